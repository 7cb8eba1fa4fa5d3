"""The command `jaxshare convert`: a model in Orbax form, or back in Hugging Face form."""

import argparse
import json
import sys
from pathlib import Path

from jaxshare.models import orbax_io
from jaxshare.models.sources import local_folder
from jaxshare.paths import check_folder
from jaxshare.serving.cli import arguments
from jaxshare.serving.locks import OutputLock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare convert`."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="folder in Hugging Face form or in the form that this command writes; or embedded",
    )
    parser.add_argument(
        "target", metavar="TARGET", help="folder to write, which does not exist yet"
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare convert`."""
    if not Path(options.target).exists():
        check_folder("TARGET", options.target)
    # beside the folder, which takes its name when all is written
    with OutputLock.of_file(options.target, "give another TARGET"):
        written = orbax_io.convert(local_folder(options.source), Path(options.target))
    form = "Orbax" if written["form"] == "orbax" else "Hugging Face"
    print(
        f"{options.target}: {written['tensors']} tensors, {written['bytes'] / 1e6:,.1f} MB, in "
        f"{form} form",
        file=sys.stderr,
    )
    if options.json:
        print(json.dumps({**written, "folder": options.target}))
    return 0
