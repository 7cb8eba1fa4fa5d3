"""Answers in pieces: what a caller of agents sees while a model writes."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from jaxshare.serving.agents.requests import Model, ModelCall, Reply

Tell = Callable[[str, bool], None]
"""Takes the next piece of an answer, and whether it is of the think block."""


@runtime_checkable
class StreamingModel(Model, Protocol):
    """The interface of a model that tells its answers in pieces."""

    async def stream(self, call: ModelCall, tell: Tell) -> Reply:
        """The answer to one call, as `answer` gives it; `tell` takes its pieces as they come.

        The pieces together are the reply's `reasoning` and its `text`; calls of tools are no pieces.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerPiece:
    """The next piece of a model's answer to an agent.

    Attributes:
      run: the id of the agent's run, the path of agents that led to it.
      state: position in the tree of that run, as in `ModelCall`.
      agent: the name of the agent.
      seed: of the call: several answers that are sampled at the same position have one each.
      text: the piece.
      is_reasoning: it is of the think block.
      is_last: the answer has ended; the text is empty.
    """

    run: str
    state: tuple[int, ...]
    agent: str
    seed: int
    text: str
    is_reasoning: bool = False
    is_last: bool = False


OnToken = Callable[[AnswerPiece], None]


def answered(model: Model, call: ModelCall, on_token: OnToken | None) -> Awaitable[Reply]:
    """Returns the model's answer, to be awaited, of which each piece is given to `on_token`."""
    return model.answer(call) if on_token is None else _told(model, call, on_token)


async def _told(model: Model, call: ModelCall, on_token: OnToken) -> Reply:
    about = (call.run, call.state, call.agent, call.seed)
    if isinstance(model, StreamingModel):

        def tell(text: str, is_reasoning: bool) -> None:
            if text:
                on_token(AnswerPiece(*about, text, is_reasoning))

        reply = await model.stream(call, tell)
    else:
        reply = await model.answer(call)
        if isinstance(reply, Reply):
            for text, is_reasoning in ((reply.reasoning, True), (reply.text, False)):
                if text:
                    on_token(AnswerPiece(*about, text, is_reasoning))
    on_token(AnswerPiece(*about, "", is_last=True))
    return reply


class AgentStream:
    """The pieces of all answers of a run, for one `async for`; `Runtime.stream` makes it.

        stream = Runtime(model).stream(solve, "What is 2 + 2?")
        async for piece in stream:
            print(piece.agent, piece.text)
        print(stream.run.accepted.value)

    The run begins with the loop. A loop that is left early ends it, once the iterator is closed, as
    by `contextlib.aclosing(aiter(stream))`.

    Attributes:
      run: after the last piece, the `AgentRun`; None before. Its error is raised by the loop.
    """

    def __init__(self, runtime: Any, agent: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        self.run: Any = None
        self._given = runtime, agent, args, kwargs

    async def __aiter__(self) -> AsyncGenerator[AnswerPiece]:
        runtime, agent, args, kwargs = self._given
        pieces: asyncio.Queue[AnswerPiece | None] = asyncio.Queue()
        before = runtime.on_token

        def take(piece: AnswerPiece) -> None:
            if before is not None:
                before(piece)
            pieces.put_nowait(piece)

        runtime.on_token = take
        whole = asyncio.ensure_future(runtime.run(agent, *args, **kwargs))
        whole.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            self.run = await whole
        finally:
            runtime.on_token = before
            if not whole.done():
                whole.cancel()
                await asyncio.wait([whole])


class Streamed:
    """The part of `jaxshare.serving.agents.runtime.Runtime` that gives answers in pieces."""

    on_token: OnToken | None

    def stream(self, agent: Any, /, *args: Any, **kwargs: Any) -> AgentStream:
        """Returns the pieces of all answers, for an `async for`; the agent runs as by `run`."""
        return AgentStream(self, agent, args, kwargs)
