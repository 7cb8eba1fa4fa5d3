"""Prefill, several blocks per pass and several rows of a long one, against a dense transformer in float64 that is
fed one path after the other."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache
from jaxshare.models import Generation, LoadedModel
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.prefill import (
    SHORT,
    SMALL,
    Piece,
    PrefillPasses,
    feed_node,
    next_pieces,
)
from jaxshare.serving.kvcache.eviction import make_policy
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.prefix_tree import Node
from jaxshare.serving.kvcache.speeds import FixedSpeeds
from tests.core.test_compile import compilations
from tests.helpers import TINY, VOCAB, DenseModel, rotated, tiny_params

MODEL = LoadedModel(TINY, tiny_params(), None, Generation())
RNG = np.random.default_rng(3)
TEXT = RNG.integers(0, VOCAB, 320).tolist()
TOKENS = 1536


def text(tokens: int) -> list[int]:
    return RNG.integers(0, VOCAB, tokens).tolist()


def manager() -> KVManager:
    return KVManager(
        MODEL,
        tokens=TOKENS,
        host_tokens=0,
        policy=make_policy("lru"),
        metrics=Metrics(),
        speeds=FixedSpeeds(),
    )


@functools.cache
def passes() -> PrefillPasses:
    """Of all tests, so that they share one program."""
    return PrefillPasses(MODEL, manager())


def add(kv: KVManager, parent: Node | None, tokens: list[int]) -> Node:
    """A node with an extent of its own, not next to its parent's."""
    kv.pool.take(1)
    node = kv.pin(parent, np.asarray(tokens, np.int32))
    assert node is not None
    return node


def feed(nodes: list[Node]) -> tuple[dict[int, np.ndarray], int]:
    """Feeds all tokens on the paths to these nodes, as many nodes at a time as fit a pass.

    Returns:
      The logits at the end of each, by its index, and the number of passes.
    """
    runner, logits, count = passes(), {}, 0
    while True:
        batch: list[Piece] = []
        busy: set[int] = set()
        for node in nodes:
            path = node.path()
            if any(id(each) in busy for each in path):  # another one feeds what it sees
                continue
            busy |= {id(each) for each in path if each.num_cached < len(each.tokens)}
            batch += next_pieces(path, SHORT.rows - len(batch))
        if not batch:
            return logits, count
        fed = runner.run(batch)
        found = fed.logits
        assert fed.finite()[: len(batch)].all()
        count += 1
        for row, piece in enumerate(batch):
            if piece.node in nodes:
                logits[nodes.index(piece.node)] = np.asarray(found[row])


@pytest.fixture
def kv() -> Iterator[KVManager]:
    """The empty memory that all tests share."""
    found = passes()._kv
    found.reset()
    yield found
    found.pool.cache.check()


def check(kv: KVManager, node: Node, dense: DenseModel, block: int) -> None:
    """The node's extent holds the keys and values of a dense block."""
    extent = node.extent
    assert extent is not None and extent.length == len(node.tokens) and extent.phase == 0
    span = slice(extent.offset, extent.offset + extent.length)
    cache = kv.pool.cache
    for shelf, keys, values in zip(dense.shelves, cache.keys, cache.values, strict=True):
        rows = shelf.blocks[block][: extent.length]
        k, v = (np.stack(side) for side in zip(*rows, strict=True))
        k = rotated(k, np.arange(extent.length), TINY.rope, TINY.rope.attention_factor)
        np.testing.assert_allclose(np.asarray(keys)[:, span].swapaxes(0, 1), k, atol=3e-4)
        np.testing.assert_allclose(np.asarray(values)[:, span].swapaxes(0, 1), v, atol=3e-4)


@functools.cache
def plain() -> tuple[DenseModel, np.ndarray]:
    """TEXT in block 0 of a dense model, and its logits [320, V]."""
    dense = DenseModel(TINY, tiny_params(), 1)
    return dense, dense.forward([TEXT], [[0]])[0]


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 1), (31, 1), (32, 1), (33, 1), (255, 1), (256, 1), (257, 2)]
)
def test_a_text_of_any_length_equals_a_plain_forward(kv, tokens, expected):
    node = add(kv, None, TEXT[:tokens])
    logits, count = feed([node])
    dense, wanted = plain()
    assert count == expected
    np.testing.assert_allclose(logits[0], wanted[tokens - 1], atol=2e-3)
    check(kv, node, dense, 0)


def test_a_text_goes_on_where_an_earlier_pass_has_ended(kv):
    """The parts end anywhere; the last has one token."""
    node = add(kv, None, TEXT[:40])
    assert node.extent is not None
    node.extent = kv.pool.take(320)
    for end in (3, 36, 299, 300):
        node.set_tokens(np.asarray(TEXT[:end], np.int32))
        logits, _ = feed([node])
        np.testing.assert_allclose(logits[0], plain()[1][end - 1], atol=2e-3)
    check(kv, node, plain()[0], 0)


TREE = ((-1, 65), (0, 300), (0, 17), (2, 64), (3, 1), (-1, 16))
"""The parent and the tokens of each node."""


@functools.cache
def dense_tree() -> tuple[list[list[int]], DenseModel, list[np.ndarray]]:
    """The texts of TREE, in a dense model, and the logits after each."""
    texts = [text(tokens) for _, tokens in TREE]
    dense, logits = DenseModel(TINY, tiny_params(), len(TREE)), []
    for i, (parent, _) in enumerate(TREE):
        path = [i]
        while (parent := TREE[path[0]][0]) >= 0:
            path.insert(0, parent)
        logits.append(dense.forward([texts[i]], [path])[0][-1])
    return texts, dense, logits


@pytest.mark.parametrize("leaves", [[1, 4, 5], [4, 1, 5], [5, 2, 0, 1, 4]])
def test_a_tree_equals_plain_forwards_of_its_paths(kv, leaves):
    """Whole paths in one pass, or a part after another."""
    texts, dense, wanted = dense_tree()
    nodes: list[Node] = []
    for (parent, _), tokens in zip(TREE, texts, strict=True):
        nodes.append(add(kv, nodes[parent] if parent >= 0 else None, tokens))
    logits, _ = feed([nodes[leaf] for leaf in leaves])
    for i, leaf in enumerate(leaves):
        np.testing.assert_allclose(logits[i], wanted[leaf], atol=2e-3)
    for block, node in enumerate(nodes):
        check(kv, node, dense, block)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([1 + i % 32 for i in range(17)], 5), ([64] * 4, 1), ([65] * 4, 2), ([100, 9, 100], 2)],
)
def test_short_siblings_are_fed_side_by_side(kv, lengths, expected):
    """One pass for the root, and few for all below it; each as if fed alone."""
    root = add(kv, None, TEXT[:30])
    assert feed([root])[1] == 1
    texts = [text(tokens) for tokens in lengths]
    nodes = [add(kv, root, tokens) for tokens in texts]
    logits, count = feed(nodes)
    assert count == expected
    dense = DenseModel(TINY, tiny_params(), 1 + len(texts))
    dense.forward([TEXT[:30]], [[0]])
    for block, (node, tokens) in enumerate(zip(nodes, texts, strict=True), start=1):
        wanted = dense.forward([tokens], [[0, block]])[0][-1]
        np.testing.assert_allclose(logits[block - 1], wanted, atol=2e-3)
        check(kv, node, dense, block)


def lost(token: int) -> LoadedModel:
    """The model with the embedding of a token that is not finite."""
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.at[token].set(jnp.nan) if path[-1].key == "embedding" else leaf,
        MODEL.params,
    )
    return dataclasses.replace(MODEL, params=params)


def test_rows_with_logits_that_are_not_finite_are_found_and_no_others(kv):
    """A cache holds finite values only: what is fed after them has finite logits of its own."""
    token = next(t for t in range(VOCAB) if t not in TEXT[:300])
    clean = [t for t in TEXT if t != token]
    root = add(kv, None, clean[:20])
    model = lost(token)
    assert feed_node(model, kv, root)
    bad = add(kv, root, [*clean[:7], token, *clean[:280]])  # in its first pass
    below, good = add(kv, root, [*clean[:9], token]), add(kv, root, clean[:30])
    assert not feed_node(model, kv, bad) and not feed_node(model, kv, below)
    pieces = [piece for node in (good,) for piece in next_pieces(node.path(), 8)]
    other = next_pieces(add(kv, root, [token, *clean[:40]]).path(), 8 - len(pieces))
    fed = PrefillPasses(model, kv).run([*pieces, *other])
    logits, finite = fed.logits, fed.finite()
    assert finite[: len(pieces)].all() and not finite[len(pieces)]
    dense = DenseModel(TINY, tiny_params(), 2)
    dense.forward([clean[:20]], [[0]])
    wanted = dense.forward([clean[:30]], [[0, 1]])[0][-1]
    np.testing.assert_allclose(logits[len(pieces) - 1], wanted, atol=2e-3)
    cache = kv.pool.cache
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in (*cache.keys, *cache.values))


def test_a_pass_reads_no_fault_of_the_one_before_it(kv, monkeypatch):
    """It would wait until that has ended."""
    runner, node = passes(), add(kv, None, text(700))
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "check", lambda _: pytest.fail("a pass that is under way was read"))
        while found := runner.next_pieces([node.path()], streaming=True):
            fed = runner.run([piece for _, piece in found])
    assert fed.finite().all()


def test_nothing_to_feed(kv):
    node = add(kv, None, TEXT[:5])
    feed([node])
    assert next_pieces(node.path(), 8) == [] == next_pieces([], 8) == next_pieces([], 0)


def test_one_program_feeds_all(kv):
    feed([add(kv, None, TEXT[:5])])
    with compilations() as names:
        feed([add(kv, None, TEXT[:300]), add(kv, None, TEXT[:17])])
    assert "_forward" not in names


@pytest.mark.parametrize(
    ("lengths", "shapes"),
    [
        ([1], [SMALL]),
        ([64], [SMALL]),
        ([65], [SMALL, SMALL]),
        ([128], [SMALL, SMALL]),
        ([129], [SHORT]),
        ([20, 30], [SMALL, SMALL]),
        ([20, 30, 40], [SHORT]),
        ([300], [SHORT, SMALL]),
    ],
)
def test_a_short_text_takes_passes_of_few_places(kv, monkeypatch, lengths, shapes):
    taken, run = [], PrefillPasses._run
    monkeypatch.setattr(
        PrefillPasses,
        "_run",
        lambda self, pieces, shape, adapters: (
            taken.append(shape) or run(self, pieces, shape, adapters)
        ),
    )
    nodes, runner, logits = [add(kv, None, TEXT[:length]) for length in lengths], passes(), {}
    while found := runner.next_pieces([node.path() for node in nodes], streaming=True):
        got = runner.run([piece for _, piece in found]).logits
        logits |= {i: np.asarray(got[row]) for row, (i, _) in enumerate(found)}
    assert taken == shapes
    for i, length in enumerate(lengths):
        np.testing.assert_allclose(logits[i], plain()[1][length - 1], atol=3e-4)


def test_many_tokens_are_fed_by_long_passes_unless_others_wait(kv):
    """Two texts after a root in one pass of long rows, and what is left in small ones."""
    root = add(kv, None, TEXT[:30])
    feed([root])
    texts = [text(700), text(330)]
    nodes = [add(kv, root, tokens) for tokens in texts]
    runner, sizes, logits = passes(), list[list[int]](), {}
    waiting = runner.next_pieces([node.path() for node in nodes], streaming=True)
    assert [(i, len(piece.tokens)) for i, piece in waiting] == [(0, 64)] * 4
    while found := runner.next_pieces([node.path() for node in nodes], streaming=False):
        fed = runner.run([piece for _, piece in found])
        got = fed.logits
        assert fed.finite()[: len(found)].all()
        sizes.append([len(piece.tokens) for _, piece in found])
        logits |= {i: np.asarray(got[row]) for row, (i, _) in enumerate(found)}
    assert sizes == [[128, 128, 128, 128, 128, 60, 128, 128], [64], [10]]
    dense = DenseModel(TINY, tiny_params(), 3)
    dense.forward([TEXT[:30]], [[0]])
    for i, (node, tokens) in enumerate(zip(nodes, texts, strict=True)):
        wanted = dense.forward([tokens], [[0, i + 1]])[0][-1]
        np.testing.assert_allclose(logits[i], wanted, atol=2e-3)
        check(kv, node, dense, i + 1)


@pytest.mark.parametrize(("tokens", "first"), [(895, [64] * 4), (896, [128] * 7)])
def test_a_long_pass_is_used_where_it_is_nearly_full(kv, tokens, first):
    node = add(kv, None, text(tokens))
    found = passes().next_pieces([node.path()], streaming=False)
    assert [len(piece.tokens) for _, piece in found] == first
