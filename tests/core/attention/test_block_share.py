"""Attention shares against float64 numpy in which the values of block b are unit vector b, so that
the output of attention is the shares."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache, Layout, Rope, make_plan
from jaxshare.attention.block_share import block_attention_share
from jaxshare.models.layers import Decoder
from tests.helpers import (
    CAPACITIES,
    LATENT,
    TINY,
    VOCAB,
    DenseModel,
    Shelf,
    cache_with,
    init,
    mostly_slow,
    on_device,
    pad_rows,
)

ROPE = dataclasses.replace(Rope.default(12, 10_000.0), attention_factor=1.2)
HEADS, KV_HEADS, DIM, WIDTH, SCALE = 4, 2, 16, 3, 0.3
ROWS, LISTED = 5, 5
BLOCKS, ARENA = 5, 4096
"""Of all cases, so that they share a program; blocks that a case does not name are empty."""

CASES = {  # lengths of the blocks, rows, new tokens of each row
    "combined": ([40, 3, 9, 5], [[0, 2, 3, 1], [0, 1, 3, 2], [0, 1, 2, 3]], [1, 3, 2]),
    "orders": ([7, 2, 30, 4, 1], [[4, 2, 0], [2, 4, 0, 1], [1, 3]], [2, 1, 3]),
    "longer than a tile": ([513, 1300, 512, 511, 1024], [[1, 3, 2, 0, 4], [0, 1, 2, 3]], [3, 1]),
    "empty blocks and rows": ([0, 600, 0, 0, 5], [[0, 1, 2], [], [1, 0, 3], [4]], [1, 0, 2, 0]),
    "one block": ([0], [[0]], [3]),
}


@jax.jit
def measured(cache: KVCache, layout: Layout, count, q, k, v):
    plan = make_plan(cache, layout, count, WIDTH)
    return block_attention_share(q, cache.append(0, k, v, plan).keys[0], plan, SCALE)


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"]))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_shares_are_those_of_a_plain_softmax(case, dtype):
    lengths, rows, count = case
    rng = np.random.default_rng(len(lengths))
    lengths = pad(lengths, BLOCKS, 0)

    def drawn(*size: int) -> np.ndarray:
        return np.asarray(on_device(rng.normal(size=size), dtype), np.float64)

    keys = [drawn(n, KV_HEADS, DIM) for n in lengths]
    values = [np.broadcast_to(np.eye(DIM)[b], key.shape) for b, key in enumerate(keys)]
    q, k = drawn(ROWS, WIDTH, HEADS, DIM), drawn(ROWS, WIDTH, KV_HEADS, DIM)
    v = np.stack(
        [
            np.broadcast_to(np.eye(DIM)[row[-1] if row else 0], k.shape[1:])
            for row in pad(rows, ROWS, [])
        ]
    )

    capacities = [n + WIDTH for n in lengths]
    ends = np.cumsum(capacities)
    ends += ARENA - ends[-1]  # the arena ends where the last block does
    cache = cache_with(
        keys,
        values,
        rope=ROPE,
        offsets=ends - capacities,
        capacities=capacities,
        tokens=ARENA,
        phases=[0, 5, 4000, 0, 1],
        dtype=dtype,
    )
    shelf = Shelf([list(zip(*both, strict=True)) for both in zip(keys, values, strict=True)])
    shelf.append(rows, count, k, v)
    expected = shelf.attend(rows, count, q, ROPE, SCALE)  # [R, T, H, block]

    shares = measured(
        cache,
        pad_rows(rows, ROWS, LISTED),
        on_device(pad(count, ROWS, 0)),
        *(on_device(x, dtype) for x in (q, k, v)),
    )
    assert shares.shape == (ROWS, WIDTH, HEADS, LISTED) and shares.dtype == jnp.float32
    assert np.isfinite(shares).all()
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for r, row in enumerate(rows):
        for t in range(count[r]):
            np.testing.assert_allclose(
                shares[r, t, :, : len(row)], expected[r, t][:, row], atol=tolerance
            )
            np.testing.assert_allclose(np.sum(shares[r, t], axis=-1), 1.0, atol=1e-5)
    assert not np.any(shares[np.asarray(pad(count, ROWS, 0)) == 0])


def pad(values: list, size: int, filler) -> list:
    return [*values, *[filler] * (size - len(values))]


def test_large_scores_do_not_overflow():
    """One key that draws everything, thousands in the exponent away from the rest."""
    keys = [np.zeros((n, KV_HEADS, DIM)) for n in (5, 4)]
    keys[0][2, :, -1] = 100.0  # the last entries are not rotated
    cache = cache_with(
        keys, keys, rope=ROPE, offsets=[0, 10], capacities=[5, 7], tokens=20, phases=[0, 0]
    )
    q = (
        jnp.zeros((1, WIDTH, HEADS, DIM))
        .at[..., -1]
        .set(on_device([100.0, -100.0, 0.0])[None, :, None])
    )
    new = jnp.zeros((1, WIDTH, KV_HEADS, DIM))
    shares = measured(cache, Layout.from_blocks([[0, 1]]), on_device([WIDTH]), q, new, new)
    np.testing.assert_allclose(
        shares[0, :, 0], [[1, 0], [4 / 10, 6 / 10], [5 / 12, 7 / 12]], atol=1e-6
    )


def test_memory_does_not_grow_with_the_cache():
    def temporary(tokens: int) -> int:
        cache = jax.eval_shape(lambda: KVCache.create(TINY, (tokens, *[64] * 8), jnp.bfloat16))
        layout = Layout.from_blocks(
            [[0, *(b for b in range(1, 9) if b != own), own] for own in range(1, 9)]
        )
        q = jax.ShapeDtypeStruct((8, 1, TINY.num_heads, TINY.head_dim), jnp.bfloat16)

        def share(cache, q):
            plan = make_plan(cache, layout, jnp.ones(8, jnp.int32), 1)
            return block_attention_share(q, cache.keys[0], plan, SCALE)

        return jax.jit(share).lower(cache, q).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(2**14), temporary(2**17)
    assert large < 2**20 and large < 2 * small


class Watched(Shelf):
    """A shelf that keeps the shares of the last call of `attend`, [R, T, H, D]: those of block b
    are at D = b."""

    def attend(self, rows, count, q, rope, scale):
        units = [
            [(k, np.broadcast_to(np.eye(k.shape[-1])[b], k.shape)) for k, _ in block]
            for b, block in enumerate(self.blocks)
        ]
        self.shares = Shelf(units).attend(rows, count, q, rope, scale)
        return super().attend(rows, count, q, rope, scale)


@pytest.mark.slow
@pytest.mark.parametrize("config", [TINY, LATENT], ids=["keys", "latents"])
def test_a_model_gives_the_masses_of_all_layers(config):
    params = init(config)
    rng = np.random.default_rng(3)
    rows, count = [[0, 2, 1], [0, 1, 2]], [2, 1]
    history, *fed = (rng.integers(0, VOCAB, n).tolist() for n in (20, *count))
    dense = DenseModel(config, params, 3)
    dense.shelves = [Watched([[], [], []]) for _ in dense.shelves]
    dense.forward([history], [[0]])
    dense.forward(fed, rows)

    def padded(tokens: list[list[int]]) -> jax.Array:
        return on_device([pad(row, 20, 0) for row in pad(tokens, 4, [])])

    run = jax.jit(Decoder(config).apply, static_argnames="method")
    _, cache = run(
        params,
        padded([history]),
        on_device([20, 0, 0, 0]),
        KVCache.create(config, CAPACITIES, jnp.float32),
        pad_rows([[0]], 4, 4),
    )
    lengths = np.asarray(cache.lengths).tolist()
    shares = run(
        params,
        padded(fed),
        on_device(pad(count, 4, 0)),
        cache,
        pad_rows(rows, 4, 4),
        method="attention_share",
    )
    assert (
        shares.shape == (config.num_layers, 4, 4) and np.asarray(cache.lengths).tolist() == lengths
    )
    for layer, shelf in enumerate(dense.shelves):
        for r, row in enumerate(rows):
            expected = shelf.shares[r, count[r] - 1].mean(axis=0)
            assert expected.max() < 0.99  # no block draws it all
            np.testing.assert_allclose(shares[layer, r], [*expected[row], 0], atol=1e-4)
    assert not np.any(shares[:, 2:])
