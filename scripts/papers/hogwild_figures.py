"""The lines of each figure of Hogwild! Inference, with the paper's settings: which evaluations it
is composed of, and what they are called in legends."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jaxshare.serving.evaluation.data_sets.programs import LIVE
from scripts.papers.folder import plural
from scripts.papers.hogwild_cases import (
    ABLATIONS,
    ASKED,
    BASELINES,
    CONTIGUOUS,
    ENCODED,
    INTERLEAVED,
    TEMPERATURE,
    UNASKED,
    Words,
)


@dataclasses.dataclass(frozen=True)
class TaskScale:
    """The scale at which the paper runs a task.

    Attributes:
      budgets: of forward passes.
      samples: the first problems; None for all.
      seeds: runs of each problem.
      dates: of contests.
    """

    budgets: tuple[int, ...] = tuple(range(1024, 8193, 1024))
    samples: int | None = None
    seeds: int = 1
    dates: str | None = None


GSM8K5, LIMO, LIVE_CODE, AIME = "gsm8k5", "limo", "livecodebench-v5", "aime2025"
MATHS, PHYSICS = "olympiad", "olympiad-physics"
SCALES: Mapping[str, TaskScale] = {
    GSM8K5: TaskScale(tuple(range(512, 4097, 512)), samples=128),
    LIVE_CODE: TaskScale(seeds=8, dates="2024-08-01,2025-01-31"),
    AIME: TaskScale(seeds=10),
}
"""Tasks whose scale is not the default one (sections 4.1 and 4.2)."""
QUICK = TaskScale((32, 96, 160, 208), samples=4)
"""A scale for the embedded model's own tasks."""
_QUICK_TASKS = ("sums", "sums-dependent", "sums-typed")
_TITLES = {
    GSM8K5: "five questions of GSM8K",
    LIMO: "LIMO",
    MATHS: "OlympiadBench, maths",
    PHYSICS: "OlympiadBench, physics",
    LIVE_CODE: "LiveCodeBench v5",
    AIME: "AIME 2025",
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to solve problems, as a line of a figure has it.

    Attributes:
      label: in legends.
      words: of `jaxshare evaluate`.
      workers: their number, or that of streams; None where the method has none.
    """

    label: str
    words: Words = ()
    workers: int | None = None

    @property
    def asks(self) -> bool:
        """True if its workers may be asked whether their work is redundant."""
        return "--method" not in self.words and "--ask-every" not in self.words


BASELINE = Kind("baseline", BASELINES["sequential"])


def hogwild(workers: int, what: str = "", words: Words = ()) -> Kind:
    """Workers, in the combined layout unless the words say otherwise."""
    return Kind(f"{plural(workers, 'worker')}{what}", words, workers)


def self_consistency(streams: int) -> Kind:
    """Streams that do not see each other."""
    label = f"self-consistency, {plural(streams, 'stream')}"
    return Kind(label, BASELINES["self-consistency"], streams)


def _pair(counts: Sequence[int]) -> list[Kind]:
    return [BASELINE, *map(hogwild, counts)]


def _methods(counts: Sequence[int]) -> list[Kind]:
    kinds = [Kind("baseline, not stopped early", BASELINES["no-early-stop"]), *_pair(counts)]
    for n in counts:
        what = f"Skeleton-of-Thought, {plural(n, 'thread')} at a time"
        kinds += [Kind(what, BASELINES["skeleton"], n), self_consistency(n)]
    return [
        *kinds,
        Kind("Skeleton-of-Thought, all threads at once", BASELINES["skeleton-unlimited"]),
    ]


def _trio(counts: Sequence[int]) -> list[Kind]:
    return [*_pair(counts), *map(self_consistency, counts)]


def _layouts(counts: Sequence[int]) -> list[Kind]:
    what = {
        CONTIGUOUS: ", contiguous layout",
        INTERLEAVED: ", not instant (interleaved)",
        UNASKED: ", not asked",
        ENCODED: ", steps encoded anew",
    }
    ablated = [hogwild(n, words, ABLATIONS[name]) for n in counts for name, words in what.items()]
    return [*_pair(counts), *ablated]


def _setups(counts: Sequence[int]) -> list[Kind]:
    return [
        kind
        for n in counts
        for kind in (
            dataclasses.replace(self_consistency(n), label=f"{n} independent streams"),
            hogwild(n, ", finished steps seen", ABLATIONS[INTERLEAVED]),
            hogwild(n, ", all seen"),
        )
    ]


@dataclasses.dataclass(frozen=True)
class PanelPlan:
    """The axes of a figure: a task, its kinds of lines, and the paper's numbers of workers."""

    task: str
    kinds: Callable[[Sequence[int]], list[Kind]]
    workers: tuple[int, ...] = (2,)


_ALL = (LIMO, MATHS, PHYSICS, LIVE_CODE, AIME)
FIGURES: Mapping[str, tuple[PanelPlan, ...]] = {
    "figure3": (
        PanelPlan(GSM8K5, _methods),
        PanelPlan(LIMO, _methods),
        PanelPlan(LIMO, _pair, (2, 3, 4)),
    ),
    "figure4": (PanelPlan(LIMO, _pair),),
    "figure5": (PanelPlan(MATHS, _pair), PanelPlan(PHYSICS, _pair)),
    "figure6": (PanelPlan(LIVE_CODE, _pair), PanelPlan(AIME, _pair)),
    "figure8": (PanelPlan(LIMO, _pair),),
    "e1": (PanelPlan(LIMO, _layouts), PanelPlan(LIMO, _pair, (1, 2, 3, 4, 6))),
    "e2": tuple(PanelPlan(task, _trio) for task in _ALL),
    "levels": (PanelPlan(LIMO, _setups),),
    "judge": (PanelPlan(LIMO, _setups),),
}
"""The axes of all figures that are composed of evaluations."""
_JUDGED = ("levels", "judge")
_JUDGED_BUDGET = 4096
"""Tokens of each worker that the judge sees (section 4.3)."""


@dataclasses.dataclass(frozen=True)
class FigureLine:
    """A line of a figure: one evaluation.

    Attributes:
      label: in the legend.
      workers: their number, or that of streams; 1 for methods of one.
      words: of `jaxshare evaluate`, all that decide the texts.
      folder: of the evaluation, within the folder of all figures.
    """

    label: str
    workers: int
    words: Words
    folder: str

    @classmethod
    def of(cls, kind: Kind, words: Words, name: str) -> Self:
        """The line of a kind; `name`: how its folder's name begins."""
        digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:10]
        method = kind.words if "--method" in kind.words else ("workers", *kind.words)
        what = "-".join([*method, *([str(kind.workers)] if kind.workers else [])])
        what = re.sub("-+", "-", what.replace("--method", "")).strip("-")
        return cls(kind.label, kind.workers or 1, words, f"evaluations/{name}-{what}-{digest}")


@dataclasses.dataclass(frozen=True)
class Panel:
    """The axes of a figure.

    Attributes:
      title: above it.
      model, task: of its lines; samples, dates: of the task.
      lines: in the order of the legend.
    """

    title: str
    model: str
    task: str
    samples: int | None
    dates: str | None
    lines: tuple[FigureLine, ...]

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Self:
        """The panel that `dataclasses.asdict` has turned into JSON."""
        lines = (FigureLine(**{**line, "words": tuple(line["words"])}) for line in saved["lines"])
        return cls(**{**saved, "lines": tuple(lines)})


@dataclasses.dataclass(frozen=True)
class FigureSettings:
    """The settings of a figure that were given, in place of the paper's.

    Attributes:
      models: their names, one or more.
      quick: the scale and the tasks of the embedded model.
      task, workers, budgets, samples, seeds, dates, ask_every: None for the paper's.
      seed: of all runs.
      more: further words of `jaxshare evaluate` that decide texts.
    """

    models: tuple[str, ...]
    quick: bool = False
    task: str | None = None
    workers: tuple[int, ...] | None = None
    budgets: tuple[int, ...] | None = None
    samples: int | None = None
    seeds: int | None = None
    dates: str | None = None
    ask_every: int | None = None
    seed: int = 0
    more: Words = ()


def panels_of(figure: str, given: FigureSettings) -> tuple[Panel, ...]:
    """The axes of a figure, for each model."""
    order = [*dict.fromkeys(plan.task for plan in FIGURES[figure])]
    found = []
    for model in given.models:
        for plan in FIGURES[figure]:
            task = _QUICK_TASKS[order.index(plan.task) % len(_QUICK_TASKS)] if given.quick else None
            found.append(_panel(figure, plan, model, given.task or task or plan.task, given))
    return (*dict.fromkeys(found),)  # with --task two tasks of a figure become the same


def _panel(figure: str, plan: PanelPlan, model: str, task: str, given: FigureSettings) -> Panel:
    scale = QUICK if given.quick else SCALES.get(task, TaskScale())
    budgets = given.budgets or scale.budgets
    if figure in _JUDGED and not given.budgets and not given.quick:
        budgets = (_JUDGED_BUDGET,)
    samples = given.samples or scale.samples
    dates = (given.dates or scale.dates) if task in LIVE else None
    common: Words = ("--budgets", ",".join(map(str, budgets)))
    common += ("--seeds", str(given.seeds or scale.seeds), "--seed", str(given.seed))
    common += ("--samples", str(samples)) if samples else ()
    common += ("--dates", dates) if dates else ()
    short = Path(model).name
    name = re.sub(r"[^\w.+-]+", "-", f"{short}-{Path(task).stem}")
    lines = []
    for kind in plan.kinds(given.workers or plan.workers):
        words: Words = (model, "--task", task, *kind.words)
        words += ("--workers", str(kind.workers)) if kind.workers else ()
        words += (*common, *_asked(kind, given), *given.more, *_differing(kind, given))
        lines.append(FigureLine.of(kind, words, name))
    title = f"{_TITLES.get(task, Path(task).stem)}, {short}"
    return Panel(title, model, task, samples, dates, tuple(lines))


def _asked(kind: Kind, given: FigureSettings) -> Words:
    """The words that have workers asked more or less often than in the paper."""
    every = given.ask_every
    if every is None and given.quick:
        every = ASKED
    return ("--ask-every", str(every)) if kind.asks and every is not None else ()


def _differing(kind: Kind, given: FigureSettings) -> Words:
    """The words by which streams that do not see each other differ: the embedded model is greedy by
    itself, and all of them would write the same."""
    is_one = kind.words != BASELINES["self-consistency"] or "--temperature" in given.more
    return () if is_one or not given.quick else ("--temperature", str(TEMPERATURE))
