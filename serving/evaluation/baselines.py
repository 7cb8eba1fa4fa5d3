"""The methods that workers are compared with.

One stream, several that vote, and an outline whose points are worked out side by side:
Hogwild! Inference, sections 4.1 and D.2. All run on the engine of `Workers` and count alike: a
budget is a number of consecutive forward passes, without those over prompts and those of the early
finisher.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxshare import FinishReason, Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.engine import Engine
from jaxshare.serving.evaluation import streams
from jaxshare.serving.evaluation.skeleton import skeleton_of_thought
from jaxshare.serving.workers.layouts import PROMPT, worker_names
from jaxshare.serving.workers.prompts.format import Format
from jaxshare.serving.workers.results import Answer, Result
from jaxshare.serving.workers.session import Workers
from jaxshare.serving.workers.session_state import FINISHER
from jaxshare.serving.workers.text import answers
from jaxshare.serving.workers.text.answers import AnswerRule
from jaxshare.serving.workers.text.transcript import Event


def sequential(
    model: LoadedModel,
    problem: str,
    *,
    budget: int,
    finish_at: Sequence[int] = (),
    early_stop: bool = True,
    kind: str | AnswerRule = "box",
    sampler: Sampler | None = None,
    seed: int = 0,
    format: Format | str | None = None,
    finisher_tokens: int = 16,
    engine: Engine | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Result:
    """Runs one stream that sees the problem alone ("Baseline" in the paper).

    Args:
      model: with a tokenizer.
      problem: the user's words.
      budget: forward passes.
      finish_at: budgets at which to take the answer; default the whole budget. They do not change
        the text.
      early_stop: request the best guess where there is no answer yet; False takes the answer in the
        text, if there is one.
      kind: of answer; see `Workers`.
      sampler: default the checkpoint's own settings.
      seed: of the stream, which is the first of that seed (`jaxshare.seeds`).
      format: the instructions and the texts of an early answer; headers and the question are left
        out. Default the model's own instructions for a single worker, or else nothing but the
        problem. The name of a preset means its family's chat with nothing but the problem in it.
      finisher_tokens: maximum tokens of an answer that is requested early.
      engine: an engine of the model, in whose passes the streams run; see `Workers`.
      on_event: called with the text as it appears.

    Raises:
      ValueError: a budget below 1, a budget to finish at beyond it, another kind, or what `Workers`
        refuses.
    """
    finish_at = streams.checked_budgets(budget, finish_at, kind)
    with streams.independent_streams(
        model,
        problem,
        (streams.ALONE,),
        streams.lone_format(model, format, sampler),
        budget=budget,
        sampler=sampler,
        seed=seed,
        kind=kind,
        finisher_tokens=finisher_tokens,
        engine=engine,
    ) as session:
        answer = session.finish if early_stop else functools.partial(_written, session)
        return _result(
            session, streams.run_to_budgets(session, budget, finish_at, answer, on_event)
        )


def self_consistency(
    model: LoadedModel,
    problem: str,
    *,
    workers: int = 2,
    budget: int,
    finish_at: Sequence[int] = (),
    answer_by: str = "concatenate",
    kind: str | AnswerRule = "box",
    sampler: Sampler | None = None,
    seed: int = 0,
    format: Format | str | None = None,
    finisher_tokens: int = 16,
    engine: Engine | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Result:
    """Runs streams that do not see each other, and takes one answer from all of them.

    Wang et al., 2022; section 4.1.

    Args:
      workers: number of streams; stream i, from 0, has the seed `jaxshare.seeds.stream_seed(seed,
        i)`, and writes what `sequential` writes with that seed.
      answer_by: "concatenate" requests the answer after all texts, in order; "vote" takes the most
        frequent of the streams' answers, guesses of those that have not answered included.
      Others are as in `sequential`.

    Raises:
      ValueError: as `sequential`; no workers, another way to answer, or texts that together may
        pass the model's context.
    """
    finish_at = streams.checked_budgets(budget, finish_at, kind)
    streams.check_workers(workers)
    if answer_by not in ("concatenate", "vote"):
        raise ValueError(f"answer_by is {answer_by!r}; it must be 'concatenate' or 'vote'")
    names = tuple(f"sample {i + 1}" for i in range(workers))
    with streams.independent_streams(
        model,
        problem,
        names,
        streams.lone_format(model, format, sampler),
        budget=budget,
        sampler=sampler,
        seed=seed,
        kind=kind,
        finisher_tokens=finisher_tokens,
        engine=engine,
    ) as session:
        answer = functools.partial(_vote, session)
        if answer_by == "concatenate":
            _check_concatenated(session, budget, model.config.max_positions)
            answer = functools.partial(session.finish, sees=(PROMPT, *names))
        return _result(
            session, streams.run_to_budgets(session, budget, finish_at, answer, on_event)
        )


class Method(Protocol):
    """The signature of all methods; those of one stream ignore `workers`."""

    def __call__(
        self,
        model: LoadedModel,
        problem: str,
        *,
        workers: int = 2,
        budget: int,
        finish_at: Sequence[int] = (),
        kind: str | AnswerRule = "box",
        sampler: Sampler | None = None,
        seed: int = 0,
        format: Format | str | None = None,
        finisher_tokens: int = 16,
        engine: Engine | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> Result: ...


def _workers(
    model: LoadedModel,
    problem: str,
    *,
    workers: int = 2,
    budget: int,
    finish_at: Sequence[int] = (),
    kind: str | AnswerRule = "box",
    on_event: Callable[[Event], None] | None = None,
    **more: Any,
) -> Result:
    """Runs workers in the combined layout, the method that the others are compared with."""
    streams.check_workers(workers)
    finish_at = streams.checked_budgets(budget, finish_at, kind)
    with Workers(
        model, problem, names=worker_names(workers), budget=budget, kind=kind, **more
    ) as session:
        return session.run(finish_at, on_event=on_event)


def _unlimited(model: LoadedModel, problem: str, *, workers: int = 2, **more: Any) -> Result:
    return skeleton_of_thought(model, problem, workers=None, **more)


def _single(
    model: LoadedModel, problem: str, *, workers: int = 2, early_stop: bool, **more: Any
) -> Result:
    return sequential(model, problem, early_stop=early_stop, **more)


METHODS: Mapping[str, Method] = {
    "no-early-stop": functools.partial(_single, early_stop=False),
    "sequential": functools.partial(_single, early_stop=True),
    "self-consistency": self_consistency,
    "vote": functools.partial(self_consistency, answer_by="vote"),
    "skeleton": skeleton_of_thought,
    "skeleton-unlimited": _unlimited,
    "workers": _workers,
}
"""All methods by name: baselines and workers."""


def _result(session: Workers, by_budget: Mapping[int, Answer]) -> Result:
    reason = session.finish_reason or FinishReason.LENGTH
    return dataclasses.replace(session.result(by_budget), finish_reason=reason)


def _written(session: Workers) -> Answer:
    """The answer that a single stream has written, or none."""
    value = streams.value_of(session, streams.ALONE)
    return Answer(value, streams.text_of(session, streams.ALONE), session.passes, 0)


def _check_concatenated(session: Workers, budget: int, context: int) -> None:
    """Raises ValueError if the texts of all streams may not fit the context one after the other."""
    capacities = dict(zip(session.blocks, session.cache.capacities.tolist(), strict=True))
    prompt = int(session.cache.lengths[session.blocks.index(PROMPT)])
    texts = sum(min(budget, capacities[name]) for name in session.names)
    if (total := prompt + texts + capacities[FINISHER]) > context:
        raise ValueError(
            f"{len(session.names)} texts of up to {budget} tokens after a prompt of {prompt} may "
            f"take {total} with the request for the answer, but the model's context holds "
            f"{context}; lower the budget or the number of workers, or let them vote"
        )


def _vote(session: Workers) -> Answer:
    """The most frequent answer of the streams, with a guess for each stream that has none."""
    given = []
    for name in session.names:
        text, value = streams.text_of(session, name), streams.value_of(session, name)
        given.append(
            session.finish(sees=session.layout.sees[name])
            if value is None
            else Answer(value, text, session.passes, 0)
        )
    return Answer(
        answers.vote([answer.value for answer in given]),
        "\n\n".join(answer.text for answer in given),
        session.passes,
        sum(answer.extra_passes for answer in given),
    )
