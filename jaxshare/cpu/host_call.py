"""Calls of Python functions from compiled programs on a CPU.

Unlike JAX's callbacks they take a few microseconds, and the programs that make them can be kept on
disk.
"""

import ctypes
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import llvmlite.binding as llvm
import numpy as np
from jax import Array

from jaxshare.cpu.ir import VOID
from jaxshare.cpu.runtime import Call, register

# Offsets in bytes, as in jaxshare.cpu.runtime: of the number of arrays, and the arrays, of a call; and
# of what describes an array.
_ARGUMENTS, _RESULTS = (56, 72), (96, 112)
_DTYPE, _DATA, _RANK, _DIMS = 16, 24, 32, 40
_DTYPES = {1: np.bool_, 4: np.int32, 8: np.uint32, 11: np.float32}
"""By their numbers in XLA, those that are served."""
_log = logging.getLogger("jaxshare.cpu")

HostFunction = Callable[..., None]
"""Takes arrays of NumPy: the arguments, and then the results, which it fills in. An exception leaves
those as they are."""


def cpu_host_call(
    function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], *arguments: Array
) -> Sequence[Array]:
    """Calls a function of a module, which is known by its name.

    It has side effects: it is called whether its results are used or not, once where the program is
    one of a single device.

    Args:
      function: see `HostFunction`.
      results, arguments: bool, int32, uint32 or float32.
    """
    return jax.ffi.ffi_call(_target(function), list(results), has_side_effect=True)(*arguments)


@functools.cache
def _target(function: HostFunction) -> str:
    name = f"host.{function.__module__}.{function.__qualname__}"
    handler = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(functools.partial(_handle, function))
    _handlers.append(handler)
    address = ctypes.cast(handler, ctypes.c_void_p).value
    assert address is not None
    llvm.add_symbol(name, address)
    return register(name, lambda call: _write_call(call, name))


_handlers: list[Any] = []  # which live as long as the process


def _write_call(call: Call, name: str) -> None:
    call.code.external(name, VOID, call.frame)


def _handle(function: HostFunction, frame: int) -> None:
    try:
        arrays = [*_arrays(frame, *_ARGUMENTS), *_arrays(frame, *_RESULTS)]
        function(*arrays)
    except Exception:
        _log.exception("a call from a program has failed")


def _arrays(frame: int, count: int, first: int) -> list[np.ndarray]:
    buffers = _word(frame + first)
    return [_array(_word(buffers + 8 * i)) for i in range(_word(frame + count))]


def _array(buffer: int) -> np.ndarray:
    dtype = np.dtype(_DTYPES[ctypes.c_int32.from_address(buffer + _DTYPE).value])
    dims = _word(buffer + _DIMS)
    shape = [_word(dims + 8 * axis) for axis in range(_word(buffer + _RANK))]
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.zeros(shape, dtype)
    data = (ctypes.c_char * size).from_address(_word(buffer + _DATA))
    return np.frombuffer(data, dtype).reshape(shape)


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value
