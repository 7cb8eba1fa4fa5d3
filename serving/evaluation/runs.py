"""Runs of an evaluation: which there are, what one comes to, and the file that they are written to
as they finish.

A run depends on its piece and the model alone. That is why an evaluation needs no state but its own
file: what stands there is skipped, the rest is run, and all is as in an unbroken one.
"""

import concurrent.futures
import dataclasses
import functools
import json
import queue
from collections.abc import (
    Callable,
    Collection,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving import jsonl
from jaxshare.serving.cluster.ray_pool import RayPool, Work
from jaxshare.serving.evaluation.baselines import METHODS
from jaxshare.serving.evaluation.tasks import Problem
from jaxshare.serving.workers.answers import AnswerRule, answer_rule, box_answers, has_entries

ALONE = ("no-early-stop", "sequential", "skeleton-unlimited")
"""Methods that do not ask how many workers there are. They count as one."""

Key = tuple[int, str, int]
"""Of a run: how many workers, the problem's id, the number of the seed."""


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """One run that is to be made: plain data, which can be sent to wherever a model is.

    Attributes:
      problem: id of the problem; text, kind and parts as it has them.
      method: one of `METHODS`; workers: how many.
      number: of the seed, from 0; seed: itself.
      budgets: forward passes after which answers are taken, in ascending order.
      answer_tokens: most tokens of an answer that is asked for early.
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
        """What ends the run: an answer to all of the problem's questions."""
        return (
            box_answers(has_entries(self.parts))
            if self.kind == "box" and self.parts > 1
            else answer_rule(self.kind)
        )

    def __str__(self) -> str:
        return f"the run of problem {self.problem} with {self.workers} worker{'s' * (self.workers > 1)}"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has been made, as its line in the file has it.

    Attributes:
      workers, problem, number, seed: see `RunSpec`; text: of the problem.
      result: all that was written and answered, as `Result.as_json` gives it.
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
        """Of a line of the file.

        Raises:
          ValueError: it is none.
        """
        try:
            run = cls(**json.loads(line))
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
    """All runs of an evaluation, problem by problem, so that one that is broken off has the same
    problems for all numbers of workers.

    A run's seed follows from `seed`, the problem's place and the number of the run
    (`jaxshare.seeds`), not from the number of workers.
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


def solve(model: LoadedModel, piece: RunSpec, on_pass: Callable[[int], None] | None = None) -> Run:
    """Makes one run. One run answers at every budget, which changes nothing of what is written.

    Args:
      on_pass: called now and then with the forward passes so far.

    Raises:
      ValueError: a problem that the method refuses, such as one that does not fit the model's
        context.
    """
    on_event = (lambda event: on_pass(event.passes)) if on_pass else None
    result = METHODS[piece.method](
        model,
        piece.text,
        workers=piece.workers,
        budget=piece.budgets[-1],
        finish_at=piece.budgets,
        kind=piece.rule,
        sampler=piece.sampler,
        seed=piece.seed,
        finisher_tokens=piece.answer_tokens,
        on_event=on_event,
        **piece.more,
    )
    return Run(piece.workers, piece.problem, piece.number, piece.seed, piece.text, result.as_json())


Execute = Callable[
    [Sequence[RunSpec], Callable[[int], None]], Iterable[tuple[RunSpec, Run | ValueError]]
]
"""Where runs are made: given pieces, each of which stands by itself, it yields what each has come
to, in any order, as they finish. It may call the second argument with the forward passes of the run
that is under way."""


def execute(model: LoadedModel) -> Execute:
    """Makes runs here: one after the other, or side by side on the data groups of the model's
    mesh."""
    replicas = model.replicas()
    free: queue.SimpleQueue[LoadedModel] = queue.SimpleQueue()
    for replica in replicas:
        free.put(replica)

    def make(
        piece: RunSpec, on_pass: Callable[[int], None] | None
    ) -> tuple[RunSpec, Run | ValueError]:
        replica = free.get()
        try:
            return piece, solve(replica, piece, on_pass)
        except ValueError as error:
            return piece, error
        finally:
            free.put(replica)

    def run(
        wanted: Sequence[RunSpec], on_pass: Callable[[int], None]
    ) -> Iterator[tuple[RunSpec, Run | ValueError]]:
        if len(replicas) == 1:
            yield from (make(piece, on_pass) for piece in wanted)
            return
        pool = concurrent.futures.ThreadPoolExecutor(
            len(replicas), thread_name_prefix="jaxshare-data"
        )
        try:
            for made in concurrent.futures.as_completed(
                [pool.submit(make, piece, None) for piece in wanted]
            ):
                yield made.result()
        finally:  # also where the caller wants no more
            pool.shutdown(cancel_futures=True)

    return run


def execute_on(fleet: RayPool, load: Callable[[], LoadedModel]) -> Execute:
    """Makes runs on the replicas of a fleet, side by side.

    Args:
      fleet: connected.
      load: gives the model, on the node where it is called.
    """

    def run(
        wanted: Sequence[RunSpec], on_pass: Callable[[int], None]
    ) -> Iterator[tuple[RunSpec, Run | ValueError]]:
        fleet.start(functools.partial(_solver, load), max_replicas=len(wanted))
        for result in fleet.run(wanted):
            yield result.piece, result.value

    return run


def _solver(load: Callable[[], LoadedModel]) -> Work:
    """What makes runs in the process of a replica."""
    model = load()

    def work(
        piece: RunSpec, arrived: Collection[Hashable]
    ) -> Iterator[tuple[Hashable, Run | ValueError]]:
        try:
            yield piece.key, solve(model, piece)
        except ValueError as error:
            yield piece.key, ValueError(str(error))

    return work


# The file.


def read_runs(file: BinaryIO, path: Path, known: Container[Key]) -> list[Run]:
    """The runs that are there already. A last line that was being written when its writer was
    killed is cut off.

    Raises:
      ValueError: a line that is damaged, repeated, or of no run of this evaluation.
    """
    found: dict[Key, Run] = {}
    for number, line in enumerate(jsonl.lines_of(file), 1):
        try:
            run = Run.read(line)
            if run.key not in known:
                raise ValueError("it is of no run of this evaluation")
            if run.key in found:
                raise ValueError("it repeats a run before")
        except ValueError as error:
            raise ValueError(
                f"line {number} of {path} is damaged ({error}); take that line out, and --resume "
                "makes the run again"
            ) from error
        found[run.key] = run
    return [*found.values()]


def write_run(file: BinaryIO, run: Run) -> None:
    """Writes a run behind the others, at once."""
    jsonl.append(file, dataclasses.asdict(run), "--resume goes on with the evaluation")
