"""Multi-head latent attention over shared blocks, absorbed and expanded, against float64 numpy that
makes a key and a value for every head and lays every row's end to end (`DenseModel`)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache, Layout
from jaxshare.attention.expansion import HeadMakers
from jaxshare.models import Generation, LoadedModel, packed, reencode
from jaxshare.models.cached_layer import run_layer
from jaxshare.models.layers import Decoder
from jaxshare.models.mla import MLA
from jaxshare.models.tensor_parallel import fit
from jaxshare.sharding import make_mesh
from jaxshare.trace.recorder import Recorder
from tests.helpers import LATENT, DenseModel, init, mostly_slow
from tests.models.test_reencoding import assert_same_cache

CAPACITIES = (200, 48, 48, 48, 0)
WIDTH, ROWS, LISTED = 6, 3, 4
CLOSE = {"rtol": 0, "atol": 2e-4}
WITHOUT_RANK = dataclasses.replace(
    LATENT, out_bias=True, mla=dataclasses.replace(LATENT.mla, q_lora_rank=0, bias=True)
)
CONFIGS = {"queries of a latent": LATENT, "queries of the input, and biases": WITHOUT_RANK}
SPLITS = dataclasses.replace(LATENT, vocab_size=104)
"""Sizes that divide over two devices."""


def loaded(config, **more) -> LoadedModel:
    return LoadedModel(config, init(config), None, Generation(), **more)


def session(
    model: LoadedModel, dense: DenseModel, recorder: Recorder | None = None
) -> tuple[KVCache, np.ndarray]:
    """Workers in three layouts, and moves: the logits of every token, compared with numpy's, which
    are returned."""
    rng = np.random.default_rng(5)
    cache = KVCache.create(model.config, CAPACITIES, jnp.float32, mesh=model.mesh)
    exact = []

    def feed(counts: list[int], rows: list[list[int]]) -> None:
        nonlocal cache
        tokens = [rng.integers(0, 101, n).tolist() for n in counts]
        padded = np.zeros((ROWS, WIDTH), np.int32)
        for r, new in enumerate(tokens):
            padded[r, : len(new)] = new
        layout = Layout.from_blocks(rows, num_rows=ROWS, width=LISTED)
        count = [*counts, *[0] * (ROWS - len(rows))]
        logits, cache = model.forward(padded, count, cache, layout, every=True)
        if recorder:
            recorder.feed(tokens, rows)
        for r, expected in enumerate(dense.forward(tokens, rows)):
            np.testing.assert_allclose(np.asarray(logits)[r, : counts[r]], expected, **CLOSE)
            exact.append(expected)

    def move(source: int, target: int) -> None:
        nonlocal cache
        cache = cache.move(source, target)
        dense.move(source, target)
        if recorder:
            recorder.move(source, target)

    feed([6], [[0]])
    feed([1], [[0]])
    for _ in range(2):  # each reads the other's step at its end
        feed([5, 6], [[0, 2, 1], [0, 1, 2]])
    move(1, 0)
    feed([1, 1, 1], [[0, 2, 1], [2, 0, 3], [0, 3, 2][:1]])  # one's own before the history
    feed([3, 1], [[0, 1], [0, 1, 2]])  # one way
    move(2, 0)
    move(3, 1)
    feed([1], [[0, 1]])
    return cache, np.concatenate(exact)


@pytest.mark.parametrize("config", mostly_slow(CONFIGS.values()), ids=CONFIGS)
def test_workers_in_three_layouts_and_their_traces(config):
    model, recorder = loaded(config), Recorder(len(CAPACITIES), CAPACITIES)
    cache, exact = session(model, DenseModel(config, model.params, len(CAPACITIES)), recorder)
    logits, again = reencode(model, recorder.trace())
    np.testing.assert_allclose(logits, exact, **CLOSE)
    assert_same_cache(again, cache, **CLOSE)


EXPANDED = LATENT.mla.expands_from


@pytest.fixture
def expansions(monkeypatch):
    """The tiles that are expanded by programs traced from here on, as their shapes."""
    seen, expand = [], HeadMakers.expand
    monkeypatch.setattr(
        HeadMakers,
        "expand",
        lambda makers, cached: seen.append(cached.shape) or expand(makers, cached),
    )
    run_layer.clear_cache()
    return seen


def long_session(config, width: int, mesh=None) -> None:
    """Passes of `width` tokens a row and of one, ragged, in one block, in many, and in three layouts
    of workers: logits of every token, compared with numpy's."""
    whole = loaded(config)
    dense, rng = DenseModel(config, whole.params, 5), np.random.default_rng(width)
    model = whole.on(mesh) if mesh else whole
    cache = KVCache.create(model.config, (*[4 * width] * 4, 0), jnp.float32, mesh=mesh)
    passes = [
        (width, [width], [[0]]),
        (width, [width, 3, width - 1], [[0, 1], [0, 2], [0, 3]]),
        (width, [1, width, 0], [[0, 2, 1], [0, 1, 2], [3]]),  # each reads what the other writes
        (1, [1, 1, 1], [[0, 2, 1], [2, 0, 3], [1, 3, 0]]),
        (width, [width // 2, 2], [[2, 0, 1], [3, 1, 2]]),
        (width, [width - 2], [[1, 2, 3, 0]]),
    ]
    for wide, counts, rows in passes:
        tokens = [rng.integers(0, 101, n).tolist() for n in counts]
        padded = np.zeros((ROWS, wide), np.int32)
        for r, new in enumerate(tokens):
            padded[r, : len(new)] = new
        layout = Layout.from_blocks(rows, num_rows=ROWS, width=LISTED)
        count = [*counts, *[0] * (ROWS - len(rows))]
        logits, cache = model.forward(padded, count, cache, layout, every=True)
        fed = [(new, row) for new, row in zip(tokens, rows, strict=True) if new]
        expected = dense.forward(*map(list, zip(*fed, strict=True)))
        found = (np.asarray(logits)[r, :n] for r, n in enumerate(counts) if n)
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, wanted, **CLOSE)


@pytest.mark.parametrize("width", mostly_slow([EXPANDED, EXPANDED + 9]))
def test_long_passes_make_keys_and_values_and_are_exact(width, expansions):
    long_session(LATENT, width)
    assert expansions


@pytest.mark.slow
def test_passes_below_the_threshold_attend_to_latents(expansions):
    long_session(WITHOUT_RANK, EXPANDED - 1)
    assert not expansions


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tensor": 2, "kv": 2}, {"kv": 4}], ids=str)
def test_long_passes_on_meshes(axes, expansions):
    long_session(SPLITS, EXPANDED + 8, mesh=make_mesh(**axes))
    assert expansions


def test_it_expands_from_where_the_operations_are_fewer():
    """DeepSeek-V3's sizes, counted one by one for each head: q queries and a tile of s tokens."""
    mla = MLA(1536, 512, 128, 64, 128)

    def absorbed(q, s):
        return q * s * (64 + 512) + q * s * 512

    def expanded(q, s):
        return s * 512 * 128 + s * 512 * 128 + q * s * (128 + 64) + q * s * 128

    assert mla.expands_from == 171
    assert expanded(171, 128) < absorbed(171, 128) and expanded(170, 128) > absorbed(170, 128)
    # Latents no larger than the heads' keys and values are never worth expanding.
    assert MLA(0, 8, 16, 8, 16).expands_from > 10**9


def test_a_fork_inside_a_block():
    model = loaded(LATENT)
    dense, rng = DenseModel(LATENT, model.params, 5), np.random.default_rng(6)
    text = rng.integers(0, 101, 6).tolist()
    cache = KVCache.create(LATENT, CAPACITIES, jnp.float32)

    def run(tokens, rows):
        nonlocal cache
        padded = np.zeros((ROWS, WIDTH), np.int32)
        for r, new in enumerate(tokens):
            padded[r, : len(new)] = new
        count = [*map(len, tokens), *[0] * (ROWS - len(tokens))]
        layout = Layout.from_blocks(rows, num_rows=ROWS, width=LISTED)
        logits, cache = model.forward(padded, count, cache, layout, every=True)
        return [np.asarray(logits)[r, : len(new)] for r, new in enumerate(tokens)]

    run([text], [[0]])
    cache = cache.fork(0, 4, 4)
    found = run([[1, 2], [3]], [[0, 4, 1], [0, 2]])
    dense.forward([text], [[0]])
    dense.forward([text[:4]], [[3]])
    expected = [dense.forward(*each)[0] for each in (([[1, 2]], [[0, 1]]), ([[3]], [[3, 2]]))]
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, **CLOSE)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_whole_text_without_a_cache(config):
    model = loaded(config)
    tokens = np.random.default_rng(7).integers(0, 101, 30)
    causal = jax.jit(functools.partial(Decoder(config).apply, method="causal"))
    logits = causal(model.params, tokens[None])
    expected = DenseModel(config, model.params, 1).forward([tokens.tolist()], [[0]])
    np.testing.assert_allclose(logits[0], expected[0], **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", mostly_slow([{"tensor": 2, "kv": 2}, {"tensor": 2}, {"kv": 2}, {"tensor": 4}]), ids=str
)
def test_every_device_has_the_latents_and_a_part_of_the_heads(axes):
    whole = loaded(SPLITS)
    model = whole.on(make_mesh(**axes))
    tensor = axes.get("tensor", 1)
    cache, _ = session(model, DenseModel(SPLITS, whole.params, len(CAPACITIES)))
    assert cache.keys[0].shape[0] == model.kv_repeats == tensor
    params = model.params["params"]["layers_0"]["attention"]
    for name, split in (
        ("q_b", True),
        ("k_b", True),
        ("v_b", True),
        ("q_a", False),
        ("kv_a", False),
    ):
        local = params[name]["kernel"].addressable_shards[0].data.shape[0]
        assert local * (tensor if split else 1) == params[name]["kernel"].shape[0], name
    assert model.fingerprint == whole.fingerprint


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="query heads do not divide over tensor=3"):
        fit(SPLITS, make_mesh(tensor=3))


@pytest.mark.slow
def test_half_precision_is_near():
    model = loaded(LATENT)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), model.params)
    tokens = np.random.default_rng(8).integers(0, 101, 31)
    half, cache = dataclasses.replace(model, params=params), KVCache.create(LATENT, (31,))
    layout, found = Layout.from_blocks([[0]]), []
    for new in (tokens[:30], tokens[30:]):
        logits, cache = half.forward(new[None], [len(new)], cache, layout, every=True)
        found.extend(np.asarray(logits[0]))
    rounded = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    expected = DenseModel(LATENT, rounded, 1).forward([tokens.tolist()], [[0]])[0]
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.slow
def test_packed_parameters_are_the_same_model():
    model = loaded(LATENT)
    joined = packed.pack({"params": {**model.params["params"]}}, LATENT)
    assert "gate_up" in joined["params"]["layers_0"]["mlp"]
    assert joined["params"]["layers_0"]["attention"].keys() == (
        model.params["params"]["layers_0"]["attention"].keys()
    )
    apply = functools.partial(Decoder(LATENT).apply, method="causal")
    tokens = np.arange(9)[None]
    np.testing.assert_allclose(apply(joined, tokens), apply(model.params, tokens), atol=1e-5)
    again = packed.unpack(joined, LATENT)
    jax.tree.map(np.testing.assert_array_equal, again, model.params)
