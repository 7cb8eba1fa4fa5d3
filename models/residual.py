"""The residual stream of a pass on a GPU, to which a layer's output is added by the kernel that
normalises the sum: what vLLM calls a fused add and norm.

Axis letters: R rows, T new tokens of a row, M model dim, P pieces of a product.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxshare.cpu import Implementation
from jaxshare.models.config import ModelConfig
from jaxshare.models.linear import uses_gpu_kernels
from jaxshare.models.norm import RMSNorm
from jaxshare.pallas.device import current_device, lowers_triton


class Residual(NamedTuple):
    """The residual stream, and what has still to be added to it.

    Attributes:
      x: the stream.
      pieces: the sum over P of these is added; None where nothing is.
    """

    x: Float[Array, "R T M"]
    pieces: Float[Array, "P R T M"] | None = None

    def normed(
        self, norm: RMSNorm, multiplier: float
    ) -> tuple[Float[Array, "R T M"], Float[Array, "R T M"]]:
        """The stream with all that is to be added, `multiplier` times, and its norm."""
        if self.pieces is None:
            return self.x, norm(self.x)
        return norm.of_sum(self.x, self.pieces, multiplier)

    def whole(self, multiplier: float) -> Float[Array, "R T M"]:
        """The stream with all that is to be added, `multiplier` times."""
        if self.pieces is None:
            return self.x
        added = jnp.sum(self.pieces, axis=0).astype(self.x.dtype)
        return self.x + (added if multiplier == 1 else added * multiplier)


Stream = Float[Array, "R T M"] | Residual
"""A residual stream to which all is added, or some of it late."""


def adds_late(config: ModelConfig, implementation: Implementation) -> bool:
    """Returns whether layers of a pass are given a `Residual`, on the device that is being traced
    for: where the kernel is served, and nothing comes between a part's output and the sum."""
    device = current_device()
    if device is None or not uses_gpu_kernels(implementation):
        return False
    return config.norm_placement == "pre" and lowers_triton(device)
