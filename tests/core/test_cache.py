"""Cache transitions: what they move, what they leave alone bit for bit, and every refusal."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare import KVCache, Layout, Rope, make_plan
from jaxshare.cache import Fault
from tests.helpers import TINY, cache_with, mostly_slow, on_device, one_layer, rotated

YARN = Rope.yarn(8, 10_000.0, 8.0, 512)
KV_HEADS, DIM = 2, 12  # partial rotary: 8 of 12


def numbers(cache: KVCache) -> list[list[int]]:
    return [
        np.asarray(a).tolist()
        for a in (cache.offsets, cache.lengths, cache.capacities, cache.phases)
    ]


def arenas(cache: KVCache) -> list[np.ndarray]:
    return [np.array(a, np.float32) for a in (*cache.keys, *cache.values)]


def raw(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(size=(n, KV_HEADS, DIM))


@functools.cache
def jitted(name: str):
    return jax.jit(getattr(KVCache, name))


# create


def test_create_lays_the_blocks_end_to_end():
    cache = KVCache.create(TINY, (40, 0, 3), jnp.bfloat16)
    assert numbers(cache) == [[0, 40, 40], [0, 0, 0], [40, 0, 3], [0, 0, 0]]
    assert len(cache.keys) == len(cache.values) == TINY.num_layers
    assert all(
        a.shape == (TINY.num_kv_heads, 43, TINY.head_dim) and a.dtype == jnp.bfloat16
        for a in (*cache.keys, *cache.values)
    )
    assert cache.num_blocks == 3 and cache.rope == TINY.rope and int(cache.faults) == 0
    assert cache.token_bytes == 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 2
    assert KVCache.create(TINY, (1,), jnp.float32).token_bytes == 2 * cache.token_bytes
    cache.check()


@settings(max_examples=40)
@given(st.lists(st.sampled_from([0, 1, 7, 127, 128, 129, 300]), min_size=1, max_size=8))
def test_blocks_do_not_overlap_and_waste_little(capacities):
    config = dataclasses.replace(TINY, num_layers=1, num_kv_heads=1, head_dim=2)
    cache = KVCache.create(config, capacities)
    offsets = np.asarray(cache.offsets)
    ends = offsets + capacities
    assert offsets[0] == 0 and (offsets[1:] >= ends[:-1]).all()
    last = 512 if ends[-1] >= 2048 else 128
    assert (
        ends[-1]
        <= cache.keys[0].shape[1]
        <= sum(capacities) + 128 * sum(c >= 128 for c in capacities) + last
    )
    assert cache.keys[0].shape == cache.values[0].shape and cache.keys[0].shape[1] >= 1


def test_the_default_dtype_is_bfloat16():
    assert KVCache.create(TINY, [4]).keys[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("capacities", "words"),
    [
        ((), "at least one block"),
        (5, "at least one block"),
        ((4, -2, -3), "capacity of block 1 is -"),
        ((2**30, 2**30), "2147483648 tokens in all"),
    ],
)
def test_create_refuses(capacities, words):
    with pytest.raises(ValueError, match=words):
        KVCache.create(TINY, capacities)


def test_create_names_the_config_where_it_is_given_a_model():
    with pytest.raises(TypeError, match=r"config is a LoadedModel, .*; give model\.config"):
        KVCache.create(one_layer(), (4, 8))
    with pytest.raises(TypeError, match=r"config is a dict, not a model.s config$"):
        KVCache.create({}, (4, 8))


def test_a_refused_capacity_is_the_one_named():
    with pytest.raises(ValueError, match="capacity of block 1 is -2;"):
        KVCache.create(TINY, (4, -2, -3))


def test_a_cache_is_a_frozen_pytree():
    cache = KVCache.create(TINY, (4, 4))
    for field in dataclasses.fields(cache):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(cache, field.name, None)
    leaves, tree = jax.tree.flatten(cache)
    assert (
        all(isinstance(leaf, jax.Array) for leaf in leaves)
        and len(leaves) == 2 * TINY.num_layers + 5
    )
    assert jax.tree.unflatten(tree, leaves).rope == TINY.rope


# empty


def test_an_empty_cache_has_nothing_but_free_slots():
    cache = KVCache.empty(TINY, 43, 3, jnp.float32)
    assert (
        numbers(cache) == [[0, 0, 0]] * 4
        and cache.num_blocks == 3
        and cache.rope == TINY.rope
        and int(cache.faults) == 0
    )
    assert len(cache.keys) == len(cache.values) == TINY.num_layers
    assert all(
        a.shape == (TINY.num_kv_heads, 43, TINY.head_dim) and a.dtype == jnp.float32
        for a in (*cache.keys, *cache.values)
    )
    assert KVCache.empty(TINY, 1, 1).keys[0].dtype == jnp.bfloat16
    cache.check()


@pytest.mark.parametrize(
    ("tokens", "blocks", "words"),
    [
        (0, 3, "at least 1 token and 1 block; got 0 and 3"),
        (5, 0, "got 5 and 0"),
        (-1, 1, "got -1 and 1"),
        (2**31, 1, "the blocks hold 2147483648 tokens in all"),
    ],
)
def test_empty_refuses(tokens, blocks, words):
    with pytest.raises(ValueError, match=words):
        KVCache.empty(TINY, tokens, blocks)


# append

CAPACITIES, ARENA = (50, 30, 4, 0, 60), 144
LENGTHS = (10, 0, 1, 0, 60)


def filled(
    lengths,
    capacities=CAPACITIES,
    *,
    rope=YARN,
    phases=None,
    gap=0,
    dtype=jnp.float32,
    seed=0,
    tokens=ARENA,
):
    """(cache, keys of each block, values of each block), blocks end to end, keys not rotated."""
    rng = np.random.default_rng(seed)
    keys, values = ([raw(rng, n) for n in lengths] for _ in range(2))
    offsets = np.cumsum(capacities) - np.asarray(capacities) + gap
    phases = [0] * len(lengths) if phases is None else phases
    cache = cache_with(
        keys,
        values,
        rope=rope,
        offsets=offsets,
        capacities=capacities,
        tokens=tokens,
        phases=phases,
        dtype=dtype,
    )
    return cache, keys, values


@functools.partial(jax.jit, static_argnames="width")
def appended(cache, layout, count, k, v, width):
    plan = make_plan(cache, layout, count, width)
    return cache.append(0, k, v, plan).advance(plan)


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    mostly_slow(
        [
            (12, 40, jnp.float32),
            (3, 200, jnp.bfloat16),  # more tokens than the arena has
            (3, 1, jnp.bfloat16),
            (12, 1, jnp.float32),
            (3, 40, jnp.float32),
            (3, 1, jnp.float32),
            (3, 200, jnp.float32),
            (12, 1, jnp.bfloat16),
            (3, 40, jnp.bfloat16),
            (12, 40, jnp.bfloat16),
        ],
        4,
        several=True,
    ),
)
def test_append_rotates_to_the_index_in_the_block_and_touches_nothing_else(rows, width, dtype):
    cache, _, _ = filled(LENGTHS, phases=(0, 7, 100, 0, 0), dtype=dtype)
    layout = Layout.from_blocks([[4, 0], [0, 1], [2]], num_rows=rows)
    room = [40, 30, 3]
    for count in ([1, 1, 1], [0, 1, 0], [40, 30, 3], [5, 0, 2]):
        count = [min(c, width) for c in count] + [0] * (rows - 3)
        rng = np.random.default_rng(width)
        k, v = (rng.normal(size=(rows, width, KV_HEADS, DIM)) for _ in range(2))
        after = appended(
            cache,
            layout,
            on_device(count, jnp.int32),
            on_device(k, dtype),
            on_device(v, dtype),
            width,
        )
        expected = arenas(cache)
        for r, block in enumerate([0, 1, 2]):
            assert count[r] <= room[r]
            at, index = (
                int(cache.offsets[block]) + LENGTHS[block],
                LENGTHS[block] + np.arange(count[r]),
            )
            given = np.asarray(on_device(k[r, : count[r]], dtype), np.float64)
            expected_keys = rotated(
                given, index + int(cache.phases[block]), YARN, YARN.attention_factor
            )
            expected[0][:, at : at + count[r]] = expected_keys.swapaxes(0, 1)
            expected[1][:, at : at + count[r]] = np.asarray(
                on_device(v[r, : count[r]], dtype), np.float32
            ).swapaxes(0, 1)
        written = np.zeros(ARENA, bool)
        for r, block in enumerate([0, 1, 2]):
            written[int(cache.offsets[block]) + LENGTHS[block] :][: count[r]] = True
        keys, values = arenas(after)
        np.testing.assert_array_equal(values, expected[1])
        np.testing.assert_array_equal(keys[:, ~written], expected[0][:, ~written])
        tolerance = {jnp.float32: 3e-6, jnp.bfloat16: 2**-8}[dtype]
        np.testing.assert_allclose(
            keys[:, written], expected[0][:, written], rtol=tolerance, atol=tolerance
        )
        assert np.asarray(after.lengths).tolist() == [
            LENGTHS[0] + count[0],
            count[1],
            LENGTHS[2] + count[2],
            0,
            60,
        ]
        assert (
            numbers(after)[0] == numbers(cache)[0]
            and numbers(after)[2:] == numbers(cache)[2:]
            and int(after.faults) == 0
        )


def test_append_beyond_the_capacity_keeps_what_fits_and_sets_a_fault():
    cache, _, _ = filled(LENGTHS)
    layout = Layout.from_blocks([[4, 0], [0, 1], [2]], num_rows=3)
    rng = np.random.default_rng(0)
    k, v = (on_device(rng.normal(size=(3, 40, KV_HEADS, DIM)), jnp.float32) for _ in range(2))
    after = appended(cache, layout, on_device([2, 3, 9], jnp.int32), k, v, 40)
    assert np.asarray(after.lengths).tolist() == [12, 3, 4, 0, 60]
    assert Fault(int(after.faults)) == Fault.OVERFLOW
    # block 4, right after the full one
    np.testing.assert_array_equal(arenas(after)[1][:, 84:], arenas(cache)[1][:, 84:])
    np.testing.assert_array_equal(arenas(after)[0][:, 84:], arenas(cache)[0][:, 84:])
    with pytest.raises(ValueError, match="a block was written beyond its capacity"):
        after.check()
    # Sticky: a pass without fault does not wash it off.
    again = appended(after, layout, on_device([1, 0, 0], jnp.int32), k, v, 40)
    assert Fault(int(again.faults)) == Fault.OVERFLOW


@pytest.mark.parametrize(
    ("rows", "fault", "words"),
    [
        (
            [[0, 1], [9, 2]],
            Fault.UNKNOWN_BLOCK,
            "a row listed a block that the cache does not have",
        ),
        ([[0, 0], [2, 1]], Fault.REPEATED_BLOCK, "a row listed the same block twice"),
        ([[0, 1], [2, 1]], Fault.TWO_WRITERS, "two rows wrote the same block in one pass"),
        ([[1, 1], [2, 1]], Fault.REPEATED_BLOCK | Fault.TWO_WRITERS, "twice; two rows wrote"),
    ],
)
def test_a_layout_that_cannot_be_sets_a_fault_inside_jit(rows, fault, words):
    cache, _, _ = filled(LENGTHS)
    layout = Layout(on_device(rows, jnp.int32))
    k = jnp.zeros((2, 1, KV_HEADS, DIM))
    after = appended(cache, layout, on_device([1, 1], jnp.int32), k, k, 1)
    assert Fault(int(after.faults)) == fault
    with pytest.raises(ValueError, match="the cache is not usable any more.*" + words):
        after.check()


def test_every_fault_has_a_sentence():
    for fault in Fault:
        assert len(fault.describe()) > 20
    assert Fault(0).describe() == ""
    everything = functools.reduce(lambda a, b: a | b, Fault)
    assert everything.describe().count(";") >= len(Fault) - 1


# move


def moved_as_expected(cache, keys, values, source, target, after, phases, tolerance=2e-5):
    """Keys of the target equal a direct rotation of all its tokens; nothing else changed, bit for
    bit."""
    at, n, m = int(cache.offsets[target]), len(keys[target]), len(keys[source])
    before, now = arenas(cache), arenas(after)
    index = phases[target] + np.arange(n, n + m)
    expected = rotated(keys[source], index, cache.rope, cache.rope.attention_factor).swapaxes(0, 1)
    np.testing.assert_allclose(
        now[0][:, at + n : at + n + m], expected, rtol=tolerance, atol=tolerance
    )
    np.testing.assert_array_equal(
        now[1][:, at + n : at + n + m], values[source].swapaxes(0, 1).astype(now[1].dtype)
    )
    untouched = np.ones(now[0].shape[1], bool)
    untouched[at + n : at + n + m] = False
    for old, new in zip(before, now, strict=True):
        np.testing.assert_array_equal(new[:, untouched], old[:, untouched])
    lengths = [len(k) for k in keys]
    lengths[source], lengths[target] = 0, n + m
    assert np.asarray(after.lengths).tolist() == lengths
    assert (
        numbers(after)[0] == numbers(cache)[0]
        and numbers(after)[2:] == numbers(cache)[2:]
        and int(after.faults) == 0
    )


MOVE_CAPACITIES, MOVE_ARENA = (430, 300, 430), 1170


@pytest.mark.parametrize("moved", [0, 1, 127, 128, 129, 256, 300])
@pytest.mark.parametrize(("source", "target"), [(1, 0), (1, 2)])
def test_move_equals_encoding_at_the_new_place(moved, source, target):
    # The extents touch; a target filled to the last token ends right where the next block, or the
    # arena, starts or ends.
    for kept, gap in ((0, 0), (17, 0), (130, 10)):
        lengths = [kept, moved, kept]
        if kept == 130 and moved == 300:
            assert lengths[target] + moved == MOVE_CAPACITIES[target]
        phases = [0, 0, 0]
        cache, keys, values = filled(
            lengths, MOVE_CAPACITIES, gap=gap, tokens=MOVE_ARENA, seed=moved + kept
        )
        after = jitted("move")(cache, jnp.int32(source), jnp.int32(target))
        moved_as_expected(cache, keys, values, source, target, after, phases)


@settings(max_examples=25)
@given(st.permutations(range(5)), st.data())
def test_move_between_any_extents_and_phases(order, data):
    capacities = [data.draw(st.integers(0, 240)) for _ in range(5)]
    lengths = [data.draw(st.integers(0, c)) for c in capacities]
    phases = [data.draw(st.sampled_from([0, 1, 50, 5000])) for _ in range(5)]
    source, target = data.draw(st.permutations(range(5)))[:2]
    lengths[target] = min(lengths[target], max(capacities[target] - lengths[source], 0))
    lengths[source] = min(lengths[source], capacities[target] - lengths[target])
    rng = np.random.default_rng(sum(lengths))
    keys, values = ([raw(rng, n) for n in lengths] for _ in range(2))
    offsets, at = [0] * 5, 0
    for block in order:
        offsets[block], at = at, at + capacities[block]
    cache = cache_with(
        keys, values, rope=YARN, offsets=offsets, capacities=capacities, tokens=1200, phases=phases
    )
    after = jitted("move")(cache, jnp.int32(source), jnp.int32(target))
    moved_as_expected(cache, keys, values, source, target, after, phases)


def test_move_outside_jit_gives_the_same():
    cache, keys, values = filled([20, 30, 0], MOVE_CAPACITIES, tokens=MOVE_ARENA)
    moved_as_expected(cache, keys, values, 1, 0, cache.move(1, 0), [0, 0, 0])
    # source and target by name, as in the design
    moved_as_expected(cache, keys, values, 1, 0, cache.move(source=1, target=0), [0, 0, 0])


def test_move_in_bfloat16():
    cache, keys, _ = filled([20, 200, 0], MOVE_CAPACITIES, tokens=MOVE_ARENA, dtype=jnp.bfloat16)
    after = jitted("move")(cache, jnp.int32(1), jnp.int32(0))
    expected = rotated(keys[1], np.arange(20, 220), YARN, YARN.attention_factor).swapaxes(0, 1)
    np.testing.assert_allclose(arenas(after)[0][:, 20:220], expected, rtol=2**-7, atol=2**-6)
    np.testing.assert_array_equal(arenas(after)[1][:, 20:220], arenas(cache)[1][:, 430:630])


def test_many_moves_do_not_drift():
    """A step of 30 tokens moved 13 times from block to block and never scaled again: still the
    direct rotation."""
    cache, keys, _ = filled([40, 30, 0], MOVE_CAPACITIES, tokens=MOVE_ARENA)
    for target, source in [(2, 1), (1, 2)] * 6 + [(0, 1)]:
        cache = jitted("move")(cache, jnp.int32(source), jnp.int32(target))
    expected = rotated(keys[1], np.arange(40, 70), YARN, YARN.attention_factor).swapaxes(0, 1)
    np.testing.assert_allclose(arenas(cache)[0][:, 40:70], expected, atol=2e-5)
    assert np.asarray(cache.lengths).tolist() == [70, 0, 0]


def test_a_move_of_all_layers():
    cache = KVCache.create(TINY, (16, 16), jnp.float32)
    rng = np.random.default_rng(0)
    cache = dataclasses.replace(
        cache,
        lengths=on_device([3, 5], jnp.int32),
        keys=tuple(on_device(rng.normal(size=a.shape), jnp.float32) for a in cache.keys),
        values=tuple(on_device(rng.normal(size=a.shape), jnp.float32) for a in cache.values),
    )
    after = cache.move(1, 0)
    for layer in range(TINY.num_layers):
        old = np.asarray(cache.keys[layer])[:, 16:21].swapaxes(0, 1)
        np.testing.assert_allclose(
            np.asarray(after.keys[layer])[:, 3:8].swapaxes(0, 1),
            rotated(old, np.full(5, 3), TINY.rope),
            atol=3e-6,
        )
        np.testing.assert_array_equal(after.values[layer][:, 3:8], cache.values[layer][:, 16:21])


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (1, 1, "block 1 cannot be moved onto itself"),
        (3, 0, "source is 3, but the cache has blocks 0 to 2"),
        (0, -1, "target is -1, but the cache has blocks 0 to 2"),
        (0, 1, "block 0 has 5 tokens, but block 1 has room for 4 more"),
    ],
)
def test_move_refuses(source, target, words):
    cache, _, _ = filled([5, 6, 0], (10, 10, 10), tokens=30)
    with pytest.raises(ValueError, match=words):
        cache.move(source, target)


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 1)])
def test_a_move_that_cannot_be_changes_nothing_inside_jit_but_sets_a_fault(source, target):
    cache, _, _ = filled([5, 6, 0], (10, 10, 10), tokens=30)
    after = jitted("move")(cache, jnp.int32(source), jnp.int32(target))
    assert numbers(after) == numbers(cache)
    for old, new in zip(arenas(cache), arenas(after), strict=True):
        np.testing.assert_array_equal(old, new)
    with pytest.raises(ValueError, match="not usable any more"):
        after.check()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("move", (7, 1)),
        ("move", (0, 7)),
        ("move", (-1, 1)),
        ("move", (0, -2)),
        ("fork", (7, 0, 2)),
        ("fork", (0, 2, 7)),
        ("clear", (7,)),
        ("clear", (-1,)),
    ],
)
def test_an_unknown_block_inside_jit_changes_nothing_but_sets_a_fault(name, arguments):
    cache, _, _ = filled([5, 6, 0], (10, 20, 0), tokens=30)
    after = jitted(name)(cache, *map(jnp.int32, arguments))
    assert numbers(after) == numbers(cache)
    assert int(after.faults) != 0


# fork and clear


def test_fork_copies_nothing():
    cache, _, _ = filled([20, 30, 0], (50, 40, 0), tokens=100)
    after = cache.fork(0, 12, 2)
    assert numbers(after) == [[0, 50, 12], [12, 30, 8], [12, 40, 38], [0, 0, 12]]
    for old, new in zip((*cache.keys, *cache.values), (*after.keys, *after.values), strict=True):
        assert new is old
    traced = jitted("fork")(cache, jnp.int32(0), jnp.int32(12), jnp.int32(2))
    assert numbers(traced) == numbers(after)
    for old, new in zip(arenas(cache), arenas(traced), strict=True):
        np.testing.assert_array_equal(new, old)
    assert numbers(cache)[1] == [20, 30, 0]


def test_a_fork_of_a_fork_and_its_ends():
    cache, _, _ = filled([20, 0, 0, 0], (50, 0, 0, 0), tokens=50)
    cache = cache.fork(0, 12, 1).fork(1, 5, 2)
    assert numbers(cache) == [[0, 12, 17, 50], [12, 5, 3, 0], [12, 5, 33, 0], [0, 12, 17, 0]]
    assert numbers(cache.fork(2, 0, 3)) == [
        [0, 12, 17, 17],
        [12, 5, 0, 3],
        [12, 5, 0, 33],
        [0, 12, 17, 17],
    ]
    assert numbers(cache.fork(2, 3, 3)) == [
        [0, 12, 17, 20],
        [12, 5, 3, 0],
        [12, 5, 3, 30],
        [0, 12, 17, 20],
    ]


@pytest.mark.parametrize(
    ("block", "at", "tail", "words"),
    [
        (3, 0, 2, "block is 3, but the cache has blocks 0 to 2"),
        (0, 0, 5, "tail is 5, but"),
        (0, 21, 2, "block 0 has 20 tokens; it cannot be cut at 21"),
        (0, -1, 2, "it cannot be cut at -1"),
        (0, 12, 1, "block 1 owns 40 tokens of the cache and cannot become a tail"),
    ],
)
def test_fork_refuses(block, at, tail, words):
    cache, _, _ = filled([20, 30, 0], (50, 40, 0), tokens=100)
    with pytest.raises(ValueError, match=words):
        cache.fork(block, at, tail)


@pytest.mark.parametrize(("at", "tail"), [(21, 2), (-1, 2), (12, 1)])
def test_a_fork_that_cannot_be_sets_a_fault_inside_jit(at, tail):
    cache, _, _ = filled([20, 30, 0], (50, 40, 0), tokens=100)
    after = jitted("fork")(cache, jnp.int32(0), jnp.int32(at), jnp.int32(tail))
    assert int(after.faults) != 0
    assert numbers(after) == numbers(cache)


def test_clear_empties_one_block():
    cache, _, _ = filled([20, 30, 4], (50, 40, 10), tokens=100, phases=(0, 9, 3))
    after = cache.clear(1)
    assert numbers(after) == [[0, 50, 90], [20, 0, 4], [50, 40, 10], [0, 0, 3]]
    assert numbers(jitted("clear")(cache, jnp.int32(1))) == numbers(after)
    assert all(
        new is old
        for old, new in zip((*cache.keys, *cache.values), (*after.keys, *after.values), strict=True)
    )
    with pytest.raises(ValueError, match="block is 3, but the cache has blocks 0 to 2"):
        cache.clear(3)


# place

PLACED_ARENA = 24


def placeable() -> KVCache:
    """Two blocks that touch, a free slot in the middle of one, and one at the arena's end."""
    cache, _, _ = filled((3, 5, 0, 2), (8, 5, 0, 4), tokens=PLACED_ARENA)
    return dataclasses.replace(
        cache,
        offsets=on_device([0, 8, 4, 20], jnp.int32),
        phases=on_device([0, 7, 0, 9], jnp.int32),
    )


def placed(state: list[list[int]], requests: list[tuple[int, int, int]]) -> list[list[int]] | None:
    """The offsets, lengths, capacities and phases that `place` should return, or None where it
    should raise."""
    state = [[*column] for column in state]
    offsets, _, capacities, _ = state
    for block, at, size in requests:
        if (
            not 0 <= block < len(offsets)
            or [b for b, _, _ in requests].count(block) > 1
            or at < 0
            or size < 0
            or at + size > PLACED_ARENA
        ):
            return None
        for column, value in zip(state, (at, 0, size, 0), strict=True):
            column[block] = value
    tokens = [t for at, size in zip(offsets, capacities, strict=True) for t in range(at, at + size)]
    return state if len(tokens) == len(set(tokens)) else None


REQUEST = st.tuples(
    st.integers(0, 3),
    st.sampled_from([0, 4, 8, 12, 13, 16, 20, 23, 24]),
    st.sampled_from([0, 0, 1, 4, 4, 5, 8]),
)
WRONG = st.tuples(
    st.integers(-1, 4), st.integers(-1, PLACED_ARENA + 1), st.integers(-1, PLACED_ARENA + 1)
)


@settings(max_examples=150)
@given(
    st.lists(
        st.lists(st.one_of(REQUEST, REQUEST, REQUEST, WRONG), max_size=4), min_size=1, max_size=5
    )
)
def test_place_against_a_list_of_tokens(calls):
    """Blocks that are placed are empty, others keep everything, and keys and values do not
    change."""
    cache = placeable()
    for requests in calls:
        before, expected = numbers(cache), placed(numbers(cache), requests)
        blocks, offsets, sizes = (
            ([*column] for column in zip(*requests, strict=True)) if requests else ([], [], [])
        )
        if expected is None:
            with pytest.raises(ValueError):
                cache.place(blocks, offsets, sizes)
            assert numbers(cache) == before
            continue
        after = cache.place(blocks, offsets, sizes)
        assert numbers(after) == expected and numbers(cache) == before and after.rope == cache.rope
        assert all(
            new is old
            for old, new in zip(
                (*cache.keys, *cache.values), (*after.keys, *after.values), strict=True
            )
        )
        assert all(
            a.dtype == jnp.int32
            for a in (after.offsets, after.lengths, after.capacities, after.phases)
        )
        # As passes and forks would leave it, so that the next call has something to empty.
        cache = dataclasses.replace(
            after, lengths=after.capacities, phases=jnp.arange(4, dtype=jnp.int32)
        )


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        # between two others, touching both
        ([(2, 13, 7)], [[0, 8, 13, 20], [3, 5, 0, 2], [8, 5, 7, 4], [0, 7, 0, 9]]),
        (
            [(1, 0, 0)],
            [[0, 0, 4, 20], [3, 0, 0, 2], [8, 0, 0, 4], [0, 0, 0, 9]],
        ),  # a free slot again
        # two change places
        ([(0, 8, 5), (1, 0, 8)], [[8, 0, 4, 20], [0, 0, 0, 2], [5, 8, 0, 4], [0, 0, 0, 9]]),
        ([(2, 24, 0)], [[0, 8, 24, 20], [3, 5, 0, 2], [8, 5, 0, 4], [0, 7, 0, 9]]),
        ([], [[0, 8, 4, 20], [3, 5, 0, 2], [8, 5, 0, 4], [0, 7, 0, 9]]),
    ],
)
def test_place_by_hand(requests, expected):
    blocks, offsets, sizes = (
        ([*column] for column in zip(*requests, strict=True)) if requests else ([], [], [])
    )
    assert numbers(placeable().place(blocks, offsets, sizes)) == expected


def test_a_block_placed_where_it_lay_has_its_tokens_again_once_it_has_its_length():
    cache = placeable()
    after = cache.place([1], [8], [5])
    assert numbers(after)[1] == [3, 0, 0, 2]
    again = dataclasses.replace(after, lengths=cache.lengths, phases=cache.phases)
    for old, new in zip(arenas(cache.move(1, 0)), arenas(again.move(1, 0)), strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_fault_stays_when_blocks_are_placed():
    faulty = dataclasses.replace(placeable(), faults=jnp.int32(Fault.OVERFLOW.value))
    with pytest.raises(ValueError, match="not usable any more"):
        faulty.place([0], [0], [8]).check()


@pytest.mark.parametrize(
    ("blocks", "offsets", "sizes", "words"),
    [
        ([0, 2, 0], [0, 13, 0], [8, 1, 8], r"blocks must name each block once; got \[0, 2, 0\]"),
        ([0, 4], [0, 13], [8, 1], r"blocks\[1\] is 4, but the cache has blocks 0 to 3"),
        ([-1], [0], [0], r"blocks\[0\] is -1"),
        ([2], [23], [2], "block 2 would take tokens 23 to 25, but the arena has 24 tokens"),
        ([2], [-1], [3], "block 2 would take tokens -1 to 2"),
        ([2], [13], [-3], "block 2 would take tokens 13 to 10"),
        ([2], [25], [0], "block 2 would take tokens 25 to 25"),
        ([2], [15], [6], "blocks 2 and 3 would overlap, at 15 to 21 and from 20"),
        # inside another block
        ([2], [7], [1], "blocks 0 and 2 would overlap, at 0 to 8 and from 7"),
        ([0, 2], [13, 13], [4, 4], "blocks 0 and 2 would overlap"),
    ],
)
def test_place_refuses(blocks, offsets, sizes, words):
    with pytest.raises(ValueError, match=words):
        placeable().place(blocks, offsets, sizes)
