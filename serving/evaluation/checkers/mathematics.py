"""Comparison of mathematical answers by math-verify, in a process that may hang or die."""

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

_PROGRAM = Path(__file__).with_name("mathematics_process.py")
_SECONDS = 30.0
_START_SECONDS = 120.0
"""The first reply waits for imports."""
_BYTES = 4 * 1024**3


class Mathematician:
    """Compares answers in a process of its own.

    The process starts with the first comparison, again after one that it did not survive, and ends
    with `close`.
    """

    def __init__(self, seconds: float = _SECONDS):
        """Prepares the comparison; the process starts later.

        Args:
          seconds: for one comparison; answers that take longer count as different.
        """
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._results: dict[tuple[str, str, float | None], bool] = {}

    @staticmethod
    def check() -> None:
        """Raises ValueError where math-verify is not installed."""
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                "answers of this task are compared with math-verify, which is not installed; "
                "`pip install 'jaxshare[evaluate]'` has it"
            )

    def same(self, reference: str, answer: str, tolerance: float | None = None) -> bool:
        """True if an answer is equal to the reference; False if that is not decided in time.

        Args:
          reference: the right answer, in LaTeX.
          answer: the one to compare with it.
          tolerance: the largest absolute difference of two numbers that count as equal; default
            that of math-verify.

        Raises:
          ValueError: math-verify is not installed, or does not run.
        """
        if reference.strip() == answer.strip():
            return True
        key = reference, answer, tolerance
        if key not in self._results:
            self._results[key] = self._compare(key)
        return self._results[key]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._listener.join()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # a question that it has not read
                        pipe.close()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compare(self, pair: tuple[str, str, float | None]) -> bool:
        if self._process is None:
            self._start()
        try:
            self._put(pair)
            return json.loads(self._replies.get(timeout=self._seconds))
        # The process hangs, has died, or died before it answered.
        except (queue.Empty, OSError, ValueError):
            self.close()
            return False

    def _start(self) -> None:
        self.check()
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._replies = replies = queue.SimpleQueue()

        def listen() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                replies.put(line)
            replies.put("")  # the process has ended

        self._listener = threading.Thread(target=listen, name="jaxshare-mathematics", daemon=True)
        self._listener.start()
        try:
            self._put(("1", "1", None))
            ready = json.loads(replies.get(timeout=_START_SECONDS))
        except (queue.Empty, OSError, ValueError) as error:
            self.close()
            raise ValueError(
                "math-verify is installed but does not run; `pip install 'jaxshare[evaluate]'` "
                "mends its packages"
            ) from error
        if not ready:
            self.close()
            raise ValueError(
                "math-verify runs but does not find 1 equal to 1; `pip install "
                "'jaxshare[evaluate]'` mends its packages"
            )

    def _put(self, pair: tuple[str, str, float | None]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(pair) + "\n")
        self._process.stdin.flush()
