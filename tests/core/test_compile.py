"""Compiled programs: none is compiled twice, and none copies the cache."""

import contextlib
import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import DecodeState, KVCache, Layout, Rope, Sampler, decode
from jaxshare.models.config import ModelConfig
from jaxshare.models.layers import Decoder, forward
from tests.helpers import (
    LISTED,
    MOST,
    ROWS,
    TINY,
    VOCAB,
    init,
    mostly_slow,
    pad_rows,
    run,
    tiny_cache,
    tiny_params,
    tiny_state,
)


@contextlib.contextmanager
def compilations():
    """Collects the names of the functions that JAX compiles meanwhile."""
    names: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.match(
                r"Finished XLA compilation of jit\((\w+)\)|Finished XLA compilation of (\w+)",
                record.getMessage(),
            ):
                names.append(found[1] or found[2])

    handler, logger = Collect(), logging.getLogger("jax")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with jax.log_compiles():
            yield names
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def test_the_collector_sees_compilations():
    def never_seen_before(x):
        return x * 3 + 1

    with compilations() as names:
        jax.jit(never_seen_before)(jnp.ones(3))
        jax.jit(never_seen_before)(jnp.ones(3))
        jax.jit(never_seen_before)(jnp.ones(4))
    assert names.count("never_seen_before") == 2


def test_decode_compiles_once():
    """Layouts, lengths, rows in use, prompts, budgets, stops, seeds, passes and every sampling
    setting are data."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (3, 16, 1, 7)]
    jax.clear_caches()
    with compilations() as names:
        done = run(tiny_state(prompts))
    assert names.count("_decode") == 1
    cache = tiny_cache().fork(0, 0, 5)
    with compilations() as names:
        run(tiny_state(prompts[:2], [[0, 2, 1], [0, 1, 2]], max_new_tokens=[3, 0, 12, 1]))
        run(tiny_state([[5]], [[4]], seeds=123, stops=[7]), passes=3)
        run(tiny_state([[5], [], [6]], [[0, 4], [], [2, 0, 1]], cache=done.cache, stops=[1, 2]))
        run(
            tiny_state(
                prompts,
                [[0, 5, 1], [0, 5, 2], [0, 3], [4]],
                cache=cache,
                seeds=[2**32 - 1, 5, 0, 9],
            ),
            passes=1,
        )
        for samplers in (
            Sampler(1.0),
            Sampler(0.3, top_k=5),
            Sampler(1.0, top_p=0.5),
            Sampler(1.0, min_p=0.1),
            [
                Sampler(),
                Sampler(2.0, 3, 0.2, 0.3),
                Sampler(bias={3: 1.0}),
                Sampler(1.0, forbidden=(4, 5)),
            ],
        ):
            state = run(tiny_state(prompts, samplers=samplers), passes=4)
            run(state, passes=9)
    assert "_decode" not in names


def test_forward_compiles_once_for_a_width():
    tokens = np.zeros((ROWS, 8), np.int32)
    jax.clear_caches()
    with compilations() as names:
        _, cache = forward(
            TINY,
            tiny_params(),
            tokens,
            [1, 2, 3, 4],
            tiny_cache(),
            pad_rows([[1], [2], [3], [4]], ROWS, LISTED),
        )
    assert names.count("_forward") == 1
    with compilations() as names:
        for rows, count in (
            ([[0, 2, 1], [0, 1, 2]], [8, 0, 0, 0]),
            ([[], [4]], [0, 1, 0, 0]),
            ([[0], [4, 0, 1], [2], [3]], [5, 5, 5, 5]),
        ):
            _, cache = forward(
                TINY, tiny_params(), tokens, count, cache, pad_rows(rows, ROWS, LISTED)
            )
        move = jax.jit(KVCache.move)
        cache = move(move(cache, jnp.int32(1), jnp.int32(0)), jnp.int32(4), jnp.int32(2))
        _, cache = forward(
            TINY,
            tiny_params(),
            tokens,
            [8] * 4,
            cache,
            pad_rows([[1], [2], [3], [0]], ROWS, LISTED),
        )
    assert "_forward" not in names and names.count("move") == 1


# memory


def real_config() -> ModelConfig:
    return dataclasses.replace(
        TINY,
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        rope=Rope.default(64, 10_000.0),
        qkv_bias=False,
        qk_norm=False,
    )


@functools.cache
def compiled_step(dtype: type):
    """(the compiled decode loop of width 1, its cache): 8 rows over a shared block, several MB a
    layer."""
    config, rows = real_config(), 8
    cache = KVCache.create(config, (2048, *[256] * rows), dtype)
    layout = Layout.from_blocks([[0, r + 1] for r in range(rows)])
    params = jax.tree.map(lambda p: p.astype(dtype), init(config))
    state = DecodeState.create(
        cache,
        layout,
        [[1, 2]] * rows,
        vocab_size=512,
        max_new_tokens=MOST,
        samplers=Sampler(1.0, top_k=5),
    )

    def step(params, cache, state):
        return decode(
            Decoder(config), params, dataclasses.replace(state, cache=cache), passes=10, width=1
        )

    rest = dataclasses.replace(state, cache=None)
    return jax.jit(step, donate_argnames="cache").lower(params, cache, rest).compile(), cache


def shape_of(array: jax.Array) -> str:
    return r"\[" + ",".join(map(str, array.shape)) + r"\]"


@pytest.mark.parametrize("dtype", mostly_slow([jnp.bfloat16, jnp.float32]))
def test_temporary_memory_stays_below_one_layers_cache(dtype):
    step, cache = compiled_step(dtype)
    one_layer = cache.keys[0].nbytes + cache.values[0].nbytes
    assert one_layer > 4e6
    assert step.memory_analysis().temp_size_in_bytes < one_layer


@pytest.mark.parametrize("dtype", mostly_slow([jnp.bfloat16, jnp.float32]))
def test_the_cache_is_updated_in_place(dtype):
    """Every arena goes in and comes out in the same memory, and no instruction copies, transposes
    or converts a whole one."""
    step, cache = compiled_step(dtype)
    arenas = [*cache.keys, *cache.values]
    assert step.memory_analysis().alias_size_in_bytes >= sum(a.nbytes for a in arenas)
    text, shape = step.as_text(), shape_of(cache.keys[0])
    assert re.search(rf"{shape}\S* get-tuple-element\(", text), (
        "no arena goes round the loop: look for its shape anew"
    )
    instructions = (
        rf"{shape}\S* (copy|copy-start|transpose|convert|concatenate|pad|gather|select|reshape)\("
    )
    whole = [
        line.strip()[:200]
        for line in text.splitlines()
        if re.search(instructions, line) and not in_fusion(text, line)
    ]
    assert not whole, whole
    if dtype == jnp.bfloat16:
        assert not re.search(rf"f32{shape}", text), "a bfloat16 arena is converted to float32"


def in_fusion(text: str, line: str) -> bool:
    """True if the line is in the body of a fusion, where only the fusion's result is stored."""
    start = text.rfind("\n\n", 0, text.index(line))
    return text[start:].lstrip().startswith("%fused")
