"""Skeleton-of-Thought: an outline, a thread for each of its points, then one stream that reads all.

Hogwild! Inference, sections 4.1 and D.2.

Threads do not see each other, so only the count of passes depends on how many of them advance in
one pass: they are always decoded side by side, and counted as though `workers` of them got a token
in each pass, in turn. A round over k unfinished threads takes ceil(k / workers) passes.
`Result.seconds` is the time side by side.
"""

import bisect
import collections
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxshare import FinishReason, Sampler
from jaxshare.compile_time import Stopwatch
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.engine import Engine
from jaxshare.serving.evaluation import streams
from jaxshare.serving.workers.layouts import PROMPT
from jaxshare.serving.workers.prompts.format import Format
from jaxshare.serving.workers.results import Answer, Result
from jaxshare.serving.workers.session import Workers
from jaxshare.serving.workers.text import answers
from jaxshare.serving.workers.text.answers import AnswerRule, answer_rule
from jaxshare.serving.workers.text.codec import codec_of
from jaxshare.serving.workers.text.transcript import Event, Step

_OUTLINE, _MAIN = "outline", "main"
_OUTLINE_TOKENS = 256
MAX_POINTS = 10
"""The most threads."""
_LOOK = 64
"""Passes between two looks at which threads have ended."""
_POINT = re.compile(r"^[ \t]*(\d+)[.)][ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_LIST_OVER = re.compile(r"\n\s*\n(?=\s*\S)(?!\s*\d)")
"""A paragraph that is no point of a numbered list."""


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
    engine: Engine | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Result:
    """Writes an outline, works out its points in threads, then reads them all and goes on.

    A budget that ends in the outline or in the threads is answered by the early finisher, from the
    text there is by then. The outline ends with a paragraph that is no point of its list, and after
    256 tokens at the latest; an outline without points is dropped, and the model goes on with the
    problem alone. Threads may fill half of the context.

    Args:
      workers: threads that advance in one pass; None for all.
      seed: of the outline; the threads and the main model have seeds that follow from it
        (`jaxshare.seeds`).
      on_event: called with the text as it appears, for threads when all of them have ended.
      Others are as in `sequential`.

    Returns:
      A result in which the outline, each point and the main model have names of their own.

    Raises:
      ValueError: as `sequential`; or no workers.
    """
    watch = Stopwatch.start()
    finish_at = streams.checked_budgets(budget, finish_at, kind)
    if workers is not None:
        streams.check_workers(workers)
    format = streams.lone_format(model, format, sampler)
    with contextlib.ExitStack() as sessions:
        settings = {"sampler": sampler, "kind": kind, "finisher_tokens": finisher_tokens}
        make = functools.partial(streams.independent_streams, model, engine=engine, **settings)

        def opened(*given: Any, **more: Any) -> Workers:
            return sessions.enter_context(make(*given, **more))

        on_event = on_event or (lambda event: None)
        run = _SkeletonRun(problem, budget, finish_at, format, opened, on_event)
        outline = _write_outline(run, seed)
        threads = _write_threads(model, run, outline, kind, workers, stream_seed(seed, "threads"))
        reason = None
        if run.passes < budget:
            notes = threads.texts(threads.passes) if threads else []
            reason = _write_main(run, notes, stream_seed(seed, "main"))
        return run.result(reason or FinishReason.LENGTH, watch.split()[1])


# The three stages.


@dataclasses.dataclass
class _SkeletonRun:
    """The task of a run and what its stages have written so far.

    Attributes:
      problem, budget, finish_at, format: of the run, checked.
      make: makes a session of independent streams.
      on_event: called with the text as it appears.
      stages: sessions, in order.
      steps: of all stages, in order.
      answers: by budget.
      passes: forward passes of all stages.
    """

    problem: str
    budget: int
    finish_at: Sequence[int]
    format: Format
    make: Callable[..., Workers]
    on_event: Callable[[Event], None]
    stages: list[Workers] = dataclasses.field(default_factory=list)
    steps: list[Step] = dataclasses.field(default_factory=list)
    answers: dict[int, Answer] = dataclasses.field(default_factory=dict)
    passes: int = 0

    def result(self, reason: FinishReason, compile_seconds: float) -> Result:
        return Result(
            names=tuple(name for stage in self.stages for name in stage.names),
            steps=self.steps,
            answers=self.answers,
            passes=self.passes,
            finish_reason=reason,
            seconds=sum(stage.seconds for stage in self.stages),
            prefill_seconds=sum(stage.prefill_seconds for stage in self.stages),
            kv_bytes=self.stages[-1].result().kv_bytes,
            compile_seconds=compile_seconds,
        )


def _write_outline(run: _SkeletonRun, seed: int) -> str:
    """Writes the outline, and answers the budgets that end in it; the text of the list."""
    # One pass per dispatch, so that the outline ends with the token that shows its end.
    session = run.make(
        outline_request(run.problem),
        (_OUTLINE,),
        dataclasses.replace(run.format, step_header="1."),
        seed=seed,
        budget=_OUTLINE_TOKENS,
        passes_at_once=1,
    )
    over = None
    for passes in dict.fromkeys([*run.finish_at, run.budget]):
        for event in session.stream(passes):
            run.on_event(event)
            if over := _LIST_OVER.search(streams.text_of(session, _OUTLINE)):
                break
        if passes == session.passes and passes in run.finish_at:
            run.answers[passes] = session.finish(sees=(PROMPT, _OUTLINE))
        if over or passes != session.passes:
            break
    session.close()  # the next stage has its memory
    run.stages.append(session)
    run.steps += session.steps
    run.passes += session.passes
    return streams.text_of(session, _OUTLINE)[: over.start() if over else None]


def _write_threads(
    model: LoadedModel,
    run: _SkeletonRun,
    outline: str,
    kind: str | AnswerRule,
    workers: int | None,
    seed: int,
) -> "_Threads | None":
    """Writes a thread for each point of the outline, and answers the budgets that end in them."""
    before, left = run.passes, run.budget - run.passes
    threads = _decode_threads(model, run, outline, kind, workers, left, seed)
    if threads is None:
        return None
    threads.session.close()
    run.stages.append(threads.session)
    used = min(left, threads.passes)
    for passes in [at for at in run.finish_at if before < at <= before + used]:
        request = main_request(run.problem, threads.texts(passes - before))
        with run.make(request, (_MAIN,), run.format, budget=run.budget) as session:
            run.answers[passes] = dataclasses.replace(session.finish(), passes=passes)
    for step in threads.steps(used, before):
        run.steps.append(step)
        finished = step.ended is not None
        passes = step.ended if step.ended is not None else before + used
        run.on_event(Event(step.worker, 1, step.text, passes, finished))
    run.passes += used
    return threads


def _write_main(run: _SkeletonRun, notes: Sequence[str], seed: int) -> FinishReason | None:
    """Goes on from the notes of all threads to the budget; why the stream has ended."""
    before = run.passes
    session = run.make(
        main_request(run.problem, notes),
        (_MAIN,),
        run.format,
        budget=run.budget,
        seed=seed,
    )
    run.answers |= streams.run_to_budgets(
        session,
        run.budget,
        [at for at in run.finish_at if at > before],
        session.finish,
        run.on_event,
        before,
    )
    run.stages.append(session)
    run.steps += [_shifted(step, before) for step in session.steps]
    run.passes += session.passes
    return session.finish_reason


def _shifted(step: Step, before: int) -> Step:
    """A step of a stage that began after `before` passes."""
    return dataclasses.replace(
        step, began=step.began + before, ended=None if step.ended is None else step.ended + before
    )


# The requests.


def outline_request(problem: str) -> str:
    """The message that asks for an outline of a problem."""
    return (
        f"{problem}\n\nDo not solve this yet. First divide the work: list the parts that can be "
        "worked out side by side, so that no part waits for the result of another. Write a "
        f"numbered list of at most {MAX_POINTS} lines, each of at most ten words, and nothing "
        "else."
    )


def thread_request(problem: str, outline: str, code: bool) -> str:
    """The message that asks for one part of a problem; its title opens the reply."""
    box = "" if code else " and put its result in \\boxed{}"
    return (
        f"{problem}\n\nThe work has been divided into these parts:\n\n{outline}\n\nEach of them is "
        "worked out by itself. Your reply begins with the title of one part: work that one out, "
        f"briefly, and no other{box}."
    )


def main_request(problem: str, notes: Sequence[str]) -> str:
    """The message that asks for the answer, with what was found in each part."""
    if not notes:
        return problem
    parts = "\n\n".join(notes)
    return (
        f"{problem}\n\nThe parts of this have been worked out one by one, apart from each "
        f"other:\n\n{parts}\n\nGo on from there: check what has been found, work out what is "
        "missing, put it together and give the answer."
    )


# The threads, and how their passes are counted.


def _points(outline: str) -> list[str]:
    """The points of a numbered list that count up from 1."""
    points = []
    for number, text in _POINT.findall(outline):
        if int(number) == len(points) + 1:
            points.append(text)
    return points[:MAX_POINTS]


@dataclasses.dataclass(frozen=True)
class _Threads:
    """Threads that have been decoded side by side.

    Attributes:
      session: that they were decoded in, a worker for each.
      tokens: of each thread, without one that stops it; decode: gives their text.
      schedule: for each thread the pass, from 1, in which it gets each of its tokens, one that
        stops it included.
      complete: for each thread, True if it ends with the last of them.
    """

    session: Workers
    tokens: list[list[int]]
    decode: Callable[[Sequence[int]], str]
    schedule: list[list[int]]
    complete: list[bool]

    @property
    def passes(self) -> int:
        """The passes until the last thread has its last token."""
        return _last_pass(self.schedule)

    def texts(self, passes: int) -> list[str]:
        """The text of each thread after some passes, under its title."""
        return [
            f"{name}\n{self.decode(tokens[: bisect.bisect_right(given, passes)])}"
            for name, tokens, given in zip(
                self.session.names, self.tokens, self.schedule, strict=True
            )
        ]

    def steps(self, passes: int, before: int) -> list[Step]:
        """A step for each thread that has begun by then, those that have ended first.

        Args:
          passes: of the threads.
          before: passes of the stages before them.
        """
        steps = []
        for name, text, tokens, given, complete in zip(
            self.session.names,
            self.texts(passes),
            self.tokens,
            self.schedule,
            self.complete,
            strict=True,
        ):
            if count := bisect.bisect_right(given, passes):
                ended = before + given[-1] if complete and count == len(given) else None
                steps.append(
                    Step(
                        name,
                        1,
                        text,
                        before + given[0],
                        ended,
                        tokens[:count],
                        answer=answers.boxed(text) is not None,
                    )
                )
        return sorted(steps, key=lambda step: (step.ended is None, step.ended))


def _decode_threads(
    model: LoadedModel,
    run: _SkeletonRun,
    outline: str,
    kind: str | AnswerRule,
    workers: int | None,
    budget: int,
    seed: int,
) -> _Threads | None:
    """Decodes a thread for each point of an outline, for at least `budget` passes or to their end.

    A thread ends with the result of its part, whatever the answer to the whole problem has to be.

    Returns:
      None if there is nothing to decode.
    """
    code = answer_rule(kind).code
    names = [f"{i}. {point}" for i, point in enumerate(_points(outline), 1)]
    if not names or not budget:
        return None
    codec = codec_of(model.tokenizer, model.config.vocab_size)
    request_tokens = len(codec.encode(main_request(run.problem, names)))
    max_tokens = (model.config.max_positions - request_tokens) // 2 // len(names)
    max_tokens = min(budget, max(1, max_tokens))
    # Titles have different lengths, and the longest may take some passes before its thread begins.
    title_passes = max(len(codec.encode(name)) for name in names)
    session = run.make(
        thread_request(run.problem, outline, code),
        names,
        dataclasses.replace(run.format, step_header="{name}\n"),
        seed=seed,
        kind="code" if code else "box",
        budget=budget + title_passes,
    )
    schedule, complete = _known_schedule(session, workers, max_tokens)
    while (
        session.finish_reason is None
        and session.passes < session.budget
        and _last_pass(schedule) < budget
        and max(map(len, schedule)) < max_tokens
    ):
        collections.deque(session.stream(session.passes + _LOOK), maxlen=0)
        schedule, complete = _known_schedule(session, workers, max_tokens)
    tokens = [
        [token for step in session.steps if step.worker == name for token in step.tokens]
        for name in names
    ]
    return _Threads(session, tokens, codec.decode, schedule, complete)


def _known_schedule(
    session: Workers, workers: int | None, max_rounds: int
) -> tuple[list[list[int]], list[bool]]:
    """The schedule of the rounds that every running thread has sampled, at most `max_rounds`.

    The second value is True for each thread that ends within them.
    """
    running = {step.worker for step in session.steps if step.ended is None}
    rounds = min([max_rounds, *(session.drawn[name] for name in running)])
    schedule = _schedule([min(count, rounds) for count in session.drawn.values()], workers)
    complete = [name not in running and session.drawn[name] <= rounds for name in session.names]
    return schedule, complete


def _schedule(lengths: Sequence[int], workers: int | None) -> list[list[int]]:
    """The pass, from 1, in which each thread gets each of its tokens.

    Args:
      lengths: tokens of each thread.
      workers: threads that get a token in one pass; None for all. A round goes over the threads
        that have not ended, in order, and a pass does not reach into the next round.
    """
    schedule: list[list[int]] = [[] for _ in lengths]
    for done in range(max(lengths)):
        active = [i for i, length in enumerate(lengths) if length > done]
        passes = _last_pass(schedule)
        for place, i in enumerate(active):
            schedule[i].append(passes + 1 + place // (workers or len(active)))
    return schedule


def _last_pass(schedule: Sequence[Sequence[int]]) -> int:
    return max(given[-1] if given else 0 for given in schedule)
