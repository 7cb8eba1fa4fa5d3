"""/v1/weights: the version of the engine's weights, and others from a checkpoint in the server's folder."""

from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from jaxshare import models
from jaxshare.models import LoadedModel
from jaxshare.models.config_fields import ConfigError
from jaxshare.models.safetensors_files import CheckpointError
from jaxshare.serving.cluster.model_spec import shortened
from jaxshare.serving.http.answers import json_response, service_of
from jaxshare.serving.http.errors import ApiError, bad_request
from jaxshare.serving.http.generation.fields import Body, FolderName
from jaxshare.serving.http.service import Service

PATH = "/v1/weights"
router = APIRouter()


class WeightsFields(Body):
    """The body of POST /v1/weights."""

    name: FolderName
    running: Literal["finish", "restart", "continue"] = "finish"
    version: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    timeout: Annotated[float, Field(ge=0, le=86_400, strict=False)] | None = 600.0


@router.get(PATH, tags=["engine"])
async def tell_weights(request: Request) -> Response:
    """Tells the version of the weights: 0 for those that the server was started with."""
    return _answer(service_of(request))


@router.post(PATH, tags=["engine"])
async def update_weights(body: WeightsFields, request: Request) -> Response:
    """Exchanges the weights between two dispatches; see `Engine.update_params`."""
    service = service_of(request)
    body.check_fields()
    service.check_open()
    if service.settings.weights_folder is None:
        raise ApiError(
            501,
            "the server was started without --weights-folder, so its weights stay as they are",
            code="no_weights_folder",
        )
    folder = Path(service.settings.weights_folder) / body.name

    def update() -> None:
        params = _loaded(service.model, folder, body.name).params
        how: dict[str, Any] = {"running": body.running, "version": body.version}
        try:
            service.engine.update_params(params, **how, copy=False, timeout=body.timeout)
        except TimeoutError as error:
            raise ApiError(504, str(error), code="timeout") from error

    with service.busy():
        await service.alone(update, prompt="name")
    return _answer(service)


def _answer(service: Service) -> Response:
    return json_response({"object": "weights", "version": service.engine.params_version})


def _loaded(model: LoadedModel, folder: Path, name: str) -> LoadedModel:
    """The checkpoint in a folder, on the devices of a model of which it has other weights.

    Raises:
      ApiError: there is none, it cannot be read, or it is of another model.
    """
    if not folder.is_dir():
        raise ApiError(
            404, f"the weights {name!r} are not there", param="name", code="weights_not_found"
        )
    try:
        found = models.load(folder, dtype=model.dtype, mesh=model.mesh)
        found = shortened(found, model.config.max_positions).for_context(model.config.max_positions)
    except (OSError, ConfigError, CheckpointError, ValueError) as error:
        # What it says names folders of the server.
        text = str(error).replace(str(folder), name)
        raise bad_request(f"the weights {name!r} cannot be read: {text}", "name") from error
    if found.config != model.config:
        raise bad_request(
            f"the weights {name!r} are of another model: their config.json says something else than "
            "that of the model that is served",
            "name",
            "another_model",
        )
    return found
