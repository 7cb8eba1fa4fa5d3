"""The log of the server: a line for each record, as text or as JSON, with the request that it is of."""

import contextlib
import contextvars
import datetime
import json
import logging
import re
import secrets
import sys
from collections.abc import Iterator
from typing import Any, override

FORMATS = ("text", "json")
"""The forms of a line."""
HEADER = b"x-request-id"
_IDENTITY = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_OF_RECORDS = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime", "color_message"))
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_request: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "jaxshare_request", default=None
)


_facts: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "jaxshare_facts", default=None
)
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def note(**facts: Any) -> None:
    """Adds facts to the record of the request that this task works for; without one, does nothing.

    They must be none of a client's own words: names that were checked, numbers, words for programs.
    """
    if (known := _facts.get()) is not None:
        known.update(facts)


def note_error(code: str | None, param: str | None) -> None:
    """Adds an error to the record of this task's request; of `param`, the field that it begins with."""
    field = (param or "").partition(".")[0]
    note(code=code, param=field if _FIELD.fullmatch(field) else None)


def count(**tokens: int) -> None:
    """Adds numbers to those that the record of this task's request has."""
    if (known := _facts.get()) is not None:
        for name, number in tokens.items():
            known[name] = known.get(name, 0) + number


def noted() -> dict[str, Any]:
    """Returns the facts of this task's request."""
    return {name: value for name, value in (_facts.get() or {}).items() if value is not None}


def begin_request(headers: list[tuple[bytes, bytes]]) -> str:
    """Returns the identity of a request, under which this task and those that it starts log from
    here on.

    Args:
      headers: of the request. Its own `x-request-id`, such as a proxy gives it, is its identity if it
        has at most 128 letters, digits and the signs . _ : -, since it comes back in a header and
        stands in logs; else a new one is made.
    """
    given = next((value for name, value in headers if name.lower() == HEADER), b"")
    identity = given.decode() if _IDENTITY.fullmatch(given) else secrets.token_hex(12)
    _request.set(identity)
    _facts.set({})
    return identity


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON.

    Its fields are `time` (UTC, ISO 8601), `level`, `logger` and `message`; `request_id` where the
    record is of a request; `exception` with a traceback; and those that `extra={"fields": {...}}`
    or other names in `extra` bring.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (identity := _request.get()) is not None:
            line["request_id"] = identity
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        more = {name: value for name, value in vars(record).items() if name not in _OF_RECORDS}
        fields = more.pop("fields", {})
        return json.dumps(line | more | fields, default=str)


_OWN = ("jaxshare", "uvicorn", "opentelemetry")
_OTHERS = ("absl", "asyncio", "jax", "py.warnings")
"""Loggers of libraries whose warnings are of interest; Orbax logs as absl, which else gives the root
logger a handler of its own, so that all lines come twice and in another form."""


notices = logging.getLogger("jaxshare.serve")
"""What the command says whatever the level of the log is: where it listens, that it is ready."""


class _NoticeFormatter(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        warning = "warning: " if record.levelno >= logging.WARNING else ""
        return f"jaxshare: {warning}{record.getMessage()}"


@contextlib.contextmanager
def logged_to_stderr(level: str, form: str) -> Iterator[None]:
    """Writes the server's log, notices and warnings of libraries to stderr within the context.

    Args:
      level: of the server's records, such as "info".
      form: one of FORMATS.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(form))
    noticed = logging.StreamHandler(sys.stderr)
    noticed.setFormatter(formatter(form) if form == "json" else _NoticeFormatter())
    loggers = {name: logging.getLogger(name) for name in (*_OWN, *_OTHERS, notices.name)}
    before = [(each, each.handlers[:], each.level, each.propagate) for each in loggers.values()]
    for name, logger in loggers.items():
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(level.upper() if name in _OWN else logging.WARNING)
    notices.handlers[:] = [noticed]
    notices.setLevel(logging.INFO)
    # Which warns of each write to a client that has gone.
    loggers["asyncio"].setLevel(logging.ERROR)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, handlers, old, propagate in before:
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(old)


def formatter(form: str) -> logging.Formatter:
    """Returns what writes the records of the server in one of FORMATS."""
    return JsonFormatter() if form == "json" else logging.Formatter(_TEXT)
