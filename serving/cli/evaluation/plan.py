"""The plan of an evaluation: its options, checked, its task, its settings and its runs."""

import argparse
import dataclasses
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxshare.models import LoadedModel
from jaxshare.paths import check_folder
from jaxshare.serving import jsonl
from jaxshare.serving.cli.evaluation import report
from jaxshare.serving.evaluation import execution, folder, runs, tasks
from jaxshare.serving.evaluation.checkers.mathematics import Mathematician
from jaxshare.serving.evaluation.checkers.sandbox import Limits
from jaxshare.serving.evaluation.runs import RunSpec
from jaxshare.serving.evaluation.scoring import Point
from jaxshare.serving.evaluation.tasks import Task
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import default_sampler
from jaxshare.serving.workers.layouts import MAX_WORKERS
from jaxshare.serving.workers.prompts import presets
from jaxshare.serving.workers.prompts.format import Format

_OF_STREAMS = ("self-consistency", "vote")
"""Methods whose streams differ by what they draw alone."""
_log = logging.getLogger("jaxshare")
_MAX_RUNS = 1_000_000
"""The most runs of an evaluation; each is a line in its folder."""


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """An evaluation before the model is loaded, checked.

    Attributes:
      options, sampling: see `run_evaluation`.
      workers: numbers of workers, ascending.
      task: its problems.
      format: of --format, or None.
      limits: of programs.
      settings: that decide the texts and their marks, as the folder keeps them.
      beside: the lines of other evaluations.
      keys: of all runs.
    """

    options: argparse.Namespace
    sampling: dict[str, Any]
    workers: list[int]
    task: Task
    format: Format | None
    limits: Limits
    settings: dict[str, Any]
    beside: list[dict[str, list[Point]]]
    keys: set[runs.Key]

    @classmethod
    def of(
        cls,
        options: argparse.Namespace,
        sampling: dict[str, Any],
        workers: Sequence[int],
        budgets: Sequence[int],
    ) -> "EvaluationPlan":
        """Checks the options and reads the task; its bad lines are named on stderr."""
        chosen = _check(options, workers, budgets)
        check_folder("--out", options.out)
        task = tasks.load_task(
            options.task,
            samples=options.samples,
            questions=_range(options.questions),
            data=options.data_dir,
            dates=options.dates,
        )
        if task.needs_mathematics:
            Mathematician.check()
        limits = report.limits_of(options)
        format = None
        if options.format is not None:
            format = presets.format_named(options.format, plain=options.method != "workers")
        settings = _settings(options, sampling, chosen, budgets, task, format)
        beside = [folder.read_lines(Path(name), settings) for name in options.beside]
        for complaint in task.complaints:
            print(complaint, file=sys.stderr)
        if len(task.problems) * options.seeds * len(chosen) > _MAX_RUNS:
            raise ValueError(
                f"--seeds {options.seeds} with {len(task.problems)} problems and {len(chosen)} "
                f"numbers of workers are more than {_MAX_RUNS} runs; give fewer seeds or --samples"
            )
        keys = {
            (count, problem.id, number)
            for problem in task.problems
            for number in range(options.seeds)
            for count in chosen
        }
        return cls(options, sampling, chosen, task, format, limits, settings, beside, keys)

    @property
    def task_options(self) -> dict[str, Any]:
        """The options that a task is loaded with, besides its name and the number of problems."""
        return {"questions": [*_range(self.options.questions)], "dates": self.options.dates}

    def specs(self, model: LoadedModel) -> list[RunSpec]:
        """All runs.

        Raises:
          ValueError: several seeds, where greedy decoding would write the same with all of them.
        """
        options = self.options
        sampler = dataclasses.replace(default_sampler(model), **self.sampling)
        warn_of_greedy(model, sampler, discouraged=presets.advises_sampling(options.format))
        if sampler.temperature == 0 and options.seeds > 1:
            raise ValueError(
                f"--seeds is {options.seeds}, but at temperature 0 all of them would write the "
                "same; give a --temperature, or one seed"
            )
        if sampler.temperature == 0 and options.method in _OF_STREAMS and self.workers[-1] > 1:
            _log.warning(
                "all %d streams will be equal, because temperature is 0; give --temperature 0.7",
                self.workers[-1],
            )
        return runs.run_specs(
            self.task.problems,
            method=options.method,
            workers=self.workers,
            budgets=self.settings["budgets"],
            seeds=options.seeds,
            seed=options.seed,
            answer_tokens=self.settings["answer_tokens"],
            sampler=sampler,
            more={**_workers_settings(options), **({"format": self.format} if self.format else {})},
        )


def _check(
    options: argparse.Namespace, workers: Sequence[int], budgets: Sequence[int]
) -> list[int]:
    """Checks the numbers; returns the numbers of workers, ascending."""
    if not budgets:
        raise ValueError("--budgets is empty; give numbers of forward passes such as 256,512,1024")
    for name, numbers in (("--workers", workers), ("--budgets", budgets)):
        if wrong := [n for n in numbers if n < 1]:
            raise ValueError(f"{name} has {wrong[0]}; the numbers start at 1")
    if workers and max(workers) > MAX_WORKERS:
        raise ValueError(f"--workers has {max(workers)}; a session has at most {MAX_WORKERS}")
    execution.check_concurrency(options.concurrency)
    for name in ("seeds", "answer_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if options.method in runs.ALONE and [*workers] not in ([], [1]):
        raise ValueError(
            f"--workers is given, but {options.method} does not depend on their number; leave it "
            "out"
        )
    for name in ("layout", "move", "ask_every", "stop_on"):
        if options.method != "workers" and getattr(options, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} is of the method workers, and the method is "
                f"{options.method}; leave it out"
            )
    return sorted(set(workers)) or ([1] if options.method in runs.ALONE else [1, 2, 4])


def _range(text: str) -> tuple[int, int]:
    """The smallest and the largest number of "5" or "5-10"."""
    if not (match := re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())):
        raise ValueError(f"--questions is {text!r}; give a number such as 5, or two such as 5-10")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise ValueError(f"--questions is {text}, a range in reverse; give {last}-{first}")
    return first, last


def _settings(
    options: argparse.Namespace,
    sampling: dict[str, Any],
    workers: Sequence[int],
    budgets: Sequence[int],
    task: Task,
    format: Format | None,
) -> dict[str, Any]:
    """The settings that decide the texts and their marks. The place of the files does not."""
    chosen = {"name": options.format, "texts": _digest(format)} if format else None
    given = {name: getattr(options, name) for name in ("model", "method", "seeds", "seed", "dtype")}
    approximate = options.approximate_kv
    return {
        **given,
        # there where it is on, since earlier versions did not have it
        **({"approximate_kv": approximate} if approximate else {}),
        **_workers_settings(options),
        **({"format": chosen} if chosen else {}),
        **sampling,
        "task": options.task,
        "problems": task.digest,
        "samples": len(task.problems),
        "workers": [*workers],
        "budgets": sorted(set(budgets)),
        "answer_tokens": options.answer_tokens or task.answer_tokens,
    }


def _digest(format: Format) -> str:
    """A sum over the texts of a format, which may change with its file or with the version.

    Fields that have their defaults are left out, so that a field which is added later changes
    nothing.
    """
    default = dataclasses.asdict(Format("", ""))
    fields = dataclasses.asdict(format).items()
    return jsonl.sha256(
        jsonl.line({name: value for name, value in fields if value != default[name]})
    )


def _workers_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the method "workers"; none of any other."""
    if options.method != "workers":
        return {}
    return {
        "layout": options.layout or "combined",
        "move": options.move or "rotate",
        "ask_every": 1024 if options.ask_every is None else options.ask_every,
        "stop_on": options.stop_on or "answer",
    }
