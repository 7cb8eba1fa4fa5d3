"""One group of prompts for scripts.bench.logits_cache: every side answers it, turn by turn."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.engine import Completion, Engine
from scripts.bench.lib import alternate
from scripts.bench.parts.logits_cache.report import BASELINE, HOTSPOT, SIDES, STEPWISE


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt answered again, with the same seed on every side; dicts are by side.

    Attributes:
      puzzle: number of the puzzle.
      turn: number of the repetition, from 0.
      tokens: of the answers.
      seconds: from submission to the last token.
      replayed: tokens that came out of the cache.
    """

    puzzle: int
    turn: int
    tokens: Mapping[str, tuple[int, ...]]
    seconds: Mapping[str, float]
    replayed: Mapping[str, int]

    def hit_ratio(self, side: str) -> float:
        return self.replayed[side] / len(self.tokens[side])

    def speedup(self, side: str) -> float:
        """The ratio of its tokens a second to those of the baseline."""
        return self.seconds[BASELINE] / self.seconds[side]


@dataclasses.dataclass(frozen=True)
class Group:
    """The measurements of a group of prompts.

    Attributes:
      requests: all turns of all prompts.
      positions, bytes: distributions of the first answers, and their size where all are kept.
      distances: for each prompt, how far hotspot sampling along its first answer is from fresh
        sampling: in the mean over positions, and of whole answers (total variation).
      seconds: of each turn, by side.
    """

    requests: list[Request]
    positions: int
    bytes: int
    distances: list[tuple[float, float]]
    seconds: Mapping[str, list[float]]


KEEPER = "keeper"
"""The engine that keeps every distribution, of which bytes and distances are told."""


@contextlib.contextmanager
def engines_of(
    model: LoadedModel, sizes: Mapping[str, Any], cache: Mapping[str, int], *, always: bool = False
) -> Iterator[dict[str, Engine]]:
    """The engines of all sides, the same but that the baseline has no Logits Cache, and the keeper.

    Args:
      model: of all of them.
      sizes: options of all of them.
      cache: options of those that have a Logits Cache.
      always: whether the sides use the Logits Cache where it does not pay, too.
    """
    with contextlib.ExitStack() as stack:
        made = {BASELINE: Engine(model, **sizes)}
        for side in (STEPWISE, HOTSPOT, KEEPER):
            made[side] = Engine(model, resample_always=always or side == KEEPER, **sizes, **cache)
        for engine in made.values():
            stack.enter_context(engine).warm_up()
        yield made


def run_group(
    engines: Mapping[str, Engine],
    prompts: Sequence[Sequence[int]],
    *,
    puzzles: Sequence[int],
    sampler: Sampler,
    tokens: int,
    turns: int,
    seed: int,
) -> Group:
    """Answers prompts once on each side, and then `turns` more times with the sides in turn.

    They run side by side, as far as the engines have rows.
    """

    def answer(side: str, turn: int, new_tokens: int) -> list[Completion]:
        seeds = [stream_seed(seed, puzzle, turn) for puzzle in puzzles]  # alike on every side
        way = {BASELINE: None, KEEPER: STEPWISE}.get(side, side)
        return _answer(engines[side], way, prompts, sampler, new_tokens, seeds)

    logits = engines[KEEPER].logits_cache
    assert logits is not None
    before = logits.bytes
    for side in SIDES:
        answer(side, 0, tokens)
    positions = sum(len(done.tokens) for done in answer(KEEPER, 0, tokens))
    size = logits.bytes - before
    distances = (
        [logits.distance(prompt, sampler, tokens) for prompt in prompts]
        if sampler.temperature
        else []
    )
    outputs: dict[str, list[list[Completion]]] = {side: [] for side in SIDES}

    def once(side: str) -> float:
        start = time.perf_counter()
        outputs[side].append(answer(side, 1 + len(outputs[side]), tokens))
        return time.perf_counter() - start

    seconds = alternate({side: lambda side=side: once(side) for side in SIDES}, turns)
    return Group(
        _requests(outputs, puzzles, turns),
        positions,
        size,
        [(each.mean, each.sequence) for each in distances],
        seconds,
    )


def _answer(
    engine: Engine,
    way: str | None,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    new_tokens: int,
    seeds: Sequence[int],
) -> list[Completion]:
    """The answers to all prompts, submitted together, once the engine has nothing left to do."""
    streams = [
        engine.submit(
            prompt,
            sampler,
            max_new_tokens=new_tokens,
            seed=seed,
            resample=way,
        )
        for seed, prompt in zip(seeds, prompts, strict=True)
    ]
    done = [stream.wait() for stream in streams]
    engine.drain()
    return done


def _requests(
    outputs: Mapping[str, Sequence[Sequence[Completion]]], puzzles: Sequence[int], turns: int
) -> list[Request]:
    """The requests of all turns; `outputs` is by side, turn and puzzle."""
    found = []
    for turn in range(turns):
        for i, puzzle in enumerate(puzzles):
            done = {side: outputs[side][turn][i] for side in SIDES}
            found.append(
                Request(
                    puzzle,
                    turn,
                    {side: output.tokens for side, output in done.items()},
                    {side: output.seconds for side, output in done.items()},
                    {side: output.replayed_tokens for side, output in done.items()},
                )
            )
    return found
