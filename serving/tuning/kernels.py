"""Tuning: measures which tiles of the GPU kernels are fastest on this GPU for a model's shape.

They are saved in the user's cache folder, where the kernels look them up (`jaxshare.pallas.chosen_tiles`).
"""

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
from jaxshare.pallas.chosen_tiles import (
    Key,
    decode_tiles,
    encode_tiles,
    read_tiles,
    tiles_file,
    use_tiles,
)
from jaxshare.pallas.device import Device
from jaxshare.pallas.head_dims import LATENT_DIMS
from jaxshare.pallas.tiles import KINDS, MOSAIC_TABLE, KernelConfig
from jaxshare.paths import write_json
from jaxshare.serving.locks import updating

ROWS = (1, 8, 64, 512)
"""A measurement is also used for half and for twice as many rows, so these cover up to 1024."""
QUICK_ROWS = (1, 64)
DTYPES = ("bfloat16", "float16")
PREFIX = 16_384
_MIN_SUFFIX, _MAX_SUFFIX = 64, 32_768
"""Tokens of a row's own block: as many as fit the memory between these where rows share nothing,
and the minimum where they share a prefix."""
_LAYERS = 2
"""Calls in an iteration of the measured loop. They share one set of work items, as a model's layers
do; more of them take longer to compile."""
_MAX_ITERATIONS = 64
_TOLERANCE = 0.05
"""Maximum relative distance of a head's output from XLA's: both round weights and results to 8 bits
or more."""


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """The shape of a model's attention.

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
                "choose one with --dtype"
            )

    @property
    def group(self) -> int:
        """The query heads per kv head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_layers(self) -> int:
        """The number of layers of the measured cache."""
        return 1

    @property
    def value_dim(self) -> int:
        """The size of a stored value: that of a key, or 0 where it is a part of one."""
        return 0 if self.head_dim in LATENT_DIMS else self.head_dim

    @property
    def layer_ropes(self) -> tuple[Rope, ...]:
        return ()

    @property
    def rope(self) -> Rope:
        """A rotation; its frequencies do not affect times."""
        return Rope.default(self.head_dim - LATENT_DIMS.get(self.head_dim, 0), 10_000.0)

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's keys and values in one layer."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Effort:
    """The effort of a measurement.

    Attributes:
      rounds: measurements of each candidate.
      seconds: of each measurement on a GPU of 1 TB/s and 100 TFLOP/s.
      cache_bytes: the approximate size of the cache.
    """

    rounds: int = 7
    seconds: float = 0.05
    cache_bytes: int = 2**30


QUICK = Effort(rounds=3, seconds=0.01, cache_bytes=2**28)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A measured pass: every row has one new token, in a block of its own.

    With `shared`, a prefix that all rows share precedes it.
    """

    shape: KernelShape
    rows: int
    shared: bool
    effort: Effort = Effort()

    @property
    def queries(self) -> int:
        """The number of queries per kv head, R * T * G."""
        return self.rows * self.shape.group

    @property
    def prefix(self) -> int:
        """The tokens that all rows share."""
        if not self.shared:
            return 0
        return min(PREFIX, max(_MIN_SUFFIX, self.effort.cache_bytes // self.shape.token_bytes))

    @property
    def suffix(self) -> int:
        """The tokens of a row's own block, including the new one."""
        if self.shared:
            return _MIN_SUFFIX
        max_tokens = self.effort.cache_bytes // self.shape.token_bytes // self.rows
        return min(max(max_tokens, _MIN_SUFFIX), _MAX_SUFFIX)

    @property
    def iterations(self) -> int:
        """The iterations of the measured loop.

        Their number is part of the program, so that the GPU never waits for the host.
        """
        read = (self.prefix + self.rows * self.suffix) * self.shape.token_bytes
        products = self.rows * self.shape.num_heads * self.shape.head_dim
        flops = 4 * products * (self.prefix + self.suffix)
        seconds = _LAYERS * max(read / 1e12, flops / 1e14)
        return min(max(1, math.ceil(self.effort.seconds / seconds)), _MAX_ITERATIONS)


Run = Callable[[], float]
"""Measures once, and returns the seconds of one layer's attention."""
Prepare = Callable[[Pass, str, KernelConfig], Run]
"""Compiles a backend with tiles for a pass, or raises the reason why it cannot be measured."""


def prepare(job: Pass, backend: str, tiles: KernelConfig) -> Run:
    """Compiles a loop of the pass's attention, and checks its output against XLA's backend.

    Only the GPU's own work is measured: one program makes all calls, each with the output of the
    last in its queries, so that none can be removed or run concurrently. Nothing is subtracted: the
    times include a share of making the work items.

    Raises:
      NotImplementedError: the backend does not support this pass or this GPU.
      ValueError: the output is wrong.
    """
    arrays, expected = _inputs(job)
    with use_tiles(tiles):
        program = _layers.lower(backend, job.iterations, *arrays).compile()
    output = np.asarray(program(*arrays).astype(jnp.float32))
    distance = np.linalg.norm(output - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    if not np.max(distance) <= _TOLERANCE:  # also true for NaN
        raise ValueError(
            f"its output differs from XLA's by {np.max(distance):.2g}, relative; it is not used"
        )

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        return (time.perf_counter() - start) / (job.iterations * _LAYERS)

    return run


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layers(
    backend: str, iterations: int, q: Array, keys: Array, values: Array, plan: Plan
) -> Array:
    def iterate(_: Any, out: Array) -> Array:
        for _ in range(_LAYERS):
            out = block_attention(q + out, keys, values, plan, implementation=backend)
            # Values may be shorter than queries.
            out = jnp.pad(out, [(0, 0)] * 3 + [(0, q.shape[3] - out.shape[3])])
        return out

    return lax.fori_loop(0, iterations, iterate, jnp.zeros_like(q))


@functools.lru_cache(maxsize=1)
def _inputs(job: Pass) -> tuple[tuple[Array, Array, Array, Plan], np.ndarray]:
    """Makes random queries and keys, and the output of XLA's backend.

    Those of the last pass are cached for its other candidates.
    """
    shape, prefix = job.shape, [job.prefix] if job.shared else []
    cache = KVCache.create(shape, (*prefix, *[job.suffix] * job.rows), shape.dtype)
    random = jax.jit(jax.random.normal, static_argnums=(1, 2))
    key = jax.random.split(jax.random.key(0), 3)
    arenas = cache.keys[0], cache.values[0]
    keys, values = (random(k, a.shape, shape.dtype) for k, a in zip(key[:2], arenas, strict=True))
    q = random(key[2], (job.rows, 1, shape.num_heads, shape.head_dim), shape.dtype)
    cache = dataclasses.replace(
        cache, lengths=jnp.asarray((*prefix, *[job.suffix - 1] * job.rows), jnp.int32)
    )
    layout = Layout.from_blocks([[0, 1 + r] if job.shared else [r] for r in range(job.rows)])
    plan = make_plan(cache, layout, jnp.ones(job.rows, jnp.int32), 1)
    arrays = q, keys, values, plan
    return arrays, np.asarray(_layers("xla", job.iterations, *arrays).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The result for one candidate in one pass.

    Attributes:
      backend, rows, shared, tiles: the pass and the candidate.
      microseconds: of one layer's attention, the median of the rounds; None if it failed.
      reason: the error, if it failed.
    """

    backend: str
    rows: int
    shared: bool
    tiles: KernelConfig
    microseconds: float | None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class TuningOutcome:
    """The result for the calls of a key.

    Attributes:
      key: the backend, shape and bucket of queries.
      best: the fastest tiles; None if nothing could be measured.
      built_in: the tiles of the built-in table.
      measurements: of all candidates.
    """

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
    """Measures every candidate, and yields the best for each backend and bucket of queries.

    The best has the lowest geometric mean of its times over the passes of the bucket, so that each
    pass counts the same however long it takes. The candidates of a pass are measured alternately,
    round by round.

    Args:
      shape: of the model.
      device: this device.
      rows: numbers of rows; those in a common bucket of queries are measured for one choice.
      backends: the backends to measure.
      effort: of each measurement.
      prepare: compiles a candidate.
      advance: called after each candidate of each pass, for a progress bar.
    """
    for queries, counts in _buckets(shape, rows):
        measured: dict[str, list[Measurement]] = {backend: [] for backend in backends}
        for job, backend in itertools.product(_passes(shape, counts, effort), backends):
            measured[backend] += _measure(
                job, backend, candidates(backend, device, shape, queries), prepare, advance
            )
        _inputs.cache_clear()
        for backend, measurements in measured.items():
            yield TuningOutcome(
                Key(backend, shape.head_dim, shape.group, queries, shape.dtype),
                _best(measurements),
                _built_in(backend, device, shape, queries),
                tuple(measurements),
            )


def num_measurements(
    shape: KernelShape, device: Device, rows: Sequence[int], backends: Sequence[str]
) -> int:
    """Returns the number of calls of `advance` by `tune`."""
    return sum(
        len(_passes(shape, counts, Effort()))
        * sum(len(candidates(b, device, shape, queries)) for b in backends)
        for queries, counts in _buckets(shape, rows)
    )


def candidates(
    backend: str, device: Device, shape: KernelShape, queries: int
) -> list[KernelConfig]:
    """Returns the tiles to measure for a bucket of queries, the built-in ones first."""
    others = (
        tables.candidates_mosaic(device, shape.head_dim, queries)
        if backend == "mosaic_gpu"
        else tables.candidates_triton(device, shape.head_dim, queries)
    )
    return [*dict.fromkeys([_built_in(backend, device, shape, queries), *others])]


def _built_in(backend: str, device: Device, shape: KernelShape, queries: int) -> KernelConfig:
    return (
        tables.built_in_mosaic(device, shape.head_dim, queries)
        if backend == "mosaic_gpu"
        else tables.built_in_triton(device, shape.head_dim, queries)
    )


def _buckets(shape: KernelShape, rows: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Returns buckets of queries, and the numbers of rows in each."""
    grouped = itertools.groupby(sorted(set(rows)), lambda count: bucket(count * shape.group))
    return [(queries, [*counts]) for queries, counts in grouped]


def _passes(shape: KernelShape, rows: Sequence[int], effort: Effort) -> list[Pass]:
    """Returns the passes of a bucket, shared and private; a single row shares nothing."""
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
        # A compiler's errors have many types, and the other candidates may compile.
        except Exception as error:
            reasons[candidate] = in_a_sentence(error)
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


def in_a_sentence(error: Exception) -> str:
    """Returns the first line of an error's message, with its type where that is informative."""
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
    # Only tiles that could be measured in every pass.
    complete = [tiles for tiles, measured in times.items() if len(measured) == len(passes)]
    return min(complete, key=lambda tiles: statistics.geometric_mean(times[tiles]), default=None)


def save(device: Device, best: Mapping[Key, KernelConfig], file: Path | None = None) -> Path:
    """Adds the best tiles to those in the file for other shapes and devices; returns the file.

    A file that cannot be read is overwritten.

    Raises:
      OSError: the file cannot be written.
    """
    file = file or tiles_file()
    with updating(file):
        try:
            known = decode_tiles(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            known = {}
        tiles = {**known.get(device.kind, {}), **best}
        write_json(file, encode_tiles({**known, device.kind: tiles}))
    read_tiles.cache_clear()
    return file
