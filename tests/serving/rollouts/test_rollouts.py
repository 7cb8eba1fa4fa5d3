"""Rollouts as arrays: log-probabilities are those of the training pass, whatever was shared."""

import dataclasses
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import FinishReason, Sampler, models
from jaxshare.models import EMBEDDED, LoadedModel
from jaxshare.models.layers import Decoder
from jaxshare.serving import Branch, generate
from jaxshare.serving.engine import Engine, EngineError
from jaxshare.serving.rollouts import UpdateError, pack, rollout, update_engines
from jaxshare.sharding import make_mesh
from tests.helpers import one_layer
from tests.serving.engine.test_engine import MODEL, SIZE, Stepped, done
from tests.serving.engine.test_update_params import NEW, OLD, PROMPT, outputs

SAMPLER = Sampler(0.8, top_p=0.9, top_k=40, presence_penalty=0.4)
QUESTIONS = ["1. 47 + 38", "1. 47 + 39\n2. 5 + 6", "1. 47 + 38\n2. 12 - 7\n3. 9 + 9"]
LENGTH = 128


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def of_training(model: LoadedModel, tokens: np.ndarray, dtype=None) -> np.ndarray:
    """float64 logits of whole sequences, of the pass that training differentiates."""
    params = model.params
    if dtype is not None:
        params = jax.tree.map(lambda array: array.astype(dtype), params)
    run = jax.jit(lambda p, t: Decoder(model.config).apply(p, t, method="causal"))
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes bfloat16
        return np.asarray(run(params, tokens), np.float64)


def drawn_with(logits: np.ndarray, before, sampler: Sampler) -> np.ndarray:
    """The logarithms of the chances of a token, by the definitions: penalties, temperature, top_k
    and top_p."""
    logits = logits.copy()
    logits[[*{*before}]] -= sampler.presence_penalty
    logits /= sampler.temperature
    order = np.argsort(-logits)
    logits[order[sampler.top_k :]] = -np.inf
    chances = np.exp(logits - logits.max())
    chances /= chances.sum()
    before_each = np.cumsum(chances[order]) - chances[order]
    chances[order[before_each >= sampler.top_p]] = 0.0
    with np.errstate(divide="ignore"):
        return np.log(chances / chances.sum())


def check(batch, model: LoadedModel, sampler: Sampler = SAMPLER, *, atol: float = 1e-4) -> None:
    """Every array against the completions and the training pass."""
    logits = of_training(model, batch.tokens)
    raw = log_softmax(logits)
    for row, each in enumerate(batch.completions):
        start, size = int(batch.prompt_lengths[row]), int(batch.completion_lengths[row])
        end = start + size
        assert size == len(each.tokens) > 0 and tuple(batch.tokens[row, start:end]) == each.tokens
        assert batch.finish_reasons[row] == each.finish_reason
        masks = batch.prompt_mask[row], batch.completion_mask[row]
        assert [*np.flatnonzero(masks[0])] == [*range(start)]
        assert [*np.flatnonzero(masks[1])] == [*range(start, end)]
        for array, none in (
            (batch.logprobs, 0),
            (batch.processed_logprobs, 0),
            (batch.versions, -1),
        ):
            assert (np.delete(array[row], slice(start, end)) == none).all()
        assert (batch.tokens[row, end:] == 0).all()
        for place in range(start, end):
            token = batch.tokens[row, place]
            assert batch.logprobs[row, place] == pytest.approx(raw[row, place - 1, token], abs=atol)
            own = drawn_with(logits[row, place - 1], each.tokens[: place - start], sampler)
            assert batch.processed_logprobs[row, place] == pytest.approx(own[token], abs=atol)


@pytest.fixture(scope="module")
def embedded():
    return models.load(EMBEDDED, dtype="float32")


@pytest.fixture(scope="module")
def engine(embedded):
    with Engine(embedded, max_rows=8) as made:
        yield made


def test_log_probabilities_are_those_of_the_training_pass(embedded, engine):
    """Several samples of prompts with common beginnings, twice, so that the tree is hit."""
    for _ in range(2):
        batch = rollout(
            engine,
            QUESTIONS,
            n=4,
            sampler=SAMPLER,
            max_new_tokens=24,
            seed=3,
            length=LENGTH,
        )
        check(batch, embedded)
    assert any(each.reused_tokens > 0 for each in batch.completions)
    assert batch.tokens.shape == (12, LENGTH) and batch.tokens.dtype == np.int32
    assert batch.prompts.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert batch.indices.tolist() == [0, 1, 2, 3] * 3
    assert (batch.versions[batch.completion_mask] == 0).all()
    alone = generate(
        embedded, QUESTIONS, n=4, sampler=SAMPLER, max_new_tokens=24, seed=3, logprobs="both"
    )
    assert [each.tokens for each in alone.completions] == [
        each.tokens for each in batch.completions
    ]
    assert batch.texts == [each.text for each in alone.completions]
    of_run = pack(
        embedded,
        QUESTIONS,
        [alone.completions[start : start + 4] for start in (0, 4, 8)],
        length=LENGTH,
    )
    np.testing.assert_allclose(of_run.logprobs, batch.logprobs, atol=1e-4)
    np.testing.assert_allclose(of_run.processed_logprobs, batch.processed_logprobs, atol=1e-4)


def test_forks_of_a_tree(embedded, engine):
    tree = Branch("1. 47 + 38", [Branch("\n2. 5 + 6"), Branch("\n2. 9 - 4", n=3)])
    batch = rollout(engine, tree, n=2, sampler=SAMPLER, max_new_tokens=12, seed=1, length=LENGTH)
    assert batch.prompts.tolist() == [0, 0, 1, 1, 1]
    check(batch, embedded)


@pytest.mark.slow
def test_what_was_preempted(embedded):
    """With memory for few, so that rows are preempted by others of a higher priority."""
    with Engine(embedded, max_rows=2, passes=4) as engine:
        low = engine.submit(QUESTIONS[2], SAMPLER, n=2, seed=1, max_new_tokens=40, logprobs="both")
        next(low.streams[0].chunks(60))
        high = engine.submit(
            QUESTIONS[0], SAMPLER, n=2, seed=2, max_new_tokens=6, logprobs="both", priority=1
        )
        samples = [low.wait(60), high.wait(60)]
    assert any(each.preemptions for each in samples[0])
    batch = pack(embedded, [QUESTIONS[2], QUESTIONS[0]], samples, length=LENGTH)
    check(batch, embedded)


@pytest.mark.slow
def test_in_bfloat16_they_are_as_near_as_the_training_pass_is(embedded):
    """Both against the same weights in float32: what is rounded between is the dtype's."""
    half = models.load(EMBEDDED, dtype="bfloat16")
    with Engine(half, max_rows=8) as engine:
        batch = rollout(
            engine, QUESTIONS, n=4, sampler=SAMPLER, max_new_tokens=24, seed=3, length=LENGTH
        )
    exact = log_softmax(of_training(half, batch.tokens, jnp.float32))
    passes = log_softmax(of_training(half, batch.tokens))
    rows, places = np.nonzero(batch.completion_mask)
    tokens = batch.tokens[rows, places]
    exact, passes = (each[rows, places - 1, tokens] for each in (exact, passes))
    own = np.abs(batch.logprobs[rows, places] - exact)
    other = np.abs(passes - exact)
    # A logit near 16 has steps of 1/16 in bfloat16.
    assert own.mean() <= 2 * other.mean() + 1e-2 and own.max() <= 4 * other.max() + 1 / 16


@pytest.mark.slow
def test_stop_tokens_and_stop_texts(embedded, engine):
    whole = rollout(
        engine, QUESTIONS[:1], sampler=Sampler(), max_new_tokens=30, length=LENGTH
    ).completions[0]
    for more in (
        {"stop": whole.text[8:10]},
        {"sampler": Sampler(stop_token_ids=whole.tokens[9:10])},
    ):
        sampler = more.pop("sampler", Sampler())
        batch = rollout(
            engine, QUESTIONS[:1], sampler=sampler, max_new_tokens=30, length=LENGTH, **more
        )
        reason = FinishReason.STOP_TEXT if more else FinishReason.STOP
        assert batch.reasons() == [reason]
        size = int(batch.completion_lengths[0])
        assert batch.completions[0].tokens == whole.tokens[:size] and size < 30
        assert (batch.processed_logprobs[batch.completion_mask] == 0).all()  # greedy


def test_versions_of_each_token():
    """A batch with samples of before, of after, and of both."""
    engine, more = Stepped(passes=2), {"logprobs": "both", "max_new_tokens": 10}
    first = engine.submit(PROMPT, n=1, **more)
    engine.settle()
    second = engine.submit(PROMPT[::-1], n=1, **more)
    while not engine._scheduler.live or len(engine._scheduler.live[0].request.output) < 3:
        engine.step()
    engine.update_params(NEW, running="continue", version=5)
    count = len(engine._scheduler.live[0].request.output)  # with what was under way
    third = engine.submit(PROMPT, n=1, **more)
    engine.settle()
    prompts = [PROMPT, PROMPT[::-1], PROMPT]
    samples = [group.wait(0) for group in (first, second, third)]
    batch = pack(MODEL, prompts, samples, multiple_of=8, pad_token=30)
    assert batch.tokens.shape == (3, 32) and (batch.tokens[~batch.completion_mask][21:] >= 0).all()
    expected = [[0] * 10, [0] * count + [5] * (10 - count), [5] * 10]
    for row, versions in enumerate(expected):
        size = int(batch.completion_lengths[row])
        assert batch.versions[row, 21 : 21 + size].tolist() == versions[:size]
        assert (batch.tokens[row, 21 + size :] == 30).all()
    for row, params in ((0, OLD), (2, NEW)):
        raw = log_softmax(
            of_training(dataclasses.replace(MODEL, params=params), batch.tokens[[row]])
        )
        for place in np.flatnonzero(batch.completion_mask[row]):
            token = batch.tokens[row, place]
            assert batch.logprobs[row, place] == pytest.approx(raw[0, place - 1, token], abs=1e-4)


def test_both_kinds_beside_others():
    """Requests of one kind, and sessions' rows, in the same dispatches."""
    engine = Stepped()
    kinds = ("both", True, "processed", False, "both")
    sampler = Sampler(1.3, top_k=5)
    streams = [
        engine.submit(PROMPT, sampler, seed=7, max_new_tokens=9, logprobs=kind) for kind in kinds
    ]
    engine.settle()
    both, raw, processed, none, again = map(done, streams)
    assert both.logprobs == pytest.approx(raw.logprobs, abs=1e-5)
    assert both.processed_logprobs == pytest.approx(processed.logprobs, abs=1e-5)
    assert both.logprob == pytest.approx(math.fsum(raw.logprobs), abs=1e-4)
    assert both.logprobs != both.processed_logprobs and again.logprobs is not None
    assert none.logprobs is None
    assert all(each.processed_logprobs is None for each in (raw, processed, none))


def test_arguments_that_are_refused(embedded, engine):
    sample = [engine.submit(QUESTIONS[0], seed=1, max_new_tokens=4, logprobs="both").wait()]
    poor = [engine.submit(QUESTIONS[0], seed=1, max_new_tokens=4, logprobs=True).wait()]
    for prompts, samples, options, message in (
        (QUESTIONS[:1], [sample, sample], {}, "there are 1 prompts and samples of 2"),
        ([], [], {}, "there are no samples"),
        (QUESTIONS[:1], [[]], {}, "there are no samples"),
        (QUESTIONS[:1], [poor], {}, "sample 0 of prompt 0 has no log-probabilities of both kinds"),
        (QUESTIONS[:1], [sample], {"length": 5}, "length is 5, but sample 0 of prompt 0 has"),
        (QUESTIONS[:1], [sample], {"multiple_of": 0}, "multiple_of"),
        (QUESTIONS[:1], [sample], {"pad_token": -1}, "pad_token"),
    ):
        with pytest.raises(ValueError, match=message):
            pack(embedded, prompts, samples, **options)
    with pytest.raises(ValueError, match="there are no engines"):
        rollout([], QUESTIONS)
    with pytest.raises(ValueError, match="best_of"):
        rollout(engine, QUESTIONS, sampler=Sampler(1.0, best_of=3))
    with pytest.raises(ValueError, match="top_logprobs is 2 and logprobs 'both'"):
        engine.submit(QUESTIONS[0], logprobs="both", top_logprobs=2)


@pytest.mark.slow
def test_data_groups_have_the_weights_and_share_the_prompts():
    """Each group's engine on its own devices; the samples are those of one engine."""
    model = one_layer()
    rng = np.random.default_rng(1)
    new = jax.tree.map(
        lambda x: x + jnp.asarray(0.02 * rng.normal(size=x.shape), x.dtype), model.params
    )
    how = {"n": 2, "sampler": SAMPLER, "max_new_tokens": 6, "seed": 3, "length": LENGTH}
    with Engine(dataclasses.replace(model, params=new), max_rows=4) as one:
        expected = rollout(one, QUESTIONS, **how)
    engines = [Engine(group, max_rows=4) for group in model.on(make_mesh(data=2)).replicas()]
    try:
        rollout(engines, QUESTIONS, **how)
        assert update_engines(engines, new, running="continue") == 1
        found = rollout(engines, QUESTIONS, **how)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
        assert (found.versions[found.completion_mask] == 1).all()
        for engine, devices in zip(engines, ({0}, {1}), strict=True):
            leaf = jax.tree.leaves(engine.model.params)[0]
            assert {device.id for device in leaf.devices()} == devices
        bad = jax.tree.map(lambda x: x, new)
        bad["params"]["norm"]["scale"] = bad["params"]["norm"]["scale"] * np.nan
        with pytest.raises(UpdateError, match=r"engine 0 of 2: norm/scale .*no engine has changed"):
            update_engines(engines, bad)
        assert [engine.params_version for engine in engines] == [1, 1]
    finally:
        for engine in engines:
            engine.shutdown()


def test_a_group_that_fails_is_named(monkeypatch):
    engines = [Engine(MODEL, max_rows=4, kv_bytes=512 * SIZE) for _ in range(3)]

    def full(*_, **__):
        raise EngineError("the device has gone")

    monkeypatch.setattr(engines[1], "update_params", full)
    with pytest.raises(UpdateError, match=r"engine 1 of 3: the device has gone \(the other 2 have"):
        update_engines(engines, NEW, version=4)
    assert [engine.params_version for engine in engines] == [4, 0, 4]
    engines[2].shutdown()
    with pytest.raises(UpdateError, match=r"engine 2 of 3: the engine is shut down.*no engine has"):
        update_engines(engines, OLD)
    assert engines[0].submit(PROMPT, max_new_tokens=5).wait().tokens == outputs(True, PROMPT, 5)
    for engine in engines[:2]:
        engine.shutdown()
    assert threading.active_count() < 50
