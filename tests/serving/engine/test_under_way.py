"""Two dispatches under way: the next one is made before the results of the last are read, and tokens
are those of each request alone."""

import numpy as np
import pytest

from jaxshare import FinishReason, Sampler
from jaxshare.decoding.changes import Changes
from jaxshare.serving.engine import decode_rows, prefill
from tests.helpers import one_layer
from tests.serving.engine.stepped import small_pieces
from tests.serving.engine.test_engine import (
    LONG,
    MODEL,
    ROWS,
    Stepped,
    alone,
    check_memory,
    done,
    engine_of,
    lasting,
)

__all__ = ["small_pieces"]  # the fixture

PROMPT, COUNT = lasting(9, 40), 40


@pytest.fixture
def log(monkeypatch):
    """What the host did: "made" for a dispatch, "widened" for one that gave blocks under way more
    room, and the number of dispatches that were under way when the results of one were read."""
    log, dispatch, fetch = [], decode_rows.DecodeRows.dispatch, decode_rows.DecodeRows.fetch
    none = Changes.none

    def changes(*given, **more):
        made = none(*given, **more)
        if made.flags[1] and not made.flags[0]:
            log.append("widened")
        return made

    def dispatched(self, *given, **more):
        log.append("made")
        dispatch(self, *given, **more)

    def fetched(self):
        log.append(len(self.under_way))
        return fetch(self)

    monkeypatch.setattr(Changes, "none", changes)
    monkeypatch.setattr(decode_rows.DecodeRows, "dispatch", dispatched)
    monkeypatch.setattr(decode_rows.DecodeRows, "fetch", fetched)
    return log


def test_a_dispatch_is_made_before_the_results_of_the_last_are_read(log):
    engine = Stepped(passes=8)
    stream = engine.submit(PROMPT, max_new_tokens=COUNT)
    engine.settle()
    assert list(done(stream).tokens) == alone(PROMPT, COUNT)[0]
    seen = [each for each in log if each != "widened"]
    # Forty tokens in dispatches of eight. For two of them something might enter as this has; after the
    # last one there is nothing to go on with.
    assert seen == ["made", 1, "made", 1, "made", "made", 2, "made", 2, 1]
    check_memory(engine)


def test_passes_sample_before_the_results_of_the_prompt_are_read(log, monkeypatch):
    finite = prefill.FedPass.finite
    monkeypatch.setattr(prefill.FedPass, "finite", lambda self: log.append("read") or finite(self))
    prompts = [lasting(18, 8), lasting(40, 8, seed=1)]
    engine = Stepped(passes=8)
    for prompt in prompts:
        stream = engine.submit(prompt, max_new_tokens=8)
        engine.settle()
        assert list(done(stream).tokens) == alone(prompt, 8)[0]
    # The second one takes two passes, and nothing else runs beside the first of these.
    assert log == ["made", "read", 1, "read", "made", "read", 1]
    check_memory(engine)


@pytest.mark.parametrize("passes", [1, 5])
def test_blocks_get_more_room_while_a_dispatch_is_under_way(log, passes):
    engine = Stepped(passes=passes)
    streams = [engine.submit([*PROMPT[:n], 7], max_new_tokens=60) for n in (3, 5, 9)]
    engine.settle()
    for n, stream in zip((3, 5, 9), streams, strict=True):
        tokens, reason = alone([*PROMPT[:n], 7], 60)
        assert (list(done(stream).tokens), done(stream).finish_reason) == (tokens, reason)
    assert "widened" in log and 2 in log
    check_memory(engine)


def test_a_block_that_cannot_grow_in_place_goes_on_in_another_once_all_is_read(log):
    """Two rows whose blocks are neighbours: the first one is full while a dispatch is under way."""
    engine = Stepped(passes=6)
    prompts = [lasting(9, 60, seed) for seed in (1, 2)]
    streams = [engine.submit(prompt, max_new_tokens=60) for prompt in prompts]
    engine.settle()
    for prompt, stream in zip(prompts, streams, strict=True):
        assert list(done(stream).tokens) == alone(prompt, 60)[0]
    assert 2 in log
    check_memory(engine)


def test_what_waits_for_a_row_enters_when_one_ends(log):
    """Rows that end unforeseen: the dispatch that was made meanwhile runs no pass."""
    engine = Stepped(passes=4)
    prompts = [[*lasting(6, 3, seed), seed % 31] for seed in (0, 1, 18, 59, 64, 69, 102, 103)]
    assert len(prompts) == 2 * ROWS
    for tokens, reason in (alone(prompt, 40) for prompt in prompts):
        assert reason is FinishReason.STOP and len(tokens) > 8
    streams = [engine.submit(prompt, max_new_tokens=40) for prompt in prompts]
    ran, fetch = [], engine._scheduler.decode_rows.fetch

    def fetched():
        result, rows = fetch()
        ended = any(result.reasons[row.index] != FinishReason.RUNNING for row in rows)
        ran.append((len(engine._scheduler.queue) > 0, ended, result.passes))
        return result, rows

    engine._scheduler.decode_rows.fetch = fetched
    engine.settle()
    for prompt, stream in zip(prompts, streams, strict=True):
        assert list(done(stream).tokens) == alone(prompt, 40)[0]
        assert done(stream).finish_reason is FinishReason.STOP
    assert 2 in log
    assert any(waits and not passes for waits, _, passes in ran)
    check_memory(engine)


def test_a_stop_text_ends_a_request_whose_row_has_gone_on_meanwhile(log):
    model = one_layer()
    prompt = "What is 12+7?"
    sampler = Sampler(forbidden=tuple(model.generation.stop_tokens))
    with engine_of(model, 3) as engine:
        whole, beside = (engine.submit(text, sampler, max_new_tokens=50) for text in (prompt, "3"))
        text, other = whole.wait().text, beside.wait()
        stop = next(text[i : i + 3] for i in range(12, 40) if text.index(text[i : i + 3]) == i)
        del log[:]
        cut = engine.submit(prompt, sampler, stop=[stop], max_new_tokens=50)
        again = engine.submit("3", sampler, max_new_tokens=50)
        assert cut.wait().text == text[: text.index(stop)] and len(cut.wait().tokens) < 50
        assert cut.wait().finish_reason is FinishReason.STOP_TEXT
        assert again.wait().tokens == other.tokens
        assert 2 in log
        engine.drain()
        check_memory(engine)


def test_distributions_are_kept_of_dispatches_that_another_one_follows(log):
    engine = Stepped(passes=4, **LONG)
    sampler = Sampler(temperature=0.7)
    first = engine.submit(PROMPT, sampler, max_new_tokens=30, seed=1, resample="stepwise")
    engine.settle()
    assert 2 in log
    del log[:]
    second = engine.submit(PROMPT, sampler, max_new_tokens=30, seed=1, resample="stepwise")
    engine.settle()
    assert done(second).tokens == done(first).tokens
    assert done(second).replayed_tokens == len(done(first).tokens) and "made" not in log
    plain = Stepped(passes=4)
    third = plain.submit(PROMPT, sampler, max_new_tokens=30, seed=1)
    plain.settle()
    assert done(third).tokens == done(first).tokens


def begun(engine: Stepped):
    """A request with a dispatch under way after the step."""
    stream = engine.submit(PROMPT, max_new_tokens=COUNT)
    while not engine._scheduler.decode_rows.under_way:
        engine.step()
    return stream


@pytest.mark.parametrize("how", ["snapshot", "save", "cancel"])
def test_all_is_read_before_memory_is_used_otherwise(how, tmp_path):
    engine = Stepped(passes=4)
    stream, rows = begun(engine), engine._scheduler.decode_rows
    (row,), before = engine._scheduler.live, len(engine._scheduler.live[0].request.output)
    if how == "cancel":
        stream.cancel()
        engine.settle()
        assert done(stream).finish_reason is FinishReason.CANCELLED
        tokens = list(done(stream).tokens)
        assert tokens == alone(PROMPT, COUNT)[0][: len(tokens)] and len(tokens) < COUNT
    else:
        engine.snapshot() if how == "snapshot" else engine.save(tmp_path)
        assert not rows.under_way and len(row.request.output) == before + 4
        check_memory(engine)
        engine.settle()
        assert list(done(stream).tokens) == alone(PROMPT, COUNT)[0]
    assert not rows.under_way
    check_memory(engine)


def test_a_higher_priority_enters_as_soon_as_what_is_under_way_is_read():
    engine = Stepped(passes=4, max_rows=1)
    low = begun(engine)
    high = engine.submit(PROMPT[::-1], max_new_tokens=5, priority=1)
    engine.step()
    assert engine._scheduler.live[0].request.priority == 1
    engine.settle()
    assert list(done(low).tokens) == alone(PROMPT, COUNT)[0] and done(low).preemptions == 1
    assert list(done(high).tokens)[:5] == alone(PROMPT[::-1], 5)[0][:5]


def test_an_error_of_what_is_under_way_ends_the_requests_and_the_engine_goes_on(monkeypatch):
    """It comes up in the turn of something else, which is not what has failed."""
    engine = Stepped(passes=4)
    stream, rows = begun(engine), engine._scheduler.decode_rows

    def fails():
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(rows, "fetch", fails)
    engine.snapshot()
    monkeypatch.undo()
    engine.settle()
    with pytest.raises(RuntimeError, match="the device is gone"):
        done(stream)
    again = engine.submit(PROMPT, max_new_tokens=COUNT)
    engine.settle()
    assert list(done(again).tokens) == alone(PROMPT, COUNT)[0]
    check_memory(engine)


def test_seeds_of_many_requests_give_what_one_dispatch_at_a_time_gives():
    def texts(follows: bool) -> list[tuple[int, ...]]:
        with engine_of(MODEL, 3) as engine:
            engine._scheduler.follows = follows
            calls = [
                engine.submit(
                    np.random.default_rng(n).integers(3, 31, 4 + n).tolist(),
                    Sampler(temperature=0.9),
                    seed=n,
                    max_new_tokens=5 + 7 * n % 41,
                )
                for n in range(3 * ROWS)
            ]
            return [call.wait().tokens for call in calls]

    assert texts(True) == texts(False)
