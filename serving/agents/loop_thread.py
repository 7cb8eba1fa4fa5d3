"""An event loop in a thread of its own, for connections that outlive the loops of agents' runs."""

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any


class LoopThread:
    """An event loop that runs in a daemon thread from the first use until it is closed.

    `run` begins an event loop for every run of an agent, and a connection belongs to the loop that
    has opened it. Connections that several runs use are opened here.

    Args:
      name: of the thread.

    Attributes:
      at_end: async functions that close what was opened, and are called once before the loop ends,
        also where that is since this object is garbage, or the program ends.
    """

    def __init__(self, name: str):
        self._name = name
        self.at_end: list[Callable[[], Awaitable[Any]]] = []
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: weakref.finalize[Any, LoopThread] | None = None

    def begin[T](self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine in the loop; cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._running())

    async def call[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop, and waits for it in another one."""
        return await asyncio.wrap_future(self.begin(work))

    def close(self) -> None:
        """Cancels what runs, and ends the thread; the next use begins another one."""
        with self._lock:
            end, self._loop, self._end = self._end, None, None
        if end is not None:
            end()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=_run, args=(loop, self.at_end), daemon=True, name=self._name
                )
                thread.start()
                self._end = weakref.finalize(self, _stop, loop, thread)
            return self._loop


def _run(loop: asyncio.AbstractEventLoop, at_end: list[Callable[[], Awaitable[Any]]]) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(_close_all(at_end))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _close_all(at_end: list[Callable[[], Awaitable[Any]]]) -> None:
    while at_end:
        with contextlib.suppress(Exception):  # of a connection that is broken anyway
            await at_end.pop()()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    with contextlib.suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(10)
