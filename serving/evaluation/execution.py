"""Makes the runs of an evaluation: many sessions in the passes of one engine, on each data group of
a mesh, or on replicas of a Ray cluster.

A run's texts depend on its spec and the model alone, whatever runs beside it: exactly in float32,
and to the rounding of sums in bfloat16 and float16, where passes of other sizes may round otherwise.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

import jax

from jaxshare.models import LoadedModel
from jaxshare.serving.cluster.ray_pool import RayPool, Work
from jaxshare.serving.engine import Engine
from jaxshare.serving.engine.session_room import engine_bytes, sessions_that_fit
from jaxshare.serving.errors import EngineError, TooLongError
from jaxshare.serving.evaluation.runs import REFUSED, Execute, Refused, Run, RunSpec, solve
from jaxshare.serving.evaluation.skeleton import MAX_POINTS
from jaxshare.serving.workers.block_sizes import rounded_budget
from jaxshare.serving.workers.layouts import worker_names
from jaxshare.serving.workers.prompts.presets import format_of

_CPU_ROWS, _ROWS = 64, 256
"""The most rows that the sessions of an engine have together by default, on a CPU and elsewhere."""
_MAX_CONCURRENCY = 512
_BATCH = 256
"""The most runs of a task of a replica."""
_STEP_TOKENS, _OPENING, _SPARE = 640, 64, 1280
"""Tokens of a step, those of what opens it, and those of headers, templates and the early answer's
prompt, and of rounding."""


def execute(model: LoadedModel, concurrency: int | None = 1) -> Execute:
    """Makes runs in this process, on each data group of the mesh.

    Args:
      model: where several processes have it, runs are made one by one.
      concurrency: runs at the same time on each data group, at most: 1 for one by one, without an
        engine; None for as many as memory and the processor are good for.

    Raises:
      ValueError: a number out of range, or more than 1 with a model that cannot.
    """
    check_concurrency(concurrency)
    if (lack := _lack(model)) and (concurrency or 1) > 1:
        raise ValueError(f"--concurrency is {concurrency}, but {lack}; leave it out")

    def run(
        specs: Sequence[RunSpec], on_pass: Callable[[int], None]
    ) -> Iterator[tuple[RunSpec, Run | Refused]]:
        replicas = model.replicas()
        many = 1 if lack else _concurrency(replicas[0], specs, concurrency, len(replicas))
        with contextlib.ExitStack() as engines:
            hosts = [_EngineRuns(replica, many, specs, engines) for replica in replicas]
            if many * len(hosts) == 1:
                yield from (hosts[0].make(spec, on_pass) for spec in specs)
                return
            yield from _side_by_side(hosts, many, specs)

    return run


def check_concurrency(concurrency: int | None) -> None:
    """Raises ValueError for a number out of range."""
    if concurrency is not None and not 1 <= concurrency <= _MAX_CONCURRENCY:
        raise ValueError(f"--concurrency is {concurrency}; give 1 to {_MAX_CONCURRENCY}")


def _side_by_side(
    hosts: Sequence["_EngineRuns"], many: int, specs: Sequence[RunSpec]
) -> Iterator[tuple[RunSpec, Run | Refused]]:
    """Makes runs on hosts that have `many` each at the same time; gives them as they finish."""
    free: queue.SimpleQueue[_EngineRuns] = queue.SimpleQueue()
    for _ in range(many):
        for host in hosts:
            free.put(host)

    stopped = threading.Event()

    def stop_at(_: int) -> None:
        if stopped.is_set():
            raise _NoMoreRuns

    def make(spec: RunSpec) -> tuple[RunSpec, Run | Refused]:
        host = free.get()
        try:
            return host.make(spec, stop_at)
        finally:
            free.put(host)

    executor = concurrent.futures.ThreadPoolExecutor(
        len(hosts) * many, thread_name_prefix="jaxshare-runs"
    )
    try:
        futures = [executor.submit(make, spec) for spec in specs]
        for made in concurrent.futures.as_completed(futures):
            yield made.result()
    finally:  # also where the caller stops early
        stopped.set()
        executor.shutdown(cancel_futures=True)


class _NoMoreRuns(Exception):
    """The caller wants no more runs; those in progress end where they are."""


class _EngineRuns:
    """Makes runs on one data group.

    Args:
      model: of the group alone.
      many: runs at the same time.
      specs: of all runs.
      engines: closes the engine at the end.
    """

    def __init__(
        self,
        model: LoadedModel,
        many: int,
        specs: Sequence[RunSpec],
        engines: contextlib.ExitStack,
    ):
        self._model, self._engine = model, None
        self._changed, self._limit, self._running = threading.Condition(), many, 0
        if many > 1:
            rows = max(map(_rows, specs))
            tokens = many * _most_tokens(model, specs)
            try:
                engine = Engine(model, kv_bytes=engine_bytes(model, tokens), max_rows=many * rows)
            except ValueError as error:
                raise ValueError(
                    f"{many} runs at the same time need {tokens} tokens of keys and values: {error}; "
                    "lower --concurrency"
                ) from error
            self._engine = engines.enter_context(engine)

    def make(
        self, spec: RunSpec, on_pass: Callable[[int], None] | None
    ) -> tuple[RunSpec, Run | Refused]:
        """Makes a run; gives its spec with the run or with the error that refuses it."""
        try:
            return spec, self._solve(spec, on_pass)
        except REFUSED as error:
            return spec, error

    def _solve(self, spec: RunSpec, on_pass: Callable[[int], None] | None) -> Run:
        while self._engine is not None:
            try:
                with self._place():
                    return solve(self._model, spec, on_pass, self._engine)
            except TooLongError:  # it needs more than was reckoned, and has memory of its own
                break
            except _NoRoom:
                continue
        return solve(self._model, spec, on_pass)

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """A place among those that run.

        Raises:
          _NoRoom: the others had too much of the memory. There is one place fewer from now on.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._running < self._limit)
            self._running += 1
        try:
            yield
        except EngineError as error:
            with self._changed:
                # The others of this class have reasons of their own, or end the engine.
                if self._running == 1 or type(error) is not EngineError:
                    raise
                self._limit = min(self._limit, self._running - 1)
            raise _NoRoom from error
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()


class _NoRoom(Exception):
    """A run has to wait until others have finished."""


def _lack(model: LoadedModel) -> str | None:
    """Why runs of a model have to be made one by one, or None."""
    if model.config.short_rope is not None:
        return (
            "this model's rotation depends on the length of the context, of which an engine has one"
        )
    if model.mesh is not None and model.mesh.is_multi_process:
        return "several processes run the model, each of which has to make the same runs in order"
    return None


def _concurrency(
    model: LoadedModel, specs: Sequence[RunSpec], concurrency: int | None, groups: int
) -> int:
    """The runs at the same time on each of so many data groups."""
    if not specs:
        return 1
    fair = -(-len(specs) // groups)
    if concurrency is not None:
        return min(concurrency, fair)
    rows = _CPU_ROWS if jax.default_backend() == "cpu" else _ROWS
    fitting = sessions_that_fit(model, _most_tokens(model, specs))
    return max(1, min(rows // max(map(_rows, specs)), fitting, fair))


def _rows(spec: RunSpec) -> int:
    """The most rows that a run has at the same time."""
    return MAX_POINTS if spec.method.startswith("skeleton") else spec.workers


def _most_tokens(model: LoadedModel, specs: Sequence[RunSpec]) -> int:
    """About as many tokens as the largest session of these runs takes.

    A session has room for its prompt, for what all workers write and once more as much in its
    history, and for a step of each worker (`block_sizes`).
    """
    longest: dict[int, RunSpec] = {}
    for spec in specs:
        if len(spec.text) >= len(longest.get(spec.workers, spec).text):
            longest[spec.workers] = spec
    return max(_tokens(model, spec) for spec in longest.values())


def _tokens(model: LoadedModel, spec: RunSpec) -> int:
    format = format_of(model, spec.more.get("format"))
    words = format.instructions(worker_names(spec.workers)), spec.text
    encode = model.tokenizer.encode if model.tokenizer else list  # without one all are refused
    prompt = sum(len(encode(text)) for text in words if text)
    written = rounded_budget(spec.budgets[-1])
    rows = _rows(spec)
    tokens = (
        prompt
        + rows * (2 * written + min(written + _OPENING, _STEP_TOKENS))
        + spec.answer_tokens
        + _SPARE
    )
    # Workers see all that the others write; rows of the other methods what is their own.
    contexts = 1 if spec.method == "workers" else rows + 1
    return min(tokens, contexts * model.config.max_positions + _SPARE)


# On a Ray cluster.


@dataclasses.dataclass(frozen=True)
class RunBatch:
    """Runs that a replica gets as one task, and makes side by side."""

    specs: tuple[RunSpec, ...]

    def __str__(self) -> str:
        more = f" and {len(self.specs) - 1} more" * (len(self.specs) > 1)
        return f"{self.specs[0]}{more}"


def execute_on(
    pool: RayPool, load: Callable[[], LoadedModel], concurrency: int | None = 1
) -> Execute:
    """Makes runs on the replicas of a pool, side by side.

    Args:
      pool: connected.
      load: gives the model, on the node where it is called.
      concurrency: see `execute`; of each replica.
    """
    check_concurrency(concurrency)

    def run(
        specs: Sequence[RunSpec], on_pass: Callable[[int], None]
    ) -> Iterator[tuple[RunSpec, Run | Refused]]:
        size, by_key = 1, dict[Hashable, RunSpec]((spec.key, spec) for spec in specs)
        if concurrency != 1:
            size = max(1, min(_BATCH, -(-len(specs) // max(1, pool.replicas))))
        batches = [RunBatch((*specs[i : i + size],)) for i in range(0, len(specs), size)]
        pool.start(functools.partial(_solver, load, concurrency), max_replicas=len(batches))
        for result in pool.run(batches):
            yield by_key[result.key], result.value

    return run


def _solver(load: Callable[[], LoadedModel], concurrency: int | None) -> Work:
    """Makes the function that makes runs in the process of a replica."""
    make = execute(load(), concurrency)

    def work(
        batch: RunBatch, arrived: Collection[Hashable]
    ) -> Iterator[tuple[Hashable, Run | Refused]]:
        specs = [spec for spec in batch.specs if spec.key not in arrived]
        for spec, made in make(specs, lambda passes: None):
            yield spec.key, made if isinstance(made, Run) else ValueError(str(made))

    return work
