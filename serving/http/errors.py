"""Errors in OpenAI's shape, with the right status, from wherever they are raised."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jaxshare.serving.errors import (
    ClosedError,
    EngineError,
    NotANumberError,
    NoTokenError,
    QueueFullError,
    TooLongError,
)
from jaxshare.serving.http import request_log

_RETRY_SECONDS = 1
_MOST_PLACES = 16
_ALTERNATIVE = re.compile(
    r"str|int|float|bool|(list|dict|literal|constrained|function)[-\[].*|[A-Z]\w*"
)
"""How pydantic names an alternative of a field on the way to an error."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
_NAMES = {"max_new_tokens": "max_tokens", "bias": "logit_bias", "include_stop": None}
"""Arguments of the library whose fields have another name."""
_REMEDIES = {
    "make it with logits_cache=BYTES": "start the server with --logits-cache SIZE",
    "give replace=True, or another name": "set load_inplace to true, or give another name",
    "make the model with a larger max_rank": "start the server with a larger --max-adapter-rank",
    "make the engine's model with more max_adapters": "start the server with more --max-adapters",
    "make the engine with model.with_adapters(max_adapters=N, max_rank=R)": "start the server with "
    "--max-adapters N",
    "raise kv_bytes": "raise the server's --kv-bytes",
}
"""What the library advises, and what an operator of a server or a client does instead."""

_SINGLE = frozenset(
    (
        *("temperature", "seed", "stop", "tools", "priority", "resample", "version", "timeout"),
        *("layout", "kind", "budget"),
    )
)
"""Fields of one word that sentences of the library begin with."""


class ApiError(Exception):
    """An error that the client is told.

    Attributes:
      status: of HTTP.
      message: a sentence.
      param: the field of the request that it is about, or None.
      code: a word for programs, or None.
      headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Returns the JSON of the answer."""
        kind = _TYPES.get(self.status, "server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """Returns the answer; the record of the request that it is for has the error, too."""
        request_log.note_error(self.code, self.param)
        return JSONResponse(self.body(), self.status, self.headers)


class ClientGoneError(Exception):
    """The client has closed the connection before the answer."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns the error for a request that cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    """Returns the error for a field that exists elsewhere and that this server does not have."""
    return bad_request(f"{param} is not supported: {why}", param, "unsupported_parameter")


def draining() -> ApiError:
    """Returns the error while the server shuts down."""
    return ApiError(
        503,
        "the server is shutting down and takes no more requests; ask another one",
        code="shutting_down",
        headers={"Retry-After": str(_RETRY_SECONDS)},
    )


def api_error(error: BaseException, *, prompt: str = "prompt") -> ApiError:
    """Returns what the client is told of an error of the library.

    Args:
      error: as raised.
      prompt: the name of the field that has the prompt.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        waiting = re.match(r"\d+", str(error))
        return ApiError(
            429,
            f"{waiting[0] if waiting else 'as many'} requests wait already, as many as may "
            "(--max-queue); try again in a moment",
            code="queue_full",
            headers={"Retry-After": str(_RETRY_SECONDS)},
        )
    if isinstance(error, TooLongError):
        return bad_request(renamed(str(error)), prompt, "context_length_exceeded")
    if isinstance(error, ClosedError):
        return draining()
    if isinstance(error, NoTokenError):
        return bad_request(str(error), None, "no_token")
    if isinstance(error, NotANumberError):
        return ApiError(500, str(error), code="not_a_number")
    if isinstance(error, EngineError):
        return ApiError(503, renamed(str(error)), headers={"Retry-After": str(_RETRY_SECONDS)})
    if isinstance(error, ValueError | TypeError):
        message = renamed(str(error))
        if "TextEncodeInput" in message:  # of the tokenizer
            message = "the text has half of a surrogate pair, such as \\ud800; send both, or none"
        return bad_request(message, param_of(message, prompt), "invalid_value")
    return ApiError(500, "the server has failed; its log has the reason", code="internal_error")


def renamed(message: str) -> str:
    """Returns a sentence of the library in the words of the interface and the command line."""
    for words, option in _REMEDIES.items():
        message = message.replace(words, option)
    for name, field in _NAMES.items():
        if field:
            message = re.sub(rf"\b{name}\b", field, message)
    return message


def param_of(message: str, prompt: str) -> str:
    """Returns the field that a sentence of the library begins with, or that of the prompt."""
    if "cannot be had with resample" in message:
        return "resample"
    if prompt == "problem" and message.startswith(("workers need names", "the name ")):
        return "names"
    found = re.match(r"([a-z]\w*) (?:is|has|cannot|are)\b", message)
    name = found[1] if found else ""
    return name if "_" in name or name in _SINGLE else prompt


def add_handlers(app: FastAPI) -> None:
    """Makes every error of an application one in OpenAI's shape."""
    app.add_exception_handler(ApiError, _tell)
    app.add_exception_handler(RequestValidationError, _tell_invalid)
    app.add_exception_handler(HTTPException, _tell_http)
    app.add_exception_handler(ClientGoneError, _tell_no_one)
    for kind in (EngineError, TooLongError, Exception):
        app.add_exception_handler(kind, _tell_library)


async def _tell(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def _tell_library(_: Request, error: Exception) -> JSONResponse:
    told = (
        api_error(error)
        if isinstance(error, EngineError | TooLongError)
        else ApiError(500, "the server has failed; its log has the reason", code="internal_error")
    )
    return told.response()


async def _tell_no_one(_: Request, error: Exception) -> JSONResponse:
    return ApiError(499, "the client has gone").response()


async def _tell_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, UnicodeDecodeError):
        place = error.__cause__.start
        return bad_request(f"the body is no UTF-8 at byte {place}", None, "invalid_json").response()
    taken = (error.headers or {}).get("Allow", "others")
    messages = {
        404: "there is no such page; docs/server.md has the endpoints",
        405: f"this page takes {taken}, and not {request.method}",
    }
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _tell_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    declared = request.headers.get("content-type", "")
    # Undeclared JSON is a text, or a form, to FastAPI.
    if any(tuple(one["loc"]) == ("body",) for one in found) and "json" not in declared.lower():
        return bad_request(
            "the body is not declared as JSON; send the header `Content-Type: application/json`",
            None,
            "invalid_value",
        ).response()
    return invalid(found).response()


def invalid(found: Sequence[Any]) -> ApiError:
    """Returns the error that tells where a body does not fit, without what it has there.

    Args:
      found: errors of pydantic, whose places begin with "body".
    """
    if broken := next((one for one in found if one.get("type") == "json_invalid"), None):
        why, (_, *place) = broken.get("ctx", {}).get("error", "it ends early"), broken["loc"]
        where = f" at character {place[0]}" if place else ""
        return bad_request(f"the body is no JSON{where}: {why}", None, "invalid_json")
    # Of a field's alternatives, those that fit the longest way are meant.
    first = [one for one in found if _field(one) == _field(found[0])]
    deepest = max((len(_place(one)) for one in first), default=0)
    meant = [one for one in first if len(_place(one)) == deepest]
    ways = zip(*map(_place, meant), strict=True)
    place = ".".join(way[0] for way in itertools.takewhile(lambda way: len({*way}) == 1, ways))
    told = dict.fromkeys(str(one.get("msg", "it is not valid")) for one in meant)
    message = f"{place or 'the body'}: {', or: '.join(told)}"
    return bad_request(message, place or None, "invalid_value")


def _field(error: Mapping[str, Any]) -> str:
    return ".".join(map(str, error.get("loc", ())[:2]))


def _place(error: Mapping[str, Any]) -> list[str]:
    """The names and numbers on the way to an error, such as ["messages", "0", "role"]."""
    parts = [str(part)[:64] for part in error.get("loc", ())[1 : 1 + _MOST_PLACES]]
    return [part for part in parts if not _ALTERNATIVE.fullmatch(part)]
