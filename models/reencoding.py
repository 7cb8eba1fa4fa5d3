"""Re-encoding traces with a model: logits and cache of a whole session in one pass, and logits that
can be trained on."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

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
) -> tuple[Array, KVCache]:
    """All that a trace has fed, computed in one parallel pass (Hogwild! Inference, appendix B).

    In float32 logits and cache are those of the session to rounding. It costs what a prompt as long
    as the trace does, and memory grows with its length alone.

    Args:
      model: that which the trace is of.
      trace: whole, or what has been recorded so far.
      at: numbers of the tokens whose logits are wanted; default all of them.
      into: a cache of the model to fill, which is donated: its blocks hold afterwards what they
        held in the end of the trace, and nothing else. Default a new one with the trace's
        capacities.

    Returns:
      logits float32[A, V] after each of those tokens, and the cache as it stood in the end.

    Raises:
      ValueError: a trace of another model or tokenizer, one without tokens, a token that it does
        not have, or a cache without room.
    """
    check(model, trace)
    wanted = np.arange(trace.num_tokens) if at is None else np.asarray(at, np.int64).reshape(-1)
    if (outside := wanted[(wanted < 0) | (wanted >= trace.num_tokens)]).size:
        raise ValueError(
            f"at names token {int(outside[0])}, but the trace has tokens 0 to "
            f"{trace.num_tokens - 1}"
        )
    model = model.for_context(trace.context) if trace.context else model
    cache = into
    if cache is None:
        cache = KVCache.create(
            model.config,
            trace.capacities.tolist(),
            jax.tree.leaves(model.params)[0].dtype,
            mesh=model.mesh,
        )
    elif (has := np.asarray(cache.capacities)).shape != trace.capacities.shape or (
        has < trace.lengths
    ).any():
        raise ValueError(
            f"the cache's {len(has)} blocks hold {has.tolist()} tokens, but in the end of the "
            f"trace {trace.num_blocks} blocks have {trace.lengths.tolist()}; give a cache with "
            "room for them"
        )
    # what was in it may have been rotated to anywhere
    cache = dataclasses.replace(cache, phases=jnp.zeros_like(cache.phases))
    tokens, blocks, indices = final_placements(trace)
    places = np.asarray(cache.offsets)[blocks] + indices
    stays = _padded(tokens), _padded(indices), _padded(places, -1)
    logits, cache = _reencode(
        model.module,
        model.params,
        TraceBatch.of([trace]),
        _padded(wanted)[None],
        cache,
        *stays,
        trace.lengths,
    )
    return logits[0, : len(wanted)], cache


def reencode_logits(
    module: Decoder | ShardedDecoder, params: Params, batch: TraceBatch, at: Array | None = None
) -> Array:
    """Logits of a batch of traces in one parallel pass: pure, and differentiable in `params`, for
    training.

        recorder = Recorder(num_blocks=3)            # a teacher plays two workers: see jaxshare.trace.recorder
        ...
        batch = TraceBatch.of([recorder.trace()])
        logits = reencode_logits(model.module, params, batch)    # what each row would sample after each token

    Args:
      module: of the model.
      params: what it takes.
      batch: of the traces; batches of one shape share a program.
      at: int32[N, A], numbers of the tokens whose logits are wanted; default all.

    Returns:
      float32[N, A, V], or [N, T, V] without `at`. Those of padding mean nothing.
    """
    return _encoded(module, params, batch, at)[0]


def check(model: LoadedModel, trace: Trace) -> None:
    """Raises ValueError for a trace that is not of this model and its tokenizer, is longer than its
    context, or has no tokens."""
    if not trace.num_tokens:
        raise ValueError("the trace has no tokens; record at least one pass")
    if trace.fingerprint not in ("", model.trace_fingerprint):
        raise ValueError(
            f"the trace is of another model or tokenizer (fingerprint {trace.fingerprint[:12]}, "
            f"and this model's is {model.trace_fingerprint[:12]}); load the model that wrote it"
        )
    if (most := int(trace.tokens.max())) >= model.config.vocab_size:
        raise ValueError(
            f"the trace has token {most}, outside the model's vocabulary of "
            f"{model.config.vocab_size}; load the model that wrote it"
        )
    if (longest := int(trace.positions.max()) + 1) > model.config.max_positions:
        raise ValueError(
            f"a row of the trace has {longest} tokens, but the model's context holds "
            f"{model.config.max_positions}; load the model that wrote it"
        )


def _padded(numbers: np.ndarray, value: int = 0) -> np.ndarray:
    """int32, with more behind them, so that traces of about the same length share a program."""
    return np.pad(
        numbers.astype(np.int32),
        (0, -max(1, len(numbers)) % 128 + (not len(numbers))),
        constant_values=value,
    )


@functools.partial(jax.jit, static_argnames=("module",), donate_argnames=("cache",))
def _reencode(
    module: Decoder | ShardedDecoder,
    params: Params,
    batch: TraceBatch,
    at: Array,
    cache: KVCache,
    tokens: Array,
    indices: Array,
    places: Array,
    lengths: Array,
) -> tuple[Array, KVCache]:
    logits, keys, values = _encoded(module, params, batch, at)
    return logits, fill(
        cache, [k[0] for k in keys], [v[0] for v in values], tokens, indices, places, lengths
    )


def _encoded(
    module: Decoder | ShardedDecoder, params: Params, batch: TraceBatch, at: Array | None
) -> Any:
    if isinstance(module, ShardedDecoder):
        return module.encode(params, batch, at)
    return module.apply(params, batch, at, method="encode")
