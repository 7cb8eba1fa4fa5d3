"""The folder of an evaluation: its files, and their settings, which keep other evaluations out."""

import contextlib
import os
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare.models import LoadedModel
from jaxshare.serving import checksums, jsonl
from jaxshare.serving.evaluation import provenance, runs, scoring
from jaxshare.serving.evaluation.runs import Run
from jaxshare.serving.evaluation.scoring import Point
from jaxshare.serving.identity import check_ended_job, check_identity, files_stamp, identity

SETTINGS, RUNS, SCORES, RESULT, TABLE, PICTURE = (
    "settings.json",
    "runs.jsonl",
    "scores.jsonl",
    "result.json",
    "table.txt",
    "accuracy.png",
)
OTHER, AGAIN = "give another --out", "--resume goes on with the evaluation"
"""Advice for error messages."""

_FORMAT = "jaxshare evaluation 2"


def open_runs(
    files: contextlib.ExitStack,
    folder: Path,
    settings: Mapping[str, Any],
    resume: bool,
    keys: Container[runs.Key],
) -> tuple[BinaryIO | None, list[Run]]:
    """Opens the file of runs, which `files` closes; with the runs in it, or None if there is none.

    Args:
      keys: of all runs of the evaluation.

    Raises:
      ValueError: the folder has an evaluation and `resume` is False, it has another evaluation, or
        a file is damaged or in use.
    """
    if not os.path.lexists(folder / SETTINGS):
        if os.path.lexists(folder / RUNS):
            raise ValueError(
                f"{folder} has {RUNS} but no {SETTINGS}, so nothing says which evaluation wrote "
                f"it; {OTHER}"
            )
        return None, []
    if not resume:
        raise ValueError(
            f"{folder} has an evaluation already; --resume goes on with it, or {OTHER}"
        )
    then = read_settings(folder)
    # a model is compared by its parameters, which may be in another folder now
    then["model"] = settings.get("model")
    jsonl.check_settings(
        f"the evaluation in {folder} began",
        _compared(then),
        _compared(settings),
        OTHER,
        causes=_CAUSES,
        notes=_NOTES,
        as_options=True,
    )
    if not os.path.lexists(folder / RUNS):  # a kill came between the two files
        return None, []
    file = files.enter_context(jsonl.open_alone(folder / RUNS, "r+b", OTHER))
    return file, runs.read_runs(file, folder / RUNS, keys)


_CAUSES = {
    "problems": "the task's problems are not those that the evaluation began with: its file, "
    "--data-dir, --questions, --dates or --seed is another one",
    "texts of the format": "the texts of --format have changed since the evaluation began",
}
_NOTES = {
    "samples": "problems cannot be added",
    "budgets": "budgets cannot be added",
    "workers": "numbers of workers cannot be added",
    "seeds": "seeds cannot be added",
}


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are compared: a format by its name, and then by its texts."""
    format = settings.get("format") or {"name": None, "texts": None}
    return {**settings, "format": format["name"], "texts of the format": format["texts"]}


def create_runs(
    files: contextlib.ExitStack, folder: Path, settings: Mapping[str, Any], model: dict[str, Any]
) -> BinaryIO:
    """Writes the settings of a new evaluation and opens its file of runs, which `files` closes."""
    value = {"format": _FORMAT, "settings": settings, **model}
    jsonl.write(folder / SETTINGS, [jsonl.line(checksums.sealed(value))], AGAIN)
    return files.enter_context(jsonl.open_alone(folder / RUNS, "xb", OTHER))


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads the settings of the evaluation in a folder.

    Raises:
      ValueError: there is none, or its file is damaged.
    """
    try:
        return jsonl.read_settings(folder / SETTINGS, _FORMAT)
    except ValueError as error:
        raise ValueError(
            f"{folder} has no evaluation that can be read ({SETTINGS}: {error}); name a folder that `jaxshare "
            "evaluate` has written"
        ) from error


def check_model(folder: Path, model: LoadedModel, name: str) -> dict[str, Any]:
    """The identity of the model (`jaxshare.serving.identity`), for the settings of the folder.

    Args:
      folder: of the evaluation.
      model: that is loaded.
      name: by which it is named now.

    Raises:
      ValueError: the evaluation in the folder began with another model.
    """
    if not os.path.lexists(folder / SETTINGS):
        return {**identity(model), **files_stamp(name)}
    saved = checksums.loads((folder / SETTINGS).read_bytes())
    names = saved["settings"].get("model"), name
    return check_identity(f"the evaluation in {folder}", saved, model, OTHER, names)


def check_finished(folder: Path, name: str, load: Callable[[], LoadedModel]) -> None:
    """Checks that a finished evaluation was of the model that is named now.

    Raises:
      ValueError: the evaluation was of another model.
    """
    saved = checksums.loads((folder / SETTINGS).read_bytes())
    names = saved["settings"].get("model"), name
    check_ended_job(f"the evaluation in {folder}", saved, load, OTHER, names)


def check_code(folder: Path) -> None:
    """Raises ValueError if the evaluation in the folder began with other code that decides texts."""
    if os.path.lexists(folder / SETTINGS):
        saved = checksums.loads((folder / SETTINGS).read_bytes())
        provenance.check_code(f"the evaluation in {folder}", saved, OTHER)


def provenance_of(task_options: Mapping[str, Any]) -> dict[str, Any]:
    """The content of settings.json for a new evaluation, besides settings and model.

    Args:
      task_options: with which the task was loaded.
    """
    return {
        "task_options": dict(task_options),
        "versions": provenance.versions(),
        "code": provenance.code(),
    }


def read_provenance(folder: Path) -> dict[str, Any]:
    """The model, the versions, the code and the options of the task that the runs are from.

    An evaluation of an earlier version has a part of it.
    """
    saved = checksums.loads((folder / SETTINGS).read_bytes())
    about = {name: saved[name] for name in ("task_options", "versions", "code") if name in saved}
    known = {"format", "settings", "files", checksums.FIELD, *about}
    return {"model": {name: saved[name] for name in saved if name not in known}, **about}


def read_lines(folder: Path, settings: Mapping[str, Any]) -> dict[str, list[Point]]:
    """Reads the lines of another finished evaluation (--beside), by their label in the legend.

    Args:
      folder: of the other evaluation.
      settings: of this one.

    Raises:
      ValueError: the folder has no finished evaluation, or one of other problems.
    """
    try:
        result = checksums.loads((folder / RESULT).read_bytes())
        theirs, points = result["settings"], [Point(**point) for point in result["points"]]
        problems, method = theirs["problems"], theirs["method"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"--beside is {folder}, which has no finished evaluation ({type(error).__name__}: "
            f"{error}); name a folder with {RESULT} in it"
        ) from error
    if problems != settings["problems"]:
        raise ValueError(
            f"--beside is {folder}, whose problems are others; name an evaluation of the same ones"
        )
    return scoring.lines(method, points)
