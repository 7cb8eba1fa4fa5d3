"""The replica of a `RayPool`: an actor in a process of its own on some node."""

import os
import queue
import socket
import threading
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

from jaxshare.serving.cluster.ray_cluster import import_ray

Work = Callable[[Any, Collection[Hashable]], Iterator[tuple[Hashable, Any]]]
"""(task, arrived) -> (key, value) pairs of a task. `arrived`: the keys that have arrived already,
which need not be made again."""


class ReplicaActor:
    """A replica's process. Work goes on while its results are on their way."""

    def __init__(self):
        self._work: Work | None = None
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def node(self) -> str:
        """The name of this node. It returns once Ray has placed the replica."""
        return f"node {socket.gethostname()} ({import_ray().util.get_node_ip_address()})"

    def alive(self) -> None:
        """Answers at once, also while other methods work: it has a thread of its own."""

    def load(self, make: Callable[[], Work], devices: int, gpus: bool) -> None:
        """Makes the work function, with JAX limited to the replica's devices before.

        Raises:
          ValueError: whatever `make` raises that is the node's or the caller's fault; it names the
            node.
        """
        try:
            claim_devices(devices, gpus)
            self._work = make()
        except (ValueError, OSError, NotImplementedError, ImportError) as error:
            raise ValueError(f"{self.node()} cannot make its replica: {error}") from error

    def start(
        self, task: Any, arrived: Collection[Hashable]
    ) -> tuple[list[tuple[Hashable, Any]], bool]:
        """Starts a task, and returns its first results as `next_results` does."""
        assert self._work is not None
        self._results = queue.SimpleQueue()
        threading.Thread(
            target=_do,
            args=(self._work, task, arrived, self._results),
            name="jaxshare-task",
            daemon=True,
        ).start()
        return self.next_results()

    def next_results(self) -> tuple[list[tuple[Hashable, Any]], bool]:
        """Waits for results: all new pairs, and True if the task is done."""
        pairs = []
        result = self._results.get()
        while True:
            if isinstance(result, BaseException):
                raise result
            if result is None:
                return pairs, True
            pairs.append(result)
            try:
                result = self._results.get_nowait()
            except queue.Empty:
                return pairs, False


def _do(
    work: Work, task: Any, arrived: Collection[Hashable], results: "queue.SimpleQueue[Any]"
) -> None:
    """Does a task; its last result is None, or the error that ended it."""
    try:
        for pair in work(task, arrived):
            results.put(pair)
        results.put(None)
    except BaseException as error:  # any: raised in the driver
        results.put(error)


def claim_devices(devices: int, gpus: bool) -> None:
    """Limits JAX to this replica's devices, before it is used.

    Args:
      devices: their number.
      gpus: Ray has assigned GPUs; else CPUs.

    Raises:
      ValueError: Ray has assigned GPUs that JAX cannot use.
    """
    if not gpus:
        # Threads of XLA, which would otherwise take every core of the node.
        os.environ["PJRT_NPROC"] = str(devices)
    import jax

    if not gpus:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    elif jax.default_backend() == "cpu" or jax.local_device_count() < devices:
        raise ValueError(
            f"Ray has {devices} GPUs for it, but JAX has {jax.local_device_count()} devices of "
            f"kind {jax.default_backend()}; pip install 'jaxshare[cuda13]' there"
        )
