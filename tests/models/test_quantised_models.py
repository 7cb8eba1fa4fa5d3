"""Models with quantised parameters against the same models with the numbers that these stand for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import models
from jaxshare.cache import KVCache
from jaxshare.layout import Layout
from jaxshare.models.fingerprint import bit_sums
from jaxshare.models.layers import Decoder, forward
from jaxshare.models.linear import dequantised, products
from jaxshare.models.packed import pack, unpack
from jaxshare.models.tensor_parallel import ShardedDecoder, fit, shard_params
from jaxshare.quantised import QuantisedTensor, is_quantised, quantised
from jaxshare.sharding import make_mesh
from tests.helpers import LATENT, TINY, init, mostly_slow, on_device
from tests.paths import FIXTURES

TOKENS = on_device(np.random.default_rng(1).integers(0, 60, (2, 5)), jnp.int32)
FORMATS = [("int8", None), ("int4", 4), ("fp8", 8), ("mxfp4", 4), ("nf4", 4)]


def quantised_params(params, format: str, group: int | None):
    """The same parameters with each matrix quantised, where groups divide its inputs."""

    def of_one(keys, leaf):
        matrix = keys[-1].key in ("kernel", "embedding") and leaf.ndim > 1
        if not matrix or leaf.shape[-1] % (group or 1):
            return leaf
        return jax.device_put(quantised(np.asarray(leaf), format, group))

    return jax.tree.map_with_path(of_one, params)


def plain(params):
    """The numbers that parameters stand for."""
    return jax.tree.map(dequantised, params, is_leaf=is_quantised)


def logits(config, params, module=None, mesh=None):
    layout = Layout.from_blocks([[0], [1]])
    cache = KVCache.create(config, [16, 16], jnp.float32, mesh=mesh)
    count = on_device([5, 3], jnp.int32)
    found, _ = forward(config, params, TOKENS, count, cache, layout, module=module)
    return np.asarray(found)


@pytest.mark.parametrize(
    ("format", "group"), mostly_slow([FORMATS[1], FORMATS[0], *FORMATS[2:]], several=True)
)
@pytest.mark.parametrize("config", mostly_slow([TINY, LATENT]), ids=["heads", "latent"])
def test_a_pass_is_that_with_the_numbers(config, format, group):
    params = quantised_params(init(config), format, group)
    assert sum(map(is_quantised, jax.tree.leaves(params, is_leaf=is_quantised))) > 8
    np.testing.assert_allclose(
        logits(config, params), logits(config, plain(params)), rtol=1e-4, atol=1e-4
    )


def test_a_sequence_without_a_cache_is_that_with_the_numbers():
    params = quantised_params(init(TINY), "int8", None)
    causal = jax.jit(functools.partial(Decoder(TINY).apply, method="causal"))
    found, expected = (causal(each, TOKENS) for each in (params, plain(params)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", mostly_slow(["mixtral_gqa", "gpt_oss_gqa_sharded"]))
def test_experts_are_those_with_the_numbers(case):
    model = models.load(FIXTURES / "parity" / case, dtype="float32")
    params = quantised_params(model.params, "int4", 4)
    np.testing.assert_allclose(
        logits(model.config, params), logits(model.config, plain(params)), rtol=1e-4, atol=1e-4
    )


def test_packed_projections_are_those_of_their_parts():
    params = quantised_params(init(TINY), "int4", 4)
    whole = pack(jax.tree.map(lambda x: x, params), TINY)
    np.testing.assert_allclose(logits(TINY, whole), logits(TINY, params), rtol=1e-4, atol=1e-4)
    again = unpack(whole, TINY)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_parts_of_several_formats_stay_apart():
    params = quantised_params(init(TINY), "int4", 4)
    attention = params["params"]["layers_0"]["attention"]
    attention["v"]["kernel"] = quantised(np.asarray(dequantised(attention["v"]["kernel"])), "int8")
    expected = logits(TINY, params)
    whole = pack(jax.tree.map(lambda x: x, params), TINY)
    assert {"q", "k", "v"} <= whole["params"]["layers_0"]["attention"].keys()
    assert "gate_up" in whole["params"]["layers_0"]["mlp"]
    np.testing.assert_allclose(logits(TINY, whole), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("format", "group"), mostly_slow([("int4", 4), ("int8", None), ("fp8", 4)], several=True)
)
@pytest.mark.parametrize("tensor", mostly_slow([2, 4]))
def test_devices_of_a_mesh_have_their_parts(format, group, tensor):
    params, mesh = quantised_params(init(TINY), format, group), make_mesh(tensor=tensor)
    config = fit(TINY, mesh)
    split = shard_params(params, TINY, mesh)
    gate = split["params"]["layers_0"]["mlp"]["gate"]["kernel"]
    assert isinstance(gate, QuantisedTensor)
    part = gate.codes.addressable_shards[0].data
    assert part.shape == (gate.codes.shape[0] // tensor, gate.codes.shape[1])
    found = logits(config, split, ShardedDecoder(config, mesh), mesh)
    np.testing.assert_allclose(found, logits(TINY, plain(params)), rtol=1e-4, atol=1e-4)
    times = config.num_kv_heads // TINY.num_kv_heads
    sums, expected = bit_sums(split, config, times), bit_sums(params, TINY, 1)
    jax.tree.map(np.testing.assert_array_equal, sums, expected)


def test_groups_that_cannot_be_split_are_named():
    params = quantised_params(init(TINY), "int4", None)
    with pytest.raises(ValueError, match=r"layers_0/.* 1 groups a row, which cannot be split"):
        shard_params(params, TINY, make_mesh(tensor=2))


def test_a_quantised_kernel_of_a_wrong_shape_is_named():
    params = quantised_params(init(TINY), "int8", None)
    mlp = params["params"]["layers_0"]["mlp"]
    mlp["gate"]["kernel"] = mlp["gate"]["kernel"][:3]
    with pytest.raises(ValueError, match=r"gate/kernel is quantised with shape \(3, "):
        logits(TINY, params)


@pytest.mark.parametrize(
    ("format", "out", "rows", "most"),
    # XLA copies the codes of fp8.
    mostly_slow(
        [("int4", 2500, 5, 0.7), ("int8", 2048, 1, 0.7), ("fp8", 3000, 40, 0.9)], several=True
    ),
)
def test_no_plain_copy_of_a_matrix_is_made_by_xla(format, out, rows, most):
    rng = np.random.default_rng(0)
    width, dtype = 1024, jnp.float32
    numbers = rng.standard_normal((3, out, width)).astype(np.float32)
    matrices = [quantised(each, format, 64) for each in numbers]
    order = rng.permutation(width).astype(np.int32)
    matrices[2] = dataclasses.replace(matrices[2], order=order)
    kernels = jax.device_put(matrices)
    x = rng.standard_normal((rows, width)).astype(np.float32)

    def two_layers(x, kernels):
        first, second = products(x, kernels[:2], dtype, "xla")
        (third,) = products(first[:, :width] + second[:, :width], kernels[2:], dtype, "xla")
        return first, second, third

    compiled = jax.jit(two_layers).lower(x, kernels).compile()
    first, second, third = compiled(x, kernels)
    plain = [each.dequantised(np.float64) for each in matrices]
    hidden = np.asarray(first[:, :width] + second[:, :width], np.float64)
    for found, given, matrix in ((first, x, 0), (second, x, 1), (third, hidden, 2)):
        expected = given @ plain[matrix].T
        size = np.abs(expected).mean()  # float32 sums of 1,024 products or more
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5 * size)
    # No dequantised copy outlives its product: not even one of a matrix is made.
    assert compiled.memory_analysis().temp_size_in_bytes < most * out * width * 4
