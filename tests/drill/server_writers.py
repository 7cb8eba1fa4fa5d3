"""What the server writes for batches, and uploads, as actions under faults of the disk."""

import asyncio
import json
import random
import shutil
from pathlib import Path

from jaxshare.serving.http.batches.batch import COMPLETED, FAILED, read_batch
from jaxshare.serving.http.batches.file_store import INPUT, FileStore
from jaxshare.serving.http.batches.running import Batches, new_batch
from jaxshare.serving.http.endpoints.response_store import ResponseStore
from jaxshare.serving.http.errors import ApiError
from jaxshare.serving.http.service import Service
from jaxshare.serving.http.settings import ServerSettings
from tests.drill.disk_faults import Writer
from tests.drill.kinds import quietly
from tests.serving.http.served import ScriptedEngine

_ENDPOINT = "/v1/completions"


def batch_over_http(folder: Path, rng: random.Random) -> Writer:
    """A batch, from its file to the files of its answers, in servers that start again."""
    inside, template = folder / "files", folder / "template"
    names = [f"line {i}" for i in range(rng.randrange(2, 6))]
    refused = rng.choice(names)
    _prepare(template, names, refused)
    answers = {name: 400 if name == refused else 200 for name in names}

    def before() -> None:
        shutil.rmtree(inside, ignore_errors=True)
        shutil.copytree(template, inside)

    def after(done: bool) -> None:
        del done  # a batch that has failed has ended, too
        _serve(inside)
        batch = read_batch(next((inside / "batches").glob("*.json")))
        assert batch is not None and batch.status in (COMPLETED, FAILED), batch
        store = FileStore(str(inside), 10**6)
        try:
            found: list[tuple[str, int]] = []
            files = [name for name in (batch.output_file_id, batch.error_file_id) if name]
            for name in files:
                with store.open(store.find(name, "")) as content:
                    lines = [*map(json.loads, content)]
                found += [(one["custom_id"], one["response"]["status_code"]) for one in lines]
        finally:
            store.close()
        assert len({name for name, _ in found}) == len(found), "a line is answered twice"
        assert {*found} <= {*answers.items()}, "an answer is another one"
        assert (batch.completed + batch.failed) == len(found), "counts are others"
        if batch.status == COMPLETED:
            assert len(found) == len(names), "an answer is lost"
        left = {path.name for path in (inside / "batches").iterdir()}
        assert left == {f"{batch.identity}.json"}, f"there is left {left}"
        kept = {path.stem for path in (inside / "files").iterdir()}
        assert kept == {batch.input_file_id, *files}, "files are left"

    return Writer(inside, before, lambda: _serve(inside, faulty=True), after)


def upload(folder: Path, rng: random.Random) -> Writer:
    """An upload, in parts: it is there whole, or not at all."""
    inside, content = folder / "files", rng.randbytes(rng.randrange(1, 5000))

    def before() -> None:
        shutil.rmtree(inside, ignore_errors=True)

    def act() -> None:
        store = FileStore(str(inside), 10**6)
        try:
            with quietly():
                made = store.upload()
                try:
                    for start in range(0, len(content), 1000):
                        made.write(content[start : start + 1000])
                    made.complete("a", INPUT, "")
                finally:
                    made.abandon()
        except ApiError:
            pass  # the client has been told
        finally:
            store.close()

    def after(done: bool) -> None:
        del done
        store = FileStore(str(inside), 10**6)
        try:
            for file in store.list(""):
                with store.open(file) as found:
                    assert found.read() == content, "a part of it is lost"
            assert store.used == sum(file.bytes for file in store.list(""))
            paths = [*(inside / "files").iterdir()]
            assert len(paths) == 2 * len(store.list("")), "something is left"
        finally:
            store.close()

    return Writer(inside, before, act, after)


def _prepare(folder: Path, names: list[str], refused: str) -> None:
    """A folder with a file and a batch that has just been made."""
    store = FileStore(str(folder), 10**6)
    made = store.upload()
    for name in names:
        body = {"prompt": "a", "max_tokens": 3, "temperature": -1 if name == refused else 0}
        line = {"custom_id": name, "method": "POST", "url": _ENDPOINT, "body": body}
        made.write(json.dumps(line).encode() + b"\n")
    file = made.complete("lines.jsonl", INPUT, "")
    batch = new_batch("", _ENDPOINT, file.identity, "24h", None)
    batch.enter(batch.status, store.batches)
    store.close()


def _serve(folder: Path, faulty: bool = False) -> None:
    """Runs a server's batches to their ends, or to a power loss; of a faulty disk for a moment."""
    store = FileStore(str(folder), 10**6)
    try:
        with quietly():
            asyncio.run(_run(store, faulty))
    finally:
        store.close()


async def _run(store: FileStore, faulty: bool) -> None:
    service = Service(ScriptedEngine(answers=["Yes."]), ServerSettings(("tiny",)), store)
    batches = Batches(service, ResponseStore(8, 10**6), store)
    try:
        batches.start()
        tasks = [run.task for run in batches._runs.values() if run.task]
        if tasks:  # one that waits for room on the disk does not end
            await asyncio.wait(tasks, timeout=0.1 if faulty else 30)
        await batches.stop()
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception():
                raise task.exception()
    finally:
        service.close()
