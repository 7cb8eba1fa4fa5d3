"""The ways to start a judged process apart from the machine: bubblewrap, `unshare`, or neither.

bubblewrap gives a process namespaces and a view of the machine, and is allowed to do so on systems
that allow it to no other program. With `unshare` the process makes its view itself
(`sandbox_view`). Without either, Python alone refuses what programs should not do.
"""

import dataclasses
import os
import shutil

from jaxshare.serving.evaluation.checkers import sandbox_view

BUBBLEWRAP, UNSHARE, PYTHON = "bubblewrap", "unshare", "python"
_UNSHARE = (
    *("--user", "--map-root-user", "--net", "--ipc", "--uts", "--mount", "--pid"),
    *("--fork", "--kill-child"),
)
_BUBBLEWRAP = (
    *("--unshare-user", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-pid"),
    *("--unshare-cgroup-try", "--disable-userns", "--cap-drop", "ALL", "--die-with-parent"),
)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to start a process.

    Attributes:
      name: `BUBBLEWRAP`, `UNSHARE` or `PYTHON`.
      command: the program that starts it, or None.
    """

    name: str
    command: str | None = None

    @property
    def has_namespaces(self) -> bool:
        """True where the kernel keeps the process apart."""
        return self.name != PYTHON

    @property
    def makes_view(self) -> bool:
        """True where the process has to make its view of the machine itself."""
        return self.name == UNSHARE

    def prefix(self, files: int) -> list[str]:
        """The start of the command line.

        Args:
          files: bytes that the process may write to its folder in memory.
        """
        if self.command is None:
            return []
        if self.name == UNSHARE:
            return [self.command, *_UNSHARE]
        return [self.command, *_BUBBLEWRAP, *_view(files), "--chdir", sandbox_view.WORK]

    def folder(self, made: str) -> str:
        """The folder of a process in its own view, where `made` was made for it on the machine."""
        return sandbox_view.WORK if self.name == BUBBLEWRAP else made


def known_ways() -> list[Way]:
    """The ways whose commands this machine has, the best first; the last needs none."""
    found = [(name, shutil.which(name_of)) for name, name_of in _COMMANDS.items()]
    return [*(Way(name, command) for name, command in found if command), Way(PYTHON)]


_COMMANDS = {BUBBLEWRAP: "bwrap", UNSHARE: "unshare"}


def _view(files: int) -> list[str]:
    """A root that cannot be written, with Python and the system's libraries, and two folders in
    memory."""
    sized = ["--size", str(files), "--tmpfs"]
    options = ["--dev", "/dev", *sized, "/dev/shm", "--proc", "/proc", *sized, sandbox_view.WORK]
    for path in sandbox_view.shown_paths():
        if path.startswith("/dev/"):
            continue
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        else:
            options += ["--ro-bind", path, path]
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/"]
