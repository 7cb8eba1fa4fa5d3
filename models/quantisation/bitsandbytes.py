"""bitsandbytes: blocks of NF4, whose scales may be quantised once more, and rows of int8.

Source: bitsandbytes 0.50, QuantState.as_dict, dequantize_4bit and int8_vectorwise_dequant in
bitsandbytes/functional.py.
"""

import dataclasses
import json
import math
from collections.abc import Mapping

import numpy as np

from jaxshare.models.config_fields import ConfigError, Fields
from jaxshare.models.quantisation.matching import Quantisation, names_in
from jaxshare.models.quantisation.stored import StoredArray, StoredForm
from jaxshare.quantised import FORMATS, QuantisedTensor, packed_codes

_STATE = "quant_state.bitsandbytes__nf4"
_BLOCK, _NESTED = 64, 256
"""Numbers that share a scale, and scales that share one in turn."""
_LARGEST = 127
_NF4_ZERO = 7
"""The code of zero."""

_NO_EFFECT = frozenset(
    {
        "quant_method",
        "_load_in_4bit",
        "_load_in_8bit",
        "bnb_4bit_compute_dtype",
        "bnb_4bit_use_double_quant",  # the tensors say whether it was
        # how inputs are multiplied, which are not quantised here
        "llm_int8_threshold",
        "llm_int8_has_fp16_weight",
        "llm_int8_enable_fp32_cpu_offload",
    }
)


@dataclasses.dataclass(frozen=True)
class NF4Form(StoredForm):
    """weight uint8[out in / 2, 1]: two codes of four bits a byte, the first in the high bits, of the
    rows one after the other. Every 64 of them share a scale, whichever rows they are in."""

    main_dtypes = ("U8",)

    def arrays(self, shape: tuple[int, ...]) -> dict[str, StoredArray]:
        count = math.prod(shape)
        scales = -(-count // _BLOCK)
        nested = StoredArray(((-(-scales // _NESTED),),), ("F32",), is_optional=True)
        return {
            "weight": StoredArray((((count + 1) // 2, 1), ((count + 1) // 2,)), self.main_dtypes),
            "weight.absmax": StoredArray(((scales,),), ("U8", "F32")),
            "weight.quant_map": StoredArray(((16,),), ("F32",)),
            "weight.nested_absmax": nested,
            "weight.nested_quant_map": StoredArray(((256,),), ("F32",), is_optional=True),
            # a text of JSON
            f"weight.{_STATE}": StoredArray((), ("U8",)),
        }

    def problem(self, shape: tuple[int, ...]) -> str:
        if shape[-1] % 2:
            return f"its {shape[-1]} inputs are no whole bytes of two codes"
        return ""

    def read(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantisedTensor:
        self._check(arrays, shape)
        octets = arrays["weight"].reshape(shape[0], -1)
        codes = np.empty((shape[0], octets.shape[1] * 2), np.uint8)
        codes[:, ::2], codes[:, 1::2] = octets >> 4, octets & 15
        # Where blocks go on in the next row, groups are the largest that divide both.
        group = math.gcd(_BLOCK, shape[-1])
        starts = np.arange(math.prod(shape) // group) * group
        scales = _scales(arrays)[starts // _BLOCK].reshape(shape[0], -1)
        if (none := scales == 0).any():  # blocks of zeros
            scales[none] = 1
            codes.reshape(*scales.shape, group)[none] = _NF4_ZERO
        return QuantisedTensor(packed_codes(codes, group), scales, format="nf4")

    def _check(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> None:
        """Raises ValueError for a state of another form."""
        try:
            state = json.loads(arrays[f"weight.{_STATE}"].tobytes())
            found = {k: state[k] for k in ("quant_type", "blocksize")}
            inner = state.get("nested_blocksize", _NESTED)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its {_STATE} cannot be read ({error})") from error
        wanted = {"quant_type": "nf4", "blocksize": _BLOCK}
        if found != wanted or inner != _NESTED or state.get("shape") not in (None, [*shape]):
            raise ValueError(
                f"its {_STATE} is {json.dumps(state)}; read are blocks of {_BLOCK} in NF4, with "
                f"scales in blocks of {_NESTED}, of the layer's shape {[*shape]}"
            )
        if not np.array_equal(arrays["weight.quant_map"], np.asarray(FORMATS["nf4"].table, "f4")):
            raise ValueError("its quant_map is not that of NF4")


def _scales(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The scale of each block in float32."""
    scales = arrays["weight.absmax"]
    nested = arrays.get("weight.nested_absmax"), arrays.get("weight.nested_quant_map")
    if scales.dtype == np.float32 and nested == (None, None):
        return scales
    state = json.loads(arrays[f"weight.{_STATE}"].tobytes())
    offset = state.get("nested_offset")
    if scales.dtype != np.uint8 or nested[0] is None or nested[1] is None:
        raise ValueError(
            "its absmax must be float32, or uint8 with a nested_absmax and a nested_quant_map"
        )
    if not isinstance(offset, int | float):
        raise ValueError(f"its {_STATE} lacks the nested_offset of its quantised scales")
    inner = np.repeat(nested[0], _NESTED)[: scales.size]
    return nested[1][scales] * inner + np.float32(offset)


@dataclasses.dataclass(frozen=True)
class LLMInt8Form(StoredForm):
    """weight int8[out, in], and SCB float32[out], the largest magnitude of each row."""

    main_dtypes = ("I8",)
    unused = frozenset({"weight_format"})  # the order of bytes, which is that of rows in files

    def arrays(self, shape: tuple[int, ...]) -> dict[str, StoredArray]:
        return {
            "weight": StoredArray((shape,), self.main_dtypes),
            "SCB": StoredArray(((shape[0],),), ("F32",)),
        }

    def problem(self, shape: tuple[int, ...]) -> str:
        return ""

    def read(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantisedTensor:
        codes, scales = arrays["weight"], arrays["SCB"][:, None] / np.float32(_LARGEST)
        if (none := scales == 0).any():  # rows of zeros
            codes, scales = np.where(none, np.int8(0), codes), np.where(none, 1, scales)
        return QuantisedTensor(codes, scales.astype(np.float32), format="int8")


def read_bitsandbytes(fields: Fields) -> Quantisation:
    """Reads the settings of bitsandbytes.

    Raises:
      ConfigError: FP4, or codes that are stored in another dtype.
    """
    four, eight = (fields.take(f"load_in_{bits}bit", bool, False) for bits in (4, 8))
    if four == eight:
        raise ConfigError(
            f"{fields.source}: one of {fields.prefix}load_in_4bit and load_in_8bit must be true"
        )
    kind = fields.take("bnb_4bit_quant_type", str, "fp4")
    if four and kind != "nf4":
        raise fields.error("bnb_4bit_quant_type", "only nf4 is read")
    if fields.take("bnb_4bit_quant_storage", str, "uint8") != "uint8":
        raise fields.error("bnb_4bit_quant_storage", "only uint8 is read")
    plain = names_in(fields, "llm_int8_skip_modules")
    fields.finish(_NO_EFFECT)
    form = NF4Form() if four else LLMInt8Form()
    return Quantisation("bitsandbytes", ((("Linear",), form),), plain)
