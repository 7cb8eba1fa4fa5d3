"""The output of a batch job, and OUTPUT.job beside it, which keeps the job's settings.

While the job runs, each line of the output has a field "checksum". The lines of a complete output
have none: their checksums are in OUTPUT.job.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare import FinishReason
from jaxshare.models import LoadedModel
from jaxshare.paths import reason
from jaxshare.serving import checksums, jsonl
from jaxshare.serving.errors import RefusedInputError
from jaxshare.serving.identity import check_ended_job, check_identity, files_stamp, identity

Key = tuple[int, tuple[int, ...], int]
"""A completion: the line of its prompt, the path of its branch in that line's tree, its number."""

OTHER, AGAIN = "give another --output", "--resume goes on with the job"
"""Advice for error messages."""

_FORMAT, _FORMER = "jaxshare batch job 3", "jaxshare batch job 2"
"""The format of a job, and that of the version before, which has neither "model" nor "share"."""
_CHANGED_INPUT = (
    "the input file has changed since the job began, whose completions would be of two inputs"
)
_RESULT = {
    "line": int,
    "index": int,
    "text": str,
    "tokens": list,
    "finish_reason": str,
    "logprob": float,
}
"""The fields of every line of the output, beside the id."""
_ALL = {*_RESULT, "id", "branch", "error", "logprobs", "top_logprobs"}


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
        "lines": None if lines is None else [*map(checksums.checksum, lines)],
    }
    jsonl.write(job, [jsonl.line(checksums.sealed(value))], AGAIN)


def write_finished(
    output: Path,
    job: Path,
    settings: Mapping[str, Any],
    model: Mapping[str, Any],
    finished: Mapping[str, Any],
    lines: Sequence[bytes],
) -> None:
    """Writes the output of a complete job, and the file of the job before it.

    So there are checksums for all lines at any moment. The arguments are those of `write_job`.

    Raises:
      ValueError: a file cannot be written.
    """
    write_job(job, settings, model, finished, lines)
    jsonl.write(output, lines, AGAIN)


def read_finished(
    job: Path, settings: Mapping[str, Any], file: BinaryIO
) -> tuple[dict[str, Any] | None, Collection[str]]:
    """Reads what is known of a job that was started.

    Returns:
      The counts of a finished job whose output has not changed since, None for any other; and the
      checksums of a finished job's lines, none for any other.

    Raises:
      ValueError: the file of the job is missing or damaged, or its settings are others, which would
        give other texts.
    """
    output = file.name
    try:
        known = checksums.loads(job.read_bytes())
        then, finished, digest = {**known["settings"]}, known["finished"], known["output"]
        lines = {*(known.get("lines") or ())}
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
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{job} cannot be read or is damaged ({type(error).__name__}: {error}); {OTHER}"
        ) from error
    jsonl.check_settings(
        f"the job of {output} began",
        # a model is compared by its parameters, which may be in another folder now
        {**then, "model": settings["model"]},
        settings,
        OTHER,
        causes={"input": _CHANGED_INPUT, "form": "the lines of the input had another form"},
        as_options=True,
    )
    unchanged = digest == jsonl.sha256(read_file(output, "output"))
    return finished if unchanged else None, lines


def _read_model(job: Path) -> tuple[dict[str, Any], str | None]:
    """The identity of the model that a job began with, as far as its file has it, and its name.

    Raises:
      ValueError: the file is damaged; `read_finished` has found the rest.
    """
    try:
        saved = checksums.loads(job.read_bytes())
        return {**saved.get("model", {})}, saved["settings"].get("model")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{job} cannot be read or is damaged ({type(error).__name__}: {error}); {OTHER}"
        ) from error


def known_model(
    output: Path, job: Path, settings: Mapping[str, Any], model: LoadedModel, *, is_new: bool
) -> dict[str, Any]:
    """The identity of the model of a job, and what tells if its files have changed.

    It is saved where a job that goes on has not saved it.

    Raises:
      ValueError: the job began with another model.
    """
    stamp = files_stamp(settings["model"])
    if is_new:
        return {**identity(model), **stamp}
    saved, name = _read_model(job)
    names = name, settings["model"]
    known = {**check_identity(f"the job of {output}", saved, model, OTHER, names), **stamp}
    if known != saved:
        write_job(job, settings, known)
    return known


def check_finished(
    output: Path, job: Path, settings: Mapping[str, Any], load: Callable[[], LoadedModel]
) -> None:
    """Checks that a finished job was of the model that is named now.

    Raises:
      ValueError: the job was of another model.
    """
    saved, name = _read_model(job)
    names = name, settings["model"]
    check_ended_job(f"the job of {output}", saved, load, OTHER, names)


def open_existing(output: Path, resume: bool) -> BinaryIO:
    """Opens an output that is there, for the job that wrote it.

    Raises:
      ValueError: the job is not to go on, or another process has the output.
    """
    if not resume:
        raise ValueError(
            f"the output {output} exists; --resume goes on with the job that wrote it, or "
            "give another --output"
        )
    return jsonl.open_alone(output, "r+b", OTHER)


def read_keys(file: BinaryIO, output: Path, known: Collection[str]) -> list[Key]:
    """The completions that the output has.

    A last line that was being written when its writer was killed is cut off.

    Args:
      file: at its start; afterwards at its end.
      output: its path.
      known: the checksums of lines that have none of their own; none if they are not known.

    Raises:
      ValueError: a line is damaged or repeated.
    """
    keys: dict[Key, int] = {}
    for number, line in enumerate(jsonl.lines_of(file), 1):
        key, plain, is_sealed = _read_line(line, number, output)
        if known and not is_sealed and checksums.checksum(plain) not in known:
            raise damaged_line(output, number, f"its checksum is not in {output}.job")
        first = keys.setdefault(key, number)
        if first != number:
            raise damaged_line(output, number, f"it repeats line {first}")
    return [*keys]


def sorted_lines(output: Path, order: Mapping[Key, tuple[int, int]]) -> list[bytes]:
    """The lines of the output in the order of the input, which `order` gives for each key.

    Raises:
      ValueError: a line is damaged.
    """
    written = read_file(output, "output").split(b"\n")[:-1]
    lines = [_read_line(line, number, output) for number, line in enumerate(written, 1)]
    if lost := next(
        (number for number, (key, *_) in enumerate(lines, 1) if key not in order), None
    ):
        raise damaged_line(output, lost, "it is of no prompt of the input")
    return [line for _, line, _ in sorted(lines, key=lambda read: order[read[0]])]


def num_failed(lines: Sequence[bytes]) -> int:
    """The number of completions among these lines that have ended with an error."""
    failed = str(FinishReason.ERROR), str(FinishReason.NO_TOKEN)
    return sum(json.loads(line)["finish_reason"] in failed for line in lines)


_MAX_BYTES = 2**32
"""The most bytes that are read of an input or an output."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Surrounds what reads the input or settings: its errors become `RefusedInputError`."""
    try:
        yield
    except ValueError as error:
        raise RefusedInputError(str(error)) from error


def read_file(path: str | Path, what: str) -> bytes:
    """Reads a whole file, the "input" or the "output".

    Raises:
      ValueError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"the {what} {path} cannot be read ({reason(error)}); give a file of JSON lines"
        ) from error
    if len(data) > _MAX_BYTES:
        raise ValueError(f"the {what} {path} has more than {_MAX_BYTES >> 30} GiB; split it")
    return data


def damaged_line(output: Path, number: int, reason: str) -> ValueError:
    """The error for a line of the output that is no completion of the job."""
    return ValueError(
        f"line {number} of the output {output} is damaged ({reason}); take that line out, and "
        "--resume samples it again"
    )


def _read_line(line: bytes, number: int, output: Path) -> tuple[Key, bytes, bool]:
    """Reads a line: its key, the line as a complete output has it, and if it has a checksum.

    Raises:
      ValueError: it is damaged.
    """
    try:
        written = checksums.parse(line)
        result = _renamed(checksums.unsealed(written))
        if wrong := [name for name, kind in _RESULT.items() if type(result[name]) is not kind]:
            raise TypeError(f"its {wrong[0]} is {json.dumps(result[wrong[0]])[:40]}")
        if unknown := result.keys() - _ALL:
            raise ValueError(f"it has {json.dumps(min(unknown))[:40]}")
        key = result["line"], tuple(map(int, result.get("branch", ()))), result["index"]
        plain = line + b"\n" if result is written else jsonl.line(result)
        return key, plain, checksums.FIELD in written
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged_line(output, number, f"{type(error).__name__}: {error}") from error


def _renamed(result: Any) -> Any:
    """The line with the field `finish_reason`, where an earlier version has written `reason`."""
    if not isinstance(result, dict) or "reason" not in result:
        return result
    former = {"reason": "finish_reason"}
    result = {former.get(name, name): value for name, value in result.items()}
    if result["finish_reason"] == "budget":
        result["finish_reason"] = str(FinishReason.LENGTH)
    return result
