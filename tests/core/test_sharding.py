"""Models, caches and everything that runs on them over meshes of devices, against the same on one
device."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxshare import DecodeState, KVCache, Layout, Rope, Sampler, decode, sharding
from jaxshare.data_parallel import decode_groups, stack, unstack
from jaxshare.models import EMBEDDED, load
from jaxshare.models.generation_config import Generation
from jaxshare.models.loading import LoadedModel
from jaxshare.sharding import STRIPE, CyclicSharding, make_mesh
from tests.helpers import TINY, init, mostly_slow

SPLITS = dataclasses.replace(
    TINY, vocab_size=104, num_heads=8, num_kv_heads=4, intermediate_size=64
)
"""TINY, with sizes that divide over eight devices; 101 tokens would not."""
ONE_LAYER = dataclasses.replace(SPLITS, num_layers=1)
"""For what does not depend on how many layers there are."""
HEADS = {"MHA": 8, "GQA": 4, "MQA": 1}
SHAPES = [
    (d, t, k)
    for d in (1, 2, 4, 8)
    for t in (1, 2, 4, 8)
    for k in (1, 2, 4, 8)
    if d * t * k in (1, 2, 4, 8)
]


def mesh_of(shape):
    return make_mesh(data=shape[0], tensor=shape[1], kv=shape[2])


def model_of(config, seed=0):
    return LoadedModel(config, init(config, seed), None, Generation.from_json({}, {}, "none"))


# Meshes and names.


def test_a_mesh_has_its_axes_and_neighbours_share_kv_then_tensor():
    mesh = make_mesh(data=2, tensor=2, kv=2)
    assert dict(mesh.shape) == {"data": 2, "expert": 1, "tensor": 2, "kv": 2}
    assert [device.id for device in mesh.devices.flat] == list(range(8))
    assert make_mesh(tensor=2).devices.size == 2
    assert [[d.id for d in group.devices.flat] for group in sharding.data_groups(mesh)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tensor": 16},
            r"data 1 x tensor 16 x kv 1 needs 16 devices, but there are 8 cpu devices; make an "
            r"axis smaller",
        ),
        ({"kv": 0}, r"kv is 0; an axis of a mesh has at least 1 device"),
        ({"data": -2}, r"data is -2"),
        (
            {"tensor": 2, "devices": slice(0, 3)},
            r"has 2 devices, but 3 are to be used, .*choose sizes that multiply to 3",
        ),
        ({"tensor": 4, "devices": slice(0, 1)}, r"needs 4 devices, but there is 1 cpu device"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(sizes, message):
    if "devices" in sizes:
        sizes = {**sizes, "devices": jax.devices()[sizes["devices"]]}
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)


def test_names_say_how_an_array_is_cut():
    model = "expert", "tensor"
    assert sharding.spec(("heads", None)) == P(model)
    assert sharding.spec(("kv_heads", "tokens", None)) == P(model, "kv")
    assert sharding.spec((None, "vocab")) == P(None, model)
    assert sharding.spec(("expert_groups", "units", None)) == P(*model)
    assert sharding.spec((None, None)) == P()
    assert sharding.spec(("rows",), {"rows": "data"}) == P("data")
    with pytest.raises(
        ValueError,
        match=r"the dimensions 'units' and 'mlp' of .* would both be cut along the axis 'tensor'",
    ):
        sharding.spec(("units", "mlp"))
    with pytest.raises(
        ValueError,
        match=r"no rule for the dimension 'head' of .*; there are rules for heads, kv_heads",
    ):
        sharding.spec(("head", None))
    with pytest.raises(
        ValueError,
        match=r"the cache has 6 along 'kv_heads', which does not divide over 4 devices, .*tensor 1 "
        r"or 2",
    ):
        sharding.check_shape(
            "the cache", (6, 128, 16), ("kv_heads", "tokens", None), make_mesh(tensor=4)
        )
    with pytest.raises(ValueError, match=r"axes 'expert' x 'tensor'; expert x tensor 1 or 2"):
        mesh = make_mesh(expert=2, tensor=2)
        sharding.check_shape("the cache", (6, 128, 16), ("kv_heads", "tokens", None), mesh)


@pytest.mark.parametrize(
    ("change", "tensor", "message"),
    [
        (
            {"num_heads": 6, "num_kv_heads": 2},
            4,
            r"the model's 6 query heads do not divide over tensor=4 devices; tensor may be 1, 2",
        ),
        (
            {"num_heads": 12, "num_kv_heads": 3},
            2,
            r"3 kv heads do not divide over tensor=2 devices; tensor may be 1",
        ),
        (
            {"intermediate_size": 36},
            8,
            r"36 MLP units do not divide over tensor=8 devices; tensor may be 1, 2, 4",
        ),
    ],
)
def test_a_model_that_does_not_divide_is_refused(change, tensor, message):
    model = model_of(dataclasses.replace(SPLITS, **change))
    with pytest.raises(ValueError, match=message):
        model.on(make_mesh(tensor=tensor))


@pytest.mark.parametrize("devices", mostly_slow([3, 2, 8]))
def test_stripes_deal_out_an_arena(devices):
    """Against a walk over the arena that gives each device its tokens one by one."""
    mesh, arena = make_mesh(kv=devices), 3 * STRIPE * devices
    keeps: list[list[int]] = [[] for _ in range(devices)]
    for index in range(arena):
        keeps[index // STRIPE % devices].append(index)
    sharded = CyclicSharding.over(mesh)
    assert arena % sharded.period == 0

    def look(index):
        count, local = sharded.local_count(index), sharded.is_local(index[:-1])
        return count[None], local[None], sharded.global_index(jnp.arange(arena // devices))[None]

    count, local, index = jax.shard_map(
        look, mesh=mesh, in_specs=P(), out_specs=P("kv"), check_vma=False
    )(jnp.arange(arena + 1))
    for device, kept in enumerate(keeps):
        np.testing.assert_array_equal(
            count[device], [sum(k < i for k in kept) for i in range(arena + 1)]
        )
        np.testing.assert_array_equal(np.flatnonzero(local[device]), kept)
        np.testing.assert_array_equal(index[device], kept)


# Passes.


def run(model):
    """Prefill beyond one stripe, two rows that read each other's blocks and decode, greedily and
    not, a move, and a pass after it."""
    tokens = np.random.default_rng(1).integers(0, SPLITS.vocab_size, (3, 160))
    cache = KVCache.create(model.config, (300, 200, 200), jnp.float32, mesh=model.mesh)
    logits, cache = model.forward(tokens, [150, 0, 0], cache, Layout.from_blocks([[0], [1], [2]]))
    state = DecodeState.create(
        cache,
        Layout.from_blocks([[0, 2, 1], [0, 1, 2]], num_rows=3),
        [[5, 6, 7], [8, 9]],
        vocab_size=model.config.vocab_size,
        samplers=[Sampler(), Sampler(temperature=1.0, top_k=20, min_p=0.01), Sampler()],
        max_new_tokens=24,
        logprobs=True,
    )
    state = decode(model.module, model.params, state, passes=30, width=4)
    after, _ = model.forward(
        np.array([[3], [4], [0]]),
        [1, 1, 0],
        state.cache.move(1, 0),
        Layout.from_blocks([[0], [2]], num_rows=3),
    )
    return {
        "prefill": np.asarray(logits)[0],
        "tokens": state.outputs(),
        "logprobs": np.asarray(state.logprobs)[:2],
        "after": np.asarray(after)[:2],
    }


def headed(heads, layers):
    return model_of(dataclasses.replace(SPLITS, num_kv_heads=HEADS[heads], num_layers=layers))


@functools.cache
def alone(heads, layers):
    return run(headed(heads, layers))


EACH = [
    pytest.param(
        heads,
        shape,
        SPLITS.num_layers,
        id=f"{heads}-{'x'.join(map(str, shape))}",
        marks=pytest.mark.slow,
    )
    for heads in HEADS
    for shape in SHAPES
]


@pytest.mark.parametrize(
    ("heads", "shape", "layers"),
    [pytest.param("MQA", (1, 2, 2), 1, id="one layer"), *EACH],
)
def test_passes_on_a_mesh_are_those_of_one_device(heads, shape, layers):
    expected = alone(heads, layers)
    found = run(headed(heads, layers).on(mesh_of(shape)))
    assert found["tokens"] == expected["tokens"]
    assert len(expected["tokens"][0]) == 24 and len(set(expected["tokens"][1])) > 5
    for what in ("prefill", "logprobs", "after"):
        np.testing.assert_allclose(found[what], expected[what], atol=2e-5, rtol=1e-5, err_msg=what)


@pytest.mark.parametrize("shape", mostly_slow([(1, 2, 2), (1, 1, 4), (1, 4, 1)]))
@pytest.mark.slow
def test_layers_of_several_forms_on_a_mesh(shape):
    """A window and no rotation in one layer, all tokens and a rotation in the other; sinks count
    once, whichever device keeps which tokens."""
    config = dataclasses.replace(
        SPLITS,
        windows=(40, 0),
        layer_ropes=(Rope.none(), SPLITS.rope),
        attention_sinks=True,
        attention_softcap=2.0,
        norm_placement="both",
        norm_adds_one=True,
        logit_softcap=4.0,
    )
    model = model_of(config)
    expected, found = run(model), run(model.on(mesh_of(shape)))
    assert found["tokens"] == expected["tokens"] and len(set(expected["tokens"][1])) > 5
    for what in ("prefill", "logprobs", "after"):
        np.testing.assert_allclose(found[what], expected[what], atol=2e-5, rtol=1e-5, err_msg=what)


def test_a_vocabulary_that_does_not_divide_is_whole_on_every_device():
    config = dataclasses.replace(ONE_LAYER, vocab_size=103)
    model = model_of(config)
    split = model.on(make_mesh(tensor=4))
    assert split.params["params"]["embed"]["embedding"].sharding.spec == P()
    tokens = np.arange(12).reshape(2, 6)

    def logits(model):
        cache = KVCache.create(model.config, (8, 8), jnp.float32, mesh=model.mesh)
        return np.asarray(
            model.forward(tokens, [6, 4], cache, Layout.from_blocks([[0], [1]]), every=True)[0]
        )

    np.testing.assert_allclose(logits(split)[0], logits(model)[0], atol=2e-5)
    np.testing.assert_allclose(logits(split)[1, :4], logits(model)[1, :4], atol=2e-5)


def test_logits_that_are_lost_on_one_device_end_the_row():
    """The vocabulary's last quarter, which one device has, gives a NaN."""
    model = model_of(ONE_LAYER)
    params = jax.tree.map(lambda x: x, model.params)
    params["params"]["head"]["kernel"] = params["params"]["head"]["kernel"].at[100].set(jnp.nan)
    model = dataclasses.replace(model, params=params).on(make_mesh(tensor=4))
    cache = KVCache.create(model.config, (32,), jnp.float32, mesh=model.mesh)
    state = DecodeState.create(
        cache,
        Layout.from_blocks([[0]]),
        [[1, 2, 3]],
        vocab_size=SPLITS.vocab_size,
        max_new_tokens=8,
    )
    state = decode(model.module, model.params, state, passes=12)
    assert state.reasons.tolist() == [8] and state.num_sampled.tolist() == [0]


def test_a_cache_of_another_mesh_is_refused():
    model = model_of(SPLITS).on(make_mesh(tensor=2))
    with pytest.raises(
        ValueError,
        match=r"the cache is on another mesh than the model; create it with mesh=model\.mesh",
    ):
        model.forward(
            [[1]], [1], KVCache.create(model.config, (8,), jnp.float32), Layout.from_blocks([[0]])
        )
    with pytest.raises(ValueError, match="is on a mesh already"):
        model.on(make_mesh(tensor=2))


# What lies where, and what is sent.


def test_every_device_has_its_share_of_the_bytes():
    model = model_of(SPLITS)
    split = model.on(make_mesh(data=1, tensor=4, kv=2))
    cut = {"q", "k", "v", "o", "gate", "up", "down", "embed", "head"}
    for (path, whole), part in zip(
        jax.tree.leaves_with_path(model.params), jax.tree.leaves(split.params), strict=True
    ):
        names = [key.key for key in path]
        shared = names[-2] in cut and not (names[-2] in ("o", "down") and names[-1] == "bias")
        sizes = {shard.data.nbytes for shard in part.addressable_shards}
        assert sizes == {whole.nbytes // 4 if shared else whole.nbytes}, names
        np.testing.assert_array_equal(part, whole)
    cache = KVCache.create(split.config, (1000, 100), jnp.bfloat16, mesh=split.mesh)
    total = sum(a.nbytes for a in (*cache.keys, *cache.values))
    for device in split.mesh.devices.flat:
        here = sum(
            shard.data.nbytes
            for a in (*cache.keys, *cache.values)
            for shard in a.addressable_shards
            if shard.device == device
        )
        assert here == total // 8
    assert (
        cache.keys[0].shape[1] % (2 * STRIPE) == 0
        and total == cache.keys[0].shape[1] * cache.token_bytes
    )


def test_kv_heads_are_repeated_where_there_are_fewer_than_devices():
    config = dataclasses.replace(SPLITS, num_kv_heads=2)
    model = model_of(config)
    split = model.on(make_mesh(tensor=8))
    assert split.config.num_kv_heads == 8
    whole, part = (
        m.params["params"]["layers_0"]["attention"]["k"]["kernel"] for m in (model, split)
    )
    for shard in part.addressable_shards:
        head = shard.device.id * 2 // 8
        np.testing.assert_array_equal(
            shard.data, whole[head * config.head_dim : (head + 1) * config.head_dim]
        )


COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) "
    r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def collectives(model, layers):
    """(kind, elements of its result) of every collective of the compiled decode loop."""
    config = dataclasses.replace(SPLITS, num_layers=layers)
    model = model_of(config).on(model)
    cache = KVCache.create(model.config, (1000, 1000), jnp.float32, mesh=model.mesh)
    state = DecodeState.create(
        cache, Layout.from_blocks([[0], [1]]), [[1], [2]], vocab_size=config.vocab_size
    )
    step = jax.jit(lambda params, state: decode(model.module, params, state, passes=4))
    text = step.lower(model.params, state).compile().as_text()
    found = []
    for shapes, kind in COLLECTIVE.findall(text):
        sizes = [
            int(np.prod([int(n) for n in dims.split(",") if n]))
            for dims in re.findall(r"\w+\[([\d,]*)\]", shapes)
        ]
        found.append((kind, max(sizes)))
    return found


def test_tensor_parallel_passes_have_two_all_reduces_a_layer():
    one, three = (collectives(make_mesh(tensor=4), layers) for layers in (1, 3))
    assert {kind for kind, _ in three} <= {"all-reduce", "all-gather"}
    assert (
        sum(kind == "all-reduce" for kind, _ in three)
        - sum(kind == "all-reduce" for kind, _ in one)
        == 2 * 2
    )
    assert [x for x in three if x[0] == "all-gather"] == [x for x in one if x[0] == "all-gather"]


def test_nothing_that_is_sent_is_as_large_as_a_cache():
    """Over kv only queries' results travel, over tensor only activations; the largest array of both
    is a row of chunks of logits."""
    found = collectives(make_mesh(tensor=2, kv=2), 1)
    rows, heads, dim, vocab, hidden = (
        2,
        SPLITS.num_heads // 2,
        SPLITS.head_dim,
        SPLITS.vocab_size,
        SPLITS.hidden_size,
    )
    assert found and max(size for _, size in found) <= rows * max(
        heads * (dim + 1), vocab, hidden, 256
    )


# Groups.


@pytest.mark.parametrize("group", mostly_slow([{}, {"tensor": 2, "kv": 2}]), ids=str)
def test_groups_decode_side_by_side_and_end_when_they_like(group):
    mesh = make_mesh(data=2, **group)
    plain = model_of(ONE_LAYER)
    model = plain.on(mesh)
    prompts, budgets = [[[1, 2, 3], [4]], [[5, 6], [7, 8, 9]]], [(6, 9), (20, 13)]

    def state_of(model, group):
        cache = KVCache.create(model.config, (40, 40), jnp.float32, mesh=model.mesh)
        return DecodeState.create(
            cache,
            Layout.from_blocks([[0], [1]]),
            prompts[group],
            vocab_size=SPLITS.vocab_size,
            samplers=[Sampler(), Sampler(temperature=0.8)],
            max_new_tokens=budgets[group],
            capacity=20,
            queue=8,
        )

    expected = [
        decode(plain.module, plain.params, state_of(plain, g), passes=40, width=4) for g in range(2)
    ]
    replicas = model.replicas()
    assert [r.mesh for r in replicas] == sharding.data_groups(mesh)
    state = stack([state_of(replica, g) for g, replica in enumerate(replicas)], mesh)
    found = unstack(decode_groups(model.module, model.params, state, passes=40, width=4))
    assert [s.outputs() for s in found] == [s.outputs() for s in expected]
    assert [int(s.passes) for s in found] == [int(s.passes) for s in expected] and int(
        found[0].passes
    ) < int(found[1].passes)
    # They are states like any other, on their groups' devices.
    more, same = (states[1].feed(0, [11]) for states in (found, expected))
    more, same = (dataclasses.replace(s, max_new_tokens=s.max_new_tokens + 4) for s in (more, same))
    assert (
        decode(replicas[1].module, replicas[1].params, more, passes=8, width=4).outputs()
        == decode(plain.module, plain.params, same, passes=8, width=4).outputs()
    )


def test_groups_that_do_not_fit_are_refused():
    mesh = make_mesh(data=2)
    model = model_of(SPLITS).on(mesh)
    states = [
        DecodeState.create(
            KVCache.create(r.config, (16 + 16 * i,), jnp.float32, mesh=r.mesh),
            Layout.from_blocks([[0]]),
            [[1]],
            vocab_size=SPLITS.vocab_size,
        )
        for i, r in enumerate(model.replicas())
    ]
    with pytest.raises(ValueError, match="there are 1 states, but the mesh has 2 data groups"):
        stack(states[:1], mesh)
    with pytest.raises(
        ValueError, match="the state of group 1 has other shapes than that of group 0"
    ):
        stack(states, mesh)


# What is served.


@functools.cache
def embedded(shape=None):
    return load(EMBEDDED, mesh=None if shape is None else mesh_of(shape))


def test_a_checkpoint_is_read_onto_a_mesh_as_it_is_laid_on_one():
    read, laid = embedded((1, 4, 2)), load(EMBEDDED).on(mesh_of((1, 4, 2)))
    assert read.config == laid.config
    jax.tree.map(np.testing.assert_array_equal, read.params, laid.params)
    assert jax.tree.map(lambda x: x.sharding, read.params) == jax.tree.map(
        lambda x: x.sharding, laid.params
    )
