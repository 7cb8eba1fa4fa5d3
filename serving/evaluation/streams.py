"""Independent streams on the engine of `Workers`: the parts that all baselines are made of."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.workers.layouts import PROMPT, WorkersLayout, worker_names
from jaxshare.serving.workers.prompts.format import PLAIN, Format
from jaxshare.serving.workers.prompts.presets import advises_sampling, format_named
from jaxshare.serving.workers.results import Answer, check_finish_at
from jaxshare.serving.workers.session import Workers
from jaxshare.serving.workers.text.answers import AnswerRule, answer_rule
from jaxshare.serving.workers.text.transcript import Event

(ALONE,) = worker_names(1)
"""The name of a single stream."""


def checked_budgets(budget: int, finish_at: Sequence[int], kind: str | AnswerRule) -> list[int]:
    """The budgets to finish at, in ascending order; by default the whole budget.

    Raises:
      ValueError: a budget below 1, one to finish at beyond it, or another kind of answer.
    """
    if budget < 1:
        raise ValueError(f"budget is {budget}; it must be at least 1 forward pass")
    check_finish_at(finish_at, budget)
    answer_rule(kind)
    return sorted(set(finish_at or [budget]))


def check_workers(workers: int) -> None:
    """Raises ValueError for a number of workers below 1."""
    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")


def lone_format(model: LoadedModel, format: Format | str | None, sampler: Sampler | None) -> Format:
    """The plain format with the instructions of another format for a single worker.

    The texts of an early answer are those of the other format too.
    """
    if sampler:
        warn_of_greedy(model, sampler, discouraged=advises_sampling(format))
    if isinstance(format, str):
        format = format_named(format, plain=True)
    format = format or (PLAIN if model.workers is None else Format.of(model))
    instructions = format.instructions((ALONE,))
    return dataclasses.replace(
        PLAIN,
        system=instructions,
        system_alone=instructions,
        in_system_role=format.in_system_role,
        separator=format.separator,
        finisher=format.finisher,
        code_finisher=format.code_finisher,
        think=format.think,
        chat_template_kwargs=format.chat_template_kwargs,
    )


def independent_streams(
    model: LoadedModel,
    problem: str,
    names: Sequence[str],
    format: Format,
    *,
    budget: int,
    **more: Any,
) -> Workers:
    """A session of streams that see the prompt and their own text."""
    if sampler := more.get("sampler"):
        sampler.refuse(["seed"], "a baseline takes its seed apart; give it as the argument seed")
    layout = WorkersLayout({name: (PROMPT, name) for name in names})
    return Workers(
        model,
        problem,
        names=names,
        layout=layout,
        format=format,
        budget=budget,
        ask_every=0,
        together=False,
        **more,
    )


def run_to_budgets(
    session: Workers,
    budget: int,
    finish_at: Sequence[int],
    answer: Callable[[], Answer],
    on_event: Callable[[Event], None] | None,
    before: int = 0,
) -> dict[int, Answer]:
    """Runs a session to the budget; the answers by budget.

    `before` passes of the budget belong to the sessions before this one.
    """
    answers: dict[int, Answer] = {}
    for passes in dict.fromkeys([*finish_at, budget]):
        for event in session.stream(passes - before):
            if on_event:
                on_event(dataclasses.replace(event, passes=before + event.passes))
        if passes in finish_at:
            answers[passes] = answer()
    return {
        passes: dataclasses.replace(given, passes=before + given.passes)
        for passes, given in answers.items()
    }


def text_of(session: Workers, name: str) -> str:
    """The text of a stream."""
    return "".join(step.text for step in session.steps if step.worker == name)


def value_of(session: Workers, name: str) -> str | None:
    """The last valid answer of a stream, or None."""
    steps = [step for step in session.steps if step.worker == name]
    return next(filter(None, map(session.answer_of, reversed(steps))), None)
