"""Ray clusters: connects to one, or starts one on this machine."""

import atexit
import contextlib
import ctypes
import logging
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any

from jaxshare.models.config_fields import first_line
from jaxshare.models.tokenizer_files import environment

_PROBE_SECONDS, _CONNECT_SECONDS, _LEAVE_SECONDS = 5, 20, 30
"""Timeouts of an address, of the cluster there, and of leaving it."""
STORE_BYTES = 128 * 2**20
"""Size of the object store of a cluster that is started here: tasks and results are small."""
_SOCKET_FOLDER = 40
"""Maximum length of a folder's path for Ray's socket paths, 64 characters longer, to stay below the
system's limit of 107."""
_PROBE = """\
import sys, ray
try:
    ray.init(sys.argv[1], log_to_driver=False, logging_level='CRITICAL')
except Exception as error:
    print(' '.join(str(error).split()))
    sys.exit(1)
"""

_log = logging.getLogger("jaxshare.fleet")


def import_ray() -> Any:
    """Imports Ray, which is an optional dependency.

    Raises:
      ValueError: it is not installed.
    """
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise ValueError(
            "replicas on several machines run on Ray, which is not installed: pip install "
            "'jaxshare[ray]'"
        ) from error
    return ray


def connect(address: str, on_exit: contextlib.ExitStack, store_bytes: int) -> None:
    """Connects to a cluster, or starts one.

    Args:
      address: see `RayPool`.
      on_exit: undoes it.
      store_bytes: of the object store of a cluster that is started here.

    Raises:
      ValueError: no usable cluster at the address, or none can be started.
    """
    ray = import_ray()
    settings: dict[str, Any] = {
        "address": address,
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    if address == "local":
        short = (
            tempfile.gettempdir()
            if len(tempfile.gettempdir()) < _SOCKET_FOLDER - len("/jaxshare-12345678")
            else "/tmp"
        )
        folder = tempfile.mkdtemp(prefix="jaxshare-", dir=short)
        on_exit.callback(shutil.rmtree, folder, ignore_errors=True)
        settings |= {
            "include_dashboard": False,
            "object_store_memory": store_bytes,
            "_temp_dir": folder,
        }
    else:
        _probe(address)
    on_exit.callback(_leave, address)
    on_exit.enter_context(contextlib.redirect_stdout(_RayOutputToStderr(sys.stdout)))
    with _without_usage_stats():
        try:
            ray.init(**settings)
        except Exception as error:  # of many kinds
            problem = (
                "a Ray cluster cannot be started on this machine"
                if address == "local"
                else f"the Ray cluster at {address} is not there"
            )
            raise ValueError(f"{problem} ({first_line(error)}); {_advice(address)}") from error


def _leave(address: str) -> None:
    """Disconnects, and ends a cluster that was started here.

    Where the head of the cluster is there but has stopped, Ray waits for it without a limit. What is
    done is done then: the process goes on, and ends without Ray.
    """
    ray = import_ray()
    leaving = threading.Thread(target=ray.shutdown, name="jaxshare-leaves-ray", daemon=True)
    leaving.start()
    leaving.join(_LEAVE_SECONDS)
    if leaving.is_alive():
        atexit.unregister(ray.shutdown)
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):  # glibc: ends with the exit code, without Ray's destructors
            libc.on_exit(libc._exit, None)
        _log.warning(
            "warning: the head of the Ray cluster at %s has not answered for %d seconds; this "
            "process leaves it as it is, and cannot connect to Ray again",
            address,
            _LEAVE_SECONDS,
        )


def _probe(address: str) -> None:
    """Raises ValueError where no cluster answers.

    Ray itself would wait for minutes at an address that is down, and then end the process: so a
    process of its own connects first.
    """
    if address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"the Ray address {address} does not answer ({error}); {_advice(address)}"
            ) from error
    with _without_usage_stats():
        try:
            probe = subprocess.run(
                [sys.executable, "-c", _PROBE, address],
                capture_output=True,
                text=True,
                timeout=_CONNECT_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(
                f"the Ray address {address} has not answered as a Ray cluster in "
                f"{_CONNECT_SECONDS} seconds; check the address and, if the cluster requires a "
                "token, give it by RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
            ) from error
    if probe.returncode:
        reason = (
            probe.stdout.strip() or (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
        )
        raise ValueError(
            f"the Ray cluster at {address} cannot be used ({reason[:300]}); {_advice(address)}"
        )


def _advice(address: str) -> str:
    """The end of an error message: what to do where a cluster is missing."""
    if address == "local":
        return "check that this machine has memory and room for sockets and shared memory"
    return (
        "start one with `ray start --head`, and run this where `ray start --address=HOST:PORT` "
        "has been run, or leave the address out"
    )


def _without_usage_stats() -> contextlib.AbstractContextManager[None]:
    """Turns off Ray's usage statistics, which it would send when it starts."""
    return environment(RAY_USAGE_STATS_ENABLED="0")


class _RayOutputToStderr:
    """Standard output, except that the prints of Ray's threads go to stderr.

    They report nodes and processes; stdout is for results.
    """

    def __init__(self, stdout: Any):
        self._stdout = stdout

    def write(self, text: str) -> int:
        return self._target().write(text)

    def flush(self) -> None:
        self._target().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)

    def _target(self) -> Any:
        return sys.stderr if threading.current_thread().name.startswith("ray_") else self._stdout
