"""A server before replicas that die by a script; the replicas are those of Ray Serve, without Ray."""

import contextlib
import json
import threading

import httpx2
import pytest

from jaxshare.serving.cli import main
from jaxshare.serving.http.replicas.front import Front, create_front
from jaxshare.serving.http.replicas.relay import MOST_DEATHS, ReplicaLostError
from jaxshare.serving.http.replicas.replica import ReplicaEndpoints
from jaxshare.serving.http.server import DrainingServer, listen, url_of
from jaxshare.serving.http.service import Service
from jaxshare.serving.http.settings import ServerSettings
from tests.serving.http.served import ScriptedEngine, sse_events, until

COMPLETIONS = "/v1/completions"
TEXT = "It rains in the morning."


class ScriptedReplicas:
    """Replicas in this process.

    Attributes:
      deaths: for each of the next answers, the messages after which its replica dies, or None.
      asked: the names of the replicas that were asked, in turn.
      late: the engine's seconds until an answer starts.
    """

    def __init__(self, *names, broken=None):
        self.num_running, self.broken, self.late = 0, broken, 0.0
        self.deaths, self.asked, self.is_closed = [], [], False
        self._names, self._replicas, self.services = names, {}, {}

    def start(self):
        if self.broken:
            raise self.broken
        for name in self._names:
            engine = ScriptedEngine(answers=[TEXT])
            engine.late = self.late
            self.services[name] = Service(engine, ServerSettings(("tiny",)))
            self._replicas[name] = ReplicaEndpoints(self.services[name], name)
        self.num_running = len(self._names)

    async def answer(self, request, route):
        name = route.holder or self._names[len(self.asked) % len(self._names)]
        self.asked.append(name)
        left = self.deaths.pop(0) if self.deaths else None
        async with contextlib.aclosing(self._replicas[name].answer(request)) as answer:
            async for messages in answer:
                for message in messages:
                    if left == 0:
                        raise ReplicaLostError("killed")
                    left = left and left - 1
                    yield [message]
        if left is not None:
            raise ReplicaLostError("killed")

    async def ask_all(self, method, *args):
        return [await getattr(each, method)(*args) for each in self._replicas.values()]

    def close(self):
        self.is_closed = True


@contextlib.contextmanager
def fronted(replicas, tracer=None, **settings):
    """Serves a front in a thread: (its client, itself, its server)."""
    listening = listen("127.0.0.1", 0)
    url = url_of(listening)
    front = Front(replicas, ServerSettings(**{"model_names": ("tiny",), **settings}), tracer)
    server = DrainingServer(front, listening, create_front(front, is_local=True))
    front.on_failure = server.end
    thread = threading.Thread(target=server.serve_until_told)
    thread.start()
    try:
        until(lambda: server.started and (front.is_warm or replicas.broken))
        with httpx2.Client(base_url=url, timeout=30) as http:
            yield http, front, server
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive() and replicas.is_closed


@pytest.fixture(scope="module")
def shared():
    """Two replicas: (client, front, replicas)."""
    replicas = ScriptedReplicas("one", "two")
    with fronted(replicas) as (client, front, _):
        yield client, front, replicas


def asked(**more):
    return {"prompt": "a", "max_tokens": 64, **more}


def streamed(client, path=COMPLETIONS, **body):
    """The pieces of a stream, and its errors."""
    text = client.post(path, json=body | {"stream": True}).text
    events = sse_events(text)
    told = [(name, json.loads(data)) for name, data in events if data != "[DONE]"]
    assert events[-1][1] == "[DONE]"
    errors = [(name, each["error"]) for name, each in told if "error" in each]
    pieces = [each for _, each in told if each.get("choices")]
    return "".join(piece["choices"][0]["text"] for piece in pieces), errors


@pytest.mark.parametrize("after", [0, 1])
def test_an_answer_that_is_no_stream_is_made_again(shared, after):
    """Its replica dies before it, or after its head."""
    client, _, replicas = shared
    replicas.deaths, replicas.asked = [after], []
    answer = client.post(COMPLETIONS, json=asked())
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == TEXT
    assert sorted(replicas.asked) == ["one", "two"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_replica_that_dies_after_its_answer_is_not_missed(shared, is_stream):
    client, front, replicas = shared
    count = len(client.post(COMPLETIONS, json=asked(stream=True)).text.split("\n\n")) - 1
    replicas.deaths, replicas.asked = [count + 2 if is_stream else 2], []
    answer = client.post(COMPLETIONS, json=asked(stream=is_stream))
    assert '"finish_reason":"stop"' in answer.text and "error" not in answer.text
    until(lambda: front.num_running == 0 and not replicas.deaths)
    assert len(replicas.asked) == 1


@pytest.mark.parametrize("after", [0, 1])
def test_a_stream_that_has_not_begun_comes_from_another_replica(shared, after):
    client, _, replicas = shared
    replicas.deaths, replicas.asked = [after], []
    assert streamed(client, **asked()) == (TEXT, [])
    assert sorted(replicas.asked) == ["one", "two"]


def test_a_stream_that_has_begun_ends_with_an_error(shared):
    client, _, replicas = shared
    replicas.deaths, replicas.asked = [3], []
    text, errors = streamed(client, **asked())
    # Its head and two events have come.
    assert text and TEXT.startswith(text) and len(text) < len(TEXT)
    ((name, error),) = errors
    assert name is None and {*error} == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("server_error", "replica_lost")
    assert len(replicas.asked) == 1


def test_a_request_over_which_replicas_die_is_given_up(shared):
    client, _, replicas = shared
    replicas.deaths, replicas.asked = [0] * MOST_DEATHS, []
    answer = client.post(COMPLETIONS, json=asked())
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "replica_lost"
    assert len(replicas.asked) == MOST_DEATHS
    assert client.post(COMPLETIONS, json=asked()).status_code == 200


def test_errors_of_replicas_are_theirs(shared):
    client, _, replicas = shared
    replicas.asked = []
    answer = client.post(COMPLETIONS, json={"prompt": 5})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
    refused = client.post(COMPLETIONS, json=asked(stream=True, model="other"))
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    assert len(replicas.asked) == 2
    assert client.get("/made/up").status_code == 404
    assert client.get(COMPLETIONS).status_code == 405
    assert len(replicas.asked) == 2


def test_stored_responses_are_asked_of_the_replica_that_has_them(shared):
    client, _, replicas = shared
    made = [client.post("/v1/responses", json={"input": "a"}).json()["id"] for _ in range(2)]
    assert [each.removeprefix("resp_").partition("-")[0] for each in made] in (
        ["one", "two"],
        ["two", "one"],
    )
    for identity in made * 2:
        assert client.get(f"/v1/responses/{identity}").json()["id"] == identity
        body = {"input": "b", "previous_response_id": identity}
        assert client.post("/v1/responses", json=body).status_code == 200
    replicas.asked = []
    assert client.delete(f"/v1/responses/{made[0]}").json()["deleted"]
    assert client.get(f"/v1/responses/{made[0]}").status_code == 404
    assert {*replicas.asked} == {made[0].removeprefix("resp_").partition("-")[0]}


def test_the_front_answers_what_needs_no_model(shared):
    client, _, replicas = shared
    replicas.asked = []
    for path in ("/health", "/ready", "/version", "/", "/metrics", "/v1/workers", "/v1/trees"):
        assert client.get(path).status_code == 200, path
    assert client.post("/v1/trees", json={"name": "one", "nodes": []}).status_code == 200
    assert client.get("/v1/trees/one").json()["nodes"] == []
    assert client.get("/v1/workers").json() == {"object": "list", "data": []}
    refused = client.get("/v1/workers/saves")
    assert refused.status_code == 501 and refused.json()["error"]["code"] == "not_with_replicas"
    for path in ("/v1/files", "/v1/batches/batch_1"):
        assert client.get(path).json()["error"]["code"] == "not_with_replicas"
    assert replicas.asked == []
    paths = client.get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in paths and replicas.asked


def test_metrics_are_those_of_all_replicas(shared):
    client, _, replicas = shared
    for _ in range(2):
        client.post(COMPLETIONS, json=asked())
    lines = client.get("/metrics").text.splitlines()
    for name in ("one", "two"):
        assert any(line.startswith("jaxshare_") and f'replica="{name}"' in line for line in lines)
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert len({*heads}) == len(heads)
    assert any(
        line.startswith("jaxshare_http_requests_total{") and f'path="{COMPLETIONS}"' in line
        for line in lines
    )
    replicas.num_running = 0
    assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
    assert "jaxshare_replicas_running 0.0" in client.get("/metrics").text
    replicas.num_running = 2


def test_keys_stay_at_the_front():
    replicas = ScriptedReplicas("one")
    seen = []
    answer = replicas.answer
    replicas.answer = lambda request, route: seen.append(request) or answer(request, route)
    with fronted(replicas, api_keys=("right",)) as (client, _, _):
        assert client.post(COMPLETIONS, json=asked()).status_code == 401
        assert seen == []
        key = {"Authorization": "Bearer right", "Cookie": "a=b"}
        made = client.post("/v1/responses", json={"input": "a"}, headers=key).json()
        assert client.get(f"/v1/responses/{made['id']}", headers=key).status_code == 200
    assert len(seen) == 2 and {len(each.owner) for each in seen} == {64}
    assert not {b"authorization", b"cookie"} & {name for each in seen for name, _ in each.headers}


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_ends_what_runs(is_stream):
    replicas = ScriptedReplicas("one")
    replicas.late = 3.0
    with fronted(replicas) as (client, front, _):
        with pytest.raises(httpx2.ReadTimeout):
            client.post(COMPLETIONS, json=asked(stream=is_stream), timeout=0.3)
        until(lambda: front.num_running == 0, 2)
        until(lambda: replicas.services["one"].num_running == 0, 2)


def test_a_front_that_drains_finishes_what_runs_and_refuses_the_rest():
    replicas = ScriptedReplicas("one")
    replicas.late = 0.5
    with fronted(replicas, grace=20) as (client, front, server):
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(client.post(COMPLETIONS, json=asked()).json())
        )
        thread.start()
        until(lambda: front.num_running == 1)
        server.drain()
        refused = client.post(COMPLETIONS, json=asked())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert client.get("/ready").status_code == 503
        thread.join(20)
        assert answers[0]["choices"][0]["text"] == TEXT
        until(lambda: server.should_exit)


@pytest.mark.parametrize("is_stream", [True, False])
def test_what_has_not_finished_within_the_grace_is_told_so(is_stream):
    replicas = ScriptedReplicas("one")
    replicas.late = 20.0
    with fronted(replicas, grace=0.2) as (client, front, server):
        answers = []
        body = asked(stream=is_stream)
        thread = threading.Thread(
            target=lambda: answers.append(client.post(COMPLETIONS, json=body).text)
        )
        thread.start()
        until(lambda: front.num_running == 1)
        server.drain()
        thread.join(10)
        assert '"code":"shutting_down"' in answers[0]


def test_a_front_whose_replicas_cannot_be_started_ends():
    replicas = ScriptedReplicas("one", broken=RuntimeError("no memory"))
    with fronted(replicas) as (_, front, server):
        until(lambda: front.failure is not None)
        until(lambda: server.should_exit)
        assert str(front.failure) == "no memory" and not front.is_warm


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replicas", "2"], "--replicas is given without --ray"),
        (["--ray", "auto", "--data", "2"], "--data is 2"),
        (["--ray", "auto", "--sessions-folder", "saves"], "--sessions-folder is given with --ray"),
        (["--ray", "auto", "--files-folder", "files"], "--files-folder is given with --ray"),
        (["--ray", "ray://head:10001"], "a server runs on a machine of the cluster"),
        (["--ray", "nowhere"], "the Ray address is 'nowhere'"),
        (["--ray", "auto", "--replicas", "0"], "replicas is 0"),
    ],
)
def test_options_that_do_not_go_together(options, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(["serve", "embedded", "--port", "0", *options]) != 0
    assert words in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []
