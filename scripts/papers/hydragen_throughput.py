"""Throughput of decoding end to end, against batch and length of the prefix (Hydragen section 4.1,
figure 3 and tables 1 to 6).

    python -m scripts.papers.hydragen throughput --output DIR
    python -m scripts.papers.hydragen throughput --model meta-llama/Llama-3.1-8B \\
        --batches 32,64,128,256,512,1024 --prefixes 1024,2048,4096,8192,16384 --output DIR

Many completions of one prompt. Prefill is not counted (appendix D.1). Sides of jaxshare and, on a CPU,
transformers take turns; every other side runs alone, because engines take a GPU's whole memory.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import importlib.util
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxshare.models import LoadedModel
from jaxshare.serving.inputs import cache_dtype, token_bytes
from scripts.bench.lib import Parser, alternate, progress, table
from scripts.bench.parts.sharing.attention import NO_ATTENTION, SHARED, THEIRS, UNSHARED, Say
from scripts.bench.parts.sharing.decode import AttentionFreeModel, Decoding
from scripts.bench.peer import WorkerError
from scripts.papers import folder as folders
from scripts.papers import hydragen_peers as peers
from scripts.papers import hydragen_plots as plots
from scripts.papers.folder import PaperFolder, plural
from scripts.papers.hydragen_memory import SideRoom

EXPERIMENT = "hydragen throughput"
SIDES = {"shared": SHARED, "unshared": UNSHARED, "no-attention": NO_ATTENTION} | {
    name: name for name in peers.PEERS
}
"""By their names on the command line."""
OURS = (SHARED, UNSHARED, NO_ATTENTION)
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the sweep."""
    folders.add_arguments(parser)
    parser.add_argument("--batches", metavar="B,B", help="completions at a time (default 1,8,32)")
    parser.add_argument(
        "--prefixes", metavar="P,P", help="tokens of the prompt (default 128,1024,4096)"
    )
    parser.add_argument(
        "--new-tokens", type=int, metavar="N", help="of each completion (default 128)"
    )
    parser.add_argument("--rounds", type=int, help="turns of each side (default 5)")
    parser.add_argument(
        "--sides", metavar="S,S", default=",".join(SIDES), help="some of %(default)s (default all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and one round, to try the command"
    )
    parser.add_argument(
        "--max-kv-gib",
        type=float,
        metavar="GIB",
        help="leave out sides whose keys and values take more (default: what is free)",
    )
    for option, name in (("torch", "PyTorch and transformers"), ("vllm", "vLLM")):
        parser.add_argument(f"--{option}-python", metavar="PATH", help=f"a Python with {name}")
    parser.add_argument("--sglang-python", metavar="PATH", help="a Python with SGLang")


def check(parser: Parser, given: argparse.Namespace) -> None:
    """Completes the options; ends the program where they cannot be right."""
    folders.check_arguments(parser, given)
    defaults = ("1,4", "64,256", 8, 1) if given.quick else ("1,8,32", "128,1024,4096", 128, 5)
    for name, default in zip(
        ("batches", "prefixes", "new_tokens", "rounds"), defaults, strict=True
    ):
        if getattr(given, name) is None:
            setattr(given, name, default)
    given.batches = sorted(parser.numbers("--batches", given.batches, "1,8,32"))
    given.prefixes = sorted(parser.numbers("--prefixes", given.prefixes, "128,1024"))
    given.sides = [SIDES[name] for name in parser.some_of("--sides", given.sides, [*SIDES])]
    parser.at_least(2, new_tokens=given.new_tokens)
    parser.at_least(1, rounds=given.rounds)
    parser.at_least(0.001, max_kv_gib=given.max_kv_gib)


def run(options: argparse.Namespace, command: str) -> int:
    """Measures what is left of a sweep, or redraws it.

    Raises:
      ValueError, OSError, ImportError: a model, a folder or settings that cannot be used.
    """
    if not options.redraw:
        _measure(options, command)
    folders.report_of(options, EXPERIMENT, summarise, plots.throughput, as_text)
    return 0


def _measure(options: argparse.Namespace, command: str) -> None:
    others = [side for side in options.sides if side not in OURS]
    if others and _may_have_gpu():
        # A process that has used a GPU keeps its memory, which other engines need.
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
            pool.submit(measure_ours, options, command).result()
    else:
        measure_ours(options, command)
    found = PaperFolder.read(options.output, EXPERIMENT)
    alone = [s for s in others if s != THEIRS or found.settings["device"] != "cpu"]
    if alone:
        _measure_alone(options, command, found, alone)


def _may_have_gpu() -> bool:
    """True if JAX may use a GPU in a process that asks it; this one does not."""
    return os.environ.get("JAX_PLATFORMS") != "cpu" and any(
        importlib.util.find_spec(name) for name in _PLUGINS
    )


def measure_ours(options: argparse.Namespace, command: str) -> None:
    """Measures jaxshare's sides and, on a CPU, transformers, point by point.

    Raises:
      ValueError: the model has no context for a prompt, or see `folder.opened`.
    """
    model = folders.load(options)
    if (longest := options.prefixes[-1] + options.new_tokens) > model.config.max_positions:
        raise ValueError(
            f"--prefixes has {options.prefixes[-1]}, but with {options.new_tokens} new tokens the "
            f"context of {folders.model_name(options)}, {model.config.max_positions} tokens, does "
            "not hold it; give shorter ones"
        )
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    together = [*OURS, THEIRS] if device == "cpu" else [*OURS]
    settings = {
        "model": folders.model_name(options),
        "dtype": str(cache_dtype(model)),
        "vocab_size": model.config.vocab_size,
        "tensor": options.tensor,
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
        "seed": options.seed,
        "max_kv_gib": options.max_kv_gib,
        "device": device,
        "sides_in_turns": [side for side in together if side in options.sides],
        "machine": folders.this_machine(),
    }
    how = {"resume": options.resume, "command": command}
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(
            folders.opened(options.output, EXPERIMENT, settings, model, **how)
        )
        theirs, absent = None, {}
        if THEIRS in settings["sides_in_turns"]:
            theirs = _opened(THEIRS, options, kept, stack)
            if theirs is None:
                absent = {THEIRS: kept.value({"side": THEIRS})["status"]}
        sweep = _Sweep(model.for_context(longest), options, theirs)
        points = [(b, p) for b in options.batches for p in options.prefixes]
        left = [point for point in points if _key(*point) not in kept]
        with progress(2 * len(left)) as say:
            for point in left:
                value = sweep.point(*point, say)
                value["left_out"] |= absent
                kept.add(_key(*point), value)


def _key(batch: int, prefix: int, side: str = "jaxshare") -> dict[str, Any]:
    return {"batch": batch, "prefix": prefix, "with": side}


class _Sweep:
    """The points that take turns in this process.

    Args:
      model: for the longest row.
      options: see `add_arguments`.
      theirs: transformers, or None.
    """

    def __init__(
        self,
        model: LoadedModel,
        options: argparse.Namespace,
        theirs: peers.Transformers | peers.OtherEngine | None,
    ):
        self._model, self._o, self._theirs = model, options, theirs

    def point(self, batch: int, prefix: int, say: Say) -> dict[str, Any]:
        """Seconds of a pass in every round by side, and why others were left out."""
        what, new, size = (
            f"{batch} rows, prefix {prefix}",
            self._o.new_tokens,
            token_bytes(self._model),
        )
        say(f"{what}, compile")
        taken = {
            SHARED: size * (prefix + batch * new),
            NO_ATTENTION: size * batch * new,
            UNSHARED: size * batch * (prefix + new),
        }
        room, runs = SideRoom(self._model, self._o.max_kv_gib), {}
        for side in (side for side in taken if side in self._o.sides):
            make = functools.partial(self._warm, side, batch, prefix)
            if (run := room.prepare(side, taken[side], make)) is not None:
                runs[side] = run
        sides: dict[str, Callable[[], float]] = {name: run.turn for name, run in runs.items()}
        if self._theirs is not None:
            make = functools.partial(_warm_peer, self._theirs, batch, prefix)
            try:
                if turn := room.prepare(THEIRS, taken[UNSHARED], make):
                    sides[THEIRS] = turn
            except WorkerError as error:
                room.left_out[THEIRS] = str(error)
        say(f"{what}, measure")
        times = alternate(sides, self._o.rounds) if sides else {}
        for run in runs.values():
            run.check(self._o.rounds + 1)
        if isinstance(self._theirs, peers.Transformers):
            self._theirs.release()
        return {"seconds": times, "left_out": room.left_out}

    def _warm(self, side: str, batch: int, prefix: int) -> Decoding:
        """A side that is compiled and has had a turn."""
        model = AttentionFreeModel.of(self._model) if side == NO_ATTENTION else self._model
        new = self._o.new_tokens
        run = Decoding(
            model,
            batch,
            1 if side == NO_ATTENTION else prefix,  # which costs nothing without attention
            shared=side != UNSHARED,
            suffix=0,
            room=new,
            steps=new,
            seed=self._o.seed,
        )
        run.compile()
        run.turn()
        return run


def _warm_peer(
    peer: peers.Transformers | peers.OtherEngine, batch: int, prefix: int
) -> Callable[[], float]:
    """The turns of a side that has had one."""
    peer.prepare(batch, prefix)
    peer.turn()
    return peer.turn


def _opened(
    side: str, options: argparse.Namespace, kept: PaperFolder, stack: contextlib.ExitStack
) -> peers.Transformers | peers.OtherEngine | None:
    """Starts a side, and notes its versions or why it is absent; None in that case."""
    s = kept.settings
    package = "torch" if side == THEIRS else peers.ENGINES[side]
    python = getattr(options, f"{package}_python")
    try:
        about = peers.PeerModel(
            peers.model_folder(options.model),
            s["dtype"],
            s["vocab_size"],
            s["tensor"],
            s["device"],
            options.prefixes[-1] + s["new_tokens"],
            options.batches[-1],
            s["new_tokens"],
            s["seed"],
        )
        if side == THEIRS and s["tensor"] > 1:
            raise peers.AbsentError("it runs on one device, and --tensor asks for more")
        peer = peers.open_peer(side, python, about, stack)
    except peers.AbsentError as error:
        kept.add({"side": side}, {"status": str(error), "versions": None})
        return None
    kept.add({"side": side}, {"status": "measured", "versions": peer.versions})
    return peer


def _measure_alone(
    options: argparse.Namespace, command: str, found: PaperFolder, sides: Sequence[str]
) -> None:
    """Measures sides one after the other, each in a process of its own."""
    how = {"resume": True, "command": command}
    with folders.opened(options.output, EXPERIMENT, found.settings, None, **how) as kept:
        for side in sides:
            points = [(b, p) for b in options.batches for p in options.prefixes]
            left = [point for point in points if _key(*point, side) not in kept]
            with contextlib.ExitStack() as stack, progress(len(left)) as say:
                if not left or (peer := _opened(side, options, kept, stack)) is None:
                    continue
                for batch, prefix in left:
                    say(f"{side}: {batch} rows, prefix {prefix}")
                    value: dict[str, Any] = {"seconds": {}, "left_out": {}}
                    try:
                        times = peers.turns(peer, batch, prefix, kept.settings["rounds"])
                        value["seconds"][side] = [*times]
                    except WorkerError as error:
                        value["left_out"][side] = str(error)
                    kept.add(_key(batch, prefix, side), value)


def summarise(kept: PaperFolder) -> dict[str, Any]:
    """Computes the rates of every point, and how they compare with shared.

    Returns:
      "points": by batch and prefix the tokens a second of each side (median, and of the slowest and
      the fastest round), and why others were left out; "sides": their state and versions.
    """
    points: dict[tuple[int, int], dict[str, Any]] = {}
    states: dict[str, Any] = {}
    for key, value in kept.points():
        if "side" in key:
            states[key["side"]] = value
            continue
        at = key["batch"], key["prefix"]
        point = points.setdefault(at, {"sides": {}, "left_out": {}})
        point["left_out"].update(value["left_out"])
        for side, seconds in value["seconds"].items():
            point["sides"][side] = _rates(key["batch"], seconds)
    found = []
    for (batch, prefix), point in sorted(points.items()):
        sides, times = point["sides"], {}
        if ours := sides.get(SHARED):
            rate = ours["tokens_per_second"]
            times = {s: rate / sides[s]["tokens_per_second"] for s in sides if s != SHARED}
        found.append({"batch": batch, "prefix": prefix, **point, "shared_to": times})
    return {"points": found, "sides": states}


def _rates(batch: int, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "tokens_per_second": batch / statistics.median(seconds),
        "lowest": batch / max(seconds),
        "highest": batch / min(seconds),
        "pass_milliseconds": statistics.median(seconds) * 1e3,
        "round_seconds": [*seconds],
    }


def as_text(report: dict[str, Any]) -> str:
    """A table for each side, as tables 1 to 6; x is what has not enough memory or failed."""
    settings, results = report["settings"], report["results"]
    points = {(p["batch"], p["prefix"]): p for p in results["points"]}
    batches, prefixes = (sorted({at[i] for at in points}) for i in (0, 1))
    texts = [
        f"{settings['model']} in {settings['dtype']}, {settings['new_tokens']} new tokens, medians "
        f"of {plural(settings['rounds'], 'round')}, {settings['machine']['cores']} cores of "
        f"{settings['machine']['cpu']}"
    ]
    known = dict.fromkeys(s for p in points.values() for s in (*p["sides"], *p["left_out"]))
    for side in known:
        rows = []
        for batch in batches:
            cells = [points.get((batch, prefix), {}) for prefix in prefixes]
            rows.append((str(batch), *(_cell(cell, side) for cell in cells)))
        texts.append(table((f"{side}, tokens a second", *map(str, prefixes)), rows))
    states = results["sides"].items()
    absent = [f"{side}: {s['status']}" for side, s in states if s["status"] != "measured"]
    notes = [peers.NOT_MEASURED] if any(p["left_out"] for p in points.values()) else []
    return "\n\n".join([*texts, *notes, *absent])


def _cell(point: dict[str, Any], side: str) -> str:
    if side in point.get("sides", {}):
        return f"{point['sides'][side]['tokens_per_second']:.0f}"
    return "x" if side in point.get("left_out", {}) else ""
