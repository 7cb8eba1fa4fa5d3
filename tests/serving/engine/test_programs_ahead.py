"""Requests with options that none had before wait for a program of their own; others go on."""

import contextlib
import logging
import threading
import time

import pytest
from jax import monitoring

from jaxshare import FinishReason, Grammar, Sampler, register_logits_processor
from jaxshare.serving.engine import Engine, decode_rows, row_programs
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow, one_layer

MODEL = one_layer()
PROMPT, WARM = "1. 47 + 38", Sampler(temperature=1.1)
PATIENCE = 120


def _halved(logits, tokens, size, state):
    return logits * 0.5, state


register_logits_processor("halved", _halved, vocab_size=MODEL.config.vocab_size)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": 0, "maximum": 500},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
OPTIONS = {
    "counts": {"sampler": Sampler(1.1, frequency_penalty=0.7)},
    "grammar on the host": {"sampler": Sampler(1.1, grammar=Grammar.json_schema(SCHEMA))},
    "likeliest": {"top_logprobs": 3},
    "grammar": {"sampler": Sampler(1.1, grammar=Grammar.regex("[a-d]{3,8}"))},
    "texts": {"sampler": Sampler(1.1, no_repeat_ngram_size=2)},
    "bias": {"sampler": Sampler(1.1, bias=dict.fromkeys(range(10, 40), 0.5))},
    "words": {"sampler": Sampler(1.1, bad_words=((5, 6), (7, 8, 9)))},
    "stops": {"sampler": Sampler(1.1, stop_token_ids=tuple(range(50, 70)))},
    "processor": {"sampler": Sampler(1.1, processors=("halved",))},
    "processed": {"logprobs": "processed"},
    "both": {"logprobs": "both"},
}


def submit(engine, sampler=WARM, seed=5, **options):
    return engine.submit(PROMPT, sampler, max_new_tokens=16, seed=seed, **options)


@contextlib.contextmanager
def compiling_threads():
    """The names of the threads that compile the decode loop meanwhile."""
    names = []

    def listen(event, _, fun_name="", **__):
        if event == "/jax/core/compile/backend_compile_duration" and fun_name == "jit(_decode)":
            names.append(threading.current_thread().name)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def gate(monkeypatch):
    """An event that compiling ahead waits for."""
    opened, compile_decode = threading.Event(), decode_rows.compile_decode

    def wait_and_compile(*args, **options):
        assert opened.wait(PATIENCE)
        compile_decode(*args, **options)

    monkeypatch.setattr(decode_rows, "compile_decode", wait_and_compile)
    yield opened
    opened.set()


@pytest.fixture(scope="module")
def engine():
    with Engine(MODEL, max_rows=3) as engine:
        submit(engine).wait()
        yield engine


@pytest.fixture(scope="module")
def alone():
    """An engine that compiles in its own thread whatever comes next."""
    with Engine(MODEL, max_rows=1) as engine:
        engine._scheduler.ahead = None
        yield engine


def check_others_go_on(engine, gate, alone, options):
    expected, plain = submit(alone, **options).wait(), submit(alone, seed=6).wait()
    with compiling_threads() as threads:
        new = submit(engine, **options)
        assert submit(engine, seed=6).wait(PATIENCE).tokens == plain.tokens
        assert new._state.output is None and not new._state.chunks
        gate.set()
        output = new.wait(PATIENCE)
    assert output.tokens == expected.tokens
    assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert threads and {*threads} == {"jaxshare-compiler"}
    with compiling_threads() as threads:
        assert submit(engine, **options).wait(PATIENCE).tokens == expected.tokens
    assert not threads


@pytest.mark.parametrize("name", mostly_slow(OPTIONS))
def test_others_go_on_while_its_program_is_compiled(engine, gate, alone, name):
    """And its text is that which it has where nothing is compiled ahead."""
    check_others_go_on(engine, gate, alone, OPTIONS[name])


@pytest.mark.slow
def test_both_programs_of_an_engine_that_was_warmed_up_are_compiled(gate, alone):
    with Engine(MODEL, max_rows=9) as engine:
        engine.warm_up()
        check_others_go_on(engine, gate, alone, OPTIONS["counts"])
        with compiling_threads() as threads:
            streams = [submit(engine, seed=i, **OPTIONS["counts"]) for i in range(9)]
            for stream in streams:
                stream.wait(PATIENCE)
        assert {*threads} <= {"jaxshare-compiler"}


@pytest.mark.slow
def test_on_a_mesh(gate, alone):
    with Engine(MODEL.on(make_mesh(tensor=2)), max_rows=2) as engine:
        for _ in range(2):  # the second dispatch is of arrays that are placed on the mesh
            submit(engine).wait()
        check_others_go_on(engine, gate, alone, OPTIONS["texts"])


@pytest.mark.slow
def test_one_program_is_for_all_that_wait_and_others_come_after_it(gate, alone, caplog):
    """Requests that come while it is compiled, with other options again, get the next one."""
    names = "counts", "texts", "bias"
    with caplog.at_level(logging.INFO, "jaxshare.engine"), Engine(MODEL, max_rows=2) as engine:
        submit(engine).wait()
        engine._scheduler.ahead._rows.programs = slow = _Entered(engine)
        with compiling_threads() as threads:
            first = [submit(engine, **OPTIONS[names[0]])]
            assert slow.entered.wait(PATIENCE)
            first += [submit(engine, **OPTIONS[name]) for name in names[1:]]
            gate.set()
            texts = [stream.wait(PATIENCE).tokens for stream in first]
        assert threads == ["jaxshare-compiler"] * 2
        assert texts == [submit(alone, **OPTIONS[name]).wait().tokens for name in names]
    told = [r.getMessage() for r in caplog.records if "compil" in r.getMessage()]
    assert "compiling the decode loop for frequency_penalty; other requests go on" in told
    assert "compiling the decode loop for bias, no_repeat_ngram_size; other requests go on" in told


class _Entered:
    """The method `programs` of an engine's rows, with an event that is set when it is called."""

    def __init__(self, engine):
        self.entered, self._programs = threading.Event(), engine._scheduler.decode_rows.programs

    def __call__(self, *shapes):
        self.entered.set()
        return self._programs(*shapes)


def test_a_request_that_is_cancelled_while_it_waits_ends_at_once(gate):
    with Engine(MODEL, max_rows=2) as engine:
        submit(engine).wait()
        waiting = submit(engine, **OPTIONS["counts"])
        waiting.cancel()
        assert waiting.wait(PATIENCE).finish_reason is FinishReason.CANCELLED
        assert submit(engine, seed=6).wait(PATIENCE).tokens


def test_where_compiling_ahead_fails_the_loop_itself_compiles(monkeypatch, alone, caplog):
    def fail(*args, **options):
        raise RuntimeError("no memory for the compiler")

    monkeypatch.setattr(decode_rows, "compile_decode", fail)
    with Engine(MODEL, max_rows=2) as engine:
        submit(engine).wait()
        output = submit(engine, **OPTIONS["counts"]).wait(PATIENCE)
    assert output.tokens == submit(alone, **OPTIONS["counts"]).wait().tokens
    assert "could not compile the decode loop for frequency_penalty" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("rows", [6, 3])  # with a program for few rows, and without
def test_the_program_for_long_paths_is_there_before_any_needs_it(rows, caplog):
    """A dialogue of many turns lists a block or two for each; no turn waits for the compiler."""
    caplog.set_level(logging.INFO, "jaxshare.engine")
    tokens, turns = [*range(10, 40)], []
    with Engine(MODEL, max_rows=rows) as engine, Engine(MODEL, max_rows=1) as alone:
        engine.warm_up()
        with compiling_threads() as threads:
            for turn in range(12):
                done = engine.submit(tokens, WARM, max_new_tokens=6, seed=turn).wait(PATIENCE)
                turns.append((tokens, done.tokens))
                tokens = [*tokens, *done.tokens, 50 + turn, 51 + turn]
                while (job := engine._scheduler.ahead._job) and job.thread.is_alive():
                    job.thread.join()
        assert engine._scheduler.decode_rows.view.width > 8
        assert threads and {*threads} == {"jaxshare-compiler"}
        for turn, (prompt, found) in enumerate(turns):
            expected = alone.submit(prompt, WARM, max_new_tokens=6, seed=turn).wait(PATIENCE)
            assert expected.tokens == found
    assert "compiling the decode loop for 16 blocks of a row; other requests go on" in caplog.text


@pytest.mark.slow
def test_one_that_needs_another_program_waits_at_rest_for_one_that_is_compiled(
    gate, alone, monkeypatch
):
    monkeypatch.setattr(row_programs, "_MISSED", 2)
    options = OPTIONS["counts"]
    expected, steps = submit(alone, **options).wait(), list[int]()
    with Engine(MODEL, max_rows=9, passes=4) as engine:
        scheduler = engine._scheduler
        step = scheduler.step
        submit(engine).wait()
        assert scheduler.ahead and scheduler.ahead.compiling  # for fewer rows
        monkeypatch.setattr(scheduler, "step", lambda *given: steps.append(1) or step(*given))
        new = submit(engine, **options)
        time.sleep(0.5)
        assert new._state.output is None and len(steps) < 30
        gate.set()
        assert new.wait(PATIENCE).tokens == expected.tokens
