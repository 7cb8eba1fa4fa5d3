"""Shards: branches over the replicas of a fleet. A run is cut into runs of neighbouring
completions, several for each replica."""

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
from jaxshare.serving.branches.sharing_plan import fold, unique_tokens
from jaxshare.serving.cluster.ray_pool import RayPool, Work
from jaxshare.serving.inputs import encode

_SHARDS_OF_A_REPLICA = 4
"""So that a slow node does not hold all up at the end."""
_MOST_COMPLETIONS = 4096
"""Of a shard: sixteen waves of as many rows as run at once, so that little is lost at its end."""
_COST = "cost"
"""The key of what a shard took; those of completions are pairs of numbers."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Neighbours in the tree of all prompts.

    Attributes:
      prompts: with their numbers in the whole run.
      places: (prompt, index) of the completions to sample.
    """

    prompts: tuple[Prompt, ...]
    places: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        numbers = sorted(prompt.number for prompt in self.prompts)
        shown = ", ".join(map(str, numbers[:5])) + (
            f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
        )
        return f"the shard of prompt{'s' * (len(numbers) > 1)} {shown} (counted from 0)"

    def skipped(self, arrived: Collection[Hashable] = ()) -> set[tuple[int, int]]:
        """(prompt, index) of completions of its prompts that are another shard's, or have
        arrived."""
        wanted = {*self.places}.difference(arrived)
        return {
            (prompt.number, index) for prompt in self.prompts for index in range(prompt.n)
        } - wanted


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a shard took on its replica: see `Completions`. `rows` ran at a time."""

    passes: int
    kv_bytes: int
    rows: int
    compile_seconds: float = 0.0


def cut(prompts: Sequence[Prompt], skip: Collection[tuple[int, int]], shards: int) -> list[Shard]:
    """Cuts a run into so many shards of nearly equal size, or more where these would be large.

    Args:
      prompts: of the whole run, in any order; in the shards they are in the order of their tokens,
        so that what begins alike is together.
      skip: (prompt, index) of completions that are not wanted.
      shards: at least 1; fewer are made of fewer completions.
    """
    skip = {*skip}
    ordered = sorted(prompts, key=lambda prompt: np.asarray(prompt.tokens, np.int32).tobytes())
    wanted = [
        (prompt, index)
        for prompt in ordered
        for index in range(prompt.n)
        if (prompt.number, index) not in skip
    ]
    count = max(min(shards, len(wanted)), -(-len(wanted) // _MOST_COMPLETIONS))
    ends = [len(wanted) * i // count for i in range(count + 1)] if count else [0]
    found = []
    for first, end in itertools.pairwise(ends):
        part = wanted[first:end]
        found.append(
            Shard(
                tuple({prompt.number: prompt for prompt, _ in part}.values()),
                tuple((prompt.number, index) for prompt, index in part),
            )
        )
    return found


class Shards:
    """A run of branches on the replicas of a fleet: `stream` yields the completions of all of them
    as they end.

    A completion depends on its prompt's number, its own number and the seed alone, so it is the
    same on whichever replica it runs, and what a lost replica has not finished is sampled again
    elsewhere with the same texts.

    Attributes:
      prompt_tokens, unique_tokens: see `Completions`.
      sampled_tokens: of the completions that have come, so far.
      passes, kv_bytes: of all replicas together, of shards that have ended: what a lost replica did
        is not known.
      compile_seconds: of the replica that has compiled longest; of shards that have ended.
      seconds: of wall time since the run began, so far, without these.
    """

    def __init__(
        self,
        fleet: RayPool,
        load: Callable[[], LoadedModel],
        model: LoadedModel,
        prompts: Prompts,
        *,
        n: int = 1,
        skip: Collection[tuple[int, int]] = (),
        **settings: Any,
    ):
        """Cuts the run, and waits until the first replica has loaded its model and found that the
        longest prompt fits.

        Args:
          fleet: connected.
          load: gives a replica its model; pickled, and called in its process.
          model: whose tokenizer reads the prompts; without parameters will do
            (`jaxshare.models.outline`).
          prompts, n, skip: as in `Branches`.
          settings: others of `Branches`, but for `prefix`; bounds on rows and memory are each
            replica's.

        Raises:
          ValueError: as in `Branches` and `RayPool.start`.
        """
        read = read_prompts(prompts, n, lambda text, first: encode(model, text, first=first))
        self.prompt_tokens, self.unique_tokens = (
            sum(len(prompt.tokens) for prompt in read),
            unique_tokens(fold(read)),
        )
        self.sampled_tokens = self.passes = 0
        self._seconds = 0.0
        self._fleet, self._peaks, self._compiled = fleet, {}, collections.Counter[int]()
        self._rows: int | None = None
        self._shards = cut(read, skip, _SHARDS_OF_A_REPLICA * fleet.replicas)
        longest = max(read, key=lambda prompt: len(prompt.tokens))
        fleet.start(
            functools.partial(_sampler, load, longest, settings), most=max(1, len(self._shards))
        )

    @property
    def rows(self) -> int | None:
        """Completions that run at a time on one replica; None before a shard has ended."""
        return self._rows

    @property
    def notes(self) -> list[str]:
        """None: what is chosen is each replica's matter, whose device this process does not see."""
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
          on_pass: called with this run whenever a completion has come.

        Raises:
          ValueError: as in `RayPool.run`.
        """
        began = time.perf_counter()
        for result in self._fleet.run(self._shards):
            self._seconds = time.perf_counter() - began
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


def _sampler(load: Callable[[], LoadedModel], longest: Prompt, settings: dict[str, Any]) -> Work:
    """What does shards on one replica. Refuses at once what cannot fit there."""
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
