"""The table of limits in docs/limits.md, whose numbers come from the code."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Limit(NamedTuple):
    """One bound, and its place in the code.

    Attributes:
      what: is bounded, and by which unit.
      source: MODULE:NAME, or MODULE:CLASS.NAME for a field or an argument with a default; modules are
        within `jaxshare`.
      option: by which it is changed; "" for none.
      beyond: what happens there.
      kind: of the number: "number", "bytes" or "seconds".
    """

    what: str
    source: str
    option: str
    beyond: str
    kind: str = "number"


_SERVER = "serving.http.settings:ServerSettings"
_BATCHES = "serving.http.batches"
_ENDPOINTS = "serving.http.endpoints"
LIMITS: dict[str, Sequence[Limit]] = {
    "The engine": (
        Limit("requests that run", "serving.engine:Engine.max_rows", "`--max-rows`", "they wait"),
        Limit(
            "requests that wait",
            "serving.engine:Engine.max_queue",
            "`--max-queue`",
            "429 (`QueueFullError`)",
        ),
        Limit(
            "keys and values, where no size is given",
            "serving.engine.validation:_MAX_DEFAULT_BYTES",
            "`--kv-bytes`",
            "evicted; requests wait",
            "bytes",
        ),
        Limit("likeliest tokens of a place", "serving.inputs:MOST_LOGPROBS", "", "refused"),
        Limit("values in a list that is an argument", "argument_checks:MOST_VALUES", "", "refused"),
        Limit("workers of a session", "serving.workers.layouts:MAX_WORKERS", "", "refused"),
        Limit(
            "compiled programs that are kept",
            "compile_cache:_MAX_BYTES",
            "",
            "the ones used longest ago leave",
            "bytes",
        ),
    ),
    "Requests over HTTP": (
        Limit("body of a request", f"{_SERVER}.max_body_bytes", "`--max-body`", "413", "bytes"),
        Limit("bodies of all open requests", f"{_SERVER}.max_held_bytes", "", "503", "bytes"),
        Limit("head of a request", "serving.http.limits:MAX_HEAD_BYTES", "", "400", "bytes"),
        Limit(
            "time for the head, and for the body, of a request",
            f"{_SERVER}.body_seconds",
            "",
            "408, or the connection is closed",
            "seconds",
        ),
        Limit("open requests", f"{_SERVER}.max_open", "", "503"),
        Limit(
            "time of a request",
            f"{_SERVER}.request_seconds",
            "`--request-seconds`",
            "it ends with what it has, `length`",
            "seconds",
        ),
        Limit(
            "time in which a client takes nothing of a stream",
            f"{_SERVER}.stall_seconds",
            "",
            "it is given up",
            "seconds",
        ),
        Limit(
            "time between two comments in a stream without events",
            "serving.http.sse:_KEEP_ALIVE_SECONDS",
            "",
            "",
            "seconds",
        ),
        Limit(
            "time of a connection without a request",
            "serving.http.server:_KEEP_ALIVE_SECONDS",
            "",
            "it is closed",
            "seconds",
        ),
        Limit(
            "time for running requests after a SIGTERM",
            f"{_SERVER}.grace",
            "`--grace`",
            "they are cancelled",
            "seconds",
        ),
        Limit(
            "time for their answers after that",
            "serving.http.server:_LAST_SECONDS",
            "",
            "connections are closed",
            "seconds",
        ),
        Limit("completions of a request", f"{_SERVER}.max_choices", "`--max-choices`", "400"),
        Limit("prompts of a request", f"{_ENDPOINTS}.completions:_MOST_PROMPTS", "", "400"),
        Limit("messages of a chat", f"{_ENDPOINTS}.chat:_MOST_MESSAGES", "", "400"),
        Limit("tools of a chat", f"{_ENDPOINTS}.chat:_MOST_TOOLS", "", "400"),
        Limit(
            "stop texts, or choices, of a request",
            "serving.http.generation.fields:MOST_TEXTS",
            "",
            "400",
        ),
        Limit("tokens to decode", f"{_ENDPOINTS}.tokens:_MOST_TOKENS", "", "400"),
        Limit("candidates to score", f"{_ENDPOINTS}.tokens:_MOST_CANDIDATES", "", "400"),
        Limit("agents (`agent_id`) at a time", f"{_SERVER}.max_agents", "`--max-agents`", "429"),
    ),
    "What a server keeps": (
        Limit(
            "stored responses",
            f"{_SERVER}.max_responses",
            "`--max-responses`",
            "the oldest leave",
        ),
        Limit("all of them", f"{_SERVER}.max_response_bytes", "", "the oldest leave", "bytes"),
        Limit("sessions of workers", f"{_SERVER}.max_sessions", "`--max-sessions`", "429"),
        Limit(
            "time in which no client looks at a session",
            f"{_SERVER}.session_idle_seconds",
            "`--session-idle-seconds`",
            "it is held until one does",
            "seconds",
        ),
        Limit("saved sessions", f"{_SERVER}.sessions_bytes", "`--sessions-bytes`", "507", "bytes"),
        Limit("an uploaded file", f"{_SERVER}.max_upload_bytes", "`--max-upload`", "413", "bytes"),
        Limit("files", f"{_BATCHES}.file_store:_MOST_FILES", "", "507"),
        Limit("lines of a batch", f"{_BATCHES}.running:MOST_LINES", "", "the batch fails"),
        Limit("batches that have not ended", f"{_BATCHES}.running:_MOST_OPEN", "", "429"),
        Limit("batches that are kept", f"{_BATCHES}.running:_MOST_KEPT", "", "the oldest leave"),
        Limit(
            "lines of batches that run", f"{_SERVER}.batch_lines", "`--batch-lines`", "they wait"
        ),
        Limit("trees of searches", f"{_ENDPOINTS}.tree_store:_MOST_TREES", "", "the oldest leave"),
        Limit(
            "all of these", f"{_ENDPOINTS}.tree_store:_MOST_BYTES", "", "the oldest leave", "bytes"
        ),
        Limit("nodes of a tree", f"{_ENDPOINTS}.trees:_MOST_NODES", "", "400"),
    ),
    "Replicas and processes": (
        Limit(
            "replicas that die over one request or task",
            "serving.http.replicas.relay:MOST_DEATHS",
            "",
            "502, or an error that names it",
        ),
        Limit(
            "time in which a replica of a batch does not answer",
            "serving.cluster.ray_pool:_SILENT_SECONDS",
            "",
            "it is lost",
            "seconds",
        ),
        Limit(
            "time for the processes of a mesh to meet",
            "serving.cluster.process_mesh:_JOIN_SECONDS",
            "",
            "an error",
            "seconds",
        ),
        Limit(
            "time without a heartbeat of a process",
            "serving.cluster.process_mesh:_LOST_SECONDS",
            "",
            "the others end",
            "seconds",
        ),
    ),
    "Templates and files": (
        Limit(
            "time to render a chat template",
            "models.chat_rendering:RENDER_SECONDS",
            "",
            "refused",
            "seconds",
        ),
        Limit(
            "memory of the process that renders",
            "models.chat_rendering:_MEMORY_BYTES",
            "",
            "refused",
            "bytes",
        ),
        Limit("characters of a template", "models.chat_rendering:_MAX_TEMPLATE", "", "refused"),
        Limit(
            "characters of a rendered prompt",
            "models.chat_rendering:_MAX_CHARACTERS",
            "",
            "refused",
        ),
        Limit(
            "characters of a file with a prompt",
            "serving.cli.arguments:_MAX_TEXT",
            "",
            "refused",
        ),
        Limit(
            "a file of a checkpoint in Orbax form",
            "models.orbax_io:_MAX_SHARD_BYTES",
            "",
            "several files",
            "bytes",
        ),
    ),
    "Agents and judged programs": (
        Limit(
            "result of a tool that agents keep",
            "serving.agents.result_sizes:MOST_BYTES",
            "`max_bytes`",
            "an error of the tool",
            "bytes",
        ),
        Limit(
            "characters of a tool's result in a dialogue",
            "serving.agents.result_sizes:MOST_CHARACTERS",
            "",
            "an error of the tool",
        ),
        Limit(
            "processor time of a judged program",
            "serving.evaluation.checkers.sandbox:Limits.seconds",
            "",
            "wrong",
            "seconds",
        ),
        Limit(
            "memory of one",
            "serving.evaluation.checkers.sandbox:Limits.memory",
            "",
            "wrong",
            "bytes",
        ),
        Limit(
            "processes and threads of one",
            "serving.evaluation.checkers.sandbox:Limits.processes",
            "",
            "wrong",
        ),
    ),
}
"""All limits, by the part that they are of."""


def value_of(source: str) -> Any:
    """Returns the number that the code has."""
    module, _, name = source.partition(":")
    found: Any = importlib.import_module(f"jaxshare.{module}")
    owner, _, name = name.rpartition(".")
    if owner:
        found = getattr(found, owner)
        parameters = inspect.signature(found).parameters
        return parameters[name].default
    return getattr(found, name)


def _bytes(number: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= size and number % size == 0:
            return f"{number // size} {unit}"
    for size, unit in ((10**9, "GB"), (10**6, "MB")):
        if number >= size and number % size == 0:
            return f"{number // size} {unit}"
    return f"{number:,} bytes"


def _seconds(number: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if number >= size and number % size == 0:
            return f"{number / size:g} {unit}"
    return f"{number:g} s"


_SHOWN: dict[str, Callable[[Any], str]] = {
    "number": lambda number: f"{number:,}",
    "bytes": _bytes,
    "seconds": _seconds,
}


def table() -> list[Sequence[str]]:
    """The rows of the table."""
    rows: list[Sequence[str]] = [("Part", "What", "Most", "Changed by", "Beyond that")]
    for part, limits in LIMITS.items():
        for number, limit in enumerate(limits):
            shown = _SHOWN[limit.kind](value_of(limit.source))
            name = f"**{part}**" if number == 0 else ""
            rows.append((name, limit.what, shown, limit.option, limit.beyond))
    return rows
