"""Other weights for a running engine: what is under way, what was cached, and what is refused."""

import asyncio
import dataclasses
import functools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import FinishReason, KVCache, Layout, Sampler
from jaxshare.models import Generation, LoadedModel
from jaxshare.models.new_params import ParamsError, ParamsForm
from jaxshare.serving import Workers
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.requests import ModelCall, Options
from jaxshare.serving.engine import ClosedError, Engine, EngineError
from tests.helpers import init, one_layer, padded
from tests.serving.engine.stepped import small_pieces
from tests.serving.engine.test_engine import (
    CONFIG,
    LENGTHS,
    MODEL,
    STOP,
    WARM,
    Stepped,
    _causal,
    check_memory,
    done,
)
from tests.serving.engine.test_engine import (
    LONG as ALL_LOGITS,
)

__all__ = ["small_pieces"]  # the fixture

OLD, NEW = MODEL.params, init(CONFIG, seed=1)
GREEDY = Sampler()


@functools.cache
def outputs(is_new: bool, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The greedy output of a prompt by plain causal attention."""
    tokens = [*prompt]
    while len(tokens) < len(prompt) + count and tokens[-1] != STOP:
        row = padded(tokens, LENGTHS)
        logits = np.asarray(_causal(NEW if is_new else OLD, row))[0, len(tokens) - 1]
        tokens.append(int(logits.argmax()))
    return tuple(tokens[len(prompt) :])


def lasting(count: int, size: int = 21, seed: int = 0) -> tuple[int, ...]:
    """A prompt whose output does not stop before `count` tokens, and differs between the weights."""
    rng = np.random.default_rng(seed)
    while True:
        prompt = tuple(rng.integers(3, 31, size).tolist())
        old, new = (outputs(is_new, prompt, count) for is_new in (False, True))
        if old != new and STOP not in (*old, *new):
            return prompt


PROMPT, LONG = lasting(20), lasting(6, size=90)


def mixed_output(prompt: tuple[int, ...], old_tokens: int, count: int) -> tuple[int, ...]:
    """The greedy output where the weights change after so many tokens: keys and values that are
    cached then stay. One token a pass, over a cache of its own."""
    cache = KVCache.create(CONFIG, [LENGTHS[-1]], jnp.float32)
    layout, tokens = Layout.from_blocks([[0]]), [*prompt]
    logits = None
    while len(tokens) < len(prompt) + count:
        for token in tokens[int(cache.lengths[0]) :]:
            is_new = len(tokens) - len(prompt) >= old_tokens
            model = dataclasses.replace(MODEL, params=NEW if is_new else OLD)
            logits, cache = model.forward([[token]], [1], cache, layout)
        tokens.append(int(np.asarray(logits)[0].argmax()))
    return tuple(tokens[len(prompt) :])


def begun(engine: Stepped, *, tokens: int = 3, **options):
    """A request of which some tokens were sampled."""
    stream = engine.submit(PROMPT, **{"max_new_tokens": 20, **options})
    while len(engine._scheduler.live[0].request.output if engine._scheduler.live else ()) < tokens:
        engine.step()
    return stream


class Updating(threading.Thread):
    """An update that waits in a thread; joined, it raises what the update has raised."""

    def __init__(self, engine: Engine, *args, **options):
        super().__init__(daemon=True)
        self._work, self.error = lambda: engine.update_params(*args, **options), None
        self.start()

    def run(self):
        try:
            self.version = self._work()
        except BaseException as error:
            self.error = error

    def until_held(self, engine: Engine):
        """Waits until new requests wait for the update."""
        while not engine._is_held:
            assert self.is_alive(), self.error
            time.sleep(0.001)

    def wait(self):
        self.join(60)
        assert not self.is_alive()
        if self.error:
            raise self.error


def settled(engine: Stepped, updating: Updating | None = None) -> None:
    """Runs steps until nothing is left to do."""
    while engine.step() or (updating and updating.is_alive()):
        pass
    engine.settle()


def test_finish_lets_what_has_begun_end_and_all_else_wait():
    engine = Stepped()
    first = begun(engine)
    updating = Updating(engine, NEW)
    updating.until_held(engine)
    second = engine.submit(PROMPT, max_new_tokens=20)
    settled(engine, updating)
    updating.wait()
    assert updating.version == engine.params_version == 1
    assert done(first).tokens == outputs(False, PROMPT, 20) and done(first).versions == (0,) * 20
    assert done(second).tokens == outputs(True, PROMPT, 20) and done(second).versions == (1,) * 20
    assert done(second).reused_tokens == 0 and done(second).restarts == 0
    check_memory(engine)
    third = engine.submit(PROMPT, max_new_tokens=20)
    engine.settle()
    assert done(third).tokens == done(second).tokens and done(third).reused_tokens > 0


def test_finish_waits_for_what_was_preempted():
    engine = Stepped(max_rows=1)
    low = begun(engine, priority=0)
    high = engine.submit(PROMPT[::-1], max_new_tokens=12, priority=1)
    engine.step()
    assert engine._scheduler.live[0].request.priority == 1
    updating = Updating(engine, NEW)
    settled(engine, updating)
    updating.wait()
    assert done(low).preemptions == 1 and done(low).versions == (0,) * 20
    assert done(low).tokens == outputs(False, PROMPT, 20)
    assert done(high).tokens == outputs(False, PROMPT[::-1], 12)


def test_restart_samples_anew():
    engine = Stepped()
    stream, unread = begun(engine), engine.submit(PROMPT[::-1], max_new_tokens=20, logprobs=True)
    while not unread._state.chunks:
        engine.step()
    read = [next(stream.chunks(0))]
    engine.update_params(NEW, running="restart", version=7)
    engine.settle()
    assert done(stream).tokens == outputs(True, PROMPT, 20)
    assert done(stream).version_runs == ((20, 7),) and done(stream).restarts == 1
    read += stream.chunks(0)
    assert [chunk.restarted for chunk in read[:2]] == [False, True]
    assert not any(chunk.restarted for chunk in read[2:])
    assert sum((chunk.tokens for chunk in read[1:]), ()) == done(stream).tokens
    # What nobody has read needs no word.
    chunks = [*unread.chunks(0)]
    assert not any(chunk.restarted for chunk in chunks)
    assert sum((chunk.tokens for chunk in chunks), ()) == outputs(True, PROMPT[::-1], 20)
    assert done(unread).logprobs is not None and len(done(unread).logprobs) == 20
    check_memory(engine)


def test_continue_goes_on_with_what_is_cached():
    engine = Stepped(passes=3)
    stream = begun(engine)
    fresh = engine.submit(LONG, max_new_tokens=6)
    engine.step()
    row, other = engine._scheduler.live
    assert other.needs_prefill and 0 < other.extent.length < len(LONG)
    count = len(row.request.output)
    engine.update_params(NEW, running="continue")
    later = engine.submit(PROMPT, max_new_tokens=20)
    check_memory(engine)
    engine.settle()
    check_memory(engine)
    assert done(stream).version_runs == ((count, 0), (20 - count, 1))
    assert done(stream).tokens == mixed_output(PROMPT, count, 20)
    assert done(stream).tokens[:count] == outputs(False, PROMPT, 20)[:count]
    # Nothing that the old weights computed is read by other requests.
    for each, prompt, size in ((fresh, LONG, 6), (later, PROMPT, 20)):
        assert done(each).tokens == outputs(True, prompt, size)
        assert done(each).versions == (1,) * len(done(each).tokens) and not done(each).restarts
    again = engine.submit((*PROMPT, *done(stream).tokens[:9]), max_new_tokens=4)
    engine.settle()
    assert done(again).tokens == outputs(True, (*PROMPT, *done(stream).tokens[:9]), 4)


@pytest.mark.slow
def test_many_updates_in_the_midst_of_requests_that_share_prefixes():
    """At random: memory stays whole, and whatever has one version is what its weights give."""
    rng = np.random.default_rng(0)
    engine = Stepped(tokens=256, host=128, passes=2)
    asked, is_new = [], False
    for _ in range(60):
        prompt = (*PROMPT[: rng.integers(1, 22)], *rng.integers(3, 31, rng.integers(1, 4)).tolist())
        asked.append(
            (prompt, engine.submit(prompt, max_new_tokens=8, priority=int(rng.integers(2))))
        )
        for _ in range(rng.integers(3)):
            engine.step()
        if rng.random() < 0.3:
            is_new = not is_new
            running = ("restart", "continue")[rng.integers(2)]
            engine.update_params(NEW if is_new else OLD, running=running)
            check_memory(engine)
    engine.settle()
    check_memory(engine)
    versions = [done(stream).versions for _, stream in asked]
    assert any(len({*each}) > 1 for each in versions)
    for prompt, stream in asked:
        if len({*done(stream).versions}) == 1:
            assert done(stream).tokens == outputs(done(stream).versions[0] % 2 == 1, prompt, 8)


@pytest.mark.slow
def test_copies_in_host_memory_are_forgotten():
    engine = Stepped(tokens=64, host=256)
    streams = [engine.submit(lasting(8, seed=seed), max_new_tokens=8) for seed in range(4)]
    engine.settle()
    kv = engine._scheduler.kv
    assert all(map(done, streams)) and kv.tree.host_used > 0
    engine.update_params(NEW)
    assert kv.tree.host_used == 0 and kv.cached_tokens == 0 and kv.pool.free == kv.pool.tokens
    for seed in range(4):
        stream = engine.submit(lasting(8, seed=seed), max_new_tokens=8)
        engine.settle()
        assert done(stream).reused_tokens == 0
        assert done(stream).tokens == outputs(True, lasting(8, seed=seed), 8)


@pytest.mark.parametrize("running", ["restart", "continue"])
def test_the_logits_cache_forgets(running):
    """What goes on with both weights writes nothing to it."""
    engine = Stepped(passes=2, **ALL_LOGITS)

    def ask():
        stream = engine.submit(PROMPT, WARM, seed=5, max_new_tokens=12, resample="stepwise")
        engine.settle()
        return done(stream)

    old = ask()
    assert ask().replayed_tokens == 12
    kept = engine.logits_cache
    stream = engine.submit(PROMPT, WARM, seed=6, max_new_tokens=12, resample="stepwise")
    while not engine._scheduler.live or not engine._scheduler.live[0].request.output:
        engine.step()
    engine.update_params(NEW, running=running)
    assert engine.logits_cache is not kept and engine.logits_cache.bytes == 0
    engine.settle()
    assert len({*done(stream).versions}) == (1 if running == "restart" else 2)
    first = ask()
    assert first.tokens != old.tokens
    with Engine(dataclasses.replace(MODEL, params=NEW), max_rows=4) as other:
        expected = other.submit(PROMPT, WARM, seed=5, max_new_tokens=12).wait()
    assert first.tokens == expected.tokens == ask().tokens and ask().replayed_tokens == 12
    assert engine.logits_cache.model_key != kept.model_key


def test_a_checkpoint_of_other_weights_is_refused(tmp_path):
    with Engine(MODEL, max_rows=4) as engine:
        engine.submit(PROMPT, max_new_tokens=4).wait()
        engine.save(tmp_path / "old", wait=True)
        engine.update_params(NEW)
        engine.submit(PROMPT, max_new_tokens=4).wait()
        engine.save(tmp_path / "new", wait=True)
    for name, params in (("old", OLD), ("new", NEW)):
        with Engine(dataclasses.replace(MODEL, params=params), max_rows=4) as other:
            assert other.restore(tmp_path / name) > 0
    with Engine(MODEL, max_rows=4) as other:
        other.update_params(NEW)
        with pytest.raises(Exception, match="of another model"):
            other.restore(tmp_path / "old")
        assert other.restore(tmp_path / "new") > 0


def test_nothing_is_compiled_again():
    with Engine(MODEL, max_rows=4) as engine:
        first = engine.submit(PROMPT, max_new_tokens=8).wait().tokens
        # These compile what checks and copies, into new memory and into that of former ones.
        for params in (NEW, OLD, jax.tree.map(np.asarray, NEW)):
            engine.update_params(params)
        engine.submit(PROMPT, max_new_tokens=8).wait()
        compiled = []
        name = "/jax/core/compile/backend_compile_duration"
        jax.monitoring.register_event_duration_secs_listener(
            listener := lambda event, seconds, **_: event == name and compiled.append(event)
        )
        try:
            for params in (OLD, jax.tree.map(np.asarray, NEW), OLD):
                engine.update_params(params, running="continue")
                last = engine.submit(PROMPT, max_new_tokens=8).wait().tokens
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)
        assert not compiled and first == last


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow
def test_one_copy_is_held(monkeypatch):
    """The old weights are gone before the new ones are there, or these are written over them."""
    config = dataclasses.replace(CONFIG, hidden_size=256, num_layers=2)
    given = [jax.tree.map(np.asarray, init(config, seed)) for seed in range(3)]
    size = sum(array.nbytes for array in jax.tree.leaves(given[0]))
    model = LoadedModel(config, jax.tree.map(jnp.array, given[0]), None, Generation())
    seen, placed = [], ParamsForm.placed

    def watched(self, found, *, copy, former):
        seen.append((live_bytes(), former is not None))
        return placed(self, found, copy=copy, former=former)

    monkeypatch.setattr(ParamsForm, "placed", watched)
    with Engine(model, max_rows=4) as engine:
        del model
        engine.submit(PROMPT, max_new_tokens=4).wait()
        before = live_bytes()
        engine.update_params(given[1])
        assert seen.pop() <= (before - size, False)
        engine.update_params(given[0])  # in memory of JAX's, no more NumPy's, from here on
        assert seen.pop()[1] and abs(live_bytes() - before) < size / 10
        own = places(engine)
        for params in (given[2], given[0]):
            engine.update_params(params)
            assert seen.pop()[1] and places(engine) == own
            assert abs(live_bytes() - before) < size / 10
        on_device = jax.tree.map(jnp.array, given[1])
        engine.update_params(on_device)
        assert places(engine) == own
        assert seen.pop()[0] <= before + size  # with the caller's copy
        engine.update_params(on_device, copy=False)  # that is now the engine's, too
        assert seen.pop()[1] and abs(live_bytes() - before) < size / 10
        engine.update_params(given[2])
        assert not seen.pop()[1] and not places(engine) & {*map(place, jax.tree.leaves(on_device))}


def place(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


def places(engine: Engine) -> set[int]:
    return {*map(place, jax.tree.leaves(engine.model.params))}


def same(found, expected) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, found, expected)))


@pytest.mark.parametrize("held", ["model", "array", "alias", "view"])
def test_what_is_held_of_former_weights_is_not_written_over(held):
    """Whatever a caller has of the engine's arrays; an alias is one where it is given again."""

    def keys(model: LoadedModel) -> Any:
        return model.named_params["params"]["layers_0"]["attention"]["k"]["kernel"]

    with Engine(MODEL, max_rows=4) as engine:
        engine.update_params(jax.tree.map(jnp.array, NEW))
        engine.update_params(jax.tree.map(jnp.array, NEW))
        kept: Any = engine.model if held == "model" else keys(engine.model)
        if held == "alias":
            kept = jax.device_put(kept, may_alias=True)
        elif held == "view":
            kept = np.asarray(kept)
        expected, again = np.array(keys(engine.model)), jax.tree.map(lambda array: array, OLD)
        if held == "alias":
            again["params"]["layers_0"]["attention"]["v"]["kernel"] = kept
        engine.update_params(again)
        assert same(engine.model.params, again)
        assert np.array_equal(keys(kept) if held == "model" else kept, expected)


def test_weights_may_be_those_of_the_engine():
    with Engine(MODEL, max_rows=4) as engine:
        for _ in range(2):
            engine.update_params(jax.tree.map(jnp.array, NEW))
        engine.update_params(engine.model.params)
        assert same(engine.model.params, NEW)


def test_what_a_caller_does_with_its_arrays_is_its_own_affair():
    given = jax.tree.map(lambda array: np.array(array), NEW)
    with Engine(MODEL, max_rows=4) as engine:
        engine.update_params(given)
        for array in jax.tree.leaves(given):
            array[...] = np.nan
        on_device = jax.tree.map(jnp.array, NEW)
        engine.update_params(on_device)
        for array in jax.tree.leaves(on_device):
            array.delete()
        assert engine.submit(PROMPT, max_new_tokens=9).wait().tokens == outputs(True, PROMPT, 9)
    assert MODEL.params is OLD  # which stay those of who has loaded them


def changed(path: str, change) -> dict:
    """The new weights with a change of one parameter; None takes it out."""
    tree = jax.tree.map(lambda array: array, NEW)
    *names, last = path.split("/")
    node = tree["params"]
    for name in names:
        node = node[name]
    node[last] = change(node.get(last))
    if node[last] is None:
        del node[last]
    return tree


_Q = "layers_0/attention/q/kernel"
BAD = {
    "shape": (lambda: changed(_Q, lambda x: x[:, :-1]), rf"{_Q} is float32\[64, 31\], but the m"),
    "rows": (lambda: changed(_Q, lambda x: x[:-1]), rf"{_Q} is float32\[63, 32\], but the model"),
    "dtype": (
        lambda: changed(_Q, lambda x: x.astype(jnp.bfloat16)),
        rf"{_Q} is bfloat16\[64, 32\]",
    ),
    "nan": (lambda: changed(_Q, lambda x: x.at[3, 4].set(jnp.nan)), rf"{_Q} has values that are N"),
    "inf": (
        lambda: changed("norm/scale", lambda x: np.asarray(x) * np.inf),
        "norm/scale has values that are NaN or infinite; the model keeps the parameters",
    ),
    "missing": (lambda: changed(_Q, lambda x: None), f"{_Q} is missing; give all"),
    "extra": (lambda: changed("norm/bias", lambda x: jnp.ones(3)), "norm/bias is no parameter of"),
    "kind": (lambda: changed(_Q, lambda x: "q"), f"{_Q} is 'q'; it must be an array"),
    "inner": (lambda: NEW["params"], r"give \{'params': \.\.\.\}, the tree of LoadedModel.params"),
    "more": (lambda: {**NEW, "batch_stats": {}}, "params has the collection 'batch_stats'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_weights_are_refused_before_anything_is_lost(name):
    make, message = BAD[name]
    engine = Stepped()
    stream = begun(engine)
    for running in ("finish", "restart", "continue"):
        with pytest.raises(ParamsError, match=message):
            engine.update_params(make(), running=running)
    settled(engine)
    assert done(stream).tokens == outputs(False, PROMPT, 20) and done(stream).versions == (0,) * 20
    again = engine.submit(PROMPT, max_new_tokens=4)
    engine.settle()
    assert done(again).reused_tokens > 0 and engine.params_version == 0


def test_deleted_weights_are_refused():
    given = jax.tree.map(jnp.array, NEW)
    given["params"]["norm"]["scale"].delete()
    with (
        Engine(MODEL, max_rows=4) as engine,
        pytest.raises(ParamsError, match="norm/scale was deleted, as a program does with"),
    ):
        engine.update_params(given)


def test_other_arguments_that_are_refused():
    with Engine(MODEL, max_rows=4) as engine:
        for options, kind, message in (
            ({"running": "wait"}, ValueError, "it must be one of finish, restart, continue"),
            ({"running": None}, ValueError, "it must be one of finish, restart, continue"),
            ({"version": 0}, ValueError, "the engine's weights have version 0; give a larger one"),
            ({"version": "1"}, TypeError, "version"),
            ({"timeout": "1"}, TypeError, "timeout"),
        ):
            with pytest.raises(kind, match=message):
                engine.update_params(NEW, **options)
        assert engine.params_version == 0
        assert engine.update_params(NEW, version=40) == 40 == engine.params_version
        assert engine.update_params(OLD) == 41


def test_a_timeout_changes_nothing():
    engine = Stepped()
    stream = begun(engine)
    with pytest.raises(
        TimeoutError, match="1 requests and 0 sessions of workers have not finished"
    ):
        engine.update_params(NEW, timeout=0.01)
    assert not engine._is_held
    engine.settle()
    assert done(stream).tokens == outputs(False, PROMPT, 20)
    assert engine.update_params(NEW, timeout=0.01) == 1


def test_an_update_during_a_drain_or_after_a_shutdown():
    engine = Stepped()
    stream = begun(engine)
    draining = threading.Thread(target=engine.drain, daemon=True)
    draining.start()
    while not engine._num_drains:
        time.sleep(0.001)
    for running in ("finish", "continue"):
        with pytest.raises(
            EngineError, match="the engine is being drained; update its weights bef"
        ):
            engine.update_params(NEW, running=running)
    waiting = begun_update_that_waits(engine, stream)
    waiting.join(60)
    assert isinstance(waiting.error, ClosedError)
    with pytest.raises(ClosedError, match="the engine is shut down; make another"):
        engine.update_params(NEW)


def begun_update_that_waits(engine: Stepped, stream) -> Updating:
    """An update that waits for a request while the engine is shut down."""
    engine.settle()
    engine._thread = None  # as where the engine's own thread has ended
    with engine._changed:
        engine._changed.notify_all()
    while engine._num_drains:
        time.sleep(0.001)
    assert done(stream).tokens == outputs(False, PROMPT, 20)
    engine._thread = threading.current_thread()
    begun(engine)
    waiting = Updating(engine, NEW)
    waiting.until_held(engine)
    ending = threading.Thread(target=engine.shutdown, daemon=True)
    ending.start()
    while not engine._closed:
        time.sleep(0.001)
    settled(engine)
    engine._thread = None
    with engine._changed:
        engine._changed.notify_all()
    ending.join(60)
    return waiting


def test_weights_that_cannot_be_placed_end_the_engine(monkeypatch):
    def full(self, found, **options):
        raise MemoryError("no room")

    engine = Stepped()
    stream = begun(engine)
    monkeypatch.setattr(ParamsForm, "placed", full)
    with pytest.raises(EngineError, match=r"has lost its weights, .* \(MemoryError: no room\)"):
        engine.update_params(NEW, running="continue")
    with pytest.raises(ClosedError, match="has failed and could not go on"):
        stream.wait(1)
    with pytest.raises(ClosedError):
        engine.submit(PROMPT)
    engine._thread = None


def other_weights(model: LoadedModel) -> dict:
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: x + jnp.asarray(0.02 * rng.normal(size=x.shape), x.dtype), model.params
    )


@pytest.mark.slow
def test_sessions_of_workers():
    """They end first, go on, or forbid to restart; what they have written tells the version."""
    model = one_layer()
    new, settings = other_weights(model), {"budget": 24, "passes_at_once": 4, "seed": 3}
    settings["stop_on"] = "never"
    with Engine(model, max_rows=4) as engine:
        with Workers(model, "1. 47 + 38", engine=engine, **settings) as session:
            for _ in session.stream(8):
                pass
            with pytest.raises(EngineError, match="1 sessions of workers are under way, and what"):
                engine.update_params(new, running="restart")
            with pytest.raises(TimeoutError, match="0 requests and 1 sessions"):
                engine.update_params(new, timeout=0.02)
            assert engine.update_params(new, running="continue") == 1
            assert session._session.loaded.params is engine.model.params
            for _ in session.stream():
                pass
            assert session.result().versions == ((0, 0), (8, 1))
            # One that is over is not waited for.
            assert engine.update_params(model.params, timeout=5) == 2
        with pytest.raises(ValueError, match="the engine is of another model; give the session"):
            Workers(model, "1. 47 + 38", engine=engine, **settings)
        with Workers(engine.model, "1. 47 + 38", engine=engine, **settings) as session:
            whole = session.run()
        assert whole.versions == ((0, 2),)
    with Workers(model, "1. 47 + 38", **settings) as alone:
        assert alone.run().texts == whole.texts and alone.result().versions == ()


def test_agents_go_on():
    """Calls before, in the midst of, and after updates are answered."""
    model = one_layer()
    new = other_weights(model)
    backend = EngineModel(model, max_rows=4)

    def call(seed: int) -> ModelCall:
        message, options = Message("user", "1. 47 + 38"), Options(max_new_tokens=12)
        return ModelCall((message,), options, seed, "maths", "run", (0,))

    async def run():
        asked = [asyncio.create_task(backend.answer(call(seed))) for seed in range(6)]
        for params in (new, model.params, new):
            await asyncio.sleep(0.01)
            await asyncio.to_thread(backend.engine.update_params, params, running="continue")
        return await asyncio.gather(*asked), await backend.answer(call(9))

    with backend.engine:
        answers, last = asyncio.run(run())
        assert len(answers) == 6 and backend.engine.params_version == 3
    with Engine(dataclasses.replace(model, params=new), max_rows=4) as engine:
        assert asyncio.run(EngineModel(engine).answer(call(9))).text == last.text


def test_no_finish_reason_is_lost():
    """A request that ends with a stop token after an update, and one that is cancelled."""
    engine = Stepped(passes=1)
    stopping = Sampler(stop_token_ids=(outputs(True, PROMPT, 20)[6],))
    stream = begun(engine, sampler=stopping, tokens=1)
    gone = engine.submit(PROMPT[::-1], max_new_tokens=20)
    engine.step()
    gone.cancel()
    engine.update_params(NEW, running="restart")
    engine.settle()
    assert done(stream).finish_reason is FinishReason.STOP
    assert len(done(stream).versions) == len(done(stream).tokens) <= 7
    assert done(gone).finish_reason is FinishReason.CANCELLED
