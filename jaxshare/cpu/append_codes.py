"""New keys and values of approximate caches on a CPU: XLA quantises them, and one call writes codes
and scales in their place.

Written by XLA, codes of floats of eight bits would have it widen whole arenas, in every pass.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jaxtyping import Float

from jaxshare.cpu.ir import I64, PTR, Code, Record
from jaxshare.cpu.runtime import Call, begin_task, register
from jaxshare.quantised import QuantisedTensor
from jaxshare.quantised_cache import Arena, as_stored
from jaxshare.rope import rotate

_PIECE = 64
"""Tokens of a piece of work."""


def cpu_append_codes(
    keys: QuantisedTensor,
    values: Arena,
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K _"],
    plan: Any,
) -> tuple[Arena, Arena]:
    """The arenas with new keys and values, as `jaxshare.arena.append_tokens`; they are donated.

    Raises:
      NotImplementedError: tokens that are spread over devices.
    """
    if plan.token_sharding.axis is not None:
        raise NotImplementedError("tokens are spread over devices")
    new_keys = as_stored(rotate(k, plan.key_cos[:, :, None], plan.key_sin[:, :, None]), keys)
    arenas, news = keys, new_keys
    if values.shape[2]:  # else they are a part of keys
        arenas, news = (keys, values), (new_keys, as_stored(v, values))
    leaves, tree = jax.tree.flatten(arenas)
    written = jax.tree.unflatten(tree, _placed(leaves, jax.tree.leaves(news), plan))
    return written if values.shape[2] else (written, values)


def _placed(arenas: Sequence[Array], news: Sequence[Array], plan: Any) -> Sequence[Array]:
    """Arrays [K, tokens, X] with those of new tokens [R, T, K, X] in their place."""
    sizes = tuple(arena.shape[2] * arena.dtype.itemsize for arena in arenas)
    target = register(f"append_codes.{'.'.join(map(str, sizes))}", functools.partial(_write, sizes))
    shapes = [jax.ShapeDtypeStruct(arena.shape, arena.dtype) for arena in arenas]
    aliases = {index: index for index in range(len(arenas))}
    call = jax.ffi.ffi_call(target, shapes, input_output_aliases=aliases)
    return call(*arenas, *news, plan.write_at, plan.count)


def _write(sizes: Sequence[int], call: Call) -> None:
    code, new = call.code, len(sizes)
    names = [f"{kind}{index}" for index in range(new) for kind in ("arena", "new")]
    fields = Record(("rows", "width", "kv_heads", "tokens"), ("write_at", "count", *names))
    work = code.array(I64, fields.bytes // 8)
    rows, width, kv_heads = (call.size(new, axis) for axis in range(3))
    fields.write(code, work, rows=rows, width=width, kv_heads=kv_heads, tokens=call.size(0, 1))
    for index, name in enumerate(("write_at", "count")):
        fields.write(code, work, **{name: call.argument(2 * new + index)})
    for index in range(new):
        fields.write(code, work, **{f"arena{index}": call.result(index)})
        fields.write(code, work, **{f"new{index}": call.argument(new + index)})
    piece = _write_piece(call, fields, sizes)
    call.parallel(piece, work, (rows * width + (_PIECE - 1)) // _PIECE)


def _write_piece(call: Call, fields: Record, sizes: Sequence[int]) -> Code:
    """piece(work, i): some tokens of the rows."""
    code = begin_task(call, "piece")
    work, index = code.args
    w = fields.read_all(code, work)
    stop = code.min((index + 1) * _PIECE, w.rows * w.width)
    with code.loop(index * _PIECE, stop) as token:
        row, t = token // w.width, token % w.width
        with code.where(t < code.load_int(w.count + row * 4)):
            at = code.load_int(w.write_at + row * 4) + t
            with code.loop(0, w.kv_heads) as head:
                for each, size in enumerate(sizes):
                    source = getattr(w, f"new{each}") + (token * w.kv_heads + head) * size
                    target = getattr(w, f"arena{each}") + (head * w.tokens + at) * size
                    code.external("memcpy", PTR, target, source, size)
    code.give()
    return code
