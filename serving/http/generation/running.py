"""Running requests: the streams of a request's choices, from their submission to their end."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jaxshare import FinishReason, Sampler
from jaxshare.seeds import stream_seed
from jaxshare.serving.engine import Engine
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.engine.stream import Stream, TokenChunk
from jaxshare.serving.errors import ClosedError
from jaxshare.serving.http import request_log
from jaxshare.serving.http.errors import ApiError, api_error, draining


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The prompts of a request, and how they are continued.

    Attributes:
      prompts: tokens of each.
      n: completions of each prompt.
      sampler, max_new_tokens, stop, include_stop: see `Engine.submit`.
      seed: of all choices: completion i of prompt p has the stream of `stream_seed(seed, p, i)`, as
        `jaxshare.serving.generate` has. None leaves seeds to the engine.
      agent_id, priority, resample, logprobs, top_logprobs, adapter: see `Engine.submit`.
    """

    prompts: Sequence[Sequence[int]]
    n: int
    sampler: Sampler
    max_new_tokens: Sequence[int]
    stop: Sequence[str] | None
    include_stop: bool
    seed: int | None
    agent_id: str | None
    priority: int
    resample: str | None
    logprobs: bool
    top_logprobs: int
    adapter: str | None = None


@dataclasses.dataclass(frozen=True)
class SampledChoice:
    """One sampled continuation.

    Attributes:
      index: its number in the answer; prompt: the number of its prompt.
      stream: of its tokens.
    """

    index: int
    prompt: int
    stream: Stream


Piece = tuple[SampledChoice, TokenChunk | Completion]
"""A piece of a choice: some tokens, or at its end all of it."""


class Running:
    """The choices of a request while they run.

    Args:
      choices: in the order of the answer.
      on_close: called once, when nothing of it runs any more.
      agent: that the request belongs to, or None.
    """

    def __init__(
        self,
        choices: Sequence[SampledChoice],
        on_close: Callable[["Running"], None],
        agent: str | None = None,
    ):
        self.choices, self._on_close, self.agent = choices, on_close, agent
        self._is_open, self._has_expired = True, False
        self._counted = set[int]()  # prompts whose tokens are in the record of the request
        self._timer: asyncio.TimerHandle | None = None

    def expire_after(self, seconds: float) -> None:
        """Ends all choices after some seconds, with what they have then."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._has_expired = True
        self.cancel()

    def cancel(self) -> None:
        """Ends all choices with the next dispatch."""
        for choice in self.choices:
            choice.stream.cancel()

    def abandon(self) -> None:
        """Ends all choices at once: whatever waits for them is told that the server shuts down."""
        for choice in self.choices:
            choice.stream.abandon(ClosedError("the server shuts down"))

    def close(self) -> None:
        """Cancels what has not finished, and frees its place."""
        if self._is_open:
            self._is_open = False
            if self._timer is not None:
                self._timer.cancel()
            self.cancel()
            self._on_close(self)

    async def finished(self) -> list[Completion]:
        """Waits for all choices; returns them in order.

        Raises:
          ApiError: one has failed, or the server shuts down.
        """
        return [await self._completion(choice) for choice in self.choices]

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Yields the pieces of all choices as they come; the last of each is its completion.

        Raises:
          ApiError: as `finished` does.
        """
        if len(self.choices) == 1:
            async for piece in self._pieces(self.choices[0]):
                yield piece
            return
        # A bound, so that what a slow client does not take is not read either.
        queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(len(self.choices))
        readers = [asyncio.create_task(self._read(choice, queue)) for choice in self.choices]
        left = len(readers)
        try:
            while left:
                piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                if piece is None:
                    left -= 1
                else:
                    yield piece
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)

    async def _read(self, choice: SampledChoice, queue: asyncio.Queue[Any]) -> None:
        """Puts all pieces of a choice into a queue, and None or an error at their end."""
        try:
            async for piece in self._pieces(choice):
                await queue.put(piece)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    async def _pieces(self, choice: SampledChoice) -> AsyncGenerator[Piece]:
        with _told():
            async for chunk in choice.stream:
                if chunk.restarted:
                    raise ApiError(
                        409,
                        "the weights of the model have changed, and what was sent of this answer is "
                        "void; ask again",
                        code="restarted",
                    )
                yield choice, chunk
        yield choice, await self._completion(choice)

    async def _completion(self, choice: SampledChoice) -> Completion:
        with _told():
            completion = await choice.stream
        if completion.finish_reason is FinishReason.CANCELLED and not self._has_expired:
            raise draining()
        is_first = choice.prompt not in self._counted
        self._counted.add(choice.prompt)
        request_log.count(
            prompt_tokens=completion.prompt_tokens if is_first else 0,
            completion_tokens=len(completion.tokens),
        )
        return completion


@contextlib.contextmanager
def _told() -> Any:
    """Turns errors of the engine into what the client is told."""
    try:
        yield
    except Exception as error:
        raise api_error(error) from error


def submit(engine: Engine, wanted: Wanted) -> list[SampledChoice]:
    """Submits all choices, or none.

    Raises:
      ApiError: one was refused.
    """
    choices: list[SampledChoice] = []
    try:
        for number, prompt in enumerate(wanted.prompts):
            for index in range(wanted.n):
                seed = wanted.seed
                stream = engine.submit(
                    prompt,
                    wanted.sampler,
                    max_new_tokens=wanted.max_new_tokens[number],
                    stop=wanted.stop,
                    include_stop=wanted.include_stop,
                    seed=None if seed is None else stream_seed(seed, number, index),
                    agent_id=wanted.agent_id,
                    priority=wanted.priority,
                    resample=wanted.resample,
                    logprobs=wanted.logprobs,
                    top_logprobs=wanted.top_logprobs,
                    adapter=wanted.adapter,
                )
                choices.append(SampledChoice(len(choices), number, stream))
    except Exception as error:
        for choice in choices:
            choice.stream.cancel()
        raise api_error(error) from error
    return choices


def versions_of(completion: Completion) -> dict[str, Any]:
    """The field of a choice with [number of tokens, version of the weights] one after the other, where
    the engine's weights have been exchanged."""
    runs = completion.version_runs
    return {"params_versions": [*map(list, runs)]} if any(v for _, v in runs) else {}


FINISHED = {
    FinishReason.STOP: "stop",
    FinishReason.STOP_TEXT: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CACHE_FULL: "length",
    FinishReason.CANCELLED: "length",
}
"""OpenAI's words for finish reasons; a request that is cancelled has had too little time."""


def usage_of(completions: Sequence[tuple[int, Completion]]) -> dict[str, Any]:
    """Returns the usage of a request in OpenAI's form.

    Args:
      completions: with the number of the prompt of each. The tokens of a prompt count once.
    """
    prompts: dict[int, Completion] = {}
    for number, completion in completions:
        prompts.setdefault(number, completion)
    prompt = sum(each.prompt_tokens for each in prompts.values())
    sampled = sum(len(completion.tokens) for _, completion in completions)
    cached = sum(each.reused_tokens for each in prompts.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
