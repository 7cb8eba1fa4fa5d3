"""The command `jaxshare judge`: grades the collaboration of workers.

It reads the texts that `jaxshare evaluate` has written:

    jaxshare judge DIR --endpoint http://localhost:8000/v1 --model NAME

DIR gets judge.json, which keeps other settings out; gradings.jsonl, a line as each grading comes
in; and at the end collaboration.json. A grading that is in gradings.jsonl is not requested again:
the same command goes on where another one ended.
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

from jaxshare import progress
from jaxshare.paths import check_folder
from jaxshare.serving import checksums, jsonl
from jaxshare.serving.cli import arguments
from jaxshare.serving.evaluation import judge
from jaxshare.serving.evaluation.folder import RUNS, read_settings
from jaxshare.serving.evaluation.judge import Endpoint, Grading, JudgeError
from jaxshare.serving.evaluation.runs import Run, label
from jaxshare.serving.locks import OutputLock

SETTINGS, GRADINGS, RESULT = "judge.json", "gradings.jsonl", "collaboration.json"
_FORMAT = "jaxshare judge 1"
_METHODS = ("workers", "self-consistency", "vote")
"""The methods whose streams are workers."""
_AGAIN = "the same command goes on"

_Key = tuple[int, str, int, int]
"""A grading: the number of workers, the problem's id, the number of the run, its own number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare judge`."""
    parser.add_argument("folder", metavar="DIR", help="folder that `jaxshare evaluate` has written")
    parser.add_argument(
        "--endpoint",
        required=True,
        metavar="URL",
        help="address of an API with OpenAI's protocol, such as http://localhost:8000/v1",
    )
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="name of the judge at the endpoint"
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
        help="gradings of each run, which are averaged (default %(default)s)",
    )
    parser.add_argument(
        "--prefix-tokens",
        type=int,
        default=judge.PREFIX_TOKENS,
        metavar="N",
        help="tokens of each worker that the judge sees, from the start (default %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=float, help="temperature of the judge (default: the endpoint's own)"
    )
    parser.add_argument(
        "--attempts",
        type=int,
        default=Endpoint.attempts,
        metavar="N",
        help="attempts per grading, with longer and longer pauses between them "
        "(default %(default)s)",
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Grades the runs of two workers or more that have not been graded.

    Raises:
      ValueError: a folder without such runs, or that another judge has graded; wrong settings; a
        judge that does not answer, or not as it should. The gradings made by then are kept.
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
    keys = {(*run.key, i): run for run in runs for i in range(options.gradings)}
    with contextlib.ExitStack() as files:
        # not the folder, which an evaluation that is going on has
        files.enter_context(OutputLock.of_file(folder / GRADINGS, "judge another folder"))
        file, done = _open(files, folder, settings)
        # Gradings of runs that have been taken out since are left alone, and do not count.
        gradings = [grading for key, grading in done.items() if key in keys]
        before = len(gradings)
        pending = {key: run for key, run in keys.items() if key not in done}
        gradings += _grade(endpoint, pending, file, options.prefix_tokens, before)
    method = read_settings(folder)["method"]
    result = {
        "settings": settings,
        "method": method,
        "levels": judge.average_levels(gradings),
        "gradings": len(gradings),
        "from_before": before,
        "folder": str(folder),
    }
    if options.json:
        print(json.dumps(result), flush=True)
    else:
        print("level of collaboration, 1 to 6")
        for level in result["levels"]:
            error = "" if level["standard_error"] is None else f" +- {level['standard_error']:.2f}"
            who = label(method, level["workers"])
            print(f"{who}: {level['level']:.2f}{error} ({level['runs']} runs)")
    jsonl.write(folder / RESULT, [jsonl.line(result)], _AGAIN)
    return 0


def _read_runs(folder: Path) -> list[Run]:
    """Reads the runs of two workers or more."""
    method = read_settings(folder)["method"]
    if method not in _METHODS:
        raise ValueError(
            f"{folder} was written by the method {method}, which has no workers; judge one of "
            f"{', '.join(_METHODS)}"
        )
    runs = []
    try:
        for number, line in enumerate((folder / RUNS).read_bytes().split(b"\n")[:-1], 1):
            try:
                runs.append(Run.read(line))
            except ValueError as error:
                raise ValueError(
                    f"line {number} of {folder / RUNS} is damaged ({error}); take that line out"
                ) from error
    except OSError as error:
        raise ValueError(
            f"{folder / RUNS} cannot be read ({error}); name a folder that `jaxshare evaluate` has "
            "written"
        ) from error
    runs = [run for run in runs if run.workers > 1]
    if not runs:
        raise ValueError(
            f"{folder} has no run of two workers or more, and one worker has no others to work "
            "with; evaluate with --workers 2"
        )
    return runs


def _open(
    files: contextlib.ExitStack, folder: Path, settings: Mapping[str, Any]
) -> tuple[BinaryIO, dict[_Key, Grading]]:
    """The file of gradings, and the gradings that are in it."""
    path = folder / GRADINGS
    advice = f"move {path} and {folder / SETTINGS} away to start anew"
    if os.path.lexists(folder / SETTINGS):
        try:
            then = jsonl.read_settings(folder / SETTINGS, _FORMAT)
        except ValueError as error:
            raise ValueError(
                f"{folder / SETTINGS} cannot be read or is damaged ({error}); {advice}"
            ) from error
        jsonl.check_settings(f"{folder} was graded", then, settings, advice)
    elif os.path.lexists(path):
        raise ValueError(
            f"{folder} has {GRADINGS} but no {SETTINGS}, so nothing says which judge has graded; "
            f"{advice}"
        )
    else:
        jsonl.write(
            folder / SETTINGS,
            [jsonl.line(checksums.sealed({"format": _FORMAT, "settings": settings}))],
            _AGAIN,
        )
    file = files.enter_context(
        jsonl.open_alone(path, "r+b" if os.path.lexists(path) else "x+b", advice)
    )
    gradings: dict[_Key, Grading] = {}
    for number, line in enumerate(jsonl.lines_of(file), 1):
        try:
            grading = Grading(**checksums.loads(line))
            if grading.level not in judge.LEVELS:
                raise ValueError(f"its level is {grading.level!r}")
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is damaged ({error}); take that line out, and {_AGAIN}"
            ) from error
        gradings[grading.workers, grading.problem, grading.number, grading.grading] = grading
    return file, gradings


def _grade(
    endpoint: Endpoint, pending: Mapping[_Key, Run], file: BinaryIO, tokens: int, before: int
) -> Sequence[Grading]:
    """Requests gradings and writes them as they come in."""
    gradings = []
    try:
        for (*_, number), run in progress.each(pending.items(), "judging", "gradings"):
            gradings.append(judge.grade(endpoint, run, number, tokens))
            jsonl.append(file, dataclasses.asdict(gradings[-1]), _AGAIN, sync=True)
    except (JudgeError, KeyboardInterrupt) as error:
        kept = (
            f"{before + len(gradings)} of {before + len(pending)} gradings are kept, and {_AGAIN}"
        )
        if isinstance(error, JudgeError):
            raise JudgeError(f"{error}; {kept}") from error
        print(kept, file=sys.stderr)
        raise
    return gradings
