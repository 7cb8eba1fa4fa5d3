"""The kernels of decode programs on this CPU, compiled and run, by their purpose: with kernels of our
own, and as XLA compiles everything.

    python -m scripts.bench.kernels                               # both models
    python -m scripts.bench.kernels --quick                       # the embedded model
    python -m scripts.bench.kernels --json --output FILE          # one JSON object

Kernels are the instructions of the optimised program that do something: fusions, custom calls,
products, copies, sorts, loops. What runs is read from a profile of 16 passes, in which XLA names the
instruction of each thunk. Programs are compiled anew, by turns. How to read the result is in
benchmarks/README.md.
"""

import collections
import glob
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxshare import decode
from jaxshare.models import Decoder, LoadedModel, load
from scripts.bench.lib import (
    Goal,
    Parser,
    finish,
    machine,
    own_command,
    progress,
    table,
    versions,
    write_checkpoint,
)
from scripts.bench.parts.decode.sides import MODEL, Run

AFTER, BEFORE = "jaxshare", "XLA alone"
SIDES = {AFTER: None, BEFORE: ("xla",)}
"""The backends of each side."""
PASSES, ROWS, PROMPT = 16, 4, 16
LAYER_GOAL, COMPILE_GOAL = 60, 0.5
EMBEDDED, LLAMA = "embedded model, float32", "Llama of 125 M parameters, bfloat16"
_OUTSIDE, _LAYERS = "outside of layers", "in layers: "

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (?:\([^=]*\)|\S+) ([a-z][\w-]*)\(")
_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="jaxshare\.(\w+)')
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_FUSED = re.compile(r"(?:calls|to_apply)=%([\w.-]+)")
_NO_KERNELS = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id")
)


def purposes(text: str) -> dict[str, str]:
    """Returns the purpose of each kernel of an optimised program, by the name of its instruction.

    Args:
      text: the program as XLA prints it.
    """
    inside = {*_FUSED.findall(text)}
    found, computation = {}, ""
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            computation = begins[1]
        instruction = _INSTRUCTION.match(line)
        if instruction and computation not in inside and instruction[2] not in _NO_KERNELS:
            found[instruction[1]] = _purpose(line, instruction[2])
    return found


def _purpose(line: str, opcode: str) -> str:
    """Returns the purpose of the kernel in a line of a program."""
    name = _NAME.search(line)
    scope = name[1] if name else ""
    target = _TARGET.search(line)
    if "run_layer" not in scope:
        return _OUTSIDE
    if target:
        return _LAYERS + {"products": "projections", "norm": "norms"}.get(target[1], target[1])
    if opcode in ("copy", "bitcast-convert"):
        return _LAYERS + "copies"
    place = re.search(r"/Layer/([\w/]*)", scope)
    if place is None:
        return _LAYERS + "others"
    if "norm" in place[1]:
        return _LAYERS + "norms"
    if re.search(r"/(q|k|v|o|gate|up|down)/", scope):
        return _LAYERS + "projections"
    return _LAYERS + ("attention and append" if "attention" in place[1] else "mlp and residuals")


def executed(run: Run, kernels: Mapping[str, str]) -> dict[str, float]:
    """Counts the thunks that a pass runs, by their purpose, in a profile of PASSES passes."""
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run.step()
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        for plane in jax.profiler.ProfileData.from_file(file).planes:
            for line in plane.lines:
                for event in line.events:
                    with warnings.catch_warnings():  # of JAX's own type
                        warnings.simplefilter("ignore", DeprecationWarning)
                        name = dict(event.stats).get("hlo_op")
                    if name is not None:
                        counts[kernels.get(str(name).removesuffix(".clone"), _OUTSIDE)] += 1
    return {purpose: count / PASSES for purpose, count in counts.items()}


class Side:
    """A decode program of ROWS rows with some backends, compiled anew each time.

    Args:
      model: that the program runs.
      backends: of its module.
      turns: how often it is compiled, and how often timed.
    """

    def __init__(self, model: LoadedModel, backends: tuple[str, ...] | None, turns: int):
        self.model, self.turns = model, turns
        self.module = Decoder(model.config, implementation=backends)
        self.lower_seconds: list[float] = []
        self.compile_seconds: list[float] = []
        budget = PASSES * (turns + 4)
        prompts, rows = np.full((ROWS, PROMPT), 5, np.int32), [[row] for row in range(ROWS)]
        self.run = Run(model, prompts, rows, [PROMPT + budget] * ROWS, PASSES, budget)
        self.run.compile_forward()
        self.run.prefill()

    def compile(self) -> None:
        """Compiles the program once more."""
        loop = jax.jit(lambda params, state: decode(self.module, params, state, passes=PASSES))
        begin = time.perf_counter()
        lowered = loop.lower(self.run.params, self.run.state)
        between = time.perf_counter()
        self.run.loop = lowered.compile()
        self.lower_seconds.append(between - begin)
        self.compile_seconds.append(time.perf_counter() - between)

    def found(self) -> dict[str, Any]:
        """Describes what was compiled, and what a pass runs and takes."""
        kernels = purposes(self.run.loop.as_text())
        self.run.step()
        ran = executed(self.run, kernels)
        layers = self.model.config.num_layers
        return {
            "kernels": dict(collections.Counter(kernels.values())),
            "ran_a_pass": ran,
            "ran_a_layer": sum(n for name, n in ran.items() if name != _OUTSIDE) / layers,
            "lower_seconds": self.lower_seconds,
            "compile_seconds": self.compile_seconds,
            "temporary_bytes": self.run.memory()["step_temp_bytes"],
            "pass_milliseconds": min(self.run.step() for _ in range(self.turns)) / PASSES * 1e3,
        }


def measure(model: LoadedModel, turns: int) -> dict[str, Any]:
    """Both sides of a model, compiled in turn."""
    sides = {name: Side(model, backends, turns) for name, backends in SIDES.items()}
    for turn in range(turns):
        for side in [*sides.values()][:: 1 if turn % 2 else -1]:
            side.compile()
    return {name: side.found() for name, side in sides.items()}


def goals(results: Mapping[str, Any]) -> list[Goal]:
    """The goals that these results can be held against."""
    found = []
    for name, sides in results.items():
        after, before = (
            statistics.median(sides[side]["compile_seconds"]) for side in (AFTER, BEFORE)
        )
        layer = sides[AFTER]["ran_a_layer"]
        found.append(Goal(f"kernels run a layer, {name}", layer, LAYER_GOAL, at_most=True))
        found.append(
            Goal(f"compile time to before, {name}", after / before, COMPILE_GOAL, at_most=True)
        )
    return found


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    where = report["machine"]
    lines = [
        f"decode programs of {ROWS} rows; {where['cpu']}, {where['cores']} cores, load "
        f"{where['load_average']} at the start; jax {report['versions']['jax']}"
    ]
    for name, sides in report["results"].items():
        purposes_ = sorted({p for side in sides.values() for p in side["kernels"]})
        rows = []
        for purpose in purposes_:
            cells = [side["kernels"].get(purpose, 0) for side in sides.values()]
            ran = [side["ran_a_pass"].get(purpose, 0.0) for side in sides.values()]
            rows.append((purpose, *map(str, cells), *(f"{n:.0f}" for n in ran)))
        total = [str(sum(side["kernels"].values())) for side in sides.values()]
        ran = [f"{sum(side['ran_a_pass'].values()):.0f}" for side in sides.values()]
        rows.append(("all", *total, *ran))
        header = ["kernels", *(f"{side}" for side in sides), *(f"a pass, {side}" for side in sides)]
        lines += ["", name, table(header, rows), ""]
        for side, found in sides.items():
            lowered, compiled = (
                statistics.median(found[f"{what}_seconds"]) for what in ("lower", "compile")
            )
            lines.append(
                f"{side}: traced in {lowered:.2f} s, compiled in {compiled:.2f} s, "
                f"{found['temporary_bytes'] / 1024:.0f} KiB of temporaries, "
                f"{found['pass_milliseconds']:.2f} ms a pass, {found['ran_a_layer']:.1f} kernels a "
                "layer"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="scripts.bench.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3, help="compilations of each side")
    parser.add_argument("--quick", action="store_true", help="the embedded model alone")
    parser.reporting()
    given = parser.parse_args(arguments)
    parser.at_least(1, turns=given.turns)
    parser.check_output(given.output)
    asked = own_command(__file__, arguments)
    where, results = machine(), {}
    jax.config.update("jax_enable_compilation_cache", False)
    with tempfile.TemporaryDirectory() as folder, progress(1 if given.quick else 2) as say:
        say(EMBEDDED)
        results[EMBEDDED] = measure(load("embedded"), given.turns)
        if not given.quick:
            say(LLAMA)
            write_checkpoint(Path(folder), MODEL, 0)
            results[LLAMA] = measure(load(folder), given.turns)
    report = {
        "benchmark": "kernels",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "jaxlib", "flax", "llvmlite")),
        "results": results,
    }
    finish(report, as_text(report), goals(results), as_json=given.json, output=given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
