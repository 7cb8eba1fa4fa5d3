"""cpu_append_codes against numbers that NumPy rotates, each as its nearest code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache, Layout, Rope, cpu, make_plan
from tests.helpers import on_device, rotated

if not cpu.available():
    pytest.skip("there are no kernels for this machine", allow_module_level=True)

from types import SimpleNamespace

from jaxshare.cpu.append_codes import cpu_append_codes

LARGEST = {"int8": 127.0, "fp8": 448.0}
appended = jax.jit(cpu_append_codes, donate_argnums=(0, 1))


def check(arena, unchanged, written: dict[int, np.ndarray], form: str) -> None:
    """Tokens [K, D] by their place are there, each number as the nearest code, and all others are as
    they were. XLA divides by multiplying, so scales may be off by the last bit."""
    codes, scales = np.float32(arena.codes), np.float64(arena.scales)
    others = [at for at in range(codes.shape[1]) if at not in written]
    assert arena.codes.dtype == unchanged.codes.dtype
    np.testing.assert_array_equal(codes[:, others], np.float32(unchanged.codes)[:, others])
    np.testing.assert_array_equal(scales[:, others], unchanged.scales[:, others])
    for at, token in written.items():
        largest = np.max(np.abs(token), axis=-1, keepdims=True)
        expected = np.where(largest == 0, 1, largest / LARGEST[form])
        np.testing.assert_allclose(scales[:, at], expected, rtol=1e-6)
        nearest = 0.5 if form == "int8" else np.maximum(np.abs(token / expected) / 16, 2**-10)
        assert np.all(np.abs(codes[:, at] * scales[:, at] - token) <= nearest * expected * 1.0001)
        if form == "int8":
            assert np.all(codes[:, at] == np.rint(codes[:, at]))


def config(dim: int, kv_heads: int, rotary: int, value_dim: int) -> SimpleNamespace:
    rope = Rope.default(rotary, 10_000.0) if rotary else Rope(())
    shape = {"num_layers": 1, "num_kv_heads": kv_heads, "head_dim": dim, "value_dim": value_dim}
    return SimpleNamespace(**shape, rope=rope, layer_ropes=())


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize(
    ("dim", "kv_heads", "width", "rotary", "value_dim"),
    [
        (16, 2, 1, 0, 16),
        (40, 3, 5, 0, 40),
        (64, 1, 70, 0, 64),
        (32, 2, 3, 32, 32),
        (48, 1, 2, 16, 0),
    ],
)
def test_tokens_are_where_they_belong(form, dim, kv_heads, width, rotary, value_dim):
    rng = np.random.default_rng(dim + width)
    capacities = (width + 3, width, 2 * width + 70, width + 1)
    cache = KVCache.create(
        config(dim, kv_heads, rotary, value_dim), capacities, jnp.float32, approximate=form
    )
    before = rng.integers(0, 100, cache.keys[0].codes.shape).astype(np.int8)
    old = jax.tree.map(
        lambda each: on_device(before[..., : each.shape[2]], each.dtype), cache.keys[0]
    )
    lengths, counts = np.array([3, 0, 70, 1]), np.array([width, 0, min(width, 2), 1])
    cache = dataclasses.replace(cache, lengths=on_device(lengths, jnp.int32))
    k = rng.normal(size=(4, width, kv_heads, dim)).astype(np.float32)
    v = rng.normal(size=(4, width, kv_heads, value_dim)).astype(np.float32)
    k[0, 0, 0] = 0  # has the scale 1
    layout = Layout.from_blocks([[0], [1], [2], [3]])
    plan = make_plan(cache, layout, on_device(counts, jnp.int32), width)
    values = old if value_dim else cache.values[0]
    copies = [jax.tree.map(jnp.copy, each) for each in (old, values)]
    kept = [jax.tree.map(np.array, each) for each in (old, values)]
    found = appended(*copies, on_device(k), on_device(v), plan)
    offsets = np.asarray(cache.offsets)
    for arena, unchanged, new, is_key in zip(found, kept, (k, v), (True, False), strict=True):
        if not arena.shape[2]:
            assert arena.shape == cache.values[0].shape
            continue
        written = {}
        for row, count in enumerate(counts):
            tokens = new[row, :count].astype(np.float64)
            if is_key and rotary:
                positions = lengths[row] + np.arange(count)
                tokens = rotated(tokens, positions, cache.rope, 1.0)
            at = offsets[row] + lengths[row]
            written |= {at + i: token for i, token in enumerate(tokens)}
        check(arena, unchanged, written, form)


def test_what_is_not_finite_is_kept_finite():
    cache = KVCache.create(config(16, 1, 0, 16), (4,), jnp.float32, approximate="int8")
    plan = make_plan(cache, Layout.from_blocks([[0]]), jnp.ones(1, jnp.int32), 1)
    new = np.ones((1, 1, 1, 16), np.float32)
    new[..., :3] = np.nan, np.inf, -np.inf
    keys, _ = appended(cache.keys[0], cache.values[0], on_device(new), on_device(new), plan)
    assert np.asarray(keys.codes)[0, 0, :4].tolist() == [0, 127, -127, 0]
    assert np.all(np.isfinite(keys.scales))


def test_the_arena_is_not_copied():
    """The program needs no memory of an arena's size beside the arenas, which it is given."""
    cache = KVCache.create(config(64, 2, 64, 64), (4096,) * 4, jnp.bfloat16, approximate="fp8")
    plan = make_plan(cache, Layout.from_blocks([[r] for r in range(4)]), jnp.ones(4, jnp.int32), 1)
    new = jnp.zeros((4, 1, 2, 64), jnp.bfloat16)
    arenas = cache.keys[0], cache.values[0]
    analysis = appended.lower(*arenas, new, new, plan).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < cache.keys[0].codes.nbytes // 16


def test_tokens_over_devices_are_refused():
    cache = KVCache.create(config(16, 1, 0, 16), (8,), jnp.float32, approximate="int8")
    plan = make_plan(cache, Layout.from_blocks([[0]]), jnp.ones(1, jnp.int32), 1)
    sharding = SimpleNamespace(axis="kv")
    spread = SimpleNamespace(
        token_sharding=sharding,
        key_cos=plan.key_cos,
        key_sin=plan.key_sin,
    )
    new = jnp.zeros((1, 1, 1, 16))
    with pytest.raises(NotImplementedError, match="spread over devices"):
        cpu_append_codes(cache.keys[0], cache.values[0], new, new, spread)
