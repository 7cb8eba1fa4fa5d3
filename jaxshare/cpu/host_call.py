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

# The words of 8 bytes of a call and of a buffer, as in jaxshare.cpu.runtime: the numbers of arguments
# and results, and where they are; a buffer's dtype, data, rank and dimensions.
_Call, _Buffer = ctypes.c_int64 * 15, ctypes.c_int64 * 6
_ARGUMENTS, _RESULTS = (7, 9), (12, 14)
_DTYPE, _DATA, _RANK, _DIMS = 2, 3, 4, 5
_DTYPES = {n: np.dtype(name) for n, name in {1: "bool", 4: "i4", 8: "u4", 11: "f4"}.items()}
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
        call = _Call.from_address(frame)
        function(*_arrays(call, *_ARGUMENTS), *_arrays(call, *_RESULTS))
    except Exception:
        _log.exception("a call from a program has failed")


def _arrays(call: Any, count: int, first: int) -> list[np.ndarray]:
    return [*map(_array, (ctypes.c_int64 * call[count]).from_address(call[first]))]


def _array(buffer: int) -> np.ndarray:
    fields = _Buffer.from_address(buffer)
    dtype = _DTYPES[fields[_DTYPE] & 0xFFFFFFFF]
    shape = [*(ctypes.c_int64 * fields[_RANK]).from_address(fields[_DIMS])] if fields[_RANK] else []
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.zeros(shape, dtype)
    return np.ndarray(shape, dtype, (ctypes.c_char * size).from_address(fields[_DATA]))
