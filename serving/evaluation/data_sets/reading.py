"""Files of problems: found by their published names, read line by line, with the bad lines named.

JSON lines, JSON lists, and Parquet, in which data sets lie on the hub, a row for each line.
"""

import codecs
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxshare.extras import MissingExtraError
from jaxshare.serving.evaluation.problems import Problem, Task

DATA_VARIABLE = "JAXSHARE_DATA"
_ROWS = 256
"""Rows of a Parquet file that are read at once: those of a program's tests are long."""
Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set as it is published.

    Attributes:
      source: where it is from, in words.
      files: the files that hold it, by the names they are published under: the first group of which
        all are there is read.
      fields: of a line, in words, for errors.
      make: makes a problem of a line.
      answer_tokens: maximum tokens of an answer that is requested early (appendix C).
    """

    source: str
    files: tuple[tuple[str, ...], ...]
    fields: str
    make: Callable[[Line], Problem]
    answer_tokens: int

    @property
    def wanted(self) -> str:
        """The names of the files, in words."""
        return " or ".join(map(_in_words, self.files))


def _in_words(names: Sequence[str]) -> str:
    """Names of files: "a", "a with b", "a, b and c", and the first and the last of more."""
    if len(names) < 3:
        return " with ".join(names)
    if len(names) == 3:
        return f"{names[0]}, {names[1]} and {names[2]}"
    return f"{names[0]} to {names[-1]}"


def data_files(task: str, data_set: DataSet, folder: str | Path | None) -> list[Path]:
    """The files of a data set.

    Args:
      folder: that has them, or the one file itself; default $JAXSHARE_DATA.

    Raises:
      ValueError: there is no such folder or file.
    """
    folder = folder or os.environ.get(DATA_VARIABLE)
    need = f"the task {task} needs a folder with {data_set.wanted} ({data_set.source})"
    if not folder:
        raise ValueError(f"{need}; name it with --data-dir or in {DATA_VARIABLE}")
    if Path(folder).is_file():
        return [Path(folder)]
    for group in data_set.files:
        if all(Path(folder, name).is_file() for name in group):
            return [Path(folder, name) for name in group]
    missing = [name for name in data_set.files[0] if not Path(folder, name).is_file()]
    what = f"has no {missing[0]}" if Path(folder).is_dir() else "does not exist"
    raise ValueError(
        f"{need}, but {folder} {what}; name another, or the file itself, with --data-dir or in "
        f"{DATA_VARIABLE}"
    )


def read_data_set(
    task: str,
    data_set: DataSet,
    folder: str | Path | None,
    samples: int | None = None,
    wanted: Callable[[Line], bool] = lambda line: True,
) -> Task:
    """Reads the first problems of a data set.

    Args:
      samples: their number; default all.
      wanted: says of a line whether it is a problem of the task; others are passed over.

    Raises:
      ValueError: no file, one that cannot be read, one of another form, or too few problems.
    """
    return read_files(
        task,
        data_files(task, data_set, folder),
        samples,
        lambda problems: data_set.answer_tokens,
        data_set.make,
        f"with {data_set.fields} ({data_set.source})",
        wanted,
    )


def read_files(
    name: str,
    paths: Sequence[Path],
    samples: int | None,
    tokens: Callable[[Sequence[Problem]], int],
    make: Callable[[Line], Problem],
    advice: str,
    wanted: Callable[[Line], bool] = lambda line: True,
    *,
    fewer: bool = False,
) -> Task:
    """Reads the first problems of files; a problem without an id has its line number as id.

    Args:
      name: of the task.
      paths: in order.
      samples: number of problems; default all.
      tokens: gives the maximum tokens of an early answer for all problems.
      make: makes a problem of a line.
      advice: what a line must have, in words, for a file without one that can be run.
      wanted: says of a line whether it is a problem of the task.
      fewer: files may have fewer problems than `samples`, but at least one.

    Raises:
      ValueError: a file that cannot be read, or too few problems.
    """
    problems: dict[str, Problem] = {}
    bad_lines: list[dict[str, Any]] = []
    for path in paths:
        prefix = f"{path.stem}-" if len(paths) > 1 else ""
        for number, raw in _lines(path):
            if samples is not None and len(problems) == samples:
                break
            try:
                value = _object(raw)
                if not wanted(value):
                    continue
                problem = make(value)
                if not problem.id:
                    problem = dataclasses.replace(problem, id=f"{prefix}{number}")
                if problem.id in problems:
                    raise ValueError(
                        f"has the id {json.dumps(problem.id)} of a line before; give each line its "
                        "own"
                    )
                problems[problem.id] = problem
            except ValueError as error:
                bad_lines.append({"file": str(path), "line": number, "error": str(error)})
            except RecursionError:
                error = "is nested too deeply"
                bad_lines.append({"file": str(path), "line": number, "error": error})
    if not problems:
        first = f" (line {bad_lines[0]['line']} {bad_lines[0]['error']})" if bad_lines else ""
        raise ValueError(
            f"no line of the task file {paths[0]} can be run{first}; give at least one {advice}"
        )
    if samples is not None and not fewer:
        check_enough(name, samples, len(problems))
    return Task(name, (*problems.values(),), tokens([*problems.values()]), (*bad_lines,))


def check_enough(name: str, samples: int, available: int) -> None:
    """Raises ValueError for more samples than there are problems."""
    if samples > available:
        raise ValueError(f"--samples is {samples}, but {name} has {available} problems; lower it")


def text_of(line: Line, field: str) -> str:
    """The text in a field.

    Raises:
      ValueError: there is none.
    """
    text = line.get(field)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'has no text as its "{field}"; give at least one word')
    return text


def id_of(line: Line, *fields: str) -> str:
    """The id of a line in the first of these fields that it has; "" if it has none."""
    found = next((line[field] for field in fields if line.get(field) is not None), "")
    if type(found) not in (str, int):
        raise ValueError(
            f"has the id {json.dumps(found)[:40]}; it must be a string or a whole number"
        )
    return str(found)


def require(line: Line, *fields: str) -> None:
    """Raises ValueError for a line without one of these fields."""
    if missing := [field for field in fields if field not in line]:
        raise ValueError(
            f'has no field "{missing[0]}" (it has {", ".join(map(str, line))})'[:300]
            + "; it is of another form"
        )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file of JSON lines, the values of a JSON list, or the rows of a Parquet file, with
    their numbers."""
    if path.suffix == ".parquet":
        yield from _rows(path)
        return
    try:
        with open(path, "rb") as file:
            first = file.read(len(codecs.BOM_UTF8) + 64).removeprefix(codecs.BOM_UTF8)
            file.seek(0)
            if path.suffix == ".json" and first.lstrip().startswith(b"["):
                yield from _values(path, file.read())
                return
            for number, line in enumerate(file, 1):
                raw = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).rstrip(b"\n")
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise ValueError(
            f"the task file {path} cannot be read ({error}); give a file of JSON lines"
        ) from error


def _values(path: Path, data: bytes) -> Iterator[tuple[int, bytes]]:
    try:
        values = json.loads(data.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the task file {path} is no JSON list ({error}); give the file as it is published"
        ) from error
    for number, value in enumerate(values, 1):
        yield number, json.dumps(value).encode()


def _rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """The rows of a Parquet file as JSON; pictures and other bytes are left out.

    Raises:
      ValueError: the file cannot be read.
      MissingExtraError: pyarrow is not installed.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingExtraError(
            f"{path} is read with pyarrow, which is not installed", "parquet"
        ) from error
    try:
        with ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(_ROWS) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield number, json.dumps(row, default=_as_json).encode()
    except (ArrowException, OSError) as error:
        raise ValueError(
            f"the task file {path} is no Parquet file that can be read ({error}); give the file as "
            "it is published"
        ) from error


def _as_json(value: Any) -> str | None:
    return None if isinstance(value, bytes) else str(value)


def _object(raw: bytes) -> Line:
    try:
        value = json.loads(raw.decode())
        # JSON may escape half of a surrogate pair, which is no text.
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(f"is not JSON in UTF-8 ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"is {json.dumps(value)[:40]}; it must be a JSON object")
    return value
