"""Logits processors of one's own, in the engine beside others, against NumPy on the host."""

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import FinishReason, Sampler, register_logits_processor
from jaxshare.decoding import loop
from jaxshare.serving import Branch, Workers, generate
from jaxshare.serving.engine import Engine, EngineError
from tests.helpers import mostly_slow, one_layer
from tests.serving.engine.test_engine import MODEL, ROWS, STOP, WARM, Stepped, alone, done
from tests.serving.engine.test_sampling_params import PROMPT, VOCAB, logits_after

SLOPE = np.linspace(-1, 1, VOCAB, dtype=np.float32)


def _memory(logits, tokens, size, state, *, strength):
    """Takes from each logit a part of what it was at the last tokens, and of the last token's."""
    count, before = state
    changed = logits - strength * before
    changed = changed.at[tokens[size - 1]].add(-strength * count)
    return changed, (count + 1, 0.5 * before + 0.5 * logits)


def _clip(logits, tokens, size, state):
    return jnp.where(size % 2 > 0, jnp.minimum(logits, 0.25) + SLOPE, logits), state


def _broken(logits, tokens, size, state, *, last):
    return jnp.where(size > last.astype(jnp.int32), jnp.nan, logits), state


register_logits_processor(
    "memory",
    _memory,
    state=(0.0, np.zeros(VOCAB, np.float32)),
    parameters={"strength": 0.6},
    vocab_size=VOCAB,
)
register_logits_processor("clip", _clip, vocab_size=VOCAB)
register_logits_processor("broken", _broken, parameters={"last": 9})


def greedy(prompt, params: Sampler, count: int) -> tuple[list[int], FinishReason]:
    """The greedy output by the same definitions in NumPy, a token at a time."""
    tokens, out, calls, before = list(prompt), [], 0, np.zeros(VOCAB)
    for _ in range(count):
        logits = logits_after(tuple(tokens)).copy()
        for token, value in params.bias.items():
            logits[token] += value
        for token in {*out}:
            logits[token] -= params.presence_penalty
        for name, given in params.processors:
            if name == "memory":
                strength, seen = dict(given)["strength"], logits
                logits = logits - strength * before
                logits[tokens[-1]] -= strength * calls
                calls, before = calls + 1, 0.5 * before + 0.5 * seen
            elif len(tokens) % 2:
                logits = np.minimum(logits, 0.25) + SLOPE
        best = np.sort(logits)[-2:]
        assert best[1] - best[0] > 1e-4, "a near tie proves nothing; choose another prompt"
        out.append(int(logits.argmax()))
        if out[-1] == STOP and not params.ignore_eos:
            return out, FinishReason.STOP
        tokens.append(out[-1])
    return out, FinishReason.LENGTH


SETTINGS = {
    "one": Sampler(processors=("memory",)),
    "of another strength": Sampler(processors={"memory": {"strength": 0.9}}, ignore_eos=True),
    "two": Sampler(processors=("memory", "clip"), ignore_eos=True),
    "two in the other order": Sampler(processors=("clip", "memory"), ignore_eos=True),
    "after other settings": Sampler(
        processors={"memory": {"strength": 0.3}}, presence_penalty=0.6, bias={7: 0.5}
    ),
}
NONE = Sampler()


@pytest.fixture(scope="module")
def engine():
    with Engine(MODEL, max_rows=ROWS, passes=7) as engine:
        yield engine


@pytest.mark.parametrize(
    "name", mostly_slow(dict.fromkeys(["two", "after other settings", *SETTINGS]))
)
def test_they_do_what_the_function_does_on_the_host(engine, name):
    """Beside requests without any, whose texts are what they always are."""
    params = SETTINGS[name]
    expected = greedy(PROMPT, params, 24)
    assert expected != greedy(PROMPT, NONE, 24), "it changes nothing"
    streams = [
        engine.submit(PROMPT, each, max_new_tokens=24) for each in (NONE, params, NONE, params)
    ]
    for each, stream in zip((NONE, params, NONE, params), streams, strict=True):
        output = stream.wait()
        assert (list(output.tokens), output.finish_reason) == greedy(PROMPT, each, 24)


def test_each_order_and_strength_gives_another_text():
    assert len({tuple(greedy(PROMPT, params, 24)[0]) for params in SETTINGS.values()}) == len(
        SETTINGS
    )


@pytest.mark.parametrize("on_engine", mostly_slow([True, False]))
def test_branches_of_one_run_have_processors_of_their_own(engine, on_engine):
    nodes = [Branch((n, n + 1), sampler=s) for n, s in enumerate(SETTINGS.values())]
    more = {"engine": engine} if on_engine else {}
    found = generate(MODEL, Branch(PROMPT, nodes), max_new_tokens=16, **more).completions
    for n, (params, completion) in enumerate(zip(SETTINGS.values(), found, strict=True)):
        expected = greedy((*PROMPT, n, n + 1), params, 16)
        assert (list(completion.tokens), completion.finish_reason) == expected


@pytest.mark.slow
def test_a_preempted_request_goes_on_with_its_state():
    """Another one of its kind has its row meanwhile, and with it the place of its state."""
    params = SETTINGS["two"]
    engine = Stepped(max_rows=1)
    low = engine.submit(PROMPT, params, max_new_tokens=40)
    while not low._state.chunks:
        engine.step()
    high = engine.submit((1, 4), SETTINGS["one"], max_new_tokens=6, priority=1)
    engine.settle()
    outputs = done(low), done(high)
    assert outputs[0].preemptions == 1 and len(outputs[0].tokens) > 8
    assert list(outputs[0].tokens) == greedy(PROMPT, params, 40)[0]
    assert list(outputs[1].tokens) == greedy((1, 4), SETTINGS["one"], 6)[0]


@pytest.mark.slow
def test_samples_are_the_same_whatever_runs_beside_them():
    params = Sampler(1.1, top_p=0.9, processors=("memory", "clip"))

    def texts(rows: int, others: int) -> list[tuple[int, ...]]:
        with Engine(MODEL, max_rows=rows, passes=3) as engine:
            beside = [engine.submit((3, n), WARM, max_new_tokens=9) for n in range(others)]
            streams = [engine.submit(PROMPT, params, seed=n, max_new_tokens=20) for n in range(3)]
            found = [stream.wait().tokens for stream in streams]
            assert all(stream.wait().tokens for stream in beside)
            return found

    assert texts(ROWS, 3) == texts(1, 0)


@pytest.mark.slow
def test_the_small_program_gives_the_same_texts():
    with Engine(MODEL, max_rows=16, passes=4) as engine:
        engine.warm_up()
        params = SETTINGS["two"]
        first = engine.submit(PROMPT, params, max_new_tokens=12)  # in the program of few rows
        assert list(first.wait().tokens) == greedy(PROMPT, params, 12)[0]
        streams = [engine.submit((*PROMPT, n), params, max_new_tokens=6 + n) for n in range(8)]
        for n, stream in enumerate(streams):
            assert list(stream.wait().tokens) == greedy((*PROMPT, n), params, 6 + n)[0]


def test_other_parameters_are_no_other_program(engine):
    def run(strength: float) -> int:
        params = Sampler(processors={"memory": {"strength": strength}, "clip": {}})
        output = engine.submit(PROMPT, params, max_new_tokens=8).wait()
        assert list(output.tokens) == greedy(PROMPT, params, 8)[0]
        return loop._decode._cache_size()

    assert run(0.1) == run(0.2)


def test_what_no_request_uses_is_not_in_the_program():
    with Engine(MODEL, max_rows=ROWS) as engine:
        engine.submit(PROMPT, NONE, max_new_tokens=4, logprobs=True).wait()
        state = engine._scheduler.decode_rows.state
        assert state is not None and state.processing is None and state.processed is None


def test_a_row_whose_processor_leaves_nothing_ends_with_an_error_alone(engine):
    bad = engine.submit(PROMPT, Sampler(processors=("broken",)), max_new_tokens=9)
    good = engine.submit(PROMPT, NONE, max_new_tokens=9)
    assert (list(good.wait().tokens), good.wait().finish_reason) == alone(PROMPT, 9)
    with pytest.raises(EngineError, match="are not numbers after 10 tokens"):
        bad.wait()


@pytest.mark.slow
def test_workers_write_with_processors_what_they_write_on_an_engine(tmp_path):
    """And what they write on after a save."""
    problem, more = "1. 47 + 38\n2. 12 * 3", {"names": ("Alice", "Bob"), "budget": 24, "seed": 1}
    params = Sampler(0.7, processors={"flatter": {"factor": 0.8}})
    with Workers(one_layer(), problem, sampler=Sampler(0.7), **more) as session:
        without = session.run().steps
    with Workers(one_layer(), problem, sampler=params, **more) as session:
        for _ in session.stream(9):
            pass
        session.save(tmp_path, wait=True)
        steps = session.run().steps
    assert steps != without
    with Workers.restore(one_layer(), tmp_path) as session:
        assert session.run().steps == steps
    with Engine(one_layer()) as engine:
        other = engine.submit(problem, Sampler(1.0, processors=("flatter",)), max_new_tokens=60)
        with Workers(one_layer(), problem, sampler=params, engine=engine, **more) as session:
            assert session.run().steps == steps
        other.wait()


def _flatter(logits, tokens, size, state, *, factor):
    return logits * factor**state, state % 3.0 + 1.0


register_logits_processor("flatter", _flatter, state=1.0, parameters={"factor": 0.9})


@pytest.mark.parametrize(
    ("processors", "words"),
    [
        (("nobody's",), r"processors names \"nobody's\", which is not registered \(.*memory, clip"),
        (("clip", "clip"), "processors names 'clip' twice; name each once"),
        ({"memory": {"power": 2}}, "gives memory the parameter 'power'; it has strength"),
        ({"clip": {"power": 2}}, "gives clip the parameter 'power'; it has none"),
        ({"memory": {"strength": "much"}}, "strength of memory is 'much'; it must be a number"),
        ({"memory": {"strength": np.inf}}, "strength of memory is inf; it must be finite"),
        ("memory", "processors is 'memory'; it must be a list"),
        ((7,), "processors is 7; it must be a list"),
        (7, "processors is 7; it must be a list"),
    ],
)
def test_what_is_not_registered_is_refused(processors, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Sampler(processors=processors)


@pytest.mark.parametrize(
    ("function", "more", "words"),
    [
        (lambda logits, *rest: logits, {}, "it must return a pair: logits and state"),
        (lambda x, t, n, s: (x[:-1], s), {}, r"returns logits of the form float32\[255\]"),
        (lambda x, t, n, s: (x.astype(jnp.bfloat16), s), {}, r"logits of the form bfloat16\[256\]"),
        (
            lambda x, t, n, s: (x, x),
            {},
            r"returns state of the form float32\[256\]; it must be None",
        ),
        (
            lambda x, t, n, s: (x, s[:1]),
            {"state": [1, 2]},
            r"state of the form \[int32\[\]\]; it must",
        ),
        (lambda x, t, n, s: (np.asarray(x), s), {}, "cannot be traced for a vocabulary of 256"),
        (lambda x: (x, None), {}, r"cannot be traced .*TypeError"),
        (5, {}, "function is 5; it must be a function"),
        (_clip, {"state": "text"}, "state is 'text'; it must be a pytree of arrays"),
        (_clip, {"parameters": ["a"]}, "parameters is .*; it must be a dict of defaults by name"),
        (_clip, {"parameters": {"a b": 1}}, "it must be a dict of defaults by name"),
        (_clip, {"parameters": {"a": None}}, "the default of a is None; it must be a number"),
        (_clip, {"vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
    ],
)
def test_functions_that_cannot_serve_are_refused_when_they_are_registered(function, more, words):
    with pytest.raises((ValueError, TypeError), match=words):
        register_logits_processor("refused", function, **more)
    with pytest.raises(ValueError, match="'refused', which is not registered"):
        Sampler(processors=("refused",))


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="name is 'clip', which a logits processor has already"):
        register_logits_processor("clip", _clip, vocab_size=VOCAB)
    with pytest.raises(TypeError, match="name is ''; it must be a text that is not empty"):
        register_logits_processor("", _clip)


@pytest.mark.parametrize("submit", [False, True])
def test_a_processor_for_another_vocabulary_is_refused_before_any_work(engine, submit):
    wide = functools.partial(_clip_of, np.ones(40, np.float32))
    name = f"of 40 {submit}"
    register_logits_processor(name, wide, vocab_size=40)
    words = re.escape(f"the logits processor {name!r} cannot be traced for a vocabulary of 31")
    with pytest.raises(ValueError, match=words):
        if submit:
            engine.submit(PROMPT, Sampler(processors=(name,)))
        else:
            generate(MODEL, PROMPT, sampler=Sampler(processors=(name,)))


def _clip_of(table, logits, tokens, size, state):
    return logits + table, state


def test_the_logits_cache_refuses_them_by_name():
    with (
        Engine(MODEL, max_rows=ROWS, logits_cache=10**5) as engine,
        pytest.raises(ValueError, match="processors cannot be had with resample"),
    ):
        engine.submit(PROMPT, SETTINGS["one"], resample="stepwise")
