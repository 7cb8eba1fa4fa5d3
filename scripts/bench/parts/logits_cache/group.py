"""One group of prompts for scripts.bench.logits_cache: every side answers it, turn by turn."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.engine import Completion, Engine
from scripts.bench.lib import alternate
from scripts.bench.parts.logits_cache.options import CACHE_BYTES
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
      positions, bytes: distributions that the stepwise side had kept after the first answers, and
        their size.
      distances: for each prompt, how far hotspot sampling along its first answer is from fresh
        sampling: in the mean over positions, and of whole answers (total variation).
      seconds: of each turn, by side.
    """

    requests: list[Request]
    positions: int
    bytes: int
    distances: list[tuple[float, float]]
    seconds: Mapping[str, list[float]]


def run_group(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    puzzles: Sequence[int],
    sampler: Sampler,
    tokens: int,
    turns: int,
    kept: int,
    kv_bytes: int,
    rows: int,
    seed: int,
) -> Group:
    """Answers prompts once on each side, and then `turns` more times with the sides in turn.

    At most `rows` prompts run side by side.
    """
    with contextlib.ExitStack() as stack:
        engines = {
            side: stack.enter_context(_engine(model, side, kept, kv_bytes, rows)) for side in SIDES
        }

        def answer(side: str, turn: int, new_tokens: int) -> list[Completion]:
            seeds = [stream_seed(seed, puzzle, turn) for puzzle in puzzles]  # alike on every side
            return _answer(engines[side], side, prompts, sampler, new_tokens, seeds)

        answer(BASELINE, 0, 1)  # one token: it needs the prompt in its cache, but no first answer
        first = answer(STEPWISE, 0, tokens)
        answer(HOTSPOT, 0, tokens)
        logits = engines[STEPWISE].logits_cache
        assert logits is not None
        positions, size = sum(len(done.tokens) for done in first), logits.bytes
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


def _engine(model: LoadedModel, side: str, kept: int, kv_bytes: int, rows: int) -> Engine:
    """The engine of a side: the same for all, but that the baseline has no Logits Cache."""
    cache: dict[str, Any] = (
        {} if side == BASELINE else {"logits_cache": CACHE_BYTES, "kept_logits": kept}
    )
    return Engine(model, kv_bytes=kv_bytes, max_rows=rows, **cache)


def _answer(
    engine: Engine,
    side: str,
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
            resample=None if side == BASELINE else side,
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
