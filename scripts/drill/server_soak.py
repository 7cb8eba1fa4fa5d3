"""A server that has hundreds of streams open, of which a third vanish, and that holds no more after
them than before."""

import collections
import functools
import json
import logging
import random
import statistics
import sys
import threading
import time
from pathlib import Path

from jaxshare.serving.engine import Engine
from jaxshare.serving.http.server import DrainingServer, listen
from jaxshare.serving.http.service import Service
from jaxshare.serving.http.settings import ServerSettings
from scripts.drill import census
from scripts.drill.census import Census
from scripts.drill.drill import Drill
from scripts.drill.http_clients import PATIENCE, expected, model
from scripts.drill.processes import finished

_STREAMS, _SECONDS, _ROWS = 500, 4, 32
_WARM_UP = 4
"""Waves before the base line, in which programs are compiled and pools filled."""
_WINDOW = 5
"""Waves of the base line, and of what is compared with it."""
_MOST_GROWTH = 1.02
"""Of the bytes that the allocator has handed out."""


class _Causes(logging.Handler):
    """Keeps the last error that the server or its engine has logged, which clients are not told.

    Attributes:
      last: its words; "" if there is none.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.last = ""
        for name in ("jaxshare.http", "jaxshare.engine"):
            log = logging.getLogger(name)
            log.setLevel(logging.ERROR)
            log.propagate = False
            log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.last = self.format(record)[-300:]


class ServerSoak:
    """The server of the part, in a thread, and what the process held after each wave.

    Attributes:
      first, last: what it held after the first waves since the warm-up, and after the last ones.
    """

    def __init__(self) -> None:
        self._causes = _Causes()
        self._engine = Engine(model(), max_rows=_ROWS, kv_bytes=2**26)
        self._engine.warm_up()
        self._service = Service(self._engine, ServerSettings(model_names=("embedded",)))
        listening = listen("127.0.0.1", 0)
        self._port = listening.getsockname()[1]
        server, started = DrainingServer(self._service, listening), threading.Event()
        server.on_start = started.set
        threading.Thread(
            target=server.serve_until_told, kwargs={"warm_up": False}, daemon=True
        ).start()
        assert started.wait(PATIENCE), "the server has not started"
        self.first: list[Census] = []
        self.last: collections.deque[Census] = collections.deque(maxlen=_WINDOW)
        for number in range(_WARM_UP):
            self._run(random.Random(f"warm {number}"))

    def wave(self, rng: random.Random) -> int:
        """Runs a wave of streams, and checks what is left of it; returns how many have vanished."""
        vanished = self._run(rng)
        (self.first if len(self.first) < _WINDOW else self.last).append(census.take(self._engine))
        if len(self.last) == _WINDOW:
            grown = census.growth(self.first, self.last)
            assert not grown, f"there is more than after the first waves of: {grown}"
            before, after = (_in_use(each) for each in (self.first, self.last))
            assert after <= _MOST_GROWTH * before, (
                f"memory in use has grown from {before / 2**20:.1f} to {after / 2**20:.1f} MiB"
            )
        return vanished

    def _run(self, rng: random.Random) -> int:
        given = [self._port, _SECONDS, rng.randrange(2**31), _STREAMS]
        clients = [sys.executable, "-m", "scripts.drill.streams", *map(str, given)]
        found = json.loads(finished(clients))
        for prompt, seed, tokens, text in found["texts"]:
            wanted = expected(prompt, seed, tokens)
            assert text == wanted, (
                f"the text is {text[:80]!r}, not {wanted[:80]!r}; {self._causes.last}"
            )
        assert found["finished"] and found["vanished"] and not found["refused"], found
        assert found["most"] == _STREAMS, f"{found['most']} streams were open at most"
        self._check_rest()
        return found["vanished"]

    def _check_rest(self) -> None:
        """Waits until nothing is left of any stream; fails where something is."""
        self._engine.drain(PATIENCE)
        end = time.monotonic() + PATIENCE
        while self._service.num_running or not self._service.is_idle:
            assert time.monotonic() < end, f"{self._service.num_running} requests are left"
            time.sleep(0.05)
        time.sleep(0.3)  # the event loop closes the last connections
        seen = self._engine.snapshot()
        assert not seen.rows and not seen.waiting, f"rows {seen.rows}, {seen.waiting} wait"
        read = [run for run in seen.runs if run.readers or run.writing]
        assert not read, f"{len(read)} runs of tokens are read or written"


def _in_use(waves: list[Census] | collections.deque[Census]) -> float:
    """The bytes in use, the median of some waves; those that are resident, where none are told."""
    return statistics.median(each.allocated or each.resident for each in waves)


@functools.cache
def _soak() -> ServerSoak:
    return ServerSoak()


def throw_waves(rng: random.Random, _: Path) -> int:
    """Throws one wave at the server that all cases share."""
    return _soak().wave(rng)


DRILLS = [
    Drill(
        "server-soak",
        "texts are the library's; rows, blocks, tasks, threads and handles come back to where they "
        "were, and memory within 2%, over all cases",
        f"waves of {_STREAMS} streams at once, of which a third vanish at random",
        throw_waves,
    )
]
