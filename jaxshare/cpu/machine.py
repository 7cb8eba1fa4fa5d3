"""The processors that kernels are written for."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Machine:
    """The vector units that kernels are written for.

    Attributes:
      lanes: float32 numbers of a vector.
      registers: the number of vectors.
      features: the names that LLVM has for what its processor can do.
    """

    lanes: int
    registers: int
    features: frozenset[str]

    @property
    def dots_bf16(self) -> bool:
        """True if it multiplies and adds pairs of bfloat16 in one instruction."""
        return {"avx512f", "avx512bf16"} <= self.features

    @property
    def rounds_bf16(self) -> bool:
        """True if it rounds float32 to bfloat16 in one instruction."""
        return {"avx512bf16", "avx512vl"} <= self.features
