"""The settings of a server, checked before anything is loaded."""

import dataclasses
import ipaddress
import re
from collections.abc import Sequence
from typing import Any

from jaxshare.argument_checks import INT32_MAX, as_float, as_integer, as_texts, shown
from jaxshare.serving.chat.formats import as_format

_MOST_SECONDS = 7 * 24 * 3600.0
_NAME = re.compile(r"[^\s\x00-\x1f\x7f]{1,256}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@*]+")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """How a server answers; where it listens is no part of it.

    Attributes:
      model_names: under which the model is served; the first one is in answers.
      api_keys: any of which a request has to bring; none for all requests.
      max_body_bytes: of a request but an upload, which has max_upload_bytes; max_held_bytes: of all that are not answered yet.
      body_seconds: in which the head of a request has to be there, and then its body.
      max_open: requests that are not answered yet; more get 503.
      request_seconds: after which a request is ended, with what it has then.
      stall_seconds: after which a client that takes nothing of a stream is given up.
      max_choices: completions that a request may ask for, over all its prompts.
      max_agents: different values of `agent_id` whose requests run or wait at a time.
      max_responses, max_response_bytes: stored responses, and the bytes that they may take.
      max_sessions: of workers at a time.
      session_idle_seconds: after which a session of workers that no client looks at is held until
        one does.
      sessions_folder: that sessions of workers are saved to; None takes no saves.
      sessions_bytes: of all saves together.
      weights_folder: with checkpoints that clients may exchange the weights for; None for none.
      adapters_folder: with adapters that clients may load; None for none.
      batch_lines: lines of batches that are run at a time.
      seed: of lines of batches that bring none.
      show_texts: /v1/engine/cache tells how cached texts begin, those of all clients.
      grace: seconds that running requests have after a SIGTERM.
      allowed_origins: of pages in browsers that may ask the server, such as https://example.org, or
        * for all; none allows none.
      allowed_hosts: names that the server answers to beside this machine's own. Without them one
        that listens at a loopback address answers to no other, and any other server to all.
      tool_format: the form of calls in answers; None for the one that the chat template tells.
      otlp_endpoint: where traces of requests are sent to; None for none.

    Raises:
      ValueError: a value out of its range.
      TypeError: a value of another type.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    max_body_bytes: int = 16 * 2**20
    max_upload_bytes: int = 200 * 2**20
    max_held_bytes: int = 256 * 2**20
    body_seconds: float = 60.0
    max_open: int = 4096
    request_seconds: float = 3600.0
    stall_seconds: float = 60.0
    max_choices: int = 128
    max_agents: int = 1024
    max_responses: int = 1024
    max_response_bytes: int = 64 * 2**20
    max_sessions: int = 16
    session_idle_seconds: float = 900.0
    sessions_folder: str | None = None
    sessions_bytes: int = 16 * 2**30
    weights_folder: str | None = None
    adapters_folder: str | None = None
    batch_lines: int = 16
    seed: int = 0
    show_texts: bool = False
    grace: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    tool_format: str | None = None
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            name: as_integer(name, getattr(self, name), least, most)
            for name, least, most in (
                ("max_body_bytes", 1024, INT32_MAX),
                ("max_upload_bytes", 1024, 2**40),
                ("max_held_bytes", 1024, 2**40),
                ("max_open", 1, 2**20),
                ("max_choices", 1, 2**16),
                ("max_agents", 0, 2**20),
                ("max_responses", 0, 2**20),
                ("max_response_bytes", 0, 2**40),
                ("max_sessions", 0, 2**12),
                ("sessions_bytes", 0, 2**50),
                ("batch_lines", 1, 2**16),
            )
        }
        for name, least in (
            ("body_seconds", 0.01),
            ("request_seconds", 0.01),
            ("session_idle_seconds", 0.01),
            ("stall_seconds", 0.01),
            ("grace", 0),
        ):
            values[name] = as_float(name, getattr(self, name), least, _MOST_SECONDS, " seconds")
        values["model_names"] = _checked_names(self.model_names)
        values["api_keys"] = _checked_keys(self.api_keys)
        values["allowed_origins"] = _checked_origins(self.allowed_origins)
        values["allowed_hosts"] = _checked_hosts(self.allowed_hosts)
        if self.tool_format is not None:
            as_format(self.tool_format)
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _checked_names(given: Any) -> tuple[str, ...]:
    error = "served_model_name is {}; a name has 1 to 256 characters and no space"
    names = _matching("served_model_name", given, _NAME, error)
    if not names:
        raise ValueError("served_model_name is empty; give at least one name")
    return tuple(dict.fromkeys(names))


def _matching(name: str, given: Any, pattern: re.Pattern[str], error: str) -> tuple[str, ...]:
    """The texts of a setting, or a ValueError with the first that does not match in its braces."""
    texts = as_texts(name, given)
    if wrong := [each for each in texts if not pattern.fullmatch(each)]:
        raise ValueError(error.format(shown(wrong[0])))
    return texts


def _checked_origins(given: Any) -> tuple[str, ...]:
    error = (
        "--allow-origin is {}, which is no origin; give a scheme and a host without a path, such as "
        "https://example.org, or * for all"
    )
    return _matching("allowed_origins", given, _ORIGIN, error)


def _checked_hosts(given: Any) -> tuple[str, ...]:
    error = (
        "--allowed-host is {}, which is no name of a host; give one without a scheme and a port, "
        "such as llm.example.org"
    )
    return tuple(each.lower() for each in _matching("allowed_hosts", given, _HOST, error))


def _checked_keys(given: Any) -> tuple[str, ...]:
    keys = as_texts("api_key", given)
    if not all(_KEY.fullmatch(key) for key in keys):  # the key is no part of the error
        raise ValueError(
            "an API key has a character that no header can have, or more than 512; use letters, "
            "digits and signs of ASCII without spaces"
        )
    return tuple(dict.fromkeys(keys))


def read_keys(
    given: Sequence[str] | None, file: str | None, variable: str | None
) -> tuple[str, ...]:
    """Returns the API keys of a command line.

    Args:
      given: of --api-key.
      file: of --api-key-file, with a key on each line; empty lines and lines with # are left out.
      variable: the value of the environment variable, one key.

    Raises:
      ValueError: the file cannot be read or has no key.
    """
    keys = [*(given or ()), *([variable] if variable else [])]
    if file is None:
        return tuple(keys)
    try:
        with open(file, encoding="utf-8") as opened:
            lines = [line.strip() for line in opened.read(2**20).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ValueError(
            f"--api-key-file {file} cannot be read ({reason}); give a file with a key on each line"
        ) from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"--api-key-file {file} has no key; write one on each line")
    return (*keys, *found)


def is_loopback(host: str) -> bool:
    """Returns True if a host name is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
