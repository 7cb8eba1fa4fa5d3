"""Snapshots of an engine between two steps: its rows, its queue, and where the cached tokens are."""

import collections
import dataclasses
from collections.abc import Iterable

from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.running_request import RunningRequest
from jaxshare.serving.engine.scheduler import Scheduler
from jaxshare.serving.kvcache.prefix_tree import Node

_EXCERPT_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class CachedRun:
    """A node of the prefix tree: tokens that follow those of its parent.

    Attributes:
      parent: the place of its parent in `EngineSnapshot.runs`; None for runs at the root.
      tokens, cached: its tokens, and those whose keys and values are cached.
      place: where these are: "accelerator", "host", or "" for nowhere.
      offset, capacity: its places in the accelerator's memory, in tokens; 0 where it has none.
      readers: running requests that read it.
      writing: True while a request writes it.
      uses: requests that have used it so far.
      agents: the agents of these, "" for requests without one.
      first_tokens: its first tokens, at most 32.
    """

    parent: int | None
    tokens: int
    cached: int
    place: str
    offset: int
    capacity: int
    readers: int
    writing: bool
    uses: int
    agents: tuple[str, ...]
    first_tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RunningRow:
    """A row of the engine that a request has.

    Attributes:
      row: its number.
      request: the number of the request, which counts from 0.
      agent: "" for none.
      decoding: True if it samples; before that its prompt is read.
      prompt_tokens, sampled_tokens, max_new_tokens: of the request.
      run: the place in `EngineSnapshot.runs` of the run that it writes, whose parents it reads;
        None where that was left out.
    """

    row: int
    request: int
    agent: str
    decoding: bool
    prompt_tokens: int
    sampled_tokens: int
    max_new_tokens: int
    run: int | None


@dataclasses.dataclass(frozen=True)
class EngineSnapshot:
    """An engine between two steps.

    Attributes:
      num_rows: rows that it has; rows: those that requests have.
      waiting: requests in the queue.
      capacity, free, leased: tokens that the accelerator's memory takes, of which some are free
        and some are leased to sessions.
      host_capacity, host_used: tokens in host memory.
      bytes_per_token: of keys and values.
      logits_bytes: of the Logits Cache.
      leases: (offset, capacity) of the extents that sessions have.
      passes, sampled_tokens, admitted_tokens, reused_tokens: see `Metrics`.
      runs: of the prefix tree, parents before their children, those nearest to the root first.
      runs_left_out: how many more there are.
    """

    num_rows: int
    rows: tuple[RunningRow, ...]
    waiting: int
    capacity: int
    free: int
    leased: int
    host_capacity: int
    host_used: int
    bytes_per_token: int
    logits_bytes: int
    leases: tuple[tuple[int, int], ...]
    passes: int
    sampled_tokens: int
    admitted_tokens: int
    reused_tokens: int
    runs: tuple[CachedRun, ...]
    runs_left_out: int


def take_snapshot(scheduler: Scheduler, metrics: Metrics, max_runs: int) -> EngineSnapshot:
    """Looks at a scheduler; the device lock is held, so that nothing changes meanwhile."""
    kv, logits = scheduler.kv, scheduler.output.logits
    pool, tree = kv.pool, kv.tree
    nodes, left_out = _first_nodes(tree.root, max_runs)
    places = {id(node): i for i, node in enumerate(nodes)}
    return EngineSnapshot(
        num_rows=len(scheduler.rows),
        rows=tuple(_row(row, places) for row in scheduler.live),
        waiting=len(scheduler.queue),
        capacity=pool.tokens,
        free=pool.free,
        leased=kv.leased_tokens,
        host_capacity=tree.host_tokens,
        host_used=tree.host_used,
        bytes_per_token=pool.bytes_per_token,
        logits_bytes=logits.bytes if logits else 0,
        leases=tuple(sorted((extent.offset, extent.capacity) for extent in kv.leased)),
        passes=metrics.passes,
        sampled_tokens=metrics.num_sampled,
        admitted_tokens=metrics.admitted_tokens,
        reused_tokens=metrics.reused,
        runs=tuple(_run(node, places) for node in nodes),
        runs_left_out=left_out,
    )


def _first_nodes(root: Node, most: int) -> tuple[list[Node], int]:
    """The nodes below the root, breadth first, and the number of those beyond `most`."""
    found: list[Node] = []
    next_ones: collections.deque[Node] = collections.deque(root.child_nodes())
    left_out = 0
    while next_ones:
        node = next_ones.popleft()
        next_ones.extend(node.child_nodes())
        if len(found) < most:
            found.append(node)
        else:
            left_out += 1
    return found, left_out


def _run(node: Node, places: dict[int, int]) -> CachedRun:
    extent, copy = node.extent, node.copy
    return CachedRun(
        parent=places.get(id(node.parent)),
        tokens=len(node.tokens),
        cached=node.num_cached,
        place="accelerator" if extent else "host" if copy else "",
        offset=extent.offset if extent else 0,
        capacity=extent.capacity if extent else 0,
        readers=node.ref_count,
        writing=node.writing,
        uses=node.segment.uses,
        agents=_names(node.segment.owners),
        first_tokens=tuple(node.tokens[:_EXCERPT_TOKENS].tolist()),
    )


def _names(owners: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(owners))


def _row(row: RunningRequest, places: dict[int, int]) -> RunningRow:
    request = row.request
    return RunningRow(
        row=row.index,
        request=request.number,
        agent=request.agent,
        decoding=row.decoding,
        prompt_tokens=len(request.prompt),
        sampled_tokens=len(request.output),
        max_new_tokens=request.max_new_tokens,
        run=places.get(id(row.node)),
    )
