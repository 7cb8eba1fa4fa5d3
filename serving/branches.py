"""Branches: many completions of one prompt, which is stored once and read once a pass for all of them (Hydragen section 3)."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import DecodeState, KVCache, Layout, Reason, Sampler, decode
from jaxshare.models import LoadedModel

_PREFILL_WIDTH = 256
_UNSHARED_WIDTH = 64
_PASSES_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    Attributes:
      text: without the stop token.
      tokens: with it.
      reason: "stop" or "budget".
      logprob: of all its tokens together, under the model itself (temperature 1, nothing cut).
    """

    text: str
    tokens: list[int]
    reason: str
    logprob: float


@dataclasses.dataclass(frozen=True)
class Completions:
    """What `generate` returns: the completions, and what they cost.

    Attributes:
      completions: n of them.
      prompt_tokens: tokens of the prompt.
      passes: forward passes, those over the prompt included.
      seconds: of wall time in them; compilation of the decode loop is not counted.
      kv_bytes: keys and values cached at the end, over all layers.
    """

    completions: list[Completion]
    prompt_tokens: int
    passes: int
    seconds: float
    kv_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens sampled, all completions together, a second."""
        return sum(len(c.tokens) for c in self.completions) / self.seconds


def generate(model: LoadedModel, prompt: str | Sequence[int], *, n: int = 1, max_new_tokens: int = 64,
             sampler: Sampler | None = None, seed: int = 0, share: bool = True, warm_up: bool = False,
             on_tokens: Callable[[DecodeState], None] | None = None) -> Completions:
    """Samples n completions of one prompt.

    Args:
      model: from `jaxshare.models.load`.
      prompt: text, or tokens.
      n: completions; number i draws from seed + i, so its text does not depend on n.
      max_new_tokens: the most tokens of a completion; a stop token ends it earlier.
      sampler: how to sample; default the checkpoint's own settings.
      seed: of the first completion.
      share: keep the prompt once for all; False gives each completion a copy of its own, for comparison.
      warm_up: compile everything before the clock starts.
      on_tokens: called between dispatches with the state so far.

    Raises:
      ValueError: an empty prompt, n or max_new_tokens below 1, or a prompt that leaves too little of the model's context.
    """
    tokens = encode(model, prompt)
    if n < 1:
        raise ValueError(f"n is {n}; ask for at least 1 completion")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for at least 1 token")
    check_context(model, len(tokens), max_new_tokens)
    model = model.for_context(len(tokens) + max_new_tokens)
    sampler = sampler or default_sampler(model)
    settings: dict[str, Any] = dict(vocab_size=model.config.vocab_size, samplers=sampler, seeds=seed, budgets=max_new_tokens,
                    stops=model.generation.stop_tokens, logprobs=True)
    if share:
        cache = KVCache.create(model.config, (len(tokens), *[max_new_tokens] * n), cache_dtype(model))
        if warm_up:
            _, cache = prefill(model, [], cache, block=0)
        clock = time.perf_counter()
        logits, cache = prefill(model, tokens, cache, block=0)
        jax.block_until_ready(logits)
        seconds, passes, width = time.perf_counter() - clock, -(-len(tokens) // _PREFILL_WIDTH), 1
        state = DecodeState.create(cache, Layout.from_blocks([[0, 1 + i] for i in range(n)]), [[]] * n, logits=logits[0], max_width=1,
                                   **settings)
    else:
        cache = KVCache.create(model.config, [len(tokens) + max_new_tokens] * n, cache_dtype(model))
        seconds, passes, width = 0.0, 0, min(_UNSHARED_WIDTH, len(tokens))
        state = DecodeState.create(cache, Layout.from_blocks([[i] for i in range(n)]), [tokens] * n, max_width=width, **settings)
    state = decode(model.module, model.params, state, passes=0, width=width)  # compiles, runs nothing
    clock = time.perf_counter()
    while bool(jnp.any(state.running)):
        state = decode(model.module, model.params, state, passes=_PASSES_AT_ONCE, width=width)
        if on_tokens:
            on_tokens(state)
    state.cache.check()
    seconds += time.perf_counter() - clock
    return Completions(completions(model, state), len(tokens), passes + int(state.passes), seconds,
                       int(jnp.sum(state.cache.lengths)) * state.cache.token_bytes)


def encode(model: LoadedModel, prompt: str | Sequence[int]) -> list[int]:
    """The prompt's tokens.

    Raises:
      ValueError: an empty prompt, or text for a model without a tokenizer.
    """
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token of text")
    if not isinstance(prompt, str):
        return list(prompt)
    if model.tokenizer is None:
        raise ValueError("the model folder has no tokenizer, so a prompt must be given as tokens; add the tokenizer's files to the folder")
    return model.tokenizer.encode(prompt, verbose=False)  # `check_context` says it if the prompt is too long


def check_context(model: LoadedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises ValueError if the prompt and what may follow it do not fit the model's context."""
    if prompt_tokens + max_new_tokens > model.config.max_positions:
        raise ValueError(f"the prompt has {prompt_tokens} tokens and {max_new_tokens} more may follow, but the model's context holds "
                         f"{model.config.max_positions}; shorten the prompt or lower max_new_tokens")


def default_sampler(model: LoadedModel) -> Sampler:
    """The checkpoint's own sampling settings."""
    g = model.generation
    return Sampler(temperature=g.temperature, top_k=g.top_k, top_p=g.top_p, min_p=g.min_p)


def cache_dtype(model: LoadedModel) -> jnp.dtype:
    """Keys and values are cached in the dtype of the parameters."""
    return jax.tree.leaves(model.params)[0].dtype


def prefill(model: LoadedModel, tokens: Sequence[int], cache: KVCache, block: int) -> tuple[Array, KVCache]:
    """Feeds tokens to a block in wide passes; float32[1, V] logits after the last. With no tokens one pass runs that writes nothing."""
    layout = Layout.from_blocks([[block]])
    for first in range(0, max(len(tokens), 1), _PREFILL_WIDTH):
        piece = list(tokens[first:first + _PREFILL_WIDTH])
        padded = np.zeros((1, _PREFILL_WIDTH), np.int32)
        padded[0, :len(piece)] = piece
        logits, cache = model.forward(padded, np.asarray([len(piece)]), cache, layout)
    return logits, cache


def completions(model: LoadedModel, state: DecodeState) -> list[Completion]:
    """The rows' samples so far, as completions."""
    found = []
    for r, tokens in enumerate(state.outputs()):
        reason = Reason(int(state.reasons[r]))
        shown = tokens[:-1] if reason is Reason.STOP else tokens
        tokenizer: Any = model.tokenizer
        text = tokenizer.decode(shown) if tokenizer else ""
        found.append(Completion(text, tokens, reason.name.lower(), float(np.sum(np.asarray(state.logprobs)[r, :len(tokens)]))))
    return found
