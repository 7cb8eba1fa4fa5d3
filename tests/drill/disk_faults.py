"""Faults of the disk, injected into each operation on it in turn, or into one.

From the n-th operation on, every one fails that Python does in a folder: opening for writing,
writing, cutting, bringing to the disk, making a folder and renaming. Libraries that write by
themselves, such as Orbax, are not reached: `RLIMIT_FSIZE` is for them.

A power loss ends the program there, and every file has what it had when it was last brought to the
disk: names are there, contents that were not are lost, as file systems leave it that write names
first.
"""

import builtins
import dataclasses
import errno
import io
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
SHORT = -1
"""In place of an error: the disk takes half of what is written, and is full from then on."""
POWER_LOSS = -2
_CALLS = ("fsync", "replace", "rename", "mkdir")
_open = io.open


ALL = (*ERRORS, SHORT, POWER_LOSS)


class PowerLossError(BaseException):
    """The program has ended; nothing may catch it and go on."""


class DiskFaults:
    """Makes the n-th operation in a folder fail, and all after it unless it fails `once`.

    Attributes:
      fired: True when an operation has failed.
      done: the operations so far.
      on_disk: the contents of the files that were written, when they were last brought to the disk.
    """

    def __init__(self, folder: Path, nth: int, error: int, *, once: bool = False):
        self.folder, self.nth, self.error, self.once = str(folder), nth, error, once
        self.fired, self.done = False, []
        self.on_disk: dict[str, bytes] = {}
        self._patches: list[Any] = []

    def __enter__(self) -> "DiskFaults":
        targets = [(builtins, "open", self._opened), (io, "open", self._opened)]
        targets += [(os, name, self._failing(name, getattr(os, name))) for name in _CALLS]
        self._patches = [mock.patch.object(*target) for target in targets]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def step(self, operation: str, path: Any) -> bool:
        """Counts an operation; True if it has to be a short write, an error if it fails."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        if not os.path.realpath(path).startswith(self.folder):
            return False
        self.done.append(operation)
        if len(self.done) < self.nth or (self.once and self.fired):
            return False
        first, self.fired = not self.fired, True
        if self.error == SHORT and first and operation == "write":
            return True
        if self.error == POWER_LOSS:
            raise PowerLossError
        number = errno.ENOSPC if self.error == SHORT else self.error
        raise OSError(number, os.strerror(number), str(path))

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(path: Any, *args: Any, **settings: Any) -> Any:
            self.step(name, path)
            result = call(path, *args, **settings)
            self._note(name, path, *args)
            return result

        return failing

    def _note(self, name: str, path: Any, *args: Any) -> None:
        """Notes what an operation has brought to the disk."""
        if name == "fsync":
            path = os.readlink(f"/proc/self/fd/{path}")
            if path in self.on_disk:
                self.on_disk[path] = _content(path)
        elif name in ("replace", "rename") and str(path) in self.on_disk:
            self.on_disk[str(args[0])] = self.on_disk.pop(str(path))

    def lose_power(self) -> None:
        """Takes from every file what was not brought to the disk."""
        for path, content in self.on_disk.items():
            if os.path.isfile(path):
                with _open(path, "wb") as file:
                    file.write(content)

    def _opened(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        **settings: Any,
    ) -> Any:
        writes = {*mode} & {*"wax+"} and not isinstance(file, int)
        if not writes or not os.path.realpath(file).startswith(self.folder):
            return _open(file, mode, buffering, encoding, errors, newline, **settings)
        self.step("open", file)
        if settings.get("opener"):  # a temporary file that looks if there is room
            return _open(file, mode, buffering, encoding, errors, newline, **settings)
        path = os.path.realpath(file)
        keeps = os.path.exists(path) and "w" not in mode
        self.on_disk.setdefault(path, _content(path) if keeps else b"")
        raw = _File(self, os.fspath(file), mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        whole = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return whole if "b" in mode else io.TextIOWrapper(whole, encoding, errors, newline)


def _content(path: str) -> bytes:
    with _open(path, "rb") as file:
        return file.read()


class _File(io.FileIO):
    """A file whose operations fail as `faults` says."""

    def __init__(self, faults: DiskFaults, path: str, mode: str):
        super().__init__(path, mode)
        self.faults = faults

    def write(self, data: Any, /) -> int:
        if self.faults.step("write", self.name):
            return super().write(memoryview(data)[: max(len(data) // 2, 1)])
        return super().write(data)

    def truncate(self, size: int | None = None, /) -> int:
        self.faults.step("truncate", self.name)
        return super().truncate(size)


@dataclasses.dataclass(frozen=True)
class Writer:
    """An action that writes, and the states before and after it.

    Attributes:
      folder: that the operations of the action are in.
      before: makes the old state.
      act: what writes.
      after: checks the state; gets True if the action has returned, False if it has raised.
    """

    folder: Path
    before: Callable[[], None]
    act: Callable[[], Any]
    after: Callable[[bool], None]


def each_fault(writer: Writer, errors: tuple[int, ...] = ALL) -> int:
    """Injects each fault into each operation of an action; see `one_fault`.

    Returns:
      The number of faults.
    """
    count = 0
    for error in errors:
        for nth in itertools.count(1):
            if not one_fault(writer, nth, error).fired:
                break
            count += 1
    return count


def one_fault(writer: Writer, nth: int, error: int, *, once: bool = False) -> DiskFaults:
    """Injects a fault into one operation of an action, and into those after it.

    Args:
      writer: the action.
      nth: the operation, counted from 1; one that there is not does not fail.
      error: an error of the system, `SHORT` or `POWER_LOSS`.
      once: the operations after it do not fail.

    Returns:
      What has become of it.

    Raises:
      AssertionError: an error of another type than the command line says in a sentence, or one that
        does not say what would do; or `writer.after` has found a wrong state.
    """
    writer.before()
    done, faults = True, DiskFaults(writer.folder.resolve(), nth, error, once=once)
    with faults:
        try:
            writer.act()
        except PowerLossError:
            done = False
        except Exception as raised:
            assert faults.fired, f"it fails by itself: {raised}"
            done = False
            _check_sentence(raised, f"operation {nth}, {faults.done[nth - 1 : nth]}")
    if error == POWER_LOSS:  # also when all is done
        faults.lose_power()
    writer.after(done)
    return faults


def _check_sentence(error: Exception, where: str) -> None:
    from jaxshare.paths import WriteError

    text = str(error)
    assert isinstance(error, ValueError | WriteError), f"{where}: {type(error).__name__}: {error}"
    assert re.search(r"\b(cannot|can|could) be (written|read)", text), f"{where}: {text}"
    assert re.search(r"\b(make room|give|copy)\b", text), f"{where}: {text}"
    assert "\n" not in text and "[Errno" not in text, f"{where}: {text}"
