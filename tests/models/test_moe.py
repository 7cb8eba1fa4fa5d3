"""Mixtures of experts against a NumPy loop over tokens and experts, and what routing must not do."""

import dataclasses
import functools
import importlib.machinery
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxshare import sharding
from jaxshare.models.experts import MixtureOfExperts
from jaxshare.models.moe import MoE, route
from jaxshare.models.ragged import ragged_product
from jaxshare.models.tensor_parallel import logical_axes
from jaxshare.pallas.device import H200, Device, assume_device
from jaxshare.quantised import quantised
from tests.helpers import TINY, mostly_slow, on_device

WIDTH = 24
PLAIN = MoE(num_experts=8, top_k=2, expert_size=12, normalise=True)
FORMS = {
    "mixtral": PLAIN,
    "olmoe": dataclasses.replace(PLAIN, top_k=3, normalise=False),
    "qwen2": dataclasses.replace(PLAIN, normalise=False, shared_size=20, shared_gate=True),
    "deepseek_v2": dataclasses.replace(
        PLAIN, normalise=False, groups=4, top_groups=2, scaling=4.0, shared_size=24
    ),
    "deepseek_v3": dataclasses.replace(
        PLAIN,
        scoring="sigmoid",
        groups=2,
        top_groups=1,
        group_score="top2",
        scaling=2.5,
        choice_bias=True,
        shared_size=12,
    ),
    "gpt_oss": dataclasses.replace(
        PLAIN,
        normalise=False,
        scoring="chosen",
        router_bias=True,
        expert_bias=True,
        swiglu_limit=1.5,
        swiglu_alpha=1.702,
    ),
}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def by_hand(moe: MoE, params, x: np.ndarray) -> np.ndarray:
    """The output of one token after the other, in float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    out = np.zeros_like(x, np.float64)
    for n, token in enumerate(x.astype(np.float64)):
        logits = p["router"]["kernel"] @ token + p["router"].get("bias", 0)
        scores = {"softmax": softmax, "sigmoid": sigmoid, "chosen": lambda s: s}[moe.scoring](
            logits
        )
        choice = scores + p.get("choice_bias", 0)
        allowed = range(moe.num_experts)
        if moe.groups > 1:
            groups = np.split(np.arange(moe.num_experts), moe.groups)
            worth = [
                np.sort(choice[g])[-2 if moe.group_score == "top2" else -1 :].sum() for g in groups
            ]
            best = sorted(range(moe.groups), key=lambda g: -worth[g])[: moe.top_groups]
            allowed = [e for g in best for e in groups[g]]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: moe.top_k]
        weights = scores[chosen]
        if moe.scoring == "chosen":
            weights = softmax(weights)
        if moe.normalise:
            weights = weights / weights.sum()
        for weight, e in zip(weights * moe.scaling, chosen, strict=True):
            gate, up = (
                p[name]["kernel"][e] @ token + (p[name]["bias"][e] if moe.expert_bias else 0)
                for name in ("gate", "up")
            )
            if moe.swiglu_limit:
                gate, up = (
                    np.minimum(gate, moe.swiglu_limit),
                    np.clip(up, -moe.swiglu_limit, moe.swiglu_limit),
                )
                hidden = gate * sigmoid(moe.swiglu_alpha * gate) * (up + 1)
            else:
                hidden = gate * sigmoid(gate) * up
            down = p["down"]["kernel"][e] @ hidden + (
                p["down"]["bias"][e] if moe.expert_bias else 0
            )
            out[n] += weight * down
        if moe.shared_size:
            gate, up = (p["shared"][name]["kernel"] @ token for name in ("gate", "up"))
            shared = p["shared"]["down"]["kernel"] @ (gate * sigmoid(gate) * up)
            if moe.shared_gate:
                shared *= sigmoid(p["shared_gate"]["kernel"][0] @ token)
            out[n] += shared
    return out


@functools.cache
def made(form: str):
    """A module's random parameters, of order 1 as sums, biases included."""
    shapes = jax.eval_shape(MixtureOfExperts(FORMS[form]).init, jax.random.key(0), tokens(1)[None])
    rng = np.random.default_rng(3)

    def fill(leaf):
        scale = leaf.shape[-1] ** -0.5 if leaf.ndim > 1 else 0.3
        return (rng.standard_normal(leaf.shape) * scale * 1.5).astype(np.float32)

    return jax.tree.map(fill, shapes)["params"]


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("moe", "implementation"))
def apply(moe, params, x, real=None, implementation="xla"):
    return MixtureOfExperts(moe, None, implementation).apply({"params": params}, x, real)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
@pytest.mark.parametrize("form", FORMS)
def test_output_is_the_weighted_sum_of_the_chosen_experts(form, implementation):
    x = tokens(12).reshape(3, 4, WIDTH)
    out = apply(FORMS[form], made(form), x, implementation=implementation)
    expected = by_hand(FORMS[form], made(form), x.reshape(-1, WIDTH)).reshape(x.shape)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_parameters_and_tokens(dtype):
    """Weights and sums are float32; only the experts' hidden units are rounded in between."""
    params = jax.tree.map(lambda leaf: on_device(leaf, dtype), made("mixtral"))
    x = on_device(tokens(6), dtype)
    expected = by_hand(PLAIN, params, np.asarray(x, np.float32))
    for implementation in ("xla", "cpu"):
        out = apply(PLAIN, params, x[None], implementation=implementation)[0]
        assert out.dtype == dtype
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=0, atol=0.06)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("form", mostly_slow(["gpt_oss", *FORMS]))
def test_kernels_of_gpus(form):
    """Interpreted; a kernel that reads no nf4 leaves the last product to XLA."""
    params = jax.tree.map(lambda leaf: on_device(leaf, jnp.bfloat16), made(form))
    x = on_device(tokens(6), jnp.bfloat16)
    down = quantised(np.asarray(params["down"]["kernel"]), "nf4")
    with_nf4 = {**params, "down": {**params["down"], "kernel": jax.device_put(down)}}
    plain = {**params, "down": {**params["down"], "kernel": on_device(down.dequantised())}}
    with assume_device(Device("interpreted", 90, 3, interpret=True)):
        for given, right in ((params, params), (with_nf4, plain)):
            lowered = apply.lower(FORMS[form], given, x[None], implementation="triton")
            assert "expert_products" in lowered.as_text(debug_info=True)
            out = lowered.compile()(given, x[None])[0]
            expected = by_hand(FORMS[form], right, np.asarray(x, np.float32))
            # Gate, up, their product and the output are rounded to 8 bits.
            bound = 2**-6 * np.abs(expected).max()
            np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("others", [0, 1, 11, 200])
def test_a_token_does_not_depend_on_what_is_routed_beside_it(others):
    """All of `others` copies choose the token's own experts, which a capacity would not hold."""
    one = tokens(1)
    x = np.concatenate([np.repeat(one, others, axis=0), one, tokens(others, seed=5)])
    for implementation in ("cpu", "xla"):
        alone = apply(PLAIN, made("mixtral"), one[None], implementation=implementation)[0, 0]
        beside = apply(PLAIN, made("mixtral"), x[None], implementation=implementation)[0, others]
        np.testing.assert_allclose(beside, alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_padding_changes_nothing_and_gives_zero(implementation):
    x = tokens(12).reshape(3, 4, WIDTH)
    real = np.arange(4) < np.array([[4], [0], [2]])
    filled = np.where(real[..., None], x, np.nan)
    out = apply(PLAIN, made("mixtral"), filled, real, implementation)
    whole = apply(PLAIN, made("mixtral"), x, implementation=implementation)
    np.testing.assert_allclose(out[real], whole[real], rtol=0, atol=2e-6)
    assert not np.any(out[~real])


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_no_token_at_all(implementation):
    out = apply(PLAIN, made("mixtral"), tokens(2)[None], np.zeros((1, 2), bool), implementation)
    assert not np.any(out)


@pytest.mark.parametrize("form", ["mixtral", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_router_that_selects_nan_gives_nan(form, bad):
    x = tokens(3)
    x[1, 0] = bad
    for implementation in ("xla", "cpu"):
        out = apply(FORMS[form], made(form), x[None], implementation=implementation)[0]
        assert np.isnan(out[1]).all() and np.isfinite(out[::2]).all()


def test_one_logit_of_the_router_that_is_nan_gives_nan():
    logits = jnp.zeros((2, 8)).at[0, 5].set(-jnp.nan)
    _, weight = route(logits, None, dataclasses.replace(PLAIN, scoring="sigmoid"))
    assert np.isnan(weight[0]).all() and np.isfinite(weight[1]).all()


@pytest.mark.parametrize("sizes", [[0, 7, 0, 70], [1, 1, 1, 1], [0, 0, 0, 0], [77, 0, 0, 0]])
def test_ragged_products_and_their_gradients(sizes):
    rng = np.random.default_rng(1)
    rows, kernel = rng.standard_normal((80, 6)), rng.standard_normal((4, 5, 6))
    count = sum(sizes)
    factors = rng.standard_normal((80, 5)) * (np.arange(80) < count)[:, None]
    group = np.repeat(np.arange(4), sizes)

    def loss(rows, kernel):
        y = ragged_product(rows, kernel, jnp.array(sizes), jnp.float32)
        return jnp.sum(jnp.where(factors != 0, y, 0) * factors), y

    arrays = (on_device(each, jnp.float32) for each in (rows, kernel))
    gradients, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(*arrays)
    expected = np.einsum("sm,sfm->sf", rows[:count], kernel[group])
    np.testing.assert_allclose(y[:count], expected, atol=1e-5)
    to_rows = np.zeros_like(rows)
    to_rows[:count] = np.einsum("sf,sfm->sm", factors[:count], kernel[group])
    np.testing.assert_allclose(gradients[0], to_rows, atol=1e-5)
    to_kernel = np.zeros_like(kernel)
    np.add.at(to_kernel, group, np.einsum("sf,sm->sfm", factors[:count], rows[:count]))
    np.testing.assert_allclose(gradients[1], to_kernel, atol=2e-5)


@pytest.mark.parametrize("sizes", [[0, 7, 0, 70], [0, 0, 0, 0]])
def test_ragged_products_of_other_devices(sizes, monkeypatch):
    """XLA's own, and those of tokamax where it is found, which has the interface of JAX's."""
    rng = np.random.default_rng(1)
    rows, kernel = rng.standard_normal((80, 6)), rng.standard_normal((4, 5, 6))
    arrays = [on_device(each, "float32") for each in (rows, kernel)]
    count, group = sum(sizes), np.repeat(np.arange(4), sizes)
    expected = np.einsum("sm,sfm->sf", rows[:count], kernel[group])
    calls = []

    def ragged_dot_general(*arguments, **more):
        calls.append(arguments)
        return jax.lax.ragged_dot_general(*arguments, **more)

    tokamax = types.ModuleType("tokamax")
    tokamax.ragged_dot_general = ragged_dot_general
    tokamax.__spec__ = importlib.machinery.ModuleSpec("tokamax", None)
    for number in (0, 1):
        if number:
            monkeypatch.setitem(sys.modules, "tokamax", tokamax)
        with assume_device(H200):
            y = ragged_product(*arrays, jnp.array(sizes), jnp.float32)
        np.testing.assert_allclose(y[:count], expected, atol=1e-5)
        assert len(calls) == number


@pytest.mark.parametrize(
    ("form", "devices", "experts"),
    mostly_slow(
        [("gpt_oss", 4, 3), ("qwen2", 4, 8), ("gpt_oss", 2, 8), ("qwen2", 4, 3)], 0, several=True
    ),
)
def test_experts_over_the_devices_of_a_mesh(form, devices, experts):
    """Whole experts where they divide over the devices, else a part of each."""
    moe = dataclasses.replace(FORMS[form], num_experts=experts)
    stacked = "router", "gate", "up", "down"
    params = {
        name: jax.tree.map(lambda leaf: leaf[:experts], value) if name in stacked else value
        for name, value in made(form).items()
    }
    mesh, config = sharding.make_mesh(tensor=devices), dataclasses.replace(TINY, moe=moe)
    local = moe.on_each_of(1, devices)
    assert local.axes == (("tensor",) if experts == 8 else ())

    def spec(path, leaf):
        names = "layers_0", "moe", *(key.key for key in path)
        return sharding.spec(logical_axes(names, config, mesh))

    run = sharding.on_each(
        lambda params, x: MixtureOfExperts(local, "tensor").apply({"params": params}, x),
        mesh,
        in_specs=(jax.tree.map_with_path(spec, params), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    x = tokens(6)[None]
    np.testing.assert_allclose(run(params, x), apply(moe, params, x), rtol=0, atol=2e-5)


@pytest.mark.parametrize("sizes", [{3: 2, 17: 1, 39: 5}, {0: 3}, {}])
def test_few_rows_read_their_own_matrices(sizes):
    rng = np.random.default_rng(2)
    rows, kernel = rng.standard_normal((8, 6)), rng.standard_normal((40, 5, 6))
    counts = [sizes.get(group, 0) for group in range(40)]
    group = np.repeat(np.arange(40), counts)
    arrays = [on_device(each, "float32") for each in (rows, kernel)]
    with assume_device(H200):
        y = ragged_product(*arrays, jnp.array(counts), jnp.float32)
    expected = np.einsum("sm,sfm->sf", rows[: len(group)], kernel[group])
    np.testing.assert_allclose(y[: len(group)], expected, atol=1e-5)
