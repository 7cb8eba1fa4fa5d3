"""Replays as they would have been, known from the tokens of outputs alone.

Two outputs for one prompt share the distributions of the tokens that both begin with, and that of
the token at which they part. So the tokens say how many distributions a Logits Cache would have
spared, whether it kept them or not; and tokens cost next to nothing to keep.
"""

import collections
import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

_MAX_OUTPUTS = 8
"""Outputs of a state that are remembered, the first ones."""
_MAX_TOKENS = 2**18
"""Tokens of all remembered outputs; one that has none counts as one."""


@dataclasses.dataclass(eq=False)
class Watched:
    """A request whose output is compared with those of its state.

    Attributes:
      kind: the requests that it is counted with.
      state: the digest of its prompt.
      num_known: outputs of its state that were remembered when it began.
      any_kept: whether the distributions of one of them were kept.
      found: tokens that a lookup gave it; None where there was none.
      follows: whether it may wait for what another request of its state computes.
    """

    kind: Hashable
    state: bytes
    num_known: int
    any_kept: bool
    found: int | None = None
    follows: bool = False

    @property
    def way(self) -> str:
        """How it samples again: "stepwise" or "hotspot"."""
        return way_of(self.kind)


def way_of(kind: Hashable) -> str:
    """The way to sample again, the last part of a kind."""
    return kind[-1] if isinstance(kind, tuple) else "stepwise"


class Evidence:
    """The tokens of recent outputs, by state."""

    def __init__(self) -> None:
        self._outputs: collections.OrderedDict[bytes, list[np.ndarray]] = collections.OrderedDict()
        self._kept: dict[bytes, bool] = {}
        self._num_tokens = 0

    def watch(self, kind: Hashable, state: bytes) -> Watched:
        """Returns a request that begins now."""
        known = len(self._outputs.get(state, ()))
        return Watched(kind, state, known, self._kept.get(state, False))

    def add(self, watched: Watched, tokens: Sequence[int], is_kept: bool) -> tuple[int, int]:
        """Adds the output of a request, the stop token that ended it included.

        Args:
          watched: the request.
          tokens: of the output.
          is_kept: whether its distributions were kept.

        Returns:
          The tokens that a replay of the outputs known at its beginning gives, and those that it
            could have taken beside them from outputs that were sampled at the same time.
        """
        own, outputs = np.asarray(tokens, np.int32), self._outputs.pop(watched.state, [])
        replayed = [_num_replayed(own, other) for other in outputs]
        found = max(replayed[: watched.num_known], default=0)
        followed = max(replayed, default=0) - found
        self._outputs[watched.state] = outputs
        if len(outputs) < _MAX_OUTPUTS:
            outputs.append(own)
            self._num_tokens += max(1, len(own))
        self._kept[watched.state] = is_kept or self._kept.get(watched.state, False)
        while self._num_tokens > _MAX_TOKENS:
            state, forgotten = self._outputs.popitem(last=False)
            self._num_tokens -= sum(max(1, len(each)) for each in forgotten)
            del self._kept[state]
        return found, followed


def _num_replayed(own: np.ndarray, other: np.ndarray) -> int:
    """Tokens of an output whose distributions another one has, too."""
    common = min(len(own), len(other))
    differs = np.flatnonzero(own[:common] != other[:common])
    return int(differs[0]) + 1 if len(differs) else common
