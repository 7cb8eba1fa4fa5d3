"""A census of what a process holds at rest, by which leaks are found."""

import asyncio
import collections
import concurrent.futures
import ctypes
import dataclasses
import gc
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxshare.serving.engine import Engine
from jaxshare.serving.kvcache.prefix_tree import Node

_BOUNDED = (
    "jaxshare.serving.kvcache.",
    "jaxshare.serving.logits_cache.",
    "jaxshare.decoding.top_logits",
    "jaxshare.models.layers",
)
"""Modules whose objects are as many as the caches hold, which bound them themselves, or as many as
there are compiled programs."""
_SLACK = {"threads of the system": 8}
"""What may be more: XLA starts threads of its pools as it needs them."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True)
class Census:
    """All that a process holds, with an engine at rest.

    Attributes:
      counts: by name: threads, file handles, arrays of JAX and their bytes outside the prefix tree,
        objects of each class of jaxshare and of event loops outside the caches, and what is
        reachable from the engine. None of it may go on growing.
      resident: bytes of memory, which the allocator's own pieces are a part of.
      allocated: bytes of the system's allocator that are in use, without what it keeps between them;
        0 where it does not tell.
    """

    counts: Mapping[str, int]
    resident: int
    allocated: int


def growth(before: Sequence[Census], after: Sequence[Census]) -> dict[str, tuple[int, int]]:
    """Returns what each of the later ones has more of than any before: (most then, least now)."""
    names = {name for census in (*before, *after) for name in census.counts}
    found = {}
    for name in sorted(names):
        then = max(census.counts.get(name, 0) for census in before)
        now = min(census.counts.get(name, 0) for census in after)
        if now > then + _SLACK.get(name, 0):
            found[name] = then, now
    return found


def take(engine: Engine) -> Census:
    """Counts what this process holds; for an engine that is at rest."""
    gc.collect()
    gc.collect()  # what finalizers have let go of
    nodes = [*engine._scheduler.kv.tree.root.subtree()]
    cached = {id(array) for node in nodes for array in jax.tree.leaves((node.logits, node.copy))}
    arrays = [array for array in jax.live_arrays() if id(array) not in cached]
    counts = {
        "threads": threading.active_count(),
        "threads of the system": len(os.listdir("/proc/self/task")),
        "file handles": len(os.listdir("/proc/self/fd")),
        "arrays": len(arrays),
        "bytes of arrays": sum(array.nbytes for array in arrays),
        **_objects(),
        **_reachable(engine),
    }
    counts["nodes outside the tree"] = counts.pop("Node", len(nodes)) - len(nodes)
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # or what is free, but not given back, would count
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return Census(counts, resident, _allocated())


class _Mallinfo2(ctypes.Structure):
    """The struct mallinfo2 of the GNU C library."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _allocated() -> int:
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return found.uordblks + found.hblkhd  # of its arenas, and mapped each by itself


def _objects() -> dict[str, int]:
    """Live objects by class: those of jaxshare, of event loops and of threads."""
    others = asyncio.Future, asyncio.AbstractEventLoop, concurrent.futures.Future, threading.Thread
    found: collections.Counter[str] = collections.Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        module = kind.__module__ if isinstance(kind.__module__, str) else ""
        if kind is Node:
            found["Node"] += 1
        elif issubclass(kind, others) or (
            module.startswith("jaxshare") and not module.startswith(_BOUNDED)
        ):
            found[f"objects {kind.__name__}"] += 1
    return dict(found)


def _reachable(engine: Engine) -> dict[str, int]:
    """The elements of containers and the bytes of numpy arrays that an engine leads to.

    Without the model, and without what is bounded by its own size: the prefix tree, its policy, the
    Logits Cache and what decides where it pays, the counts from which seeds are derived, free
    memory in pieces that come together again, and the last sampler of each row.
    """
    kv, samplers = engine._scheduler.kv, engine._scheduler.decode_rows._samplers
    bounded = (
        *(engine.model, kv.tree, kv._policy, engine.logits_cache),
        *(engine._seeds.counts, kv.pool._free_list, samplers, engine._scheduler.output.payoff),
    )
    seen, found, size = {id(each) for each in bounded}, 0, 0
    waiting: list[Any] = [engine]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            size += thing.nbytes
        inner = _inside(thing)
        found += len(inner)
        waiting += inner
    return {"elements in the engine": found, "bytes in the engine": size}


def _inside(thing: Any) -> list[Any]:
    """The elements of a container, or the attributes of an object of jaxshare."""
    if isinstance(thing, Mapping):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, list | tuple | set | frozenset | collections.deque):
        return [*thing]
    if type(thing).__module__.startswith("jaxshare"):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        named = [getattr(thing, name) for name in slots if hasattr(thing, name)]
        return [*named, *getattr(thing, "__dict__", {}).values()]
    return []
