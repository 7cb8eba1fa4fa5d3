"""GPTQ: codes of four or eight bits in words along the inputs, as AutoGPTQ and GPTQModel store them.

Source: AutoGPTQ 0.7.1, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxshare.models.config_fields import Fields
from jaxshare.models.quantisation.awq import read_group_size
from jaxshare.models.quantisation.codes import (
    WORD,
    as_stored_codes,
    as_stored_zeros,
    order_of,
    unpacked,
)
from jaxshare.models.quantisation.matching import Quantisation, names_in
from jaxshare.models.quantisation.stored import StoredArray, StoredForm, group_problem
from jaxshare.quantised import QuantisedTensor

_FORMATS = ("gptq", "gptq_v2")
_NO_EFFECT = frozenset(
    {
        "act_group_aware",
        "backend",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "cache_examples_on_gpu",
        "damp_auto_increment",
        "damp_percent",
        "dataset",
        "desc_act",  # g_idx tells the order of inputs
        "device",
        "disable_exllama",
        "exllama_config",
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",  # the others have plain tensors
        "mse",
        "pad_token_id",
        "parallel_packing",
        "quant_method",
        "static_groups",
        "sym",  # qzeros tells it
        "tokenizer",
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
    }
)


@dataclasses.dataclass(frozen=True)
class GPTQForm(StoredForm):
    """qweight int32[in bits / 32, out], qzeros int32[groups, out bits / 32], scales [groups, out],
    and the group of each input, g_idx int32[in].

    Attributes:
      bits: of a code.
      group: the inputs of a group; -1 for all of a row.
      zeros_less: subtracted from zeros before they are stored: 1 in the first version of the form.
    """

    bits: int
    group: int
    zeros_less: int
    main = "qweight"
    main_dtypes = ("I32",)
    unused = frozenset({"bias"})  # zeros, for layers without one; `match_tensors` makes sure

    def arrays(self, shape: tuple[int, ...]) -> dict[str, StoredArray]:
        outputs, inputs = shape
        groups, in_word = -(-inputs // self._group(inputs)), WORD // self.bits
        zeros = (groups, -(-outputs // in_word))
        return {
            "qweight": StoredArray(((-(-inputs // in_word), outputs),), self.main_dtypes),
            "qzeros": StoredArray((zeros,), ("I32",)),
            "scales": StoredArray(((groups, outputs),)),
            "g_idx": StoredArray(((inputs,),), ("I32",), is_optional=True),
        }

    def problem(self, shape: tuple[int, ...]) -> str:
        outputs, inputs = shape
        for size, name in ((outputs, "outputs"), (inputs, "inputs")):
            if size * self.bits % WORD:
                return f"words of {WORD // self.bits} codes do not divide its {size} {name}"
        return group_problem(inputs, self._group(inputs), self.bits)

    def read(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantisedTensor:
        group = self._group(shape[-1])
        order = order_of(arrays["g_idx"], group) if "g_idx" in arrays else None
        codes = unpacked(arrays["qweight"].T, self.bits)
        codes = codes if order is None else codes[:, order]
        format, codes = as_stored_codes(codes, self.bits, group)
        zeros = unpacked(arrays["qzeros"], self.bits).T.astype(np.int16) + self.zeros_less
        # A zero of 0 is stored as the largest code in the first version.
        zeros = as_stored_zeros(zeros & ((1 << self.bits) - 1), self.bits)
        scales = np.ascontiguousarray(arrays["scales"].T)
        return QuantisedTensor(codes, scales, zeros, order=order, format=format)

    def _group(self, inputs: int) -> int:
        return inputs if self.group == -1 else self.group


def read_gptq(fields: Fields) -> Quantisation:
    """Reads the settings of GPTQ.

    Raises:
      ConfigError: bits or a form that are not read here.
    """
    bits = fields.take("bits", int)
    if bits not in (4, 8):
        raise fields.error("bits", "only 4 and 8 are read for GPTQ")
    for name in ("is_marlin_format", "lm_head"):
        if fields.take(name, bool, False) and name == "is_marlin_format":
            raise fields.error(name, "only the forms gptq and gptq_v2 are read")
    version = "gptq"
    for name in ("format", "checkpoint_format"):
        version = fields.take(name, str, version)
        if version not in _FORMATS:
            raise fields.error(name, f"only {' and '.join(_FORMATS)} are read")
    if fields.take("pack_dtype", str, "int32") != "int32":
        raise fields.error("pack_dtype", "only int32 is read")
    form = GPTQForm(bits, read_group_size(fields), int(version == "gptq"))
    plain = names_in(fields, "modules_to_not_convert")
    fields.finish(_NO_EFFECT)
    return Quantisation("gptq", ((("Linear",), form),), plain)
