"""Caches whose values are a part of their keys (multi-head latent attention), against lists of keys
in float64 numpy: sessions of passes, moves, forks and relocations, and their edges."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache, Layout, Rope, arena, block_attention, cpu, make_plan
from jaxshare.attention.api import BACKENDS
from jaxshare.attention.expansion import HeadMakers
from jaxshare.pallas.device import H200, assume_device
from tests.helpers import mostly_slow, on_device, pad_rows, rotated, softmax_attention

planned = jax.jit(make_plan, static_argnums=3)


ROTARY, LATENT, HEADS, SCALE = 8, 12, 5, 0.4
ROPE = Rope.yarn(ROTARY, 10_000.0, 4.0, 64)
CAPACITIES = (300, 130, 70, 40, 40, 0, 0)
ROWS, LISTED = 3, 5
TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 4e-2}


@dataclasses.dataclass(frozen=True)
class Config:
    """A `CacheConfig`: one key of [rotated | latent] for all heads, and no values."""

    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = ROTARY + LATENT
    value_dim: int = 0
    rope: Rope = ROPE
    layer_ropes: tuple[Rope, ...] = ()


@functools.partial(jax.jit, static_argnames="implementation")
def attended(cache, layout, count, q, k, implementation=None):
    plan = make_plan(cache, layout, count, q.shape[1])
    cache = cache.append(0, k, jnp.zeros((*k.shape[:3], 0), k.dtype), plan)
    arenas = cache.keys[0], cache.values[0]
    out = block_attention(q, *arenas, plan, scale=SCALE, implementation=implementation)
    return out, cache.advance(plan)


class Latents:
    """A cache, and beside it the oracle: for each block the list of its keys, not rotated."""

    def __init__(self, dtype: Any = jnp.float32, capacities=CAPACITIES, seed: int = 0):
        self.cache = KVCache.create(Config(), capacities, dtype)
        self.blocks: list[list[np.ndarray]] = [[] for _ in capacities]
        self.dtype, self.rng = dtype, np.random.default_rng(seed)

    def check(self, rows, count, *, width: int, num_rows: int = ROWS, implementation=None):
        """Feeds random tokens and compares what they attend to with the oracle."""

        def rounded(*size: int) -> np.ndarray:
            return np.asarray(on_device(self.rng.normal(size=size), self.dtype), np.float64)

        q = rounded(num_rows, width, HEADS, ROTARY + LATENT)
        k = rounded(num_rows, width, 1, ROTARY + LATENT)
        for r, row in enumerate(rows):
            self.blocks[row[-1]] += list(k[r, : count[r], 0])
        out, self.cache = attended(
            self.cache,
            pad_rows(rows, num_rows, LISTED),
            on_device([*count, *[0] * (num_rows - len(rows))], jnp.int32),
            *(on_device(x, self.dtype) for x in (q, k)),
            implementation=implementation,
        )
        assert out.shape == (num_rows, width, HEADS, LATENT) and out.dtype == self.dtype
        assert np.isfinite(np.asarray(out, np.float64)).all()
        self.cache.check()
        assert self.cache.lengths.tolist() == [len(keys) for keys in self.blocks]
        for r, row in enumerate(rows):
            for t in range(count[r]):
                expected = self.attend(row, count[r] - t - 1, q[r, t])
                np.testing.assert_allclose(
                    np.asarray(out[r, t], np.float64), expected, rtol=0, atol=TOLERANCE[self.dtype]
                )

    def attend(self, row, later: int, q: np.ndarray) -> np.ndarray:
        """[H, LATENT]: a query at the end of a row's keys without the `later` last ones."""
        seen = np.stack([key for block in row for key in self.blocks[block]])
        seen = seen[: len(seen) - later, None]
        keys = rotated(seen, np.arange(len(seen)), ROPE, ROPE.attention_factor)
        query = rotated(q, np.asarray(len(seen) - 1), ROPE, ROPE.attention_factor)
        return softmax_attention(query, keys, seen[..., ROTARY:], SCALE)

    def move(self, source: int, target: int) -> None:
        self.cache = self.cache.move(source, target)
        self.blocks[target] += self.blocks[source]
        self.blocks[source] = []

    def fork(self, block: int, at: int, tail: int) -> None:
        self.cache = self.cache.fork(block, at, tail)
        self.blocks[tail] = self.blocks[block][at:]
        del self.blocks[block][at:]


def only_where_there_is(implementation: str) -> None:
    if implementation == "cpu" and not cpu.available():
        pytest.skip("no CPU kernels here")


@pytest.mark.parametrize("implementation", mostly_slow(["cpu", "xla", "reference"]))
def test_a_session_of_rows_that_list_blocks_at_other_places(implementation):
    only_where_there_is(implementation)
    latents = Latents()
    check = functools.partial(latents.check, implementation=implementation)
    check([[0], [1], [2]], [64, 64, 17], width=64)
    check([[0], [1]], [64, 61], width=64)
    check([[0, 1, 3], [1, 0, 2], [4]], [3, 1, 2], width=3)  # 128 and 125 tokens
    check([[1, 2, 0, 4], [2, 3], [0]], [3, 2, 0], width=3)
    latents.move(4, 2)
    check([[0, 2, 3], [2, 1], [4]], [1, 3, 1], width=3)
    latents.fork(0, 100, 5)
    check([[0, 5, 2, 3], [0, 4], [1, 5]], [2, 3, 1], width=3)
    latents.fork(5, 0, 6)
    check([[0, 3], [5, 6], [0, 5, 4]], [3, 3, 3], width=3)
    latents.move(3, 6)
    check([[1, 6], [6, 2], [4]], [2, 2, 2], width=3)
    latents.cache = latents.cache.clear(1)
    latents.blocks[1] = []
    check([[1], [6, 0, 1, 4], [1, 2]], [1, 1, 1], width=3)  # the first of an empty block


def test_relocated_blocks_have_their_latents():
    latents = Latents()
    latents.check([[0], [1], [2]], [64, 30, 17], width=64)
    end = latents.cache.keys[0].shape[1]
    latents.cache = latents.cache.relocate(
        [4, 2], [int(latents.cache.offsets[2]), end - 20], [9, 20]
    )
    latents.check([[2, 0, 1], [0, 2], [1, 4]], [3, 3, 3], width=3)
    with pytest.raises(ValueError, match="its new extent has a capacity of 3"):
        latents.cache.relocate([1], [0], [3])


def test_a_token_alone_is_its_own_latent():
    latents = Latents()
    q, k = np.random.default_rng(1).normal(size=(2, ROWS, 3, HEADS, ROTARY + LATENT))
    out, cache = attended(
        latents.cache,
        pad_rows([[3]], ROWS, LISTED),
        on_device([1, 0, 0]),
        *(on_device(x, jnp.float32) for x in (q, k[:, :, :1])),
        implementation="xla",
    )
    np.testing.assert_allclose(out[0, 0], np.tile(k[0, 0, 0, ROTARY:], (HEADS, 1)), rtol=1e-6)
    assert np.isfinite(out).all() and cache.lengths.tolist() == [0, 0, 0, 1, 0, 0, 0]


def test_blocks_up_to_their_last_token():
    latents = Latents(capacities=(64, 70, 3, 1, 0, 0, 0))
    latents.check([[0], [1]], [64, 64], width=64, implementation="xla")
    latents.check([[0, 1, 2], [3]], [3, 1], width=3, implementation="xla")
    with pytest.raises(ValueError, match="beyond its capacity"):
        latents.check([[0]], [1], width=3, implementation="xla")


@pytest.mark.parametrize("implementation", mostly_slow(["cpu", "xla"]))
def test_bfloat16(implementation):
    only_where_there_is(implementation)
    latents = Latents(jnp.bfloat16)
    check = functools.partial(latents.check, implementation=implementation)
    check([[0], [1], [2]], [64, 30, 17], width=64)
    check([[1, 0], [2, 1], [0, 1, 3]], [0, 2, 3], width=3)
    latents.move(3, 2)
    check([[1, 0], [2], [0, 2, 3]], [1, 2, 3], width=3)


@pytest.mark.slow
def test_rows_that_share_all_of_an_arena():
    """Where blocks fill an arena, xla reads it in one product."""
    latents = Latents(capacities=(512, 510, 1, 1))
    for _ in range(7):
        latents.check([[0], [1]], [70, 70], width=70, implementation="xla")
    assert latents.cache.keys[0].shape[1] == 1024
    latents.check([[0, 1, 2], [1, 0, 3]], [1, 1], width=1, implementation="xla")


@pytest.mark.slow
def test_the_cpu_kernel_takes_the_sizes_of_deepseek():
    """Two workers that read each other, 12 heads each, over latents of 512."""
    only_where_there_is("cpu")
    rng, rope, scale = np.random.default_rng(3), Rope.default(64, 10_000.0), 0.07
    cache = KVCache.create(Config(head_dim=576, rope=rope), (135, 70), jnp.bfloat16)
    blocks: list[list[np.ndarray]] = [[], []]

    def fed(count: list[int], rows: list[list[int]]) -> tuple[KVCache, jax.Array]:
        width = max(count)
        q, k = (
            on_device(rng.normal(size=(2, width, heads, 576)), jnp.bfloat16) for heads in (12, 1)
        )
        plan = make_plan(cache, Layout.from_blocks(rows), on_device(count), width)
        after = cache.append(0, k, k[..., :0], plan)
        arenas = after.keys[0], after.values[0]
        out = block_attention(q, *arenas, plan, scale=scale, implementation="cpu")
        for r, row in enumerate(rows):
            blocks[row[-1]] += list(np.asarray(k, np.float64)[r, : count[r]])
        for r, row in enumerate(rows):
            seen = np.stack([key for block in row for key in blocks[block]])
            keys, last = rotated(seen, np.arange(len(seen)), rope), np.asarray(len(seen) - 1)
            query = rotated(np.asarray(q, np.float64)[r, count[r] - 1], last, rope)
            expected = softmax_attention(query, keys, seen[..., 64:], scale)
            found = np.asarray(out, np.float64)[r, count[r] - 1]
            # Half a spacing of bfloat16 for outputs of about 4, and its rounded keys and weights.
            np.testing.assert_allclose(found, expected, rtol=0, atol=4e-2)
        return after.advance(plan), out

    cache, _ = fed([130, 65], [[0], [1]])
    cache, out = fed([1, 1], [[1, 0], [0, 1]])
    assert out.shape == (2, 1, 12, 512) and cache.lengths.tolist() == [131, 66]


def test_values_take_no_room():
    cache = KVCache.create(Config(num_layers=3), (5, 4), jnp.bfloat16)
    assert [a.shape for a in cache.values] == [(1, 9, 0)] * 3
    assert [a.shape for a in cache.keys] == [(1, 9, ROTARY + LATENT)] * 3
    assert cache.token_bytes == 3 * (ROTARY + LATENT) * 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_cpu_kernel_appends_the_same(dtype):
    if not cpu.available():
        pytest.skip("no CPU kernels here")
    cache = Latents(dtype).cache
    layout, count = pad_rows([[0], [1], [3]], ROWS, LISTED), on_device([3, 1, 0])
    k = on_device(np.random.default_rng(2).normal(size=(ROWS, 3, 1, ROTARY + LATENT)), dtype)
    k = k.at[0, 0, 0, -1].set(jnp.nan)

    @functools.partial(jax.jit, static_argnums=0)
    def appended(by_kernel):
        plan = make_plan(cache, layout, count, 3)
        new = cache.keys[0], cache.values[0], k, k[..., :0], plan
        return cpu.append_tokens(*new, "cpu") if by_kernel else arena.append_tokens(*new)

    for found, expected in zip(appended(True), appended(False), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(
            np.asarray(found, np.float64), np.asarray(expected, np.float64), atol=1e-6
        )


@pytest.mark.parametrize("name", ["triton", "mosaic_gpu"])
def test_backends_with_kernels_say_that_they_cannot(name):
    cache = Latents().cache
    plan = planned(cache, pad_rows([[0]], 1, 1), on_device([1]), 1)
    q = jnp.ones((1, 1, HEADS, ROTARY + LATENT))
    with pytest.raises(NotImplementedError):
        BACKENDS[name](q, cache.keys[0], cache.values[0], plan, SCALE)


@pytest.mark.parametrize("name", ["triton", "mosaic_gpu"])
def test_gpu_backends_name_the_latents_that_they_take(name):
    cache = Latents(jnp.bfloat16).cache
    plan = planned(cache, pad_rows([[0]], 1, 1), on_device([1]), 1)
    q = jnp.ones((1, 1, HEADS, ROTARY + LATENT), jnp.bfloat16)
    why = "where values are a part of keys its head dims are 576 with 512 of values; this one is 20"
    with assume_device(H200), pytest.raises(NotImplementedError, match=why):
        BACKENDS[name](q, cache.keys[0], cache.values[0], plan, SCALE)


def test_makers_that_do_not_fit_are_refused():
    cache = KVCache.create(Config(), (9,), jnp.float32)
    plan = planned(cache, Layout.from_blocks([[0]]), on_device([1]), 1)
    arenas, q = (cache.keys[0], cache.values[0]), jnp.ones((1, 1, HEADS, ROTARY + 3))
    fit = HeadMakers(jnp.ones((HEADS, 3, LATENT)), jnp.ones((HEADS, 2, LATENT)))
    assert block_attention(q, *arenas, plan, makers=fit, implementation="xla").shape[3] == 2
    with pytest.raises(NotImplementedError, match="reference: it makes no keys and values"):
        block_attention(q, *arenas, plan, makers=fit, implementation="reference")
    for keys, values in [((HEADS, 4, LATENT), (HEADS, 2, LATENT)), ((4, 3, LATENT),) * 2]:
        makers = HeadMakers(jnp.ones(keys), jnp.ones(values))
        with pytest.raises(ValueError, match="the arena must be"):
            block_attention(q, *arenas, plan, makers=makers)


@pytest.mark.parametrize("shape", [(1, 9, 12), (1, 8, 0), (2, 9, 0), (1, 9)])
def test_values_of_another_shape_are_refused(shape):
    cache = KVCache.create(Config(), (9,), jnp.float32)
    plan = planned(cache, Layout.from_blocks([[0]]), on_device([1]), 1)
    q = jnp.ones((1, 1, HEADS, ROTARY + LATENT))
    with pytest.raises(ValueError, match="a last dim of 0"):
        block_attention(q, cache.keys[0], jnp.zeros(shape), plan)
