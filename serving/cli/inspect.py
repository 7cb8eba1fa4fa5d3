"""The command `jaxshare inspect`."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from jaxshare.paths import check_file, check_folder, reason, whole_file
from jaxshare.serving.locks import OutputLock
from jaxshare.serving.workers.inspection import plots
from jaxshare.serving.workers.inspection.probe import Snapshot, block_table, row_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare inspect`."""
    parser.add_argument(
        "snapshot", metavar="SNAPSHOT.json", help="a snapshot that a session of workers has saved"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        default=".",
        help="folder for cache.png and mass.png (default: the current folder)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout in place of the tables"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the tables of a snapshot, and writes its pictures.

    Raises:
      ValueError: a file that is not a snapshot, a folder that cannot be written, or pictures
        without matplotlib.
    """
    snapshot, folder = Snapshot.load(options.snapshot), Path(options.out)
    pictures = {"cache.png": plots.cache_picture}
    if snapshot.attention:
        pictures["mass.png"] = plots.attention_picture
    check_folder("--out", folder)
    for name in pictures:
        check_file("--out", folder / name, makes_folder=True)
    try:
        figures = {name: picture(snapshot) for name, picture in pictures.items()}
    except ImportError as error:
        raise ValueError(str(error)) from error
    if not options.json:
        Console().print(block_table(snapshot), row_table(snapshot))
    written: list[str] = []
    try:
        with OutputLock.of_folder(folder, "give another folder to --out"):
            for name, figure in figures.items():
                with whole_file(folder / name, "wb") as file:
                    figure.savefig(file)
                written.append(str(folder / name))
    except OSError as error:
        raise ValueError(
            f"the pictures cannot be written to {folder} ({reason(error)}); give another folder to --out"
        ) from error
    finally:
        if options.json:
            print(json.dumps({**snapshot.to_json(), "pictures": written}))
        elif written:
            print(f"pictures: {', '.join(written)}")
    return 0
