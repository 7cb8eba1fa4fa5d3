"""Reading `quantization_config` of a config.json."""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from jaxshare.models.config_fields import Fields, read_json
from jaxshare.models.quantisation.awq import read_awq
from jaxshare.models.quantisation.bitsandbytes import read_bitsandbytes
from jaxshare.models.quantisation.compressed_tensors import read_compressed_tensors
from jaxshare.models.quantisation.fp8 import read_fp8
from jaxshare.models.quantisation.gptq import read_gptq
from jaxshare.models.quantisation.matching import Quantisation

_NAME = "quantization_config"

METHODS: Mapping[str, Callable[[Fields], Quantisation]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "bitsandbytes": read_bitsandbytes,
}
"""The readers of the settings of each method, by its name in config.json."""


def read_quantisation(fields: Fields, others: Collection[str] = ()) -> Quantisation | None:
    """Reads the settings of quantised weights.

    Args:
      fields: of a config.json.
      others: methods whose tensors the model's family reads without settings.

    Returns:
      None where weights are plain, or quantised with one of `others`.

    Raises:
      ConfigError: an unknown method, or settings that are not read here.
    """
    settings = fields.inside(_NAME)
    if settings is None or settings.values.get("quant_method") in others:
        return None
    method = settings.take("quant_method", str)
    if method not in METHODS:
        raise settings.error(
            "quant_method",
            f"quantised weights of this method are not read; those that are: {', '.join(METHODS)}. "
            "A checkpoint in bfloat16 or float16 will do",
        )
    return METHODS[method](settings)


def quantisation_of(folder: str | os.PathLike) -> Quantisation | None:
    """Reads the settings of quantised weights of a folder whose configuration has been checked."""
    file = Path(folder) / "config.json"
    settings = read_json(file)
    found = settings.get(_NAME) or (settings.get("text_config") or {}).get(_NAME)
    if not found or found["quant_method"] not in METHODS:
        return None
    return read_quantisation(Fields({_NAME: found}, str(file)))
