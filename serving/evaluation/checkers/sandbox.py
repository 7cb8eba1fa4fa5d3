"""The sandbox runs a model's programs against tests, in a process of its own.

It limits time and memory, and has no network.

This guards against mistakes: endless loops, memory that grows, an answer looked up on the network,
a program that ends before its tests. It is NOT a jail. A program runs as you do: it can read the
files that you can read, and write those that you can write. Where the kernel allows namespaces
(Linux, `unshare`), it has no network at all and its processes die with it. Elsewhere Python itself
refuses to connect and to start other processes, which a malicious program can circumvent. For such
programs use a container or another machine.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_PROGRAM = Path(__file__).with_name("sandbox_process.py")
_NAMESPACES = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
_START_SECONDS = 10.0
"""Time for the start of a process, on a busy machine."""
_REPORT_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a program and its tests together.

    Attributes:
      seconds: of processor time; of wall time twice that, and some for the start.
      memory: bytes of address space, Python's own 20 MB or so included. macOS does not enforce it.
      files: bytes of each file that is written.

    Raises:
      ValueError: a limit that is not above 0.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    files: int = 1 << 26

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
def namespaces() -> tuple[str, ...]:
    """The command that starts a process without a network, or () where the system has none."""
    command = shutil.which("unshare")
    if command is None:
        return ()
    prefix = (command, *_NAMESPACES)
    probe = subprocess.run(
        [*prefix, "true"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    return prefix if probe.returncode == 0 else ()


def run_tests(
    program: str, tests: str, limits: Limits = Limits(), *, isolate: bool = True
) -> Verdict:
    """Runs a program, then its tests in the same module.

    Args:
      program: Python code. The block under `if __name__ == "__main__":` is not run.
      tests: Python code that uses the program's definitions, and raises an exception if they are
        wrong.
      limits: see `Limits`.
      isolate: in namespaces, where the system has them; False blocks the network in Python alone.
    """
    prefix = namespaces() if isolate else ()
    read, write = os.pipe()
    try:
        mark = secrets.token_hex(16)
        given = {
            "program": program,
            "tests": tests,
            "report": write,
            "mark": mark,
            "block": not prefix,
            "seconds": math.ceil(limits.seconds),
            "memory": limits.memory,
            "files": limits.files,
        }
        with tempfile.TemporaryDirectory(prefix="jaxshare-", ignore_cleanup_errors=True) as folder:
            error = _run_process(prefix, given, folder, write, 2 * limits.seconds + _START_SECONDS)
        os.set_blocking(read, False)
        return error or _verdict(read, mark)
    finally:
        os.close(read)
        os.close(write)


def _run_process(
    prefix: tuple[str, ...], given: dict[str, object], folder: str, report: int, seconds: float
) -> Verdict | None:
    """Runs the process to its end or its time limit; a verdict where it cannot report one."""
    # No variable of this process reaches the program: there are keys among them.
    environment = {
        "PATH": os.defpath,
        "HOME": folder,
        "LANG": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [*prefix, sys.executable, "-I", "-B", str(_PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=environment,
        pass_fds=[report],
        start_new_session=True,
    )
    try:
        process.communicate(json.dumps(given).encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        return Verdict(False, f"takes more than {seconds:g} seconds")
    finally:
        # Its children too, also where it has ended by itself.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


def _verdict(report: int, mark: str) -> Verdict:
    """Reads the report of the process."""
    try:
        result = json.loads(os.read(report, _REPORT_BYTES))
        if result["mark"] != mark:
            raise ValueError("another mark")
    except (BlockingIOError, ValueError, KeyError, TypeError):
        return Verdict(
            False,
            "ended before its tests did: it ends itself, or takes more time or memory than it may",
        )
    return Verdict(result["error"] is None, result["error"])
