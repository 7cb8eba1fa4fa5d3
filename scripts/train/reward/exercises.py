"""Exercises of training by reward: single paragraphs that a lone worker is to write, and whether
they are right.

A rollout is short: the prompt has the problem and the paragraphs that solve some of its questions
already, as a session of one worker has them, and what is sampled is the next paragraph alone.
"""

import collections
import dataclasses
import importlib
import math
import random
from collections.abc import Callable, Sequence

import numpy as np

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving import Format
from jaxshare.serving.engine import Engine
from jaxshare.serving.evaluation.arithmetic import (
    BOX,
    NAMES,
    QUESTIONS,
    SEPARATOR,
    Dependent,
    SumsProblem,
    boxed,
    check,
    header,
    make_problem,
    next_move,
    results,
)
from jaxshare.serving.rollouts import rollout
from jaxshare.serving.workers.text.codec import codec_of

_SMALLEST = 3
"""The fewest questions of a problem that is practised."""
_BY_RULE = 0.85
"""The share of exercises whose paragraphs come in the order of the rule."""
_PARAGRAPHS = 12
"""The most that a held-out problem may take: seven are enough for five questions."""
PARAGRAPH_TOKENS = 80
"""A question that doubles a number of three digits takes 70."""


@dataclasses.dataclass(frozen=True)
class Exercise:
    """One paragraph to write.

    Attributes:
      problem: with the question that it is about.
      solved: the questions that earlier paragraphs have answered.
      move: the question that is next by the rule, or BOX.
      tokens: the prompt, up to the header of the paragraph.
    """

    problem: SumsProblem
    solved: tuple[int, ...]
    move: int
    tokens: tuple[int, ...]


def right_answer(exercise: Exercise, text: str) -> float:
    """The checker's reward: 1 for the right answer to the question that is next by the rule and
    nothing else, or for the right box where all are solved; else 0. The text is without the
    separator that ends it.

    An answer to another open question is right, too, but has no reward: a model that is rewarded for
    it learns to leave the hard questions for later.
    """
    if exercise.move == BOX:
        return float(boxed(text) is not None and all(check(text, exercise.problem)))
    return float(results(text) == {exercise.move: exercise.problem.answers[exercise.move - 1]})


def load_reward(name: str, default: Callable[..., float]) -> Callable[..., float]:
    """The reward function "package.module:function", or the default for "right-answer".

    Raises:
      ValueError: there is none of that name.
    """
    if name == "right-answer":
        return default
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--reward {name} cannot be imported ({error}); give right-answer, or module:function"
        ) from error
    if not callable(found):
        raise ValueError(f"--reward {name} is no function; give one")
    return found


@dataclasses.dataclass
class Failures:
    """The samples that could not be rewarded: their number, and the first one of each error."""

    count: int = 0
    named: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, where: str, why: str) -> None:
        self.count += 1
        self.named.setdefault(why, where)

    def __str__(self) -> str:
        return "; ".join(f"{where}: {why}" for why, where in self.named.items())


def rewarded(
    reward: Callable[..., float], samples: Sequence[tuple[str, tuple]]
) -> tuple[np.ndarray, Failures]:
    """The rewards of samples. One whose reward function raises an exception, or returns no finite
    number, is left out.

    Args:
      reward: the function.
      samples: of each a name for messages, and the function's arguments.

    Returns:
      float64[N], NaN for those that are left out, and these.
    """
    found, failures = np.full(len(samples), np.nan), Failures()
    for i, (name, arguments) in enumerate(samples):
        try:
            value = float(reward(*arguments))
        except Exception as error:  # of any type: the function is a user's
            failures.add(name, f"{type(error).__name__}: {error}")
            continue
        if math.isfinite(value):
            found[i] = value
        else:
            failures.add(name, f"the reward is {value}, which is no finite number")
    return found, failures


@dataclasses.dataclass(frozen=True)
class ExerciseBook:
    """Draws exercises, and asks held-out problems, in the form of a session of one worker.

    Attributes:
      model: that writes the tokens.
      format: of its sessions.
    """

    model: LoadedModel
    format: Format

    def prompt(self, problem: SumsProblem) -> list[int]:
        """The tokens of a problem, as a session of one worker starts with them."""
        return self.format.prompt_tokens(self.model.tokenizer, problem.prompt(), NAMES[:1])

    def opening(self, step: int) -> list[int]:
        """The tokens that a session feeds at the start of a step, from the separator on."""
        codec = codec_of(self.model.tokenizer, self.model.config.vocab_size)
        text = self.format.opening(NAMES[0], step, names=NAMES[:1], ask=False)
        return [*codec.encode(SEPARATOR), *codec.encode(text.rstrip(" "))]

    def draw(self, rng: random.Random, plain: float) -> Exercise:
        """Draws an exercise of a problem of 3 to 5 questions.

        Args:
          rng: the source of randomness.
          plain: the share of exercises about anything but a dependent question.
        """
        problem = make_problem(rng, rng.randint(_SMALLEST, QUESTIONS), dependent=True)
        codec = codec_of(self.model.tokenizer, self.model.config.vocab_size)
        tokens, steps = self.prompt(problem), []
        solved: tuple[int, ...] = ()
        for move in _moves(problem, rng):
            tokens = [*tokens, *self.opening(len(solved) + 1)]
            steps.append(Exercise(problem, solved, move, tuple(tokens)))
            tokens = [*tokens, *codec.encode(problem.body(move))]
            solved = (*solved, move)
        dependent = [
            step
            for step in steps
            if step.move != BOX and isinstance(problem.questions[step.move - 1], Dependent)
        ]
        others = [step for step in steps if step not in dependent]
        return rng.choice(others if rng.random() < plain else dependent)

    def solve(self, engine: Engine, problems: Sequence[SumsProblem]) -> list[str]:
        """The greedy texts of a lone worker on problems, from the first paragraph to the box, as a
        session of one worker writes them."""
        tokens = [self.prompt(problem) for problem in problems]
        texts = [""] * len(problems)
        left, separator = [*range(len(problems))], tuple(self.opening(1)[:1])
        for step in range(1, _PARAGRAPHS + 1):
            for i in left:
                tokens[i] += self.opening(step)
            sampled = paragraphs(engine, [tokens[i] for i in left], 1, Sampler(0.0), 0)
            for i, written in zip([*left], sampled.completions, strict=True):
                texts[i] += SEPARATOR + header(NAMES[0], step) + written.text
                if boxed(texts[i]) is None and written.tokens[-1:] == separator:
                    tokens[i] += written.tokens[:-1]
                else:
                    left.remove(i)
            if not left:
                break
        return texts

    def measure(self, engine: Engine, problems: Sequence[SumsProblem]) -> dict[str, float]:
        """The share of right boxed answers to held-out problems: of questions that use another
        answer, of plain ones, and of all."""
        right = collections.defaultdict(list)
        for problem, text in zip(problems, self.solve(engine, problems), strict=True):
            for question, passed in zip(problem.questions, check(text, problem), strict=True):
                right["dependent" if isinstance(question, Dependent) else "plain"].append(passed)
        right["all"] = [*right["dependent"], *right["plain"]]
        return {name: float(np.mean(passed)) for name, passed in right.items()}


def _moves(problem: SumsProblem, rng: random.Random) -> list[int]:
    """The order in which a problem's questions are solved: by the rule, or the plain ones first, in
    any order, and then the others by the rule. By the rule alone the answer that a dependent question
    needs is often the one just before it, and a model that always takes that one would be rewarded
    for it."""
    if rng.random() < _BY_RULE:
        text, moves = "", []
        while BOX not in moves:
            moves.append(next_move(NAMES[0], text, problem))
            text += SEPARATOR + header(NAMES[0], len(moves)) + problem.body(moves[-1])
        return moves
    dependent = [n for n, q in enumerate(problem.questions, 1) if isinstance(q, Dependent)]
    plain = sorted({*range(1, len(problem.questions) + 1)} - {*dependent})
    return [*rng.sample(plain, len(plain)), *dependent, BOX]


def held_out(problems: int) -> list[SumsProblem]:
    """The first problems of the task `sums-dependent`, which no exercise draws."""
    return [
        make_problem(random.Random(f"evaluate/sums-dependent/{i}"), QUESTIONS, dependent=True)
        for i in range(problems)
    ]


def paragraphs(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samples: int,
    sampler: Sampler,
    seed: int,
    max_new_tokens: int = PARAGRAPH_TOKENS,
):
    """Samples paragraphs after prompts, each with the separator that ends it; see `rollout`."""
    return rollout(
        engine,
        [np.asarray(prompt, np.int32) for prompt in prompts],
        n=samples,
        sampler=sampler,
        max_new_tokens=max_new_tokens,
        stop=SEPARATOR,
        seed=seed,
    )
