"""Calibration: what attention costs on this device, measured, kept in the user's cache folder, and
used when runs decide what to share."""

import dataclasses
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from jaxshare import KVCache, Layout, Plan, block_attention, make_plan
from jaxshare.models import LoadedModel
from jaxshare.models.config import ModelConfig
from jaxshare.paths import cache_folder, write_json
from jaxshare.serving.inputs import cache_dtype
from jaxshare.serving.kvcache import sharing_cost as defaults
from jaxshare.serving.kvcache.sharing_cost import PRIVATE_TILE, SHARED_TILE, Costs
from jaxshare.sharding import TENSOR, axis_size

ROWS = (2, 8, 64)
PREFIXES = (64, 256, 1024, 4096)
SUFFIX = 128
_ROUNDS, _CALLS = 7, 3


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement: `rows` rows over a prefix of so many tokens, kept once or in copies, with a
    suffix each; and its microseconds."""

    rows: int
    prefix: int
    suffix: int
    shared: bool
    time: float


def calibrate(
    model: LoadedModel,
    rows: Sequence[int] = ROWS,
    prefixes: Sequence[int] = PREFIXES,
    progress: Callable[[Iterable], Iterable] = tqdm,
) -> tuple[Costs, list[Point]]:
    """Measures one attention layer of the model's shape over shared prefixes and over copies of
    them, and fits the cost model.

    Both sides of a point are measured in turn. About a minute on two cores.

    Returns:
      The costs, and what they were fitted to.
    """
    points = []
    for count, prefix in progress([*itertools.product(rows, prefixes)]):
        sides = {shared: _attention(model, count, prefix, shared) for shared in (True, False)}
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(_ROUNDS):
            for shared, call in sides.items():
                begin = time.perf_counter()
                for _ in range(_CALLS):
                    call()
                times[shared].append((time.perf_counter() - begin) / _CALLS)
        points += [
            Point(count, prefix, SUFFIX, shared, statistics.median(t) * 1e6)
            for shared, t in times.items()
        ]
    return fit(points), points


def fit(points: Sequence[Point]) -> Costs:
    """The costs, none negative, that come closest to what was measured, every point's error counted
    relative to its time."""

    def features(point: Point) -> list[float]:
        own = point.suffix if point.shared else point.prefix + point.suffix
        tiles = -(-point.prefix // SHARED_TILE) if point.shared else 0
        # In the order of the fields of Costs; the last is what every call costs, whatever it reads.
        return [
            float(point.shared),
            tiles,
            tiles * SHARED_TILE * point.rows,
            point.rows,
            point.rows * -(-own // PRIVATE_TILE),
            1.0,
        ]

    matrix = np.asarray([features(point) for point in points]) / np.asarray(
        [[point.time] for point in points]
    )
    scale = np.linalg.norm(matrix, axis=0)
    used = [*np.flatnonzero(scale)]
    found = np.zeros(matrix.shape[1])
    while used:
        solved = (
            np.linalg.lstsq(matrix[:, used] / scale[used], np.ones(len(points)), rcond=None)[0]
            / scale[used]
        )
        if (solved >= 0).all():
            found[used] = solved
            break
        used.pop(int(np.argmin(solved * scale[used])))
    return Costs(*map(float, found[:-1]))


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Costs, and where they come from, in words that end a sentence."""

    costs: Costs
    source: str


def choose(model: LoadedModel, file: Path | None = None) -> Chosen:
    """What was measured for this device and the model's shape; or for this device at all; or else
    what is predicted of the device (`costs.predicted`).

    Warns:
      UserWarning: a file of measurements that cannot be read.
    """
    file, kind, shape = file or costs_file(), _device(), _shape(model.config, model)
    try:
        shapes = json.loads(file.read_text(encoding="utf-8")).get(kind, {})
        if data := shapes.get(shape):
            return Chosen(Costs.from_json(data), f"measured on this device, {kind} ({file})")
        if other := next(iter(shapes.items()), None):
            return Chosen(
                Costs.from_json(other[1]),
                f"measured on this device, {kind}, for another shape, {other[0]} ({file})",
            )
    except FileNotFoundError:
        pass
    except (OSError, ValueError, AttributeError) as error:
        warnings.warn(
            f"the costs in {file} cannot be read ({error}); defaults are used until `jaxshare "
            "calibrate` writes it anew",
            stacklevel=2,
        )
    c, tensor = model.config, axis_size(model.mesh, TENSOR)
    costs, entry = defaults.predicted(
        kind,
        defaults.Shape(
            c.num_heads // tensor, c.num_kv_heads // tensor, c.head_dim, cache_dtype(model).itemsize
        ),
    )
    known = (
        "of two CPU cores"
        if entry == "cpu"
        else f"that a roofline predicts for {entry}"
        + ("" if kind.startswith(entry) else f", since {kind} is not in the table")
    )
    return Chosen(costs, f"{known}; `jaxshare calibrate` measures this device")


def load(model: LoadedModel, file: Path | None = None) -> Costs:
    """The costs of `choose`."""
    return choose(model, file).costs


def save(model: LoadedModel, costs: Costs, file: Path | None = None) -> Path:
    """Keeps the costs for this device and the model's shape; returns where.

    Raises:
      OSError: the file cannot be written.
    """
    file = file or costs_file()
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    shapes = known.get(_device())
    known[_device()] = {
        **(shapes if isinstance(shapes, dict) else {}),
        _shape(model.config, model): costs.as_json(),
    }
    write_json(file, known)
    return file


def costs_file() -> Path:
    """Where costs are kept: the user's cache folder, or $JAXSHARE_CACHE."""
    return cache_folder() / "costs.json"


def _device() -> str:
    return jax.devices()[0].device_kind


def _shape(config: ModelConfig, model: LoadedModel) -> str:
    return f"{config.num_heads} heads, {config.num_kv_heads} kv heads, dim {config.head_dim}, {cache_dtype(model).name}"


def _attention(model: LoadedModel, rows: int, prefix: int, shared: bool) -> Callable[[], Array]:
    """One layer's attention of a decode pass in which every row has filled half of its suffix's
    room."""
    config, dtype = dataclasses.replace(model.config, num_layers=1), cache_dtype(model)
    blocks = (prefix, *[SUFFIX] * rows) if shared else [prefix + SUFFIX] * rows
    lengths = (prefix, *[SUFFIX // 2] * rows) if shared else [prefix + SUFFIX // 2] * rows
    cache = KVCache.create(config, blocks, dtype)
    key = jax.random.key(0)
    keys, values = (
        jax.random.normal(k, cache.keys[0].shape).astype(dtype) for k in jax.random.split(key)
    )
    cache = dataclasses.replace(cache, lengths=jnp.asarray(lengths, jnp.int32))
    layout = Layout.from_blocks(
        [[0, 1 + r] for r in range(rows)] if shared else [[r] for r in range(rows)]
    )
    plan = jax.jit(lambda cache, layout: make_plan(cache, layout, jnp.ones(rows, jnp.int32), 1))(
        cache, layout
    )
    q = jax.random.normal(key, (rows, 1, config.num_heads, config.head_dim)).astype(dtype)

    @jax.jit
    def attend(q: Array, keys: Array, values: Array, plan: Plan) -> Array:
        return block_attention(q, keys, values, plan)

    def call() -> Array:
        return jax.block_until_ready(attend(q, keys, values, plan))

    call()
    return call
