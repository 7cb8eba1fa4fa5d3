"""An engine for many rows runs a smaller program while few are in use."""

import logging
import threading

import pytest

from jaxshare import Sampler
from jaxshare.serving import Workers
from jaxshare.serving.engine import Engine, decode_rows, row_programs
from jaxshare.serving.engine.row_programs import RowPrograms, row_counts
from tests.helpers import one_layer
from tests.serving.engine.test_engine import MODEL, WARM, alone
from tests.serving.engine.test_warm_up import PROMPT, counted_compiles

ROWS, FEW = 16, 4


@pytest.fixture
def dispatched(monkeypatch):
    """The rows of each dispatch's program, and the passes that it was to run at most."""
    log, decode = [], decode_rows.decode
    monkeypatch.setattr(
        decode_rows,
        "decode",
        lambda *given, rows, passes, **more: (
            log.append((rows, passes)) or decode(*given, rows=rows, passes=passes, **more)
        ),
    )
    return log


@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        (1, (1,)),
        (4, (4,)),
        (5, (4, 5)),
        (10, (4, 10)),
        (16, (4, 8, 16)),
        (32, (4, 8, 16, 32)),
        (48, (8, 16, 32, 48)),
        (64, (8, 16, 32, 64)),
        (512, (64, 128, 256, 512)),
    ],
)
def test_programs_have_powers_of_two_rows_from_an_eighth_or_four_on(rows, counts):
    assert row_counts(rows) == counts


def test_the_smallest_program_that_is_there_and_has_the_rows_runs():
    programs = RowPrograms(64, fewer=True)
    assert programs.choose("sizes", 3) == 64
    programs.warm_up()
    assert programs.choose("sizes", 8) == 8
    assert programs.choose("sizes", 9) == 64
    programs.add("sizes", 32)
    assert [programs.choose("sizes", used) for used in (1, 9, 32, 33, 64)] == [8, 32, 32, 64, 64]
    # Of other sizes it was not compiled.
    assert [programs.choose("larger", used) for used in (1, 9)] == [8, 64]
    assert programs.there("sizes") == [8, 32, 64] and programs.there("larger") == [8, 64]
    alone = RowPrograms(64, fewer=False)
    alone.warm_up()
    assert alone.choose("sizes", 1) == 64 and alone.take_wanted() is None


def test_a_program_is_wanted_once_after_many_dispatches_that_it_would_have_served():
    programs = RowPrograms(64, fewer=True)
    programs.warm_up()
    for _ in range(31):
        programs.choose("sizes", 12)
        programs.choose("sizes", 3)
        programs.choose("sizes", 60)
        programs.choose("sizes", 30)
    assert programs.take_wanted() is None
    programs.choose("sizes", 12)
    assert programs.take_wanted() == 16
    for _ in range(100):
        programs.choose("sizes", 12)
    assert programs.take_wanted() is None
    # Of sizes that have changed other dispatches count.
    for _ in range(31):
        programs.choose("larger", 30)
    assert programs.take_wanted() is None
    programs.choose("larger", 17)
    assert programs.take_wanted() == 32


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_is_compiled_beside_the_loop_and_texts_stay_the_same(
    dispatched, monkeypatch, caplog, fails
):
    monkeypatch.setattr(row_programs, "_MISSED", 3)
    compile_decode, threads = decode_rows.compile_decode, list[str]()

    def compile_or_fail(*args, **how):
        threads.append(threading.current_thread().name)
        if fails:
            raise MemoryError("none left")
        compile_decode(*args, **how)

    monkeypatch.setattr(decode_rows, "compile_decode", compile_or_fail)
    prompt = [5, 7, 11]
    with Engine(MODEL, max_rows=ROWS, passes=4) as engine, caplog.at_level(logging.INFO):
        for _ in range(2):
            assert (
                list(engine.submit(prompt, max_new_tokens=40).wait().tokens)
                == alone((5, 7, 11), 40)[0]
            )
            for thread in threading.enumerate():
                if thread.name == "jaxshare-compiler":
                    thread.join()
        streams = [engine.submit([5, 7, 11 + n], max_new_tokens=12) for n in range(6)]
        texts = [list(stream.wait().tokens) for stream in streams]
        last = engine.submit(prompt, max_new_tokens=12).wait()
    assert texts == [alone((5, 7, 11 + n), 12)[0] for n in range(6)]
    assert list(last.tokens) == texts[0]
    assert threads and {*threads} == {"jaxshare-compiler"}
    assert dispatched[0][0] == ROWS and dispatched[-1][0] == (ROWS if fails else FEW)
    assert ("could not compile the decode loop for 4 rows" in caplog.text) is fails
    assert ("compiled the decode loop for 4 rows: " in caplog.text) is not fails


@pytest.mark.slow
def test_without_a_warm_up_no_request_waits_for_a_second_program(dispatched):
    with Engine(MODEL, max_rows=ROWS, passes=4) as engine:
        engine.submit([5, 7, 11], Sampler(), max_new_tokens=20).wait()
    assert {rows for rows, _ in dispatched} == {ROWS}


@pytest.mark.slow
def test_texts_are_the_same_from_either_program(dispatched):
    prompts = [[5, 7, 11 + n] for n in range(9)]
    with Engine(MODEL, max_rows=ROWS, passes=4) as engine:
        engine.warm_up()
        dispatched.clear()
        first = engine.submit(prompts[0], Sampler(), max_new_tokens=20).wait()
        assert {rows for rows, _ in dispatched} == {FEW}
        dispatched.clear()
        calls = [engine.submit(p, Sampler(), max_new_tokens=8 + n) for n, p in enumerate(prompts)]
        texts = [call.wait().tokens for call in calls]
        assert ROWS in {rows for rows, _ in dispatched}
        drawn = [engine.submit(p, WARM, seed=3, max_new_tokens=12) for p in prompts]
        drawn = [call.wait().tokens for call in drawn]
        dispatched.clear()
        again = engine.submit(prompts[8], WARM, seed=3, max_new_tokens=12).wait().tokens
        assert {rows for rows, _ in dispatched} == {FEW}
    assert list(first.tokens) == alone(tuple(prompts[0]), 20)[0]
    for n, (prompt, tokens) in enumerate(zip(prompts, texts, strict=True)):
        assert list(tokens) == alone(tuple(prompt), 8 + n)[0]
    assert again == drawn[8]


@pytest.mark.slow
def test_after_a_warm_up_it_is_compiled_and_a_session_writes_what_it_writes_alone(dispatched):
    settings = dict(names=("Alice", "Bob"), budget=24, seed=1)
    with Workers(one_layer(), PROMPT, **settings) as session:
        expected = session.run().steps
    with Engine(one_layer(), max_rows=ROWS) as engine:
        engine.warm_up()
        assert {rows for rows, _ in dispatched} == {ROWS, FEW}
        dispatched.clear()
        with counted_compiles() as compiled:
            engine.submit(PROMPT, WARM, max_new_tokens=12).wait()
            assert "jit(_decode)" not in compiled
        with Workers(one_layer(), PROMPT, **settings, engine=engine) as session:
            assert session.run().steps == expected
    assert {rows for rows, _ in dispatched} == {FEW}
