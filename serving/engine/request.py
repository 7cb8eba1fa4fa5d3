"""What is asked of the engine, and what comes back: calls, streams of their tokens, how they end,
and the errors of refused ones."""

import asyncio
import collections
import dataclasses
import enum
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, Self

import numpy as np

from jaxshare import Sampler
from jaxshare.decoding.top_logits import TopLogits


class End(enum.StrEnum):
    """Why a call has ended."""

    STOP = "stop"
    """The model has sampled a stop token."""
    STOP_TEXT = "stop text"
    LENGTH = "length"
    """It has as many tokens as it may have."""
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class TokenChunk:
    """What a stream gives at a time: tokens, and the text that they complete (a character may end
    with a later piece)."""

    tokens: tuple[int, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A call that has ended.

    Attributes:
      tokens: sampled, up to where the text ends; without a stop token.
      text: of these, or "" where the model has no tokenizer.
      end: why.
      prompt_tokens: of the prompt, and of these `reused_tokens` that were known.
      replayed_tokens: of the answer, that came out of the Logits Cache.
      preemptions: how often it had to make room for another.
      first_token_seconds, seconds: from its submission to its first token, and to its end.
      error: what went wrong where `end` says so.
    """

    tokens: tuple[int, ...]
    text: str
    end: End
    prompt_tokens: int
    reused_tokens: int
    replayed_tokens: int
    preemptions: int
    first_token_seconds: float | None
    seconds: float
    error: Exception | None = None


class Stream:
    """What a call samples, as it comes; to be read in an event loop or from any thread.

        stream = engine.submit("What is 2 + 2?")
        async for piece in stream:
            print(piece.text, end="")
        done = await stream                     # or, outside of an event loop, stream.wait()

    The engine never waits for a reader: what is not read stays here, and can be no more than the
    call may sample. A call whose stream nobody has any more is cancelled.
    """

    def __init__(self, state: "StreamState", cancel: Callable[[], None]):
        self._state, self._cancel = state, cancel
        self._gone = weakref.finalize(self, cancel)
        self._gone.atexit = False

    def cancel(self) -> None:
        """Ends the call, if it has not; what it has sampled so far is its completion."""
        self._cancel()

    def wait(self, timeout: float | None = None) -> RequestOutput:
        """Waits for the end, in the calling thread.

        Raises:
          TimeoutError: it has not ended within so many seconds; the call goes on.
          EngineError: what went wrong with the call.
        """
        with self._state.changed:
            if not self._state.changed.wait_for(lambda: self._state.done is not None, timeout):
                raise TimeoutError(f"the call has not ended within {timeout} seconds")
        return self._state.outcome()

    async def _ended(self) -> RequestOutput:
        await self._state.until(lambda: self._state.done is not None)
        return self._state.outcome()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._ended().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        state = self._state
        await state.until(lambda: state.pieces or state.done is not None)
        with state.changed:
            tokens = state.pieces.popleft() if state.pieces else ()
            last = state.done is not None and not state.pieces
        piece = TokenChunk(tokens, state.text.more(tokens, last))
        if piece.tokens or piece.text:
            return piece
        state.outcome()  # raises what went wrong
        raise StopAsyncIteration


class Text:
    """The text of an answer. Who reads it works it out, so that the engine need not.

    Args:
      tokenizer: None for no texts.
      stops: it ends before the first of these.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, stops
        self._said: list[int] = []
        self._shown = 0

    def of(self, tokens: Sequence[int]) -> str:
        """Of an answer's first tokens."""
        return self._cut(tokens)[0]

    def stopped(self, tokens: Sequence[int]) -> bool:
        """Whether one of the stop texts stands in these."""
        return bool(self._stops) and self._cut(tokens)[1]

    def more(self, tokens: Sequence[int], last: bool) -> str:
        """What the next tokens add to it, but for what may still become a stop text, or a
        character."""
        self._said += tokens
        text = self.of(self._said)
        if not last:
            held = max(
                (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
                default=0,
            )
            text = text[: len(text) - held].rstrip("\ufffd")
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new

    def _cut(self, tokens: Sequence[int]) -> tuple[str, bool]:
        text = "" if self._tokenizer is None else self._tokenizer.decode(tokens)
        end = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        return text[:end], end is not None


class StreamState:
    """What a stream and the engine share, so that the engine does not keep the stream alive."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.changed = threading.Condition()
        self.pieces: collections.deque[tuple[int, ...]] = collections.deque()
        self.done: RequestOutput | None = None
        self.waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._outcome: RequestOutput | None = None

    def outcome(self) -> RequestOutput:
        assert self.done is not None
        if self.done.error:
            raise self.done.error
        if self._outcome is None:
            self._outcome = dataclasses.replace(self.done, text=self.text.of(self.done.tokens))
        return self._outcome

    async def until(self, so: Callable[[], Any]) -> None:
        while True:
            with self.changed:
                if so():
                    return
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self.waiting.append((loop, future))
            await future

    def tell(self, tokens: tuple[int, ...] = (), done: RequestOutput | None = None) -> None:
        """From the engine's thread; `done` without its text."""
        with self.changed:
            if tokens:
                self.pieces.append(tokens)
            self.done = self.done or done
            self.changed.notify_all()
            waiting, self.waiting = self.waiting, []
        for loop, future in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future)


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


@dataclasses.dataclass(eq=False)
class Request:
    """A call, as the engine's loop has it.

    Attributes:
      number: in the order of submission.
      prompt: its tokens.
      sampler, seed, budget: how it is answered.
      agent, priority: whose it is, and before which others it is served.
      resample: "stepwise" or "hotspot" if the Logits Cache may answer it, and keeps what it comes
        to; None for neither.
      output: tokens sampled so far, of which the first `replayed` came from the cache; stop_token:
        what ended them.
      reused: tokens of the prompt that were known when it was first admitted.
      drawn_from: what is kept of the distributions that its tokens were drawn from, but for the
        replayed ones.
      next_seed: of the next call that asks the same, where seeds follow from that.
      given: how many tokens its stream was given.
    """

    number: int
    prompt: np.ndarray
    sampler: Sampler
    seed: int
    budget: int
    agent: str
    priority: int
    state: StreamState
    resample: str | None = None
    submitted: float = dataclasses.field(default_factory=time.perf_counter)
    output: list[int] = dataclasses.field(default_factory=list)
    stop_token: int | None = None
    replayed: int = 0
    looked_up: bool = False
    reused: int | None = None
    drawn_from: list[TopLogits] = dataclasses.field(default_factory=list)
    next_seed: int | None = None
    given: int = 0
    preemptions: int = 0
    first: float | None = None
    cancelled: bool = False

    @property
    def tokens(self) -> np.ndarray:
        """Everything that it has, prompt and answer."""
        return np.concatenate([self.prompt, np.asarray(self.output, np.int32)])

    @property
    def needs(self) -> int:
        """Tokens that it may come to."""
        return len(self.prompt) + self.budget

    @property
    def left(self) -> int:
        """Tokens that it may still sample."""
        return self.budget - len(self.output)
