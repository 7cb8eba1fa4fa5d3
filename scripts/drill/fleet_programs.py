"""Programs that the drill of the fleet starts: a Ray cluster of two nodes, and a pool's caller.

python -m scripts.drill.fleet_programs nodes FOLDER
python -m scripts.drill.fleet_programs pool ADDRESS
"""

import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock

TASKS, KEYS = 6, 8
SILENT, PLACEMENT = 8.0, 30.0
"""Seconds: a pool's own limits for replicas that stop and for nodes without room, made shorter."""


def nodes(folder: str) -> None:
    """Runs two nodes of one CPU; says the address; a line on stdin removes the second one."""
    os.environ["RAY_TMPDIR"] = folder  # the address of the cluster is written into ray/ of it
    os.mkdir(f"{folder}/ray")
    from ray.cluster_utils import Cluster

    more = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    head = {**more, "include_dashboard": False, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(**more)
    print(cluster.address, flush=True)
    if sys.stdin.readline():
        cluster.remove_node(second, allow_graceful=False)
    sys.stdin.read()
    cluster.shutdown()


def value(task: int, key: int) -> str:
    """The result of a task for a key."""
    return hashlib.sha256(f"{task} {key}".encode()).hexdigest()


def make(seconds: float) -> Any:
    """Makes a work function that takes some seconds for a result."""

    def work(task: int, arrived: Collection[Any]) -> Iterator[tuple[int, str]]:
        for key in range(KEYS):
            if key not in arrived:
                time.sleep(seconds)
                yield key, value(task, key)

    return work


def pool(address: str) -> None:
    """Does tasks on a pool, and prints each result as it comes, and then that all are done."""
    import ray.cloudpickle

    from jaxshare.serving.cluster import ray_pool

    ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    with (
        mock.patch.object(ray_pool, "_SILENT_SECONDS", SILENT),
        mock.patch.object(ray_pool, "_PLACEMENT_SECONDS", PLACEMENT),
        ray_pool.RayPool(address) as replicas,
    ):
        replicas.start(functools.partial(make, 0.1))
        for result in replicas.run(range(TASKS)):
            print(json.dumps([result.piece, result.key, result.value]), flush=True)
    print(json.dumps("done"), flush=True)


def main() -> int:
    program, argument = sys.argv[1:]
    try:
        {"nodes": nodes, "pool": pool}[program](argument)
    except ValueError as error:  # as the command line does
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
