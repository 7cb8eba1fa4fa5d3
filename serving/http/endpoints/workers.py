"""/v1/workers: sessions of workers that write together, and see each other's words at once."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from jaxshare import Sampler
from jaxshare.serving.http import sse
from jaxshare.serving.http.answers import json_response, owner_of, service_of
from jaxshare.serving.http.errors import ApiError, api_error, bad_request
from jaxshare.serving.http.generation.fields import Body, Number
from jaxshare.serving.http.identities import new_id
from jaxshare.serving.http.service import Service
from jaxshare.serving.http.sessions.running import (
    CLOSED,
    ENDED,
    FAILED,
    RunningSession,
    answer_json,
    describe,
)
from jaxshare.serving.inputs import default_sampler
from jaxshare.serving.workers import Workers
from jaxshare.serving.workers.inspection.probe import attention_shares
from jaxshare.serving.workers.prompts.presets import FORMATS
from jaxshare.serving.workers.results import check_finish_at

router = APIRouter()

Name = Annotated[str, Field(min_length=1, max_length=64)]
Count = Annotated[int, Field(ge=1, le=2**20)]


class SessionFields(Body):
    """The body of POST /v1/workers. None means the default of `jaxshare.serving.Workers`."""

    REFUSED: ClassVar = {"implementation": "it is the server's", "engine": "it is the server's"}

    model: str | None = None
    problem: Annotated[str, Field(min_length=1)]
    names: Annotated[list[Name], Field(min_length=1, max_length=64)] = Field(["Alice", "Bob"])
    layout: str = "combined"
    budget: Count = 1024
    format: str | None = None
    ask_every: Annotated[int, Field(ge=0, le=2**20)] | None = None
    max_workers: Count | None = None
    stop_on: str | None = None
    finish_at: Annotated[list[Count], Field(max_length=64)] | None = None
    kind: str | None = None
    temperature: Number | None = Field(None, ge=0)
    top_p: Number | None = Field(None, gt=0, le=1)
    min_p: Number | None = Field(None, ge=0, le=1)
    seed: int | None = None


class SayFields(Body):
    """The body of POST /v1/workers/{identity}/say."""

    text: Annotated[str, Field(min_length=1)]
    name: Name = "User"


class WorkerFields(Body):
    """The body of requests about one worker."""

    name: Name


@router.post("/v1/workers", tags=["workers"])
async def create_session(body: SessionFields, request: Request) -> Response:
    """Creates a session, whose workers begin to write at once."""
    service = service_of(request)
    body.check_fields()
    service.check_open()
    service.check_model(body.model)
    # The library takes files, too, but no request may touch the disk.
    if body.format is not None and body.format.partition("+")[0] not in FORMATS:
        raise bad_request(
            f"the format {body.format[:64]!r} is not known; it must be one of "
            f"{', '.join(FORMATS)}, with options after it, such as qwen3+user",
            "format",
        )
    sampler = _sampler(service, body)
    given = {
        name: value
        for name in ("format", "ask_every", "max_workers", "stop_on", "kind", "seed")
        if (value := getattr(body, name)) is not None
    }

    def make() -> Workers:
        return Workers(
            service.model_for(body.model),
            body.problem,
            names=body.names,
            layout=body.layout,
            budget=body.budget,
            sampler=sampler,
            engine=service.engine,
            **given,
        )

    try:
        check_finish_at(body.finish_at or (), body.budget)
    except ValueError as error:
        raise api_error(error) from error
    return await _begin(request, new_id("session", service.replica), make, body.finish_at or ())


@router.get("/v1/workers", tags=["workers"])
async def list_sessions(request: Request) -> Response:
    """Lists the sessions of this key."""
    owner = owner_of(request)
    mine = [each for each in service_of(request).sessions.values() if each.owner == owner]
    return json_response({"object": "list", "data": [_head(each) for each in mine]})


@router.get("/v1/workers/saves", tags=["workers"])
async def list_saves(request: Request) -> Response:
    """Lists the saved sessions of this key, the newest first."""
    saves, owner = service_of(request).saves, owner_of(request)
    found = await asyncio.to_thread(saves.list, owner)
    return json_response({"object": "list", "data": found})


@router.post("/v1/workers/saves/{identity}/restore", tags=["workers"])
async def restore(identity: str, request: Request) -> Response:
    """Goes on with a saved session, as it would have gone on; it has the identity that it had."""
    service = service_of(request)
    service.check_open()
    _check_gone(service, identity)
    saved, folder = service.saves.find(identity, owner_of(request))

    def make() -> Workers:
        return Workers.restore(service.model, folder, engine=service.engine)

    return await _begin(request, identity, make, saved.finish_at)


@router.delete("/v1/workers/saves/{identity}", tags=["workers"])
async def delete_save(identity: str, request: Request) -> Response:
    """Deletes a save."""
    service, owner = service_of(request), owner_of(request)
    _check_gone(service, identity)
    await asyncio.to_thread(service.saves.delete, identity, owner)
    return json_response({"id": identity, "object": "workers.save", "deleted": True})


@router.get("/v1/workers/{identity}", tags=["workers"])
async def retrieve_session(identity: str, request: Request) -> Response:
    """Describes a session: its workers, and the steps that they have written."""
    running = _session(request, identity)
    return json_response(_told(running, await _result(request, running.ask(describe))))


@router.get("/v1/workers/{identity}/events", tags=["workers"])
async def stream_events(identity: str, request: Request, after: int = 0) -> Response:
    """Streams the events of a session from a number on, up to its end."""
    service, running = service_of(request), _session(request, identity)
    if after < 0:
        raise bad_request(f"after is {after}; it must be at least 0", "after")

    async def events() -> AsyncGenerator[bytes]:
        async for each in running.events(after):
            yield sse.event(each, each["type"])
        yield sse.DONE

    seconds = service.settings.stall_seconds
    return sse.EventStream(events(), seconds, on_gone=service.client_gone, on_end=lambda: None)


@router.post("/v1/workers/{identity}/say", tags=["workers"])
async def say(identity: str, body: SayFields, request: Request) -> Response:
    """Adds a person's words to the history, which all workers read from the next pass on."""
    body.check_fields()
    return await _do(request, identity, lambda w: w.say(body.text, body.name), "text")


@router.post("/v1/workers/{identity}/pause", tags=["workers"])
async def pause(identity: str, body: WorkerFields, request: Request) -> Response:
    """Stops a worker where it is."""
    return await _do(request, identity, lambda w: w.pause(body.name))


@router.post("/v1/workers/{identity}/resume", tags=["workers"])
async def resume(identity: str, body: WorkerFields, request: Request) -> Response:
    """Lets a paused worker go on."""
    return await _do(request, identity, lambda w: w.resume(body.name))


@router.post("/v1/workers/{identity}/add", tags=["workers"])
async def add(identity: str, body: WorkerFields, request: Request) -> Response:
    """Adds a worker, which starts its first step with the next pass."""
    return await _do(request, identity, lambda w: w.add(body.name))


@router.post("/v1/workers/{identity}/remove", tags=["workers"])
async def remove(identity: str, body: WorkerFields, request: Request) -> Response:
    """Removes a worker; what it has written stays."""
    return await _do(request, identity, lambda w: w.remove(body.name))


@router.post("/v1/workers/{identity}/finish", tags=["workers"])
async def finish(identity: str, request: Request) -> Response:
    """Gives the answer of the workers, or their best guess now, and lets them go on."""
    running = _session(request, identity)
    found = await _result(
        request, running.ask(lambda each: answer_json(each.passes, each.finish()))
    )
    return json_response({"object": "workers.answer", **found})


@router.post("/v1/workers/{identity}/save", tags=["workers"])
async def save(identity: str, request: Request) -> Response:
    """Saves a session, in place of its save before; it goes on when that is on the disk."""
    service, running = service_of(request), _session(request, identity)
    return json_response(
        await _result(request, running.ask(lambda workers: service.saves.save(running, workers)))
    )


@router.get("/v1/workers/{identity}/attention", tags=["workers"])
async def attention(identity: str, request: Request) -> Response:
    """Measures how each worker's newest token shares its attention between the blocks it sees.

    It takes a forward pass of the session, which goes on as if there had been none.
    """
    running = _session(request, identity)

    def measure(workers: Workers) -> dict[str, Any]:
        return {
            "object": "workers.attention",
            "passes": workers.passes,
            "shares": attention_shares(workers),
        }

    return json_response(await _result(request, running.ask(measure)))


@router.delete("/v1/workers/{identity}", tags=["workers"])
async def delete_session(identity: str, request: Request) -> Response:
    """Ends a session, and frees its memory."""
    running = _session(request, identity)
    service_of(request).sessions.pop(identity, None)
    await asyncio.get_running_loop().run_in_executor(None, running.close)
    return json_response({"id": identity, "object": "workers.session", "deleted": True})


async def _begin(
    request: Request, identity: str, make: Callable[[], Workers], finish_at: Sequence[int]
) -> Response:
    """Starts a session, and describes it when its prompt has been read.

    Raises:
      ApiError: there are as many as may be (429), or it cannot be made.
    """
    service = service_of(request)
    most, sessions = service.settings.max_sessions, service.sessions
    if len(sessions) >= most:
        raise ApiError(
            429,
            f"the server has {most} sessions, the most that it takes; delete one",
            code="too_many_sessions",
        )
    seconds = service.settings.session_idle_seconds
    running = RunningSession(identity, owner_of(request), make, seconds, finish_at)
    sessions[identity] = running
    try:
        made = await _result(request, running.ready, "problem")
    except BaseException:
        del sessions[identity]
        raise
    return json_response(_told(running, made))


def _check_gone(service: Service, identity: str) -> None:
    """Raises ApiError where a session still is on the server."""
    if identity in service.sessions:
        raise bad_request(
            "this session is on the server; delete it first: that leaves its save", "identity"
        )


def _sampler(service: Service, body: SessionFields) -> Sampler:
    given = {
        name: value
        for name in ("temperature", "top_p", "min_p")
        if (value := getattr(body, name)) is not None
    }
    base = default_sampler(service.model)
    try:
        return Sampler(**{"temperature": base.temperature, "top_p": base.top_p, **given})
    except ValueError as error:
        raise api_error(error) from error


def _session(request: Request, identity: str) -> RunningSession:
    """The session of this name, if it is of this key.

    Raises:
      ApiError: there is none (404).
    """
    found = service_of(request).sessions.get(identity)
    if found is None or found.owner != owner_of(request):
        raise ApiError(
            404, "there is no such session; GET /v1/workers lists those that are", param="identity"
        )
    return found


async def _do(
    request: Request, identity: str, work: Callable[[Workers], Any], field: str = "name"
) -> Response:
    """Lets a session that has not ended do something, and describes it then.

    Raises:
      ApiError: it has ended (409), or refuses.
    """
    running = _session(request, identity)
    if running.status in (ENDED, FAILED, CLOSED):
        raise ApiError(
            409,
            f"the session is {running.status}, and its workers write no more; begin another one",
            code="session_ended",
        )

    def done(workers: Workers) -> dict[str, Any]:
        work(workers)
        return describe(workers)

    return json_response(_told(running, await _result(request, running.ask(done), field)))


async def _result(request: Request, future: Any, field: str = "identity") -> Any:
    """Awaits what the thread of a session computes.

    Raises:
      ApiError: for every error of the library.
    """
    try:
        return await service_of(request).unless_over(asyncio.wrap_future(future))
    except Exception as error:
        told = api_error(error, prompt=field)
        if told.status == 500:
            raise
        raise told from error


def _head(running: RunningSession) -> dict[str, Any]:
    return {"id": running.identity, "object": "workers.session", "status": running.status}


def _told(running: RunningSession, described: dict[str, Any]) -> dict[str, Any]:
    return {**_head(running), **described}
