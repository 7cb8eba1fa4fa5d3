"""Public functions and classes with wrong types and extreme values: they work, or refuse by name."""

import math

import numpy as np
import pytest

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, ModelConfig
from jaxshare.serving import Prefixes, agents, pass_at_k
from jaxshare.serving.engine import Hotspot
from jaxshare.serving.evaluation import wilson
from tests.drill import argument_targets
from tests.drill.argument_targets import TARGETS, Target, attack, running, wrong
from tests.serving.engine.test_engine import MODEL

ENDLESS = range(10**12)
QUICK = ("Sampler", "Branch", "pass_at_k", "Engine.submit", "Hotspot", "llm", "Budget", "wilson")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Sampler(forbidden=ENDLESS), ValueError, "forbidden has more than 4,194,304"),
        (lambda: pass_at_k(1, 10**40, 2**31 - 1), ValueError, "n is 1000.*at most 100000"),
        (lambda: pass_at_k(None, 4, 2), TypeError, "correct is None; it must be an integer"),
        (lambda: wilson(None, 4), TypeError, "accuracy is None; it must be a number"),
        (lambda: wilson(0.5, 0), ValueError, "problems is 0; it must be at least 1"),
        (lambda: wilson(2.0, 4), ValueError, r"accuracy is 2\.0; it must be at most 1"),
        (lambda: Hotspot(decay="x"), TypeError, "decay is 'x'; it must be a number"),
        (lambda: Hotspot(top_k=np.ones(2)), TypeError, "top_k is array.*; it must be an integer"),
        (lambda: agents.Budget(calls="7"), TypeError, "calls of a budget is '7'; it must be a nu"),
        (lambda: agents.Budget(seconds=math.nan), ValueError, "seconds of a budget is nan"),
        (lambda: agents.llm(5), TypeError, "content is 5; it must be a list"),
        (
            lambda: agents.llm("a", stop=5),
            TypeError,
            "stop is 5; it must be a text or a list of texts",
        ),
        (lambda: agents.llm("a", stop=np.ones((2, 2))), ValueError, "stop is array.*; give texts"),
        (lambda: agents.llm("a", stop=ENDLESS), ValueError, "stop has more than"),
        (lambda: agents.llm("a", retries=None), TypeError, "retries is None; it must be an int"),
        (lambda: agents.llm("a", top_k=[7]), TypeError, r"top_k is \[7\]; it must be an integer"),
        (lambda: agents.llm("a", max_new_tokens={}), TypeError, r"max_new_tokens is \{\}; it must"),
        (lambda: agents.llm("a", timeout=1j), TypeError, "timeout is 1j; it must be a number"),
        (lambda: agents.llm("a", rounds=np.ones((2, 2))), TypeError, "rounds is array.*; it must"),
        (
            lambda: Sampler(forbidden_first={"role": "user"}),
            TypeError,
            "a token of forbidden_first is 'role'; it must be an integer",
        ),
        (lambda: Prefixes(MODEL, max_tokens={}), TypeError, "max_tokens is .*; it must be an int"),
        (lambda: Prefixes(MODEL, max_kv_bytes="9"), TypeError, "max_kv_bytes is '9'; it must be"),
        (
            lambda: ModelConfig.from_json(EMBEDDED).for_context(None),
            TypeError,
            "positions is None; it must be an integer",
        ),
    ],
)
def test_what_once_hung_or_named_no_argument(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_store_of_prefixes_names_what_is_no_text():
    store = Prefixes(MODEL, max_tokens=64)
    for text, words in (
        (14, "the prompt is 14; it must be a list"),
        (["", 1], "a token of the prompt is ''; it must be an integer"),
        ([2**63], "a token of the prompt is 9223372036854775808; it must be at most"),
        (ENDLESS, "the prompt has more than"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            store.add(text)


def test_an_engine_names_sizes_texts_and_times_that_are_none():
    for capacities, words in (
        (None, "capacities is None; it must be a list"),
        (["x"], "capacities is 'x'; it must be an integer"),
        ([-(2**31) - 1], "capacities is -2147483649; it must be at least 0"),
        (ENDLESS, "capacities has more than"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            running().lease(capacities)
    for options, words in (
        ({"stop": ENDLESS}, "stop has more than"),
        ({"resample": np.ones((2, 2))}, "resample is array"),
    ):
        with pytest.raises(ValueError, match=words):
            running().submit([5, 6], **options)
    stream = running().submit([5, 6], max_new_tokens=1)
    with pytest.raises(TypeError, match="timeout is 'x'; it must be a number"):
        stream.wait("x")
    assert stream.wait(2**64).tokens, "as long as for ever"


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TARGETS],
)
def test_whatever_is_given_is_taken_or_refused_by_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    count, found = attack(name, 0, 15)
    assert not found and count


def test_a_call_that_names_no_argument_or_ends_in_an_accident_is_found(monkeypatch):
    def bad(number):
        if number == 1:
            raise ValueError("that is wrong")
        raise [KeyError, AttributeError, MemoryError][number]("number")

    monkeypatch.setitem(TARGETS, "bad", Target(lambda: bad))
    assert wrong("bad", {"number": 1}).startswith("an error that names no argument")
    assert wrong("bad", {"number": 2}).startswith("MemoryError")
    monkeypatch.setattr(argument_targets, "SECONDS", -1.0)
    monkeypatch.setitem(TARGETS, "bad", Target(lambda: lambda number: None))
    assert wrong("bad", {"number": 2}).startswith("it takes 0.0 seconds")
