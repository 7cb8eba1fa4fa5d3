"""The service of a request, and the forms of answers, for all handlers."""

import json
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from jaxshare.serving.http import request_log, sse
from jaxshare.serving.http.errors import ApiError, ClientGoneError

if TYPE_CHECKING:
    from jaxshare.serving.http.service import Service


def service_of(request: Request) -> "Service":
    """Returns the service of the application that a request came to."""
    return request.app.state.service


def owner_of(request: Request) -> str:
    """Returns the hash of the key of a request; "" without keys."""
    return getattr(request.state, "owner", "")


def json_response(content: Any, status: int = 200) -> Response:
    """Returns an answer of JSON, whatever characters its texts have."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Response(text.encode("utf-8", "replace"), status, media_type="application/json")


def failed(error: ApiError) -> bytes:
    """Returns the event of an error in the midst of a stream."""
    request_log.note_error(error.code, error.param)
    return sse.event(error.body())


async def whole(request: Request, work: Awaitable[Response]) -> Response:
    """Awaits an answer as long as the client is there.

    Raises:
      ClientGoneError: it has gone; all that ran for it is cancelled.
    """
    service = service_of(request)
    try:
        with service.busy():
            return await sse.unless_gone(work, sse.disconnected(request.receive))
    except ClientGoneError:
        service.client_gone()
        raise
