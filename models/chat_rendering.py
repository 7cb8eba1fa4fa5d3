"""Rendering of chat templates, in a process of its own with limits of time, memory and length.

A chat template is a program in a checkpoint: it may loop for ever or fill all memory. The process
is started by the first call, serves all threads, and ends with this one.
"""

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

RENDER_SECONDS = 5.0
"""The time limit of one prompt; real templates take less than a millisecond."""

_START_SECONDS = 60.0
"""The time that the process may take to start, on a machine that is busy."""
_MEMORY_BYTES = 2**30
_MAX_CHARACTERS = 2**24
_MAX_TEMPLATE = 2**20
_PROGRAM = Path(__file__).with_name("chat_rendering_process.py")


class ChatTemplateError(ValueError):
    """A chat template refuses its messages, is no template, or goes beyond its limits."""


class SlowTemplateError(ChatTemplateError):
    """A chat template does not end within its time limit."""


def render(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Renders messages up to the start of the assistant's words, as transformers does.

    Args:
      template: in Jinja.
      messages: each with a role and content; of types that JSON has.
      variables: further ones that the template sees, such as bos_token.

    Raises:
      ChatTemplateError: the template raises an error, or takes more than `RENDER_SECONDS`, a GiB
        of memory or 2**24 characters.
    """
    if len(template) > _MAX_TEMPLATE:
        raise ChatTemplateError(
            f"it has {len(template):,} characters, more than the {_MAX_TEMPLATE:,} that are read"
        )
    shown = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
    try:
        # A key without a value is absent, as transformers has it, but for the content beside calls,
        # which some templates compare with None.
        kept = [
            {
                key: value
                for key, value in message.items()
                if value is not None or (key == "content" and "tool_calls" in message)
            }
            for message in messages
        ]
        request = json.dumps({"template": template, "variables": {**shown, "messages": kept}})
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(
            f"its messages and variables must be texts, numbers and lists of them: {error}"
        ) from error
    with _lock:
        reply = _renderer().ask(request)
    if "error" in reply:
        raise ChatTemplateError(reply["error"])
    return reply["text"]


class _Renderer:
    """The process, and what it is waited for."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        paths = {str(Path(str(module.__file__)).parents[1]) for module in (jinja2, markupsafe)}
        limits = str(_MEMORY_BYTES), str(_MAX_CHARACTERS)
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_PROGRAM), *limits, *sorted(paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._exchange('{"template": "", "variables": {}}', _START_SECONDS)
        except ChatTemplateError:
            self.close()
            raise

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: str) -> dict[str, str]:
        """The reply to a request; a process that is too slow, or gone, is ended."""
        try:
            return self._exchange(request, RENDER_SECONDS)
        except BaseException:  # an interrupt too: its reply must not be the next one's
            self.close()
            raise

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # of what was not written yet
                pipe.close()

    def _exchange(self, request: str, seconds: float) -> dict[str, str]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        received, end = bytearray(), time.monotonic() + seconds
        try:
            stdin.write(request.encode() + b"\n")
            stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(stdout, selectors.EVENT_READ)
                while not received.endswith(b"\n"):
                    if not selector.select(max(0.0, end - time.monotonic())):
                        raise SlowTemplateError(f"it takes more than {seconds:.0f} seconds")
                    if not (part := os.read(stdout.fileno(), 2**20)):
                        raise ChatTemplateError("it ends the process that renders it")
                    received += part
        except OSError as error:
            raise ChatTemplateError("it ends the process that renders it") from error
        return json.loads(received)


_lock = threading.Lock()
_current: _Renderer | None = None


def _renderer() -> _Renderer:
    """The running process of this process; a fork starts one of its own. `_lock` is held."""
    global _current
    if _current is not None and _current.pid != os.getpid():
        _current = None  # the pipes are the parent's
    if _current is None or not _current.is_running:
        _close()
        _current = _Renderer()
    return _current


@atexit.register
def _close() -> None:
    global _current
    if _current is not None and _current.pid == os.getpid():
        _current.close()
    _current = None


def _after_fork() -> None:
    # Another thread may have held it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
