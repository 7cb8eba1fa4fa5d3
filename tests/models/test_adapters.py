"""Adapters of a model: against PEFT, against merged weights, and what is refused.

The adapters and results in fixtures/adapters were written by scripts/fixtures/make_adapters.py.
"""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxshare import KVCache, Layout, models
from jaxshare.models import AdapterError, AdapterParams, Generation, LoadedModel, LowRank
from jaxshare.models.adapters.adapter_params import layer_shapes
from jaxshare.models.adapters.low_rank import RowAdapters
from jaxshare.models.packed import pack
from jaxshare.quantised import is_quantised
from jaxshare.sharding import make_mesh
from tests.helpers import LATENT, TINY, init, mostly_slow, on_device
from tests.paths import FIXTURES

FOLDER = FIXTURES / "adapters"
CASES = sorted(path.parent.name for path in FOLDER.glob("*/case.json"))
TOLERANCE = 1e-4  # float32 logits of order 1 to 7
MODEL = LoadedModel(TINY, init(TINY), None, Generation())


def random_adapter(config, rank, seed=0, targets=("q", "k", "v", "o", "gate", "up", "down")):
    """An adapter about as large as half of the kernels that it is added to."""
    made = models.new_adapter(config, rank, targets=targets, seed=seed)
    rng = np.random.default_rng(seed)
    return AdapterParams(
        {
            path: LowRank(
                each.a,
                on_device(0.4 * rng.normal(size=each.b.shape) / rank**0.5, jnp.float32),
                1.5,
            )
            for path, each in made.matrices.items()
        }
    )


@functools.cache
def loaded(case):
    base = json.loads((FOLDER / case / "case.json").read_text())["base"]
    model = models.load(FIXTURES / "parity" / base, dtype="float32")
    with np.load(FOLDER / case / "expected.npz") as expected:
        return model, dict(expected)


def in_pieces(model, tokens, *, layout=None):
    """The logits after each token of a text in row 1 of two, in passes of 16 tokens and of one."""
    cache = KVCache.create(model.config, [8, 64], model.dtype, mesh=model.mesh)
    layout, found = layout or Layout.from_blocks([[0], [1]]), []
    for size in [16, 16, *[1] * 16]:
        start = sum(map(len, found))
        given = np.zeros((2, size), np.int32)
        given[1] = tokens[start : start + size]
        logits, cache = model.forward(given, [0, size], cache, layout, every=True)
        found.append(np.asarray(logits[1]))
    return np.concatenate(found)


def test_there_are_fixtures():
    assert len(CASES) == 6, f"{FOLDER} lacks adapters: make them with scripts/fixtures"


@pytest.mark.parametrize("case", mostly_slow(CASES, 2))
def test_merged_weights_have_the_logits_of_peft(case):
    model, expected = loaded(case)
    adapter = models.load_adapter(FOLDER / case, model.config)
    run = jax.jit(functools.partial(model.module.apply, method="causal"))
    for params, name in ((model.params, "base"), (None, "logits")):
        params = params or models.merged(model.params, adapter, model.config)
        logits = np.asarray(run(params, expected["tokens"][None])[0])
        np.testing.assert_allclose(logits, expected[name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", mostly_slow(CASES, 1))
def test_passes_over_a_cache_have_the_logits_of_peft(case):
    model, expected = loaded(case)
    served = model.with_adapters({"own": FOLDER / case}, max_adapters=3, max_rank=9)
    for name, wanted in ((None, "base"), ("own", "logits")):
        logits = in_pieces(served.using(name), expected["tokens"])
        np.testing.assert_allclose(logits, expected[wanted], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_peft_has_written(case, tmp_path):
    model, _ = loaded(case)
    adapter = models.load_adapter(FOLDER / case, model.config)
    models.save_adapter(tmp_path, adapter, model.config)
    own, theirs = (
        safetensors.numpy.load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path, FOLDER / case)
    )
    assert own.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_array_equal(own[name], theirs[name])
    again = models.load_adapter(tmp_path, model.config)
    assert again.digest == adapter.digest and again.base == adapter.base == model_name(case)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["peft_type"] == "LORA" and written["r"] in {len(a) for a in own.values()}


def model_name(case):
    return json.loads((FOLDER / case / "case.json").read_text())["base"]


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (20, 1), (4, 16), (20, 4)])
def test_what_is_added_is_the_product_of_the_rows_own_matrices(shape):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(5, 3, 12)), rng.normal(size=(5, 7, 3))
    a[0] = b[0] = 0
    x = rng.normal(size=(*shape, 12))
    rows = rng.integers(0, 5, shape[0])
    added = RowAdapters(*(on_device(each, jnp.float32) for each in (a, b)), on_device(rows))
    expected = [x[row] @ a[place].T @ b[place].T for row, place in enumerate(rows)]
    found = added.product(on_device(x, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert not np.asarray(found)[rows == 0].any()


def test_a_row_with_numbers_that_are_not_finite_leaves_the_others_alone():
    a, b = np.ones((3, 2, 4), np.float32), np.ones((3, 4, 2), np.float32)
    x = np.ones((40, 1, 4), np.float32)
    x[0] = np.inf
    rows = on_device([1, 2] * 20)
    found = np.asarray(RowAdapters(on_device(a), on_device(b), rows).product(on_device(x)))
    assert not np.isfinite(found[0]).any() and (found[1:] == 8).all()


TEXT = np.random.default_rng(1).integers(3, 101, 48).astype(np.int32)


def merged_logits(model, adapter):
    """What plain causal attention computes with merged weights."""
    params = models.merged(model.params, adapter, TINY) if adapter else model.params
    return np.asarray(MODEL.module.apply(params, TEXT[None], method="causal")[0])


@functools.cache
def adapters():
    return {
        "small": random_adapter(TINY, 1, 1, ("v",)),
        "large": random_adapter(TINY, 6, 2),
        "mlp": random_adapter(TINY, 4, 3, ("gate", "down")),
    }


def test_rows_with_several_adapters_and_none_in_one_pass():
    served = MODEL.with_adapters(adapters())
    assert served.adapters.max_adapters == 3 and served.adapters.max_rank == 6
    names = ["large", None, "small", "mlp", "large", None]
    places = [served.adapters.named(name).place if name else 0 for name in names]
    cache = KVCache.create(TINY, [64] * 6, jnp.float32)
    layout = served.adapted(Layout.from_blocks([[i] for i in range(6)]), places)
    first, cache = served.forward([TEXT[:40]] * 6, [40] * 6, cache, layout)
    second, cache = served.forward([TEXT[40:41]] * 6, [1] * 6, cache, layout)
    for row, name in enumerate(names):
        expected = merged_logits(MODEL, name and adapters()[name])
        np.testing.assert_allclose(first[row], expected[39], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(second[row], expected[40], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_packed_projections():
    packed = dataclasses.replace(MODEL, params=pack({"params": {**MODEL.params["params"]}}, TINY))
    served = packed.with_adapters(adapters()).using("large")
    expected = merged_logits(MODEL, adapters()["large"])
    np.testing.assert_allclose(in_pieces(served, TEXT), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_bfloat16_is_as_far_from_float32_as_the_base_is():
    low = dataclasses.replace(
        MODEL, params=jax.tree.map(lambda p: p.astype("bfloat16"), MODEL.params)
    )
    served = low.with_adapters(adapters())
    errors = []
    for name in (None, "large"):
        exact = merged_logits(MODEL, name and adapters()[name])
        errors.append(np.abs(in_pieces(served.using(name), TEXT) - exact).mean())
    assert errors[1] < 2 * errors[0]


@pytest.mark.slow
def test_a_mesh_with_heads_and_mlp_split_and_kv_heads_repeated():
    mesh = make_mesh(tensor=4)
    served = MODEL.on(mesh).with_adapters(adapters())
    expected = merged_logits(MODEL, adapters()["large"])
    found = in_pieces(served.using("large"), TEXT)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    found = in_pieces(served.using(None), TEXT)
    np.testing.assert_allclose(found, merged_logits(MODEL, None), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "case", mostly_slow(["gptq_phi3", "bitsandbytes_nf4_llama", "fp8_tensors_llama"], 0)
)
def test_beside_a_quantised_base(case):
    base = models.load(FIXTURES / "quantised" / case, dtype="float32")
    text = TEXT % base.config.vocab_size
    adapter = random_adapter(base.config, 3)
    with pytest.raises(
        AdapterError, match="is quantised, and the sum with an adapter would not be"
    ):
        models.merged(base.params, adapter, base.config)
    plain = jax.tree.map(
        lambda each: on_device(each.dequantised(jnp.float32)) if is_quantised(each) else each,
        base.named_params,
        is_leaf=is_quantised,
    )
    params = models.merged(plain, adapter, base.config)
    expected = np.asarray(base.module.apply(params, text[None], method="causal")[0])
    found = in_pieces(base.with_adapters({"a": adapter}).using("a"), text)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_a_merge_has_gradients_and_needs_plain_kernels():
    adapter = random_adapter(TINY, 2)

    def loss(adapter):
        params = models.merged(MODEL.params, adapter, TINY)
        return MODEL.module.apply(params, TEXT[None, :8], method="causal").mean()

    grads = jax.jit(jax.grad(loss))(adapter)
    path = ("layers_1", "attention", "o")
    one = adapter.matrices[path]

    def moved(step):
        changed = dataclasses.replace(one, b=one.b.at[0, 0].add(step))
        return loss(dataclasses.replace(adapter, matrices={**adapter.matrices, path: changed}))

    # Of the losses a rounding of 2**-24 of their size remains, over twice the step.
    numeric = (moved(1e-2) - moved(-1e-2)) / 2e-2
    assert one.scale == 1.5
    np.testing.assert_allclose(grads.matrices[path].b[0, 0], numeric, rtol=1e-2, atol=1e-5)


def test_a_new_adapter_adds_nothing():
    made = models.new_adapter(TINY, 4, alpha=2)
    assert {each.scale for each in made.matrices.values()} == {0.5} and made.rank == 4
    assert made.matrices.keys() == layer_shapes(TINY).keys()
    params = models.merged(MODEL.params, made, TINY)
    jax.tree.map(np.testing.assert_array_equal, params, MODEL.params)
    with pytest.raises(
        ValueError, match="targets has 'qq'; the model's layers for adapters are down"
    ):
        models.new_adapter(TINY, targets=["qq"])


# What is refused.


def changed(tmp_path, case="patterns", *, tensors=None, **settings):
    """A copy of a fixture with other settings or tensors."""
    folder = tmp_path / "copy"
    shutil.copytree(FOLDER / case, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    if tensors:
        weights = folder / "adapter_model.safetensors"
        found = safetensors.numpy.load_file(weights)
        safetensors.numpy.save_file(tensors(found), weights)
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, 'peft_type is "IA3", but only LORA is supported'),
        ({"use_dora": True}, r"use_dora is true, but adapters with magnitudes \(DoRA\)"),
        ({"bias": "all"}, 'bias is "all", but biases of the base stay as they are'),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*lm_head.*, but whole modules"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa", but such a start changes'),
        ({"layer_replication": [[0, 2]]}, "unknown settings that may change .* layer_replication"),
        ({"rank_pattern": {"(a+)+b": 3}}, "without repeated groups; name the modules"),
        ({"r": 3}, r"q_proj have shapes .* by adapter_config.json its rank is 3"),
        ({"r": 0}, "r is 0, but must be greater than 0"),
        ({"target_modules": ["q_proj", "o_proj"]}, "'o_proj' among target_modules, but"),
    ],
)
def test_settings_that_are_not_supported_are_named(settings, message, tmp_path):
    model, _ = loaded("patterns")
    with pytest.raises(AdapterError, match=message):
        models.load_adapter(changed(tmp_path, **settings), model.config)


def renamed(old, new):
    return lambda found: {name.replace(old, new): value for name, value in found.items()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            renamed("layers.1.", "layers.7."),
            "layers.7.mlp.down_proj, a layer that the model does not",
        ),
        (renamed("mlp.down_proj", "mlp.expert"), "of model.layers.0.mlp.expert, a layer that"),
        (renamed("lora_A.weight", "lora_embedding_A"), "only pairs of lora_A and lora_B"),
        (renamed("0.mlp.down_proj.lora_A", "0.mlp.up_proj.lora_A"), "lacks lora_.*mlp.*fetch"),
        (lambda found: {name: value * np.inf for name, value in found.items()}, "are not finite"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(tensors, message, tmp_path):
    model, _ = loaded("patterns")
    with np.errstate(invalid="ignore"):
        folder = changed(tmp_path, tensors=tensors)
    with pytest.raises(AdapterError, match=message):
        models.load_adapter(folder, model.config)


def test_an_adapter_for_another_base_is_refused_by_name(tmp_path):
    message = r"gate_proj, a layer that .* another base \(it was made for qwen3_gqa_tied\)"
    with pytest.raises(AdapterError, match=message):
        models.load_adapter(FOLDER / "all_linear", loaded("fused_stabilised")[0].config)
    wide = random_adapter(dataclasses.replace(TINY, hidden_size=64), 2)
    with pytest.raises(
        AdapterError, match=r"'wide' has matrices of shapes \[2, 64\].*another base"
    ):
        MODEL.with_adapters({"wide": wide})
    latent = LoadedModel(LATENT, init(LATENT), None, Generation())
    with pytest.raises(
        AdapterError, match="layers_0/attention/q, which the model does not have as"
    ):
        latent.with_adapters({"q": random_adapter(TINY, 2, targets=("q",))})
    experts, _ = loaded("attention_beside_experts")
    folder = changed(
        tmp_path,
        "attention_beside_experts",
        tensors=renamed("self_attn.o_proj", "mlp.gate"),
        target_modules=["q_proj"],
    )
    with pytest.raises(AdapterError, match=r"mlp\.gate, and adapters of such a layer are not"):
        models.load_adapter(folder, experts.config)


def test_files_that_cannot_be_read(tmp_path):
    config = loaded("patterns")[0].config
    with pytest.raises(FileNotFoundError, match="is no folder; an adapter is a folder with"):
        models.load_adapter(tmp_path / "absent", config)
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        models.load_adapter(tmp_path, config)
    folder = changed(tmp_path)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(AdapterError, match="is not a complete safetensors file"):
        models.load_adapter(folder, config)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(
        FileNotFoundError, match=r"only adapter_model\.bin: pickled weights are never"
    ):
        models.load_adapter(folder, config)


def test_places_are_bounded():
    given = adapters()
    with pytest.raises(AdapterError, match="3 adapters are given, but max_adapters is 2"):
        MODEL.with_adapters(given, max_adapters=2)
    with pytest.raises(AdapterError, match="'large' has rank 6, but there is room for rank 4"):
        MODEL.with_adapters(given, max_rank=4)
    with pytest.raises(AdapterError, match="the name of an adapter is 'a b'"):
        MODEL.with_adapters({"a b": given["small"]})
    with pytest.raises(AdapterError, match="'x' is not loaded; loaded are: large, mlp, small"):
        MODEL.with_adapters(given).using("x")
    with pytest.raises(AdapterError, match="the model has no places for adapters"):
        MODEL.using("x")
