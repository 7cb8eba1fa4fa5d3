"""Decode and prefill speed of a Llama of 125 M parameters in bfloat16 against llama.cpp: same
weights, same cores, same run, in turn.

    python -m scripts.bench.llama_cpp                             # the full measurement
    python -m scripts.bench.llama_cpp --quick                     # within three minutes on two cores
    python -m scripts.bench.llama_cpp --json --output FILE        # one JSON object

llama.cpp is built by `make bench WHAT=llama-cpp` for the machine at hand, and runs with flash
attention (without, it is slower everywhere here). Its cache is one buffer or one for each sequence,
whichever is faster. It does not choose tokens while it is timed; jaxshare does. How to read the
result is in benchmarks/README.md.
"""

import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxshare.models import LoadedModel, load
from scripts.bench.lib import (
    Goal,
    Parser,
    alternate,
    cores,
    finish,
    machine,
    own_command,
    progress,
    ratios,
    table,
    versions,
    write_checkpoint,
)
from scripts.bench.parts.decode.options import Options, add_options, checked
from scripts.bench.parts.decode.report import GOAL_PROMPT, OURS, SHARED
from scripts.bench.parts.decode.sides import MODEL, Run, prepare
from scripts.bench.peer import Worker, WorkerError, other_python

WORKER = "scripts.bench.peers.llama_decode"
LLAMA_PYTHON = ".venv-llama/bin/python"
THEIRS, THEIRS_SHARED = "llama.cpp", "llama.cpp, one prompt"
DECODE_GOALS = {1: 1.0, 8: 1.2, 64: 1.8}
SHARED_GOALS = {64: 2.2}
PREFILL_GOALS = {1: 1.1, 64: 3.0}
MEMORY_GOAL = 0.8
"""The part of the memory's rate at which a decode step of one row reads the weights."""


class Bench:
    """Both sides, with the same weights.

    Args:
      say: is called with what is done next.
    """

    def __init__(
        self, options: Options, model: LoadedModel, peer: Worker, say: Callable[[str], None]
    ):
        self._o, self._model, self._peer, self._say = options, model, peer, say
        self._growth = options.steps * (options.rounds + 1)
        """Steps of a run: those of the first turn warm up, and are compared."""

    def batch(self, rows: int, prompts: np.ndarray) -> dict[str, Any]:
        """Measures a batch: prefill, decode, and decode of rows that share one prompt."""
        o = self._o
        self._say(f"batch {rows}, compile")
        runs = prepare(self._model, prompts, o.steps, self._growth, share=rows > 1)
        own = runs[OURS]
        unified = self._faster_cache(rows, prompts)
        self._open(rows, unified)
        self._say(f"batch {rows}, prefill")
        tokens = prompts.tolist()
        sides = {OURS: own.prefill, THEIRS: lambda: self._prefill(tokens)["seconds"]}
        own.prefill()  # once each to warm up
        first = self._prefill(tokens)["tokens"]
        prefill = alternate(sides, 1 if o.quick and rows > 8 else o.rounds)
        agreement = self._compare(own, first)
        self._say(f"batch {rows}, decode")
        self._peer.reset_idle()
        decode = alternate({OURS: own.step, THEIRS: self._step}, o.rounds)
        own.check(self._growth)
        found = {
            "batch": rows,
            "unified": unified,
            "prefill": _summary(prefill, rows * o.prompt),
            "decode": _summary(decode, rows * o.steps),
            "agreement": agreement,
            "cores_busy_while_waiting": {
                OURS: self._peer.idle_here.cores,
                THEIRS: self._peer.idle_there.cores,
            },
        }
        if rows > 1:
            found["shared"] = self._shared(rows, runs[SHARED], tokens)
        return found

    def _shared(self, rows: int, run: Run, tokens: list[list[int]]) -> dict[str, Any]:
        """Measures decode where all rows have the first prompt, which both sides store once."""
        self._say(f"batch {rows}, decode with one prompt")
        self._open(rows, unified=True)
        run.prefill()
        self._prefill(tokens, share=True)
        sides = {SHARED: run.step, THEIRS_SHARED: self._step}
        for side in sides.values():
            side()
        times = alternate(sides, self._o.rounds)
        run.check(self._growth)
        return _summary(times, rows * self._o.steps)

    def _faster_cache(self, rows: int, prompts: np.ndarray) -> bool:
        """Returns whether one buffer for all sequences serves llama.cpp better than one for each."""
        if rows == 1 or self._o.quick:
            return False
        self._say(f"batch {rows}, llama.cpp's cache")
        seconds = {}
        for unified in (False, True):
            self._open(rows, unified)
            self._prefill(prompts.tolist())
            self._step()
            seconds[unified] = min(self._step() for _ in range(2))
        return seconds[True] < seconds[False]

    def _open(self, rows: int, unified: bool) -> None:
        room = self._o.prompt + 2 * self._growth
        self._peer.ask("open", rows=rows, tokens=room, flash=True, unified=unified)

    def _prefill(self, tokens: list[list[int]], share: bool = False) -> dict[str, Any]:
        return self._peer.ask("prefill", tokens=tokens, share=share)

    def _step(self) -> float:
        return self._peer.ask("step", steps=self._o.steps)["seconds"]

    def _compare(self, run: Run, first: Sequence[int]) -> dict[str, int]:
        """Decodes the first turn on both sides, and counts greedy tokens that are equal, each row up
        to its first difference: after it the sides read different texts."""
        run.step()
        theirs = [first, *self._peer.ask("trace", steps=self._o.steps - 1)["tokens"]]
        compared = equal = 0
        for row, ours in enumerate(run.state.outputs()):
            for token, other in zip(ours, [step[row] for step in theirs], strict=False):
                compared += 1
                equal += int(token) == other
                if int(token) != other:
                    break
        return {"tokens": compared, "equal": equal}


def _summary(times: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Tokens per second of each side by the median of its turns, and the ratio of each round."""
    ours, theirs = times
    rates = {name: tokens / statistics.median(seconds) for name, seconds in times.items()}
    return {
        "tokens_per_second": rates,
        "ratio": ratios(times[theirs], times[ours]),
        "turn_seconds": times,
    }


def memory_rate(turns: int = 5) -> float:
    """The bytes per second at which all cores together read memory, the best of some turns."""
    arrays = [np.ones(2**24, np.uint64) for _ in range(cores())]
    best = 0.0
    for _ in range(turns):
        threads = [threading.Thread(target=array.sum) for array in arrays]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, sum(a.nbytes for a in arrays) / (time.perf_counter() - begin))
    return best


def goals(report: dict[str, Any]) -> list[Goal]:
    """The goals that a report can be held against: they are set for one length of prompt."""
    if report["settings"]["prompt"] != GOAL_PROMPT:
        return []
    found, by_batch = [], {r["batch"]: r for r in report["results"]}
    for batch, r in by_batch.items():
        if batch in DECODE_GOALS:
            name = f"decode tokens per second, batch {batch}: times llama.cpp"
            found.append(Goal(name, r["decode"]["ratio"]["median"], DECODE_GOALS[batch]))
        if batch in SHARED_GOALS:
            ours = r["shared"]["tokens_per_second"][SHARED]
            theirs = r["decode"]["tokens_per_second"][THEIRS]
            name = f"decode, batch {batch} of one prompt: times llama.cpp with own prompts"
            found.append(Goal(name, ours / theirs, SHARED_GOALS[batch]))
        if batch in PREFILL_GOALS:
            name = f"prefill tokens per second, {batch} prompt{'s' * (batch > 1)}: times llama.cpp"
            found.append(Goal(name, r["prefill"]["ratio"]["median"], PREFILL_GOALS[batch]))
    if 1 in by_batch:
        rate = by_batch[1]["decode"]["tokens_per_second"][OURS] * report["settings"]["step_bytes"]
        part = rate / report["memory_bytes_per_second"]
        found.append(Goal("weights read at batch 1: part of the memory's rate", part, MEMORY_GOAL))
    return found


def as_text(report: dict[str, Any]) -> str:
    """The report without its goals."""
    settings, where, found = report["settings"], report["machine"], report["versions"]
    lines = [
        f"Llama, {settings['parameters'] / 1e6:.1f} M parameters, bfloat16, prompt "
        f"{settings['prompt']}; medians of {settings['rounds']} rounds of {settings['steps']} steps",
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{found[OURS]['jax']}; llama.cpp of llama-cpp-python {found[THEIRS]['llama-cpp-python']}",
        f"memory is read at {report['memory_bytes_per_second'] / 1e9:.1f} GB/s",
        "",
    ]
    rows, rest = [], []
    for r in report["results"]:
        for what in ("prefill", "decode", "shared"):
            if what not in r:
                continue
            rates, ratio = r[what]["tokens_per_second"], r[what]["ratio"]
            name = {"shared": "decode, one prompt"}.get(what, what)
            spread = f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}"
            numbers = [f"{rate:.0f}" for rate in rates.values()]
            rows.append((f"{r['batch']}  {name}", *numbers, f"{ratio['median']:.2f}", spread))
        same, busy = r["agreement"], r["cores_busy_while_waiting"]
        rest.append(
            f"batch {r['batch']}: {same['equal']} of {same['tokens']} greedy tokens equal; cores "
            f"busy while waiting: {OURS} {busy[OURS]:.2f}, {THEIRS} {busy[THEIRS]:.2f}"
        )
    header = ("batch", "jaxshare tokens/s", "llama.cpp", "ratio", "of rounds")
    return "\n".join([*lines, table(header, rows), "", *rest])


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(prog="scripts.bench.llama_cpp", description=__doc__.splitlines()[0])
    add_options(parser, quick_steps=8, quick="fewer and shorter turns")
    parser.add_argument(
        "--llama-python",
        metavar="PATH",
        help=f"a Python with llama-cpp-python and gguf (default {LLAMA_PYTHON})",
    )
    given = parser.parse_args(arguments)

    def find_python() -> str:
        return other_python(
            parser,
            given.llama_python,
            option="--llama-python",
            made=LLAMA_PYTHON,
            made_by="make bench WHAT=llama-cpp",
            runs="llama.cpp",
            packages="llama-cpp-python and gguf",
        )

    return checked(parser, given, find_python, fewest_steps=2)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where = machine()
    try:
        with contextlib.ExitStack() as stack:
            peer = stack.enter_context(Worker(options.python, WORKER, {}))
            theirs = peer.begin()
            settings, rate, results = measure_all(options, peer)
    except WorkerError as error:
        print(f"scripts.bench.llama_cpp: llama.cpp could not go on: {error}", file=sys.stderr)
        return 1
    report = {
        "benchmark": "llama_cpp",
        "command": asked,
        "machine": where,
        "versions": {
            OURS: versions(("jax", "jaxlib", "flax", "numpy", "llvmlite")),
            THEIRS: theirs,
        },
        "settings": settings,
        "memory_bytes_per_second": rate,
        "results": results,
    }
    finish(report, as_text(report), goals(report), as_json=options.json, output=options.output)
    return 0


def measure_all(
    options: Options, peer: Worker
) -> tuple[dict[str, Any], float, list[dict[str, Any]]]:
    """The settings of a run, the rate of the memory, and the results, one a batch."""
    steps = len(options.batches) * (4 if options.quick else 5) + 2
    with tempfile.TemporaryDirectory() as folder, progress(steps) as say:
        say("weights")
        parameters = write_checkpoint(Path(folder), MODEL, options.seed)
        model = load(folder)
        say("llama.cpp: load")
        system = peer.ask("load", folder=folder, threads=cores())["system"]
        rate = memory_rate()
        bench, results = Bench(options, model, peer, say), []
        rng = np.random.default_rng([options.seed, 1])
        for batch in options.batches:
            prompts = rng.integers(0, MODEL["vocab_size"], (batch, options.prompt))
            results.append(bench.batch(batch, prompts))
    settings = {
        "parameters": parameters,
        # A step reads all weights but the embedding, of which it reads a row.
        "step_bytes": 2 * (parameters - MODEL["vocab_size"] * MODEL["hidden_size"]),
        "prompt": options.prompt,
        "rounds": options.rounds,
        "steps": options.steps,
        "quick": options.quick,
        "seed": options.seed,
        "llama_cpp": system,
        "model": MODEL,
    }
    return settings, rate, results


if __name__ == "__main__":
    sys.exit(main())
