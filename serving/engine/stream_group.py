"""Several samples of one prompt: their streams, and the best of them."""

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from jaxshare.argument_checks import as_timeout
from jaxshare.seeds import stream_seed
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.engine.stream import Stream


class StreamGroup:
    """The streams of several samples of one prompt, whose tokens are stored once.

        group = engine.submit("Name a colour.", Sampler(temperature=1.0), n=4)
        for completion in group.wait():           # or, in an event loop, `await group`
            print(completion.index, completion.text)

    Attributes:
      streams: of the samples, in their order; each may be read and cancelled by itself.
    """

    def __init__(self, streams: Sequence[Stream], num_kept: int | None):
        """`num_kept`: of the best samples to give; None gives all in their order."""
        self.streams, self._num_kept = tuple(streams), num_kept

    def cancel(self) -> None:
        """Ends all samples that have not finished; their outputs are what was sampled so far."""
        for stream in self.streams:
            stream.cancel()

    def wait(self, timeout: float | None = None) -> list[Completion]:
        """Blocks the calling thread until all samples have finished.

        Returns:
          Their completions in the order of the samples; with `best_of` the n best, the best first
            (`likeliest`). `Completion.index` is the number of the sample.

        Raises:
          TimeoutError: they have not finished within `timeout` seconds; they go on.
          EngineError: the error that ended the first sample that has one.
        """
        seconds = as_timeout("timeout", timeout)
        end = None if seconds is None else time.monotonic() + seconds
        return self._kept(
            [
                stream.wait(None if end is None else max(end - time.monotonic(), 0.0))
                for stream in self.streams
            ]
        )

    def _kept(self, completions: list[Completion]) -> list[Completion]:
        return completions if self._num_kept is None else likeliest(completions, self._num_kept)

    async def _finished(self) -> list[Completion]:
        return self._kept([await stream for stream in self.streams])

    def __await__(self) -> Generator[Any, None, list[Completion]]:
        return self._finished().__await__()


def likeliest(completions: Sequence[Completion], count: int) -> list[Completion]:
    """The completions of one prompt with the largest `logprob`, that of all their tokens together, the
    best first and the first of equals."""
    return sorted(completions, key=lambda c: (-(c.logprob or 0.0), c.index))[:count]


def start_group(
    start: Callable[[int, int | None], Stream],
    seed: int | None,
    num_sampled: int,
    num_kept: int | None,
) -> StreamGroup:
    """Starts the samples of a prompt; where one is refused, those before it are cancelled.

    Args:
      start: submits the sample of a number with a seed.
      seed: sample i has the stream `stream_seed(seed, 0, i)`, as from `generate`; None leaves each to
        the engine, as requests one after the other.
      num_sampled, num_kept: the number of samples, and see `StreamGroup`.
    """
    with contextlib.ExitStack() as refused:
        streams = []
        for index in range(num_sampled):
            streams.append(start(index, None if seed is None else stream_seed(seed, 0, index)))
            refused.callback(streams[-1].cancel)
        refused.pop_all()
    return StreamGroup(streams, num_kept)
