"""Passes over random caches, for scripts.bench.attention and the GPU tests, and what is wrong with
a backend's answer to one of them.

Arenas are filled with what leaves nothing to chance: large noise wherever there is no block, so
that reading too far shows, and large values in the first and the last token of every block, so that
reading one token too few shows however long the block is.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import KVCache, Layout, Plan, Rope, block_attention, make_plan

THETA = 10_000.0
NOISE = 30.0
"""Standard deviation of the noise between blocks; that of keys and values is 1."""
PERIOD = 1_048_573
"""A prime, so that no two tokens of an arena are equal, wherever they are."""
TOLERANCE_EPSILONS = 3
REFERENCE_ROWS = 4
"""The reference unrolls its rows, so it judges at most this many of a pass."""
Backend = Callable[[Array, Array, Array, Plan], Array]


@dataclasses.dataclass(frozen=True)
class Heads:
    """The fields of a model that a cache needs (`CacheConfig`), and G, `group`, query heads of a kv
    head. Without `rotated` the rotation is that of no entry at all.
    """

    num_kv_heads: int
    group: int
    head_dim: int = 128
    num_layers: int = 1
    rotated: bool = True
    layer_ropes: tuple[Rope, ...] = ()

    @property
    def num_heads(self) -> int:
        """H."""
        return self.num_kv_heads * self.group

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def rope(self) -> Rope:
        return Rope.default(self.head_dim, THETA) if self.rotated else Rope(())


@dataclasses.dataclass(frozen=True)
class Case:
    """One pass. R rows, B blocks.

    Attributes:
      name: as it is called in results.
      rows: for each row the blocks it sees, in order.
      lengths: of each block, before the pass.
      count: new tokens of each row.
      width: T.
      dtype: of queries, keys and values.
    """

    name: str
    heads: Heads
    rows: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    count: tuple[int, ...]
    width: int = 1
    dtype: str = "bfloat16"

    @property
    def after(self) -> list[int]:
        """The tokens of each block after the pass's appends."""
        after = list(self.lengths)
        for row, count in zip(self.rows, self.count, strict=True):
            if row:
                after[row[-1]] += count
        return after

    @property
    def layer_bytes(self) -> int:
        """Keys and values of one layer that this pass sees, each block's once: what has to be read
        at least."""
        seen = {b for row, count in zip(self.rows, self.count, strict=True) if count for b in row}
        heads, size, after = self.heads, jnp.dtype(self.dtype).itemsize, self.after
        return 2 * heads.num_kv_heads * heads.head_dim * size * sum(after[b] for b in seen)

    @property
    def layer_flops(self) -> int:
        """The FLOPs of one layer's two products, for every pair of a query and a token that it
        sees."""
        pairs, after = 0, self.after
        for row, count in zip(self.rows, self.count, strict=True):
            if row:
                before = sum(after[b] for b in row) - count
                pairs += count * before + count * (count + 1) // 2
        return 4 * self.heads.num_heads * self.heads.head_dim * pairs


def private(heads: Heads, rows: int, tokens: int) -> Case:
    """A pass in which every row sees a block of its own, whose last token is its new one."""
    return Case(
        f"{rows} rows, {tokens} tokens each",
        heads,
        tuple((r,) for r in range(rows)),
        (tokens - 1,) * rows,
        (1,) * rows,
    )


def shared(heads: Heads, rows: int, prefix: int, own: int) -> Case:
    """A pass in which all rows see one prefix, and each a block of its own, its new token among
    them."""
    return Case(
        f"{rows} rows, prefix {prefix}, {own} each",
        heads,
        tuple((0, 1 + r) for r in range(rows)),
        (prefix, *[own - 1] * rows),
        (1,) * rows,
    )


def prompt(heads: Heads, tokens: int) -> Case:
    """A pass of one row that feeds a whole prompt to its empty block."""
    return Case(f"prompt of {tokens}", heads, ((0,),), (0,), (tokens,), width=tokens)


def workers(heads: Heads, count: int, history: int, own: int) -> Case:
    """All see the history first, then the others' blocks, then their own (Hogwild! section 3.2, the
    combined layout)."""
    own_blocks = range(1, 1 + count)
    rows = tuple((0, *(b for b in own_blocks if b != mine), mine) for mine in own_blocks)
    return Case(
        f"{count} rows, history {history}, {own} each",
        heads,
        rows,
        (history, *[own - 1] * count),
        (1,) * count,
    )


def mixed_cases(heads: Heads, width: int, dtype: str) -> list[Case]:
    """Passes of three rows over five blocks that are one program: workers, a prefix, blocks apart,
    ragged and empty ones, tile borders."""
    full = (width,) * 3
    ragged = (width, 0, max(1, width // 2))
    every = [
        ("workers", ((0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 3, 1)), (600, 70, 33, 5, 0), full),
        ("a prefix", ((0, 1), (0, 2), (0, 3)), (1000, 1, 64, 129, 0), full),
        ("blocks apart", ((1,), (2,), (3,)), (0, 300, 65, 0, 0), full),
        ("ragged", ((4, 0, 1), (2,), (4, 3)), (257, 31, 40, 0, 128), ragged),
        ("empty blocks", ((4, 0, 1), (4, 2), ()), (0, 0, 0, 7, 0), (width, width, 0)),
        ("tile borders", ((0, 4, 1), (4, 0, 2), (0, 3)), (128, 64, 63, 127, 256), full),
    ]
    return [
        Case(name, heads, rows, lengths, count, width, dtype)
        for name, rows, lengths, count in every
    ]


def many_rows(heads: Heads, rows: int, dtype: str) -> list[Case]:
    """Passes of many rows that are one program: over one prefix; over two of them and a tail that
    all see, some rows bringing nothing."""
    lengths = (900, 130, 65, *(r * 7 % 90 for r in range(rows)))
    return [
        Case(
            "many rows, one prefix",
            heads,
            tuple((0, 3 + r) for r in range(rows)),
            lengths,
            (1,) * rows,
            1,
            dtype,
        ),
        Case(
            "many rows, two prefixes",
            heads,
            tuple((r % 2, 2, 3 + r) for r in range(rows)),
            lengths,
            tuple(int(r % 5 > 0) for r in range(rows)),
            1,
            dtype,
        ),
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """A pass as arrays, its keys and values in the arenas already. q [R, T, H, D]."""

    cache: KVCache
    layout: Layout
    count: Array
    q: Array

    @property
    def plan(self) -> Plan:
        return make_plan(self.cache, self.layout, self.count, self.q.shape[1])


def make(case: Case, seed: int, *, tokens: int | None = None, slots: int | None = None) -> Inputs:
    """Random inputs.

    Args:
      tokens, slots: arena tokens and N, where several cases are to be one program; default what
        this case needs.
    """
    after, heads = case.after, case.heads
    offsets, needed = _extents(after)
    tokens = needed if tokens is None else tokens
    edges = np.ones(tokens, np.float32)
    inside = np.zeros(tokens, bool)
    for at, length in zip(offsets, after, strict=True):
        inside[at : at + length] = True
        edges[[at, at + length - 1] if length else []] = max(1.0, length**0.5 / 2)
    rng = np.random.default_rng(seed)
    shape = heads.num_kv_heads, tokens, heads.head_dim
    spread = (
        np.where(inside, 1.0, NOISE).astype(np.float32),
        np.where(inside, edges, NOISE).astype(np.float32),
    )
    arenas = [
        tuple(noise(rng, shape, case.dtype, s[:, None]) for _ in range(heads.num_layers))
        for s in spread
    ]
    cache = KVCache(
        keys=arenas[0],
        values=arenas[1],
        offsets=jnp.asarray(offsets, jnp.int32),
        lengths=jnp.asarray(case.lengths, jnp.int32),
        capacities=jnp.asarray(after, jnp.int32),
        phases=jnp.zeros(len(after), jnp.int32),
        faults=jnp.zeros((), jnp.int32),
        rope=heads.rope,
    )
    q = noise(rng, (len(case.rows), case.width, heads.num_heads, heads.head_dim), case.dtype)
    return Inputs(
        cache, Layout.from_blocks(case.rows, width=slots), jnp.asarray(case.count, jnp.int32), q
    )


def noise(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, spread: np.ndarray | float = 1.0
) -> Array:
    """Normal numbers, times `spread`. Beyond PERIOD of them they repeat, because more would take
    longer than all that is measured."""
    size = math.prod(shape)
    numbers = rng.standard_normal(min(size, PERIOD), np.float32)
    if size <= PERIOD:
        return jnp.asarray(
            (numbers.reshape(shape) * np.asarray(spread, np.float32)).astype(jnp.dtype(dtype))
        )
    return _repeated(numbers.astype(jnp.dtype(dtype)), np.asarray(spread, np.float32), shape)


@functools.partial(jax.jit, static_argnums=2)
def _repeated(numbers: Array, spread: Array, shape: tuple[int, ...]) -> Array:
    size = math.prod(shape)
    return jnp.tile(numbers, -(-size // PERIOD))[:size].reshape(shape) * spread.astype(
        numbers.dtype
    )


def _extents(capacities: Sequence[int]) -> tuple[list[int], int]:
    """The offsets of blocks in an arena of their own, and its tokens, as in `KVCache.create`."""
    made = KVCache.create(Heads(num_kv_heads=1, group=1, head_dim=2), capacities, jnp.int8)
    return np.asarray(made.offsets).tolist(), made.keys[0].shape[1]


@functools.partial(jax.jit, static_argnames="implementation")
def answer(inputs: Inputs, implementation: str) -> Array:
    """The first layer's attention, [R, T, H, D]."""
    return block_attention(
        inputs.q,
        inputs.cache.keys[0],
        inputs.cache.values[0],
        inputs.plan,
        implementation=implementation,
    )


@jax.jit
def truth(inputs: Inputs) -> Array:
    """The same by the reference in float32."""
    q, keys, values = (
        x.astype(jnp.float32) for x in (inputs.q, inputs.cache.keys[0], inputs.cache.values[0])
    )
    return block_attention(q, keys, values, inputs.plan, implementation="reference")


def only(case: Case, inputs: Inputs, rows: Sequence[int]) -> Inputs:
    """The pass of these rows alone, over an arena of the blocks that they see; other rows' new
    tokens are in them already."""
    blocks = sorted({b for r in rows for b in case.rows[r]})
    after = np.asarray(case.after, np.int32)
    before = after.copy()
    for r in rows:
        if case.rows[r]:
            before[case.rows[r][-1]] -= case.count[r]
    offsets = np.asarray(inputs.cache.offsets)

    def kept(arena: Array) -> Array:
        return jnp.concatenate(
            [arena[:, offsets[b] : offsets[b] + after[b]] for b in blocks], axis=1
        )

    sizes = after[blocks]
    layout = Layout.from_blocks(
        [[blocks.index(b) for b in case.rows[r]] for r in rows], width=inputs.layout.blocks.shape[1]
    )
    cache = dataclasses.replace(
        inputs.cache,
        keys=(kept(inputs.cache.keys[0]),),
        values=(kept(inputs.cache.values[0]),),
        offsets=jnp.asarray(np.cumsum(sizes) - sizes, jnp.int32),
        lengths=jnp.asarray(before[blocks]),
        capacities=jnp.asarray(sizes),
        phases=inputs.cache.phases[jnp.asarray(blocks)],
    )
    return Inputs(cache, layout, inputs.count[jnp.asarray(rows)], inputs.q[jnp.asarray(rows)])


def expected(case: Case, inputs: Inputs) -> tuple[list[int], np.ndarray]:
    """Some rows, spread over all, and what the reference answers for them, float32[rows, T, H,
    D]."""
    count = len(case.rows)
    if count <= REFERENCE_ROWS:
        return list(range(count)), np.asarray(truth(inputs))
    rows = sorted({round(i * (count - 1) / (REFERENCE_ROWS - 1)) for i in range(REFERENCE_ROWS)})
    return rows, np.asarray(truth(only(case, inputs, rows)))


def error(case: Case, out: Array, rows: Sequence[int], right: np.ndarray) -> float:
    """The largest distance of an answer from the right one, over all rows, real tokens and heads,
    as a part of the right one's length.

    Infinite where a real token's answer is not finite.
    """
    out = np.asarray(out.astype(jnp.float32))[np.asarray(rows)]
    real = np.arange(case.width) < np.asarray(case.count)[np.asarray(rows)][:, None]
    found, right = out[real], right[real]  # [tokens, H, D]
    if not np.isfinite(found).all():
        return float("inf")
    distance, length = (
        np.sqrt((x.astype(np.float64) ** 2).sum(-1)) for x in (found - right, right)
    )
    return float((distance / length).max(initial=0.0))


def tolerance(dtype: str) -> float:
    """The error that rounding explains: queries after their rotation, weights and the answer are
    each rounded to the dtype, by half an epsilon at most; the rest of twice that is for the heads
    where the right answer is short."""
    return TOLERANCE_EPSILONS * float(jnp.finfo(jnp.dtype(dtype)).eps)
