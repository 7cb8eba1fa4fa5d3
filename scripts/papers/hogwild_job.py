"""The common parts of the figures of Hogwild! Inference: the job and its files."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxshare.models import LoadedModel
from jaxshare.serving import jsonl
from jaxshare.serving.cluster.model_spec import ModelSpec
from scripts.papers import folder as papers
from scripts.papers.folder import PaperFolder
from scripts.papers.hogwild_cases import Evaluations, Words, options_of

TABLE = "table.md"
INCOMPLETE = 3
"""The exit code where lines of a task are bad or problems were refused; the others have been run."""


@dataclasses.dataclass
class Job:
    """A figure to make.

    Attributes:
      figure: its name.
      models: names of the models.
      settings: all that its numbers depend on, as JSON, for the folder.
      out: the folder of all figures; that of this figure is in it.
      resume: it may have begun before.
      command: the command line, fit to be published.
      words: of `jaxshare evaluate` that decide texts, for loading; where: those that do not, such
        as devices.
      options: of the command.
      evaluations: where models are loaded.
      incomplete: problems are missing from it.
    """

    figure: str
    models: tuple[str, ...]
    settings: dict[str, Any]
    out: Path
    resume: bool
    command: str
    words: Words
    where: Words
    options: argparse.Namespace
    evaluations: Evaluations = dataclasses.field(default_factory=Evaluations)
    incomplete: bool = False

    @property
    def path(self) -> Path:
        """The folder of this figure."""
        return self.out / self.figure

    @property
    def experiment(self) -> str:
        """The name of the figure among those of all papers."""
        return f"hogwild {self.figure}"

    @property
    def load_options(self) -> argparse.Namespace:
        """The options of `jaxshare evaluate` that load the first model."""
        unused = ("--task", "", "--budgets", "", "--out", "")
        return options_of((self.models[0], *self.words, *self.where, *unused))

    @contextlib.contextmanager
    def opened(self, model: LoadedModel | None = None) -> Iterator[PaperFolder]:
        """The folder of this figure; with the first model's identity.

        Args:
          model: loaded; by default one without parameters, for figures whose evaluations have the
            identities of their models.
        """
        if model is None:
            model = ModelSpec.of(self.load_options).outline()
        with papers.opened(
            self.path,
            self.experiment,
            self.settings,
            model,
            resume=self.resume,
            command=self.command,
        ) as found:
            yield found

    def read(self) -> PaperFolder:
        """The folder of this figure, as it is."""
        return PaperFolder.read(self.path, self.experiment)


Pictures = Mapping[str, Callable[[], Any]]
"""By the name of its file what makes a matplotlib figure."""


def write(
    job: Job, kept: PaperFolder, results: Any, text: str, pictures: Pictures, **more: Any
) -> None:
    """Writes the report, the table and the pictures of a figure, and prints them.

    Raises:
      ValueError: one of them cannot be written.
    """
    report = kept.report(results, **more)
    jsonl.write(kept.path / TABLE, [text.encode() + b"\n"], papers.OTHER)
    papers.draw(kept.path, pictures)
    papers.finish(report, text, kept.path, as_json=job.options.json)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def note(text: str) -> None:
    """Says on stderr what is being done."""
    print(f"hogwild: {text}", file=sys.stderr, flush=True)
