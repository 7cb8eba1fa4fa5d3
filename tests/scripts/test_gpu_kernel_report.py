"""Goals of compiled kernels, from results made by hand."""

import pytest

from scripts.gpu.kernel_report import goals_of_kernels
from scripts.gpu.targets import TARGETS

KERNEL = dict(
    spill_bytes=0, serialized=0, static_shared_bytes=1024, dynamic_shared_bytes=200_000, tcgen05=48
)
CASE = dict(head_dim=128, group=8, width=64, rows=4, approximate=None)


def goals(target: str = "b200", *, tcgen05: int = 48, **case) -> dict[str, tuple]:
    """(measured, met) of each goal of one program, by its name."""
    merging = {**KERNEL, "tcgen05": 0}
    program = {
        "backend": "mosaic_gpu",
        "case": {**CASE, **case},
        "kernels": [{**KERNEL, "tcgen05": tcgen05}, merging],
    }
    return {g.name: (g.measured, g.met) for g in goals_of_kernels([program], TARGETS[target])}


IN_TENSOR_MEMORY = "mosaic_gpu: passes of many queries that do not multiply in tensor memory"


def test_many_queries_multiply_in_tensor_memory_on_a_b200():
    assert goals()[IN_TENSOR_MEMORY] == (0, True)
    assert goals(tcgen05=0)[IN_TENSOR_MEMORY] == (1, False)


@pytest.mark.parametrize(
    "other",
    [dict(target="h200"), dict(rows=3), dict(approximate="int8"), dict(head_dim=256)],
    ids=str,
)
def test_others_need_not(other):
    assert IN_TENSOR_MEMORY not in goals(tcgen05=0, **other)


def test_shared_memory_is_that_of_a_block_of_the_gpu():
    name = "mosaic_gpu: bytes of shared memory of a block, most"
    assert goals()[name] == (201_024, True)
    assert goals("l40", rows=1)[name] == (201_024, False)
