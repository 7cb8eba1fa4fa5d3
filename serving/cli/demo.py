"""The demo: one model as one, two and four workers and as sixteen branches over one shared cache,
in front of your eyes."""

import collections
import dataclasses
import random
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

import jaxshare.models
from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.branches.generate import Completions, generate
from jaxshare.serving.branches.run import Branches
from jaxshare.serving.cli.display import Streams
from jaxshare.serving.evaluation import arithmetic
from jaxshare.serving.workers.layouts import worker_names
from jaxshare.serving.workers.results import Result
from jaxshare.serving.workers.session import Workers

_WORKERS = {1: "One worker", 2: "Two workers", 4: "Four workers"}
_BRANCHES = 16
_EXAMPLES = 3
_BUDGET = 320
_TEMPERATURE = 0.7


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table: what ran, with sharing and without. Speeds are tokens per second
    without compilation, sizes bytes."""

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
    tokenizer: Any = model.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(
            "the demo asks its problem as a chat, and this model has no tokenizer with a chat "
            "template; use one that has"
        )
    problem = arithmetic.make_problem(random.Random(seed))
    console.print(Panel(problem.prompt(), title="the problem", title_align="left"))

    def asked(messages: Sequence[dict[str, str]]) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def together(
        names: Sequence[str], implementation: str | None = None, streams: Streams | None = None
    ) -> Result:
        session = Workers(
            model,
            problem.prompt(),
            names=names,
            budget=_BUDGET,
            max_workers=max(_WORKERS),
            sampler=Sampler(),
            implementation=implementation,
        )
        return session.run(on_event=streams.show if streams else None)

    groups: dict[int, Result] = {}
    for count, title in _WORKERS.items():
        said = (
            "compiling takes a few seconds"
            if count == 1
            else "each reads what the others write as it is written"
        )
        console.print(f"\n[bold]{title}[/]: {said}")
        with Streams(worker_names(count), console) as streams:
            groups[count] = together(worker_names(count), streams=streams)
        console.print(
            f"{_right(_words(groups[count]), problem)} of {len(problem.answers)} answers right in "
            f"{groups[count].passes} passes."
        )
    copies = {
        count: together(worker_names(count), implementation="reference")
        for count in _WORKERS
        if count > 1
    }

    # none of which is the problem of another seed
    rng = random.Random(stream_seed(seed, "examples"))
    examples = [arithmetic.make_problem(rng) for _ in range(_EXAMPLES)]
    prompt = asked(arithmetic.few_shot_messages(examples, problem))
    console.print(
        f"\n[bold]{_BRANCHES} branches[/] of one prompt of {_EXAMPLES} worked examples, at "
        f"temperature {_TEMPERATURE}"
    )
    branch: dict[str, Any] = dict(n=_BRANCHES, max_new_tokens=_BUDGET, seed=seed, warm_up=True)
    with _Answers(problem, console) as answers:
        sampled = generate(
            model,
            prompt,
            sampler=Sampler(temperature=_TEMPERATURE),
            share=True,
            on_tokens=answers.show,
            **branch,
        )
        answers.finish(sampled)
    vote = _vote([c.text for c in sampled.completions])
    voted = f"\\boxed{{{', '.join(vote)}}}"
    single = np.mean([_right(c.text, problem) for c in sampled.completions])
    console.print(
        f"The vote: {voted}, {_right(voted, problem)} of 5 right; single branches have "
        f"{single:.1f}.",
        highlight=False,
    )
    # As many equal prompts: all of these write the same, and with and without sharing it has to be
    # the same.
    equal = [prompt] * branch.pop("n")
    shared = generate(model, equal, sampler=Sampler(), share=True, **branch)
    unshared = generate(model, equal, sampler=Sampler(), share=False, **branch)

    lines = [
        *(_line(count, group, copies.get(count)) for count, group in groups.items()),
        Line(
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
        ),
    ]
    console.print()
    console.print(_table(lines))
    console.print(
        "Without sharing, each of several workers gathers a copy of all it sees and rotates its "
        "keys anew in every pass;\neach branch reads the prompt itself and keeps a copy. "
        "Identical: both ways wrote the same text, token for token.",
        style="dim",
        highlight=False,
    )
    return {
        "problem": problem.prompt(),
        "answers": list(problem.answers),
        "workers": {str(count): group.texts for count, group in groups.items()},
        "branches": _texts(sampled),
        "vote": vote,
        "right": {
            **{str(count): _right(_words(group), problem) for count, group in groups.items()},
            "vote": _right(voted, problem),
        },
        "table": [dataclasses.asdict(line) for line in lines],
    }


def _line(count: int, group: Result, copies: Result | None) -> Line:
    """Of workers, and of as many with a copy each of all that they see."""
    name = f"{count} worker{'s' * (count > 1)}"
    if copies is None:
        return Line(
            name,
            group.passes,
            None,
            group.tokens / group.seconds,
            None,
            group.kv_bytes,
            None,
            None,
            group.compile_seconds,
            None,
        )
    return Line(
        name,
        group.passes,
        copies.passes,
        group.tokens / group.seconds,
        copies.tokens / copies.seconds,
        group.kv_bytes,
        count * group.kv_bytes,
        group.texts == copies.texts,
        group.compile_seconds,
        copies.compile_seconds,
    )


class _Answers:
    """One line for each branch: what it has boxed so far, and how many of the five are right."""

    def __init__(self, problem: arithmetic.SumsProblem, console: Console):
        self.problem, self.console = problem, console
        self.texts: dict[int, str] = {}
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "_Answers":
        if self.live:
            self.live.start()
        return self

    def show(self, run: Branches) -> None:
        if self.live:
            self.texts |= {c.index: c.text for c in run.running()}
            self.live.update(self._view([*self.texts.values()]), refresh=True)

    def finish(self, done: Completions) -> None:
        view = self._view([c.text for c in done.completions])
        if self.live:
            self.live.update(view, refresh=True)
        else:
            self.console.print(view)

    def _view(self, texts: list[str]) -> Group:
        cells = []
        for i, text in enumerate(texts):
            boxed = arithmetic.boxed(text)
            cells.append(
                f"{i + 1:>2}  {', '.join(boxed)}  {'✓' * _right(text, self.problem)}"
                if boxed
                else f"{i + 1:>2}  {text.strip()[-32:]}".replace("\n", " ")
            )
        return Group(Columns([cell.ljust(38) for cell in cells], expand=False))

    def __exit__(self, *_) -> None:
        if self.live:
            self.live.stop()


def _right(text: str, problem: arithmetic.SumsProblem) -> int:
    return sum(arithmetic.check(text, problem))


def _words(result: Result) -> str:
    return "".join(step.text for step in result.steps)


def _vote(texts: list[str]) -> list[str]:
    """The most frequent answer to each question, over the branches that boxed one for each."""
    boxes = [
        b for text in texts if (b := arithmetic.boxed(text)) and len(b) == arithmetic.QUESTIONS
    ]
    return [collections.Counter(column).most_common(1)[0][0] for column in zip(*boxes, strict=True)]


def _texts(done: Completions) -> list[str]:
    return [c.text for c in done.completions]


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

    def pair(shared: str, unshared: str | None) -> str:
        return f"{shared} | {unshared if unshared is not None else '-':>8}"

    for line in lines:
        table.add_row(
            line.name,
            pair(
                str(line.passes),
                None if line.passes_unshared is None else str(line.passes_unshared),
            ),
            pair(
                f"{line.speed:,.0f}",
                None if line.speed_unshared is None else f"{line.speed_unshared:,.0f}",
            ),
            pair(
                f"{line.compile_seconds:.1f}",
                None
                if line.compile_seconds_unshared is None
                else f"{line.compile_seconds_unshared:.1f}",
            ),
            pair(
                _size(line.kv_bytes),
                None if line.kv_bytes_unshared is None else _size(line.kv_bytes_unshared),
            ),
            "-" if line.identical is None else "identical" if line.identical else "DIFFERENT",
        )
    return table


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def load_embedded() -> LoadedModel:
    """The model that comes with the package, in float32."""
    return jaxshare.models.load("embedded", dtype=jnp.float32)


def console_for(json: bool) -> Console:
    """Pictures go to stdout, or to stderr where stdout is for JSON."""
    return Console(
        file=sys.stderr if json else sys.stdout, width=None if sys.stdout.isatty() else 110
    )
