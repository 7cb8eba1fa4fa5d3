"""The log-probabilities that are kept of sampled tokens: of the model's logits, as drawn, or both."""

from typing import Any

import numpy as np

from jaxshare.argument_checks import shown
from jaxshare.decoding.array_rows import filled

RAW, PROCESSED, BOTH = "raw", "processed", "both"
"""The kinds of log-probabilities: under the model itself, or of the chances that tokens were drawn
with, after biases, penalties, bans, processors, the temperature and truncation; or both of them."""
_MUST = "it must be True, False, 'raw', 'processed' or 'both'"


def as_logprobs(value: Any) -> str | None:
    """Returns the kind of log-probabilities that is asked for: "raw", "processed", "both" or None.

    Args:
      value: one of these, or True for "raw" and False for None.

    Raises:
      ValueError: another text.
      TypeError: something else.
    """
    if value is None or isinstance(value, bool | np.bool_):
        return RAW if value else None
    if not isinstance(value, str):
        raise TypeError(f"logprobs is {shown(value)}; {_MUST}")
    if value not in (RAW, PROCESSED, BOTH):
        raise ValueError(f"logprobs is {shown(value)}; {_MUST}")
    return value


def logprob_places(kind: str | None, shape: tuple[int, int]) -> dict[str, Any]:
    """The fields of a decode state of R rows with X places, all of which want log-probabilities.

    Args:
      kind: that `as_logprobs` has returned.
      shape: (R, X).
    """
    rows = shape[0]
    return {
        "logprobs": filled(shape if kind else (rows, 0), dtype=np.float32),
        "scored": filled(rows, kind is not None, bool),
        "processed": filled(rows, True, bool) if kind in (PROCESSED, BOTH) else None,
        "raw_logprobs": filled(shape, dtype=np.float32) if kind == BOTH else None,
    }
