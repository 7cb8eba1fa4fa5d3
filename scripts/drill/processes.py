"""Processes of the drill: run to their end, or killed with -9 at a point of their progress."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

LONGEST = 600  # seconds that a command may take


def jaxshare(*arguments: str) -> list[str]:
    """The command line of `jaxshare` with these arguments."""
    return [sys.executable, "-m", "jaxshare.serving.cli.main", *arguments]


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Starts a command in a session of its own, of which nothing is left afterwards."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        kill(process)
        process.communicate()


def kill(process: subprocess.Popen[str]) -> None:
    """Kills a process, and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def ended(command: Sequence[str]) -> tuple[int, str, str]:
    """Runs a command to its end; returns its exit code, what it prints and what it says."""
    with started(command) as process:
        printed, errors = process.communicate(timeout=LONGEST)
    return process.returncode, printed, errors


def finished(command: Sequence[str]) -> str:
    """Runs a command that must succeed; returns what it prints."""
    code, printed, errors = ended(command)
    assert code == 0, f"exit {code}: {errors[-300:]}"
    return printed


def killed(command: Sequence[str], is_due: Callable[[], bool], more: float) -> bool:
    """Kills a command some seconds after it is due; False if it had ended before."""
    with started(command) as process:
        deadline = time.monotonic() + LONGEST
        while process.poll() is None and time.monotonic() < deadline and not is_due():
            time.sleep(0.0002)
        # Read meanwhile, so that a command with much to say does not wait for its reader.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=more)
        kill(process)
        process.communicate()
    return process.returncode == -signal.SIGKILL


class Changes:
    """Counts the states that a folder's files come to, by their names and sizes.

    Attributes:
      count: the changes seen so far.
    """

    def __init__(self, folder: Path):
        self.count, self._folder = 0, folder
        self._seen = self._state()

    def __call__(self) -> int:
        """Looks at the folder again; returns the count."""
        if (state := self._state()) != self._seen:
            self.count, self._seen = self.count + 1, state
        return self.count

    def _state(self) -> dict[str, int]:
        found = {}
        for path, _, names in os.walk(self._folder):
            for name in ("", *names):
                with contextlib.suppress(OSError):  # it has just been removed or renamed
                    found[place] = os.stat(place := os.path.join(path, name)).st_size
        return found


def watched(command: Sequence[str], folder: Path) -> tuple[str, int]:
    """Runs a command that must succeed; returns what it prints and how often a folder changed."""
    changes = Changes(folder)
    with started(command) as process:
        while process.poll() is None:
            changes()
            time.sleep(0.0002)
        printed, errors = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, f"exit {process.returncode}: {errors[-300:]}"
    return printed, changes()


def moment(rng: random.Random, most: int) -> tuple[int, float]:
    """Draws a number of changes to wait for, and the seconds after it; also before the first."""
    until = rng.choice([0, *range(1, most + 1)])
    return until, rng.random() * (3 if until == 0 else rng.choice([0.0005, 0.005, 0.05]))
