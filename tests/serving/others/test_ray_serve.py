"""A server before two replicas under Ray Serve: texts, prefixes, states, and a replica that dies."""

import collections
import concurrent.futures
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading

import httpx2
import pytest

from jaxshare.models import load
from jaxshare.serving import generate
from jaxshare.serving.engine import Engine
from jaxshare.serving.inputs import default_sampler
from tests.helpers import folder_of_first_layers
from tests.processes import below, ray_cluster, wait_for
from tests.serving.http.served import sse_events

pytestmark = pytest.mark.others
COMPLETIONS = "/v1/completions"
REPLICA = "ray::ServeReplica"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The first layer of the embedded model."""
    return folder_of_first_layers(tmp_path_factory.mktemp("model") / "one", 1)


@pytest.fixture(scope="module")
def live(folder, tmp_path_factory):
    """A server with two rows in each of two replicas: (its client, the cluster's process id)."""
    with ray_cluster(tmp_path_factory.mktemp("compiled")) as (address, pid):
        command = [sys.executable, "-m", "jaxshare.serving.cli", "serve", str(folder)]
        command += ["--ray", address, "--replicas", "2", "--port", "0", "--max-rows", "2"]
        command += ["--served-model-name", "tiny", "--max-model-len", "1024"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            url = re.search(r"tiny is served at (http://127\.0\.0\.1:\d+)/v1", line)
            assert url, line + process.stderr.read()
            with httpx2.Client(base_url=url[1], timeout=120) as client:
                refused = client.post(COMPLETIONS, json={"prompt": "a"})
                assert refused.json()["error"]["code"] == "starting"
                wait_for(lambda: client.get("/ready").status_code == 200)
                yield client, pid
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert replicas(pid) == {}


def replicas(pid):
    """The processes of replicas, by their names."""
    found = below(pid).items()
    return {name.split("#")[-1].split()[0]: p for p, name in found if name.startswith(REPLICA)}


def texts(model, prompts, max_tokens, **changed):
    """The texts of the library, each by itself, as requests have seeds of their own."""
    sampler = dataclasses.replace(default_sampler(model), **changed)
    options = {"max_new_tokens": max_tokens, "sampler": sampler, "seed": 3}
    with Engine(model, max_rows=2) as engine:
        made = [generate(model, [each], engine=engine, **options) for each in prompts]
    return [each.completions[0].text for each in made]


def asked(prompt, **more):
    return {"prompt": prompt, "seed": 3, **more}


def counted(client, name):
    """The sums of a counter's values by replica."""
    page = client.get("/metrics").text
    found = re.findall(rf'^{name}{{.*?replica="(\w+)".*?}} (\S+)$', page, re.MULTILINE)
    sums = collections.Counter()
    for replica, value in found:
        sums[replica] += float(value)
    return sums


def test_texts_are_the_library_s_and_both_replicas_write_some(live, folder):
    client, _ = live
    prompts = [f"{i}. What is {i} + 25?" for i in range(6)]
    wanted = texts(load(folder), prompts, 12)
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        made = [
            *threads.map(lambda p: client.post(COMPLETIONS, json=asked(p, max_tokens=12)), prompts)
        ]
    assert [answer.json()["choices"][0]["text"] for answer in made] == wanted
    assert sum(value > 0 for value in counted(client, "jaxshare_calls_total").values()) == 2


def test_a_prefix_is_read_once(live):
    """Whatever is asked between: the replicas take turns for prompts that are new."""
    client, _ = live
    long = "The rules of the game are these. " * 12
    cached = []
    for i in range(4):
        body = {"prompt": f"{long}{i}", "max_tokens": 1}
        usage = client.post(COMPLETIONS, json=body).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        client.post(COMPLETIONS, json={"prompt": f"{i} is another", "max_tokens": 1})
    assert cached[0] == 0 and min(cached[1:]) > 0.8 * usage["prompt_tokens"]


def test_states_are_found_where_they_are(live):
    client, _ = live
    made = [
        client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2}).json()
        for _ in range(2)
    ]
    for each in made * 2:
        assert client.get(f"/v1/responses/{each['id']}").json()["id"] == each["id"]
        body = {"input": "on", "max_output_tokens": 2, "previous_response_id": each["id"]}
        assert client.post("/v1/responses", json=body).status_code == 200
    sessions = [
        client.post("/v1/workers", json={"problem": f"{i} + 1", "names": ["A"], "budget": 8}).json()
        for i in range(2)
    ]
    listed = client.get("/v1/workers").json()["data"]
    assert {each["id"] for each in listed} == {each["id"] for each in sessions}
    for each in sessions:
        assert client.get(f"/v1/workers/{each['id']}").status_code == 200
        assert client.delete(f"/v1/workers/{each['id']}").status_code == 200
    client.post("/v1/trees", json={"name": "one", "nodes": []})
    assert [tree["name"] for tree in client.get("/v1/trees").json()["data"]] == ["one"]
    assert client.get("/v1/workers/saves").json()["error"]["code"] == "not_with_replicas"


def test_a_client_that_goes_away_frees_its_row(live):
    client, _ = live
    for _ in range(5):  # more than there are rows
        with pytest.raises(httpx2.ReadTimeout):
            body = asked("a", max_tokens=900, n=64, ignore_eos=True)
            client.post(COMPLETIONS, json=body, timeout=0.5)
    wait_for(lambda: not any(counted(client, "jaxshare_rows").values()), 20)
    assert not any(counted(client, "jaxshare_queue").values())


def read_stream(client, prompt, begun):
    """The text of a stream, and the code of its error or None."""
    body = asked(prompt, max_tokens=300, ignore_eos=True, stream=True)
    text, code = "", None
    with client.stream("POST", COMPLETIONS, json=body) as answer:
        assert answer.status_code == 200
        lines = ""
        for part in answer.iter_text():
            begun.set()
            lines += part
    assert lines.endswith("data: [DONE]\n\n")
    for _, data in sse_events(lines)[:-1]:
        told = json.loads(data)
        if "error" in told:
            code = told["error"]["code"]
        else:
            text += told["choices"][0]["text"]
    return text, code


def test_a_replica_that_is_killed_loses_no_request_that_has_not_begun_to_stream(live, folder):
    """With two rows in each, requests run and wait at both replicas when one is killed."""
    client, pid = live
    before = replicas(pid)
    prompts = [f"{i}. {i * 7} + 25 = " for i in range(8)]
    wanted = texts(load(folder), prompts, 300, ignore_eos=True)
    begun = [threading.Event() for _ in prompts]
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        streams = [
            threads.submit(read_stream, client, prompt, event)
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        body = {"max_tokens": 300, "ignore_eos": True}
        whole = [threads.submit(client.post, COMPLETIONS, json=asked(p, **body)) for p in prompts]
        wait_for(lambda: sum(event.is_set() for event in begun) >= 2)
        os.kill(next(iter(before.values())), signal.SIGKILL)
        had_begun = [event.is_set() for event in begun]
        found = [stream.result() for stream in streams]
        answers = [one.result() for one in whole]
    assert [one.json()["choices"][0]["text"] for one in answers] == wanted
    lost = [code for _, code in found if code]
    assert {*lost} <= {"replica_lost"} and len(lost) <= 2  # as many as it had rows
    for (text, code), has_begun, right in zip(found, had_begun, wanted, strict=True):
        assert text == right if code is None else has_begun and right.startswith(text)
    wait_for(lambda: len({*replicas(pid)} - {*before}) == 1)
    wait_for(lambda: "jaxshare_replicas_running 2.0" in client.get("/metrics").text)
