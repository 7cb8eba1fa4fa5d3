"""Lessons for workers: drawn from a seed, packed side by side into batches of one shape, made ahead
in processes of their own."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxshare.models.loading import outline
from jaxshare.serving import Format
from jaxshare.serving.evaluation.arithmetic import (
    BOX,
    MAX_QUESTIONS,
    NAMES,
    QUESTIONS,
    SEPARATOR,
    Question,
    SumsProblem,
    header,
    make_problem,
    refusal,
    typed_problem,
)
from jaxshare.serving.evaluation.arithmetic_forms import sample_form
from jaxshare.serving.evaluation.skeleton import main_request, outline_request, thread_request
from jaxshare.serving.workers.layouts import worker_names
from jaxshare.trace.attention import TILE, TraceBatch
from jaxshare.trace.trace import NOT_ENDED, Trace
from scripts.train.checking import said
from scripts.train.other_requests import sample_request
from scripts.train.pair_attention import Pairs
from scripts.train.paragraphs import Paragraph
from scripts.train.sessions import Lesson, chat, lone, plain, play
from scripts.train.teacher import Lapses, Script

MOST_WORKERS = 6
_WORKERS = {1: 3, 2: 4, 3: 2, 4: 4, 5: 1, 6: 3}
"""Weights of the numbers of workers."""
_LAYOUTS = {"combined": 2, "contiguous": 1, "interleaved": 1}
_INSTANT = {"combined": 3, "contiguous": 1}
"""Those of workers that check each other."""
_DEPENDENT, _OTHER_NAMES, _ASKED, _CUT, _CROWDED, _ANEW = 0.75, 0.4, 0.5, 0.3, 0.15, 0.2
"""Shares of lessons with dependent questions, with names in another order or of others, with the
question whether work is redundant, of those that a budget cuts off, of those in which there is
hardly a question for each worker (clashes from the first pass on), and of those that encode steps
anew."""
_EVEN = 0.25
"""Share of lessons of several workers whose questions all take as long to write: all end in the
same pass, and go for what is left."""
_CHECKED, _ANSWERED = 0.33, 0.9
"""Shares of sessions whose workers check what others answer, and of those in which there are
answers from the begin."""
_LAPSES = Lapses(slips=0.03, yields=0.3, early=0.2)
_FEW = 0.3
"""Share of typed problems with hardly any questions."""
_GUESSES = 3
"""Times in a lesson, at most, that the finisher boxes what is known by then."""
_CHATS, _TURNS, _SYSTEM, _PLAIN = 0.2, 3, 0.4, 0.3
"""Share of chats, the most messages in one, and the shares of those in which a message of the
system names the workers, and of those that are a plain text without a template."""
_SKELETONS = 0.2
"""Share of chats that are a stage of Skeleton-of-Thought."""
_TYPED, _TYPED_CHATS, _OTHER = 0.45, 0.7, 0.3
"""Shares of problems as a person would type them, in sessions and in chats, and of a chat's messages
that ask for something else."""
_NAMES = (
    *worker_names(8),
    "Ivan",
    "Judy",
    "Kim",
    "Leo",
    "Mia",
    "Nina",
    "Omar",
    "Pia",
    "Quinn",
    "Rosa",
    "Sam",
    "Tom",
    "Uma",
    "Vera",
    "Walt",
    "Zoe",
)
_GROUP = 24
"""Lessons that are packed together, so that few places stay empty and the long ones have the same
chance as the short."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a batch: T tokens, J tiles and B blocks, as in `TraceBatch`, and the number of
    which its `Pairs` are a multiple."""

    tokens: int = 2048
    tiles: int = 40
    blocks: int = 40
    pairs: int = 64


Batch = tuple[TraceBatch, Pairs, np.ndarray, np.ndarray, np.ndarray]
"""Numpy arrays: a trace of several sessions, the pairs that see each other in it, and at
int32[1, T], targets int32[1, T] and weights float32[1, T] of what was sampled."""


def draw(script: Script, rng: random.Random) -> Lesson:
    """One lesson: 1 to 6 workers, 1 to 10 questions, any layout; or a chat of a lone one."""
    if rng.random() < _CHATS:
        return _chat(script, rng)
    typed = rng.random() < _TYPED
    many = rng.choices([*_WORKERS], [*_WORKERS.values()])[0]
    names = rng.sample(_NAMES, many) if rng.random() < _OTHER_NAMES else worker_names(many)
    if typed:
        few = rng.random() < _FEW
        questions = rng.randint(1, QUESTIONS) if few else rng.randint(QUESTIONS, MAX_QUESTIONS)
    elif many > 1 and rng.random() < _CROWDED:
        questions = rng.randint(2, many + 1)
    else:
        questions = rng.choice((QUESTIONS, rng.randint(QUESTIONS, MAX_QUESTIONS)))
    checked, there = rng.random() < _CHECKED, []
    if checked:
        questions = min(questions, QUESTIONS + 1)
        problem = dataclasses.replace(make_problem(rng, questions), checked=True)
        there = _answered(problem, [name for name in _NAMES if name not in names], rng)
    elif typed:
        problem = typed_problem(rng, questions, sample_form(rng))
    elif many > 1 and rng.random() < _EVEN:
        questions = rng.choice([count for count in range(2, MAX_QUESTIONS + 1) if count % many])
        problem = _even_problem(script, rng, questions)
    else:
        problem = make_problem(
            rng, questions, dependent=questions > 1 and rng.random() < _DEPENDENT
        )
    layouts = _INSTANT if checked else _LAYOUTS
    layout = rng.choices([*layouts], [*layouts.values()])[0]
    longest = 30 + (90 if checked else 40) * -(-questions // many)
    cut = rng.randint(4, longest) if rng.random() < _CUT else 1024
    guesses = {rng.randint(4, longest) for _ in range(rng.randint(0, _GUESSES))}
    ask_every = rng.choice((32, 64, 128, 256)) if rng.random() < _ASKED else 0
    move = "reencode" if rng.random() < _ANEW else "rotate"
    return play(
        script,
        problem,
        names,
        layout,
        rng,
        ask_every=ask_every,
        seed=rng.randrange(2**32),
        move=move,
        lapses=_LAPSES,
        budget=cut,
        guess=True,
        guesses=guesses,
        said=there,
    )


def _answered(problem: SumsProblem, names: Sequence[str], rng: random.Random) -> list[Paragraph]:
    """The steps that are there already when a session of workers that check begins: of one other."""
    if rng.random() >= _ANSWERED:
        return []
    name, numbers = rng.choice(names), range(1, len(problem.questions) + 1)
    found = rng.sample(numbers, rng.randint(1, len(numbers)))
    return [
        said(problem, name, step, number, rng, wrong=rng.random() < 0.5)
        for step, number in enumerate(found, 1)
    ]


def _chat(script: Script, rng: random.Random) -> Lesson:
    """A chat, or a plain text without a template: of problems, or of other requests."""
    if rng.random() < _SKELETONS:
        return _skeleton(script, rng)
    form = sample_form(rng)

    def turn() -> tuple[str, str]:
        if rng.random() < _OTHER:
            return sample_request(rng), refusal()
        questions = rng.choice((QUESTIONS, rng.randint(1, MAX_QUESTIONS)))
        problem = (
            typed_problem(rng, questions, form)
            if rng.random() < _TYPED_CHATS
            else make_problem(rng, questions, dependent=questions > 1 and rng.random() < _DEPENDENT)
        )
        return problem.prompt(), problem.solution()

    if not script.tokenizer.chat_template or rng.random() < _PLAIN:
        return plain(script, *turn())
    turns = [turn() for _ in range(rng.randint(1, _TURNS))]
    return chat(script, turns, system=rng.random() < _SYSTEM)


def _skeleton(script: Script, rng: random.Random) -> Lesson:
    """One of the three stages of Skeleton-of-Thought, in which nothing depends on anything else."""
    questions = rng.choice((QUESTIONS, rng.randint(2, MAX_QUESTIONS)))
    problem, stage = make_problem(rng, questions), rng.randrange(3)
    titles = [f"{i}. {question.text}" for i, question in enumerate(problem.questions, 1)]
    bodies = [problem.body(i) for i in range(1, questions + 1)]
    results = [
        f"{body} \\boxed{{{answer}}}" for body, answer in zip(bodies, problem.answers, strict=True)
    ]
    message, outline = problem.prompt(), "\n".join(titles)
    if stage == 0:
        opening = SEPARATOR + "1."
        return lone(script, outline_request(message), opening, outline.removeprefix("1."))
    if stage == 1:
        at = rng.randrange(questions)
        request = thread_request(message, outline, code=False)
        return lone(script, request, f"{SEPARATOR}{titles[at]}\n", results[at])
    notes = [f"{title}\n{result}" for title, result in zip(titles, results, strict=True)]
    answer = SEPARATOR + header(NAMES[0], 1) + problem.body(BOX)
    return lone(script, main_request(message, notes), "", answer)


def _even_problem(script: Script, rng: random.Random, questions: int) -> SumsProblem:
    """Questions that all take as long to write."""
    alike: dict[int, list[Question]] = {}
    for _ in range(6):
        for number, question in enumerate((drawn := make_problem(rng, MAX_QUESTIONS)).questions, 1):
            alike.setdefault(
                len(script.codec.encode(drawn.body(number))) - len(str(number)), []
            ).append(question)
    enough = [held for held in alike.values() if len(held) >= questions] or [
        max(alike.values(), key=len)
    ]
    return SumsProblem(tuple(rng.choice(enough)[:questions]))


def pack(lessons: Sequence[Lesson]) -> Lesson:
    """Joins lessons one after the other, in blocks of their own, so that none sees another."""
    tokens, views, passes, blocks, parts = 0, 0, 0, 0, []
    total = sum(lesson.trace.num_blocks for lesson in lessons)
    for lesson in lessons:
        trace = lesson.trace
        sides = ((0, 0), (blocks, total - blocks - trace.num_blocks))
        parts.append(
            {
                "tokens": trace.tokens,
                "row_pass": trace.row_pass + views,
                "rows": trace.rows,
                "passes": trace.passes + passes,
                "starts": np.pad(trace.starts, sides),
                "visible": np.pad(trace.visible, sides),
                "placement_tokens": trace.placement_tokens + tokens,
                "placement_blocks": trace.placement_blocks + blocks,
                "placement_indices": trace.placement_indices,
                "placement_starts": trace.placement_starts + passes,
                "placement_ends": np.where(
                    trace.placement_ends == NOT_ENDED,
                    NOT_ENDED,
                    trace.placement_ends + np.minimum(passes, NOT_ENDED - trace.placement_ends),
                ),
                "capacities": trace.capacities,
                "at": lesson.at + tokens,
                "targets": lesson.targets,
                "weights": lesson.weights,
            }
        )
        tokens, views, passes, blocks = (
            tokens + trace.num_tokens,
            views + len(trace.rows),
            passes + trace.num_passes,
            blocks + trace.num_blocks,
        )
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    at, targets, weights = (whole.pop(name) for name in ("at", "targets", "weights"))
    return Lesson(Trace(**whole), at, targets, weights)


def batch(lesson: Lesson, shape: Shape) -> Batch:
    """A lesson as arrays of a shape."""
    traces = TraceBatch.of(
        [lesson.trace], tokens=shape.tokens, tiles=shape.tiles, blocks=shape.blocks
    )
    room = traces.shape[1] - len(lesson.at)
    at, targets, weights = (
        np.pad(array, (0, room))[None] for array in (lesson.at, lesson.targets, lesson.weights)
    )
    traces = jax.tree.map(np.asarray, traces)
    return traces, Pairs.of(traces, shape.pairs), at, targets, weights


def group(script: Script, seed: int, number: int, shape: Shape) -> list[Batch]:
    """The batches of one group of lessons, which depend on seed and number alone. A lesson that is
    too long for a batch is left out.

    Raises:
      ValueError: most are.
    """
    rng = random.Random(f"lessons/{seed}/{number}")
    drawn = sorted(
        (draw(script, rng) for _ in range(_GROUP)), key=lambda lesson: -lesson.trace.num_tokens
    )
    lessons = [lesson for lesson in drawn if fits([lesson], shape)]
    if 2 * len(lessons) < _GROUP:
        raise ValueError(
            f"most lessons are longer than a batch of {shape}, up to {drawn[0].trace.num_tokens} "
            "tokens; give it more"
        )
    bins = [[lessons[i] for i in held] for held in first_fit(lessons, shape)]
    rng.shuffle(bins)
    return [batch(pack(held), shape) for held in bins]


def first_fit(lessons: Sequence[Lesson], shape: Shape) -> list[list[int]]:
    """The numbers of lessons that share a batch; each goes to the first one with room for it."""
    bins: list[list[int]] = []
    for i, lesson in enumerate(lessons):
        place = next(
            (held for held in bins if fits([*(lessons[j] for j in held), lesson], shape)), None
        )
        if place is None:
            bins.append([i])
        else:
            place.append(i)
    return bins


def fits(lessons: Sequence[Lesson], shape: Shape) -> bool:
    """True if these lessons are no longer than one batch."""
    tiles = sum(
        int(np.sum(-(-np.bincount(lesson.trace.placement_blocks) // TILE))) for lesson in lessons
    )
    return (
        sum(lesson.trace.num_tokens for lesson in lessons) <= shape.tokens
        and tiles <= shape.tiles
        and sum(lesson.trace.num_blocks for lesson in lessons) <= shape.blocks
    )


@contextlib.contextmanager
def stream(
    folder: Path,
    format: Format,
    seed: int,
    shape: Shape,
    *,
    first: int = 0,
    processes: int = 1,
    ahead: int = 3,
) -> Iterator[Iterator[tuple[int, list[Batch]]]]:
    """Groups of batches from the number `first` on, with their numbers, made ahead.

    Args:
      folder: of the model, for its tokenizer.
      format: the texts of a session.
      seed: of the lessons.
      shape: of the batches.
      processes: that make them; 0 makes them here, when they are asked for.
      ahead: groups that are made before they are asked for.
    """
    if not processes:
        yield (
            (number, group(_script(folder, format), seed, number, shape))
            for number in itertools.count(first)
        )
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin) as pool:

        def made() -> Iterator[tuple[int, list[Batch]]]:
            waiting: collections.deque[Future] = collections.deque()
            for number in itertools.count(first):
                while len(waiting) < ahead:
                    waiting.append(
                        pool.submit(_made, folder, format, seed, number + len(waiting), shape)
                    )
                yield number, waiting.popleft().result()

        try:
            yield made()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """Starts a process that makes lessons: the accelerator is the trainer's, and the process ends
    with a trainer that is killed."""
    jax.config.update("jax_platforms", "cpu")
    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def follow() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _made(folder: Path, format: Format, seed: int, number: int, shape: Shape) -> list[Batch]:
    return group(_script(folder, format), seed, number, shape)


@functools.lru_cache(maxsize=2)
def _script(folder: Path, format: Format) -> Script:
    model = outline(folder)
    return Script.of(model.tokenizer, model.config.vocab_size, model.generation, format)
