"""Prefill in wide passes, several blocks per pass, against a dense transformer in float64 that is
fed one path after the other."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache
from jaxshare.models import Generation, LoadedModel
from jaxshare.serving.engine.prefill import Feed, feed_all, warm_up
from tests.core.test_compile import compilations
from tests.helpers import TINY, VOCAB, DenseModel, rotated, tiny_params

MODEL = LoadedModel(TINY, tiny_params(), None, Generation())
RNG = np.random.default_rng(3)
TEXT = RNG.integers(0, VOCAB, 320).tolist()
TOKENS, SLOTS, WIDTH = 1536, 48, 4
"""The sizes of every cache and layout here, so that all tests share three programs."""


def text(tokens: int) -> list[int]:
    return RNG.integers(0, VOCAB, tokens).tolist()


def cache_for(sizes: Sequence[int]) -> KVCache:
    """Blocks of these capacities, the last one lowest in the arena."""
    offsets = np.cumsum(sizes[::-1])[::-1] - np.asarray(sizes)
    return KVCache.empty(TINY, TOKENS, SLOTS, jnp.float32).place(
        range(len(sizes)), offsets.tolist(), sizes
    )


@functools.cache
def plain() -> tuple[DenseModel, np.ndarray]:
    """TEXT in block 0 of a dense model, and its logits [320, V]."""
    dense = DenseModel(TINY, tiny_params(), 1)
    return dense, dense.forward([TEXT], [[0]])[0]


def check(
    cache: KVCache, dense: DenseModel, block: int, tokens: int, dense_block: int | None = None
) -> None:
    """The block holds the keys and values of the first `tokens` of a dense one."""
    at = int(cache.offsets[block])
    assert int(cache.lengths[block]) == tokens
    for shelf, keys, values in zip(dense.shelves, cache.keys, cache.values, strict=True):
        k, v = (
            np.stack(side)
            for side in zip(
                *shelf.blocks[block if dense_block is None else dense_block][:tokens], strict=True
            )
        )
        k = rotated(k, np.arange(tokens), TINY.rope, TINY.rope.attention_factor)
        np.testing.assert_allclose(
            np.asarray(keys)[:, at : at + tokens].swapaxes(0, 1), k, atol=3e-4
        )
        np.testing.assert_allclose(
            np.asarray(values)[:, at : at + tokens].swapaxes(0, 1), v, atol=3e-4
        )


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 1), (16, 1), (17, 1), (64, 1), (65, 1), (256, 1), (257, 2), (300, 2)],
)
def test_a_text_of_any_length_equals_a_plain_forward(tokens, expected):
    logits, cache, passes = feed_all(
        MODEL, cache_for([7, tokens]), [Feed(1, (), TEXT[:tokens])], WIDTH
    )
    dense, wanted = plain()
    assert list(logits) == [1] and logits[1].shape == (VOCAB,) and passes == expected
    np.testing.assert_allclose(logits[1], wanted[tokens - 1], atol=2e-3)
    check(cache, dense, 1, tokens, 0)
    assert np.asarray(cache.lengths).sum() == tokens
    cache.check()


TREE = [
    Feed(3, (0, 2), text(64)),
    Feed(1, (0,), text(300)),
    Feed(4, (0, 2, 3), text(1)),
    Feed(0, (), text(65)),
    Feed(2, (0,), text(17)),
    Feed(5, (), text(16)),
]
"""Children before their parents."""


@functools.cache
def dense_tree() -> tuple[DenseModel, dict[int, np.ndarray]]:
    """TREE in a dense model, and the logits after each block."""
    dense, logits = DenseModel(TINY, tiny_params(), len(TREE)), {}
    for feed in sorted(TREE, key=lambda feed: len(feed.path)):
        logits[feed.block] = dense.forward([feed.tokens], [[*feed.path, feed.block]])[0][-1]
    return dense, logits


@pytest.mark.parametrize(
    "calls", [[TREE], [TREE[3:], TREE[:3]]], ids=["at once", "parents in an earlier call"]
)
def test_a_tree_equals_plain_forwards_of_its_paths(calls):
    sizes = {feed.block: len(feed.tokens) for feed in TREE}
    cache, found = cache_for([sizes[b] for b in range(len(TREE))]), {}
    for feeds in calls:
        logits, cache, passes = feed_all(MODEL, cache, feeds, WIDTH)
        # one of them takes two
        assert set(logits) == {feed.block for feed in feeds} and passes <= len(feeds) + 1
        found |= logits
    dense, wanted = dense_tree()
    for block in sizes:
        np.testing.assert_allclose(found[block], wanted[block], atol=2e-3)
        check(cache, dense, block, sizes[block])
    cache.check()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1 + i % 16 for i in range(33)], 3),
        ([16] * 16, 1),
        ([16] * 17, 2),
        ([17, 64, 20, 33, 50], 2),
        ([65, 65], 2),
        ([300, *[9] * 19], 3),  # 256 tokens; the rest beside three short ones; all others
        ([9, 40], 2),  # a longer one takes part as far as the pass goes, and has 24 left
    ],
)
def test_short_siblings_are_fed_side_by_side(lengths, expected):
    """One pass for the root, and few for all blocks below it; each as if fed alone."""
    root = TEXT[:30]
    feeds = [Feed(0, (), root), *(Feed(b, (0,), text(n)) for b, n in enumerate(lengths, 1))]
    logits, cache, passes = feed_all(
        MODEL, cache_for([len(feed.tokens) for feed in feeds]), feeds, WIDTH
    )
    assert passes == 1 + expected
    dense = DenseModel(TINY, tiny_params(), len(feeds))
    dense.forward([root], [[0]])
    for feed in feeds[1:]:
        wanted = dense.forward([feed.tokens], [[0, feed.block]])[0][-1]
        np.testing.assert_allclose(logits[feed.block], wanted, atol=2e-3)
        check(cache, dense, feed.block, len(feed.tokens))
    assert np.asarray(cache.lengths).tolist() == [30, *lengths] + [0] * (SLOTS - len(feeds))
    cache.check()


def test_nothing_to_feed():
    cache = cache_for([5])
    logits, after, passes = feed_all(MODEL, cache, [], WIDTH)
    assert (logits, passes) == ({}, 0) and after is cache


def test_warming_up_writes_nothing_and_leaves_nothing_to_compile():
    """Several texts of one length, with a model that no other test here compiles."""
    small = LoadedModel(dataclasses.replace(TINY, num_layers=1), MODEL.params, None, Generation())
    lengths = (300, 300, 300)
    cache = KVCache.create(small.config, lengths, jnp.float32)
    warm = warm_up(small, cache, lengths, WIDTH)
    assert not any(
        np.asarray(a).any() for a in (*warm.keys, *warm.values, warm.lengths, warm.faults)
    )
    with compilations() as names:
        feed_all(small, warm, [Feed(b, (), TEXT[:n]) for b, n in enumerate(lengths)], WIDTH)
    assert "_forward" not in names
