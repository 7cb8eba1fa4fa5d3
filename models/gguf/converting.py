"""A GGUF file as a folder in Orbax form."""

from pathlib import Path
from typing import Any

from jaxshare.models import orbax_io
from jaxshare.models.gguf import params
from jaxshare.models.gguf.settings import sampling_of
from jaxshare.models.loading import outline
from jaxshare.models.model_folder import check_target, new_folder, write_settings
from jaxshare.models.sources import Source, opened
from jaxshare.models.tokenizer_files import read_tokenizer


def convert_gguf(source: Path, target: Path) -> dict[str, Any]:
    """Writes the model of a GGUF file in Orbax form.

    Codes and scales are those that `load` makes of the file, and plain tensors keep their dtype and
    their bits. Settings and the tokenizer come from the folder of the file, or else its metadata.

    Args:
      source: the file, or a folder with one.
      target: a folder that does not exist yet.

    Returns:
      A summary, as that of `orbax_io.convert`.

    Raises:
      ImportError, ConfigError, CheckpointError: as `load`.
      ValueError: a target that exists, or a folder that cannot be made for it.
      WriteError: the target cannot be written; nothing of it is left.
    """
    check_target(target)
    found = opened(source)
    assert found.gguf is not None
    places = params.match(found.gguf, found.config)
    with new_folder(source, target) as partial:
        _write_settings(found, partial)
        tokenizer = None if read_tokenizer(partial) else outline(source).tokenizer
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        tensors = params.read_stored(found.gguf, places)
        sizes = orbax_io.write_orbax(partial, tensors, found.config)
    return {"form": "orbax", "tensors": len(sizes), "bytes": sum(sizes)}


def _write_settings(source: Source, folder: Path) -> None:
    """Writes config.json and generation_config.json, as far as they are not there."""
    assert source.gguf is not None
    dtype = {"dtype": params.stored_dtype(source.gguf).name}
    named = {"torch_dtype", "dtype"} & source.settings.values.keys()
    write_settings(folder / "config.json", {**({} if named else dtype), **source.settings.values})
    file = folder / "generation_config.json"
    if not file.exists() and (sampling := sampling_of(source.gguf)):
        write_settings(file, sampling)
