"""Batches that run: their lines are answered beside requests, and survive the server."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Generator
from typing import Any

from jaxshare.serving.http.batches import batch as states
from jaxshare.serving.http.batches.answering import answer
from jaxshare.serving.http.batches.batch import Batch, BatchAnswers, publish, read_batch
from jaxshare.serving.http.batches.file_store import INPUT, FileStore, newest_first
from jaxshare.serving.http.batches.lines import BatchLine, LineAnswer, check_lines, read_line
from jaxshare.serving.http.endpoints.response_store import ResponseStore
from jaxshare.serving.http.errors import ApiError, bad_request
from jaxshare.serving.http.identities import new_id
from jaxshare.serving.http.service import Service

_log = logging.getLogger("jaxshare.http")

MOST_LINES = 50_000
"""The most lines of a batch."""
_MOST_ERRORS = 100
_MOST_OPEN = 64
"""The most batches that have not ended."""
_MOST_KEPT = 10_000
"""The most batches whose facts are kept."""
_AGAIN_SECONDS = 10.0
"""The time between two tries to make files of answers."""
_EXPIRED = ("batch_expired", "the completion window ended before this line was run")


@dataclasses.dataclass
class _BatchRun:
    """A batch that runs: its task, those of its lines, and the state in which it is to end early."""

    task: asyncio.Task[None] | None = None
    lines: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
    early_end: str | None = None


class Batches:
    """The batches of a server; all but `start` of it runs in the server's event loop.

    What a batch needs after a kill is on the disk before it is told to a client: its facts, and each
    answer before it is counted. A batch that had not ended goes on with the lines without an answer
    when the server starts again; a line that was being run then is run again, to the same text.

    Args:
      service: that answers.
      stored: the responses of /v1/responses.
      files: inputs and outputs.
    """

    def __init__(self, service: Service, stored: ResponseStore, files: FileStore):
        self._service, self._stored, self._files = service, stored, files
        self._seed = service.settings.seed
        self._batches: dict[str, Batch] = {}
        self._runs: dict[str, _BatchRun] = {}
        self._slots = asyncio.Semaphore(service.settings.batch_lines)

    # What clients ask for.

    def start(self) -> None:
        """Reads the batches of the folder, and goes on with those that have not ended."""
        for path in sorted(self._files.batches.glob("batch_*.json")):
            found = read_batch(path)
            if found is None:
                _log.warning("a batch cannot be read and is left out: %s", path.name)
                continue
            self._batches[found.identity] = found
            if found.has_ended:
                self._files.remove_answers(found.identity)
            else:
                _log.info(
                    "batch %s goes on after a restart: it was %s, with %d lines",
                    *(found.identity, found.status, found.total),
                )
                self._begin(found)

    async def stop(self) -> None:
        """Ends all tasks; the batches go on with the next start."""
        tasks = [run.task for run in self._runs.values() if run.task]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def create(self, made: Batch) -> Batch:
        """Starts a batch.

        Raises:
          ApiError: there is no such file, or the server has as many as it may (429).
          OSError: the disk is full.
        """
        if self._files.find(made.input_file_id, made.owner, "input_file_id").purpose != INPUT:
            raise bad_request("the file's purpose is not batch", "input_file_id", "invalid_value")
        if len(self._runs) >= _MOST_OPEN:
            raise ApiError(
                429,
                f"the server has {_MOST_OPEN} batches that have not ended; wait for one",
                code="too_many_batches",
                headers={"Retry-After": "10"},
            )
        made.enter(states.VALIDATING, self._files.batches)
        self._batches[made.identity] = made
        self._forget_oldest()
        self._begin(made)
        return made

    def find(self, identity: str, owner: str) -> Batch:
        """Returns a batch.

        Raises:
          ApiError: this key has no such batch (404).
        """
        found = self._batches.get(identity)
        if found is None or found.owner != owner:
            raise ApiError(
                404,
                "there is no such batch; GET /v1/batches lists those that are",
                param="batch_id",
            )
        return found

    def list(self, owner: str) -> list[Batch]:
        """Returns the batches of a key, the newest first."""
        return newest_first(self._batches.values(), owner)

    def cancel(self, identity: str, owner: str) -> Batch:
        """Ends a batch; what has been answered stays.

        Raises:
          ApiError: there is none, or it has ended.
          OSError: the disk is full.
        """
        found, run = self.find(identity, owner), self._runs.get(identity)
        if found.has_ended or found.status == states.FINALIZING or run is None:
            raise bad_request(f"the batch is {found.status} and cannot be cancelled")
        found.end = states.CANCELLED
        if found.status != states.CANCELLING:
            found.enter(states.CANCELLING, self._files.batches)
        self._end_early(run, states.CANCELLED)
        return found

    def uses(self, identity: str) -> bool:
        """Returns True if a batch that has not ended reads a file."""
        return any(self._batches[each].input_file_id == identity for each in self._runs)

    # How they run.

    def _begin(self, batch: Batch) -> None:
        run = self._runs[batch.identity] = _BatchRun()
        if batch.end != states.COMPLETED:
            run.early_end = batch.end
        run.task = asyncio.create_task(self._run(batch, run))

    def _forget_oldest(self) -> None:
        """Drops the oldest batch that has ended, where there are too many."""
        if len(self._batches) <= _MOST_KEPT:
            return
        ended = [each for each in self._batches.values() if each.has_ended]
        for oldest in sorted(ended, key=lambda each: each.created_at)[:1]:
            del self._batches[oldest.identity]
            with contextlib.suppress(OSError):
                (self._files.batches / f"{oldest.identity}.json").unlink()

    def _end_early(self, run: _BatchRun, end: str) -> None:
        run.early_end = end
        for line in run.lines:
            line.cancel()

    async def _run(self, batch: Batch, run: _BatchRun) -> None:
        loop, folder = asyncio.get_running_loop(), self._files.batches
        left = max(batch.expires_at - time.time(), 0)
        timer = loop.call_later(left, self._end_early, run, states.EXPIRED)
        try:
            if batch.status == states.VALIDATING:
                await self._validate(batch, run)
            if not batch.has_ended:
                await self._answer_all(batch, run)
        except _InterruptedError:
            pass  # by the end of the server: it goes on with the next start
        except OSError as error:
            _log.error("batch %s cannot begin: %s", batch.identity, error)
            batch.fail("storage_failed", "it could not be written; the log has the reason")
            with contextlib.suppress(OSError):
                batch.enter(states.FAILED, folder)
            batch.status = states.FAILED
        except Exception:
            _log.exception("batch %s has failed", batch.identity)
            batch.fail("internal_error", "the server has failed; its log has the reason")
            with contextlib.suppress(OSError):
                batch.enter(states.FAILED, folder)
            batch.status = states.FAILED
            self._files.remove_answers(batch.identity)
        finally:
            timer.cancel()
            self._runs.pop(batch.identity, None)

    async def _validate(self, batch: Batch, run: _BatchRun) -> None:
        """Checks the file of a batch as a whole, before a line of it runs."""
        files = self._files

        def check() -> tuple[int, list[dict]]:
            with files.open(files.find(batch.input_file_id, batch.owner)) as lines:
                total, errors = check_lines(
                    lines,
                    batch.endpoint,
                    most_lines=MOST_LINES,
                    most_errors=_MOST_ERRORS,
                    is_cancelled=lambda: run.early_end is not None,
                )
            return total, [error.as_json() for error in errors]

        batch.total, batch.errors = await asyncio.to_thread(check)
        status = states.FAILED if batch.errors else states.IN_PROGRESS
        batch.enter(run.early_end or status, files.batches)

    async def _answer_all(self, batch: Batch, run: _BatchRun) -> None:
        """Runs the lines that have no answer, and makes files of the answers."""
        files = self._files
        # Where a kill came after this state, answers may be files already: nothing is opened again.
        if batch.status != states.FINALIZING:
            answers = await asyncio.to_thread(BatchAnswers, batch, files)
            try:
                await self._collect(batch, run, answers)
                answers.name_files()
                batch.status = states.FINALIZING  # while the disk may take nothing for long
                await _until_written(batch.identity, answers.sync)
                await _until_written(batch.identity, batch.enter, states.FINALIZING, files.batches)
            finally:
                answers.close()
        await _until_written(batch.identity, publish, batch, files)
        await _until_written(batch.identity, batch.enter, batch.end, files.batches)

    async def _collect(self, batch: Batch, run: _BatchRun, answers: BatchAnswers) -> None:
        """Runs lines, and says in which state the batch is to end."""
        try:
            await self._run_lines(batch, run, answers)
            batch.end = run.early_end or states.COMPLETED
            if batch.end == states.EXPIRED:
                for line in self._lines(batch, answers):
                    answers.add(LineAnswer(line.custom_id, None, None, _EXPIRED))
        except (OSError, ApiError) as error:
            _log.error("batch %s cannot go on: %s", batch.identity, error)
            batch.end = states.FAILED
            why = "the disk takes no more" if isinstance(error, OSError) else str(error)
            batch.fail(
                "storage_failed",
                f"{why}; {batch.completed + batch.failed} of {batch.total} lines have answers, which "
                "are in its files; send the others in a new batch when there is room",
            )

    async def _run_lines(self, batch: Batch, run: _BatchRun, answers: BatchAnswers) -> None:
        """Runs lines, as many at a time as may be.

        Raises:
          _InterruptedError: the server ends.
          ApiError, OSError: an answer could not be written.
        """
        failures: list[BaseException] = []
        lines = self._lines(batch, answers)

        def ended(task: asyncio.Task[None]) -> None:
            run.lines.discard(task)
            self._slots.release()
            if not task.cancelled() and (error := task.exception()):
                failures.append(error)

        try:
            for line in lines:
                await self._slots.acquire()
                if run.early_end or failures or self._service.is_draining:
                    self._slots.release()
                    break
                task = asyncio.create_task(self._run_line(batch, answers, line))
                run.lines.add(task)
                task.add_done_callback(ended)
            while run.lines:
                await asyncio.wait(run.lines)
        finally:
            for task in [*run.lines]:
                task.cancel()
            while run.lines:
                await asyncio.wait(run.lines)
            lines.close()
        if failures:
            raise failures[0]
        if self._service.is_draining and not run.early_end and len(answers.done) < batch.total:
            raise _InterruptedError

    async def _run_line(self, batch: Batch, answers: BatchAnswers, line: BatchLine) -> None:
        with self._service.busy():
            try:
                found = await answer(
                    self._service, self._stored, line, owner=batch.owner, seed=self._seed
                )
            except ApiError as error:  # the server shuts down
                raise _InterruptedError from error
            answers.add(found)

    def _lines(self, batch: Batch, answers: BatchAnswers) -> Generator[BatchLine]:
        """The lines that have no answer yet."""
        with self._files.open(self._files.find(batch.input_file_id, batch.owner)) as lines:
            for number, text in enumerate(lines, 1):
                if text.strip():
                    line = read_line(number, text.rstrip(b"\r\n"), batch.endpoint)
                    if line.custom_id not in answers.done:
                        yield line


async def _until_written(identity: str, work: Callable[..., None], *args: Any) -> None:
    """Does something with the disk, again and again while that fails: no answer is lost to it."""
    while True:
        try:
            return await asyncio.to_thread(work, *args)
        except OSError as error:
            _log.error("batch %s: its answers cannot become files yet: %s", identity, error)
        await asyncio.sleep(_AGAIN_SECONDS)


class _InterruptedError(Exception):
    """The server ends before a batch does."""


def new_batch(
    owner: str, endpoint: str, input_file_id: str, window: str, metadata: dict[str, str] | None
) -> Batch:
    """Makes a batch.

    Args:
      owner, endpoint, input_file_id, metadata: see `Batch`.
      window: the time that it has, in hours, such as "24h".
    """
    now = int(time.time())
    hours = int(window.removesuffix("h"))
    return Batch(
        new_id("batch_"),
        owner,
        endpoint,
        input_file_id,
        window,
        metadata,
        now,
        now + 3600 * hours,
    )
