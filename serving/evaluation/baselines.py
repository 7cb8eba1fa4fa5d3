"""What workers are compared with: one stream, several that vote, and an outline whose points are
worked out side by side.

Hogwild! Inference, sections 4.1 and D.2. All run on the engine of `Workers` and count alike: a
budget is a number of consecutive forward passes, those over prompts and those of the early finisher
left out.
"""

import bisect
import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxshare import Sampler
from jaxshare.compile_time import Stopwatch
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.workers import answers
from jaxshare.serving.workers.answers import AnswerRule, answer_rule
from jaxshare.serving.workers.codec import codec_of
from jaxshare.serving.workers.layouts import PROMPT, WorkersLayout, worker_names
from jaxshare.serving.workers.prompts.format import PLAIN, Format
from jaxshare.serving.workers.prompts.presets import advises_sampling, format_named
from jaxshare.serving.workers.results import Answer, Result, check_finish_at
from jaxshare.serving.workers.session import Workers
from jaxshare.serving.workers.session_state import FINISHER
from jaxshare.serving.workers.transcript import Event, Step

(_ALONE,) = worker_names(1)
_OUTLINE, _MAIN = "outline", "main"
_OUTLINE_TOKENS = 256
_MOST_POINTS = 10
_LOOK = 64
_POINT = re.compile(r"^[ \t]*(\d+)[.)][ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_LIST_OVER = re.compile(r"\n\s*\n(?=\s*\S)(?!\s*\d)")
"""A paragraph that is no point of a numbered list."""


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
    on_event: Callable[[Event], None] | None = None,
) -> Result:
    """One stream that sees the problem alone ("Baseline" in the paper).

    Args:
      model: with a tokenizer.
      problem: the user's words.
      budget: forward passes.
      finish_at: budgets at which to take the answer; default the whole budget. They change nothing
        of what is written.
      early_stop: ask for the best guess where there is no answer yet; False takes what stands in
        the text, if anything does.
      kind: of answer; see `Workers`.
      sampler: default the checkpoint's own settings.
      seed: of the stream, which is the first of that seed (`jaxshare.seeds`).
      format: what the model is told and what ends a run early; its headers and its question are
        left out. Default what the model's own says of one who works alone, or else nothing but the
        problem. The name of a preset stands for its family's chat with nothing but the problem in
        it.
      finisher_tokens: most tokens of an answer that is asked for.
      on_event: called with the text as it appears.

    Raises:
      ValueError: a budget below 1, a budget to finish at beyond it, another kind, or what `Workers`
        refuses.
    """
    finish_at = _checked(budget, finish_at, kind)
    session = _rows(
        model,
        problem,
        (_ALONE,),
        _alone(model, format, sampler),
        budget=budget,
        sampler=sampler,
        seed=seed,
        kind=kind,
        finisher_tokens=finisher_tokens,
    )

    def written() -> Answer:
        return Answer(_value(session, _ALONE), _text(session, _ALONE), session.passes, 0)

    answer = session.finish if early_stop else written
    return _result(session, _run(session, budget, finish_at, answer, on_event))


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
    on_event: Callable[[Event], None] | None = None,
) -> Result:
    """Several streams that do not see each other, and one answer from all of them (Wang et al.,
    2022; section 4.1).

    Args:
      workers: streams; number i, from 0, draws from `jaxshare.seeds.stream_seed(seed, i)`, and
        writes what `sequential` writes with that as its seed.
      answer_by: "concatenate" asks for the answer behind all texts, one after the other; "vote"
        takes the most frequent of the streams' answers, guesses of those that have not answered
        included.
      Others are as in `sequential`.

    Raises:
      ValueError: as `sequential`; no workers, another way to answer, or texts that together may
        pass the model's context.
    """
    finish_at = _checked(budget, finish_at, kind)
    _check_workers(workers)
    if answer_by not in ("concatenate", "vote"):
        raise ValueError(f"answer_by is {answer_by!r}; it must be 'concatenate' or 'vote'")
    names = tuple(f"sample {i + 1}" for i in range(workers))
    session = _rows(
        model,
        problem,
        names,
        _alone(model, format, sampler),
        budget=budget,
        sampler=sampler,
        seed=seed,
        kind=kind,
        finisher_tokens=finisher_tokens,
    )
    answer = functools.partial(_vote, session)
    if answer_by == "concatenate":
        _check_together(session, budget, model.config.max_positions)
        answer = functools.partial(session.finish, sees=(PROMPT, *names))
    return _result(session, _run(session, budget, finish_at, answer, on_event))


def skeleton_of_thought(
    model: LoadedModel,
    problem: str,
    *,
    workers: int | None = None,
    budget: int,
    finish_at: Sequence[int] = (),
    kind: str | AnswerRule = "box",
    sampler: Sampler | None = None,
    seed: int = 0,
    format: Format | str | None = None,
    finisher_tokens: int = 16,
    on_event: Callable[[Event], None] | None = None,
) -> Result:
    """An outline, its points worked out in threads of their own, then the model reads them all and
    goes on (sections 4.1 and D.2).

    Threads do not see each other, so that only the count of passes depends on how many of them
    advance in one: they are always decoded side by side, and then counted as though `workers` went
    round them, a token each. A round over k threads that are still being written takes ceil(k /
    workers) passes. `Result.seconds` is what side by side has taken.

    A budget that ends in the outline or in the threads is answered by the early finisher, over what
    there is by then. The outline ends with a paragraph that is no point of its list, and after 256
    tokens at the latest; an outline without points is dropped, and the model goes on with the
    problem alone. Threads may fill half of the context.

    Args:
      workers: how many threads advance in one pass; None for all.
      seed: of the outline; the threads and the main model have seeds of their own that follow from
        it (`jaxshare.seeds`).
      on_event: called with the text as it appears, and with that of the threads when all of them
        have ended.
      Others are as in `sequential`.

    Returns:
      A result in which the outline, each point and the main model have names of their own.

    Raises:
      ValueError: as `sequential`; or no workers.
    """
    watch = Stopwatch.start()
    finish_at = _checked(budget, finish_at, kind)
    if workers is not None:
        _check_workers(workers)
    format = _alone(model, format, sampler)
    rows = functools.partial(
        _rows, model, sampler=sampler, kind=kind, finisher_tokens=finisher_tokens
    )
    emit = on_event or (lambda event: None)

    # One pass at a time, so that the outline ends with the token that shows its end.
    outline = rows(
        _outline_request(problem),
        (_OUTLINE,),
        dataclasses.replace(format, step_header="1."),
        seed=seed,
        budget=_OUTLINE_TOKENS,
        passes_at_once=1,
    )
    found, over = {}, None
    for at in dict.fromkeys([*finish_at, budget]):
        for event in outline.stream(at):
            emit(event)
            if over := _LIST_OVER.search(_text(outline, _OUTLINE)):
                break
        if at == outline.passes and at in finish_at:
            found[at] = outline.finish(sees=(PROMPT, _OUTLINE))
        if over or at != outline.passes:
            break
    listed = _text(outline, _OUTLINE)[: over.start() if over else None]
    stages, steps, before = [outline], outline.steps, outline.passes

    threads = _threads(
        model,
        rows,
        problem,
        listed,
        format,
        kind,
        workers,
        budget - before,
        stream_seed(seed, "threads"),
    )
    if threads:
        stages.append(threads.session)
        used = min(budget - before, threads.passes)
        for at in [at for at in finish_at if before < at <= before + used]:
            asked = rows(
                _main_request(problem, threads.texts(at - before)), (_MAIN,), format, budget=budget
            )
            found[at] = dataclasses.replace(asked.finish(), passes=at)
        for step in threads.steps(used, before):
            steps.append(step)
            emit(
                Event(
                    step.worker,
                    1,
                    step.text,
                    before + used if step.ended is None else step.ended,
                    step.ended is not None,
                )
            )
        before += used

    ended = "budget"
    if before < budget:
        notes = threads.texts(threads.passes) if threads else []
        main = rows(
            _main_request(problem, notes),
            (_MAIN,),
            format,
            budget=budget,
            seed=stream_seed(seed, "main"),
        )
        found |= _run(
            main, budget, [at for at in finish_at if at > before], main.finish, on_event, before
        )
        stages.append(main)
        ended = main.ended or ended
        steps += [_later(step, before) for step in main.steps]
        before += main.passes
    return Result(
        names=tuple(name for stage in stages for name in stage.names),
        steps=steps,
        answers=found,
        passes=before,
        ended=ended,
        seconds=sum(stage.seconds for stage in stages),
        prefill_seconds=sum(stage.prefill_seconds for stage in stages),
        kv_bytes=stages[-1].result().kv_bytes,
        compile_seconds=watch.split()[1],
    )


class Method(Protocol):
    """How all methods are called; those of one stream pay no heed to `workers`."""

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
        on_event: Callable[[Event], None] | None = None,
    ) -> Result: ...


def _together(
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
    """Workers in the combined layout, the method that the others are compared with."""
    _check_workers(workers)
    finish_at = _checked(budget, finish_at, kind)
    return Workers(
        model, problem, names=worker_names(workers), budget=budget, kind=kind, **more
    ).run(finish_at, on_event=on_event)


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
    "workers": _together,
}
"""All methods by name: baselines and workers."""


def _checked(budget: int, finish_at: Sequence[int], kind: str | AnswerRule) -> list[int]:
    """The budgets to finish at, in ascending order."""
    if budget < 1:
        raise ValueError(f"budget is {budget}; it must be at least 1 forward pass")
    check_finish_at(finish_at, budget)
    answer_rule(kind)
    return sorted(set(finish_at or [budget]))


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")


def _alone(model: LoadedModel, format: Format | str | None, sampler: Sampler | None) -> Format:
    """The plain format, with the words of another one for somebody who works alone and for what
    ends a run early."""
    if sampler:
        warn_of_greedy(model, sampler, discouraged=advises_sampling(format))
    if isinstance(format, str):
        format = format_named(format, plain=True)
    format = format or (PLAIN if model.workers is None else Format.of(model))
    told = format.instructions((_ALONE,))
    return dataclasses.replace(
        PLAIN,
        system=told,
        system_alone=told,
        in_system_role=format.in_system_role,
        separator=format.separator,
        finisher=format.finisher,
        code_finisher=format.code_finisher,
        think=format.think,
        chat_template_kwargs=format.chat_template_kwargs,
    )


def _rows(
    model: LoadedModel,
    problem: str,
    names: Sequence[str],
    format: Format,
    *,
    budget: int,
    **more: Any,
) -> Workers:
    """A session of streams that see the prompt and what they write themselves."""
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


def _run(
    session: Workers,
    budget: int,
    finish_at: Sequence[int],
    answer: Callable[[], Answer],
    on_event: Callable[[Event], None] | None,
    before: int = 0,
) -> dict[int, Answer]:
    """Runs a session to the budget, of which others have had `before` passes; the answers by
    budget."""
    found = {}
    for at in dict.fromkeys([*finish_at, budget]):
        for event in session.stream(at - before):
            if on_event:
                on_event(dataclasses.replace(event, passes=before + event.passes))
        if at in finish_at:
            found[at] = answer()
    return {at: dataclasses.replace(got, passes=before + got.passes) for at, got in found.items()}


def _result(session: Workers, found: Mapping[int, Answer]) -> Result:
    return dataclasses.replace(session.result(found), ended=session.ended or "budget")


def _check_together(session: Workers, budget: int, context: int) -> None:
    """Raises ValueError if all that the streams may write does not fit the context together."""
    room = dict(zip(session.blocks, session.cache.capacities.tolist(), strict=True))
    prompt = int(session.cache.lengths[session.blocks.index(PROMPT)])
    if (
        most := prompt + sum(min(budget, room[name]) for name in session.names) + room[FINISHER]
    ) > context:
        raise ValueError(
            f"{len(session.names)} texts of up to {budget} tokens behind a prompt of {prompt} may "
            f"take {most} with what asks for the answer, but the model's context holds {context}; "
            "lower the budget or the number of workers, or let them vote"
        )


def _text(session: Workers, name: str) -> str:
    return "".join(step.text for step in session.steps if step.worker == name)


def _value(session: Workers, name: str) -> str | None:
    """The last valid answer of a stream, or None."""
    steps = [step for step in session.steps if step.worker == name]
    return next(filter(None, map(session.answer_of, reversed(steps))), None)


def _vote(session: Workers) -> Answer:
    """The answer that most streams give, or guess where they have not given one."""
    given = []
    for name in session.names:
        text, value = _text(session, name), _value(session, name)
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


def _later(step: Step, before: int) -> Step:
    return dataclasses.replace(
        step, began=step.began + before, ended=None if step.ended is None else step.ended + before
    )


# Skeleton-of-Thought: what is asked, and how threads are counted.


def _outline_request(problem: str) -> str:
    return (
        f"{problem}\n\nDo not solve this yet. First divide the work: list the parts that can be "
        "worked out side by side, so that no part waits for the result of another. Write a "
        f"numbered list of at most {_MOST_POINTS} lines, each of at most ten words, and nothing "
        "else."
    )


def _thread_request(problem: str, outline: str, code: bool) -> str:
    box = "" if code else " and put its result in \\boxed{}"
    return (
        f"{problem}\n\nThe work has been divided into these parts:\n\n{outline}\n\nEach of them is "
        "worked out by itself. Your reply begins with the title of one part: work that one out, "
        f"briefly, and no other{box}."
    )


def _main_request(problem: str, notes: Sequence[str]) -> str:
    if not notes:
        return problem
    parts = "\n\n".join(notes)
    return (
        f"{problem}\n\nThe parts of this have been worked out one by one, apart from each "
        f"other:\n\n{parts}\n\nGo on from there: check what has been found, work out what is "
        "missing, put it together and give the answer."
    )


def _points(outline: str) -> list[str]:
    """The points of a numbered list, those that count on from 1."""
    points = []
    for number, text in _POINT.findall(outline):
        if int(number) == len(points) + 1:
            points.append(text)
    return points[:_MOST_POINTS]


@dataclasses.dataclass(frozen=True)
class _Threads:
    """Threads that have been decoded side by side.

    Attributes:
      session: that they were decoded in, a worker for each.
      tokens: of each thread, without one that stops it; decode: what they say.
      turns: for each thread the pass, from 1, in which it gets each of its tokens, one that stops
        it included.
      complete: for each thread whether it ends with the last of them.
    """

    session: Workers
    tokens: list[list[int]]
    decode: Callable[[Sequence[int]], str]
    turns: list[list[int]]
    complete: list[bool]

    @property
    def passes(self) -> int:
        """Until the last of them has its last token."""
        return _last(self.turns)

    def texts(self, passes: int) -> list[str]:
        """What there is of each after some passes, under its title."""
        return [
            f"{name}\n{self.decode(tokens[: bisect.bisect_right(turns, passes)])}"
            for name, tokens, turns in zip(self.session.names, self.tokens, self.turns, strict=True)
        ]

    def steps(self, passes: int, before: int) -> list[Step]:
        """A step for each that has been begun by then, after `before` passes of others; first those
        that have ended."""
        found = []
        for name, text, tokens, turns, complete in zip(
            self.session.names,
            self.texts(passes),
            self.tokens,
            self.turns,
            self.complete,
            strict=True,
        ):
            if count := bisect.bisect_right(turns, passes):
                ended = before + turns[-1] if complete and count == len(turns) else None
                found.append(
                    Step(
                        name,
                        1,
                        text,
                        before + turns[0],
                        ended,
                        tokens[:count],
                        answer=answers.boxed(text) is not None,
                    )
                )
        return sorted(found, key=lambda step: (step.ended is None, step.ended))


def _threads(
    model: LoadedModel,
    rows: Callable[..., Workers],
    problem: str,
    outline: str,
    format: Format,
    kind: str | AnswerRule,
    workers: int | None,
    budget: int,
    seed: int,
) -> _Threads | None:
    """Decodes a thread for each point of an outline, for at least `budget` passes or to their end;
    None if there is nothing to decode.

    A thread ends with the result of its part, whatever the answer to the whole problem has to be.
    """
    code = answer_rule(kind).code
    names = [f"{i}. {point}" for i, point in enumerate(_points(outline), 1)]
    if not names or not budget:
        return None
    codec = codec_of(model.tokenizer, model.config.vocab_size)
    room = (model.config.max_positions - len(codec.encode(_main_request(problem, names)))) // 2
    most = min(budget, max(1, room // len(names)))
    # Titles are of different lengths, and the longest may take some passes before its thread
    # begins.
    session = rows(
        _thread_request(problem, outline, code),
        names,
        dataclasses.replace(format, step_header="{name}\n"),
        seed=seed,
        kind="code" if code else "box",
        budget=budget + max(len(codec.encode(name)) for name in names),
    )
    turns, complete = _known_turns(session, workers, most)
    while (
        session.ended is None
        and session.passes < session.budget
        and _last(turns) < budget
        and max(map(len, turns)) < most
    ):
        collections.deque(session.stream(session.passes + _LOOK), maxlen=0)
        turns, complete = _known_turns(session, workers, most)
    tokens = [
        [token for step in session.steps if step.worker == name for token in step.tokens]
        for name in names
    ]
    return _Threads(session, tokens, codec.decode, turns, complete)


def _known_turns(
    session: Workers, workers: int | None, most: int
) -> tuple[list[list[int]], list[bool]]:
    """The turns of the rounds that no thread has still to write, at most so many, and which threads
    end within them."""
    running = {step.worker for step in session.steps if step.ended is None}
    rounds = min([most, *(session.drawn[name] for name in running)])
    turns = _turns([min(count, rounds) for count in session.drawn.values()], workers)
    return turns, [name not in running and session.drawn[name] <= rounds for name in session.names]


def _turns(lengths: Sequence[int], workers: int | None) -> list[list[int]]:
    """The pass, from 1, in which each thread gets each of its tokens.

    Args:
      lengths: tokens of each thread.
      workers: threads that get a token in one pass; None for all. A round goes over those that have
        not ended, in order, and a pass does not reach into the next round.
    """
    turns: list[list[int]] = [[] for _ in lengths]
    for done in range(max(lengths)):
        active, passes = [i for i, length in enumerate(lengths) if length > done], _last(turns)
        for place, i in enumerate(active):
            turns[i].append(passes + 1 + place // (workers or len(active)))
    return turns


def _last(turns: Sequence[Sequence[int]]) -> int:
    return max(of_thread[-1] if of_thread else 0 for of_thread in turns)
