"""Kernels of the CPU as custom calls of XLA: compiled by LLVM, run on XLA's own threads.

The handlers speak XLA's foreign function interface (xla/ffi/api/c_api.h in jaxlib), version 0.4, of
which XLA keeps every version for a year. What they read of its structures is listed here.
"""

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.typing import DTypeLike
from llvmlite import ir

from jaxshare.cpu.compiled import kept, load, made, this_machine
from jaxshare.cpu.ir import FORMATS, I32, I64, PTR, VOID, Code, Machine, Record, Val

_VERSION = 0, 4
# Offsets in bytes: of fields of a call and of its buffers, and of XLA's functions.
_EXTENSION, _API, _CONTEXT, _STAGE, _ARGUMENTS, _RESULTS = 8, 16, 24, 32, 72, 112
_DATA, _DIMS, _SCHEDULE, _NUM_THREADS = 24, 40, 136, 144
# Of the metadata in an extension, and of the version in the metadata.
_METADATA, _MAJOR, _MINOR = 24, 24, 28
_EXECUTE = 3
_HANDLER = "handler"
"""The name of a kernel's function in its module."""


_log = logging.getLogger("jaxshare.cpu")
_lock = threading.Lock()
_targets: set[str] = set()


class Call:
    """A call of a kernel, as its code sees it.

    Attributes:
      code: of the handler.
      module, machine: what other functions of the kernel are written in and for.
      frame: the call, as XLA describes it.
    """

    def __init__(self, code: Code, frame: Val, parallel: Code):
        self.code, self.module, self.machine = code, code.module, code.machine
        self.frame, self._parallel = frame, parallel

    def argument(self, index: int) -> Val:
        """The data of an argument."""
        return self._data(_ARGUMENTS, index)

    def result(self, index: int) -> Val:
        """The data of a result."""
        return self._data(_RESULTS, index)

    def size(self, index: int, axis: int) -> Val:
        """The size of an argument's axis."""
        dims = self.code.load(self._buffer(_ARGUMENTS, index) + _DIMS, PTR)
        return self.code.load_int(dims + 8 * axis, I64)

    def _data(self, array: int, index: int) -> Val:
        return self.code.load(self._buffer(array, index) + _DATA, PTR)

    def _buffer(self, array: int, index: int) -> Val:
        return self.code.load(self.code.load(self.frame + array, PTR) + 8 * index, PTR)

    def parallel(
        self, task: Code, work: Val, count: Any, around: tuple[Code, Code] | None = None
    ) -> None:
        """Runs task(work, i) for all i below `count` on XLA's threads; returns when all are done.

        Args:
          task: of two arguments; see `begin_task`.
          work: the first one.
          count: how many pieces of work there are.
          around: two functions, of which a thread calls one before its first piece and one after its
            last. They have no arguments: for a thread that comes late there is no `work` any more.
        """
        code = self.code
        begin, end = map(code.address, around) if around else [code.constant(None, PTR)] * 2
        code.call(self._parallel, self.frame, code.address(task), work, count, begin, end)


def begin_task(call: Call, name: str) -> Code:
    """Begins a function for `Call.parallel`, whose arguments are (work, i)."""
    return Code(call.module, call.machine, name, [PTR, I64])


def served_dtypes(*dtypes: DTypeLike) -> list[str]:
    """Returns the names of dtypes.

    Raises:
      NotImplementedError: no kernel is written for one of them.
    """
    names = [str(jax.numpy.dtype(dtype)) for dtype in dtypes]
    if unknown := [name for name in names if name not in FORMATS]:
        raise NotImplementedError(f"it has no kernel for {unknown[0]}")
    return names


Kernel = Callable[[Call], None]
"""Writes the code of a kernel."""


def register(name: str, kernel: Kernel) -> str:
    """Registers a kernel with XLA, once a process; returns the name of its target.

    It is loaded if an earlier process has left it, and else compiled in a thread, while the program
    that calls it is traced and compiled; its first call waits for that. The first one of a process is
    compiled here, so that what LLVM cannot do on this machine is an error here.

    Args:
      name: of the kernel; kernels of one name are the same.
      kernel: writes it, and raises nothing.
    """
    target = f"jaxshare.{name}"
    with _lock:
        if target not in _targets:
            make, code = (
                functools.partial(made, name, functools.partial(_module, name, kernel)),
                kept(name),
            )
            if code is None and not _targets:
                code = make()
            address = _compiled_later(make) if code is None else _loaded(code)
            jax.ffi.register_ffi_target(target, _capsule(address), platform="cpu")
            _targets.add(target)
    return target


def _module(name: str, kernel: Kernel) -> str:
    module, machine = ir.Module(name), this_machine()
    parallel = _write_parallel(module, machine)
    _write_handler(module, machine, _HANDLER, lambda c, frame: kernel(Call(c, frame, parallel)))
    return str(module)


def _loaded(code: bytes) -> int:
    ((address,), _) = load(code, [_HANDLER])
    return address


def _capsule(address: int) -> Any:
    return jax.ffi.pycapsule(ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address))


# Handlers of kernels that are being compiled.

_STUBS = 32
"""Stubs that are made at a time: in the midst of compiling LLVM would have to be waited for."""
_compiler = ThreadPoolExecutor(1, thread_name_prefix="jaxshare-kernels")  # LLVM serves one thread
_free_stubs: list[tuple[int, int]] = []  # addresses of handlers and of their places
_NAP = 200
"""Microseconds between two looks at a place."""


def _compiled_later(make: Callable[[], bytes]) -> int:
    """The address of a handler that runs another one, whose code is made in a thread.

    No Python runs in its first call: an interrupt there would leave its results unwritten.
    """
    if not _free_stubs:
        name, numbers = f"stubs.{_STUBS}", range(_STUBS)
        code = kept(name) or made(name, _write_stubs)
        found = load(code, [f"stub{i}" for i in numbers], [f"place{i}" for i in numbers])
        _free_stubs.extend(zip(*found, strict=True))
    address, place = _free_stubs.pop()

    def load_into_place() -> None:
        try:
            handler: int | None = _loaded(make())
        except BaseException:
            # A program that has begun would go on with memory that nothing has written.
            _log.critical(
                "a CPU kernel cannot be compiled; calling it ends the process", exc_info=True
            )
            handler = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
        ctypes.c_void_p.from_address(place).value = handler

    _compiler.submit(load_into_place)
    return address


def _write_stubs() -> str:
    module = ir.Module("stubs")
    for i in range(_STUBS):
        place: Any = ir.GlobalVariable(module, PTR, f"place{i}")
        place.initializer = ir.Constant(PTR, None)

        def wait_and_jump(code: Code, frame: Val, place: Any = place) -> None:
            def handler() -> Val:
                return code.load(code.address_of(place), PTR)

            with code.loop_while(lambda: handler().equals(code.constant(None, PTR))):
                code.external("usleep", I32, code.constant(_NAP, I32))
            code.give(_call_at(code, handler(), PTR, frame))

        _write_handler(module, this_machine(), f"stub{i}", wait_and_jump)
    return str(module)


# The code around kernels.


def _write_handler(
    module: ir.Module, machine: Machine, name: str, execute: Callable[[Code, Val], None]
) -> None:
    code = Code(module, machine, name, [PTR], PTR, is_public=True)
    (frame,) = code.args
    no_error = code.constant(None, PTR)
    extension = code.load(frame + _EXTENSION, PTR)
    with code.where(extension.differs(code.constant(None, PTR))):  # XLA asks what this is
        metadata = code.load(extension + _METADATA, PTR)
        for at, number in zip((_MAJOR, _MINOR), _VERSION, strict=True):
            code.store(code.constant(number, I32), metadata + at)
        code.give(no_error)
    with code.where(code.load_int(frame + _STAGE).equals(_EXECUTE)):
        execute(code, frame)
    code.give(no_error)


_SHARED = Record(
    ("count", "threads", "numbers", "done", "references"), ("task", "work", "begin", "end")
)
"""What the threads of one call share: pieces of work, threads and how many have a number, pieces
that are done, and threads that may still look at this. The next piece of each thread follows."""


def _write_parallel(module: ir.Module, machine: Machine) -> Code:
    """parallel(frame, task, work, count, begin, end): see `Call.parallel`.

    A helper that starts late finds no work and touches nothing but what is shared, which the last of
    all frees: nothing waits for threads that are busy with something else.
    """
    work_on, help = _write_work_on(module, machine)
    code = Code(module, machine, "parallel", [PTR, PTR, PTR, I64, PTR, PTR])
    frame, task, work, count, begin, end = code.args
    api, context = code.load(frame + _API, PTR), code.load(frame + _CONTEXT, PTR)
    answer = code.array(I64, 1)
    _ask(code, api + _NUM_THREADS, context, answer)
    threads = code.min(code.load_int(answer, I64), count)
    with code.where(threads < 2):
        _call_if_any(code, begin)
        with code.loop(0, count) as i:
            _call_at(code, task, VOID, work, i)
        _call_if_any(code, end)
        code.give()
    shared = code.external("malloc", PTR, threads * 8 + _SHARED.bytes)
    _SHARED.write(code, shared, count=count, threads=threads, references=threads)
    _SHARED.write(code, shared, numbers=0, done=0, task=task, work=work, begin=begin, end=end)
    with code.loop(0, threads) as thread:
        code.store(thread * count // threads, shared + (thread * 8 + _SHARED.bytes))
    with code.loop(1, threads):
        refused = _ask(code, api + _SCHEDULE, context, code.address(help), shared)
        with code.where(refused.differs(code.constant(None, PTR))):
            _added(code, _SHARED.at(shared, "references"), -1)
    code.call(work_on, shared)
    with code.loop_while(lambda: _added(code, _SHARED.at(shared, "done"), 0) < count):
        code.pause()
    _release(code, shared)
    code.give()
    return code


def _write_work_on(module: ir.Module, machine: Machine) -> tuple[Code, Code]:
    """work_on(shared), which does pieces of work, and help(shared), which does so on another thread.

    Each thread begins with a run of pieces of its own, which follow each other in memory, and then
    does what others have left.
    """
    code = Code(module, machine, "work_on", [PTR])
    (shared,) = code.args
    s = _SHARED.read_all(code, shared)
    me = _added(code, _SHARED.at(shared, "numbers"), 1)
    _call_if_any(code, s.begin)
    with code.loop(0, s.threads) as i:
        thread = (me + i) % s.threads
        place, end = shared + (thread * 8 + _SHARED.bytes), (thread + 1) * s.count // s.threads
        index = code.var(_added(code, place, 1))
        with code.loop_while(lambda: index.get() < end):
            _call_at(code, s.task, VOID, s.work, index.get())
            _added(code, _SHARED.at(shared, "done"), 1)
            index.set(_added(code, place, 1))
    _call_if_any(code, s.end)
    code.give()
    help = Code(module, machine, "help", [PTR])
    help.call(code, help.args[0])
    _release(help, help.args[0])
    help.give()
    return code, help


def _release(code: Code, shared: Val) -> None:
    with code.where(_added(code, _SHARED.at(shared, "references"), -1).equals(1)):
        code.external("free", VOID, shared)


def _ask(code: Code, function: Val, *fields: Val) -> Val:
    """Calls one of XLA's functions with a structure of these fields; returns its error."""
    size = 8 * (2 + len(fields))
    request = code.array(I64, size // 8)
    for at, value in enumerate((code.constant(size), code.constant(0), *fields)):
        code.store(value, request + 8 * at)
    return _call_at(code, code.load(function, PTR), PTR, request)


def _call_at(code: Code, address: Val, result: ir.Type, *values: Val) -> Val:
    kind = ir.FunctionType(result, [value.type for value in values])
    # llvmlite calls what has the type of a function; its own `bitcast` leaves pointers as they are.
    target = ir.instructions.CastInstr(
        code.b.block, "bitcast", address.value, kind.as_pointer(), ""
    )
    code.b._insert(target)
    return Val(code, code.b.call(target, [value.value for value in values]))


def _call_if_any(code: Code, address: Val) -> None:
    with code.where(address.differs(code.constant(None, PTR))):
        _call_at(code, address, VOID)


def _added(code: Code, place: Val, number: int) -> Val:
    """Adds to a number that threads share; returns it as it was."""
    typed = code.b.bitcast(place.value, I64.as_pointer())
    return Val(code, code.b.atomic_rmw("add", typed, ir.Constant(I64, number), "seq_cst"))
