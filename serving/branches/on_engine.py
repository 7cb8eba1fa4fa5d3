"""Completions of prompts as requests of a running engine, in the same passes as its other rows."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxshare.serving.branches.answering import Answering
from jaxshare.serving.branches.prompt_tree import Prompt
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.engine.stream import Stream
from jaxshare.serving.errors import QueueFullError, SamplingError

if TYPE_CHECKING:
    from jaxshare.serving.engine import Engine


def complete_on(
    engine: "Engine",
    prompts: Sequence[Prompt],
    *,
    answers: Mapping[int, Answering],
    adapter: str | None = None,
    top_logprobs: int,
    logprobs: bool | str,
) -> Iterator[Completion]:
    """Samples completions of prompts, and yields them in the order of the prompts.

    Requests that have not finished are cancelled where the caller stops.

    Args:
      engine: of the model.
      prompts: as tokens, with the number of completions of each.
      answers: how each prompt is answered, by its number.
      adapter: of the engine's, by name.
      top_logprobs, logprobs: see `Branches`.

    Raises:
      NotANumberError, NoTokenError: nothing can be sampled for a prompt.
      TooLongError, QueueFullError, ClosedError: see `Engine.submit`.
    """
    waiting: collections.deque[tuple[int, int, Stream]] = collections.deque()
    with contextlib.ExitStack() as cancelled:
        for prompt, index in _samples(prompts):
            number, stream = prompt.number, None
            answering = answers[number]
            while stream is None:
                try:
                    stream = engine.submit(
                        prompt.tokens,
                        dataclasses.replace(answering.sampler, n=None, best_of=None),
                        max_new_tokens=answering.max_new_tokens,
                        stop=answering.stops,
                        include_stop=answering.includes_stop,
                        seed=answering.seed(index),
                        logprobs=logprobs,
                        top_logprobs=top_logprobs,
                        adapter=adapter,
                    )
                except QueueFullError:
                    if not waiting:  # it is full of others' requests
                        raise
                    yield _result(*waiting.popleft())
            cancelled.callback(stream.cancel)
            waiting.append((number, index, stream))
        while waiting:
            yield _result(*waiting.popleft())


def _samples(prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, int]]:
    for prompt in prompts:
        for index in range(prompt.n):
            yield prompt, index


def _result(number: int, index: int, stream: Stream) -> Completion:
    """The completion of a request, with the number of its prompt.

    Raises:
      SamplingError: with that number, too.
    """
    try:
        return dataclasses.replace(stream.wait(), prompt=number, index=index)
    except SamplingError as error:
        raise type(error).of(f"prompt {number}", error.after) from error
