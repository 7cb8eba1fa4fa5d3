"""Calibration: measures the costs of attention on this device.

They are saved in the user's cache folder and decide what runs share.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import KVCache, Layout, Plan, block_attention, make_plan, progress
from jaxshare.models import LoadedModel
from jaxshare.quantised_cache import Arena, as_stored
from jaxshare.serving.inputs import cache_dtype
from jaxshare.serving.kvcache.sharing_cost import PRIVATE_TILE, SHARED_TILE, Costs

ROWS = (2, 8, 64)
PREFIXES = (64, 256, 1024, 4096)
SUFFIX = 128
_ROUNDS, _CALLS = 7, 3


@dataclasses.dataclass(frozen=True)
class Timing:
    """One measurement of attention: rows that read a common prefix and a suffix of their own.

    Attributes:
      rows: number of rows.
      prefix: tokens of the prefix.
      suffix: tokens of each row's suffix block.
      shared: the prefix is stored once, not copied for each row.
      time: in microseconds.
    """

    rows: int
    prefix: int
    suffix: int
    shared: bool
    time: float


def calibrate(
    model: LoadedModel,
    rows: Sequence[int] = ROWS,
    prefixes: Sequence[int] = PREFIXES,
) -> tuple[Costs, list[Timing]]:
    """Measures one attention layer over shared and copied prefixes, and fits the cost model.

    The layer has the model's shape. Shared and copied runs of a point alternate. Takes about a
    minute on two cores.

    Returns:
      The costs, and the measurements they were fitted to.
    """
    points = []
    for count, prefix in progress.each([*itertools.product(rows, prefixes)], "measuring", "points"):
        runs = {shared: _attention(model, count, prefix, shared) for shared in (True, False)}
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(_ROUNDS):
            for shared, run in runs.items():
                start = time.perf_counter()
                for _ in range(_CALLS):
                    run()
                times[shared].append((time.perf_counter() - start) / _CALLS)
        points += [
            Timing(count, prefix, SUFFIX, shared, statistics.median(t) * 1e6)
            for shared, t in times.items()
        ]
    return fit(points), points


def fit(points: Sequence[Timing]) -> Costs:
    """Fits non-negative costs to measurements by least squares of the relative errors."""

    def features(point: Timing) -> list[float]:
        private = point.suffix if point.shared else point.prefix + point.suffix
        tiles = -(-point.prefix // SHARED_TILE) if point.shared else 0
        # In the order of the fields of Costs; the last is the fixed cost of a call.
        return [
            float(point.shared),
            tiles,
            tiles * SHARED_TILE * point.rows,
            point.rows,
            point.rows * -(-private // PRIVATE_TILE),
            1.0,
        ]

    matrix = np.asarray([features(point) for point in points]) / np.asarray(
        [[point.time] for point in points]
    )
    scale = np.linalg.norm(matrix, axis=0)
    used = [*np.flatnonzero(scale)]
    costs = np.zeros(matrix.shape[1])
    # Drops the most negative cost until none is negative.
    while used:
        solved = (
            np.linalg.lstsq(matrix[:, used] / scale[used], np.ones(len(points)), rcond=None)[0]
            / scale[used]
        )
        if (solved >= 0).all():
            costs[used] = solved
            break
        used.pop(int(np.argmin(solved * scale[used])))
    return Costs(*map(float, costs[:-1]))


def _attention(model: LoadedModel, rows: int, prefix: int, shared: bool) -> Callable[[], Array]:
    """Compiles one layer's attention of a decode pass over half-filled suffixes."""
    config, dtype = dataclasses.replace(model.config, num_layers=1), cache_dtype(model)
    blocks = (prefix, *[SUFFIX] * rows) if shared else [prefix + SUFFIX] * rows
    lengths = (prefix, *[SUFFIX // 2] * rows) if shared else [prefix + SUFFIX // 2] * rows
    cache = KVCache.create(config, blocks, dtype, approximate=model.approximate_kv)
    key = jax.random.key(0)
    keys, values = (
        as_stored(jax.random.normal(k, arena.shape), arena)
        for k, arena in zip(jax.random.split(key), (cache.keys[0], cache.values[0]), strict=True)
    )
    cache = dataclasses.replace(cache, lengths=jnp.asarray(lengths, jnp.int32))
    layout = Layout.from_blocks(
        [[0, 1 + r] for r in range(rows)] if shared else [[r] for r in range(rows)]
    )
    plan = make_plan(cache, layout, jnp.ones(rows, jnp.int32), 1)
    q = jax.random.normal(key, (rows, 1, config.num_heads, config.head_dim)).astype(dtype)

    @jax.jit
    def attend(q: Array, keys: Arena, values: Arena, plan: Plan) -> Array:
        return block_attention(q, keys, values, plan)

    def call() -> Array:
        return jax.block_until_ready(attend(q, keys, values, plan))

    call()
    return call
