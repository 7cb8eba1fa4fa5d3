"""Jobs of `jaxshare batch` whose lines have OpenAI's batch format.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

Each line is answered as `jaxshare serve` would, by the same functions, and the output has OpenAI's
form: what holds of the server's fields and errors holds here. As in other jobs, completed lines are
there after a kill, and `--resume` goes on with the others.
"""

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare import models, progress
from jaxshare.paths import check_file
from jaxshare.serving import checksums, jsonl
from jaxshare.serving.cli import arguments, batch_output, resuming
from jaxshare.serving.cli.batch_output import AGAIN, OTHER
from jaxshare.serving.cluster import process_mesh
from jaxshare.serving.engine import Engine
from jaxshare.serving.errors import RefusedInputError
from jaxshare.serving.http.batches.lines import BatchLine, is_batch_line, read_lines
from jaxshare.serving.locks import OutputLock

_PACKAGES = ("fastapi", "pydantic", "uvicorn")
_MAX_ROWS = 64
_REFUSED = 3
"""The exit code when lines could not be read, or have errors; the others have run."""
_OTHERS = {
    "tree": False,
    "chat": False,
    "n": 1,
    "max_new_tokens": 64,
    "share": "auto",
    "stop": None,
    "include_stop": False,
    "logprobs": False,
    "top_logprobs": 0,
}
"""Options of other jobs, whose part is in the lines here, with their defaults."""


def has_requests(options: argparse.Namespace) -> bool:
    """Returns True if the first line of the input has OpenAI's form.

    An input that cannot be read has not; the job tells of it.
    """
    with contextlib.suppress(OSError, ValueError), open(options.input, "rb") as file:
        first = next((line for line in file if line.strip()), b"")
        return is_batch_line(checksums.parse(first))
    return False


def run_job(options: argparse.Namespace, sampling: Mapping[str, Any]) -> int:
    """Runs a job, or what is left of it.

    Args:
      options: of `jaxshare batch`.
      sampling: settings that the command line has; none may be.

    Returns:
      0; or 3 if lines cannot be read, which stderr names, or have errors, which the output tells.

    Raises:
      RefusedInputError: wrong settings, an input that cannot be read or has no line that can be run.
      ValueError: an output that cannot be written, is there already or belongs to another job.
    """
    _check(options, sampling)
    with batch_output.refusing():
        data = batch_output.read_file(options.input, "input")
    lines, bad_lines = _read_lines(data, options.input)
    if not lines:
        raise RefusedInputError(f"no line of the input {options.input} can be run")
    output, job = Path(options.output), Path(f"{options.output}.job")
    names = tuple(options.served_model_name or (options.model,))
    settings = {
        "input": jsonl.sha256(data),
        "form": "OpenAI batch",
        "names": [*names],
        **{name: getattr(options, name) for name in ("model", "seed", "dtype")},
        **({"adapter": options.adapter} if options.adapter else {}),
    }
    mesh = process_mesh.mesh_of(options)
    load = functools.partial(arguments.load_model, options, mesh, several=True)
    with contextlib.ExitStack() as files:
        files.enter_context(OutputLock.of_file(output, OTHER))
        file, done, known_lines = None, set[str](), ()
        if os.path.lexists(output):
            file = files.enter_context(batch_output.open_existing(output, options.resume))
            finished, known_lines = batch_output.read_finished(job, settings, file)
            if finished:
                batch_output.check_finished(output, job, settings, load)
                return _report(options, finished, finished["completions"])
            done = _read_done(file, output, {line.custom_id for line in lines}, known_lines)
        elif options.resume:
            resuming.say_new("job", output)
        model = load()
        known = batch_output.known_model(output, job, settings, model, is_new=file is None)
        if file is None:
            batch_output.write_job(job, settings, known)
            file = files.enter_context(jsonl.open_alone(output, "xb", OTHER))
        left = [line for line in lines if line.custom_id not in done]
        _answer(options, model, names, left, len(lines), file)
        written = _sorted_lines(output, lines)
        finished = {
            "completions": len(lines),
            "prompts": len(lines),
            "bad_lines": bad_lines,
            "failed": _statuses(written),
        }
        batch_output.write_finished(output, job, settings, known, finished, written)
        return _report(options, finished, len(done))


def _check(options: argparse.Namespace, sampling: Mapping[str, Any]) -> None:
    """Refuses options that have no meaning here.

    Raises:
      RefusedInputError: one is given.
      ValueError: packages are not installed, or the output cannot be written.
    """
    given = [name for name, plain in _OTHERS.items() if getattr(options, name) not in (None, plain)]
    given += [name for name in sampling if name not in given]
    if given:
        raise RefusedInputError(
            f"--{given[0].replace('_', '-')} is given, but the lines of {options.input} have "
            "OpenAI's form, whose bodies say it; leave it out"
        )
    if options.data != 1 or options.replicas or options.ray:
        raise RefusedInputError(
            "lines of OpenAI's form run on one engine; leave out --data and --ray, or split "
            "the input"
        )
    if options.max_rows is not None and options.max_rows < 1:
        raise RefusedInputError(f"--max-rows is {options.max_rows}; ask for at least 1 row")
    with batch_output.refusing():
        arguments.parse_bytes(options.max_kv_bytes or "1")
    check_file("--output", options.output)
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"lines of OpenAI's form need {', '.join(missing)}, which are not installed; run pip "
            "install 'jaxshare[serve]'"
        )


def _read_lines(data: bytes, file: str) -> tuple[list[BatchLine], list[dict[str, Any]]]:
    """The lines of the input, and the bad ones, which are named on stderr."""
    lines, bad_lines = [], []
    for found in read_lines(data.split(b"\n"), None):
        if isinstance(found, BatchLine):
            lines.append(found)
        else:
            bad_lines.append({"line": found.number, "error": str(found)})
    resuming.say_bad(file, bad_lines)
    return lines, bad_lines


def _read_done(
    file: BinaryIO, output: Path, names: set[str], known: Sequence[str] | Any
) -> set[str]:
    """The names of the lines that the output answers.

    Raises:
      ValueError: a line is damaged, repeated, or of no line of the input.
    """
    done: set[str] = set()
    for number, line in enumerate(jsonl.lines_of(file), 1):
        name, plain, is_sealed = _read_answer(line, number, output)
        if known and not is_sealed and checksums.checksum(plain) not in known:
            why = f"its checksum is not in {output}.job"
            raise batch_output.damaged_line(output, number, why)
        if name not in names:
            raise batch_output.damaged_line(output, number, "it is of no line of the input")
        if name in done:
            raise batch_output.damaged_line(output, number, "its line has been answered before")
        done.add(name)
    return done


def _read_answer(line: bytes, number: int, output: Path) -> tuple[str, bytes, bool]:
    """Reads a line of the output: its name, the line without a checksum, and if it has one.

    Raises:
      ValueError: it is damaged.
    """
    try:
        written = checksums.parse(line)
        plain = checksums.unsealed(written)
        if plain.keys() != {"id", "custom_id", "response", "error"}:
            raise ValueError("it is no answer")
        text = line + b"\n" if plain is written else jsonl.line(plain)
        return plain["custom_id"], text, plain is not written
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise batch_output.damaged_line(output, number, why) from error


def _sorted_lines(output: Path, lines: Sequence[BatchLine]) -> list[bytes]:
    """The lines of the output in the order of the input."""
    order = {line.custom_id: place for place, line in enumerate(lines)}
    written = batch_output.read_file(output, "output").split(b"\n")[:-1]
    read = [_read_answer(line, number, output) for number, line in enumerate(written, 1)]
    return [plain for _, plain, _ in sorted(read, key=lambda each: order[each[0]])]


def _statuses(lines: Sequence[bytes]) -> int:
    """The number of lines with a status that is not 200."""
    return sum(json.loads(line)["response"]["status_code"] != 200 for line in lines)


def _answer(
    options: argparse.Namespace,
    model: models.LoadedModel,
    names: tuple[str, ...],
    lines: Sequence[BatchLine],
    total: int,
    file: BinaryIO,
) -> None:
    """Answers lines, and writes each answer as it comes."""
    if not lines:
        return
    rows = min(options.max_rows or _MAX_ROWS, total)
    memory = {}
    if options.max_kv_bytes is not None:
        memory["kv_bytes"] = arguments.parse_bytes(options.max_kv_bytes)
    done = total - len(lines)
    with (
        Engine(model, max_rows=rows, max_queue=2 * rows, seed=options.seed, **memory) as engine,
        progress.work("answering", total, "lines", done) as work,
    ):
        try:
            asyncio.run(_answer_all(engine, names, options.seed, lines, 2 * rows, file, work))
        except KeyboardInterrupt:
            work.close()
            print(
                f"{work.done} of {total} lines are answered in {options.output}; --resume goes on "
                "with the job",
                file=sys.stderr,
            )
            raise


async def _answer_all(
    engine: Engine,
    names: tuple[str, ...],
    seed: int,
    lines: Sequence[BatchLine],
    at_once: int,
    file: BinaryIO,
    work: progress.Activity,
) -> None:
    # Here, because they need packages of the extra `serve`.
    from jaxshare.serving.http.batches.answering import answer
    from jaxshare.serving.http.endpoints.response_store import ResponseStore
    from jaxshare.serving.http.service import Service
    from jaxshare.serving.http.settings import ServerSettings

    service = Service(engine, ServerSettings(names, request_seconds=7 * 24 * 3600.0))
    stored, slots = ResponseStore(1024, 2**26), asyncio.Semaphore(at_once)

    async def run(line: BatchLine) -> None:
        try:
            found = await answer(service, stored, line, owner="", seed=seed)
        finally:
            slots.release()
        jsonl.append(file, found.as_json(), AGAIN)
        work.update()

    try:
        async with asyncio.TaskGroup() as tasks:
            for line in lines:
                await slots.acquire()
                tasks.create_task(run(line))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        service.close()


def _report(options: argparse.Namespace, finished: Mapping[str, Any], before: int) -> int:
    """Tells what the job has come to; returns its exit code."""
    total, failed = finished["completions"], finished.get("failed", 0)
    old = f" ({before} of them before)" if before else ""
    print(f"{total} lines are answered in {options.output}{old}", file=sys.stderr)
    if failed:
        print(
            f"jaxshare: {failed} of them ended with an error, which the output tells",
            file=sys.stderr,
        )
    if bad_lines := finished["bad_lines"]:
        print(resuming.count_bad(options.input, bad_lines), file=sys.stderr)
    if options.json:
        print(json.dumps({**finished, "output": options.output, "resumed": before}))
    if failed or bad_lines:
        return _REFUSED
    return 0
