"""Decode steps of published models with experts: the models themselves, and what a configuration
predicts against what JAX says of tiny models on eight virtual devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare.models import ModelConfig
from jaxshare.models.layers import Decoder
from jaxshare.models.tensor_parallel import ShardedDecoder, fit
from jaxshare.sharding import make_mesh
from scripts.gpu import expert_report, hlo, moe_models, predicted, programs
from tests.helpers import mostly_slow
from tests.models.test_deepseek import V3
from tests.models.test_gpt_oss import GPT_OSS_20B
from tests.models.test_moe_config import QWEN3_30B_A3B

MODELS = {model.name: model for model in moe_models.MODELS}
TINY = {
    "Qwen3-30B-A3B": dict(hidden_size=48, num_heads=8, num_kv_heads=4, vocab_size=128),
    "gpt-oss-20b": dict(hidden_size=32, num_heads=16, num_kv_heads=8, vocab_size=96),
    "DeepSeek-V3": dict(hidden_size=64, num_heads=16, intermediate_size=48, vocab_size=80),
}
PARTS = {
    "Qwen3-30B-A3B": dict(num_experts=16, expert_size=12),
    "gpt-oss-20b": dict(expert_size=32),
    "DeepSeek-V3": dict(num_experts=32, expert_size=16, shared_size=16),
}


def tiny(name: str) -> ModelConfig:
    """A model of the same kind with two layers of each kind, small enough to compile for CPUs."""
    config = MODELS[name].config
    config = moe_models.with_layers(config, moe_models.compiled_layers(config))
    return dataclasses.replace(
        config, **TINY[name], moe=dataclasses.replace(config.moe, **PARTS[name])
    )


@pytest.mark.parametrize(
    ("name", "published"),
    [("Qwen3-30B-A3B", QWEN3_30B_A3B), ("gpt-oss-20b", GPT_OSS_20B), ("DeepSeek-V3", V3)],
)
def test_models_are_those_that_are_published(name, published):
    assert MODELS[name].config == ModelConfig.from_json(published)


def test_two_layers_of_each_kind_are_compiled():
    kept = {m.name: moe_models.compiled_layers(m.config) for m in moe_models.MODELS}
    assert kept == {
        "Qwen3-30B-A3B": (0, 1),
        "gpt-oss-20b": (0, 1, 2, 3),
        "DeepSeek-V3": (0, 1, 3, 4),
    }
    cut = moe_models.with_layers(MODELS["gpt-oss-20b"].config, (2, 3))
    assert (cut.num_layers, cut.windows) == (2, (128, 0))
    assert [str(kind) for kind in predicted.kinds(cut)] == ["experts, window", "experts"]


def shapes_on_devices(config: ModelConfig):
    mesh = make_mesh(tensor=8)
    config = fit(config, mesh)
    params = jax.eval_shape(
        lambda: Decoder(config).init(
            jax.random.key(0), jnp.zeros((1, 2), jnp.int32), method="causal"
        )
    )
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec)
        ),
        params,
        ShardedDecoder(config, mesh).specs(params),
    )


def held(params) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(params)
    )


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_a_device_are_those_that_jax_lays_there(name):
    model = MODELS[name]
    for config in (
        tiny(name),
        moe_models.with_layers(model.config, moe_models.compiled_layers(model.config)),
    ):
        params = shapes_on_devices(config)
        assert predicted.weight_bytes(config, 8) == held(params)
    # The last config is the real one, whose inputs divide into groups.
    packed = moe_models.packed_experts(params, model.packing)
    assert predicted.weight_bytes(config, 8, model.packing) == held(packed)
    assert (held(packed) < held(params)) == (model.packing is not None)


def test_published_sizes():
    """Of the model cards: parameters, and the 12.8 GiB of gpt-oss-20b's checkpoint, in which a
    scale is one byte."""
    published = {"Qwen3-30B-A3B": 30.5e9, "DeepSeek-V3": 671.026e9, "gpt-oss-20b": 20.91e9}
    for name, parameters in published.items():
        whole = predicted.weight_bytes(MODELS[name].config, 1)
        assert whole / 2 == pytest.approx(parameters, rel=2e-3)
    stored = predicted.weight_bytes(MODELS["gpt-oss-20b"].config, 1, MODELS["gpt-oss-20b"].packing)
    assert stored / 2**30 == pytest.approx(12.8, rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(MODELS))
def test_what_a_step_sends_and_keeps_on_eight_devices(name):
    """Compiled for eight virtual devices of the CPU, whose collectives are those of GPUs."""
    config, step = tiny(name), programs.Step("5 rows", 5, "shared", 16, 1, False)
    decoding = programs.decoding(step, "xla", config, history=64, mesh=make_mesh(tensor=8))
    compiled = jax.jit(decoding.function, donate_argnums=(1,)).lower(*decoding.arguments).compile()
    found = hlo.collectives(hlo.executed(hlo.computations(compiled.as_text())))
    for layer in range(config.num_layers):
        sent = [(one.kind, one.bytes) for one in found if f"layers_{layer}/" in one.line]
        assert sent == [(each.kind, each.bytes) for each in predicted.sent_by_layer(config, 5)]
    outside = {(one.kind, one.bytes) for one in found if "layers_" not in one.line}
    embeddings, logits = predicted.sent_outside(config, 5)
    # CPUs sum bfloat16 in float32.
    assert {(embeddings.kind, 2 * embeddings.bytes), (logits.kind, logits.bytes)} <= outside
    cache = predicted.cached_bytes(config, 8, 64, 16, 5)["held"]
    # Arenas are of whole tiles, so a cache of so few tokens is larger.
    assert decoding.cache_bytes >= cache
    assert compiled.memory_analysis().argument_size_in_bytes >= predicted.weight_bytes(config, 8)


def test_expected_experts_are_those_of_many_draws():
    moe = MODELS["Qwen3-30B-A3B"].config.moe
    rng = np.random.default_rng(0)
    draws = [
        len({e for _ in range(4) for e in rng.choice(128, 8, replace=False) if e < 16})
        for _ in range(4000)
    ]
    assert predicted.active_experts(moe, 8, 4) == pytest.approx(np.mean(draws), rel=0.03)


def test_bytes_that_are_read():
    config = MODELS["gpt-oss-20b"].config
    whole = predicted.weight_bytes(config, 8)
    # All experts are read by many rows, and of embeddings the rows' own alone.
    embedding = 201088 // 8 * 2880 * 2
    assert predicted.read_bytes(config, 8, 10_000) == pytest.approx(whole - embedding)
    one = predicted.read_bytes(config, 8, 1)
    assert whole - embedding - one == pytest.approx(24 * 3.5 * 3 * 2880 * 2880 * 2)
    cached = predicted.cached_bytes(config, 8, 1000, 200, 3)
    token = 2 * 64 * 2
    assert cached["held"] == 24 * 1600 * token
    assert cached["read"] == 12 * 1600 * token + 12 * 3 * 128 * token


SENT = [{"kind": "all-reduce", "bytes": 80, "times": 2}]
STEP = {
    "backend": "triton",
    "name": "a model",
    "rows": 64,
    "measured": {
        "weight_bytes": 100e9,
        "cache_bytes": 10e9,
        "temp_bytes": 1e9,
        "layer": {"experts": {"products": 3, "others": 17}},
        "attention_by_xla": False,
        "of_attention": {"experts": 6},
        "outside": 100,
        "launches": 300,
        "sent": {"experts": SENT},
        "sent_outside": [*SENT, {"kind": "all-gather", "bytes": 9, "times": 1}],
        "copies_of_experts": {},
        "aliased": 1.0,
        "spill_bytes": 0,
    },
    "predicted": {
        "weight_bytes": 100e9,
        "weight_bytes_in_bfloat16": 200e9,
        "cache_bytes": 10e9,
        "layer": {"experts": {"norms": 2, "all else": 17}},
        "of_attention": 9,
        "launches": 290,
        "sent": {"experts": [{"kind": "all-reduce", "bytes": 80}] * 2},
        "sent_outside": [{"kind": "all-gather", "bytes": 9}],
        "read_bytes": 50e9,
        "read_cache_bytes": 5e9,
        "seconds": dict.fromkeys(("weights", "cache", "sending", "launches", "all"), 0.002),
    },
}


def missed(**changes) -> list[str]:
    step = {**STEP, "measured": {**STEP["measured"], **changes}}
    return [goal.name for goal in expert_report.goals_of_experts(step) if not goal.met]


def test_goals():
    assert missed() == []
    for changes, expected in [
        ({"temp_bytes": 32e9}, "of those it has"),
        ({"copies_of_experts": {"transpose": 1}}, "as much as a layer's experts"),
        ({"aliased": 0.5}, "in place"),
        ({"spill_bytes": 4}, "spill"),
        ({"weight_bytes": 101e9}, "weights, from predicted"),
        ({"cache_bytes": 9e9}, "cache, from predicted"),
        ({"layer": {"experts": {"products": 24}}}, "launches of a layer"),
        ({"attention_by_xla": True}, "launches of a layer"),
        ({"sent": {"experts": SENT * 2}}, "collectives of layers"),
        ({"sent": {"experts": []}}, "collectives of layers"),
        ({"sent_outside": SENT}, "predicted and missing"),
    ]:
        [name] = missed(**changes)
        assert expected in name


def test_the_tables_name_each_model_and_kind_of_layer():
    text = expert_report.experts_text([{**STEP, "error": None}])
    assert "triton: a model: experts" in text and "2 all-reduce of 0.00 MB" in text
    assert "300 (290)" in text and "20 (19)" in text
