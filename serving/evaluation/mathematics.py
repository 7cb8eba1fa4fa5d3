"""Whether two answers are the same as mathematics: math-verify, in a process that may hang or die
without harm."""

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
    """Compares answers. Its process begins with the first question and anew after one that was too
    much for it, and ends with `close`."""

    def __init__(self, seconds: float = _SECONDS):
        """Starts nothing yet.

        Args:
          seconds: for one comparison; what takes longer counts as different.
        """
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._known: dict[tuple[str, str], bool] = {}

    @staticmethod
    def check() -> None:
        """Raises ValueError where math-verify is not installed."""
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                "answers of this task are compared with math-verify, which is not installed; "
                "`pip install 'jaxshare[evaluate]'` has it"
            )

    def same(self, reference: str, answer: str) -> bool:
        """Whether an answer says the same as the reference. What cannot be told in time is not the
        same.

        Raises:
          ValueError: math-verify is not there, or does not run.
        """
        if reference.strip() == answer.strip():
            return True
        key = reference, answer
        if key not in self._known:
            self._known[key] = self._ask(key)
        return self._known[key]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._listener.join()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: tuple[str, str]) -> bool:
        if self._process is None:
            self._begin()
        try:
            self._put(question)
            return json.loads(self._replies.get(timeout=self._seconds))
        except (
            queue.Empty,
            OSError,
            ValueError,
        ):  # it hangs, it has died, or it died before it answered
            self.close()
            return False

    def _begin(self) -> None:
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
            replies.put("")  # it has ended

        self._listener = threading.Thread(target=listen, name="jaxshare-mathematics", daemon=True)
        self._listener.start()
        try:
            self._put(("1", "1"))
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
                "math-verify runs but does not take 1 for 1; `pip install 'jaxshare[evaluate]'` "
                "mends its packages"
            )

    def _put(self, question: tuple[str, str]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
