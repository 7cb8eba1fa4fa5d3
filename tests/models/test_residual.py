"""Passes in which the kernel that normalises a sum adds a layer's output too, interpreted on the
CPU, against the logits of transformers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import models
from jaxshare.cache import KVCache
from jaxshare.layout import Layout
from jaxshare.models import residual
from jaxshare.models.layers import Decoder, forward
from jaxshare.models.linear import Linear, Turns
from jaxshare.models.tensor_parallel import ShardedDecoder, fit, shard_params
from jaxshare.pallas.device import Device, assume_device
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow
from tests.models import test_adapters as adapters
from tests.models.test_parity import CASES, FOLDER, TOLERANCE, context

GPU = Device("interpreted", 90, 3, interpret=True)
IMPLEMENTATION = ("xla", "triton")
"""Attention is XLA's, and products and norms are a GPU's."""
TOKENS = 12
LATE = [
    "llama_mqa_linear_biases",
    "granite_gqa_tied",
    "deepseek_v3_experts",
    "gpt_oss_gqa_sharded",
]
"""Biases, a multiplier, latents, experts, and layers of both forms."""
AT_ONCE = "gemma2_gqa_softcaps"
"""Its norms come between a part's output and the sum."""

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


@functools.cache
def loaded(case: str) -> tuple[models.LoadedModel, np.ndarray, np.ndarray]:
    """A model, tokens, and the logits that transformers has for them."""
    model = models.load(FOLDER / case, dtype="float32").for_context(context(case))
    with np.load(FOLDER / case / "expected.npz") as expected:
        return model, expected["tokens"][:TOKENS], expected["logits"][:TOKENS]


def passes(config, params, tokens, module=None, mesh=None):
    """The logits of all tokens, in two passes, beside a row that has none."""
    cache = KVCache.create(config, [TOKENS, 4], jnp.float32, mesh=mesh)
    layout, width, found = Layout.from_blocks([[0], [1]]), TOKENS // 2, []
    for part in np.split(tokens, 2):
        rows, count = [part, np.zeros_like(part)], [width, 0]
        logits, cache = forward(
            config, params, rows, count, cache, layout, every=True, module=module
        )
        found.append(np.asarray(logits[0]))
    return np.concatenate(found)


@pytest.mark.parametrize("case", mostly_slow(dict.fromkeys([*LATE[:1], AT_ONCE, *LATE, *CASES]), 2))
def test_logits_are_those_of_transformers(case):
    model, tokens, expected = loaded(case)
    module = Decoder(model.config, IMPLEMENTATION)
    with assume_device(GPU):
        found = passes(model.config, model.params, tokens, module)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def on_mesh(case: str, tensor: int):
    """The logits of a model whose heads are split, those of transformers, and what counts kernels in
    a pass of some tokens."""
    model, tokens, expected = loaded(case)
    mesh = make_mesh(tensor=tensor)
    config = fit(model.config, mesh)
    params = shard_params(model.params, model.config, mesh)
    module = ShardedDecoder(config, mesh, IMPLEMENTATION)
    with assume_device(GPU):
        found = passes(config, params, tokens, module, mesh)
    return found, expected, lambda width: kernels(config, params, module, width, mesh)


def test_devices_of_a_mesh_add_their_sum_late():
    found, expected, counted = on_mesh("llama_mha", 2)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert counted(6) == 2 * loaded("llama_mha")[0].config.num_layers


@pytest.mark.parametrize(
    ("case", "tensor"),
    mostly_slow([("qwen3_gqa_tied", 2), ("qwen2_gqa", 2), ("granite_gqa_tied", 4)], several=True),
)
def test_long_passes_over_a_mesh_are_computed_in_two_groups(case, tensor, monkeypatch):
    """Norms of heads, biases, and a multiplier; each row's first tokens, then the others."""
    monkeypatch.setattr(residual, "_GROUP", 6)  # of two rows with three tokens each
    found, expected, counted = on_mesh(case, tensor)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    sums = 2 * loaded(case)[0].config.num_layers
    # Passes of fewer tokens have one group, and so have those that cannot be halved.
    assert [counted(width) for width in (4, 6, 7, 8)] == [sums, 2 * sums, sums, 2 * sums]


@pytest.mark.parametrize("case", mostly_slow(adapters.CASES))
def test_rows_with_adapters_have_the_logits_of_peft(case):
    """Their products are whole, what is added to them included."""
    model, expected = adapters.loaded(case)
    served = model.with_adapters({"own": adapters.FOLDER / case}, max_adapters=3, max_rank=9)
    layout = dataclasses.replace(Layout.from_blocks([[0], [1]]), adapters=np.array([1, 0]))
    module = Decoder(model.config, IMPLEMENTATION)
    tokens = np.stack([expected["tokens"][:TOKENS]] * 2)
    cache = KVCache.create(model.config, [TOKENS] * 2, jnp.float32)
    with assume_device(GPU):
        found, _ = forward(
            *(model.config, served.variables, tokens, [TOKENS] * 2, cache, layout),
            every=True,
            module=module,
        )
    for logits, name in zip(found, ("logits", "base"), strict=True):
        np.testing.assert_allclose(logits, expected[name][:TOKENS], rtol=0, atol=TOLERANCE)


def kernels(config, params, module, width: int = 1, mesh=None) -> int:
    """The kernels that add and normalise in one pass of so many tokens of two rows."""
    cache = KVCache.create(config, [8, 8], jnp.float32, mesh=mesh)
    tokens, count = jnp.ones((2, width), jnp.int32), jnp.full(2, width, jnp.int32)
    with assume_device(GPU):
        traced = jax.make_jaxpr(module.apply)(
            params, tokens, count, cache, Layout.from_blocks([[0], [1]])
        )
    return calls(traced.jaxpr, "add_and_normalise")


def calls(jaxpr, name: str) -> int:
    """Kernels of this name that a program runs, without loops."""
    found = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found += name in str(equation.params)
            continue
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            found += calls(inner, name) if hasattr(inner, "eqns") else 0
    return found


def test_one_kernel_follows_each_sum():
    """The first norm has nothing to add, and the model's norm comes after the last sum."""
    model, *_ = loaded("llama_mha")
    assert model.config.num_layers > 1
    for implementation, expected in ((IMPLEMENTATION, 2 * model.config.num_layers), ("xla", 0)):
        module = Decoder(model.config, implementation)
        assert kernels(model.config, model.params, module) == expected
    model, *_ = loaded(AT_ONCE)
    assert kernels(model.config, model.params, Decoder(model.config, IMPLEMENTATION)) == 0


@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "pieces"),
    [
        (3, 1024, 64, 8),
        (64, 4096, 96, 8),
        (1, 352, 32, 1),
        (1, 384, 32, 2),
        (4096, 512, 32, 1),
        (2, 255, 32, 1),
    ],
)
def test_products_are_the_sums_of_their_pieces(tokens, inputs, outputs, pieces):
    """As many as give three multiprocessors work, of 128 inputs or more, in whole steps of 32."""
    rng = np.random.default_rng(inputs)
    x, kernel = (
        rng.standard_normal(shape, np.float32) for shape in ((tokens, inputs), (outputs, inputs))
    )
    apply = functools.partial(Linear(outputs).apply, method="in_pieces")
    variables = {"params": {"kernel": jnp.asarray(kernel)}}
    with assume_device(GPU):
        found = np.asarray(jax.jit(lambda p, x: apply(p, x, None, Turns(1)))(variables, x))
    assert found.shape == (pieces, tokens, outputs)
    wide = x.astype(np.float64), kernel.astype(np.float64)
    # Each sum is rounded once a term at most, in whatever order this machine adds.
    bound = inputs * 2**-24 * (np.abs(wide[0]) @ np.abs(wide[1]).T)
    assert (np.abs(found.astype(np.float64).sum(0) - wide[0] @ wide[1].T) <= bound).all()
