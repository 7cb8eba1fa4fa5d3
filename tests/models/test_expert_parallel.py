"""Experts over the mesh axis `expert`: tokens that devices send to each other, against one device
and a NumPy loop over tokens and experts."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxshare import KVCache, Layout, models, sharding
from jaxshare.models import LoadedModel, orbax_io
from jaxshare.models.expert_parallel import TokenShare
from jaxshare.models.experts import MixtureOfExperts
from jaxshare.models.tensor_parallel import fit, logical_axes
from jaxshare.serving.engine import Engine
from jaxshare.sharding import make_mesh
from tests.helpers import TINY, mostly_slow
from tests.models.test_moe import FORMS, PLAIN, by_hand, made, tokens
from tests.paths import FIXTURES

PARITY = FIXTURES / "parity"


@functools.cache
def layer(form: str, expert: int, tensor: int = 1):
    """A jitted function of (x [1, N, M], real [1, N]) that computes a layer of experts on a mesh."""
    moe, params = FORMS[form], made(form)
    mesh, config = make_mesh(expert=expert, tensor=tensor), dataclasses.replace(TINY, moe=moe)
    local = moe.on_each_of(expert, tensor)
    axis = sharding.axis_in_use(mesh, sharding.MODEL_AXES)

    def spec(path, leaf):
        names = "layers_0", "moe", *(key.key for key in path)
        return sharding.spec(logical_axes(names, config, mesh))

    def run(params, x, real):
        share = TokenShare.of(local, x.shape[0] * x.shape[1])
        module = MixtureOfExperts(local, axis, share=share)
        if share is None:
            return module.apply({"params": params}, x, real)
        out = module.apply({"params": params}, share.own(x), share.own(real))
        return share.whole(out, x.shape)

    specs = jax.tree.map_with_path(spec, params), PartitionSpec(), PartitionSpec()
    mapped = jax.jit(sharding.on_each(run, mesh, in_specs=specs, out_specs=PartitionSpec()))
    return lambda x, real=None: np.asarray(
        mapped(params, x[None], np.ones((1, len(x)), bool) if real is None else real[None])
    )[0]


@pytest.mark.parametrize(
    ("form", "expert", "tensor"),
    mostly_slow(
        [
            ("deepseek_v3", 2, 2),
            ("mixtral", 4, 1),
            ("gpt_oss", 4, 2),
            ("qwen2", 2, 4),
            ("deepseek_v2", 4, 2),
            ("mixtral", 8, 1),
        ],
        several=True,
    ),
)
def test_tokens_pass_through_experts_of_other_devices(form, expert, tensor):
    """Numbers of tokens that do not divide over the devices; one alone; 135 that all choose the
    same experts, which no message of even routing would hold."""
    run, moe = layer(form, expert, tensor), FORMS[form]
    even, same = tokens(135), np.repeat(tokens(1, seed=3), 135, axis=0)
    for x in (even, same, even[:1], even[: 2 * expert + 1]):
        expected = by_hand(moe, made(form), x)
        np.testing.assert_allclose(run(x), expected, rtol=0, atol=2e-5)


def largest_message(x: np.ndarray) -> int:
    """The most tokens of a device, which has 34, that are for one other."""
    chosen = np.argsort(-(x @ made("mixtral")["router"]["kernel"].T))[:, :2] // 2
    sent = np.any(chosen[..., None] == np.arange(4), axis=1)
    return max(sent[i : i + 34].sum(axis=0).max() for i in range(0, len(x), 34))


def test_a_token_does_not_depend_on_those_beside_it():
    """Bit for bit, whether all tokens fit into short messages or every token is sent."""
    run, x = layer("mixtral", 4), tokens(135)
    crowd = np.concatenate([x[:30], np.repeat(x[:1], 105, axis=0)])
    room = TokenShare(135, 4)._room(PLAIN.on_each_of(4, 1))
    assert largest_message(x) <= room < largest_message(crowd) == 34
    np.testing.assert_array_equal(run(x)[:30], run(crowd)[:30])
    np.testing.assert_array_equal(run(crowd)[30:], np.repeat(run(crowd)[:1], 105, axis=0))


def test_padding_and_tokens_that_are_not_finite_change_no_others():
    run, x = layer("mixtral", 4), tokens(135)
    expected, real = run(x), np.arange(135) % 5 != 1
    filled = np.where(real[:, None], x, np.nan)
    np.testing.assert_array_equal(run(filled, real), np.where(real[:, None], expected, 0))
    x[70, 3] = np.inf  # so that the router selects NaN
    found = run(x)
    assert np.isnan(found[70]).all()
    np.testing.assert_array_equal(np.delete(found, 70, axis=0), np.delete(expected, 70, axis=0))


# Models.


def loaded(case: str, **more) -> LoadedModel:
    return models.load(PARITY / case, dtype="float32", **more)


def logits(model: LoadedModel) -> np.ndarray:
    """Of two rows that read each other, in passes of many tokens that do not divide over the
    devices, and of one."""
    cache = KVCache.create(model.config, (48, 48), jnp.float32, mesh=model.mesh)
    new, found = np.random.default_rng(5).integers(0, 96, (2, 33)), []
    layout = Layout.from_blocks([[1, 0], [0, 1]])
    for width, count in ((33, [33, 20]), (1, [1, 1])):
        out, cache = model.forward(new[:, :width], count, cache, layout, every=True)
        found += [np.asarray(out)[row, :n] for row, n in enumerate(count)]
    return np.concatenate(found)


@functools.cache
def of_one_device(case: str) -> np.ndarray:
    return logits(loaded(case))


SPLITS = {
    "expert 2 x tensor 2": {"expert": 2, "tensor": 2},
    "expert 4": {"expert": 4},
    "expert 2 x kv 2": {"expert": 2, "kv": 2},
    "expert 2": {"expert": 2},
}
FAMILIES = (
    "deepseek_v3_experts",
    "mixtral_gqa",
    "gpt_oss_mqa_yarn_mxfp4",
    "qwen3_moe_gqa_sharded",
    "qwen2_moe_gqa_dense_layer_yarn",
)


@pytest.mark.parametrize(
    ("case", "split"),
    mostly_slow(
        [
            *zip(FAMILIES[:1], SPLITS, strict=False),
            *((case, split) for case in FAMILIES for split in [*SPLITS][case == FAMILIES[0] :]),
        ],
        0,
        several=True,
    ),
)
def test_a_mesh_gives_the_logits_of_one_device(case, split):
    """Read onto it and moved there, with a fingerprint that is the same."""
    read, one = loaded(case, mesh=make_mesh(**SPLITS[split])), loaded(case)
    np.testing.assert_allclose(logits(read), of_one_device(case), rtol=0, atol=2e-5)
    moved = one.on(read.mesh)
    assert read.fingerprint == one.fingerprint == moved.fingerprint
    for a, b in zip(jax.tree.leaves(moved.params), jax.tree.leaves(read.params), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


def test_orbax_is_restored_onto_the_axis(tmp_path):
    case, mesh = "mixtral_gqa", make_mesh(data=2, expert=2, tensor=2)
    orbax_io.convert(PARITY / case, tmp_path / "orbax")
    found = models.load(tmp_path / "orbax", dtype="float32", mesh=mesh)
    experts = found.params["params"]["layers_0"]["moe"]["up"]["kernel"]
    assert {shard.data.shape for shard in experts.addressable_shards} == {(1, 56, 32)}
    assert found.fingerprint == loaded(case).fingerprint
    assert [replica.mesh.shape["expert"] for replica in found.replicas()] == [2, 2]


def test_three_experts_are_whole_along_expert_and_in_parts_along_tensor():
    config = dataclasses.replace(
        loaded("mixtral_mha_wide_heads").config, num_heads=12, num_kv_heads=12
    )
    assert config.moe.num_experts == 3
    local = config.moe.on_each_of(3, 2)
    assert (local.num_held, local.expert_size, local.axes) == (1, 28, ("expert",))
    names = ("layers_0", "moe", "down", "kernel")
    spec = sharding.spec(logical_axes(names, config, make_mesh(expert=3, tensor=2)))
    assert spec == PartitionSpec("expert", None, "tensor")


def collectives(model: LoadedModel, width: int) -> dict[str, int]:
    """The collectives of a pass of two rows, in the compiled program."""
    cache = KVCache.create(model.config, (64, 64), jnp.float32, mesh=model.mesh)
    arguments = jnp.zeros((2, width), jnp.int32), jnp.full(2, width), cache
    run = jax.jit(lambda params, *rest: model.module.apply(params, *rest))
    layout = Layout.from_blocks([[0], [1]])
    text = run.lower(model.params, *arguments, layout).compile().as_text()
    kinds = "all-to-all", "reduce-scatter", "all-gather", "all-reduce"
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}


def test_many_tokens_are_sent_and_few_are_summed():
    """Two layers: for many tokens each has two branches of messages, and no sum over all devices."""
    model = loaded("mixtral_gqa", mesh=make_mesh(expert=4))
    few, many = collectives(model, 1), collectives(model, 32)
    assert few["all-to-all"] == few["reduce-scatter"] == 0
    # Of a layer: there and back in short messages, or back alone, where all tokens are gathered.
    assert many["all-to-all"] == 2 * 3 and many["reduce-scatter"] == 2
    assert few["all-reduce"] - many["all-reduce"] == 2 * 2


@pytest.mark.slow
def test_the_text_of_an_engine():
    prompts = [np.random.default_rng(i).integers(0, 96, 70 - i).tolist() for i in range(3)]

    def texts(model: LoadedModel) -> list[list[int]]:
        with Engine(model, max_rows=3) as engine:
            streams = [engine.submit(prompt, max_new_tokens=8) for prompt in prompts]
            return [list(stream.wait().tokens) for stream in streams]

    one = loaded("mixtral_gqa")
    assert texts(one.on(make_mesh(expert=2, kv=2))) == texts(one)


@pytest.mark.parametrize(
    ("case", "sizes", "message"),
    [
        ("llama_mha", {"expert": 2}, "no experts, which expert=2 would split; use tensor=2"),
        (
            "mixtral_mha_wide_heads",
            {"expert": 2},
            r"3 experts of 56 units .*over expert=2 devices; expert may be 1.*, and alone tensor may",
        ),
        ("mixtral_gqa", {"expert": 8}, "4 query heads do not divide over expert=8 devices"),
        ("mixtral_gqa", {"expert": 4, "tensor": 2}, "4 query heads .* over expert=4 x tensor=2 "),
    ],
)
def test_a_mesh_that_a_model_does_not_divide_over_is_refused(case, sizes, message):
    config = models.ModelConfig.from_json(PARITY / case)
    with pytest.raises(ValueError, match=message):
        fit(config, make_mesh(**sizes))


def test_the_messages_of_few_devices_are_whole():
    """Where even routing sends most tokens everywhere, none are chosen."""
    assert TokenShare(64, 2)._room(PLAIN.on_each_of(2, 1)) == 32
