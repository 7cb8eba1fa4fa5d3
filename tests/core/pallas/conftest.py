"""What all tests of the GPU backends have in common."""

import functools

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu


@pytest.fixture(autouse=True, scope="module")
def races():
    """Interpreted kernels in Pallas on Mosaic GPU raise an error where a warp reads or writes what
    another, or a bulk copy, may be writing: where no barrier is between them."""
    looking = functools.partial(plgpu.InterpretGPUParams, detect_races=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "InterpretGPUParams", looking)
        yield
