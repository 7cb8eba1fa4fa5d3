"""Packed parameters: the same results and the same names as the checkpoint's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache, Layout, models
from jaxshare.models import Decoder, Generation, LoadedModel
from jaxshare.models.packed import pack, unpack
from tests.helpers import TINY, init, mostly_slow

CONFIGS = {
    "llama": TINY,
    "biases": dataclasses.replace(TINY, qkv_bias=True, mlp_bias=True, out_bias=True),
    "norms of queries and keys": dataclasses.replace(TINY, qk_norm=True, tie_embeddings=True),
    "norms over all heads, clipped": dataclasses.replace(
        TINY, qk_norm=False, qk_norm_whole=True, qkv_clip=0.9
    ),
}


def random_params(config):
    """Parameters whose biases are not zero."""
    leaves, form = jax.tree.flatten(init(config))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = [0.1 * jax.random.normal(k, p.shape) for k, p in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(form, [p + n for p, n in zip(leaves, noise, strict=True)])


def packed_copy(params, config):
    """The parameters packed; `pack` empties what it is given."""
    return pack({**params, "params": {**params["params"]}}, config)


def logits(model: LoadedModel):
    cache = KVCache.create(model.config, (16, 16), "float32")
    found, _ = model.forward(
        [[3, 5, 7, 11], [2, 4, 0, 0]], [4, 2], cache, Layout.from_blocks([[0], [1]]), every=True
    )
    return np.concatenate([np.asarray(found)[0], np.asarray(found)[1, :2]])


@pytest.mark.parametrize("name", mostly_slow(CONFIGS))
def test_logits_and_fingerprints_are_those_of_the_parts(name):
    config = CONFIGS[name]
    params = random_params(config)
    plain = LoadedModel(config, params, None, Generation())
    packed = dataclasses.replace(plain, params=packed_copy(params, config))
    np.testing.assert_allclose(logits(packed), logits(plain), rtol=1e-5, atol=1e-5)
    causal = [
        Decoder(config).apply(each.params, jnp.array([[3, 5, 7, 11]]), method="causal")
        for each in (packed, plain)
    ]
    np.testing.assert_allclose(*causal, rtol=1e-5, atol=1e-5)
    assert packed.fingerprint == plain.fingerprint


@pytest.mark.parametrize("name", CONFIGS)
def test_names_come_back(name):
    config = CONFIGS[name]
    params = random_params(config)
    packed = packed_copy(params, config)
    layer = packed["params"]["layers_0"]
    assert set(layer["attention"]) & {"q", "k", "v", "qkv"} == {"qkv"}
    assert set(layer["mlp"]) == {"gate_up", "down"}
    model = LoadedModel(config, packed, None, Generation())
    for found in (model.named_params, unpack(params, config)):
        assert jax.tree.structure(found) == jax.tree.structure(params)
        jax.tree.map(np.testing.assert_array_equal, found, params)


def test_packing_holds_one_layer_twice_at_most():
    """The parts of a layer are let go of before the next one is packed."""
    params = init(TINY)
    params = {**params, "params": {**params["params"]}}
    pack(params, TINY)
    assert params == {}


def test_a_model_is_packed_where_it_is_loaded_for_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    packed = models.load("embedded")
    monkeypatch.undo()
    plain = models.load("embedded")
    assert "qkv" in packed.params["params"]["layers_0"]["attention"]
    assert "q" in plain.params["params"]["layers_0"]["attention"]
    jax.tree.map(np.testing.assert_array_equal, packed.named_params, plain.params)
    assert packed.fingerprint == plain.fingerprint
