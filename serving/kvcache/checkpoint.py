"""Checkpoints of the prefix tree with its keys and values, apart from their places in memory."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxshare import KVCache, cache_io
from jaxshare.models import LoadedModel
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.policy import Segment, prefix_hash
from jaxshare.serving.kvcache.pool import HostCopy
from jaxshare.serving.kvcache.prefix_tree import Node, PrefixTree

_SEGMENT = ("depth", "owners", "last_used", "uses", "priority")


def snapshot(kv: KVManager, model: LoadedModel) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and metadata of all cached tokens, in host memory.

    The arrays are `tokens` int32[N] and, of each layer L, `keys.L` and `values.L` [K, N, D] with
    every kv head once: the tokens of all nodes, parents first. Where keys and values are
    approximated they are `keys.L.codes` and `keys.L.scales`. A node that is being written is saved
    as far as it is cached. What adapters have computed is left out.
    """
    # Below a node in host memory none is on the accelerator, so parents stay first.
    nodes = sorted(_cached_nodes(kv.tree.root), key=lambda node: node.extent is None)
    arrays = {
        "tokens": np.concatenate(
            [np.zeros(0, np.int32), *(node.tokens[: node.num_cached] for node in nodes)]
        )
    }
    cache = kv.pool.cache
    index = cache_io.token_indices(
        [(node.extent.offset, node.num_cached) for node in nodes if node.extent]
    )
    on_device = int(np.sum(index >= 0))
    copies = [node.copy for node in nodes if not node.extent and node.copy]
    for kind in ("keys", "values"):
        for layer, arena in enumerate(getattr(cache, kind)):
            device = cache_io.read(arena, index, cache.mesh, model.kv_repeats)
            parts = [jax.tree.map(np.asarray, device)[:, :on_device]]
            parts += [getattr(copy, kind)[layer][:: model.kv_repeats] for copy in copies]
            whole = jax.tree.map(lambda *each: np.concatenate(each, axis=1), *parts)
            arrays |= cache_io.named_arrays(f"{kind}.{layer}", whole)
    numbers = {id(node): i for i, node in enumerate(nodes)}
    return arrays, {
        "now": kv.tree.now,
        "nodes": [_node_metadata(node, numbers.get(id(node.parent))) for node in nodes],
    }


def _cached_nodes(root: Node) -> list[Node]:
    """All nodes with cached tokens, parents first."""
    nodes, stack = [], root.child_nodes()
    while stack:
        node = stack.pop()
        if node.num_cached and not node.private and not node.adapter:
            nodes.append(node)
            stack += node.child_nodes()
    return nodes


def _node_metadata(node: Node, parent: int | None) -> dict[str, Any]:
    memory = node.extent or node.copy
    assert memory is not None
    segment = {name: getattr(node.segment, name) for name in _SEGMENT}
    return {
        **segment,
        "depth": segment["depth"] - len(node.tokens) + node.num_cached,
        "tokens": node.num_cached,
        "phase": memory.phase,
        "parent": parent,
    }


def restore(
    kv: KVManager,
    model: LoadedModel,
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any],
) -> int:
    """Restores a snapshot into an empty manager, the most recently used tokens first, as far as
    there is memory.

    Returns:
      The number of cached tokens.
    """
    tree, nodes = kv.tree, metadata["nodes"]
    starts = [0, *itertools.accumulate(node["tokens"] for node in nodes)]
    # each with all tokens from the root to its end
    restored: dict[int | None, tuple[Node, np.ndarray]] = {None: (tree.root, np.zeros(0, np.int32))}
    on_device: dict[int, Node] = {}
    for i in sorted(range(len(nodes)), key=lambda i: (-nodes[i]["last_used"], nodes[i]["depth"])):
        if nodes[i]["parent"] not in restored:  # there was no memory for it
            continue
        parent, before = restored[nodes[i]["parent"]]
        tokens = arrays["tokens"][starts[i] : starts[i + 1]]
        whole = np.concatenate([before, tokens])
        node = Node(
            tokens,
            None,
            Segment(len(tokens), prefix_hash(whole), *(nodes[i][name] for name in _SEGMENT)),
            unmerged=False,
        )
        if _take_extent(tree, node, parent, nodes[i]["phase"]):
            on_device[i] = node
        elif tree.host_used + len(tokens) <= tree.host_tokens:
            node.copy = _host_copy(
                kv.pool.cache,
                arrays,
                slice(starts[i], starts[i + 1]),
                nodes[i]["phase"],
                model.kv_repeats,
            )
            tree.host_used += len(tokens)
        else:
            continue
        parent.attach(node)
        restored[i] = node, whole
    _write(kv, model, arrays, {starts[i]: node for i, node in on_device.items()})
    tree.now, kv.view_changed = metadata["now"], True
    segments = [node.segment for number, (node, _) in restored.items() if number is not None]
    for segment in sorted(segments, key=lambda segment: (segment.last_used, -segment.depth)):
        tree.policy.touched(segment, segment.last_used)
    return sum(segment.tokens for segment in segments)


def _take_extent(tree: PrefixTree, node: Node, parent: Node, phase: int) -> bool:
    """Gives a node an extent, if one is free.

    Below a node in host memory none may be on the accelerator.
    """
    if parent is tree.root or parent.extent:
        node.extent = tree.pool.take(len(node.tokens))
    if node.extent:
        node.extent.length, node.extent.phase = len(node.tokens), phase
    return node.extent is not None


def _host_copy(
    cache: KVCache, arrays: Mapping[str, np.ndarray], tokens: slice, phase: int, repeats: int
) -> HostCopy:
    keys, values = (
        jax.tree.map(
            lambda a: np.repeat(a[:, tokens], repeats, axis=0),
            (*cache_io.from_names(cache, kind, arrays),),
        )
        for kind in ("keys", "values")
    )
    return HostCopy(keys, values, phase)


def _write(
    kv: KVManager,
    model: LoadedModel,
    arrays: Mapping[str, np.ndarray],
    nodes: Mapping[int, Node],
) -> None:
    """Writes the keys and values of nodes, keyed by their first token in the arrays."""
    if not nodes:
        return
    index = cache_io.token_indices(
        [(node.extent.offset, node.extent.length) for node in nodes.values() if node.extent]
    )
    source = cache_io.token_indices([(start, len(node.tokens)) for start, node in nodes.items()])
    cache = kv.pool.cache
    keys, values = (
        jax.tree.map(lambda a: a[:, source], cache_io.from_names(cache, kind, arrays))
        for kind in ("keys", "values")
    )
    kv.pool.cache = cache_io.with_tokens(cache, index, keys, values, model.kv_repeats)
