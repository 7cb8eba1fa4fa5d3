"""RMS normalisation on a CPU, in one call; XLA makes four or more kernels of it."""

import functools
import itertools
import operator
from collections.abc import Callable

import jax
from jax import Array
from jaxtyping import Float

from jaxshare.cpu.ir import BYTES, F32, FORMATS, I64, Code, Record, Val, ir
from jaxshare.cpu.mathematics import folded, reduced
from jaxshare.cpu.runtime import Call, begin_task, register, served_dtypes

_WORK = Record(("rows",), ("x", "scale", "out"))
_PIECE = 16_384
"""Numbers of a piece of work."""
_SUMS = 4
"""Vectors in which squares are added up, so that no sum waits for the one before."""


def cpu_rms_norm(x: Float[Array, "R M"], scale: Float[Array, " M"], eps: float) -> Array:
    """x / rms(x) * scale over the last axis: in float32, and rounded to x's dtype before the scale.

    Raises:
      NotImplementedError: a dtype that there is no kernel for.
    """
    dtypes = served_dtypes(x.dtype, scale.dtype)
    width = x.shape[1]
    write = functools.partial(_write, width, eps, *dtypes)
    target = register(f"norm.{width}.{eps!r}.{'.'.join(dtypes)}", write)
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, scale)


def _write(width: int, eps: float, given: str, scale: str, call: Call) -> None:
    code, rows = call.code, call.size(0, 0)
    work = code.array(I64, _WORK.bytes // 8)
    _WORK.write(code, work, rows=rows, x=call.argument(0), scale=call.argument(1))
    _WORK.write(code, work, out=call.result(0))
    per_piece = max(_PIECE // width, 1)
    piece = _write_piece(call, width, per_piece, eps, FORMATS[given], FORMATS[scale])
    call.parallel(piece, work, (rows + (per_piece - 1)) // per_piece)


def _write_piece(
    call: Call, width: int, per_piece: int, eps: float, given: ir.Type, kind: ir.Type
) -> Code:
    """piece(work, i): some of the rows."""
    code = begin_task(call, "piece")
    work, index = code.args
    w = _WORK.read_all(code, work)
    with code.loop(index * per_piece, code.min((index + 1) * per_piece, w.rows)) as row:
        start = row * (width * BYTES[given])
        x, out = w.x + start, w.out + start
        mean = _sum_of_squares(code, x, given, width) * (1 / width)
        inverse = code.constant(1.0, F32) / code.intrinsic("sqrt", mean + eps)
        factor = code.splat(inverse, code.machine.lanes)

        def scaled(at: Val, count: Val | None, x=x, out=out, factor=factor) -> None:
            lanes = code.machine.lanes
            number = code.widened(code.load(x + at * BYTES[given], given, lanes, count), given)
            weight = code.load(w.scale + at * BYTES[kind], kind, lanes, count)
            a, b = (
                code.widened(code.narrowed(each, given), given)
                for each in (number * factor, code.widened(weight, kind))
            )
            code.store(code.narrowed(a * b, given), out + at * BYTES[given], count)

        _for_vectors(code, width, scaled)
    code.give()
    return code


def _sum_of_squares(code: Code, x: Val, given: ir.Type, width: int) -> Val:
    lanes = code.machine.lanes
    sums = [code.var(code.zeros(lanes)) for _ in range(_SUMS)]
    turns = itertools.cycle(sums)

    def add(at: Val, count: Val | None) -> None:
        number = code.widened(code.load(x + at * BYTES[given], given, lanes, count), given)
        total = next(turns)
        total.set(code.fma(number, number, total.get()))

    _for_vectors(code, width, add, _SUMS)
    return reduced(folded([total.get() for total in sums], operator.add), operator.add)


def _for_vectors(
    code: Code, width: int, body: Callable[[Val, Val | None], None], at_once: int = 1
) -> None:
    """Writes body(place, count) for all vectors of a row; `count` is of the last one, if it is not
    a whole one."""
    lanes = code.machine.lanes
    whole = width // (lanes * at_once) * (lanes * at_once)
    with code.loop(0, whole, lanes * at_once) as at:
        for i in range(at_once):
            body(at + i * lanes, None)
    for at in range(whole, width, lanes):
        count = None if at + lanes <= width else code.constant(width - at)
        body(code.constant(at), count)
