"""Data parallelism: branches over the data groups of a mesh.

Each group has the model, a cache and completions of its own.
"""

import queue
import threading
from collections.abc import Callable, Collection, Generator
from typing import Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.branches.prompt_tree import Prompts
from jaxshare.serving.branches.run import Branches
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.kvcache.sharing_cost import Chosen
from jaxshare.sharding import DATA, axis_size


def branches(model: LoadedModel, prompts: Prompts | None, **settings: Any) -> "Branches | Replicas":
    """A run over a tree of prompts, on all data groups of the model's mesh; see `Branches`."""
    return (
        Replicas(model, prompts, **settings)
        if axis_size(model.mesh, DATA) > 1
        else Branches(model, prompts, **settings)
    )


class Replicas:
    """A run of branches, split over the data groups of a mesh.

    `stream` yields the completions of all groups as they end. Every group takes neighbouring
    completions of the tree, so that a common prefix is fed on few groups. A completion depends on
    its prompt and seed alone, so it is the same on every group.

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
        """Plans the run of each group, whose bounds on rows and memory these are.

        Args:
          model, prompts, skip, settings: see `Branches`.

        Raises:
          ValueError: see `Branches`; or a prefix, which is in the memory of one group.
        """
        if settings.get("prefix") is not None:
            raise ValueError(
                "a prefix is in the memory of one data group; run it with data=1, or give the "
                "whole prompts"
            )
        models = model.replicas()
        self._whole = Branches(models[0], prompts, skip=skip, **settings)
        ids = self._whole.sample_ids
        share = max(1, -(-len(ids) // len(models)))
        parts = [ids[start : start + share] for start in range(0, len(ids), share)]
        self.runs = [
            Branches(replica, prompts, skip={*ids, *skip}.difference(part), **settings)
            for replica, part in zip(models, parts, strict=False)
        ]

    @property
    def sampler(self) -> Sampler:
        return self._whole.sampler

    @property
    def sample_counts(self) -> list[tuple[int, Sampler]]:
        return self._whole.sample_counts

    @property
    def rows(self) -> int:
        """The number of completions that run at a time, on all groups together."""
        return sum(run.rows for run in self.runs)

    @property
    def costs(self) -> Chosen | None:
        return self._whole.costs

    @property
    def notes(self) -> list[str]:
        """The notes of the group with the most rows; see `Branches.notes`."""
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
        """The number of passes of all groups together."""
        return sum(run.passes for run in self.runs)

    @property
    def seconds(self) -> float:
        """The seconds of the slowest group, without compilation."""
        return self._slowest[0]

    @property
    def compile_seconds(self) -> float:
        """The seconds that the slowest group has compiled."""
        return self._slowest[1]

    @property
    def _slowest(self) -> tuple[float, float]:
        return max(
            ((run.seconds, run.compile_seconds) for run in self.runs), key=sum, default=(0.0, 0.0)
        )

    @property
    def kv_bytes(self) -> int:
        """The sum of the peaks of all groups."""
        return sum(run.kv_bytes for run in self.runs)

    @property
    def prompt_tokens(self) -> int:
        return self.runs[0].prompt_tokens if self.runs else 0

    @property
    def unique_tokens(self) -> int:
        return self.runs[0].unique_tokens if self.runs else 0

    def stream(
        self, on_pass: "Callable[[Any], None] | None" = None, *, warm_up: bool = False
    ) -> Generator[Completion, None, None]:
        """Runs, and yields every completion as it ends. To be called once.

        Args:
          on_pass: called between dispatches of any group, in the caller's thread, with this run.
          warm_up: compile everything before the clock starts.
        """
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stop = threading.Event()

        def passed(_: Branches) -> None:
            if stop.is_set():
                raise _Stopped
            results.put(None)

        def work(run: Branches) -> None:
            try:
                for completion in run.stream(passed, warm_up=warm_up):
                    results.put(completion)
                results.put(_Done())
            except _Stopped:
                results.put(_Done())
            except BaseException as error:  # any: raised in the caller's thread
                results.put(error)

        threads = [
            threading.Thread(target=work, args=(run,), name=f"jaxshare-data-{i}")
            for i, run in enumerate(self.runs)
        ]
        for thread in threads:
            thread.start()
        left = len(threads)
        try:
            while left:
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                if isinstance(result, _Done):
                    left -= 1
                elif isinstance(result, Completion):
                    yield result
                elif on_pass:
                    on_pass(self)
        finally:  # also where the caller closes the stream
            stop.set()
            for thread in threads:
                thread.join()


class _Done:
    """Marks the end of a group's results."""


class _Stopped(Exception):
    """Ends a group's run because the caller has closed the stream."""
