"""Tuning: which tiles of the GPU kernels are fastest on this GPU for a model's shape, measured, and
kept in the user's cache folder, where the kernels look them up (`jaxshare.pallas.tiles`)."""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxshare import KVCache, Layout, Plan, Rope, block_attention, make_plan
from jaxshare.layout import bucket
from jaxshare.pallas import tiles as tables
from jaxshare.pallas.device import Device
from jaxshare.pallas.tiles import KINDS, MOSAIC_TABLE, KernelConfig, Key, use_tiles
from jaxshare.paths import write_json

ROWS = (1, 8, 64, 512)
"""What is measured for one of them is used for half and for twice as many too, so that these are
enough for up to 1024."""
QUICK_ROWS = (1, 64)
DTYPES = ("bfloat16", "float16")
PREFIX = 16_384
_LONGEST, _SHORTEST = 32_768, 64
"""Tokens of a row's own block: as many as memory allows within these where rows share nothing, and
the fewest where they share a prefix."""
_LAYERS = 2
"""Calls in a turn of the measured loop. They share one set of work items, as a model's layers do;
more of them take longer to compile."""
_MOST_TURNS = 64
_TOLERANCE = 0.05
"""Of a head's answer against XLA's, relative: both round weights and results to 8 bits or more."""


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """Of a model's attention.

    Raises:
      ValueError: heads that kv heads do not divide, or a head dim or dtype that no kernel is
        written for.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = DTYPES[0]

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"there are {self.num_heads} heads and {self.num_kv_heads} kv heads; both must be "
                "at least 1, and the first a multiple of the second"
            )
        if self.head_dim not in MOSAIC_TABLE:
            raise ValueError(
                f"the head dim is {self.head_dim}, but the GPU kernels are for "
                f"{', '.join(map(str, MOSAIC_TABLE))}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(
                f"the dtype is {self.dtype}, but the GPU kernels are for {' and '.join(DTYPES)}; "
                "say which with --dtype"
            )

    @property
    def group(self) -> int:
        """G."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_layers(self) -> int:
        """Of the cache that is measured."""
        return 1

    @property
    def rope(self) -> Rope:
        """Some rotation; its frequencies do not matter here."""
        return Rope.default(self.head_dim, 10_000.0)

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is spent: rounds of measurements, seconds of each on a GPU of 1 TB/s and 100
    TFLOP/s, and about how many bytes of cache."""

    rounds: int = 7
    seconds: float = 0.05
    cache_bytes: int = 2**30


QUICK = Effort(rounds=3, seconds=0.01, cache_bytes=2**28)


@dataclasses.dataclass(frozen=True)
class Pass:
    """What is measured: every row brings one token, and sees a block of its own; with `shared`, a
    prefix of all rows before it."""

    shape: KernelShape
    rows: int
    shared: bool
    effort: Effort = Effort()

    @property
    def queries(self) -> int:
        """R * T * G."""
        return self.rows * self.shape.group

    @property
    def prefix(self) -> int:
        """Tokens that all rows see."""
        return (
            min(PREFIX, max(_SHORTEST, self.effort.cache_bytes // self.shape.token_bytes))
            if self.shared
            else 0
        )

    @property
    def own(self) -> int:
        """Tokens of a row's own block, the new one among them."""
        room = self.effort.cache_bytes // self.shape.token_bytes // self.rows
        return _SHORTEST if self.shared else min(max(room, _SHORTEST), _LONGEST)

    @property
    def turns(self) -> int:
        """Of the measured loop. Their number is part of the program, so that the GPU never asks the
        host whether to go on."""
        read = (self.prefix + self.rows * self.own) * self.shape.token_bytes / 1e12
        computed = (
            4
            * self.rows
            * self.shape.num_heads
            * self.shape.head_dim
            * (self.prefix + self.own)
            / 1e14
        )
        return min(
            max(1, math.ceil(self.effort.seconds / (_LAYERS * max(read, computed)))), _MOST_TURNS
        )


Run = Callable[[], float]
"""Measures once; seconds of one layer's attention."""
Prepare = Callable[[Pass, str, KernelConfig], Run]
"""Compiles a backend with tiles for a pass. What it raises says why that cannot be measured."""


def prepare(job: Pass, backend: str, tiles: KernelConfig) -> Run:
    """Compiles a loop of the pass's attention, and holds its answer against that of XLA's backend.

    Nothing but the GPU's own work is measured: one program makes all calls, each with the answer
    before it in its queries, so that none can be left out or run beside another. Nothing is
    subtracted: the times hold what making the work items takes, a part of it each.

    Raises:
      NotImplementedError: the backend does not serve this pass or this GPU.
      ValueError: the answer is wrong.
    """
    arrays, right = _inputs(job)
    with use_tiles(tiles):
        program = _layers.lower(backend, job.turns, *arrays).compile()
    found = np.asarray(program(*arrays).astype(jnp.float32))
    distance = np.linalg.norm(found - right, axis=-1) / np.linalg.norm(right, axis=-1)
    if not np.max(distance) <= _TOLERANCE:  # nor is NaN
        raise ValueError(
            f"its answer differs from XLA's by {np.max(distance):.2g}, relative; it is not used"
        )

    def run() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        return (time.perf_counter() - begin) / (job.turns * _LAYERS)

    return run


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layers(backend: str, turns: int, q: Array, keys: Array, values: Array, plan: Plan) -> Array:
    def turn(_: Any, out: Array) -> Array:
        for _ in range(_LAYERS):
            out = block_attention(q + out, keys, values, plan, implementation=backend)
        return out

    return lax.fori_loop(0, turns, turn, jnp.zeros_like(q))


@functools.lru_cache(maxsize=1)
def _inputs(job: Pass) -> tuple[tuple[Array, Array, Array, Plan], np.ndarray]:
    """Random queries and keys, and what XLA's backend answers. The last pass's are kept for its
    other candidates."""
    shape, prefix = job.shape, [job.prefix] if job.shared else []
    cache = KVCache.create(shape, (*prefix, *[job.own] * job.rows), shape.dtype)
    random = jax.jit(jax.random.normal, static_argnums=(1, 2))
    key = jax.random.split(jax.random.key(0), 3)
    keys, values = (random(k, cache.keys[0].shape, shape.dtype) for k in key[:2])
    q = random(key[2], (job.rows, 1, shape.num_heads, shape.head_dim), shape.dtype)
    cache = dataclasses.replace(
        cache, lengths=jnp.asarray((*prefix, *[job.own - 1] * job.rows), jnp.int32)
    )
    layout = Layout.from_blocks([[0, 1 + r] if job.shared else [r] for r in range(job.rows)])
    plan = jax.jit(
        lambda cache, layout: make_plan(cache, layout, jnp.ones(job.rows, jnp.int32), 1)
    )(cache, layout)
    arrays = q, keys, values, plan
    return arrays, np.asarray(_layers("xla", job.turns, *arrays).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Of one candidate in one pass: microseconds of one layer's attention, the median of the
    rounds; or why there are none."""

    backend: str
    rows: int
    shared: bool
    tiles: KernelConfig
    microseconds: float | None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class TuningOutcome:
    """What was found for the calls of a key: the best tiles, None where nothing could be measured,
    and those that the table has."""

    key: Key
    best: KernelConfig | None
    built_in: KernelConfig
    measurements: tuple[Measurement, ...]


def tune(
    shape: KernelShape,
    device: Device,
    rows: Sequence[int] = ROWS,
    backends: Sequence[str] = (*KINDS,),
    effort: Effort = Effort(),
    prepare: Prepare = prepare,
    advance: Callable[[], object] = lambda: None,
) -> Iterator[TuningOutcome]:
    """Measures every candidate, and yields what is best for each backend and bucket of queries, one
    after the other.

    The best has the least geometric mean of its times over the passes of the bucket, so that each
    pass counts the same however long it takes. The candidates of a pass are measured in turn, round
    by round.

    Args:
      shape: of the model.
      device: that this runs on.
      rows: for how many rows; those that have a bucket of queries in common are measured for one
        choice.
      backends: which.
      effort: how much to spend.
      prepare: makes a candidate ready to be measured.
      advance: called after each candidate of each pass.
    """
    for queries, counts in _buckets(shape, rows):
        measured: dict[str, list[Measurement]] = {backend: [] for backend in backends}
        for job, backend in itertools.product(_passes(shape, counts, effort), backends):
            measured[backend] += _measure(
                job, backend, candidates(backend, device, shape, queries), prepare, advance
            )
        _inputs.cache_clear()
        for backend, found in measured.items():
            yield TuningOutcome(
                Key(backend, shape.head_dim, shape.group, queries, shape.dtype),
                _best(found),
                _built_in(backend, device, shape, queries),
                tuple(found),
            )


def num_measurements(
    shape: KernelShape, device: Device, rows: Sequence[int], backends: Sequence[str]
) -> int:
    """How often `tune` calls `advance`."""
    return sum(
        len(_passes(shape, counts, Effort()))
        * sum(len(candidates(b, device, shape, queries)) for b in backends)
        for queries, counts in _buckets(shape, rows)
    )


def candidates(
    backend: str, device: Device, shape: KernelShape, queries: int
) -> list[KernelConfig]:
    """What is measured for calls of so many queries, what the table has first."""
    found = (
        tables.candidates_mosaic(shape.head_dim)
        if backend == "mosaic_gpu"
        else tables.candidates_triton(device, shape.head_dim, queries)
    )
    return [*dict.fromkeys([_built_in(backend, device, shape, queries), *found])]


def _built_in(backend: str, device: Device, shape: KernelShape, queries: int) -> KernelConfig:
    return (
        tables.built_in_mosaic(shape.head_dim, queries)
        if backend == "mosaic_gpu"
        else tables.built_in_triton(device, shape.head_dim, queries)
    )


def _buckets(shape: KernelShape, rows: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Buckets of queries, and the numbers of rows that fall in them."""
    grouped = itertools.groupby(sorted(set(rows)), lambda count: bucket(count * shape.group))
    return [(queries, [*counts]) for queries, counts in grouped]


def _passes(shape: KernelShape, rows: Sequence[int], effort: Effort) -> list[Pass]:
    """One row shares nothing."""
    return [
        Pass(shape, count, shared, effort)
        for count in rows
        for shared in ((True, False) if count > 1 else (False,))
    ]


def _measure(
    job: Pass,
    backend: str,
    tiles: Sequence[KernelConfig],
    prepare: Prepare,
    advance: Callable[[], object],
) -> list[Measurement]:
    ready: dict[KernelConfig, Run] = {}
    reasons: dict[KernelConfig, str] = {}
    for candidate in tiles:
        try:
            ready[candidate] = prepare(job, backend, candidate)
        except (
            Exception
        ) as error:  # a compiler's errors are of many kinds, and the other candidates may compile
            reasons[candidate] = _sentence(error)
        advance()
    times: dict[KernelConfig, list[float]] = {candidate: [] for candidate in ready}
    for _ in range(job.effort.rounds):
        for candidate, run in ready.items():
            times[candidate].append(run())
    return [
        Measurement(
            backend,
            job.rows,
            job.shared,
            candidate,
            statistics.median(times[candidate]) * 1e6 if candidate in ready else None,
            reasons.get(candidate),
        )
        for candidate in tiles
    ]


def _sentence(error: Exception) -> str:
    """The first line of what it says."""
    first = next(iter(str(error).strip().splitlines()), "")[:300]
    return (
        first
        if isinstance(error, NotImplementedError) and first
        else f"{type(error).__name__}: {first}"
    )


def _best(measurements: Sequence[Measurement]) -> KernelConfig | None:
    passes = {(m.rows, m.shared) for m in measurements if m.microseconds is not None}
    times: dict[KernelConfig, list[float]] = {}
    for m in measurements:
        if m.microseconds is not None:
            times.setdefault(m.tiles, []).append(m.microseconds)
    everywhere = [tiles for tiles, found in times.items() if len(found) == len(passes)]
    return min(everywhere, key=lambda tiles: statistics.geometric_mean(times[tiles]), default=None)


def save(device: Device, best: Mapping[Key, KernelConfig], file: Path | None = None) -> Path:
    """Keeps what is best beside what the file holds for other shapes and devices; returns where.

    What the file holds that cannot be read is lost.

    Raises:
      OSError: the file cannot be written.
    """
    file = file or tables.tiles_file()
    try:
        known = tables.decode_tiles(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    write_json(
        file, tables.encode_tiles({**known, device.kind: {**known.get(device.kind, {}), **best}})
    )
    tables.read_tiles.cache_clear()
    return file
