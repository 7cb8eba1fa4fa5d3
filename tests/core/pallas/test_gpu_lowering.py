"""Every GPU backend of block attention lowers for CUDA without a GPU.

JAX has neither a GPU nor the packages for one here. All shapes that are promised. Lowering does not
imply compiling: `make gpu-compile` tests that.
"""

import dataclasses
import importlib
import importlib.util
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxshare.decoding import truncation
from jaxshare.models import residual
from jaxshare.pallas import block_attention_mosaic_gpu
from jaxshare.pallas.dense_products import gpu_dense_product
from jaxshare.pallas.device import H200
from scripts.gpu import programs, quantised_steps
from tests.core.pallas.lowering import lowered_for
from tests.helpers import mostly_slow
from tests.paths import ROOT

# JAX warns wherever the backend lowers. That it will be removed is known, and the reason why
# nothing else imports its files.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

TARGETS = {"mosaic_gpu": "mosaic_gpu_v2", "triton": "xla.gpu.triton"}
"""The name in StableHLO of the calls of each backend's kernels."""
# Each head dim, each G, both dtypes and each kind of pass among them.
FEW = [
    programs.Case(*shape, *one)
    for shape, one in zip(
        [
            (64, 1, "bfloat16"),
            (80, 16, "float16"),
            (96, 5, "bfloat16"),
            (128, 8, "bfloat16"),
            (192, 7, "float16"),
            (256, 2, "bfloat16"),
            (128, 4, "float16"),
        ],
        itertools.cycle(programs.PASSES),
    )
]


def lowered(backend: str, function, *arguments, **options) -> str:
    """A function as StableHLO for CUDA; arguments are shapes."""
    if backend == "triton" and importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        pytest.skip("this JAX has no Triton backend any more")
    return lowered_for(H200, function, *arguments, **options)


def calls(text: str) -> set[str]:
    """The backends whose kernels a program calls."""
    return {name for name, target in TARGETS.items() if target in text}


def check(backend: str, case) -> None:
    function, arguments = programs.attention(case, backend)
    text = lowered(backend, function, *arguments)
    assert calls(text) == {backend} & TARGETS.keys(), case
    short = {"bfloat16": "bf16", "float16": "f16"}[case.dtype]
    # what the program returns
    heads = f"{case.group}x512" if case.head_dim == 576 else f"{2 * case.group}x{case.head_dim}"
    assert f"-> (tensor<{case.rows}x{case.width}x{heads}x{short}>" in text, case


@pytest.mark.parametrize("case", mostly_slow(FEW, 3), ids=str)
@pytest.mark.parametrize("backend", TARGETS)
def test_it_lowers_for_cuda(backend, case):
    check(backend, case)


@pytest.mark.parametrize("case", mostly_slow(programs.SCORED), ids=str)
@pytest.mark.parametrize("backend", TARGETS)
def test_windows_softcaps_and_sinks_lower_for_cuda(backend, case):
    check(backend, case)


@pytest.mark.parametrize("case", mostly_slow(programs.LATENT), ids=str)
@pytest.mark.parametrize("backend", TARGETS)
def test_latents_lower_for_cuda(backend, case):
    check(backend, case)


@pytest.mark.parametrize("case", mostly_slow(programs.CODED), ids=str)
@pytest.mark.parametrize("backend", TARGETS)
def test_codes_lower_for_cuda(backend, case):
    check(backend, case)


@pytest.mark.parametrize(
    "case",
    mostly_slow([case for case in programs.CODED[::-1] if case.head_dim > 192]),
    ids=str,
)
def test_codes_of_wide_heads_are_served_by_mosaic_without_a_name(case):
    function, arguments = programs.attention(case, None)
    assert calls(lowered("mosaic_gpu", function, *arguments)) == {"mosaic_gpu"}


@pytest.mark.parametrize("form", mostly_slow(quantised_steps.FORMS), ids=lambda form: form.name)
@pytest.mark.parametrize("backend", TARGETS)
def test_products_with_quantised_matrices_lower_for_cuda(backend, form):
    x = jax.ShapeDtypeStruct((5, 256), jnp.bfloat16)
    matrix = quantised_steps.packed((296, 256), form)

    def multiply(x, matrix):
        return gpu_dense_product(x, matrix, x.dtype, (backend,))

    assert calls(lowered(backend, multiply, x, matrix)) == {backend}


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("backend", TARGETS)
def test_the_whole_grid_lowers_for_cuda(backend, head_dim):
    """Every G and dtype, each with one kind of pass."""
    for i, group in enumerate((1, 2, 4, 5, 7, 8, 16)):
        for j, dtype in enumerate(("bfloat16", "float16")):
            check(
                backend,
                programs.Case(
                    head_dim, group, dtype, *programs.PASSES[(i + 3 * j) % len(programs.PASSES)]
                ),
            )


@pytest.mark.slow
@pytest.mark.parametrize("backend", [*TARGETS, "xla"])
def test_a_decode_step_lowers_for_cuda(backend):
    """The plan, the appends, the moves of finished steps and sampling around it included, of which
    some kernels are Triton's."""
    config = dataclasses.replace(programs.MODEL, num_layers=1)
    decoding = programs.decoding(programs.QUICK_STEPS[0], backend, config, history=4096)
    assert calls(lowered(backend, decoding.function, *decoding.arguments, donate_argnums=(1,))) == {
        backend
    } & TARGETS.keys() | {"triton"}


@pytest.mark.parametrize("spread", mostly_slow(programs.SPREADS), ids=str)
def test_a_decode_step_on_several_devices_lowers_for_cuda(spread, monkeypatch):
    """Each device runs the kernels on its part.

    `make gpu-compile` counts what they send. Triton lowers only for a described device, and the
    mesh takes the place of the description: sampling, appends, sums and norms are XLA's here.
    """
    monkeypatch.setattr(truncation, "draws_on", lambda _: None)
    for user in (block_attention_mosaic_gpu, residual):
        monkeypatch.setattr(user, "lowers_triton", lambda _: False)
    config = dataclasses.replace(programs.MODEL, num_layers=1)
    mesh = spread.mesh(jax.devices()[: spread.tensor * spread.kv])
    decoding = programs.decoding(
        programs.QUICK_STEPS[0], "mosaic_gpu", config, history=4096, mesh=mesh
    )
    assert calls(
        lowered("mosaic_gpu", decoding.function, *decoding.arguments, donate_argnums=(1,))
    ) == {"mosaic_gpu"}


ONCE = """
import dataclasses, re, sys
import jax
from jaxshare.pallas.device import H200, assume_device
from scripts.gpu import programs
from tests.core.pallas.test_gpu_lowering import TARGETS, lowered

backend, layers = sys.argv[1], int(sys.argv[2])
traces = []
@jax.jit
def traced(x):
    traces.append(1)
    return x

with assume_device(H200):
    config = dataclasses.replace(programs.MODEL, num_layers=layers)
    decoding = programs.decoding(programs.Step("2 rows", 2, "shared", 16, 1, False), backend, config, 256)
    traced(1.0)
text = lowered(backend, decoding.function, *decoding.arguments, donate_argnums=(1,))
with assume_device(H200):
    traced(1.0)
calls = [line for line in text.splitlines() if re.search(rf"custom_call @\\S*{re.escape(TARGETS[backend])}", line)]
made = len(re.findall(r"call @make_work", text))
appends, sums = (sum(f'name = "{name}"' in line for line in text.splitlines()) for name in ("append_and_gather", "add_and_normalise"))
others = [line for line in calls if 'name = "draw"' not in line and 'name = "add_and_normalise"' not in line]
print(len(traces), len(others), made, appends, sums)
"""
"""Run in a process that has not imported what kernels are written with."""


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, 5])
@pytest.mark.parametrize("backend", TARGETS)
def test_kernels_are_lowered_once_for_all_layers_and_nothing_is_traced_again(backend, layers):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ONCE, backend, str(layers)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Attention and its merge; the work items of the pass; what appends, which is Triton's; sums of
    # as many pieces as attention's output has, and as the MLP's, and of these without the sum itself.
    assert done.stdout.split() == ["1", "2", "1", "1" if backend == "mosaic_gpu" else "0", "3"]


def test_what_is_compiled_covers_all_that_is_promised():
    assert set(programs.GPU_BACKENDS) == TARGETS.keys()
    for cases in (FEW, programs.QUICK, programs.whole_grid()):
        assert {case.head_dim for case in cases} == {64, 80, 96, 128, 192, 256}
        assert {case.group for case in cases} == {1, 2, 4, 5, 7, 8, 16}
        assert {case.dtype for case in cases} == {"bfloat16", "float16"}
        assert {(case.width, case.rows, case.blocks) for case in cases} == set(programs.PASSES)
    assert {1, 8, 64} == {width for width, _, _ in programs.PASSES} and {"shared", "private"} < {
        blocks for _, _, blocks in programs.PASSES
    }
    assert {case.group for case in programs.LATENT} >= {16, 128}
    assert {case[3:6] for case in programs.LATENT} == set(programs.PASSES)
    assert len(programs.whole_grid()) == 6 * 7 * 2 * len(programs.PASSES)
