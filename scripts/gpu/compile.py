"""Compiles block attention's GPU kernels and whole decode steps for NVIDIA H200s, one and several,
on a machine that needs no GPU.

    python -m scripts.gpu.compile                          # every head dim, every G, both dtypes, but not each with each
    python -m scripts.gpu.compile --all                    # each with each: about an hour for each backend
    python -m scripts.gpu.compile --backends mosaic_gpu --parts kernels
    python -m scripts.gpu.compile --json --output FILE     # one JSON object

Ends with code 1 where something does not compile, a kernel spills registers or wants more shared
memory than a block can have, a decode step copies the cache, or one on several devices sends more
than it should; with code 2 where the packages that this takes are missing (`make gpu-compile`
installs them). What is NOT checked is what takes a GPU: results and speed. Autotuning is off, so
XLA may choose other products on a device.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from scripts.bench.lib import Goal, Parser, command, finish, machine, table, versions
from scripts.gpu.compiler import (
    Compiler,
    MissingError,
    Program,
    Toolchain,
    collectives,
    computations,
    executed,
    kernel_calls,
    large_results,
    launches,
    opcode,
)

BACKENDS = ("mosaic_gpu", "triton", "xla")
"""XLA's kernels are its own affair, so its backend is looked at in decode steps alone."""
PARTS = ("kernels", "steps", "devices", "plan")
SHARED_BYTES = 232_448
"""The most shared memory that a block of an H200 can have (CUDA C Programming Guide, compute
capability 9.0: 227 KB)."""
LARGE = 4
"""A decode step is to write no array as large as a LARGE-th of one layer's keys, but for the
updates in place, and to send none."""
OF_A_LAYER = 2
"""All-reduces of a layer: over `tensor` the sums behind attention and MLP, over `kv` the largest
log-sum-exp and what is merged by it."""
OF_A_PASS = {"all-reduce over tensor": 5, "all-gather over tensor": 2}
"""The most collectives of a pass outside of its layers: the embedding's sum and whether logits are
finite; for sampling the largest logit, its place, the logits where top-k or top-p need them in
order, the weights of all chunks and those of the chunk drawn from."""
OF_MOVES = {"all-reduce over kv": 2}
"""And where steps move, in two loops: what a step has overflowed by, and a step that has ended, a
tile of all layers at a time."""
OF_OURS = 2
"""Kernels of a GPU backend in a layer: attention and merging."""


@dataclasses.dataclass(frozen=True)
class Options:
    backends: tuple[str, ...]
    parts: tuple[str, ...]
    whole: bool
    json: bool
    output: Path | None


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(
        prog="scripts.gpu.compile",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--all", action="store_true", help="every head dim with every G, dtype and kind of pass"
    )
    parser.add_argument(
        "--backends",
        default=",".join(BACKENDS),
        metavar="B,B",
        help="of block attention (default %(default)s)",
    )
    parser.add_argument(
        "--parts",
        default=",".join(PARTS),
        metavar="P,P",
        help="what to compile (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the JSON object to this file too"
    )
    given = parser.parse_args(arguments)
    lists = {}
    for name, known in (("backends", BACKENDS), ("parts", PARTS)):
        lists[name] = tuple(dict.fromkeys(getattr(given, name).split(",")))
        if wrong := [word for word in lists[name] if word not in known]:
            parser.error(f"--{name} has {wrong[0]!r}, but there are {', '.join(known)}")
    parser.check_output(given.output)
    return Options(**lists, whole=given.all, json=given.json, output=given.output)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        toolchain = Toolchain.find()
    except MissingError as error:
        print(f"scripts.gpu.compile: {error}", file=sys.stderr)
        return 2
    asked = command(
        [str(Path(__file__).resolve()), *(sys.argv[1:] if arguments is None else arguments)]
    )
    with tempfile.TemporaryDirectory(prefix="gpu_compile_") as folder:
        toolchain.prepare(Path(folder))
        compiler = Compiler(toolchain, Path(folder))
        results = compile_all(compiler, options)
    goals = all_goals(results)
    report = {
        "check": "gpu-compile",
        "command": asked,
        "target": compiler.device,
        "machine": machine(),
        "versions": {
            **versions(("jax", "jaxlib", "flax", "numpy")),
            **toolchain.packages,
            "ptxas": toolchain.release,
        },
        **results,
        "ok": all(goal.met is not False for goal in goals),
    }
    finish(report, as_text(report), goals, as_json=options.json, output=options.output)
    return 0 if report["ok"] else 1


Task = tuple[dict[str, Any], Callable[[], dict[str, Any]]]
"""(what is compiled, what compiles it and finds its numbers)."""


def compile_all(compiler: Compiler, options: Options) -> dict[str, list[dict[str, Any]]]:
    """The results of each part that was asked for; what does not compile has an `error` in place of
    its numbers."""
    # These import JAX, which has to wait until the environment is set.
    from jaxshare.pallas.device import H200, assume_device
    from scripts.gpu import programs

    tasks_of = dict(zip(PARTS, (kernel_tasks, step_tasks, device_tasks, plan_tasks), strict=True))
    tasks = [
        (part, *task)
        for part in PARTS
        if part in options.parts
        for task in tasks_of[part](compiler, options, programs)
    ]
    results: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS if part in options.parts}
    with assume_device(H200), tqdm(tasks, leave=False, file=sys.stderr) as bar:
        for part, about, task in bar:
            bar.set_description_str(f"{about.get('backend', 'plan')}: {about['name']}")
            begin = time.perf_counter()
            try:
                found = {"error": None, **task()}
            except Exception as error:  # whatever a compiler says, and however: the other programs are still worth compiling
                found = {"error": f"{type(error).__name__}: {error}"[:2000]}
            results[part].append(
                {**about, "seconds": round(time.perf_counter() - begin, 2), **found}
            )
    return results


def kernel_tasks(compiler: Compiler, options: Options, programs: Any) -> Iterator[Task]:
    """Block attention alone; of some shapes also with the tokens spread over devices."""
    mesh = mesh_of(compiler, programs.SPREAD_TOKENS)
    for backend in options.backends:
        if backend == "xla":
            continue
        for case in programs.whole_grid() if options.whole else programs.QUICK:
            yield (
                {"backend": backend, "case": case._asdict(), "name": str(case)},
                lambda backend=backend, case=case: kernels_of(
                    compiler, *programs.attention(case, backend)
                ),
            )
        for case in programs.QUICK_SPREAD:
            yield (
                {
                    "backend": backend,
                    "case": case._asdict(),
                    "name": f"{case}, {programs.SPREAD_TOKENS}",
                },
                lambda backend=backend, case=case: kernels_of(
                    compiler, *programs.spread_attention(case, backend, mesh), mesh=mesh
                ),
            )


def step_tasks(compiler: Compiler, options: Options, programs: Any) -> Iterator[Task]:
    """Decode steps on one device."""
    for backend, step in itertools.product(
        options.backends, programs.ALL_STEPS if options.whole else programs.QUICK_STEPS
    ):
        yield (
            {"backend": backend, "name": step.name, "rows": step.rows, "width": step.width},
            lambda backend=backend, step=step: step_numbers(
                *compiled_step(compiler, programs.decoding(step, backend))
            ),
        )


def device_tasks(compiler: Compiler, options: Options, programs: Any) -> Iterator[Task]:
    """Decode steps on several devices. Workers' steps move, so that theirs is the one that sends
    most."""
    steps = (
        programs.QUICK_STEPS
        if options.whole
        else [step for step in programs.QUICK_STEPS if step.moves]
    )
    for backend, spread, step in itertools.product(options.backends, programs.SPREADS, steps):
        mesh = mesh_of(compiler, spread)
        yield (
            {
                "backend": backend,
                "name": f"{step.name}, {spread}",
                "rows": step.rows,
                "axes": spread.axes,
                "moves": step.moves,
            },
            lambda backend=backend, step=step, mesh=mesh: device_numbers(
                *compiled_step(compiler, programs.decoding(step, backend, mesh=mesh))
            ),
        )


def plan_tasks(compiler: Compiler, _: Options, programs: Any) -> Iterator[Task]:
    """The plan of a pass alone."""
    alones = {"plan": programs.plan_alone, "plan and work": programs.work_alone}
    for step, (what, alone) in itertools.product(programs.QUICK_STEPS, alones.items()):
        yield (
            {"name": step.name, "what": what, "rows": step.rows},
            lambda step=step, alone=alone: plan_numbers(compiler, *alone(step)),
        )


def mesh_of(compiler: Compiler, spread: Any) -> Any:
    return spread.mesh(compiler.devices(spread.tensor * spread.kv))


def kernels_of(
    compiler: Compiler, function: Callable[..., Any], arguments: tuple[Any, ...], mesh: Any = None
) -> dict[str, Any]:
    kernels = compiler.compile(function, *arguments, mesh=mesh).kernels
    if not kernels:
        raise ValueError("the program holds no kernel that the backend has written")
    return {"kernels": [dataclasses.asdict(kernel) for kernel in kernels]}


def compiled_step(compiler: Compiler, decoding: Any) -> tuple[Program, Any]:
    """A decode step's program, and the step."""
    return compiler.compile(
        decoding.function, *decoding.arguments, mesh=decoding.mesh, donate_argnums=(1,)
    ), decoding


def step_numbers(program: Program, decoding: Any) -> dict[str, Any]:
    """What a decode step does to the cache, and how many launches a pass is; bytes, of each
    device."""
    return {
        "whole_cache": dict(large_results(program.text, decoding.arena_elements // LARGE)),
        "temp_bytes": program.temp_bytes,
        "layer_bytes": decoding.layer_bytes,
        "aliased_bytes": program.alias_bytes,
        "cache_bytes": decoding.cache_bytes,
        "launches": pass_launches(program.text, decoding.layers),
        "spill_bytes": sum(kernel.spill_bytes for kernel in program.kernels),
    }


def device_numbers(program: Program, decoding: Any) -> dict[str, Any]:
    """What a decode step on several devices does besides: what they send each other in a pass, and
    kernels of ours a layer."""
    turn = turn_of_layers(program.text, decoding.layers)
    sent = collectives(executed(computations(program.text)))
    of_layers = Counter(
        str(one) for one in collectives(turn) if of_layer(one.line, decoding.layers)
    )
    return {
        **step_numbers(program, decoding),
        "sent": {
            "layer": {kind: number / decoding.layers for kind, number in of_layers.items()},
            "outside": dict(Counter(str(one) for one in collectives(turn)) - of_layers),
            "largest_of_layers_keys": max((one.elements for one in sent), default=0)
            / decoding.arena_elements,
        },
        "kernel_calls": sum(of_layer(line, decoding.layers) for line in kernel_calls(turn))
        / decoding.layers,
        "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
    }


def plan_numbers(
    compiler: Compiler, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> dict[str, Any]:
    program = compiler.compile(function, *arguments)
    lines = list(executed(computations(program.text)))
    return {
        "launches": len(launches(lines)),
        "loops": sum(opcode(line) == "while" for line in lines),
    }


def pass_launches(text: str, layers: int) -> dict[str, int | float]:
    """Launches of a turn, those of loops inside it counted once: of one layer, the middle one, and
    of all that belongs to no layer, the plan's among them. What layers share is laid to the first
    of them, and so counts as outside."""
    turn = turn_of_layers(text, layers)
    counts = [sum(f"layers_{i}/" in line for line in launches(turn)) for i in range(layers)]
    layer = statistics.median(counts[1:] or counts)
    return {
        "layer": layer,
        "outside": len(launches(turn)) - layer * layers,
        "loops": sum(opcode(line) == "while" for line in turn),
    }


def turn_of_layers(text: str, layers: int) -> list[str]:
    """The instructions of one turn of the loop that holds the layers."""
    found = computations(text)
    loops = (
        body
        for line in found["ENTRY"]
        if opcode(line) == "while"
        for body in [line.partition("body=%")[2].split(",")[0].strip()]
    )
    turns = [list(executed(found, body)) for body in loops]
    return max(turns, key=lambda turn: sum(of_layer(line, layers) for line in launches(turn)))


def of_layer(line: str, layers: int) -> bool:
    """Whether an instruction belongs to a layer."""
    return any(f"layers_{i}/" in line for i in range(layers))


def all_goals(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Goal]:
    """What these results are held against. What did not compile has no numbers of its own."""
    goals = []
    kernels, steps, devices = (results.get(part, []) for part in ("kernels", "steps", "devices"))
    for backend in dict.fromkeys(program["backend"] for program in (*kernels, *steps, *devices)):
        failed = sum(
            program["error"] is not None
            for program in (*kernels, *steps, *devices)
            if program["backend"] == backend
        )
        goals.append(Goal(f"{backend}: programs that do not compile", failed, 0, at_most=True))
    for backend in dict.fromkeys(
        program["backend"] for program in (*kernels, *devices) if program["backend"] != "xla"
    ):
        own = [
            kernel
            for program in (*kernels, *devices)
            if program["backend"] == backend
            for kernel in program.get("kernels", [])
        ]
        spilled, shared = (
            max((k["spill_bytes"] for k in own), default=None),
            max(map(shared_bytes, own), default=None),
        )
        goals += [
            Goal(f"{backend}: bytes that a kernel spills, most", spilled, 0, at_most=True),
            Goal(
                f"{backend}: bytes of shared memory of a block, most",
                shared,
                SHARED_BYTES,
                at_most=True,
            ),
        ]
    if plans := results.get("plan"):
        goals.append(
            Goal(
                "plan: programs that do not compile",
                sum(plan["error"] is not None for plan in plans),
                0,
                at_most=True,
            )
        )
    for step in (*steps, *devices):
        if step["error"] is None:
            what = f"{step['backend']}, {step['name']}"
            goals += [
                Goal(
                    f"{what}: copies of the cache",
                    sum(step["whole_cache"].values()),
                    0,
                    at_most=True,
                ),
                Goal(
                    f"{what}: temporary memory, of one layer's cache",
                    step["temp_bytes"] / step["layer_bytes"],
                    1,
                    at_most=True,
                ),
                Goal(
                    f"{what}: updated in place, of the cache",
                    step["aliased_bytes"] / step["cache_bytes"],
                    1,
                ),
                Goal(
                    f"{what}: bytes that kernels of ours spill",
                    step["spill_bytes"],
                    0,
                    at_most=True,
                ),
            ]
    for step in devices:
        if step["error"] is None:
            goals += goals_of_sending(step)
    return goals


def goals_of_sending(step: Mapping[str, Any]) -> list[Goal]:
    """What a decode step on several devices is held against besides."""
    what, sent = f"{step['backend']}, {step['name']}", step["sent"]
    meant = {f"all-reduce over {axis}": OF_A_LAYER for axis in step["axes"]}
    differ = sum(
        abs(sent["layer"].get(kind, 0) - meant.get(kind, 0)) for kind in {*sent["layer"], *meant}
    )
    allowed = {**OF_A_PASS, **(OF_MOVES if step["moves"] and "kv" in step["axes"] else {})}
    more = sum(max(0, number - allowed.get(kind, 0)) for kind, number in sent["outside"].items())
    goals = [
        Goal(
            f"{what}: collectives a layer, more or fewer than {OF_A_LAYER} all-reduces an axis",
            differ,
            0,
            at_most=True,
        ),
        Goal(
            f"{what}: collectives outside of layers, more than sampling and moves take",
            more,
            0,
            at_most=True,
        ),
        Goal(
            f"{what}: largest array sent, of one layer's keys",
            sent["largest_of_layers_keys"],
            1 / LARGE,
            at_most=True,
        ),
    ]
    if step["backend"] != "xla":
        goals.append(Goal(f"{what}: kernels of ours a layer", step["kernel_calls"], OF_OURS))
    return goals


def shared_bytes(kernel: Mapping[str, Any]) -> int:
    return kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"]


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    found = report["versions"]
    lines = [
        f"compiled for {report['target']} with jax {found['jax']}, ptxas {found['ptxas']}; results "
        "and speed take a GPU"
    ]
    tables = {
        "kernels": _kernels_text,
        "steps": _steps_text,
        "devices": _devices_text,
        "plan": _plan_text,
    }
    lines += [text(report[part]) for part, text in tables.items() if report.get(part)]
    if failed := [result for part in tables for result in report.get(part, []) if result["error"]]:
        lines.append(
            "\n".join(
                [
                    "does not compile:",
                    *(f"  {r.get('backend', 'plan')}, {r['name']}: {r['error']}" for r in failed),
                ]
            )
        )
    return "\n\n".join(lines)


def _kernels_text(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{r['backend']}: {r['name']}",
            k["name"],
            str(k["registers"]),
            str(k["spill_bytes"]),
            str(k["static_shared_bytes"]),
            str(k["dynamic_shared_bytes"]),
        )
        for r in results
        for k in r.get("kernels", [])
    ]
    return table(
        ("block attention", "kernel", "registers", "spilled", "static shared", "dynamic"), rows
    )


def _steps_text(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for r in results:
        if r["error"] is None:
            copies = ", ".join(f"{count} {kind}" for kind, count in r["whole_cache"].items())
            rows.append(
                (
                    f"{r['backend']}: {r['name']}",
                    copies or "none",
                    *(
                        f"{r[name] / 2**20:.1f}"
                        for name in ("temp_bytes", "layer_bytes", "aliased_bytes", "cache_bytes")
                    ),
                    *(f"{r['launches'][name]:g}" for name in ("layer", "outside", "loops")),
                )
            )
    return table(
        (
            "decode step",
            "whole-cache writes",
            "temp MiB",
            "a layer's",
            "in place",
            "cache",
            "launches a layer",
            "outside",
            "loops",
        ),
        rows,
    )


def _devices_text(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{r['backend']}: {r['name']}",
            *(
                ", ".join(f"{number:g} {kind}" for kind, number in r["sent"][where].items())
                or "none"
                for where in ("layer", "outside")
            ),
            f"{r['sent']['largest_of_layers_keys']:.1%}",
        )
        for r in results
        if r["error"] is None
    ]
    return "\n\n".join(
        [
            _steps_text(results),
            table(
                ("on devices", "sent a layer", "sent outside", "largest, of a layer's keys"), rows
            ),
        ]
    )


def _plan_text(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (f"{r['name']}: {r['what']}", str(r["launches"]), str(r["loops"]))
        for r in results
        if r["error"] is None
    ]
    return table(("alone", "launches", "loops"), rows)


if __name__ == "__main__":
    sys.exit(main())
