"""What an engine knows, apart from how it lies in memory: the prefix tree with its keys and values.
How an engine is saved and restored."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxshare import cache_io
from jaxshare.models import LoadedModel
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.policy import Segment, prefix_hash
from jaxshare.serving.kvcache.pool import HostCopy
from jaxshare.serving.kvcache.prefix_tree import Node, PrefixTree

_SEGMENT = ("depth", "owners", "last_used", "uses", "priority")


def known(memory: KVManager, model: LoadedModel) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and facts of all that is known, in host memory.

    The arrays are `tokens` int32[N] and, of each layer L, `keys.L` and `values.L` [K, N, D] with
    every kv head once: the tokens of all nodes, parents first. What a call is writing is known as
    far as it has got.
    """
    # behind those nobody is on the accelerator
    nodes = sorted(_known_nodes(memory.tree.root), key=lambda node: node.extent is None)
    arrays = {
        "tokens": np.concatenate(
            [np.zeros(0, np.int32), *(node.tokens[: node.known] for node in nodes)]
        )
    }
    index, cache = (
        cache_io.token_indices([(node.extent.offset, node.known) for node in nodes if node.extent]),
        memory.pool.cache,
    )
    there, copies = (
        int(np.sum(index >= 0)),
        [node.copy for node in nodes if not node.extent and node.copy],
    )
    for kind in ("keys", "values"):
        for layer, arena in enumerate(getattr(cache, kind)):
            held = np.asarray(cache_io.read(arena, index, cache.mesh, model.kv_repeats))[:, :there]
            arrays[f"{kind}.{layer}"] = np.concatenate(
                [held, *(getattr(copy, kind)[layer][:: model.kv_repeats] for copy in copies)],
                axis=1,
            )
    places = {id(node): i for i, node in enumerate(nodes)}
    return arrays, {
        "now": memory.tree.now,
        "nodes": [_facts(node, places.get(id(node.parent))) for node in nodes],
    }


def _known_nodes(root: Node) -> list[Node]:
    """All nodes of which something is known, parents first."""
    found, stack = [], root.offspring()
    while stack:
        node = stack.pop()
        if node.known:
            found.append(node)
            stack += node.offspring()
    return found


def _facts(node: Node, parent: int | None) -> dict[str, Any]:
    where = node.extent or node.copy
    assert where is not None
    facts = {name: getattr(node.segment, name) for name in _SEGMENT}
    return {
        **facts,
        "depth": facts["depth"] - len(node.tokens) + node.known,
        "tokens": node.known,
        "phase": where.phase,
        "parent": parent,
    }


def learn(
    memory: KVManager,
    model: LoadedModel,
    arrays: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
) -> int:
    """Brings what was known into a memory that knows nothing yet: what was used last first, as far
    as there is room.

    Returns:
      How many tokens are known now.
    """
    tree, nodes = memory.tree, facts["nodes"]
    begins = [0, *itertools.accumulate(node["tokens"] for node in nodes)]
    # with all tokens to its end
    made: dict[int | None, tuple[Node, np.ndarray]] = {None: (tree.root, np.zeros(0, np.int32))}
    held: dict[int, Node] = {}
    for i in sorted(range(len(nodes)), key=lambda i: (-nodes[i]["last_used"], nodes[i]["depth"])):
        if nodes[i]["parent"] not in made:  # there was no room for it
            continue
        parent, before = made[nodes[i]["parent"]]
        tokens = arrays["tokens"][begins[i] : begins[i + 1]]
        whole = np.concatenate([before, tokens])
        node = Node(
            tokens,
            None,
            Segment(len(tokens), prefix_hash(whole), *(nodes[i][name] for name in _SEGMENT)),
            fresh=False,
        )
        if _place(tree, node, parent, nodes[i]["phase"]):
            held[i] = node
        elif tree.host_used + len(tokens) <= tree.host_tokens:
            node.copy = _copy(
                arrays,
                slice(begins[i], begins[i + 1]),
                nodes[i]["phase"],
                len(memory.pool.cache.keys),
                model.kv_repeats,
            )
            tree.host_used += len(tokens)
        else:
            continue
        parent.adopt(node)
        made[i] = node, whole
    _write(memory, model, arrays, {begins[i]: node for i, node in held.items()})
    tree.now, memory.moved = facts["now"], True
    learned = [node.segment for place, (node, _) in made.items() if place is not None]
    for segment in sorted(learned, key=lambda segment: (segment.last_used, -segment.depth)):
        tree.policy.used(segment, segment.last_used)
    return sum(segment.tokens for segment in learned)


def _place(tree: PrefixTree, node: Node, parent: Node, phase: int) -> bool:
    """Gives a node an extent, if there is one left. Behind what is in host memory alone nothing is
    on the accelerator."""
    if parent is tree.root or parent.extent:
        node.extent = tree.pool.take(len(node.tokens))
    if node.extent:
        node.extent.length, node.extent.phase = len(node.tokens), phase
    return node.extent is not None


def _copy(
    arrays: Mapping[str, np.ndarray], tokens: slice, phase: int, layers: int, repeats: int
) -> HostCopy:
    keys, values = (
        tuple(
            np.repeat(arrays[f"{kind}.{layer}"][:, tokens], repeats, axis=0)
            for layer in range(layers)
        )
        for kind in ("keys", "values")
    )
    return HostCopy(keys, values, phase)


def _write(
    memory: KVManager,
    model: LoadedModel,
    arrays: Mapping[str, np.ndarray],
    held: Mapping[int, Node],
) -> None:
    """Puts the keys and values of nodes, whose tokens begin at these places of the arrays, where
    their extents are."""
    if not held:
        return
    index = cache_io.token_indices(
        [(node.extent.offset, node.extent.length) for node in held.values() if node.extent]
    )
    source = cache_io.token_indices([(begin, len(node.tokens)) for begin, node in held.items()])
    cache, layers = memory.pool.cache, range(len(memory.pool.cache.keys))
    keys, values = (
        [arrays[f"{kind}.{layer}"][:, source] for layer in layers] for kind in ("keys", "values")
    )
    memory.pool.cache = cache_io.with_tokens(cache, index, keys, values, model.kv_repeats)
