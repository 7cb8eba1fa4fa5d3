"""The blocks that each worker sees while a session runs: Hogwild! Inference, figure 1."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxshare.models import LoadedModel
from jaxshare.serving import Workers
from jaxshare.serving.cli import arguments
from jaxshare.serving.evaluation import tasks
from jaxshare.serving.inputs import default_sampler
from jaxshare.serving.workers.inspection import plots
from jaxshare.serving.workers.inspection.probe import BlockExtent, Listed, Snapshot
from jaxshare.serving.workers.layouts import worker_names
from scripts.papers.folder import PaperFolder
from scripts.papers.hogwild_job import Job, markdown, write

BUDGETS, QUICK_BUDGETS = (256, 1024), (24, 64)
TASK, QUICK_TASK = "limo", "sums"
_SHOWN = 60
"""Characters of a block that the table has, from its end."""


def make(job: Job) -> None:
    """Runs a session on the first problem of the task, and keeps what its workers see after each
    budget.

    Raises:
      ValueError: a task that is not there, or a problem that does not fit the model's context.
    """
    options = job.options
    task = tasks.load_task(options.task, samples=1, data=options.data_dir, dates=options.dates)
    model = job.evaluations.load(job.load_options)
    with job.opened(model) as kept:
        if any({"budget": budget} not in kept for budget in options.budgets):
            _run(kept, model, task, job)
        finish(job, kept)


def _run(kept: PaperFolder, model: LoadedModel, task: tasks.Task, job: Job) -> None:
    """Makes all moments, since those of one session follow each other."""
    options, problem = job.options, task.problems[0]
    sampler = dataclasses.replace(default_sampler(model), **arguments.sampling_of(options))
    with Workers(
        model,
        problem.text,
        names=worker_names(options.workers[0]),
        budget=max(options.budgets),
        kind=problem.kind,
        sampler=sampler,
        seed=options.seed,
        format=options.format,
        **({} if options.ask_every is None else {"ask_every": options.ask_every}),
    ) as session:
        for budget in sorted(options.budgets):
            for _ in session.stream(budget):
                pass
            if {"budget": budget} not in kept:
                steps = [dataclasses.asdict(step) for step in session.steps]
                kept.add({"budget": budget}, {**Snapshot.of(session).to_json(), "steps": steps})


def redraw(job: Job) -> None:
    """Makes the figure of the moments that are there."""
    finish(job, job.read())


def finish(job: Job, kept: PaperFolder) -> None:
    """Writes and prints the figure: a picture for each budget, and the texts at the last one."""
    moments = sorted((value for _, value in kept.points()), key=lambda moment: moment["passes"])
    # A session that has answered before a budget has the same moment for that one, too.
    by_passes = {moment["passes"]: moment for moment in moments}
    pictures = {
        f"{job.figure}-{passes}.png": functools.partial(plots.cache_picture, snapshot(moment))
        for passes, moment in by_passes.items()
    }
    write(job, kept, [*by_passes.values()], table(moments[-1]), pictures)


def snapshot(moment: Mapping[str, Any]) -> Snapshot:
    """The snapshot of a moment of the report."""
    return Snapshot(
        moment["passes"],
        tuple(BlockExtent(**block) for block in moment["blocks"]),
        {name: tuple(Listed(**block) for block in row) for name, row in moment["rows"].items()},
    )


def table(moment: Mapping[str, Any]) -> str:
    """The blocks of each worker in its order, and how each ends."""
    rows = []
    for worker, row in moment["rows"].items():
        for block in row:
            text = _text(block["block"], moment["steps"])
            rows.append([worker, block["block"], str(block["start"]), str(block["length"]), text])
    header = ("worker", "sees", "from position", "tokens", "which ends with")
    return f"what each worker sees after {moment['passes']} passes\n\n{markdown(header, rows)}"


def _text(block: str, steps: Sequence[Mapping[str, Any]]) -> str:
    """The end of a block's text: a worker's unfinished step, or the last that was finished."""
    current = [step for step in steps if step["worker"] == block and step["ended"] is None]
    finished = [step for step in steps if step["ended"] is not None]
    written = current if current else finished if block == "history" else []
    shown = "".join(step["text"] for step in written[-1:])[-_SHOWN:]
    return shown.replace("|", "\\|").replace("\n", " ").strip()
