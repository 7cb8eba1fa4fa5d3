"""All that is measured on a machine with a GPU, in one command and by what exists: `make gpu`.

    python -m scripts.gpu.run_all                       # the important half first, each part within its time
    python -m scripts.gpu.run_all --minutes 9           # what can be begun and ended within nine minutes
    python -m scripts.gpu.run_all --parts texts,step    # some parts
    python -m scripts.gpu.run_all --rehearse            # the same at tiny sizes on a CPU

Each part is a program of its own, which is ended when its time is over; benchmarks of attention write
what they have by then. Results are written as soon
as there are some, to OUTPUT/PART.json, with what became of each part in OUTPUT/state.json. The same
command goes on where an earlier one ended: parts that are done with this commit are not run again.
In the end all is in OUTPUT/gpu.json; where that is of a GPU, also in benchmarks/results, from which
`scripts.docs.tables` writes its table. Ends with code 1 where a part has failed or was late.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.lib import ROOT, Parser, machine, paths, table
from scripts.gpu.results import current_commit

RESULT = "gpu"
"""The name of the result of all parts, without its ending."""
SLOWER = 8
"""Times a part's limit that it may take where it is rehearsed, on a CPU that does other things too."""
GRACE = 5
"""Seconds that a part has after its limit to write what it has measured."""
_ATTENTION = "scripts.bench.attention"
DONE, FAILED, LATE = "done", "failed", "late"


@dataclasses.dataclass(frozen=True)
class Part:
    """One program.

    Attributes:
      name: in results and options.
      module, options: what is run, with `--output FILE` added; without a module, pytest.
      tiny: the options in their place where it is rehearsed.
      seconds: its limit.
      environment: further variables, on a GPU.
    """

    name: str
    module: str
    options: str
    tiny: str
    seconds: int
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def command(self, output: Path, *, rehearsed: bool, sides: str | None = None) -> list[str]:
        options = (self.tiny if rehearsed else self.options).split()
        result = [] if self.module == "pytest" else ["--output", str(output)]
        asked = ["--sides", sides] if sides and self.module == _ATTENTION else []
        return [sys.executable, "-m", self.module, *options, *asked, *result]


def _attention(name: str, parts: str, seconds: int, options: str = "--without-torch") -> Part:
    """Some parts of the benchmark of attention."""
    tiny = f"--cpu --without-torch --parts {parts}"
    return Part(name, _ATTENTION, f"--quick --parts {parts} {options}", tiny, seconds)


_WORKERS = "--quick --histories 64 --workers 1,2 --steps 1 --rounds 1"
_TESTS = "-q -m gpu -n 8 tests/core/pallas"
_SHARED = {
    "JAX_PLATFORMS": "cuda,cpu",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # Of the references' products: to compile them takes longer than all else.
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}
"""The environment of several processes on one GPU that compile much and run it once."""
_BEST = "--without-torch --sides mosaic_gpu,triton,jax-cudnn"
FIRST = (
    _attention("correctness", "correctness", 80),
    Part("texts", "scripts.gpu.texts", "", "--devices cpu,cpu", 90),
    Part("sampling", "scripts.bench.sampling", "--quick", "--quick --rows 2 --vocab 500", 40),
    _attention("contexts", "contexts", 65, _BEST),
    _attention("prefill", "prefill", 65, _BEST),
    _attention("prefixes", "prefixes", 65, _BEST),
    _attention("step", "step", 90, _BEST),
)
"""The most important half: all limits and graces together are at most nine minutes."""
SECOND = (
    Part("tests", "pytest", _TESTS, f"{_TESTS}/test_gpu.py -k preferred", 600, _SHARED),
    Part(
        "kernels",
        "scripts.gpu.kernel_times",
        "--compare-overlap",
        "--compare-overlap --cpu --cases short,prompts",
        150,
    ),
    _attention("workers-attention", "workers", 60),
    _attention("shared", "private,shared,plan", 180),
    Part("workers", "scripts.bench.workers", "--histories 1024,4096,16384", _WORKERS, 300),
    Part("engine", "scripts.bench.engine", "", "--quick --rows 2 --rounds 1", 600),
    _attention("others", "private,contexts,prefill", 300, ""),
)
"""The rest; in `others` all sides take part, PyTorch too where a Python has it."""
PARTS = (*FIRST, *SECOND)


@dataclasses.dataclass(frozen=True)
class Options:
    """`minutes` is None for no limit of all together."""

    parts: tuple[str, ...]
    sides: str | None
    minutes: float | None
    output: Path
    rehearsed: bool
    again: bool


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(
        prog="scripts.gpu.run_all",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--parts", default=",".join(names), metavar="P,P", help="what to run (default %(default)s)"
    )
    parser.add_argument(
        "--sides",
        metavar="S,S",
        help=f"of attention, as {_ATTENTION} takes them, in place of each part's own",
    )
    parser.add_argument(
        "--minutes", type=float, help="of all together; the rest is left for another run"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="for results (default build/gpu)"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes on the CPU, to try everything"
    )
    parser.add_argument("--again", action="store_true", help="run parts that are done, too")
    given = parser.parse_args(arguments)
    if given.minutes is not None and not given.minutes > 0:
        parser.error(f"--minutes is {given.minutes}, but it must be more than 0")
    folder = ROOT / "build" / ("gpu-rehearsal" if given.rehearse else "gpu")
    output = folder if given.output is None else given.output
    parser.check_folder("--output", output)
    asked = parser.some_of("--parts", given.parts, names)
    return Options(asked, given.sides, given.minutes, output.resolve(), given.rehearse, given.again)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not options.rehearsed and (why := without_gpu()):
        print(f"scripts.gpu.run_all: {why}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    state = State(options.output / "state.json")
    run_parts(options, state)
    report = collected(options, state)
    write(options.output / f"{RESULT}.json", report)
    if options.rehearsed:
        from scripts.docs import tables

        tables.gpu(options.output)  # what would be written
    elif any(state.is_done(part.name) for part in PARTS):
        from scripts.docs import tables

        write(tables.RESULTS / f"{RESULT}.json", report)
        tables.main()
    print(as_text(state))
    return 1 if any(state.status(name) in (FAILED, LATE) for name in options.parts) else 0


def without_gpu() -> str | None:
    """The reason why JAX has no NVIDIA GPU here, or None; a process of its own asks, since one that
    has a GPU keeps its memory."""
    ask = "import jax; print(jax.default_backend())"
    done = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=False, cwd=ROOT
    )
    backend = done.stdout.strip()
    if done.returncode == 0 and backend == "gpu":
        return None
    return (
        f"JAX has no NVIDIA GPU here, only {backend or 'an error'}: run this on a machine that has "
        "one, or try it at tiny sizes with --rehearse"
    )


class State:
    """The fate of each part, in a file that is written after each."""

    def __init__(self, file: Path):
        self._file, self._commit = file, current_commit()
        self.parts: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            self.parts = json.loads(file.read_text(encoding="utf-8"))

    def is_done(self, name: str) -> bool:
        """True if this part has been done with this commit."""
        found = self.parts.get(name, {})
        return found.get("status") == DONE and found.get("commit") == self._commit

    def status(self, name: str) -> str | None:
        return self.parts.get(name, {}).get("status")

    def add(self, name: str, found: Mapping[str, Any]) -> None:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        self.parts[name] = {**found, "commit": self._commit, "date": today}
        write(self._file, self.parts)


def run_parts(options: Options, state: State, clock: Callable[[], float] = time.monotonic) -> None:
    """Runs the parts that are asked for and not done, as long as there is time."""
    start = clock()
    for part in PARTS:
        if part.name not in options.parts or (state.is_done(part.name) and not options.again):
            continue
        limit = float(part.seconds * (SLOWER if options.rehearsed else 1))
        if options.minutes is not None:
            limit = min(limit, options.minutes * 60 - (clock() - start))
        if limit <= 0:
            continue
        print(f"{part.name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
        state.add(part.name, run_part(part, options, limit))
        print(f"{part.name}: {state.status(part.name)}", file=sys.stderr, flush=True)


def run_part(part: Part, options: Options, limit: float) -> dict[str, Any]:
    """Runs one program within its limit, and says what became of it."""
    result = options.output / f"{part.name}.json"
    result.unlink(missing_ok=True)
    command = part.command(result, rehearsed=options.rehearsed, sides=options.sides)
    environment = {**os.environ, **({} if options.rehearsed else part.environment)}
    if options.rehearsed:
        environment["JAX_PLATFORMS"] = "cpu"
    start = time.monotonic()
    log = options.output / f"{part.name}.log"
    with log.open("w", encoding="utf-8") as said:
        # A session of its own, so that whatever the part has started ends with it.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)  # it may write what it has
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    has = "with" if result.exists() else "without"
    late = f"it was ended after {limit:.0f} s, {has} results of what it had measured"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return {
        "status": LATE if code is None else DONE if code == 0 else FAILED,
        "seconds": round(time.monotonic() - start, 1),
        "limit": round(limit),
        "said": late if code is None else "\n".join(lines[-5:])[-1000:] if code else "",
    }


def collected(options: Options, state: State) -> dict[str, Any]:
    """The results of all parts that have any, and their goals."""
    results = {}
    for part in PARTS:
        file = options.output / f"{part.name}.json"
        if part.name in state.parts and file.exists():
            results[part.name] = json.loads(file.read_text(encoding="utf-8"))
    goals = {}
    for name, result in results.items():
        for goal in result.get("goals", []):
            if goal["measured"] is not None:
                goals[f"{name}: {goal['name']}"] = {**goal, "name": f"{name}: {goal['name']}"}
    command = "make gpu" + (" GPU_ARGS=--rehearse" if options.rehearsed else "")
    devices = [r["machine"]["device"] for r in results.values() if "device" in r["machine"]]
    return {
        "benchmark": RESULT,
        "command": command,
        "machine": machine() | {"device": devices[0] if devices else None},
        "state": state.parts,
        "results": results,
        "goals": [*goals.values()],
    }


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON, whole or not at all."""
    with paths.whole_file(file) as stream:
        stream.write(json.dumps(content, indent=2) + "\n")


def as_text(state: State) -> str:
    """The fate of the parts."""
    rows = []
    for part in PARTS:
        found = state.parts.get(part.name)
        said = found["said"].splitlines() if found else []
        seconds = f"{found['seconds']:.0f}" if found else ""
        status = found["status"] if found else "not run"
        rows.append((part.name, status, seconds, said[-1][:100] if said else ""))
    return table(("part", "", "seconds", "it said"), rows)


if __name__ == "__main__":
    sys.exit(main())
