"""The command `jaxshare serve` with --ray: replicas of the model behind one server."""

import argparse
import dataclasses
import importlib.util
import socket
from collections.abc import Callable
from typing import Any

from jaxshare.serving.cluster.model_spec import ModelSpec, shortened
from jaxshare.serving.cluster.ray_pool import RayPool
from jaxshare.serving.engine import RequestTracer
from jaxshare.serving.http.settings import ServerSettings, is_loopback

_MISSING = (
    "a server with --ray runs on Ray Serve, which is not installed: pip install "
    "'jaxshare[ray-serve]'"
)


def check_installed() -> None:
    """Raises ValueError where Ray is not installed, with the extra that has Ray Serve, too."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(_MISSING)


def check(options: argparse.Namespace) -> None:
    """Checks options that --ray does not go with.

    Raises:
      ValueError: one of them, or Ray Serve is not installed.
    """
    for name in ("sessions_folder", "files_folder", "adapters_folder"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} is given with --ray, but replicas may be on machines "
                "that do not share a folder; leave out one of the two"
            )
    if options.ray.startswith("ray://"):
        raise ValueError(
            f"the Ray address is {options.ray}, but a server runs on a machine of the cluster; "
            "give auto or HOST:PORT there"
        )
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise ValueError(_MISSING) from error


def tracer_of(settings: ServerSettings) -> RequestTracer | None:
    """Returns what makes spans of a server's requests, or None."""
    if settings.otlp_endpoint is None:
        return None
    return RequestTracer.exporting(settings.otlp_endpoint, settings.model_names[0])


def run(
    options: argparse.Namespace,
    pool: RayPool,
    engine: dict[str, Any],
    settings: ServerSettings,
    listening: socket.socket,
    announce: Callable[[Any], None],
) -> None:
    """Serves until the server is told to end.

    Args:
      options: of the command.
      pool: of the options, not yet connected.
      engine: arguments of every replica's engine.
      settings: of the server.
      listening: a socket that is bound.
      announce: lets the server say what it does.

    Raises:
      ValueError: no such cluster, no room in it, or replicas that cannot be started.
      FileNotFoundError: no such model.
    """
    from jaxshare.serving.http.replicas.front import Front, create_front
    from jaxshare.serving.http.replicas.ray_serve import RayServeReplicas
    from jaxshare.serving.http.replicas.replica import ReplicaPlan
    from jaxshare.serving.http.server import DrainingServer

    spec = ModelSpec.of(options, several=True)
    shortened(spec.outline(), options.max_model_len)  # errors come before the cluster is asked
    plan = ReplicaPlan(
        spec,
        options.max_model_len,
        engine,
        dataclasses.replace(settings, api_keys=(), allowed_origins=()),
        warm_up=not options.no_warm_up,
    )
    with pool:
        # A replica whose rows are half as many requests behind is not worth waiting for.
        replicas = RayServeReplicas(pool, plan, spread=max(1, options.max_rows // 2))
        tracer = tracer_of(settings)
        front = Front(replicas, settings, tracer)
        app = create_front(front, is_local=is_loopback(listening.getsockname()[0]))
        server = DrainingServer(front, listening, app)
        announce(server)
        front.on_failure = server.end
        server.serve_until_told()
        if tracer is not None:
            tracer.close()
    if front.failure is not None:
        raise ValueError(
            f"the replicas cannot be started ({' '.join(str(front.failure).split())[-600:]})"
        ) from front.failure
