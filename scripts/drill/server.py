"""A server that is killed, told to end, and asked by clients that vanish or say nonsense."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from scripts.drill import http_clients
from scripts.drill.drill import Drill
from scripts.drill.http_clients import PATIENCE, Refused, ask
from scripts.drill.processes import jaxshare, kill

_GRACE = 5
_THREADS = 8
"""What may be more: the executor of the event loop and XLA start threads as they need them."""


class Held(NamedTuple):
    """The file handles and threads of a process."""

    handles: int
    threads: int


class ServerProcess:
    """A server in a process of its own.

    Args:
      port: that it listens at.
      folder: where it writes what it says.

    Attributes:
      port: as given.
      process: its own.
      at_rest: what it has held at rest for the first time.
    """

    def __init__(self, port: int, folder: Path):
        settings = ["--port", str(port), "--max-rows", "4", "--max-queue", "8"]
        settings += ["--max-model-len", "512", "--grace", str(_GRACE)]
        self.port, self._said = port, folder / f"server-{time.monotonic_ns()}.txt"
        with self._said.open("w") as file:
            self.process = subprocess.Popen(
                jaxshare("serve", "embedded", *settings),
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                stderr=file,
                start_new_session=True,
            )
        self.at_rest: Held | None = None

    @property
    def said(self) -> str:
        """Returns its standard error so far."""
        return self._said.read_text(encoding="utf-8")

    def wait_until_ready(self) -> None:
        """Waits for the warm engine, and remembers what the process holds at rest."""
        end = time.monotonic() + PATIENCE
        while not self._is_ready():
            assert self.process.poll() is None, f"the server has ended: {self.said[-500:]}"
            assert time.monotonic() < end, f"the server is not ready: {self.said[-500:]}"
            time.sleep(0.1)
        http_clients.right(self.port, random.Random(0))
        time.sleep(0.5)
        self.at_rest = self._held()

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return ask(self.port, "GET", "/ready").status == 200
        return False

    def _held(self) -> Held:
        folder = Path("/proc") / str(self.process.pid)
        return Held(len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")))

    def check_rest(self) -> None:
        """Waits until nothing is left of any request; fails where something is."""
        end = time.monotonic() + PATIENCE
        while left := self._left():
            assert time.monotonic() < end, f"there is left: {'; '.join(left)}"
            time.sleep(0.1)

    def _left(self) -> list[str]:
        assert self.process.poll() is None, f"the server has ended: {self.said[-500:]}"
        stats = json.loads(ask(self.port, "GET", "/v1/engine/stats").body)
        cache = json.loads(ask(self.port, "GET", "/v1/engine/cache").body)
        metrics = ask(self.port, "GET", "/metrics").body.decode()
        held, before = self._held(), self.at_rest
        assert before is not None
        opened = re.search(r"^jaxshare_http_open_requests (\S+)$", metrics, re.MULTILINE)
        rows = stats["rows"]["decoding"] + stats["rows"]["prefilling"]
        found = {
            "rows": rows or stats["requests"],
            "requests that wait": stats["waiting"],
            "runs of tokens that are read": sum(run["readers"] > 0 for run in cache["runs"]),
            "runs of tokens that are written": sum(run["writing"] for run in cache["runs"]),
            "memory of sessions": stats["memory"]["session_bytes"],
            "open requests": opened is None or float(opened[1]) != 1,
            "file handles": max(0, held.handles - before.handles),
            "threads": max(0, held.threads - before.threads - _THREADS),
        }
        return [f"{name} ({value})" for name, value in found.items() if value]


@contextlib.contextmanager
def _serving(port: int, folder: Path) -> Iterator[ServerProcess]:
    """A server that is ready, of which nothing is left afterwards."""
    server = ServerProcess(port, folder)
    try:
        server.wait_until_ready()
        yield server
    finally:
        kill(server.process)
        server.process.wait()


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


class _Clients:
    """Clients of random kinds in threads of their own.

    Args:
      server: that they ask.
      rng: random numbers.
      count: of them.
    """

    def __init__(self, server: ServerProcess, rng: random.Random, count: int):
        self._threads = ThreadPoolExecutor(count)
        self._asked = [
            self._threads.submit(self._ask, server.port, random.Random(rng.random()))
            for _ in range(count)
        ]

    @staticmethod
    def _ask(port: int, rng: random.Random) -> tuple[int, int]:
        faults = refused = 0
        for _ in range(3):
            time.sleep(rng.random() * 0.3)
            try:
                faults += rng.choice(http_clients.KINDS)(port, rng)
            except Refused:
                refused += 1
        return faults, refused

    def ended(self) -> int:
        """Waits for all of them; returns their faults."""
        with self._threads:
            return sum(each.result(2 * PATIENCE)[0] for each in self._asked)


def throw_at_server(rng: random.Random, folder: Path) -> int:
    """Two waves of clients, and one in which the server is killed or told to end."""
    port, faults = _free_port(), 1
    with _serving(port, folder) as server:
        for _ in range(2):
            faults += _Clients(server, rng, rng.randrange(4, 12)).ended()
            server.check_rest()
        clients, sent = _Clients(server, rng, 8), rng.choice((signal.SIGKILL, signal.SIGTERM))
        time.sleep(rng.random())
        server.process.send_signal(sent)
        code = server.process.wait(_GRACE + 30)
        assert code == (-sent if sent == signal.SIGKILL else 0), f"exit {code} after {sent!r}"
        faults += clients.ended()
        _check_said(server)
    with _serving(port, folder) as server:
        http_clients.right(port, rng)
        faults += _Clients(server, rng, 8).ended()
        server.check_rest()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(_GRACE - 2)  # there is nothing to wait for
        assert code == 0, f"exit {code} of a server at rest"
        _check_said(server)
    return faults


def _check_said(server: ServerProcess) -> None:
    """No request may end in an error of the server."""
    assert "Traceback" not in server.said, f"the server says {server.said[-2000:]}"


DRILLS = [
    Drill(
        "server",
        "right requests have the library's texts or are refused with a time; nothing is left of the "
        "others, and a server that was killed starts again",
        "clients that vanish, read slowly, come in crowds or say nonsense; kill -9 or SIGTERM in "
        "their midst",
        throw_at_server,
    )
]
