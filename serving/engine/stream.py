"""Streams: the tokens of a request as they come, their text, and the finished output."""

import asyncio
import bisect
import collections
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Self

from jaxshare.argument_checks import as_timeout
from jaxshare.serving.engine.completion import Completion, without_stop
from jaxshare.serving.errors import EngineError

_SETTLED_TOKENS = 16
"""Tokens after which the text before them is decoded no more."""
_FEW_TOKENS = 32
"""So many tokens at the end of an output are always decoded again."""
_ODD_START = 16
"""The most characters at the start of some tokens' text that differ where others come before them: a
space, or parts of a character."""


@dataclasses.dataclass(frozen=True)
class TokenChunk:
    """One item of a stream: tokens, and the text that they complete.

    A character may be completed by a later chunk, and the beginning of a possible stop text comes
    when it is known to be none. All chunks together have the tokens of the completion but for a
    stop token, which is no text, and the same log-probabilities.

    Attributes:
      tokens, text: as described.
      logprobs: of each token, or None where they were not asked for.
      top_logprobs: see `Completion`.
      restarted: whether all chunks before this one are void, because the weights of the model have
        changed and the request was to start over (`Engine.update_params`).
    """

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    restarted: bool = False


class Stream:
    """The tokens of a request as they are sampled, for an event loop or any thread.

        stream = engine.submit("What is 2 + 2?")
        async for chunk in stream:
            print(chunk.text, end="")
        output = await stream

    Outside of an event loop these are `for chunk in stream.chunks()` and `stream.wait()`.

    The engine never waits for a reader: unread tokens stay here, at most `max_new_tokens` of them.
    A request whose stream is garbage-collected is cancelled.
    """

    def __init__(self, state: "StreamState", cancel: Callable[[], None]):
        self._state, self._cancel = state, cancel
        self._finalizer = weakref.finalize(self, cancel)
        self._finalizer.atexit = False

    def cancel(self) -> None:
        """Ends the request unless it has finished; its output is what was sampled so far."""
        self._cancel()

    def abandon(self, error: EngineError) -> None:
        """Ends the stream with an error at once, even while the engine compiles; cancels the request.

        A stream that has ended stays as it is.
        """
        self._cancel()
        self._state.abandon(error)

    def wait(self, timeout: float | None = None) -> Completion:
        """Blocks the calling thread until the request has finished.

        Raises:
          TimeoutError: it has not finished within `timeout` seconds; the request goes on.
          EngineError: the error that ended the request.
        """
        timeout = as_timeout("timeout", timeout)
        with self._state.changed:
            if not self._state.changed.wait_for(self._state.has_ended, timeout):
                raise TimeoutError(f"the request has not finished within {timeout} seconds")
        return self._state.result()

    async def _finished(self) -> Completion:
        await self._state.wait_until(self._state.has_ended)
        return self._state.result()

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._finished().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        await self._state.wait_until(self._state.has_next)
        if chunk := self._state.next_chunk():
            return chunk
        self._state.result()  # raises the request's error
        raise StopAsyncIteration

    def chunks(self, timeout: float | None = None) -> Iterator[TokenChunk]:
        """Yields the chunks as they come, for the calling thread. Each chunk has one reader.

        Raises:
          TimeoutError: no chunk has come within `timeout` seconds; the request goes on.
          EngineError: the error that ended the request.
        """
        state, timeout = self._state, as_timeout("timeout", timeout)
        while True:
            with state.changed:
                if not state.changed.wait_for(state.has_next, timeout):
                    raise TimeoutError(f"the request has sampled nothing within {timeout} seconds")
            chunk = state.next_chunk()
            if chunk is None:
                state.result()  # raises the request's error
                return
            yield chunk


class Detokenizer:
    """The text of an output. Readers decode it, so that the engine's thread need not.

    Args:
      tokenizer: None if there are no texts.
      stops: the text ends before the first of these.
      includes_stop: it ends after that.

    Attributes:
      stops: as given.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], includes_stop: bool = False):
        self._tokenizer, self.stops, self._includes_stop = tokenizer, stops, includes_stop
        self.restart_text()
        self.restart_search()

    def restart_text(self) -> None:
        """Begins with another output, for `next_text`."""
        self._growing, self._num_shown = GrowingText(self._tokenizer), 0

    def restart_search(self) -> None:
        """Begins with another output, for `fewest_with_stop`."""
        # What ends before this token has no stop text.
        self._begin, self._most_decoded = 0, _FEW_TOKENS

    def text(self, tokens: Sequence[int]) -> str:
        """The text of an output's first tokens, cut at a stop text."""
        return self._cut(tokens)[0]

    def stopped(self, tokens: Sequence[int]) -> bool:
        """Returns whether the text of these tokens contains a stop text."""
        return bool(self.stops) and self._cut(tokens)[1]

    def fewest_with_stop(self, tokens: Sequence[int]) -> int | None:
        """Returns the fewest of these tokens whose text contains a stop text; None if it has none.

        Those of earlier calls must be a beginning of these. Only the end of the text is decoded, and
        all of it once, where that end has a stop text.
        """
        if not self.stops or not self._ends_with_stop(tokens) or not self.stopped(tokens):
            return None
        return bisect.bisect_left(
            range(len(tokens)), True, lo=1, key=lambda n: self.stopped(tokens[:n])
        )

    def _ends_with_stop(self, tokens: Sequence[int]) -> bool:
        """Returns whether the text of the tokens from `_begin` on has a stop text; moves `_begin` on where
        these have become many, so that each token is decoded a few times in all."""
        text = self._decode(tokens[self._begin :])
        if any(stop in text for stop in self.stops):
            return True
        # After a character that is not complete, more than the last one may change.
        if len(tokens) - self._begin <= self._most_decoded or text.endswith("\ufffd"):
            return False
        enough, size = max(map(len, self.stops)) + 2 * _ODD_START, _FEW_TOKENS // 2
        while size < len(tokens) - self._begin:
            end = self._decode(tokens[-size:])
            if len(end) >= enough and text.endswith(end[_ODD_START:]):
                self._begin = len(tokens) - size
                break
            size *= 2
        self._most_decoded = 2 * (len(tokens) - self._begin)
        return False

    def _decode(self, tokens: Sequence[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(tokens)

    def next_text(self, tokens: Sequence[int], last: bool) -> str:
        """Text that the next tokens add.

        Holds back the beginning of a possible stop text and incomplete characters, unless `last`.
        """
        text = self._cut_text(self._growing.add(tokens, last))[0]
        if not last:
            text = text.rstrip("\ufffd")  # first: a stop text may go on with this character
            held = max(
                (n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
                default=0,
            )
            text = text[: len(text) - held]
        new, self._num_shown = text[self._num_shown :], max(self._num_shown, len(text))
        return new

    def _cut(self, tokens: Sequence[int]) -> tuple[str, bool]:
        return self._cut_text(self._decode(tokens))

    def _cut_text(self, text: str) -> tuple[str, bool]:
        found = [(start, len(stop)) for stop in self.stops if (start := text.find(stop)) >= 0]
        if not found:
            return text, False
        start, size = min(found)
        return text[: start + size * self._includes_stop], True


class GrowingText:
    """The text of tokens that come a few at a time, of which each is decoded a few times only.

    The newest tokens are decoded together with some before them, as far as the text is known to stay
    what it is. Where a tokenizer changes text before a place by what comes after it, all is decoded.

    Args:
      tokenizer: None if there are no texts.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._tokens = tokenizer, list[int]()
        # The text of the first `_end` tokens is `_settled`; that of those from `_start` to there is
        # `_context`, by itself.
        self._start = self._end = 0
        self._settled = self._context = ""
        self._is_local = True

    def add(self, tokens: Sequence[int], last: bool) -> str:
        """Adds tokens; returns the whole text, which after the last ones is that of all together."""
        self._tokens += tokens
        if self._tokenizer is None:
            return ""
        if last or not self._is_local:
            return self._tokenizer.decode(self._tokens)
        window = self._tokenizer.decode(self._tokens[self._start :])
        if not window.startswith(self._context):
            self._is_local = False
            return self._tokenizer.decode(self._tokens)
        new = window[len(self._context) :]
        text = self._settled + new
        # A text that ends in the sign for a broken character may still become another one.
        if len(self._tokens) - self._end >= _SETTLED_TOKENS and new and new[-1] != "\ufffd":
            self._context = self._tokenizer.decode(self._tokens[self._end :])
            self._settled, self._start, self._end = text, self._end, len(self._tokens)
        return text


class StreamState:
    """State shared by a stream and the engine, which must not keep the stream itself alive.

    Attributes:
      on_end: called once with the output in the engine's thread, or None.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self.changed = threading.Condition()
        self.chunks: collections.deque[TokenChunk] = collections.deque()
        self.output: Completion | None = None
        self.waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._result: Completion | None = None
        self._submit_time = time.perf_counter()
        self._queue_seconds: float | None = None
        self._first_token_seconds: float | None = None
        self.on_end: Callable[[Completion], None] | None = None
        self._given_up: EngineError | None = None
        self._was_read = self._is_restarted = False

    def result(self) -> Completion:
        """The output with its text. Raises the request's error if it has one."""
        if self.output is None and self._given_up is not None:
            raise self._given_up
        assert self.output is not None
        if self.output.error:
            raise self.output.error
        if self._result is None:
            shown = without_stop(self.output.tokens, self.output.finish_reason)
            text = self.detokenizer.text(shown)
            self._result = dataclasses.replace(self.output, text=text)
        return self._result

    async def wait_until(self, condition: Callable[[], Any]) -> None:
        """Waits in an event loop until the condition holds."""
        while True:
            with self.changed:
                if condition():
                    return
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self.waiters.append((loop, future))
            await future

    def has_next(self) -> bool:
        """Returns whether a reader need not wait: there is a chunk, or the end."""
        return bool(self.chunks) or self.has_ended()

    def has_ended(self) -> bool:
        """Returns whether the output is there, or readers were told not to wait for it."""
        return self.output is not None or self._given_up is not None

    def abandon(self, error: EngineError) -> None:
        """Lets readers wait for no more; what the engine does is not for them."""
        with self.changed:
            self._given_up = error
        self._notify()

    def next_chunk(self) -> TokenChunk | None:
        """The next chunk with its text; None at the end."""
        with self.changed:
            chunk = self.chunks.popleft() if self.chunks else TokenChunk((), "")
            last = self.has_ended() and not self.chunks
            self._was_read |= bool(chunk.tokens)
        if chunk.restarted:
            self.detokenizer.restart_text()
        chunk = dataclasses.replace(chunk, text=self.detokenizer.next_text(chunk.tokens, last))
        return chunk if chunk.tokens or chunk.text or chunk.restarted else None

    def admitted(self) -> None:
        """Notes that the request has left the queue, the first time. Called in the engine's thread."""
        if self._queue_seconds is None:
            self._queue_seconds = time.perf_counter() - self._submit_time

    def put(self, chunk: TokenChunk) -> None:
        """Adds tokens. Called in the engine's thread."""
        if self._first_token_seconds is None:
            self._first_token_seconds = time.perf_counter() - self._submit_time
        with self.changed:
            self.chunks.append(self._marked(chunk))
        self._notify()

    def restart(self) -> None:
        """Forgets all chunks. Called in the turn of the engine."""
        with self.changed:
            self.chunks.clear()
            self._is_restarted |= self._was_read
            self.detokenizer.restart_search()

    def _marked(self, chunk: TokenChunk) -> TokenChunk:
        """A chunk that is put in, which says so where those before it are void."""
        is_first, self._is_restarted = self._is_restarted, False
        return dataclasses.replace(chunk, restarted=True) if is_first else chunk

    def finish(self, output: Completion) -> Completion:
        """Sets the final output, without its text. Called in the engine's thread.

        Returns:
          The output with the times from its submission; the first one, where there are several.
        """
        with self.changed:
            if self._is_restarted:
                self.chunks.append(self._marked(TokenChunk((), "")))
            self.output = self.output or dataclasses.replace(
                output,
                seconds=time.perf_counter() - self._submit_time,
                first_token_seconds=self._first_token_seconds,
                queue_seconds=self._queue_seconds,
            )
            on_end, self.on_end = self.on_end, None
        self._notify()
        if on_end is not None:
            on_end(self.output)
        return self.output

    def _notify(self) -> None:
        """Wakes all readers."""
        with self.changed:
            self.changed.notify_all()
            waiters, self.waiters = self.waiters, []
        for loop, future in waiters:
            _WAKE_UPS.add(loop, future)


class _WakeUps:
    """Wakes readers in their event loops, all of a loop at once.

    To call into a loop takes a system call, in which the engine's thread lets go of the interpreter's
    lock: once for each reader would be many times in a dispatch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, future: "asyncio.Future[None]") -> None:
        """Wakes one reader, now or with those that are being woken. From any thread."""
        with self._lock:
            if due := self._due.get(loop):
                due.append(future)
                return
            for other in [other for other in self._due if other.is_closed()]:
                del self._due[other]
            self._due[loop] = [future]
        try:
            loop.call_soon_threadsafe(self._wake, loop)
        except RuntimeError:  # the loop is closed: its readers are gone
            with self._lock:
                self._due.pop(loop, None)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            due = self._due.pop(loop, [])
        for future in due:
            if not future.done():
                future.set_result(None)


_WAKE_UPS = _WakeUps()
