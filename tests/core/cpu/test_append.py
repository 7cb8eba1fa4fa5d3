"""cpu_append against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import Layout, Rope, cpu, make_plan
from tests.helpers import cache_with, mostly_slow, on_device, rotated

if not cpu.available():
    pytest.skip("there are no kernels for this machine", allow_module_level=True)

from jaxshare.cpu.append import cpu_append

planned = jax.jit(make_plan, static_argnums=3)


TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}
"""Absolute, for numbers of up to about 4."""

appended = jax.jit(cpu_append, donate_argnums=(0, 1))


@dataclasses.dataclass
class Append:
    """New tokens [R, T, K, D] of rows that write into blocks of their own, in arenas in a cache."""

    width: int
    kv_heads: int
    dim: int
    rotary: int
    new: str = "float32"
    arena: str = "float32"
    lengths: tuple[int, ...] = (3, 0, 70, 1)
    counts: tuple[int, ...] = (1, 0, 1, 1)
    phases: tuple[int, ...] = (0, 5, 4000, 2)

    def check(self) -> None:
        """Compares the arenas with what NumPy puts into them."""
        rng = np.random.default_rng(self.width + self.dim)
        rope = Rope.default(self.rotary, 10_000.0) if self.rotary else Rope(())
        rope = dataclasses.replace(rope, attention_factor=1.1)
        offsets = [int(sum(self.lengths[:b])) + b * (self.width + 1) for b in range(4)]
        total = offsets[-1] + self.lengths[-1] + self.width  # up to the arena's last token
        blocks = [rng.normal(size=(n, self.kv_heads, self.dim)) for n in self.lengths]
        cache = cache_with(
            blocks,
            blocks,
            rope=rope,
            offsets=offsets,
            capacities=[n + self.width for n in self.lengths],
            tokens=total,
            phases=self.phases,
            dtype=getattr(jnp, self.arena),
        )
        k, v = (
            on_device(rng.normal(size=(4, self.width, self.kv_heads, self.dim)), self.new)
            for _ in range(2)
        )
        counts = on_device(self.counts, jnp.int32)
        plan = planned(cache, Layout.from_blocks([[0], [1], [2], [3]]), counts, self.width)
        expected = [np.array(each[0], np.float64) for each in (cache.keys, cache.values)]
        for row, count in enumerate(self.counts):
            at = offsets[row] + self.lengths[row]
            positions = self.phases[row] + self.lengths[row] + np.arange(count)
            new = [np.asarray(each[row, :count], np.float64) for each in (k, v)]
            new[0] = rotated(new[0], positions, rope, rope.attention_factor)
            for arena, tokens in zip(expected, new, strict=True):
                arena[:, at : at + count] = tokens.swapaxes(0, 1)
        found = appended(cache.keys[0], cache.values[0], k, v, plan)
        tolerance = max(TOLERANCE[self.new], TOLERANCE[self.arena])
        for arena, what in zip(found, expected, strict=True):
            assert arena.dtype == self.arena
            changed = np.abs(what) < 20  # what no block holds is large, and must stay as it is
            arena = np.asarray(arena, np.float64)
            np.testing.assert_allclose(arena[changed], what[changed], atol=tolerance)
            np.testing.assert_array_equal(arena[~changed], what[~changed])


@pytest.mark.parametrize("rotary", mostly_slow([34, 0, 64, 2, 16], 3))
def test_part_of_the_numbers_is_rotated(rotary):
    Append(1, 2, 64, rotary).check()


@pytest.mark.parametrize("dim", mostly_slow([20, 2, 128, 8, 40, 96], 3))
def test_sizes_of_heads(dim):
    Append(1, 3, dim, dim).check()


def test_ragged_tokens():
    Append(70, 2, 20, 12, counts=(70, 0, 1, 64)).check()


@pytest.mark.parametrize("new", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("arena", ["float32", "float16", "bfloat16"])
def test_dtypes(new, arena):
    Append(3, 1, 24, 16, new, arena, counts=(3, 1, 0, 2)).check()


def test_rows_that_write_nothing_change_nothing():
    Append(2, 1, 8, 8, counts=(0, 0, 0, 0)).check()


@pytest.mark.parametrize("arena", ["float32", "float16", "bfloat16"])
def test_what_is_not_finite_is_made_so(arena):
    """Kernels read what a row does not see with a weight of 0, and 0 times infinity is no number."""
    cache = cache_with(
        [np.zeros((0, 1, 8))],
        [np.zeros((0, 1, 8))],
        rope=Rope(()),
        offsets=[0],
        capacities=[2],
        tokens=2,
        phases=[0],
        dtype=getattr(jnp, arena),
    )
    new = on_device([jnp.nan, jnp.inf, -jnp.inf, 1e30, -1e30, 1, 0, -0.0], jnp.float32)
    new = jnp.broadcast_to(new, (1, 2, 1, 8))
    plan = planned(cache, Layout.from_blocks([[0]]), on_device([2]), 2)
    largest = float(jnp.finfo(arena).max)
    wide = min(largest, float(on_device(1e30, "bfloat16"))) if arena != "float32" else 1e30
    expected = [0, largest, -largest, wide, -wide, 1, 0, 0]
    for found in appended(cache.keys[0], cache.values[0], new, new, plan):
        np.testing.assert_allclose(found[0].astype("float32"), [expected] * 2, rtol=1e-6)


def test_the_arenas_are_written_in_place():
    cache = cache_with(
        [np.zeros((1, 2, 16))],
        [np.zeros((1, 2, 16))],
        rope=Rope.default(16, 10_000.0),
        offsets=[0],
        capacities=[4],
        tokens=4,
        phases=[0],
    )
    new = jnp.ones((1, 1, 2, 16))
    plan = planned(cache, Layout.from_blocks([[0]]), on_device([1]), 1)
    arguments = cache.keys[0], cache.values[0], new, new, plan
    text = appended.lower(*arguments).compile().as_text()
    assert "input_output_alias={ {0}" in text and " copy(" not in text
    places = [each.unsafe_buffer_pointer() for each in arguments[:2]]
    found = appended(*arguments)
    assert [each.unsafe_buffer_pointer() for each in found] == places
