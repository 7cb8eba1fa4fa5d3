"""The log of the server: a line for each record, as text or as JSON, with the request that it is of."""

import contextvars
import datetime
import json
import logging
import re
import secrets
from typing import Any, override

FORMATS = ("text", "json")
"""The forms of a line."""
HEADER = b"x-request-id"
_IDENTITY = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_request: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "jaxshare_request", default=None
)


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
    return identity


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON.

    Its fields are `time` (UTC, ISO 8601), `level`, `logger` and `message`; `request_id` where the
    record is of a request; `exception` with a traceback; and those that `extra={"fields": {...}}`
    brings.
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
        return json.dumps(line | getattr(record, "fields", {}), default=str)


def formatter(form: str) -> logging.Formatter:
    """Returns what writes the records of the server in one of FORMATS."""
    return JsonFormatter() if form == "json" else logging.Formatter(_TEXT)
