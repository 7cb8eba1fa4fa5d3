"""Words of the commands that go on with a job: --resume, a job that begins, lines that are bad."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LISTED = 3
"""Lines of a file that are listed by number."""


def add_resume(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds --resume, which goes on with `what`."""
    parser.add_argument(
        "--resume",
        action="store_true",
        help=f"go on with {what}; where there is none yet, it begins",
    )


def say_new(what: str, place: str | Path) -> None:
    """Says on stderr that --resume has found nothing to go on with: "no job at out.jsonl yet"."""
    print(f"no {what} at {place} yet: it begins now", file=sys.stderr)


def say_bad(file: str, bad_lines: Sequence[Mapping[str, Any]]) -> None:
    """Names each bad line of a file on stderr, with what is wrong with it."""
    for bad in bad_lines:
        print(f"{file}, line {bad['line']}: {bad['error']}", file=sys.stderr)


def count_bad(file: str, bad_lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns how many lines of a file are bad, and which: "2 lines of in.jsonl could not be read
    (3, 5)"."""
    count = len(bad_lines)
    numbers = [str(bad["line"]) for bad in bad_lines[:_LISTED]] + ["..."] * (count > _LISTED)
    return f"{count} line{'s' * (count > 1)} of {file} could not be read ({', '.join(numbers)})"
