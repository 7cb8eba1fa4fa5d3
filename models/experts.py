"""The MLP of a layer with a mixture of experts.

Each token passes through the experts that its router chooses, however many others choose the same:
there is no capacity, and what a token gets does not depend on what else is routed. Of the experts on
other devices see `jaxshare.models.expert_parallel`.

Axis letters: R rows, T new tokens of a row, N = R T tokens, M model dim, E experts, K chosen experts
of a token, F MLP units of an expert.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32

from jaxshare.cpu import Implementation
from jaxshare.models.expert_parallel import TokenShare
from jaxshare.models.linear import Linear, Weight, keep_inputs, projections, weight
from jaxshare.models.moe import MoE, route
from jaxshare.models.packed import GATE_UP
from jaxshare.models.ragged import expert_products, ragged_product, sorted_products
from jaxshare.sharding import EXPERT, Axis, axis_without, psum


class MixtureOfExperts(nn.Module):
    """The weighted sum of the outputs of each token's experts, and of a shared one's.

    Attributes:
      moe: of the model, or of one device's part of it.
      axis: the mesh axis over which experts, or their units, are split.
      implementation: of products.
      share: the tokens of this device, where they are divided; these are then x, in one dimension.
      in_pieces: leave the output as a piece [1, ..., M] in float32, to be rounded by what adds it.
    """

    moe: MoE
    axis: Axis | None = None
    implementation: Implementation = "xla"
    share: TokenShare | None = None
    in_pieces: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "*tokens M"], real: Bool[Array, "*tokens"] | None = None
    ) -> Float[Array, "..."]:
        """Computes the tokens that are `real`, by default all; the others give 0."""
        moe, rows = self.moe, x.reshape(-1, x.shape[-1])
        router = Linear(
            moe.num_experts,
            moe.router_bias,
            dtype=jnp.float32,
            implementation=self.implementation,
            name="router",
        )
        bias = None
        if moe.choice_bias:
            bias = self.param("choice_bias", nn.initializers.zeros, (moe.num_experts,))
        expert, weight = route(router(rows), None if bias is None else bias.astype("float32"), moe)
        if real is not None:
            expert = jnp.where(real.reshape(-1, 1), expert, moe.num_experts)
        axis = self.axis
        if self.share is None:
            out = self._held(rows, expert, weight)
        else:
            out = self.share.through_experts(rows, expert, weight, moe, self._held)
            axis = axis_without(axis, EXPERT)
        if moe.shared_size:
            once = EXPERT in moe.axes and self.share is None
            out = out + _once(self._shared(rows), EXPERT if once else None)
        out = psum(out, axis)
        return out.reshape(1, *x.shape) if self.in_pieces else out.astype(x.dtype).reshape(x.shape)

    def _held(
        self, x: Float[Array, "N M"], expert: Int32[Array, "N K"], weight: Float32[Array, "N K"]
    ) -> Float32[Array, "N M"]:
        """The weighted sum of the experts of this device."""
        held = self.moe.num_held
        if self.moe.axes:
            expert = expert - jax.lax.axis_index(self.moe.axes) * held
        used = (expert >= 0) & (expert < held)
        return self._experts(x, jnp.where(used, expert, held), jnp.where(used, weight, 0.0))

    def _experts(
        self, x: Float[Array, "N M"], expert: Int32[Array, "N K"], weight: Float32[Array, "N K"]
    ) -> Float32[Array, "N M"]:
        moe, (tokens, width) = self.moe, x.shape
        held = moe.num_held
        stacked = functools.partial(StackedLinear, held, bias=moe.expert_bias)
        gate, up = (stacked(moe.expert_size, name=name)(width) for name in ("gate", "up"))
        down = stacked(width, name="down")(moe.expert_size)
        kernels = [kernel for kernel, _ in (gate, up, down)]
        first = expert_products(x, expert, kernels[:2], x.dtype, self.implementation)
        if first is None:
            # Sorted once for all products, with those of no expert at the end.
            order = jnp.argsort(expert.reshape(-1), stable=True)
            sizes = jnp.bincount(expert.reshape(-1), length=held)
            sorted_x, chosen = x[order // moe.top_k], expert.reshape(-1)[order]
            g, u = (ragged_product(sorted_x, kernel, sizes, x.dtype) for kernel in kernels[:2])
            hidden = _activated(g, u, gate[1], up[1], chosen, moe)
            keep_inputs(self, "experts", (sorted_x, hidden, sizes))
            found = ragged_product(hidden, kernels[2], sizes, jnp.float32)
            places = jnp.argsort(order)
            y = found[places].reshape(tokens, moe.top_k, width)
        else:
            g, u = first
            hidden = _activated(g, u, gate[1], up[1], expert, moe).reshape(-1, g.shape[-1])
            each = expert.reshape(-1, 1)
            found = expert_products(hidden, each, kernels[2:], jnp.float32, self.implementation)
            if found is None:  # matrices that are quantised in another way
                found = [sorted_products(hidden, expert.reshape(-1), kernels[2], jnp.float32)]
            y = found[0].reshape(tokens, moe.top_k, width)
        if down[1] is not None:
            parts = self.axis  # over which units are split
            for split in moe.axes:
                parts = axis_without(parts, split)
            y = y + _once(down[1], parts)[jnp.minimum(expert, held - 1)].astype(y.dtype)
        y = jnp.where((expert < held)[..., None], y, 0)
        return jnp.sum(y * weight[..., None], axis=1)

    def _shared(self, x: Float[Array, "N M"]) -> Float32[Array, "N M"]:
        out = SharedExpert(self.moe.shared_size, self.implementation, name="shared")(x)
        if not self.moe.shared_gate:
            return out
        gate = Linear(1, dtype=jnp.float32, implementation=self.implementation, name="shared_gate")
        return jax.nn.sigmoid(gate(x)) * out


def _once(x: Array, axis: Axis | None) -> Array:
    """Gives one device of an axis what all of them have, and the others 0, for a sum over it."""
    return x if axis is None else jnp.where(jax.lax.axis_index(axis) == 0, x, 0)


class SharedExpert(nn.Module):
    """The expert that all tokens pass through: down(silu(gate(x)) * up(x)) in float32, to be summed
    over devices.

    Attributes:
      size: its MLP units on this device.
      implementation: of products.
    """

    size: int
    implementation: Implementation = "xla"

    @nn.compact
    def __call__(self, x: Float[Array, "N M"]) -> Float32[Array, "N M"]:
        how = {"bias": False, "implementation": self.implementation}
        gate, up = projections(self, GATE_UP, {"gate": self.size, "up": self.size}, **how)(x)
        return Linear(x.shape[-1], dtype=jnp.float32, name="down", **how)(nn.silu(gate) * up)


class StackedLinear(nn.Module):
    """The parameters of a linear layer for each expert: kernel [E, out, in], bias [E, out].

    Attributes:
      experts: E.
      features: out.
      bias: they have one.
    """

    experts: int
    features: int
    bias: bool = False

    @nn.compact
    def __call__(self, width: int) -> tuple[Weight, Float[Array, "E out"] | None]:
        """The kernels for inputs of this width, and the biases if there are any."""
        init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
        kernel = weight(self, "kernel", init, (self.experts, self.features, width))
        if not self.bias:
            return kernel, None
        return kernel, self.param("bias", nn.initializers.zeros, (self.experts, self.features))


def _activated(
    gate: Float[Array, "*N F"],
    up: Float[Array, "*N F"],
    gate_bias: Float[Array, "E F"] | None,
    up_bias: Float[Array, "E F"] | None,
    expert: Int32[Array, "*N"],
    moe: MoE,
) -> Float[Array, "*N F"]:
    """The input of the experts' last products; undefined where a token has no expert."""
    if gate_bias is not None and up_bias is not None:
        gate = gate + gate_bias[expert].astype(gate.dtype)
        up = up + up_bias[expert].astype(up.dtype)
    if not moe.swiglu_limit:
        return nn.silu(gate) * up
    gate = jnp.minimum(gate, moe.swiglu_limit)
    up = jnp.clip(up, -moe.swiglu_limit, moe.swiglu_limit)
    return gate * nn.sigmoid(moe.swiglu_alpha * gate) * (up + 1)
