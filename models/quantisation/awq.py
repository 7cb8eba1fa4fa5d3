"""AWQ: codes of four bits in words along the outputs, as AutoAWQ's "gemm" version stores them.

Source: AutoAWQ 0.2.9, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxshare.models.config_fields import Fields
from jaxshare.models.quantisation.codes import as_stored_codes, as_stored_zeros
from jaxshare.models.quantisation.matching import Quantisation, names_in
from jaxshare.models.quantisation.stored import StoredArray, StoredForm, group_problem
from jaxshare.quantised import QuantisedTensor

_BITS, _IN_WORD = 4, 8
_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs whose codes a word has, those in low bits first."""

_NO_EFFECT = frozenset(
    {"backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse", "quant_method"}
)


@dataclasses.dataclass(frozen=True)
class AWQForm(StoredForm):
    """qweight and qzeros int32[in or groups, out / 8], scales [groups, out].

    Attributes:
      group: the inputs of a group; -1 for all of a row.
      has_zeros: codes have zero points.
    """

    group: int
    has_zeros: bool
    main = "qweight"
    main_dtypes = ("I32",)

    def arrays(self, shape: tuple[int, ...]) -> dict[str, StoredArray]:
        outputs, inputs = shape
        groups, words = -(-inputs // self._group(inputs)), -(-outputs // _IN_WORD)
        return {
            "qweight": StoredArray(((inputs, words),), self.main_dtypes),
            "qzeros": StoredArray(((groups, words),), ("I32",), is_optional=not self.has_zeros),
            "scales": StoredArray(((groups, outputs),)),
        }

    def problem(self, shape: tuple[int, ...]) -> str:
        outputs, inputs = shape
        if outputs % _IN_WORD:
            return f"words of {_IN_WORD} codes do not divide its {outputs} outputs"
        return group_problem(inputs, self._group(inputs), _BITS)

    def read(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantisedTensor:
        format, codes = as_stored_codes(_outputs(arrays["qweight"]), _BITS, self._group(shape[-1]))
        zeros = as_stored_zeros(_outputs(arrays["qzeros"]), _BITS) if "qzeros" in arrays else None
        scales = np.ascontiguousarray(arrays["scales"].T)
        return QuantisedTensor(codes, scales, zeros, format=format)

    def _group(self, inputs: int) -> int:
        return inputs if self.group == -1 else self.group


def _outputs(words: np.ndarray) -> np.ndarray:
    """The codes [out, rows] of words [rows, out / 8]."""
    turned = np.ascontiguousarray(words.T)
    codes = np.empty((words.shape[1], _IN_WORD, words.shape[0]), np.uint8)
    for place, output in enumerate(_OUTPUTS):
        codes[:, output] = (turned >> (_BITS * place)).astype(np.uint8) & 15
    return codes.reshape(-1, words.shape[0])


def read_awq(fields: Fields) -> Quantisation:
    """Reads the settings of AWQ.

    Raises:
      ConfigError: bits or a version that are not read here.
    """
    if fields.take("bits" if "bits" in fields.values else "w_bit", int, 4) != _BITS:
        raise fields.error("bits", "only 4 is read for AWQ, the one that AutoAWQ makes")
    if fields.take("version", str, "gemm").lower() != "gemm":
        raise fields.error(
            "version", "only gemm is read; convert the checkpoint to it with AutoAWQ"
        )
    name = "group_size" if "group_size" in fields.values else "q_group_size"
    form = AWQForm(read_group_size(fields, name), fields.take("zero_point", bool, True))
    plain = names_in(fields, "modules_to_not_convert")
    fields.finish(_NO_EFFECT)
    return Quantisation("awq", ((("Linear",), form),), plain)


def read_group_size(fields: Fields, name: str = "group_size") -> int:
    """Reads the inputs of a group: -1 for all of a row, or at least 1."""
    size = fields.take(name, int, 128)
    if size != -1 and size < 1:
        raise fields.error(name, "it must be at least 1, or -1 for all inputs of a row")
    return size
