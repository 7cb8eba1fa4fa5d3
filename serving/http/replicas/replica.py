"""A replica: a server without a socket, in a process of its own on some node."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Message, Scope

from jaxshare.serving.cluster.model_spec import ModelSpec, shortened
from jaxshare.serving.cluster.ray_replica import claim_devices
from jaxshare.serving.engine import Engine, RequestTracer
from jaxshare.serving.http.app import create_endpoints
from jaxshare.serving.http.replicas.routes import ForwardedRequest
from jaxshare.serving.http.service import Service
from jaxshare.serving.http.settings import ServerSettings
from jaxshare.serving.http.tracing import continued

_log = logging.getLogger("jaxshare.http")


@dataclasses.dataclass(frozen=True)
class ReplicaPlan:
    """The parts of every replica, as plain data that can be sent to its node.

    Attributes:
      model: that it loads itself.
      max_model_len: tokens of its context; None for the model's own.
      engine: further arguments of `Engine`.
      settings: of the server; keys are checked before requests are sent on.
      devices, gpus: see `claim_devices`.
      warm_up: compile before requests come.
    """

    model: ModelSpec
    max_model_len: int | None
    engine: dict[str, Any]
    settings: ServerSettings
    devices: int = 1
    gpus: bool = False
    warm_up: bool = True


class ReplicaEndpoints:
    """The endpoints of a service, called without HTTP.

    Args:
      service: that they share; its `replica` is set.
      name: of the replica.

    Attributes:
      name: as given.
    """

    def __init__(self, service: Service, name: str):
        self._service, self.name = service, name
        service.replica = name
        self._app = create_endpoints(service)

    async def answer(
        self, request: ForwardedRequest, route: object = None
    ) -> AsyncGenerator[list[Message]]:
        """Yields the messages of ASGI of an answer; all that there are, at a time.

        Where it is closed, the client has gone, and what runs for it is cancelled.

        Args:
          request: of a client.
          route: for the router alone.
        """
        del route
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        task = asyncio.ensure_future(self._call(request, messages, gone))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                ready: list[Message] = [message]
                while not messages.empty() and (more := messages.get_nowait()) is not None:
                    ready.append(more)
                yield ready
                if task.done() and messages.empty():
                    break
        finally:
            gone.set()
            task.cancel()

    async def whole(self, request: ForwardedRequest) -> tuple[str, int, bytes]:
        """Returns (name of the replica, status, body) of an answer."""
        status, body = 500, b""
        async for messages in self.answer(request):
            for message in messages:
                status = message.get("status", status)
                body += message.get("body", b"")
        return self.name, status, body

    async def metrics(self) -> tuple[str, list[Any]]:
        """Returns (name of the replica, the families of its engine's counters)."""
        return self.name, [*self._service.engine.metrics.registry.collect()]

    async def _call(
        self,
        request: ForwardedRequest,
        messages: "asyncio.Queue[Message | None]",
        gone: asyncio.Event,
    ) -> None:
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if is_read:
                await gone.wait()
                return {"type": "http.disconnect"}
            is_read = True
            return {"type": "http.request", "body": request.body, "more_body": False}

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        try:
            with continued(self._service.tracer, request.headers, request.path):
                await self._app(_scope_of(request), receive, send)
        except Exception:  # after its client has been told that the server has failed
            _log.exception("a request has failed")


class ReplicaServer(ReplicaEndpoints):
    """The process of a replica, which Ray Serve starts on some node.

    Args:
      plan: what it is made of.
    """

    def __init__(self, plan: ReplicaPlan):
        from ray import serve

        claim_devices(plan.devices, plan.gpus)
        model = shortened(plan.model.load(), plan.max_model_len)
        engine, settings = Engine(model, **plan.engine), plan.settings
        if settings.otlp_endpoint is not None:
            name = settings.model_names[0]
            engine.tracer = RequestTracer.exporting(settings.otlp_endpoint, name)
        service = Service(engine, settings)
        if plan.warm_up:
            service.warm_up()
        service.is_warm = True
        super().__init__(service, serve.get_replica_context().replica_id.unique_id)


def _scope_of(request: ForwardedRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": [*request.headers],
        "client": None,
        "server": None,
        "state": {"owner": request.owner},
    }
