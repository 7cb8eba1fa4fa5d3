"""A process that reads what a case throws at it: one that fails ends alone."""

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

_START_SECONDS, _END_SECONDS = 120.0, 3.0


class Reader:
    """A process that answers requests, lines of JSON; one that is too slow, or gone, is replaced.

    The answer to such a request is {"wrong": what has happened}.
    """

    def __init__(self, module: str, environment: Mapping[str, str] | None = None):
        """Starts nothing yet.

        Args:
          module: its program.
          environment: further variables.
        """
        self._command = [sys.executable, "-m", module]
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a request, which may take these seconds, and some more at the start."""
        fresh = self._process is None
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "JAX_PLATFORMS": "cpu", **self._environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        allowed = seconds + _START_SECONDS * fresh
        received, end = b"", time.monotonic() + allowed
        with contextlib.suppress(BrokenPipeError), selectors.DefaultSelector() as selector:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            selector.register(stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    self.close()
                    return {"wrong": f"it takes more than {allowed:.0f} seconds"}
                if not (part := os.read(stdout.fileno(), 2**16)):
                    break
                received += part
        if received.endswith(b"\n"):
            return json.loads(received)
        status = self._process.wait()
        self.close()
        return {"wrong": f"it ends the process, with status {status}"}

    def close(self) -> None:
        """Ends the process, and those that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)  # it ends the processes that it has started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
