"""The output of a batch job, and OUTPUT.job beside it, which keeps the job's settings."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare import FinishReason
from jaxshare.serving import jsonl

Key = tuple[int, tuple[int, ...], int]
"""A completion: the line of its prompt, the path of its branch in that line's tree, its number."""

OTHER, AGAIN = "give another --output", "--resume goes on with the job"
"""Advice for error messages."""

_FORMAT, _FORMER = "jaxshare batch job 3", "jaxshare batch job 2"
"""The format of a job, and that of the version before, which has neither "model" nor "share"."""
_RESULT = {
    "line": int,
    "index": int,
    "text": str,
    "tokens": list,
    "finish_reason": str,
    "logprob": float,
}
"""The fields of every line of the output, beside the id."""


def write_job(
    job: Path,
    settings: Mapping[str, Any],
    model: Mapping[str, Any],
    finished: Mapping[str, Any] | None = None,
    lines: Sequence[bytes] | None = None,
) -> None:
    """Writes the file of a job.

    Args:
      job: its path.
      settings: that decide the texts.
      model: its identity (`jaxshare.serving.identity`).
      finished: the counts of a job that is complete.
      lines: the whole output of a job that is complete.

    Raises:
      ValueError: the file cannot be written.
    """
    value = {
        "format": _FORMAT,
        "settings": settings,
        "model": model,
        "finished": finished,
        "output": None if lines is None else jsonl.sha256(b"".join(lines)),
    }
    jsonl.write(job, [jsonl.line(value)], AGAIN)


def read_finished(job: Path, settings: Mapping[str, Any], file: BinaryIO) -> dict[str, Any] | None:
    """The counts of a finished job whose output has not changed since; None for any other.

    Raises:
      ValueError: the file of the job is missing or damaged, or its settings are others, which would
        give other texts.
    """
    output = file.name
    try:
        known = json.loads(job.read_bytes())
        then, finished, digest = {**known["settings"]}, known["finished"], known["output"]
        if known["format"] == _FORMER:
            then.setdefault("share", settings["share"])
        if known["format"] not in (_FORMAT, _FORMER) or (
            finished and {*finished} - {"failed"} != {"completions", "prompts", "bad_lines"}
        ):
            raise ValueError(f"its format is not {_FORMAT!r}")
    except FileNotFoundError as error:
        raise ValueError(
            f"there is no {job}, so nothing says which job wrote {output}; {OTHER}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{job} cannot be read or is damaged ({type(error).__name__}: {error}); {OTHER}"
        ) from error
    jsonl.check_settings(f"the job of {output} began", then, settings, OTHER)
    unchanged = digest == jsonl.sha256(file.read())
    file.seek(0)
    return finished if unchanged else None


def read_model(job: Path) -> dict[str, Any]:
    """The identity of the model that a job began with, as far as its file has it.

    Raises:
      ValueError: the file is damaged; `read_finished` has found the rest.
    """
    try:
        return {**json.loads(job.read_bytes()).get("model", {})}
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{job} cannot be read or is damaged ({type(error).__name__}: {error}); {OTHER}"
        ) from error


def read_keys(file: BinaryIO, output: Path) -> list[Key]:
    """The completions that the output has.

    A last line that was being written when its writer was killed is cut off.

    Raises:
      ValueError: a line is damaged or repeated.
    """
    keys: dict[Key, int] = {}
    for number, line in enumerate(jsonl.lines_of(file), 1):
        first = keys.setdefault(_key(line, number, output), number)
        if first != number:
            raise damaged_line(output, number, f"it repeats line {first}")
    return [*keys]


def sorted_lines(output: Path, order: Mapping[Key, tuple[int, int]]) -> list[bytes]:
    """The lines of the output in the order of the input, which `order` gives for each key."""
    lines = map(_renamed, read_file(output, "output").splitlines(keepends=True))
    return sorted(lines, key=lambda line: order[_key(line, 0, output)])


def num_failed(lines: Sequence[bytes]) -> int:
    """The number of completions among these lines that have ended with an error."""
    failed = str(FinishReason.ERROR)
    return sum(json.loads(line)["finish_reason"] == failed for line in lines)


def read_file(path: str | Path, what: str) -> bytes:
    """Reads a whole file, the "input" or the "output".

    Raises:
      ValueError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"the {what} {path} cannot be read ({error}); give a file of JSON lines"
        ) from error


def damaged_line(output: Path, number: int, reason: str) -> ValueError:
    """The error for a line of the output that is no completion of the job."""
    return ValueError(
        f"line {number} of the output {output} is damaged ({reason}); take that line out, and "
        "--resume samples it again"
    )


def _renamed(line: bytes) -> bytes:
    """The line with the field `finish_reason`, where an earlier version has written `reason`."""
    if b'"reason"' not in line:
        return line
    result = json.loads(line)
    if not isinstance(result, dict) or "reason" not in result:
        return line
    former = {"reason": "finish_reason"}
    result = {former.get(name, name): value for name, value in result.items()}
    if result["finish_reason"] == "budget":
        result["finish_reason"] = str(FinishReason.LENGTH)
    return jsonl.line(result)


def _key(line: bytes, number: int, output: Path) -> Key:
    try:
        result = json.loads(_renamed(line))
        if wrong := [name for name, kind in _RESULT.items() if type(result[name]) is not kind]:
            raise TypeError(f"its {wrong[0]} is {json.dumps(result[wrong[0]])[:40]}")
        return result["line"], tuple(map(int, result.get("branch", ()))), result["index"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged_line(output, number, f"{type(error).__name__}: {error}") from error
