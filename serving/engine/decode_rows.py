"""The rows of the jitted decode loop: its state and samplers, as requests enter and leave it."""

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxshare import DecodeState, Sampler, decode
from jaxshare.decoding.array_rows import filled, placed, shapes_of
from jaxshare.decoding.changes import Action, Changes
from jaxshare.decoding.loop import compile_decode
from jaxshare.decoding.pieces import num_pieces
from jaxshare.decoding.processing import Processing
from jaxshare.decoding.processors import LogitsProcessor
from jaxshare.decoding.row_transfer import take_rows
from jaxshare.decoding.samplers import Samplers
from jaxshare.decoding.steps import Steps
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.serving.engine.dispatched import Dispatched, UnderWay
from jaxshare.serving.engine.loop_sizes import LoopSizes
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.row_programs import RowPrograms
from jaxshare.serving.engine.running_request import (
    WIDTH,
    RunningRequest,
    compile_stacked_logits,
    stacked_logits,
)
from jaxshare.serving.engine.session_passes import (
    PlacedSession,
    RowShape,
    SessionPasses,
    SessionRows,
)
from jaxshare.serving.grammars.compiled import compile_grammar
from jaxshare.serving.grammars.places import GrammarPlaces
from jaxshare.serving.kvcache.fan_in import FanInGroups
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.view import SessionBlocks, ViewBuilder, spans

PIECES = 16
"""Pieces of texts that a pass with several tokens of a row has room for, beside the rows that feed a
token each. On a CPU such a pass costs what its places cost: with 32, passes of fifteen sessions took
2.2 ms in place of 1.9. With more than 64 rows there is one for four of them: a pass costs what all
rows cost, and their prompts, which come many at once, are not to take more passes for that."""


class DecodeRows:
    """The decode loop's state. Its sizes only grow, so that few programs serve all requests.

    Args:
      model: as loaded.
      kv: the keys and values.
      rows: the number of rows.
      passes: the most passes of a dispatch.
      num_top_logits: logits that are kept of each distribution; 0 for none.
      groups: sizes of fan-in groups to begin with.
      sessions: whether sessions can join.

    Attributes:
      before_dispatch: called with the rows of the program that is about to run.
      view: of the last dispatch; is_warm: whether the loop was warmed up.
      row_programs: the programs that run while few rows are in use.
      under_way: the dispatches whose results are not fetched, at most two.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: KVManager,
        *,
        rows: int,
        passes: int,
        num_top_logits: int,
        groups: tuple[int, ...] = (),
        sessions: bool = False,
    ):
        self._model, self._kv, self._num_rows, self._passes = model, kv, rows, passes
        self._sizes = LoopSizes(num_top_logits=num_top_logits)
        self._views = ViewBuilder(rows, FanInGroups(rows, groups))
        self.view = self._views.build({})  # of the last dispatch
        self._samplers = [Sampler()] * rows
        self._adapters = [0] * rows  # their places
        self._stacked: tuple[Samplers, Processing | None] | None = None  # the same on the device
        self._pieces = PIECES
        # Requests that come later find few rows in use at times; those of a batch seldom do.
        self.row_programs = RowPrograms(rows, fewer=sessions)
        self.is_warm, self._running_rows = False, rows  # of the program that runs
        self.before_dispatch: Callable[[int], None] = lambda num_rows: None
        self._grammars = GrammarPlaces(model.config.vocab_size)
        self._grammar_states: dict[int, int] = {}  # of rows that enter with the next dispatch
        # Rows that leave, resume and enter with the next dispatch.
        self._left: list[int] = []
        self._resumed: list[int] = []
        self._entering: dict[int, RunningRequest] = {}
        self._total_passes = 0  # of the state when it was last fetched
        self._session_rows = SessionRows(model.config.vocab_size) if sessions else None
        self.under_way = collections.deque[UnderWay[RunningRequest, PlacedSession]]()
        self.state: DecodeState | None = None

    def use(self, model: LoadedModel) -> None:
        """Goes on with other weights of the same model."""
        self._model = model

    def reset(self) -> None:
        """Drops the state after a failure, or to free its memory."""
        self.state, self._total_passes = None, 0
        self._grammars = GrammarPlaces(self._model.config.vocab_size)
        for each in (self._left, self._resumed, self._entering, self.under_way):
            each.clear()

    def _created(self) -> DecodeState:
        """A state with nothing in it."""
        shape, steps = RowShape.of(self._passes), None
        if self._session_rows:
            steps = Steps.none(
                self._num_rows,
                self._session_rows.automata,
                capacity=shape.outputs,
                openings=shape.openings,
                longest=shape.opening_tokens,
            )
        self.view = self._views.build({})
        return DecodeState.create(
            self.view.over(self._kv.pool.cache),
            self._model.adapted(self.view.layout),
            [],
            vocab_size=self._model.config.vocab_size,
            stops=self._model.generation.stop_tokens,
            queue=shape.pending,
            capacity=shape.outputs,
            places=self._sizes.samplers,
            max_width=WIDTH,
            logprobs=True,
            num_top_logits=self._sizes.num_top_logits,
            steps=steps,
        )

    def admit(self, rows: Sequence[RunningRequest]) -> None:
        """Lets rows enter with the next dispatch.

        Args:
          rows: with at most `MAX_PENDING` unread tokens, or logits.
        """
        self._grow(self._sizes.grown([row.request for row in rows], self._model))
        for row in rows:
            row.decoding = True
            if self._samplers[row.index] != row.request.sampler:
                self._samplers[row.index], self._stacked = row.request.sampler, None
            self._entering[row.index] = row
            self._adapters[row.index] = row.request.adapter_place
            grammar = compile_grammar(self._model, row.request.sampler)
            state = self._grammars.enter(row.index, grammar, row.request.output)
            self._grammar_states[row.index] = state

    def dispatch(
        self,
        rows: Sequence[RunningRequest],
        *,
        passes: int,
        stop_on_finish: bool,
        max_idle: int = 0,
        sessions: Sequence[tuple[SessionPasses, np.ndarray, SessionBlocks]] = (),
    ) -> None:
        """Dispatches passes that sample for these rows, after those that are under way.

        Where some are, no rows enter or resume, and there are no sessions.

        Args:
          rows: all that are in the loop.
          passes, stop_on_finish, max_idle: see `jaxshare.decode`.
          sessions: those that take part, the rows that they take, and their blocks.
        """
        self.state = self.state or self._created()
        changes = self._changes(rows, [blocks for _, _, blocks in sessions])
        state = self._state_with_inputs()
        placed = [
            PlacedSession(session, taken, block)
            for (session, taken, _), block in zip(sessions, self.view.first, strict=True)
        ]
        if placed:
            assert self._session_rows
            state = self._session_rows.put(state.changed(changes), placed)
            largest = max(each.request.num_rows for each in placed)
            self._pieces = max(self._pieces, bucket(num_pieces(largest, WIDTH)))
            view, queue = self.view, state.pending.shape[1]
            changes = Changes.none(queue, view.listed, view.table, keeps_view=True)
        taken = [row.index for row in rows] + [int(each.rows[-1]) for each in placed]
        num_rows = self.row_programs.choose(self._shapes, max(taken, default=0) + 1)
        self._running_rows = num_rows
        self.before_dispatch(num_rows)
        for each in self.under_way:
            each.keep_results()
        self._kv.speeds.dispatching()
        self.state = decode(
            self._model.module,
            self._model.variables,
            state,
            passes=passes,
            width=WIDTH,
            pieces=self._pieces_of(num_rows),
            rows=num_rows,
            stop_on_finish=stop_on_finish,
            max_idle=max_idle,
            unless_finished=stop_on_finish and bool(self.under_way),
            changes=changes,
        )
        self._kv.speeds.dispatched()
        # The next view has no blocks of these sessions.
        changed = bool(placed) or (self._kv.view_changed and bool(self.under_way))
        self._kv.pool.cache, self._kv.view_changed = self.state.cache, changed
        self.under_way.append(UnderWay(rows, passes, self.state, placed))

    def _changes(
        self, rows: Sequence[RunningRequest], sessions: Sequence[SessionBlocks]
    ) -> Changes:
        """The changes since the last dispatch: the blocks, and rows that enter, leave or resume."""
        assert self.state is not None
        follows = bool(self.under_way)  # the host does not know all lengths
        changed = bool(sessions or self._entering) or self._kv.view_changed
        if follows:
            grown = {row.block: row.extent.capacity - row.capacity for row in rows}
            if changed := any(grown.values()):
                self.view = self.view.widened(grown)
        elif changed:
            seen = {row.index: spans(row.node.path()) for row in rows}
            self.view = self._views.build(seen, sessions)
            for row in rows:
                row.block, row.length = self.view.own[row.index]
        for row in rows:
            row.capacity = row.extent.capacity
        changes = Changes.none(
            self.state.pending.shape[1],
            self.view.listed,
            self.view.table,
            keeps_view=not changed,
            keeps_lengths=follows,
            takes_outputs=True,
        )
        # In this order: a row that resumes may leave after all, and another one take its place.
        changes.act(self._resumed, Action.RESUME)
        changes.act(self._left, Action.RETIRE)
        for index, row in self._entering.items():
            changes.admit(index, row.start(self._grammar_states.pop(index)))
        self._left.clear()
        self._resumed.clear()
        return changes

    def _state_with_inputs(self) -> DecodeState:
        """The state with the samplers of all rows, and the logits of those that enter with some."""
        assert self.state is not None
        sizes, arena, view = self._sizes, self._kv.pool.cache, self.view
        if self._stacked is None:
            stops = self._model.generation.stop_tokens
            self._stacked = (
                Samplers.stack(self._samplers, places=sizes.samplers, stops=stops),
                Processing.stack(self._samplers, places=sizes.processors),
            )
        samplers, processing = self._stacked
        processing = processing and self._with_states(processing)
        processed = self.state.processed
        if sizes.processed and processed is None:
            processed = filled(self._num_rows, False, bool)
        raw = self.state.raw_logprobs
        if sizes.both and (raw is None or raw.shape != self.state.tokens.shape):
            raw = filled(self.state.tokens.shape, dtype=np.float32)  # what it had is taken
        history = self.state.history.grown(sizes.vocab, sizes.texts)
        for row in self._entering.values():
            if row.request.sampler.looks_back:
                tokens = row.request.tokens.tolist()
                history = history.with_text(row.index, tokens, len(row.request.prompt))
        top_logits = self.state.top_logits
        if top_logits.tokens.shape[-1] < sizes.num_top_logits:  # what it had is taken
            shape, vocab = self.state.tokens.shape, self._model.config.vocab_size
            top_logits = TopLogits.empty(shape, sizes.num_top_logits, vocab)
        cache, layout = self.state.cache, dataclasses.replace(self.state.layout, groups=view.groups)
        # Of other sizes than before all blocks come with the changes: without these a program would
        # be compiled that leads from one size to the other, beside that of the new one.
        if cache.num_blocks != view.table.shape[1]:
            cache = view.over(cache)
        if layout.blocks.shape != view.listed.shape:
            layout = dataclasses.replace(layout, blocks=placed(view.listed))
        state = dataclasses.replace(
            self.state,
            cache=dataclasses.replace(
                cache, keys=arena.keys, values=arena.values, faults=arena.faults
            ),
            samplers=samplers,
            history=history,
            top_logits=top_logits,
            processing=processing,
            processed=processed,
            raw_logprobs=raw,
            grammars=self._grammars.put(self.state.grammars),
            layout=self._model.adapted(layout, self._adapters),
        )
        rows = [row for row in self._entering.values() if row.logits is not None]
        if rows:
            logits = stacked_logits(rows, self._num_rows)
            state = state.with_logits([row.index for row in rows], logits)
        for row in rows:
            row.logits = None
        self._entering.clear()
        return state

    def _with_states(self, processing: Processing) -> Processing:
        """Logits processors with the states of all rows, those of preempted requests included."""
        assert self.state is not None
        processing = processing.with_states_of(self.state.processing)
        for index, row in self._entering.items():
            if states := row.request.processor_states:
                processing = processing.with_row_states(index, states)
                row.request.processor_states = None
        return processing

    def processor_states(self, row: RunningRequest) -> dict[LogitsProcessor, Any] | None:
        """The states of a row's logits processors, to go on with in another row; None without."""
        if row.index in self._entering or not row.decoding or not row.request.sampler.processors:
            return row.request.processor_states
        assert self.state is not None and self.state.processing is not None
        return self.state.processing.row_states(row.index)

    def fetch(self) -> tuple[Dispatched, Sequence[RunningRequest]]:
        """Waits for the first dispatch under way; returns its results, and the rows in it."""
        first = self.under_way[0]
        found = first.fetch()
        self.under_way.popleft()
        total, phases = found["passes"], found.pop("phases")
        found["passes"], self._total_passes = total - self._total_passes, total
        self._kv.speeds.fetched(found["passes"])
        if found.pop("faults"):
            first.state.cache.check()
        if first.sessions:
            assert self._session_rows
            self._session_rows.take(first.state, first.sessions, found["lengths"], phases)
            self._left += [row for each in first.sessions for row in each.rows.tolist()]
        return Dispatched(**found), first.rows

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compiles the loop, and what lets rows enter, for requests with such samplers.

        From then on a program of few rows runs while few are in use.
        """
        self._grow(self._sizes.grown(requests, self._model))
        compile_stacked_logits(self._num_rows, self._model.config.vocab_size)
        logits = jnp.zeros((self._num_rows, self._model.config.vocab_size))
        self.state = (self.state or self._created()).with_logits([], logits)
        self.dispatch([], passes=0, stop_on_finish=False)
        self.fetch()
        self.row_programs.warm_up()
        self.dispatch([], passes=0, stop_on_finish=False)
        self.fetch()
        self.is_warm = True
        self._views.keep_groups()

    @property
    def sizes(self) -> LoopSizes:
        """The sizes that there is room for."""
        return dataclasses.replace(self._sizes, grammars=self._grammars.sizes)

    def sizes_for(self, requests: Sequence[Request]) -> LoopSizes:
        """The sizes with room for these requests, too."""
        found = [compile_grammar(self._model, each.sampler) for each in requests]
        grammars = self._grammars.sizes_for(grammar for grammar in found if grammar)
        return dataclasses.replace(self._sizes.grown(requests, self._model), grammars=grammars)

    def grow(self, sizes: LoopSizes) -> None:
        """Makes room of these sizes, beside what there is."""
        self._grow(self._sizes.joined(sizes))
        self._grammars.grow(sizes.grammars)

    def _grow(self, sizes: LoopSizes) -> None:
        has = self._sizes
        if (sizes.samplers, sizes.processors) != (has.samplers, has.processors):
            self._stacked = None
        self._sizes = sizes

    @property
    def _shapes(self) -> Hashable:
        """The shapes of the program that runs, but for its rows."""
        return self.sizes, self.view.width, self.view.groups, self._pieces

    def programs(
        self, sizes: LoopSizes, width: int, rows: int | None = None
    ) -> dict[int, Callable[[], None]]:
        """Calls that compile the loop of these sizes, in any thread, while this one goes on; by the
        rows of each program, of which the first is in place of the one that runs now. With `rows`
        the one of so many."""
        other = copy.copy(self)
        other.view = view = dataclasses.replace(self.view, width=width)
        other._entering, other._grammars = {}, copy.copy(self._grammars)
        other.grow(sizes)
        state = other._state_with_inputs()
        changes = Changes.none(state.pending.shape[1], view.listed, view.table)
        arrays, shapes = shapes_of((self._model.variables, state, changes)), other._shapes

        def compile_for(num_rows: int) -> None:
            how = {"width": WIDTH, "pieces": self._pieces_of(num_rows), "rows": num_rows}
            compile_decode(self._model.module, *arrays[:2], changes=arrays[2], **how)
            self.row_programs.add(shapes, num_rows)

        in_use = [rows] if rows else [self._running_rows, *self.row_programs.there(self._shapes)]
        return {each: functools.partial(compile_for, each) for each in dict.fromkeys(in_use)}

    def _pieces_of(self, num_rows: int) -> int:
        return min(max(self._pieces, bucket(num_rows) // 4), num_pieces(num_rows, WIDTH))

    @property
    def can_follow(self) -> bool:
        """True if a dispatch can be made before the results of the one under way are read."""
        sessions = any(each.sessions for each in self.under_way)
        return not (sessions or self._entering or self._resumed or self._grammars.is_serving)

    def grammar_error(self, index: int) -> str:
        """Why the grammar of a row can be read on no more; an empty text where it can."""
        return self._grammars.error(index)

    def remove(self, row: RunningRequest) -> None:
        """Takes a row out with the next dispatch."""
        row.decoding = False
        self._grammars.leave(row.index)
        if self._entering.pop(row.index, None) is None:
            self._left.append(row.index)

    def resume(self, row: RunningRequest) -> None:
        """Lets a row go on that has stopped at the end of its block."""
        self._resumed.append(row.index)

    def narrow(self, rows: Sequence[int]) -> None:
        """Goes on with these rows alone, in this order; the others have left."""
        assert self.state is not None and not self._entering
        self._views = ViewBuilder(len(rows), FanInGroups(len(rows)))
        place = {row: i for i, row in enumerate(rows)}
        self.state = take_rows(self.state, np.asarray(rows))
        self._left = [place[row] for row in self._left if row in place]
        self._resumed = [place[row] for row in self._resumed if row in place]
        self._samplers = [self._samplers[row] for row in rows]
        self._adapters = [self._adapters[row] for row in rows]
        self._grammars.move(rows)
        self._stacked, self._num_rows = None, len(rows)
        self.row_programs = RowPrograms(len(rows), fewer=False)
