"""New keys and values on a CPU, in one call: keys are rotated, and both are written in their place."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxshare.cpu.ir import BYTES, F32, FORMATS, I64, NAMES, Code, Record, Val, ir
from jaxshare.cpu.runtime import Call, begin_task, register, served_dtypes

_KEYS, _VALUES, _K, _V, _COS, _SIN, _WRITE_AT, _COUNT = range(8)
"""The arguments of a call."""
_WORK = Record(
    ("rows", "width", "kv_heads", "tokens"),
    ("keys", "values", "k", "v", "cos", "sin", "write_at", "count"),
)
_PIECE = 64
"""Tokens of a piece of work."""


def cpu_append(
    keys: Float[Array, "K tokens D"],
    values: Float[Array, "K tokens _"],
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K _"],
    plan: Any,
) -> tuple[Array, Array]:
    """The arenas with new keys and values, as `jaxshare.arena.append_tokens`; they are donated.

    Raises:
      NotImplementedError: a dtype that there is no kernel for, or tokens that are spread over
        devices.
    """
    if plan.token_sharding.axis is not None:
        raise NotImplementedError("tokens are spread over devices")
    dtypes = served_dtypes(k.dtype, keys.dtype)
    has_values = values.shape[2] > 0  # else they are a part of keys
    dim, pairs = keys.shape[2], plan.key_cos.shape[-1]
    write = functools.partial(_write, dim, pairs, has_values, *dtypes)
    target = register(f"append.{dim}.{pairs}.{has_values}.{'.'.join(dtypes)}", write)
    shapes = [jax.ShapeDtypeStruct(arena.shape, arena.dtype) for arena in (keys, values)]
    call = jax.ffi.ffi_call(target, shapes, input_output_aliases={_KEYS: 0, _VALUES: 1})
    new = keys, values
    written = call(*new, k, v, plan.key_cos, plan.key_sin, plan.write_at, plan.count)
    return written[0], written[1]


def _write(dim: int, pairs: int, has_values: bool, new: str, arena: str, call: Call) -> None:
    code = call.code
    work = code.array(I64, _WORK.bytes // 8)
    rows, width, kv_heads = (call.size(_K, axis) for axis in range(3))
    tokens = call.size(_KEYS, 1)
    _WORK.write(code, work, rows=rows, width=width, kv_heads=kv_heads, tokens=tokens)
    _WORK.write(code, work, keys=call.result(0), values=call.result(1))
    arguments = {"k": _K, "v": _V, "cos": _COS, "sin": _SIN, "write_at": _WRITE_AT, "count": _COUNT}
    for name, index in arguments.items():
        _WORK.write(code, work, **{name: call.argument(index)})
    piece = _write_piece(call, dim, pairs, has_values, FORMATS[new], FORMATS[arena])
    run_pieces(call, piece, work, rows, width)


def _write_piece(
    call: Call, dim: int, pairs: int, has_values: bool, new: ir.Type, arena: ir.Type
) -> Code:
    """piece(work, i): some tokens of the rows."""

    def copied(code: Code, w: Any, token: Val, source: Val, target: Val) -> None:
        angles = [each + token * (pairs * 4) for each in (w.cos, w.sin)]
        source, target = source * (dim * BYTES[new]), target * (dim * BYTES[arena])
        copy = _Copy(code, dim, new, arena)
        copy.rotated(w.k + source, w.keys + target, pairs, *angles)
        if has_values:
            copy.plain(w.v + source, w.values + target, 0)

    return write_heads(call, _WORK, copied)


def run_pieces(call: Call, piece: Code, work: Val, rows: Val, width: Val) -> None:
    """Runs a piece that `write_heads` has written until all tokens of the rows are done."""
    call.parallel(piece, work, (rows * width + (_PIECE - 1)) // _PIECE)


def write_heads(
    call: Call, fields: Record, copied: Callable[[Code, Any, Val, Val, Val], None]
) -> Code:
    """Writes piece(work, i), which goes over some tokens of the rows.

    Args:
      call: whose kernel it is of.
      fields: of the work, with rows, width, kv_heads, tokens, write_at and count.
      copied: writes the code for one kv head of a real token, of (code, the fields, the token's
        number, that of the head in [R, T, K], that of its place in [K, tokens]).
    """
    code = begin_task(call, "piece")
    work, index = code.args
    w = fields.read_all(code, work)
    stop = code.min((index + 1) * _PIECE, w.rows * w.width)
    with code.loop(index * _PIECE, stop) as token:
        row, t = token // w.width, token % w.width
        with code.where(t < code.load_int(w.count + row * 4)):
            at = code.load_int(w.write_at + row * 4) + t
            with code.loop(0, w.kv_heads) as head:
                copied(code, w, token, token * w.kv_heads + head, head * w.tokens + at)
    code.give()
    return code


class _Copy:
    """The code that copies the numbers of one head of a token."""

    def __init__(self, code: Code, dim: int, new: ir.Type, arena: ir.Type):
        self._code, self._dim, self._new, self._arena = code, dim, new, arena

    def rotated(self, source: Val, target: Val, pairs: int, cos: Val, sin: Val) -> None:
        """Rotates the first numbers, and copies the others."""
        lanes = self._code.machine.lanes
        for p in range(0, pairs, lanes):
            count = self._count(pairs - p)
            c, s = (self._code.load(each + p * 4, F32, lanes, count) for each in (cos, sin))
            a, b = self._load(source, p, count), self._load(source, pairs + p, count)
            for at, value in ((p, a * c - b * s), (pairs + p, b * c + a * s)):
                # Rounded as the numbers that were not rotated are.
                rounded = self._code.narrowed(value, self._new)
                self._store(self._code.widened(rounded, self._new), target, at, count)
        self.plain(source, target, 2 * pairs)

    def plain(self, source: Val, target: Val, start: int) -> None:
        """Copies the numbers from `start` on."""
        for d in range(start, self._dim, self._code.machine.lanes):
            count = self._count(self._dim - d)
            self._store(self._load(source, d, count), target, d, count)

    def _count(self, left: int) -> Val | None:
        return None if left >= self._code.machine.lanes else self._code.constant(left)

    def _load(self, source: Val, at: int, count: Val | None) -> Val:
        code = self._code
        place = source + at * BYTES[self._new]
        return code.widened(code.load(place, self._new, code.machine.lanes, count), self._new)

    def _store(self, value: Val, target: Val, at: int, count: Val | None) -> None:
        code = self._code
        largest = float(jnp.finfo(NAMES[self._arena]).max)
        value = code.select(value.equals(value), value, 0.0)  # not a number
        value = code.min(code.max(value, -largest), largest)
        code.store(code.narrowed(value, self._arena), target + at * BYTES[self._arena], count)
