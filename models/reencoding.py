"""Re-encoding traces with a model: the logits and cache of a session in one differentiable pass."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int

from jaxshare.cache import KVCache
from jaxshare.models.layers import Decoder, Params
from jaxshare.models.loading import LoadedModel
from jaxshare.models.tensor_parallel import ShardedDecoder
from jaxshare.trace.attention import TraceBatch, fill, final_placements
from jaxshare.trace.trace import Trace


def reencode(
    model: LoadedModel,
    trace: Trace,
    *,
    at: Sequence[int] | None = None,
    into: KVCache | None = None,
) -> tuple[Float32[Array, "A V"], KVCache]:
    """Computes all that a trace has fed in one parallel pass (Hogwild! Inference, appendix B).

    In float32, logits and cache equal those of the session up to rounding. The cost is that of a
    prompt as long as the trace; memory is linear in its length.

    Args:
      model: the model of the trace.
      trace: a whole one, or what has been recorded so far.
      at: indices of the tokens to return logits of; default all.
      into: a cache of the model to fill, which is donated: its blocks hold afterwards what they
        held at the end of the trace, and nothing else. Default a new one with the trace's
        capacities.

    Returns:
      The logits after each of those tokens, and the cache as it was at the end.

    Raises:
      ValueError: a trace of another model or tokenizer, one without tokens, a token outside the
        trace, or a cache that is too small.
    """
    _check(model, trace)
    indices = np.arange(trace.num_tokens) if at is None else np.asarray(at, np.int64).reshape(-1)
    if (outside := indices[(indices < 0) | (indices >= trace.num_tokens)]).size:
        raise ValueError(
            f"at names token {int(outside[0])}, but the trace has tokens 0 to "
            f"{trace.num_tokens - 1}"
        )
    model = model.for_context(trace.context) if trace.context else model
    cache = _empty_cache(model, trace, into)
    tokens, blocks, block_indices = final_placements(trace)
    slots = np.asarray(cache.offsets)[blocks] + block_indices
    logits, cache = _reencode(
        model.module,
        model.params,
        TraceBatch.of([trace]),
        _padded(indices)[None],
        cache,
        _padded(tokens),
        _padded(block_indices),
        _padded(slots, -1),
        trace.lengths,
    )
    return logits[0, : len(indices)], cache


def _empty_cache(model: LoadedModel, trace: Trace, cache: KVCache | None) -> KVCache:
    """Returns a cache for the trace: the given one with its phases cleared, or a new one.

    Raises:
      ValueError: the given one is too small.
    """
    if cache is None:
        cache = KVCache.create(
            model.config,
            trace.capacities.tolist(),
            model.dtype,
            mesh=model.mesh,
            approximate=model.approximate_kv,
        )
    elif (has := np.asarray(cache.capacities)).shape != trace.capacities.shape or (
        has < trace.lengths
    ).any():
        raise ValueError(
            f"the cache's {len(has)} blocks hold {has.tolist()} tokens, but at the end of the "
            f"trace {trace.num_blocks} blocks have {trace.lengths.tolist()}; give a cache with "
            "room for them"
        )
    # The former contents may have been rotated by any phase.
    return dataclasses.replace(cache, phases=jnp.zeros_like(cache.phases))


def reencode_logits(
    module: Decoder | ShardedDecoder,
    params: Params,
    batch: TraceBatch,
    at: Int[Array | np.ndarray, "N A"] | None = None,
) -> Float32[Array, "N A V"]:
    """Computes the logits of a batch of traces in one parallel pass.

    Pure, and differentiable in `params`, for training:

        recorder = Recorder(num_blocks=3)  # jaxshare.trace.recorder; a teacher plays two workers
        ...
        batch = TraceBatch.of([recorder.trace()])
        logits = reencode_logits(model.module, params, batch)  # for each row's next token

    Args:
      module: of the model.
      params: of the module.
      batch: of the traces; batches of one shape share a program.
      at: indices of the tokens to return logits of; default all, A = T.

    Returns:
      The logits; those of padding are undefined.
    """
    return _encode(module, params, batch, at)[0]


def _check(model: LoadedModel, trace: Trace) -> None:
    """Raises ValueError if a trace has no tokens, is of another model, or exceeds its context."""
    if not trace.num_tokens:
        raise ValueError("the trace has no tokens; record at least one pass")
    if model.adapter is not None:
        raise ValueError(
            f"the model is used with the adapter {model.adapter.name!r}, and a trace is encoded anew "
            "without one; merge it into the model (jaxshare.models.merged)"
        )
    if trace.fingerprint not in ("", model.trace_fingerprint):
        raise ValueError(
            f"the trace is of another model or tokenizer (fingerprint {trace.fingerprint[:12]}, "
            f"and this model's is {model.trace_fingerprint[:12]}); load the model that wrote it"
        )
    if (max_token := int(trace.tokens.max())) >= model.config.vocab_size:
        raise ValueError(
            f"the trace has token {max_token}, outside the model's vocabulary of "
            f"{model.config.vocab_size}; load the model that wrote it"
        )
    if (max_tokens := int(trace.positions.max()) + 1) > model.config.max_positions:
        raise ValueError(
            f"a row of the trace has {max_tokens} tokens, but the model's context holds "
            f"{model.config.max_positions}; load the model that wrote it"
        )


def _padded(values: np.ndarray, fill_value: int = 0) -> np.ndarray:
    """Converts to int32, padded so that traces of about the same length share a program."""
    padding = -max(1, len(values)) % 128 + (not len(values))
    return np.pad(values.astype(np.int32), (0, padding), constant_values=fill_value)


@functools.partial(jax.jit, static_argnames=("module",), donate_argnames=("cache",))
def _reencode(
    module: Decoder | ShardedDecoder,
    params: Params,
    batch: TraceBatch,
    at: Array,
    cache: KVCache,
    tokens: Array,
    block_indices: Array,
    slots: Array,
    lengths: Array,
) -> tuple[Array, KVCache]:
    logits, keys, values = _encode(module, params, batch, at)
    cache = fill(
        cache, [k[0] for k in keys], [v[0] for v in values], tokens, block_indices, slots, lengths
    )
    return logits, cache


def _encode(
    module: Decoder | ShardedDecoder,
    params: Params,
    batch: TraceBatch,
    at: Int[Array | np.ndarray, "N A"] | None,
) -> Any:
    """Returns logits, keys and values as `Decoder.encode`."""
    if isinstance(module, ShardedDecoder):
        return module.encode(params, batch, at)
    return module.apply(params, batch, at, method="encode")
