"""Processes that tests start and look at: a Ray cluster of its own, what runs below one, and ports."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CLUSTER = """
import ray, sys, tempfile
with tempfile.TemporaryDirectory(prefix="jaxshare-", dir="/tmp") as folder:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
             logging_level="ERROR", object_store_memory=100 * 2**20, _temp_dir=folder)
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()
"""


def free_port() -> int:
    """A port of this machine at which nothing listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@contextlib.contextmanager
def ray_cluster(compiled: Path) -> Iterator[tuple[str, int]]:
    """Runs a cluster of two CPUs in processes of its own, which share a compilation cache.

    Args:
      compiled: the folder of the cache.

    Yields:
      (address, process id)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        },
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.communicate("", timeout=60)


def below(pid: int) -> dict[int, str]:
    """The processes that one has started, directly or not, and their command lines."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            found[int(status.parent.name)] = parent, (status.parent / "cmdline").read_bytes()
    under, names = {pid}, {}
    while more := {p for p, (parent, _) in found.items() if parent in under} - under:
        under |= more
        names |= {p: found[p][1].replace(b"\0", b" ").decode(errors="replace") for p in more}
    return names


def wait_for(condition, seconds: float = 120):
    """Waits until the condition returns a true value, and returns it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition has not become true"
        time.sleep(0.01)
    return found
