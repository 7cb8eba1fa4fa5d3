"""How kernels of the CPU are made, chosen and called."""

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import cpu
from jaxshare.attention.api import BACKENDS
from jaxshare.pallas.device import H200, assume_device

if not cpu.available():
    pytest.skip("there are no kernels for this machine", allow_module_level=True)

from jaxshare.cpu import compiled, runtime
from jaxshare.cpu.ir import I64, Code, Machine, ir
from jaxshare.cpu.matrices.call import cpu_products
from tests.helpers import mostly_slow
from tests.processes import free_port


@pytest.fixture(autouse=True)
def kernels_folder(tmp_path):
    """The code of a test's kernels is kept for that test alone."""
    former = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "kernels"
    jax.config.update("jax_compilation_cache_dir", former)


def _count_up(call: runtime.Call) -> None:
    """Adds one to as many numbers as there are, each in a piece of work of its own."""
    task = runtime.begin_task(call, "task")
    numbers, i = task.args
    task.store(task.load_int(numbers + i * 8, I64) + 1, numbers + i * 8)
    task.give()
    with call.code.loop(0, call.size(0, 0)) as i:
        call.code.store(call.code.load_int(call.argument(0) + i * 8, I64), call.result(0) + i * 8)
    call.parallel(task, call.result(0), call.size(0, 0))


def _check_count_up(target: str, count: int) -> None:
    with jax.enable_x64(True):
        x = jnp.arange(count, dtype="int64")
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        run = jax.jit(lambda x: jax.ffi.ffi_call(target, result)(x))
        for _ in range(20):
            np.testing.assert_array_equal(run(x), np.arange(count) + 1)


def _until_compiled() -> None:
    """Waits for the kernels that were registered so far."""
    runtime._compiler.submit(lambda: None).result()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000])
def test_every_piece_of_work_is_done_once(count):
    _check_count_up(runtime.register("test.count_up", _count_up), count)


def _count_threads(call: runtime.Call) -> None:
    """Says of each piece of work whether a thread had begun before it; after these, how many have
    ended and begun in all calls so far."""
    code, count = call.code, call.size(0, 0) - 2
    counters, around = [], []
    for name in ("began", "ended"):
        counter = ir.GlobalVariable(call.module, I64, name)
        counter.initializer = ir.Constant(I64, 0)
        each = Code(call.module, call.machine, f"count_{name}", [])
        runtime._added(each, each.address_of(counter), 1)
        each.give()
        counters.append(counter)
        around.append(each)
    task = runtime.begin_task(call, "task")
    seen, i = task.args
    task.store(task.load_int(task.address_of(counters[0]), I64), seen + i * 8)
    task.give()
    call.parallel(task, call.result(0), count, (around[0], around[1]))
    for at, counter in enumerate(reversed(counters)):
        found = code.load_int(code.address_of(counter), I64)
        code.store(found, call.result(0) + (count + at) * 8)


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_each_thread_begins_and_ends_once_a_call(count):
    target = runtime.register(f"test.count_threads.{count}", _count_threads)
    with jax.enable_x64(True):
        result = jax.ShapeDtypeStruct((count + 2,), "int64")
        run = jax.jit(lambda x: jax.ffi.ffi_call(target, result)(x))
        for calls in range(1, 21):
            *seen, ended, began = np.asarray(run(jnp.zeros(count + 2, "int64"))).tolist()
            assert all(number >= calls for number in seen)
            # The thread of the call has ended; the others may be late.
            threads = max(os.cpu_count() or 1, jax.device_count())
            assert calls <= ended <= began <= calls * threads


def test_calls_from_many_threads():
    """Calls share XLA's threads, and each waits for its own work alone."""
    rng = np.random.default_rng(0)
    cases = [rng.normal(size=(2, 64, 64)).astype("float32") for _ in range(8)]
    run = jax.jit(lambda x, k: cpu_products(x[:2], [k, k], "float32"))
    wrong: list[int] = []

    def work(number: int) -> None:
        x, kernel = cases[number]
        for _ in range(50):
            for y in run(x, kernel):
                if not np.allclose(y, x[:2] @ kernel.T, atol=1e-4):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_kernel_is_compiled_once():
    made = []

    def write(call: runtime.Call) -> None:
        made.append(call)

    assert runtime.register("test.once", write) == runtime.register("test.once", write)
    _until_compiled()
    assert len(made) == 1


def test_kernels_serve_a_program_under_vmap_and_scan():
    rng = np.random.default_rng(1)
    x, kernel = rng.normal(size=(5, 2, 12)), rng.normal(size=(7, 12))

    def body(total, each):
        (y,) = cpu_products(each, [jnp.asarray(kernel, "float32")], "float32")
        return total + y, y

    total, each = jax.jit(lambda x: jax.lax.scan(body, jnp.zeros((2, 7)), x))(x.astype("float32"))
    np.testing.assert_allclose(each, x @ kernel.T, atol=1e-5)
    np.testing.assert_allclose(total, (x @ kernel.T).sum(0), atol=1e-5)


_TEXT = """
import jax, logging
logging.basicConfig()
from jaxshare import cpu
from jaxshare.attention.api import preferred
{before}
print(cpu.available(), preferred())
"""


def _seen(before: str, **environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _TEXT.format(before=before)],
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": "", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), done.stderr


def test_they_can_be_turned_off():
    assert _seen("", JAXSHARE_CPU_KERNELS="off")[0] == "False ('xla',)"


def test_a_backend_whose_kernels_are_not_for_the_device_says_so():
    with assume_device(H200), pytest.raises(NotImplementedError, match="turned off, or not for"):
        BACKENDS["cpu"](*[None] * 5)  # type: ignore[arg-type]


def test_without_llvmlite_everything_runs_as_xla_compiles_it():
    out, _ = _seen(
        "import sys; sys.modules['llvmlite'] = None; sys.modules['llvmlite.binding'] = None"
    )
    assert out == "False ('xla',)"


def test_where_a_kernel_cannot_be_used_a_warning_says_why():
    before = "from jaxshare.cpu import runtime; runtime._VERSION = 9, 9"
    out, logged = _seen(before)
    assert out == "False ('xla',)"
    assert "warning: the CPU kernels cannot be used (" in logged and "9" in logged


def test_each_of_several_processes_uses_them(tmp_path):
    port = free_port()
    program = f"""
import sys, jax
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.distributed.initialize("127.0.0.1:{port}", num_processes=2, process_id=int(sys.argv[1]))
from jaxshare import cpu
print(jax.device_count(), jax.local_device_count(), cpu.available())
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, process],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for process in "01"
    ]
    for out, logged in [process.communicate(timeout=120) for process in started]:
        assert out.splitlines()[-1:] == ["2 1 True"], logged


def _address(name: str, written: list[str]) -> int:
    def write() -> str:
        written.append(name)
        return runtime._module(name, _count_up)

    code = compiled.kept(name) or compiled.made(name, write)
    return runtime._loaded(code)


def test_the_code_of_a_kernel_is_kept(kernels_folder):
    written: list[str] = []
    assert _address("test.kept", written) != _address("test.kept", written)
    assert len(written) == 1 and len([*kernels_folder.iterdir()]) == 1
    _address("test.other", written)
    assert len(written) == 2 and len([*kernels_folder.iterdir()]) == 2


@pytest.mark.parametrize("damage", ["bit", "cut", "empty"])
def test_code_that_is_damaged_is_compiled_again(kernels_folder, damage):
    written: list[str] = []
    _address("test.damaged", written)
    (file,) = kernels_folder.iterdir()
    sound = file.read_bytes()
    flipped = sound[:200] + bytes([sound[200] ^ 1]) + sound[201:]
    file.write_bytes({"bit": flipped, "cut": sound[:-1], "empty": b""}[damage])
    _address("test.damaged", written)
    assert len(written) == 2 and file.read_bytes() == sound


def test_where_nothing_can_be_written_code_is_not_kept(kernels_folder):
    kernels_folder.write_text("no folder")
    written: list[str] = []
    for _ in range(2):
        assert _address("test.unwritable", written)
    assert len(written) == 2


@pytest.mark.parametrize("folder", [None, "gs://bucket/compiled"])
def test_without_a_folder_code_is_not_kept(folder):
    jax.config.update("jax_compilation_cache_dir", folder)
    written: list[str] = []
    for _ in range(2):
        assert _address("test.nowhere", written)
    assert len(written) == 2


_IN_A_THREAD = """
import os, signal, sys, threading, numpy as np, jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
from jaxshare.cpu import available, runtime
from jaxshare.cpu.matrices.call import cpu_products
assert available()
waits, threads, load = threading.Event(), [], runtime._loaded

def slow(code):
    threads.append(threading.current_thread().name)
    assert waits.wait(60)
    if "fails" in sys.argv:
        raise MemoryError("none left")
    return load(code)

runtime._loaded = slow
x, kernel = np.ones((3, 32), "f4"), np.arange(2048, dtype="f4").reshape(64, 32)
multiply = jax.jit(lambda x, kernel: cpu_products(x, [kernel, kernel], "float32")[1])
if "kept" in sys.argv:
    waits.set()
program = multiply.lower(x, kernel).compile()  # which does not wait
threading.Timer(0.6, waits.set).start()
if "interrupted" in sys.argv:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    program(x, kernel).block_until_ready()
    threading.Event().wait(5 if "interrupted" in sys.argv else 0)
except KeyboardInterrupt:
    print("interrupted")
for _ in range(3):
    np.testing.assert_allclose(program(x, kernel), x @ kernel.T, rtol=1e-5)
print(threads)
"""


def _in_a_thread(folder, *how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _IN_A_THREAD, str(folder), *how],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        text=True,
        capture_output=True,
        timeout=120,
    )


def test_a_kernel_is_compiled_in_a_thread_and_its_first_call_waits(tmp_path):
    done = _in_a_thread(tmp_path)
    assert done.stdout == "['jaxshare-kernels_0']\n", done.stderr
    done = _in_a_thread(tmp_path, "kept")  # which this process loads
    assert done.stdout == "['MainThread']\n", done.stderr


def test_a_program_ends_where_a_kernel_that_it_needs_cannot_be_compiled(tmp_path):
    done = _in_a_thread(tmp_path, "fails")
    assert done.returncode == -signal.SIGABRT and not done.stdout
    assert "a CPU kernel cannot be compiled; " in done.stderr and "none left" in done.stderr


def test_an_interrupt_waits_for_the_first_call(tmp_path):
    done = _in_a_thread(tmp_path, "interrupted")
    assert done.stdout == "interrupted\n['jaxshare-kernels_0']\n", done.stderr


def test_more_kernels_than_there_are_stubs_for_are_compiled(monkeypatch):
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(runtime, "_free_stubs", [])
    monkeypatch.setattr(runtime, "_STUBS", 2)
    for target in [runtime.register(f"test.stubs.{i}", _count_up) for i in range(5)]:
        _check_count_up(target, 3)


_PROCESS = {"malloc", "free", "memset", "memcpy", "log2f"}
"""Functions of the process that kernels may call."""
_WITHOUT = {
    "all that this one has": (),
    "no bfloat16": ("amx-", "avx512bf16", "avx512fp16"),
    "AVX2": ("amx-", "avx512"),
}


@pytest.mark.parametrize(
    ("lacks", "dtype"),
    mostly_slow(
        # What converts the most; then all others.
        dict.fromkeys(
            [
                ("AVX2", "bfloat16"),
                ("no bfloat16", "float16"),
                ("all that this one has", "bfloat16"),
                *itertools.product(_WITHOUT, ("float32", "bfloat16", "float16")),
            ]
        ),
        several=True,
    ),
)
def test_kernels_for_lesser_machines_call_nothing_that_is_not_there(monkeypatch, lacks, dtype):
    """A conversion without an instruction becomes a call, which is of no use where it is missing."""
    from jaxshare.cpu.append import _write as write_append
    from jaxshare.cpu.attention.call import _write as write_attention
    from jaxshare.cpu.attention.work import Shape
    from jaxshare.cpu.matrices.few_rows import write_few_rows
    from jaxshare.cpu.norm import _write as write_norm
    from jaxshare.cpu.truncation import _write as write_truncation
    from jaxshare.cpu.truncation import _write_typical as write_typical

    whole = compiled.this_machine()
    features = frozenset(f for f in whole.features if not f.startswith(_WITHOUT[lacks] or "?"))
    lanes, registers = (16, 32) if "avx512f" in features else (8, 16)
    machine = Machine(lanes, registers, features)
    monkeypatch.setattr(runtime, "this_machine", lambda: machine)
    monkeypatch.setattr(compiled, "this_machine", lambda: machine)
    compiled._target_machine.cache_clear()
    kernels = {
        "few": functools.partial(write_few_rows, 2, dtype, dtype),
        "append": functools.partial(write_append, 40, 10, True, "float32", dtype),
        "norm": functools.partial(write_norm, 100, 1e-6, dtype, "float32"),
        "attention": functools.partial(write_attention, Shape(80, 20, dtype, dtype, 0.1), True),
        "truncation": write_truncation,
        "typical": write_typical,
    }
    try:
        for name, kernel in kernels.items():
            module = compiled._optimised(runtime._module(name, kernel))
            text = compiled._target_machine().emit_assembly(module)
            # At the start of a line, since `bl` is a register of an x86 processor too.
            call = r"^\s*(?:callq?|jmp|bl)\s+_?([A-Za-z_]\w*)"
            called = set(re.findall(call, text, re.M))
            called |= set(re.findall(r"movabsq\s+\$([A-Za-z_]\w*)", text))
            assert called - _PROCESS <= set(re.findall(r"^([A-Za-z_]\w*):", text, re.M)), name
    finally:
        compiled._target_machine.cache_clear()
