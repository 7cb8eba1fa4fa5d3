"""One layer of a pass over a cache, traced once for all layers of a model."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxshare import cpu
from jaxshare.attention.api import append_and_attend, can_expand
from jaxshare.attention.expansion import HeadMakers
from jaxshare.attention.plan import Plan
from jaxshare.models.adapters.low_rank import LayerAdapters, of_rows
from jaxshare.models.decoder_layer import Layer
from jaxshare.models.latent_attention import ExpandingAttend
from jaxshare.models.residual import Stream, shape_of
from jaxshare.quantised_cache import Arena

# Traced, and lowered, once for layers of all forms.
_append_and_attend = jax.jit(
    append_and_attend, static_argnames=("scale", "softcap", "implementation")
)


def without_padding(
    x: Float[Array, "R T *rest"], real: Bool[Array, "R T"], implementation: cpu.Implementation
) -> Float[Array, "R T *rest"]:
    """Where the CPU's kernels compute a pass, zeros in place of padding: its states are zeros in all
    layers then, and products with them cost next to nothing."""
    if not cpu.used_for(implementation):
        return x
    return jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, 0)


@functools.partial(jax.jit, static_argnames=("layer", "implementation"))
def run_layer(
    layer: Layer,
    params: Mapping[str, Any],
    x: Stream,
    keys: Arena,
    values: Arena,
    plan: Plan,
    implementation: cpu.Implementation,
    adapters: LayerAdapters | None = None,
) -> tuple[Stream, Arena, Arena]:
    """One layer of a pass: its output, and its arenas with the new tokens.

    Layers of one form have the same shapes, so that all of them are traced once. Rows may have
    adapters.
    """

    config = layer.config
    how = {"scale": config.scale, "softcap": config.attention_softcap}
    _, width, _ = shape_of(x)
    real = jnp.arange(width) < plan.count[:, None]

    def attend(
        q: Array, k: Array, v: Array, sinks: Array | None, makers: HeadMakers | None = None
    ) -> Array:
        nonlocal keys, values
        more = {"sinks": sinks, "makers": makers, "implementation": implementation}
        out, keys, values = _append_and_attend(q, k, v, keys, values, plan, **how, **more)
        return without_padding(out, real, implementation)

    mla, given = config.mla, attend
    if mla is not None and width >= mla.expands_from and can_expand(implementation):
        given = ExpandingAttend(attend, lambda q, k, makers: attend(q, k, k[..., :0], None, makers))
    variables = {"params": params} | of_rows(adapters)
    out: Any = layer.apply(variables, x, given, real)
    return out, keys, values
