"""The kernel that appends and gathers, interpreted on the CPU, against numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxshare import make_plan
from jaxshare.pallas.append_triton import append_and_gather
from jaxshare.pallas.device import Device, lowers_triton
from jaxshare.pallas.work_items import WorkForm, work_of
from jaxshare.quantised import FORMATS, QuantisedTensor
from jaxshare.quantised_cache import as_stored, empty_arena
from tests.core.attention.test_attention import Shape, cases, place
from tests.core.pallas.interpreted import DECODE, LATENT, PENDING, case
from tests.helpers import mostly_slow

INTERPRETED = Device("interpreted", 90, multiprocessors=3, interpret=True)
SPAN = 128
SCALE = 0.3
PENDING_ROWS = dataclasses.replace(PENDING, rows=3, width=2)
ROUNDING = {jnp.bfloat16: 2**-7, jnp.float16: 2**-10}
"""Relative: a unit in the last place."""


@functools.partial(jax.jit, static_argnames=("kv_heads", "device"))
def run(cache, layout, count, q, k, v, kv_heads, device):
    plan = make_plan(cache, layout, count, q.shape[1])
    form = WorkForm(q.shape[2] // kv_heads, kv_heads, SPAN, 64, 3, 64, 1)
    work = work_of(plan, form)
    arenas = cache.keys[0], cache.values[0]
    return append_and_gather(q, k, v, *arenas, plan, work, SCALE, device), plan, work


def turned(x: np.ndarray, cos, sin) -> np.ndarray:
    """Vectors [..., D] whose pairs of entries i and i + P are turned as complex numbers."""
    x, pairs = np.asarray(x, np.float64), np.shape(cos)[-1]
    angles = np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64)
    found = (x[..., :pairs] + 1j * x[..., pairs : 2 * pairs]) * angles
    return np.concatenate([found.real, found.imag, x[..., 2 * pairs :]], axis=-1)


def written(shape: Shape, one, cache, k, v) -> tuple[np.ndarray, np.ndarray]:
    """The arenas with each row's new tokens behind those of its block; all else is as it was."""
    keys, values = (np.array(numbers(a[0])) for a in (cache.keys, cache.values))
    angular = np.asarray(shape.rope.frequencies, np.float64)
    for row, listed in enumerate(one.rows):
        for token in range(one.count[row]):
            place_in_block = one.lengths[listed[-1]] + token
            at = int(cache.offsets[listed[-1]]) + place_in_block
            angle = (one.phases[listed[-1]] + place_in_block) * angular
            cos, sin = (f(angle) * shape.factor for f in (np.cos, np.sin))
            keys[:, at], values[:, at] = turned(k[row, token], cos, sin), v[row, token]
    return keys, values


def numbers(arena) -> np.ndarray:
    """Of an arena, which may be codes."""
    arena = arena.dequantised(jnp.float32) if isinstance(arena, QuantisedTensor) else arena
    return np.asarray(arena, np.float64)


def check(shape: Shape, one, device: Device = INTERPRETED) -> None:
    """Compares arenas and queries with numpy's, of a cache that is exact."""
    (cache, *rest), _ = place(shape, one)
    (queries, keys, values), plan, work = run(cache, *rest, shape.kv_heads, device)
    *_, q, k, v = rest
    close = functools.partial(np.testing.assert_allclose, rtol=ROUNDING[shape.dtype], atol=1e-3)
    expected = written(shape, one, cache, k, v)
    close(numbers(keys), expected[0])
    np.testing.assert_array_equal(numbers(values), expected[1])

    # Each query is where the work says, turned towards the block that it reads there.
    group = shape.heads // shape.kv_heads
    for row, slot in np.argwhere(np.asarray(work.query) >= 0):
        angles = plan.query_cos[row, slot][:, None], plan.query_sin[row, slot][:, None]
        expected = turned(q[row], *angles) * SCALE
        expected = expected.reshape(shape.width, shape.kv_heads, group, -1).swapaxes(0, 1)
        first = int(work.query[row, slot])
        found = queries[:, first : first + shape.width * group]
        close(np.asarray(found, np.float64).reshape(expected.shape), expected)
    read = int(work.segments.table[max(int(work.count) - 1, 0), 0]) + SPAN
    assert np.isfinite(np.asarray(queries[:, :read], np.float64)).all()


@pytest.mark.parametrize(
    "more",
    mostly_slow(
        [
            dict(),
            dict(dim=80, rotary=32, dtype=jnp.float16),
            dict(heads=5, kv_heads=1, dim=256, rotary=256),
            dict(rotary=32),
            dict(rotary=0),
            dict(dim=80, rotary=80, dtype=jnp.float16),
        ],
    ),
    ids=str,
)
def test_appends_and_gathers(more):
    """Rows of one block and of several, one that brings nothing, and phases."""
    shape = dataclasses.replace(DECODE, **more)
    check(
        shape,
        case([[0, 1], [1, 0, 2], [0, 3]], [1, 1, 0], [200, 50, 0, 7], phases=[0, 5, 9, 1]),
    )


def test_pending_tokens():
    check(PENDING, case([[0, 2, 1]], [31], [70, 40, 3, 0], gaps=[3, 0, 1, 0]))


def test_latents():
    """Values are a part of keys, and have no arena."""
    check(LATENT, case([[0, 1], [0, 2]], [1, 1], [150, 66, 0], phases=[0, 5, 0]))


def test_nothing_new():
    check(DECODE, case([[0, 1], [], []], [0, 0, 0], [20, 3, 0, 0]))


@settings(max_examples=25)
@given(cases(DECODE))
def test_many_layouts(one):
    check(DECODE, one)


def test_what_is_not_finite_is_stored_as_finite_numbers():
    (cache, layout, count, q, k, v), _ = place(DECODE, case([[0], [1], [2]], [1] * 3, [3, 0, 5, 0]))
    k, v = k.at[0, 0, 0, 5].set(jnp.nan), v.at[0, 0, 1, 7].set(-jnp.inf)
    (_, keys, values), *_ = run(cache, layout, count, q, k, v, DECODE.kv_heads, INTERPRETED)
    at = int(cache.offsets[0]) + 3
    assert np.isfinite(np.asarray(keys, np.float64)).all()
    assert float(keys[0, at, 5]) == 0.0  # the pair is NaN, and becomes 0
    assert float(values[1, at, 7]) == float(jnp.finfo(values.dtype).min)


def check_codes(format: str, shape: Shape, one, device: Device = INTERPRETED) -> None:
    """Checks that each new number is as near to its code's as codes are apart, and that the largest
    of a token's is exact."""
    (cache, *rest), _ = place(shape, one)
    keys, values = (
        as_stored(a[0], empty_arena(a[0].shape, a[0].dtype, format, None)) if a[0].size else a[0]
        for a in (cache.keys, cache.values)
    )
    cache = dataclasses.replace(cache, keys=(keys,), values=(values,))
    (_, *found), *_ = run(cache, *rest, shape.kv_heads, device)
    assert found[1].shape == values.shape
    for after, before, expected in zip(
        found, (keys, values), written(shape, one, cache, *rest[-2:]), strict=True
    ):
        if not expected.size:
            continue
        new = np.any(numbers(before) != expected, axis=-1)
        assert new.any()
        np.testing.assert_array_equal(numbers(after)[~new], expected[~new])
        off, expected = np.abs(numbers(after)[new] - expected[new]), np.abs(expected[new])
        scales = np.asarray(after.scales, np.float64)[new]
        largest = np.max(expected, axis=-1, keepdims=True)
        np.testing.assert_allclose(scales * FORMATS[format].largest, largest, rtol=2**-7)
        apart = scales if format == "int8" else np.maximum(expected * 2**-3, scales * 2**-9)
        assert np.all(off <= apart / 2 * 1.001 + expected * ROUNDING[shape.dtype])


@pytest.mark.parametrize(
    ("format", "shape"),
    mostly_slow(
        [
            *(("int8", DECODE), ("fp8", LATENT), ("int8", PENDING_ROWS)),
            *(("fp8", DECODE), ("int8", LATENT), ("fp8", PENDING_ROWS)),
        ],
        several=True,
    ),
)
def test_codes_are_the_nearest(format, shape):
    check_codes(format, shape, some_rows(shape))


def some_rows(shape: Shape, seed: int = 0):
    """Up to three rows, with a token each."""
    rows, lengths = [[0, 1], [2, 0], [0, 3]][: shape.rows], [20, 5, 0, 7][: shape.blocks]
    return case(rows, [1] * shape.rows, lengths, seed=seed)


@pytest.mark.parametrize(("capability", "able"), [(75, False), (80, True), (100, True)])
def test_it_serves_gpus_from_ampere_on(capability, able):
    assert lowers_triton(dataclasses.replace(INTERPRETED, capability=capability)) is able
