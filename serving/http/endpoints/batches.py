"""/v1/batches: requests of a file, answered beside those of clients."""

from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from jaxshare.serving.http.answers import json_response, owner_of, service_of
from jaxshare.serving.http.batches.file_store import on_disk
from jaxshare.serving.http.batches.running import new_batch
from jaxshare.serving.http.endpoints.files import batches_of, page_of
from jaxshare.serving.http.generation.fields import Body, matching

router = APIRouter()

PATH = "/v1/batches"
_MOST_LISTED = 100


class BatchFields(Body):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Annotated[
        str, *matching(r"[1-9][0-9]{0,2}h", "it must be 1 to 999 hours, such as 24h")
    ] = "24h"
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None


@router.post(PATH, tags=["OpenAI"])
async def create_batch(body: BatchFields, request: Request) -> Response:
    """Begins a batch."""
    batches = batches_of(request)
    body.check_fields()
    service_of(request).check_open()
    made = new_batch(
        owner_of(request),
        body.endpoint,
        body.input_file_id,
        body.completion_window,
        body.metadata,
    )
    return json_response(on_disk(lambda: batches.create(made), "batch").as_json())


@router.get(PATH, tags=["OpenAI"])
async def list_batches(request: Request, after: str | None = None, limit: int = 20) -> Response:
    """Lists the batches of this key, the newest first."""
    rows = [each.as_json() for each in batches_of(request).list(owner_of(request))]
    return json_response(page_of(rows, after, limit, _MOST_LISTED))


@router.get("/v1/batches/{batch_id}", tags=["OpenAI"])
async def retrieve_batch(batch_id: str, request: Request) -> Response:
    """Describes a batch."""
    return json_response(batches_of(request).find(batch_id, owner_of(request)).as_json())


@router.post("/v1/batches/{batch_id}/cancel", tags=["OpenAI"])
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """Ends a batch; the answers that it has become files."""
    batches, owner = batches_of(request), owner_of(request)
    return json_response(on_disk(lambda: batches.cancel(batch_id, owner), "batch").as_json())
