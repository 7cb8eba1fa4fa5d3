"""Attention alone: how much faster it is over a shared prefix than over copies of it, against batch,
prefix and suffix (Hydragen section 4.2, figures 4 and 7).

    python -m scripts.papers.hydragen attention --output DIR
    python -m scripts.papers.hydragen attention --heads paper --output DIR

One layer of a decode pass in bfloat16 with random keys and values: each row brings one token and sees
the prefix and a suffix of its own. The heads are those that one device has of the model.
"""

import argparse
import contextlib
import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxshare import models
from jaxshare.models import LoadedModel
from jaxshare.models.config import ModelConfig
from jaxshare.serving.branches.row_budget import free_bytes
from scripts.bench.lib import ROOT, Parser, progress, table
from scripts.bench.parts.sharing import attention as measuring
from scripts.bench.parts.sharing.attention import SDPA, SHARED, UNSHARED
from scripts.bench.parts.sharing.options import PAPER_HEADS
from scripts.bench.peer import TORCH_PYTHON, WAITING, Worker, WorkerError
from scripts.papers import folder as folders
from scripts.papers import hydragen_plots as plots
from scripts.papers.folder import PaperFolder, plural
from scripts.papers.hydragen_peers import ABSENT, NOT_MEASURED, TORCH_WORKER, AbsentError

EXPERIMENT = "hydragen attention"
_SIZES = ("batches", "prefixes", "suffixes")


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of the sweep."""
    folders.add_arguments(parser)
    for name, what in (
        ("batches", "rows, one token each (default 16,64,256,1024)"),
        ("prefixes", "tokens that all rows see (default 1024,4096,16384)"),
        ("suffixes", "tokens that each row has of its own (default 64,512)"),
    ):
        parser.add_argument(f"--{name}", metavar="N,N", help=what)
    parser.add_argument(
        "--heads",
        choices=("model", "paper"),
        default="model",
        help="the model's, of which a device of --tensor has its part, or those of section 4.2 (8 "
        "heads, 1 kv head, dimension 128)",
    )
    parser.add_argument("--rounds", type=int, help="turns of each side (default 5)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and one round, to try the command"
    )
    parser.add_argument(
        "--max-kv-gib",
        type=float,
        metavar="GIB",
        help="leave out copies that take more (default: what is free)",
    )
    parser.add_argument(
        "--torch-python",
        metavar="PATH",
        help="a Python with PyTorch, for scaled_dot_product_attention",
    )


def check(parser: Parser, given: argparse.Namespace) -> None:
    """Completes the options; ends the program where they cannot be right."""
    folders.check_arguments(parser, given)
    quick = ("2,8", "64,256", "16", 1)
    full = ("16,64,256,1024", "1024,4096,16384", "64,512", 5)
    for name, default in zip((*_SIZES, "rounds"), quick if given.quick else full, strict=True):
        if getattr(given, name) is None:
            setattr(given, name, default)
    for name in _SIZES:
        found = parser.numbers(f"--{name}", getattr(given, name), "64,512")
        setattr(given, name, sorted(found))
    parser.at_least(1, rounds=given.rounds, tensor=given.tensor)
    parser.at_least(0.001, max_kv_gib=given.max_kv_gib)
    if given.dtype not in (None, "bfloat16"):
        parser.error(f"--dtype is {given.dtype}, but attention alone is measured in bfloat16")


def run(options: argparse.Namespace, command: str) -> int:
    """Measures what is left of a sweep, or redraws it.

    Raises:
      ValueError, OSError, ImportError: a model, a folder or settings that cannot be used.
    """
    if not options.redraw:
        _measure(options, command)
    folders.report_of(options, EXPERIMENT, summarise, plots.attention, as_text)
    return 0


def _measure(options: argparse.Namespace, command: str) -> None:
    model = models.outline(options.model)
    config = heads_of(model, options.heads, options.tensor)
    settings = {
        "model": folders.model_name(options),
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "dtype": "bfloat16",
        "rounds": options.rounds,
        "seed": options.seed,
        "max_kv_gib": options.max_kv_gib,
        "machine": folders.this_machine(),
    }
    given = options.max_kv_gib
    most = free_bytes(model) if given is None else int(given * 2**30)
    how = {"resume": options.resume, "command": command}
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(
            folders.opened(options.output, EXPERIMENT, settings, model, **how)
        )
        points = itertools.product(*(getattr(options, name) for name in _SIZES))
        left = [point for point in points if _key(point) not in kept]
        if not left:
            return
        worker, product = _torch(options, kept, stack), measuring.Product()
        with progress(len(left)) as say:
            for point in left:
                sizes = {"rows": point[:1], "prefixes": point[1:2], "suffixes": point[2:]}
                more = (options.rounds, most, worker, product, options.seed, say)
                (found,) = measuring.measure(config, sizes, *more)
                kept.add(_key(point), found)


def heads_of(model: LoadedModel, heads: str, tensor: int) -> ModelConfig:
    """The configuration whose heads are measured: those that each of `tensor` devices has.

    Raises:
      ValueError: latent attention, or heads that do not divide over the devices.
    """
    config = model.config
    if heads == "paper":
        names = ("num_heads", "num_kv_heads", "head_dim")
        return dataclasses.replace(config, **dict(zip(names, PAPER_HEADS.values(), strict=True)))
    if config.mla is not None:
        raise ValueError(
            f"{model.name} has latent attention, whose heads have one key; give another --model, or "
            "--heads paper"
        )
    kv = max(1, config.num_kv_heads // tensor)
    if config.num_heads % tensor or (config.num_heads // tensor) % kv:
        raise ValueError(
            f"--tensor is {tensor}, but {config.num_heads} heads and {config.num_kv_heads} kv heads "
            "do not divide over so many devices"
        )
    return dataclasses.replace(config, num_heads=config.num_heads // tensor, num_kv_heads=kv)


def _torch(
    options: argparse.Namespace, kept: PaperFolder, stack: contextlib.ExitStack
) -> Worker | None:
    """PyTorch's side, or None; its versions, or why it is absent, are noted."""
    found, python = None, options.torch_python or str(ROOT / TORCH_PYTHON)
    status, versions = "measured", None
    try:
        if not Path(python).exists():
            made = "" if options.torch_python else ", which `make parity` makes"
            raise AbsentError(f"there is no {options.torch_python or TORCH_PYTHON}{made}")
        # Threads that spin would take the cores of the other sides.
        found = stack.enter_context(Worker(python, TORCH_WORKER, WAITING["passive"]))
        versions = found.begin()
    except (OSError, WorkerError, AbsentError) as error:
        found, status = None, f"{ABSENT}: {error}"
    kept.add({"side": SDPA}, {"status": status, "versions": versions})
    return found


def _key(point: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(("batch", "prefix", "suffix"), point, strict=True))


def summarise(kept: PaperFolder) -> dict[str, Any]:
    """All points as `scripts.bench.parts.sharing.attention.summarise` gives them, and the state of
    PyTorch's side."""
    points = [(key, value) for key, value in kept.points() if "side" not in key]
    points.sort(key=lambda point: [*point[0].values()])
    states = {key["side"]: value for key, value in kept.points() if "side" in key}
    return {"points": [value for _, value in points], "sides": states}


def as_text(report: Mapping[str, Any]) -> str:
    """Times and speedups, a line for each point."""
    settings, results = report["settings"], report["results"]
    rows = []
    for p in results["points"]:
        sides, slower = p["sides"], p["slower_than_shared"]
        shown = [f"{sides[s]['milliseconds']:.3f}" if s in sides else "x" for s in _SHOWN]
        ratios = [f"{slower[s]['median']:.2f}" if s in slower else "x" for s in _SHOWN[1:]]
        at = f"{p['rows']} rows, prefix {p['prefix']}, suffix {p['suffix']}"
        rows.append((at, *shown, *ratios))
    header = ("milliseconds", *_SHOWN, *(f"{side} to shared" for side in _SHOWN[1:]))
    first = (
        f"{settings['heads']} heads, {settings['kv_heads']} kv heads of {settings['head_dim']}, "
        f"bfloat16, medians of {plural(settings['rounds'], 'round')}, {settings['machine']['cores']} "
        f"cores of {settings['machine']['cpu']}"
    )
    notes = [NOT_MEASURED] if any("x" in row for row in rows) else []
    states = [f"{side}: {s['status']}" for side, s in results["sides"].items()]
    states = [line for line in states if not line.endswith(": measured")]
    return "\n\n".join([first, table(header, rows), *notes, *states])


_SHOWN = (SHARED, UNSHARED, SDPA)
