"""/v1/files: files of requests that batches run, and of their answers."""

import urllib.parse
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response

from jaxshare.serving.http.answers import json_response, owner_of, service_of
from jaxshare.serving.http.batches.file_store import FileStore, no_folder
from jaxshare.serving.http.batches.running import Batches
from jaxshare.serving.http.batches.uploads import read_upload
from jaxshare.serving.http.errors import ApiError, ClientGoneError, bad_request

router = APIRouter()

PATH = "/v1/files"
_MOST_LISTED = 10_000


@router.post(
    PATH,
    tags=["OpenAI"],
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["file", "purpose"],
                        "properties": {
                            "file": {"type": "string", "format": "binary"},
                            "purpose": {"type": "string", "enum": ["batch"]},
                        },
                    }
                }
            },
        }
    },
)
async def create_file(request: Request) -> Response:
    """Keeps a file, which comes as multipart/form-data."""
    service, files = service_of(request), files_of(request)
    service.check_open()
    settings = service.settings
    _check_origin(request, settings.allowed_origins)
    try:
        found = await read_upload(
            request.stream(),
            request.headers.get("content-type", ""),
            files.upload,
            owner=owner_of(request),
            max_bytes=settings.max_upload_bytes,
            seconds=settings.body_seconds,
        )
    except ClientDisconnect as error:
        service.client_gone()
        raise ClientGoneError from error
    return json_response(found.as_json())


@router.get(PATH, tags=["OpenAI"])
async def list_files(
    request: Request,
    purpose: str | None = None,
    after: str | None = None,
    limit: int = _MOST_LISTED,
    order: str = "desc",
) -> Response:
    """Lists the files of this key, the newest first."""
    found = files_of(request).list(owner_of(request))
    if purpose is not None:
        found = [each for each in found if each.purpose == purpose]
    if order not in ("asc", "desc"):
        raise bad_request("order is neither asc nor desc", "order")
    rows = [each.as_json() for each in (found if order == "desc" else found[::-1])]
    return json_response(page_of(rows, after, limit, _MOST_LISTED))


@router.get("/v1/files/{file_id}", tags=["OpenAI"])
async def retrieve_file(file_id: str, request: Request) -> Response:
    """Describes a file."""
    return json_response(files_of(request).find(file_id, owner_of(request)).as_json())


@router.get("/v1/files/{file_id}/content", tags=["OpenAI"])
async def retrieve_content(file_id: str, request: Request) -> Response:
    """Returns the content of a file."""
    files = files_of(request)
    found = files.find(file_id, owner_of(request))
    headers = {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}
    return FileResponse(files.path(found), media_type="application/octet-stream", headers=headers)


@router.delete("/v1/files/{file_id}", tags=["OpenAI"])
async def delete_file(file_id: str, request: Request) -> Response:
    """Deletes a file, unless a batch that has not ended reads it."""
    files, batches = files_of(request), batches_of(request)
    files.find(file_id, owner_of(request))
    if batches.uses(file_id):
        raise bad_request(
            "a batch that has not ended reads this file; cancel the batch first", "file_id"
        )
    await run_in_threadpool(files.delete, file_id, owner_of(request))
    return json_response({"id": file_id, "object": "file", "deleted": True})


def _check_origin(request: Request, allowed: Sequence[str]) -> None:
    """Refuses forms that a page of another site sends: browsers do not ask before they send one.

    Raises:
      ApiError: it comes from such a page (403).
    """
    origin = request.headers.get("origin")
    if origin is None or origin in allowed:
        return
    if urllib.parse.urlsplit(origin).netloc != request.headers.get("host"):
        raise ApiError(
            403, "pages of other sites may not upload; --allow-origin names those that may"
        )


def files_of(request: Request) -> FileStore:
    """Returns the files of the server.

    Raises:
      ApiError: it keeps none.
    """
    files = service_of(request).files
    if files is None:
        raise no_folder()
    return files


def batches_of(request: Request) -> Batches:
    """Returns the batches of the server.

    Raises:
      ApiError: it keeps no files.
    """
    files_of(request)
    return request.app.state.batches


def page_of(
    rows: Sequence[dict[str, Any]], after: str | None, limit: int, most: int
) -> dict[str, Any]:
    """Returns a page of a list in OpenAI's form.

    Args:
      rows: all of the list.
      after: the id of the row before the page; None for the first page.
      limit: rows of the page, from 1 to `most`.

    Raises:
      ApiError: another limit, or no such row.
    """
    if not 1 <= limit <= most:
        raise bad_request(f"limit is {limit}; it must be 1 to {most}", "limit")
    if after is not None:
        places = [place for place, row in enumerate(rows) if row["id"] == after]
        if not places:
            raise ApiError(404, "after names nothing of this list", param="after")
        rows = rows[places[0] + 1 :]
    shown = rows[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(rows) > len(shown),
    }
