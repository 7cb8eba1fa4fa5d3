"""The kernels of one call of block attention on a GPU, and the time of each, by kind of pass.

    python -m scripts.gpu.kernel_times                               # the backend that is taken by itself
    python -m scripts.gpu.kernel_times --backend triton --cases prefixes,prompts
    python -m scripts.gpu.kernel_times --compare-overlap             # mosaic_gpu also with products one by one
    python -m scripts.gpu.kernel_times --json --output FILE          # one JSON object
    python -m scripts.gpu.kernel_times --cpu                         # the whole program at tiny sizes

Calls run as in scripts.bench.attention, many in one dispatch, once by the clock and once under JAX's
profiler, which takes time itself. The difference between a call's time and the sum of its kernels'
is what the GPU waits between them. On a CPU the profiler sees no kernels.
"""

import collections
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxshare.attention.api import preferred
from jaxshare.pallas.chosen_tiles import choose_mosaic, use_tiles
from jaxshare.pallas.device import current_device
from scripts.bench.attention import device, without_gpu
from scripts.bench.lib import Parser, finish, machine, own_command, table, versions
from scripts.bench.parts.attention import cases
from scripts.bench.parts.attention.cases import Case, Heads, Inputs
from scripts.bench.parts.attention.scale import FULL, TINY
from scripts.bench.parts.attention.speed import BACKENDS, attend_often, seconds_of, with_layers

CALLS, DISPATCHES = 24, 5
"""Of a dispatch, as 8 calls in a loop of 3; and of the clock, of which the shortest counts."""
SHORT = 132
"""Tokens of rows with little of their own."""
_WIDE = ("prefixes", "prompts")
"""The passes with segments of more than 64 queries."""
MOST = 12
"""Kernels that a table shows."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a call: its mean time, and how often it runs in a call, in the mean."""

    name: str
    microseconds: float
    times: float


def layouts(*, tiny: bool) -> dict[str, list[Case]]:
    """The passes, by kind."""
    s, short = (TINY, 5) if tiny else (FULL, SHORT)
    one_each = Heads(
        s.private_heads.num_kv_heads * s.private_heads.group, 1, s.private_heads.head_dim
    )
    return {
        "short": [
            cases.private(heads, s.private_rows, short) for heads in (one_each, s.private_heads)
        ],
        "contexts": [cases.private(s.private_heads, *size) for size in s.contexts],
        "prefixes": [
            cases.shared(s.private_heads, rows, s.prefix, s.own) for rows in s.prefix_rows
        ],
        "workers": [cases.workers(s.worker_heads, n, s.history, s.own) for n in s.workers if n > 1],
        "prompts": [cases.prompt(s.private_heads, tokens) for tokens in s.prefills],
    }


def kernels_of(run: Callable[[], Any]) -> list[Kernel]:
    """The kernels that a dispatch of `CALLS` calls launches on GPUs, the longest first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = Path(folder).glob("**/*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        took, count = collections.Counter[str](), collections.Counter[str]()
        for plane in planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events:
                    took[event.name] += event.duration_ns
                    count[event.name] += 1
    return [
        Kernel(name, nanoseconds / 1e3 / count[name], count[name] / CALLS)
        for name, nanoseconds in took.most_common()
    ]


def one_by_one(inputs: Inputs) -> contextlib.AbstractContextManager[None]:
    """A context in which mosaic_gpu takes its tiles for such a call without overlapping products."""
    (rows, width, heads, dim), (kv_heads, *_) = inputs.q.shape, inputs.cache.keys[0].shape
    chip, group = current_device(), heads // kv_heads
    assert chip is not None
    tiles = choose_mosaic(chip, dim, group, rows * width * group, inputs.cache.keys[0].dtype)
    return use_tiles(dataclasses.replace(tiles, overlap=False))


def measure(case: Case, backend: str, seed: int, *, overlap: bool = True) -> dict[str, Any]:
    """A call's time by the clock, its least, and its kernels."""
    case = with_layers(case, FULL.most_layers)
    inputs: Inputs = cases.make(case, seed)

    def run() -> None:
        attend_often(inputs, backend, 8, CALLS // 8).block_until_ready()

    with contextlib.nullcontext() if overlap else one_by_one(inputs):
        run()
        took = min(seconds_of(run) for _ in range(DISPATCHES)) / CALLS
        kernels = kernels_of(run)
    return {
        "case": case.name,
        "overlap": overlap,
        "kv_heads": case.heads.num_kv_heads,
        "group": case.heads.group,
        "read_bytes": case.layer_bytes,
        "flops": case.layer_flops,
        "microseconds": took * 1e6,
        "kernels": [dataclasses.asdict(kernel) for kernel in kernels],
    }


def as_text(found: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for each in found:
        kernels = each["kernels"]
        busy = sum(k["microseconds"] * k["times"] for k in kernels)
        title = f"{each['case']}, K {each['kv_heads']}, G {each['group']}"
        title += ", products one by one" * (not each["overlap"])
        rows = [
            (k["name"][:60], f"{k['times']:.2f}", f"{k['microseconds']:.2f}")
            for k in kernels[:MOST]
        ]
        rows = [("all, by the clock", "1.00", f"{each['microseconds']:.1f}"), *rows]
        rows.insert(1, ("all kernels", "1.00", f"{busy:.1f}"))
        parts.append(table((title, "a call", "us each"), rows))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="scripts.gpu.kernel_times", description=__doc__.splitlines()[0])
    kinds = [*layouts(tiny=True)]
    parser.add_argument(
        "--cases",
        default=",".join(kinds),
        metavar="C,C",
        help="kinds of passes (default %(default)s)",
    )
    parser.add_argument("--backend", choices=BACKENDS, help="default the one that is preferred")
    parser.add_argument(
        "--cpu", action="store_true", help="tiny sizes on the CPU, to try the program"
    )
    parser.add_argument(
        "--compare-overlap",
        action="store_true",
        help="with mosaic_gpu: prefixes and prompts once more, without overlapping products",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default 0)")
    parser.reporting()
    given = parser.parse_args(arguments)
    asked = parser.some_of("--cases", given.cases, kinds)
    parser.check_output(given.output)
    if given.cpu:
        jax.config.update("jax_platforms", "cpu")
    elif current_device() is None:
        print(without_gpu("scripts.gpu.kernel_times"), file=sys.stderr)
        return 2
    backend = given.backend or ("xla" if given.cpu else preferred()[0])
    found = []
    for kind in asked:
        for case in layouts(tiny=given.cpu)[kind]:
            print(case.name, file=sys.stderr, flush=True)
            found.append(measure(case, backend, given.seed))
            if given.compare_overlap and kind in _WIDE and backend == "mosaic_gpu":
                found.append(measure(case, backend, given.seed, overlap=False))
    report = {
        "benchmark": "kernel_times",
        "command": own_command(__file__, arguments),
        "machine": machine() | {"device": device()},
        "versions": versions(("jax", "jaxlib")),
        "settings": {"backend": backend, "seed": given.seed, "cpu": given.cpu},
        "results": found,
    }
    finish(report, as_text(found), [], as_json=given.json, output=given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
