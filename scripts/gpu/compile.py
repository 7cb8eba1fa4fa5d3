"""Compiles block attention's GPU kernels and whole decode steps for NVIDIA H200s, one and several,
and for other GPUs, on a machine that needs no GPU.

    python -m scripts.gpu.compile                          # every head dim, every G, both dtypes, but not each with each
    python -m scripts.gpu.compile --all                    # each with each: about an hour for each backend
    python -m scripts.gpu.compile --backends mosaic_gpu --parts kernels
    python -m scripts.gpu.compile --target b200            # for another GPU: scripts/gpu/targets.py
    python -m scripts.gpu.compile --json --output FILE     # one JSON object

Ends with code 1 where something does not compile, a kernel spills registers or needs more shared
memory than a block can have, a decode step copies the cache, one on several devices sends more than
it should, or one of a published model with experts is not what its configuration predicts (the part
`experts`, scripts/gpu/predicted.py) or one of a quantised model reads or writes more than its packed
weights (the part `quantised`); with code 2 where the packages that this takes are missing (`make gpu-compile`
installs them). What is NOT checked is what takes a GPU: results and speed. Autotuning is off, so
XLA may choose other products on a device.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from scripts.bench.lib import Parser, finish, machine, own_command, versions
from scripts.gpu import cold
from scripts.gpu.compiler import Compiler, MissingError, Program, Toolchain
from scripts.gpu.numbers import device_numbers, plan_numbers, sampling_numbers, step_numbers
from scripts.gpu.report import APPENDS, all_goals, as_text
from scripts.gpu.results import Results
from scripts.gpu.sass import under_products
from scripts.gpu.targets import HOPPER, TARGETS, Target

BACKENDS = ("mosaic_gpu", "triton", "xla")
"""XLA's kernels are its own affair, so its backend is looked at in decode steps alone."""
PARTS = (
    "kernels",
    "steps",
    "devices",
    "prompts",
    "plan",
    "experts",
    "sampling",
    "cold",
    "quantised",
    "codes",
)
ANYWHERE = ("kernels", "steps", "sampling", "codes")
"""The parts for any GPU; the others have predictions and numbers of the H200 in them."""


@dataclasses.dataclass(frozen=True)
class Options:
    target: Target
    backends: tuple[str, ...]
    parts: tuple[str, ...]
    whole: bool
    json: bool
    output: Path | None
    resume: bool


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
        "--target",
        default="h200",
        choices=TARGETS,
        help="the GPU to compile for: %(choices)s (default %(default)s)",
    )
    parser.add_argument(
        "--backends",
        default=",".join(BACKENDS),
        metavar="B,B",
        help="of block attention (default %(default)s)",
    )
    parser.add_argument(
        "--parts",
        metavar="P,P",
        help=f"what to compile (default {','.join(PARTS)}; for others than the H200 "
        f"{','.join(ANYWHERE)})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the JSON object to this file too"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what FILE has: results of this commit are not compiled again, those of others "
        "stay until they are",
    )
    given = parser.parse_args(arguments)
    target, lists = TARGETS[given.target], {}
    parts = PARTS if target is HOPPER else ANYWHERE
    given.parts = given.parts or ",".join(parts)
    for name, known in (("backends", BACKENDS), ("parts", parts)):
        lists[name] = tuple(dict.fromkeys(getattr(given, name).split(",")))
        if wrong := [word for word in lists[name] if word not in known]:
            parser.error(
                f"--{name} has {wrong[0]!r}, but for the {given.target} there are {', '.join(known)}"
            )
    if given.resume and given.output is None:
        parser.error("--resume needs --output FILE, whose results it goes on with")
    parser.check_output(given.output)
    if given.resume and given.output.exists():
        former = json.loads(given.output.read_text(encoding="utf-8")).get("target")
        if former != target.kind:
            parser.error(
                f"--resume cannot go on with {given.output}, whose results are of {former}, for "
                f"{target.kind}; name another file"
            )
    return Options(
        target, **lists, whole=given.all, json=given.json, output=given.output, resume=given.resume
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        toolchain = Toolchain.find()
    except MissingError as error:
        print(f"scripts.gpu.compile: {error}", file=sys.stderr)
        return 2
    asked = own_command(__file__, arguments)
    with tempfile.TemporaryDirectory(prefix="gpu_compile_") as folder:
        toolchain.prepare(Path(folder))
        compiler = Compiler(toolchain, Path(folder), options.target)
        results = Results(PARTS, options.output if options.resume else None)
        try:
            compile_all(compiler, options, results)
        finally:
            # What is done counts, also where this is stopped before the end.
            found = results.all()
            goals = all_goals(found, options.target)
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
                **found,
                "ok": all(goal.met is not False for goal in goals),
            }
            shown = as_text(report)
            finish(report, shown, goals, as_json=options.json, output=options.output)
    return 0 if report["ok"] else 1


Task = tuple[dict[str, Any], Callable[[], dict[str, Any]]]
"""(what is compiled, what compiles it and finds its numbers)."""


def compile_all(compiler: Compiler, options: Options, results: Results) -> None:
    """Adds the results of each part of the options that are not there yet; what does not compile
    has an `error` in place of its numbers."""
    # These import JAX, which has to wait until the environment is set.
    from jaxshare.pallas.device import assume_device
    from scripts.gpu import programs

    all_tasks = (
        kernel_tasks,
        step_tasks,
        device_tasks,
        prompt_tasks,
        plan_tasks,
        expert_tasks,
        sampling_tasks,
        cold_tasks,
        quantised_tasks,
        code_tasks,
    )
    tasks_of = dict(zip(PARTS, all_tasks, strict=True))
    tasks = [
        (part, *task)
        for part in PARTS
        if part in options.parts
        for task in tasks_of[part](compiler, options, programs)
        if not results.is_new(part, task[0])
    ]
    device = compiler.target.device
    with assume_device(device), tqdm(tasks, leave=False, file=sys.stderr) as bar:
        for part, about, task in bar:
            bar.set_description_str(f"{about.get('backend', 'plan')}: {about['name']}")
            begin = time.perf_counter()
            try:
                found = {"error": None, **task()}
            except NotImplementedError as error:
                # The backend says that it does not serve this here, and the next one does.
                why = str(error).removeprefix("no attention backend can do this: ")
                found = {"error": None, "declined": why}
            except Exception as error:  # from any compiler; the other programs still count
                found = {"error": f"{type(error).__name__}: {error}"[:2000]}
            seconds = round(time.perf_counter() - begin, 2)
            results.add(part, {**about, "seconds": seconds, **found})


def kernel_tasks(compiler: Compiler, options: Options, programs: Any) -> Iterator[Task]:
    """Block attention alone; of some shapes also with its appends, and with the tokens spread over
    devices."""
    mesh = mesh_of(compiler, programs.SPREAD_TOKENS)
    for backend in options.backends:
        if backend == "xla":
            continue
        grid = programs.whole_grid() if options.whole else programs.QUICK
        for case in (*grid, *programs.SCORED, *programs.LATENT):
            yield (
                {"backend": backend, "case": case._asdict(), "name": str(case)},
                lambda backend=backend, case=case: kernels_of(
                    compiler, *programs.attention(case, backend)
                ),
            )
        for case in programs.APPENDING if backend == "mosaic_gpu" else ():
            yield (
                {"backend": backend, "case": case._asdict(), "name": f"{case}{APPENDS}"},
                lambda case=case: kernels_of(
                    compiler, *programs.attention(case, "mosaic_gpu", appends=True)
                ),
            )
        for case in (*programs.QUICK_SPREAD, programs.LATENT[0]):
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


def prompt_tasks(compiler: Compiler, options: Options, _: Any) -> Iterator[Task]:
    """Passes over prompts on eight devices."""
    from scripts.gpu import prompts

    yield from described_tasks(compiler, options, prompts, prompts.PROMPTS)


def plan_tasks(compiler: Compiler, _: Options, programs: Any) -> Iterator[Task]:
    """The plan of a pass alone."""
    from scripts.gpu import plans

    alones = {"plan": plans.plan_alone, "plan and work": plans.work_alone}
    for step, (what, alone) in itertools.product(programs.QUICK_STEPS, alones.items()):
        yield (
            {"name": step.name, "what": what, "rows": step.rows},
            lambda step=step, alone=alone: plan_numbers(compiler, *alone(step)),
        )


def expert_tasks(compiler: Compiler, options: Options, _: Any) -> Iterator[Task]:
    """Decode steps of published models with experts on eight devices."""
    from scripts.gpu import expert_steps, moe_models

    yield from described_tasks(compiler, options, expert_steps, moe_models.MODELS)


def described_tasks(
    compiler: Compiler, options: Options, part: Any, programs: Iterable[Any]
) -> Iterator[Task]:
    """The programs of a module that compiles them for a backend, and describes them, itself."""
    if part.BACKEND in options.backends:
        for each in programs:
            yield part.describe(each), lambda each=each: part.compiled(compiler, each)


def sampling_tasks(compiler: Compiler, _: Options, __: Any) -> Iterator[Task]:
    """Samplers alone."""
    from scripts.gpu import samplers

    for name, sampler in samplers.SAMPLERS.items():
        function, arguments = samplers.sampling(sampler)
        yield (
            {"name": name, "rows": samplers.ROWS, "vocab": samplers.VOCAB},
            lambda function=function, arguments=arguments: sampling_numbers(
                compiler.compile(function, *arguments, is_part=True)
            ),
        )


def cold_tasks(_: Compiler, options: Options, __: Any) -> Iterator[Task]:
    """From the start of a program to its first step, with models of real sizes."""
    for backend, name in itertools.product(options.backends, cold.MODELS):
        if backend in cold.TARGETS:
            yield (
                {"backend": backend, "name": name, "width": cold.WIDTH},
                lambda backend=backend, name=name: cold.measured(name, backend),
            )


def quantised_tasks(compiler: Compiler, options: Options, _: Any) -> Iterator[Task]:
    """Products of quantised matrices alone, and decode steps of published models with them."""
    from scripts.gpu import quantised_steps as steps

    kernels = [backend for backend in steps.KERNELS if backend in options.backends]
    for task in itertools.product(kernels, steps.FORMS, steps.ROWS):
        yield (
            steps.describe_product(*task),
            lambda task=task: steps.compiled_product(compiler, *task),
        )
    if steps.BACKEND in options.backends:
        for task in itertools.product(steps.MODELS, steps.FORMS, steps.STEPS):
            yield (steps.describe(*task), lambda task=task: steps.compiled(compiler, *task))


def code_tasks(compiler: Compiler, options: Options, programs: Any) -> Iterator[Task]:
    """Block attention over caches that approximate, alone and in decode steps."""
    for backend in options.backends:
        for case in () if backend == "xla" else programs.CODED:
            yield (
                {"backend": backend, "case": case._asdict(), "name": str(case)},
                lambda backend=backend, case=case: kernels_of(
                    compiler, *programs.attention(case, backend)
                ),
            )
        for step, form in zip(programs.QUICK_STEPS, ("int8", "fp8"), strict=True):
            yield (
                {"backend": backend, "name": f"{step.name}, {form} cache", "rows": step.rows},
                lambda backend=backend, step=step, form=form: step_numbers(
                    *compiled_step(compiler, programs.decoding(step, backend, approximate=form))
                ),
            )


def mesh_of(compiler: Compiler, spread: Any) -> Any:
    return spread.mesh(compiler.devices(spread.tensor * spread.kv))


def kernels_of(
    compiler: Compiler, function: Callable[..., Any], arguments: tuple[Any, ...], mesh: Any = None
) -> dict[str, Any]:
    program = compiler.compile(function, *arguments, mesh=mesh)
    if not program.kernels:
        raise ValueError("the program holds no kernel that the backend has written")
    under = under_products(compiler.ptxas, program.ptx)
    return {
        "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
        "under_products": under and under._asdict(),
    }


def compiled_step(compiler: Compiler, decoding: Any) -> tuple[Program, Any]:
    """A decode step's program, and the step."""
    return compiler.compile(
        decoding.function, *decoding.arguments, mesh=decoding.mesh, donate_argnums=(1,)
    ), decoding


if __name__ == "__main__":
    sys.exit(main())
