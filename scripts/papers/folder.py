"""The folder of an experiment of one of the papers: points as they finish, then the report and the
pictures.

    settings.json   the experiment, its settings, the model's identity, the code: they keep others out
    points.jsonl    a line for each start of the command, and one for each point, as soon as it is known
    result.json     the report, which `--redraw` makes afresh without running anything
    *.png           the pictures

A command that is interrupted loses the point that it was at: `--resume` goes on with the others. It
is refused, by name, where a setting, the model or the code that decides texts has changed.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from jaxshare import models
from jaxshare.models import EMBEDDED, LoadedModel
from jaxshare.paths import whole_file
from jaxshare.serving import checksums, jsonl
from jaxshare.serving.cluster import process_mesh
from jaxshare.serving.evaluation import provenance
from jaxshare.serving.identity import check_identity, identity
from jaxshare.serving.locks import OutputLock
from scripts.bench.lib import Parser, machine
from scripts.bench.parts.sharing import plots

SETTINGS, POINTS, RESULT = "settings.json", "points.jsonl", "result.json"
OTHER, AGAIN = "give another --output", "--resume goes on with the experiment"
"""Advice for error messages."""
_FORMAT = "jaxshare paper 1"


def add_arguments(parser: Parser) -> None:
    """Adds what the commands of all papers have: the model, the folder, and how to go on."""
    parser.add_argument(
        "--model",
        default=EMBEDDED,
        metavar="MODEL",
        help="folder, GGUF file or hub id, or `embedded` for the model that comes with jaxshare (default)",
    )
    parser.add_argument(
        "--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's own)"
    )
    parser.add_argument(
        "--tensor",
        type=int,
        default=1,
        metavar="N",
        help="split heads, MLP and vocabulary over N devices (default 1)",
    )
    parser.set_defaults(expert=1, kv=1, data=1)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the points, the report and the pictures",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the experiment that started the folder"
    )
    parser.add_argument(
        "--redraw",
        action="store_true",
        help="make the report and the pictures of the folder's points, without running anything",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def check_arguments(parser: Parser, given: argparse.Namespace) -> None:
    """Ends the program where the options of `add_arguments` cannot be right."""
    parser.check_folder("--output", given.output)
    parser.at_least(0, seed=given.seed)
    if given.resume and given.redraw:
        parser.error("--resume and --redraw are both given; give one of them")


def load(options: argparse.Namespace) -> LoadedModel:
    """Loads the model that the options of `add_arguments` name, onto a mesh where --tensor asks for
    one.

    Raises:
      ValueError, OSError, ImportError: see `jaxshare.models.load`.
    """
    return models.load(options.model, dtype=options.dtype, mesh=process_mesh.mesh_of(options))


def model_name(options: argparse.Namespace) -> str:
    """The name of the model of `add_arguments` as reports have it: of a folder its last part."""
    path = Path(options.model)
    return path.name if path.is_dir() else options.model


def digest(value: Any) -> str:
    """A hash of a JSON value, for settings."""
    return jsonl.sha256(json.dumps(value).encode())


def plural(count: int, what: str) -> str:
    """A number of things, such as "1 round" or "5 rounds"."""
    return f"{count} {what}{'s' * (count != 1)}"


def exit_code(program: str, work: Callable[[], int]) -> int:
    """The exit code of `work`; 2, after one sentence on stderr, for what it refuses, and 130 where
    it was interrupted."""
    try:
        return work()
    except (ValueError, OSError, ImportError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted; --resume goes on after the last point", file=sys.stderr)
        return 130


def this_machine() -> dict[str, Any]:
    """The parts of the machine on which times depend, for settings: its processor, its cores and
    its devices."""
    import jax

    whole = machine()
    kinds = [device.device_kind for device in jax.devices()]
    return {"cpu": whole["cpu"], "cores": whole["cores"], "devices": sorted({*kinds})}


@dataclasses.dataclass
class PaperFolder:
    """The points of one experiment; from `opened`, or from `read` without a way to add any.

    Attributes:
      path: of the folder.
      experiment: its name.
      settings: as JSON holds them.
      model: the identity of the model (`jaxshare.serving.identity`).
      about: versions and hashes of the code, when the experiment began.
      runs: for each start of the command what it ran on: machine, versions, command, time.
    """

    path: Path
    experiment: str
    settings: dict[str, Any]
    model: dict[str, Any]
    about: dict[str, Any]
    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _points: dict[str, tuple[dict[str, Any], Any]] = dataclasses.field(default_factory=dict)
    _file: BinaryIO | None = None

    @classmethod
    def read(cls, path: Path, experiment: str) -> Self:
        """The experiment of a folder, to look at.

        Raises:
          ValueError: there is none, it is another one, or a file is damaged.
        """
        saved = _saved(path, experiment)
        found = cls(path, experiment, saved["settings"], saved["model"], saved["about"])
        with contextlib.suppress(FileNotFoundError), open(path / POINTS, "rb") as file:
            found._take(file.read().split(b"\n")[:-1])  # what is after the last end is incomplete
        return found

    def __contains__(self, key: Mapping[str, Any]) -> bool:
        return _name(key) in self._points

    def __len__(self) -> int:
        return len(self._points)

    def value(self, key: Mapping[str, Any]) -> Any:
        """The value of a point.

        Raises:
          KeyError: it is not known.
        """
        return self._points[_name(key)][1]

    def points(self) -> list[tuple[dict[str, Any], Any]]:
        """Key and value of all points, in the order in which they were found."""
        return [*self._points.values()]

    def add(self, key: Mapping[str, Any], value: Any) -> None:
        """Adds a point, which is on the disk when this returns.

        Args:
          key: the settings of the point, as JSON.
          value: JSON.

        Raises:
          ValueError: it cannot be written.
        """
        assert self._file is not None
        line = {"key": dict(key), "run": len(self.runs) - 1, "value": value}
        jsonl.append(self._file, line, AGAIN, sync=True)
        self._points[_name(key)] = dict(key), json.loads(json.dumps(value))

    def report(self, results: Any, **more: Any) -> dict[str, Any]:
        """Writes result.json; what is in it.

        Raises:
          ValueError: it cannot be written.
        """
        found = {
            "experiment": self.experiment,
            "settings": self.settings,
            "model": self.model,
            **self.about,
            "runs": self.runs,
            **more,
            "results": results,
        }
        jsonl.write(self.path / RESULT, [jsonl.line(checksums.sealed(found))], OTHER)
        return found

    def _take(self, lines: Sequence[bytes]) -> None:
        for number, line in enumerate(lines, 1):
            try:
                found = checksums.loads(line)
                if "about" in found:
                    self.runs.append(found["about"])
                else:
                    self._points[_name(found["key"])] = found["key"], found["value"]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"line {number} of {self.path / POINTS} is damaged ({error}); remove the line, "
                    f"or {OTHER}"
                ) from error


@contextlib.contextmanager
def opened(
    path: Path,
    experiment: str,
    settings: Mapping[str, Any],
    model: LoadedModel | None,
    *,
    resume: bool,
    command: str,
    versions: Mapping[str, Any] | None = None,
) -> Iterator[PaperFolder]:
    """Opens the folder of an experiment for this process alone, or begins it.

    Args:
      path: of the folder, which is made if it is missing.
      experiment: its name, such as "hydragen throughput".
      settings: all that points depend on beside the model, as JSON.
      model: None where an experiment that has begun goes on in a process without it.
      resume: an experiment may be there.
      command: the command line, fit to be published.
      versions: of packages beside those of `provenance.versions`.

    Raises:
      ValueError: an experiment is there and `resume` is False, it has other settings, another model
        or other code, or a file is damaged, in use or cannot be written.
    """
    settings = dict(json.loads(json.dumps(settings)))
    with OutputLock.of_folder(path, OTHER), contextlib.ExitStack() as files:
        if (path / SETTINGS).exists():
            if not resume:
                raise ValueError(
                    f"{path} has an experiment already; --resume goes on with it, or {OTHER}"
                )
            found = _continued(path, experiment, settings, model)
        else:
            if (path / POINTS).exists():
                raise ValueError(
                    f"{path} has {POINTS} but no {SETTINGS}, so nothing says which experiment wrote "
                    f"it; {OTHER}"
                )
            assert model is not None
            found = _begun(path, experiment, settings, model)
        mode = "r+b" if (path / POINTS).exists() else "xb"
        file = found._file = files.enter_context(jsonl.open_alone(path / POINTS, mode, OTHER))
        if mode == "r+b":
            found._take(jsonl.lines_of(file))
        about = {
            "command": command,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": {**provenance.versions(), **(versions or {})},
        }
        found.runs.append(about)
        jsonl.append(file, {"about": about}, AGAIN, sync=True)
        yield found


def _begun(
    path: Path, experiment: str, settings: dict[str, Any], model: LoadedModel
) -> PaperFolder:
    about = {"versions": provenance.versions(), "code": provenance.code()}
    found = PaperFolder(path, experiment, settings, identity(model), about)
    value = {
        "format": _FORMAT,
        "experiment": experiment,
        "settings": settings,
        "model": found.model,
        "about": about,
    }
    jsonl.write(path / SETTINGS, [jsonl.line(checksums.sealed(value))], OTHER)
    return found


def _continued(
    path: Path, experiment: str, settings: dict[str, Any], model: LoadedModel | None
) -> PaperFolder:
    saved, what = _saved(path, experiment), f"the experiment in {path}"
    jsonl.check_settings(f"{what} began", saved["settings"], settings, OTHER)
    provenance.check_code(what, saved["about"], OTHER)
    if model is not None and model.params:  # without them the settings say what counts
        check_identity(what, saved["model"], model, OTHER)
    return PaperFolder(path, experiment, saved["settings"], saved["model"], saved["about"])


def _saved(path: Path, experiment: str) -> dict[str, Any]:
    """The content of settings.json."""
    try:
        saved = checksums.loads((path / SETTINGS).read_bytes())
        if saved["format"] != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT!r}")
        for name in ("settings", "model", "about"):
            saved[name].keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} has no experiment that can be read ({SETTINGS}: {error}); {OTHER}"
        ) from error
    if saved["experiment"] != experiment:
        raise ValueError(
            f"{path} has the experiment {saved['experiment']!r}, not {experiment!r}; {OTHER}"
        )
    return saved


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps(dict(key), sort_keys=True)


def draw(path: Path, pictures: Mapping[str, Callable[[], Any]]) -> list[str]:
    """Draws pictures into a folder; the names of their files.

    Without matplotlib none are drawn, and stderr says how to get them.

    Args:
      path: of the folder.
      pictures: by the name of its file what makes the figure.
    """
    if not plots.available():
        print(
            "pictures are left out, because matplotlib is not installed; `pip install "
            "'jaxshare[plot]'` has it, and --redraw draws them",
            file=sys.stderr,
        )
        return []
    for name, make in pictures.items():
        with whole_file(path / name, "wb") as file:
            make().savefig(file, dpi=130, metadata={"Software": None})
    return [*pictures]


def report_of(
    options: argparse.Namespace,
    experiment: str,
    summarise: Callable[[PaperFolder], Mapping[str, Any]],
    pictures: Callable[[Mapping[str, Any]], Mapping[str, Callable[[], Any]]],
    as_text: Callable[[Mapping[str, Any]], str],
) -> None:
    """Makes the report and the pictures of a folder's points, and prints the report.

    Args:
      options: of `add_arguments`.
      experiment: its name, as in `opened`.
      summarise: of the folder, what follows from its points.
      pictures: of that, what `draw` takes.
      as_text: of the report, its text.
    """
    found = PaperFolder.read(options.output, experiment)
    results = summarise(found)
    report = found.report(results, pictures=draw(options.output, pictures(results)))
    finish(report, as_text(report), options.output, as_json=options.json)


def finish(report: Mapping[str, Any], text: str, path: Path, *, as_json: bool) -> None:
    """Prints a report as one JSON object, or its text; and where its files are, on stderr."""
    print(json.dumps(report) if as_json else text, flush=True)
    print(f"all points, the report and the pictures are in {path}", file=sys.stderr)
