"""A small language for kernels: values with operators, variables, loops and vectors over LLVM's IR.

A kernel is a function of Python that writes a function of LLVM in the order in which it runs. Loops
of Python leave straight code behind, and those of `Code.loop` are loops of the machine.
"""

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from jaxshare.cpu.machine import Machine


class _BFloat(ir.types._BaseFloatType):
    """LLVM's bfloat, which llvmlite has no name for."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
BOOL, I8, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
I16, F16, BF16, F32 = ir.IntType(16), ir.HalfType(), _BFloat(), ir.FloatType()
F64 = ir.DoubleType()
PTR, VOID = ir.PointerType(), ir.VoidType()
FORMATS: dict[str, ir.Type] = {"float32": F32, "bfloat16": BF16, "float16": F16}
"""The formats of numbers by NumPy's names."""
NAMES = {kind: name for name, kind in FORMATS.items()}
BYTES = {F32: 4, F64: 8, BF16: 2, F16: 2, I32: 4, I64: 8, PTR: 8, I8: 1, I16: 2}
_FLOATS = (F32, F64, F16)
"""The types that LLVM's instructions for floats are used with."""


class Val:
    """A value of the machine: an i64, a float, a pointer, a bool, or a vector of these.

    Operators take another value of the same type, or a number of Python. Adding an int or an i64 to
    a pointer moves it by so many bytes. A NaN differs from every number, and no comparison else holds
    for it.
    """

    __slots__ = ("code", "value")

    def __init__(self, code: "Code", value: Any):
        self.code, self.value = code, value

    @property
    def type(self) -> Any:  # llvmlite's types name few of their attributes
        return self.value.type

    def _same(self, other: Any) -> ir.Value:
        return self.code.constant(other, self.type).value

    def _binary(self, name: str, other: Any) -> "Val":
        scalar = self.type.element if isinstance(self.type, ir.VectorType) else self.type
        is_float = scalar in _FLOATS
        names = {"div": "fdiv" if is_float else "sdiv", "rem": "srem"}
        name = names.get(name, f"f{name}" if is_float and name in ("add", "sub", "mul") else name)
        return Val(self.code, getattr(self.code.b, name)(self.value, self._same(other)))

    def __add__(self, other: Any) -> "Val":
        if self.type == PTR:
            offset = self.code.constant(other, I64).value
            return Val(self.code, self.code.b.gep(self.value, [offset], source_etype=I8))
        return self._binary("add", other)

    def __sub__(self, other: Any) -> "Val":
        return self._binary("sub", other)

    def __rsub__(self, other: Any) -> "Val":
        return self.code.constant(other, self.type) - self

    def __mul__(self, other: Any) -> "Val":
        return self._binary("mul", other)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Any) -> "Val":
        return self._binary("div", other)

    def __truediv__(self, other: Any) -> "Val":
        return self._binary("div", other)

    def __mod__(self, other: Any) -> "Val":
        return self._binary("rem", other)

    def __and__(self, other: Any) -> "Val":
        return self._binary("and_", other)

    def __or__(self, other: Any) -> "Val":
        return self._binary("or_", other)

    def __lshift__(self, other: Any) -> "Val":
        return self._binary("shl", other)

    def _compare(self, op: str, other: Any) -> "Val":
        scalar = self.type.element if isinstance(self.type, ir.VectorType) else self.type
        b = self.code.b
        of_floats = b.fcmp_unordered if op == "!=" else b.fcmp_ordered
        compare = of_floats if scalar in _FLOATS else b.icmp_signed
        return Val(self.code, compare(op, self.value, self._same(other)))

    def __lt__(self, other: Any) -> "Val":
        return self._compare("<", other)

    def __le__(self, other: Any) -> "Val":
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> "Val":
        return self._compare(">", other)

    def __ge__(self, other: Any) -> "Val":
        return self._compare(">=", other)

    def equals(self, other: Any) -> "Val":
        return self._compare("==", other)

    def differs(self, other: Any) -> "Val":
        return self._compare("!=", other)

    # Vectors.

    def bitcast(self, kind: ir.Type) -> "Val":
        return Val(self.code, self.code.b.bitcast(self.value, kind))

    def shuffled(self, other: "Val", order: Sequence[int]) -> "Val":
        """The elements of two vectors in this order."""
        mask = ir.Constant(ir.VectorType(I32, len(order)), [*order])
        return Val(self.code, self.code.b.shuffle_vector(self.value, other.value, mask))

    def element(self, index: int) -> "Val":
        return Val(self.code, self.code.b.extract_element(self.value, ir.Constant(I32, index)))


class Var:
    """A variable, which becomes a register."""

    def __init__(self, code: "Code", value: Val):
        with code.b.goto_entry_block():
            self._place = code.b.alloca(value.type)
        self._code, self._type = code, value.type
        self.set(value)

    def get(self) -> Val:
        return Val(self._code, self._code.b.load(self._place, typ=self._type))

    def set(self, value: Val) -> None:
        self._code.b.store(value.value, self._place)


class Code:
    """One function that is being written.

    Attributes:
      module: that it is in.
      machine: that it is written for.
      function: of LLVM.
      args: its arguments.
      b: llvmlite's builder.
    """

    def __init__(
        self,
        module: ir.Module,
        machine: Machine,
        name: str,
        arguments: Sequence[ir.Type],
        result: ir.Type = VOID,
        *,
        is_public: bool = False,
    ):
        self.module, self.machine = module, machine
        self.function = ir.Function(module, ir.FunctionType(result, arguments), name)
        if not is_public:
            self.function.linkage = "internal"
        self.b = ir.IRBuilder(self.function.append_basic_block())
        self.args = [Val(self, argument) for argument in self.function.args]

    # Numbers.

    def constant(self, value: Any, kind: ir.Type = I64) -> Val:
        """A number of Python as a value of this type, all lanes of it; a value as it is."""
        if isinstance(value, Val):
            return value
        if isinstance(kind, ir.VectorType):
            return Val(self, ir.Constant(kind, [value] * kind.count))
        return Val(self, ir.Constant(kind, value))

    def zeros(self, lanes: int, kind: ir.Type = F32) -> Val:
        return self.constant(0.0 if kind in _FLOATS else 0, ir.VectorType(kind, lanes))

    def splat(self, scalar: Val, lanes: int) -> Val:
        """A vector with this number in all lanes."""
        kind = ir.VectorType(scalar.type, lanes)
        one = self.b.insert_element(
            ir.Constant(kind, ir.Undefined), scalar.value, ir.Constant(I32, 0)
        )
        order = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return Val(self, self.b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), order))

    def iota(self, lanes: int) -> Val:
        """0, 1, 2... as int64."""
        return Val(self, ir.Constant(ir.VectorType(I64, lanes), [*range(lanes)]))

    def widened(self, value: Val, kind: ir.Type) -> Val:
        """A vector of floats of this format, or a single one, as float32."""
        lanes = value.type.count if isinstance(value.type, ir.VectorType) else 0

        def of(scalar: ir.Type) -> ir.Type:
            return ir.VectorType(scalar, lanes) if lanes else scalar

        if kind == BF16:  # of the same bits, so that no conversion can fail to be an instruction
            bits = self.b.zext(value.bitcast(of(I16)).value, of(I32))
            return (Val(self, bits) << 16).bitcast(of(F32))
        return value if kind == F32 else Val(self, self.b.fpext(value.value, of(F32)))

    def narrowed(self, value: Val, kind: ir.Type) -> Val:
        """A vector of float32, or a single one, rounded to this format."""
        if kind == F32:
            return value
        lanes = value.type.count if isinstance(value.type, ir.VectorType) else 0

        def of(scalar: ir.Type) -> ir.Type:
            return ir.VectorType(scalar, lanes) if lanes else scalar

        if kind != BF16 or self.machine.rounds_bf16:
            return Val(self, self.b.fptrunc(value.value, of(kind)))
        # Without an instruction LLVM would call a function that no process has.
        bits = value.bitcast(of(I32))

        def upper(number: Val) -> Val:
            return Val(self, self.b.lshr(number.value, self.constant(16, of(I32)).value))

        to_even = bits + ((upper(bits) & 1) + 0x7FFF)
        rounded = upper(self.select(value.equals(value), to_even, bits | 0x400000))
        return Val(self, self.b.trunc(rounded.value, of(I16))).bitcast(of(kind))

    def narrowed_int(self, value: Val, kind: ir.Type) -> Val:
        """An i64 as a smaller integer."""
        return Val(self, self.b.trunc(value.value, kind))

    def as_int(self, condition: Val) -> Val:
        """A bool as an i64, 0 or 1."""
        return Val(self, self.b.zext(condition.value, I64))

    def select(self, condition: Val, a: Any, b: Any) -> Val:
        a = a if isinstance(a, Val) else self.constant(a, b.type)
        return Val(self, self.b.select(condition.value, a.value, self.constant(b, a.type).value))

    def call(self, function: "Code", *values: Any) -> Val:
        return Val(self, self.b.call(function.function, [self.constant(v).value for v in values]))

    def intrinsic(self, name: str, *values: Val) -> Val:
        """An intrinsic of LLVM that has the type of its first argument."""
        kind = values[0].type
        full = f"llvm.{name}.{_mangled(kind)}"
        return self._external(full, kind, *values)

    def _external(self, name: str, result: ir.Type, *values: Val) -> Val:
        types = [value.type for value in values]
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, types), name)
        return Val(self, self.b.call(function, [value.value for value in values]))

    def external(self, name: str, result: ir.Type, *values: Any) -> Val:
        """A call of a function of the process, or of an instruction of the machine."""
        return self._external(name, result, *(self.constant(value) for value in values))

    def fma(self, a: Val, b: Val, c: Val) -> Val:
        """a * b + c."""
        return self.intrinsic("fma", a, b, c)

    def dot_bf16(self, total: Val, a: Val, b: Val) -> Val:
        """Adds the products of pairs of bfloat16 to float32: total[i] + a[2i] b[2i] + a[2i + 1] b[2i
        + 1]."""
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * total.type.count}"
        return self._external(name, total.type, total, a, b)

    def max(self, a: Val, b: Any) -> Val:
        b = self.constant(b, a.type)
        return self.select(a > b, a, b)

    def min(self, a: Val, b: Any) -> Val:
        b = self.constant(b, a.type)
        return self.select(a < b, a, b)

    # Memory.

    def load(self, pointer: Val, kind: ir.Type, lanes: int = 0, count: Val | None = None) -> Val:
        """A number, or a vector of them; with `count` only the first ones, and 0 after them."""
        if kind in (BF16, F16):  # as integers, which LLVM moves without converting them
            bits = self.load(pointer, I16, lanes, count)
            return bits.bitcast(ir.VectorType(kind, lanes) if lanes else kind)
        size = BYTES[kind]
        if not lanes:
            return Val(self, self.b.load(pointer.value, typ=kind, align=size))
        whole = ir.VectorType(kind, lanes)
        if count is None:
            return Val(self, self.b.load(pointer.value, typ=whole, align=size))
        name = f"llvm.masked.load.{_mangled(whole)}.p0"
        zero = Val(self, ir.Constant(whole, None))
        return self._external(
            name, whole, pointer, *self._align(size), self._mask(count, lanes), zero
        )

    def store(self, value: Val, pointer: Val, count: Val | None = None) -> None:
        """Stores a number or a vector; with `count` only the first ones of it."""
        vector = isinstance(value.type, ir.VectorType)
        kind = value.type.element if vector else value.type
        if kind in (BF16, F16):
            value = value.bitcast(ir.VectorType(I16, value.type.count) if vector else I16)
        size = BYTES[kind]
        if count is None:
            self.b.store(value.value, pointer.value, align=size)
            return
        name = f"llvm.masked.store.{_mangled(value.type)}.p0"
        mask = self._mask(count, value.type.count)
        self._external(name, VOID, value, pointer, *self._align(size), mask)

    def prefetch(self, pointer: Val, level: int = 3) -> None:
        """Has memory brought to the caches that will be read soon; it need not be there."""
        flags = (Val(self, ir.Constant(I32, flag)) for flag in (0, level, 1))  # for reading, data
        self.external("llvm.prefetch.p0", VOID, pointer, *flags)

    def _align(self, size: int) -> list[Val]:
        return [Val(self, ir.Constant(I32, size))]

    def _mask(self, count: Val, lanes: int) -> Val:
        return self.iota(lanes) < self.splat(count, lanes)

    def load_int(self, pointer: Val, kind: ir.Type = I32) -> Val:
        """A number as an i64."""
        value = self.b.load(pointer.value, typ=kind, align=BYTES[kind])
        return Val(self, value if kind == I64 else self.b.sext(value, I64))

    def array(self, kind: ir.Type, size: int) -> Val:
        """Memory of the function's own."""
        with self.b.goto_entry_block():
            place = self.b.alloca(ir.ArrayType(kind, size))
            place.align = 64  # pyright: ignore[reportAttributeAccessIssue]
            return self._pointer(place)

    def address(self, function: "Code") -> Val:
        """The address of a function, to be called by another one."""
        return self._pointer(function.function)

    def address_of(self, variable: ir.GlobalVariable) -> Val:
        """The address of a variable of the module."""
        return self._pointer(variable)

    def _pointer(self, place: ir.Value) -> Val:
        # llvmlite keeps the type of what a pointer points to; LLVM has pointers of one type.
        pointer = self.b.gep(place, [ir.Constant(I64, 0)], source_etype=I8)
        pointer.type = PTR
        return Val(self, pointer)

    # The flow.

    def var(self, value: Any) -> Var:
        return Var(self, self.constant(value))

    @contextlib.contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Val]:
        """A loop over start, start + step... below stop."""
        index, stop = self.var(start), self.constant(stop)
        head, body, after = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch((index.get() < stop).value, body, after)
        self.b.position_at_end(body)
        at = index.get()
        yield at
        index.set(at + step)
        self.b.branch(head)
        self.b.position_at_end(after)

    @contextlib.contextmanager
    def loop_while(self, condition: Any) -> Iterator[None]:
        """A loop as long as `condition()` holds."""
        head, body, after = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(condition().value, body, after)
        self.b.position_at_end(body)
        yield
        self.b.branch(head)
        self.b.position_at_end(after)

    @contextlib.contextmanager
    def where(self, condition: Val) -> Iterator[None]:
        """Code that runs if a condition holds."""
        with self.b.if_then(condition.value):
            yield

    def pause(self) -> None:
        """Waits a moment in a loop that waits for another thread."""
        if "sse2" in self.machine.features:
            self._external("llvm.x86.sse2.pause", VOID)

    def give(self, value: Val | None = None) -> None:
        """Returns."""
        self.b.ret_void() if value is None else self.b.ret(value.value)


class Record:
    """A structure in memory whose fields are i64 and pointers.

    Attributes:
      bytes: of one.
    """

    def __init__(self, integers: Sequence[str], pointers: Sequence[str] = ()):
        names = (*integers, *pointers)
        self._at = {name: 8 * i for i, name in enumerate(names)}
        self._pointers, self.bytes = frozenset(pointers), 8 * len(names)

    def write(self, code: Code, place: Val, **fields: Any) -> None:
        """Writes fields of the structure at a place."""
        for name, value in fields.items():
            code.store(code.constant(value), place + self._at[name])

    def at(self, place: Val, name: str) -> Val:
        """Where a field of the structure at a place is."""
        return place + self._at[name]

    def read(self, code: Code, place: Val, name: str) -> Val:
        """A field of the structure at a place."""
        return code.load(place + self._at[name], PTR if name in self._pointers else I64)

    def read_all(self, code: Code, place: Val) -> Any:
        """All fields, as attributes."""
        return types.SimpleNamespace(**{name: self.read(code, place, name) for name in self._at})


def _mangled(kind: ir.Type) -> str:
    """The name of a type in the names of intrinsics."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_mangled(kind.element)}"
    names = {F32: "f32", F16: "f16", BF16: "bf16"}
    return f"i{kind.width}" if isinstance(kind, ir.IntType) else names[kind]
