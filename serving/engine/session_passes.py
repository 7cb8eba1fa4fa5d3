"""Requests of sessions for passes of their rows, one dispatch each.

Between dispatches rows can be paused and blocks moved. For a dispatch the rows join those of the
requests, and leave again with all that they carry.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from jaxshare import DecodeState
from jaxshare.argument_checks import INT32_MAX
from jaxshare.decoding.array_rows import with_fields
from jaxshare.decoding.automaton import TokenAutomata, TokenAutomaton
from jaxshare.decoding.row_transfer import (
    PlacedRows,
    goes_on_from_logits,
    on_host,
    put_rows,
    take_rows,
)
from jaxshare.decoding.samplers import SamplerPlaces
from jaxshare.layout import bucket
from jaxshare.serving.engine.session_feed import FedText, SessionFeed, SessionRequest
from jaxshare.serving.errors import ClosedError
from jaxshare.serving.kvcache.view import SessionBlocks

MAX_PENDING = 128
"""Tokens that a row may have pending, at least."""
MIN_PLACES = SamplerPlaces(edits=8)
"""Places for the settings of a row's sampler, at least."""
_OUTPUTS, _OPENINGS, _OPENING_TOKENS = 64, 128, 32
"""Sampled tokens, openings of steps and tokens of one that a row has places for, at least."""
_MAX_PAIRS, _MAX_ENTRIES = 4, 2**14
"""Pairs of automata that the state has places for, and entries of their tables, at first."""

Automata = tuple[TokenAutomaton, TokenAutomaton]


@dataclasses.dataclass(frozen=True)
class RowShape:
    """The places that a row of a decode state has. Rows of one shape can join each other's states.

    Attributes:
      outputs: X, sampled tokens.
      pending: P, tokens to feed.
      openings, opening_tokens: N and E, of steps.
    """

    outputs: int
    pending: int
    openings: int
    opening_tokens: int

    @classmethod
    def of(cls, passes: int, *, pending: int = 0, opening_tokens: int = 0) -> "RowShape":
        """The shape for dispatches of so many passes.

        Args:
          passes: of a dispatch.
          pending: the most tokens that a row ever has pending.
          opening_tokens: the most tokens of an opening.
        """
        return cls(
            max(_OUTPUTS, bucket(passes + 1)),
            max(MAX_PENDING, bucket(pending)),
            max(_OPENINGS, 2 * passes),
            max(_OPENING_TOKENS, bucket(opening_tokens)),
        )


@dataclasses.dataclass(eq=False, kw_only=True)
class SessionPasses(SessionRequest):
    """Passes of a session's rows, in one dispatch.

    Attributes:
      state: its rows; after the dispatch as they are then. Its arenas are not used.
      automata: with which its rows find the ends of steps and of answers.
      listed: for each row the blocks that it sees.
      passes: the most to run.
      halts: whether the session runs no further pass once a row has finished.
      is_first: whether the session has had no passes yet.
      version: of the weights that it ran with.
    """

    state: DecodeState
    automata: Automata
    listed: Sequence[Sequence[int]]
    passes: int
    halts: bool
    is_first: bool = False
    version: int = 0

    @property
    def num_rows(self) -> int:
        """The rows that it takes."""
        return self.state.layout.num_rows

    @property
    def text(self) -> str:
        return (
            f"{self.passes} passes{' to a halt' * self.halts} of rows {[*map(list, self.listed)]}"
        )


@dataclasses.dataclass(frozen=True)
class PlacedSession:
    """A session's rows in the decode loop.

    Attributes:
      request: the passes that it asks for.
      rows: int[r], ascending.
      block: the number of its first block in the view.
    """

    request: SessionPasses
    rows: np.ndarray
    block: int


class WaitingSessions:
    """The sessions that wait for a dispatch, or for texts to be fed, in the order in which they came.

    Attributes:
      feeds: texts that are not all fed yet.
      running: those that have been in a dispatch, whose texts are fed, or that were refused, since
        the host last cleared it.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[SessionPasses] = collections.deque()
        self._go_first = False  # as one has waited for rows
        self.feeds: list[SessionFeed] = []
        self.running: list[SessionRequest] = []

    def __len__(self) -> int:
        """The requests for passes and for texts that wait."""
        return len(self._waiting) + len(self.feeds)

    @property
    def has_passes(self) -> bool:
        """Returns whether any wait for passes."""
        return bool(self._waiting)

    def add(self, sessions: Iterable[SessionRequest]) -> None:
        """Lets sessions wait."""
        for each in sessions:
            if isinstance(each, SessionFeed):
                self.feeds.append(each)
            else:
                assert isinstance(each, SessionPasses)
                self._waiting.append(each)

    def clear(self) -> list[SessionRequest]:
        """Removes all, those that run included; returns them."""
        found = [*self._waiting, *self.feeds, *self.running]
        for each in (self._waiting, self.feeds, self.running):
            each.clear()
        return found

    def texts(self) -> list[FedText]:
        """The texts that are still to be fed."""
        found: list[FedText] = []
        for feed in self.feeds:
            try:
                found += feed.left()
            except ClosedError as error:
                feed.error = error
        self.end_feeds()
        return found

    def end_feeds(self, given_up: Collection[int] = ()) -> None:
        """Ends requests whose texts are all fed, that have failed, or that were given up.

        Args:
          given_up: numbers of their leases.
        """
        over = [f for f in self.feeds if f.is_over or f.error or f.owner.number in given_up]
        self.feeds = [feed for feed in self.feeds if feed not in over]
        self.running += over

    @property
    def kept_rows(self) -> int:
        """The rows that requests must leave to the first one, which could not run without."""
        return self._waiting[0].num_rows if self._waiting and self._go_first else 0

    def place(
        self, free: Sequence[int], version: int
    ) -> list[tuple[SessionPasses, np.ndarray, SessionBlocks]]:
        """The sessions that take part in the next dispatch, their rows, and their blocks.

        Args:
          free: rows that they may take.
          version: of the weights.
        """
        placed: list[tuple[SessionPasses, np.ndarray, SessionBlocks]] = []
        while self._waiting and self._waiting[0].num_rows <= len(free):
            session = self._waiting.popleft()
            session.version = version
            self.running.append(session)
            try:
                blocks = SessionBlocks(session.blocks(), session.listed)
            except ClosedError as error:
                session.error = error
                continue
            placed.append((session, np.asarray(free[: session.num_rows]), blocks))
            free = free[session.num_rows :]
        self._go_first = bool(self._waiting) and not placed
        return placed


def outputs_of(state: DecodeState) -> dict[str, Any]:
    """The arrays of a state that tell what a dispatch has sampled, for each row.

    They are the session's passes so far ("clock"), the tokens that it holds with their marks and
    passes, how many were sampled and taken, the step being written, and why rows have finished.
    """
    return {
        "clock": state.clock,
        "num_sampled": state.num_sampled,
        "num_taken": state.num_taken,
        "reasons": state.reasons,
        "number": state.steps.number,
        "tokens": state.tokens,
        "marks": state.steps.marks,
        "sampled_at": state.steps.sampled_at,
    }


class SessionRows:
    """Puts sessions into the decode loop's state, and takes them out.

    Args:
      vocab_size: of the model.
    """

    def __init__(self, vocab_size: int):
        self._vocab_size, self._pairs = vocab_size, list[Automata]()
        self.automata = self._joined()

    def put(self, state: DecodeState, sessions: Sequence[PlacedSession]) -> DecodeState:
        """The state with these sessions; it must have no outputs."""
        state = self._with_automata(state, [each.request.automata for each in sessions])
        parts = []
        for each in sessions:
            request = each.request
            request.state = on_host(request.state)
            part = request.state.without_outputs()
            part = with_fields(
                part,
                last_pass=part.clock + np.int32(request.passes),
                halts=np.full(request.num_rows, request.halts),
            )
            brings = bool(goes_on_from_logits(part).any()) or part.history.is_kept
            first = self._first(request.automata)
            parts.append(PlacedRows(part, each.rows, each.block, first, brings))
        return put_rows(state, parts)

    def take(
        self,
        state: DecodeState,
        sessions: Sequence[PlacedSession],
        lengths: np.ndarray,
        phases: np.ndarray,
    ) -> None:
        """Gives sessions their rows back, with what they have sampled.

        Args:
          state: after the dispatch.
          sessions: all that took part.
          lengths, phases: of the blocks of the view.
        """
        whole = on_host(state)  # fetched once for all
        for each in sessions:
            self._take(whole, each, lengths, phases)

    def _take(
        self, state: DecodeState, each: PlacedSession, lengths: np.ndarray, phases: np.ndarray
    ) -> None:
        request, old = each.request, each.request.state
        first = self._first(request.automata)
        taken = take_rows(state, each.rows, block=each.block, automaton=first, before=old)
        blocks = slice(each.block, each.block + old.cache.num_blocks)
        own = {"lengths": lengths[blocks].copy(), "phases": phases[blocks].copy()}
        request.state = with_fields(
            taken,
            cache=with_fields(old.cache, **own),
            layout=old.layout,
            samplers=old.samplers,  # beside rows with more places, these would have as many
            grammars=old.grammars,  # and they have none
            steps=with_fields(taken.steps, automata=old.steps.automata),
            processing=old.processing
            and taken.processing
            and taken.processing.only(old.processing.places),
            passes=old.passes,
            last_pass=np.full(request.num_rows, INT32_MAX, np.int32),
            halts=np.zeros(request.num_rows, bool),
        )

    def _first(self, automata: Automata) -> int:
        """The number of automata before a pair."""
        return 2 * self._find(automata)

    def _find(self, automata: Automata) -> int:
        pairs = enumerate(self._pairs)
        return next(
            (i for i, pair in pairs if all(a is b for a, b in zip(pair, automata, strict=True))), -1
        )

    def _with_automata(self, state: DecodeState, needed: Sequence[Automata]) -> DecodeState:
        new = [pair for pair in needed if self._find(pair) < 0]
        if not new:
            return state
        if len(self._pairs) + len(new) > _MAX_PAIRS:
            self._pairs = []
            new = list(needed)
        for pair in new:
            if self._find(pair) < 0:
                self._pairs.append(pair)
        self.automata = self._joined()
        steps = dataclasses.replace(state.steps, automata=self.automata)
        return dataclasses.replace(state, steps=steps)

    def _joined(self) -> TokenAutomata:
        return TokenAutomata.of(
            [automaton for pair in self._pairs for automaton in pair],
            vocab_size=self._vocab_size,
            max_automata=2 * max(_MAX_PAIRS, bucket(len(self._pairs))),
            max_entries=bucket(max(_MAX_ENTRIES, _entries(self._pairs))),
        )


def _entries(pairs: Sequence[Automata]) -> int:
    return 1 + sum(automaton.transitions.size for pair in pairs for automaton in pair)
