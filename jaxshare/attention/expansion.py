"""Keys and values of heads, made of the latents that a cache keeps (multi-head latent attention)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


class HeadMakers(NamedTuple):
    """The matrices that make the part of each head's key that is not rotated, and its value, of a
    token's latent (DeepSeek-V2 section 2.1.1)."""

    keys: Float[Array, "H N latent"]
    values: Float[Array, "H V latent"]

    def expand(
        self, cached: Float[Array, "W size D"]
    ) -> tuple[Float[Array, "HW size DN"], Float[Array, "HW size V"]]:
        """The keys [rotated | not] and values of all heads, for W windows of what is cached, each
        token's being [rotated | latent]; head by head, and each head's windows."""
        windows, size, dim = cached.shape
        heads, _, latent = self.keys.shape
        shared, latents = cached[..., : dim - latent], cached[..., dim - latent :]
        keys, values = (_made(maker.astype(cached.dtype), latents) for maker in self)
        shared = jnp.broadcast_to(shared, (heads, *shared.shape))
        keys = jnp.concatenate([shared, keys], axis=-1)
        return keys.reshape(heads * windows, size, -1), values.reshape(heads * windows, size, -1)


def _made(maker: Array, latents: Array) -> Array:
    """[H, n, latent] by [W, size, latent] -> [H, W, size, n], accumulated in float32 and rounded to
    the dtype of what is cached; exact products for float32."""
    precision = jax.lax.Precision.HIGHEST if maker.dtype == jnp.float32 else None
    made = jnp.einsum(
        "hnl,wsl->hwsn", maker, latents, precision=precision, preferred_element_type=jnp.float32
    )
    return made.astype(latents.dtype)
