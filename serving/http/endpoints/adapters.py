"""/v1/load_lora_adapter and /v1/unload_lora_adapter: adapters from the server's folder, which requests then name
as their model; the names and fields are vLLM's."""

import functools
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from jaxshare.models import AdapterError
from jaxshare.serving.errors import ClosedError, EngineError
from jaxshare.serving.http.answers import json_response, service_of
from jaxshare.serving.http.errors import ApiError, bad_request, renamed
from jaxshare.serving.http.generation.fields import Body, FolderName
from jaxshare.serving.http.service import Service

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
router = APIRouter()

AdapterName = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterFields(Body):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: AdapterName
    lora_path: FolderName
    load_inplace: bool = False


class UnloadAdapterFields(Body):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: AdapterName


@router.post(LOAD, tags=["engine"])
async def load_adapter(body: LoadAdapterFields, request: Request) -> Response:
    """Adds an adapter between two dispatches; see `Engine.add_adapter`."""
    service = service_of(request)
    body.check_fields()
    folder = _folder_of(service) / body.lora_path
    if body.lora_name in service.settings.model_names:
        raise bad_request(f"{body.lora_name!r} is the name of the model itself", "lora_name")
    if not folder.is_dir():
        raise ApiError(
            404,
            f"the adapter {body.lora_path!r} is not there",
            param="lora_path",
            code="adapter_not_found",
        )

    def add() -> None:
        try:
            service.engine.add_adapter(body.lora_name, folder, replace=body.load_inplace)
        except (OSError, AdapterError) as error:
            # What it says names folders of the server.
            text = renamed(str(error).replace(str(folder), body.lora_path))
            raise bad_request(text, "lora_path", "invalid_adapter") from error
        except ClosedError:
            raise
        except EngineError as error:  # no place for it, which does not change by itself
            raise bad_request(renamed(str(error)), "lora_name", "no_adapter_place") from error

    with service.busy():
        await service.alone(add, prompt="lora_path")
    return _answer(service)


@router.post(UNLOAD, tags=["engine"])
async def unload_adapter(body: UnloadAdapterFields, request: Request) -> Response:
    """Removes an adapter; requests that run go on with it. See `Engine.remove_adapter`."""
    service = service_of(request)
    body.check_fields()
    _folder_of(service)
    if body.lora_name not in service.adapter_names:
        raise ApiError(
            404,
            f"the adapter {body.lora_name!r} is not loaded; GET /v1/models lists those that are",
            param="lora_name",
            code="adapter_not_found",
        )
    remove = functools.partial(service.engine.remove_adapter, body.lora_name)
    with service.busy():
        await service.alone(remove, prompt="lora_name")
    return _answer(service)


def _folder_of(service: Service) -> Path:
    """The folder of the server's adapters.

    Raises:
      ApiError: it has none, or shuts down.
    """
    service.check_open()
    if service.settings.adapters_folder is None:
        raise ApiError(
            501,
            "the server was started without --adapters-folder, so its adapters stay as they are",
            code="no_adapters_folder",
        )
    return Path(service.settings.adapters_folder)


def _answer(service: Service) -> Response:
    return json_response({"object": "adapters", "adapters": [*service.adapter_names]})
