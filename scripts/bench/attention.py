"""The attention of one layer on a GPU, and a decode step, against the device's own ceilings and
against others' attention.

    python -m scripts.bench.attention                             # the full measurement
    python -m scripts.bench.attention --quick                     # within three minutes
    python -m scripts.bench.attention --parts private,workers     # some of its parts
    python -m scripts.bench.attention --sides mosaic_gpu,jax-cudnn  # some of its sides
    python -m scripts.bench.attention --json --output FILE        # one JSON object
    python -m scripts.bench.attention --cpu                       # the whole program at tiny sizes, without a GPU

First every backend's answers are held against the reference in float32, over random inputs that are
new in every run (--seed repeats one). A backend whose answer is wrong is not timed, and the program
ends with code 1. Then, in turn with a copy of device memory and a large product in bfloat16: rows
with private blocks, a shared prefix, workers over one history, Llama-3.1-8B's heads decoding at
several lengths, over prefixes and with whole prompts, the plan, and a step of a 7B-shaped model.
PyTorch runs under a Python of its own (--torch-python), where one with CUDA is found. How to read
the result is in benchmarks/README.md; what a model of the hardware predicts is in
benchmarks/roofline.md.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxshare.pallas.device import current_device
from scripts.bench.lib import ROOT, Parser, finish, machine, own_command, table, versions
from scripts.bench.parts.attention import measurements as parts
from scripts.bench.parts.attention import plots
from scripts.bench.parts.attention.scale import FULL, QUICK, TINY
from scripts.bench.parts.attention.speed import BACKENDS, PEERS, Bench, Ceilings, Say
from scripts.bench.peer import TORCH_PYTHON, Worker, WorkerError

SIDES = {name: name for name in BACKENDS} | PEERS
"""By their names on the command line."""
WORKER = "scripts.bench.peers.torch_attention"
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run.

    `torch_python` is None if no Python with PyTorch is known, `plots` if none are drawn.
    """

    parts: tuple[str, ...]
    sides: tuple[str, ...]
    quick: bool
    cpu: bool
    rounds: int
    seed: int
    torch_python: str | None
    json: bool
    output: Path | None
    plots: Path | None


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(prog="scripts.bench.attention", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts",
        default=",".join(parts.PARTS),
        metavar="P,P",
        help="what to look at (default %(default)s)",
    )
    parser.add_argument(
        "--sides",
        default=",".join(SIDES),
        metavar="S,S",
        help="what is measured, where a part has it (default %(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer passes and turns, and of a whole model the best backend alone",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="tiny sizes on the CPU, to try the program; its times mean nothing",
    )
    parser.add_argument("--rounds", type=int, help="turns of each side (default 9; quick 5; cpu 1)")
    parser.add_argument(
        "--seed", type=int, help="of all that is random (default another one in every run)"
    )
    parser.add_argument(
        "--torch-python",
        metavar="PATH",
        help=f"a Python that has PyTorch with CUDA (default {TORCH_PYTHON}, or this one)",
    )
    parser.add_argument(
        "--without-torch", action="store_true", help="measure without PyTorch's side"
    )
    parser.reporting()
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the results there")
    given = parser.parse_args(arguments)
    asked = parser.some_of("--parts", given.parts, parts.PARTS)
    sides = [SIDES[side] for side in parser.some_of("--sides", given.sides, [*SIDES])]
    rounds = (
        given.rounds if given.rounds is not None else 1 if given.cpu else 5 if given.quick else 9
    )
    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    if rounds < 1 or not 0 <= seed < 2**31:
        parser.error(
            f"--rounds is {rounds} and --seed {seed}, but rounds must be at least 1 and the seed "
            f"from 0 to {2**31 - 1}"
        )
    parser.check_output(given.output)
    parser.check_folder("--plots", given.plots)
    if given.plots and not plots.available():
        parser.error("--plots needs matplotlib: install jaxshare[plot]")
    if given.without_torch and given.torch_python:
        parser.error("--torch-python and --without-torch are both given; give one of them")
    if given.torch_python and not shutil.which(given.torch_python):
        parser.error(f"--torch-python is {given.torch_python}, but there is no such program")
    python = None if given.without_torch else given.torch_python or _torch_python()
    return Options(
        asked,
        tuple(sides),
        given.quick,
        given.cpu,
        rounds,
        seed,
        python,
        given.json,
        given.output,
        given.plots,
    )


def _torch_python() -> str | None:
    """A Python that has PyTorch, if one is known."""
    if (ROOT / TORCH_PYTHON).exists():
        return str(ROOT / TORCH_PYTHON)
    return sys.executable if importlib.util.find_spec("torch") else None


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.cpu:
        jax.config.update("jax_platforms", "cpu")
    if current_device() is None and not options.cpu:
        print(without_gpu("scripts.bench.attention"), file=sys.stderr)
        return 2
    asked = own_command(__file__, arguments)
    where, found = (
        machine() | {"device": device()},
        {"jaxshare": versions(("jax", "jaxlib", "flax", "numpy")) | plugins()},
    )
    print(f"scripts.bench.attention: seed {options.seed}", file=sys.stderr)
    with (
        contextlib.ExitStack() as stack,
        tqdm(leave=False, file=sys.stderr, bar_format="{desc} [{elapsed}]") as bar,
    ):
        worker, torch_reason = None, "no Python with PyTorch was named or found"
        if options.torch_python:
            try:
                worker = stack.enter_context(Worker(options.torch_python, WORKER, {}))
                found["torch"] = worker.begin()
            except WorkerError as error:
                worker, torch_reason = None, str(error)
        bench, results = prepared(options, worker, lambda what: bar.set_description(what)), {}
        try:
            measure(options, bench, results)
            interrupted = False
        except KeyboardInterrupt:  # what is measured counts
            interrupted = True
    report = {
        "benchmark": "attention",
        "command": asked,
        "machine": where,
        "versions": found,
        "settings": settings_of(options, bench, None if worker else torch_reason),
        "interrupted": interrupted,
        "results": {"correctness": bench.checks, **results},
    }
    goals = parts.goals(results, tiny=options.cpu)
    finish(report, as_text(report), goals, as_json=options.json, output=options.output)
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        plots.draw(results, options.plots)
    return 1 if interrupted or any(check["right"] is False for check in bench.checks) else 0


def without_gpu(program: str) -> str:
    """The words of a program that takes a GPU, or --cpu, where there is none."""
    return (
        f"{program}: there is no NVIDIA GPU that JAX can use, only {jax.devices()[0].device_kind}: "
        "run this on a machine that has one, or try the program at tiny sizes with --cpu"
    )


def settings_of(options: Options, bench: Bench, torch_skipped: str | None) -> dict[str, Any]:
    """The settings of a report; `torch_skipped` says why PyTorch's side was not measured."""
    return {
        "parts": options.parts,
        "sides": options.sides,
        "quick": options.quick,
        "cpu": options.cpu,
        "seed": options.seed,
        "rounds": options.rounds,
        "kernel_calls_of_a_loop": bench.kernel_calls,
        "calls_of_a_loop": bench.calls,
        "turn_seconds": bench.turn_seconds,
        "copy_bytes": bench.ceilings.copy_bytes,
        "product_size": bench.ceilings.product_size,
        "work_items": bench.items,
        "dtype": "bfloat16",
        "torch_skipped": torch_skipped,
    }


def prepared(options: Options, worker: Worker | None, say: Say) -> Bench:
    """The settings and tools of a measurement."""
    gpu = current_device()
    shared: dict[str, Any] = {
        "backends": [name for name in BACKENDS if name in options.sides],
        "peers": [name for name in PEERS.values() if name in options.sides],
        "worker": worker,
        "rounds": options.rounds,
        "seed": options.seed,
        "say": say,
    }
    if options.cpu or gpu is None:
        return Bench(
            ceilings=Ceilings(1 << 20, 128, 2),
            kernel_calls=1,
            calls=1,
            turn_seconds=0.0,
            items=8,
            **shared,
        )
    return Bench(
        ceilings=Ceilings(2 << 30, 8192, 8),
        kernel_calls=64,
        calls=8,
        turn_seconds=0.03,
        items=gpu.multiprocessors,
        **shared,
    )


def measure(options: Options, bench: Bench, results: dict[str, Any]) -> None:
    """Measures all parts of the options; `results` grows, and so do the bench's checks."""
    scale = TINY if options.cpu else QUICK if options.quick else FULL
    # Without a GPU few backends can do anything, so the reference takes the place of one more.
    first = (
        dataclasses.replace(bench, backends=(*bench.backends, "reference"))
        if options.cpu
        else bench
    )
    if "correctness" in options.parts:
        parts.measure_correctness(first, scale)
    if "private" in options.parts:
        for group in scale.private_groups:
            results.setdefault("private", []).append(parts.measure_private(first, scale, group))
    if "shared" in options.parts:
        results["shared"] = parts.measure_shared(bench, scale)
    if "workers" in options.parts:
        results["workers"] = parts.measure_workers(bench, scale)
    for part, measure_one, sizes in (
        ("contexts", parts.measure_contexts, scale.contexts),
        ("prefixes", parts.measure_prefixes, [(rows,) for rows in scale.prefix_rows]),
        ("prefill", parts.measure_prefill, [(tokens,) for tokens in scale.prefills]),
    ):
        for size in sizes if part in options.parts else ():
            results.setdefault(part, []).append(measure_one(bench, scale, *size))
    if "plan" in options.parts:
        results["plan"] = parts.measure_plan(bench, scale)
    if "step" in options.parts:
        # Compiling a whole model takes long, and backends that gave a wrong answer need not be.
        wrong = {check["backend"] for check in bench.checks if check["right"] is False}
        able = [b for b in bench.backends if b not in wrong]
        if options.quick and (right := [c["backend"] for c in bench.checks if c["right"]]):
            able = [next(b for b in able if b in right)] if any(b in right for b in able) else able
        best = dataclasses.replace(bench, backends=able)
        for batch in scale.batches:
            results.setdefault("step", []).append(parts.measure_step(best, scale, batch))


def device() -> dict[str, Any]:
    """The device that everything runs on."""
    first, gpu = jax.devices()[0], current_device()
    memory = (first.memory_stats() or {}).get("bytes_limit")
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "multiprocessors": gpu and gpu.multiprocessors,
        "usable_memory_gib": memory and round(memory / 2**30, 1),
    }


def plugins() -> dict[str, str]:
    """The version of JAX's plugin for GPUs."""
    found = {}
    for name in _PLUGINS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    settings, results, gpu = report["settings"], report["results"], report["machine"]["device"]
    lines = [
        f"{gpu['kind']}, jax {report['versions']['jaxshare']['jax']}, bfloat16, seed "
        f"{settings['seed']}; medians of {settings['rounds']} rounds"
    ]
    if settings["cpu"]:
        lines.append("tiny sizes on a CPU: these times say nothing about any device")
    points = [
        *results.get("private", []),
        *([results["shared"]] if "shared" in results else []),
        *([results["workers"]] if "workers" in results else []),
        *(point for part in ("contexts", "prefixes", "prefill") for point in results.get(part, [])),
    ]
    if points:
        copy, product = points[0]["copy_gigabytes_per_second"], points[0]["product_teraflops"]
        lines.append(f"ceilings: {copy:.3g} GB/s of copies, {product:.3g} TFLOP/s of products")
    texts = ["\n".join(lines), _correctness_text(results["correctness"]), *map(_point_text, points)]
    if "plan" in results:
        rows = [
            (name, *(f"{side['microseconds']:.1f}" for side in sides.values()))
            for name, sides in results["plan"].items()
        ]
        texts.append(table(("plan, microseconds", *next(iter(results["plan"].values()))), rows))
    for step in results.get("step", []):
        rows = [
            (
                name,
                f"{side['milliseconds']:.3f}",
                f"{side['tokens_per_second']:.0f}",
                f"{side['of_limit']:.2f}",
            )
            for name, side in step["sides"].items()
        ]
        what = f"step, batch {step['batch']}, limit {step['limit_milliseconds']:.3f} ms"
        texts.append(
            table((what, "ms", "tokens/s", "of the limit"), rows) + _skipped_text(step["skipped"])
        )
    if settings["torch_skipped"]:
        texts.append(f"PyTorch's side was not measured: {settings['torch_skipped']}")
    return "\n\n".join(text for text in texts if text)


def _correctness_text(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for backend in dict.fromkeys(check["backend"] for check in checks):
        mine = [check for check in checks if check["backend"] == backend]
        errors = [
            check["error"] / check["tolerance"] for check in mine if check["error"] is not None
        ]
        said = sorted({check["reason"] for check in mine if "reason" in check})
        rows.append(
            (
                backend,
                str(sum(check["right"] is True for check in mine)),
                str(sum(check["right"] is False for check in mine)),
                str(sum(check["right"] is None for check in mine)),
                f"{max(errors):.2f}" if errors else "-",
                said[0] if said else "",
            )
        )
    return (
        table(
            (
                "correctness, passes",
                "right",
                "wrong",
                "refused",
                "worst, of what is allowed",
                "why not",
            ),
            rows,
        )
        if rows
        else ""
    )


def _point_text(point: Mapping[str, Any]) -> str:
    ratio = {}
    for name, of in point.get("times_faster_than_unshared", {}).items():
        ratio[name] = f"{of['median']:.2f} times faster than unshared"
    for backend, of in point.get("to_one_row", {}).items():
        ratio |= {
            f"{backend}, {parts.rows_name(int(n))}": f"{r['median']:.3f} times one row, not rotated"
            for n, r in of.items()
        }
    rows = [
        (
            name,
            f"{s['microseconds']:.1f}",
            f"{s['gigabytes_per_second']:.0f}",
            f"{s['of_copy']:.2f}",
            f"{s['teraflops']:.1f}",
            f"{s['of_products']:.2f}",
            ratio.get(name, "" if s["scaled"] == 1 else f"times taken {s['scaled']:.3g}-fold"),
        )
        for name, s in point["sides"].items()
    ]
    header = (
        f"{point['case']}, K {point['kv_heads']}, G {point['group']}",
        "us",
        "GB/s",
        "of copy",
        "TFLOP/s",
        "of products",
        "",
    )
    return table(header, rows) + _skipped_text(point["skipped"])


def _skipped_text(skipped: Mapping[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, why in skipped.items():
        names.setdefault(why, []).append(name)
    return "".join(f"\n  not measured: {'; '.join(same)}: {why}" for why, same in names.items())


if __name__ == "__main__":
    sys.exit(main())
