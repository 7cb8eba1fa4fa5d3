"""The rows of the jitted decode loop: its state and samplers, as requests enter and leave it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import DecodeState, FinishReason, KVCache, Sampler, decode
from jaxshare.decoding.row_transfer import take_rows
from jaxshare.decoding.sampling import Samplers
from jaxshare.decoding.steps import Steps
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.running_request import WIDTH, RunningRequest
from jaxshare.serving.engine.session_passes import (
    MIN_BIAS_SLOTS,
    PlacedSession,
    RowShape,
    SessionRows,
)
from jaxshare.serving.kvcache.view import View

WIDE_ROWS = 16
"""Rows that a pass with several tokens of a row has room for, beside the others, which feed a token each."""


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """The results of a dispatch, for R rows with room for X tokens.

    Attributes:
      reasons: int32[R], `FinishReason` of each row.
      num_held: int32[R], tokens that each row has sampled in the dispatch.
      tokens: int32[R, X], these tokens; logprobs: float32[R, X], or [R, 0] if no row wants them.
      top_logits: [R, X], or None if no row wants them.
      lengths: of the view's blocks.
      faults: of the cache; 0 for none.
      passes: passes of the dispatch.
    """

    reasons: np.ndarray
    num_held: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    top_logits: TopLogits | None
    lengths: np.ndarray
    faults: np.ndarray
    passes: int


class DecodeRows:
    """The decode loop's state. Its sizes only grow, so that few programs serve all requests.

    Args:
      model: as loaded.
      rows: the number of rows.
      passes: the most passes of a dispatch.
      num_top_logits: logits that are kept of each distribution; 0 for none.
      sessions: whether sessions can join.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        rows: int,
        passes: int,
        num_top_logits: int,
        sessions: bool = False,
    ):
        self._model, self._num_rows, self._passes = model, rows, passes
        self._num_top_logits = num_top_logits
        self._samplers = [Sampler()] * rows
        self._stacked: Samplers | None = None  # the same on the device
        self._wide_rows = WIDE_ROWS
        self._left: list[int] = []  # rows that have left, but not yet the state
        self._total_passes = 0  # of the state when it was last fetched
        self._wanted = False, False  # log-probabilities and top logits by any row
        self._session_rows = SessionRows(model.config.vocab_size) if sessions else None
        self._sessions: Sequence[PlacedSession] = ()  # in the dispatch under way
        self.state: DecodeState | None = None

    def reset(self) -> None:
        """Drops the state after a failure, or to free its memory."""
        self.state, self._total_passes = None, 0
        self._left.clear()

    def create(self, view: View, requests: Sequence[Request]) -> None:
        """Creates the state, with an empty view, for requests with such samplers."""
        shape, steps = RowShape.of(self._passes), None
        if self._session_rows:
            steps = Steps.none(
                self._num_rows,
                self._session_rows.automata,
                capacity=shape.outputs,
                openings=shape.openings,
                longest=shape.opening_tokens,
            )
        self.state = DecodeState.create(
            view.cache,
            view.layout,
            [],
            vocab_size=self._model.config.vocab_size,
            stops=self._model.generation.stop_tokens,
            queue=shape.pending,
            capacity=shape.outputs,
            bias_slots=max(MIN_BIAS_SLOTS, bucket(_max_edits(requests))),
            max_width=WIDTH,
            logprobs=True,
            num_top_logits=self._num_top_logits,
            steps=steps,
        )

    def grow(self, requests: Sequence[Request]) -> None:
        """Grows the state to hold the edits of these requests' samplers."""
        state = self._without_left_rows()
        if (slots := bucket(_max_edits(requests))) > state.samplers.bias_tokens.shape[1]:
            state = dataclasses.replace(state, samplers=self._stacked_samplers(slots))
        self.state = state

    def set_samplers(self, rows: Sequence[RunningRequest]) -> None:
        """Sets the samplers of rows that are about to enter."""
        for row in rows:
            if self._samplers[row.index] != row.request.sampler:
                self._samplers[row.index], self._stacked = row.request.sampler, None

    def admit(self, rows: Sequence[RunningRequest], view: View) -> None:
        """Lets rows enter.

        Args:
          rows: with at most `MAX_PENDING` unread tokens, or logits.
          view: of all rows in the loop.
        """
        assert self.state is not None
        state = dataclasses.replace(
            self.state,
            cache=view.cache,
            layout=view.layout_without([row.index for row in rows]),
            samplers=self._stacked_samplers(self.state.samplers.bias_tokens.shape[1]),
        )
        requests = [row.request for row in rows]
        self.state = state.admit(
            [row.index for row in rows],
            [view.blocks[row.index] for row in rows],
            self._entering_logits(rows),
            seeds=[request.seed for request in requests],
            max_new_tokens=[request.max_new_tokens for request in requests],
            num_sampled=[len(request.output) for request in requests],
            pending=[row.unread.tolist() if row.logits is None else [] for row in rows],
            recorded=[request.resample is not None for request in requests],
            scored=[request.scored for request in requests],
        )
        for row in rows:
            row.logits = None

    def _entering_logits(self, rows: Sequence[RunningRequest]) -> Array:
        # For each row of the loop, and out of a rounded number, so that few programs serve all.
        none = jnp.zeros(self._model.config.vocab_size)
        different = {id(row.logits): row.logits for row in rows if row.logits is not None}
        if not different:
            return jnp.broadcast_to(none, (self._num_rows, len(none)))
        place = {key: i for i, key in enumerate(different)}
        index = [place.get(id(row.logits), 0) for row in rows]
        index += [0] * (self._num_rows - len(rows))
        stacked = [*different.values()]
        stacked += [none] * (bucket(len(stacked)) - len(stacked))
        return jnp.stack(stacked)[np.asarray(index)]

    def dispatch(
        self,
        rows: Sequence[RunningRequest],
        cache: KVCache,
        view: View | None,
        *,
        passes: int,
        stop_on_finish: bool,
        sessions: Sequence[PlacedSession] = (),
    ) -> KVCache:
        """Dispatches passes that sample for these rows; returns the cache.

        Args:
          rows: all that are in the loop.
          sessions: those that take part; the view must be of them, too.
          cache: with the current arrays.
          view: of the rows, or None for the same one as in the last dispatch.
          passes, stop_on_finish: see `jaxshare.decode`.
        """
        state = self._without_left_rows().without_outputs()
        if view is not None:
            state = dataclasses.replace(state, cache=view.cache, layout=view.layout)
        else:
            own = dataclasses.replace(state.cache, keys=cache.keys, values=cache.values)
            state = dataclasses.replace(state, cache=own)
        self._wanted = (
            any(row.request.scored for row in rows),
            any(row.request.resample for row in rows),
        )
        self._sessions = sessions
        if sessions:
            assert self._session_rows
            state = self._session_rows.put(state, sessions)
            largest = max(each.request.num_rows for each in sessions)
            self._wide_rows = max(self._wide_rows, bucket(largest))
        self.state = decode(
            self._model.module,
            self._model.params,
            state,
            passes=passes,
            width=WIDTH,
            wide_rows=min(self._wide_rows, self._num_rows),
            stop_on_finish=stop_on_finish,
        )
        return self.state.cache

    def fetch(self) -> Dispatched:
        """Waits for a dispatch and fetches its results."""
        state = self.state
        assert state is not None
        scored, recorded = self._wanted
        found = jax.device_get(
            {
                "reasons": state.reasons,
                "num_sampled": state.num_sampled,
                "num_taken": state.num_taken,
                "tokens": state.tokens,
                "logprobs": state.logprobs if scored else np.zeros((self._num_rows, 0)),
                "top_logits": state.top_logits if recorded else None,
                "lengths": state.cache.lengths,
                "faults": state.cache.faults,
                "passes": state.passes,
                "phases": state.cache.phases if self._sessions else np.zeros(0),
            }
        )
        held = found.pop("num_sampled") - found.pop("num_taken")
        total, phases = int(found.pop("passes")), found.pop("phases")
        passes, self._total_passes = total - self._total_passes, total
        if found["faults"]:
            state.cache.check()
        for each in self._sessions:
            assert self._session_rows
            self._session_rows.take(state, each, found["lengths"], phases)
            self._left += each.rows.tolist()
        self._sessions = ()
        return Dispatched(**found, num_held=held, passes=passes)

    def warm_up(self, view: View) -> KVCache:
        """Compiles the loop, and what lets rows enter and leave; returns the cache."""
        self.admit([], view)
        assert self.state is not None
        self.state = self.state.retire([])
        cache = self.dispatch([], view.cache, None, passes=0, stop_on_finish=False)
        self.fetch()
        return cache

    def remove(self, row: RunningRequest) -> None:
        """Takes a row out."""
        self._left.append(row.index)
        row.decoding = False

    def resume(self, row: RunningRequest) -> None:
        """Lets a row go on that has stopped at the end of its block."""
        assert self.state is not None
        self.state = self.state.end(row.index, FinishReason.RUNNING)

    def narrow(self, rows: Sequence[int]) -> None:
        """Goes on with these rows alone, in this order; the others have left."""
        state = self._without_left_rows()
        self.state = take_rows(state, np.asarray(rows))
        self._samplers = [self._samplers[row] for row in rows]
        self._stacked, self._num_rows = None, len(rows)

    def _stacked_samplers(self, slots: int) -> Samplers:
        if self._stacked is None or self._stacked.bias_tokens.shape[1] != slots:
            self._stacked = Samplers.stack(self._samplers, bias_slots=slots)
        return self._stacked

    def _without_left_rows(self) -> DecodeState:
        state: Any = self.state
        if self._left:
            self.state = state = state.retire(self._left)
            self._left.clear()
        return state


def _max_edits(requests: Sequence[Request]) -> int:
    """The most edits of one sampler."""
    samplers = [request.sampler for request in requests]
    return max((len(s.bias) + len(s.forbidden) for s in samplers), default=0)
