"""A run of agents that is killed with -9 many times, and counts its calls."""

import functools
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxshare.serving.agents.call_keys import digest_of
from scripts.drill.drill import Drill
from scripts.drill.processes import finished, killed

KILLS = 10
"""The kills of one case."""

Firing = tuple[str, tuple[int, ...]]
"""(id of a run, its state when it asked the model)."""


class Kept(NamedTuple):
    """The outcomes that a journal had at a kill.

    Attributes:
      lines: the lines that the file of calls had.
      firings: those that the model had answered; parts: the numbers of answers in others.
      tools: keys of the calls of tools that had ended.
    """

    lines: int
    firings: set[Firing]
    parts: Counter[Firing]
    tools: set[str]


def throw_kills(rng: random.Random, folder: Path, kills: int = KILLS) -> int:
    """Kills a run at random moments, and goes on with the same command each time."""
    line, (expected, whole) = _command(folder), _unbroken()
    calls, kept = folder / "calls", list[Kept]()
    for left in range(kills, 0, -1):
        done = len(_lines(calls))
        until = done + rng.randint(0, max(1, 2 * (len(whole) - done) // left))
        more = rng.random() * (2.0 if until == done else rng.choice([0.0005, 0.005, 0.02]))
        if not killed(line, lambda least=until: len(_lines(calls)) >= least, more):
            break
        kept.append(_kept(folder))
    found = json.loads(finished(line))
    assert found == expected, f"the resumed result differs:\n{found}\n{expected}"
    check(_lines(calls), kept, Counter(map(_firing, _begun(whole, "run"))))
    return len(kept)


def check(
    lines: Sequence[dict[str, Any]], kept: Sequence[Kept], total: Counter[Firing | None]
) -> None:
    """Raises an AssertionError if anything was called again that had answered.

    Args:
      lines: of the file of calls.
      kept: what the journal had at each kill.
      total: the numbers of calls of each firing in a run that was not killed.
    """
    for number, before in enumerate(kept, 1):
        later = lines[before.lines :]
        again = {each["key"] for each in _begun(later, "tool")} & before.tools
        assert not again, f"tools that had answered are called again after kill {number}: {again}"
        asked = {each["key"]: _firing(each) for each in _begun(later, "run")}
        for firing, count in Counter(asked.values()).items():
            most = 0 if firing in before.firings else total[firing] - before.parts[firing]
            assert count <= most, f"{firing} is asked {count} times after kill {number}, not {most}"
    _check_order([_firing(each) for each in _begun(lines, "run")])


def _check_order(asked: Sequence[Firing]) -> None:
    """Nothing is asked again on which a later call of the same path has been built.

    That needs no journal: a call is made with the answers of those before it.
    """
    used: set[Firing] = set()
    for run, state in asked:
        assert (run, state) not in used, f"{run} {state} is asked again after its answer was used"
        used |= {(run, state[:end]) for end in range(len(state))}


def _command(folder: Path) -> list[str]:
    files = [str(folder / "journal"), str(folder / "calls")]
    return [sys.executable, "-m", "scripts.drill.agent_calls", *files]


def _lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _begun(lines: Sequence[dict[str, Any]], of: str) -> list[dict[str, Any]]:
    """The begins of calls of the model ("run") or of tools ("tool")."""
    return [line for line in lines if line["what"] == "begin" and of in line]


def _firing(line: dict[str, Any]) -> Firing:
    return line["run"], tuple(line["state"])


def _kept(folder: Path) -> Kept:
    """The outcomes in the journal now."""
    kept, journal = Kept(len(_lines(folder / "calls")), set(), Counter(), set()), ""
    for line in _lines(folder / "journal"):
        journal = line.get("id", journal)
        if "path" not in line:
            continue
        firing = line["run"], tuple(step for step in line["path"] if step >= 0)
        if "reply" in line:
            kept.parts[firing] += 1
        elif line["asked"].startswith("an answer"):
            kept.firings.add(firing)
        elif line["asked"].startswith("the tool"):
            kept.tools.add(digest_of(journal, line["run"], tuple(line["path"]), size=16))
    return kept


@functools.cache
def _unbroken() -> tuple[Any, list[dict[str, Any]]]:
    """The result of the run without kills, and the lines of its calls."""
    with tempfile.TemporaryDirectory(prefix="jaxshare-drill-") as name:
        result = json.loads(finished(_command(Path(name))))
        lines = _lines(Path(name) / "calls")
    keys = [line["key"] for line in lines if line["what"] == "begin"]
    assert len(keys) == len({*keys}), "a run that is not killed makes a call twice"
    return result, lines


DRILLS = [
    Drill(
        "kill-agent-calls",
        "agents whose journal grows in a file go on with the same command to what unbroken ones "
        "have; no model and no tool is called again that had answered",
        f"kill -9 {KILLS} times in one run, at random moments",
        throw_kills,
    )
]
