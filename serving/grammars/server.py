"""The host's part of grammars that are no tables: it reads along, and computes the next masks.

A GPU is at work on the next pass meanwhile. Where the host itself is the device, it computes them
between two passes: threads beside those of a pass would hold these up for longer than that takes.
"""

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxshare.decoding.grammar_rows import register_server
from jaxshare.decoding.grammar_tables import MOST_FORCED
from jaxshare.pallas.device import current_device
from jaxshare.serving.grammars.compiled import CompiledGrammar
from jaxshare.serving.grammars.vocabulary import GrammarVocabulary

_ALL = 0xFFFFFFFF


@dataclasses.dataclass(eq=False)
class _ServedRow:
    """A row that is read along with.

    Attributes:
      vocabulary: of the model.
      matcher: has read the forced tokens, too.
      forced: tokens that must come, and were not fed yet.
    """

    vocabulary: GrammarVocabulary
    matcher: Any
    forced: collections.deque[int]

    def read(self, token: int) -> None:
        """Reads a sampled token, and finds those that it forces."""
        if self.forced:
            self.forced.popleft()
        elif token not in self.vocabulary.stops:
            self.matcher.consume_token(token)
            self.find_forced()

    def find_forced(self) -> None:
        """Reads the tokens that must come next."""
        tokens = self.matcher.compute_ff_tokens()
        if tokens and self.matcher.consume_tokens(tokens):
            self.forced += tokens


class MatcherServer:
    """The rows of one decode state whose grammars the host reads along with; a `MaskServer`.

    Args:
      vocab_size: V of the model.

    Attributes:
      number: by which the decode state names it.
    """

    def __init__(self, vocab_size: int):
        self._words, self._ahead = -(-vocab_size // 32), current_device() is not None
        self._rows: dict[int, _ServedRow] = {}
        self._masks, self._address = np.zeros((0, self._words), np.uint32), 0
        self._under_way: concurrent.futures.Future | None = None
        self.number = register_server(self)

    @property
    def is_serving(self) -> bool:
        """True if it serves any rows."""
        return bool(self._rows)

    def enter(self, index: int, grammar: CompiledGrammar, output: Sequence[int]) -> None:
        """Serves a row from now on, whose output so far is given."""
        row = _ServedRow(grammar.vocabulary, grammar.matcher(), collections.deque())
        row.find_forced()
        for token in output:  # one by one, so that the same tokens are forced as at first
            row.read(token)
        self._wait()
        self._rows[index] = row
        self._grow(index + 1)
        self._masks[index] = 0  # and so remain the places that the tokenizer does not use
        self._compute([index])

    def leave(self, index: int) -> None:
        """Serves a row no more."""
        self._wait()
        if self._rows.pop(index, None):
            self._masks[index] = _ALL

    def move(self, rows: Sequence[int]) -> None:
        """Goes on with these rows, in this order."""
        self._wait()
        masks, self._masks = self._masks, self._masks[:0]
        kept = {i: row for i, row in enumerate(rows) if row in self._rows}
        self._grow(len(rows))
        self._masks[[*kept]] = masks[[*kept.values()]]
        self._rows = {i: self._rows[row] for i, row in kept.items()}

    def error(self, index: int) -> str:
        """Why a row's matcher gave up; an empty text if it did not."""
        self._wait()
        return self._rows[index].matcher.get_error() if index in self._rows else ""

    def advance(
        self, tokens: np.ndarray, sampled: np.ndarray, room: np.ndarray, least: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `MaskServer.advance`."""
        self._wait()
        forced = np.zeros((len(tokens), MOST_FORCED), np.int32)
        count = np.zeros(len(tokens), np.int32)
        read = np.flatnonzero(sampled).tolist()
        for index in read:
            row = self._rows[index]
            row.read(int(tokens[index]))
            count[index] = min(len(row.forced), room[index])
        if count.sum() < least:
            count[:] = 0
        for index in read:
            for place in range(count[index]):
                forced[index, place] = self._rows[index].forced.popleft()
        self._compute(read)
        return forced, count

    def masks(self, rows: int) -> np.ndarray:
        """See `MaskServer.masks`."""
        self._wait()
        self._grow(rows)
        return self._masks[:rows]

    def _compute(self, indices: Sequence[int]) -> None:
        """Computes the masks of some rows."""
        unforced = []
        for index in indices:
            row = self._rows[index]
            if row.forced:
                self._masks[index] = 0
                word, bit = divmod(row.forced[0], 32)
                self._masks[index, word] = 1 << bit
            else:
                unforced.append(index)
        if self._ahead and unforced:
            self._under_way = _thread().submit(self._fill, unforced)
        else:
            self._fill(unforced)

    def _fill(self, indices: Sequence[int]) -> None:
        for index in indices:
            row = self._rows[index]
            size = 4 * row.vocabulary.num_words
            row.matcher.unsafe_compute_mask_ptr(self._address + 4 * index * self._words, size)
            if row.matcher.is_error():
                self._masks[index] = 0

    def _grow(self, rows: int) -> None:
        if rows > len(self._masks):
            more = np.full((rows - len(self._masks), self._words), _ALL, np.uint32)
            self._masks = np.concatenate([self._masks, more])
            self._address = self._masks.ctypes.data

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()


@functools.cache
def _thread() -> concurrent.futures.Executor:
    """One thread for all servers."""
    return concurrent.futures.ThreadPoolExecutor(1, "jaxshare grammars")
