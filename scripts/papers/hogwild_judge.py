"""The collaboration of workers as a judge grades it: Hogwild! Inference, section 4.3, figure 7 and
appendix G.

`levels` has the mean level of each setup: streams that do not see each other (self-consistency, as
it is), workers that see each other's finished steps, and workers that see all. `judge` looks at the
judge itself: how often it gives each level, how far its gradings of one run are apart, and how far
they are from people's.
"""

import collections
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxshare.serving import checksums
from jaxshare.serving.cli.evaluation.judge import GRADINGS, RESULT
from jaxshare.serving.evaluation import JudgeError, plot
from jaxshare.serving.evaluation.judge_texts import LEVELS
from scripts.papers import hogwild_accuracy as accuracy
from scripts.papers.folder import PaperFolder
from scripts.papers.hogwild_figures import FigureLine, Panel
from scripts.papers.hogwild_job import Job, markdown, note, write

_HUMAN = 'such as {"folder": "...", "problem": "1", "number": 0, "level": 4}'


def make(job: Job) -> None:
    """Runs the evaluations and has them graded, or what is left of both.

    Raises:
      ValueError: see `hogwild_accuracy.make`; levels of people that cannot be read; a judge that
        cannot be reached, or gives no level. Gradings made by then are kept.
    """
    human = read_human(job.options.human)
    with accuracy.evaluated(job) as (kept, panels):
        for line in accuracy.lines_of(panels):
            note(f"judging {line.folder}")
            _grade(job, line)
        finish(job, kept, panels, human)


def _grade(job: Job, line: FigureLine) -> None:
    try:
        job.evaluations.judge((str(job.out / line.folder), *job.options.judging))
    except JudgeError as error:
        raise ValueError(
            f"{line.label}: {error} (with --resume; --model of `jaxshare judge` is --judge here)"
        ) from error


def redraw(job: Job) -> None:
    """Makes a figure of the gradings that are there."""
    kept = job.read()
    finish(job, kept, accuracy.saved_panels(kept), read_human(job.options.human))


def finish(
    job: Job, kept: PaperFolder, panels: Sequence[Panel], human: Mapping[tuple, float]
) -> None:
    """Writes and prints the figure."""
    found = [_judged(job, panel, human) for panel in panels]
    draw, text = (
        (levels_picture, levels_table) if job.figure == "levels" else (judge_picture, _judge_table)
    )
    pictures = {f"{job.figure}.png": lambda: draw(found)}
    models = {line["command"].split()[2]: line["model"] for p in found for line in p["lines"]}
    write(job, kept, {"panels": found}, text(found), pictures, model=models)


def _judged(job: Job, panel: Panel, human: Mapping[tuple, float]) -> dict[str, Any]:
    """The evaluations of a panel, each with its levels."""
    found = accuracy.collected(job, panel)
    for line, plan in zip(found["lines"], panel.lines, strict=True):
        line |= _levels(job.out / plan.folder, plan, human)
    return found


def _levels(folder: Path, line: FigureLine, human: Mapping[tuple, float]) -> dict[str, Any]:
    """The levels of an evaluation, and what they say of the judge.

    Raises:
      ValueError: it has not been graded, or a file is damaged.
    """
    try:
        result = checksums.loads((folder / RESULT).read_bytes())
        rows = (folder / GRADINGS).read_bytes().splitlines()
        gradings = [checksums.loads(row) for row in rows]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} has no gradings that can be read ({error}); the same command with --resume "
            "has it graded"
        ) from error
    [level] = result["levels"]
    by_run: dict[tuple, list[int]] = collections.defaultdict(list)
    for grading in gradings:
        by_run[grading["problem"], grading["number"]].append(grading["level"])
    counts = collections.Counter(grading["level"] for grading in gradings)
    pairs = [
        [human[key], statistics.fmean(levels)]
        for (problem, number), levels in by_run.items()
        if (key := (line.folder, problem, number)) in human
    ]
    return {
        "judge": result["settings"],
        "method": result["method"],
        "level": level["level"],
        "standard_error": level["standard_error"],
        "gradings": len(gradings),
        "by_level": {str(n): counts.get(n, 0) for n in LEVELS},
        "all_the_same": statistics.fmean(len({*levels}) == 1 for levels in by_run.values()),
        "range": statistics.fmean(max(levels) - min(levels) for levels in by_run.values()),
        "human_and_judge": pairs,
    }


def read_human(path: str | None) -> dict[tuple, float]:
    """People's levels by evaluation, problem and number of the seed; none without a file.

    Raises:
      ValueError: a file that cannot be read, or a line of another form.
    """
    if path is None:
        return {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--human is {path}, which cannot be read ({error})") from error
    found = {}
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            key = str(value["folder"]), str(value["problem"]), int(value.get("number", 0))
            found[key] = float(value["level"])
            if not min(LEVELS) <= found[key] <= max(LEVELS):
                raise ValueError(f"the level is {value['level']}, but it must be 1 to 6")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"line {number} of {path} is no level of a run ({type(error).__name__}: {error}); "
                f"give lines {_HUMAN}"
            ) from error
    return found


def correlation(pairs: Sequence[Sequence[float]]) -> float | None:
    """Pearson's correlation of people's levels and the judge's; None where one of them is always
    the same."""
    try:
        return statistics.correlation(*zip(*pairs, strict=True))
    except (statistics.StatisticsError, TypeError):
        return None


# Tables and pictures.


def levels_table(panels: Sequence[Mapping[str, Any]]) -> str:
    """The mean level of each setup, with its standard error over runs."""
    rows = []
    for panel in panels:
        for line in panel["lines"]:
            error = line["standard_error"]
            level = f"{line['level']:.2f}" + ("" if error is None else f" +- {error:.2f}")
            rows.append([panel["title"], line["label"], level, str(line["runs"])])
    return markdown(("", "setup", "level of collaboration, 1 to 6", "runs"), rows)


def levels_picture(panels: Sequence[Mapping[str, Any]]) -> Any:
    """Figure 7: a group of bars for each model, a bar for each setup."""
    figure, [axes] = plot.panels(1)
    labels = [*dict.fromkeys(line["label"] for panel in panels for line in panel["lines"])]
    width = 0.8 / len(labels)
    for i, (label, style) in enumerate(plot.styles(labels).items()):
        for place, panel in enumerate(panels):
            [line] = [line for line in panel["lines"] if line["label"] == label]
            axes.bar(
                place + (i - (len(labels) - 1) / 2) * width,
                line["level"],
                width * 0.92,
                yerr=line["standard_error"],
                capsize=4,
                color=style["color"],
                label=None if place else label,
            )
    axes.set_xticks(range(len(panels)), labels=[panel["title"] for panel in panels])
    axes.set(ylabel="level of collaboration", ylim=(0, max(LEVELS) + 1.2), yticks=[*LEVELS])
    axes.grid(alpha=0.3, axis="y")
    axes.legend(frameon=False, loc="upper left", ncols=1, fontsize=9)
    return figure


def _judge_table(panels: Sequence[Mapping[str, Any]]) -> str:
    header = ("", "setup", *map(str, LEVELS), "gradings all the same", "mean range")
    rows = [
        [
            panel["title"],
            line["label"],
            *(str(line["by_level"][str(n)]) for n in LEVELS),
            f"{100 * line['all_the_same']:.0f}%",
            f"{line['range']:.2f}",
        ]
        for panel in panels
        for line in panel["lines"]
    ]
    text = f"gradings at each level, and how they differ within a run\n\n{markdown(header, rows)}"
    if pairs := _pairs(panels):
        found = correlation(pairs)
        text += f"\n\n{len(pairs)} runs have levels of people: correlation with the judge's " + (
            "is not defined, because one of them is always the same"
            if found is None
            else f"{found:.2f}"
        )
    return text


def _pairs(panels: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    return [pair for panel in panels for line in panel["lines"] for pair in line["human_and_judge"]]


def judge_picture(panels: Sequence[Mapping[str, Any]]) -> Any:
    """Parts of the gradings at each level; and, like figure 20, people's levels and the judge's."""
    pairs = _pairs(panels)
    figure, all_axes = plot.panels(len(panels) + bool(pairs))
    for axes, panel in zip(all_axes, panels, strict=False):
        width = 0.8 / len(panel["lines"])
        labels = [line["label"] for line in panel["lines"]]
        for i, (line, style) in enumerate(
            zip(panel["lines"], plot.styles(labels).values(), strict=True)
        ):
            axes.bar(
                [n + (i - (len(labels) - 1) / 2) * width for n in LEVELS],
                [100 * line["by_level"][str(n)] / line["gradings"] for n in LEVELS],
                width * 0.92,
                color=style["color"],
                label=line["label"],
            )
        axes.set(title=panel["title"], xlabel="level of collaboration", ylabel="gradings, %")
        axes.set(xticks=[*LEVELS], ylim=(0, 130), yticks=range(0, 101, 20))
        axes.grid(alpha=0.3, axis="y")
        axes.legend(frameon=False, fontsize=9, loc="upper right")
    if pairs:
        axes = all_axes[-1]
        widest = max(LEVELS) - min(LEVELS)
        bins = [n / 2 - 0.25 for n in range(-2 * widest, 2 * widest + 2)]
        axes.hist([judge - human for human, judge in pairs], bins=bins)
        axes.set(title="the judge and people", xlabel="the judge's level less people's")
        axes.set(ylabel="runs")
        axes.grid(alpha=0.3)
    return figure
