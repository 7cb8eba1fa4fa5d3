"""Commands that are killed with -9 at random points, and go on."""

import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.drill.drill import Drill

_LINES = [
    {"prompt": "1. 47 + 38\n2. 12 * 7\n3. 93 - 16\n4. 64 + 19\n5. 47 + 38"},
    {"prompt": "1. 47 + 38\n2. 12 * 7\n3. 93 - 16\n4. 64 + 19\n5. 12 * 7", "temperature": 0.5},
    {"messages": [{"role": "user", "content": "1. 90 - 17"}]},
    {"tokens": [5, 6, 7, 8, 9], "n": 5},
]
_LONGEST = 600  # seconds that a command may take


def _jaxshare(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "jaxshare.serving.cli.main", *arguments]


def _batch(folder: Path) -> list[str]:
    lines = "".join(json.dumps(line) + "\n" for line in _LINES)
    (folder / "in.jsonl").write_text(lines, encoding="utf-8")
    files = ["--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    settings = ["--n", "4", "--max-new-tokens", "32", "--max-rows", "4", "--seed", "5"]
    return _jaxshare(folder, "batch", "embedded", *files, *settings, "--temperature", "2")


def _batch_progress(folder: Path) -> int:
    output = folder / "out.jsonl"
    return output.read_bytes().count(b"\n") if output.exists() else 0


def _batch_result(folder: Path, _: str) -> Any:
    lines = (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()
    results = [json.loads(line) for line in lines]
    for result in results:  # rounded by the rows that ran beside it
        result["logprob"] = round(result["logprob"], 2)
    return results


def _workers(folder: Path) -> list[str]:
    problem = ["--problem", "1. Compute 17 + 25. 2. Compute 6 * 7. 3. Compute 91 - 18."]
    settings = ["--budget", "300", "--temperature", "0.7", "--seed", "3", "--finish-at", "16,300"]
    saving = ["--checkpoint", str(folder / "saves"), "--checkpoint-every", "4"]
    return _jaxshare(folder, "workers", "embedded", *problem, *settings, *saving, "--json")


def _workers_progress(folder: Path) -> int:
    numbers = [int(path.name) for path in folder.glob("saves/*") if path.name.isdigit()]
    return max(numbers, default=0)


def _workers_result(_: Path, printed: str) -> Any:
    return _without_times(json.loads(printed))


def _without_times(value: Any) -> Any:
    """A JSON value without what depends on the clock."""
    if isinstance(value, list):
        return [_without_times(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {k: _without_times(v) for k, v in value.items() if not re.search("second", k)}


def _evaluate(folder: Path) -> list[str]:
    task = ["--task", "sums", "--samples", "3", "--questions", "3", "--seeds", "2"]
    runs = ["--workers", "1,2", "--budgets", "24,48", "--temperature", "0.7", "--seed", "1"]
    return _jaxshare(folder, "evaluate", "embedded", *task, *runs, "--out", str(folder / "out"))


def _evaluate_progress(folder: Path) -> int:
    runs = folder / "out" / "runs.jsonl"
    return runs.read_bytes().count(b"\n") if runs.exists() else 0


def _evaluate_result(folder: Path, _: str) -> Any:
    """The scores, without times."""
    text = (folder / "out" / "runs.jsonl").read_text(encoding="utf-8")
    runs = [json.loads(line) for line in text.splitlines()]
    return sorted(json.dumps(_without_times(run), sort_keys=True) for run in runs)


def _start(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _finished(command: list[str]) -> str:
    """Runs a command to its end; returns what it prints."""
    process = _start(command)
    printed, errors = process.communicate(timeout=_LONGEST)
    assert process.returncode == 0, f"exit {process.returncode}: {errors[-300:]}"
    return printed


def _killed(command: list[str], progress: Callable[[], int], until: int, more: float) -> bool:
    """Kills a command after so much progress and some seconds; False if it had ended before."""
    process, deadline = _start(command), time.monotonic() + _LONGEST
    while process.poll() is None and time.monotonic() < deadline and progress() < until:
        time.sleep(0.001)
    time.sleep(more)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def throw_kills(
    make: Callable[[Path], list[str]],
    progress: Callable[[Path], int],
    result: Callable[[Path, str], Any],
    rng: random.Random,
    folder: Path,
) -> int:
    """Kills a command one to three times, resumes it, and compares it with the unbroken one."""
    expected, most = _unbroken(make, progress, result)
    command, kills, resumed = make(folder), 0, False
    for _ in range(rng.choice([1, 1, 2, 3])):
        # Also before anything is written, and while the last is put into its place.
        until = rng.choice([0, *range(1, most + 1)])
        begun = progress(folder)
        more = rng.random() * (6 if until == 0 else 0.05)
        again = [*command, *["--resume"] * resumed]
        if not _killed(again, lambda: progress(folder), max(until, begun), more):
            break
        kills += 1
        resumed = any(folder.iterdir()) and _has_begun(folder)
    printed = _finished([*command, *["--resume"] * _has_begun(folder)])
    found = result(folder, printed)
    assert found == expected, f"the resumed result differs:\n{found}\n{expected}"
    return kills


def _has_begun(folder: Path) -> bool:
    """True if a command has written more than its input."""
    return any(path.name not in ("in.jsonl",) for path in folder.iterdir())


@functools.cache
def _unbroken(
    make: Callable[[Path], list[str]],
    progress: Callable[[Path], int],
    result: Callable[[Path, str], Any],
) -> tuple[Any, int]:
    """The result of a command that is not killed, and how much progress there is in it."""
    folder = Path(tempfile.mkdtemp(prefix="jaxshare-drill-"))
    try:
        printed = _finished(make(folder))
        return result(folder, printed), progress(folder)
    finally:
        shutil.rmtree(folder)


def _drill(name: str, *parts: Any) -> Drill:
    return Drill(
        f"kill-{name}",
        f"a killed `jaxshare {name}` goes on with --resume to what the unbroken one comes to",
        "kill -9 one to three times, at random points of its progress",
        functools.partial(throw_kills, *parts),
    )


DRILLS = [
    _drill("batch", _batch, _batch_progress, _batch_result),
    _drill("workers", _workers, _workers_progress, _workers_result),
    _drill("evaluate", _evaluate, _evaluate_progress, _evaluate_result),
]
