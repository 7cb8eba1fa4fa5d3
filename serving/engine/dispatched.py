"""Dispatches of the decode loop: those under way, and the results of one on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare import DecodeState
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.serving.engine.request import Request


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """The results of a dispatch, for R rows with room for X tokens.

    Attributes:
      reasons: int32[R], `FinishReason` of each row.
      num_held: int32[R], tokens that each row has sampled in the dispatch.
      tokens: int32[R, X], these tokens; logprobs: float32[R, X], or [R, 0] if no row wants them.
      raw_logprobs: the same under the model itself, of rows that want both kinds.
      top_logits: [R, X], or None if no row wants them.
      lengths: of the view's blocks.
      passes: passes of the dispatch.
    """

    reasons: np.ndarray
    num_held: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    top_logits: TopLogits | None
    lengths: np.ndarray
    passes: int


class _SampledRow(Protocol):
    """A row of a dispatch."""

    request: Request


@dataclasses.dataclass
class UnderWay[Row: _SampledRow, Session]:
    """A dispatch whose results the host has not read.

    Attributes:
      rows: that take part.
      passes: that it has, at most.
      state: after it, of which results are read; another dispatch may take its arenas and logits.
      sessions: that take part.
    """

    rows: Sequence[Row]
    passes: int
    state: DecodeState
    sessions: Sequence[Session]

    @property
    def _recorded(self) -> bool:
        """True if the top logits of any row are wanted."""
        return any(row.request.recorded for row in self.rows)

    def keep_results(self) -> None:
        """Keeps what the next dispatch would take, which is about to be made."""
        if self._recorded:
            kept = jax.tree.map(jnp.copy, self.state.top_logits)
            self.state = dataclasses.replace(self.state, top_logits=kept)

    def fetch(self) -> dict[str, Any]:
        """Waits for the results, by the names that `Dispatched` has for them, and "phases" and
        "faults" of the cache."""
        state, none = self.state, np.zeros((self.state.layout.num_rows, 0))
        scored = any(row.request.scored for row in self.rows)
        found = jax.device_get(
            {
                "reasons": state.reasons,
                "num_sampled": state.num_sampled,
                "num_taken": state.num_taken,
                "tokens": state.tokens,
                "logprobs": state.logprobs if scored else none,
                "raw_logprobs": none if state.raw_logprobs is None else state.raw_logprobs,
                "top_logits": state.top_logits if self._recorded else None,
                "lengths": state.cache.lengths,
                "faults": state.cache.faults,
                "passes": state.passes,
                "phases": state.cache.phases if self.sessions else np.zeros(0),
            }
        )
        found["num_held"] = found.pop("num_sampled") - found.pop("num_taken")
        found["passes"] = int(found["passes"])
        return found
