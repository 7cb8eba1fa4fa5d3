"""Commands that are killed with -9 at random points, and go on."""

import functools
import hashlib
import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from scripts.drill import engine_saves
from scripts.drill.drill import Drill
from scripts.drill.processes import Changes, finished, jaxshare, killed, moment, watched

_INPUT = "in.jsonl"
_LINES = [
    {"prompt": "1. 47 + 38\n2. 12 * 7\n3. 93 - 16\n4. 64 + 19\n5. 47 + 38"},
    {"prompt": "1. 47 + 38\n2. 12 * 7\n3. 93 - 16\n4. 64 + 19\n5. 12 * 7", "temperature": 0.5},
    {"messages": [{"role": "user", "content": "1. 90 - 17"}]},
    {"tokens": [5, 6, 7, 8, 9], "n": 5},
]


class Command(NamedTuple):
    """A command that goes on with `--resume`.

    Attributes:
      make: the command line that works in a folder; its input is written.
      result: what it comes to, from the folder and from what it prints.
      check: looks at the folder after each kill; raises AssertionError.
    """

    make: Callable[[Path], list[str]]
    result: Callable[[Path, str], Any]
    check: Callable[[Path], None] = lambda _: None


# Commands of jaxshare.


def _batch(folder: Path) -> list[str]:
    lines = "".join(json.dumps(line) + "\n" for line in _LINES)
    (folder / _INPUT).write_text(lines, encoding="utf-8")
    files = ["--input", str(folder / _INPUT), "--output", str(folder / "out.jsonl")]
    settings = ["--n", "4", "--max-new-tokens", "32", "--max-rows", "4", "--seed", "5"]
    return jaxshare("batch", "embedded", *files, *settings, "--temperature", "2")


def _batch_result(folder: Path, _: str) -> Any:
    """The lines, in their order."""
    lines = (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()
    results = [json.loads(line) for line in lines]
    for result in results:  # rounded by the rows that ran beside it
        result["logprob"] = round(result["logprob"], 2)
    return results


def _workers(folder: Path) -> list[str]:
    problem = ["--problem", "1. Compute 17 + 25. 2. Compute 6 * 7. 3. Compute 91 - 18."]
    settings = ["--budget", "300", "--temperature", "0.7", "--seed", "3", "--finish-at", "16,300"]
    saving = ["--checkpoint", str(folder / "saves"), "--checkpoint-every", "4"]
    return jaxshare("workers", "embedded", *problem, *settings, *saving, "--json")


def _workers_result(_: Path, printed: str) -> Any:
    """The session, without times."""
    return _without_times(json.loads(printed))


def _without_times(value: Any) -> Any:
    """A JSON value without what depends on the clock: times, and checksums of lines with them."""
    if isinstance(value, list):
        return [_without_times(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {k: _without_times(v) for k, v in value.items() if not re.search("second|checksum", k)}


def _evaluate(folder: Path) -> list[str]:
    task = ["--task", "sums", "--samples", "3", "--questions", "3", "--seeds", "2"]
    runs = ["--workers", "1,2", "--budgets", "24,48", "--temperature", "0.7", "--seed", "1"]
    return jaxshare("evaluate", "embedded", *task, *runs, "--out", str(folder / "out"))


def _evaluate_result(folder: Path, _: str) -> Any:
    """The runs, without times."""
    text = (folder / "out" / "runs.jsonl").read_text(encoding="utf-8")
    runs = [json.loads(line) for line in text.splitlines()]
    return sorted(json.dumps(_without_times(run), sort_keys=True) for run in runs)


COMMANDS = {
    "batch": Command(_batch, _batch_result),
    "workers": Command(_workers, _workers_result),
    "evaluate": Command(_evaluate, _evaluate_result),
}
"""The commands whose output another start could share, too."""


# Programs of a user's own, and the training.


def _agents(folder: Path) -> list[str]:
    return [*_agents_of_script(folder), "--model", "embedded"]


def _agents_of_script(folder: Path) -> list[str]:
    return [sys.executable, "-m", "scripts.drill.agents_run", str(folder / "journal.json")]


def _agents_result(folder: Path, printed: str) -> Any:
    """The states, scores and costs of all agents, the journal, and how often the model was asked,
    where an answer that the journal had must not be asked for again."""
    report = json.loads(printed)
    report["asked"] = report.pop("calls") + report.pop("kept")
    journal = json.loads((folder / "journal.json").read_text(encoding="utf-8"))
    return report, sorted(journal["entries"], key=lambda entry: (entry["run"], entry["path"]))


def _train(folder: Path) -> list[str]:
    model = ["--layers", "1", "--hidden", "72", "--tokens", "512", "--learning-rate", "0.02"]
    run = ["--steps", "6", "--accumulate", "1", "--evaluate-every", "0", "--processes", "0"]
    files = ["--run-dir", str(folder / "run"), "--out", str(folder / "out")]
    more = ["--save-seconds", "0", "--context", "4096", "--json"]
    return [sys.executable, "-m", "scripts.train.train_workers", *model, *run, *files, *more]


def _train_result(folder: Path, printed: str) -> Any:
    """The steps, the last loss, and the files of the model."""
    report = json.loads(printed)
    files = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("out/*")
    }
    return report["steps"], report["loss"], files


def _save(folder: Path) -> list[str]:
    files = [str(folder / "saves"), str(folder / "reported")]
    return [sys.executable, "-m", "scripts.drill.engine_saves", *files]


def _reported(folder: Path) -> dict[str, list[Any]]:
    """The answers and digests that have been reported; equal ones count once."""
    reported, found = folder / "reported", dict[str, list[Any]]()
    lines = reported.read_text(encoding="utf-8").splitlines() if reported.exists() else []
    for line in lines:
        for kind, value in json.loads(line).items():
            if value not in found.setdefault(kind, []):
                found[kind].append(value)
    return {kind: sorted(values) for kind, values in found.items()}


def _check_saves(folder: Path) -> None:
    """The newest checkpoint has what it had when it was complete."""
    digests = dict(_reported(folder).get("checkpoint", []))
    if digests:
        number, digest = engine_saves.digest(folder / "saves")
        assert number >= max(digests), f"checkpoint {max(digests)} is lost; the newest is {number}"
        assert digests.get(number, digest) == digest, f"checkpoint {number} has changed"


_PROGRAMS = {
    "agents": Command(_agents_of_script, _agents_result),
    "agents of the embedded model": Command(_agents, _agents_result),
    "train": Command(_train, _train_result),
    "save": Command(_save, lambda folder, _: _reported(folder)["answer"], _check_saves),
}


# The kills.


def throw_kills(names: tuple[str, ...], rng: random.Random, folder: Path) -> int:
    """Kills a command one to three times, resumes it, and compares it with the unbroken one."""
    name = rng.choice(names)
    command, (expected, most) = (COMMANDS | _PROGRAMS)[name], _unbroken(name)
    line, kills = command.make(folder), 0
    for _ in range(rng.choice([1, 1, 2, 3])):
        until, more = moment(rng, most)
        changes = Changes(folder)
        if not killed(_again(line, folder), lambda u=until, c=changes: c() >= u, more):
            break
        kills += 1
        command.check(folder)
    found = command.result(folder, finished(_again(line, folder)))
    assert found == expected, f"the resumed result differs:\n{found}\n{expected}"
    return kills


def _again(line: list[str], folder: Path) -> list[str]:
    """The command, which goes on where it has written more than its input."""
    has_begun = any(path.name != _INPUT for path in folder.iterdir())
    return [*line, *["--resume"] * has_begun]


@functools.cache
def _unbroken(name: str) -> tuple[Any, int]:
    """The result of a command that is not killed, and how often its files change."""
    folder, command = Path(tempfile.mkdtemp(prefix="jaxshare-drill-")), (COMMANDS | _PROGRAMS)[name]
    try:
        printed, changes = watched(command.make(folder), folder)
        return command.result(folder, printed), changes
    finally:
        shutil.rmtree(folder)


_FAULT = "kill -9 one to three times, after random changes of its files"


def _drill(name: str, promise: str, *names: str) -> Drill:
    return Drill(f"kill-{name}", promise, _FAULT, functools.partial(throw_kills, names or (name,)))


DRILLS = [
    *(
        _drill(name, f"a killed `jaxshare {name}` comes with --resume to what the unbroken one has")
        for name in COMMANDS
    ),
    _drill(
        "agents",
        "killed agents come with the journal that they have saved to what unbroken ones have, and "
        "ask for no answer that is in it",
        *["agents"] * 3,
        "agents of the embedded model",
    ),
    _drill("train", "a killed training comes with --resume to the same parameters, bit for bit"),
    _drill(
        "save",
        "a killed engine is restored from a whole checkpoint, and answers as the unbroken one",
    ),
]
