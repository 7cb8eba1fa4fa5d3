"""The residual stream of a pass on a GPU, to which a layer's output is added by the kernel that
normalises the sum: what vLLM calls a fused add and norm.

Over several GPUs the tokens of a long pass are two groups: products of one are computed while the
sums of the other are sent. Attention is computed once for all.

Axis letters: R rows, T new tokens of a row, M model dim, P pieces of a product.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxshare.cpu import Implementation
from jaxshare.models.config import ModelConfig
from jaxshare.models.linear import Turns, uses_gpu_kernels
from jaxshare.models.norm import RMSNorm
from jaxshare.pallas.device import current_device, lowers_triton
from jaxshare.sharding import Axis

_GROUP = 512
"""Tokens of a group at least: products of fewer take less time than to read the weights once more."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual:
    """The residual stream of a group of tokens, and what has still to be added to it.

    Attributes:
      x: the stream.
      pieces: the sum over P of these is added; None where nothing is.
    """

    x: Float[Array, "R T M"]
    pieces: Float[Array, "P R T M"] | None = None

    def normed(
        self, norm: RMSNorm, multiplier: float, after: tuple[Array, ...] = ()
    ) -> tuple[Float[Array, "R T M"], Float[Array, "R T M"]]:
        """The stream with all that is to be added, `multiplier` times, and its norm, once `after` is
        there where something is added."""
        if self.pieces is None:
            return self.x, norm(self.x)
        return norm.of_sum(self.x, self.pieces, multiplier, after)

    def whole(self, multiplier: float) -> Float[Array, "R T M"]:
        """The stream with all that is to be added, `multiplier` times."""
        if self.pieces is None:
            return self.x
        added = jnp.sum(self.pieces, axis=0).astype(self.x.dtype)
        return self.x + (added if multiplier == 1 else added * multiplier)


class Groups:
    """The norms of groups of tokens, each computed when it is asked for, in turns.

    Attributes:
      turns: of what is computed from them.
      totals: the streams, with all added, of those that were asked for.
    """

    def __init__(self, streams: Sequence[Residual], norm: RMSNorm, multiplier: float):
        self._streams, self._norm, self._multiplier = streams, norm, multiplier
        self.turns, self.totals = Turns(len(streams)), []

    def each(
        self, project: Callable[[Float[Array, "R _ M"]], list[Array]]
    ) -> list[Float[Array, "R T _"]]:
        """The projections of all groups, laid side by side."""
        made = []
        for group in self:
            made.append(project(self.turns.apart(group)))
            self.turns.end(*made[-1])
        return [jnp.concatenate(parts, axis=1) for parts in zip(*made, strict=True)]

    def split(self, x: Float[Array, "R T _"]) -> Iterator[Float[Array, "R _ _"]]:
        """The groups of what is computed from all of them."""
        return map(self.turns.apart, jnp.split(x, len(self._streams), axis=1))

    def __iter__(self) -> Iterator[Float[Array, "R _ M"]]:
        for each in self._streams:
            total, normed = each.normed(self._norm, self._multiplier, self.turns.last[:1])
            self.totals.append(total)
            yield normed


Stream = Float[Array, "R T M"] | tuple[Residual, ...]
"""A residual stream to which all is added, or that of each group of tokens, in order."""


def shape_of(x: Stream) -> tuple[int, int, int]:
    """R, T and M of all groups together."""
    groups = [each.x for each in x] if isinstance(x, tuple) else [x]
    rows, _, width = groups[0].shape
    return rows, sum(each.shape[1] for each in groups), width


def as_stream(
    x: Float[Array, "R T M"], config: ModelConfig, axis: Axis | None, implementation: Implementation
) -> Stream:
    """Returns the stream that layers of a pass are given, on the device that is being traced for.

    An output is added late where the kernel is served, and nothing comes between a layer's part and
    the sum. Groups are for layers whose sums over `axis` are all that is sent.
    """
    device = current_device()
    if device is None or not uses_gpu_kernels(implementation):
        return x
    if config.norm_placement != "pre" or not lowers_triton(device):
        return x
    rows, tokens, _ = x.shape
    is_plain = config.moe is None and config.mla is None
    if axis is None or not is_plain or tokens % 2 or rows * tokens < 2 * _GROUP:
        return (Residual(x),)
    return tuple(map(Residual, jnp.split(x, 2, axis=1)))
