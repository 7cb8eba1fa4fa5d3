"""The arena against a map of the owners of its tokens, one by one."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxshare.models import Generation, LoadedModel
from jaxshare.serving.branches.arena import Arena, footprints
from jaxshare.serving.kvcache.pool import whole_tiles
from tests.helpers import TINY, tiny_params

MODEL = LoadedModel(dataclasses.replace(TINY, num_layers=1), tiny_params(), None, Generation())
TILE = 128
TOKENS, SLOTS = 1024, 6
SIZES = (1, 5, 100, 127, 128, 129, 200, 256, 300, 512)


class Map:
    """The block of each token of the arena, or -1."""

    def __init__(self, tokens: int, slots: int):
        self.owners, self.slots = np.full(tokens, -1), slots

    def offsets(self, capacity: int) -> list[int]:
        """The possible offsets of a block.

        Its tokens are free, and it starts on a tile if it is as large as one.
        """
        return [
            offset
            for offset in range(0, len(self.owners) - capacity + 1, TILE if capacity >= TILE else 1)
            if (self.owners[offset : offset + capacity] == -1).all()
        ]

    def extents(self) -> list[tuple[int, int]]:
        """The (offset, capacity) of every slot."""
        found = [np.flatnonzero(self.owners == block) for block in range(self.slots)]
        assert all((np.diff(tokens) == 1).all() for tokens in found)
        return [(int(tokens[0]), len(tokens)) if len(tokens) else (0, 0) for tokens in found]


def settled(arena: Arena) -> list[tuple[int, int]]:
    cache = arena.settle()
    extents = [
        *zip(np.asarray(cache.offsets).tolist(), np.asarray(cache.capacities).tolist(), strict=True)
    ]
    # the offset of a free slot means nothing
    return [(offset, size) if size else (0, 0) for offset, size in extents]


TAKE = st.tuples(st.just("take"), st.sampled_from(SIZES), st.booleans())
GIVE = st.tuples(st.just("give"), st.integers(0, SLOTS - 1), st.none())
SETTLE = st.tuples(st.just("settle"), st.none(), st.none())


@settings(max_examples=100)
@given(st.lists(st.one_of(TAKE, TAKE, GIVE, SETTLE), max_size=40))
@example([("take", 1, False)] * 7)  # slots run out long before tokens do
@example(
    [
        ("take", 1, False),
        ("take", 512, False),
        ("take", 512, False),
        ("give", 0, None),
        ("take", 512, False),
    ]
)
def test_what_is_taken_and_given_back_is_what_the_cache_has(actions):
    """Low blocks are as low as possible and high ones as high.

    So a free run that was not merged, or was lost, shows.
    """
    arena, expected = Arena(MODEL, TOKENS, SLOTS), Map(TOKENS, SLOTS)
    held: list[int] = []
    written = np.zeros(SLOTS, int)  # tokens in each block, as passes would leave them

    def check():
        nonlocal written
        arena.cache = arena.settle()
        # old blocks stay, new ones are empty
        np.testing.assert_array_equal(arena.cache.lengths, written)
        assert settled(arena) == expected.extents()
        written = np.asarray(arena.cache.capacities)
        arena.cache = dataclasses.replace(arena.cache, lengths=jnp.asarray(written, jnp.int32))

    for action, value, high in actions:
        if action == "take":
            block, offsets = arena.take(value, high=high), expected.offsets(value)
            if not offsets or len(held) == SLOTS:
                assert block is None
            else:
                assert block is not None and 0 <= block < SLOTS and block not in held
                offset = max(offsets) if high else min(offsets)
                expected.owners[offset : offset + value] = block
                held.append(block)
                written = np.where(np.arange(SLOTS) == block, 0, written)
        elif action == "give" and held:
            block = held.pop(value % len(held))
            arena.give_back(block)
            expected.owners[expected.owners == block] = -1
            written = np.where(np.arange(SLOTS) == block, 0, written)
        elif action == "settle":
            check()
        assert arena.free == (expected.owners == -1).sum()
    check()
    for block in held:
        arena.give_back(block)
    assert arena.free == TOKENS and arena.take(TOKENS) is not None


def test_low_and_high_blocks_are_kept_apart():
    """Prompts are below, rows above.

    The tokens of ended rows are one free run again, whatever the order in which rows end.
    """
    arena = Arena(MODEL, TOKENS, 16)
    prompts = [arena.take(size) for size in (130, 60, 256)]
    rows = [arena.take(50, high=True) for _ in range(6)]
    extents = settled(arena)
    assert [extents[b] for b in prompts] == [(0, 130), (130, 60), (256, 256)]
    assert [extents[b] for b in rows] == [(TOKENS - 50 * (i + 1), 50) for i in range(6)]
    for i in (1, 4, 0, 5, 3, 2):
        arena.give_back(rows[i])
    assert arena.take(512) is not None and settled(arena)[rows[0]] == (512, 512)


def test_nothing_changes_until_it_is_settled():
    arena = Arena(MODEL, TOKENS, 4)
    before = arena.cache
    block = arena.take(100)
    assert arena.cache is before and not np.asarray(before.capacities).any()
    assert settled(arena)[block] == (0, 100)
    cache = arena.cache
    assert arena.settle() is cache  # without changes it does nothing


def test_a_block_given_back_and_taken_again_is_empty():
    """It is so even between two calls of `settle`, in the same slot and at the same offset."""
    arena = Arena(MODEL, TOKENS, 4)
    kept, block = arena.take(200), arena.take(100)
    arena.cache = dataclasses.replace(
        arena.settle(), lengths=jnp.asarray([150, 70, 0, 0], jnp.int32)
    )
    arena.give_back(block)
    assert arena.take(100) == block
    assert np.asarray(arena.settle().lengths).tolist() == [150, 0, 0, 0] and settled(arena)[
        kept
    ] == (0, 200)


def test_an_arena_is_as_large_as_asked():
    arena = Arena(MODEL, 201, 2)
    assert arena.tokens == arena.free == arena.largest == 201
    assert {a.shape for a in (*arena.cache.keys, *arena.cache.values)} == {
        (TINY.num_kv_heads, 201, TINY.head_dim)
    }
    assert arena.cache.num_blocks == 2 and not np.asarray(arena.cache.capacities).any()


@pytest.mark.parametrize(
    ("limit", "tokens"),
    [(1, 1), (127, 127), (128, 128), (255, 128), (2047, 1920), (2048, 2048), (2559, 2048)],
)
def test_whole_tiles(limit, tokens):
    assert whole_tiles(limit) == tokens


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(SIZES), max_size=5),
    st.lists(st.sampled_from(SIZES), min_size=1, max_size=5),
)
def test_blocks_low_and_rows_high_fit_in_their_footprints(blocks, rows):
    """An arena of the footprints' size has room for the blocks, in any order of their sizes."""
    arena = Arena(MODEL, sum(footprints(blocks)) + sum(footprints(rows)), len(blocks) + len(rows))
    assert all(arena.take(size, high=True) is not None for size in rows)
    assert all(arena.take(size) is not None for size in blocks)


def test_footprints_count_whole_tiles_and_gaps_where_sizes_mix():
    assert (
        footprints([]) == []
        and footprints([5, 127]) == [5, 127]
        and footprints([128, 129]) == [128, 256]
    )
    assert footprints([5, 129]) == [5, 256 + 127]


def test_slots_that_are_added_are_taken_after_the_others_and_leave_blocks_where_they_are():
    arena = Arena(MODEL, TOKENS, 2)
    held = [arena.take(100), arena.take(300)]
    assert held == [0, 1] and arena.take(1) is None and arena.used_slots == 2
    before = settled(arena)
    arena.grow(2)
    arena.grow(1)
    assert arena.slots == 2, "it never has fewer"
    arena.grow(5)
    assert arena.slots == 5 and settled(arena) == [*before, (0, 0), (0, 0), (0, 0)]
    arena.give_back(0)
    assert [arena.take(10) for _ in range(4)] == [0, 2, 3, 4] and arena.take(1) is None
    extents = settled(arena)
    assert extents[1] == before[1] and len({offset for offset, _ in extents}) == 5
    assert arena.cache.num_blocks == 5 and np.asarray(arena.cache.lengths).tolist() == [0] * 5
