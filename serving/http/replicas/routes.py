"""The way of a request: by the prefix that it begins with, or to the replica that holds its state."""

import array
import dataclasses
import json
import re
from typing import Any

from jaxshare.serving.http.replicas.prefixes import prefix_keys

_HELD = re.compile(r"(?:session|resp_)([a-z0-9]+)-[0-9a-f]{32}")
"""Identities with the name of the replica that made them, see `new_id`."""
_REPLICA = re.compile(r"(?:^|&)replica=([a-z0-9]{1,64})(?:&|$)")


@dataclasses.dataclass(frozen=True)
class ForwardedRequest:
    """A request as it is sent to a replica: keys have been checked, and do not go with it.

    Attributes:
      method, path, query: of HTTP; the path as the client has sent it.
      headers: those of the content.
      body: all of it.
      owner: the hash of the client's key; "" without keys.
    """

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = dataclasses.field(default=b"", repr=False)
    owner: str = ""


@dataclasses.dataclass(frozen=True)
class Route:
    """The part of a request that a router has to know.

    Attributes:
      keys: of its prefix, see `prefix_keys`.
      holder: the name of the replica that holds what it is about, or "".
    """

    keys: tuple[bytes, ...] = ()
    holder: str = ""


def route_of(request: ForwardedRequest) -> Route:
    """Returns where a request should go.

    A body that is no JSON, or has other fields than the endpoint takes, has no prefix: the replica
    tells what is wrong with it.
    """
    for part in request.path.split("/"):
        if holder := holder_of(part):
            return Route(holder=holder)
    if request.path.startswith("/v1/engine/"):
        found = _REPLICA.search(request.query.decode("latin-1"))
        return Route(holder=found[1] if found else "")
    if request.method != "POST":
        return Route()
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError):
        return Route()
    if not isinstance(body, dict):
        return Route()
    holder = holder_of(body.get("previous_response_id"))
    return Route(prefix_keys(_beginning(body)), holder)


def holder_of(identity: Any) -> str:
    """Returns the name of the replica that holds a session or a response; "" for other texts."""
    found = _HELD.fullmatch(identity) if isinstance(identity, str) else None
    return found[1] if found else ""


def _beginning(body: dict[str, Any]) -> bytes:
    """The beginning of a prompt, in the order in which it is read."""
    prompt = body.get("prompt", body.get("prefix"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "replace")
    if isinstance(prompt, list):
        fits = all(type(token) is int and 0 <= token < 2**32 for token in prompt)
        return array.array("I", prompt).tobytes() if fits else b""
    names = ("chat_template_kwargs", "tools", "instructions", "messages", "input", "problem")
    parts = [json.dumps(body[name]) for name in names if body.get(name)]
    # The bracket that ends a list of messages is no part of what the next turn begins with.
    return "".join(part.removesuffix("]") for part in parts).encode()
