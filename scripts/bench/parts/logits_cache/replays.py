"""Prompts that one model answers again at several temperatures, on the sides of the comparison: what
is measured at each of them (Hive, section 8.2)."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxshare import KVCache, Layout, Sampler
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.engine import Engine
from jaxshare.serving.inputs import token_bytes
from scripts.bench.parts.engine.random_model import Profile, profile
from scripts.bench.parts.logits_cache.group import Group, engines_of, run_group
from scripts.bench.parts.logits_cache.options import (
    CACHE_BYTES,
    GROWTH,
    PROFILE_ROWS,
    PROFILE_TOKENS,
    Scale,
)
from scripts.bench.parts.logits_cache.report import BASELINE, SIDES, STEPWISE


@dataclasses.dataclass(frozen=True)
class Replays:
    """Prompts and what is alike at all temperatures.

    Attributes:
      model: answers.
      prompts: their tokens.
      scale: sizes.
      tokens: of every answer.
      turns: answers of each prompt after the first.
      seed: of all answers.
      engine: options of all engines, in place of those that follow from the sizes.
      logits_cache: bytes of the Logits Cache.
    """

    model: LoadedModel
    prompts: Sequence[Sequence[int]]
    scale: Scale
    tokens: int
    turns: int
    seed: int
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    logits_cache: int = CACHE_BYTES

    @property
    def forbidden(self) -> tuple[int, ...]:
        """The model's stop tokens, so that all answers have the same length."""
        return tuple(self.model.generation.stop_tokens)

    @property
    def sizes(self) -> dict[str, Any]:
        """Options of all engines."""
        # All answers of a prompt fit beside it, and the capacity of the next one.
        longest = max(map(len, self.prompts)) + (self.turns + 2) * (self.tokens + GROWTH)
        # Alike for both tasks of the benchmark, which share programs.
        kv_bytes = bucket(max(8, self.scale.rows) * longest) * token_bytes(self.model)
        return {"kv_bytes": kv_bytes, "max_rows": self.scale.rows, **self.engine}

    @property
    def _cache(self) -> dict[str, int]:
        return {"logits_cache": self.logits_cache, "kept_logits": self.scale.kept}

    def profile(self) -> Profile:
        """The certainty of the model about its own text at temperature 1."""
        return model_profile(self.model, self.prompts, self.forbidden, self.seed)

    def compile(self) -> None:
        """Runs everything once, untimed."""
        self._begin_together()
        with engines_of(self.model, self.sizes, self._cache, always=True) as engines:
            for temperature in (0.3, 1.0):
                self._run(engines, self._groups[0], temperature, stream_seed(self.seed, "warm up"))

    def point(self, temperature: float, say: Callable[[str], None]) -> dict[str, Any]:
        """Measures all prompts at one temperature; see `summarise`."""
        done = []
        # They know nothing at first, and learn from group to group where the Logits Cache pays.
        with engines_of(self.model, self.sizes, self._cache) as engines:
            for number, group in enumerate(self._groups):
                say(f"temperature {temperature}, group {number + 1} of {len(self._groups)}")
                done.append(self._run(engines, group, temperature, self.seed))
        return summarise(temperature, done, self.model.config.vocab_size)

    @property
    def _groups(self) -> list[range]:
        rows, count = self.scale.rows, len(self.prompts)
        return [range(at, min(at + rows, count)) for at in range(0, count, rows)]

    def _run(
        self, engines: Mapping[str, Engine], group: range, temperature: float, seed: int
    ) -> Group:
        return run_group(
            engines,
            [self.prompts[i] for i in group],
            puzzles=group,
            sampler=Sampler(temperature, forbidden=self.forbidden),
            tokens=self.tokens,
            turns=self.turns,
            seed=seed,
        )

    def _begin_together(self) -> None:
        """Lets every number of rows begin together once."""
        rows = self.scale.rows
        with Engine(self.model, **self.sizes, **self._cache) as engine:
            for count in range(1, rows + 2):
                streams = [
                    engine.submit(
                        self.prompts[i % len(self.prompts)],
                        Sampler(temperature=1.0, forbidden=self.forbidden),
                        max_new_tokens=4,
                        seed=count * rows + i,
                        resample=STEPWISE,
                    )
                    for i in range(count)
                ]
                for stream in streams:
                    stream.wait()


def summarise(temperature: float, groups: Sequence[Group], vocab: int) -> dict[str, Any]:
    """All groups of one temperature. As in the paper, requests that came out of the cache whole are
    counted apart: what they gain has no bound. `speedup_with_all` has them in it. `free_replay` is
    what a replay alone cannot surpass: the speed-up if it had cost nothing, and every other token
    as much as in the baseline."""
    requests = [request for group in groups for request in group.requests]
    sides = {}
    for side in SIDES:
        some = [r for r in requests if side == BASELINE or r.replayed[side] < len(r.tokens[side])]
        rates = [len(r.tokens[side]) / r.seconds[side] for r in some]
        found: dict[str, Any] = {
            "requests": len(some),
            "whole_hits": len(requests) - len(some),
            "mean_tokens_per_second": statistics.fmean(rates) if rates else None,
            "median_tokens_per_second": statistics.median(rates) if rates else None,
            "group_seconds": sum(sum(group.seconds[side]) for group in groups),
        }
        if side != BASELINE:
            speedups = [r.speedup(side) for r in some]
            found |= {
                "speedup": statistics.fmean(speedups) if some else None,
                "median_speedup": statistics.median(speedups) if some else None,
                "free_replay": statistics.fmean(1 / (1 - r.hit_ratio(side)) for r in some)
                if some
                else None,
                "speedup_with_all": statistics.fmean(r.speedup(side) for r in requests),
                "hit_ratio": statistics.fmean(r.hit_ratio(side) for r in some) if some else None,
                "hit_ratio_with_all": statistics.fmean(r.hit_ratio(side) for r in requests),
            }
        sides[side] = found
    distances = [pair for group in groups for pair in group.distances]
    return {
        "temperature": temperature,
        "sides": sides,
        "different_from_baseline": sum(r.tokens[STEPWISE] != r.tokens[BASELINE] for r in requests),
        "storage_of_full_logits": sum(g.bytes for g in groups)
        / (sum(g.positions for g in groups) * vocab * 4),
        "hotspot_distance": {
            "position": statistics.fmean(each for each, _ in distances) if distances else 0.0,
            "sequence": statistics.fmean(each for _, each in distances) if distances else 0.0,
        },
    }


def model_profile(
    model: LoadedModel, prompts: Sequence[Sequence[int]], forbidden: tuple[int, ...], seed: int
) -> Profile:
    """The certainty of the model about its own text at temperature 1."""
    some = [list(prompt) for prompt in prompts[:PROFILE_ROWS]]
    with Engine(
        model,
        max_rows=len(some),
        kv_bytes=len(some) * (len(max(some, key=len)) + 1024) * token_bytes(model),
    ) as engine:
        streams = [
            engine.submit(
                prompt,
                Sampler(temperature=1.0, forbidden=forbidden),
                max_new_tokens=PROFILE_TOKENS,
                seed=stream_seed(seed, "profile", i),
            )
            for i, prompt in enumerate(some)
        ]
        texts = [
            [*prompt, *stream.wait().tokens] for prompt, stream in zip(some, streams, strict=True)
        ]
    length, logits = max(map(len, texts)), []
    for text in texts:
        cache = KVCache.create(model.config, (length,))
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(text)] = text
        found, _ = model.forward(padded, [len(text)], cache, Layout.from_blocks([[0]]), every=True)
        own = np.array(found, np.float32)[0, len(text) - PROFILE_TOKENS - 1 : len(text) - 1]
        own[:, list(forbidden)] = -np.inf
        logits.append(own)
    return profile(np.concatenate(logits))
