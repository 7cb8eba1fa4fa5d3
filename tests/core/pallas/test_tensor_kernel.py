"""The kernel of block attention that multiplies in tensor memory, interpreted against float64 numpy.

The interpreter runs its warps and barriers, and says where one reads what another may be writing.
That it compiles, `make gpu-compile` tests.
"""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxshare.attention.api import preferred
from jaxshare.pallas import tensor_kernel_mosaic_gpu, tiles
from jaxshare.pallas.chosen_tiles import choose_mosaic, use_tiles
from jaxshare.pallas.device import H200, Device, assume_device
from jaxshare.pallas.tiles import MosaicTiles
from jaxshare.quantised import quantised
from scripts.gpu import programs
from tests.core.attention.test_attention import Case, Shape, cases
from tests.core.pallas.interpreted import SOME_LENGTHS, case, compare
from tests.core.pallas.lowering import BLACKWELL, lowered_for
from tests.helpers import Scoring, mostly_slow

INTERPRETED = Device("interpreted", 100, multiprocessors=2, interpret=True)
"""Two work items, so that most cuts fall inside blocks."""
MANY = Shape(
    rows=7,
    width=3,
    listed=3,
    blocks=7,
    heads=16,
    kv_heads=1,
    dim=64,
    arena=2048,
    rotary=64,
    dtype=jnp.bfloat16,
)
"""A block that all rows see has 336 queries, one that three rows see 144: both warpgroups have some,
or the first one alone."""
LAYOUT = case(
    [[0, 1], [0, 1, 2], [0, 3], [0, 1, 4], [0, 5], [], [0, 3, 6]],
    [3, 3, 2, 1, 3, 0, 3],
    [300, 130, 5, 64, 0, 17, 30],
    gaps=[1] * 7,
    phases=[0, 5, 0, 3, 0, 0, 1],
)


@pytest.fixture(autouse=True)
def many(monkeypatch):
    """A few queries are many."""
    monkeypatch.setattr(tiles, "MANY_QUERIES", 1)


def check(shape: Shape, case: Case, device: Device = INTERPRETED) -> None:
    compare("mosaic_gpu", device, shape, case)


def of_its_own(arena: int, **more) -> Shape:
    """MANY with a length of the arena that no other test has, since JAX keeps what it has traced."""
    return dataclasses.replace(MANY, arena=arena, **more)


@pytest.mark.parametrize(
    "more",
    mostly_slow(
        [
            dict(dim=128, rotary=128),
            dict(),
            dict(dim=80, rotary=40, dtype=jnp.float16),
            dict(dim=96, rotary=0),
            dict(dim=192, rotary=64, dtype=jnp.float16),
            dict(scoring=Scoring(window=100)),
            dict(scoring=Scoring(softcap=8.0, sinks=(9.0, 0.0, 1.0, -1.0) * 4)),
            dict(heads=32, kv_heads=2),
        ],
        1,
    ),
    ids=str,
)
def test_segments_of_one_warpgroup_and_of_two(more):
    made, kernel = [], tensor_kernel_mosaic_gpu.TensorMemory.scratch

    def scratch(*arguments):
        made.append(kernel(*arguments))
        return made[-1]

    with mock.patch.object(tensor_kernel_mosaic_gpu.TensorMemory, "scratch", scratch):
        check(of_its_own(2112, **more), LAYOUT)
    assert len(made) == 1  # none of the other kernels


@pytest.mark.parametrize("rise", mostly_slow([0.0, 100.0], 1))
def test_weights_are_relative_to_any_maximum(monkeypatch, rise):
    """That of all tiles before, or of the first alone."""
    monkeypatch.setattr(tensor_kernel_mosaic_gpu, "RISE", rise)
    check(of_its_own(2176 + 64 * bool(rise)), LAYOUT)


@pytest.mark.slow
def test_pending_tokens_are_causal_in_their_own_block():
    shape = dataclasses.replace(MANY, rows=1, width=33, blocks=4, heads=16, arena=1024)
    check(shape, case([[0, 2, 1]], [31], [70, 40, 3, 0], gaps=[3, 0, 1, 0]))
    check(shape, case([[0, 2, 1]], [33], [700, 128, 3, 0], gaps=[3, 0, 1, 0]))


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [MosaicTiles(64, 2, 1), MosaicTiles(128, 3, 1)], ids=str)
def test_other_tiles(chosen):
    with use_tiles(chosen):
        check(MANY, LAYOUT)


@pytest.mark.slow
@pytest.mark.parametrize("items", [1, 5, 40])
def test_any_number_of_items(items):
    """Of the last some have no tiles."""
    device = dataclasses.replace(INTERPRETED, multiprocessors=items)
    check(MANY, LAYOUT, device)


@pytest.mark.slow
@settings(max_examples=40)
@given(cases(of_its_own(2304), lengths=SOME_LENGTHS))
def test_many_layouts(case):
    with mock.patch.object(tensor_kernel_mosaic_gpu, "RISE", 1.0):
        check(of_its_own(2304), case)


@pytest.mark.slow
@settings(max_examples=15)
@given(cases(dataclasses.replace(MANY, scoring=Scoring(window=70)), lengths=SOME_LENGTHS))
def test_many_layouts_with_windows(case):
    check(dataclasses.replace(MANY, scoring=Scoring(window=70)), case)


@pytest.mark.parametrize("dim", mostly_slow([128, 64, 80, 96, 192], 1))
def test_it_lowers_for_blackwell(dim):
    one = programs.Case(dim, 8, "bfloat16", *programs.PASSES[1])
    function, arguments = programs.attention(one, "mosaic_gpu")
    text = lowered_for(BLACKWELL, function, *arguments)
    assert text.count("@mosaic_gpu_v2") == 2


def buffers(choice: MosaicTiles, dim: int) -> int:
    """Bytes of everything that the kernel keeps in shared memory, buffer by buffer."""
    half = np.dtype(np.float16)
    found = [
        np.empty((choice.query_stages, 2, 128, dim), half),
        np.empty((2, choice.stages, choice.tile, dim), half),
        np.empty((2, 128), np.float32),
        np.empty(3 * choice.query_stages + 4 * choice.stages + 10, np.int64),
    ]
    return sum(-(-buffer.nbytes // 128) * 128 for buffer in found)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192])
def test_tiles_fit_shared_and_tensor_memory(monkeypatch, dim):
    monkeypatch.setattr(tiles, "MANY_QUERIES", 2048)
    chosen = choose_mosaic(BLACKWELL, dim, 8, 2048, "bfloat16")
    candidates = tiles.candidates_mosaic(BLACKWELL, dim, 2048)
    assert candidates and chosen.tile == max(each.tile for each in candidates)
    for each in [chosen, *candidates]:
        assert buffers(each, dim) <= 232_448
        assert 2 * each.tile + 2 * dim <= 512


def test_many_queries_are_triton_s_where_tensor_memory_is_not_taken(monkeypatch):
    monkeypatch.setattr(tiles, "MANY_QUERIES", 2048)

    def arena(dim: int) -> jax.Array:
        return jnp.zeros((1, 64, dim), jnp.bfloat16)

    with assume_device(BLACKWELL):
        assert preferred(2047)[0] == preferred(2047, arena(256))[0] == "mosaic_gpu"
        for dim in (64, 80, 96, 128, 192):
            assert preferred(2048, arena(dim))[0] == "mosaic_gpu"
        for other in (arena(256), arena(576), quantised(np.ones((1, 64, 128), np.float32), "int8")):
            assert preferred(2048, other) == ("triton", "mosaic_gpu", "xla")
    for device in (H200, Device("NVIDIA RTX PRO 6000", 120, 188)):
        with assume_device(device):
            first = "mosaic_gpu" if device is H200 else "triton"
            assert preferred(2048, arena(128))[0] == first
