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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from jaxshare.serving.chat.dialogue import (
    checked_messages,
    forms_of_calls,
    has_calls,
    with_other_names,
)
from jaxshare.serving.chat.tools import FunctionTool
from jaxshare.serving.words import mark_messages, mark_values, restore_marks

RENDER_SECONDS = 5.0
"""The time limit of one prompt; real templates take less than a millisecond."""

_START_SECONDS = 60.0
"""The time that the process may take to start, on a machine that is busy."""
_MEMORY_BYTES = 2**30
_MAX_CHARACTERS = 2**24
_MAX_TEMPLATE = 2**20
_PROGRAM = Path(__file__).with_name("chat_template_process.py")


class ChatTemplateError(ValueError):
    """A chat template refuses its messages, is no template, or goes beyond its limits."""


class UnusedToolsError(ChatTemplateError):
    """A chat template writes nothing of the tools that are offered."""


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


def render_marked(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[FunctionTool] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Renders messages with marks at the control tokens in their words; see `words.encode_marked`.

    Words are all texts in messages, in calls of functions and their results, in descriptions of
    tools and in variables.

    Args:
      tokenizer: with a chat template.
      messages: see `chat.dialogue.checked_messages`.
      tools: that are offered to the model.
      variables: further ones that the template sees.

    Raises:
      UnusedToolsError: the template writes nothing of the tools.
      ChatTemplateError: see `render`; or the template writes nothing of the calls in messages.
      TypeError, ValueError: a message has another form.
    """
    marked = mark_messages(tokenizer, checked_messages(messages))
    extra = mark_values(tokenizer, dict(variables or {}))
    schemas = mark_values(tokenizer, [tool.schema() for tool in tools])

    def rendered(messages: Sequence[Mapping[str, Any]], tools: Any = schemas) -> str:
        return render_with(tokenizer, messages, **{**extra, "tools": tools or None})

    form = _form_with_calls(marked, rendered) if has_calls(marked) else marked
    text = rendered(form)
    if tools and text == _without_tools(lambda: rendered(form, None)):
        raise UnusedToolsError(
            "it writes nothing of tools; offer none, or use a template that knows them"
        )
    return restore_marks(text, marked, schemas, extra)


def _form_with_calls(
    messages: list[dict[str, Any]], rendered: Callable[[Sequence[Mapping[str, Any]]], str]
) -> list[dict[str, Any]]:
    """The messages in the form in which a template writes their calls."""
    errors = []
    for form in forms_of_calls(messages):
        try:
            if rendered(form) != rendered(with_other_names(form)):
                return form
        except SlowTemplateError:
            raise
        except ChatTemplateError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    raise ChatTemplateError("it writes nothing of the calls of functions in messages")


def _without_tools(rendered: Callable[[], str]) -> str | None:
    """The text without tools; None if the template refuses to write one."""
    try:
        return rendered()
    except SlowTemplateError:
        raise
    except ChatTemplateError:
        return None


def render_with(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Renders messages in a tokenizer's chat template.

    Args:
      tokenizer: with a chat template.
      messages: see `render`.
      variables: further ones that the template sees; with `tools`, the template for them is taken
        where a tokenizer has one of its own.

    Raises:
      ChatTemplateError: see `render`.
    """
    tools = variables.get("tools")
    try:
        template = tokenizer.get_chat_template(**({"tools": tools} if tools else {}))
    except ValueError as error:  # several by name, and none of them the default
        raise ChatTemplateError(str(error)) from error
    if not isinstance(template, str):
        raise ChatTemplateError("it is not a text")
    special = {name: _plain(token) for name, token in tokenizer.special_tokens_map.items()}
    return render(template, messages, {**special, **variables})


def _plain(token: Any) -> str | list[str]:
    return [str(one) for one in token] if isinstance(token, (list, tuple)) else str(token)


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
