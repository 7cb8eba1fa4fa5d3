"""Requests made from the description of the interface: none is an error of the server, none hangs."""

import collections
import contextlib
import time
from typing import Any

import pytest

from jaxshare.serving.http.batches.file_store import FileStore
from tests.serving.http.served import served, until

pytestmark = pytest.mark.slow

_EXAMPLES = 25
_SECONDS = 60
"""In which an answer is there, of which a stream is read for a moment."""
_MOST = 300
"""The largest number of a plausible body."""
_REFUSALS = (503, 507)
"""What is no error: too much is asked for at a time, or saved."""

_UNKNOWN = {
    *("GET /v1/files/{file_id}", "GET /v1/files/{file_id}/content", "DELETE /v1/files/{file_id}"),
    *("GET /v1/batches/{batch_id}", "POST /v1/batches/{batch_id}/cancel", "POST /v1/batches"),
    *("GET /v1/models/{name}", "GET /v1/trees/{name}", "DELETE /v1/trees/{name}"),
    *("POST /v1/workers/saves/{identity}/restore", "DELETE /v1/workers/saves/{identity}"),
    "POST /v1/weights",
}
"""Operations on what has to be there under a name."""


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory):
    """A server that does all that it can, and gives no request much time."""
    folder = str(tmp_path_factory.mktemp("saves"))
    given: dict[str, Any] = {"sessions_folder": folder, "request_seconds": 0.5}
    given |= {
        "session_idle_seconds": 0.5,
        "weights_folder": str(tmp_path_factory.mktemp("weights")),
    }
    files = FileStore(str(tmp_path_factory.mktemp("files")), 2**24)
    with contextlib.closing(files), served(engine, files=files, **given, show_texts=True) as made:
        yield made


def _answer(url: str, request: dict[str, Any]) -> tuple[int, bytes]:
    """The status and the beginning of an answer; fails where it does not come."""
    import requests

    begin, read = time.monotonic(), b""
    with (
        requests.Session() as session,
        session.request(**request, stream=True, timeout=_SECONDS) as answer,
    ):
        for part in answer.iter_content(None):
            read += part
            if time.monotonic() - begin > 0.6 and answer.headers.get("content-type", "").startswith(
                "text/event-stream"
            ):
                break
            assert time.monotonic() - begin < _SECONDS, f"{url} does not end"
        return answer.status_code, read


def _plausible(value: Any) -> Any:
    """A body with whole numbers that are small integers, and with texts that are not empty."""
    if (isinstance(value, float) and value.is_integer()) or type(value) is int:
        return int(value) if abs(value) <= _MOST else int(value) % _MOST
    if isinstance(value, list):
        return [_plausible(each) for each in value] or ["a"]
    if not isinstance(value, dict):
        return value
    found = {str(name): _plausible(each) for name, each in value.items()}
    if "role" in found and not isinstance(found.get("content"), str):
        found["content"] = "1. 17 + 25"
    for name in ("prompt", "input", "problem", "prefix", "text"):
        if name in found and isinstance(found[name], str | list):
            found[name] = "1. 17 + 25"
    if "candidates" in found:
        found["candidates"] = [" 42.", "."]
    unknown = ("model", "layout", "format", "stop_on", "kind")  # names that nobody knows
    return {name: each for name, each in found.items() if name not in unknown or each is None}


class _Asked:
    """All requests to one server, and what came of them."""

    def __init__(self, server: Any):
        self.server, self.statuses = server, collections.Counter[tuple[str, int]]()

    def ask(self, case: Any, plausible: bool) -> None:
        """Sends a request, as it was made or more as one that is served."""
        label, sessions = case.operation.label, self.server.service.sessions
        if plausible:
            case.body = _plausible(case.body)
            if "/v1/workers/{identity}" in label:
                case.path_parameters["identity"] = self._session()
                if isinstance(case.body, dict) and "name" in case.body:
                    is_new = label.endswith("/add")
                    case.body["name"] = (
                        f"Worker {sum(self.statuses.values())}" if is_new else "Alice"
                    )
            elif "/v1/responses/{identity}" in label:
                case.path_parameters["identity"] = self._made("responses", {"input": "1. 17 + 25"})
        request = case.as_transport_kwargs(base_url=self.server.url)
        try:
            status, read = _answer(label, request)
        except OSError as error:  # those of requests are such
            raise AssertionError(f"{label} has no answer to {request}") from error
        self.statuses[label, status] += 1
        assert status < 500 or status in _REFUSALS, (
            f"{label} has the answer {status} {read[:500]!r} to {request}"
        )
        assert b"internal_error" not in read, f"a stream has failed: {read[-500:]!r} to {request}"
        for session in [*sessions.values()][1:]:  # there is not memory for many
            sessions.pop(session.identity).close()

    def _session(self) -> str:
        """The identity of a session of workers."""
        fields = {"problem": "1. 17 + 25", "budget": 64, "max_workers": 3}
        return next(iter(self.server.service.sessions), "") or self._made("workers", fields)

    def _made(self, kind: str, fields: dict[str, Any]) -> str:
        answer = self.server.post(f"/v1/{kind}", fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]


@pytest.mark.filterwarnings("default")  # of what schemathesis imports
def test_no_request_is_an_error_of_the_server_or_hangs(whole, caplog):
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from schemathesis import GenerationMode

    asked = _Asked(whole)
    schema = schemathesis.openapi.from_url(f"{whole.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 30
    for operation in sorted(operations, key=lambda each: each.label != "POST /v1/workers"):
        modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
        cases = st.one_of(
            *(
                operation.as_strategy(generation_mode=mode)
                for mode in modes[: 1 + _varies(operation)]
            )
        )

        @given(cases, st.booleans())
        @settings(
            max_examples=_EXAMPLES if _varies(operation) else 3,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        def run(case, plausible):
            asked.ask(case, plausible)

        run()
    served_ones = {label for (label, status), count in asked.statuses.items() if status == 200}
    hardly = {each.label for each in operations} - served_ones
    assert hardly <= _UNKNOWN, f"{hardly} are never served"
    assert not [each for each in caplog.records if each.exc_info], caplog.text
    for session in [*whole.service.sessions.values()]:
        session.close()
    whole.service.sessions.clear()
    until(lambda: whole.service.is_idle)
    stats = whole.http.get("/v1/engine/stats").json()
    assert stats["requests"] == [] and stats["waiting"] == 0


def _varies(operation: Any) -> bool:
    """True if requests of an operation differ."""
    parts = (operation.body, operation.path_parameters, operation.query)
    return any(len([*part]) > 0 for part in parts)
