"""Decode speed of Llamas with quantised weights against the same in bfloat16, and against llama.cpp's
Q8_0 and Q4_0 of the same weights: same cores, same run, in turn.

    python -m scripts.bench.quantised                             # the full measurement
    python -m scripts.bench.quantised --quick                     # within three minutes on two cores
    python -m scripts.bench.quantised --keep FOLDER               # weights stay there for other runs
    python -m scripts.bench.quantised --json --output FILE        # one JSON object

A Llama of 125 M parameters and, without `--quick`, one of 1.1 B, both random. Several rows share one
prompt, which each side stores once. jaxshare's cache is set to the prompt's length without its keys,
since a step takes as long with any. llama.cpp takes part where there is a Python that has it: `make
.venv-llama/.installed` builds it. How to read the result is in benchmarks/README.md.
"""

import argparse
import contextlib
import dataclasses
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare.models import LoadedModel, load
from jaxshare.quantised import quantised
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
from scripts.bench.parts.decode.sides import MODEL, Run
from scripts.bench.peer import ROOT, Worker, WorkerError

WORKER = "scripts.bench.peers.llama_decode"
LLAMA_PYTHON = ".venv-llama/bin/python"
PLAIN = "bf16"
FORMATS: Mapping[str, tuple[str, int | None]] = {
    "int8, rows": ("int8", None),
    "int8, groups of 128": ("int8", 128),
    "int4, groups of 64": ("int4", 64),
}
"""The format and the group of each quantised side."""
BYTES, HALVES = "int8, groups of 128", "int4, groups of 64"
THEIRS = {"llama.cpp Q8_0": BYTES, "llama.cpp Q4_0": HALVES}
"""llama.cpp's sides, and which of ours each is held against."""
MODELS: Mapping[str, Mapping[str, Any]] = {
    "125M": MODEL,
    "1.1B": {
        **MODEL,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}
PLAIN_GOALS = {(BYTES, 1): 1.5, (HALVES, 1): 2.0, (BYTES, 64): 0.9, (HALVES, 64): 0.9}
THEIR_GOALS = {1: 0.9, 64: 1.0}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run.

    Attributes:
      python: that runs llama.cpp, if there is one.
      keep: the folder of weights, made by an earlier run or by this one; None for a temporary one.
    """

    models: tuple[str, ...]
    batches: tuple[int, ...]
    prompt: int
    rounds: int
    steps: int
    quick: bool
    seed: int
    python: str | None
    keep: Path | None
    json: bool
    output: Path | None


def quantised_model(model: LoadedModel, format: str, group: int | None) -> LoadedModel:
    """The model with all matrices quantised, and the head and the embedding, as llama.cpp has them."""

    def of_one(leaf: jax.Array) -> Any:
        if leaf.ndim < 2:
            return leaf
        packed = quantised(np.asarray(leaf), format, group, scale_dtype=jnp.bfloat16)
        return jax.tree.map(jnp.asarray, packed)

    leaves, tree = jax.tree.flatten(model.params)
    with ThreadPoolExecutor(cores()) as pool:
        params = tree.unflatten(pool.map(of_one, leaves))
    return dataclasses.replace(model, params=params)


class Bench:
    """All sides, with weights that come from the same numbers.

    Args:
      sides: jaxshare's models by their names.
      peers: llama.cpp by the names of its sides, with the model loaded.
      say: is called with what is done next.
    """

    def __init__(
        self,
        options: Options,
        sides: Mapping[str, LoadedModel],
        peers: Mapping[str, Worker],
        say: Callable[[str], None],
    ):
        self._o, self._sides, self._peers, self._say = options, sides, peers, say
        self._growth = options.steps * (options.rounds + 1)

    def batch(self, rows: int) -> dict[str, Any]:
        """Measures decode steps of so many rows that share a prompt."""
        o = self._o
        self._say(f"batch {rows}, compile")
        with ThreadPoolExecutor(cores()) as pool:
            runs = dict(
                zip(
                    self._sides,
                    pool.map(lambda model: self._prepared(model, rows), self._sides.values()),
                    strict=True,
                )
            )
        self._say(f"batch {rows}, decode")
        unified = {name: self._opened(peer, rows) for name, peer in self._peers.items()}
        sides: dict[str, Callable[[], float]] = {name: run.step for name, run in runs.items()}
        for name, peer in self._peers.items():
            sides[name] = lambda peer=peer: peer.ask("step", steps=o.steps)["seconds"]
        for side in sides.values():
            side()  # once each to warm up
        times = alternate(sides, o.rounds)
        for run in runs.values():
            run.check(self._growth)
        return {
            "batch": rows,
            "unified": unified,
            "tokens_per_second": {
                name: rows * o.steps / statistics.median(seconds) for name, seconds in times.items()
            },
            "to_bf16": {name: ratios(times[PLAIN], times[name]) for name in times if name != PLAIN},
            "to_llama_cpp": {
                name: ratios(times[name], times[ours])
                for name, ours in THEIRS.items()
                if name in times
            },
            "turn_seconds": times,
        }

    def _prepared(self, model: LoadedModel, rows: int) -> Run:
        """The decode loop of rows after one prompt, compiled."""
        prompt = np.zeros((1, self._o.prompt), np.int32)
        run = Run(
            model,
            prompt,
            [[0, row + 1] for row in range(rows)],
            (self._o.prompt, *[self._growth] * rows),
            self._o.steps,
            self._growth + 2,
            [[5]] * rows,
        )
        cache = run.state.cache
        lengths = cache.lengths.at[0].set(self._o.prompt)
        cache = dataclasses.replace(cache, lengths=lengths)
        run.state = dataclasses.replace(run.state, cache=cache)
        run.compile_loop()
        return run

    def _opened(self, peer: Worker, rows: int) -> bool:
        """Gives llama.cpp the prompt; returns whether its cache is one buffer for all sequences,
        which are then read by all, or one for each: whichever is faster."""

        def seconds(unified: bool) -> float:
            self._open(peer, rows, unified)
            return min(peer.ask("step", steps=2)["seconds"] for _ in range(2))

        unified = rows > 1 and seconds(True) < seconds(False)
        self._open(peer, rows, unified)
        return unified

    def _open(self, peer: Worker, rows: int, unified: bool) -> None:
        room = self._o.prompt + 2 * self._growth
        peer.ask("open", rows=rows, tokens=room, flash=True, unified=unified)
        tokens = np.random.default_rng(self._o.seed).integers(0, 1000, self._o.prompt).tolist()
        peer.ask("prefill", tokens=[tokens] * rows, share=rows > 1)


def goals(report: Mapping[str, Any]) -> list[Goal]:
    """The goals of each model's batches."""
    found = []
    for model, results in report["results"].items():
        for r in results:
            for (side, batch), goal in PLAIN_GOALS.items():
                if batch == r["batch"]:
                    name = f"{model}, batch {batch}, {side}: times bf16"
                    found.append(Goal(name, r["to_bf16"][side]["median"], goal))
            for side, ratio in r["to_llama_cpp"].items():
                if r["batch"] in THEIR_GOALS:
                    name = f"{model}, batch {r['batch']}, {THEIRS[side]}: times {side}"
                    found.append(Goal(name, ratio["median"], THEIR_GOALS[r["batch"]]))
    return found


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    settings, where = report["settings"], report["machine"]
    lines = [
        f"prompt {settings['prompt']}, which all rows share; medians of {settings['rounds']} rounds "
        f"of {settings['steps']} steps",
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{report['versions']['jaxshare']['jax']}; llama.cpp "
        + (settings["llama_cpp"] or f"is left out: there is no {LLAMA_PYTHON}"),
    ]
    for model, results in report["results"].items():
        rows = [
            (
                f"{r['batch']}",
                side,
                f"{rate:.1f}",
                f"{r['to_bf16'][side]['median']:.2f}" if side in r["to_bf16"] else "",
                f"{r['to_llama_cpp'][side]['median']:.2f}" if side in r["to_llama_cpp"] else "",
            )
            for r in results
            for side, rate in r["tokens_per_second"].items()
        ]
        header = ("batch", "side", "tokens/s", "times bf16", "ours to it")
        lines += ["", f"Llama of {model}", table(header, rows)]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(prog="scripts.bench.quantised", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", metavar="NAME,NAME", help="of 125M and 1.1B (default both; quick 125M)"
    )
    parser.add_argument("--batches", metavar="N,N", default="1,8,64", help="(default 1,8,64)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens (default 128)")
    parser.add_argument("--rounds", type=int, help="turns of each side (default 5; quick 3)")
    parser.add_argument("--steps", type=int, help="decode steps a turn (default 16; quick 8)")
    parser.add_argument("--quick", action="store_true", help="one model, fewer and shorter turns")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument(
        "--llama-python",
        metavar="PATH",
        help=f"a Python with llama-cpp-python and gguf (default {LLAMA_PYTHON}, if it is there)",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="where weights are kept for other runs, 5 GB with both models (default nowhere)",
    )
    parser.reporting()
    return _checked(parser, parser.parse_args(arguments))


def _checked(parser: Parser, given: argparse.Namespace) -> Options:
    batches = parser.numbers("--batches", given.batches, "1,8,64")
    default = "125M" if given.quick else ",".join(MODELS)
    models = parser.some_of("--models", given.models or default, list(MODELS))
    rounds = given.rounds if given.rounds is not None else 3 if given.quick else 5
    steps = given.steps if given.steps is not None else 8 if given.quick else 16
    if rounds < 1 or steps < 1 or given.seed < 0:
        parser.error(
            f"--rounds is {rounds}, --steps {steps} and --seed {given.seed}, but they must be at "
            "least 1, 1 and 0"
        )
    most = MODEL["max_position_embeddings"] - steps * (rounds + 1)
    if not 1 <= given.prompt <= most:
        parser.error(
            f"--prompt is {given.prompt}, but with {rounds} rounds of {steps} steps it must be "
            f"from 1 to {most} tokens"
        )
    parser.check_output(given.output)
    python = shutil.which(given.llama_python or ROOT / LLAMA_PYTHON)
    if given.llama_python and python is None:
        parser.error(f"--llama-python is {given.llama_python}, but there is no such program")
    return Options(
        models,
        batches,
        given.prompt,
        rounds,
        steps,
        given.quick,
        given.seed,
        python,
        given.keep,
        given.json,
        given.output,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where = machine()
    results, settings, found = {}, {}, {}
    try:
        with progress(len(options.models) * (2 + 2 * len(options.batches))) as say:
            for model in options.models:
                results[model], settings[model], found = _measured(options, model, say)
    except WorkerError as error:
        print(f"scripts.bench.quantised: llama.cpp could not go on: {error}", file=sys.stderr)
        return 1
    report = {
        "benchmark": "quantised",
        "command": asked,
        "machine": where,
        "versions": {
            "jaxshare": versions(("jax", "jaxlib", "flax", "numpy", "llvmlite")),
            **({"llama.cpp": found} if found else {}),
        },
        "settings": {
            "models": settings,
            "llama_cpp": f"of llama-cpp-python {found['llama-cpp-python']}" if found else None,
            "prompt": options.prompt,
            "rounds": options.rounds,
            "steps": options.steps,
            "quick": options.quick,
            "seed": options.seed,
        },
        "results": results,
    }
    finish(report, as_text(report), goals(report), as_json=options.json, output=options.output)
    return 0


def _measured(
    options: Options, name: str, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, str]]:
    """The results of one model, one a batch, what it is, and llama.cpp's versions."""
    found: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        say(f"{name}, weights")
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder / f"{name}-{options.seed}"
        if not (folder / "config.json").exists():  # it is written last
            folder.mkdir(parents=True, exist_ok=True)
            write_checkpoint(folder, MODELS[name], options.seed)
        peers: dict[str, Worker] = {}
        extra: dict[str, bool] = {}
        for side in THEIRS if options.python else ():
            peers[side], extra[side], found = _started(stack, options, folder, side.split()[-1])
        say(f"{name}, quantise")
        plain = load(folder)
        parameters = sum(each.size for each in jax.tree.leaves(plain.params))
        sides = {PLAIN: plain}
        sides |= {side: quantised_model(plain, *way) for side, way in FORMATS.items()}
        bench = Bench(options, sides, peers, say)
        results = [bench.batch(rows) for rows in options.batches]
        sizes = {side: _nbytes(model) for side, model in sides.items()}
    settings = {"parameters": parameters, "bytes": sizes, "llama_cpp_extra_buffers": extra}
    return results, settings, found


def _started(
    stack: contextlib.ExitStack, options: Options, folder: Path, kind: str
) -> tuple[Worker, bool, dict[str, str]]:
    """llama.cpp with the weights in a kind of blocks; whether it has them in its forms for the
    machine's matrix unit and vector units, with which it crashes on some; and its versions."""
    assert options.python is not None
    for extra in (True, False):
        peer = stack.enter_context(Worker(options.python, WORKER, {}))
        found = peer.begin()
        file = str(folder / f"{kind}.gguf")
        try:
            peer.ask("load", folder=str(folder), threads=cores(), kind=kind, file=file, extra=extra)
            peer.ask("open", rows=1, tokens=64, flash=True, unified=False)
            peer.ask("prefill", tokens=[[1, 2, 3]])
            return peer, extra, found
        except WorkerError:
            if not extra:
                raise
    raise AssertionError


def _nbytes(model: LoadedModel) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(model.params))


if __name__ == "__main__":
    sys.exit(main())
