"""Adapters by request: each text is the one of the merged weights, whatever runs beside it; what is
cached is of one adapter; adapters come and go while requests run, and nothing is compiled for them."""

import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from jaxshare import Sampler, models
from jaxshare.compile_time import compile_seconds
from jaxshare.models import AdapterError, Generation, LoadedModel
from jaxshare.models.layers import Decoder
from jaxshare.serving import Workers
from jaxshare.serving.branches import Prefixes, generate
from jaxshare.serving.checkpoints import SaveError
from jaxshare.serving.engine import ClosedError, Engine, EngineError
from jaxshare.sharding import make_mesh
from tests.helpers import init, one_layer, padded
from tests.models.test_adapters import random_adapter
from tests.serving.engine.stepped import small_pieces, use_always
from tests.serving.engine.test_engine import (
    CONFIG,
    LENGTHS,
    MOST_PASSES,
    ROWS,
    SIZE,
    STOP,
    check_memory,
    done,
)

__all__ = ["small_pieces"]  # the fixture

MODEL = LoadedModel(CONFIG, init(CONFIG), None, Generation(stop_tokens=(STOP,)))
ADAPTERS = {
    "a": random_adapter(CONFIG, 3, 1),
    "b": random_adapter(CONFIG, 1, 2, ("q", "down")),
    "c": random_adapter(CONFIG, 4, 3, ("v", "up")),
}
SERVED = MODEL.with_adapters({name: ADAPTERS[name] for name in "ab"}, max_adapters=3, max_rank=4)
_causal = jax.jit(lambda params, tokens: Decoder(CONFIG).apply(params, tokens, method="causal"))


@functools.cache
def weights(name):
    """The parameters with an adapter merged into them."""
    return models.merged(MODEL.params, ADAPTERS[name], CONFIG) if name else MODEL.params


@functools.cache
def text(name, prompt, count=12):
    """The greedy output of the merged weights by plain causal attention."""
    tokens = [*prompt]
    while len(tokens) < len(prompt) + count and tokens[-1] != STOP:
        row = padded(tokens, LENGTHS)
        logits = np.asarray(_causal(weights(name), row))[0, len(tokens) - 1]
        tokens.append(int(logits.argmax()))
    return tuple(tokens[len(prompt) :])


class SteppedWithAdapters(Engine):
    """An engine whose steps the test runs itself, of the model with adapters."""

    def __init__(self, model=SERVED, tokens=512, **more):
        super().__init__(
            model, kv_bytes=tokens * SIZE, **{"max_rows": ROWS, "passes": MOST_PASSES, **more}
        )
        self._scheduler.passes = 4
        use_always(self)
        self._thread = threading.current_thread()

    def step(self):
        busy = self._step()
        self._thread = threading.current_thread()
        return busy

    def settle(self):
        while self.step():
            pass


def differing(size, seed=0):
    """A prompt whose outputs are different with each adapter, and none of which stops."""
    rng = np.random.default_rng(seed)
    while True:
        prompt = tuple(rng.integers(3, 31, size).tolist())
        found = [text(name, prompt) for name in (None, *ADAPTERS)]
        if len({*found}) == len(found) and all(STOP not in each for each in found):
            return prompt


SHORT, LONG = differing(21), differing(90, 1)


def test_a_mixed_batch_has_the_texts_of_merged_weights():
    engine = SteppedWithAdapters()
    asked = [(name, prompt) for prompt in (SHORT, LONG) for name in (None, "a", "b", "a")]
    streams = [engine.submit(prompt, adapter=name, max_new_tokens=12) for name, prompt in asked]
    engine.settle()
    for stream, (name, prompt) in zip(streams, asked, strict=True):
        assert done(stream).tokens == text(name, prompt), name
    check_memory(engine)


def test_what_is_cached_is_of_one_adapter():
    engine = SteppedWithAdapters()
    reused = []
    for name in (None, "a", "b", "a", None, "b"):
        stream = engine.submit(LONG, adapter=name, max_new_tokens=12)
        engine.settle()
        assert done(stream).tokens == text(name, LONG)
        reused.append(done(stream).reused_tokens)
    assert reused[:3] == [0, 0, 0] and all(count >= len(LONG) - 1 for count in reused[3:])
    check_memory(engine)


@pytest.mark.slow
def test_the_logits_cache_tells_adapters_apart():
    engine = SteppedWithAdapters(logits_cache=10**6, kept_logits=31)
    replayed = []
    for name in (None, "a", "b", "a", None):
        stream = engine.submit(
            SHORT, Sampler(0.7), adapter=name, max_new_tokens=12, seed=3, resample="stepwise"
        )
        engine.settle()
        alone = SteppedWithAdapters()
        same = alone.submit(SHORT, Sampler(0.7), adapter=name, max_new_tokens=12, seed=3)
        alone.settle()
        assert done(stream).tokens == done(same).tokens
        replayed.append(done(stream).replayed_tokens)
    assert replayed[:3] == [0, 0, 0] and replayed[3] and replayed[4]


def test_adapters_come_and_go_while_requests_run_and_nothing_is_compiled():
    # Another engine compiles for a schedule of the same shapes, and for one adapter of another rank.
    warm = SteppedWithAdapters()
    first = warm.submit(SHORT, adapter="b", max_new_tokens=12)
    warm.step()
    warm.step()
    warm.add_adapter("e", ADAPTERS["a"])
    warm.submit(SHORT, adapter="a", max_new_tokens=12)
    warm.settle()
    assert done(first).tokens == text("b", SHORT)
    warm.submit(SHORT, adapter="e", max_new_tokens=12)
    warm.settle()
    engine = SteppedWithAdapters()
    engine.submit(SHORT, adapter="a", max_new_tokens=12)
    engine.submit(LONG, max_new_tokens=12)
    engine.settle()
    for name in "bc":  # by the oracle, which is compiled too
        text(name, SHORT)
    compiled = compile_seconds()
    running = engine.submit(SHORT, adapter="b", max_new_tokens=12)
    engine.step()
    engine.step()
    engine.remove_adapter("b")
    assert [each.name for each in engine.adapters()] == ["a"]
    with pytest.raises(AdapterError, match="'b' is not loaded; loaded are: a"):
        engine.submit(SHORT, adapter="b")
    engine.add_adapter("c", ADAPTERS["c"])
    # The place of "b" is taken as long as its request runs.
    with pytest.raises(EngineError, match=r"all 3 places for adapters are taken \(loaded: a, c;"):
        engine.add_adapter("d", ADAPTERS["b"])
    other = engine.submit(SHORT, adapter="c", max_new_tokens=12)
    engine.settle()
    assert done(running).tokens == text("b", SHORT) and done(other).tokens == text("c", SHORT)
    engine.add_adapter("d", ADAPTERS["b"])
    again = engine.submit(SHORT, adapter="d", max_new_tokens=12)
    engine.settle()
    assert done(again).tokens == text("b", SHORT) and done(again).reused_tokens == 0
    assert compile_seconds() == compiled
    check_memory(engine)


def test_one_is_replaced_and_what_is_under_way_goes_on_with_the_old_one():
    engine = SteppedWithAdapters()
    with pytest.raises(AdapterError, match="'a' is loaded already; give replace=True"):
        engine.add_adapter("a", ADAPTERS["c"])
    old = engine.submit(SHORT, adapter="a", max_new_tokens=12)
    engine.step()
    engine.step()
    assert engine.add_adapter("a", ADAPTERS["c"], replace=True).rank == 4
    new = engine.submit(SHORT, adapter="a", max_new_tokens=12)
    engine.settle()
    assert done(old).tokens == text("a", SHORT) and done(new).tokens == text("c", SHORT)


@pytest.mark.slow
def test_other_weights_of_the_base_keep_the_adapters():
    engine = SteppedWithAdapters()
    first = engine.submit(SHORT, adapter="a", max_new_tokens=12)
    engine.settle()
    engine.update_params(init(CONFIG, seed=1))
    second = engine.submit(SHORT, adapter="a", max_new_tokens=12)
    engine.settle()
    moved = dataclasses.replace(MODEL, params=init(CONFIG, seed=1))
    params = models.merged(moved.params, ADAPTERS["a"], CONFIG)
    expected = generate(
        dataclasses.replace(MODEL, params=params),
        [list(SHORT)],
        max_new_tokens=12,
        sampler=Sampler(),
    )
    assert done(first).tokens == text("a", SHORT)
    assert done(second).tokens == expected.completions[0].tokens != done(first).tokens
    assert done(second).reused_tokens == 0


@pytest.mark.slow
def test_few_rows_preempted_requests_and_several_threads():
    with Engine(SERVED, max_rows=ROWS, kv_bytes=512 * SIZE) as engine:
        engine.warm_up()
        asked = [(name, prompt) for name in (None, "a", "b") for prompt in (SHORT, LONG)] * 2
        streams = [
            engine.submit(prompt, adapter=name, max_new_tokens=12, priority=i)
            for i, (name, prompt) in enumerate(asked)
        ]
        for stream, (name, prompt) in zip(streams, asked, strict=True):
            assert stream.wait().tokens == text(name, prompt)
        engine.add_adapter("c", ADAPTERS["c"])
        assert engine.submit(SHORT, adapter="c", max_new_tokens=12).wait().tokens == text(
            "c", SHORT
        )


@pytest.mark.slow
def test_branches_with_an_adapter_alone_on_an_engine_and_below_a_prefix():
    prompts = [list(LONG), list(LONG[:60] + SHORT), list(LONG)]
    how = {"max_new_tokens": 12, "sampler": Sampler()}
    for name in (None, "a"):
        expected = [text(name, tuple(prompt)) for prompt in prompts]
        model = SERVED.using(name)
        found = generate(model, prompts, share=True, **how)
        assert [c.tokens for c in found.completions] == expected
        store = Prefixes(model, max_tokens=512)
        with store.add(list(LONG[:60])) as prefix:
            rest = [prompt[60:] for prompt in prompts]
            found = generate(model, rest, prefix=prefix, **how)
            assert [c.tokens for c in found.completions] == expected
            with pytest.raises(ValueError, match="by another model, or with another adapter"):
                generate(SERVED.using("b"), rest, prefix=prefix, **how)
    with Engine(SERVED, max_rows=ROWS) as engine:
        found = generate(engine.model.using("a"), prompts, engine=engine, **how)
        assert [c.tokens for c in found.completions] == expected


@pytest.mark.slow
def test_workers_with_an_adapter_alone_beside_others_and_saved(tmp_path):
    base = one_layer()
    adapter = random_adapter(base.config, 2, 5)
    merged = dataclasses.replace(base, params=models.merged(base.params, adapter, base.config))
    settings = {"budget": 24, "passes_at_once": 4, "seed": 3, "stop_on": "never"}
    problem = "1. 47 + 38"

    def written(session):
        for _ in session.stream():
            pass
        steps = [(step.worker, step.tokens) for step in session.result().steps]
        return steps, session.finish().value

    with Workers(merged, problem, **settings) as session:
        expected = written(session)
    with Workers(base, problem, **settings) as session:
        assert written(session) != expected
    model = base.with_adapters({"a": adapter}, max_adapters=2)
    with Workers(model.using("a"), problem, **settings) as session:
        assert written(session) == expected
        session.save(tmp_path, wait=True)
    with Engine(model, max_rows=4) as engine:
        engine.add_adapter("b", random_adapter(base.config, 1, 6))
        own = engine.model.using("a")
        stream = engine.submit("1. 2 + 3", adapter="b", max_new_tokens=16, seed=1)
        with Workers(own, problem, engine=engine, **settings) as session:
            engine.remove_adapter("a")
            with pytest.raises(EngineError, match="all 2 places for adapters are taken"):
                engine.add_adapter("c", adapter)
            assert written(session) == expected
        stream.wait()
        with pytest.raises(
            EngineError, match="the adapter 'a' of the session is not loaded in the"
        ):
            Workers(own, problem, engine=engine, **settings)
        engine.add_adapter("c", adapter)
        with Workers.restore(engine.model.using("c"), tmp_path, engine=engine) as session:
            assert [(s.worker, s.tokens) for s in session.result().steps] == expected[0]
        with pytest.raises(SaveError):
            Workers.restore(engine.model.using("b"), tmp_path, engine=engine)


@pytest.mark.slow
def test_an_engine_without_adapters_runs_the_programs_of_a_model_without():
    """The inputs of a pass have no more leaves than before, so that it is the same program."""
    engine = SteppedWithAdapters(MODEL)
    stream = engine.submit(SHORT, max_new_tokens=12)
    engine.settle()
    assert done(stream).tokens == text(None, SHORT)
    assert engine._scheduler.decode_rows.state.layout.adapters is None
    assert engine.model.variables is engine.model.params
    with pytest.raises(EngineError, match="the engine's model has no places for adapters; make"):
        engine.add_adapter("a", ADAPTERS["a"])
    with pytest.raises(AdapterError, match="'a' is asked for, but the model has no places"):
        engine.submit(SHORT, adapter="a")
    with pytest.raises(TypeError, match="adapter is 3; it must be the name of one, or None"):
        engine.submit(SHORT, adapter=3)
    assert engine.adapters() == ()


def test_what_cannot_be_added_or_removed():
    engine = SteppedWithAdapters()
    with pytest.raises(AdapterError, match="'x' is not loaded; loaded are: a, b"):
        engine.remove_adapter("x")
    other = random_adapter(dataclasses.replace(CONFIG, hidden_size=64), 2)
    with pytest.raises(AdapterError, match="another base"):
        engine.add_adapter("x", other)
    with pytest.raises(AdapterError, match="has rank 5, but there is room for rank 4"):
        engine.add_adapter("x", random_adapter(CONFIG, 5))
    with pytest.raises(FileNotFoundError, match="is no folder; an adapter is a folder with"):
        engine.add_adapter("x", "nowhere")
    assert [each.name for each in engine.adapters()] == ["a", "b"]
    engine._thread = None
    engine.shutdown()
    with pytest.raises(ClosedError):
        engine.add_adapter("x", ADAPTERS["c"])


@pytest.mark.slow
def test_on_a_mesh_with_data_groups_and_split_layers():
    model = MODEL.on(make_mesh(data=2, tensor=2)).with_adapters(
        {name: ADAPTERS[name] for name in "ab"}, max_adapters=3, max_rank=4
    )
    prompts = [list(SHORT), list(LONG), list(SHORT)]
    found = generate(model.using("a"), prompts, max_new_tokens=12, sampler=Sampler())
    assert [c.tokens for c in found.completions] == [text("a", tuple(p)) for p in prompts]
    with Engine(model.replicas()[1], max_rows=ROWS, kv_bytes=512 * SIZE) as engine:
        assert engine.submit(SHORT, adapter="b", max_new_tokens=12).wait().tokens == text(
            "b", SHORT
        )
        compiled = compile_seconds()
        engine.add_adapter("c", ADAPTERS["c"])
        assert engine.submit(SHORT, adapter="c", max_new_tokens=12).wait().tokens == text(
            "c", SHORT
        )
        assert compile_seconds() == compiled
