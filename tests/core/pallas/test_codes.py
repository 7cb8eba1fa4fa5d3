"""The GPU backends over quantised keys and values, interpreted on the CPU, against float64 numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare import KVCache, Layout, Rope, block_attention, make_plan
from jaxshare.pallas.chosen_tiles import use_tiles
from jaxshare.pallas.device import Device, assume_device
from jaxshare.pallas.tiles import MosaicTiles
from jaxshare.quantised_cache import as_stored, empty_arena
from tests.core.attention.test_attention import Case, Shape, cases, place
from tests.core.pallas.interpreted import (
    DECODE,
    LATENT,
    PENDING,
    SOME_LENGTHS,
    TOLERANCE,
    WIDE,
    case,
)
from tests.core.test_quantised_cache import attention_in_numpy
from tests.helpers import TINY, Scoring, mostly_slow

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)
INTERPRETED = Device("interpreted", 90, multiprocessors=3, interpret=True)
ROPE = Rope(tuple(1e4 ** -(np.arange(0, 40, 2) / 40)), 1.1)
HEADS, KV_HEADS = 4, 2


def filled(format: str, dim: int) -> tuple[KVCache, jax.Array]:
    """A cache in which two rows write tokens, and queries of their last ones."""
    config = dataclasses.replace(
        TINY, num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=dim, rope=ROPE
    )
    cache, rng = KVCache.create(config, [180, 70], approximate=format), np.random.default_rng(0)
    layout, count = Layout.from_blocks([[0], [1]]), jnp.asarray([150, 40], jnp.int32)
    k, v = (jnp.asarray(rng.normal(size=(2, 150, KV_HEADS, dim)), jnp.bfloat16) for _ in "kv")

    @jax.jit
    def written(cache):
        plan = make_plan(cache, layout, count, 150)
        return cache.append(0, k, v, plan).advance(plan)

    return written(cache), jnp.asarray(rng.normal(size=(2, 5, HEADS, dim)), jnp.bfloat16)


def check(
    backend: str, format: str, shape: Shape, case: Case, device: Device = INTERPRETED
) -> None:
    """Compares a backend with the oracle over a cache whose tokens have become codes."""
    (cache, layout, count, q, k, v), _ = place(shape, case)
    scoring = shape.scoring

    def coded(arenas):
        return tuple(
            as_stored(arena, empty_arena(arena.shape, arena.dtype, format, None))
            for arena in arenas
        )

    @jax.jit
    def attended(cache, layout, count, q, k, v):
        plan = make_plan(cache, layout, count, q.shape[1], window=scoring.window)
        cache = cache.append(0, k, v, plan)
        out = block_attention(
            q,
            cache.keys[0],
            cache.values[0],
            plan,
            implementation=backend,
            softcap=scoring.softcap,
            sinks=jnp.asarray(scoring.sinks) if scoring.sinks else None,
        )
        return out, cache.advance(plan), plan.faults

    cache = dataclasses.replace(cache, keys=coded(cache.keys), values=coded(cache.values))
    with assume_device(device):
        out, cache, faults = attended(cache, layout, count, q, k, v)
    assert int(faults) == 0
    found = np.asarray(out, np.float64)
    expected = attention_in_numpy(cache, case.rows, case.count, q, scoring)
    real = ~np.isnan(expected)
    assert np.isfinite(found).all()
    assert np.abs(found - expected)[real].max(initial=0.0) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize(
    ("backend", "format", "dim"),
    mostly_slow(
        [
            ("mosaic_gpu", "int8", 64),
            ("triton", "fp8", 64),
            ("triton", "int8", 80),
            ("triton", "fp8", 80),
            ("triton", "int8", 192),
            ("triton", "fp8", 256),
            ("mosaic_gpu", "fp8", 80),
            ("mosaic_gpu", "int8", 96),
            ("mosaic_gpu", "fp8", 128),
            ("mosaic_gpu", "int8", 192),
            ("mosaic_gpu", "fp8", 192),
            ("mosaic_gpu", "int8", 256),
            ("mosaic_gpu", "fp8", 256),
        ],
        several=True,
    ),
)
def test_attention_is_that_over_the_numbers_of_the_codes(backend, format, dim):
    cache, q = filled(format, dim)
    rows, count = [[1, 0], [0, 1]], [5, 5]

    @jax.jit
    def attended(cache, q):
        plan = make_plan(cache, Layout.from_blocks(rows), jnp.asarray(count, jnp.int32), 5)
        cache = cache.append(0, q[..., ::2, :], q[..., 1::2, :], plan)
        arenas = cache.keys[0], cache.values[0]
        return block_attention(q, *arenas, plan, implementation=backend), cache.advance(plan)

    with assume_device(INTERPRETED):
        out, cache = attended(cache, q)
    expected = attention_in_numpy(cache, rows, count, q)
    np.testing.assert_allclose(
        np.asarray(out).astype(np.float64), expected, atol=TOLERANCE[jnp.bfloat16]
    )


MOSAIC = "mosaic_gpu"
HEADS_OF_256 = dataclasses.replace(DECODE, dim=256, rotary=256)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_more_queries_than_a_warpgroup_takes(format):
    rows = [[0, n] for n in range(1, 6)]
    check(MOSAIC, format, WIDE, case(rows, [1] * 5, [300, 5, 0, 64, 1, 17], gaps=[1] * 6))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_pending_tokens_in_float16(format):
    check(MOSAIC, format, PENDING, case([[0, 2, 1]], [31], [70, 40, 3, 0], gaps=[3, 0, 1, 0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "more"),
    [
        ("int8", dict()),
        ("fp8", dict(width=3, heads=5, dtype=jnp.float16)),
        ("fp8", dict(heads=128)),
        ("int8", dict(width=40, heads=2)),
        ("int8", dict(scoring=Scoring(100, 3.0, (1.0, -np.inf) * 8))),
    ],
    ids=str,
)
def test_values_that_are_a_part_of_keys(format, more):
    """A row's own block is full with what it brings, and one of a single token is before it."""
    shape = dataclasses.replace(LATENT, **more)
    lengths = [150, 66, 0] if more else [150, 1, 0]
    rows = case([[0, 1], [0, 2]], [shape.width, 1], lengths, gaps=[1, 0, 3], phases=[0, 5, 0])
    check(MOSAIC, format, shape, rows)


@pytest.mark.slow
def test_one_token_alone():
    """The first token of a row, and rows that bring nothing."""
    for shape in (HEADS_OF_256, LATENT):
        check(MOSAIC, "int8", shape, case([[0], []], [1, 0], [0] * shape.blocks))


@pytest.mark.slow
def test_wide_heads_with_more_queries_than_both_warpgroups_take():
    """80 queries of 256 entries: both warpgroups have the same 64, so that there are two pieces."""
    shape = dataclasses.replace(WIDE, dim=256, rotary=256)
    rows = [[0, n] for n in range(1, 6)]
    check(MOSAIC, "fp8", shape, case(rows, [1] * 5, [300, 5, 0, 64, 1, 17], gaps=[1] * 6))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 192, 256])
def test_windows_softcaps_and_sinks(dim):
    scoring = Scoring(window=70, softcap=8.0, sinks=(1.0, -2.0, 4.0, -np.inf))
    shape = dataclasses.replace(DECODE, dim=dim, rotary=dim, scoring=scoring)
    rows, lengths = [[0, 1], [1, 0, 2], [0, 3]], [200, 50, 3, 0]
    check(MOSAIC, "int8", shape, case(rows, [1, 1, 1], lengths, gaps=[1, 2, 0, 3]))


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [MosaicTiles(64, 1, 1, 1), MosaicTiles(128, 2, 1, 2)])
def test_other_tiles(tiles):
    with use_tiles(tiles):
        rows = [[0, 1], [1, 0, 2], [3]]
        check(MOSAIC, "fp8", DECODE, case(rows, [1, 1, 1], [300, 129, 3, 0], gaps=[1, 0, 0, 0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        (HEADS_OF_256, MosaicTiles(64, 2, 1, 1)),
        (HEADS_OF_256, MosaicTiles(128, 1, 1, 1)),
        (LATENT, MosaicTiles(64, 1, 2, 1)),
    ],
)
def test_other_tiles_of_wide_heads(shape, tiles):
    with use_tiles(tiles):
        rows, lengths, gaps = [[0, 1], [1, 2]], [200, 129, 0, 0], [1, 0, 0, 0]
        n = shape.blocks
        check(MOSAIC, "fp8", shape, case(rows, [1, 1], lengths[:n], gaps=gaps[:n]))


@pytest.mark.slow
@settings(max_examples=20)
@given(cases(DECODE), st.sampled_from(["int8", "fp8"]))
def test_many_layouts(case, format):
    check(MOSAIC, format, DECODE, case)


@pytest.mark.slow
@settings(max_examples=10)
@given(cases(dataclasses.replace(DECODE, dim=192, rotary=192), lengths=SOME_LENGTHS))
def test_many_layouts_of_wide_heads(case):
    """The warpgroup that fetches converts, too."""
    check(MOSAIC, "int8", dataclasses.replace(DECODE, dim=192, rotary=192), case)


@pytest.mark.slow
@settings(max_examples=10)
@given(cases(HEADS_OF_256, lengths=SOME_LENGTHS), st.sampled_from(["int8", "fp8"]))
def test_many_layouts_of_heads_whose_columns_are_shared(case, format):
    check(MOSAIC, format, HEADS_OF_256, case)


@pytest.mark.slow
@settings(max_examples=10)
@given(cases(LATENT, lengths=SOME_LENGTHS), st.sampled_from(["int8", "fp8"]))
def test_many_layouts_of_latents(case, format):
    check(MOSAIC, format, LATENT, case)


@pytest.mark.slow
@settings(max_examples=10)
@given(cases(WIDE, lengths=SOME_LENGTHS))
def test_many_layouts_of_many_queries(case):
    check(MOSAIC, "fp8", WIDE, case)


def test_fp8_on_a_gpu_that_does_not_convert_it():
    cache, q = filled("fp8", 64)
    planned = jax.jit(make_plan, static_argnums=3)
    plan = planned(cache, Layout.from_blocks([[0], [1]]), jnp.ones(2, jnp.int32), 5)
    old = Device("old", 80, multiprocessors=3, interpret=True)
    with assume_device(old), pytest.raises(NotImplementedError, match=r"capability 8\.9"):
        block_attention(q, cache.keys[0], cache.values[0], plan, implementation="triton")
