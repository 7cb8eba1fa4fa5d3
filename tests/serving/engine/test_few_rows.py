"""An engine for many rows runs a smaller program while few are in use."""

import pytest

from jaxshare import Sampler
from jaxshare.serving import Workers
from jaxshare.serving.engine import Engine, decode_rows
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
    ("rows", "size"), [(1, 1), (4, 4), (5, 4), (16, 4), (32, 4), (48, 8), (64, 8), (512, 64)]
)
def test_the_small_program_has_an_eighth_of_the_rows_and_four_at_least(rows, size):
    assert decode_rows.few_rows(rows) == size


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
