"""Caches that approximate: what is rounded, by how much, and what stays bit for bit. Attention over
codes against NumPy over the numbers that they stand for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxshare import KVCache, Layout, Rope, block_attention, cache_io, make_plan
from jaxshare.attention.block_share import block_attention_share
from jaxshare.sharding import make_mesh, on_each
from tests.helpers import PLAIN, TINY, mostly_slow, on_device, rotated, softmax_attention

ROPE = Rope.yarn(8, 10_000.0, 8.0, 512)
KV_HEADS, HEADS, DIM = 2, 4, 12  # partial rotary: 8 of 12
FORMATS = ("int8", "fp8")
CONFIG = dataclasses.replace(
    TINY, num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, rope=ROPE
)
CAPACITIES, LENGTHS = (120, 60, 60, 20, 0), (90, 30, 40)


@dataclasses.dataclass(frozen=True)
class Latent:
    """A config of multi-head latent attention: values are the keys' last entries."""

    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = DIM
    value_dim: int = 0
    rope: Rope = ROPE
    layer_ropes: tuple[Rope, ...] = ()


def numbers(arena) -> np.ndarray:
    """What codes and scales, or plain numbers, stand for: float64[K, tokens, D]."""
    if isinstance(arena, jax.Array):
        return np.asarray(arena).astype(np.float64)
    return np.asarray(arena.codes).astype(np.float64) * np.asarray(arena.scales, np.float64)


def half_step(arena) -> np.ndarray:
    """The most by which a number may differ from the one that was written: half the distance of
    neighbouring codes, times the scale."""
    codes, scales = (np.asarray(a).astype(np.float64) for a in (arena.codes, arena.scales))
    if arena.format == "int8":
        return np.full(codes.shape, 0.5) * scales
    exponent = np.floor(np.log2(np.maximum(np.abs(codes), 2.0**-6)))
    return 2.0 ** (exponent - 4) * scales


def bits(cache: KVCache) -> list[np.ndarray]:
    return [np.array(leaf).view(np.uint8) for leaf in jax.tree.leaves((cache.keys, cache.values))]


@functools.partial(jax.jit, static_argnames=("width", "implementation"))
def one_pass(cache, layout, count, q, k, v, width, implementation="xla"):
    """(attention, the cache): new keys and values appended, and attended to."""
    plan = make_plan(cache, layout, count, width)
    cache = cache.append(0, k, v, plan)
    out = block_attention(q, cache.keys[0], cache.values[0], plan, implementation=implementation)
    return out, cache.advance(plan)


def passed(cache, rows, count, width, *, dtype, seed=0, implementation="xla", kv_heads=KV_HEADS):
    """One pass with random numbers: (attention, the cache, q, k, v)."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        on_device(rng.normal(size=(len(rows), width, heads, DIM)), dtype)
        for heads in (HEADS, kv_heads, kv_heads)
    )
    v = v if cache.values[0].shape[2] else v[..., :0]
    layout = Layout.from_blocks(rows)
    given = layout, on_device(count, jnp.int32), q, k, v
    out, cache = one_pass(cache, *given, width=width, implementation=implementation)
    cache.check()
    return np.asarray(out).astype(np.float64), cache, q, k, v


@functools.cache
def filled(format, dtype) -> KVCache:
    """A cache of random tokens, written block by block."""
    cache = KVCache.create(CONFIG, CAPACITIES, dtype, approximate=format)
    rows = [[block] for block in range(3)]
    return passed(cache, rows, LENGTHS, max(LENGTHS), dtype=dtype, seed=5)[1]


def attention_in_numpy(cache, rows, count, q, scoring=PLAIN) -> np.ndarray:
    """Attention of tokens that are in the cache already, over what its codes stand for."""
    keys, values = (numbers(arenas[0]).swapaxes(0, 1) for arenas in (cache.keys, cache.values))
    values = values if values.shape[2] else keys[..., 2 * len(cache.rope.frequencies) :]
    offsets, lengths, phases = (np.asarray(a) for a in (cache.offsets, cache.lengths, cache.phases))
    out = np.full((*q.shape[:3], values.shape[2]), np.nan)
    for r, row in enumerate(rows):
        if not count[r]:
            continue
        start, seen_keys, seen_values = 0, [], []
        for block in row:
            at = slice(offsets[block], offsets[block] + lengths[block])
            further = np.full(lengths[block], start - phases[block])
            seen_keys.append(rotated(keys[at], further, cache.rope))
            seen_values.append(values[at])
            start += lengths[block]
        k, v = np.concatenate(seen_keys), np.concatenate(seen_values)
        for t in range(count[r]):
            position = start - count[r] + t
            query = np.asarray(q[r, t]).astype(np.float64)
            query = rotated(query, np.asarray(position), cache.rope, cache.rope.attention_factor)
            first = max(position + 1 - scoring.window, 0) if scoring.window else 0
            seen = slice(first, position + 1)
            out[r, t] = softmax_attention(query, k[seen], v[seen], q.shape[3] ** -0.5, scoring)
    return out


# create


def test_a_cache_is_exact_unless_it_is_asked_to_approximate():
    exact = KVCache.create(CONFIG, (40,), jnp.bfloat16)
    assert exact.approximate is None and isinstance(exact.keys[0], jax.Array)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_take_a_byte_a_number_and_four_a_scale(format):
    cache = KVCache.create(CONFIG, (40, 3), jnp.bfloat16, approximate=format)
    assert cache.approximate == format
    assert cache.token_bytes == 2 * KV_HEADS * (DIM + 4)
    codes, scales = cache.keys[0].codes, cache.keys[0].scales
    assert codes.shape == (KV_HEADS, 43, DIM) and scales.shape == (KV_HEADS, 43, 1)
    assert codes.dtype == {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}[format]
    assert not numbers(cache.keys[0]).any()


@pytest.mark.parametrize("format", ["int4", "exact", ""])
def test_a_format_that_is_not_known_is_refused(format):
    with pytest.raises(ValueError, match=r"approximate is .*; a cache is exact .* int8 or fp8"):
        KVCache.create(CONFIG, (4,), approximate=format)


# append


@pytest.mark.parametrize("dtype", mostly_slow([jnp.bfloat16, jnp.float32]))
@pytest.mark.parametrize("format", mostly_slow(FORMATS))
def test_what_is_appended_is_within_half_a_step_and_nothing_else_changes(format, dtype):
    cache = filled(format, dtype)
    count, width = [9, 0, 5], 9
    _, after, _, k, v = passed(cache, [[0], [1], [2]], count, width, dtype=dtype)
    written = np.zeros(cache.keys[0].shape[1], bool)
    eps = {jnp.float32: 2.0**-22, jnp.bfloat16: 2.0**-7}[dtype]  # of what is rotated first
    for r, n in enumerate(count):
        at, index = int(cache.offsets[r] + cache.lengths[r]), int(cache.lengths[r]) + np.arange(n)
        run = slice(at, at + n)
        written[run] = True
        keys = rotated(np.asarray(k[r, :n]).astype(np.float64), index, ROPE, ROPE.attention_factor)
        values = np.asarray(v[r, :n]).astype(np.float64)
        for new, arena in ((keys, after.keys[0]), (values, after.values[0])):
            new = new.swapaxes(0, 1)
            most = np.abs(new).max(axis=-1, keepdims=True)
            error = np.abs(numbers(arena)[:, run] - new)
            assert (error <= half_step(arena)[:, run] * (1 + 2**-10) + eps * most).all()
            assert (np.abs(np.asarray(arena.codes[:, run]).astype(np.float32)).max(-1) > 100).all()
    for old, new in zip(bits(cache), bits(after), strict=True):
        np.testing.assert_array_equal(old[:, ~written], new[:, ~written])


@pytest.mark.parametrize("format", mostly_slow(FORMATS))
def test_numbers_that_are_not_finite_and_keys_of_zeros_are_written_as_finite_numbers(format):
    cache = KVCache.create(CONFIG, (4, 4), jnp.float32, approximate=format)
    k = jnp.ones((2, 1, KV_HEADS, DIM)).at[0, 0, 0, 3].set(jnp.nan).at[0, 0, 1, 9].set(jnp.inf)
    k = k.at[1].set(0.0)
    layout, one = Layout.from_blocks([[0], [1]]), jnp.ones(2, jnp.int32)
    q = jnp.ones((2, 1, HEADS, DIM))
    _, cache = one_pass(cache, layout, one, q, k, k, width=1)
    for arena in (cache.keys[0], cache.values[0]):
        assert np.isfinite(numbers(arena)).all()
        assert not numbers(arena)[:, int(cache.offsets[1])].any()
    assert numbers(cache.values[0])[0, 0, 3] == 0
    assert numbers(cache.values[0])[1, 0, 9] > 3e38


# attention


@pytest.mark.parametrize(
    ("implementation", "format", "dtype", "width"),
    mostly_slow(
        [
            (name, format, dtype, width)
            for width in (1, 6)
            for dtype in (jnp.bfloat16, jnp.float32)
            for format in FORMATS
            for name in ("xla", "reference", "cpu")
        ],
        3,
        several=True,
    ),
)
def test_attention_is_that_over_the_numbers_of_the_codes(implementation, format, dtype, width):
    cache = filled(format, dtype)
    # A block that all see, those that two see and write, and one that one alone sees.
    rows, count = [[0, 2, 1], [0, 1, 2], [0, 3]], [width, width, min(width, 2)]
    out, cache, q, *_ = passed(
        cache, rows, count, width, dtype=dtype, seed=1, implementation=implementation
    )
    expected = attention_in_numpy(cache, rows, count, q)
    # Queries, weights and results are rounded to bfloat16; scores reach 4.
    tolerance = {jnp.float32: 1e-5, jnp.bfloat16: 4e-2}[dtype]
    for r, n in enumerate(count):
        np.testing.assert_allclose(out[r, :n], expected[r, :n], atol=tolerance)


@pytest.mark.parametrize("implementation", mostly_slow(["xla", "reference"]))
def test_values_may_be_a_part_of_quantised_keys(implementation):
    config = Latent()
    cache = KVCache.create(config, (64, 64), jnp.float32, approximate="int8")
    assert cache.values[0].shape == (1, 128, 0) and cache.token_bytes == DIM + 4
    rows = [[0, 1]]
    more = {"dtype": jnp.float32, "kv_heads": 1}
    _, cache, *_ = passed(cache, [[0]], [30], 30, **more)
    out, cache, q, *_ = passed(cache, rows, [5], 5, seed=1, implementation=implementation, **more)
    np.testing.assert_allclose(out, attention_in_numpy(cache, rows, [5], q), atol=1e-5)


def test_the_attention_share_is_that_of_the_numbers_of_the_codes():
    cache = filled("int8", jnp.float32)
    exact = dataclasses.replace(
        cache, keys=(on_device(numbers(cache.keys[0]), jnp.float32),), values=cache.values
    )
    layout = Layout.from_blocks([[0, 2, 1]])
    q = on_device(np.random.default_rng(0).normal(size=(1, 1, HEADS, DIM)), jnp.float32)

    @jax.jit
    def share_of(cache):
        plan = make_plan(cache, layout, jnp.ones(1, jnp.int32), 1)
        return block_attention_share(q, cache.keys[0], plan, DIM**-0.5)

    share, expected = share_of(cache), share_of(exact)
    np.testing.assert_allclose(share, expected, atol=1e-6)
    assert abs(float(jnp.sum(share[0, 0, 0])) - 1) < 1e-5


@pytest.mark.parametrize("rows", mostly_slow([4, 1]))
def test_no_copy_of_the_arena_is_made(rows):
    config = dataclasses.replace(CONFIG, head_dim=64, rope=Rope((1.0, 0.1)))
    cache = KVCache.create(config, [16384, *[512] * rows], jnp.bfloat16, approximate="int8")
    layout = Layout.from_blocks([[0, 1 + r] for r in range(rows)])
    q, k, v = (jnp.zeros((rows, 1, n, 64), jnp.bfloat16) for n in (HEADS, KV_HEADS, KV_HEADS))

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache, layout, count, q, k, v):
        plan = make_plan(cache, layout, count, 1)
        cache = cache.append(0, k, v, plan)
        out = block_attention(q, cache.keys[0], cache.values[0], plan, implementation="xla")
        return out, cache.advance(plan)

    compiled = run.lower(cache, layout, jnp.ones(rows, jnp.int32), q, k, v).compile()
    codes = cache.keys[0].codes.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < codes / 2


# moves


@pytest.mark.parametrize("format", mostly_slow([*FORMATS, None]))
def test_a_hundred_moves_add_at_most_half_a_step_each(format):
    """A rotation keeps the length of a difference, so that the errors of a key's moves add up:
    each is at most half a step in each entry."""
    rng, n = np.random.default_rng(0), 60
    cache = KVCache.create(CONFIG, (300, 300), jnp.float32, approximate=format)
    _, cache, _, k, _ = passed(cache, [[0]], [n], n, dtype=jnp.float32)
    regions = np.asarray(cache.offsets)
    original = np.asarray(k[0]).astype(np.float64)  # not rotated
    given = rotated(original, np.arange(n), ROPE, ROPE.attention_factor).swapaxes(0, 1)
    before = numbers(cache.keys[0])[:, :n]
    allowed = np.linalg.norm(before - given, axis=-1)
    values, source = bits(cache)[-2:] if format else bits(cache)[-1:], 0
    offset, phase = 0, 0
    move = jax.jit(KVCache.move)
    for _ in range(100):
        # The block goes after some tokens of a block that starts at some phase.
        shift, target_phase = int(rng.integers(0, 200)), int(rng.integers(0, 3000))
        target = 1 - source
        numbers_of = {
            "offsets": (offset, regions[target]),
            "lengths": (n, shift),
            "capacities": (n, 300),
            "phases": (phase, target_phase),
        }
        order = [source, target]
        cache = dataclasses.replace(
            cache,
            **{
                name: on_device([pair[order.index(b)] for b in (0, 1)], jnp.int32)
                for name, pair in numbers_of.items()
            },
        )
        cache = move(cache, source, target)
        source, offset, phase = target, int(regions[target]) + shift, target_phase + shift
        run = slice(offset, offset + n)
        if format:
            allowed = allowed + np.linalg.norm(half_step(cache.keys[0])[:, run], axis=-1)
    expected = rotated(original, phase + np.arange(n), ROPE, ROPE.attention_factor).swapaxes(0, 1)
    error = np.linalg.norm(numbers(cache.keys[0])[:, run] - expected, axis=-1)
    length = np.linalg.norm(expected, axis=-1)
    if format is None:
        assert (error < 1e-4 * length).all()
        return
    assert (error <= allowed * (1 + 1e-3) + 1e-4 * length).all()
    # Errors of many moves do not add up in one direction: they stay far below that.
    assert np.mean(error / length) < {"int8": 0.05, "fp8": 0.4}[format]
    for old, new in zip(values, bits(cache)[-2:], strict=True):
        np.testing.assert_array_equal(old[:, :n], new[:, run])


@pytest.mark.parametrize("format", mostly_slow(FORMATS))
def test_a_move_that_rotates_nothing_keeps_codes_bit_for_bit(format):
    cache = filled(format, jnp.bfloat16)
    empty = cache.clear(1)
    moved = empty.move(2, 1)
    n, (there, here) = int(cache.lengths[2]), np.asarray(cache.offsets)[1:3]
    for old, new in zip(bits(cache), bits(moved), strict=True):
        np.testing.assert_array_equal(old[:, here : here + n], new[:, there : there + n])
    before = bits(moved)
    relocated = moved.relocate([1], [there + 11], [60 - 11])
    for old, new in zip(before, bits(relocated), strict=True):
        np.testing.assert_array_equal(old[:, there : there + n], new[:, there + 11 :][:, :n])


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_fork_shares_codes(format):
    cache = filled(format, jnp.float32)
    forked = cache.fork(0, 50, 4)
    for old, new in zip(bits(cache), bits(forked), strict=True):
        np.testing.assert_array_equal(old, new)
    q = on_device(np.random.default_rng(0).normal(size=(1, 1, HEADS, DIM)), jnp.float32)
    k = jnp.zeros((1, 1, KV_HEADS, DIM))
    one, outs = jnp.ones(1, jnp.int32), []
    for c, row in ((cache, [0, 1]), (forked, [0, 4, 1])):
        outs.append(one_pass(c, Layout.from_blocks([row]), one, q, k, k, width=1)[0])
    np.testing.assert_allclose(*outs, atol=1e-5)


# files


@pytest.mark.parametrize("format", mostly_slow(FORMATS))
def test_tokens_that_are_read_and_put_elsewhere_are_the_same_bits(format):
    cache = filled(format, jnp.bfloat16)
    runs = [(int(cache.offsets[b]), int(cache.lengths[b])) for b in (2, 0)]
    index = cache_io.token_indices(runs)
    arrays = {}
    for kind in ("keys", "values"):
        for layer, arena in enumerate(getattr(cache, kind)):
            read = cache_io.read(arena, index, None)
            arrays |= cache_io.named_arrays(f"{kind}.{layer}", jax.tree.map(np.asarray, read))
    assert set(arrays) == {f"{k}.0.{a}" for k in ("keys", "values") for a in ("codes", "scales")}
    empty = KVCache.create(CONFIG, (130,), jnp.bfloat16, approximate=format)
    keys, values = (cache_io.from_names(empty, kind, arrays) for kind in ("keys", "values"))
    other = cache_io.token_indices([(0, 130)])
    restored = cache_io.with_tokens(empty, other, keys, values)
    for old, new in zip(bits(cache), bits(restored), strict=True):
        np.testing.assert_array_equal(old[:, index[:130]], new[:, :130])


# meshes


@pytest.mark.parametrize("format", mostly_slow(FORMATS))
def test_a_cache_over_devices_is_the_same_bit_for_bit(format):
    capacities, rows, count = (300, 150), [[0, 1], [1, 0]], [40, 60]
    found = []
    for mesh in (None, make_mesh(tensor=2), make_mesh(kv=2)):
        cache = KVCache.create(CONFIG, capacities, jnp.float32, mesh=mesh, approximate=format)
        specs, rng = cache.specs, np.random.default_rng(0)
        k, v = (on_device(rng.normal(size=(2, 60, KV_HEADS, DIM)), jnp.float32) for _ in "kv")

        def write(cache, layout, count, k, v):
            plan = make_plan(cache, layout, count, 60)
            heads = cache.keys[0].shape[0]
            if heads < KV_HEADS:
                at = jax.lax.axis_index("tensor") * heads
                k, v = (jax.lax.dynamic_slice_in_dim(x, at, heads, axis=2) for x in (k, v))
            return cache.append(0, k, v, plan).advance(plan)

        layout = Layout.from_blocks(rows)
        cache = jax.jit(
            on_each(write, mesh, in_specs=(specs, P(), P(), P(), P()), out_specs=specs)
        )(cache, layout, on_device(count, jnp.int32), k, v)
        moved = cache.move(0, 1)
        index = cache_io.token_indices([(int(moved.offsets[1]), 100)])
        read = cache_io.read(moved.keys[0], index, mesh)
        found.append([np.asarray(leaf).astype(np.float32) for leaf in jax.tree.leaves(read)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a[:, :100], b[:, :100])
