"""Accuracies by kinds of questions and of problems, read from an evaluation's folder."""

import json
from pathlib import Path
from typing import Any

from jaxshare.serving.evaluation import load_task


def by_form(folder: Path) -> dict[int, dict[str, float]]:
    """The part of the questions that is right at the last budget, by number of workers and by the
    form that a problem's id begins with."""
    right: dict[int, dict[str, list[bool]]] = {}
    for score in _last(folder):
        form = score["problem"].rpartition(" ")[0]
        right.setdefault(score["workers"], {}).setdefault(form, []).extend(score["right"])
    return {
        count: {form: _part(marks) for form, marks in forms.items()}
        for count, forms in sorted(right.items())
    }


def going_on(folder: Path, questions: int) -> dict[int, float]:
    """The part of the questions that use another answer that is right at the last budget, by number
    of workers; of problems of so many questions of the task `sums-dependent`."""
    scores = _last(folder)
    count = max(int(score["problem"]) for score in scores)
    task = load_task("sums-dependent", samples=count, questions=(questions, questions))
    lines = {problem.id: problem.text.splitlines()[-questions:] for problem in task.problems}
    right: dict[int, list[bool]] = {}
    for score in scores:
        for mark, line in zip(score["right"], lines[score["problem"]], strict=True):
            if "the answer of" in line:
                right.setdefault(score["workers"], []).append(mark)
    return {workers: _part(marks) for workers, marks in sorted(right.items())}


def _last(folder: Path) -> list[dict[str, Any]]:
    """The scores at the last budget."""
    text = (folder / "scores.jsonl").read_text(encoding="utf-8")
    scores = [json.loads(line) for line in text.splitlines()]
    last = max(score["budget"] for score in scores)
    return [score for score in scores if score["budget"] == last]


def _part(marks: list[bool]) -> float:
    return sum(marks) / len(marks)
