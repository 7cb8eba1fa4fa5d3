"""Figures of accuracy against the budget of forward passes or against seconds: Hogwild! Inference,
figures 3 to 6 and 8, appendices E.1 and E.2."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxshare.models import LoadedModel
from jaxshare.serving.evaluation import plot, tasks
from jaxshare.serving.evaluation.checkers.mathematics import Mathematician
from jaxshare.serving.evaluation.scoring import Point, cell
from scripts.papers.folder import PaperFolder
from scripts.papers.hogwild_cases import result_of
from scripts.papers.hogwild_figures import FigureLine, Panel, panels_of
from scripts.papers.hogwild_job import Job, Pictures, markdown, note, write

Seconds = Mapping[str, Mapping[int, float]]
"""For each label the seconds that budgets of forward passes take."""


def make(job: Job) -> None:
    """Runs the evaluations of a figure, or what is left of them, and makes the figure.

    Raises:
      ValueError: a task that is not there, or what `run_evaluation` refuses.
    """
    with evaluated(job) as (kept, panels):
        finish(job, kept, panels)


def redraw(job: Job) -> None:
    """Makes a figure of the evaluations that are there, without running anything."""
    kept = job.read()
    finish(job, kept, saved_panels(kept))


def rescore(job: Job) -> None:
    """Marks the answers of a figure again, and makes it of these marks.

    Raises:
      ValueError: an evaluation is missing, or see `jaxshare rescore`.
    """
    mark_again(job)
    redraw(job)


def mark_again(job: Job) -> None:
    """Marks the answers of a figure's evaluations again."""
    for line in lines_of(saved_panels(job.read())):
        note(f"marking {line.folder}")
        words = (str(job.out / line.folder), *job.options.marking)
        job.incomplete |= bool(job.evaluations.rescore(words))


@contextlib.contextmanager
def evaluated(
    job: Job, model: LoadedModel | None = None
) -> Iterator[tuple[PaperFolder, tuple[Panel, ...]]]:
    """The folder of a figure, and its panels once their evaluations are there; `model`: see
    `Job.opened`."""
    panels = panels_of(job.figure, job.options.given)
    check(panels, job)
    job.settings["panels"] = [dataclasses.asdict(panel) for panel in panels]
    with job.opened(model) as kept:
        lines = lines_of(panels)
        for number, line in enumerate(lines, 1):
            note(f"{number} of {len(lines)}: {line.words[0]}, {line.words[2]}, {line.label}")
            _run(job, line)
        yield kept, panels


def _run(job: Job, line: FigureLine) -> None:
    words = (*line.words, *job.where, "--out", str(job.out / line.folder), "--resume")
    try:
        job.incomplete |= bool(job.evaluations.evaluate(words))
    except ValueError as error:
        raise ValueError(f"{line.label}: {error}") from error


def check(panels: Sequence[Panel], job: Job) -> None:
    """Reads the tasks of all panels, so that a missing one is known before any is run.

    Raises:
      ValueError: see `load_task`; or math-verify is not installed, and a task needs it.
    """
    for task, samples, dates in dict.fromkeys((p.task, p.samples, p.dates) for p in panels):
        found = tasks.load_task(task, samples=samples, dates=dates, data=job.options.data_dir)
        if found.needs_mathematics:
            Mathematician.check()


def lines_of(panels: Sequence[Panel]) -> list[FigureLine]:
    """The lines of all panels; those of several panels once."""
    return [*{line.folder: line for panel in panels for line in panel.lines}.values()]


def saved_panels(kept: PaperFolder) -> tuple[Panel, ...]:
    """The panels that a figure began with."""
    return tuple(map(Panel.read, kept.settings["panels"]))


def finish(
    job: Job,
    kept: PaperFolder,
    panels: Sequence[Panel],
    seconds: Seconds | None = None,
    beside: str = "",
    **more: Any,
) -> None:
    """Collects the results of evaluations, and writes and prints the figure.

    Args:
      seconds: that budgets take, for a figure over seconds.
      beside: text after the tables; more: of the report.
    """
    found = [collected(job, panel, seconds) for panel in panels]
    models = {line["command"].split()[2]: line["model"] for p in found for line in p["lines"]}
    text = "\n\n".join([*map(_table, found), *([beside] if beside else [])])
    pictures: Pictures = {f"{job.figure}.png": lambda: picture(found), **more.pop("pictures", {})}
    write(job, kept, {"panels": found, **more}, text, pictures, model=models)


def collected(job: Job, panel: Panel, seconds: Seconds | None = None) -> dict[str, Any]:
    """The results of a panel's evaluations, as JSON."""
    lines = []
    for line in panel.lines:
        result = result_of(job.out / line.folder)
        job.incomplete |= bool(result["bad_lines"] or result["refused"])
        points = [point for point in result["points"] if point["workers"] == line.workers]
        if seconds:
            points = [
                {**point, "seconds": seconds[line.label][point["budget"]]} for point in points
            ]
        lines.append(
            {
                "label": line.label,
                "workers": line.workers,
                "command": " ".join(["jaxshare evaluate", *line.words]),
                "folder": line.folder,
                "points": points,
                "passes_to_90": result["passes_to_90"].get(str(line.workers)),
                "passes_to_90_at_most": line.workers in result.get("passes_to_90_at_most", ()),
                **{
                    name: result[name]
                    for name in (
                        *("settings", "model", "versions", "code", "marked"),
                        *("bad_lines", "refused", "runs"),
                    )
                    if name in result
                },
            }
        )
    return {"title": panel.title, "model": panel.model, "task": panel.task, "lines": lines}


def points_of(line: Mapping[str, Any]) -> list[Point]:
    """The points of a line of the report."""
    return [
        Point(**{name: value for name, value in point.items() if name != "seconds"})
        for point in line["points"]
    ]


def _table(panel: Mapping[str, Any]) -> str:
    """Accuracy in percent with its interval of 95%: a row per line, a column per budget."""
    budgets = sorted({point["budget"] for line in panel["lines"] for point in line["points"]})
    rows = []
    for line in panel["lines"]:
        by_budget = {point.budget: point for point in points_of(line)}
        cells = [cell(by_budget[b]) if b in by_budget else "" for b in budgets]
        rows.append([line["label"], *cells])
        if "seconds" in line["points"][0]:
            seconds = [f"{point['seconds']:.3g}" for point in line["points"]]
            rows.append([f"{line['label']}, seconds", *seconds])
    head = f"{panel['title']}: accuracy in percent after passes, with its interval of 95%"
    return f"{head}\n\n{markdown(('passes', *map(str, budgets)), rows)}"


def picture(panels: Sequence[Mapping[str, Any]]) -> Any:
    """The figure: panels side by side, over seconds where the points have them. A line that several
    panels have looks the same in all."""
    figure, all_axes = plot.panels(len(panels))
    counts = collections.Counter(line["label"] for p in panels for line in p["lines"])
    common = [label for label, count in counts.items() if count > 1]
    for axes, panel in zip(all_axes, panels, strict=True):
        lines = {line["label"]: points_of(line) for line in panel["lines"]}
        looks = plot.styles(dict.fromkeys([*common, *lines]))
        seconds = {
            line["label"]: {p["budget"]: p["seconds"] for p in line["points"]}
            for line in panel["lines"]
            if "seconds" in line["points"][0]
        }
        plot.draw_accuracy(axes, lines, panel["title"], seconds or None, looks)
    return figure
