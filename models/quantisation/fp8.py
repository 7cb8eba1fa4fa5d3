"""FP8: codes in e4m3, with a scale for a matrix, for each output or for each block of a matrix.

Source: DeepSeek-V3, inference/kernel.py (weight_dequant_kernel); transformers 5,
integrations/finegrained_fp8.py.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from jaxshare.models.config_fields import Fields
from jaxshare.models.quantisation.matching import Quantisation, names_in
from jaxshare.models.quantisation.stored import FLOATS, StoredArray, StoredForm
from jaxshare.quantised import QuantisedTensor

_SCALES = ("weight_scale_inv", "weight_scale")
_NO_EFFECT = frozenset(
    {
        "activation_scale_ub",
        "activation_scheme",
        "dequantize",
        "is_checkpoint_fp8_serialized",
        "kv_cache_scheme",
        "quant_method",
        "scale_fmt",  # of scales that are powers of two; they are stored as numbers
    }
)


@dataclasses.dataclass(frozen=True)
class FP8Form(StoredForm):
    """weight e4m3[out, in], and a scale for all of it, for each output or for each block.

    Attributes:
      block: the outputs and inputs of a block that has a scale; None for a scale of all inputs.
      scale: the name of the scales, by which codes are multiplied, "weight_scale_inv" too.
    """

    block: tuple[int, int] | None = None
    scale: str = _SCALES[0]
    main_dtypes = ("F8_E4M3",)
    unused = frozenset({"activation_scale", "input_scale", "input_scale_ub", "output_scale"})

    def for_layer(self, layer: str, stored: Mapping[str, Any]) -> Self:
        there = [name for name in _SCALES if f"{layer}.{name}" in stored]
        # Scales that are missing have the name of others.
        there = there or [
            name for name in _SCALES if any(tensor.endswith(f".{name}") for tensor in stored)
        ]
        return dataclasses.replace(self, scale=there[0]) if there else self

    def arrays(self, shape: tuple[int, ...]) -> dict[str, StoredArray]:
        outputs = shape[0]
        scales = ((), (1,), (1, 1), (outputs,), (outputs, 1))
        if self.block is not None:
            scales = (tuple(-(-n // size) for n, size in zip(shape, self.block, strict=True)),)
        return {
            "weight": StoredArray((shape,), self.main_dtypes),
            self.scale: StoredArray(scales, (*FLOATS, "F8_E8M0")),
        }

    def problem(self, shape: tuple[int, ...]) -> str:
        return ""

    def read(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantisedTensor:
        scales = arrays[self.scale]
        if scales.dtype.itemsize == 1:  # powers of two
            scales = scales.astype(np.float32)
        return QuantisedTensor(
            arrays["weight"], scales_of_rows(scales, shape, self.block), format="fp8"
        )


def group_of_blocks(inputs: int, columns: int) -> int:
    """Returns the inputs that share a scale in rows of blocks with this many columns. The last block
    of a row may have fewer: groups are then smaller ones that divide all blocks."""
    return math.gcd(inputs, columns) if inputs > columns else inputs


def scales_of_rows(
    scales: np.ndarray, shape: tuple[int, ...], block: tuple[int, int] | None
) -> np.ndarray:
    """Returns scales [out, groups] of a matrix from one scale, from those of outputs, or from those
    of blocks."""
    outputs, inputs = shape
    if block is None:
        return np.ascontiguousarray(np.broadcast_to(scales.reshape(-1, 1), (outputs, 1)))
    rows, columns = block
    group = group_of_blocks(inputs, columns)
    by_row = np.repeat(scales, rows, axis=0)[:outputs]
    return np.repeat(by_row, -(-columns // group), axis=1)[:, : inputs // group]


def read_fp8(fields: Fields) -> Quantisation:
    """Reads the settings of FP8.

    Raises:
      ConfigError: numbers or blocks that are not read here.
    """
    if fields.take("fmt", str, "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.error("fmt", "only e4m3 is read")
    form = FP8Form(read_block(fields, "weight_block_size"))
    plain = names_in(fields, "modules_to_not_convert", "ignored_layers")
    fields.finish(_NO_EFFECT)
    return Quantisation("fp8", ((("Linear",), form),), plain)


def read_block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Reads the outputs and inputs of a block; None where there are no blocks."""
    block = fields.take(name, list, None)
    if block is None:
        return None
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise fields.error(
            name, "it must be two whole numbers, of the outputs and inputs of a block"
        )
    return block[0], block[1]
