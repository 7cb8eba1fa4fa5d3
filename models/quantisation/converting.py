"""The folder of a quantised model, made of that of a plain one."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from jaxshare.models import orbax_io
from jaxshare.models.config import ModelConfig
from jaxshare.models.config_fields import read_json
from jaxshare.models.model_folder import check_folders, new_folder, write_settings
from jaxshare.models.quantisation.compressed_form import (
    check_form,
    quantization_config,
    stored_tensors_of,
)
from jaxshare.models.quantisation.making import Maker, Making, Text
from jaxshare.models.tensor_names import expected_tensors

HUGGING_FACE, ORBAX = "huggingface", "orbax"
FORMS = (HUGGING_FACE, ORBAX)
_SETTING = "quantization_config"


def convert_quantised(
    source: Path, target: Path, making: Making, form: str, text: Text | None = None
) -> dict[str, Any]:
    """Writes a quantised model, layer by layer.

    Args:
      source: a folder of a plain model in either form.
      target: a folder that does not exist yet.
      making: how matrices are quantised.
      form: "huggingface" for safetensors in the form of compressed-tensors, which other programs
        read, or "orbax".
      text: by which scales are chosen and the loss is measured; None to do without.

    Returns:
      A summary: "form", "tensors" and "bytes" as `orbax_io.convert`; "quantize", "group", "zeros"
      and "embeddings", the settings; "matrices", how many are quantised; "plain", the names of those
      that are not because no group divides their inputs; "bits" for each number of the model; and
      "perplexity", None without a text: of the held-out part of it, "tokens", "before", "after", and
      "change" as a part of "before".

    Raises:
      FileNotFoundError, CheckpointError: see `jaxshare.models.load`.
      ValueError: a source that is quantised, groups that divide no matrix, a model that has no such
        form, or a target that exists.
      WriteError: the target cannot be written; nothing of it is left.
    """
    check_folders(source, target)
    check_plain(source)
    config = ModelConfig.from_json(source)
    expected = expected_tensors(config)
    if form == HUGGING_FACE:
        check_form(expected.values())
    with orbax_io.plain_parameters(source, config) as read:
        maker = Maker(config, making, text, read, expected)
        with new_folder(source, target) as partial:
            if form == ORBAX:
                sizes = orbax_io.write_orbax(partial, maker.parameters(), config)
            else:
                tensors = stored_tensors_of(expected, maker.parameters())
                sizes = orbax_io.write_safetensors(partial, tensors)
                _configure(partial / "config.json", quantization_config(config, expected, making))
    numbers = sum(math.prod(tensor.shape) for tensor in expected.values())
    return {
        "form": form,
        "tensors": len(sizes),
        "bytes": sum(sizes),
        "quantize": making.rounding.format,
        "group": making.rounding.group,
        "zeros": making.rounding.zeros,
        "embeddings": making.embeddings and making.embeddings.format,
        "matrices": maker.matrices,
        "plain": maker.plain,
        "bits": round(8 * sum(sizes) / numbers, 3),
        "perplexity": maker.loss
        and {
            **dataclasses.asdict(maker.loss),
            "change": maker.loss.after / maker.loss.before - 1,
        },
    }


def check_plain(source: Path) -> None:
    """Raises ValueError for a model that is quantised already, as its config.json says."""
    settings = read_json(source / "config.json")
    found = settings.get(_SETTING) or (settings.get("text_config") or {}).get(_SETTING)
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise ValueError(
            f"{source} is quantised already ({method}), and quantising it again would lose more; "
            "give the model that it was made from"
        )


def _configure(file: Path, settings: dict[str, Any]) -> None:
    """Adds the settings of quantised weights to a config.json."""
    write_settings(file, {**read_json(file), _SETTING: settings})
