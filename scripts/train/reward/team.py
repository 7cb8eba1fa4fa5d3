"""Sessions of workers as samples of training by reward: the tokens that all workers of a session have
sampled, in its trace, which one parallel pass encodes again (Hogwild! Inference, appendix B)."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving import Format, Workers
from jaxshare.serving.evaluation.arithmetic import (
    QUESTIONS,
    SumsProblem,
    check,
    make_problem,
    results,
)
from jaxshare.serving.workers.layouts import worker_names
from jaxshare.serving.workers.results import Result
from jaxshare.serving.workers.text.answers import box_answers, has_entries
from scripts.train.reward.policy_gradient import Episode
from scripts.train.sessions import Lesson

STEP_TOKENS = 128
_HASTE = 0.5
"""The part of an answer's reward that is lost where it takes the whole budget."""


def right_and_soon(problem: SumsProblem, result: Result) -> float:
    """The share of right boxed answers, each less half of the share of the budget after which it was
    first in a finished step.

    One that no step gives by itself counts as given at the end.
    """
    [(budget, answer)] = result.answers.items()
    first: dict[tuple[int, int], int] = {}
    for step in result.steps:
        if step.ended is not None:
            for given in results(step.text).items():
                first[given] = min(step.ended, first.get(given, step.ended))
    right = check("" if answer.value is None else f"\\boxed{{{answer.value}}}", problem)
    passes = [first.get(each, result.passes) for each in enumerate(problem.answers, 1)]
    return float(np.mean(np.where(right, 1 - _HASTE * np.asarray(passes) / budget, 0.0)))


def play(
    model: LoadedModel,
    format: Format,
    problem: SumsProblem,
    *,
    workers: int,
    budget: int,
    temperature: float,
    seed: int,
) -> tuple[Result, Lesson]:
    """A session of workers on a problem, and what was sampled in it.

    Args:
      model: that writes; format: of its sessions.
      problem: of several questions.
      workers: their number, 2 or more.
      budget: forward passes, after which the finisher answers.
      temperature: that workers sample at.
      seed: of the session.

    Returns:
      The result, with the answer at the budget, and a lesson whose weights are 1.
    """
    session = Workers(
        model,
        problem.prompt(),
        names=worker_names(workers),
        budget=budget,
        format=format,
        sampler=Sampler(temperature),
        seed=seed,
        step_tokens=STEP_TOKENS,
        finisher_tokens=8 * len(problem.questions),
        kind=box_answers(has_entries(len(problem.questions))),
        record=True,
    )
    with session:
        result = session.run(finish_at=[budget])
        return result, lesson_of(session)


def lesson_of(session: Any) -> Lesson:
    """The lesson of a session: all that its workers have sampled, but stop tokens, which it does not keep.

    Args:
      session: `Workers` with a trace.

    Raises:
      ValueError: what was sampled is not what was fed, since openings are longer than a pass.
    """
    trace = session.trace
    found: list[tuple[int, int]] = []
    for row, name in enumerate(session.names):
        tokens = [t for step in _in_order(session, name) for t in step.tokens]
        fed = np.flatnonzero(trace.rows[trace.row_pass] == row)
        of_pass = trace.row_pass[fed]
        # Each pass begins with the token that was sampled last, and may go on with an opening.
        [starts] = np.nonzero(np.diff(of_pass, prepend=-1))
        starts = starts[1:]  # the first one feeds the opening of the first step
        known = trace.tokens[fed[starts]].tolist()
        if known != tokens[: len(known)] or len(tokens) > len(known) + 1:
            raise ValueError(
                f"{name} has fed other tokens than it has sampled; give a format whose headers are "
                "shorter than a pass"
            )
        before = [*fed[starts - 1].tolist(), *fed[-1:].tolist()]
        found += [*zip(before, tokens, strict=False)]
    at, targets = np.asarray(sorted(found), np.int32).reshape(-1, 2).T
    return Lesson(trace, at, targets, np.ones(len(at), np.float32))


def _in_order(session: Any, name: str) -> list[Any]:
    return sorted((s for s in session.steps if s.worker == name), key=lambda step: step.number)


def draw(seed: int, step: int, prompts: int) -> list[SumsProblem]:
    """The problems of a step: five plain questions each."""
    rng = random.Random(f"grpo team/{seed}/{step}")
    return [make_problem(rng, QUESTIONS) for _ in range(prompts)]


def session_seed(seed: int, step: int, prompt: int, sample: int) -> int:
    """The seed of a sample."""
    return stream_seed(seed, "grpo team", step, prompt, sample)


def team_episodes(
    lessons: Sequence[Lesson], gains: np.ndarray, length: int | None = None
) -> list[Episode]:
    """Sessions as episodes; their log-probabilities are to be filled in by the policy that sampled.

    Args:
      lessons: N sessions.
      gains: float32[N], advantages; NaN leaves a session out.
      length: that takes the place of the number of sampled tokens.
    """
    found = []
    for lesson, gain in zip(lessons, gains, strict=True):
        size = len(lesson.at)
        if np.isfinite(gain) and size:
            weights = np.full(size, 1 / (length or size), np.float32)
            learned = Lesson(lesson.trace, lesson.at, lesson.targets, weights)
            nothing = np.zeros(size, np.float32)
            found.append(Episode(learned, nothing, np.full(size, gain, np.float32), 1))
    return found
