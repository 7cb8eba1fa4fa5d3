"""The rows of the jitted decode loop: its state and samplers, as requests enter and leave it."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import DecodeState, FinishReason, KVCache, Layout, Sampler
from jaxshare.decoding.sampling import Samplers
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.running_request import RunningRequest


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """The results of a dispatch.

    Attributes:
      reasons: int32[R], `FinishReason` of each row.
      num_sampled: int32[R], tokens that each row has sampled so far.
      tokens: int32[R, X], these tokens.
      lengths: of the view's blocks.
      faults: of the cache; 0 for none.
      passes: forward passes of the dispatch.
    """

    reasons: np.ndarray
    num_sampled: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    faults: np.ndarray
    passes: int


class DecodeRows:
    """The decode loop's state. Its sizes only grow, so that few programs serve all requests.

    Args:
      model: as loaded.
      rows: the number of rows.
      max_pending: tokens that a row may still have to feed when it enters.
      num_top_logits: logits that are kept of each distribution; 0 for none.
    """

    def __init__(self, model: LoadedModel, *, rows: int, max_pending: int, num_top_logits: int):
        self._model, self._num_rows = model, rows
        self._max_pending, self._num_top_logits = max_pending, num_top_logits
        self._no_logits = jnp.zeros((rows, model.config.vocab_size))
        self._samplers = [Sampler()] * rows
        self._stacked: Samplers | None = None  # the same on the device
        self._left: list[int] = []  # rows that have left, but not yet the state
        self._passes = 0  # of the state when it was last fetched
        self.state: DecodeState | None = None

    def reset(self) -> None:
        """Drops the state after a failure, or to free its memory."""
        self.state, self._passes = None, 0
        self._left.clear()

    def create(self, cache: KVCache, layout: Layout, requests: Sequence[Request]) -> None:
        """Creates the state, with an empty view, for requests of this size."""
        max_new_tokens, edits = _sizes(requests)
        self.state = DecodeState.create(
            cache,
            layout,
            [],
            vocab_size=self._model.config.vocab_size,
            stops=self._model.generation.stop_tokens,
            queue=self._max_pending,
            capacity=max(1024, bucket(max_new_tokens)),
            bias_slots=max(8, bucket(edits)),
            max_width=1,
            num_top_logits=self._num_top_logits,
        )

    def grow(self, requests: Sequence[Request]) -> None:
        """Grows the state to hold what these requests may sample and their samplers' edits."""
        max_new_tokens, edits = _sizes(requests)
        state = self._without_left_rows()
        if (more := bucket(max_new_tokens) - state.tokens.shape[1]) > 0:

            def widened(array: Array) -> Array:
                return jnp.pad(array, ((0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)))

            state = dataclasses.replace(
                state,
                tokens=widened(state.tokens),
                top_logits=jax.tree.map(widened, state.top_logits),
            )
        if (slots := bucket(edits)) > state.samplers.bias_tokens.shape[1]:
            state = dataclasses.replace(state, samplers=self._stacked_samplers(slots))
        self.state = state

    def set_samplers(self, rows: Sequence[RunningRequest]) -> None:
        """Sets the samplers of rows that are about to enter."""
        for row in rows:
            if self._samplers[row.index] != row.request.sampler:
                self._samplers[row.index], self._stacked = row.request.sampler, None

    def admit(
        self, rows: Sequence[RunningRequest], cache: KVCache, blocks: list[list[int]], width: int
    ) -> None:
        """Lets rows enter.

        Args:
          rows: with at most `max_pending` unread tokens, or logits.
          cache, blocks: the view of all rows in the loop, and the blocks that each row sees.
          width: the layout's.
        """
        assert self.state is not None
        new = {row.index for row in rows}
        layout = Layout.from_blocks(
            [[] if i in new else listed for i, listed in enumerate(blocks)], width=width
        )
        state = dataclasses.replace(
            self.state,
            cache=cache,
            layout=layout,
            samplers=self._stacked_samplers(self.state.samplers.bias_tokens.shape[1]),
        )
        requests = [row.request for row in rows]
        self.state = state.admit(
            [row.index for row in rows],
            [blocks[row.index] for row in rows],
            self._entering_logits(rows),
            seeds=[request.seed for request in requests],
            max_new_tokens=[request.max_new_tokens for request in requests],
            num_sampled=[row.num_sampled for row in rows],
            pending=[row.unread.tolist() if row.logits is None else [] for row in rows],
            recorded=[request.resample is not None for request in requests],
        )
        for row in rows:
            row.logits = None

    def _entering_logits(self, rows: Sequence[RunningRequest]) -> Array:
        # Always one for each row of the loop, so that one program serves any number of rows.
        if not any(row.logits is not None for row in rows):
            return self._no_logits
        none = self._no_logits[0]
        logits = [none if row.logits is None else row.logits for row in rows]
        return jnp.stack(logits + [none] * (self._num_rows - len(rows)))

    def before_dispatch(self, cache: KVCache, layout: Layout | None) -> DecodeState:
        """The state for a dispatch.

        Args:
          cache: a view of the rows in the loop; or, for the same view as in the last dispatch, any
            cache with the current arrays.
          layout: of the view, or None for the same view.
        """
        state = self._without_left_rows()
        if layout is not None:
            return dataclasses.replace(state, cache=cache, layout=layout)
        return dataclasses.replace(
            state, cache=dataclasses.replace(state.cache, keys=cache.keys, values=cache.values)
        )

    def fetch(self) -> "Dispatched":
        """Waits for a dispatch and fetches its results."""
        state = self.state
        assert state is not None
        reasons, num_sampled, tokens, lengths, faults, total = jax.device_get(
            (
                state.reasons,
                state.num_sampled,
                state.tokens,
                state.cache.lengths,
                state.cache.faults,
                state.passes,
            )
        )
        passes, self._passes = int(total) - self._passes, int(total)
        return Dispatched(reasons, num_sampled, tokens, lengths, faults, passes)

    def remove(self, row: RunningRequest) -> None:
        """Takes a row out, and gives its request the top logits of what it sampled."""
        assert self.state is not None
        if row.request.resample and row.num_sampled > row.first_sampled:
            top = jax.device_get(
                jax.tree.map(lambda array: array[row.index], self.state.top_logits)
            )
            sampled = slice(row.first_sampled, row.num_sampled)
            row.request.top_logits.append(jax.tree.map(lambda array: array[sampled], top))
        self._left.append(row.index)
        row.decoding = False

    def resume(self, row: RunningRequest) -> None:
        """Lets a row go on that has stopped at the end of its block."""
        assert self.state is not None
        reasons = self.state.reasons.at[row.index].set(FinishReason.RUNNING.value)
        self.state = dataclasses.replace(self.state, reasons=reasons)

    def _stacked_samplers(self, slots: int) -> Samplers:
        if self._stacked is None or self._stacked.bias_tokens.shape[1] != slots:
            self._stacked = Samplers.stack(self._samplers, bias_slots=slots)
        return self._stacked

    def _without_left_rows(self) -> DecodeState:
        assert self.state is not None
        if self._left:
            self.state = self.state.retire(self._left)
            self._left.clear()
        return self.state


def _sizes(requests: Sequence[Request]) -> tuple[int, int]:
    """(the most tokens that one of them may sample, the most edits of one sampler)."""
    max_new_tokens = max(request.max_new_tokens for request in requests)
    samplers = [request.sampler for request in requests]
    return max_new_tokens, max(len(s.bias) + len(s.forbidden) for s in samplers)
