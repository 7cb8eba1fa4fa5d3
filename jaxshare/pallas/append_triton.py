"""Writes a pass's new keys and values into the arenas, and puts its queries into the order of
segments, in one kernel that JAX lowers through Triton: for NVIDIA GPUs from Ampere on.

By itself XLA makes three kernels of this in every layer, and seven where the cache approximates.
Keys are rotated to their place in their block, queries towards the blocks that they read (Hogwild!
section 3.4). Queries that no segment has are left out, so that places for blocks that a row does not
list cost nothing.

A program has some lines, each of a token and a head: the first programs append, the others gather.
The first and the second entries of rotated pairs, and what is not rotated, are arrays of their own,
because Triton has no slices.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxshare.attention.plan import Plan
from jaxshare.pallas.device import Device
from jaxshare.pallas.work_items import Work
from jaxshare.quantised import FORMATS
from jaxshare.quantised_cache import Arena, approximation, make_finite

_WARPS = 4
_ENTRIES = 2048
"""Of a program at once, sixteen of each thread."""


def append_and_gather(
    q: Float[Array, "R T H D"],
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K _"],
    keys: Arena,
    values: Arena,
    plan: Plan,
    work: Work,
    scale: float,
    device: Device,
) -> tuple[Float[Array, "K queries D"], Arena, Arena]:
    """Appends to one layer's arenas, in place where they are donated, and gathers queries.

    Args:
      q, k, v: of one dtype, not rotated.
      keys, values: the arenas [K, tokens, D] and [K, tokens, _].
      plan, work: of the pass.
      scale: of the queries.
      device: the GPU, for which `lowers_triton` is true.

    Returns:
      The Q + span queries in the order of the segments, rotated, scaled and in the arenas' dtype;
      those that no segment reads are undefined. Then the arenas as `jaxshare.arena.append_tokens`
      returns them.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    (rows, width, heads, dim), kv_heads = q.shape, k.shape[2]
    tokens = rows * width
    # Where one product has made all three XLA finds that this is its result.
    x = jnp.concatenate([each.reshape(rows, width, -1) for each in (q, k, v)], axis=2)
    x = x.reshape(tokens, -1)
    pairs = plan.query_cos.shape[-1]
    # A kernel takes no empty arrays.
    tables = [
        each.reshape(-1, pairs) if pairs else jnp.zeros((1, 1))
        for each in (plan.key_cos, plan.key_sin, plan.query_cos, plan.query_sin)
    ]
    arenas, layout = jax.tree.flatten([each for each in (keys, values) if each.shape[2]])
    runs = _Runs.of(dim, pairs)
    entries = sum(pl.next_power_of_2(end - start) for start, end in runs.all)
    lines = max(1, _ENTRIES // pl.next_power_of_2(entries))
    queries = work.taken.shape[0]
    appending = pl.cdiv(tokens * kv_heads, lines)
    inputs = (
        x,
        *tables,
        plan.write_to.reshape(-1),
        work.taken,
        work.turned,
        work.segments.table,
        work.totals,
    )
    gathered, *written = pl.pallas_call(
        functools.partial(
            _kernel,
            runs=runs,
            group=heads // kv_heads,
            span=work.span,
            scale=scale,
            forms=tuple(_ArenaForm.of(each) for each in (keys, values) if each.shape[2]),
            lines=lines,
            appending=appending,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((kv_heads, queries, dim), keys.dtype),
            *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arenas),
        ],
        grid=(appending + kv_heads * pl.cdiv(queries, lines),),
        input_output_aliases={len(inputs) + i: 1 + i for i in range(len(arenas))},
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=device.interpret,
        name="append_and_gather",
    )(*inputs, *arenas)
    keys, *rest = jax.tree.unflatten(layout, written)
    return gathered, keys, (rest[0] if rest else values)


class _ArenaForm(NamedTuple):
    """The form in which an arena keeps numbers: their dtype, and the format of codes, if any."""

    dtype: np.dtype
    codes: str | None

    @classmethod
    def of(cls, arena: Arena) -> "_ArenaForm":
        return cls(np.dtype(arena.dtype), approximation(arena))

    def stored(self, parts: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """The numbers of lines, in parts [lines, _] of their columns, as an arena keeps them, and the
        scales [lines, 1] of codes, if any; see `jaxshare.quantised_cache`."""
        parts = [make_finite(part.astype(self.dtype)) for part in parts]
        if self.codes is None:
            return parts, []
        parts, largest = [part.astype(jnp.float32) for part in parts], FORMATS[self.codes].largest
        most = [jnp.max(jnp.abs(part), axis=1, keepdims=True) for part in parts]
        scales = functools.reduce(jnp.maximum, most) / largest
        scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, scales)
        scaled = [jnp.clip(part / scales, -largest, largest) for part in parts]
        return [_rounded(x) for x in scaled] if self.codes == "int8" else scaled, [scales]


class _Runs(NamedTuple):
    """Runs of a head's columns: the first and the second entries of rotated pairs, and what is not
    rotated. The start and the end of each."""

    of_pairs: tuple[tuple[int, int], ...]
    rest: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, dim: int, pairs: int) -> "_Runs":
        of_pairs = ((0, pairs), (pairs, 2 * pairs)) if pairs else ()
        return cls(of_pairs, ((2 * pairs, dim),) if dim > 2 * pairs else ())

    @property
    def all(self) -> tuple[tuple[int, int], ...]:
        return (*self.of_pairs, *self.rest)

    @property
    def dim(self) -> int:
        return self.all[-1][1]


def _columns(run: tuple[int, int]) -> tuple[Array, Array]:
    """The columns of a run, and which of them are its own: there are a power of two."""
    from jax.experimental import pallas as pl

    start, end = run
    columns = start + jnp.arange(pl.next_power_of_2(end - start))
    return columns, columns < end


def _kernel(
    x_ref: Any,
    key_cos_ref: Any,
    key_sin_ref: Any,
    query_cos_ref: Any,
    query_sin_ref: Any,
    write_to_ref: Any,
    taken_ref: Any,
    turned_ref: Any,
    segments_ref: Any,
    totals_ref: Any,
    *refs: Any,
    runs: _Runs,
    group: int,
    span: int,
    scale: float,
    forms: tuple[_ArenaForm, ...],
    lines: int,
    appending: int,
) -> None:
    """Appends or gathers `lines` lines.

    Refs: x [R * T, (H + 2 K) * D]; cos, sin float32[_, P], of keys by token and of queries by pair
    and token; write_to int32[R * T]; taken, turned int32[Q + span]; segments int32[S, 8]; totals
    int32[2]; the arrays of the arenas [K, tokens, _], which are the last results too, those of codes
    before their scales; queries [K, Q + span, D].
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    queries_ref, *arena_refs = refs[len(refs) // 2 :]
    kv_heads, arena_tokens, _ = arena_refs[0].shape
    program, dim = pl.program_id(0), runs.dim

    def entries(
        token: Array, head: Array, real: Array, columns: Sequence[tuple[int, int]]
    ) -> list[Array]:
        """The entries [lines, _] of each token's head in some runs, as they are."""
        found = []
        for column, inside in map(_columns, columns):
            at = token[:, None], head[:, None] * dim + column[None]
            mask = real[:, None] & inside[None]
            found.append(plt.load(x_ref.at[at], mask=mask, other=0.0))
        return found

    def rotated(
        token: Array, head: Array, real: Array, cos_ref: Any, sin_ref: Any, angle: Array
    ) -> list[Array]:
        """The entries of all runs in float32, rotated by the angles that each line has."""
        found = [x.astype(jnp.float32) for x in entries(token, head, real, runs.all)]
        if not runs.of_pairs:
            return found
        first, second, *rest = found
        pair, inside = _columns(runs.of_pairs[0])
        at, mask = (angle[:, None], pair[None]), real[:, None] & inside[None]
        cos, sin = (plt.load(ref.at[at], mask=mask, other=0.0) for ref in (cos_ref, sin_ref))
        return [first * cos - second * sin, second * cos + first * sin, *rest]

    def store(ref: Any, at: tuple[Array, ...], real: Array, parts: Sequence[Array]) -> None:
        """Stores the entries of all runs, or of a single one, in the lines `at`."""
        for run, part in zip(
            runs.all if len(parts) > 1 else [(0, ref.shape[2])], parts, strict=True
        ):
            column, inside = _columns(run)
            mask = real[:, None] & inside[None]
            plt.store(ref.at[(*at, column[None])], part.astype(ref.dtype), mask=mask)

    @pl.when(program < appending)
    def append() -> None:
        line = program * lines + jnp.arange(lines)
        token, head = line // kv_heads, line % kv_heads
        real = line < write_to_ref.shape[0] * kv_heads
        to = plt.load(write_to_ref.at[token], mask=real, other=arena_tokens)
        real = real & (to < arena_tokens)
        first = x_ref.shape[1] // dim - len(forms) * kv_heads + head
        keys = rotated(token, first, real, key_cos_ref, key_sin_ref, token)
        new = [
            [part.astype(x_ref.dtype) for part in keys],
            *(entries(token, first + kv_heads, real, [(0, dim)]) for _ in forms[1:]),
        ]
        refs = iter(arena_refs)
        for form, parts in zip(forms, new, strict=True):
            numbers, scales = form.stored(parts)
            for each in (numbers, scales) if scales else (numbers,):
                store(next(refs), (head[:, None], to[:, None]), real, each)

    @pl.when(program >= appending)
    def gather() -> None:
        tiles = pl.cdiv(queries_ref.shape[1], lines)
        head, tile = (program - appending) // tiles, (program - appending) % tiles
        index = tile * lines + jnp.arange(lines)
        # Whole segments are read, and none after the last one.
        end = segments_ref[jnp.maximum(totals_ref[0] - 1, 0), 0] + span
        real = index < jnp.minimum(end, queries_ref.shape[1])

        @pl.when(tile * lines < end)
        def _() -> None:
            taken = plt.load(taken_ref.at[index], mask=real, other=0)
            angle = plt.load(turned_ref.at[index], mask=real, other=0)
            of_head = head * group + taken % group
            turned = rotated(taken // group, of_head, real, query_cos_ref, query_sin_ref, angle)
            store(queries_ref, (head, index[:, None]), real, [part * scale for part in turned])


def _rounded(x: Array) -> Array:
    """Numbers rounded to whole ones, halves to even ones: JAX lowers no such operation to Triton."""
    below = jnp.floor(x)
    rest, is_odd = x - below, below - 2 * jnp.floor(below / 2) == 1
    return below + ((rest > 0.5) | ((rest == 0.5) & is_odd)).astype(x.dtype)
