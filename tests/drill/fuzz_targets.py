"""The readers of what others write, for fuzzing: each gives a value or an error in a sentence.

Run as a program it reads requests, a kind and a file in each line, and answers each with the error
or none: so a reader that takes all time or memory ends this process alone.
"""

import argparse
import dataclasses
import functools
import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, chat_rendering, outline, tokenizer_files
from jaxshare.models.config import ModelConfig
from jaxshare.models.safetensors_files import INDEX, SINGLE, stored_tensors
from jaxshare.serving import checksums
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.agents.search_log import SearchLog
from jaxshare.serving.branches.batch_input import read_input
from jaxshare.serving.checkpoints import CheckpointStore, SavedCheckpoint
from jaxshare.serving.evaluation import runs
from jaxshare.serving.evaluation.tasks import load_task
from jaxshare.serving.workers.inspection.probe import Snapshot
from jaxshare.trace.trace import Trace

MEMORY, SECONDS = 2**30, 10.0
"""The most bytes and seconds that a reader may take."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A reader.

    Attributes:
      file: the name of the file that it reads.
      valid: the content of one that is as it should be.
      read: reads it, in a folder that has nothing else but what `prepare` has made.
      prepare: makes the files beside it.
      encode: the content of the file for a JSON value; None where it has none.
      is_named: errors name the file or its folder.
    """

    file: str
    valid: Callable[[], bytes]
    read: Callable[[Path], Any]
    prepare: Callable[[Path], None] = lambda folder: None
    encode: Callable[[Any], bytes] | None = lambda value: json.dumps(value).encode()
    is_named: bool = True

    def value(self) -> Any:
        """The valid content as a JSON value, which `encode` takes."""
        return self.decode(self.valid())

    decode: Callable[[bytes], Any] = json.loads


def _embedded(name: str) -> Callable[[], bytes]:
    return (EMBEDDED / name).read_bytes


def _beside(*names: str) -> Callable[[Path], None]:
    """Copies files of the embedded model."""

    def prepare(folder: Path) -> None:
        for name in names:
            shutil.copy(EMBEDDED / name, folder)

    return prepare


# safetensors


def _tensors() -> bytes:
    return safetensors.numpy.save(
        {"a.weight": np.ones((4, 4), np.float32), "b.weight": np.ones(4, np.float16)}
    )


def _header(data: bytes) -> Any:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _with_header(value: Any) -> bytes:
    header = json.dumps(value).encode()
    return len(header).to_bytes(8, "little") + header + bytes(72)


def _shard(folder: Path) -> None:
    (folder / "model-1.safetensors").write_bytes(_tensors())


_SHARDS = {"weight_map": {name: "model-1.safetensors" for name in ("a.weight", "b.weight")}}


# lines


def _lines(value: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in value)


def _values(data: bytes) -> Any:
    return [json.loads(line) for line in data.splitlines()]


_BATCH = [
    {"prompt": "one", "n": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    {"tokens": [5, 6], "id": "zwö"},
    {"messages": [{"role": "user", "content": "hi"}], "id": 2.5},
]
_TREES = [{"id": "t", "text": "ab", "top_k": 9, "children": ["b", {"tokens": [3], "n": 2}]}]
_TASKS = [
    {"problem": "one", "answer": "1"},
    {"problem": "two", "answer": 2.5, "id": "b"},
    {"problem": "three", "answer": ["1", "x"], "id": 9},
    {"problem": "four", "tests": "assert f(1)"},
]


def _read_batch(folder: Path, tree: bool) -> Any:
    from tests.serving.cli.test_batch import model

    options = argparse.Namespace(tree=tree, chat=False, n=1, max_new_tokens=4)
    return read_input((folder / "in.jsonl").read_bytes(), model(), options, Sampler())


def _read_task(folder: Path) -> Any:
    return load_task(str(folder / "own.jsonl"))


def _read_runs(folder: Path) -> Any:
    path = folder / "runs.jsonl"
    with open(path, "r+b") as file:
        return runs.read_runs(file, path, {(2, "b", 0)})


_RUNS = [
    {
        "workers": 2,
        "problem": "b",
        "number": 0,
        "seed": 7,
        "text": "what?",
        "result": {"workers": ["Alice"], "answers": {"8": "85"}, "passes": 8},
    }
]


# what jaxshare writes, with checksums that are right


def _sealed(value: Any) -> bytes:
    return json.dumps(checksums.sealed(value) if isinstance(value, dict) else value).encode()


def _unsealed(data: bytes) -> Any:
    return checksums.loads(data)


def _sealed_entries(value: Any) -> bytes:
    if isinstance(value, dict) and isinstance(value.get("entries"), list):
        entries = [checksums.sealed(e) if isinstance(e, dict) else e for e in value["entries"]]
        value = value | {"entries": entries}
    return json.dumps(value).encode()


def _entries(data: bytes) -> Any:
    value = json.loads(data)
    return value | {"entries": [checksums.unsealed(entry) for entry in value["entries"]]}


def _saved(value: Callable[[Any], Any]) -> Callable[[], bytes]:
    """The content that `save` writes of a random value."""

    @functools.cache
    def valid() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            value(random.Random(5)).save(Path(folder) / "file")
            return (Path(folder) / "file").read_bytes()

    return valid


def _journal(rng: Any) -> Any:
    from tests.drill.kinds import random_journal

    return random_journal(rng)


def _log(rng: Any) -> Any:
    from tests.drill.kinds import random_log

    return random_log(rng)


def _snapshot(rng: Any) -> Any:
    from tests.drill.kinds import random_snapshot

    return random_snapshot(rng)


def _trace(rng: Any) -> Any:
    from tests.core.trace.test_trace import random_session

    return random_session(3, passes=4)[0].trace()


def _arrays(data: bytes) -> Any:
    """A trace as JSON: its arrays as lists with their types."""
    with np.load(io.BytesIO(data.partition(b"\n")[2])) as file:
        arrays = {name: [str(file[name].dtype), file[name].tolist()] for name in file}
        about = json.loads(file["about"].tobytes())
    return arrays | {"about": about}


def _of_arrays(value: Any) -> bytes:
    """The file of `_arrays`, with the checksum that belongs to it."""
    content, arrays = io.BytesIO(), {}
    for name, given in value.items() if isinstance(value, dict) else ():
        if name == "about":
            arrays[name] = np.frombuffer(json.dumps(given).encode(), np.uint8)
            continue
        try:
            kind, numbers = given
            arrays[name] = np.asarray(numbers, kind)
        except (TypeError, ValueError, OverflowError):
            arrays[name] = np.zeros(3)
    np.savez_compressed(content, **{re.sub("\0|/", "", str(k)): v for k, v in arrays.items()})
    body = content.getvalue()
    return b"jaxshare trace 1 %s\n%s" % (hashlib.sha256(body).hexdigest().encode(), body)


def _read_template(folder: Path) -> Any:
    template = (folder / "chat_template.jinja").read_bytes().decode("utf-8", "surrogateescape")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    return chat_rendering.render(template, messages, {"bos_token": "<s>"})


@functools.cache
def _session() -> tuple[Any, tempfile.TemporaryDirectory[str]]:
    """A model, and a folder with a checkpoint of a session of it."""

    from tests.serving.workers.test_checkpoint import model, saved_at

    folder = tempfile.TemporaryDirectory(prefix="jaxshare-drill-")
    saved_at(folder.name, 20).close()
    return model(), folder


@functools.cache
def _metadata() -> bytes:
    with SavedCheckpoint(_session()[1].name) as saved:
        return json.dumps(saved.metadata).encode()


def _read_session(folder: Path) -> Any:
    """A session whose saved arrays are as they should be, and whose metadata is the file's."""
    from jaxshare.serving import Workers

    try:
        metadata = checksums.parse((folder / "facts.json").read_bytes())
    except ValueError:  # nothing that could be saved
        return

    model, saved_in = _session()
    with SavedCheckpoint(saved_in.name) as saved:
        arrays = saved.arrays()
    store = CheckpointStore(folder / "saves")
    store.save(arrays, metadata, wait=True)
    store.close()
    Workers.restore(model, folder / "saves").close()


TARGETS: dict[str, Target] = {
    "config": Target("config.json", _embedded("config.json"), ModelConfig.from_json),
    "generation": Target(
        "generation_config.json",
        _embedded("generation_config.json"),
        outline,
        _beside("config.json"),
    ),
    "safetensors": Target(
        SINGLE,
        _tensors,
        lambda folder: repr(stored_tensors(folder)),
        encode=_with_header,
        decode=_header,
    ),
    "index": Target(INDEX, json.dumps(_SHARDS).encode, lambda f: repr(stored_tensors(f)), _shard),
    "tokenizer": Target(
        "tokenizer.json", _embedded("tokenizer.json"), tokenizer_files.read_tokenizer
    ),
    "tokenizer config": Target(
        "tokenizer_config.json",
        _embedded("tokenizer_config.json"),
        tokenizer_files.read_tokenizer,
        _beside("tokenizer.json"),
    ),
    "template": Target(
        "chat_template.jinja",
        _embedded("chat_template.jinja"),
        _read_template,
        encode=None,
        is_named=False,
    ),
    "batch": Target(
        "in.jsonl",
        lambda: _lines(_BATCH),
        lambda folder: _read_batch(folder, False),
        encode=_lines,
        decode=_values,
        is_named=False,
    ),
    "trees": Target(
        "in.jsonl",
        lambda: _lines(_TREES),
        lambda folder: _read_batch(folder, True),
        encode=_lines,
        decode=_values,
        is_named=False,
    ),
    "task": Target("own.jsonl", lambda: _lines(_TASKS), _read_task, encode=_lines, decode=_values),
    "runs": Target(
        "runs.jsonl",
        lambda: _lines(_RUNS),
        _read_runs,
        encode=lambda value: b"".join(_sealed(line) + b"\n" for line in value),
        decode=_values,
    ),
    "journal": Target(
        "journal.json",
        _saved(_journal),
        lambda folder: Journal.load(folder / "journal.json"),
        encode=_sealed_entries,
        decode=_entries,
    ),
    "search log": Target(
        "log.json",
        _saved(_log),
        lambda folder: SearchLog.load(folder / "log.json"),
        encode=_sealed,
        decode=_unsealed,
    ),
    "snapshot": Target(
        "value.json",
        _saved(_snapshot),
        lambda folder: Snapshot.load(folder / "value.json"),
        encode=_sealed,
        decode=_unsealed,
    ),
    "trace": Target(
        "one.trace",
        _saved(_trace),
        lambda folder: Trace.load(folder / "one.trace"),
        encode=_of_arrays,
        decode=_arrays,
    ),
    "checkpoint": Target("facts.json", _metadata, _read_session),
}
"""All of them, by the names of the folders of their corpora in tests/fixtures/fuzz."""


def wrong(kind: str, folder: Path, content: bytes) -> str:
    """Reads a content in an empty folder; returns what is wrong with how that ends, or ""."""
    target = TARGETS[kind]
    target.prepare(folder)
    (folder / target.file).write_bytes(content)
    start = time.monotonic()
    try:
        target.read(folder)
    except (ValueError, OSError) as error:
        said = str(error)
        if isinstance(error, OSError) and type(error) is not FileNotFoundError:
            return f"{type(error).__name__}: {said[:200]}"
        if type(error) in (UnicodeDecodeError, UnicodeEncodeError, json.JSONDecodeError):
            return f"a raw {type(error).__name__}: {said[:200]}"
        if not said or "\n" in said.strip():
            return f"an error in several lines, or none: {said[:200]!r}"
        if target.is_named and str(folder) not in said:
            return f"an error that does not name the file: {said[:200]}"
        if len(said) > 20_000:
            return f"an error of {len(said)} characters: {said[:200]}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    seconds = time.monotonic() - start
    return f"it takes {seconds:.1f} seconds" if seconds > SECONDS else ""


def main() -> None:
    """Answers requests {"kind", "folder", "file"} with {"wrong"}, one in a line each."""
    chat_rendering.RENDER_SECONDS = 1.0
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that are no Python write there, too
    is_limited = False
    for line in sys.stdin:
        request = json.loads(line)
        kind, folder = request["kind"], Path(request["folder"])
        TARGETS[kind].valid()  # imports what it needs, before memory is limited
        if not is_limited:
            for made in ("config", "tokenizer", "batch"):
                (warm := folder / made).mkdir()
                wrong(made, warm, TARGETS[made].valid())
                shutil.rmtree(warm)
            is_limited = True
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, -1))
        try:
            found = wrong(kind, folder, Path(request["file"]).read_bytes())
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        print(json.dumps({"wrong": found}), file=replies, flush=True)


if __name__ == "__main__":
    main()
