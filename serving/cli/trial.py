"""Trials of a device: its results, beside those of another way to compute the same.

`jaxshare doctor --compute` prints them. They show where a device, its driver, its compiler or an
untried version of JAX gives wrong results: attention of every backend beside the reference, a text
of `generate` beside its score in one pass, and a session of workers beside its trace, encoded again
in one pass.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import KVCache, Layout, Sampler, block_attention, make_plan, progress
from jaxshare.attention.plan import Plan
from jaxshare.models import LoadedModel, ModelConfig, reencode
from jaxshare.serving.branches.generate import generate
from jaxshare.serving.scoring.scores import score
from jaxshare.serving.tuning import diagnosis
from jaxshare.serving.tuning.diagnosis import Trial
from jaxshare.serving.tuning.kernels import in_a_sentence
from jaxshare.serving.workers.session import Workers

PROBLEM = "1. 47 + 38\n2. 12 * 7"
TOKENS = 32
"""Tokens of a text, and forward passes of the workers."""
_LENGTHS, _NEW = (300, 64, 5), (5, 1)
"""Tokens of a block that two rows see and of their own ones, and new ones of each."""


def trials(
    model: LoadedModel, config: ModelConfig | None = None, dtype: jax.typing.DTypeLike | None = None
) -> list[Trial]:
    """Computes on JAX's default device, and compares.

    Args:
      model: with a tokenizer.
      config: of the model whose attention is tried; default the model's own.
      dtype: of its cache; default the model's own.

    Raises:
      ValueError: a model without a tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(
            "the model folder has no tokenizer, and what is tried are texts; add the tokenizer's "
            "files, or leave --model out"
        )
    config, dtype = config or model.config, jnp.dtype(model.dtype if dtype is None else dtype)
    depth = max(1.0, math.sqrt(model.config.num_layers) / 2)  # errors of layers add up
    per_token = 0.01 if model.dtype == jnp.float32 else 0.05
    attend = _AttentionTrial(config, dtype)
    tried = [
        *((f"attention by {b}", _allowed(dtype), attend.error(b)) for b in attend.backends),
        ("a text of generate", per_token, lambda: _of_a_text(model)),
        ("a session of workers", depth * _allowed(model.dtype), lambda: _of_workers(model)),
    ]
    return [_tried(*each) for each in progress.each(tried, "computing", "trials")]


def problem_of(trial: Trial) -> str:
    """The sentence about a trial that is not right, with what would do."""
    what = (
        f"is off by {trial.error:.2g}, where {trial.allowed:.2g} may be rounding"
        if trial.failure is None
        else f"failed: {trial.failure}"
    )
    return (
        f"{trial.name} {what}: do not trust what this device computes with this version of JAX; try "
        "another version, or JAX_PLATFORMS=cpu, and report it with this output"
    )


def _tried(name: str, allowed: float, compute: Callable[[], float]) -> Trial:
    """A trial of what may raise any error: a compiler's, a driver's."""
    try:
        error = compute()
    except Exception as failure:
        return Trial(name, None, allowed, in_a_sentence(failure))
    return Trial(name, error if math.isfinite(error) else math.inf, allowed)


def _allowed(dtype: jax.typing.DTypeLike) -> float:
    """The error of a vector, as a part of its length, that may be rounding: three epsilons, of TF32
    where float32 is used, since GPUs multiply in that by default."""
    return 3 * max(float(jnp.finfo(dtype).eps), 2**-10)


# Attention.


class _AttentionTrial:
    """Attention over blocks of random numbers, by every backend that serves the model here."""

    def __init__(self, config: ModelConfig, dtype: np.dtype):
        self._rng, self._dtype = np.random.default_rng(0), dtype
        checked = [diagnosis.check_backend(name, config, dtype) for name in diagnosis.SERVING]
        self.backends = [check.name for check in checked if check.reason is None]
        cache = KVCache.create(dataclasses.replace(config, num_layers=1), (512, 128, 128), dtype)
        whole, *own = _LENGTHS
        layout = Layout.from_blocks([[0, 1], [0, 2]])
        cache, plan = self._with_tokens(cache, Layout.from_blocks([[0]]), [whole])
        cache, plan = self._with_tokens(cache.advance(plan), layout, own)
        self._cache, self._plan = self._with_tokens(cache.advance(plan), layout, _NEW)
        self._q = self._noise(2, max(_NEW), config.num_heads, cache.keys[0].shape[2])
        self._real = np.arange(max(_NEW)) < np.asarray(_NEW)[:, None]

    def error(self, backend: str) -> Callable[[], float]:
        """A function that computes the largest distance of a token's answer of a head, as a part of
        the right one's length."""

        def compute() -> float:
            right, found = self._right, self._attended(backend, self._dtype)
            distance = np.linalg.norm(found - right, axis=-1)
            return float((distance / np.linalg.norm(right, axis=-1)).max())

        return compute

    @functools.cached_property
    def _right(self) -> np.ndarray:
        with jax.default_matmul_precision("highest"):
            return self._attended("reference", np.dtype("float32"))

    def _attended(self, backend: str, dtype: np.dtype) -> np.ndarray:
        arrays: tuple[Any, ...] = self._q, self._cache.keys[0], self._cache.values[0]
        run = jax.jit(functools.partial(block_attention, implementation=backend))
        found = run(*(each.astype(dtype) for each in arrays), self._plan)
        return np.asarray(found.astype(jnp.float32))[self._real]

    def _noise(self, *shape: int) -> Array:
        return jnp.asarray(self._rng.standard_normal(shape), self._dtype)

    def _with_tokens(
        self, cache: KVCache, layout: Layout, count: Sequence[int]
    ) -> tuple[KVCache, Plan]:
        """The cache with so many new tokens of each row, and the plan of that pass."""
        plan = make_plan(cache, layout, jnp.asarray(count, jnp.int32), max(count))
        lines = layout.num_rows, max(count), cache.keys[0].shape[0]
        keys, values = (self._noise(*lines, x[0].shape[2]) for x in (cache.keys, cache.values))
        return cache.append(0, keys, values, plan), plan


# Models.


def _of_a_text(model: LoadedModel) -> float:
    """The log-probability of a greedy text as it was decoded, beside its score, of a token."""
    made = generate(model, [PROBLEM], max_new_tokens=TOKENS, sampler=Sampler(0.0)).completions[0]
    again = score(model, PROBLEM, [made.tokens])[0]
    assert made.logprob is not None  # since it is not turned off
    return abs(made.logprob - again.logprob) / len(made.tokens)


def _of_workers(model: LoadedModel) -> float:
    """The keys of the last layer that a greedy session has cached, beside those of its trace."""
    session = Workers(model, PROBLEM, budget=TOKENS, sampler=Sampler(0.0), record=True)
    session.run()
    _, again = reencode(model, session.trace, at=[])
    distance = length = 0.0
    caches: tuple[Any, ...] = session.cache, again
    for block, count in enumerate(np.asarray(again.lengths)):
        ours, theirs = (
            np.asarray(each.keys[-1].astype(jnp.float32))[
                :, (start := int(each.offsets[block])) : start + int(count)
            ]
            for each in caches
        )
        distance += float(np.sum((ours - theirs) ** 2))
        length += float(np.sum(theirs**2))
    return math.sqrt(distance / length)
