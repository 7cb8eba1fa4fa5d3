"""Attention of whole sequences without a cache: for training, and as a check."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxshare.models.config import LayerForm, ModelConfig
from jaxshare.rope import rotate
from jaxshare.softcap import soft_capped


def causal_attention(
    q: Float[Array, "R T H D"],
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K _"],
    sinks: Float[Array, " H"] | None,
    config: ModelConfig,
    form: LayerForm,
) -> Float[Array, "R T H _"]:
    """Plain causal attention of one layer; token t is at position t.

    Args:
      q, k, v: not rotated. With a last dim of 0, v is k without the entries that are rotated.
      sinks: as in `jaxshare.attention.block_attention`.
      config: of the model.
      form: of the layer.
    """
    cos, sin = form.rope.cos_sin(jnp.arange(q.shape[1])[:, None])
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    softcap = config.attention_softcap
    v = v if v.shape[3] else k[..., form.rope.rotary_dim :]
    if sinks is None and not softcap and v.shape == k.shape:
        window = (form.window - 1, 0) if form.window else None
        return jax.nn.dot_product_attention(
            q, k, v, scale=config.score_scale, is_causal=True, local_window_size=window
        )
    rows, tokens, heads, dim = q.shape
    grouped = q.reshape(rows, tokens, k.shape[2], -1, dim)
    scores = jnp.einsum("rtkgd,rskd->rkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * config.scale
    scores = soft_capped(scores, softcap)
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
    sees = (distance >= 0) & (distance < (form.window or tokens))
    scores = jnp.where(sees, scores, -jnp.inf)
    if sinks is not None:
        sink = sinks.reshape(k.shape[2], -1, 1, 1).astype(jnp.float32)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :tokens].astype(v.dtype)
    return jnp.einsum("rkgts,rskd->rtkgd", weights, v).reshape(rows, tokens, heads, -1)
