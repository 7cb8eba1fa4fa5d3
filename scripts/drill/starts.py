"""Two starts at once of commands that share an output."""

import contextlib
import functools
import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxshare import models
from jaxshare.serving.agents.search_log import SearchLog
from jaxshare.serving.checkpoints import SavedCheckpoint, has_checkpoints
from jaxshare.serving.evaluation.runs import Run
from jaxshare.serving.workers.inspection.probe import Snapshot
from jaxshare.trace.trace import Trace
from scripts.drill import kills
from scripts.drill.drill import Drill
from scripts.drill.processes import LONGEST, finished, jaxshare, kill, started

_SEEDS = (5, 6)
_REFUSED = re.compile(
    r"jaxshare: error: [^\n]*(is being written by process \d+ on|exists|has checkpoints|--resume)"
    r"[^\n]*\n$"
)


def _seed_of_batch(folder: Path) -> int | None:
    return _seed_in(folder / "out.jsonl.job")


def _seed_of_evaluation(folder: Path) -> int | None:
    return _seed_in(folder / "out" / "settings.json")


def _seed_in(file: Path) -> int | None:
    return json.loads(file.read_bytes())["settings"]["seed"] if file.exists() else None


def _seed_of_session(folder: Path) -> int | None:
    if not has_checkpoints(folder / "saves"):
        return None
    with SavedCheckpoint(folder / "saves") as saved:
        return saved.metadata["settings"]["seed"]


# Commands of one kind.


class _Kind(NamedTuple):
    """A command with an output, and the seed that its files say."""

    command: kills.Command
    seed: Callable[[Path], int | None]


_KINDS = {
    "batch": _Kind(kills.COMMANDS["batch"], _seed_of_batch),
    "evaluate": _Kind(kills.COMMANDS["evaluate"], _seed_of_evaluation),
    "workers": _Kind(kills.COMMANDS["workers"], _seed_of_session),
}


def _command(kind: _Kind, folder: Path, seed: int) -> list[str]:
    command = kind.command.make(folder)
    command[command.index("--seed") + 1] = str(seed)
    return command


@functools.cache
def _unbroken(name: str, seed: int) -> Any:
    """The result of a command that has its output for itself."""
    folder, kind = Path(tempfile.mkdtemp(prefix="jaxshare-drill-")), _KINDS[name]
    try:
        return kind.command.result(folder, finished(_command(kind, folder, seed)))
    finally:
        shutil.rmtree(folder)


def throw_starts(rng: random.Random, folder: Path) -> int:
    """Starts two commands on one output, kills one of them at times, and resumes what is there."""
    name = rng.choice([*_KINDS])
    kind, is_killed = _KINDS[name], rng.random() < 0.4
    delays = rng.choice([(0.0, 0.0), (rng.random() * 2, 0.0), (rng.random() * 8, 0.0)])
    codes: list[int] = []
    with contextlib.ExitStack() as processes:
        both = []
        for seed, delay in zip(_SEEDS, delays, strict=True):
            both.append(processes.enter_context(started(_command(kind, folder, seed))))
            time.sleep(delay)
        if is_killed:
            time.sleep(rng.random() * 8)
            kill(rng.choice(both))
        for process in both:
            _, errors = process.communicate(timeout=LONGEST)
            codes.append(process.returncode)
            assert process.returncode in (0, 1, -9), f"exit {process.returncode}: {errors[-300:]}"
            assert process.returncode != 1 or _REFUSED.search(errors), f"it says {errors[-300:]}"
    assert codes.count(0) <= 1, "both have had the output"
    assert is_killed or 0 in codes, "none has had the output"
    seed = kind.seed(folder)
    assert seed is not None or 0 not in codes, "the one that has ended has written nothing"
    if 0 in codes:
        assert seed == _SEEDS[codes.index(0)], f"the output is of seed {seed}"
    last = _command(kind, folder, seed or _SEEDS[0])
    found = kind.command.result(folder, finished([*last, *["--resume"] * (seed is not None)]))
    expected = _unbroken(name, seed or _SEEDS[0])
    assert found == expected, f"the result of {name} differs:\n{found}\n{expected}"
    return 1 + (-9 in codes)


# Commands of two kinds.

_AGENT = """
from jaxshare.serving.agents import agent
@agent
async def one():
    return 7
AGENT, MODEL = one, "scripted"
def scripted():
    return None
"""
_SESSION = ("workers", "embedded", "--problem", "1. Compute 17 + 25.", "--budget", "64", "--json")


def _read_batch(output: Path) -> None:
    assert len([*map(json.loads, output.read_text(encoding="utf-8").splitlines())]) == 17


def _read_evaluation(output: Path) -> None:
    lines = (output / "runs.jsonl").read_bytes().splitlines()
    assert len([*map(Run.read, lines)]) == 12


def _read_checkpoint(output: Path) -> None:
    with SavedCheckpoint(output) as saved:
        assert saved.arrays()


def _read_model(output: Path) -> None:
    assert models.load(output).fingerprint == models.load("embedded").fingerprint


class _Writer(NamedTuple):
    """A command that writes an output: how it is made, and what reads the output as a whole."""

    make: Callable[[Path, Path], list[str]]
    read: Callable[[Path], object]


def _with_output(name: str, option: str) -> Callable[[Path, Path], list[str]]:
    def make(folder: Path, output: Path) -> list[str]:
        line = kills.COMMANDS[name].make(folder)
        line[line.index(option) + 1] = str(output)
        return line

    return make


def _agents(folder: Path, output: Path) -> list[str]:
    (folder / "agent.py").write_text(_AGENT, encoding="utf-8")
    return jaxshare("agents", "run", str(folder / "agent.py"), "--trace", str(output))


_WRITERS = {
    "batch": _Writer(_with_output("batch", "--output"), _read_batch),
    "evaluate": _Writer(_with_output("evaluate", "--out"), _read_evaluation),
    "workers": _Writer(_with_output("workers", "--checkpoint"), _read_checkpoint),
    "snapshot": _Writer(lambda _, to: jaxshare(*_SESSION, "--save", str(to)), Snapshot.load),
    "trace": _Writer(lambda _, to: jaxshare(*_SESSION, "--trace", str(to)), Trace.load),
    "agents": _Writer(_agents, SearchLog.load),
    "convert": _Writer(lambda _, to: jaxshare("convert", "embedded", str(to)), _read_model),
}
_SENTENCE = re.compile(r"jaxshare: error: [^\n]+\n$")


def throw_pair(rng: random.Random, folder: Path) -> int:
    """Starts two commands of any kinds on one output."""
    names, output = rng.choices([*_WRITERS], k=2), folder / "out"
    codes = []
    with contextlib.ExitStack() as processes:
        both = []
        for name in names:
            line = _WRITERS[name].make(folder, output)
            both.append(processes.enter_context(started(line)))
            time.sleep(rng.choice((0.0, rng.random(), 9 * rng.random())))
        for name, process in zip(names, both, strict=True):
            _, errors = process.communicate(timeout=LONGEST)
            codes.append(process.returncode)
            is_said = process.returncode == 1 and _SENTENCE.search(errors) and str(output) in errors
            assert process.returncode == 0 or is_said, f"{name} of {names}: {errors[-300:]}"
    done = [name for name, code in zip(names, codes, strict=True) if code == 0]
    assert done, f"none of {names} has had the output"
    wrong = []
    for name in done:  # the last may have replaced what the first has written
        try:
            _WRITERS[name].read(output)
        except (ValueError, AssertionError, OSError, KeyError) as error:
            wrong.append(f"{name}: {error}")
    assert len(wrong) < len({*done}), f"the output of {names} is damaged: {wrong}"
    return 1


DRILLS = [
    Drill(
        "pairs",
        "of two commands of any kinds that share an output one has it, or both one after the other",
        "two starts at once or one soon after the other",
        throw_pair,
    ),
    Drill(
        "starts",
        "of two commands that share an output one has it, and --resume goes on with its settings",
        "two starts at once or one soon after the other, and kill -9 of one of them",
        throw_starts,
    ),
]
