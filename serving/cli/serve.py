"""The command `jaxshare serve`: a model behind OpenAI's HTTP interface."""

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import os
import sys
import threading
import time
from typing import Any

from jaxshare import __version__, models, progress
from jaxshare.serving.cli import arguments, serve_replicas
from jaxshare.serving.cluster import process_mesh, ray_pool
from jaxshare.serving.cluster.model_spec import AdapterFolders, shortened
from jaxshare.serving.engine import Engine, tracing
from jaxshare.serving.http.settings import ServerSettings, is_loopback, read_keys

KEY_VARIABLE = "JAXSHARE_API_KEY"
"""The environment variable with an API key."""
_PACKAGES = ("fastapi", "pydantic", "python_multipart", "uvicorn")
_FORCED_SECONDS = 2.0
"""The time that a server has to end by itself after a second signal."""
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ServerSettings)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare serve`."""
    arguments.add_model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="to listen at (default 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=8000, help="to listen at; 0 takes a free one (default 8000)"
    )
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="requests have to bring; may be given several times, but other users of this machine "
        f"can see it: rather use ${KEY_VARIABLE} or --api-key-file (default: none)",
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="with a key on each line")
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="by which requests name the model; may be given several times (default: MODEL)",
    )
    _add_engine(parser)
    _add_limits(parser)
    parser.add_argument(
        "--tool-format",
        metavar="NAME",
        help="form of calls in answers, such as hermes (default: as the chat template tells)",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        metavar="ORIGIN",
        help="of pages in browsers that may ask the server, such as https://example.org; may be "
        "given several times (default: none)",
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="that a proxy on this machine passes on as the host, such as llm.example.org; may be "
        "given several times (default: this machine's names alone at a loopback address, else all)",
    )
    parser.add_argument(
        "--show-texts",
        action="store_true",
        help="show on the page how cached texts begin, to all who have a key (default: their sizes)",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="what is logged to stderr; info has a line for each request (default warning)",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="form of the log; json has an object on each line, with the request's identity "
        "(default text)",
    )
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="of a collector that gets OpenTelemetry traces of requests, such as "
        "http://localhost:4318; OTEL_* variables count, too (default: none)",
    )
    arguments.add_dtype(parser)
    arguments.add_adapter(parser, several=True)
    arguments.add_chat_template(parser)
    process_mesh.add_arguments(parser, groups="engines, of which a server has one")
    ray_pool.add_arguments(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of a prompt and its output together (default: the model's context)",
    )
    arguments.add_memory(parser)
    parser.add_argument(
        "--logits-cache",
        metavar="SIZE",
        help="host memory for the Logits Cache, which the field `resample` takes (default: none)",
    )
    parser.add_argument(
        "--max-rows", type=int, default=16, help="requests that run at a time (default 16)"
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=1024,
        help="requests that wait beside those; more get the status 429 (default 1024)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of requests that bring none (default 0)"
    )
    parser.add_argument(
        "--no-warm-up",
        action="store_true",
        help="do not compile before requests come; the first ones wait for it",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-body",
        metavar="SIZE",
        help="most bytes of a request (default 16MiB)",
    )
    parser.add_argument(
        "--max-upload", metavar="SIZE", help="most bytes of a file of /v1/files (default 200MiB)"
    )
    parser.add_argument(
        "--files-folder",
        metavar="FOLDER",
        help="for /v1/files and /v1/batches, whose batches go on there after a restart (default: "
        "none)",
    )
    parser.add_argument(
        "--files-bytes", metavar="SIZE", default="4GiB", help="most bytes in it (default 4GiB)"
    )
    for name, text in (
        ("weights", "checkpoints of the model that POST /v1/weights may exchange its weights for"),
        ("adapters", "adapters that POST /v1/load_lora_adapter may load beside the model"),
    ):
        text = f"with {text} (default: none)"
        parser.add_argument(f"--{name}-folder", metavar="FOLDER", help=text)
    parser.add_argument(
        "--sessions-folder",
        metavar="FOLDER",
        help="that sessions of /v1/workers may be saved to (default: none)",
    )
    parser.add_argument(
        "--sessions-bytes", metavar="SIZE", help="most bytes of these saves (default 16GiB)"
    )
    for name, text in (
        ("request_seconds", "after which a request ends with what it has"),
        ("grace", "seconds that running requests have after a SIGTERM"),
        ("session_idle_seconds", "after which a session that no client looks at is held"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            metavar="SECONDS",
            default=_DEFAULTS[name],
            help=f"{text} (default {_DEFAULTS[name]:g})",
        )
    for name, text in (
        ("max_choices", "most completions of one request"),
        ("max_agents", "most different values of the field `agent_id` at a time"),
        ("max_responses", "most responses of /v1/responses that are stored"),
        ("max_sessions", "most sessions of /v1/workers at a time"),
        ("batch_lines", "lines of batches that run at a time"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            metavar="N",
            default=_DEFAULTS[name],
            help=f"{text} (default {_DEFAULTS[name]})",
        )


def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare serve` until it is told to end.

    Raises:
      ValueError: wrong settings, an address that is taken, or packages that are not installed.
      FileNotFoundError: no such model.
    """
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"serve needs {', '.join(missing)}, which are not installed; run pip install "
            "'jaxshare[serve]'"
        )
    from jaxshare.serving.http.request_log import logged_to_stderr, notices
    from jaxshare.serving.http.server import DrainingServer, listen, url_of
    from jaxshare.serving.http.service import Service
    from jaxshare.serving.http.sessions.saves import make_root

    # Errors that do not depend on the model are raised before it is loaded.
    settings = settings_of(options)
    pool = _pool_of(options)
    engine = _engine_arguments(options)
    if settings.sessions_folder is not None:
        make_root(settings.sessions_folder)
    with contextlib.ExitStack() as held:
        held.enter_context(logged_to_stderr(options.log_level, options.log_format))
        if options.log_format == "json":  # its lines are no JSON
            held.enter_context(progress.DISPLAY.session(quiet=True))
        listening = held.enter_context(listen(options.host, options.port))
        files = _files_of(options)
        if files is not None:
            held.callback(files.close)
        if not settings.api_keys and not is_loopback(listening.getsockname()[0]):
            notices.warning(
                "anyone who can reach this machine can use the server, which listens at "
                "%s without an API key; set $%s or give --api-key-file",
                *(options.host, KEY_VARIABLE),
            )

        warm_up = not options.no_warm_up

        def announce(server: DrainingServer) -> None:
            url, name = url_of(listening), settings.model_names[0]
            _announce(server, f"{name} is served at {url}/v1, with a page at {url}/", warm_up)

        if pool is not None:
            serve_replicas.run(options, pool, engine, settings, listening, announce)
            return 0
        with Engine(_model_of(options), **engine) as made:
            if tracer := serve_replicas.tracer_of(settings):
                made.tracer = tracer
                held.callback(tracer.close)
            server = DrainingServer(Service(made, settings, files), listening)
            announce(server)
            _log_start(made, settings)
            server.serve_until_told(warm_up=warm_up)
    return 0


def _pool_of(options: argparse.Namespace) -> ray_pool.RayPool | None:
    """The pool of replicas, or None; checks what the options say of how many engines there are.

    Raises:
      ValueError: they contradict each other, or the port is none.
    """
    if options.ray is not None:
        serve_replicas.check_installed()
    pool = ray_pool.of_options(options)
    if pool is not None:
        serve_replicas.check(options)
    elif options.data != 1:
        raise ValueError(
            f"--data is {options.data}, but a server has one engine; run a server for each group, "
            "or give --ray and --replicas"
        )
    if not 0 <= options.port < 2**16:
        raise ValueError(f"--port is {options.port}; it must be 0 to 65535")
    return pool


def _model_of(options: argparse.Namespace) -> models.LoadedModel:
    """The model that the options name."""
    model = arguments.load_model(options, process_mesh.mesh_of(options), several=True)
    return shortened(model, options.max_model_len)


def _engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Engine` beside the model.

    Raises:
      ValueError: a size that is none.
    """
    memory: dict[str, Any] = {
        name: arguments.parse_bytes(size, f"--{name.replace('_', '-')}")
        for name in ("kv_bytes", "host_kv_bytes", "logits_cache")
        if (size := getattr(options, name)) is not None
    }
    return {
        "seed": options.seed,
        "max_rows": options.max_rows,
        "max_queue": options.max_queue,
        **memory,
    }


def _files_of(options: argparse.Namespace) -> Any:
    """The folder of files, or None.

    Raises:
      ValueError: it cannot be used.
    """
    if options.files_folder is None:
        return None
    from jaxshare.serving.http.batches.file_store import FileStore

    size = arguments.parse_bytes(options.files_bytes, "--files-bytes")
    return FileStore(options.files_folder, size)


def settings_of(options: argparse.Namespace) -> ServerSettings:
    """Returns the settings of the server from the options of the command.

    Raises:
      ValueError: one is out of its range.
    """
    for name in ("weights_folder", "adapters_folder"):
        folder = getattr(options, name)
        if folder is not None and not os.path.isdir(folder):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is {folder}, but there is no such folder; make it before")
    if options.adapters_folder is not None and not (options.adapter or options.max_adapters):
        raise ValueError(
            "--adapters-folder is given, but there is no room for adapters; give --max-adapters"
        )
    names = options.served_model_name or (options.model,)
    for name, _ in AdapterFolders.of(options, several=True).folders:
        if name in names:
            raise ValueError(f"--adapter has the name {name!r}, which is the model's; give another")
    given = {
        name: getattr(options, name)
        for name in (
            *("request_seconds", "grace", "max_choices", "max_agents", "max_responses"),
            *("max_sessions", "session_idle_seconds", "show_texts", "sessions_folder"),
            *("batch_lines", "seed", "weights_folder", "adapters_folder"),
        )
    }
    for field, name in (
        ("max_body_bytes", "max_body"),
        ("max_upload_bytes", "max_upload"),
        ("sessions_bytes", "sessions_bytes"),
    ):
        if (size := getattr(options, name)) is not None:
            given[field] = arguments.parse_bytes(size, f"--{name.replace('_', '-')}")
    variable = os.environ.get(KEY_VARIABLE)
    return ServerSettings(
        model_names=tuple(options.served_model_name or (options.model,)),
        api_keys=read_keys(options.api_key, options.api_key_file, variable),
        allowed_origins=tuple(options.allow_origin or ()),
        allowed_hosts=tuple(options.allowed_host or ()),
        tool_format=options.tool_format,
        otlp_endpoint=_endpoint_of(options),
        **given,
    )


def _endpoint_of(options: argparse.Namespace) -> str | None:
    """The address that traces are sent to, or None.

    Raises:
      ValueError: --otlp-endpoint cannot be used. What is wrong with the environment, which may be
        meant for other programs, is told.
    """
    try:
        endpoint = tracing.endpoint_of(options.otlp_endpoint)
        if endpoint is not None:
            tracing.check_installed()
    except ValueError as error:
        if options.otlp_endpoint is not None:
            raise
        _say(f"warning: requests are not traced: {error}")
        return None
    return endpoint


def _log_start(engine: Engine, settings: ServerSettings) -> None:
    """Logs what is served, and within which limits; of keys their number alone."""
    from jaxshare.serving.http.app import log

    limits = {n: v for n, v in vars(settings).items() if isinstance(v, int | float)}
    facts = {
        "version": __version__,
        "model": settings.model_names[0],
        "kv_bytes": engine.kv_bytes,
        "rows": engine.rows,
        "max_request_tokens": engine.max_request_tokens,
        "api_keys": len(settings.api_keys),
    }
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    log.info("jaxshare serves: %s", told, extra={"fields": {**facts, "limits": limits}})


def _announce(server: Any, address: str, warm_up: bool) -> None:
    """Lets a server say where it listens, when it is ready and that it ends.

    A second signal ends the process, whatever the engine does.
    """
    from jaxshare.serving.http.request_log import notices

    begun = time.monotonic()

    def on_start() -> None:
        notices.info(address)
        if warm_up:
            notices.info("it compiles what requests need; until then GET /ready has the status 503")

    def on_warm() -> None:
        _settle()
        if warm_up:
            notices.info("ready after %.1f s", time.monotonic() - begun)

    def on_drain() -> None:
        count, grace = server.service.num_running, server.service.settings.grace
        runs = f"{count} request{'s run' if count != 1 else ' runs'}, up to {grace:g} s"
        told = runs if count else "no request runs"
        notices.info("draining: %s; a second signal ends at once", told)

    def on_forced(sig: int) -> None:
        # The engine may be compiling, which nothing can interrupt. What is on the disk stays whole.
        end = threading.Timer(_FORCED_SECONDS, os._exit, (128 + sig,))
        end.daemon = True
        end.start()

    server.on_start, server.on_warm = on_start, on_warm
    server.on_drain, server.on_forced = on_drain, on_forced


def _settle() -> None:
    """Keeps the garbage collector from what has been loaded, which stays as long as the process.

    A full collection would look at all of it, for a tenth of a second in which no request goes on.
    """
    gc.collect()
    gc.freeze()


def _say(line: str) -> None:
    print(f"jaxshare: {line}", file=sys.stderr, flush=True)
