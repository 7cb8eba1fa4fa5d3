"""Sessions of workers that are saved over HTTP, and go on in another server."""

import json

import pytest

from tests.serving.http.served import served, until
from tests.serving.http.test_workers import begin, end, events_of

LONG = {"budget": 120, "stop_on": "never", "finish_at": [60, 120]}


def steps_of(server, identity):
    told = server.http.get(f"/v1/workers/{identity}").json()
    steps = [(step["worker"], step["step"], step["text"]) for step in told["steps"]]
    return steps, [each["value"] for each in told["answers"]], told["passes"]


def test_a_saved_session_goes_on_in_another_server_as_if_nothing_had_been(engine, tmp_path):
    with served(engine, sessions_folder=str(tmp_path)) as first:
        made = begin(first, **LONG)
        identity = made["id"]
        until(lambda: first.http.get(f"/v1/workers/{identity}").json()["passes"] >= 8)
        saved = first.http.post(f"/v1/workers/{identity}/save").json()
        again = first.http.post(f"/v1/workers/{identity}/save").json()
        assert saved["object"] == "workers.save" and 8 <= saved["passes"] <= again["passes"] < 120
        size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        assert again["bytes"] == size
        listed = first.http.get("/v1/workers/saves").json()["data"]
        assert [(each["id"], each["names"]) for each in listed] == [(identity, ["Alice", "Bob"])]
        taken = first.http.post(f"/v1/workers/saves/{identity}/restore")
        assert taken.status_code == 400 and "delete it first" in taken.json()["error"]["message"]
        assert first.http.delete(f"/v1/workers/saves/{identity}").status_code == 400
        events_of(first, identity)
        whole = steps_of(first, identity)
        assert whole[2] == 120
        end(first, identity)
    with served(engine, sessions_folder=str(tmp_path)) as second:
        restored = second.http.post(f"/v1/workers/saves/{identity}/restore")
        assert restored.status_code == 200, restored.text
        assert restored.json()["id"] == identity
        assert restored.json()["passes"] >= again["passes"]
        events_of(second, identity)
        assert steps_of(second, identity) == whole
        end(second, identity)
        assert second.http.delete(f"/v1/workers/saves/{identity}").json()["deleted"]
        assert second.http.get("/v1/workers/saves").json()["data"] == []
        gone = second.http.post(f"/v1/workers/saves/{identity}/restore")
        assert gone.status_code == 404 and gone.json()["error"]["param"] == "identity"
    assert [*tmp_path.iterdir()] == []


def test_saves_belong_to_the_key_that_made_them(engine, tmp_path):
    with served(engine, sessions_folder=str(tmp_path), api_keys=("one", "two")) as made:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"problem": "Solve: 1. 3 + 4", "names": ["Alice"], "budget": 16}
        identity = made.http.post("/v1/workers", json=body, headers=one).json()["id"]
        assert made.http.post(f"/v1/workers/{identity}/save", headers=two).status_code == 404
        assert made.http.post(f"/v1/workers/{identity}/save", headers=one).status_code == 200
        assert made.http.delete(f"/v1/workers/{identity}", headers=one).json()["deleted"]
        assert made.http.get("/v1/workers/saves", headers=two).json()["data"] == []
        path = f"/v1/workers/saves/{identity}"
        assert made.http.post(f"{path}/restore", headers=two).status_code == 404
        assert made.http.delete(path, headers=two).status_code == 404
        assert made.http.delete(path, headers=one).json()["deleted"]


def test_the_quota_the_disk_and_servers_without_a_folder_refuse_saves(engine, live, tmp_path):
    made = begin(live)
    refused = live.http.post(f"/v1/workers/{made['id']}/save")
    assert refused.status_code == 400 and "--sessions-folder" in refused.text
    assert live.http.get("/v1/workers/saves").json()["data"] == []
    end(live, made["id"])
    with served(engine, sessions_folder=str(tmp_path / "few"), sessions_bytes=1000) as few:
        made = begin(few)
        refused = few.http.post(f"/v1/workers/{made['id']}/save")
        assert refused.status_code == 507 and refused.json()["error"]["code"] == "storage_full"
        assert events_of(few, made["id"])[-1]["type"] == "end"  # it goes on
        assert not (tmp_path / "few").exists() or [*(tmp_path / "few").iterdir()] == []
    taken = tmp_path / "taken"
    taken.write_text("no folder")
    with served(engine, sessions_folder=str(taken)) as broken:
        made = begin(broken)
        refused = broken.http.post(f"/v1/workers/{made['id']}/save")
        assert refused.status_code == 507 and refused.json()["error"]["code"] == "storage_failed"
        assert str(taken) not in refused.text


@pytest.mark.parametrize("identity", ["..", "session", "session/../x", "%2e%2e%2fx", "a" * 300])
def test_no_identity_names_another_path(engine, tmp_path, identity):
    outside = tmp_path / "x"
    outside.mkdir()
    facts = {"identity": "x", "owner": "", "finish_at": [], "names": [], "problem": ""}
    (outside / "session.json").write_text(json.dumps({**facts, "passes": 1, "saved_at": 1}))
    with served(engine, sessions_folder=str(tmp_path / "saves")) as made:
        assert made.http.delete(f"/v1/workers/saves/{identity}").status_code in (404, 405)
        answer = made.http.post(f"/v1/workers/saves/{identity}/restore")
        assert answer.status_code in (404, 405)
    assert outside.is_dir()


def test_damaged_facts_of_a_save_hide_it_alone(engine, tmp_path):
    broken = tmp_path / f"session{'0' * 32}"
    broken.mkdir()
    (broken / "session.json").write_text('{"identity": 3')
    with served(engine, sessions_folder=str(tmp_path)) as made:
        assert made.http.get("/v1/workers/saves").json()["data"] == []
