"""The order of siblings in the prefix tree: what is found among thousands that begin alike, against
a comparison with each of them, and without one."""

import random
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.serving.kvcache import prefix_node
from jaxshare.serving.kvcache.eviction import make_policy
from jaxshare.serving.kvcache.pool import Extent
from jaxshare.serving.kvcache.prefix_node import MIN_SHARED_TOKENS, Node
from jaxshare.serving.kvcache.prefix_tree import PrefixTree

TEMPLATE = (7, 3, 9, 9, 2)
"""The tokens that all prompts begin with, fewer than are worth a node of their own."""


def empty_tree() -> PrefixTree:
    return PrefixTree(types.SimpleNamespace(free=0), make_policy("lru"), 0)


def array(tokens) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def add(tree: PrefixTree, tokens, *, cached: int | None = None, adapter: bytes = b"") -> Node:
    """A child of the root, of which so many tokens are cached, by default all."""
    count = len(tokens)
    extent = Extent(0, count, count if cached is None else cached)
    node = tree.add(tree.root, array(tokens), extent, adapter=adapter)
    node.writing = extent.length < count
    return node


def in_common(a, b) -> int:
    """The leading tokens that two texts share, one by one."""
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


texts = st.lists(st.integers(0, 2), min_size=1, max_size=MIN_SHARED_TOKENS + 6)
"""Of few tokens, so that many share long beginnings, and some are beginnings of others."""


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(texts, st.sampled_from([b"", b"x"])), max_size=30), texts)
def test_nearest_gives_each_child_once_and_the_most_alike_first(children, wanted):
    tree = empty_tree()
    for tokens, adapter in children:
        add(tree, tokens, adapter=adapter)
    for adapter in (b"", b"x"):
        found = [*tree.root.nearest(array(wanted), adapter)]
        given_back = sorted((node.tokens.tolist(), common) for node, common in found)
        assert given_back == sorted(
            (tokens, in_common(tokens, wanted))
            for tokens, of in children
            if of == adapter and tokens[0] == wanted[0]
        )
        first = [min(common, MIN_SHARED_TOKENS) for _, common in found]
        assert first == sorted(first, reverse=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(texts, st.integers(0, 30)), max_size=20), texts)
def test_a_match_has_the_most_cached_tokens(children, wanted):
    tree = empty_tree()
    for tokens, cached in children:
        add(tree, tokens, cached=min(cached, len(tokens)))
    match = tree.match(array(wanted), len(wanted))
    usable = [min(in_common(tokens, wanted), cached) for tokens, cached in children]
    assert match.tokens == max(usable, default=0)
    # What a request is about to write counts where it is more than what is cached.
    ahead = [in_common(tokens, wanted) for tokens, cached in children if cached < len(tokens)]
    assert match.in_flight == max(0, max(ahead, default=0) - match.tokens)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_nodes_keep_their_order_while_they_grow_shrink_and_leave(data):
    tree, nodes = empty_tree(), []
    for _ in range(data.draw(st.integers(1, 30))):
        kind = data.draw(st.sampled_from(["add", "add", "grow", "shrink", "leave"]))
        if kind == "add" or not nodes:
            nodes.append(add(tree, data.draw(texts)))
            continue
        node = nodes[data.draw(st.integers(0, len(nodes) - 1))]
        if kind == "grow":
            tree.append_tokens(node, data.draw(texts))
        elif kind == "shrink":
            node.set_tokens(node.tokens[: data.draw(st.integers(0, len(node.tokens)))])
        else:
            nodes.remove(node)
            node.detach()
        for siblings in tree.root.children.values():
            firsts = [each.tokens[:MIN_SHARED_TOKENS].tolist() for each in siblings]
            assert firsts == sorted(firsts)
        assert set(tree.root.child_nodes()) == set(nodes)
        for each in nodes:
            begins = each.tokens[:MIN_SHARED_TOKENS].tolist()
            alike = {
                other
                for other in nodes
                if other is not each
                and other.key == each.key
                and other.tokens[: len(begins)].tolist() == begins
            }
            assert set(each.twins()) == alike


def test_among_thousands_that_begin_alike_few_are_compared(monkeypatch):
    rng, tree = random.Random(5), empty_tree()
    prompts = [(*TEMPLATE, *(rng.randrange(1000) for _ in range(30))) for _ in range(3000)]
    for tokens in prompts:
        add(tree, tokens)
    compared = []

    def counted(a, b):
        compared.append(a)
        return in_common(a, b)

    monkeypatch.setattr(prefix_node, "common_prefix", counted)
    for tokens in prompts[:50]:
        compared.clear()
        assert tree.match(array(tokens), len(tokens)).tokens == len(tokens)
        assert len(compared) <= 4
    for _ in range(50):
        new = (*TEMPLATE, *(rng.randrange(1000) for _ in range(30)))
        compared.clear()
        match = tree.match(array(new), len(new))
        assert match.tokens == max(in_common(tokens, new) for tokens in prompts)
        assert len(compared) <= 4


def test_unused_tokens_are_counted_until_there_are_enough():
    rng, tree = random.Random(6), empty_tree()
    for _ in range(200):
        node = add(tree, [rng.randrange(50) for _ in range(rng.randrange(1, 20))])
        node.ref_count = rng.randrange(2)
    nodes = [*tree.root.subtree()]
    assert len(nodes) == len(set(nodes)) == 201
    unused = sum(len(node.tokens) for node in nodes if not node.ref_count)
    assert tree.unused_tokens(10**9) == unused
    for enough in (0, 1, 37, unused - 1, unused, unused + 1):
        found = tree.unused_tokens(enough)
        assert min(enough, unused) <= found <= unused
        assert found < enough + 20
    tree.pool.free = 11
    assert tree.can_be_free(unused + 11) and not tree.can_be_free(unused + 12)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_subtree_has_each_node_once_and_parents_first(depth):
    rng, tree = random.Random(7), empty_tree()
    level, nodes = [tree.root], {tree.root}
    for _ in range(depth):
        level = [
            tree.add(parent, array([rng.randrange(9), 1]), Extent(0, 2, 2))
            for parent in level
            for _ in range(5)
        ]
        nodes |= set(level)
    seen = set()
    for node in tree.root.subtree():
        assert node.parent is None or node.parent in seen
        assert node not in seen
        seen.add(node)
    assert seen == nodes
