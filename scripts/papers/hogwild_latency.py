"""The latency of a pass of workers by the length of their history: Hogwild! Inference, tables 1 and 2
and figure 8, whose right half has accuracies over the seconds that passes of that latency take."""

import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxshare import KVCache
from jaxshare.models import LoadedModel
from jaxshare.serving.engine.prefill import prefill
from jaxshare.serving.evaluation import plot, tasks
from jaxshare.serving.inputs import cache_dtype
from jaxshare.serving.workers.layouts import worker_names
from jaxshare.serving.workers.prompts.presets import format_of
from jaxshare.sharding import KV, axis_size
from scripts.bench.parts.workers.sides import ATTENTION, CURRENT, PLAN, STEP_ROOM, Run
from scripts.bench.workers import measure
from scripts.papers import hogwild_accuracy as accuracy
from scripts.papers.folder import PaperFolder, plural, this_machine
from scripts.papers.hogwild_figures import BASELINE, Panel
from scripts.papers.hogwild_job import Job, markdown, note, write

HISTORIES = {
    "table1": (1024, 2048, 4096, 8192, 16384),
    "table2": (300, 4096, 8192, 16384),
    "figure8": (1024, 2048, 4096, 8192, 16384),
}
WORKERS = (1, 2, 4)
QUICK_HISTORIES = (64, 256, 1024)
_DECILES = (10, 90)
_PASS = "pass_milliseconds"

Latencies = Sequence[tuple[int, float]]
"""Tokens of history and seconds of a pass, in ascending order."""


def make_table(job: Job) -> None:
    """Measures what table 1 or 2 has, or what is left of it."""
    model = job.evaluations.load(job.load_options).replicas()[0]
    settle(job, model)
    with job.opened(model) as kept:
        measure_all(job, kept, model)
        finish_table(job, kept)


def redraw_table(job: Job) -> None:
    """Makes a table of what has been measured."""
    finish_table(job, job.read())


def settle(job: Job, model: LoadedModel) -> None:
    """Adds what latencies depend on to the settings.

    Raises:
      ValueError: a history that does not fit the model's context.
    """
    options, context = job.options, model.config.max_positions
    longest = _context(job, max(options.histories))
    if longest > context:
        raise ValueError(
            f"--histories has {max(options.histories)}, which takes {longest} tokens with the steps "
            f"of {max(options.workers_timed)} workers, but the model's context holds {context}; "
            "give shorter ones"
        )
    job.settings |= {
        "histories": [*options.histories],
        "workers_timed": [*options.workers_timed],
        "rounds": options.rounds,
        "steps": options.steps,
        "current": CURRENT,
        "machine": this_machine(),
    }


def _context(job: Job, history: int) -> int:
    """The tokens that a worker sees at the end of a turn."""
    return history + max(job.options.workers_timed) * (CURRENT + job.options.steps)


def measure_all(job: Job, kept: PaperFolder, model: LoadedModel) -> None:
    """Measures all histories that the folder does not have."""
    options = job.options
    for history in options.histories:
        if {"history": history} in kept:
            continue
        found = measure(
            model.for_context(_context(job, history)),
            None,
            options.workers_timed,
            history,
            options.steps,
            options.rounds,
            options.seed,
            functools.partial(_say, history),
            make_run,
        )
        kept.add({"history": history}, found)


def _say(history: int, what: str) -> None:
    note(f"history of {history} tokens: {what}")


def make_run(model: LoadedModel, workers: int, history: int, steps: int, seed: int) -> Run:
    """The side that is measured, over a cache that the model has filled with random tokens.

    The plan is timed alone where one device has all tokens, and attention where a layer's is that of
    `block_attention` without options.
    """
    config, mesh = model.config, model.mesh
    parts = [] if mesh is not None and axis_size(mesh, KV) > 1 else [PLAN]
    is_plain = mesh is None and model.approximate_kv is None and config.mla is None
    if is_plain and not any(config.windows):
        parts.append(ATTENTION)
    return Run(
        model,
        workers,
        history,
        steps,
        seed,
        cache=fed_cache(model, workers, history, seed),
        alone=parts,
    )


def fed_cache(model: LoadedModel, workers: int, history: int, seed: int) -> KVCache:
    """A cache of any model: a history of random tokens, and for each worker a current step."""
    rng = np.random.default_rng(seed)
    cache = KVCache.create(
        model.config,
        (history, *[STEP_ROOM] * workers),
        cache_dtype(model),
        mesh=model.mesh,
        approximate=model.approximate_kv,
    )
    for block, length in enumerate((history, *[CURRENT] * workers)):
        tokens = rng.integers(model.config.vocab_size, size=length).tolist()
        _, cache = prefill(model, tokens, cache, block)
    return cache


def measured(kept: PaperFolder) -> list[dict[str, Any]]:
    """The measurements of a folder, by their history."""
    return sorted((value for _, value in kept.points()), key=lambda found: found["history"])


def latencies(found: Sequence[Mapping[str, Any]], workers: int) -> Latencies:
    """The latencies of a number of workers."""
    return [(f["history"], f["workers"][str(workers)][_PASS] / 1e3) for f in found]


def seconds_of(passes: int, workers: int, known: Latencies, start: int = 0) -> float:
    """The seconds of passes that begin with a history of `start` tokens, to which each adds a token
    of each worker.

    Latencies are interpolated linearly between the histories that were measured. Below the shortest
    that of the shortest is taken; beyond the longest the last slope goes on.
    """
    histories, seconds = (np.asarray(column, float) for column in zip(*known, strict=True))
    lengths = start + workers * np.arange(passes)
    taken = np.interp(lengths, histories, seconds)
    if len(known) > 1:
        slope = (seconds[-1] - seconds[-2]) / (histories[-1] - histories[-2])
        taken += max(0.0, slope) * np.maximum(0, lengths - histories[-1])
    return float(taken.sum())


# The tables.


def finish_table(job: Job, kept: PaperFolder) -> None:
    """Writes and prints table 1 or 2."""
    found = measured(kept)
    text = _TABLES[job.figure](found)
    write(job, kept, _with_times(found), text, {})


def _with_times(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Measurements with deciles of their rounds, and the seconds to as many tokens as the history
    has."""
    rows = []
    for f in found:
        workers = {}
        for n, w in f["workers"].items():
            known = latencies(found, int(n))
            low, high = np.percentile(w["round_seconds"], _DECILES) * 1e3
            workers[n] = {
                **w,
                "mean_milliseconds": statistics.fmean(w["round_seconds"]) * 1e3,
                "deciles_milliseconds": [float(low), float(high)],
                "seconds_to_tokens": seconds_of(math.ceil(f["history"] / int(n)), int(n), known),
            }
        rows.append({**f, "workers": workers})
    return rows


def table1(found: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per second, latency and time by the length of the history and the number of workers."""
    rows, parts = _with_times(found), []
    for title, value in (
        ("tokens per second", lambda w: f"{w['tokens_per_second']:.1f}"),
        ("latency of a forward pass (ms)", lambda w: f"{w[_PASS]:.3g}"),
        ("time to as many tokens (s)", lambda w: f"{w['seconds_to_tokens']:.3g}"),
    ):
        lines = [
            [n, *(value(row["workers"][n]) for row in rows)] for n in _numbers_of_workers(rows)
        ]
        header = ("workers", *(str(row["history"]) for row in rows))
        parts.append(f"{title}\n\n{markdown(header, lines)}")
    return "\n\n".join(parts)


def table2(found: Sequence[Mapping[str, Any]]) -> str:
    """Attention of a layer and the plan of a pass, which all layers share."""
    numbers = _numbers_of_workers(found)
    head = [f"{what}, {n}" for what in ("attention (us)", "plan (us)") for n in numbers]
    rows = [
        [
            str(f["history"]),
            *(_us(f["workers"][n]["attention_microseconds_a_layer"]) for n in numbers),
            *(_us(f["workers"][n]["plan_microseconds"]) for n in numbers),
        ]
        for f in found
    ]
    return (
        "attention of a layer, and the plan of a pass, by tokens of history and number of workers"
        f"\n\n{markdown(('history', *head), rows)}"
    )


_TABLES = {"table1": table1, "table2": table2}


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _numbers_of_workers(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return [*found[0]["workers"]]


# Figure 8.


def make_figure8(job: Job) -> None:
    """Measures latencies and runs evaluations, or what is left of both, and makes figure 8."""
    model = job.evaluations.load(job.load_options).replicas()[0]
    settle(job, model)
    with accuracy.evaluated(job, model) as (kept, panels):
        measure_all(job, kept, model)
        if {"prompts": True} not in kept:
            kept.add({"prompts": True}, prompt_tokens(job, model, panels))
        finish_figure8(job, kept, panels)


def redraw_figure8(job: Job) -> None:
    """Makes figure 8 of what has been measured and evaluated."""
    kept = job.read()
    finish_figure8(job, kept, accuracy.saved_panels(kept))


def rescore_figure8(job: Job) -> None:
    """Marks the answers of figure 8 again, and makes it of these marks."""
    accuracy.mark_again(job)
    redraw_figure8(job)


def prompt_tokens(job: Job, model: LoadedModel, panels: Sequence[Panel]) -> dict[str, float]:
    """The mean tokens of a prompt, its problem and the instructions, by the label of the line."""
    [panel] = panels
    task = tasks.load_task(
        panel.task, samples=panel.samples, dates=panel.dates, data=job.options.data_dir
    )
    assert model.tokenizer is not None
    encode, format = model.tokenizer.encode, format_of(model, job.options.format)
    problem = statistics.fmean(len(encode(problem.text)) for problem in task.problems)
    found = {}
    for line in panel.lines:
        rules = format.instructions(worker_names(line.workers))
        is_alone = line.label == BASELINE.label
        found[line.label] = problem + (0 if is_alone or not rules else len(encode(rules)))
    return found


def finish_figure8(job: Job, kept: PaperFolder, panels: Sequence[Panel]) -> None:
    """Writes and prints figure 8."""
    found = [f for f in (value for _, value in kept.points()) if "history" in f]
    found.sort(key=lambda f: f["history"])
    prompts = kept.value({"prompts": True})
    seconds = {
        line.label: {
            budget: seconds_of(
                budget, line.workers, latencies(found, line.workers), round(prompts[line.label])
            )
            for budget in _budgets(line.words)
        }
        for panel in panels
        for line in panel.lines
    }
    rows = _with_times(found)
    accuracy.finish(
        job,
        kept,
        panels,
        seconds,
        table1(found),
        latency=rows,
        prompt_tokens=prompts,
        pictures={"latency.png": lambda: latency_picture(rows)},
    )


def _budgets(words: Sequence[str]) -> Iterator[int]:
    return map(int, words[words.index("--budgets") + 1].split(","))


def latency_picture(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The left half of figure 8: mean latencies, and the deciles of rounds as bands."""
    figure, [axes] = plot.panels(1)
    numbers = _numbers_of_workers(rows)
    for n, style in plot.styles(numbers).items():
        histories = [row["history"] for row in rows]
        found = [row["workers"][n] for row in rows]
        low, high = zip(*(w["deciles_milliseconds"] for w in found), strict=True)
        axes.fill_between(histories, low, high, color=style["color"], alpha=0.15, linewidth=0)
        axes.plot(
            histories,
            [w["mean_milliseconds"] for w in found],
            **style,
            markersize=5,
            label=plural(int(n), "worker"),
        )
    axes.set(xlabel="tokens of history", ylabel="latency of a forward pass, ms", ylim=(0, None))
    axes.set_title("mean of all rounds, and its deciles")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure
