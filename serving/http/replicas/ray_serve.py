"""Replicas under Ray Serve: a deployment on a cluster, and the calls that go there."""

import contextlib
import dataclasses
import logging
import re
import secrets
import threading
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Message

from jaxshare.serving.cluster.ray_cluster import import_ray
from jaxshare.serving.cluster.ray_pool import RayPool
from jaxshare.serving.http.replicas.relay import ReplicaLostError
from jaxshare.serving.http.replicas.replica import ReplicaPlan, ReplicaServer
from jaxshare.serving.http.replicas.routes import ForwardedRequest, Route

_ROUTER = "jaxshare.serving.http.replicas.router.PrefixRouter"
_DEPLOYMENT = "jaxshare"
_CHECK_SECONDS = 1.0
"""The time between two looks at how many replicas run."""
_POLL_SECONDS = 0.2
_END_SECONDS, _LEAVE_SECONDS = 5.0, 30.0
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_ERROR_LINE = re.compile(r"[\w.]*(?:Error|Exception)\b")
"""The end of what Python tells of an error."""
_HEALTH_SECONDS, _SILENT_SECONDS = 5.0, 60.0


class RayServeReplicas:
    """Replicas of a server as an application of Ray Serve.

    Args:
      pool: that is connected to the cluster; only its connection is used.
      plan: what every replica is made of.
      spread: see `PrefixMap`.

    Attributes:
      num_running: the replicas that run.
    """

    def __init__(self, pool: RayPool, plan: ReplicaPlan, *, spread: int):
        resources = pool.replica_resources()
        self._plan = dataclasses.replace(plan, devices=pool.devices, gpus="GPU" in resources)
        self._count, self._spread, self._resources = pool.replicas, spread, resources
        self._name = f"jaxshare-{secrets.token_hex(4)}"
        self._handle: Any = None
        self._ended, self._is_starting = threading.Event(), threading.Lock()
        self.num_running = 0

    def start(self) -> None:
        """Starts the replicas, and waits until all of them are ready.

        Raises:
          RuntimeError: they cannot be made.
        """
        self._is_starting.acquire()
        try:
            self._handle = self._run()
        except RuntimeError as error:
            raise RuntimeError(self._reason() or str(error)) from error
        finally:
            self._is_starting.release()
        self.num_running = self._count
        threading.Thread(target=self._count_running, name="jaxshare-replicas", daemon=True).start()

    def _run(self) -> Any:
        from ray import serve
        from ray.serve.config import RequestRouterConfig

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        quiet: Any = {"log_level": "ERROR", "enable_access_log": False}
        # The server that asks them has the socket, so that Ray opens none for requests.
        serve.start(proxy_location="Disabled", logging_config=quiet)
        routing: Any = {
            "request_router_class": _ROUTER,
            "request_router_kwargs": {"spread": self._spread},
        }
        deployment: Any = serve.deployment(ReplicaServer)
        made = deployment.options(
            name=_DEPLOYMENT,
            num_replicas=self._count,
            max_ongoing_requests=2 * self._plan.settings.max_open,
            graceful_shutdown_timeout_s=_END_SECONDS,
            graceful_shutdown_wait_loop_s=0.1,
            health_check_period_s=_HEALTH_SECONDS,
            health_check_timeout_s=_SILENT_SECONDS,
            ray_actor_options={
                "num_cpus": self._resources["CPU"],
                "num_gpus": self._resources.get("GPU", 0),
            },
            request_router_config=RequestRouterConfig(**routing),
            logging_config=quiet,
        )
        target = serve.RunTarget(made.bind(self._plan), self._name, None, quiet)
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        # A wait that ends with the server: Ray's own does not.
        while (status := self._status()) != "RUNNING":
            if status in _FAILED or self._ended.wait(_POLL_SECONDS):
                raise RuntimeError("they have not become ready")
        return handle

    async def answer(
        self, request: ForwardedRequest, route: Route
    ) -> AsyncGenerator[list[Message]]:
        """Yields the messages of ASGI of an answer.

        Raises:
          ReplicaLostError: the replica has died, or its node.
        """
        ray = import_ray()
        response = self._handle.answer.options(stream=True).remote(request, route=route)
        try:
            async for messages in response:
                yield messages
        except (
            ray.exceptions.RayActorError,
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.NodeDiedError,
        ) as error:
            raise ReplicaLostError(type(error).__name__) from error
        finally:
            response.cancel()

    async def ask_all(self, method: str, *args: Any) -> list[Any]:
        """Returns what a method of every replica returns; those that die meanwhile are left out."""
        ray = import_ray()
        response = self._handle.broadcast(method, *args)
        with contextlib.suppress(ray.exceptions.RayActorError):
            return await response.results_async()
        return await self._handle.broadcast(method, *args).results_async()

    def close(self) -> None:
        """Ends the replicas, those that start too."""
        from ray import serve

        self._ended.set()
        # What still asks Ray when it is left would start a cluster of its own.
        self._is_starting.acquire(timeout=_LEAVE_SECONDS)
        with contextlib.suppress(Exception):  # of many kinds, where the cluster itself is gone
            serve.delete(self._name)

    def _status(self) -> str:
        """The status of the application; "" while there is none."""
        from ray import serve

        told: Any = serve.status().applications.get(self._name)
        return told.status.value if told else ""

    def _reason(self) -> str:
        """The last error of a replica that could not be made, from what Ray Serve tells; or ""."""
        from ray import serve

        told: Any = serve.status().applications.get(self._name)
        messages = [each.message for each in told.deployments.values()] if told else []
        lines = [line.strip() for text in messages for line in text.splitlines()]
        errors = [line for line in lines if _ERROR_LINE.match(line)]
        return errors[-1] if errors else " ".join(" ".join(messages).split())

    def _count_running(self) -> None:
        from ray import serve

        while not self._ended.wait(_CHECK_SECONDS):
            with contextlib.suppress(Exception):  # a controller that starts again has no answer
                told: Any = serve.status().applications[self._name].deployments[_DEPLOYMENT]
                self.num_running = told.replica_states.get("RUNNING", 0)
