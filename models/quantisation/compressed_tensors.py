"""compressed-tensors, as llm-compressor writes it: codes of four or eight bits in words, in int8 or in
FP8, with scales of a matrix, of outputs, of groups or of blocks.

Source: compressed-tensors 0.20.0, compressors/ and quantization/lifecycle/forward.py.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxshare.models.config_fields import Fields
from jaxshare.models.quantisation.codes import (
    WORD,
    as_stored_codes,
    as_stored_zeros,
    order_of,
    unpacked,
)
from jaxshare.models.quantisation.fp8 import group_of_blocks, read_block, scales_of_rows
from jaxshare.models.quantisation.matching import Quantisation, names_in
from jaxshare.models.quantisation.stored import FLOATS, StoredArray, StoredForm, group_problem
from jaxshare.quantised import QuantisedTensor

_UNUSED = frozenset(
    {
        "input_scale",
        "input_zero_point",
        "input_g_idx",
        "k_scale",
        "k_zero_point",
        "output_scale",
        "output_zero_point",
        "v_scale",
        "v_zero_point",
    }
)
_PACKED = "pack-quantized"
_FORMATS = {
    _PACKED: (("int", 4), ("int", 8)),
    "int-quantized": (("int", 8),),
    "float-quantized": (("float", 8),),
    "naive-quantized": (("int", 8), ("float", 8)),
}
"""The types and bits of weights in each format."""
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclasses.dataclass(frozen=True)
class _Scales:
    """The numbers that share a scale.

    Attributes:
      strategy: "tensor", "channel", "group" or "block".
      group: the inputs of a group.
      block: the outputs and inputs of a block.
    """

    strategy: str
    group: int = 0
    block: tuple[int, int] | None = None

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes that scales may have."""
        outputs, inputs = shape
        if self.strategy == "tensor":
            return (), (1,), (1, 1)
        if self.strategy == "channel":
            return (outputs, 1), (outputs,)
        if self.block is not None:
            return (tuple(-(-n // size) for n, size in zip(shape, self.block, strict=True)),)
        return ((outputs, -(-inputs // self.group)),)

    def of_inputs(self, inputs: int) -> int:
        """The inputs of a row that share a scale."""
        if self.block is not None:
            return group_of_blocks(inputs, self.block[1])
        return self.group if self.strategy == "group" else inputs

    def by_row(self, scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Scales, or zeros, [out, groups]."""
        return scales if self.strategy == "group" else scales_of_rows(scales, shape, self.block)


@dataclasses.dataclass(frozen=True)
class PackedForm(StoredForm):
    """weight_packed int32[out, in bits / 32], weight_scale, and with zero points those of groups
    int32[out bits / 32, groups].

    Attributes:
      bits: of a code.
      scales: the numbers that share one.
      has_zeros: codes have zero points.
    """

    bits: int
    scales: _Scales
    has_zeros: bool
    main = "weight_packed"
    main_dtypes = ("I32",)
    unused = _UNUSED

    def arrays(self, shape: tuple[int, ...]) -> dict[str, StoredArray]:
        outputs, inputs = shape
        in_word = WORD // self.bits
        zeros, dtypes = self.scales.shapes(shape), ("I8",)
        if self._packs_zeros:
            zeros, dtypes = tuple((-(-rows // in_word), *more) for rows, *more in zeros), ("I32",)
        arrays = {
            "weight_packed": StoredArray(((outputs, -(-inputs // in_word)),), self.main_dtypes),
            "weight_scale": StoredArray(self.scales.shapes(shape)),
            "weight_shape": StoredArray(((2,),), ("I64", "I32"), is_optional=True),
            "weight_g_idx": StoredArray(((inputs,),), ("I32",), is_optional=True),
        }
        return arrays | (
            {"weight_zero_point": StoredArray(zeros, dtypes)} if self.has_zeros else {}
        )

    def problem(self, shape: tuple[int, ...]) -> str:
        return group_problem(shape[-1], self.scales.of_inputs(shape[-1]), self.bits)

    def read(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantisedTensor:
        inputs = shape[-1]
        if "weight_shape" in arrays and tuple(arrays["weight_shape"]) != shape:
            raise ValueError(
                f"its weight_shape is {tuple(map(int, arrays['weight_shape']))}, not {shape}"
            )
        group = self.scales.of_inputs(inputs)
        groups = arrays.get("weight_g_idx")
        order = None if groups is None else order_of(groups, group)
        codes = np.ascontiguousarray(unpacked(arrays["weight_packed"], self.bits)[:, :inputs])
        codes = codes if order is None else codes[:, order]
        format, codes = as_stored_codes(codes, self.bits, group)
        zeros = self._zeros(arrays["weight_zero_point"], shape) if self.has_zeros else None
        scales = self.scales.by_row(arrays["weight_scale"], shape)
        return QuantisedTensor(codes, scales, zeros, order=order, format=format)

    @property
    def _packs_zeros(self) -> bool:
        return self.scales.strategy in ("group", "channel")

    def _zeros(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
        if self._packs_zeros:
            words = stored.reshape(stored.shape[0], -1).T
            zeros = unpacked(words, self.bits)[:, : shape[0]].T
        else:  # those of codes with a sign
            zeros = stored.astype(np.int16) + (1 << (self.bits - 1))
        return as_stored_zeros(np.ascontiguousarray(self.scales.by_row(zeros, shape)), self.bits)


@dataclasses.dataclass(frozen=True)
class UnpackedForm(StoredForm):
    """weight int8[out, in] or e4m3[out, in], weight_scale, and with zero points int8 of its shape.

    Attributes:
      format: of a `QuantisedTensor`, "int8" or "fp8".
      scales: the numbers that share one.
      has_zeros: codes have zero points.
    """

    format: str
    scales: _Scales
    has_zeros: bool
    main_dtypes = ("I8", "F8_E4M3")
    unused = _UNUSED

    def arrays(self, shape: tuple[int, ...]) -> dict[str, StoredArray]:
        scales = self.scales.shapes(shape)
        arrays = {
            "weight": StoredArray((shape,), ("I8",) if self.format == "int8" else ("F8_E4M3",)),
            "weight_scale": StoredArray(scales, FLOATS),
            "weight_g_idx": StoredArray(((shape[-1],),), ("I32",), is_optional=True),
        }
        kinds = ("I8",) if self.format == "int8" else (*FLOATS, "F8_E4M3", "I8")
        zeros = StoredArray(scales, kinds, is_optional=not self.has_zeros)
        return arrays | {"weight_zero_point": zeros}

    def problem(self, shape: tuple[int, ...]) -> str:
        return group_problem(shape[-1], self.scales.of_inputs(shape[-1]), 8)

    def read(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantisedTensor:
        codes, groups = arrays["weight"], arrays.get("weight_g_idx")
        group = self.scales.of_inputs(shape[-1])
        order = None if groups is None else order_of(groups, group)
        zeros = arrays.get("weight_zero_point")
        if zeros is not None and not zeros.astype(np.float32).any():
            zeros = None  # of symmetric codes, which some files have
        if zeros is not None and self.format == "fp8":
            raise ValueError("its weight_zero_point is not 0, but codes in FP8 have no zero points")
        return QuantisedTensor(
            codes if order is None else np.ascontiguousarray(codes[:, order]),
            self.scales.by_row(arrays["weight_scale"], shape),
            None if zeros is None else self.scales.by_row(zeros, shape),
            order=order,
            format=self.format,
        )


_NO_EFFECT = frozenset(
    {
        "global_compression_ratio",
        "kv_cache_scheme",  # caches have the model's dtype
        "quant_method",
        "quantization_status",
        "run_compressed",
        "version",
    }
)
_NO_EFFECT_ON_WEIGHTS = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})


def read_compressed_tensors(fields: Fields) -> Quantisation:
    """Reads the settings of compressed-tensors.

    Raises:
      ConfigError: a format or a scheme that is not read here.
    """
    format = fields.take("format", str, "dense")
    groups = fields.take("config_groups", dict)
    sparsity = fields.inside("sparsity_config")
    if sparsity is not None and sparsity.take("format", str, "dense") != "dense":
        raise sparsity.error("format", "sparse weights are not read, only dense")
    forms = []
    for name in groups:
        prefix = f"{fields.prefix}config_groups."
        group = Fields(groups, fields.source, prefix).inside(name)
        if group is None:
            raise Fields(groups, fields.source, prefix).error(name, "it must be a scheme")
        forms.append(_read_group(group, format, fields))
    plain = names_in(fields, "ignore")
    fields.finish(_NO_EFFECT)
    return Quantisation("compressed-tensors", tuple(forms), plain, is_exact=True)


def _read_group(group: Fields, format: str, settings: Fields) -> tuple[tuple[str, ...], StoredForm]:
    """Reads the targets of a scheme and the form of their weights; activations stay as they are.

    Args:
      group: the scheme.
      format: that of schemes without one of their own.
      settings: those that `format` is of.
    """
    targets = names_in(group, "targets")
    own = group.take("format", str, None)
    format = own or format
    for name in ("input_activations", "output_activations"):
        group.take(name, dict, None)
    weights = group.inside("weights")
    if weights is None:
        raise group.error("weights", "schemes without quantised weights are not read")
    kind, bits = weights.take("type", str, "int"), weights.take("num_bits", int, 8)
    if format not in _FORMATS:
        named = settings if own is None else group
        raise named.error("format", f"the formats that are read are {', '.join(_FORMATS)}")
    if (kind, bits) not in _FORMATS[format]:
        kinds = " or ".join(f"{kind} with num_bits {bits}" for kind, bits in _FORMATS[format])
        raise weights.error("num_bits", f"weights in {format} must be of type {kinds}, not {kind}")
    if weights.take("dynamic", bool, False):
        raise weights.error("dynamic", "weights must have scales that are stored")
    weights.given("actorder")  # weight_g_idx tells it
    scales, symmetric = _read_scales(weights), weights.take("symmetric", bool, True)
    weights.finish(_NO_EFFECT_ON_WEIGHTS)
    group.finish()
    if format == _PACKED:
        return targets, PackedForm(bits, scales, not symmetric)
    return targets, UnpackedForm("int8" if kind == "int" else "fp8", scales, not symmetric)


def _read_scales(weights: Fields) -> _Scales:
    group = weights.take("group_size", int, None)
    default = "tensor" if group is None else "channel" if group == -1 else "group"
    strategy = weights.take("strategy", str, default)
    if strategy not in _STRATEGIES:
        raise weights.error("strategy", f"only {', '.join(_STRATEGIES)} are read")
    if strategy == "group" and (group is None or group < 1):
        raise weights.error("group_size", "groups must have at least 1 input")
    block = read_block(weights, "block_structure")
    if strategy == "block" and block is None:
        raise weights.error("block_structure", "blocks must have a size")
    return _Scales(strategy, group or 0, block if strategy == "block" else None)
