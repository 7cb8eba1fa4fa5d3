"""The sides of `scripts.papers.hydragen throughput` that are not jaxshare: each in a process of its
own."""

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxshare.models.sources import FILES, find
from scripts.bench.lib import ROOT
from scripts.bench.parts.sharing.attention import THEIRS
from scripts.bench.peer import TORCH_PYTHON, WAITING, Worker, WorkerError, fastest
from scripts.papers.hydragen_engines import ENGINE, SGLANG, VLLM

ABSENT = "not installed"
"""The start of the reason for which a side is nowhere."""
NOT_MEASURED = (
    "x: not measured; the side takes more memory than there is, failed, or is not installed"
)
"""The note below a table that has such cells."""
TEXTLESS = "vllm-no-text"
ENGINES = {VLLM: VLLM, TEXTLESS: VLLM, SGLANG: SGLANG}
"""The package that each side of an engine runs."""
PEERS = (THEIRS, *ENGINES)
TORCH_WORKER, ENGINE_WORKER = "scripts.bench.peers.torch_sharing", "scripts.papers.hydragen_engines"


@dataclasses.dataclass(frozen=True)
class PeerModel:
    """The facts of the model that a side needs.

    Attributes:
      folder: of its files.
      dtype: of its parameters.
      vocab_size: of its tokens.
      tensor: devices to split it over.
      device: "cpu" or "cuda", for PyTorch.
      positions, rows: the longest row, and the most rows at a time.
      new_tokens: of each row in a turn.
      seed: of prompts.
    """

    folder: str
    dtype: str
    vocab_size: int
    tensor: int
    device: str
    positions: int
    rows: int
    new_tokens: int
    seed: int


class AbsentError(RuntimeError):
    """A side cannot be measured at all; the message says why."""


class Transformers:
    """transformers: its own cache, a copy of the prefix for every row, and its own passes.

    Raises:
      AbsentError: no Python has it, or it cannot load the model.
    """

    def __init__(self, python: str, model: PeerModel, stack: contextlib.ExitStack):
        self._model = model
        waiting = WAITING if model.device == "cpu" else {"default": {}}
        try:
            workers = {
                name: stack.enter_context(Worker(python, TORCH_WORKER, env))
                for name, env in waiting.items()
            }
            self.versions = [worker.begin() for worker in workers.values()][-1]
        except (OSError, WorkerError) as error:
            raise AbsentError(f"{ABSENT}: {error}") from error
        try:
            if model.device == "cpu":
                self._worker, _ = fastest(workers, model.folder, model.dtype)
            else:
                self._worker = workers["default"]
                how = {"threads": 1, "dtype": model.dtype, "device": model.device}
                self._worker.ask("load", folder=model.folder, **how)
        except WorkerError as error:
            raise AbsentError(f"cannot load this model: {error}") from error

    def prepare(self, batch: int, prefix: int) -> None:
        self._worker.ask("fill", rows=batch, tokens=prefix)

    def turn(self) -> float:
        """Seconds of a pass, the mean of a turn's."""
        steps = self._model.new_tokens
        return self._worker.ask("turn", steps=steps)["seconds"] / steps

    def release(self) -> None:
        self._worker.ask("release")


class OtherEngine:
    """vLLM or SGLang, which samples completions of one random prompt.

    Args:
      side: one of `ENGINES`.

    Raises:
      AbsentError: the Python does not have it, or it cannot load the model.
    """

    def __init__(self, side: str, python: str, model: PeerModel, stack: contextlib.ExitStack):
        self._side, self._model, package = side, model, ENGINES[side]
        try:
            # Its own environment may be offline or not; a model that was downloaded needs no network.
            self._worker = stack.enter_context(Worker(python, ENGINE_WORKER, {ENGINE: package}))
            self.versions = self._worker.begin()
        except (OSError, WorkerError) as error:
            raise AbsentError(f"{ABSENT}: {error}") from error
        names = ("folder", "dtype", "tensor", "positions", "rows", "seed")
        try:
            self._worker.ask("load", **{name: getattr(model, name) for name in names})
        except WorkerError as error:
            raise AbsentError(f"cannot load this model: {error}") from error

    def prepare(self, batch: int, prefix: int) -> None:
        rng = np.random.default_rng([self._model.seed, prefix])
        self._rows, self._prompt = batch, rng.integers(0, self._model.vocab_size, prefix).tolist()

    def turn(self) -> float:
        """Seconds of a pass, the mean of those after the first token."""
        tokens = self._model.new_tokens
        how = {"rows": self._rows, "tokens": tokens, "text": self._side != TEXTLESS}
        return self._worker.ask("turn", prompt=self._prompt, **how)["seconds"] / (tokens - 1)


def open_peer(
    side: str, python: str | None, model: PeerModel, stack: contextlib.ExitStack
) -> Transformers | OtherEngine:
    """Starts a side, which `stack` ends.

    Args:
      python: that has it; None for the one that `make parity` makes, or this one for an engine.

    Raises:
      AbsentError: see the classes.
    """
    if side != THEIRS:
        return OtherEngine(side, python or sys.executable, model, stack)
    if python is None and not (ROOT / TORCH_PYTHON).exists():
        raise AbsentError(f"{ABSENT}: there is no {TORCH_PYTHON}, which `make parity` makes")
    return Transformers(python or str(ROOT / TORCH_PYTHON), model, stack)


def turns(
    peer: Transformers | OtherEngine, batch: int, prefix: int, rounds: int
) -> Sequence[float]:
    """Seconds of a pass in every round, after one turn that warms up.

    Raises:
      WorkerError: it failed, because of memory for instance.
    """
    peer.prepare(batch, prefix)
    peer.turn()
    return [peer.turn() for _ in range(rounds)]


def model_folder(name: str) -> str:
    """The folder of a model's files for other programs.

    Raises:
      AbsentError: it is a file of a form that they do not read.
    """
    place = Path(find(name, None, FILES))
    if not (place / "config.json").is_file():
        raise AbsentError("cannot load this model: its files are not those of transformers")
    return str(place)
