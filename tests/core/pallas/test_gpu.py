"""Every backend against the reference on a GPU.

Head dims, query heads of a kv head, dtypes, widths, and layouts of all kinds.

    python -m pytest -m gpu

Without an NVIDIA GPU that JAX can use they are skipped. Inputs are random and new in every run, and
a failure names their seed; scripts/bench/parts/attention/cases.py describes what is random in them.
The reference runs on the same GPU, in float32, and shares no code with the backends.
scripts/bench/attention.py measures their speed.
"""

import dataclasses
import itertools
import secrets

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxshare import Sampler, Samplers
from jaxshare.attention.api import preferred
from jaxshare.decoding import sampling, truncation
from jaxshare.pallas.device import current_device, lowers_triton
from jaxshare.quantised import QuantisedTensor, quantised
from scripts.bench.parts.attention import cases
from tests.core.pallas import interpreted, products
from tests.core.pallas import test_append_triton as appends
from tests.core.pallas import test_codes as codes_interpreted
from tests.core.pallas import test_expert_products as experts
from tests.core.pallas import test_residual_triton as residual

Heads = cases.Heads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

BACKENDS = ("mosaic_gpu", "triton", "xla")
DIMS, GROUPS, WIDTHS, DTYPES = (
    (64, 80, 96, 128, 192, 256),
    (1, 2, 4, 5, 8, 16),
    (1, 8, 64),
    ("bfloat16", "float16"),
)
TOKENS, SLOTS = 2048, 4
"""The same for all mixed cases, so that those of one shape are one program."""


def grid():
    """The cases (D, G, T, dtype): every D with every G, and every D with every T in every dtype."""
    for (i, dim), (j, group) in itertools.product(enumerate(DIMS), enumerate(GROUPS)):
        yield (
            dim,
            group,
            WIDTHS[(i + j) % len(WIDTHS)],
            DTYPES[(i + j // len(WIDTHS)) % len(DTYPES)],
        )


@pytest.fixture(autouse=True)
def gpu():
    """The GPU; tests that need one are skipped where there is none."""
    device = current_device()
    if device is None:
        pytest.skip(
            f"there is no NVIDIA GPU that JAX can use, only {jax.devices()[0].platform}; where one "
            "is, run python -m pytest -m gpu"
        )
    return device


def able(backend: str, device) -> bool:
    """Each backend runs where the docs promise.

    mosaic_gpu on Hopper and Blackwell's data centre GPUs, triton on Ampere and later, xla everywhere.
    """
    return {
        "mosaic_gpu": device.capability // 10 in (9, 10),
        "triton": device.capability >= 80,
        "xla": True,
    }[backend]


@pytest.fixture
def judge(gpu):
    """Compares a backend's result of a case, over new inputs, with the reference's."""

    def judge(backend, case, **shape):
        seed = secrets.randbelow(2**31)
        inputs = cases.make(case, seed, **shape)
        if not able(backend, gpu):
            with pytest.raises(NotImplementedError, match=backend):
                cases.answer(inputs, backend)
            pytest.skip(f"{backend} does not serve {gpu.kind}")
        rows, right = cases.expected(case, inputs)
        out = cases.answer(inputs, backend)
        assert out.shape == inputs.q.shape and out.dtype == inputs.q.dtype
        assert bool(jnp.all(jnp.isfinite(out))), (
            f"{case.name}, seed {seed}: not finite, padding included"
        )
        error = cases.error(case, out, rows, right)
        assert error <= cases.tolerance(case.dtype), (
            f"{case.name}, seed {seed}: {backend} is off by {error:.3g}"
        )

    return judge


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dim", "group", "width", "dtype"), list(grid()))
def test_workers_prefixes_blocks_apart_ragged_and_empty_ones(
    judge, backend, dim, group, width, dtype
):
    for case in cases.mixed_cases(Heads(2, group, dim), width, dtype):
        judge(backend, case, tokens=TOKENS, slots=SLOTS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "group", "dtype"), [(300, 8, "bfloat16"), (300, 1, "float16"), (1100, 4, "bfloat16")]
)
def test_many_rows(judge, backend, rows, group, dtype):
    many = cases.many_rows(Heads(2, group), rows, dtype)
    tokens = max(cases.make(case, 0).cache.keys[0].shape[1] for case in many)
    for case in many:
        judge(backend, case, tokens=tokens, slots=3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(cases.private(Heads(8, 4), 1, 16384), id="one row"),
        pytest.param(cases.private(Heads(8, 4), 48, 1000), id="private rows"),
        pytest.param(cases.shared(Heads(1, 8), 64, 8192, 40), id="a long prefix"),
        pytest.param(cases.workers(Heads(8, 5), 4, 16384, 64), id="workers"),
        pytest.param(cases.workers(Heads(32, 1), 2, 500, 9), id="one query head each"),
    ],
)
def test_long_blocks_and_many_heads(judge, backend, case):
    judge(backend, case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256, 576])
def test_codes(gpu, backend, format, dim):
    if not able(backend, gpu) or ((backend, format) == ("triton", "fp8") and gpu.capability < 89):
        pytest.skip(f"{backend} does not serve {format} on {gpu.kind}")
    latent = dim == 576
    shape = dataclasses.replace(
        codes_interpreted.WIDE, dim=dim, rotary=64 if latent else dim, latent=latent
    )
    rows, lengths = [[0, n] for n in range(1, 6)], [300, 5, 0, 64, 1, 17]
    some = interpreted.case(rows, [1] * 5, lengths, gaps=[1] * 6, seed=secrets.randbelow(2**31))
    codes_interpreted.check(backend, format, shape, some, gpu)


@pytest.mark.parametrize("format", [None, "int8", "fp8"])
def test_appends(gpu, format):
    """Numbers, and codes, of heads of several forms."""
    if not lowers_triton(gpu):
        pytest.skip(f"{gpu.kind} is not from Ampere on")
    if format == "fp8" and gpu.capability < 89:
        pytest.skip(f"{gpu.kind} does not convert to fp8")
    for shape in (interpreted.DECODE, interpreted.LATENT, appends.PENDING_ROWS):
        some = appends.some_rows(shape, secrets.randbelow(2**31))
        if format is None:
            appends.check(shape, some, gpu)
        else:
            appends.check_codes(format, shape, some, gpu)


@pytest.mark.parametrize("dtype", residual.ROUNDING)
@pytest.mark.parametrize(
    ("tokens", "width", "pieces"), [(1, 64, 1), (64, 4096, 8), (3, 2880, 16), (2048, 8192, 1)]
)
def test_sums_and_their_norms(gpu, tokens, width, pieces, dtype):
    if not lowers_triton(gpu):
        pytest.skip(f"{gpu.kind} is not from Ampere on")
    given = residual.inputs(tokens, width, pieces, dtype, "float32", secrets.randbelow(2**31))
    residual.check(gpu, *given)


def test_the_same_answer_every_time(gpu):
    """Pieces are merged in one order, whichever of them is ready first."""
    case = cases.shared(Heads(2, 8), 40, 3000, 30)
    inputs = cases.make(case, secrets.randbelow(2**31))
    for backend in (b for b in BACKENDS if able(b, gpu)):
        first = np.asarray(cases.answer(inputs, backend).astype(jnp.float32))
        for _ in range(5):
            np.testing.assert_array_equal(
                np.asarray(cases.answer(inputs, backend).astype(jnp.float32)), first
            )


def test_the_best_backend_is_preferred(gpu):
    assert next(b for b in preferred() if able(b, gpu)) == (
        "mosaic_gpu" if gpu.capability // 10 == 9 else "triton"
    )


def test_draws_are_those_of_xla(gpu, monkeypatch):
    """Of all settings side by side; sums are rounded differently, which one draw of many may show."""
    cuts = [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9, "min_p": 0.05}]
    samplers = Samplers.stack([Sampler(0.8, **cut) for cut in cuts * 8] + [Sampler()] * 32)
    rng = np.random.default_rng(secrets.randbelow(2**31))
    logits = jnp.asarray(rng.normal(size=(64, 128_256)) * 3, "float32")
    seeds = jnp.asarray(rng.integers(2**32, size=(64, 2)), "uint32")

    def tokens() -> np.ndarray:
        draw = jax.jit(lambda *given: Samplers.sample(*given))
        return np.stack([draw(samplers, logits, seeds, jnp.full(64, n)) for n in range(8)])

    found = tokens()
    assert sampling.draws_on(logits) == (gpu if gpu.capability >= 80 else None)
    monkeypatch.setattr(sampling, "draws_on", lambda _: None)
    monkeypatch.setattr(truncation, "draws_on", lambda _: None)
    assert (found != tokens()).sum() <= 2


@pytest.mark.parametrize("rows", [1, 5, 64, 130])
@pytest.mark.parametrize(
    ("format", "group", "zeros"),
    [("int4", 128, True), ("int4", 64, False), ("int8", None, False), ("int8", 128, True)],
)
@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
def test_products_with_quantised_matrices(backend, format, group, zeros, rows, gpu):
    if not able(backend, gpu):
        pytest.skip(f"{backend} does not run on {gpu.kind}")
    case = products.random_case(0, rows, 1032, 4096, format, group, zeros)
    products.compare(*case, device=gpu, backend=backend)


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
def test_products_with_fp8_matrices(backend, group, gpu):
    """All finite codes, subnormal ones included."""
    if not able(backend, gpu) or gpu.capability < 89:
        pytest.skip(f"{backend} does not run on {gpu.kind}")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 1024)), jnp.bfloat16)
    codes = rng.permutation(np.arange(256 * 1024) % 256).astype(np.uint8).reshape(256, 1024)
    codes = np.where((codes & 127) == 127, 0, codes).view(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 1.5, size=(256, 1024 // (group or 1024))).astype(np.float32)
    numbers = codes.astype(np.float64).reshape(*scales.shape, -1) * scales[..., None]
    tensor = QuantisedTensor(codes, scales, format="fp8")
    products.compare(x, tensor, numbers.reshape(256, 1024), device=gpu, backend=backend)


@pytest.mark.parametrize(
    ("format", "group"),
    [(None, None), ("fp8", 64), ("mxfp4", 32), ("int4", 64), ("int8", None)],
)
def test_products_with_the_matrices_of_experts(format, group, gpu):
    if not able("triton", gpu) or (format == "fp8" and gpu.capability < 89):
        pytest.skip(f"{gpu.kind} does not run them")
    x, expert, matrices = experts.random(secrets.randbelow(2**31), 70, 192, 5, 40, 3)
    if format is None:
        kernel = numbers = jnp.asarray(matrices, jnp.bfloat16)
    else:
        tensor = quantised(matrices, format, group)
        numbers = jnp.asarray(tensor.dequantised(np.float32), jnp.bfloat16)
        kernel = jax.tree.map(jnp.asarray, tensor)
    assert experts.compare(x, expert, kernel, numbers, tolerance=1e-4, device=gpu)
