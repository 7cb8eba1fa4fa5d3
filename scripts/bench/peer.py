"""The other side of a comparison: a program under another interpreter, which speaks JSON over
pipes."""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Self

from scripts.bench.lib import ROOT, alternate, cores

TORCH_PYTHON = ".venv-torch/bin/python"


# How PyTorch's threads may wait for their next piece of work. Spinning is often faster where
# nothing else runs, and far slower where something does, so both are tried.
WAITING = {"passive": {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}, "default": {}}


# Workers neither ask the network nor write what their reader would have to skip.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class WorkerError(RuntimeError):
    """The other interpreter could not do what it was asked; the message is what it said."""


class Worker:
    """A side that runs under another interpreter, and only while it answers a request.

    Its script speaks one JSON object a line on stdin and stdout. It begins with {"versions": ...};
    each answer to a request has what the script did between the answer before and the request,
    `idle_seconds` and `idle_cpu_seconds`, or is {"error": SENTENCE}.

    Attributes:
      idle_here, idle_there: what each process did while the other was at work, since `reset_idle`.

    Raises:
      WorkerError: the script said that something failed, or ended.
    """

    def __init__(self, python: str, module: str, environment: Mapping[str, str]):
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115, `close` closes it
        self._process = subprocess.Popen(
            [python, "-m", module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env={**os.environ, **_QUIET, **environment},
        )
        self.reset_idle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the other process; may be called again."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def begin(self) -> dict[str, str]:
        """Waits until the script is ready for requests; its versions. To be called once, first."""
        return self._answer()["versions"]

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Sends a request and waits for its answer."""
        begin, cpu = time.perf_counter(), time.process_time()
        with contextlib.suppress(BrokenPipeError):  # it has ended: `_answer` finds out why
            self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        self.idle_here.add(time.perf_counter() - begin, time.process_time() - cpu)
        self.idle_there.add(answer["idle_seconds"], answer["idle_cpu_seconds"])
        return answer

    def reset_idle(self) -> None:
        self.idle_here, self.idle_there = Idle(), Idle()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().strip().splitlines()
            raise WorkerError(
                f"it ended with code {self._process.wait()}: "
                f"{said[-1] if said else 'it said nothing'}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer


@dataclasses.dataclass
class Idle:
    """The time that a process waited, and the CPU time that it took meanwhile, in seconds."""

    seconds: float = 0.0
    cpu: float = 0.0

    def add(self, seconds: float, cpu: float) -> None:
        self.seconds += seconds
        self.cpu += cpu

    @property
    def cores(self) -> float:
        """Cores that were kept busy by waiting; more than a few hundredths would spoil the other
        side's times."""
        return round(self.cpu / self.seconds, 3) if self.seconds else 0.0


def fastest(
    workers: Mapping[str, Worker], folder: str, dtype: str = "bfloat16"
) -> tuple[Worker, dict[str, Any]]:
    """transformers with the weights in `folder`, its threads waiting in the way (of WAITING) that
    is faster here; how it was set up."""
    threads = {
        worker.ask("load", folder=folder, threads=cores(), dtype=dtype)["threads"]
        for worker in workers.values()
    }
    seconds = alternate(
        {
            name: lambda worker=worker: worker.ask("step", steps=4)["seconds"]
            for name, worker in workers.items()
        },
        3,
    )
    step = {name: statistics.median(times) / 4 * 1e3 for name, times in seconds.items()}
    best = min(step, key=step.__getitem__)
    for name in workers.keys() - {best}:
        workers[name].close()
    return workers[best], {
        "threads": threads.pop(),
        "waiting": best,
        "step_milliseconds_waiting": step,
    }


def other_python(
    parser: argparse.ArgumentParser,
    given: str | None,
    *,
    option: str = "--torch-python",
    made: str = TORCH_PYTHON,
    made_by: str = "make parity",
    runs: str = "transformers",
    packages: str = "PyTorch and transformers",
) -> str:
    """The Python that `option` names, or the one that make has made; ends the program where there
    is neither."""
    if given is None and not (ROOT / made).exists():
        parser.error(
            f"there is no {made} to run {runs} with: `{made_by}` makes it, or name a Python that "
            f"has {packages} with {option}"
        )
    python = shutil.which(given or ROOT / made)
    if python is None:
        parser.error(f"{option} is {given}, but there is no such program")
    return python
