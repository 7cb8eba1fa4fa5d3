"""Reading the parts of a mesh's devices: against parameters that are read whole and then moved, and
the bytes that come from the files."""

import contextlib
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxshare import models
from jaxshare.models import CheckpointError, partial_reads
from jaxshare.models.partial_reads import PartialReader
from jaxshare.models.safetensors_files import stored_tensors
from jaxshare.models.safetensors_io import match_tensors
from jaxshare.models.tensor_parallel import ShardedDecoder, fit
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow
from tests.models.peak_memory import measured_in_parts
from tests.models.test_moe_models import write_random_model
from tests.paths import FIXTURES

PARITY = FIXTURES / "parity"
MESHES = [
    ("mixtral_gqa", {"expert": 2, "tensor": 2}),  # an expert each
    ("gpt_oss_mqa_yarn_mxfp4", {"expert": 4}),  # MXFP4; a kv head for four devices
    ("gpt_oss_gqa_sharded", {"expert": 2, "tensor": 2}),  # experts in one transposed tensor
    ("deepseek_v3_experts", {"tensor": 2, "kv": 2}),  # rows in another order, and of groups
    ("glm4_mqa_yarn_no_bias", {"tensor": 2}),  # the same of a kv head that is repeated
    ("mixtral_mha_wide_heads", {"tensor": 2}),  # a part of each expert
    ("qwen3_moe_mqa_dense_layer_tied", {"tensor": 4}),
    ("phi3_mqa_longrope_short_sharded", {"tensor": 4}),  # fused projections in shards
    ("olmo2_gqa_bias_llama3", {"tensor": 4}),  # norms and biases of repeated heads
]


def bits(x) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)


@pytest.mark.parametrize(("case", "sizes"), mostly_slow(MESHES, 5, several=True))
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_parts_are_those_of_parameters_that_are_read_whole(case, sizes, dtype):
    mesh = make_mesh(**sizes)
    found = models.load(PARITY / case, dtype=dtype, mesh=mesh).params
    expected = models.load(PARITY / case, dtype=dtype).on(mesh).params
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.sharding == other.sharding and one.dtype == other.dtype
        for part, whole in zip(one.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_array_equal(bits(part.data), bits(whole.data))


class CountingSlice:
    """Stands for a tensor of a file, and counts the bytes that are taken of it."""

    def __init__(self, inner, counts: list[int]):
        self.inner, self.counts = inner, counts

    def __getitem__(self, index):
        value = self.inner[index]
        self.counts.append(value.nbytes)
        return value


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("mixtral_gqa", {"expert": 4, "kv": 2}),
        ("deepseek_v3_experts", {"data": 2, "expert": 2, "tensor": 2}),
        ("phi3_mqa_longrope_short_sharded", {"tensor": 4, "kv": 2}),
    ],
)
def test_a_process_reads_what_its_devices_have_once(case, sizes, monkeypatch):
    """A process with two of eight devices that have the same parts, or neighbouring ones."""
    counts: list[int] = []
    opened = partial_reads.opened

    @contextlib.contextmanager
    def counting(stored, name):
        with opened(stored, name) as tensor:
            yield CountingSlice(tensor, counts)

    monkeypatch.setattr(partial_reads, "opened", counting)
    mesh, folder = make_mesh(**sizes), PARITY / case
    whole = models.load(folder, dtype="bfloat16")
    moved = whole.on(mesh)
    stored = stored_tensors(folder)
    assert {tensor.dtype for tensor in stored.values()} <= {"BF16", "F16"}
    expected = match_tensors(whole.config, stored, folder)
    module = ShardedDecoder(fit(whole.config, mesh), mesh)
    reader = PartialReader(stored, expected, whole.config, module, jnp.dtype("bfloat16"))
    mine = [*mesh.devices.flat][2:4]
    distinct = 0
    for path, shape, parts in reader.parts(mine):
        value = moved.params["params"]
        for key in path:
            value = value[key]
        assert value.shape == shape
        shards = {shard.device: shard for shard in value.addressable_shards}
        for device in mine:
            np.testing.assert_array_equal(bits(parts[device]), bits(shards[device].data))
        different = {str(shards[device].index) for device in mine}
        distinct += len(different) * parts[mine[0]].size * 2
    assert sum(counts) == distinct
    everything = sum(leaf.nbytes for leaf in jax.tree.leaves(whole.params))
    assert sum(counts) < 0.75 * everything


def test_a_part_that_is_not_finite_is_named(tmp_path):
    folder, name = tmp_path / "m", "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    shutil.copytree(PARITY / "mixtral_gqa", folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors[name][4, 5] = np.nan
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    mesh = make_mesh(expert=2, tensor=2)
    with pytest.raises(CheckpointError, match=f"{name} has values that are NaN or infinite"):
        models.load(folder, mesh=mesh)
    found = models.load(folder, mesh=mesh, check=False).params["params"]["layers_1"]["moe"]
    assert np.isnan(np.asarray(found["down"]["kernel"])[3, 4, 5])


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="reads the peak of resident memory from /proc"
)
def test_peak_memory_is_little_more_than_the_parts(tmp_path):
    """Of a process that has two of eight devices, in a model of four times what it keeps."""
    write_random_model(tmp_path, layers=16, experts=16, width=512, units=640, shards=64)
    size, peak = measured_in_parts(tmp_path, {"expert": 4, "kv": 2}, 2)
    assert size > 120e6
    assert peak < 1.1 * size, f"{peak / size:.3f} times the parts of {size / 1e6:.0f} MB"
