"""RayPool: independent tasks on replicas of a model, each an actor on a Ray cluster.

Losing a node loses no results.

    with RayPool("local", replicas=2) as pool:
        pool.start(make, max_replicas=len(tasks))
        for result in pool.run(tasks):
            ...

`make` runs once in the process of every replica and returns the work function: it takes a task and
yields keys and values. These come to the caller as they are made. A task whose replica died, or did
not answer for a minute, is done again on another one, which gets the keys that have arrived;
nothing arrives twice. So the work function decides what a key is, and the pool is independent of
models and of what is done with them.
"""

import argparse
import collections
import contextlib
import dataclasses
import logging
import math
import os
import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxshare.serving.cluster.process_mesh import sizes_of
from jaxshare.serving.cluster.ray_cluster import STORE_BYTES, connect, import_ray
from jaxshare.serving.cluster.ray_replica import ReplicaActor, Work

_MAX_DEATHS = 3
"""Replicas that may die over one task, or in a row while they start, before that is an error."""
_PLACEMENT_SECONDS = 120
"""How long nodes may be too busy for any replica."""
_SILENT_SECONDS = 60.0
"""A replica whose process has answered nothing for this long is lost: it is stopped, or its node
swaps. Ray sees only processes that end and nodes that are gone."""
_CHECK_SECONDS = 1.0
"""The time between two questions to a replica, and the longest wait for replies."""
_log = logging.getLogger("jaxshare.fleet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --ray and --replicas."""
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="run replicas of the model on a Ray cluster: one that is started on this machine, or "
        "that at `auto` (the one this machine is part of), HOST:PORT or ray://HOST:PORT",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="with --ray, the number of replicas, each on --tensor x --expert x --kv devices "
        "(default: as many as the cluster's GPUs or, where it has none, CPUs allow)",
    )


def of_options(options: argparse.Namespace) -> "RayPool | None":
    """The pool of a command's options, not yet connected, or None.

    Raises:
      ValueError: options that contradict each other, an invalid address, or Ray is not installed.
    """
    if options.ray is None:
        if options.replicas is not None:
            raise ValueError(
                "--replicas is given without --ray; add --ray for replicas on this machine, or use "
                "--data"
            )
        return None
    sizes = sizes_of(options)
    if sizes["data"] > 1:
        raise ValueError(
            f"--data is {sizes['data']}, but with --ray each replica is one group; give --replicas "
            "instead"
        )
    return RayPool(options.ray, replicas=options.replicas, devices=math.prod(sizes.values()))


class JobResult(NamedTuple):
    """A result of a task: one of the pairs that the work function yields.

    Attributes:
      piece: the task, as given.
      key, value: the pair.
      replica: number of the replica that made it.
    """

    piece: Any
    key: Hashable
    value: Any
    replica: int


@dataclasses.dataclass
class _Job:
    """A task and its progress.

    Attributes:
      task: as given.
      arrived: the keys that have arrived.
      deaths: replicas that have died over it since the last key arrived.
      is_wanted: whether the run that it belongs to goes on.
    """

    task: Any
    arrived: set[Hashable] = dataclasses.field(default_factory=set)
    deaths: int = 0
    is_wanted: bool = True


@dataclasses.dataclass
class _ReplicaHandle:
    """The driver's view of a replica.

    Attributes:
      number: its own, never used again.
      actor: its Ray actor.
      reply: the pending answer of the actor, or None while it waits for a task.
      stage: what it is doing.
      node: the name of its node, once known.
      job: the job in progress.
      ping: the pending answer to the question whether its process runs, or None.
      silent: seconds for which this has been waited for.
    """

    number: int
    actor: Any
    reply: Any
    stage: Literal["placing", "loading", "ready", "working"] = "placing"
    node: str = ""
    job: _Job | None = None
    ping: Any = None
    silent: float = 0.0


class RayPool:
    """Replicas on a Ray cluster, as a context manager.

    Entering connects; leaving ends the replicas, and the cluster if it was started here.

    Attributes:
      address, devices: as given.
      replicas: the number of replicas; known once connected.
    """

    def __init__(
        self,
        address: str = "local",
        *,
        replicas: int | None = None,
        devices: int = 1,
        store_bytes: int = STORE_BYTES,
    ):
        """Checks the arguments as far as that is possible without the cluster.

        Args:
          address: "local" starts a cluster on this machine, "auto" is the one that this machine is
            part of; else HOST:PORT of the head node or ray://HOST:PORT. A program that has called
            `ray.init` already stays connected as it is.
          replicas: their number; default as many as the nodes have room for.
          devices: of one replica: GPUs where the cluster has any and JAX_PLATFORMS is not cpu, or
            else CPUs.
          store_bytes: of the object store of a cluster that is started here.

        Raises:
          ValueError: a number below 1, an invalid address, or Ray is not installed.
        """
        for name, value in (("replicas", replicas), ("devices", devices)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if address not in ("local", "auto") and not re.fullmatch(
            r"(ray://)?[^/:\s]+:\d{1,5}", address
        ):
            raise ValueError(
                f"the Ray address is {address!r}; it must be auto, HOST:PORT or ray://HOST:PORT, "
                "or local for a cluster here"
            )
        import_ray()
        self.address, self._requested, self.devices = address, replicas, devices
        self._on_exit, self._store_bytes = contextlib.ExitStack(), store_bytes
        self._handles: dict[int, _ReplicaHandle] = {}
        self._spawned = self._failed_starts = 0
        self._queue: collections.deque[_Job] = collections.deque()
        self._make: Callable[[], Work] | None = None
        self._idle_since = self._checked = 0.0
        self._gpus = False
        self.replicas = replicas or 0

    def __enter__(self) -> "RayPool":
        """Connects.

        Raises:
          ValueError: no answer at the address, a server that is no Ray cluster or one of another
            version, or nodes without room for the replicas.
        """
        with contextlib.ExitStack() as on_exit:
            ray = import_ray()
            if not ray.is_initialized():
                connect(self.address, on_exit, self._store_bytes)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self._gpus = os.environ.get("JAX_PLATFORMS") != "cpu" and any(
                node.get("GPU") for node in nodes
            )
            self.replicas = self._num_replicas(nodes)
            self._on_exit = on_exit.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for number in [*self._handles]:
            self._kill(number)
        self._on_exit.close()

    def start(self, make: Callable[[], Work], *, max_replicas: int | None = None) -> None:
        """Places replicas on nodes, and waits until the first one is ready for work.

        Others may be later; `run` then raises the errors of their nodes.

        Args:
          make: returns the work function; called once in each replica, where JAX has the replica's
            devices alone. It is pickled, so a function of a module that all nodes have, with
            `functools.partial` for its arguments.
          max_replicas: the number of replicas that are of use; default all.

        Raises:
          ValueError: what `make` has raised, with the name of the node; or replicas that die as
            they start, or find no room.
        """
        self._make = make
        for _ in range(min(self.replicas, max_replicas or self.replicas)):
            self._spawn()
        while not any(handle.stage == "ready" for handle in self._handles.values()):
            self._poll()

    def run(self, tasks: Sequence[Any]) -> Iterator[JobResult]:
        """Does the tasks, started in this order, and yields their results as they come.

        After an error, or where the caller stops, the pool can run other tasks. Tasks under way are
        done first, and what they make is dropped.

        Raises:
          ValueError: a task that has ended several replicas, named by its `str`; or an error of
            `start`, from later replicas.
          Exception: any error of the work function itself.
        """
        self._queue = collections.deque(_Job(task) for task in tasks)
        try:
            while self._queue or any(h.job and h.job.is_wanted for h in self._handles.values()):
                for handle in self._handles.values():
                    if handle.stage == "ready" and self._queue:
                        job = self._queue.popleft()
                        handle.stage, handle.job = "working", job
                        handle.reply = handle.actor.start.remote(job.task, frozenset(job.arrived))
                yield from self._poll()
        finally:
            self._queue.clear()
            for handle in self._handles.values():
                if handle.job:
                    handle.job.is_wanted = False

    def _num_replicas(self, nodes: Sequence[Mapping[str, float]]) -> int:
        """The number of replicas, given the resources of the nodes.

        Raises:
          ValueError: the nodes have no room for the requested number, even when idle.
        """
        resources = self.replica_resources()
        capacity = sum(
            int(min(node.get(name, 0) // count for name, count in resources.items()))
            for node in nodes
        )
        needed = 1 if self._requested is None else self._requested
        if needed > capacity:
            each = " and ".join(
                f"{count} {name}{'s' * (count > 1)}" for name, count in resources.items()
            )
            what = (
                f"{needed} replicas of {each} each are" if needed > 1 else f"1 replica of {each} is"
            )
            raise ValueError(
                f"{what} asked for, but the Ray cluster, of {len(nodes)} "
                f"node{'s' * (len(nodes) != 1)}, has room for {capacity}; lower --replicas, "
                "--tensor, --expert or --kv, or add nodes"
            )
        return capacity if self._requested is None else self._requested

    def replica_resources(self) -> dict[str, int]:
        """Returns what Ray reserves for a replica, such as {"CPU": 1}; known once connected."""
        return {"GPU": self.devices, "CPU": 1} if self._gpus else {"CPU": self.devices}

    def _spawn(self) -> None:
        """Requests one more replica, on any node with room."""
        resources = self.replica_resources()
        # Ray must not restart it: a replica on another node will do, and deaths are counted here.
        actor = (
            import_ray()
            .remote(concurrency_groups={"alive": 1})(ReplicaActor)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,
                max_task_retries=0,
            )
            .remote()
        )
        number = self._spawned
        self._handles[number] = _ReplicaHandle(number, actor, actor.node.remote())
        self._spawned += 1

    def _poll(self) -> list[JobResult]:
        """Waits up to a second for replies of replicas, and handles them."""
        ray = import_ray()
        self._check_silence()
        pending = {h.reply: h for h in self._handles.values() if h.reply is not None}
        if not ray.wait([*pending], timeout=_CHECK_SECONDS)[0]:
            self._check_placement()
            return []
        results: list[JobResult] = []
        for reply in ray.wait([*pending], num_returns=len(pending), timeout=0)[0]:
            handle = pending[reply]
            try:
                results += self._handle_reply(handle, ray.get(reply))
            except ray.exceptions.RayTaskError as error:
                job = handle.job
                if job:
                    handle.stage, handle.reply, handle.job = "ready", None, None
                if job is None or job.is_wanted:
                    # Its cause is the error that the replica's process raised.
                    raise error.cause from error
            except ray.exceptions.RayError as error:
                self._replica_died(handle, error)
        return results

    def _handle_reply(self, handle: _ReplicaHandle, reply: Any) -> list[JobResult]:
        """Takes a replica's reply, and requests the next one."""
        if handle.stage == "placing":
            handle.stage, handle.node = "loading", reply
            handle.reply = handle.actor.load.remote(self._make, self.devices, self._gpus)
            return []
        if handle.stage == "loading":
            handle.stage, handle.reply, self._failed_starts = "ready", None, 0
            return []
        pairs, done = reply
        job = handle.job
        assert job is not None
        new = {key: value for key, value in pairs if key not in job.arrived}
        job.arrived.update(new)
        if new:
            job.deaths = 0
        if done:
            handle.stage, handle.reply, handle.job = "ready", None, None
        else:
            handle.reply = handle.actor.next_results.remote()
        if not job.is_wanted:
            return []
        return [JobResult(job.task, key, value, handle.number) for key, value in new.items()]

    def _replica_died(self, handle: _ReplicaHandle, error: Exception) -> None:
        """Spawns another replica for one that has died, and puts its job back at the front."""
        reason, where = _death_reason(error), f" on {handle.node}" if handle.node else ""
        self._kill(handle.number)
        if handle.job and handle.job.is_wanted:
            handle.job.deaths += 1
            if handle.job.deaths == _MAX_DEATHS:
                self._spawn()  # for other tasks
                raise ValueError(
                    f"{handle.job.task} ended {_MAX_DEATHS} replicas one after the other, the "
                    f"last{where} ({reason}); take it out of the input, or give a replica more "
                    "memory"
                ) from error
            self._queue.appendleft(handle.job)
        elif handle.stage in ("placing", "loading"):
            self._failed_starts += 1
            if self._failed_starts == _MAX_DEATHS:
                raise ValueError(
                    f"{_MAX_DEATHS} replicas one after the other died as they started, the "
                    f"last{where} ({reason}); check that the nodes have the memory for the model, "
                    "and the same jaxshare installed"
                ) from error
        _log.warning(
            "replica %d%s is lost (%s); another takes its place", handle.number, where, reason
        )
        self._spawn()

    def _kill(self, number: int) -> None:
        """Ends a replica, if it still runs."""
        handle = self._handles.pop(number)
        with contextlib.suppress(Exception):  # of many kinds, where the cluster itself is gone
            import_ray().kill(handle.actor, no_restart=True)

    def _check_silence(self) -> None:
        """Gives up replicas whose processes are there, but have stopped.

        Only the time in which this process polls counts, as it may have been stopped itself.
        """
        ray, elapsed = import_ray(), time.monotonic() - self._checked
        if elapsed < _CHECK_SECONDS:
            return
        self._checked += elapsed
        for handle in [*self._handles.values()]:
            if handle.stage == "placing":
                continue
            if handle.ping is None or ray.wait([handle.ping], timeout=0)[0]:
                handle.silent = 0.0
                alive = handle.actor.alive.options(concurrency_group="alive")
                handle.ping = alive.remote()
                continue
            handle.silent += min(elapsed, 2 * _CHECK_SECONDS)
            if handle.silent >= _SILENT_SECONDS:
                self._replica_died(
                    handle,
                    TimeoutError(f"its process has not answered for {_SILENT_SECONDS:g} seconds"),
                )

    def _check_placement(self) -> None:
        """Raises ValueError if for a while no node has had room for any replica."""
        if any(handle.stage != "placing" for handle in self._handles.values()):
            self._idle_since = 0.0
            return
        self._idle_since = self._idle_since or time.monotonic()
        if time.monotonic() - self._idle_since > _PLACEMENT_SECONDS:
            raise ValueError(
                "no node of the Ray cluster has had room for a replica for "
                f"{_PLACEMENT_SECONDS} seconds; wait for what else runs there, or add nodes"
            )


def _death_reason(error: Exception) -> str:
    """The reason of a replica's death, from the paragraph that Ray writes about it."""
    text = " ".join(str(error).split())
    if isinstance(error, TimeoutError):
        return text
    return (text.rpartition("The actor is dead because ")[2] or type(error).__name__)[:300]
