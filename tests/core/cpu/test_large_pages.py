"""Large pages for arrays, as the system counts them."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare.cpu.large_pages import use_large_pages

MIB = 2**20


def in_large_pages(array):
    """The bytes of the process's large pages where an array is, as the system says."""
    address, total, inside = array.unsafe_buffer_pointer(), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, after = (int(each, 16) for each in bounds.groups())
            inside = first < address + array.nbytes and after > address
        elif inside and line.startswith("AnonHugePages:"):
            total += 1024 * int(line.split()[1])
    return total


def test_the_system_counts_what_is_said_and_numbers_stay():
    numbers = np.arange(6 * MIB, dtype=np.float32)
    array = jax.block_until_ready(jnp.asarray(numbers) + 1.0)
    given = use_large_pages([array])
    np.testing.assert_array_equal(np.asarray(array), numbers + 1.0)
    assert given <= array.nbytes
    if sys.platform == "linux":
        assert in_large_pages(array) >= given


def test_small_and_traced_arrays_are_left_alone():
    assert use_large_pages([jnp.zeros(1000)]) == 0

    @jax.jit
    def traced(array):
        assert use_large_pages([array]) == 0
        return array * 2

    assert float(traced(jnp.ones(8 * MIB))[0]) == 2.0
