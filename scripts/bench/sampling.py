"""Sampling of 64 rows of 128,256 logits: by the thresholds of jaxshare, and by bisection as before.

    python -m scripts.bench.sampling                              # the full measurement
    python -m scripts.bench.sampling --quick                      # fewer rounds
    python -m scripts.bench.sampling --json --output FILE         # one JSON object

All sides sample the same logits, normal with a deviation of 3, at temperature 1, in turn. The
bisection halves the range of the logits' bits 32 times for top-k and 32 times for top-p, and reads
all logits each time. How to read the result is in benchmarks/README.md.
"""

import contextlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxshare import Sampler, Samplers, cpu
from jaxshare.decoding import sampling, truncation
from jaxshare.decoding.truncation import truncation_bounds
from scripts.bench.lib import (
    Goal,
    Parser,
    alternate,
    finish,
    machine,
    own_command,
    progress,
    ratios,
    table,
    versions,
)

ROWS, VOCAB = 64, 128_256
ROUNDS, QUICK_ROUNDS = 15, 5
AFTER, ALONE, BEFORE = "jaxshare", "XLA alone", "bisection"
BOTH = "top_k and top_p"
SETTINGS = {
    "top_k": Sampler(1.0, top_k=50),
    "top_p": Sampler(1.0, top_p=0.9),
    BOTH: Sampler(1.0, top_k=50, top_p=0.9),
    "neither": Sampler(1.0),
}
GOAL = 0.5

Draw = Callable[[Samplers, Array, Array, Array], Array]


def _bisected(
    scaled: Array, top_k: Array, top_p: Array, min_p: Array, *_: Any
) -> tuple[Array, Array]:
    """The bounds of `truncation_bounds` as they were found before it."""
    top = jnp.max(scaled, axis=-1, keepdims=True)
    bits = lax.bitcast_convert_type(scaled, jnp.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    k = jnp.where(top_k > 0, top_k, scaled.shape[1])[:, None].astype(jnp.float32)
    by_k = _bisected_threshold(order, jnp.ones_like(scaled), k)
    mass = jnp.where(order >= by_k, jnp.exp(scaled - top), 0.0)
    p = jnp.where(top_p < 1, top_p, 0.0)[:, None] * jnp.sum(mass, axis=-1, keepdims=True)
    by_p = jnp.where(top_p[:, None] < 1, _bisected_threshold(order, mass, p), by_k)
    kept = jnp.maximum(by_k, by_p)
    floor = lax.bitcast_convert_type(kept ^ ((kept >> 31) & 0x7FFFFFFF), jnp.float32)
    return jnp.maximum(floor, top + jnp.log(min_p)[:, None]), jnp.full_like(floor, jnp.inf)


def _bisected_threshold(order: Array, weights: Array, target: Array) -> Array:
    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        sums = jnp.sum(jnp.where(order >= middle, weights, 0.0), axis=-1, keepdims=True)
        reached = sums >= target
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low = jnp.min(order, axis=-1, keepdims=True)
    return lax.fori_loop(0, 32, halve, (low, jnp.max(order, axis=-1, keepdims=True) + 1))[0]


def _draw(samplers: Samplers, logits: Array, seeds: Array, positions: Array) -> Array:
    return samplers.sample(logits, seeds, positions)


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    """A context in which traces have the kernels of neither a CPU nor a GPU."""
    with (
        mock.patch.object(cpu, "floor_and_top", lambda *_: None),
        mock.patch.object(sampling, "draws_on", lambda _: None),
        mock.patch.object(truncation, "draws_on", lambda _: None),
    ):
        yield


def _draw_alone(*arguments: Any) -> Array:
    with _without_kernels():
        return _draw(*arguments)


def _draw_before(*arguments: Any) -> Array:
    with _without_kernels(), mock.patch.object(sampling, "truncation_bounds", _bisected):
        return _draw(*arguments)


SIDES: dict[str, Draw] = {AFTER: _draw, ALONE: _draw_alone, BEFORE: _draw_before}


def measure(rows: int, vocab: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The milliseconds of every side with every setting, and how many tokens differ."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(rows, vocab)) * 3, "float32")
    seeds = jnp.asarray(rng.integers(2**32, size=(rows, 2)), "uint32")
    compiled, results = {name: jax.jit(draw) for name, draw in SIDES.items()}, {}
    for setting, sampler in SETTINGS.items():
        say(setting)
        given = Samplers.stack([sampler] * rows), logits, seeds, jnp.arange(rows)
        tokens = {name: np.asarray(draw(*given)) for name, draw in compiled.items()}

        def timed(draw: Draw, given: Any = given) -> float:
            start = time.perf_counter()
            jax.block_until_ready(draw(*given))
            return time.perf_counter() - start

        times = alternate(
            {name: lambda draw=draw, timed=timed: timed(draw) for name, draw in compiled.items()},
            rounds,
        )
        results[setting] = {
            "milliseconds": {name: [t * 1e3 for t in times[name]] for name in SIDES},
            "to_before": {name: ratios(times[name], times[BEFORE]) for name in (AFTER, ALONE)},
            "different_tokens": {
                name: int((tokens[name] != tokens[BEFORE]).sum()) for name in (AFTER, ALONE)
            },
        }
    return results


def loops(rows: int, vocab: int) -> int:
    """The number of loops in the optimised program that XLA alone makes of the thresholds."""
    kinds = ((rows, vocab), "float32"), *(((rows,), f"{k}32") for k in ("int", "float", "float"))
    with _without_kernels():
        lowered = jax.jit(lambda *arguments: truncation_bounds(*arguments)).lower(
            *(jax.ShapeDtypeStruct(*kind) for kind in kinds)
        )
    return len(re.findall(r" while\(", lowered.compile().as_text()))


def goals(results: Mapping[str, Any], number_of_loops: int) -> list[Goal]:
    """The goals that these results can be held against."""
    to_before = results[BOTH]["to_before"][AFTER]["median"]
    return [
        Goal(f"time to bisection, {BOTH}", to_before, GOAL, at_most=True),
        Goal("loops in the program of XLA alone", number_of_loops, 0, at_most=True),
    ]


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    where, settings = report["machine"], report["settings"]
    rows = []
    for setting, found in report["results"].items():
        medians = [statistics.median(found["milliseconds"][name]) for name in SIDES]
        shares = [found["to_before"][name]["median"] for name in (AFTER, ALONE)]
        different = [found["different_tokens"][name] for name in (AFTER, ALONE)]
        cells = [*(f"{m:.2f}" for m in medians), *(f"{s:.3f}" for s in shares)]
        rows.append((setting, *cells, *map(str, different)))
    header = ["milliseconds", *SIDES, *(f"{name} to before" for name in (AFTER, ALONE))]
    header += [f"tokens that differ, {name}" for name in (AFTER, ALONE)]
    return "\n".join(
        [
            f"sampling {settings['rows']} rows of {settings['vocab']} logits, "
            f"{settings['rounds']} rounds; {where['cpu']}, {where['cores']} cores, load "
            f"{where['load_average']} at the start; jax {report['versions']['jax']}",
            "",
            table(header, rows),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="scripts.bench.sampling", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS, help="default %(default)s")
    parser.add_argument("--vocab", type=int, default=VOCAB, help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.reporting()
    given = parser.parse_args(arguments)
    for name in ("rows", "vocab"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} is {getattr(given, name)}, but it must be at least 1")
    parser.check_output(given.output)
    asked = own_command(__file__, arguments)
    where, rounds = machine(), QUICK_ROUNDS if given.quick else ROUNDS
    with progress(len(SETTINGS)) as say:
        results = measure(given.rows, given.vocab, rounds, say)
    number_of_loops = loops(given.rows, given.vocab)
    report = {
        "benchmark": "sampling",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "jaxlib", "llvmlite")),
        "settings": {"rows": given.rows, "vocab": given.vocab, "rounds": rounds},
        "results": results,
        "loops_by_xla_alone": number_of_loops,
    }
    found = goals(results, number_of_loops)
    finish(report, as_text(report), found, as_json=given.json, output=given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
