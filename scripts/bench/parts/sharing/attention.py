"""Attention alone, for scripts.bench.sharing: one layer of a decode pass over one shared prefix and
over copies of it (Hydragen section 4.2)."""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxshare import KVCache, Layout, Plan, block_attention, make_plan
from jaxshare.models.config import ModelConfig
from scripts.bench.lib import alternate, ratios
from scripts.bench.peer import Worker

# Sides, as they are called in results.
SHARED, UNSHARED, NO_ATTENTION, THEIRS, SDPA, PRODUCT = (
    "shared",
    "unshared",
    "no attention",
    "transformers",
    "SDPA",
    "matrix product",
)
Say = Callable[[str], None]

_PRODUCT_SIZE = 2048
_PRODUCT_FLOPS = 2 * _PRODUCT_SIZE**3
_TURN_SECONDS = 0.05
_NOISE = 1 << 20
"""Different random numbers in a cache; they repeat, because making more takes longer than all that
is measured."""


def attention_flops(rows: int, heads: int, head_dim: int, tokens: int) -> int:
    """The FLOPs of one layer, for one new token a row that sees `tokens`: two products, with a
    multiplication and an addition a number."""
    return 4 * rows * heads * head_dim * tokens


def copies_bytes(config: ModelConfig, rows: int, tokens: int) -> int:
    """The bytes of the keys and values in bfloat16 where each row has `tokens` of its own, over all
    layers."""
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * rows * tokens


def fill(cache: KVCache, lengths: Sequence[int], seed: int) -> KVCache:
    """The cache with random keys and values, and `lengths` tokens in its blocks.

    The cache is donated.
    """
    noise = jax.random.normal(jax.random.key(seed), (_NOISE,), cache.keys[0].dtype)
    keys, values = (
        tuple(_filled(arena, noise) for arena in arenas) for arenas in (cache.keys, cache.values)
    )
    return dataclasses.replace(
        cache, keys=keys, values=values, lengths=jnp.asarray(lengths, jnp.int32)
    )


@functools.partial(jax.jit, donate_argnums=0)
def _filled(zeros: Array, noise: Array) -> Array:
    return zeros + jnp.tile(noise, -(-zeros.size // noise.size))[: zeros.size].reshape(zeros.shape)


@jax.jit
def _product(a: Array, b: Array) -> Array:
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


@jax.jit
def _product_transposed(a: Array, b: Array) -> Array:
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


class Product:
    """The machine's rate of matrix products, bfloat16 in and float32 out, which attention is held
    against."""

    def __init__(self):
        a, b = jax.random.normal(jax.random.key(0), (2, _PRODUCT_SIZE, _PRODUCT_SIZE), jnp.bfloat16)
        self._forms = [
            lambda form=form: form(a, b).block_until_ready()
            for form in (_product, _product_transposed)
        ]
        for form in self._forms:
            form()  # compiles
        self.times = repeats(min(_seconds(form) for form in self._forms))

    def turn(self) -> float:
        """Seconds of one product, the mean of a turn's, by the faster of two ways to lay out its
        right side.

        A turn of each way takes as long as one of attention: a machine that is disturbed for a
        millisecond slows neither side more than the other.
        """
        return min(
            _seconds(lambda form=form: [form() for _ in range(self.times)]) / self.times
            for form in self._forms
        )


def rates(seconds: Sequence[float]) -> list[float]:
    """FLOP/s of the products that took so long."""
    return [_PRODUCT_FLOPS / s for s in seconds]


class Attention:
    """`block_attention` of one layer: every row brings one token and sees the prefix and a suffix
    of its own, which that token ends."""

    def __init__(
        self, config: ModelConfig, rows: int, prefix: int, suffix: int, *, shared: bool, seed: int
    ):
        one_layer = dataclasses.replace(config, num_layers=1)
        capacities = (prefix, *[suffix] * rows) if shared else (prefix + suffix,) * rows
        lengths = (prefix, *[suffix - 1] * rows) if shared else (prefix + suffix - 1,) * rows
        layout = Layout.from_blocks(
            [[0, 1 + r] for r in range(rows)] if shared else [[r] for r in range(rows)]
        )
        cache = fill(KVCache.create(one_layer, capacities), lengths, seed)
        self.keys, self.values = cache.keys[0], cache.values[0]
        self.plan = make_plan(cache, layout, jnp.ones(rows, jnp.int32), 1)
        self.q = jax.random.normal(
            jax.random.key(seed), (rows, 1, config.num_heads, config.head_dim), jnp.bfloat16
        )
        self.attend(1)  # compiles
        self.times = repeats(_seconds(lambda: self.attend(1)))

    def attend(self, times: int) -> Array:
        """`times` calls, each answer being the next query, in one dispatch."""
        return jax.block_until_ready(_attend(self.q, self.keys, self.values, self.plan, times))

    def turn(self) -> float:
        """Seconds of one call, the mean of a turn's."""
        return _seconds(lambda: self.attend(self.times)) / self.times


def repeats(seconds: float) -> int:
    """The number of calls of `seconds` each that make a turn long enough to be timed."""
    return max(1, min(64, int(_TURN_SECONDS / seconds)))


def measure(
    config: ModelConfig,
    points: Mapping[str, Sequence[int]],
    rounds: int,
    most_bytes: int,
    worker: Worker | None,
    product: Product,
    seed: int,
    say: Say,
) -> list[dict[str, Any]]:
    """All points, as `summarise` gives them.

    Args:
      config: for the heads; one layer is measured.
      points: "rows", "prefixes" and "suffixes", of which every combination is measured.
      most_bytes: sides whose copies of the prefix would take more are left out.
      worker: for SDPA, or None to leave it out.
    """
    config, found = dataclasses.replace(config, num_layers=1), []
    for rows, prefix, suffix in itertools.product(
        points["rows"], points["prefixes"], points["suffixes"]
    ):
        say(f"attention: {rows} rows, prefix {prefix}, suffix {suffix}")
        fits = copies_bytes(config, rows, prefix + suffix) <= most_bytes
        runs = {SHARED: Attention(config, rows, prefix, suffix, shared=True, seed=seed)}
        if fits:
            runs[UNSHARED] = Attention(config, rows, prefix, suffix, shared=False, seed=seed)
        sides: dict[str, Callable[[], float]] = {name: run.turn for name, run in runs.items()}
        if worker and fits:
            worker.ask(
                "prepare",
                rows=rows,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                tokens=prefix + suffix,
                device="cuda" if jax.default_backend() == "gpu" else "cpu",
            )
            worker.ask("attend", times=1)
            times = repeats(worker.ask("attend", times=1)["seconds"])
            sides[SDPA] = lambda times=times: worker.ask("attend", times=times)["seconds"] / times
        times = alternate({**sides, PRODUCT: product.turn}, rounds)
        found.append(summarise(config, rows, prefix, suffix, times))
    if worker:
        worker.ask("release")
    return found


def summarise(
    config: ModelConfig, rows: int, prefix: int, suffix: int, times: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """One point: each side's time, rate and fraction of the rate of matrix products; how many times
    slower than shared the others are.

    Args:
      times: seconds of one call in every round, by side; SHARED and PRODUCT among them.
    """
    flops = attention_flops(rows, config.num_heads, config.head_dim, prefix + suffix)
    sides = {
        name: {
            "milliseconds": statistics.median(seconds) * 1e3,
            "gflops": flops / statistics.median(seconds) / 1e9,
            "of_products": ratios([flops / s for s in seconds], rates(times[PRODUCT]))["median"],
            "round_seconds": list(seconds),
        }
        for name, seconds in times.items()
        if name != PRODUCT
    }
    return {
        "rows": rows,
        "prefix": prefix,
        "suffix": suffix,
        "sides": sides,
        "slower_than_shared": {
            name: ratios(times[name], times[SHARED]) for name in sides if name != SHARED
        },
        "product_gflops": statistics.median(rates(times[PRODUCT])) / 1e9,
    }


@jax.jit
def _attend(q: Array, keys: Array, values: Array, plan: Plan, times: Array | int) -> Array:
    return jax.lax.fori_loop(0, times, lambda _, q: block_attention(q, keys, values, plan), q)


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
