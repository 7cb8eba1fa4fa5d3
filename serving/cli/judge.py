"""The command `jaxshare judge`: grades how well workers worked together, from the texts that
`jaxshare evaluate` has written.

    jaxshare judge DIR --endpoint http://localhost:8000/v1 --model NAME

DIR gets judge.json, which keeps other settings out; gradings.jsonl, a line as each grading comes
in; and at the end collaboration.json. What stands in gradings.jsonl is not asked for again: the
same command goes on where another one ended.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from jaxshare.paths import check_folder
from jaxshare.serving import jsonl
from jaxshare.serving.cli.evaluate import RUNS, read_settings
from jaxshare.serving.evaluation import judge
from jaxshare.serving.evaluation.judge import Endpoint, Grading, JudgeError
from jaxshare.serving.evaluation.runs import Run

SETTINGS, GRADINGS, RESULT = "judge.json", "gradings.jsonl", "collaboration.json"
_FORMAT = "jaxshare judge 1"
_METHODS = ("workers", "self-consistency", "vote")
"""Those whose streams are workers."""
_AGAIN = "the same command goes on"

_Key = tuple[int, str, int, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `jaxshare judge`."""
    parser.add_argument("folder", metavar="DIR", help="that `jaxshare evaluate` has written")
    parser.add_argument(
        "--endpoint",
        required=True,
        metavar="URL",
        help="of an API that speaks OpenAI's protocol, such as http://localhost:8000/v1",
    )
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="of the judge, at the endpoint"
    )
    parser.add_argument(
        "--key-variable",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable with the key, which is sent if it is set (default %(default)s)",
    )
    parser.add_argument(
        "--gradings",
        type=int,
        default=judge.GRADINGS,
        metavar="N",
        help="of each run, which are averaged (default %(default)s)",
    )
    parser.add_argument(
        "--prefix-tokens",
        type=int,
        default=judge.PREFIX_TOKENS,
        metavar="N",
        help="of each worker that the judge sees, from the begin (default %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=float, help="of the judge (default: the endpoint's own)"
    )
    parser.add_argument(
        "--attempts",
        type=int,
        default=Endpoint.attempts,
        metavar="N",
        help="at one question, with longer and longer pauses between them (default %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, everything else on stderr"
    )


def run(options: argparse.Namespace) -> int:
    """Grades the runs of two workers or more that have not been graded.

    Raises:
      ValueError: a folder without such runs, or that another judge has graded; wrong settings; a
        judge that cannot be asked or does not answer as it should. What has been graded by then is
        kept.
    """
    for name in ("gradings", "prefix_tokens"):
        if (value := getattr(options, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    endpoint = Endpoint(
        options.endpoint,
        options.model,
        os.environ.get(options.key_variable) or None,
        options.temperature,
        attempts=options.attempts,
    )
    folder = Path(options.folder)
    runs = _read_runs(folder)
    check_folder("DIR", folder)
    settings = {
        "model": options.model,
        "gradings": options.gradings,
        "prefix_tokens": options.prefix_tokens,
        "temperature": options.temperature,
        "prompt": jsonl.sha256(judge.prompt_of("", {"": "", " ": ""}).encode()),
    }
    wanted = {(*run.key, i): run for run in runs for i in range(options.gradings)}
    with contextlib.ExitStack() as files:
        file, done = _open(files, folder, settings)
        # Those of runs that have been taken out since are left alone, and do not count.
        found = [grading for key, grading in done.items() if key in wanted]
        before = len(found)
        found += _grade(
            endpoint,
            {key: run for key, run in wanted.items() if key not in done},
            file,
            options.prefix_tokens,
            before,
        )
    result = {
        "settings": settings,
        "levels": judge.average_levels(found),
        "gradings": len(found),
        "from_before": before,
        "folder": str(folder),
    }
    if options.json:
        print(json.dumps(result), flush=True)
    else:
        print("level of collaboration, 1 to 6")
        for level in result["levels"]:
            error = "" if level["standard_error"] is None else f" +- {level['standard_error']:.2f}"
            print(f"{level['workers']} workers: {level['level']:.2f}{error} ({level['runs']} runs)")
    jsonl.write(folder / RESULT, [jsonl.line(result)], _AGAIN)
    return 0


def _read_runs(folder: Path) -> list[Run]:
    """Those of two workers or more."""
    method = read_settings(folder)["method"]
    if method not in _METHODS:
        raise ValueError(
            f"{folder} was written by the method {method}, which has no workers; judge one of "
            f"{', '.join(_METHODS)}"
        )
    found = []
    try:
        for number, line in enumerate((folder / RUNS).read_bytes().split(b"\n")[:-1], 1):
            try:
                found.append(Run.read(line))
            except ValueError as error:
                raise ValueError(
                    f"line {number} of {folder / RUNS} is damaged ({error}); take that line out"
                ) from error
    except OSError as error:
        raise ValueError(
            f"{folder / RUNS} cannot be read ({error}); name a folder that `jaxshare evaluate` has "
            "written"
        ) from error
    found = [run for run in found if run.workers > 1]
    if not found:
        raise ValueError(
            f"{folder} has no run of two workers or more, and one alone has nobody to work with; "
            "evaluate with --workers 2"
        )
    return found


def _open(
    files: contextlib.ExitStack, folder: Path, settings: Mapping[str, Any]
) -> tuple[BinaryIO, dict[_Key, Grading]]:
    """The file of gradings, and those that are in it."""
    path, do = (
        folder / GRADINGS,
        f"move {folder / GRADINGS} and {folder / SETTINGS} away to begin anew",
    )
    if os.path.lexists(folder / SETTINGS):
        try:
            then = jsonl.read_settings(folder / SETTINGS, _FORMAT)
        except ValueError as error:
            raise ValueError(
                f"{folder / SETTINGS} cannot be read or is damaged ({error}); {do}"
            ) from error
        jsonl.check_settings(f"{folder} was graded", then, settings, do)
    elif os.path.lexists(path):
        raise ValueError(
            f"{folder} has {GRADINGS} but no {SETTINGS}, so nothing says who has graded; {do}"
        )
    else:
        jsonl.write(
            folder / SETTINGS, [jsonl.line({"format": _FORMAT, "settings": settings})], _AGAIN
        )
    file = files.enter_context(
        jsonl.open_alone(path, "r+b" if os.path.lexists(path) else "x+b", do)
    )
    found: dict[_Key, Grading] = {}
    for number, line in enumerate(jsonl.lines_of(file), 1):
        try:
            grading = Grading(**json.loads(line))
            if grading.level not in judge.LEVELS:
                raise ValueError(f"its level is {grading.level!r}")
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is damaged ({error}); take that line out, and {_AGAIN}"
            ) from error
        found[grading.workers, grading.problem, grading.number, grading.grading] = grading
    return file, found


def _grade(
    endpoint: Endpoint, wanted: Mapping[_Key, Run], file: BinaryIO, tokens: int, before: int
) -> Sequence[Grading]:
    """Asks for gradings and writes them down as they come in."""
    found = []
    try:
        for (*_, number), run in tqdm(
            wanted.items(),
            "judging",
            unit=" gradings",
            leave=False,
            disable=not sys.stderr.isatty(),
        ):
            found.append(judge.grade(endpoint, run, number, tokens))
            jsonl.append(file, dataclasses.asdict(found[-1]), _AGAIN)
    except (JudgeError, KeyboardInterrupt) as error:
        kept = f"{before + len(found)} of {before + len(wanted)} gradings are kept, and {_AGAIN}"
        if isinstance(error, JudgeError):
            raise JudgeError(f"{error}; {kept}") from error
        print(kept, file=sys.stderr)
        raise
    return found
