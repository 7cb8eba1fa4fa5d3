"""Products by warps: which thread holds what, against NVIDIA's tables; and that kernels with them
lower and compute on, for a GPU that is not there."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu

from jaxshare.pallas.device import Device, assume_device
from scripts.gpu import programs
from tests.core.pallas.interpreted import DECODE, case, compare
from tests.core.pallas.lowering import BLACKWELL, lowered_for
from tests.helpers import mostly_slow

INTERPRETED = Device("interpreted", 100, multiprocessors=2, interpret=True)
"""Two work items, so that most cuts fall inside blocks."""


def held(layout: mgpu.TiledLayout, shape: tuple[int, int]) -> dict[tuple[int, int], list[tuple]]:
    """The elements that each thread, (warp, lane), holds, in the order of its registers."""
    rows, columns = np.meshgrid(*map(np.arange, shape), indexing="ij")
    elements = rows * shape[1] + columns
    for tile in layout.tiling.tiles:
        # The last dimensions are cut into tiles, whose own dimensions come last.
        lead = elements.shape[: elements.ndim - len(tile)]
        cut = [
            part
            for size, own in zip(elements.shape[len(lead) :], tile, strict=True)
            for part in (size // own, own)
        ]
        order = [*range(len(lead))]
        order += [len(lead) + 2 * i for i in range(len(tile))]
        order += [len(lead) + 2 * i + 1 for i in range(len(tile))]
        elements = elements.reshape(*lead, *cut).transpose(order)

    def places(dims) -> list[int]:
        return [d % elements.ndim for d in dims if isinstance(d, int)]

    warps, lanes = places(layout.warp_dims), places(layout.lane_dims)
    vector = layout.vector_dim % elements.ndim
    registers = [d for d in range(elements.ndim) if d not in (*warps, *lanes, vector)]
    found = elements.transpose([*warps, *lanes, *registers, vector])
    # All warps hold the same where no dimension tells them apart.
    found = found.reshape(4 if warps else 1, 32, -1)
    found = np.broadcast_to(found, (4, *found.shape[1:]))
    return {
        (warp, lane): [divmod(int(e), shape[1]) for e in found[warp, lane]]
        for warp in range(4)
        for lane in range(32)
    }


def test_an_accumulator_lies_as_in_the_table_of_mma():
    """Parallel Thread Execution ISA, mma.m16n8k16, fragments of C: rows g and g + 8 of a warp's 16,
    columns 2t and 2t + 1, where g is a quarter of the lane and t the rest."""
    for (warp, lane), found in held(mgpu.WGMMA_LAYOUT, (64, 8)).items():
        row, column = 16 * warp + lane // 4, 2 * (lane % 4)
        assert found == [(r, c) for r in (row, row + 8) for c in (column, column + 1)]


@pytest.mark.parametrize("tile", [64, 128])
def test_weights_have_each_thread_where_the_left_operand_has_it(tile):
    """That is why they are only named anew, register by register."""
    to = mgpu.MMALayouts(jnp.bfloat16).lhs
    assert held(mgpu.WGMMA_LAYOUT, (64, tile)) == held(to, (64, tile))
    shapes = (layout.registers_shape((64, tile)) for layout in (mgpu.WGMMA_LAYOUT, to))
    assert len({int(np.prod(shape)) for shape in shapes}) == 1


@pytest.mark.parametrize("tile", [64, 128])
def test_masks_know_the_columns_of_each_register(tile):
    """What `columns_between` takes to be so: pairs of columns by eights of them, and in each eight by
    the two rows; a row's number, of a vector of rows, in the order of these two."""
    for (_, lane), found in held(mgpu.WGMMA_LAYOUT, (64, tile)).items():
        pairs = [(eight, row) for eight in range(tile // 8) for row in range(2)]
        columns = [8 * eight + 2 * (lane % 4) + i for eight, _ in pairs for i in range(2)]
        assert [column for _, column in found] == columns
        assert len({row for row, _ in found[::4]}) == len({row for row, _ in found[2::4]}) == 1
        assert found[2][0] == found[0][0] + 8
    assert mgpu.WGMMA_LAYOUT.registers_shape((64, tile)) == (1, tile // 8, 1, 1, 2, 1, 1, 1, 1)
    assert mgpu.WGMMA_ROW_LAYOUT.registers_shape((64,)) == (1, 1, 2, 1, 1)


def test_the_left_operand_lies_as_in_the_table_of_mma():
    """The same, fragments of A: columns 2t and 2t + 1 of both rows, then those 8 further on."""
    for (warp, lane), found in held(mgpu.MMALayouts(jnp.bfloat16).lhs, (64, 16)).items():
        row, column = 16 * warp + lane // 4, 2 * (lane % 4)
        assert found == [
            (r, c + i) for c in (column, column + 8) for r in (row, row + 8) for i in (0, 1)
        ]


def test_the_right_operand_lies_as_in_the_table_of_mma():
    """The same, fragments of B, which each warp holds whole: column g, rows 2t and 2t + 1, then
    those 8 further on."""
    for (_, lane), found in held(mgpu.MMALayouts(jnp.bfloat16).rhs, (16, 8)).items():
        row, column = 2 * (lane % 4), lane // 4
        assert found == [(r + i, column) for r in (row, row + 8) for i in (0, 1)]


@pytest.mark.parametrize(
    "one",
    mostly_slow(
        [
            programs.Case(128, 4, "bfloat16", *programs.PASSES[0]),
            programs.Case(64, 8, "float16", *programs.PASSES[4]),
            programs.Case(80, 8, "bfloat16", *programs.PASSES[1]),
            programs.Case(256, 2, "bfloat16", *programs.PASSES[5], programs.Scoring(4096, 50.0)),
            programs.Case(128, 4, "bfloat16", *programs.PASSES[3], approximate="fp8"),
        ],
        1,
    ),
    ids=str,
)
def test_kernels_lower_for_a_gpu_without_wgmma(one):
    function, arguments = programs.attention(one, "mosaic_gpu")
    text = lowered_for(BLACKWELL, function, *arguments)
    assert text.count("@mosaic_gpu_v2") == 2


@pytest.mark.parametrize("shape", mostly_slow([DECODE, dataclasses.replace(DECODE, dim=128)], 1))
def test_what_is_around_the_products_computes_on(shape):
    compare(
        "mosaic_gpu",
        INTERPRETED,
        shape,
        case([[0, 1], [1, 0, 2], [0, 3]], [1, 1, 1], [200, 70, 3, 0], gaps=[1, 2, 0, 3]),
    )


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (
            programs.LATENT[0],
            "heads of bfloat16 caches have at most 256 entries, and these have 576",
        ),
        (
            programs.Case(192, 4, "bfloat16", *programs.PASSES[0], approximate="int8"),
            "heads of int8 caches have at most 128 entries, and these have 192",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_registers_is_declined_with_the_reason(one, why):
    function, arguments = programs.attention(one, "mosaic_gpu")
    with (
        assume_device(BLACKWELL),
        pytest.raises(NotImplementedError, match=f"mosaic_gpu: .*{why}"),
    ):
        jax.eval_shape(function, *arguments)
