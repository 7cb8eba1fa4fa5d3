"""The layers of which a decoder is made, as Flax linen modules.

Axis letters: R rows, T new tokens of a row, H query heads, K kv heads, D head dim, M model dim, F
MLP dim.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxshare.cpu import Implementation
from jaxshare.models.adapters.low_rank import adapter_of
from jaxshare.models.config import LayerForm, ModelConfig
from jaxshare.models.expert_parallel import TokenShare
from jaxshare.models.experts import MixtureOfExperts
from jaxshare.models.latent_attention import LatentAttention
from jaxshare.models.linear import Linear, projections
from jaxshare.models.norm import RMSNorm
from jaxshare.models.packed import GATE_UP, QKV, part_sizes
from jaxshare.models.residual import Groups, Residual, Stream, shape_of
from jaxshare.sharding import Axis

Sinks = Float[Array, " H"] | None
"""For each head a score beside those of all keys, in models that have them."""

AttendInLayer = Callable[
    [Float[Array, "R T H D"], Float[Array, "R T K D"], Float[Array, "R T K D"], Sinks],
    Float[Array, "R T H D"],
]
"""(q, k, v, sinks) -> attention output; q and k are not rotated yet."""

Tokens = Float[Array, "R T M"] | Groups
"""What a part of a layer computes: all tokens of a pass, or groups of them."""

Output = Float[Array, "..."] | tuple[Float[Array, "P R _ M"], ...]
"""What it returns, of each group in pieces."""


class Attention(nn.Module):
    """The projections around `attend`, which owns positions, masks and the cache.

    Attributes:
      config: of the model, or of one device's part of it.
      axis: the mesh axis over which heads are split.
      implementation: of products.
      share: the tokens whose output this device keeps, [S, M]; None for all.
    """

    config: ModelConfig
    axis: Axis | None = None
    implementation: Implementation = "xla"
    share: TokenShare | None = None

    @nn.compact
    def __call__(self, x: Tokens, attend: AttendInLayer) -> Output:
        """Returns [R, T, M], or [S, M]; of groups of tokens pieces to be summed
        (`Linear.in_pieces`)."""
        c = self.config
        how = {"bias": c.qkv_bias, "implementation": self.implementation}
        project = projections(self, QKV, part_sizes(c)[QKV], **how)
        found = x.each(project) if isinstance(x, Groups) else project(x)
        norm = functools.partial(RMSNorm, c.norm_eps, self.implementation, c.norm_adds_one)
        if c.qk_norm_whole:
            # Where devices repeat kv heads, each counts as often as the others.
            whole = functools.partial(norm, axis=self.axis)
            found[:2] = whole(name="q_norm")(found[0]), whole(name="k_norm")(found[1])
        if c.qkv_clip:
            found = [jnp.clip(y, -c.qkv_clip, c.qkv_clip) for y in found]
        q, k, v = (y.reshape(*y.shape[:-1], -1, c.head_dim) for y in found)
        if c.qk_norm:
            q, k = norm(name="q_norm")(q), norm(name="k_norm")(k)
        sinks = None
        if c.attention_sinks:
            sinks = self.param("sinks", nn.initializers.normal(), (c.num_heads,))
        out = attend(q, k, v, sinks)
        out = out.reshape(*out.shape[:-2], c.num_heads * c.head_dim)
        how = {"axis": self.axis, "share": self.share, "implementation": self.implementation}
        last, adapter = Linear(c.hidden_size, c.out_bias, **how, name="o"), adapter_of(self, "o")
        if not isinstance(x, Groups):
            return last(out, adapter)
        return tuple(last.in_pieces(each, adapter, x.turns) for each in x.split(out))


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)).

    Attributes:
      config: of the model, or of one device's part of it.
      axis: the mesh axis over which the MLP is split.
      implementation: of products.
    """

    config: ModelConfig
    axis: Axis | None = None
    implementation: Implementation = "xla"

    @nn.compact
    def __call__(self, x: Tokens) -> Output:
        """Returns [R, T, M]; of groups of tokens pieces to be summed (`Linear.in_pieces`)."""
        c = self.config
        how = {"bias": c.mlp_bias, "implementation": self.implementation}
        project = projections(self, GATE_UP, part_sizes(c)[GATE_UP], **how)
        last = Linear(c.hidden_size, axis=self.axis, name="down", **how)
        adapter = adapter_of(self, "down")

        def hidden(x: Array) -> Array:
            gate, up = project(x)
            gate = nn.silu(gate) if c.activation == "silu" else nn.gelu(gate, approximate=True)
            return gate * up

        if not isinstance(x, Groups):
            return last(hidden(x), adapter)
        return tuple(last.in_pieces(hidden(each), adapter, x.turns) for each in x)


class Layer(nn.Module):
    """One decoder layer: attention and an MLP or experts, each added to its input, with norms
    before, after or both.

    Attributes:
      config: of the model, or of one device's part of it.
      axis: the mesh axis over which heads and MLP are split; both end with a sum over it.
      implementation: of products.
      form: of this layer.
    """

    config: ModelConfig
    axis: Axis | None = None
    implementation: Implementation = "xla"
    form: LayerForm | None = None

    @nn.compact
    def __call__(
        self,
        given: Stream,
        attend: AttendInLayer,
        real: Bool[Array, "R T"] | None = None,
    ) -> Stream:
        """Computes a layer; experts compute the tokens that are `real` alone, by default all. What it
        returns is of the form of what it is given."""
        c, how = self.config, (self.config, self.axis, self.implementation)
        is_sparse = c.moe is not None and self.form is not None and self.form.is_sparse
        shape = shape_of(given)
        share = TokenShare.of(c.moe, shape[0] * shape[1]) if is_sparse else None
        norm = functools.partial(RMSNorm, c.norm_eps, self.implementation, c.norm_adds_one)
        late, times = isinstance(given, tuple) and share is None, c.residual_multiplier

        def added(
            x: Stream,
            name: str,
            part: Callable[[Any], Any],
            kept: Callable[[Array], Array] = lambda x: x,
        ) -> Stream:
            if isinstance(x, tuple):
                groups = Groups(x, norm(name=f"{name}_norm"), times)
                found = part(groups)
                return tuple(map(Residual, groups.totals, found))
            inner = x if c.norm_placement == "post" else norm(name=f"{name}_norm")(x)
            out = part(inner)
            out = out if c.norm_placement == "pre" else norm(name=f"{name}_post_norm")(out)
            return kept(x) + (out if times == 1 else out * times)

        attention = (LatentAttention if c.mla else Attention)(*how, share, name="attention")
        own = share.own if share else lambda x: x
        x = given[0].whole(times) if isinstance(given, tuple) and not late else given
        x = added(x, "attention", lambda x: attention(x, attend), own)
        if c.moe is None or not is_sparse:
            return added(x, "mlp", MLP(*how, name="mlp"))
        experts = MixtureOfExperts(c.moe, *how[1:], share, late, name="moe")
        kept = None if real is None else own(real)
        x = added(
            x, "mlp", lambda x: [experts(each, kept) for each in x] if late else experts(x, kept)
        )
        if share is None or isinstance(x, tuple):
            return x
        x = share.whole(x, shape)
        return (Residual(x),) if isinstance(given, tuple) else x
