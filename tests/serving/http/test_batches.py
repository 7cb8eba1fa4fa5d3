"""Files and batches, with OpenAI's own client: what it gets, and what it is refused."""

import contextlib
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import httpx2
import openai
import pytest

from jaxshare import Sampler
from jaxshare.serving import generate
from jaxshare.serving.http.batches import batch as batch_module
from jaxshare.serving.http.batches import running
from jaxshare.serving.http.batches.file_store import FileStore
from jaxshare.serving.http.batches.lines import LineError, read_line
from tests.helpers import one_layer
from tests.serving.http.served import ScriptedEngine, served, until

ENDPOINT = "/v1/completions"


def line(name, prompt="1. 3 + 4", endpoint=ENDPOINT, **body):
    body = {"prompt": prompt, "max_tokens": 6, "seed": 3, "temperature": 1.0, **body}
    return {"custom_id": name, "method": "POST", "url": endpoint, "body": body}


def file_of(lines):
    return ("lines.jsonl", "\n".join(map(json.dumps, lines)).encode())


def slow_engine(seconds):
    """An engine that waits before each answer."""
    engine = ScriptedEngine(answers=["Yes."])
    engine.late = seconds
    return engine


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@contextlib.contextmanager
def opened(engine, folder, max_bytes=2**24, **settings):
    files = FileStore(str(folder), max_bytes)
    try:
        with served(engine, files=files, **settings) as made:
            yield made, client_of(made)
    finally:
        files.close()


def ended(client, batch, seconds=60):
    """The batch at its end."""
    deadline = time.monotonic() + seconds
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def answers_of(client, file_id):
    content = client.files.content(file_id).read().decode()
    return {each["custom_id"]: each for each in map(json.loads, content.splitlines())}


@pytest.fixture(scope="module")
def kept(engine, tmp_path_factory):
    with opened(engine, tmp_path_factory.mktemp("files")) as made:
        yield made


@pytest.fixture(scope="module")
def client(kept):
    return kept[1]


def start(client, lines, endpoint=ENDPOINT, **more):
    file = client.files.create(file=file_of(lines), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


def test_a_batch_gives_the_texts_of_the_library(client):
    lines = [line(f"a{i}", f"{i}. 3 + 4", seed=i) for i in range(4)]
    batch = start(client, lines, metadata={"name": "sums"})
    assert batch.metadata == {"name": "sums"}
    batch = ended(client, batch)
    assert batch.status == "completed" and batch.error_file_id is None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 4, 0)
    found = answers_of(client, batch.output_file_id)
    for i in range(4):
        expected = generate(
            one_layer(), f"{i}. 3 + 4", sampler=Sampler(1.0), max_new_tokens=6, seed=i
        )
        body = found[f"a{i}"]["response"]["body"]
        assert found[f"a{i}"]["response"]["status_code"] == 200 and not found[f"a{i}"]["error"]
        assert body["choices"][0]["text"] == expected.completions[0].text
    assert batch.completed_at >= batch.finalizing_at >= batch.in_progress_at >= batch.created_at


def test_chats_and_responses_may_be_lines_too(client):
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    for endpoint, body in (
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 4}),
        ("/v1/responses", {"input": "What is 3 + 4?", "max_output_tokens": 4}),
    ):
        one = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
        batch = ended(client, start(client, [one], endpoint))
        found = answers_of(client, batch.output_file_id)["a"]["response"]["body"]
        assert found["object"] == ("response" if "input" in body else "chat.completion")


def test_lines_that_are_refused_have_the_endpoints_words_in_a_file_of_their_own(client, kept):
    lines = [line("good"), line("hot", temperature=-1), line("long", "a " * 9000)]
    lines += [line("other", model="another"), line("n", n=1000)]
    batch = ended(client, start(client, lines))
    assert batch.status == "completed"
    assert answers_of(client, batch.output_file_id).keys() == {"good"}
    failed = answers_of(client, batch.error_file_id)
    assert batch.request_counts.failed == len(failed) == 4
    for each in lines[1:]:
        direct = kept[0].http.post(ENDPOINT, json=each["body"])
        told = failed[each["custom_id"]]["response"]
        assert (told["status_code"], told["body"]) == (direct.status_code, direct.json())


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"3", "invalid_json_line"),
        (b"[" * 10**5, "invalid_json_line"),
        ({"custom_id": ""}, "missing_custom_id"),
        ({"custom_id": 3}, "missing_custom_id"),
        ({"custom_id": "a" * 1000}, "invalid_custom_id"),
        ({"custom_id": "\ud800"}, "invalid_custom_id"),
        ({"custom_id": "a\nb"}, "invalid_custom_id"),
        ({"method": "GET"}, "invalid_method"),
        ({"url": "/v1/chat/completions"}, "invalid_url"),
        ({"url": "/v1/embeddings"}, "invalid_url"),
        ({"body": "a"}, "missing_body"),
        ({"body": {"stream": True}}, "invalid_body"),
        ({"bodies": {}}, "unknown_field"),
    ],
)
def test_lines_of_another_form_are_told(text, code):
    given = text if isinstance(text, bytes) else json.dumps({**line("a"), **text}).encode()
    with pytest.raises(LineError) as error:
        read_line(7, given, ENDPOINT)
    assert (error.value.code, error.value.number) == (code, 7)


def test_a_file_with_a_bad_line_fails_before_anything_runs(client):
    lines = [line("a"), line("b"), {**line("a"), "url": "/v1/embeddings"}, line("a")]
    batch = ended(client, start(client, lines))
    assert batch.status == "failed" and batch.output_file_id is None
    assert [(each.code, each.line) for each in batch.errors.data] == [
        ("invalid_url", 3),
        ("duplicate_custom_id", 4),
    ]
    empty = client.files.create(file=("empty.jsonl", b"\n\n"), purpose="batch")
    batch = client.batches.create(
        input_file_id=empty.id, endpoint=ENDPOINT, completion_window="24h"
    )
    assert ended(client, batch).errors.data[0].code == "empty_file"


def test_files_are_listed_read_and_deleted(client):
    content = bytes(range(256)) * 1000
    made = client.files.create(file=("a/../ä.bin", content), purpose="batch")
    assert (made.bytes, made.purpose, made.filename) == (len(content), "batch", "a/../ä.bin")
    assert client.files.content(made.id).read() == content
    assert made.id in [each.id for each in client.files.list(purpose="batch")]
    first = client.files.list(limit=1)
    assert first.data[0].id == made.id
    assert made.id not in [each.id for each in client.files.list(after=made.id)]
    assert client.files.delete(made.id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_batches_are_listed_in_pages(client):
    made = [ended(client, start(client, [line("a")])).id for _ in range(3)]
    listed = [each.id for each in client.batches.list(limit=2)]
    assert {*made} <= {*listed} and len(listed) == len({*listed})
    page = client.batches.list(limit=2)
    assert page.has_more and len(page.data) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1 day"}, "completion_window"),
        ({"metadata": {"a": 3}}, "metadata"),
    ],
)
def test_batches_that_cannot_be_are_refused(kept, client, body, param):
    file = client.files.create(file=file_of([line("a")]), purpose="batch")
    plain = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
    answer = kept[0].http.post("/v1/batches", json={**plain, **body})
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_uploads_that_cannot_be_kept_leave_nothing(engine, tmp_path):
    with opened(engine, tmp_path, 50_000, max_upload_bytes=40_000) as (server, client):
        post = server.http.post
        for files, data, status in (
            ({"file": ("a", b"1")}, {"purpose": "fine-tune"}, 400),
            ({}, {"purpose": "batch"}, 400),
            ({"file": ("a", b"")}, {"purpose": "batch"}, 400),
            ({"file": ("a", b"1" * 41_000)}, {"purpose": "batch"}, 413),
            ({"other": ("a", b"1" * 2000)}, {"purpose": "batch"}, 400),
        ):
            answer = post("/v1/files", files=files, data=data)
            assert answer.status_code == status and answer.json()["error"]["message"]
        assert post("/v1/files", json={}).status_code == 400
        head = {"Content-Type": "multipart/form-data; boundary=x"}
        assert post("/v1/files", content=b"--y\r\n\r\n", headers=head).status_code == 400
        half = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
        assert post("/v1/files", content=half, headers=head).status_code == 400
        kept = [client.files.create(file=("a", b"1" * 20_000), purpose="batch") for _ in range(2)]
        with pytest.raises(openai.APIStatusError) as full:
            client.files.create(file=("a", b"1" * 20_000), purpose="batch")
        assert full.value.status_code == 507
        assert full.value.response.json()["error"]["code"] == "storage_full"
        assert len([*(tmp_path / "files").iterdir()]) == 2 * len(kept)
        client.files.delete(kept[0].id)
        client.files.create(file=("a", b"1" * 20_000), purpose="batch")
        site = {"Origin": "https://example.org"}
        form = {"files": {"file": ("a", b"1")}, "data": {"purpose": "batch"}}
        assert post("/v1/files", **form, headers=site).status_code == 403
        assert post("/v1/files", **form, headers={"Origin": server.url}).status_code == 200


def test_a_server_without_a_folder_says_so(live):
    client = client_of(live)
    for ask in (
        lambda: client.files.list(),
        lambda: client.files.create(file=("a", b"1"), purpose="batch"),
        lambda: client.batches.list(),
    ):
        with pytest.raises(openai.BadRequestError, match="--files-folder"):
            ask()


def test_one_key_does_not_see_the_files_and_batches_of_another(engine, tmp_path):
    with opened(engine, tmp_path, api_keys=("one", "two")) as (server, _):
        one, two = client_of(server, "one"), client_of(server, "two")
        batch = ended(one, start(one, [line("a")]))
        assert two.files.list().data == [] and two.batches.list().data == []
        for ask, name in (
            (two.files.content, batch.output_file_id),
            (two.files.delete, batch.input_file_id),
            (two.batches.retrieve, batch.id),
            (two.batches.cancel, batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask(name)
        with pytest.raises(openai.NotFoundError):
            two.batches.create(
                input_file_id=batch.input_file_id, endpoint=ENDPOINT, completion_window="24h"
            )


def test_a_cancelled_batch_keeps_what_it_has(tmp_path):
    with opened(slow_engine(0.05), tmp_path, batch_lines=1) as (server, client):
        lines = [line(f"a{i}") for i in range(200)]
        batch = start(client, lines)
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2)
        with pytest.raises(openai.BadRequestError, match="cancel the batch"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        batch = ended(client, batch)
        assert batch.status == "cancelled" and batch.cancelled_at >= batch.cancelling_at
        found = answers_of(client, batch.output_file_id)
        assert 2 <= len(found) == batch.request_counts.completed < 200
        until(lambda: server.service.num_running == 0)
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            client.batches.cancel(batch.id)
        client.files.delete(batch.input_file_id)


def test_the_lines_of_a_batch_that_expires_say_so(tmp_path):
    with opened(slow_engine(0.05), tmp_path, batch_lines=1) as (server, client):
        batch = start(client, [line(f"a{i}") for i in range(50)])
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 1)
        batches = server.server._batches
        run = batches._runs[batch.id]
        run.task.get_loop().call_soon_threadsafe(batches._end_early, run, "expired")
        batch = ended(client, batch)
        assert batch.status == "expired"
        done = answers_of(client, batch.output_file_id)
        expired = answers_of(client, batch.error_file_id)
        assert {*done, *expired} == {f"a{i}" for i in range(50)} and not {*done} & {*expired}
        assert {each["error"]["code"] for each in expired.values()} == {"batch_expired"}
        assert all(each["response"] is None for each in expired.values())


def test_a_quota_that_ends_a_batch_keeps_its_answers(tmp_path):
    with opened(ScriptedEngine(answers=["Yes. " * 20]), tmp_path, 60_000) as (_, client):
        batch = ended(client, start(client, [line(f"a{i}", max_tokens=100) for i in range(100)]))
        assert batch.status == "failed"
        assert [each.code for each in batch.errors.data] == ["storage_failed"]
        found = answers_of(client, batch.output_file_id)
        assert 0 < len(found) == batch.request_counts.completed < 100
        told = batch.errors.data[0].message
        assert "--files-bytes" in told and f"{len(found)} of 100 lines have answers" in told


def test_a_batch_on_a_full_disk_is_finalizing_until_there_is_room(tmp_path, monkeypatch):
    """It runs no more lines, names no files that are not there, and says what is left to send."""
    full, add = threading.Event(), batch_module.BatchAnswers.add
    monkeypatch.setattr(running, "_AGAIN_SECONDS", 0.05)

    def write(name, work):
        def written(*args, **more):
            if full.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
            return work(*args, **more)

        monkeypatch.setattr(batch_module, name, written)

    def added(answers, answer):
        if len(answers.done) == 5:
            full.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        add(answers, answer)

    write("whole_file", batch_module.whole_file)
    monkeypatch.setattr(batch_module.BatchAnswers, "add", added)
    with opened(ScriptedEngine(answers=["Yes."]), tmp_path, batch_lines=1) as (_, client):
        made = start(client, [line(f"a{i}") for i in range(9)])
        until(lambda: client.batches.retrieve(made.id).errors)
        until(lambda: client.batches.retrieve(made.id).status == "finalizing")
        batch = client.batches.retrieve(made.id)
        assert batch.output_file_id is None and batch.error_file_id is None
        full.clear()
        batch = ended(client, batch)
        assert batch.status == "failed" and batch.request_counts.completed == 5
        assert answers_of(client, batch.output_file_id).keys() == {f"a{i}" for i in range(5)}
        (error,) = batch.errors.data
        assert error.code == "storage_failed" and "5 of 9 lines have answers" in error.message


def test_a_server_that_ends_in_order_goes_on_with_the_next_start(tmp_path, caplog):
    caplog.set_level(logging.INFO, "jaxshare.http")
    with opened(slow_engine(0.02), tmp_path, batch_lines=2) as (server, client):
        batch = start(client, [line(f"a{i}") for i in range(60)])
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 3)
        server.server.drain()
        until(lambda: not server.server.started or server.server.should_exit)
    with opened(ScriptedEngine(answers=["Yes."]), tmp_path) as (_, client):
        batch = ended(client, client.batches.retrieve(batch.id))
        assert batch.status == "completed" and batch.request_counts.completed == 60
        assert f"batch {batch.id} goes on after a restart" in caplog.text
        content = client.files.content(batch.output_file_id).read().decode()
        names = [json.loads(each)["custom_id"] for each in content.splitlines()]
        assert sorted(names) == sorted(f"a{i}" for i in range(60))


def test_files_that_another_version_describes_stay_and_are_not_seen(tmp_path, caplog):
    """An upload that was cut off, of which nothing is described, is deleted."""
    with opened(ScriptedEngine(answers=["Yes."]), tmp_path) as (_, client):
        made = client.files.create(file=("a.jsonl", b'{"custom_id": "a"}'), purpose="batch")
        other = client.files.create(file=("b.jsonl", b'{"custom_id": "b"}'), purpose="batch")
    content = next(tmp_path.rglob(other.id))
    facts = content.with_name(f"{other.id}.json")
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "colour": "blue"}))
    cut_off = content.with_name("file-" + "0" * 32)
    cut_off.write_bytes(b"x")
    with opened(ScriptedEngine(answers=["Yes."]), tmp_path) as (_, client):
        assert [file.id for file in client.files.list()] == [made.id]
    assert content.read_bytes() == b'{"custom_id": "b"}' and not cut_off.exists()
    assert f"the facts of {other.id} cannot be read; it is kept, unseen" in caplog.text


def test_two_servers_do_not_share_a_folder(tmp_path):
    first = FileStore(str(tmp_path), 100)
    with pytest.raises(ValueError, match="--files-folder"):
        FileStore(str(tmp_path), 100)
    first.close()
    FileStore(str(tmp_path), 100).close()


def test_uploads_and_lines_that_a_kill_has_cut_off_are_deleted(tmp_path):
    with opened(ScriptedEngine(answers=["Yes."]), tmp_path) as (_, client):
        file = client.files.create(file=file_of([line("a")]), purpose="batch")
    (tmp_path / "files" / f"file-{'0' * 32}").write_bytes(b"half")
    (tmp_path / "files" / f"file-{'1' * 32}.json").write_bytes(b"{}")
    store = FileStore(str(tmp_path), 10**6)
    assert [each.identity for each in store.list("")] == [file.id] and store.used == file.bytes
    assert len([*(tmp_path / "files").iterdir()]) == 2
    store.close()


def test_lines_wait_behind_requests_of_clients(tmp_path):
    engine = ScriptedEngine(answers=["Yes."])
    with opened(engine, tmp_path) as (server, client):
        lines = [line("a"), line("b", priority=10**12), line("c", priority=-5)]
        ended(client, start(client, lines))
        server.http.post(ENDPOINT, json={"prompt": "a"})
    assert sorted(asked["priority"] for _, asked in engine.asked) == [-1005, -1000, -1000, 0]


SERVER = """
import sys
from jaxshare.serving.engine import Engine
from jaxshare.serving.http.batches.file_store import FileStore
from jaxshare.serving.http.server import DrainingServer, listen, url_of
from jaxshare.serving.http.service import Service
from jaxshare.serving.http.settings import ServerSettings
from tests.helpers import one_layer

listening = listen("127.0.0.1", 0)
with Engine(one_layer(), max_rows=4, max_queue=64, passes=4) as engine:
    files = FileStore(sys.argv[1], 10**7)
    settings = ServerSettings(("tiny",), batch_lines=4)
    server = DrainingServer(Service(engine, settings, files), listening)
    server.on_start = lambda: print(url_of(listening), flush=True)
    server.serve_until_told(warm_up=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moments", [(10,), (4, 15, 30)], ids=["once", "often"])
def test_a_batch_survives_kills_with_each_line_answered_once(tmp_path, moments):
    lines = [line(f"a{i}", f"{i % 7}. 3 + 4", max_tokens=12, seed=None) for i in range(40)]

    def serve():
        made = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(tmp_path / "files")],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert made.stdout is not None
        with made.stdout:
            url = made.stdout.readline().strip()
        return made, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    process, client = serve()
    batch = start(client, lines)
    for least in moments:
        deadline = time.monotonic() + 60
        while client.batches.retrieve(batch.id).request_counts.completed < least:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process, client = serve()
    try:
        done = ended(client, client.batches.retrieve(batch.id))
        content = client.files.content(done.output_file_id).read().decode()
        again = ended(client, start(client, lines))
        unbroken = answers_of(client, again.output_file_id)
    finally:
        process.terminate()
        process.wait(30)
    assert done.status == "completed" and done.request_counts.completed == 40
    found = [json.loads(each) for each in content.splitlines()]
    assert sorted(each["custom_id"] for each in found) == sorted(
        each["custom_id"] for each in lines
    )

    def text(answer):
        return answer["response"]["body"]["choices"][0]["text"]

    assert {each["custom_id"]: text(each) for each in found} == {
        name: text(each) for name, each in unbroken.items()
    }


def test_a_client_that_goes_away_in_the_midst_of_an_upload_leaves_nothing(engine, tmp_path):
    with opened(engine, tmp_path) as (server, client):

        def parts():
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
            raise RuntimeError("gone")

        head = {"Content-Type": "multipart/form-data; boundary=x"}
        with contextlib.suppress(RuntimeError, httpx2.HTTPError):
            server.http.post("/v1/files", content=parts(), headers=head)
        until(lambda: not [*(tmp_path / "files").iterdir()])
        assert client.files.list().data == []
