"""The command `jaxshare tune`: the fastest tiles of the GPU kernels on this GPU."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxshare import progress
from jaxshare.models.sources import described
from jaxshare.pallas.chosen_tiles import tiles_file
from jaxshare.pallas.device import Device, current_device
from jaxshare.pallas.tiles import KINDS, MOSAIC_TABLE, KernelConfig
from jaxshare.paths import check_file
from jaxshare.serving.cli import arguments
from jaxshare.serving.tuning import kernels
from jaxshare.serving.tuning.kernels import (
    DTYPES,
    QUICK,
    QUICK_ROWS,
    ROWS,
    Effort,
    KernelShape,
    TuningOutcome,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare tune`."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="folder, GGUF file or hub id: its config.json gives heads, head dim and dtype",
    )
    parser.add_argument("--heads", type=int, metavar="H", help="query heads, in place of --model")
    parser.add_argument("--kv-heads", type=int, metavar="K", help="heads of the cache")
    parser.add_argument(
        "--head-dim", type=int, metavar="D", help=f"one of {', '.join(map(str, MOSAIC_TABLE))}"
    )
    parser.add_argument(
        "--dtype",
        help=f"dtype of the cache: {' or '.join(DTYPES)} (default: the model's own, or "
        f"{DTYPES[0]})",
    )
    parser.add_argument(
        "--rows",
        metavar="R,R,...",
        help=f"numbers of rows that decode at once (default {','.join(map(str, ROWS))})",
    )
    parser.add_argument("--backend", choices=(*KINDS,), help="default: all of them")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"less of everything: rows {','.join(map(str, QUICK_ROWS))}, fewer rounds, "
        "smaller caches",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="file to keep the result in (default: tiles.json in the cache "
        "folder, the one that kernels read)",
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare tune`.

    Raises:
      ValueError: arguments that are wrong, nothing that could be measured, or a file that cannot be
        written.
      FileNotFoundError: no such model.
      NotImplementedError: there is no GPU.
    """
    rows = arguments.parse_numbers("--rows", options.rows)
    if wrong := [count for count in rows if count < 1]:
        raise ValueError(f"--rows has {wrong[0]}; numbers of rows start at 1")
    if options.output:
        check_file("--output", options.output, makes_folder=True)
    else:
        check_file("the file in the cache folder JAXSHARE_CACHE", tiles_file(), makes_folder=True)
    shape = _shape(options)
    device = current_device()
    if device is None:
        raise NotImplementedError(
            "there is no NVIDIA GPU here that JAX can use, and tiles are measured on the GPU that "
            "they are for"
        )
    file = options.output or tiles_file()
    outcomes, save_error = _measure(options, shape, device, rows, file)
    if not any(outcome.best for outcome in outcomes):
        reasons = dict.fromkeys(
            f"{m.backend}: {m.reason}"
            for outcome in outcomes
            for m in outcome.measurements
            if m.reason
        )
        raise ValueError(
            f"no kernel could be measured on this {device.kind}: {'; '.join([*reasons][:2])}"
        )
    if options.json:
        print(json.dumps(_as_json(device, shape, file, outcomes)))
    else:
        _show(device, shape, outcomes)
        if not save_error:
            print(f"kept in {file}")
    if save_error:
        raise ValueError(
            f"the tiles cannot be kept in {file} ({save_error.strerror}); give another --output, or set "
            "JAXSHARE_CACHE to a folder that can be written"
        ) from save_error
    return 0


def _measure(
    options: argparse.Namespace,
    shape: KernelShape,
    device: Device,
    rows: Sequence[int],
    file: Path,
) -> tuple[list[TuningOutcome], OSError | None]:
    """Measures kernels and saves the best tiles; the outcomes, and the error of a failed save."""
    rows = rows or (QUICK_ROWS if options.quick else ROWS)
    backends = [options.backend] if options.backend else [*KINDS]
    outcomes: list[TuningOutcome] = []
    save_error: OSError | None = None
    total = kernels.num_measurements(shape, device, rows, backends)
    with progress.work("measuring", total, "kernels") as work:
        effort = QUICK if options.quick else Effort()
        # Each result is saved at once, so that ending the program early loses no more than the
        # measurement in progress.
        for outcome in kernels.tune(
            shape, device, rows, backends, effort, kernels.prepare, work.update
        ):
            outcomes.append(outcome)
            try:
                if outcome.best:
                    kernels.save(device, {outcome.key: outcome.best}, file)
            except OSError as error:  # the measurements are printed at the end all the same
                save_error = error
    return outcomes, save_error


def _as_json(
    device: Device, shape: KernelShape, file: Path, outcomes: Sequence[TuningOutcome]
) -> dict[str, Any]:
    return {
        "device": device.kind,
        "shape": dataclasses.asdict(shape),
        "file": str(file),
        "best": [
            {
                **dataclasses.asdict(outcome.key),
                "tiles": dataclasses.asdict(outcome.best) if outcome.best else None,
                "built_in": dataclasses.asdict(outcome.built_in),
            }
            for outcome in outcomes
        ],
        "measurements": [
            dataclasses.asdict(m) for outcome in outcomes for m in outcome.measurements
        ],
    }


def _show(device: Device, shape: KernelShape, outcomes: Sequence[TuningOutcome]) -> None:
    print(
        f"microseconds of one attention layer on {device.kind}: {shape.num_heads} heads, "
        f"{shape.num_kv_heads} kv heads, dim {shape.head_dim}, {shape.dtype}\nbackend      rows  "
        "blocks   built in      best  tiles"
    )
    for outcome in outcomes:
        times = {(m.rows, m.shared, m.tiles): m.microseconds for m in outcome.measurements}
        for rows, shared in dict.fromkeys((rows, shared) for rows, shared, _ in times):
            before, after = (
                times.get((rows, shared, tiles)) if tiles else None
                for tiles in (outcome.built_in, outcome.best)
            )
            print(
                f"{outcome.key.backend:10} {rows:6}  {'shared ' if shared else 'private'} "
                f"{_number(before)} {_number(after)}  "
                f"{_words(outcome.best) if outcome.best else 'nothing could be measured'}"
            )
    reasons: dict[tuple[str, str | None], list[str]] = {}
    for m in (m for outcome in outcomes for m in outcome.measurements if m.reason):
        reasons.setdefault((m.backend, m.reason), []).append(_words(m.tiles))
    for (backend, reason), left in reasons.items():
        print(
            f"left out: {backend}, "
            f"{left[0]}{f' and {len(left) - 1} more' if len(left) > 1 else ''}: {reason}",
            file=sys.stderr,
        )


def _number(time: float | None) -> str:
    return f"{'-' if time is None else f'{time:.1f}':>9}"


def _words(tiles: KernelConfig) -> str:
    return ", ".join(
        _word(name.removeprefix("num_").replace("_", " "), value)
        for name, value in dataclasses.asdict(tiles).items()
    )


def _word(name: str, value: int) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value}"


def _shape(options: argparse.Namespace) -> KernelShape:
    numbers = {
        "--heads": options.heads,
        "--kv-heads": options.kv_heads,
        "--head-dim": options.head_dim,
    }
    missing = [name for name, value in numbers.items() if value is None]
    if bool(options.model) == (len(missing) < len(numbers)):
        raise ValueError(
            "name the heads to tune for, either with --model or with --heads, --kv-heads and "
            "--head-dim"
        )
    if options.model:
        return _model_shape(options.model, options.dtype)
    if missing:
        raise ValueError(f"{missing[0]} is missing; --heads, --kv-heads and --head-dim go together")
    return KernelShape(
        options.heads, options.kv_heads, options.head_dim, options.dtype or DTYPES[0]
    )


def _model_shape(name: str, dtype: str | None) -> KernelShape:
    """The shape in the model's config.json; its weights are not read."""
    model = described(name)
    return KernelShape(
        model.config.num_heads,
        model.config.num_kv_heads,
        model.config.head_dim,
        dtype or model.dtype_name or DTYPES[0],
    )
