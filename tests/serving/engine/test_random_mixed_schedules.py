"""Sessions of workers, calls and branches of trees that come to one engine in any order, end, are
cancelled and preempted: every text is the one that it has alone, and all memory comes back.

The oracles compute every text afresh, without a cache: see `mixed_schedules`.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable

import jax.numpy as jnp
import pytest

from jaxshare import FinishReason, Sampler
from jaxshare.serving.engine import NotANumberError
from tests.helpers import mostly_slow
from tests.serving.engine import mixed_schedules
from tests.serving.engine.mixed_schedules import (
    BIAS,
    BRACE,
    STOP,
    UNWANTED,
    Call,
    Played,
    Schedule,
    Visit,
    model,
)
from tests.serving.engine.stepped import Client, small_pieces

__all__ = ["small_pieces"]  # the fixture


def visit(**settings) -> Visit:
    """A session of the shape of all that schedules have."""
    usual = {
        "problem": "1 + 1",
        "names": ("Alice", "Bob"),
        "layout": "combined",
        "sampler": Sampler(temperature=1.5, bias=BIAS, forbidden=UNWANTED),
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


def metric(played: Played, name: str, **labels: str) -> float:
    registry = played.engine.metrics.registry
    return registry.get_sample_value(f"jaxshare_{name}_total", labels) or 0.0


def run(seed: int, play: Callable[[Schedule], Played] = mixed_schedules.play) -> Counter[str]:
    """Runs and checks the schedule of a seed; returns what happened in it."""
    schedule = mixed_schedules.make(seed)
    try:
        played = play(schedule)
        mixed_schedules.check(played)
    except BaseException as error:
        error.add_note(f"seed {seed}: {schedule}")
        raise
    ends = [str(found.finish_reason) for _, found in played.visits]
    steps = [steps for _, found in played.visits for steps in found.written.values()]
    evicted = (metric(played, "evicted_tokens", to=to) for to in ("host", "nowhere"))
    return Counter(
        preemptions=int(metric(played, "preemptions")),
        evicted=int(sum(evicted)),
        replayed=int(metric(played, "tokens", how="replayed")),
        cancelled=sum(d.finish_reason is FinishReason.CANCELLED for _, _, d in played.calls),
        stopped=sum(done.finish_reason is FinishReason.STOP for _, _, done in played.calls),
        answers=ends.count("answer"),
        moved=sum(len(each) - 1 for each in steps),
        calls=len(played.calls),
        sessions=len(played.visits),
    )


KINDS_OF_EVENTS = 9


@pytest.mark.parametrize("seeds", mostly_slow([(5, 47), range(12)], 0), ids=["few", "a dozen"])
def test_texts_are_those_of_each_alone(seeds):
    """In schedules in which everything happens that can."""
    happened = sum(map(run, seeds), Counter())
    assert len(happened) == KINDS_OF_EVENTS, happened


@pytest.mark.slow
@pytest.mark.parametrize("first", range(12, 312, 30))
def test_texts_are_those_of_each_alone_in_hundreds_of_schedules(first):
    happened = sum(map(run, range(first, first + 30)), Counter())
    assert len(happened) == KINDS_OF_EVENTS, happened


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(1000, 1001), range(1001, 1022)])
def test_texts_are_those_of_each_alone_in_threads(seeds):
    for seed in seeds:
        run(seed, mixed_schedules.play_in_threads)


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


@pytest.mark.parametrize("together", mostly_slow([False, True]))
def test_answers_that_turn_out_to_be_none_cost_no_pass_and_change_no_order(together):
    """Of each worker alone or of all together, however many passes a dispatch has."""
    engine, none = mixed_schedules.start_engine(mixed_schedules.make(0)), 0
    braces = Sampler(temperature=1.5, bias={**BIAS, BRACE: 9.0}, forbidden=UNWANTED)
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


def test_an_answer_ends_a_session_of_which_a_worker_is_paused():
    """Its workers end together; a paused one would have nothing to go on for."""
    engine, ends = mixed_schedules.start_engine(mixed_schedules.make(0)), []
    braces = Sampler(temperature=1.5, bias={**BIAS, BRACE: 10.0}, forbidden=UNWANTED)
    for seed in range(6):
        told = visit(stop_on="answer", seed=seed, sampler=braces)
        told = dataclasses.replace(told, acts=((2, "pause", "Bob"),))
        clients, _ = together(engine, [told], [])
        mixed_schedules.check_visit(seed, told, clients[0].result)
        ends.append(clients[0].result.finish_reason)
    assert FinishReason.ANSWER in ends


def test_a_worker_whose_answer_turns_out_to_be_none_goes_on_where_the_other_has_answered():
    """Its step is moved first; the session was over before that (found by a schedule)."""
    engine = mixed_schedules.start_engine(mixed_schedules.make(0))
    told = visit(
        problem="30 + 1",
        stop_on="answer",
        together=False,
        seed=5314035455698797280,
        sampler=Sampler(2.5, 40, bias=BIAS, forbidden=UNWANTED),
        ask_every=20,
        passes_at_once=3,
        budget=29,
    )
    clients, _ = together(engine, [told], [])
    found = clients[0].result
    mixed_schedules.check_visit(0, told, found)
    assert [step.worker for step in found.steps if step.ended] == ["Bob", "Alice", "Alice"]


@pytest.mark.slow
def test_a_step_that_has_just_opened_goes_on_where_anothers_answer_turns_out_to_be_none():
    """While the tokens that open it are fed, so that the last one sampled ended the step before."""
    engine, opening = mixed_schedules.start_engine(mixed_schedules.make(0)), 0
    format = dataclasses.replace(
        mixed_schedules.CHAT, step_header="{name} {step}, and on it goes with this:"
    )
    braces = Sampler(temperature=1.5, bias={**BIAS, BRACE: 8.0, STOP: -9.0}, forbidden=UNWANTED)
    for seed in (16, 17, 26):
        told = visit(
            names=mixed_schedules.NAMES[:3],
            stop_on="answer",
            budget=30,
            seed=seed,
            sampler=braces,
            format=format,
        )
        client = Client(functools.partial(mixed_schedules.visit, engine, told))
        while not client.over:
            client.turn()
            engine.step()
        mixed_schedules.check_visit(seed, told, client.result)
        steps = client.result.steps
        opening += sum(
            step.ended == other.began + 1
            for step in steps
            for other in steps
            if BRACE in step.tokens and step.worker != other.worker and other.number > 1
        )
    assert opening >= 3, "no step had just opened"


def together(engine, visits: list[Visit], calls: list[Call]) -> tuple[list, list]:
    """Runs sessions and calls in the same passes; the clients and the streams."""
    clients = [Client(functools.partial(mixed_schedules.visit, engine, told)) for told in visits]
    streams = []
    while not all(client.over for client in clients) or engine._requests:
        for client in clients:
            client.turn(raises=False)
        if not streams:
            streams = [engine.submit(call.tokens, **call.options) for call in calls]
        engine.step()
    return clients, streams


WARM = Sampler(temperature=1.5, bias=BIAS, forbidden=UNWANTED)
CALLS = [
    Call((5, 6, 7 + i), -1, 0, {"sampler": WARM, "seed": i, "max_new_tokens": 20}) for i in range(2)
]


def test_a_history_that_is_full_ends_its_session_and_changes_nothing_beside_it():
    engine = mixed_schedules.start_engine(mixed_schedules.make(0))
    full, other = visit(history_tokens=60, seed=3), visit(seed=4)
    clients, streams = together(engine, [full, other], CALLS)
    found = clients[0].result
    assert found.finish_reason is FinishReason.CACHE_FULL and found.lengths["history"] <= 60
    plain = mixed_schedules.PlainSession(model(), full.settings, mixed_schedules.holds_answer)
    plain.run(found.passes)
    assert sum(len(steps) for steps in found.written.values()) > 2
    for name in full.settings["names"]:
        both = [[t for _, step in w[name] for t in step] for w in (found.written, plain.written)]
        assert both[0] == both[1]
    mixed_schedules.check_visit(1, other, clients[1].result)
    done = [(c, [*c.tokens], s.wait(0)) for c, s in zip(CALLS, streams, strict=True)]
    mixed_schedules.check_calls(done)
    mixed_schedules.check_baseline(engine)


def test_logits_that_are_not_numbers_end_what_has_them_and_change_nothing_beside_it():
    """A token whose embedding is no number: of a call's prompt, and drawn by a worker."""
    lost = 42
    params = {"params": {**model().params["params"]}}
    embedding = params["params"]["embed"]["embedding"]
    params["params"]["embed"] = {"embedding": embedding.at[lost].set(jnp.nan)}
    broken = dataclasses.replace(model(), params=params)
    engine = mixed_schedules.start_engine(mixed_schedules.make(0), loaded=broken)
    safe = dataclasses.replace(WARM, forbidden=(*UNWANTED, lost))
    calls = [Call(c.tokens, -1, 0, {**c.options, "sampler": safe}) for c in CALLS]
    calls.insert(1, Call((5, 6, lost), -1, 0, calls[0].options))
    draws_it = visit(seed=3, sampler=dataclasses.replace(WARM, bias={lost: 1e6}))
    other = visit(seed=4, sampler=safe)
    clients, (first, failed, last) = together(engine, [draws_it, other], calls)
    with pytest.raises(NotANumberError, match="logits for request 1 are"):
        failed.wait(0)
    assert isinstance(clients[0].failure, NotANumberError)
    mixed_schedules.check_visit(1, other, clients[1].result)
    done = [(c, [*c.tokens], s.wait(0)) for c, s in ((calls[0], first), (calls[2], last))]
    mixed_schedules.check_calls(done)
    mixed_schedules.check_baseline(engine)
