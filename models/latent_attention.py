"""Multi-head latent attention (DeepSeek-V2, section 2.1): attention over latents.

A token's keys and values of all heads are products of one latent vector. In place of making them,
each head's query is multiplied by the matrix that makes its keys, and what it attends to, a mixture
of latents, by the one that makes its values (section 2.1.2): absorbed. So the cache is that of one
kv head, whose key is [rotated | latent] and whose value is the latent, for blocks as for any other
model. In passes of many new tokens a row it may take less to make the keys and values, of each tile
of latents as it is read (`MLA.expands_from`): expanded. The cache is the same.
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxshare.attention.expansion import HeadMakers
from jaxshare.cpu import Implementation
from jaxshare.models.config import ModelConfig
from jaxshare.models.expert_parallel import TokenShare
from jaxshare.models.linear import Linear, Weight, dequantised, is_doubled, linears
from jaxshare.models.norm import RMSNorm
from jaxshare.models.residual import Groups
from jaxshare.sharding import Axis

_NORM_EPS = 1e-6
"""Of the norms of latents, whatever that of the other norms is."""


@dataclasses.dataclass(frozen=True)
class ExpandingAttend:
    """The `attend` of a pass in which `LatentAttention` has keys and values made of the latents.

    Attributes:
      attend: as for any other pass.
      makers_too: takes queries [rotated | not], not absorbed, new keys, and what makes keys and
        values of heads.
    """

    attend: Callable[..., Array]
    makers_too: Callable[[Array, Array, HeadMakers], Array]

    def __call__(self, *new: Array | None) -> Array:
        """Attends to latents."""
        return self.attend(*new)


class LatentAttention(nn.Module):
    """The projections around `attend`, which owns positions, masks and the cache, as in
    `jaxshare.models.decoder_layer.Attention`.

    Attributes:
      config: of the model, or of one device's part of it; it has an `MLA`.
      axis: the mesh axis over which heads are split; each device makes the latents of all tokens.
      implementation: of products.
      share: the tokens whose output this device keeps, [S, M]; None for all.
    """

    config: ModelConfig
    axis: Axis | None = None
    implementation: Implementation = "xla"
    share: TokenShare | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "R T M"] | Groups, attend: Callable[..., Array]
    ) -> Float[Array, "..."] | tuple[Array]:
        given, c, m = x, self.config, self.config.mla
        (x,) = given if isinstance(given, Groups) else (given,)
        assert m is not None
        linear = functools.partial(Linear, implementation=self.implementation)
        norm = functools.partial(RMSNorm, _NORM_EPS, self.implementation)
        queries = c.num_heads * m.query_dim
        first = (
            linear(m.q_lora_rank, m.bias, name="q_a")
            if m.q_lora_rank
            else linear(queries, name="q")
        )
        q, kv = linears(x, [first, linear(m.cached_dim, m.bias, name="kv_a")])
        if m.q_lora_rank:
            q = linear(queries, name="q_b")(norm(name="q_a_norm")(q))
        own, rotated = jnp.split(q.reshape(*x.shape[:-1], -1, m.query_dim), [m.nope_dim], axis=-1)
        latent, shared = jnp.split(kv, [m.kv_lora_rank], axis=-1)
        latent = norm(name="kv_a_norm")(latent)
        key_maker, _ = linear(c.num_heads * m.nope_dim, name="k_b").parameters(m.kv_lora_rank)
        value_maker, _ = linear(c.num_heads * m.value_dim, name="v_b").parameters(m.kv_lora_rank)
        k = jnp.concatenate([shared, latent], axis=-1)[..., None, :]
        if isinstance(attend, ExpandingAttend):
            makers = (
                dequantised(maker, x.dtype).reshape(c.num_heads, -1, m.kv_lora_rank)
                for maker in (key_maker, value_maker)
            )
            queries = jnp.concatenate([rotated, own], axis=-1)
            out = attend.makers_too(queries, k, HeadMakers(*makers))
        else:
            absorbed = _by_head(own, key_maker, 1)
            out = attend(jnp.concatenate([rotated, absorbed], axis=-1), k, k[..., :0], None)
            out = _by_head(out, value_maker, 2)
        last = linear(c.hidden_size, c.out_bias, axis=self.axis, share=self.share, name="o")
        out = out.reshape(*x.shape[:-1], -1)
        return (last.in_pieces(out, None, given.turns),) if isinstance(given, Groups) else last(out)


def _by_head(x: Array, kernel: Weight, contract: int) -> Array:
    """The product of each head's x [R, T, H, _] with its rows of the kernel [H, _, latent],
    contracting the kernel's axis `contract`; accumulated in float32 and rounded to x's dtype."""
    rows, tokens, heads, _ = x.shape
    by_head = jnp.moveaxis(x, 2, 0).reshape(heads, rows * tokens, -1)
    single = is_doubled(rows * tokens, x.dtype)
    y = jax.lax.dot_general(
        jnp.concatenate([by_head, by_head], axis=1) if single else by_head,
        dequantised(kernel, x.dtype).reshape(heads, -1, kernel.shape[-1]),
        (((2,), (contract,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
    y = y[:, : rows * tokens].reshape(heads, rows, tokens, -1)
    return jnp.moveaxis(y, 0, 2).astype(x.dtype)
