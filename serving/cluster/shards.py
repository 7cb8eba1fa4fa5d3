"""Shards: branches over the replicas of a pool.

A run is cut into runs of neighbouring completions, several for each replica.
"""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxshare.models import LoadedModel
from jaxshare.serving.branches.prompt_tree import Prompt, Prompts, read_prompts
from jaxshare.serving.branches.run import Branches, Completion
from jaxshare.serving.branches.sharing_plan import build_prefix_tree, unique_tokens
from jaxshare.serving.cluster.ray_pool import RayPool, Work
from jaxshare.serving.inputs import encode

_SHARDS_PER_REPLICA = 4
"""More than one, so that a slow node does not delay the end of the run much."""
_MAX_COMPLETIONS = 4096
"""The maximum size of a shard: sixteen waves of 256 rows, so that few rows idle at its end."""
_COST = "cost"
"""The key of a shard's `Cost`; those of completions are pairs of numbers."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a run: completions that are neighbours in the tree of all prompts.

    Attributes:
      prompts: with their numbers in the whole run.
      sample_ids: (prompt, index) of the completions to sample.
    """

    prompts: tuple[Prompt, ...]
    sample_ids: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        numbers = sorted(prompt.number for prompt in self.prompts)
        shown = ", ".join(map(str, numbers[:5])) + (
            f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
        )
        return f"the shard of prompt{'s' * (len(numbers) > 1)} {shown} (counted from 0)"

    def skipped(self, arrived: Collection[Hashable] = ()) -> set[tuple[int, int]]:
        """The completions of its prompts not to sample, as (prompt, index).

        They are those of other shards, and those that have arrived.
        """
        needed = {*self.sample_ids}.difference(arrived)
        return {
            (prompt.number, index) for prompt in self.prompts for index in range(prompt.n)
        } - needed


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a shard on its replica; see `Completions`."""

    passes: int
    kv_bytes: int
    rows: int
    compile_seconds: float = 0.0


def cut(prompts: Sequence[Prompt], skip: Collection[tuple[int, int]], shards: int) -> list[Shard]:
    """Cuts a run into shards of nearly equal size.

    Args:
      prompts: of the whole run, in any order; in the shards they are in the order of their tokens,
        so that common prefixes are together.
      skip: (prompt, index) of completions to leave out.
      shards: their number, at least 1; it becomes larger where shards would be too large, and
        smaller where there are fewer completions.
    """
    skip = {*skip}
    ordered = sorted(prompts, key=lambda prompt: np.asarray(prompt.tokens, np.int32).tobytes())
    samples = [
        (prompt, index)
        for prompt in ordered
        for index in range(prompt.n)
        if (prompt.number, index) not in skip
    ]
    count = max(min(shards, len(samples)), -(-len(samples) // _MAX_COMPLETIONS))
    bounds = [len(samples) * i // count for i in range(count + 1)] if count else [0]
    found = []
    for start, end in itertools.pairwise(bounds):
        part = samples[start:end]
        found.append(
            Shard(
                tuple({prompt.number: prompt for prompt, _ in part}.values()),
                tuple((prompt.number, index) for prompt, index in part),
            )
        )
    return found


class Shards:
    """A run of branches on the replicas of a pool.

    `stream` yields the completions of all replicas as they end. A completion depends on its
    prompt's number, its own number and the seed alone, so it is the same on every replica, and
    what a lost replica has not finished is sampled again elsewhere with the same texts.

    Attributes:
      prompt_tokens, unique_tokens: see `Completions`.
      sampled_tokens: of the completions that have arrived so far.
      passes, kv_bytes: of all replicas together, in shards that have ended: the costs of a lost
        replica are not known.
      compile_seconds: of the replica that has compiled longest, in shards that have ended.
      seconds: of wall time since the run started, so far, without these.
    """

    def __init__(
        self,
        pool: RayPool,
        load: Callable[[], LoadedModel],
        model: LoadedModel,
        prompts: Prompts,
        *,
        n: int = 1,
        skip: Collection[tuple[int, int]] = (),
        **settings: Any,
    ):
        """Cuts the run, and waits until one replica has a model and checked the longest prompt.

        Args:
          pool: connected.
          load: returns a replica's model; pickled, and called in its process.
          model: its tokenizer reads the prompts; parameters are not needed
            (`jaxshare.models.outline`).
          prompts, n, skip: see `Branches`.
          settings: other arguments of `Branches`, except `prefix`; bounds on rows and memory are
            each replica's.

        Raises:
          ValueError: see `Branches` and `RayPool.start`.
        """
        read = read_prompts(prompts, n, lambda text, first: encode(model, text, first=first))
        self.prompt_tokens = sum(len(prompt.tokens) for prompt in read)
        self.unique_tokens = unique_tokens(build_prefix_tree(read))
        self.sampled_tokens = self.passes = 0
        self._seconds = 0.0
        self._pool = pool
        self._peaks: dict[int, int] = {}  # kv_bytes of each replica
        self._compiled = collections.Counter[int]()  # seconds of each replica
        self._rows: int | None = None
        self._shards = cut(read, skip, _SHARDS_PER_REPLICA * pool.replicas)
        most = settings.get("max_new_tokens")
        longest = max(
            read,
            key=lambda p: len(p.tokens) + ((p.sampler and p.sampler.max_tokens) or most or 0),
        )
        pool.start(
            functools.partial(_make_work, load, longest, settings),
            max_replicas=max(1, len(self._shards)),
        )

    @property
    def rows(self) -> int | None:
        """The number of completions at a time on one replica; None before a shard has ended."""
        return self._rows

    @property
    def notes(self) -> list[str]:
        """Empty: the choices are each replica's, and this process does not see its device."""
        return []

    @property
    def kv_bytes(self) -> int:
        return sum(self._peaks.values())

    @property
    def compile_seconds(self) -> float:
        return max(self._compiled.values(), default=0.0)

    @property
    def seconds(self) -> float:
        return max(self._seconds - self.compile_seconds, 0.0)

    def stream(self, on_pass: Callable[["Shards"], None] | None = None) -> Iterator[Completion]:
        """Runs, and yields every completion as it ends. To be called once.

        Args:
          on_pass: called with this run after each completion.

        Raises:
          ValueError: see `RayPool.run`.
        """
        start = time.perf_counter()
        for result in self._pool.run(self._shards):
            self._seconds = time.perf_counter() - start
            if result.key == _COST:
                self.passes += result.value.passes
                self._compiled[result.replica] += result.value.compile_seconds
                self._rows = max(self._rows or 0, result.value.rows)
                self._peaks[result.replica] = max(
                    self._peaks.get(result.replica, 0), result.value.kv_bytes
                )
                continue
            self.sampled_tokens += len(result.value.tokens)
            if on_pass:
                on_pass(self)
            yield result.value


def _make_work(load: Callable[[], LoadedModel], longest: Prompt, settings: dict[str, Any]) -> Work:
    """The work function of one replica; a ValueError at once if the longest prompt cannot fit."""
    model = load()
    Branches(model, [longest], **settings)
    return functools.partial(_sample, model, settings)


def _sample(
    model: LoadedModel, settings: dict[str, Any], shard: Shard, arrived: Collection[Hashable]
) -> Iterator[tuple[Hashable, Any]]:
    run = Branches(model, shard.prompts, skip=shard.skipped(arrived), **settings)
    for completion in run.stream():
        yield (completion.prompt, completion.index), completion
    yield _COST, Cost(run.passes, run.kv_bytes, run.rows, run.compile_seconds)
