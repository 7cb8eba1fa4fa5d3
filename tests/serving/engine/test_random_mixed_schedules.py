"""Sessions of workers, calls and branches of trees that come to one engine in any order, end, are
cancelled and preempted: every text is the one that it has alone, and all memory comes back.

The oracles compute every text afresh, without a cache: see `mixed_schedules`.
"""

import functools

import pytest

from jaxshare import FinishReason, Sampler
from jaxshare.serving.engine import prefill, running_request
from jaxshare.serving.kvcache import manager
from tests.serving.engine import mixed_schedules
from tests.serving.engine.mixed_schedules import BIAS, BRACE, FENCES, STOP, Call, Visit
from tests.serving.engine.stepped import Client


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Makes few tokens many pieces: chunks of a prompt, extents, tokens that the decode loop
    feeds."""
    monkeypatch.setattr(manager, "GROWTH", 16)
    monkeypatch.setattr(prefill, "ROWS", 4)
    monkeypatch.setattr(prefill, "WIDTH", 8)
    monkeypatch.setattr(running_request, "WIDTH", 2)


def visit(**settings) -> Visit:
    """A session of the shape of all that schedules have."""
    usual = {
        "problem": "1 + 1",
        "names": ("Alice", "Bob"),
        "layout": "combined",
        "sampler": Sampler(temperature=1.5, bias=BIAS, forbidden=FENCES),
        "seed": 0,
        "ask_every": 0,
        "stop_on": "never",
        "together": True,
        "passes_at_once": 16,
        "move": "rotate",
        "budget": 24,
        "max_workers": 3,
        "format": mixed_schedules.CHAT,
        "step_tokens": 16,
        "history_tokens": 450,
    }
    settings = {**usual, **settings}
    return Visit(settings, (), settings["budget"])


def test_a_call_ends_at_a_stop_token_in_the_row_of_a_session_that_has_ended_at_one():
    """Beside another session, with which steps are looked for at all."""
    engine = mixed_schedules.start_engine(mixed_schedules.make(0))
    first, second = visit(stop_on="eos", budget=9), visit(budget=24)
    streams = []
    for told in (first, second):
        client = Client(functools.partial(mixed_schedules.visit, engine, told))
        if told is second:
            ends = Sampler(temperature=1.5, bias={STOP: 7.0})
            options = {"sampler": ends, "max_new_tokens": 40}
            calls = [Call((5, 6, 7 + i), -1, 0, {**options, "seed": i}) for i in range(3)]
            streams = [engine.submit(call.tokens, **call.options) for call in calls]
        for _ in range(40):
            client.turn()
            engine.step()
        mixed_schedules.check_visit(0, told, client.result)
    done = [(call, [*call.tokens], s.wait(0)) for call, s in zip(calls, streams, strict=True)]
    mixed_schedules.check_calls(done)
    assert {found.finish_reason for _, _, found in done} == {FinishReason.STOP}
    assert max(len(found.tokens) for _, _, found in done) > 4, "none ran beside the session"
    mixed_schedules.check_baseline(engine)


@pytest.mark.parametrize("together", [False, True])
def test_answers_that_turn_out_to_be_none_cost_no_pass_and_change_no_order(together):
    """Of each worker alone or of all together, however many passes a dispatch has."""
    engine, none = mixed_schedules.start_engine(mixed_schedules.make(0)), 0
    braces = Sampler(temperature=1.5, bias={**BIAS, BRACE: 9.0}, forbidden=FENCES)
    for seed in range(6):
        told = visit(stop_on="answer", together=together, seed=seed, sampler=braces)
        client = Client(functools.partial(mixed_schedules.visit, engine, told))
        while not client.over:
            client.turn()
            engine.step()
        mixed_schedules.check_visit(seed, told, client.result)
        steps = [tokens for steps in client.result.written.values() for _, tokens in steps]
        none += sum(BRACE in tokens for tokens in steps[:-1])
    assert none > 6, "few answers turned out to be none"
