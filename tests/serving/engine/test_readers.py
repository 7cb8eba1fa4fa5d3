"""Readers of streams in event loops, which the engine's thread wakes."""

import asyncio
import threading

from jaxshare import FinishReason
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.engine.stream import Detokenizer, Stream, StreamState, TokenChunk


def state_and_stream() -> tuple[StreamState, Stream]:
    state = StreamState(Detokenizer(None, ()))
    return state, Stream(state, lambda: None)


async def read(stream: Stream) -> list[int]:
    return [token async for chunk in stream for token in chunk.tokens]


async def settled() -> None:
    """Lets all tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_all_readers_of_a_loop_are_woken_by_one_call_into_it():
    pairs = [state_and_stream() for _ in range(50)]

    async def main():
        loop, calls = asyncio.get_running_loop(), 0
        enter = loop.call_soon_threadsafe

        def counted(*arguments, **more):
            nonlocal calls
            calls += 1
            return enter(*arguments, **more)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        tasks = [asyncio.create_task(read(stream)) for _, stream in pairs]
        await settled()
        for step in range(3):
            # As in a dispatch, while the loop does not run.
            thread = threading.Thread(
                target=lambda step=step: [
                    state.put(TokenChunk((number, step), ""))
                    for number, (state, _) in enumerate(pairs)
                ]
            )
            thread.start()
            thread.join()
            await settled()
            assert calls == step + 1
        for number, (state, _) in enumerate(pairs):
            tokens = tuple(each for step in range(3) for each in (number, step))
            state.finish(Completion("", tokens, FinishReason.LENGTH))
        return await asyncio.gather(*tasks)

    found = asyncio.run(main())
    assert found == [[n, 0, n, 1, n, 2] for n in range(len(pairs))]


def test_a_loop_that_is_closed_keeps_no_reader_from_another_one():
    gone, _gone_stream = state_and_stream()
    there, stream = state_and_stream()

    async def wait(state):
        task = asyncio.create_task(state.wait_until(state.has_next))
        await settled()
        return task

    closed = asyncio.new_event_loop()
    task = closed.run_until_complete(wait(gone))
    gone.put(TokenChunk((1,), ""))  # is due when the loop is closed
    task.cancel()
    closed.run_until_complete(asyncio.gather(task, return_exceptions=True))
    second, _second_stream = state_and_stream()
    task = closed.run_until_complete(wait(second))
    task.cancel()
    closed.run_until_complete(asyncio.gather(task, return_exceptions=True))
    closed.close()
    second.put(TokenChunk((2,), ""))

    async def main():
        reader = asyncio.create_task(read(stream))
        await settled()
        there.put(TokenChunk((3,), ""))
        there.finish(Completion("", (3,), FinishReason.LENGTH))
        return await reader

    assert asyncio.run(main()) == [3]
