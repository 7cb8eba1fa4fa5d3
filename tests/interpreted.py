"""What the tests of the GPU backends have in common: kernels are interpreted on the CPU and held against float64 numpy."""

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jaxshare.pallas.device import Device, assume_device
from tests.test_attention import Case, Shape, attended, place

TOLERANCE = {jnp.bfloat16: 4e-2, jnp.float16: 6e-3}
"""Absolute, for values of unit variance: keys, queries and weights are rounded to 2**-9 and 2**-12, and scores reach 4."""

SOME_LENGTHS = st.sampled_from([0, 1, 7, 63, 64, 65, 128, 200])


def compare(implementation: str, device: Device, shape: Shape, case: Case) -> None:
    """Holds a backend's answer on a device against the oracle's."""
    arguments, expected = place(shape, case)
    with assume_device(device):
        out, faults = attended(*arguments, implementation=implementation)
    out = np.asarray(out, np.float64)
    real = ~np.isnan(expected[..., 0])
    assert out.shape == expected.shape and int(faults) == 0 and np.isfinite(out).all()
    assert np.abs(out - expected)[real].max(initial=0.0) < TOLERANCE[shape.dtype]


def case(rows, count, lengths, *, seed=0, gaps=None, phases=None):
    """A case whose blocks lie in the arena in the reverse of their order."""
    blocks = len(lengths)
    return Case(rows, count, lengths, list(range(blocks))[::-1], gaps or [0] * blocks, phases or [0] * blocks, seed)
