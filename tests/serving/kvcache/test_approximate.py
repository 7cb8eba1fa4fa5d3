"""Models whose caches approximate: what the pool copies stays bit for bit, engines and sessions are
saved and restored, and files of another form are refused."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxshare.models import Generation, LoadedModel
from jaxshare.serving.branches import generate
from jaxshare.serving.checkpoints import SaveError
from jaxshare.serving.engine import Engine
from jaxshare.serving.identity import check_identity, identity
from jaxshare.serving.inputs import token_bytes
from jaxshare.serving.kvcache.pool import Pool
from jaxshare.serving.logits_cache.cache import LogitsCache
from jaxshare.serving.workers.session import Workers
from tests.helpers import TINY, init, one_layer
from tests.serving.workers.test_session import run

CONFIG = dataclasses.replace(TINY, num_layers=1, vocab_size=31, max_positions=512)
FORMATS = ("int8", "fp8")
PROMPTS = [[3 + i * 7 % 28 for i in range(40)], [3 + i * 5 % 28 for i in range(61)]]


@functools.cache
def model(approximate_kv: str | None = "int8") -> LoadedModel:
    params = init(CONFIG)
    return LoadedModel(CONFIG, params, None, Generation(), approximate_kv=approximate_kv)


def bits(arrays) -> list[np.ndarray]:
    return [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(arrays)]


def same(a, b) -> None:
    for one, other in zip(bits(a), bits(b), strict=True):
        np.testing.assert_array_equal(one, other)


def noise(pool: Pool) -> None:
    """Fills the arenas with codes and scales."""
    rng = np.random.default_rng(0)

    def filled(leaf):
        values = rng.integers(1, 100, leaf.shape).astype(np.float32)
        return jax.numpy.asarray(values).astype(leaf.dtype)

    cache = pool.cache
    keys, values = jax.tree.map(filled, (cache.keys, cache.values))
    pool.cache = dataclasses.replace(cache, keys=keys, values=values)


def test_a_format_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"approximate_kv is 'int4'; a cache is exact \(None\)"):
        dataclasses.replace(model(), approximate_kv="int4")


@pytest.mark.parametrize("format", FORMATS)
def test_memory_is_counted_with_scales(format):
    chosen, exact = model(format), model(None)
    numbers = CONFIG.num_kv_heads * 2
    assert token_bytes(exact) == numbers * CONFIG.head_dim * 4
    assert token_bytes(chosen) == numbers * (CONFIG.head_dim + 4)
    pool = Pool(chosen, 256)
    assert pool.cache.approximate == format
    assert pool.bytes_per_token == pool.cache.token_bytes == token_bytes(chosen)


@pytest.mark.parametrize("format", FORMATS)
def test_host_memory_keeps_codes_and_scales_bit_for_bit(format):
    pool = Pool(model(format), 512)
    noise(pool)
    extent, other = pool.take(100), pool.take(150)
    assert extent and other
    extent.length, extent.phase = 100, 7
    copy = pool.read(extent)
    window = jax.tree.map(lambda a: np.asarray(a)[:, :100], (pool.cache.keys, pool.cache.values))
    same(window, (copy.keys, copy.values))
    head, rest = copy.split(33)
    assert (head.tokens, rest.tokens, rest.phase) == (33, 67, 40)
    before = bits((pool.cache.keys, pool.cache.values))
    target = pool.take(67)
    assert target
    pool.write(target, rest)
    written = pool.read(target)
    same((rest.keys, rest.values), (written.keys, written.values))
    untouched = np.ones(before[0].shape[1], bool)
    untouched[target.offset : target.end] = False
    for old, new in zip(before, bits((pool.cache.keys, pool.cache.values)), strict=True):
        np.testing.assert_array_equal(old[:, untouched], new[:, untouched])


def test_compaction_keeps_codes_and_scales_bit_for_bit():
    pool = Pool(model(), 512)
    noise(pool)
    extents = [pool.take(100) for _ in range(5)]
    for extent in extents:
        assert extent
        extent.length = 100
    kept = [extents[1], extents[3]]
    copies = [pool.read(extent) for extent in kept]
    for i in (0, 2, 4):
        pool.give_back(extents[i])
    assert pool.compact(kept, 300)
    for extent, copy in zip(kept, copies, strict=True):
        again = pool.read(extent)
        same((copy.keys, copy.values), (again.keys, again.values))


def outputs(engine: Engine) -> list[tuple[int, ...]]:
    streams = [engine.submit(prompt, max_new_tokens=8) for prompt in PROMPTS]
    return [tuple(stream.wait().tokens) for stream in streams]


@pytest.mark.slow
def test_branches_run_and_leave_their_memory_in_order():
    more = {"n": 2, "max_new_tokens": 6, "seed": 1}
    found = [generate(model(), PROMPTS, **more).completions for _ in range(2)]
    tokens = [[tuple(each.tokens) for each in run] for run in found]
    assert tokens[0] == tokens[1] and [len(each) for each in tokens[0]] == [6] * 4


@pytest.mark.slow
def test_a_saved_engine_is_restored_where_caches_are_of_the_same_form(tmp_path):
    with Engine(model(), max_rows=2, host_kv_bytes=2**20) as engine:
        first = outputs(engine)
        engine.save(tmp_path, wait=True)
    with Engine(model(), max_rows=2) as restored:
        assert restored.restore(tmp_path) > 60
        assert outputs(restored) == first
    for other, words in ((None, "here they are exact"), ("fp8", "here they are approximated as")):
        with (
            Engine(model(other), max_rows=2) as engine,
            pytest.raises(SaveError, match=rf"approximated as int8, but {words}.*'int8'"),
        ):
            engine.restore(tmp_path)


def test_a_logits_cache_belongs_to_one_form_of_caches():
    with Engine(model(), max_rows=2, logits_cache=10**6) as engine:
        kept = engine.logits_cache
    assert isinstance(kept, LogitsCache)
    with pytest.raises(ValueError, match="make another for it"):
        Engine(model(None), max_rows=2, logits_cache=kept)


def test_a_job_does_not_go_on_with_caches_of_another_form():
    exact, chosen = (identity(model(form)) for form in (None, "int8"))
    assert "approximate_kv" not in exact and chosen["approximate_kv"] == "int8"
    check_identity("the job", chosen, model(), "give another")
    for saved, form in ((exact, "int8"), (chosen, None), (chosen, "fp8")):
        with pytest.raises(ValueError, match="the approximation of its keys and values"):
            check_identity("the job", saved, model(form), "give another")


PROBLEM = "Answer the questions.\n1. 47 + 38\n2. 12 * 7"


def session(form: str | None = "int8", layout: str = "combined") -> Workers:
    chosen = dataclasses.replace(one_layer(), approximate_kv=form)
    return Workers(chosen, PROBLEM, layout=layout, budget=90, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["combined", "interleaved", "contiguous"])
def test_a_session_of_workers_is_saved_and_restored(layout, tmp_path):
    whole = session(layout=layout)
    expected = run(whole)
    assert whole.cache.approximate == "int8" and sum(map(len, expected.values()))
    part = session(layout=layout)
    for _ in part.stream(40):
        pass
    part.save(tmp_path, wait=True)
    chosen = dataclasses.replace(one_layer(), approximate_kv="int8")
    restored = Workers.restore(chosen, tmp_path)
    assert restored.passes == 40 and run(restored) == expected
    assert restored.passes == whole.passes
    with pytest.raises(SaveError, match="approximated as int8, but here they are exact"):
        Workers.restore(one_layer(), tmp_path)
