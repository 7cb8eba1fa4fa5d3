"""The sides of scripts.bench.attention: two ceilings, one layer's attention, plans, a decode step.

On a GPU a call takes microseconds and its launch by the host as long. So every side of attention is
a jitted loop of many calls in one dispatch, each answer being the next query, over as many layers'
arenas as make the level-2 cache useless. A turn's time is that of the whole dispatch, divided by
its calls; nothing is subtracted.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import block_attention
from jaxshare.attention.api import BACKENDS as BACKENDS_HERE
from jaxshare.attention.plan import Plan
from jaxshare.pallas.work_items import Work
from scripts.bench.lib import alternate, ratios
from scripts.bench.parts.attention import cases
from scripts.bench.parts.attention.cases import Case, Inputs
from scripts.bench.peer import Worker

# Sides, as they are called in results.
KERNELS = ("mosaic_gpu", "triton")
BACKENDS = (*KERNELS, "xla")
COPY, PRODUCT = "copy", "matrix product"
JAX_XLA, JAX_CUDNN, PALLAS, SDPA, TOKAMAX = (
    "jax.nn, xla",
    "jax.nn, cudnn",
    "JAX's Pallas decode",
    "PyTorch SDPA",
    "tokamax",
)
PEERS = {
    "jax-xla": JAX_XLA,
    "jax-cudnn": JAX_CUDNN,
    "jax-pallas": PALLAS,
    "torch": SDPA,
    "tokamax": TOKAMAX,
}
"""The others' sides, by their names on the command line."""
UNSHARED, UNROTATED = "unshared", "one row, not rotated"

L2_BYTES = 64 << 20
"""No GPU of today has a larger level-2 cache."""
MOST_ELEMENTS = 2**31 - 1
"""Of one array; kernels count in int32."""
SPLITS, SPLIT_TILE = 16, 128
"""Of JAX's Pallas decode kernel, its defaults; the tokens must be a multiple of both."""
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The device's memory and matrix units, each a side of its own; a turn is one copy or one
    product.

    One takes a millisecond and more on a GPU, so the host is ahead of the device, and `times`
    dispatches are one turn; a jitted loop would copy what it carries.
    """

    copy_bytes: int
    product_size: int
    times: int

    @functools.cached_property
    def _copied(self) -> Array:
        return jnp.ones(self.copy_bytes // 2, jnp.bfloat16)

    @functools.cached_property
    def _factors(self) -> tuple[Array, Array]:
        n, rng = self.product_size, np.random.default_rng(0)
        return cases.noise(rng, (n, n), "bfloat16"), cases.noise(rng, (n, n), "bfloat16")

    def _turn(self, *calls: Callable[[], Array]) -> float:
        """Seconds of one call of the fastest."""

        def often(call: Callable[[], Array]) -> None:
            for _ in range(self.times):
                made = call()
            made.block_until_ready()

        return min(seconds_of(lambda call=call: often(call)) for call in calls) / self.times

    def copy(self) -> float:
        """Seconds in which `copy_bytes` are read and as many written, by the faster of two ways:
        negated, or halves exchanged."""
        return self._turn(lambda: _negated(self._copied), lambda: _exchanged(self._copied))

    def product(self) -> float:
        """Seconds of a product, bfloat16 in and out, by the faster of two ways to lay out its right
        side."""
        return self._turn(
            lambda: _multiplied(*self._factors, 0), lambda: _multiplied(*self._factors, 1)
        )

    def copy_rate(self, seconds: float) -> float:
        """Bytes read and written in a second."""
        return 2 * self.copy_bytes / seconds

    def product_rate(self, seconds: float) -> float:
        """FLOP/s."""
        return 2 * self.product_size**3 / seconds


@jax.jit
def _negated(x: Array) -> Array:
    return -x


@jax.jit
def _exchanged(x: Array) -> Array:
    half = x.shape[0] // 2
    return jnp.concatenate([x[half:], x[:half]])


@functools.partial(jax.jit, static_argnames="contract")
def _multiplied(a: Array, b: Array, contract: int) -> Array:
    return jax.lax.dot_general(a, b, (((1,), (contract,)), ((), ())))


@dataclasses.dataclass(frozen=True)
class Side:
    """One timed side of a layer's attention.

    Attributes:
      turn: runs it and returns the seconds of one call, times `scaled`.
      read_bytes, flops: of one call, times `scaled`: the least that has to be read, and the
        arithmetic of two products.
      scaled: required rows, to those that were measured.
      way: how it is done, where that was found out.
    """

    turn: Callable[[], float]
    read_bytes: float
    flops: float
    scaled: float = 1.0
    way: str | None = None


@dataclasses.dataclass(frozen=True)
class Bench:
    """The settings and tools that all parts need.

    Attributes:
      backends: names, as `block_attention` takes them.
      ceilings: of this device.
      worker: PyTorch's side, or None.
      rounds: turns of each side.
      kernel_calls, calls: of a loop's body by the GPU backends, and by every other side. What the
        GPU backends make of a plan is made again in every turn of a loop, as it is in every pass of
        a model, so they have as many calls as QwQ-32B has layers.
      turn_seconds: how long a turn should be, were the device as fast as GPUs are.
      items: into how many pieces the GPU backends cut a pass: the device's multiprocessors.
      seed: of all that is random.
      say: told what is being done.
      peers: the others' sides that are measured.
      checks: what correctness found, in the order in which it was looked at; grows.
    """

    backends: Sequence[str]
    ceilings: Ceilings
    worker: Worker | None
    rounds: int
    kernel_calls: int
    calls: int
    turn_seconds: float
    items: int
    seed: int
    say: Say
    peers: Sequence[str] = tuple(PEERS.values())
    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def loop(self, case: Case, backend: str | None = None) -> tuple[int, int]:
        """Calls in a loop's body, and how often it runs, so that a turn is long enough to be timed
        and the slower sides' not too long."""
        calls = self.kernel_calls if backend in KERNELS else self.calls
        seconds = case.layer_bytes / 3e12 + case.layer_flops / 4e14 + 1e-5
        return calls, max(1, round(self.turn_seconds / (calls * seconds)))

    def check(self, case: Case, inputs: Inputs, skipped: dict[str, str]) -> list[str]:
        """The backends with right answers; the others' reasons go to `skipped`."""
        sampled, right = cases.expected(case, inputs)
        good = []
        for backend in self.backends:
            found: dict[str, Any] = {
                "case": case.name,
                "backend": backend,
                "dtype": case.dtype,
                "width": case.width,
                "group": case.heads.group,
                "head_dim": case.heads.head_dim,
                "error": None,
                "tolerance": cases.tolerance(case.dtype),
                "right": None,
            }
            try:
                found["error"] = cases.error(
                    case, attend_often(inputs, backend, 1, 1), sampled, right
                )
                found["right"] = found["error"] <= found["tolerance"]
                if found["right"]:
                    good.append(backend)
                else:
                    skipped[backend] = (
                        f"its answer is wrong by {found['error']:.3g}; {found['tolerance']:.3g} "
                        "may be rounding"
                    )
            except (
                Exception
            ) as error:  # a kernel that does not compile raises whatever its compiler does
                skipped[backend] = found["reason"] = reason(error)
                # A backend may say that it cannot, or not be there; anything else is a fault of its
                # own.
                found["right"] = (
                    None
                    if isinstance(error, NotImplementedError) or backend not in BACKENDS_HERE
                    else False
                )
            self.checks.append(found)
        return good

    def measure(self, sides: Mapping[str, Side]) -> dict[str, Any]:
        """Every side once to compile and warm up, then all in turn with the ceilings; sides that
        fail are given back with their reasons.

        Returns:
          "sides", for each its time, its rates and what part of the ceilings they are, round by
            round; "skipped"; the ceilings.
        """
        skipped = {}
        for name, side in sides.items():
            self.say(f"compile {name}")
            try:
                side.turn()
            except Exception as error:  # as above
                skipped[name] = reason(error)
        self.say("measure in turn")
        running = {name: side for name, side in sides.items() if name not in skipped}
        times = alternate(
            {
                **{name: side.turn for name, side in running.items()},
                COPY: self.ceilings.copy,
                PRODUCT: self.ceilings.product,
            },
            self.rounds,
        )
        return summarise(running, times, self.ceilings) | {"skipped": skipped}


def reason(error: Exception) -> str:
    """The cause of an error, in one line."""
    said = str(error).strip().splitlines()
    text = said[0] if said else "it said nothing"
    return (
        text if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {text[:300]}"
    )


def summarise(
    sides: Mapping[str, Side], times: Mapping[str, Sequence[float]], ceilings: Ceilings
) -> dict[str, Any]:
    """Medians of each side's times and rates; its part of a ceiling is the median of the rounds'
    own.

    Args:
      times: seconds of one call in every round, by side; COPY and PRODUCT among them.
    """
    copies, products = (
        [rate(s) for s in times[name]]
        for name, rate in ((COPY, ceilings.copy_rate), (PRODUCT, ceilings.product_rate))
    )
    found = {}
    for name, side in sides.items():
        seconds = times[name]
        middle = statistics.median(seconds)
        found[name] = {
            "microseconds": middle * 1e6,
            "gigabytes_per_second": side.read_bytes / middle / 1e9,
            "of_copy": ratios([side.read_bytes / s for s in seconds], copies)["median"],
            "teraflops": side.flops / middle / 1e12,
            "of_products": ratios([side.flops / s for s in seconds], products)["median"],
            "read_bytes": side.read_bytes,
            "flops": side.flops,
            "scaled": side.scaled,
            "way": side.way,
            "round_seconds": list(seconds),
        }
    return {
        "sides": found,
        "copy_gigabytes_per_second": statistics.median(copies) / 1e9,
        "product_teraflops": statistics.median(products) / 1e12,
    }


# Sides.


def layers_for(case: Case, most: int) -> int:
    """The number of layers' arenas that a loop goes through, so that none is still in the level-2
    cache when its turn comes again."""
    return max(1, min(most, -(-4 * L2_BYTES // case.layer_bytes)))


def with_layers(case: Case, most: int) -> Case:
    """The case with as many layers as `layers_for` says."""
    return dataclasses.replace(
        case, heads=dataclasses.replace(case.heads, num_layers=layers_for(case, most))
    )


def ours(bench: Bench, case: Case, inputs: Inputs, backend: str, scaled: float = 1.0) -> Side:
    """`block_attention` by one backend."""
    calls, passes = bench.loop(case, backend)

    def turn() -> float:
        return (
            seconds_of(lambda: attend_often(inputs, backend, calls, passes).block_until_ready())
            / (calls * passes)
            * scaled
        )

    return Side(turn, case.layer_bytes * scaled, case.layer_flops * scaled, scaled)


@functools.partial(jax.jit, static_argnames=("implementation", "calls", "passes"))
def attend_often(inputs: Inputs, implementation: str, calls: int, passes: int) -> Array:
    """Attention of one backend: a loop of so many passes with so many calls each, of which each has
    the answer of the one before for queries."""
    plan, cache = inputs.plan, inputs.cache
    # Jitted by itself, so that it is traced and lowered once for all calls.
    layer = jax.jit(functools.partial(block_attention, implementation=implementation))
    return _loop(
        lambda q, i: layer(q, cache.keys[i], cache.values[i], plan),
        inputs.q,
        len(cache.keys),
        calls,
        passes,
    )


def _loop(
    layer: Callable[[Array, int], Array], q: Array, layers: int, calls: int, passes: int
) -> Array:
    def one_pass(_: Array, q: Array) -> Array:
        for call in range(calls):
            q = layer(q, call % layers)
        return q

    # Known trip counts: the host need not ask the device whether to go on.
    return jax.lax.fori_loop(0, passes, one_pass, q)


# Plans.


@dataclasses.dataclass(frozen=True)
class Planned:
    """The parts of a pass that are made once for all of its layers."""

    plan: Plan
    work: Work | None


jax.tree_util.register_dataclass(Planned, ["plan", "work"], [])


def seconds_of(call: Callable[[], Any]) -> float:
    """The time of a call by the clock."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
