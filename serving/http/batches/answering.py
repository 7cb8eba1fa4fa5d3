"""Answers to lines of a batch, by what the endpoints answer with."""

import asyncio
import json
import logging
from typing import Any

from pydantic import ValidationError

from jaxshare.argument_checks import INT64_MAX
from jaxshare.seeds import stream_seed
from jaxshare.serving.http.batches.lines import BatchLine, LineAnswer
from jaxshare.serving.http.endpoints import chat, completions, responses
from jaxshare.serving.http.endpoints.response_store import ResponseStore
from jaxshare.serving.http.errors import ApiError, api_error, invalid
from jaxshare.serving.http.generation.fields import SamplingFields
from jaxshare.serving.http.service import Service

_log = logging.getLogger("jaxshare.http")

_FIELDS: dict[str, type[SamplingFields]] = {
    "/v1/chat/completions": chat.ChatFields,
    "/v1/completions": completions.CompletionFields,
    "/v1/responses": responses.ResponseFields,
}
_PRIORITY = -1000
"""Of lines, or lower where they ask for that: requests of clients that wait come before them."""
_AGAIN_SECONDS = 0.1


async def answer(
    service: Service, stored: ResponseStore, line: BatchLine, *, owner: str, seed: int
) -> LineAnswer:
    """Answers a line as its endpoint would; where the queue is full, it waits.

    Args:
      service: that samples.
      stored: the responses of /v1/responses.
      line: to be answered.
      owner: the hash of the key that the batch is of.
      seed: of the batch. A line without a seed has that of its place, so that it has the same text
        whenever it is run.

    Raises:
      ApiError: the server shuts down (503); the line has to be run again.
    """
    try:
        fields = _fields(line)
        fields.priority = max(min(fields.priority, 0) + _PRIORITY, -INT64_MAX)
        if fields.seed is None:
            fields.seed = stream_seed(seed, "batch", line.number)
        while True:
            try:
                body = await _body(service, stored, owner, fields)
                return LineAnswer(line.custom_id, 200, body)
            except ApiError as error:
                if error.code != "queue_full":
                    raise
            await asyncio.sleep(_AGAIN_SECONDS)
    except ApiError as error:
        if error.code == "shutting_down":
            raise
        return LineAnswer(line.custom_id, error.status, error.body())
    except Exception as error:
        _log.error("a line of a batch has failed", exc_info=error)
        told = api_error(error)
        return LineAnswer(line.custom_id, told.status, told.body())


def _fields(line: BatchLine) -> SamplingFields:
    """The body of a line, checked as that of a request.

    Raises:
      ApiError: it does not fit.
    """
    try:
        return _FIELDS[line.url].model_validate_json(json.dumps(line.body))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise invalid([{**each, "loc": ("body", *each["loc"])} for each in found]) from None


async def _body(
    service: Service, stored: ResponseStore, owner: str, fields: SamplingFields
) -> dict[str, Any]:
    if isinstance(fields, chat.ChatFields):
        found = await chat.complete(service, fields)
    elif isinstance(fields, completions.CompletionFields):
        found = await completions.complete(service, fields)
    else:
        assert isinstance(fields, responses.ResponseFields)
        found = await responses.complete(service, stored, owner, fields)
    return json.loads(bytes(found.body))
