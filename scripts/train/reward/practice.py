"""The tasks of training by reward: single paragraphs of one worker, or whole sessions of several."""

import argparse
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxshare import Sampler
from jaxshare.seeds import stream_seed
from jaxshare.serving import Format
from jaxshare.serving.engine import Engine
from jaxshare.serving.evaluation import passes_to
from scripts.train.lessons import Shape
from scripts.train.reward import team
from scripts.train.reward.exercises import (
    ExerciseBook,
    Failures,
    held_out,
    load_reward,
    paragraphs,
    rewarded,
    right_answer,
)
from scripts.train.reward.policy_gradient import Episode, advantages, group_episodes, widest
from scripts.train.train_workers import GOAL, measure

_TEAM_BUDGETS = tuple(range(16, 161, 8))
"""Forward passes after which held-out answers of workers are taken."""


@dataclasses.dataclass(frozen=True)
class Practice:
    """The samples of one step.

    Attributes:
      episodes: of the groups that teach something.
      rewards: float64[P, G], NaN for samples that are left out.
      dropped: groups whose rewards are equal.
      failures: samples that could not be rewarded.
      scored: whether episodes have the log-probabilities that tokens were sampled with.
    """

    episodes: list[Episode]
    rewards: np.ndarray
    dropped: int
    failures: Failures
    scored: bool = True


class RewardTask(Protocol):
    """A task that is practised and measured, with an engine that samples."""

    def practise(self, step: int) -> Practice:
        """Samples and rewards groups."""
        ...

    def measure(self) -> dict[str, float]:
        """Numbers of held-out problems; `score` is to become larger."""
        ...


def rewarded_groups(
    reward: Callable[..., float], named: Sequence[tuple[str, tuple]], args: argparse.Namespace
) -> tuple[np.ndarray, Failures, np.ndarray]:
    """The rewards [P, G] of samples in the order of their prompts, those that could not be rewarded,
    and the advantages [P, G], NaN for samples that are not learned from."""
    rewards, failures = rewarded(reward, named)
    rewards = rewards.reshape(args.prompts, args.samples)
    return rewards, failures, advantages(widest(rewards, args.learn_from), args.variant)


def _dropped(gains: np.ndarray) -> int:
    return int(np.sum(np.all(np.isnan(gains), axis=1)))


class AloneTask:
    """Single paragraphs of one worker, on problems with dependent questions."""

    def __init__(self, engine: Engine, format: Format, shape: Shape, args: argparse.Namespace):
        """Draws the held-out problems, and imports the reward.

        Raises:
          ValueError: no such reward function.
        """
        self._engine, self._shape, self._args = engine, shape, args
        self._book = ExerciseBook(engine.model, format)
        self._reward = load_reward(args.reward, right_answer)
        self._held_out = held_out(args.problems)

    def practise(self, step: int) -> Practice:
        args, rng = self._args, random.Random(f"grpo/{self._args.seed}/{step}")
        exercises = [self._book.draw(rng, args.plain) for _ in range(args.prompts)]
        sampled = paragraphs(
            self._engine,
            [exercise.tokens for exercise in exercises],
            args.samples,
            Sampler(args.temperature),
            stream_seed(args.seed, "grpo", step),
            args.max_new_tokens,
        )
        rewards, failures, gains = rewarded_groups(
            self._reward,
            [
                (f"sample {i} of prompt {p} in step {step}", (exercises[p], text))
                for p, i, text in zip(sampled.prompts, sampled.indices, sampled.texts, strict=True)
            ],
            args,
        )
        length = args.max_new_tokens if args.variant == "dr-grpo" else None
        episodes = group_episodes(sampled, gains, self._shape, length)
        return Practice(episodes, rewards, _dropped(gains), failures)

    def measure(self) -> dict[str, float]:
        found = self._book.measure(self._engine, self._held_out)
        return {**found, "score": found["all"]}


class TeamTask:
    """Sessions of several workers, on problems of five plain questions."""

    def __init__(self, engine: Engine, format: Format, shape: Shape, args: argparse.Namespace):
        """Imports the reward.

        Raises:
          ValueError: no such reward function.
        """
        self._engine, self._format, self._args = engine, format, args
        self._reward = load_reward(args.reward, team.right_and_soon)

    def practise(self, step: int) -> Practice:
        args = self._args
        problems = team.draw(args.seed, step, args.prompts)
        lessons, named = [], []
        for p, problem in enumerate(problems):
            for i in range(args.samples):
                result, lesson = team.play(
                    self._engine.model,
                    self._format,
                    problem,
                    workers=args.workers,
                    budget=args.budget,
                    temperature=args.temperature,
                    seed=team.session_seed(args.seed, step, p, i),
                )
                lessons.append(lesson)
                named.append((f"sample {i} of prompt {p} in step {step}", (problem, result)))
        rewards, failures, gains = rewarded_groups(self._reward, named, args)
        length = args.workers * args.budget if args.variant == "dr-grpo" else None
        episodes = team.team_episodes(lessons, gains.ravel(), length)
        return Practice(episodes, rewards, _dropped(gains), failures, scored=False)

    def measure(self) -> dict[str, float]:
        args = self._args
        found = measure(
            self._engine.model, self._format, args.problems, [args.workers], budgets=_TEAM_BUDGETS
        )
        [passes] = passes_to(found, GOAL).values()
        most = _TEAM_BUDGETS[-1]
        return {
            "passes to 90% / 160": 1.0 if passes is None else passes / most,
            "accuracy": next(each.accuracy for each in found if each.budget == most),
            "score": 1.0 - (1.0 if passes is None else passes / most),
        }
