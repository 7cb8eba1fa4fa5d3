"""The command `jaxshare demo`: one model as workers and as branches over one shared cache.

It runs one, two and four workers and sixteen branches, live on the terminal.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from jaxshare import Sampler, models, progress
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.branches.generate import Completions, generate
from jaxshare.serving.branches.run import Branches
from jaxshare.serving.cli import arguments
from jaxshare.serving.cli.display import Streams, console_for
from jaxshare.serving.evaluation import arithmetic
from jaxshare.serving.evaluation.arithmetic import SumsProblem
from jaxshare.serving.inputs import encode_messages
from jaxshare.serving.workers.layouts import worker_names
from jaxshare.serving.workers.results import Result
from jaxshare.serving.workers.session import Workers

_WORKERS = {1: "One worker", 2: "Two workers", 4: "Four workers"}
_BRANCHES = 16
_EXAMPLES = 3
_BUDGET = 320
_TEMPERATURE = 0.7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare demo`."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="folder, GGUF file or hub id of a chat model; default the one that comes with jaxshare",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the problem and the samples (default 0)"
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare demo`."""
    model = models.load(options.model) if options.model else load_embedded()
    result = run_demo(model, options.seed, console_for(options.json))
    if options.json:
        print(json.dumps(result))
    return 0


def load_embedded() -> LoadedModel:
    """Loads the model that comes with the package, in float32."""
    return models.load("embedded", dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table: a run with sharing and without.

    Speeds are tokens per second without compilation, sizes bytes.
    """

    name: str
    passes: int
    passes_unshared: int | None
    speed: float
    speed_unshared: float | None
    kv_bytes: int
    kv_bytes_unshared: int | None
    identical: bool | None
    compile_seconds: float
    compile_seconds_unshared: float | None


def run_demo(model: LoadedModel, seed: int, console: Console) -> dict:
    """Runs all parts on one problem and prints as it goes.

    Args:
      model: the embedded one, or any with a tokenizer and a chat template.
      seed: of the problem and of the samples.
      console: where to print.

    Returns:
      What was printed, as plain data for `--json`.

    Raises:
      ValueError: a model without a tokenizer or chat template.
    """
    if model.tokenizer is None or not model.tokenizer.chat_template:
        raise ValueError(
            "the demo gives its problem as a chat, and this model has no tokenizer with a chat "
            "template; use one that has"
        )
    problem = arithmetic.make_problem(random.Random(seed))
    console.print(Panel(problem.prompt(), title="the problem", title_align="left"))

    groups = _run_workers(model, problem, console)
    with progress.work("running the workers without sharing"):
        copies = {
            count: _session(model, problem, worker_names(count), implementation="reference").run()
            for count in _WORKERS
            if count > 1
        }
    prompt = _few_shot_prompt(model, problem, seed)
    sampled = _sample_branches(model, problem, prompt, seed, console)
    vote = _vote([c.text for c in sampled.completions])
    voted = f"\\boxed{{{', '.join(vote)}}}"
    single = np.mean([_num_right(c.text, problem) for c in sampled.completions])
    console.print(
        f"The vote: {voted}, {_num_right(voted, problem)} of 5 right; single branches have "
        f"{single:.1f}.",
        highlight=False,
    )
    lines = [
        *(_workers_line(count, group, copies.get(count)) for count, group in groups.items()),
        _branches_line(model, prompt, seed, sampled),
    ]
    _print_table(lines, console)
    return {
        "problem": problem.prompt(),
        "answers": list(problem.answers),
        "workers": {str(count): group.texts for count, group in groups.items()},
        "branches": _texts(sampled),
        "vote": vote,
        "right": {
            **{str(count): _num_right(_words(group), problem) for count, group in groups.items()},
            "vote": _num_right(voted, problem),
        },
        "table": [dataclasses.asdict(line) for line in lines],
    }


# Workers.


def _session(
    model: LoadedModel,
    problem: SumsProblem,
    names: Sequence[str],
    implementation: str | None = None,
) -> Workers:
    return Workers(
        model,
        problem.prompt(),
        names=names,
        budget=_BUDGET,
        max_workers=max(_WORKERS),
        sampler=Sampler(),
        implementation=implementation,
    )


def _run_workers(model: LoadedModel, problem: SumsProblem, console: Console) -> dict[int, Result]:
    """Runs each number of workers live; the results by that number."""
    groups: dict[int, Result] = {}
    for count, title in _WORKERS.items():
        note = (
            "compiling takes a few seconds"
            if count == 1
            else "each reads what the others write as it is written"
        )
        console.print(f"\n[bold]{title}[/]: {note}")
        names = worker_names(count)
        with Streams(names, console) as streams:
            groups[count] = _session(model, problem, names).run(on_event=streams.show)
        console.print(
            f"{_num_right(_words(groups[count]), problem)} of {len(problem.answers)} answers right "
            f"in {groups[count].passes} passes."
        )
    return groups


def _workers_line(count: int, group: Result, copies: Result | None) -> Line:
    """The line of workers, beside workers that each have a copy of all that they see."""
    return Line(
        name=f"{count} worker{'s' * (count > 1)}",
        passes=group.passes,
        passes_unshared=copies and copies.passes,
        speed=group.tokens / group.seconds,
        speed_unshared=copies and copies.tokens / copies.seconds,
        kv_bytes=group.kv_bytes,
        kv_bytes_unshared=copies and count * group.kv_bytes,
        identical=copies and group.texts == copies.texts,
        compile_seconds=group.compile_seconds,
        compile_seconds_unshared=copies and copies.compile_seconds,
    )


# Branches.


def _few_shot_prompt(model: LoadedModel, problem: SumsProblem, seed: int) -> list[int]:
    # A seed of its own, so that no example is the problem of another seed.
    rng = random.Random(stream_seed(seed, "examples"))
    examples = [arithmetic.make_problem(rng) for _ in range(_EXAMPLES)]
    return encode_messages(model, arithmetic.few_shot_messages(examples, problem))


def _branch_settings(seed: int) -> dict[str, Any]:
    return {"max_new_tokens": _BUDGET, "seed": seed, "warm_up": True}


def _sample_branches(
    model: LoadedModel, problem: SumsProblem, prompt: list[int], seed: int, console: Console
) -> Completions:
    """Samples all branches live."""
    console.print(
        f"\n[bold]{_BRANCHES} branches[/] of one prompt of {_EXAMPLES} worked examples, at "
        f"temperature {_TEMPERATURE}"
    )
    with _BranchAnswers(problem, console) as answers:
        sampled = generate(
            model,
            prompt,
            n=_BRANCHES,
            sampler=Sampler(temperature=_TEMPERATURE),
            share=True,
            on_tokens=answers.show,
            **_branch_settings(seed),
        )
        answers.finish(sampled)
    return sampled


def _branches_line(model: LoadedModel, prompt: list[int], seed: int, sampled: Completions) -> Line:
    """The line of greedy branches, with and without sharing.

    All of these equal prompts get the same text, and with and without sharing it has to be the
    same.
    """
    equal = [prompt] * _BRANCHES
    settings = _branch_settings(seed)
    with progress.work("running the branches with and without sharing"):
        shared = generate(model, equal, sampler=Sampler(), share=True, **settings)
        unshared = generate(model, equal, sampler=Sampler(), share=False, **settings)
    return Line(
        f"{_BRANCHES} branches",
        shared.passes,
        unshared.passes,
        shared.tokens_per_second,
        unshared.tokens_per_second,
        shared.kv_bytes,
        unshared.kv_bytes,
        _texts(shared) == _texts(unshared),
        sampled.compile_seconds + shared.compile_seconds,
        unshared.compile_seconds,
    )


class _BranchAnswers:
    """One line for each branch: its boxed answers so far, and how many of the five are right."""

    def __init__(self, problem: SumsProblem, console: Console):
        self.problem, self.console = problem, console
        self.texts: dict[int, str] = {}
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._lines = contextlib.ExitStack()

    def __enter__(self) -> "_BranchAnswers":
        if self.live:
            self._lines.enter_context(progress.DISPLAY.lines())
            self.live.start()
        return self

    def show(self, run: Branches) -> None:
        if self.live:
            self.texts |= {c.index: c.text for c in run.running()}
            self.live.update(self._view([*self.texts.values()]), refresh=True)

    def finish(self, result: Completions) -> None:
        view = self._view(_texts(result))
        if self.live:
            self.live.update(view, refresh=True)
        else:
            self.console.print(view)

    def _view(self, texts: list[str]) -> Group:
        cells = []
        for i, text in enumerate(texts):
            boxed = arithmetic.boxed(text)
            cells.append(
                f"{i + 1:>2}  {', '.join(boxed)}  {'✓' * _num_right(text, self.problem)}"
                if boxed
                else f"{i + 1:>2}  {text.strip()[-32:]}".replace("\n", " ")
            )
        return Group(Columns([cell.ljust(38) for cell in cells], expand=False))

    def __exit__(self, *_) -> None:
        if self.live:
            self.live.stop()
        self._lines.close()


def _num_right(text: str, problem: SumsProblem) -> int:
    return sum(arithmetic.check(text, problem))


def _words(result: Result) -> str:
    return "".join(step.text for step in result.steps)


def _vote(texts: list[str]) -> list[str]:
    """The most frequent answer to each question, over the branches that boxed one for each."""
    boxes = [
        b for text in texts if (b := arithmetic.boxed(text)) and len(b) == arithmetic.QUESTIONS
    ]
    return [collections.Counter(column).most_common(1)[0][0] for column in zip(*boxes, strict=True)]


def _texts(result: Completions) -> list[str]:
    return [c.text for c in result.completions]


# The table.


def _print_table(lines: list[Line], console: Console) -> None:
    console.print()
    console.print(_table(lines))
    console.print(
        "Without sharing, each of several workers gathers a copy of all it sees and rotates its "
        "keys anew in every pass; each branch reads the prompt itself and keeps a copy. "
        "Identical: both ways wrote the same text, token for token.",
        style="dim",
        highlight=False,
    )


def _table(lines: list[Line]) -> Table:
    table = Table(title="this run, with sharing | without", title_justify="left")
    for heading in (
        "",
        "forward passes",
        "tokens per second",
        "seconds compiling",
        "KV cache",
        "same greedy text",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    for line in lines:
        table.add_row(
            line.name,
            _pair("{}", line.passes, line.passes_unshared),
            _pair("{:,.0f}", line.speed, line.speed_unshared),
            _pair("{:.1f}", line.compile_seconds, line.compile_seconds_unshared),
            _pair("{:.2f} MB", line.kv_bytes / 1e6, _megabytes(line.kv_bytes_unshared)),
            "-" if line.identical is None else "identical" if line.identical else "DIFFERENT",
        )
    return table


def _pair(form: str, shared: float, unshared: float | None) -> str:
    return f"{form.format(shared)} | {'-' if unshared is None else form.format(unshared):>8}"


def _megabytes(count: int | None) -> float | None:
    return None if count is None else count / 1e6
