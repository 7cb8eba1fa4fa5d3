"""The host's part of grammars that are no tables: it reads along, and computes the next masks while
the device is at work on the next pass."""

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

from jaxshare.decoding.grammar_rows import register_server
from jaxshare.decoding.grammar_tables import MOST_FORCED
from jaxshare.serving.grammars.compiled import CompiledGrammar

_ALL = 0xFFFFFFFF


@dataclasses.dataclass(eq=False)
class _ServedRow:
    """A row that is read along with.

    Attributes:
      matcher: has read the forced tokens, too.
      stops: tokens that end the text.
      forced: tokens that must come, and were not fed yet.
    """

    matcher: Any
    stops: tuple[int, ...]
    forced: collections.deque[int]

    def read(self, token: int) -> None:
        """Reads a sampled token, and finds those that it forces."""
        if self.forced:
            self.forced.popleft()
        elif token not in self.stops:
            self.matcher.consume_token(token)
            self.find_forced()

    def find_forced(self) -> None:
        """Reads the tokens that must come next."""
        if self.matcher.is_stopped():
            return
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
        self._words = -(-vocab_size // 32)
        self._rows: dict[int, _ServedRow] = {}
        self._masks = np.zeros((0, self._words), np.int32)
        self._executor = llguidance.LLExecutor()
        self._under_way: concurrent.futures.Future | None = None
        self.number = register_server(self)

    def enter(self, index: int, grammar: CompiledGrammar, output: Sequence[int]) -> None:
        """Serves a row from now on, whose output so far is given."""
        row = _ServedRow(grammar.matcher(), grammar.vocabulary.stops, collections.deque())
        row.find_forced()
        for token in output:  # one by one, so that the same tokens are forced as at first
            row.read(token)
        self._wait()
        self._rows[index] = row
        self._compute([index])

    def leave(self, index: int) -> None:
        """Serves a row no more."""
        self._wait()
        self._rows.pop(index, None)

    def move(self, rows: Sequence[int]) -> None:
        """Goes on with these rows, in this order."""
        self._wait()
        self._rows = {i: self._rows[row] for i, row in enumerate(rows) if row in self._rows}
        self._compute([*self._rows])

    def error(self, index: int) -> str:
        """Why a row's matcher gave up; an empty text if it did not."""
        self._wait()
        return self._rows[index].matcher.get_error() if index in self._rows else ""

    def advance(
        self, tokens: np.ndarray, sampled: np.ndarray, room: np.ndarray
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
            for place in range(count[index]):
                forced[index, place] = row.forced.popleft()
        self._compute(read)
        return forced, count

    def masks(self, rows: int) -> np.ndarray:
        """See `MaskServer.masks`."""
        self._wait()
        words = np.full((rows, self._words), _ALL, np.uint32)
        served = [index for index in self._rows if index < rows]
        words[served] = self._masks[served].view(np.uint32)
        return words

    def _compute(self, indices: Sequence[int]) -> None:
        """Computes the masks of some rows in the background."""
        self._grow(max(indices, default=-1) + 1)
        matchers = []
        for index in indices:
            row = self._rows[index]
            if row.forced:
                self._masks[index] = 0
                word, bit = divmod(row.forced[0], 32)
                self._masks.view(np.uint32)[index, word] = 1 << bit
            else:
                matchers.append((row.matcher, index))
        if matchers:
            self._under_way = _thread().submit(self._fill, matchers)

    def _fill(self, matchers: Sequence[tuple[Any, int]]) -> None:
        llguidance.numpy.fill_next_token_bitmask_par(self._executor, [*matchers], self._masks)
        for matcher, index in matchers:
            if matcher.is_error():
                self._masks[index] = 0

    def _grow(self, rows: int) -> None:
        if rows > len(self._masks):
            self._masks = np.pad(self._masks, ((0, rows - len(self._masks)), (0, 0)))

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()


@functools.cache
def _thread() -> concurrent.futures.Executor:
    """One thread for all servers; llguidance has its own for the rows of a call."""
    return concurrent.futures.ThreadPoolExecutor(1, "jaxshare grammars")
