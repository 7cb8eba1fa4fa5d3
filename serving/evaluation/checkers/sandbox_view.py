"""The view of the machine that a process in namespaces of its own has (Linux).

Its root is a file system in memory, with Python, its packages and the system's libraries, which it
can read, and a folder to write in. Sockets, files and processes of the machine are not there. It
all goes with the namespace, so nothing has to be cleaned. Uses the standard library alone.
"""

import contextlib
import ctypes
import os
import platform
import struct
import sys
from pathlib import Path

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/nix", "/gnu")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
WORK = "/tmp"
"""The folder of a process, in its own view."""
MAX_FILES = 10_000
"""Files and folders that a process may have in it."""
# mount(2), mount_setattr(2), prctl(2), capset(2)
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC = 2, 4, 8, 1 << 12, 1 << 14
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_CAPABILITY_VERSION = 0x20080522


def enter(folder: str, size: int) -> None:
    """Makes `folder` the root of this process, which needs its own namespaces, and gives up rights.

    Args:
      folder: an empty one; nothing is written to it on the machine.
      size: bytes of all files together that the process may write.

    Raises:
      OSError: the system does not allow it.
    """
    # No further namespaces, in which a process would have rights again.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    options = f"size={size},nr_inodes={MAX_FILES},mode=755"
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path in shown_paths():
        _show(path, folder + path, read_only=path not in _DEVICES)
    for path in ("/proc", "/dev/shm", WORK):
        Path(folder + path).mkdir(parents=True, exist_ok=True)
    # Containers that hide parts of /proc allow no new one; then there is none.
    with contextlib.suppress(PermissionError):
        _mount("proc", f"{folder}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        _make_read_only(f"{folder}/proc")
    os.chdir(folder)
    _call("syscall", _SYS_PIVOT_ROOT[platform.machine()], b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir(WORK)
    os.environ["HOME"] = WORK
    _drop_rights()


def hide_memory() -> None:
    """Keeps this process's memory from other processes of the same user, where Linux is."""
    if sys.platform == "linux":
        _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def shown_paths() -> list[str]:
    """The files and folders of the machine that a judged process sees, each but once."""
    python = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sys.path)
    wanted = {*_SYSTEM, *_DEVICES, *(os.path.abspath(path) for path in python)}
    paths: list[str] = []
    for path in sorted(wanted - {"/"}):
        if os.path.lexists(path) and not any(path.startswith(f"{other}/") for other in paths):
            paths.append(path)
    return paths


def _show(path: str, target: str, read_only: bool) -> None:
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(path, target, None, _MS_BIND | _MS_REC)
    if read_only:
        _make_read_only(target)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = (source, target, kind)
    encoded = (None if argument is None else os.fsencode(argument) for argument in arguments)
    _call("mount", *encoded, flags, options.encode())


def _make_read_only(target: str) -> None:
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = len(attributes)
    path = os.fsencode(target)
    _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, attributes, size)


def _drop_rights() -> None:
    """Gives up what the root of a namespace may do, such as mounting."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    with contextlib.suppress(OSError):  # the number after the last
        for capability in range(64):
            _call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, none = struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)
    _call("capset", header, none)


def _call(name: str, *arguments: int | bytes | None) -> None:
    """Calls a function of the C library that returns 0.

    Raises:
      OSError: it returned something else.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    given = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    if getattr(libc, name)(*given):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
