"""Models with mixtures of experts: workers that read each other, meshes, wrong tensors, memory."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxshare import DecodeState, FinishReason, KVCache, Layout, decode, models
from jaxshare.models import CheckpointError, orbax_io
from jaxshare.models.tensor_names import expected_tensors, stored_shapes
from jaxshare.models.tensor_parallel import fit
from jaxshare.quantised import QuantisedTensor
from jaxshare.sharding import make_mesh
from tests.helpers import DenseModel, mostly_slow
from tests.models.peak_memory import measured
from tests.models.test_moe import by_hand
from tests.paths import FIXTURES

PARITY = FIXTURES / "parity"
SHARED = "qwen2_moe_gqa_dense_layer_yarn"
FAMILIES = [SHARED, "mixtral_gqa", "qwen3_moe_gqa_sharded"]
LAYOUTS = {
    "combined": [[0, 2, 1], [0, 1, 2]],
    "own first": [[2, 0, 1], [1, 0, 2]],
    "three": [[0, 2, 1], [3, 1, 2], [1, 3]],
}


def loaded(case: str) -> models.LoadedModel:
    return models.load(PARITY / case, dtype="float32")


class DenseExperts(DenseModel):
    """With experts in the layers that have them."""

    def __init__(self, config, params, blocks):
        super().__init__(config, _numbers(params), blocks)

    def mlp(self, layer, x):
        if "moe" not in layer:
            return super().mlp(layer, x)
        rows = x.reshape(-1, x.shape[-1])
        return by_hand(self.config.moe, layer["moe"], rows).reshape(x.shape)


def _numbers(params):
    """Parameters whose quantised matrices are plain numbers."""
    return jax.tree.map(
        lambda x: x.dequantised(np.float32) if isinstance(x, QuantisedTensor) else x,
        params,
        is_leaf=lambda x: isinstance(x, QuantisedTensor),
    )


@pytest.mark.parametrize("case", mostly_slow(FAMILIES))
def test_workers_that_read_each_other(case):
    """Ragged passes, in which rows bring several tokens, one or none, in three layouts."""
    model = loaded(case)
    for rows in LAYOUTS.values():
        dense = DenseExperts(model.config, model.params, 4)
        cache = KVCache.create(model.config, (24,) * 4, jnp.float32)
        layout = Layout.from_blocks(rows, num_rows=4, width=3)
        rng = np.random.default_rng(len(rows))
        first = rng.integers(0, 96, 9).tolist()
        _, cache = model.forward(
            np.pad([first[:8]], ((0, 3), (0, 0))),
            [8, 0, 0, 0],
            cache,
            Layout.from_blocks([[0], [], [], []], width=3),
        )
        dense.forward([first[:8]], [[0]])
        for count in ([8, 3, 1], [1, 1, 1], [2, 0, 5], [1, 1, 0]):
            fed = [rng.integers(0, 96, n).tolist() for n in count[: len(rows)]]
            tokens = np.zeros((4, 8), np.int32)
            for r, new in enumerate(fed):
                tokens[r, : len(new)] = new
            given = [*map(len, fed), *[0] * (4 - len(rows))]
            logits, cache = model.forward(tokens, given, cache, layout)
            for r, expected in enumerate(dense.forward(fed, rows)):
                if len(expected):
                    np.testing.assert_allclose(logits[r], expected[-1], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("case", "tensor"),
    mostly_slow(
        [
            (SHARED, 2),
            ("olmoe_gqa_normalised_bias", 4),
            ("mixtral_gqa", 4),
            ("qwen3_moe_gqa_sharded", 4),
            ("mixtral_mha_wide_heads", 2),
        ],
        several=True,
    ),
)
def test_on_a_mesh_as_on_one_device(case, tensor, tmp_path):
    """Loaded onto it from both forms of files, and moved there."""
    orbax_io.convert(PARITY / case, tmp_path / "orbax")
    mesh, one = make_mesh(tensor=tensor), loaded(case)
    tokens, layout = np.arange(16).reshape(2, 8), Layout.from_blocks([[0], [1]])

    def logits(model):
        cache = KVCache.create(model.config, (16, 16), jnp.float32, mesh=model.mesh)
        return np.asarray(model.forward(tokens, [8, 5], cache, layout)[0])

    expected, found = logits(one), one.on(mesh)
    np.testing.assert_allclose(logits(found), expected, rtol=0, atol=2e-5)
    for folder in (PARITY / case, tmp_path / "orbax"):
        other = models.load(folder, dtype="float32", mesh=mesh)
        assert other.fingerprint == one.fingerprint
        for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(other.params), strict=True):
            assert a.sharding == b.sharding
            np.testing.assert_array_equal(a, b)


def test_experts_are_split_over_devices():
    """Four experts whole on two devices; three in parts, and over four devices not at all."""
    split = loaded("mixtral_gqa").on(make_mesh(tensor=2)).params["params"]["layers_0"]["moe"]
    assert {shard.data.shape for shard in split["gate"]["kernel"].addressable_shards} == {
        (2, 56, 32)
    }
    parts = loaded("mixtral_mha_wide_heads").on(make_mesh(tensor=2)).params["params"]["layers_0"]
    assert {shard.data.shape for shard in parts["moe"]["down"]["kernel"].addressable_shards} == {
        (3, 32, 28)
    }
    config = loaded(SHARED).config
    moe = dataclasses.replace(config.moe, num_experts=3, expert_size=10)
    config = dataclasses.replace(config, moe=moe)
    with pytest.raises(ValueError, match=r"3 experts of 10 units .* divide over tensor=4 .* 1, 2$"):
        fit(config, make_mesh(tensor=4))


def test_orbax_and_back(tmp_path):
    orbax_io.convert(PARITY / SHARED, tmp_path / "orbax")
    orbax_io.convert(tmp_path / "orbax", tmp_path / "back")
    first, second = (
        safetensors.numpy.load_file(folder / "model.safetensors")
        for folder in (PARITY / SHARED, tmp_path / "back")
    )
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value.view(np.uint16), second[name].view(np.uint16))


def test_a_router_that_gives_nan_ends_the_row_with_an_error():
    model = loaded("mixtral_gqa")
    router = model.params["params"]["layers_1"]["moe"]["router"]
    router["kernel"] = router["kernel"].at[2].set(jnp.nan)
    cache = KVCache.create(model.config, (24,), jnp.float32)
    state = DecodeState.create(
        cache, Layout.from_blocks([[0]]), [[1, 2, 3]], vocab_size=96, max_new_tokens=4
    )
    state = decode(model.module, model.params, state, passes=8)
    assert state.reasons.tolist() == [FinishReason.ERROR] and state.num_sampled.tolist() == [0]


# Wrong files.


def copied(tmp_path: Path, case: str) -> Path:
    shutil.copytree(PARITY / case, tmp_path / case)
    return tmp_path / case


def rewritten(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


def test_wrong_tensors_of_experts_are_named(tmp_path):
    folder = copied(tmp_path, "mixtral_gqa")
    layer = "model.layers.0.block_sparse_moe"

    def change(tensors):
        del tensors[f"{layer}.experts.2.w1.weight"]
        tensors[f"{layer}.experts.3.w2.weight"] = np.zeros((56, 32), ml_dtypes.bfloat16)
        tensors[f"{layer}.experts.4.w3.weight"] = np.zeros((56, 32), ml_dtypes.bfloat16)
        tensors[f"{layer}.gate.weight"] = np.zeros((5, 32), ml_dtypes.bfloat16)

    rewritten(folder, change)
    with pytest.raises(CheckpointError) as caught:
        models.load(folder)
    for problem in (
        f"{layer}.experts.2.w1.weight is missing",
        f"{layer}.experts.3.w2.weight has shape (56, 32), not (32, 56)",
        f"{layer}.experts.4.w3.weight is unexpected",
        f"{layer}.gate.weight has shape (5, 32), not (4, 32)",
    ):
        assert problem in str(caught.value)
    assert str(caught.value).count("; ") == 4


def test_an_expert_in_two_shards_is_named(tmp_path):
    folder = copied(tmp_path, "qwen3_moe_gqa_sharded")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    other = next(file for file in sorted(folder.glob("*.safetensors")) if file.name != index[name])
    tensors = safetensors.numpy.load_file(other)
    tensors[name] = np.zeros((16, 32), ml_dtypes.bfloat16)
    safetensors.numpy.save_file(tensors, other)
    with pytest.raises(
        CheckpointError, match=f"{name} is in {other.name} and listed in {index[name]}"
    ):
        models.load(folder)


def test_an_expert_that_is_not_finite_is_named(tmp_path):
    folder = copied(tmp_path, "mixtral_gqa")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"

    def change(tensors):
        tensors[name][4, 5] = np.inf

    rewritten(folder, change)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {re.escape(name)} has .* NaN"):
        models.load(folder)


def test_experts_of_several_dtypes_are_read_without_rounding(tmp_path):
    folder = copied(tmp_path, "mixtral_gqa")
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    value = np.random.default_rng(0).standard_normal((56, 32)).astype(np.float32)
    rewritten(folder, lambda tensors: tensors.update({name: value}))
    model = models.load(folder, dtype="float32")
    stacked = model.params["params"]["layers_1"]["moe"]["gate"]["kernel"]
    np.testing.assert_array_equal(stacked[3], value)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="reads the peak of resident memory from /proc"
)
def test_peak_memory_is_little_more_than_the_parameters(tmp_path):
    """Of 16 layers of 16 experts in 64 shards: one stacked parameter is held beside them."""
    write_random_model(tmp_path, layers=16, experts=16, width=512, units=640, shards=64)
    size, peak = measured(tmp_path)
    assert size > 250e6
    assert peak < 1.1 * size, f"{peak / size:.3f} times the parameters of {size / 1e6:.0f} MB"


def write_random_model(
    folder: Path, *, layers: int, experts: int, width: int, units: int, shards: int
) -> None:
    """Writes a model of random parameters."""
    config = json.loads((PARITY / "qwen3_moe_gqa_sharded" / "config.json").read_text())
    config |= dict(
        num_hidden_layers=layers,
        num_local_experts=experts,
        hidden_size=width,
        moe_intermediate_size=units,
    )
    (folder / "config.json").write_text(json.dumps(config))
    expected = expected_tensors(models.ModelConfig.from_json(config))
    shapes = stored_shapes(expected)
    rng = np.random.default_rng(0)
    weight_map = {}
    for i, names in enumerate(np.array_split(sorted(shapes), shards)):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        tensors = {
            str(name): rng.standard_normal(shapes[name], np.float32).astype(ml_dtypes.bfloat16)
            for name in names
        }
        safetensors.numpy.save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
