"""A pool of replicas on a Ray cluster whose processes, nodes and network fail."""

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.drill import fleet_programs
from scripts.drill.drill import Drill

_START = 120
"""Seconds in which a cluster starts, also on a busy machine."""
_LONGEST = 150
"""Seconds within which a job has ended, whatever happens to it."""
_MARK = "JAXSHARE_DRILL"
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    # A node that is silent is lost sooner than after half a minute, and so is the head.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
}


def _marked(mark: str) -> dict[int, str]:
    """The processes that were started with a mark in their environment, and their command lines."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and f"{_MARK}={mark}".encode() in (place / "environ").read_bytes():
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(place.name)] = words.decode(errors="replace")
    return found


def _start(mark: str, token: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.drill.fleet_programs", *arguments],
        env={**os.environ, **_ENVIRONMENT, "RAY_AUTH_TOKEN": token, _MARK: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def _no_process_left(mark: str) -> Iterator[None]:
    """Raises AssertionError if processes with a mark are left after some time; ends them."""
    try:
        yield
        deadline = time.monotonic() + 90  # a cluster without a head ends itself, with some delay
        while _marked(mark) and time.monotonic() < deadline:
            time.sleep(0.2)
        left = _marked(mark)
        assert not left, f"processes are left: {left}"
    finally:
        for pid in _marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class _Cluster:
    """Two nodes, in processes that have a mark."""

    def __init__(self, mark: str, folder: str):
        self.mark, self.token = mark, secrets.token_hex(32)
        self.process = _start(mark, self.token, "nodes", folder)
        assert self.process.stdout
        timer = threading.Timer(_START, self.process.kill)
        timer.start()
        lines = iter(self.process.stdout.readline, "")
        self.address = next((line.strip() for line in lines if line.strip()[-1:].isdigit()), "")
        timer.cancel()
        assert self.address, f"the cluster does not start: {self.process.communicate()[1][-500:]}"
        self.has_second = True

    def find(self, word: str) -> list[int]:
        """The processes whose command lines have a word, the oldest first."""
        return sorted(pid for pid, words in _marked(self.mark).items() if word in words)

    def remove_node(self) -> None:
        """Removes the second node."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.has_second = False

    def close(self) -> None:
        self.process.communicate(timeout=60)


Fault = Callable[[_Cluster, random.Random], None]


def _signal(pids: list[int], number: int) -> bool:
    """Sends a signal; False where none of the processes is there."""
    sent = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            sent = True
    return sent


def _stop(pids: list[int], seconds: float) -> None:
    """Stops processes for some seconds."""
    _signal(pids, signal.SIGSTOP)
    time.sleep(seconds)
    _signal(pids, signal.SIGCONT)


def _kill_replica(cluster: _Cluster, rng: random.Random) -> None:
    if replicas := cluster.find("ReplicaActor"):
        _signal([rng.choice(replicas)], signal.SIGKILL)


def _stop_replica(cluster: _Cluster, rng: random.Random) -> None:
    if replicas := cluster.find("ReplicaActor"):
        _stop([rng.choice(replicas)], rng.choice((1.0, fleet_programs.SILENT + 5)))


def _stop_for_good(cluster: _Cluster, rng: random.Random) -> None:
    """Stops one replica or all of them, and nothing lets them go on."""
    replicas = cluster.find("ReplicaActor")
    _signal(replicas[: rng.randrange(1, 3)], signal.SIGSTOP)


def _remove_node(cluster: _Cluster, rng: random.Random) -> None:
    if cluster.has_second:
        cluster.remove_node()


def _block_node(cluster: _Cluster, rng: random.Random) -> None:
    """The second node's daemon is silent, for a moment or until the node is lost."""
    if cluster.has_second:
        seconds = rng.choice((1.0, 15.0))
        _stop(cluster.find("raylet/raylet")[-1:], seconds)
        cluster.has_second = seconds < 2


def _block_head(cluster: _Cluster, rng: random.Random) -> None:
    """The head of the cluster is silent for a moment."""
    _stop(cluster.find("gcs_server"), rng.random() * 2)


_FAULTS: tuple[Fault, ...] = (
    _kill_replica,
    _kill_replica,
    _stop_replica,
    _stop_for_good,
    _remove_node,
    _block_node,
    _block_head,
)


@contextlib.contextmanager
def _running(cluster: _Cluster, address: str) -> Iterator[tuple[subprocess.Popen[str], list]]:
    """A job in a process of its own, and its results so far; it is ended when it takes too long."""
    results: list = []
    with _start(cluster.mark, cluster.token, "pool", address) as job:  # which closes its pipes

        def read() -> None:
            assert job.stdout
            for line in job.stdout:
                with contextlib.suppress(json.JSONDecodeError):
                    results.append(json.loads(line))

        reader = threading.Thread(target=read)
        reader.start()
        timer = threading.Timer(_LONGEST, job.kill)
        timer.start()
        try:
            yield job, results
        finally:
            job.kill()
            timer.cancel()
            reader.join()


def _throw(cluster: _Cluster, rng: random.Random, faults: list[Fault]) -> None:
    """Runs a job while faults come; its results must be those of one without them."""
    names = ", ".join(fault.__name__.strip("_") for fault in faults)
    with _running(cluster, cluster.address) as (job, results):
        errors = _in_background(job.stderr)
        for fault in faults:
            until = len(results) + rng.randrange(0, 10)
            while job.poll() is None and len(results) < until:
                time.sleep(0.01)
            if job.poll() is None:
                fault(cluster, rng)
        job.wait()
        text = "".join(errors())
    _check(results, f"after {names}: exit {job.returncode}, {len(results)} results, {text[-800:]}")
    assert job.returncode == 0 and results[-1] == "done", (
        f"after {names} the job ended with {job.returncode} and {len(results)} results: "
        f"{text[-800:]}"
    )
    assert len(results) == fleet_programs.TASKS * fleet_programs.KEYS + 1


def _in_background(stream) -> Callable[[], list[str]]:
    """Reads a stream in a thread, so that its writer never waits; returns how to get the lines."""
    lines: list[str] = []
    thread = threading.Thread(target=lambda: lines.extend(stream))
    thread.start()

    def get() -> list[str]:
        thread.join()
        return lines

    return get


def _check(results: list, words: str) -> None:
    """Every result is right, and none came twice."""
    pairs = [tuple(each) for each in results if isinstance(each, list)]
    for task, key, value in pairs:
        assert value == fleet_programs.value(task, key), f"a wrong result {words}"
    assert len({pair[:2] for pair in pairs}) == len(pairs), f"a result came twice {words}"


def _lose_the_head(cluster: _Cluster, rng: random.Random) -> None:
    """A job whose cluster is gone, or is silent for good, ends with an error that says so."""
    number = rng.choice((signal.SIGKILL, signal.SIGSTOP))
    with _running(cluster, cluster.address) as (job, results):
        errors = _in_background(job.stderr)
        until = rng.randrange(0, 10)
        while job.poll() is None and len(results) < until:
            time.sleep(0.01)
        _signal(cluster.find("gcs_server"), number)
        begun = time.monotonic()
        job.wait()
        seconds, text = time.monotonic() - begun, "".join(errors())
    _check(results, f"after {number!r} of the head: {text[-800:]}")
    assert job.returncode != -signal.SIGKILL, f"a job without a head has not ended in {_LONGEST} s"
    if results[-1:] != ["done"]:
        assert job.returncode > 0 and text.strip(), f"exit {job.returncode}: {text[-800:]}"
    assert seconds < 120


def _mute_address(cluster: _Cluster, rng: random.Random) -> None:
    """An address that takes connections and never answers is an error within half a minute."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with _running(cluster, address) as (job, results):
            begun = time.monotonic()
            errors = _in_background(job.stderr)
            job.wait()
            text = "".join(errors())
    assert job.returncode == 1 and not results
    assert address in text and time.monotonic() - begun < 90, text[-800:]


def throw_at_fleet(rng: random.Random, _: Path) -> int:
    """Starts a cluster, runs jobs on it while it fails, and ends it."""
    mark = secrets.token_hex(8)
    folder = tempfile.mkdtemp(prefix="jaxshare-", dir="/tmp")  # short, for Ray's sockets
    try:
        with _no_process_left(mark):
            cluster, count = _Cluster(mark, folder), 0
            for _ in range(rng.randrange(1, 3)):
                faults = rng.choices(_FAULTS, k=rng.randrange(1, 3))
                _throw(cluster, rng, faults)
                count += len(faults)
            if rng.random() < 0.4:
                rng.choice((_lose_the_head, _mute_address))(cluster, rng)
                count += 1
            _signal([*_marked(mark)], signal.SIGCONT)
            cluster.close()
        return count
    finally:
        shutil.rmtree(folder, ignore_errors=True)


DRILLS = [
    Drill(
        "fleet",
        "every result is right and comes once, jobs go on with what is left, or end with the "
        "cause; nothing hangs or is left",
        "kill -9 and stops of replicas, a node that is removed or silent, a head that is silent or "
        "gone, an address that never answers",
        throw_at_fleet,
    )
]
