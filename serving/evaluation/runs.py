"""Runs of an evaluation: their specs, their results, and the file that they are written to.

A run depends on its spec and the model alone. That is why an evaluation needs no state but its own
file: the runs in it are skipped, the rest is made, and the result is that of an unbroken one.
"""

import dataclasses
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving import checksums, jsonl
from jaxshare.serving.engine import Engine
from jaxshare.serving.errors import NotANumberError
from jaxshare.serving.evaluation.baselines import METHODS
from jaxshare.serving.evaluation.problems import Problem
from jaxshare.serving.workers.text.answers import AnswerRule, answer_rule, box_answers, has_entries

ALONE = ("no-early-stop", "sequential", "skeleton-unlimited")
"""Methods that do not depend on the number of workers. They count as one."""

Key = tuple[int, str, int]
"""The key of a run: the number of workers, the problem's id, the number of the seed."""


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """The specification of one run: plain data, which can be sent to the process of a model.

    Attributes:
      problem: id of the problem; text, kind and parts as it has them.
      method: one of `METHODS`.
      workers: their number.
      number: of the seed, from 0; seed: the seed itself.
      budgets: forward passes after which answers are taken, in ascending order.
      answer_tokens: maximum tokens of an answer that is requested early.
      sampler: for all of them.
      more: further arguments of the method: the format, and settings of `Workers` for the method
        "workers".
    """

    problem: str
    text: str
    kind: str
    parts: int
    method: str
    workers: int
    number: int
    seed: int
    budgets: tuple[int, ...]
    answer_tokens: int
    sampler: Sampler
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.workers, self.problem, self.number

    @property
    def rule(self) -> AnswerRule:
        """The rule that ends the run: an answer to all of the problem's questions."""
        return (
            box_answers(has_entries(self.parts))
            if self.kind == "box" and self.parts > 1
            else answer_rule(self.kind)
        )

    def __str__(self) -> str:
        team = f"{self.workers} worker{'s' * (self.workers > 1)}"
        return f"the run of problem {self.problem} with {team}"


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run, with the fields of its line in the file.

    Attributes:
      workers, problem, number, seed: see `RunSpec`; text: of the problem.
      result: all texts and answers, as `Result.as_json` gives them.
    """

    workers: int
    problem: str
    number: int
    seed: int
    text: str
    result: dict[str, Any]

    @property
    def key(self) -> Key:
        return self.workers, self.problem, self.number

    @classmethod
    def read(cls, line: bytes) -> "Run":
        """Reads a line of the file.

        Raises:
          ValueError: the line is no run.
        """
        try:
            run = cls(**checksums.loads(line))
        except TypeError as error:
            raise ValueError(str(error)) from error
        kinds = {
            "workers": int,
            "problem": str,
            "number": int,
            "seed": int,
            "text": str,
            "result": dict,
        }
        wrong = [name for name, kind in kinds.items() if type(getattr(run, name)) is not kind]
        if wrong or not {"workers", "answers", "passes"} <= {*run.result}:
            raise ValueError(f"its {wrong[0] if wrong else 'result'} is not what a run has")
        return run


def run_specs(
    problems: Sequence[Problem],
    *,
    method: str,
    workers: Sequence[int],
    budgets: Sequence[int],
    seeds: int,
    seed: int,
    answer_tokens: int,
    sampler: Sampler,
    more: Mapping[str, Any],
) -> list[RunSpec]:
    """The specs of all runs of an evaluation, problem by problem.

    So an evaluation that is broken off has the same problems for all numbers of workers. A run's
    seed follows from `seed`, the problem's place and the number of the run (`jaxshare.seeds`), not
    from the number of workers.
    """
    settings: Any = dict(
        budgets=tuple(sorted(set(budgets))), answer_tokens=answer_tokens, sampler=sampler, more=more
    )
    return [
        RunSpec(
            problem.id,
            problem.text,
            problem.kind,
            problem.parts,
            method,
            count,
            number,
            stream_seed(seed, "evaluation run", place, number),
            **settings,
        )
        for place, problem in enumerate(problems)
        for number in range(seeds)
        for count in workers
    ]


def label(method: str, workers: int) -> str:
    """The name of a method with a number of workers, for legends and messages."""
    if method in ALONE:
        return method
    return (
        f"{workers} worker{'s' * (workers > 1)}" if method == "workers" else f"{method}, {workers}"
    )


def solve(
    model: LoadedModel,
    spec: RunSpec,
    on_pass: Callable[[int], None] | None = None,
    engine: Engine | None = None,
) -> Run:
    """Makes one run. It answers at every budget, which changes nothing of the text.

    Args:
      model: the engine's, if there is one.
      spec: of the run.
      on_pass: called from time to time with the forward passes so far.
      engine: in whose passes the run takes part.

    Raises:
      ValueError: a problem that the method refuses, such as one that does not fit the model's
        context.
      NotANumberError: the model's logits for it are not finite.
      EngineError: other sessions have too much of the engine's memory.
    """
    on_event = (lambda event: on_pass(event.passes)) if on_pass else None
    result = METHODS[spec.method](
        model,
        spec.text,
        workers=spec.workers,
        budget=spec.budgets[-1],
        finish_at=spec.budgets,
        kind=spec.rule,
        sampler=spec.sampler,
        seed=spec.seed,
        finisher_tokens=spec.answer_tokens,
        engine=engine,
        on_event=on_event,
        **spec.more,
    )
    return Run(spec.workers, spec.problem, spec.number, spec.seed, spec.text, result.as_json())


Refused = ValueError | NotANumberError
"""The errors of a problem that cannot be run; the others are."""
REFUSED = ValueError, NotANumberError

Execute = Callable[
    [Sequence[RunSpec], Callable[[int], None]], Iterable[tuple[RunSpec, Run | Refused]]
]
"""Makes runs: takes specs, which are independent of each other, and yields each with its run or its
error, in any order, as they finish. It may call the second argument with the forward passes of the
run in progress."""


# The file.


def read_runs(file: BinaryIO, path: Path, known: Container[Key]) -> list[Run]:
    """Reads the runs that are there already.

    A last line that was being written when its writer was killed is cut off.

    Raises:
      ValueError: a line that is damaged, repeated, or of no run of this evaluation.
    """
    runs: dict[Key, Run] = {}
    for number, line in enumerate(jsonl.lines_of(file), 1):
        try:
            run = Run.read(line)
            if run.key not in known:
                raise ValueError("it is of no run of this evaluation")
            if run.key in runs:
                raise ValueError("it repeats a run before")
        except ValueError as error:
            raise ValueError(
                f"line {number} of {path} is damaged ({error}); take that line out, and --resume "
                "makes the run again"
            ) from error
        runs[run.key] = run
    return [*runs.values()]


def write_run(file: BinaryIO, run: Run) -> None:
    """Appends a run to the file, at once."""
    jsonl.append(file, dataclasses.asdict(run), "--resume goes on with the evaluation", sync=True)
