"""Evaluations that figures and benchmarks are composed of: each is one `jaxshare evaluate`.

The methods and the ablations of Hogwild! Inference (section 4.1, appendices D.2 and E.1) are words
of that command.
"""

import argparse
import contextlib
import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxshare import progress
from jaxshare.compile_time import reported_compiles
from jaxshare.models import LoadedModel
from jaxshare.serving import checksums
from jaxshare.serving.cli import arguments
from jaxshare.serving.cli.evaluation import evaluate, rescore
from jaxshare.serving.cluster import process_mesh
from jaxshare.serving.evaluation import execution
from jaxshare.serving.evaluation.folder import RESULT

TEMPERATURE = 0.7
"""Of streams that are to differ: Wang et al. (2022) sample at it."""
ASKED = 64
"""Tokens between two questions whether work is redundant, where problems have fewer than the 1,024
of the paper."""

Words = tuple[str, ...]
BASELINES: Mapping[str, Words] = {
    name: ("--method", name)
    for name in (
        *("sequential", "no-early-stop", "self-consistency", "vote"),
        *("skeleton", "skeleton-unlimited"),
    )
}
"""The methods that workers are compared with."""
CONTIGUOUS, INTERLEAVED, UNASKED, ENCODED = "contiguous", "interleaved", "not asked", "encoded anew"
ABLATIONS: Mapping[str, Words] = {
    CONTIGUOUS: ("--layout", "contiguous"),
    INTERLEAVED: ("--layout", "interleaved"),
    UNASKED: ("--ask-every", "0"),
    ENCODED: ("--move", "reencode"),
}
"""Workers of whom a part is taken away."""
_OF_MODEL = ("model", "dtype", "approximate_kv", "adapter", "tensor", "expert", "kv", "data")
"""The options that a loaded model depends on."""


class Evaluations:
    """Runs `jaxshare evaluate` and `jaxshare rescore` in this process.

    What they print is left out. Evaluations of the same model one after the other load it once.
    """

    def __init__(self) -> None:
        self._key: tuple[str, ...] = ()
        self._model: LoadedModel | None = None

    def evaluate(self, words: Sequence[str]) -> int:
        """Runs an evaluation.

        Args:
          words: the arguments of `jaxshare evaluate`.

        Returns:
          its exit code: 0, or 3 where lines of the task are bad or problems were refused.

        Raises:
          ValueError: see `jaxshare.serving.cli.evaluation.evaluate.run_evaluation`.
        """
        options = _parsed(evaluate, words)
        with _silent():
            if options.ray is not None:
                return evaluate.run(options)
            return evaluate.run_evaluation(
                options,
                arguments.sampling_of(options),
                arguments.parse_numbers("--workers", options.workers),
                arguments.parse_numbers("--budgets", options.budgets),
                functools.partial(self.load, options),
                functools.partial(execution.execute, concurrency=options.concurrency),
            )

    def rescore(self, words: Sequence[str]) -> int:
        """Marks an evaluation again; `words` are the arguments of `jaxshare rescore`."""
        options = _parsed(rescore, words)
        with _silent():
            return rescore.run(options)

    def load(self, options: argparse.Namespace) -> LoadedModel:
        """The model that the options of an evaluation name."""
        key = tuple(repr(getattr(options, name)) for name in _OF_MODEL)
        if self._model is None or key != self._key:
            self._model = None  # its memory is needed for the next one
            mesh = process_mesh.mesh_of(options)
            self._model, self._key = arguments.load_model(options, mesh), key
        return self._model


def result_of(folder: Path) -> dict[str, Any]:
    """The result of a finished evaluation.

    Raises:
      ValueError: there is none, or its file is damaged.
    """
    try:
        return checksums.loads((folder / RESULT).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{folder / RESULT} cannot be read ({error}); the same command with --resume makes it "
            "again"
        ) from error


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """The options of `jaxshare evaluate` with these arguments."""
    return _parsed(evaluate, words)


def _parsed(command: Any, words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"jaxshare {command.__name__.rpartition('.')[2]}")
    command.add_arguments(parser)
    return parser.parse_args(words)


@contextlib.contextmanager
def _silent():
    with (
        contextlib.redirect_stdout(io.StringIO()),
        progress.DISPLAY.session(),
        reported_compiles(),
    ):
        yield
