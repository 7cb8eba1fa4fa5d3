"""Families on meshes, with packed parameters, and converted, against one device, plain ones and
what was converted."""

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxshare import KVCache, Layout, models
from jaxshare.models import LoadedModel, orbax_io
from jaxshare.models.packed import pack
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow
from tests.paths import FIXTURES

CASES = (
    "phi3_mqa_longrope_short_sharded",  # fused projections, whose kv head is repeated
    "olmo3_gqa_yarn",  # norms over all heads, windows, two rotations
    "glm4_mqa_yarn_no_bias",  # rows in another order
    "gemma2_gqa_softcaps",
    "smollm3_mqa_biases_window",
    "olmoe_gqa_clipped",  # bounds after norms over all heads
    "qwen2_moe_gqa_window_of_lower_layers",
)
TOKENS = np.random.default_rng(5).integers(0, 96, (2, 24))


def load(case: str, **more) -> LoadedModel:
    return models.load(FIXTURES / "parity" / case, dtype="float32", **more)


def logits(model: LoadedModel) -> np.ndarray:
    """Of three passes: a prompt that leaves windows, and two rows that read each other."""
    cache = KVCache.create(model.config, (32, 32, 32), jnp.float32, mesh=model.mesh)
    found = []
    for count, rows in (([24, 0], [[0], [1]]), ([7, 24], [[0, 2, 1], [0, 1, 2]])):
        layout = Layout.from_blocks(rows, num_rows=2, width=3)
        out, cache = model.forward(TOKENS, count, cache, layout, every=True)
        found += [np.asarray(out)[row, :n] for row, n in enumerate(count)]
    return np.concatenate(found)


@pytest.mark.parametrize("case", mostly_slow(CASES))
def test_a_mesh_gives_the_logits_of_one_device(case):
    expected = logits(load(case))
    read = load(case, mesh=make_mesh(tensor=2, kv=2))
    assert read.fingerprint == load(case).fingerprint
    np.testing.assert_allclose(logits(read), expected, atol=1e-4, rtol=0)
    laid = load(case).on(read.mesh)
    for one, other in zip(np.asarray(logits(laid)), np.asarray(logits(read)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_packed_parameters_give_the_same_logits(case):
    model = load(case)
    expected = model.module.apply(model.params, TOKENS, method="causal")
    packed = pack(load(case).params, model.config)
    assert {"qkv", "o"} <= packed["params"]["layers_0"]["attention"].keys()
    found = model.module.apply(packed, TOKENS, method="causal")
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "case",
    mostly_slow(["glm4_gqa_partial", "phi3_gqa", "olmo3_mha", "gemma3_inside_a_model_of_images"]),
)
def test_converted_and_back_every_tensor_is_the_same(case, tmp_path):
    """Fused projections, rows in another order; of a model of images the language model alone."""
    source, there, back = FIXTURES / "parity" / case, tmp_path / "orbax", tmp_path / "back"
    orbax_io.convert(source, there)
    orbax_io.convert(there, back)
    first, last = (safetensors.numpy.load_file(f / "model.safetensors") for f in (source, back))
    of_images = {name for name in first if name.startswith(("vision_tower.", "multi_modal"))}
    assert bool(of_images) == ("images" in case) and first.keys() - of_images == last.keys()
    for name, tensor in last.items():
        assert tensor.dtype == first[name].dtype
        np.testing.assert_array_equal(tensor, first[name])
    assert models.load(there).fingerprint == models.load(source).fingerprint
