"""Patterns as deterministic automata over the bytes of UTF-8."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxshare.serving.grammars.patterns import (
    BeyondError,
    Chain,
    Characters,
    Choice,
    Pattern,
    Repeat,
)

MOST_STATES = 1024
_MOST_EDGES = 50_000
_CONTINUED = 0x80, 0xBF
_SIZES = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)
"""The last characters of one, two, three and four bytes."""


@dataclasses.dataclass(frozen=True, eq=False)
class ByteGrammar:
    """A deterministic automaton that accepts texts. S states.

    Attributes:
      transitions: int32[S, 256], the state after a byte, -1 where it is not admitted.
      accepting: bool[S].
      start: the state of an empty text.
    """

    transitions: np.ndarray
    accepting: np.ndarray
    start: int = 0

    def certain(self, state: int, longest: int = 64) -> tuple[bytes, bool]:
        """The bytes that must come after a state, and whether the text ends with them."""
        found = bytearray()
        while not self.accepting[state] and len(found) < longest:
            after = np.flatnonzero(self.transitions[state] >= 0)
            if len(after) != 1:
                break
            found.append(int(after[0]))
            state = int(self.transitions[state, after[0]])
        ends = bool(self.accepting[state]) and not (self.transitions[state] >= 0).any()
        return bytes(found), ends


def byte_grammar(pattern: Pattern) -> ByteGrammar:
    """The smallest automaton of a pattern.

    Raises:
      BeyondError: it has more than `MOST_STATES` states.
    """
    graph = _Graph()
    start, end = graph.state(), graph.state()
    graph.add(pattern, start, end)
    return _smallest(*_deterministic(graph, start, end))


class _Graph:
    """A nondeterministic automaton over bytes.

    Attributes:
      edges: for each state (first byte, last byte, state after it); free: states that are reached
        without a byte.
    """

    def __init__(self) -> None:
        self.edges: list[list[tuple[int, int, int]]] = []
        self.free: list[list[int]] = []
        self._count = 0

    def state(self) -> int:
        """A new state."""
        self._bounded()
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def add(self, pattern: Pattern, start: int, end: int) -> None:
        """Adds paths for a pattern from one state to another."""
        if isinstance(pattern, Characters):
            for first, last in pattern.ranges:
                for each in _utf8(first, last):
                    self._add_bytes(each, start, end)
        elif isinstance(pattern, Choice):
            for part in pattern.parts:
                self.add(part, start, end)
        elif isinstance(pattern, Chain):
            for part in pattern.parts:
                after = self.state()
                self.add(part, start, after)
                start = after
            self._join(start, end)
        else:
            self._add_repeat(pattern, start, end)

    def _add_repeat(self, repeat: Repeat, start: int, end: int) -> None:
        for _ in range(repeat.least):
            after = self.state()
            self.add(repeat.part, start, after)
            start = after
        if repeat.most is None:
            loop = self.state()
            self._join(start, loop)
            after = self.state()
            self.add(repeat.part, loop, after)
            self._join(after, loop)
            start = loop
        else:
            if repeat.most < repeat.least:
                raise BeyondError("it repeats something at least as often as never")
            for _ in range(repeat.most - repeat.least):
                self._join(start, end)
                after = self.state()
                self.add(repeat.part, start, after)
                start = after
        self._join(start, end)

    def _add_bytes(self, ranges: Sequence[tuple[int, int]], start: int, end: int) -> None:
        for first, last in ranges[:-1]:
            after = self.state()
            self._edge(start, first, last, after)
            start = after
        self._edge(start, *ranges[-1], end)

    def _edge(self, start: int, first: int, last: int, end: int) -> None:
        self._bounded()
        self.edges[start].append((first, last, end))

    def _join(self, start: int, end: int) -> None:
        self._bounded()
        self.free[start].append(end)

    def _bounded(self) -> None:
        self._count += 1
        if self._count > _MOST_EDGES:
            raise BeyondError("it is large")


def _utf8(first: int, last: int) -> Iterator[list[tuple[int, int]]]:
    """The UTF-8 of a range of characters, as sequences of ranges of bytes."""
    for size, most in enumerate(_SIZES, start=1):
        least = _SIZES[size - 2] + 1 if size > 1 else 0
        if first <= most and last >= least:
            low, high = max(first, least), min(last, most)
            yield from _of_bytes([*chr(low).encode()], [*chr(high).encode()])


def _of_bytes(low: list[int], high: list[int]) -> Iterator[list[tuple[int, int]]]:
    """All sequences of bytes between two of the same size, whose first bytes may differ."""
    if len(low) == 1:
        yield [(low[0], high[0])]
        return
    if low[0] == high[0]:
        for rest in _of_bytes(low[1:], high[1:]):
            yield [(low[0], low[0]), *rest]
        return
    least, most = [_CONTINUED[0]] * len(low[1:]), [_CONTINUED[1]] * len(low[1:])
    first, last = low[0], high[0]
    if low[1:] != least:
        for rest in _of_bytes(low[1:], most):
            yield [(first, first), *rest]
        first += 1
    end = []
    if high[1:] != most:
        end = [[(last, last), *rest] for rest in _of_bytes(least, high[1:])]
        last -= 1
    if first <= last:
        yield [(first, last), *[_CONTINUED] * len(least)]
    yield from end


def _deterministic(graph: _Graph, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Transitions and accepting states, the first of which is the start; -1 where there is none."""

    def closed(states: set[int]) -> frozenset[int]:
        found = [*states]
        for state in found:  # grows as new states are found
            for after in graph.free[state]:
                if after not in states:
                    states.add(after)
                    found.append(after)
        # Those without a byte tell nothing but whether the end is among them.
        return frozenset(s for s in states if graph.edges[s] or s == end)

    first = closed({start})
    numbers, found, rows = {first: 0}, [first], []
    for states in found:  # grows as new states are found
        if len(found) > 8 * MOST_STATES:
            raise BeyondError("it is large")
        edges = [edge for state in states for edge in graph.edges[state]]
        cuts = sorted({0, 256, *(e[0] for e in edges), *(e[1] + 1 for e in edges)})
        row = np.full(256, -1, np.int32)
        for low, high in itertools.pairwise(cuts):
            reached = {after for a, b, after in edges if a <= low <= b}
            if reached:
                after = closed(reached)
                if after not in numbers:
                    numbers[after] = len(found)
                    found.append(after)
                row[low:high] = numbers[after]
        rows.append(row)
    return np.stack(rows), np.asarray([end in states for states in found])


def _smallest(transitions: np.ndarray, accepting: np.ndarray) -> ByteGrammar:
    """The automaton without states that lead nowhere, and with one of each kind."""
    lives = accepting.copy()
    while True:
        leads = (transitions >= 0) & lives[transitions]
        more = lives | leads.any(axis=1)
        if (more == lives).all():
            break
        lives = more
    transitions = np.where(leads, transitions, -1)
    kinds, count = accepting.astype(np.int32), 0
    different = np.unique(transitions, axis=1)  # many bytes do the same in every state
    while True:
        after = np.where(different < 0, -1, kinds[different])
        rows = np.concatenate([kinds[:, None], after], axis=1)
        numbers: dict[bytes, int] = {}
        kinds = np.asarray([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows])
        if len(numbers) == count:
            break
        count = len(numbers)
    first = np.unique(kinds, return_index=True)[1]
    if count > MOST_STATES:
        raise BeyondError("it is large")
    merged = transitions[first]
    return ByteGrammar(
        np.where(merged < 0, -1, kinds[merged]).astype(np.int32), accepting[first], int(kinds[0])
    )
