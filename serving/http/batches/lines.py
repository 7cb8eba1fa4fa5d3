"""Lines of OpenAI's batch format: how they are read, and how answers to them are written."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxshare.serving import checksums
from jaxshare.serving.http.identities import new_id

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""The endpoints that lines may name."""
_MOST_ID = 512
_FIELDS = frozenset({"custom_id", "method", "url", "body"})


class LineError(ValueError):
    """A line of a batch cannot be read.

    Attributes:
      number: of the line, from 1.
      code: a word for programs; param: the field that is wrong, or None.
    """

    def __init__(self, number: int, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.number, self.code, self.param = number, code, param

    def as_json(self) -> dict[str, Any]:
        """Returns the error in OpenAI's form."""
        return {
            "code": self.code,
            "line": self.number,
            "message": str(self),
            "param": self.param,
        }


@dataclasses.dataclass(frozen=True)
class BatchLine:
    """A request of a batch.

    Attributes:
      number: of its line, from 1.
      custom_id: its name in the answers.
      url: the endpoint.
      body: of the request.
    """

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LineAnswer:
    """The answer to a line.

    Attributes:
      custom_id: of the line.
      status: of the answer, as over HTTP; None where the line has not been run.
      body: of the answer: OpenAI's object, or an error in its shape.
      reason: the code and the words for a line that has not been run.
    """

    custom_id: str
    status: int | None
    body: dict[str, Any] | None
    reason: tuple[str, str] | None = None

    @property
    def is_complete(self) -> bool:
        """True if the line has been answered."""
        return self.status == 200

    def as_json(self) -> dict[str, Any]:
        """Returns the answer in OpenAI's form."""
        response = None
        if self.status is not None:
            identity = new_id("req_")
            response = {"status_code": self.status, "request_id": identity, "body": self.body}
        error = self.reason and {"code": self.reason[0], "message": self.reason[1]}
        return {
            "id": new_id("batch_req_"),
            "custom_id": self.custom_id,
            "response": response,
            "error": error,
        }


def is_batch_line(content: Any) -> bool:
    """Returns True if a JSON value has the form of this format, well made or not."""
    return isinstance(content, dict) and "custom_id" in content and "body" in content


def read_line(number: int, text: bytes, endpoint: str | None = None) -> BatchLine:
    """Reads a line.

    Args:
      number: of it, from 1.
      text: without its end.
      endpoint: the one that all lines of the batch have; None for any.

    Raises:
      LineError: it is no such line.
    """

    def refused(code: str, message: str, param: str | None = None) -> LineError:
        return LineError(number, code, message, param)

    try:
        found = checksums.parse(text)
    except ValueError:
        raise refused("invalid_json_line", "the line is no JSON object") from None
    if not isinstance(found, dict):
        raise refused("invalid_json_line", "the line is no JSON object")
    for name in ("custom_id", "method", "url"):
        if not isinstance(found.get(name), str) or not found[name]:
            raise refused(f"missing_{name}", f"{name} is missing, or no text", name)
    if len(found["custom_id"]) > _MOST_ID:
        raise refused("invalid_custom_id", f"custom_id has more than {_MOST_ID} characters")
    if not found["custom_id"].isprintable():
        raise refused("invalid_custom_id", "custom_id has characters that are not printable")
    if found["method"] != "POST":
        raise refused("invalid_method", "method is not POST", "method")
    url = found["url"]
    if url not in ENDPOINTS or endpoint not in (None, url):
        wanted = endpoint or f"one of {', '.join(ENDPOINTS)}"
        raise refused("invalid_url", f"url is not {wanted}", "url")
    body = found.get("body")
    if not isinstance(body, dict):
        raise refused("missing_body", "body is missing, or no object", "body")
    if body.get("stream"):
        raise refused("invalid_body", "body.stream is true; a batch has whole answers", "body")
    if unknown := found.keys() - _FIELDS:
        name = min(unknown)[:64]
        raise refused("unknown_field", f"the line has the field {json.dumps(name)}", name)
    return BatchLine(number, found["custom_id"], url, body)


def read_lines(lines: Iterable[bytes], endpoint: str | None) -> Iterator[BatchLine | LineError]:
    """Reads all lines of a file; yields each request, or what is wrong with its line.

    Empty lines are left out.

    Args:
      lines: of the file.
      endpoint: see `read_line`.
    """
    seen: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = read_line(number, text.rstrip(b"\r\n"), endpoint)
        except LineError as error:
            yield error
            continue
        first = seen.setdefault(line.custom_id, number)
        yield (
            line
            if first == number
            else LineError(
                number,
                "duplicate_custom_id",
                f"custom_id is that of line {first}, too; each line needs its own",
                "custom_id",
            )
        )


def check_lines(
    lines: Iterable[bytes],
    endpoint: str | None,
    *,
    most_lines: int,
    most_errors: int,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> tuple[int, list[LineError]]:
    """Checks all lines of a file.

    Args:
      lines, endpoint: see `read_lines`.
      most_lines: that a batch may have.
      most_errors: that are collected.
      is_cancelled: looked at on the way; True ends the check.

    Returns:
      The number of requests, and what is wrong.
    """
    count, errors = 0, list[LineError]()
    for found in read_lines(lines, endpoint):
        if is_cancelled():
            break
        if isinstance(found, LineError):
            errors.append(found)
        elif count == most_lines:
            why = f"a batch has at most {most_lines} lines"
            errors.append(LineError(found.number, "too_many_lines", why))
            break
        else:
            count += 1
        if len(errors) >= most_errors:
            break
    if not count and not errors:
        errors.append(LineError(1, "empty_file", "the file has no line with a request"))
    return count, errors
