"""The front: what listens before several replicas, and sends each request to one of them."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Protocol

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from starlette.responses import Response
from starlette.routing import Route as HttpRoute
from starlette.types import Message, Receive, Scope, Send

from jaxshare import __version__
from jaxshare.serving.engine.tracing import RequestTracer
from jaxshare.serving.errors import ClosedError
from jaxshare.serving.http import errors, sse
from jaxshare.serving.http.answers import json_response, owner_of
from jaxshare.serving.http.app import NO_TELEMETRY, ROUTERS, guard
from jaxshare.serving.http.endpoints import page, trees, weights
from jaxshare.serving.http.endpoints.tree_store import TreeStore
from jaxshare.serving.http.metrics import HttpMetrics
from jaxshare.serving.http.replicas.relay import Relay, ReplicaAnswers
from jaxshare.serving.http.replicas.routes import ForwardedRequest, route_of
from jaxshare.serving.http.settings import ServerSettings
from jaxshare.serving.http.tracing import Headers, carried

_HERE = {"/health", "/ready", "/version"}
"""Endpoints that the front answers itself, beside the page and trees, which need no model."""
_REFUSED = ("/v1/files", "/v1/batches", "/v1/workers/saves")
"""Endpoints that keep files, which replicas on several machines do not share."""
_HEADERS = {b"content-type", b"content-length", b"accept"}


class ServedReplicas(ReplicaAnswers, Protocol):
    """The replicas as a front sees them, such as `RayServeReplicas`.

    Attributes:
      num_running: the replicas that run.
    """

    num_running: int

    def start(self) -> None: ...

    async def ask_all(self, method: str, *args: Any) -> list[Any]: ...

    def close(self) -> None: ...


class Front:
    """The state of a server before several replicas, with the life of a `Service`.

    Args:
      replicas: that requests are sent to.
      settings: of the server.
      tracer: makes spans of requests, which replicas continue, or None.

    Attributes:
      settings, tracer: as given.
      metrics: of the server.
      is_draining: True when it takes no more requests.
      failure: why the replicas could not be started, or None.
      on_failure: called then.
    """

    def __init__(
        self,
        replicas: ServedReplicas,
        settings: ServerSettings,
        tracer: RequestTracer | None = None,
    ):
        self._replicas, self.settings, self.tracer = replicas, settings, tracer
        self.metrics = HttpMetrics(settings.model_names[0])
        Gauge(
            "jaxshare_replicas_running", "Replicas that run", registry=self.metrics.registry
        ).set_function(lambda: self._replicas.num_running)
        self.is_draining, self._is_started, self._is_cancelled = False, False, False
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._running: set[asyncio.Future[None]] = set()

    @property
    def is_warm(self) -> bool:
        """True when requests are served at once: a replica runs."""
        return self._is_started and self._replicas.num_running > 0

    @is_warm.setter
    def is_warm(self, value: bool) -> None:
        """Is set where the server starts; replicas warm up themselves."""

    @property
    def num_running(self) -> int:
        """The number of requests that run."""
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        """True if nothing is computed for any client."""
        return not self._running

    def warm_up(self) -> None:
        """Starts the replicas.

        Raises:
          ClosedError: they cannot be started; `failure` has the reason.
        """
        try:
            self._replicas.start()
        except Exception as error:
            if not self.is_draining:  # else the server ends before they are ready
                self.failure = error
                self.on_failure()
            raise ClosedError("the replicas cannot be started") from error
        self._is_started = True

    def cancel_all(self) -> None:
        """Ends all requests; their clients are told that the server shuts down."""
        self._is_cancelled = True
        for task in [*self._running]:
            task.cancel()

    def close(self) -> None:
        """Ends the replicas."""
        self._replicas.close()

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends a request to a replica, and its answer to the client.

        Raises:
          ApiError: there is no replica yet, or the server shuts down.
          ClientGoneError: the client has not waited for the answer.
        """
        request = await _read(scope, receive, carried(self.tracer))
        self._check_open(request)
        relay = Relay(request, route_of(request), self._in_time(send))
        task = asyncio.ensure_future(relay.run(self._replicas))
        self._running.add(task)
        try:
            await sse.unless_gone(task, sse.disconnected(receive))
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
            await relay.fail(errors.draining())
        except (errors.ClientGoneError, OSError):
            self.metrics.gone()
        finally:
            self._running.discard(task)

    async def sessions(self, request: Request) -> Response:
        """Lists the sessions of a key on all replicas."""
        asked = ForwardedRequest("GET", "/v1/workers", owner=owner_of(request))
        self._check_open(asked)
        answers = sorted(await self._replicas.ask_all("whole", asked))
        data = [each for _, _, body in answers for each in json.loads(body)["data"]]
        return json_response({"object": "list", "data": data})

    async def weights(self, request: Request) -> Response:
        """Tells the versions of the weights of all replicas, or exchanges them on all.

        Raises:
          ApiError: replicas that have refused them, each with its name and its reason.
        """
        asked = await _read(request.scope, request.receive)
        self._check_open(asked)
        answers = sorted(await self._replicas.ask_all("whole", asked))
        found = {name: (status, json.loads(body)) for name, status, body in answers}
        versions = {
            name: body["version"] for name, (status, body) in found.items() if status == 200
        }
        failed = {name: told for name, told in found.items() if name not in versions}
        if failed:
            reasons = (
                f"replica {n}: {body['error']['message']}" for n, (_, body) in failed.items()
            )
            others = (
                f"; {len(versions)} of {len(found)} replicas have the weights" if versions else ""
            )
            raise errors.ApiError(
                max(status for status, _ in failed.values()),
                "; ".join(reasons) + others,
                code=next(iter(failed.values()))[1]["error"]["code"],
            )
        told = {"version": min(versions.values(), default=0), "replicas": versions}
        return json_response({"object": "weights", **told})

    async def told_metrics(self) -> Response:
        """Tells the counters of the front, and those of every replica's engine with its name."""
        registry, families = CollectorRegistry(), _Families()
        registry.register(families)
        if self.is_warm:
            for name, found in await self._replicas.ask_all("metrics"):
                families.add(name, found)
        text = generate_latest(registry) + generate_latest(self.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _check_open(self, request: ForwardedRequest) -> None:
        is_held = request.path.startswith("/v1/workers/")
        if self.is_draining and request.method == "POST" and not is_held:
            raise errors.draining()
        if not self._is_started:
            raise errors.ApiError(
                503,
                "the replicas are starting; try again when GET /ready has the status 200",
                code="starting",
                headers={"Retry-After": "5"},
            )

    def _in_time(self, send: Send) -> Send:
        """Sends to clients that take what they are sent; others are taken for gone."""

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self.settings.stall_seconds):
                    await send(message)
            except TimeoutError as error:
                raise errors.ClientGoneError from error

        return send_in_time


class _Families:
    """Counters of several engines as one collector: every sample has the label `replica`."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, replica: str, families: list[Metric]) -> None:
        for family in families:
            made = self._families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            made.samples += [
                Sample(one.name, {**one.labels, "replica": replica}, one.value)
                for one in family.samples
            ]

    def collect(self) -> list[Metric]:
        return [*self._families.values()]


class _Forwarding:
    """An application that sends the requests of a path on.

    Attributes:
      path: of the endpoint, by which its requests are counted.
    """

    def __init__(self, front: Front, path: str):
        self._front, self.path = front, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self
        await self._front.forward(scope, receive, send)


def create_front(front: Front, *, is_local: bool = False) -> FastAPI:
    """Makes the application that listens before replicas.

    Args:
      front: its state.
      is_local: see `create_app`.
    """
    app = FastAPI(title="jaxshare", version=__version__, openapi_url=None, telemetry=NO_TELEMETRY)
    app.state.service, app.state.trees = front, TreeStore()
    errors.add_handlers(app)
    app.add_api_route("/v1/workers", front.sessions, methods=["GET"])
    app.add_api_route("/metrics", front.told_metrics, methods=["GET"])
    for router in ROUTERS:
        for route in router.routes:
            assert isinstance(route, HttpRoute)
            methods = [*(route.methods or ())]
            if router in (page.router, trees.router) or route.path in _HERE:
                app.add_api_route(route.path, route.endpoint, methods=methods)
            elif route.path == weights.PATH:
                app.add_api_route(route.path, front.weights, methods=methods)
            elif route.path.startswith(_REFUSED):
                app.add_api_route(route.path, _refuse, methods=methods)
            else:
                _add_forwarding(app, front, route.path, methods)
    _add_forwarding(app, front, "/openapi.json", ["GET"])
    guard(app, front.settings, front.metrics, is_local=is_local, tracer=front.tracer)
    return app


def _add_forwarding(app: FastAPI, front: Front, path: str, methods: list[str]) -> None:
    app.router.routes.append(HttpRoute(path, _Forwarding(front, path), methods=methods))


async def _refuse(request: Request) -> Response:
    """Tells that files are not kept by a server with replicas."""
    del request
    raise errors.ApiError(
        501,
        "a server that was started with --ray keeps no files, batches and saved sessions; ask one "
        "that was started without it",
        code="not_with_replicas",
    )


async def _read(scope: Scope, receive: Receive, more: Headers = ()) -> ForwardedRequest:
    """Reads a request, whose body is bounded before; it gets more headers.

    Raises:
      ClientGoneError: the client has gone meanwhile.
    """
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise errors.ClientGoneError
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    return ForwardedRequest(
        scope["method"],
        scope["path"],
        scope["query_string"],
        (*((name, value) for name, value in scope["headers"] if name in _HEADERS), *more),
        b"".join(parts),
        scope.get("state", {}).get("owner", ""),
    )
