"""New parameters in the form of those of a running model: packed, quantised, on meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare.models import Generation, LoadedModel
from jaxshare.models.new_params import ParamsError, ParamsForm
from jaxshare.models.packed import pack
from jaxshare.quantised import is_quantised, quantised
from jaxshare.sharding import make_mesh
from tests.helpers import LATENT, TINY, init, mostly_slow

SPLIT = dataclasses.replace(TINY, num_layers=1, vocab_size=104)


def quantised_params(params, format="int8", group=None):
    """The same parameters with each matrix quantised."""

    def of_one(keys, leaf):
        if keys[-1].key not in ("kernel", "embedding") or leaf.ndim < 2:
            return leaf
        return jax.device_put(quantised(np.asarray(leaf), format, group))

    return jax.tree.map_with_path(of_one, params)


def packed(params, config):
    return pack({**params, "params": {**params["params"]}}, config)


def on_mesh(tensor: int, kv: int = 1, data: int = 1):
    def make(params, config):
        model = LoadedModel(config, params, None, Generation())
        return model.on(make_mesh(tensor=tensor, kv=kv, data=data))

    return make


def plain(change):
    return lambda params, config: LoadedModel(config, change(params, config), None, Generation())


MODELS = {
    "plain": plain(lambda params, config: params),
    "packed": plain(packed),
    "packed and quantised": plain(lambda p, config: packed(quantised_params(p), config)),
    "quantised": plain(lambda p, config: quantised_params(p)),
    "four devices, kv heads twice": on_mesh(4),
    "two by two devices": on_mesh(2, kv=2),
    "quantised on two devices": lambda p, config: on_mesh(2)(quantised_params(p), config),
}
HARDEST = "packed and quantised", "four devices, kv heads twice", "quantised on two devices"


def given_in_each_way(params):
    """As arrays on a device, of NumPy, and put on another device on purpose."""
    yield params
    yield jax.tree.map(lambda array: np.array(array), params)
    yield jax.device_put(params, jax.devices()[5])


@pytest.mark.parametrize("name", mostly_slow(dict.fromkeys([*HARDEST, *MODELS])))
@pytest.mark.parametrize("config", mostly_slow([SPLIT, dataclasses.replace(LATENT, num_layers=1)]))
def test_new_ones_are_as_those_of_a_model_made_of_them(name, config):
    if config.mla and name.startswith("four devices"):
        config = dataclasses.replace(config, vocab_size=104)
    make = MODELS[name]
    old, expected = (make(init(config, seed), config) for seed in (0, 1))
    form = ParamsForm(old)
    named = init(config, 1)
    named = quantised_params(named) if "quantised" in name else named
    for given in (*given_in_each_way(named), expected.params):
        for copy in (True, False):
            found = form.placed(form.check(given), copy=copy)
            same_form_and_numbers(found, expected.params)
    assert dataclasses.replace(old, params=found).fingerprint == expected.fingerprint


def same_form_and_numbers(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (new.shape, new.dtype, new.weak_type) == (old.shape, old.dtype, False)
        assert new.sharding == old.sharding and new.committed == old.committed
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old))


def buffers(params) -> set[int]:
    shards = [s for array in jax.tree.leaves(params) for s in array.addressable_shards]
    return {shard.data.unsafe_buffer_pointer() for shard in shards}


@pytest.mark.parametrize("name", ["plain", "quantised", "two by two devices"])
def test_copies_have_memory_of_their_own(name):
    """Where the arrays are as they should be already, on a mesh too."""
    old, new = (MODELS[name](init(SPLIT, seed), SPLIT) for seed in (0, 1))
    form = ParamsForm(old)
    found = form.placed(form.check(new.params))
    assert not buffers(found) & buffers(new.params)
    shared = form.placed(form.check(new.params), copy=False)
    assert buffers(shared) == buffers(new.params)


def test_parameters_of_one_device_that_a_mesh_has_are_copied():
    params = init(SPLIT, 1)
    form = ParamsForm(on_mesh(2, data=2)(init(SPLIT), SPLIT))
    assert not buffers(form.placed(form.check(params))) & buffers(params)


def test_weak_types_become_strong():
    params = init(SPLIT, 1)
    params["params"]["norm"]["scale"] = jnp.full(SPLIT.hidden_size, 1.0) * 1.0
    weak = jax.tree.map(lambda x: jax.lax.full_like(x, 1.0), params)
    weak["params"]["norm"]["scale"] = jnp.broadcast_to(jnp.asarray(1.0), (SPLIT.hidden_size,))
    assert weak["params"]["norm"]["scale"].weak_type
    form = ParamsForm(LoadedModel(SPLIT, init(SPLIT), None, Generation()))
    found = form.placed(form.check(weak))
    assert not any(array.weak_type for array in jax.tree.leaves(found))


def test_quantised_ones_must_be_quantised_alike():
    params = init(SPLIT)
    form = ParamsForm(LoadedModel(SPLIT, quantised_params(params, "int4", 16), None, Generation()))
    with pytest.raises(ParamsError, match="but the model's is int4 codes for float32"):
        form.check(params)
    for other in (("int8", None), ("int4", 8)):
        with pytest.raises(ParamsError, match=r"is quantised as .* quantise it as the model was"):
            form.check(quantised_params(params, *other))
    given = quantised_params(params, "int4", 16)
    leaf = given["params"]["layers_0"]["mlp"]["up"]["kernel"]
    for value, what in ((jnp.nan, "NaN"), (0, "scales that are zero")):
        bad = dataclasses.replace(leaf, scales=leaf.scales.at[3, 1].set(value))
        given["params"]["layers_0"]["mlp"]["up"]["kernel"] = bad
        with pytest.raises(ParamsError, match=f"layers_0/mlp/up/kernel has values that .*{what}"):
            form.check(given)
    assert is_quantised(leaf)


def test_parts_of_packed_ones_are_named():
    form = ParamsForm(LoadedModel(SPLIT, packed(init(SPLIT), SPLIT), None, Generation()))
    params = init(SPLIT)
    params["params"]["layers_0"]["mlp"]["up"]["kernel"] = jnp.zeros((5, SPLIT.hidden_size))
    with pytest.raises(ParamsError, match=r"mlp/up/kernel is float32\[5, 32\], but .*\[48, 32\]"):
        form.check(params)
    del params["params"]["layers_0"]["mlp"]["up"]
    with pytest.raises(ParamsError, match="layers_0/mlp/up/kernel is missing"):
        form.check(params)
