"""Sessions of workers over HTTP: what they write, what is asked of them, and how they end."""

import json
import threading
import time

import pytest

from jaxshare import Sampler
from jaxshare.serving import Workers
from jaxshare.serving.http.endpoints.workers import SessionFields
from tests.helpers import one_layer
from tests.serving.http.served import served, until
from tests.serving.http.test_values import VALUES

PROBLEM = "Solve: 1. 3 + 4 2. 5 + 6"
SETTINGS = {"names": ["Alice", "Bob"], "budget": 48, "seed": 3}


def begin(live, **more) -> dict:
    answer = live.http.post(
        "/v1/workers", json={"problem": PROBLEM, "temperature": 1.0, **SETTINGS, **more}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(live, identity: str, after: int = 0) -> list[dict]:
    """All events to the end of the session."""
    with live.http.stream("GET", f"/v1/workers/{identity}/events?after={after}") as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def end(live, identity: str) -> None:
    assert live.http.delete(f"/v1/workers/{identity}").json()["deleted"]


def test_a_session_writes_what_it_writes_in_the_library_and_a_late_client_sees_all(live):
    made = begin(live)
    found = events_of(live, made["id"])
    assert [each["number"] for each in found] == [*range(len(found))]
    assert events_of(live, made["id"], after=3) == found[3:]
    told = live.http.get(f"/v1/workers/{made['id']}").json()
    with Workers(one_layer(), PROBLEM, sampler=Sampler(1.0), **SETTINGS) as session:
        expected = [(step.worker, step.number, step.text) for step in session.run().steps]
    steps = [(step["worker"], step["step"], step["text"]) for step in told["steps"]]
    assert steps == expected
    written: dict[tuple, str] = {}
    for each in found:
        if each["type"] == "text":
            key = each["worker"], each["step"]
            written[key] = written.get(key, "") + each["text"]
    assert written == {(worker, number): text for worker, number, text in expected if text}
    assert told["status"] == "ended" and found[-1]["type"] == "end"
    end(live, made["id"])
    assert live.http.get(f"/v1/workers/{made['id']}").status_code == 404


def test_a_session_that_has_failed_says_so(live, monkeypatch):
    def fail(*_):
        raise RuntimeError("the roof is down")

    monkeypatch.setattr(Workers, "stream", fail)
    made = begin(live)
    assert events_of(live, made["id"])[-1]["message"] == "the roof is down"
    told = live.http.get(f"/v1/workers/{made['id']}")
    assert told.status_code == 410
    assert told.json()["error"] | {"param": None} == {
        "message": "the session has failed (the roof is down); make another",
        "type": "server_error",
        "param": None,
        "code": "session_failed",
    }
    end(live, made["id"])


def test_two_sessions_and_a_request_at_once_do_not_change_each_other(live):
    alone = begin(live)
    expected = [e for e in events_of(live, alone["id"]) if e["type"] == "text"]
    both, texts = [begin(live), begin(live, seed=4)], []
    request = threading.Thread(
        target=lambda: texts.append(
            live.http.post("/v1/completions", json={"prompt": "1. 3 + 4", "max_tokens": 30})
        )
    )
    request.start()
    found = [[e for e in events_of(live, made["id"]) if e["type"] == "text"] for made in both]
    request.join()
    assert "".join(e["text"] for e in found[0]) and texts[0].status_code == 200

    def words(events):
        return {w: "".join(e["text"] for e in events if e["worker"] == w) for w in ("Alice", "Bob")}

    assert words(found[0]) == words(expected) != words(found[1])
    for made in (alone, *both):
        end(live, made["id"])


def test_a_person_speaks_workers_pause_join_and_leave_and_answer_at_any_time(live):
    made = begin(live, names=["Alice"], max_workers=2, budget=4000, stop_on="never")
    path = f"/v1/workers/{made['id']}"

    def ask(what: str, **body) -> dict:
        answer = live.http.post(f"{path}/{what}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert ask("add", name="Bob")["names"] == ["Alice", "Bob"]
    told = ask("say", text="Please be brief.", name="Carol")
    assert any(step["worker"] == "Carol" and "be brief" in step["text"] for step in told["steps"])
    ask("pause", name="Alice")
    ask("pause", name="Bob")
    deadline = time.monotonic() + 60
    while live.http.get(path).json()["status"] != "waiting" and time.monotonic() < deadline:
        time.sleep(0.05)
    passes = live.http.get(path).json()["passes"]
    assert live.http.get(path).json() == {**live.http.get(path).json(), "passes": passes}
    answer = ask("finish")
    assert answer["object"] == "workers.answer" and answer["passes"] <= passes
    ask("resume", name="Bob")
    while live.http.get(path).json()["passes"] == passes and time.monotonic() < deadline:
        time.sleep(0.05)
    assert live.http.get(path).json()["passes"] > passes
    assert ask("remove", name="Alice")["names"] == ["Bob"]
    assert [each["id"] for each in live.http.get("/v1/workers").json()["data"]] == [made["id"]]
    end(live, made["id"])
    assert live.http.get("/v1/workers").json()["data"] == []


def test_a_client_that_goes_away_stops_no_session_and_the_memory_comes_back(live, engine):
    before = engine._leases.available
    made = begin(live, budget=200, stop_on="never")
    with live.http.stream("GET", f"/v1/workers/{made['id']}/events") as answer:
        next(answer.iter_lines())
    assert events_of(live, made["id"])[-1]["type"] == "end"
    assert engine._leases.available < before
    end(live, made["id"])
    assert engine._leases.available == before


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"problem": ""}, 400, "problem"),
        ({"names": []}, 400, "names"),
        ({"names": ["A", "A"]}, 400, "A"),
        ({"budget": 0}, 400, "budget"),
        ({"layout": "spiral"}, 400, "layout"),
        ({"format": "/etc/passwd"}, 400, "format"),
        ({"kind": "poem"}, 400, "kind"),
        ({"temperature": -1}, 400, "temperature"),
        ({"budget": 2**21}, 400, "budget"),
        ({"model": "other"}, 404, "other"),
        ({"engine": "mine"}, 400, "engine"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_and_leaves_no_session(live, body, status, words):
    answer = live.http.post("/v1/workers", json={"problem": PROBLEM, **SETTINGS, **body})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and error["param"].partition(".")[0] in body
    assert live.http.get("/v1/workers").json()["data"] == []


def test_wrong_requests_of_a_session_are_told_and_it_goes_on(live):
    made = begin(live, budget=400)  # so that it still runs then
    path = f"/v1/workers/{made['id']}"
    for what, body in (
        ("pause", {"name": "Nobody"}),
        ("say", {"text": ""}),
        ("add", {"name": "Bob"}),
    ):
        answer = live.http.post(f"{path}/{what}", json=body)
        assert answer.status_code == 400, answer.text
    assert live.http.get(f"{path}/events?after=-1").status_code == 400
    assert live.http.post("/v1/workers/session-none/pause", json={"name": "A"}).status_code == 404
    assert events_of(live, made["id"])[-1]["type"] == "end"
    end(live, made["id"])


@pytest.mark.slow
@pytest.mark.parametrize("field", [*SessionFields.model_fields])
def test_no_value_of_a_field_makes_the_server_fail(live, field):
    for value in VALUES:
        body = {"problem": PROBLEM, **SETTINGS, "budget": 4, field: value}
        head = {"Content-Type": "application/json"}
        answer = live.http.post("/v1/workers", content=json.dumps(body), headers=head)
        assert answer.status_code != 415
        assert answer.status_code < 500 or answer.status_code == 503, (value, answer.text)
        if answer.status_code == 200:
            end(live, answer.json()["id"])


@pytest.mark.slow
def test_a_session_that_no_client_looks_at_waits_for_one(engine):
    with served(engine, session_idle_seconds=0.05) as made:
        session = begin(made, budget=1500, stop_on="never")
        running = made.service.sessions[session["id"]]
        until(lambda: running.status == "waiting")
        passes = running.num_sampled
        time.sleep(0.2)
        assert running.num_sampled == passes < 3000
        found = events_of(made, session["id"])
        assert any(event["type"] == "waiting" for event in found)
        assert found[-1]["type"] == "end" and found[-1]["passes"] == 1500
        end(made, session["id"])


def test_a_session_that_has_ended_tells_so_once_however_often_it_is_asked(live):
    made = begin(live)
    found = events_of(live, made["id"])
    for what, body in (("pause", {"name": "Alice"}), ("say", {"text": "Go on."})):
        answer = live.http.post(f"/v1/workers/{made['id']}/{what}", json=body)
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "session_ended"
    for _ in range(3):
        told = live.http.get(f"/v1/workers/{made['id']}").json()
        live.http.post(f"/v1/workers/{made['id']}/finish")
    assert events_of(live, made["id"]) == found and told["status"] == "ended"
    end(live, made["id"])


def test_what_workers_see_and_how_they_are_is_told(live):
    made = begin(live, names=["Alice", "Bob"], budget=1500, stop_on="never", layout="contiguous")
    path = f"/v1/workers/{made['id']}"
    live.http.post(f"{path}/pause", json={"name": "Bob"})
    told = live.http.get(path).json()
    assert {name: each["state"] for name, each in told["workers"].items()} == {
        "Alice": "running",
        "Bob": "paused",
    }
    with Workers(one_layer(), PROBLEM, layout="contiguous", **SETTINGS) as session:
        sees = {name: [*session.layout.sees[name]] for name in session.names}
        blocks = session.block_lengths
    assert {name: each["sees"] for name, each in told["workers"].items()} == sees
    assert told["blocks"].keys() == blocks.keys() and told["moves"] == {}
    written = sum(told["blocks"].values()) - sum(blocks.values())
    assert written >= told["passes"] - 16
    shares = live.http.get(f"{path}/attention").json()["shares"]
    assert shares.keys() == {"Alice"} and [*shares["Alice"]] == sees["Alice"]
    assert sum(shares["Alice"].values()) == pytest.approx(1, abs=1e-3)
    end(live, made["id"])


def test_answers_at_budgets_are_those_of_a_run_of_the_library(live):
    made = begin(live, finish_at=[40, 8, 24], stop_on="never")
    found = events_of(live, made["id"])
    with Workers(
        one_layer(), PROBLEM, sampler=Sampler(1.0), stop_on="never", **SETTINGS
    ) as session:
        run = session.run(finish_at=[8, 24, 40])
    expected = [
        (budget, each.value, each.text, each.passes) for budget, each in run.answers.items()
    ]
    told = live.http.get(f"/v1/workers/{made['id']}").json()
    for answers in (told["answers"], [each for each in found if each["type"] == "answer"]):
        assert [
            (each["budget"], each["value"], each["text"], each["passes"]) for each in answers
        ] == expected
    steps = [(step["worker"], step["step"], step["text"]) for step in told["steps"]]
    assert steps == [(step.worker, step.number, step.text) for step in run.steps]
    end(live, made["id"])
    refused = live.http.post(
        "/v1/workers", json={"problem": PROBLEM, **SETTINGS, "finish_at": [49]}
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "finish_at"
