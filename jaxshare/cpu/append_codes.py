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

from jaxshare.cpu.append import run_pieces, write_heads
from jaxshare.cpu.ir import I64, PTR, Code, Record, Val
from jaxshare.cpu.runtime import Call, register
from jaxshare.quantised import QuantisedTensor
from jaxshare.quantised_cache import Arena, as_stored
from jaxshare.rope import rotate


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

    def copied(code: Code, w: Any, _: Val, source: Val, target: Val) -> None:
        for index, size in enumerate(sizes):
            place, given = (getattr(w, f"{kind}{index}") for kind in ("arena", "new"))
            code.external("memcpy", PTR, place + target * size, given + source * size, size)

    run_pieces(call, write_heads(call, fields, copied), work, rows, width)
