"""The sandbox runs a model's programs against tests.

The program runs in one process, and the tests, which compare, in another that it cannot reach:
nothing that a program prints, writes or sends counts as passed. Both are limited together.

Where the kernel allows namespaces (Linux, with bubblewrap or else `unshare`; see `isolation`), a
program sees a file system of its own with Python and the system's libraries, which it can read, and
a folder in memory, which it can write. It has no network, and sees no process, variable, file or
socket of yours. Elsewhere Python itself refuses to connect, to start processes and to read /proc, which a malicious program can circumvent;
it can then read and write what you can. `notice` says what a machine lacks.

This is NOT a jail either way. A program still talks to your kernel, whose faults it may use;
memory and processes are counted every hundredth of a second, so that a burst may pass a limit for
that long; memory that no process has mapped is not counted; the hypervisor of a virtual machine
(vsock) and the keys that the kernel keeps for you are not shut off; and a test that asks one of the
program's own objects about itself gets the program's answer. For programs that mean harm use a
container or another machine.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxshare.serving.evaluation.checkers import process_counts
from jaxshare.serving.evaluation.checkers.isolation import PYTHON, Way, known_ways
from jaxshare.serving.evaluation.checkers.sandbox_view import MAX_FILES, WORK

_PROGRAM = Path(__file__).with_name("sandbox_process.py")
_START_SECONDS = 10.0
"""Time for the start of a process, on a busy machine."""
_REPORT_BYTES = 1 << 16
_INTERVAL = 0.01
"""Seconds between two counts of memory and processes."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a program and its tests together.

    Attributes:
      seconds: of processor time; of wall time twice that, and some for the start.
      memory: bytes of address space of each process, Python's own 20 MB or so included, and of
        memory of all processes together. macOS does not enforce it.
      files: bytes of all files together; of each file, where the system has no namespaces.
      processes: processes and threads together, at least those of the sandbox itself, which are 4.

    Raises:
      ValueError: a limit that is not above 0.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    files: int = 1 << 26
    processes: int = 64

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; a program needs more than 0 of it")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of tests: passed, or the reason why not."""

    passed: bool
    error: str | None = None


@functools.cache
def ways() -> tuple[Way, ...]:
    """The ways to start a judged process that work on this machine, the best first."""
    return tuple(
        way for way in known_ways() if not way.has_namespaces or _run("", "", Limits(), way).passed
    )


def way_named(isolate: bool | str) -> Way:
    """The best way, or with False the one without namespaces, or the one of this name.

    Raises:
      ValueError: the machine does not have it.
    """
    if isolate is True:
        return ways()[0]
    name = isolate or PYTHON
    for way in ways():
        if way.name == name:
            return way
    raise ValueError(f"isolate is {isolate!r}, which does not work on this machine")


def notice() -> str | None:
    """One sentence on what the sandbox cannot hold on this machine, or None."""
    if ways()[0].has_namespaces:
        return None
    missing = "this system gives no namespaces to the sandbox (neither by bubblewrap, `bwrap`, nor "
    return (
        f"{missing}by `unshare` with users, mounts, processes and network), so a program that means "
        "harm can read and write what you can, leave processes and take more than its limits; "
        "install bubblewrap, or run programs that you do not trust in a container"
    )


def run_tests(
    program: str,
    tests: str,
    limits: Limits = Limits(),
    *,
    preamble: str = "",
    isolate: bool | str = True,
) -> Verdict:
    """Runs a program, and its tests as though in the same module.

    The tests run in another process. Plain data is copied between the two, and what a call changes
    in a list, dict or set is changed for the tests too. The program's own objects stay where they
    are: the tests can call and use them, compare them with each other, and compare those that are
    lists, numbers or the like with plain data.

    Args:
      program: Python code. The block under `if __name__ == "__main__":` is not run.
      tests: Python code that uses the program's definitions, and raises an exception if they are
        wrong. Python's own names mean Python's own; `from solution import max` takes the program's.
      limits: see `Limits`.
      preamble: Python code that is run before the program, in the same module.
      isolate: in namespaces, where the system has them; False blocks the network in Python alone,
        and a name chooses a way (`isolation`).
    """
    return _run(program, tests, limits, way_named(isolate), preamble)


def _run(program: str, tests: str, limits: Limits, way: Way, preamble: str = "") -> Verdict:
    with judged_folder() as folder:
        verdict = _run_in(folder, program, tests, limits, way, preamble)
    return verdict if folder.left is None else Verdict(False, folder.left)


class JudgedFolder:
    """A folder for a judged process.

    Attributes:
      path: of the folder.
      left: why it could not be removed afterwards, or None.
    """

    def __init__(self, path: str):
        self.path, self.left = path, None


@contextlib.contextmanager
def judged_folder() -> Iterator[JudgedFolder]:
    """Makes a folder for a judged process, and removes it whatever is in it."""
    folder = JudgedFolder(tempfile.mkdtemp(prefix="jaxshare-"))
    try:
        yield folder
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(folder.path)
        raise
    try:
        _remove(folder.path)
    except OSError as error:
        folder.left = f"left a folder that cannot be removed ({error}); remove {folder.path}"


def _run_in(
    folder: JudgedFolder, program: str, tests: str, limits: Limits, way: Way, preamble: str
) -> Verdict:
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(end) for end in socket.socketpair()]
        read, write = os.pipe()
        stack.callback(os.close, read)
        processes = []
        stack.callback(kill, processes)
        try:
            for source, before, end, report in (
                (program, preamble, ends[0], None),
                (tests, "", ends[1], write),
            ):
                orders = {"source": source, "preamble": before}
                orders |= {"calls": end.fileno(), "report": report}
                passed = [end.fileno(), *([write] if report else [])]
                processes.append(start(way, orders, passed, folder, limits))
        finally:
            os.close(write)
        # Each end is in one process alone, so that either notices when the other has ended.
        for end in ends:
            end.close()
        error = wait(processes, limits)
        os.set_blocking(read, False)
        return Verdict(False, error) if error else _verdict(read)


def start(
    way: Way,
    orders: Mapping[str, Any],
    passed: Sequence[int],
    folder: JudgedFolder,
    limits: Limits,
) -> subprocess.Popen[bytes]:
    """Starts a judged process.

    Args:
      way: to start it.
      orders: see `sandbox_process`; its limits are added.
      passed: file descriptors that it gets.
      folder: an empty one.
      limits: of it.
    """
    orders = {
        **dataclasses.asdict(limits),
        "seconds": math.ceil(limits.seconds),
        "namespaces": way.has_namespaces,
        "view": way.makes_view,
        "folder": folder.path,
        **orders,
    }
    # No variable of this process reaches the program: there are keys among them.
    environment = {
        "PATH": os.defpath,
        "HOME": way.folder(folder.path),
        "LANG": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile() as file:  # a pipe might not take all of it at once
        file.write(json.dumps(orders).encode())
        file.seek(0)
        return subprocess.Popen(
            [*way.prefix(limits.files), sys.executable, "-I", "-B", str(_PROGRAM)],
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder.path,
            env=environment,
            pass_fds=passed,
            start_new_session=True,
        )


def wait(processes: Sequence[subprocess.Popen[bytes]], limits: Limits) -> str | None:
    """Waits for the last process to end; returns the limit that was passed, if any."""
    seconds = 2 * limits.seconds + _START_SECONDS
    end = time.monotonic() + seconds
    while True:
        try:
            processes[-1].wait(_INTERVAL)
            return None
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > end:
            return f"takes more than {seconds:g} seconds"
        pids = [pid for process in processes for pid in process_counts.descendants(process.pid)]
        count = sum(len(process_counts.threads(pid)) for pid in pids)
        if count > limits.processes:
            return f"has {count} processes and threads, more than {limits.processes}"
        sums = (sum(map(count, pids)) for count in (process_counts.resident, process_counts.share))
        if all(taken > limits.memory for taken in sums):
            return f"takes more than {limits.memory} bytes of memory in all its processes"
        if any(process_counts.files(pid, WORK) > MAX_FILES for pid in pids):
            return f"makes more than {MAX_FILES} files"


def kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends processes and what they have started, also where they have ended by themselves."""
    for process in processes:
        for pid in [*process_counts.descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _verdict(report: int) -> Verdict:
    """Reads the report of the tests' process."""
    try:
        error = json.loads(os.read(report, _REPORT_BYTES))["error"]
    except (BlockingIOError, ValueError):
        error = "ended before its tests did, and so did the process of the tests"
    # Half of a surrogate pair is in no text that a file can hold.
    return Verdict(error is None, error and error.encode(errors="replace").decode())


def _remove(folder: str) -> None:
    """Removes a folder however deep it is.

    Folders within folders are first moved to the top, so that no path is long and nothing recurs.

    Raises:
      OSError: something cannot be removed.
    """
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        moved = 0
        while names := os.listdir(top):
            for name in names:
                moved = _empty(top, name, moved)
    finally:
        os.close(top)
    os.rmdir(folder)


def _empty(top: int, name: str, moved: int) -> int:
    """Removes an entry of a folder; folders in it become entries named with numbers from `moved`.

    Returns:
      The first number that is left.
    """
    if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=top)
        return moved
    os.chmod(name, 0o700, dir_fd=top)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for entry in os.listdir(inner):
            if not stat.S_ISDIR(os.stat(entry, dir_fd=inner, follow_symlinks=False).st_mode):
                os.unlink(entry, dir_fd=inner)
                continue
            os.chmod(entry, 0o700, dir_fd=inner)  # a folder that moves is written to
            while os.access(f".jaxshare-{moved}", os.F_OK, dir_fd=top, follow_symlinks=False):
                moved += 1
            os.rename(entry, f".jaxshare-{moved}", src_dir_fd=inner, dst_dir_fd=top)
            moved += 1
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)
    return moved
