"""The triton backend, interpreted on the CPU, against float64 numpy.

test_work_items tests how work is cut, test_gpu_lowering and `make gpu-compile` that the kernels
compile.
"""

import dataclasses
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings

from jaxshare import block_attention, make_plan
from jaxshare.pallas.chosen_tiles import use_tiles
from jaxshare.pallas.device import H200, Device, assume_device
from jaxshare.pallas.head_dims import HEAD_DIMS
from jaxshare.pallas.tiles import TritonTiles
from tests.core.attention.test_attention import Case, Shape, cases, place
from tests.core.pallas.interpreted import (
    LATENT,
    SOME_LENGTHS,
    case,
    compare,
    compare_layers,
    compare_spread,
)
from tests.helpers import Scoring, mostly_slow

# JAX warns wherever the backend lowers. That it will be removed is known, and the reason why
# nothing else imports its files.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

INTERPRETED = Device("interpreted", 90, multiprocessors=3, interpret=True)
"""Few work items, so that most cuts fall inside blocks."""

DECODE = Shape(
    rows=4,
    width=1,
    listed=4,
    blocks=6,
    heads=6,
    kv_heads=2,
    dim=64,
    arena=2400,
    rotary=64,
    dtype=jnp.bfloat16,
)
WIDE = Shape(
    rows=3,
    width=5,
    listed=4,
    blocks=6,
    heads=8,
    kv_heads=1,
    dim=80,
    arena=2400,
    rotary=40,
    factor=1.2,
    dtype=jnp.float16,
)
"""Pending tokens, causal in their own block; half of each head is rotated, and a head is no power
of two."""
MANY_ROWS = Shape(
    rows=70,
    width=1,
    listed=3,
    blocks=73,
    heads=4,
    kv_heads=2,
    dim=64,
    arena=3000,
    rotary=64,
    dtype=jnp.bfloat16,
)
PROMPT = Shape(
    rows=2,
    width=70,
    listed=3,
    blocks=4,
    heads=2,
    kv_heads=2,
    dim=64,
    arena=1500,
    rotary=64,
    dtype=jnp.bfloat16,
)

SINKS = (1.0, -2.0, 4.0, -math.inf, 0.0, 2.0)
"""One is that of no key."""


def check(shape: Shape, case: Case, device: Device = INTERPRETED) -> None:
    compare("triton", device, shape, case)


@settings(max_examples=12)
@given(cases(DECODE, lengths=SOME_LENGTHS))
def test_any_layout(case):
    check(DECODE, case)


@pytest.mark.slow
@settings(max_examples=8)
@given(cases(WIDE, lengths=SOME_LENGTHS))
def test_any_layout_with_pending_tokens(case):
    check(WIDE, case)


def test_rows_in_pieces():
    rows = [[0, 3, 1], [0, 1, 3], [2, 4]]
    compare("triton", INTERPRETED, WIDE, case(rows, [5, 1, 3], [70, 9, 0, 64, 1, 0]), piece=2)


def test_sinks():
    shape = dataclasses.replace(DECODE, scoring=Scoring(sinks=SINKS))
    check(shape, case([[0, 3, 1], [], [2]], [1, 0, 1], [0, 129, 0, 64, 1, 0], gaps=[1] * 6))


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [1.5, 50.0])
def test_softcaps(softcap):
    """Scores far above the cap, and far below."""
    shape = dataclasses.replace(WIDE, scoring=Scoring(softcap=softcap))
    check(shape, case([[0, 3, 1], [2, 0]], [5, 2], [70, 129, 0, 64, 1, 0], gaps=[1] * 6))


@pytest.mark.parametrize("window", mostly_slow([3, 100]))
@settings(max_examples=8)
@given(case=cases(WIDE, lengths=SOME_LENGTHS))
def test_windows(window, case):
    """One is narrower than a row's tokens."""
    check(dataclasses.replace(WIDE, scoring=Scoring(window)), case)


def test_empty_blocks_and_rows_that_bring_nothing():
    check(
        DECODE,
        case(
            [[0, 3, 1], [], [2], [4, 5]],
            [1, 0, 1, 0],
            [0, 129, 0, 64, 1, 0],
            gaps=[1, 0, 3, 0, 0, 2],
            phases=[0, 5, 0, 0, 9, 0],
        ),
    )


@pytest.mark.parametrize(
    ("rotary", "runs"), mostly_slow([(64, False), (0, False), (64, True)], 2, several=True)
)
def test_layers_share_the_work_of_their_plan(rotary, runs):
    one = case([[0, 1], [1, 0, 2], [0, 3], []], [1, 1, 1, 0], [20, 70, 3, 0, 9, 0])
    compare_layers(
        "triton", INTERPRETED, dataclasses.replace(DECODE, rotary=rotary), one, runs=runs
    )


@pytest.mark.slow
def test_many_rows_over_a_shared_block():
    check(
        MANY_ROWS,
        case([[0, r + 1] for r in range(70)], [1] * 70, [300, *[r % 5 for r in range(70)], 0, 0]),
    )


@pytest.mark.parametrize("devices", mostly_slow([4, 2]))
def test_tokens_that_are_spread_over_devices(devices):
    """Blocks are merged over the devices by the log-sum-exps that the kernels give: windows are of
    all devices' tokens, and sinks count once.

    Blocks start inside a stripe, and some devices have nothing of them; one row sees nothing but its
    own token, and one is empty.
    """
    shape = dataclasses.replace(DECODE, arena=2560, scoring=Scoring(200, 3.0, SINKS))
    compare_spread(
        "triton",
        INTERPRETED,
        shape,
        case(
            [[0, 3, 1], [2], [5], []],
            [1, 1, 1, 0],
            [700, 129, 0, 64, 1, 3],
            gaps=[1, 0, 3, 0, 0, 200],
            phases=[0, 5, 0, 0, 9, 0],
        ),
        devices,
    )


@pytest.mark.slow
def test_a_prompt():
    check(PROMPT, case([[0, 1], [0, 2]], [70, 33], [100, 3, 0, 0], gaps=[3, 1, 0, 0]))


@pytest.mark.slow
@pytest.mark.parametrize("dim", sorted({*HEAD_DIMS} - {64}))
def test_every_head_dim(dim):
    shape = Shape(
        rows=2,
        width=1,
        listed=2,
        blocks=3,
        heads=3,
        kv_heads=1,
        dim=dim,
        arena=512,
        rotary=dim,
        dtype=jnp.bfloat16,
    )
    check(shape, case([[0, 1], [0, 2]], [1, 1], [150, 66, 0], gaps=[1, 0, 0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        dict(),
        dict(width=3, heads=5, dtype=jnp.float16),
        dict(heads=128),
        dict(width=40, heads=2),
    ],
    ids=str,
)
def test_values_that_are_a_part_of_keys(more):
    shape = dataclasses.replace(LATENT, **more)
    check(
        shape,
        case([[0, 1], [0, 2]], [shape.width, 1], [150, 66, 0], gaps=[1, 0, 3], phases=[0, 5, 0]),
    )


@pytest.mark.slow
def test_latents_with_all_that_is_done_to_scores():
    shape = dataclasses.replace(LATENT, scoring=Scoring(100, 3.0, (1.0, -math.inf) * 8))
    check(shape, case([[0, 1], [0, 2]], [1, 1], [150, 66, 0], gaps=[1, 0, 0]))


@pytest.mark.slow
def test_latents_that_are_spread_over_devices():
    shape = dataclasses.replace(LATENT, arena=1024)
    compare_spread(
        "triton", INTERPRETED, shape, case([[0, 1], [2]], [1, 1], [400, 66, 3], gaps=[1, 0, 7]), 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("group", [*range(1, 17), 24, 71, 128])
def test_every_number_of_query_heads(group):
    shape = dataclasses.replace(
        DECODE, rows=2, heads=2 * group, listed=2, blocks=3, dtype=jnp.float16
    )
    check(shape, case([[0, 1], [0, 2]], [1, 1], [150, 66, 0], gaps=[1, 0, 0], seed=group))


@pytest.mark.slow
def test_no_rotation():
    check(
        dataclasses.replace(DECODE, rotary=0),
        case([[0, 1], [0, 2], [3], []], [1, 1, 1, 0], [150, 66, 0, 3, 0, 0]),
    )


@pytest.mark.slow
def test_an_arena_smaller_than_a_tile():
    shape = dataclasses.replace(DECODE, rows=1, listed=1, blocks=1, heads=2, kv_heads=1, arena=13)
    check(shape, case([[0]], [1], [11]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiles", [TritonTiles(16, 16, 4, 2, 1), TritonTiles(128, 128, 8, 2, 4)], ids=str
)
def test_other_tiles(tiles):
    shape = dataclasses.replace(DECODE, rows=2, listed=2, blocks=3)
    with use_tiles(tiles):
        check(shape, case([[0, 1], [0, 2]], [1, 1], [300, 66, 0], gaps=[1, 0, 0]))


@pytest.mark.slow
@settings(max_examples=150)
@given(cases(DECODE))
def test_many_layouts(case):
    check(DECODE, case)


@pytest.mark.slow
@settings(max_examples=80)
@given(cases(MANY_ROWS, lengths=SOME_LENGTHS))
def test_many_layouts_of_many_rows(case):
    check(MANY_ROWS, case)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases(PROMPT, lengths=SOME_LENGTHS))
def test_many_layouts_of_prompts(case):
    check(PROMPT, case)


@pytest.fixture
def call():
    """A call with one thing changed; it is only traced."""

    def call(device=H200, dim=64, heads=4, dtype=jnp.bfloat16):
        shape = dataclasses.replace(
            DECODE, heads=heads, kv_heads=1, dim=dim, rotary=dim, dtype=dtype
        )
        (cache, layout, count, q, _, _), _ = place(shape, case([[0, 1]], [1], [5, 3, 0, 0, 0, 0]))

        def attend(q, cache):
            return block_attention(
                q,
                cache.keys[0],
                cache.values[0],
                make_plan(cache, layout, count, 1),
                implementation="triton",
            )

        if device is None:
            return jax.eval_shape(attend, q, cache)
        with assume_device(device):
            return jax.eval_shape(attend, q, cache)

    return call


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (dict(device=None), "it runs on NVIDIA GPUs from compute capability 8.0; this is cpu"),
        (
            dict(device=Device("Tesla V100", 70, 80)),
            "it runs on NVIDIA GPUs from compute capability 8.0; this is Tesla V100 of 7.0",
        ),
        (dict(dtype=jnp.float32), "its caches are bfloat16 or float16; this one is float32"),
        (dict(dim=72), "its head dims are 64, 80, 96, 128, 192, 256; this one is 72"),
        (dict(dim=576), "its head dims are 64, 80, 96, 128, 192, 256; this one is 576"),
        (dict(heads=129), "it takes up to 128 query heads for each kv head; here are 129"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(call, wrong, why):
    with pytest.raises(NotImplementedError, match=f"triton: {why}"):
        call(**wrong)


@pytest.mark.parametrize(
    "device",
    mostly_slow(
        [
            Device("NVIDIA A100", 80, 108),
            Device("NVIDIA L4", 89, 58),
            Device("NVIDIA B200", 100, 148),
        ]
    ),
    ids=lambda device: device.kind,
)
def test_every_gpu_from_ampere_on_is_served(call, device):
    assert call(device=device).shape == (4, 1, 4, 64)


def test_a_jax_without_triton_has_a_reason_and_no_error(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    with pytest.raises(
        NotImplementedError, match=r"triton: JAX .* cannot lower Pallas kernels through Triton"
    ):
        call()


def test_it_is_imported_when_it_is_called_and_not_before():
    """Neither our files of it are imported nor JAX's, which warn that they will be removed."""
    program = (
        "import sys, jaxshare, jaxshare.serving.cli.main; print([name for name in sys.modules if "
        "'triton' in name and name.startswith(('jax.', 'jaxshare'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
