"""The grammars of the rows of a decode loop: where their tables are, or who reads along."""

import copy
import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxshare.decoding.grammar_rows import SERVED, GrammarRows
from jaxshare.decoding.grammar_tables import MOST_FORCED, GrammarTables
from jaxshare.layout import bucket
from jaxshare.serving.grammars.compiled import CompiledGrammar
from jaxshare.serving.grammars.server import MatcherServer

_MOST_BYTES = 64 * 2**20
"""Of the tables of one decode loop; grammars beyond that are read along with on the host."""
_LEAST = 64, 4, 1024
"""States, grammars and transitions that there is room for at first."""


@dataclasses.dataclass(frozen=True)
class GrammarSizes:
    """The sizes of the grammars of a decode loop; others are another program.

    Attributes:
      states, grammars, transitions: that there is room for in tables.
      served: whether the host reads along with grammars that are no tables.
    """

    states: int = 0
    grammars: int = 0
    transitions: int = 0
    served: bool = False

    @property
    def tables(self) -> tuple[int, int, int]:
        """The sizes of the tables."""
        return self.states, self.grammars, self.transitions

    def joined(self, other: "GrammarSizes") -> "GrammarSizes":
        """Returns sizes for both."""
        states, grammars, transitions = map(max, self.tables, other.tables)
        return GrammarSizes(states, grammars, transitions, self.served or other.served)


@dataclasses.dataclass
class _Placed:
    """A grammar whose table is on the device.

    Attributes:
      grammar: as compiled.
      number: its classes' place; state, transition: where its states and transitions begin.
      rows: that use it.
    """

    grammar: CompiledGrammar
    number: int
    state: int
    transition: int
    rows: set[int]


class GrammarPlaces:
    """Gives the rows of a decode loop their grammars. Its sizes only grow, so that few programs
    serve all; tables that no row uses make room for others.

    Args:
      vocab_size: V of the model.
    """

    def __init__(self, vocab_size: int):
        self._vocab = vocab_size
        self._server: MatcherServer | None = None
        self._placed: dict[CompiledGrammar, _Placed] = {}
        self._of_row: dict[int, _Placed] = {}
        self._sizes = 0, 0, 0
        self._changed = self._entered = False

    @property
    def sizes(self) -> GrammarSizes:
        """The sizes that there is room for."""
        states, grammars, transitions = self._sizes
        return GrammarSizes(states, grammars, transitions, self._server is not None)

    def sizes_for(self, grammars: Iterable[CompiledGrammar]) -> GrammarSizes:
        """The sizes that these need beside those that rows have."""
        trial = copy.copy(self)
        trial._placed = {
            grammar: dataclasses.replace(placed, rows={-1, *placed.rows})
            for grammar, placed in self._placed.items()
            if placed.rows
        }
        served = self._server is not None
        for grammar in grammars:
            placed = trial._place(grammar)
            served |= placed is None
            if placed:
                placed.rows.add(-1)
        return dataclasses.replace(trial.sizes, served=served)

    def grow(self, sizes: GrammarSizes) -> None:
        """Makes room of these sizes, beside what there is."""
        sizes = self.sizes.joined(sizes)
        if sizes.tables != self._sizes:
            self._sizes, self._changed = sizes.tables, True
        if sizes.served and self._server is None:
            self._server, self._entered = MatcherServer(self._vocab), True

    def enter(self, row: int, grammar: CompiledGrammar | None, output: Sequence[int]) -> int:
        """Gives a row a grammar; returns the row's state in `GrammarRows`.

        Args:
          row: its number.
          grammar: None for none.
          output: of the row so far.
        """
        self.leave(row)
        if grammar is None:
            return -1
        placed = self._place(grammar)
        if placed is not None:
            assert grammar.table is not None
            placed.rows.add(row)
            self._of_row[row] = placed
            return placed.state + grammar.table.read(output)
        if self._server is None:
            self._server = MatcherServer(self._vocab)
        self._server.enter(row, grammar, output)
        self._entered = True
        return SERVED

    def leave(self, row: int) -> None:
        """Takes a row's grammar away."""
        if placed := self._of_row.pop(row, None):
            placed.rows.discard(row)
        if self._server:
            self._server.leave(row)

    @property
    def is_serving(self) -> bool:
        """True if the host reads along with the grammar of any row."""
        return self._server is not None and self._server.is_serving

    def error(self, row: int) -> str:
        """Why the host can read a row's grammar on no more; an empty text where it can."""
        return self._server.error(row) if self._server else ""

    def move(self, rows: Sequence[int]) -> None:
        """Goes on with these rows, in this order."""
        of_row = {i: self._of_row[row] for i, row in enumerate(rows) if row in self._of_row}
        self._of_row = of_row
        for placed in self._placed.values():
            placed.rows = {i for i, other in of_row.items() if other is placed}
        if self._server:
            self._server.move(rows)

    def put(self, grammars: GrammarRows) -> GrammarRows:
        """The grammars of a decode state with the tables and the server that its rows need."""
        if self._entered:  # the device has the masks of the others already
            assert self._server
            grammars, self._entered = grammars.with_server(self._server.number), False
        if not self._changed:
            return grammars
        self._changed = False
        return dataclasses.replace(grammars, tables=self._tables())

    def _place(self, grammar: CompiledGrammar) -> _Placed | None:
        """Where the table of a grammar is; None if it has none or there is no room."""
        table = grammar.table
        if table is None or grammar in self._placed:
            return self._placed.get(grammar)
        sizes = table.num_states, 1, table.transitions.size
        if self._bytes(tuple(map(max, self._sizes, sizes))) > _MOST_BYTES:
            return None
        while (at := self._free(sizes)) is None:
            unused = next((g for g, placed in self._placed.items() if not placed.rows), None)
            if unused is None:
                return None
            del self._placed[unused]
        self._placed[grammar] = placed = _Placed(grammar, at[1], at[0], at[2], set())
        needed = [start + size for start, size in zip(at, sizes, strict=True)]
        self._sizes = tuple(
            max(has, bucket(n), least)
            for has, n, least in zip(self._sizes, needed, _LEAST, strict=True)
        )
        self._changed = True
        return placed

    def _free(self, sizes: Sequence[int]) -> list[int] | None:
        """Where a table of these sizes fits; None if that takes too many bytes."""
        at = []
        for axis, size in enumerate(sizes):
            taken = sorted(self._extent(placed)[axis] for placed in self._placed.values())
            start = 0
            for first, count in taken:
                if first - start >= size:
                    break
                start = first + count
            at.append(start)
        grown = [bucket(start + size) for start, size in zip(at, sizes, strict=True)]
        return at if self._bytes([*map(max, self._sizes, grown)]) <= _MOST_BYTES else None

    @staticmethod
    def _extent(placed: _Placed) -> tuple[tuple[int, int], ...]:
        table = placed.grammar.table
        assert table is not None
        return (
            (placed.state, table.num_states),
            (placed.number, 1),
            (placed.transition, table.transitions.size),
        )

    def _bytes(self, sizes: Sequence[int]) -> int:
        states, grammars, transitions = sizes
        words = -(-self._vocab // 32)
        return 4 * (states * (words + 2 * MOST_FORCED + 3) + grammars * self._vocab + transitions)

    def _tables(self) -> GrammarTables:
        made = jax.tree.map(np.array, GrammarTables.empty(self._vocab, *self._sizes))
        for placed in self._placed.values():
            table = placed.grammar.table
            assert table is not None
            states = slice(placed.state, placed.state + table.num_states)
            places = slice(placed.transition, placed.transition + table.transitions.size)
            forced, after, count = table.forced(placed.grammar.vocabulary.stops)
            made.masks[states] = table.masks()
            made.classes[placed.number] = table.classes
            made.grammar[states] = placed.number
            starts = np.arange(table.num_states) * table.transitions.shape[1]
            made.first[states] = placed.transition + starts
            whole = table.transitions
            made.transitions[places] = np.where(whole < 0, -1, whole + placed.state).reshape(-1)
            made.forced[states], made.num_forced[states] = forced, count
            made.after[states] = after + placed.state
        return jax.device_put(made)
