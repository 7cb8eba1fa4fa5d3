"""The parts of a checkpoint beside its weights: generation settings, tokenizer, texts of workers."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxshare.models.config_fields import read_json
from jaxshare.models.generation_config import Generation
from jaxshare.models.gguf import tokenizer as gguf_tokenizer
from jaxshare.models.gguf.settings import sampling_of
from jaxshare.models.sources import Source
from jaxshare.models.tokenizer_files import read_tokenizer, tried

if TYPE_CHECKING:
    from jaxshare.models.tokenizer import Tokenizer


def generation_of(source: Source) -> Generation:
    """The stop tokens and sampling defaults of generation_config.json, or of a GGUF file."""
    file = source.place / "generation_config.json"
    if not file.is_file() and source.gguf:
        file, values = source.gguf.path, sampling_of(source.gguf)
    else:
        values = read_json(file) if file.is_file() else {}
    return Generation.from_json(values, source.settings.values, str(file))


def tokenizer_of(source: Source) -> "Tokenizer | Any | None":
    """The tokenizer of a folder, or else of its GGUF file; see `tokenizer_files.read_tokenizer`."""
    found, file = read_tokenizer(source.place), source.gguf
    if found is not None or file is None:
        return found
    return tried(functools.partial(gguf_tokenizer.tokenizer_of, file), file.path)


def workers_of(folder: Path) -> dict[str, Any] | None:
    """The contents of workers.json, or None for a folder without one."""
    file = folder / "workers.json"
    return read_json(file) if file.is_file() else None
