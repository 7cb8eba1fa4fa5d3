"""The command `jaxshare calibrate`: what attention costs on this device."""

import argparse
import dataclasses
import json
from collections.abc import Sequence

from jaxshare.paths import check_file, reason
from jaxshare.serving.cli import arguments
from jaxshare.serving.kvcache import sharing_cost
from jaxshare.serving.tuning import calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare calibrate`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder, GGUF file or hub id, or `embedded`: its heads and dtype are what is measured",
    )
    arguments.add_dtype(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare calibrate`.

    Raises:
      ValueError: wrong settings, or costs that cannot be saved; they are printed all the same.
      FileNotFoundError: no such model.
    """
    check_file(
        "the file in the cache folder JAXSHARE_CACHE", sharing_cost.costs_file(), makes_folder=True
    )
    model = arguments.load_model(options)
    costs, points = calibration.calibrate(model)
    file, save_error = None, None
    try:
        file = sharing_cost.save_costs(model, costs)
    except OSError as error:  # the measurements are printed all the same
        save_error = error
    if options.json:
        result = {
            "costs": costs.as_json(),
            "points": [dataclasses.asdict(point) for point in points],
            "file": str(file) if file else None,
        }
        print(json.dumps(result))
    else:
        _print_table(points)
        if file:
            print(f"kept in {file}")
    if save_error:
        raise ValueError(
            f"the costs cannot be kept in {sharing_cost.costs_file()} ({reason(save_error)}); set "
            "JAXSHARE_CACHE to a folder that can be written"
        ) from save_error
    return 0


def _print_table(points: Sequence[calibration.Timing]) -> None:
    """Prints a line for each pair of points: a shared prefix, and copies of it."""
    print("microseconds of one attention layer\n   rows  prefix   shared   copies")
    for shared, copies in zip(points[::2], points[1::2], strict=True):
        print(f"{shared.rows:7} {shared.prefix:7} {shared.time:8.0f} {copies.time:8.0f}")
