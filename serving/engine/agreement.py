"""Agreement of several processes that run one engine on one mesh.

Every process runs the same program. Its threads run at their own speed, so process 0 of the mesh
decides: it writes what each turn at the device is about under the turn's number, as JSON, and the
others do the same in their turns of that number. So all of them give their devices the same work in
the same order. The records go through the key-value store of JAX's coordination service. No device
takes part: an engine without work sends nothing.

A turn takes three messages: its record; for each other process an answer, which is empty or says
why that process cannot do it; and the word to go on. So no process starts work that another one
will not do.
"""

import collections
import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
from jax._src import distributed
from jax.sharding import Mesh

from jaxshare.serving.errors import ClosedError, EngineError
from jaxshare.serving.kvcache.device_lock import Agreed, DeviceLock, Turn

LATE_SECONDS = 120.0
"""A process that has not come to a turn this long after the record of it has another program."""
ANSWER_SECONDS = 900.0
"""Process 0 waits this long for an answer, as another process may load or compile meanwhile. A
process that is lost ends the others before (`jaxshare.serving.cluster.process_mesh`)."""
_POLL_SECONDS = 2.0
"""The longest time without a look at this process's own threads."""
END, FAILED = "end", "failed"
"""The names of the last turn of an engine."""

_numbers: collections.Counter[tuple[int, ...]] = collections.Counter()
"""Engines so far for each group of processes."""
_numbers_lock = threading.Lock()


class Store(Protocol):
    """A key-value store that all processes see."""

    def put(self, key: str, value: str) -> None:
        """Writes a new key."""
        ...

    def get(self, key: str, seconds: float) -> str | None:
        """Waits for a key; None if it is not there after so many seconds."""
        ...

    def delete(self, key: str) -> None:
        """Deletes a key."""
        ...


class CoordinationStore:
    """The store of JAX's coordination service, which process 0 of all runs."""

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client

    def put(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value)

    def get(self, key: str, seconds: float) -> str | None:
        try:
            return self._client.blocking_key_value_get(key, max(1, int(1000 * seconds)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise EngineError(
                f"the coordination service of the processes does not answer ({error}); start all "
                "processes again"
            ) from error

    def delete(self, key: str) -> None:
        self._client.key_value_delete(key)


def device_lock(mesh: Mesh | None) -> DeviceLock:
    """The device lock of a new engine on this mesh.

    All processes of the mesh must create their engines on it in the same order.
    """
    if mesh is None or not mesh.is_multi_process:
        return DeviceLock()
    processes = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    with _numbers_lock:
        number = _numbers[processes]
        _numbers[processes] += 1
    folder = f"jaxshare/engines/{'-'.join(map(str, processes))}/{number}"
    own, store = jax.process_index(), CoordinationStore()
    if own == processes[0]:
        return LeaderLock(store, folder, processes[1:])
    return FollowerLock(store, folder, own, processes[0])


class _SharedLock(DeviceLock):
    """A device lock of one of several processes.

    Args:
      store: through which they agree.
      folder: the start of its keys.
    """

    shared = True

    def __init__(self, store: Store, folder: str):
        super().__init__()
        self._changed = threading.Condition(self._lock)
        self._store, self._folder = store, folder
        self._number = 0  # of the next turn
        self._error: Exception | None = None  # of all turns from now on
        self._reason = ""

    def _key(self, kind: str, *more: int) -> str:
        return "/".join(map(str, (self._folder, self._number, kind, *more)))

    def _check(self) -> None:
        if self._error:
            raise self._error

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._error:
                return
            self._error, self._reason = _ended(error), str(error)
            self._changed.notify_all()
        self._tell(self._reason)

    def _tell(self, error: str) -> None:
        """Tells the other processes of an error."""


class LeaderLock(_SharedLock):
    """The lock of the process that decides.

    Args:
      store, folder: see `_SharedLock`.
      others: the numbers of the other processes.
    """

    decides = True

    def __init__(self, store: Store, folder: str, others: tuple[int, ...]):
        super().__init__(store, folder)
        self._others = others

    @contextlib.contextmanager
    def held(self, turn: Turn) -> Iterator[Agreed]:
        with self._exclusive():
            if turn.name == END:
                self._fail(ClosedError("the engine is shut down"))
                yield {"released": []}
                return
            self._check()
            agreed = turn.propose()
            try:
                self._agree(turn.name, agreed)
            except BaseException as error:  # an interrupt, too: some may have gone on
                self._fail(EngineError(str(error) or type(error).__name__))
                raise
            yield agreed

    def fail(self, error: Exception) -> None:
        with self._exclusive():
            self._fail(error)

    def _agree(self, name: str, agreed: Agreed) -> None:
        """Writes the record, and waits until all others can do the same.

        Raises:
          EngineError: one of them cannot, or does not answer.
        """
        self._store.put(self._key("turn"), json.dumps({"name": name, "agreed": agreed}))
        for process in self._others:
            answer = _get(self._store, self._key("answer", process), ANSWER_SECONDS)
            if answer is None:
                raise EngineError(
                    f"process {process} has not come to {describe(name, agreed)} within "
                    f"{ANSWER_SECONDS:g} seconds; run the same program in every process"
                )
            if answer:
                raise EngineError(f"process {process} cannot go on: {answer}")
        done = [self._key("turn"), *(self._key("answer", process) for process in self._others)]
        self._store.put(self._key("go"), "")
        for key in done:
            self._store.delete(key)
        self._delete_go(self._number - 1)  # all have seen the one before
        self._number += 1

    def _delete_go(self, number: int) -> None:
        if number >= 0:
            self._store.delete(f"{self._folder}/{number}/go")

    def _tell(self, error: str) -> None:
        # Where the others wait for this turn or for the next one.
        name = END if isinstance(self._error, ClosedError) else FAILED
        record = json.dumps({"name": name, "agreed": {"error": error}})
        with contextlib.suppress(Exception):  # the turn has a record already, or the store is gone
            self._store.put(self._key("turn"), record)
        with contextlib.suppress(Exception):
            self._store.put(self._key("go"), error or "the engine of process 0 has failed")


class FollowerLock(_SharedLock):
    """The lock of a process that does what another one decides.

    Args:
      store, folder: see `_SharedLock`.
      own, leader: the numbers of this process and of the one that decides.
    """

    decides = False

    def __init__(self, store: Store, folder: str, own: int, leader: int):
        super().__init__(store, folder)
        self._own, self._leader = own, leader
        self._head: Mapping[str, Any] | None = None  # the record of the next turn, once it is read
        self._head_time = 0.0
        self._reading = False

    @contextlib.contextmanager
    def held(self, turn: Turn) -> Iterator[Agreed]:
        if turn.name == END:  # memory is freed, which needs no other process
            with self._changed:
                self._changed.wait_for(lambda: not self._busy)
                self._error = self._error or _ended(ClosedError(""))
                self._changed.notify_all()
            yield {"released": []}
            return
        agreed = self._take(turn.name)
        try:
            self._answer(turn, agreed)
            yield agreed
        finally:
            with self._changed:
                self._busy, self._head = False, None
                self._number += 1
                self._changed.notify_all()
            if self._reason:  # of another thread, which could not tell it during this turn
                self._tell(self._reason)

    def fail(self, error: Exception) -> None:
        self._fail(error)

    def _take(self, name: str) -> Agreed:
        """Waits for the turn of this name. One of the threads that wait reads the next record."""
        while True:
            with self._changed:
                self._check()
                if self._head and self._head["name"] == name and not self._busy:
                    self._busy = True
                    return self._head["agreed"]
                reads = self._head is None and not self._busy and not self._reading
                self._reading |= reads
                if not reads:
                    self._changed.wait(_POLL_SECONDS)
                late = self._late()
            if reads:
                self._read()
            elif late:
                self._give_up(late)

    def _late(self) -> Mapping[str, Any] | None:
        """The record to whose turn no thread has come for too long, or None."""
        waits = self._head is not None and not self._busy
        return self._head if waits and time.monotonic() - self._head_time > LATE_SECONDS else None

    def _read(self) -> None:
        """Reads the record of the next turn, if it is there soon."""
        record = None
        try:
            record = self._store.get(self._key("turn"), _POLL_SECONDS)
        except EngineError as error:
            self.fail(error)
        finally:
            with self._changed:
                self._reading = False
                if record is not None:
                    self._head = head = json.loads(record)
                    self._head_time = time.monotonic()
                    if head["name"] in (END, FAILED):
                        self._error = self._error or self._told(head)
                self._changed.notify_all()

    def _told(self, record: Mapping[str, Any]) -> Exception:
        if record["name"] == END:
            return ClosedError(f"process {self._leader} has shut the engine down; make another")
        return self._failed(record["agreed"]["error"])

    def _failed(self, error: str) -> EngineError:
        return EngineError(
            f"the engine of process {self._leader} has failed: {error}; make another in every "
            "process"
        )

    def _give_up(self, record: Mapping[str, Any]) -> None:
        self.fail(
            EngineError(
                f"process {self._leader} is at {describe(**record)}, to which this process has "
                f"not come within {LATE_SECONDS:g} seconds; run the same program in every process"
            )
        )

    def _answer(self, turn: Turn, agreed: Agreed) -> None:
        """Answers that this process can do the same, and waits for the word to go on.

        Raises:
          EngineError: it cannot, or another process cannot.
        """
        try:
            turn.prepare(agreed)
        except Exception as error:
            self.fail(error)
            raise
        self._store.put(self._key("answer", self._own), "")
        word = _get(self._store, self._key("go"), ANSWER_SECONDS)
        if word != "":
            error = self._failed(word or f"it has not answered within {ANSWER_SECONDS:g} seconds")
            with self._changed:
                self._error = self._error or error
            raise error

    def _tell(self, error: str) -> None:
        with contextlib.suppress(Exception):  # it has answered already, or the store is gone
            self._store.put(self._key("answer", self._own), error)


def _get(store: Store, key: str, seconds: float) -> str | None:
    """Waits for a key in short looks, so that an interrupt is seen."""
    deadline = time.monotonic() + seconds
    while (value := store.get(key, _POLL_SECONDS)) is None and time.monotonic() < deadline:
        pass
    return value


def _ended(error: Exception) -> Exception:
    """The error of all turns after this one."""
    if isinstance(error, ClosedError):
        return ClosedError("the engine is shut down; make another")
    return EngineError(f"the engine has failed ({error}); make another in every process")


def describe(name: str, agreed: Agreed) -> str:
    """A turn in words, for errors."""
    requests = ", ".join(each["text"] for each in agreed.get("requests", ()))
    return f"the turn {name!r}{f' with {requests}' if requests else ''}"
