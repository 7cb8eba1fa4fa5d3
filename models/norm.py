"""RMSNorm, as a Flax linen module."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxshare import cpu
from jaxshare.cpu import Implementation
from jaxshare.pallas.device import current_device
from jaxshare.sharding import Axis


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis.

    Computed in float32 and rounded before the scale, as the checkpoints expect.

    Attributes:
      eps: is added to the mean of squares.
      implementation: "cpu", or None on a CPU, for one kernel.
      adds_one: multiply by 1 + scale, and round after it (Gemma).
      axis: the mesh axis over which x is split in equal parts.
    """

    eps: float
    implementation: Implementation = "xla"
    adds_one: bool = False
    axis: Axis | None = None

    @nn.compact
    def scale(self, width: int) -> Float[Array, " M"]:
        """The factors of so many entries."""
        init = nn.initializers.zeros if self.adds_one else nn.initializers.ones
        return self.param("scale", init, (width,))

    def __call__(self, x: Float[Array, "... M"]) -> Float[Array, "... M"]:
        scale = self.scale(x.shape[-1])
        plain = not self.adds_one and self.axis is None
        found = cpu.rms_norm(x, scale, self.eps, self.implementation) if plain else None
        if found is not None:
            return found
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        square = square if self.axis is None else jax.lax.pmean(square, self.axis)
        wide = wide * jax.lax.rsqrt(square + self.eps)
        if self.adds_one:
            return (wide * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
        return scale.astype(x.dtype) * wide.astype(x.dtype)

    def of_sum(
        self,
        x: Float[Array, "... M"],
        pieces: Float[Array, "P ... M"],
        multiplier: float,
        after: tuple[Array, ...] = (),
    ) -> tuple[Float[Array, "... M"], Float[Array, "... M"]]:
        """Returns x plus `multiplier` times the sum of pieces, and the norm of that, on a GPU that
        JAX lowers Triton's kernels for; computed once `after` is there."""
        from jaxshare.pallas.residual_triton import add_and_normalise

        device, width = current_device(), x.shape[-1]
        assert device is not None and self.axis is None
        total, normed = add_and_normalise(
            x.reshape(-1, width),
            pieces.reshape(pieces.shape[0], -1, width),
            self.scale(width),
            self.eps,
            device,
            multiplier=multiplier,
            adds_one=self.adds_one,
            after=after,
        )
        return total.reshape(x.shape), normed.reshape(x.shape)
