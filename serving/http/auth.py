"""API keys: every request but those of probes brings one, where the server has any."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxshare.serving.http.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What probes ask for, without a key."""
_PAGE = "/page/"


def is_open(path: str) -> bool:
    """Returns True if a path needs no key: those of probes, and the page, which has no secrets."""
    return path in OPEN_PATHS or path == "/" or path.startswith(_PAGE)


class ApiKeys:
    """Refuses requests without a key of the server.

    The scope of a request gets an `owner`: the hash of its key, or "" where there are no keys. What
    is stored for one owner is not shown to another.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        # Digests have one length, so that the time of a comparison tells nothing of a key's.
        self._digests = [_digest(key.encode("ascii")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope.setdefault("state", {})["owner"] = ""
        if self._digests and not is_open(scope["path"]) and scope["method"] != "OPTIONS":
            given = _bearer(scope)
            digest = _digest(given or b"")
            # All of them are compared, so that the time does not tell which one it was.
            known = sum([hmac.compare_digest(digest, each) for each in self._digests])
            if given is None or not known:
                return await _refusal(given).response()(scope, receive, send)
            scope["state"]["owner"] = digest.hex()
        await self._app(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer(scope: Scope) -> bytes | None:
    """The key in a request's header Authorization, or None without one."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = value.partition(b" ")
            return key.strip() if kind.lower() == b"bearer" else None
    return None


def _refusal(given: bytes | None) -> ApiError:
    missing = given is None
    return ApiError(
        401,
        "there is no API key; send it in the header `Authorization: Bearer KEY`"
        if missing
        else "the API key is not one of this server's",
        code=None if missing else "invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
