"""Kernels as machine code: compiled by LLVM, and kept beside XLA's programs for later processes."""

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import llvmlite
import llvmlite.binding as llvm
from blake3 import blake3

from jaxshare.cpu import amx
from jaxshare.cpu.machine import Machine
from jaxshare.paths import whole_file

_log = logging.getLogger("jaxshare.cpu")
_X86 = frozenset(("avx2", "fma", "f16c"))
"""What kernels need of an x86 processor; without, LLVM calls functions that no process has."""
_CHECKSUM = 32
"""Bytes of the checksum that a file begins with."""
_engines: list[Any] = []  # which hold the code for as long as the process lives


@functools.cache
def this_machine() -> Machine:
    """The vector units of this machine."""
    features = frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)
    if not amx.allow():
        features -= amx.FEATURES
    lanes, registers = (16, 32) if "avx512f" in features else (8, 16)
    return Machine(lanes, registers, features)


def is_served() -> bool:
    """Returns whether kernels can be compiled for this machine."""
    is_x86 = llvm.get_process_triple().startswith(("x86_64", "i386", "i686"))
    return not is_x86 or this_machine().features >= _X86


def kept(name: str) -> bytes | None:
    """The code of a kernel that an earlier process has left; None without."""
    return _read(_file(name))


def made(name: str, write: Callable[[], str]) -> bytes:
    """Compiles a kernel, and leaves its code for later processes.

    Args:
      name: of the kernel; kernels of one name are the same.
      write: the kernel's module, as LLVM's assembly.
    """
    data = _compile(write())
    _keep(_file(name), data)
    return data


def load(
    data: bytes, functions: Sequence[str], variables: Sequence[str] = ()
) -> tuple[list[int], list[int]]:
    """Loads code; returns the addresses of functions and of global variables of its module."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    _engines.append(engine)
    return (
        [engine.get_function_address(each) for each in functions],
        [engine.get_global_value_address(each) for each in variables],
    )


@functools.cache
def _target_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(features=_features(), opt=3, jit=True)


def _features() -> str:
    # Vectors of 512 bits are meant where they are written.
    return ",".join([*(f"+{name}" for name in sorted(this_machine().features)), "-prefer-256-bit"])


def _compile(text: str) -> bytes:
    return _target_machine().emit_object(_optimised(text))


def _optimised(text: str) -> Any:
    """A module of LLVM, given as its assembly."""
    machine = _target_machine()
    module = llvm.parse_assembly(text)
    module.triple = machine.triple
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = False  # vectors are written as such
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


# Files.


def _file(name: str) -> Path | None:
    """Where the code of a kernel is kept, if compiled programs are."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or "://" in folder:
        return None
    digest = blake3(f"{_source()} {name}".encode()).hexdigest()
    return Path(folder) / "kernels" / f"{digest}.o"


@functools.cache
def _source() -> str:
    """A digest of all that the code of a kernel follows from, but its name."""
    digest = blake3(f"{llvmlite.__version__} {llvm.get_process_triple()} {_features()}".encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path | None) -> bytes | None:
    """Reads a file; returns None if there is none that is sound."""
    if file is None:
        return None
    try:
        data = file.read_bytes()
    except OSError:
        return None
    return data[_CHECKSUM:] if data[:_CHECKSUM] == blake3(data[_CHECKSUM:]).digest() else None


def _keep(file: Path | None, data: bytes) -> None:
    if file is None:
        return
    try:
        with whole_file(file, "wb") as whole:
            whole.write(blake3(data).digest() + data)
    except OSError as error:
        _log.info("the code of a kernel is not kept: %s: %s", file, error)
