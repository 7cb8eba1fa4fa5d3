"""Codes of quantised matrices as numbers in registers, and what their groups have beside them."""

import dataclasses

import numpy as np
from jax import Array
from llvmlite import ir

from jaxshare.cpu.compiled import this_machine
from jaxshare.cpu.ir import BF16, F16, F32, FORMATS, I8, I16, I32, Code, Val
from jaxshare.quantised import FORMATS as CODE_FORMATS
from jaxshare.quantised import QuantisedTensor

_EXPONENTS = "float8_e8m0fnu"
_INTEGERS = {"int8": I8, "uint8": I8, "int16": I16, "uint16": I16, "int32": I32}
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, _EXPONENTS: 1}
_SIZES |= {name: kind.width // 8 for name, kind in _INTEGERS.items()}
_EXACT = ("int4", "mxfp4")
"""Formats of four bits whose numbers are numbers of bfloat16."""


@dataclasses.dataclass(frozen=True)
class Codes:
    """The way in which a matrix is quantised, as far as the code of a kernel depends on it.

    Attributes:
      format: the name of a `CodeFormat`.
      group: inputs of a group; 0 for all of a row, of 8 bits.
      scales, zeros, offsets: the dtypes of these; "" for none.
    """

    format: str
    group: int
    scales: str
    zeros: str
    offsets: str

    @classmethod
    def of(cls, tensor: QuantisedTensor) -> "Codes":
        """The way of a tensor.

        Raises:
          NotImplementedError: no kernel is written for it, or this machine has no instruction to look
            its numbers up.
        """
        whole = tensor.group == tensor.shape[-1] and tensor.code_format.bits == 8
        parts = (tensor.scales, tensor.zeros, tensor.offsets)
        dtypes = ["" if each is None else str(each.dtype) for each in parts]
        floats = {*FORMATS, _EXPONENTS}
        if (
            dtypes[0] not in floats
            or dtypes[1] not in {"", *_INTEGERS}
            or dtypes[2] not in floats | {""}
        ):
            raise NotImplementedError(f"it has no kernel for {' and '.join(filter(None, dtypes))}")
        if tensor.code_format.table and not {"avx2", "avx512f"} & this_machine().features:
            raise NotImplementedError("the machine cannot look numbers up")
        return cls(tensor.format, 0 if whole else tensor.group, *dtypes)

    @property
    def name(self) -> str:
        """For the name of a kernel."""
        return "_".join(
            (self.format, str(self.group), self.scales, self.zeros or "-", self.offsets or "-")
        )

    @property
    def bits(self) -> int:
        return CODE_FORMATS[self.format].bits

    @property
    def middle(self) -> int:
        return CODE_FORMATS[self.format].middle

    @property
    def is_exact(self) -> bool:
        """True if the numbers of codes come out of a table of bfloat16."""
        return self.format in _EXACT

    @property
    def is_shifted(self) -> bool:
        """True if there is more to a number than its code and a scale."""
        return bool(self.zeros or self.offsets)

    @property
    def factor(self) -> float:
        """By this much the numbers in registers are smaller than those of the format."""
        return 256.0 if self.format == "fp8" else 1.0

    def arrays(self, tensor: QuantisedTensor) -> list[Array | np.ndarray]:
        """The arrays of a tensor that a kernel reads, as many as `count`."""
        found = (tensor.codes, tensor.scales, tensor.zeros, tensor.offsets)
        return [each for each in found if each is not None]

    @property
    def count(self) -> int:
        return 2 + bool(self.zeros) + bool(self.offsets)

    @property
    def table(self) -> list[float]:
        """The numbers of all codes of four bits, before zeros that are given."""
        return [*CODE_FORMATS[self.format].table] or [i - self.middle for i in range(16)]

    # What groups have.

    def scale(self, code: Code, place: Val, lanes: int = 0, count: Val | None = None) -> Val:
        """One scale, or several."""
        return _float(code, self.scales, place, lanes, count)

    def zero(self, code: Code, place: Val, lanes: int = 0, count: Val | None = None) -> Val:
        """One zero, or several, less than the middle that `numbers` has taken away already."""
        kind = _INTEGERS[self.zeros]
        value = code.load(place, kind, lanes, count)
        whole = ir.VectorType(I32, lanes) if lanes else I32
        if kind != I32:
            extend = code.b.zext if self.zeros.startswith("u") else code.b.sext
            value = Val(code, extend(value.value, whole))
        floats = ir.VectorType(F32, lanes) if lanes else F32
        return Val(code, code.b.sitofp((value - self.middle).value, floats))

    def offset(self, code: Code, place: Val, lanes: int = 0, count: Val | None = None) -> Val:
        """One offset, or several."""
        return _float(code, self.offsets, place, lanes, count)

    def size(self, which: str) -> int:
        """The bytes of one of the scales, zeros or offsets."""
        return _SIZES[getattr(self, which)]

    # Numbers.

    def numbers(self, code: Code, codes: Val) -> list[Val]:
        """The numbers of a vector of bytes in float32, divided by `factor`: of four bits those in the
        low halves, and those in the high halves."""
        lanes = codes.type.count
        floats = ir.VectorType(F32, lanes)
        if self.format == "fp8":
            # A half of float16 has the exponent of e4m3 with 8 more, and numbers without a leading
            # 1 as well. The codes that stand for no number become 480.
            wide = Val(code, code.b.sext(codes.value, ir.VectorType(I16, lanes)))
            bits = (wide << 7) & 0xBFFF
            return [code.widened(bits.bitcast(ir.VectorType(F16, lanes)), F16)]
        if self.bits == 8:
            wide = code.b.sext(codes.value, ir.VectorType(I32, lanes))
            return [Val(code, code.b.sitofp(wide, floats))]
        low = Val(code, code.b.zext(codes.value, ir.VectorType(I32, lanes)))
        return [self._looked_up(code, each) for each in (low, _right(code, low, 4))]

    def _looked_up(self, code: Code, index: Val) -> Val:
        """The numbers of the low four bits of integers."""
        features, lanes = code.machine.features, index.type.count
        floats = ir.VectorType(F32, lanes)
        if "avx512f" in features and lanes == 16:
            table = Val(code, ir.Constant(floats, self.table))
            name = "llvm.x86.avx512.permvar.sf.512"
            return code.external(name, floats, table, index)
        if not CODE_FORMATS[self.format].table:
            return Val(code, code.b.sitofp(((index & 15) - self.middle).value, floats))
        low, high = (
            code.external(
                "llvm.x86.avx2.permps", floats, Val(code, ir.Constant(floats, part)), index
            )
            for part in (self.table[:8], self.table[8:])
        )
        return code.select((index & 8).equals(0), low, high)

    def pairs(self, code: Code, codes: Val, table: Val | None = None) -> list[Val]:
        """The numbers of a vector of bytes of four bits in bfloat16: those in the low halves, and
        those in the high halves.

        Args:
          table: a vector of as many numbers, 16 again and again; default the format's own.
        """
        lanes = codes.type.count
        words = ir.VectorType(I16, lanes)
        if table is None:
            bits = np.array(self.table, np.float32).view(np.uint32) >> 16
            table = Val(code, ir.Constant(words, [int(each) for each in bits] * (lanes // 16)))
        low = Val(code, code.b.zext(codes.value, words))
        name = f"llvm.x86.avx512.permvar.hi.{16 * lanes}"
        found = (
            code.external(name, words, table.bitcast(words), each)
            for each in (low, _right(code, low, 4))
        )
        return [each.bitcast(ir.VectorType(BF16, lanes)) for each in found]


def _right(code: Code, value: Val, bits: int) -> Val:
    return Val(code, code.b.lshr(value.value, code.constant(bits, value.type).value))


def _float(code: Code, dtype: str, place: Val, lanes: int, count: Val | None) -> Val:
    """Floats as float32."""
    if dtype != _EXPONENTS:
        kind = FORMATS[dtype]
        return code.widened(code.load(place, kind, lanes, count), kind)
    value = code.load(place, I8, lanes, count)
    bits = code.b.zext(value.value, ir.VectorType(I32, lanes) if lanes else I32)
    return (Val(code, bits) << 23).bitcast(ir.VectorType(F32, lanes) if lanes else F32)
