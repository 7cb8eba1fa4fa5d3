"""Replicas: branches over the data groups of a mesh. Each group has the model, a cache and
completions of its own (data parallel)."""

import queue
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.branches.prompt_tree import Prompts
from jaxshare.serving.branches.run import Branches, Completion
from jaxshare.serving.kvcache.sharing_cost import Chosen
from jaxshare.sharding import DATA, axis_size


def branches(model: LoadedModel, prompts: Prompts | None, **settings: Any) -> "Branches | Replicas":
    """A run over a tree of prompts, on all data groups of the model's mesh. Arguments and errors as
    in `Branches`."""
    return (
        Replicas(model, prompts, **settings)
        if axis_size(model.mesh, DATA) > 1
        else Branches(model, prompts, **settings)
    )


class Replicas:
    """A run of branches that the data groups of a mesh share: `stream` yields the completions of
    all of them as they end.

    Every group takes neighbouring completions of the tree, so that what they have in common is fed
    on few groups. A completion depends on its prompt and seed alone, so it is the same on whichever
    group it runs.

    Attributes:
      runs: one of each group.
    """

    def __init__(
        self,
        model: LoadedModel,
        prompts: Prompts | None,
        *,
        skip: Collection[tuple[int, int]] = (),
        **settings: Any,
    ):
        """Arguments and errors as in `Branches`; bounds on rows and memory are each group's.

        Raises:
          ValueError: also a prefix, which lies in the memory of one group.
        """
        if settings.get("prefix") is not None:
            raise ValueError(
                "a prefix lies in the memory of one data group; run it with data=1, or give the "
                "whole prompts"
            )
        models = model.replicas()
        self._whole = Branches(models[0], prompts, skip=skip, **settings)
        places = self._whole.places
        share = max(1, -(-len(places) // len(models)))
        parts = [places[first : first + share] for first in range(0, len(places), share)]
        self.runs = [
            Branches(replica, prompts, skip={*places, *skip}.difference(part), **settings)
            for replica, part in zip(models, parts, strict=False)
        ]

    @property
    def sampler(self) -> Sampler:
        return self._whole.sampler

    @property
    def most_of_a_prompt(self) -> int:
        return self._whole.most_of_a_prompt

    @property
    def rows(self) -> int:
        """Completions that run at a time, of all groups together."""
        return sum(run.rows for run in self.runs)

    @property
    def costs(self) -> Chosen | None:
        return self._whole.costs

    @property
    def notes(self) -> list[str]:
        """As of `Branches`: rows are those of the group that has most."""
        widest = max(self.runs, key=lambda run: run.rows, default=None)
        return (
            [f"in each of {len(self.runs)} data groups: {note}" for note in widest.notes]
            if widest
            else []
        )

    @property
    def sampled_tokens(self) -> int:
        return sum(run.sampled_tokens for run in self.runs)

    @property
    def passes(self) -> int:
        """Of all groups together."""
        return sum(run.passes for run in self.runs)

    @property
    def seconds(self) -> float:
        """The seconds of the group that took longest, without compilation."""
        return self._longest[0]

    @property
    def compile_seconds(self) -> float:
        """The seconds that the group that took longest has compiled."""
        return self._longest[1]

    @property
    def _longest(self) -> tuple[float, float]:
        return max(
            ((run.seconds, run.compile_seconds) for run in self.runs), key=sum, default=(0.0, 0.0)
        )

    @property
    def kv_bytes(self) -> int:
        """On all groups together, each at its peak."""
        return sum(run.kv_bytes for run in self.runs)

    @property
    def prompt_tokens(self) -> int:
        return self.runs[0].prompt_tokens if self.runs else 0

    @property
    def unique_tokens(self) -> int:
        return self.runs[0].unique_tokens if self.runs else 0

    def stream(
        self, on_pass: "Callable[[Any], None] | None" = None, *, warm_up: bool = False
    ) -> Iterator[Completion]:
        """Runs, and yields every completion as it ends. To be called once.

        Args:
          on_pass: called between dispatches of any group, in the caller's thread, with this run.
          warm_up: compile everything before the clock starts.
        """
        found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stop = threading.Event()

        def passed(_: Branches) -> None:
            if stop.is_set():
                raise _Stopped
            found.put(None)

        def work(run: Branches) -> None:
            try:
                for completion in run.stream(passed, warm_up=warm_up):
                    found.put(completion)
                found.put(_Done())
            except _Stopped:
                found.put(_Done())
            except BaseException as error:  # it is the caller's to see, whatever it is
                found.put(error)

        threads = [
            threading.Thread(target=work, args=(run,), name=f"jaxshare-data-{i}")
            for i, run in enumerate(self.runs)
        ]
        for thread in threads:
            thread.start()
        left = len(threads)
        try:
            while left:
                result = found.get()
                if isinstance(result, BaseException):
                    raise result
                if isinstance(result, _Done):
                    left -= 1
                elif isinstance(result, Completion):
                    yield result
                elif on_pass:
                    on_pass(self)
        finally:  # also where the caller wants no more
            stop.set()
            for thread in threads:
                thread.join()


class _Done:
    """A group has no more to give."""


class _Stopped(Exception):
    """Nobody wants what comes next."""
