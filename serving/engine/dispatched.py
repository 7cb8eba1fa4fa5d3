"""The results of a dispatch of the decode loop, on the host."""

import dataclasses

import numpy as np

from jaxshare.decoding.top_logits import TopLogits


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
