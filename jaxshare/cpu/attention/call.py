"""Block attention on a CPU, in one call: every block is read once for all rows that see it.

Blocks are cut into segments. A piece of work is one kv head, one segment and some of the rows that
read it: their queries are rotated towards the block, and scores, softmax and mixing go over it a
tile at a time (Hydragen section 3.2, Hogwild! section 3.4). What the pieces leave of a row is merged
by log-sum-exp. A row's result does not depend on the number of threads; on the rows beside it only
in its rounding, since few queries are summed in another order than many.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxshare.attention.merge import merge_over
from jaxshare.attention.plan import Plan
from jaxshare.cpu.attention.merging import PER_PIECE, write_merge
from jaxshare.cpu.attention.piece import write_piece
from jaxshare.cpu.attention.unit import write_unit
from jaxshare.cpu.attention.work import WORK, Shape, write_lists
from jaxshare.cpu.ir import I64, PTR, VOID, Code, Val
from jaxshare.cpu.runtime import Call, register, served_dtypes
from jaxshare.quantised import QuantisedTensor
from jaxshare.quantised_cache import Arena

_Q, _KEYS, _VALUES, _BLOCKS, _SEEN, _OFFSETS, _COS, _SIN, _KEY_SCALES, _VALUE_SCALES = range(10)
"""The arguments of a call; the last two where keys and values are quantised."""
_LINE = 64
"""Bytes of a line of the cache."""


def cpu_attention(
    q: Float[Array, "R T H D"],
    keys: Arena,
    values: Arena,
    plan: Plan,
    scale: float,
    softcap: float = 0.0,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "R T H _"]:
    """Attention of queries that are not rotated; see `jaxshare.attention.block_attention`.

    Raises:
      NotImplementedError: a dtype that there is no kernel for, windows, softcaps and sinks.
    """
    for given, what in (
        (plan.window, "window"),
        (softcap, "softcap"),
        (sinks is not None, "sink"),
    ):
        if given:
            raise NotImplementedError(f"it has no {what}s")
    # Where values are a part of keys, whole keys are mixed, and what is rotated is left out of the
    # sums.
    first = 0 if values.shape[2] else 2 * plan.query_cos.shape[-1]
    values = values if values.shape[2] else keys
    query, cache = served_dtypes(q.dtype, keys.dtype)
    codes, arenas, scales = "", [keys, values], []
    if isinstance(keys, QuantisedTensor) and isinstance(values, QuantisedTensor):
        codes, arenas = keys.format, [keys.codes, values.codes]
        scales = [keys.scales, values.scales]
    shape = Shape(q.shape[3], plan.query_cos.shape[-1], query, cache, scale, codes)
    axis = plan.token_sharding.axis
    has_lse = axis is not None
    name = f"attention.{shape.name}{'.lse' * has_lse}"
    target = register(name, functools.partial(_write, shape, has_lse))
    results = [jax.ShapeDtypeStruct(q.shape, jnp.float32 if has_lse else q.dtype)]
    if has_lse:
        results.append(jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))
    out, *lse = jax.ffi.ffi_call(target, results)(
        *(q, *arenas, plan.blocks, plan.seen, plan.offsets, plan.query_cos, plan.query_sin),
        *scales,
    )
    out = merge_over(axis, out, lse[0]).astype(q.dtype) if has_lse else out
    return out[..., first:]


def _line_after(code: Code, place: Val) -> Val:
    """Where the next line of the cache begins: vectors that cross lines are read in twice the time."""
    address = Val(code, code.b.ptrtoint(place.value, I64))
    return place + ((0 - address) & (_LINE - 1))


def _write(shape: Shape, has_lse: bool, call: Call) -> None:
    """Lists the pieces of work, runs them, and merges what they leave."""
    code = call.code
    rows, width, heads = (call.size(_Q, axis) for axis in range(3))
    kv_heads = call.size(_KEYS, 0)
    work = code.array(I64, WORK.bytes // 8)
    WORK.write(code, work, rows=rows, width=width, heads=heads, kv_heads=kv_heads)
    WORK.write(code, work, group=heads // kv_heads, tokens=call.size(_KEYS, 1))
    WORK.write(code, work, slots=call.size(_BLOCKS, 1), out=call.result(0))
    arguments = {"q": _Q, "keys": _KEYS, "values": _VALUES, "seen": _SEEN, "offsets": _OFFSETS}
    if shape.codes:
        arguments |= {"key_scales": _KEY_SCALES, "value_scales": _VALUE_SCALES}
    for name, index in {**arguments, "cos": _COS, "sin": _SIN}.items():
        WORK.write(code, work, **{name: call.argument(index)})
    if has_lse:
        WORK.write(code, work, lse=call.result(1))
    lists = write_lists(shape, call, work, call.argument(_BLOCKS), call.size(_OFFSETS, 0))
    w = WORK.read_all(code, work)
    padded = shape.padded(code.machine.lanes)
    numbers = {"queries": padded, "mixed": padded, "tops": 1, "totals": 1, "ends": 1}
    count = w.num_queries * kv_heads
    scratch = code.external("malloc", PTR, count * (4 * sum(numbers.values())) + _LINE)
    place = _line_after(code, scratch)
    for name, size in numbers.items():
        WORK.write(code, work, **{name: place})
        place = place + count * (4 * size)
    around = write_unit(call) if shape.uses_tiles(call.machine) else None
    call.parallel(write_piece(shape, call), work, w.num_items * kv_heads, around)
    per_piece = code.max(code.constant(PER_PIECE) // heads, 1)
    merged = (rows * width + per_piece - 1) // per_piece
    call.parallel(write_merge(shape, has_lse, call), work, merged)
    for each in (*lists, scratch):
        code.external("free", VOID, each)
