"""Decoder: the module that all models share.

Axis letters: R rows, T new tokens of a row, H query heads, K kv heads, D head dim, M model dim, F
MLP dim, V vocabulary, L layers, N traces of a batch, A selected tokens of a trace.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Float32, Int

from jaxshare.attention.api import block_attention, with_work
from jaxshare.attention.block_share import block_attention_share, last_tokens
from jaxshare.attention.pass_checks import check_pass
from jaxshare.attention.plan import Plan, make_plan
from jaxshare.cache import KVCache
from jaxshare.cpu import Implementation
from jaxshare.decoding.state import DecodeModel
from jaxshare.layout import Layout, is_concrete
from jaxshare.models.adapters.low_rank import ADAPTERS, LayerAdapters, of_rows
from jaxshare.models.cached_layer import run_layer, without_padding
from jaxshare.models.causal_attention import causal_attention
from jaxshare.models.config import LayerForm, ModelConfig
from jaxshare.models.decoder_layer import MLP as MLP
from jaxshare.models.decoder_layer import Attention as Attention
from jaxshare.models.decoder_layer import Layer, Sinks
from jaxshare.models.linear import Embedding, Linear, Weight, dequantised, products
from jaxshare.models.linear import product as product
from jaxshare.models.norm import RMSNorm
from jaxshare.models.residual import as_stream
from jaxshare.rope import Rope
from jaxshare.sharding import Axis, psum
from jaxshare.softcap import soft_capped
from jaxshare.trace.attention import TraceBatch, trace_attention

Params = Mapping[str, Any]
"""Flax variables: {"params": {...}}, and {"adapters": {...}} where rows may have adapters."""

Attend = Callable[
    [int, Float[Array, "R T H D"], Float[Array, "R T K D"], Float[Array, "R T K D"], Sinks],
    Float[Array, "R T H D"],
]
"""(layer, q, k, v, sinks) -> attention output; q and k are not rotated yet."""


class Decoder(nn.Module):
    """A decoder-only transformer.

    Parameters: embed, layers_0 .. layers_{L-1}, norm, and head where it is not tied.

    Attributes:
      config: of the whole model, or of the part that each device of a mesh has
        (`jaxshare.models.tensor_parallel`).
      implementation: attention backend, and how products of a pass over a cache are computed.
      axis: the mesh axis over which heads and MLP are split.
      vocab_axis: the mesh axis over which the vocabulary is split.
    """

    config: ModelConfig
    implementation: Implementation = None
    axis: Axis | None = None
    vocab_axis: Axis | None = None

    def setup(self):
        c = self.config
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.layers = [Layer(c, self.axis, form=form) for form in c.layer_forms]
        self.norm = RMSNorm(c.norm_eps, adds_one=c.norm_adds_one)
        if not c.tie_embeddings:
            self.head = Linear(c.vocab_size, dtype=jnp.float32)

    def __call__(
        self,
        tokens: Int[Array, "R T"],
        count: Int[Array, " R"],
        cache: KVCache,
        layout: Layout,
        *,
        every: bool = False,
    ) -> tuple[Float32[Array, "R V"] | Float32[Array, "R T V"], KVCache]:
        """Runs one forward pass over a shared cache.

        Args:
          tokens: new tokens of each row, padded on the right.
          count: the number of real tokens of each row; a row with 0 takes no part.
          cache: the cached tokens.
          layout: the blocks that each row sees.
          every: return the logits of every new token, not of each row's last alone.

        Returns:
          The logits of each row's last real token ([R, T, V] with `every`), and the cache with the
          new tokens in it. Logits of rows with count 0, and of padding, are undefined. Those of a
          row are NaN where the model's output is not finite at any of its tokens. Where the
          vocabulary is split they are this device's part.
        """
        x, cache, plan = self._pass(tokens, count, cache, layout)
        if not every:
            # The cache stores finite values only, so later tokens would not show an overflow.
            real = jnp.arange(x.shape[1]) < plan.count[:, None]
            overflowed = jnp.any(~jnp.isfinite(x) & real[..., None], axis=(1, 2))
            last = jnp.maximum(plan.count - 1, 0)
            x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
            x = jnp.where(overflowed[:, None], jnp.nan, x) if tokens.shape[1] > 1 else x
        return self._logits(x, self.implementation), cache

    def hidden(
        self,
        tokens: Int[Array, "R T"],
        count: Int[Array, " R"],
        cache: KVCache,
        layout: Layout,
    ) -> tuple[Float[Array, "R T M"], KVCache]:
        """Runs a pass as `__call__` does, up to the states that the head makes logits of.

        For texts whose logits [R, T, V] would be too large, or are needed at few positions alone.

        Returns:
          The normed states of every new token, undefined for padding, and the cache with the new
          tokens in it.
        """
        return self._pass(tokens, count, cache, layout)[:2]

    def logits(self, hidden: Float[Array, "N M"]) -> Float32[Array, "N V"]:
        """Returns the logits of some states that `hidden` has returned."""
        return self._logits(hidden, self.implementation)

    def causal(self, tokens: Int[Array | np.ndarray, "R T"]) -> Float32[Array, "R T V"]:
        """Returns the logits of whole sequences with plain causal attention and no cache.

        For training and as a check. Token t is at position t.
        """

        def attend(layer: int, q: Array, k: Array, v: Array, sinks: Sinks) -> Array:
            return causal_attention(q, k, v, sinks, self.config, self.config.layer_form(layer))

        return self._logits(self._trunk(tokens, attend))

    def encode(
        self, batch: TraceBatch, at: Int[Array | np.ndarray, "N A"] | None = None
    ) -> tuple[
        Float32[Array, "N A V"],
        tuple[Float[Array, "N T K D"], ...],
        tuple[Float[Array, "N T K _"], ...],
    ]:
        """Computes all that traces have fed in one parallel pass without a cache; differentiable.

        See `jaxshare.models.reencode`.

        Args:
          batch: of the traces.
          at: indices of the tokens to return logits of; default all, A = T.

        Returns:
          The logits, and for each layer keys, not rotated, and values.
        """
        keys: list[Array] = []
        values: list[Array] = []

        c = self.config

        def attend(layer: int, q: Array, k: Array, v: Array, sinks: Sinks) -> Array:
            keys.append(k)
            values.append(v)
            rope, window, _ = c.layer_form(layer)
            how = {"scale": c.score_scale, "softcap": c.attention_softcap, "sinks": sinks}
            return trace_attention(q, k, v, batch, rope, window=window, **how)

        x = self._trunk(batch.tokens, attend)
        x = x if at is None else jnp.take_along_axis(x, at[..., None], axis=1)
        return self._logits(x), tuple(keys), tuple(values)

    def attention_share(
        self,
        tokens: Int[Array, "R T"],
        count: Int[Array, " R"],
        cache: KVCache,
        layout: Layout,
    ) -> Float32[Array, "L R N"]:
        """Measures how each row's last real token divides its attention among the row's blocks.

        Arguments as in `__call__`; the cache of the pass is discarded.

        Returns:
          The mean over heads for each of N blocks, in the order in which the row lists them. It
          sums to 1 over N, and is all 0 for a row without new tokens.
        """
        plans, shares = self._plans(cache, layout, count, tokens.shape[1]), []
        how: Any = {"scale": self.config.scale, "softcap": self.config.attention_softcap}

        def attend(layer: int, q: Array, k: Array, v: Array, sinks: Sinks) -> Array:
            nonlocal cache
            plan = plans[self.config.layer_form(layer)]
            cache = cache.append(layer, k, v, plan)
            last, last_plan = last_tokens(q, plan)
            found = block_attention_share(last, cache.keys[layer], last_plan, **how)
            share = jnp.mean(found[:, 0], axis=1)
            shares.append(share if self.axis is None else jax.lax.pmean(share, self.axis))
            arenas, implementation = (cache.keys[layer], cache.values[layer]), self.implementation
            return block_attention(
                q, *arenas, plan, sinks=sinks, implementation=implementation, **how
            )

        x = self._embed(tokens)
        for i, form in enumerate(self.config.layer_forms):
            layer = Layer(self.config, self.axis, form=form, parent=None)
            own = self._variables_of(i, layout)
            variables = {"params": own[0]} | of_rows(own[1])
            x: Any = layer.apply(variables, x, functools.partial(attend, i))
        return jnp.stack(shares)

    def _pass(
        self, tokens: Int[Array, "R T"], count: Int[Array, " R"], cache: KVCache, layout: Layout
    ) -> tuple[Float[Array, "R T M"], KVCache, Plan]:
        """The normed states of all new tokens, the cache with them in it, and the pass's plan."""
        plans = self._plans(cache, layout, count, tokens.shape[1])
        plan, keys, values = plans[self.config.layer_form(0)], [*cache.keys], [*cache.values]
        real = jnp.arange(tokens.shape[1]) < plan.count[:, None]
        x = without_padding(self._embed(tokens), real, self.implementation)
        if self.is_initializing():
            self._trunk(tokens, lambda layer, q, k, v, sinks: q)
        x = as_stream(x, self.config, self.axis, self.implementation)
        for i, form in enumerate(self.config.layer_forms):
            layer = Layer(self.config, self.axis, self.implementation, form, parent=None)
            params, adapters = self._variables_of(i, layout)
            with jax.named_scope(f"layers_{i}"):  # which profiles and compiled programs tell apart
                x, keys[i], values[i] = run_layer(
                    layer, params, x, keys[i], values[i], plans[form], self.implementation, adapters
                )
        cache = dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))
        if isinstance(x, tuple):
            times = self.config.residual_multiplier
            x = jnp.concatenate([each.normed(self.norm, times)[1] for each in x], axis=1)
        else:
            x = self.norm(x)
        return x, cache.advance(plan), plan

    def _variables_of(
        self, layer: int, layout: Layout
    ) -> tuple[Mapping[str, Any], LayerAdapters | None]:
        """The parameters of a layer, and its adapters where the layout's rows may have some."""
        name, adapters = f"layers_{layer}", self.variables.get(ADAPTERS)
        of_layer = None
        if adapters is not None and layout.adapters is not None:
            of_layer = adapters[name], jnp.asarray(layout.adapters)
        return self.variables["params"][name], of_layer

    def _plans(
        self, cache: KVCache, layout: Layout, count: Array, width: int
    ) -> dict[LayerForm, Plan]:
        """The plan of the layers of each form, with what their backend makes of it once for all of
        them; layers that read alike have one plan."""
        made: dict[tuple[Rope, int], Plan] = {}
        for i, (rope, window, _) in enumerate(self.config.layer_forms):
            if (rope, window) not in made:
                plan = make_plan(cache, layout, count, width, rope=rope, window=window)
                arenas, heads = (cache.keys[i], cache.values[i]), self.config.num_heads
                made[rope, window] = with_work(plan, heads, *arenas, self.implementation)
        return {form: made[form[:2]] for form in self.config.layer_forms}

    def _trunk(
        self, tokens: Int[Array | np.ndarray, "R T"], attend: Attend
    ) -> Float[Array, "R T M"]:
        x: Any = self._embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, lambda q, k, v, sinks, i=i: attend(i, q, k, v, sinks))
        return self.norm(x)

    def _embed(self, tokens: Int[Array | np.ndarray, "R T"]) -> Float[Array, "R T M"]:
        table, times = self.embed.table(), self.config.embedding_multiplier
        if times != 1:
            return self._looked_up(tokens, table) * jnp.asarray(times, table.dtype)
        return self._looked_up(tokens, table)

    def _looked_up(self, tokens: Array | np.ndarray, table: Weight) -> Array:
        if self.vocab_axis is None:
            return dequantised(table[tokens])
        index = tokens - jax.lax.axis_index(self.vocab_axis) * table.shape[0]
        is_local = (index >= 0) & (index < table.shape[0])
        rows = dequantised(table[jnp.clip(index, 0, table.shape[0] - 1)])
        return psum(jnp.where(is_local[..., None], rows, 0), self.vocab_axis)

    def _logits(
        self, x: Float[Array, "... M"], implementation: Implementation = "xla"
    ) -> Float32[Array, "... V"]:
        tied = self.config.tie_embeddings
        kernel = self.embed.table() if tied else self.head.parameters(x.shape[-1])[0]
        (logits,) = products(x, [kernel], jnp.float32, implementation)
        divisor = self.config.logit_divisor
        logits = logits if divisor == 1 else logits / divisor
        return soft_capped(logits, self.config.logit_softcap)


def forward(
    config: ModelConfig,
    params: Params,
    tokens: ArrayLike | Sequence[Any],
    count: ArrayLike | Sequence[Any],
    cache: KVCache,
    layout: Layout,
    *,
    every: bool = False,
    checked: bool = True,
    implementation: Implementation = None,
    module: Any = None,
) -> tuple[Float32[Array, "R V"] | Float32[Array, "R T V"], KVCache]:
    """Runs one jitted pass after checking its arguments as far as their values are known.

    The cache is donated: use the returned one. Other arguments and results as in
    `Decoder.__call__`; tokens [R, T] and count [R] may be lists, too.

    Args:
      checked: False trusts the values, which are not read then: reading those of a cache waits for
        the pass that it comes from.
      module: the module that takes `params`; default `Decoder(config, implementation)`.

    Raises:
      ValueError: shapes or counts that do not fit the layout, a token outside the vocabulary, an
        unknown or repeated block, two rows writing one block, or a block that would be written
        beyond its capacity.
    """
    # A pass has copies of arrays of the host, which may change while it runs. They are placed with the
    # other arguments, which takes less time.
    tokens, count = (
        x.astype(np.int32) if isinstance(x, Array) else np.array(x, np.int32)
        for x in (tokens, count)
    )
    if checked:
        _check(config, tokens, count, cache, layout)
    return _forward(
        module or Decoder(config, implementation), params, tokens, count, cache, layout, every
    )


@functools.partial(jax.jit, static_argnames=("model", "every"), donate_argnames=("cache",))
def _forward(
    model: DecodeModel,
    params: Params,
    tokens: Array,
    count: Array,
    cache: KVCache,
    layout: Layout,
    every: bool,
) -> Any:
    return model.apply(params, tokens, count, cache, layout, every=every)


def _check(
    config: ModelConfig,
    tokens: Array | np.ndarray,
    count: Array | np.ndarray,
    cache: KVCache,
    layout: Layout,
) -> None:
    if tokens.ndim != 2 or tokens.shape[0] != layout.num_rows or count.shape != tokens.shape[:1]:
        raise ValueError(
            f"tokens must be int32[R, T] and count int32[R] with R = {layout.num_rows}, the "
            f"layout's rows; got {tokens.shape} and {count.shape}"
        )
    check_pass(cache, layout, count, tokens.shape[1])
    if not is_concrete(tokens, count):
        return
    real = np.arange(tokens.shape[1]) < np.asarray(count)[:, None]
    if ((np.asarray(tokens) < 0) | (np.asarray(tokens) >= config.vocab_size))[real].any():
        raise ValueError(
            f"tokens must lie between 0 and {config.vocab_size - 1}, the model's vocabulary"
        )
