"""Growth of blocks: extents checked by a plain search, and caches with relocated blocks."""

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxshare import KVCache
from jaxshare.serving.workers.growth import Growth, Writer
from tests.helpers import TINY

HISTORY = 0


def filled(capacities: list[int], lengths: list[int], seed: int = 0) -> KVCache:
    """A cache of random keys and values, whose blocks have these lengths."""
    cache = KVCache.create(dataclasses.replace(TINY, num_layers=1), capacities, jnp.float32)
    keys = jax.random.split(jax.random.key(seed), 2)
    arenas = [(jax.random.normal(key, cache.keys[0].shape),) for key in keys]
    return dataclasses.replace(
        cache, keys=arenas[0], values=arenas[1], lengths=jnp.asarray(lengths, jnp.int32)
    )


def held(cache: KVCache) -> list[np.ndarray]:
    """The contents [2K, tokens, D] of each block, read one by one."""
    both = np.concatenate([np.asarray(cache.keys[0]), np.asarray(cache.values[0])])
    return [
        both[:, offset : offset + length]
        for offset, length in zip(cache.offsets.tolist(), cache.lengths.tolist(), strict=True)
    ]


@pytest.mark.parametrize("distance", [-300, -130, -128, -60, -1, 1, 60, 128, 130, 300])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 333])
def test_a_relocated_block_keeps_its_tokens_and_leaves_the_others_alone(distance, length):
    cache = filled([100, 100, 1024], [60, 100, 0])
    cache = cache.place([2], [640], [400])
    cache = dataclasses.replace(
        cache, lengths=cache.lengths.at[2].set(length), phases=cache.phases.at[2].set(7)
    )
    before = held(cache)
    after = cache.relocate([2], [640 + distance], [length + 5])
    for was, now in zip(before, held(after), strict=True):
        np.testing.assert_array_equal(was, now)
    assert (int(after.offsets[2]), int(after.capacities[2]), int(after.phases[2])) == (
        640 + distance,
        length + 5,
        7,
    )


def test_blocks_that_make_way_for_each_other():
    cache = filled([256] * 4, [200, 200, 200, 0])
    before = held(cache)
    # The second goes to where the third has its first tokens, so the third goes first.
    after = cache.relocate([1, 2, 3], [400, 620, 830], [210, 205, 150])
    for was, now in zip(before, held(after), strict=True):
        np.testing.assert_array_equal(was, now)
    again = filled([256] * 4, [200, 200, 200, 0])
    with pytest.raises(
        ValueError, match=r"blocks \[0, 1\] would overwrite each other, whichever is moved first"
    ):
        again.relocate([0, 1], [256, 0], [256, 256])
    with pytest.raises(
        ValueError, match="block 0 has 200 tokens, but its new extent has a capacity of 199"
    ):
        again.relocate([0], [0], [199])
    with pytest.raises(ValueError, match="blocks 2 and 3 would overlap"):
        again.relocate([3], [760], [100])
    with pytest.raises(
        ValueError, match="block 3 would take tokens 900 to 1100, but the arena has 1024 tokens"
    ):
        again.relocate([3], [900], [200])


def plain_check(growth: Growth, offsets, capacities, lengths, writers: list[Writer]) -> None:
    """Extents are apart and hold their tokens.

    All blocks but those of the writers and of the history are where they were.
    """
    runs = sorted((int(o), int(o + c)) for o, c in zip(offsets, capacities, strict=True) if c)
    assert all(low[1] <= high[0] for low, high in itertools.pairwise(runs))
    assert (lengths <= capacities).all() and (capacities >= 0).all()
    moved = {HISTORY, *(w.block for w in writers)}
    for block in set(range(len(offsets))) - moved:
        assert (offsets[block], capacities[block]) == (
            growth.offsets[block],
            growth.capacities[block],
        )
    assert offsets[HISTORY] == growth.offsets[HISTORY]


@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([0, 1000]))
def test_steps_of_any_length_have_room_until_the_history_is_used_up(seed, workers, shift):
    """A simulation: steps grow by up to 16 tokens at a time, end now and then, and move.

    The expected free capacity is computed by addition.
    """
    rng = random.Random(seed)
    history, home = rng.choice([700, 2048, 5000]), rng.choice([24, 100, 512])
    sizes = np.asarray([history, 64, *[home] * workers])
    offsets = np.asarray([0, *np.cumsum(sizes)[:-1]])
    growth = Growth(offsets, sizes)
    offsets, capacities, lengths = offsets + shift, sizes.copy(), np.zeros_like(sizes)
    lengths[HISTORY] = 50
    ends = rng.choice([0.0, 0.02, 0.2])
    for _ in range(400):
        writers = [Writer(2 + w, HISTORY, 17, 10**6) for w in range(workers)]
        for block, (offset, capacity) in growth.extents(
            writers, offsets, capacities, lengths
        ).items():
            offsets[block], capacities[block] = offset, capacity
        plain_check(
            dataclasses.replace(growth, offsets=growth.offsets + shift),
            offsets,
            capacities,
            lengths,
            writers,
        )
        used = int(
            lengths[HISTORY] + sum(lengths[w.block] for w in writers if capacities[w.block] != home)
        )
        if history - used < 17 * workers + home * workers:
            return  # the history is used up: what happens to be left is shared out
        for w in writers:
            new = rng.randint(0, 16)
            assert capacities[w.block] - lengths[w.block] >= new, (
                history,
                home,
                lengths,
                capacities,
            )
            lengths[w.block] += new
        for w in writers:
            if rng.random() < ends and lengths[HISTORY] + lengths[w.block] <= capacities[HISTORY]:
                lengths[HISTORY] += lengths[w.block]
                lengths[w.block] = 0


def test_a_step_that_no_row_may_see_grow_stays_within_what_the_others_can_see():
    growth = Growth(np.asarray([0, 1000]), np.asarray([1000, 100]))
    found = growth.extents(
        [Writer(1, 0, 17, 120)], growth.offsets, growth.capacities, np.asarray([10, 90])
    )
    assert found[1][1] >= 107
    capped = growth.extents(
        [Writer(1, 0, 17, 100)], growth.offsets, growth.capacities, np.asarray([10, 90])
    )
    assert capped == {}
