"""Where the files of a model are, and what its settings say."""

import dataclasses
import os
import re
from pathlib import Path

from jaxshare.models import orbax_io
from jaxshare.models.config import ModelConfig
from jaxshare.models.config_fields import ConfigError, Fields, first_line, read_json
from jaxshare.models.gguf import file as gguf_file
from jaxshare.models.gguf.settings import config_of

EMBEDDED = Path(__file__).parent / "embedded"
"""The folder of the small model that comes with the package."""
FILES = [
    "*.json",
    "model*.safetensors",
    "*.jinja",
    "tokenizer*",
    "merges.txt",
    "vocab.txt",
    "*.model",
]
"""Patterns of the files that are fetched from the hub."""
FILES_WITHOUT_WEIGHTS = [pattern for pattern in FILES if "safetensors" not in pattern]


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint whose settings were read.

    Attributes:
      place: its folder, or a GGUF file that is there alone.
      settings: those of config.json, or what they would be.
      config: the model that they describe.
      gguf: the file with the weights, if they are in GGUF.
    """

    place: Path
    settings: Fields
    config: ModelConfig
    gguf: gguf_file.GGUFFile | None = None

    @property
    def dtype_name(self) -> str | None:
        """The name of the dtype in the settings, such as "bfloat16", if they have one."""
        named = self.settings.given("dtype") or self.settings.given("torch_dtype")
        return None if named is None else str(named).removeprefix("torch.")


def opened(place: Path) -> Source:
    """Reads the settings of a checkpoint: config.json, but in a GGUF file those of its own if there
    is none that describes a model."""
    found = None if orbax_io.is_checkpoint(place) else gguf_file.find(place)
    file = None if found is None else gguf_file.read_header(found)
    named = place / "config.json"
    if file is None:
        return Source(place, Fields(read_json(named), str(named)), ModelConfig.from_json(place))
    if named.is_file() and (values := read_json(named)).get("architectures"):
        return Source(place, Fields(values, str(named)), ModelConfig.from_json(place), file)
    values = config_of(file)
    try:
        config = ModelConfig.from_json(values)
    except ConfigError as error:
        raise ConfigError(f"{file.path}, in the words of config.json: {error}") from error
    return Source(place, Fields(values, str(file.path)), config, file)


def described(name: str | os.PathLike) -> Source:
    """Reads the settings of a checkpoint of which config.json alone is fetched from the hub.

    Args:
      name: a folder, a GGUF file, a hub id or "embedded".

    Raises:
      FileNotFoundError: there is no such model.
      ConfigError: it is not supported, or config.json is no JSON object.
    """
    return opened(find(name, None, ["config.json"]))


def local_folder(name: str | os.PathLike) -> Path:
    """Returns the local folder that a model's name refers to, which need not exist.

    "embedded" is the model in the package.
    """
    return EMBEDDED if name == "embedded" else Path(name)


def find(path: str | os.PathLike, revision: str | None, files: list[str]) -> Path:
    """Returns the folder of a model, or its GGUF file; fetches the files of one of the hub.

    Raises:
      FileNotFoundError: there is none.
    """
    folder = local_folder(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file() and gguf_file.find(folder) is None:
            raise FileNotFoundError(
                f"{folder} has no config.json: a model folder holds config.json and "
                "model.safetensors, as in Hugging Face checkpoints, or one GGUF file"
            )
        return folder
    if gguf_file.find(folder) is not None:
        return folder
    if folder.exists():
        raise FileNotFoundError(
            f"{folder} is a file: give the folder that holds config.json and the weights, or a "
            "file that ends in .gguf"
        )
    name = os.fspath(path)
    if name.endswith(".gguf"):
        raise FileNotFoundError(
            f"there is no file {name}: give a GGUF file that exists, or a folder with one"
        )
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", name):
        raise FileNotFoundError(
            f"there is no model folder {name}: give a folder with config.json and "
            "model.safetensors, a GGUF file, a hub id such as Qwen/Qwen3-0.6B, or `embedded` for the model that "
            "comes with jaxshare"
        )
    import huggingface_hub  # here, because most programs do not use the hub

    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=files)
        )
    # Types differ between versions: no network, no such repository or revision, no access.
    except Exception as error:
        at = f" at revision {revision}" if revision else ""
        raise FileNotFoundError(
            f"there is no model folder {name}, and the hub did not give a model of this name{at} "
            f"({first_line(error)}): give an existing folder, or check the name, the network and "
            "the access rights"
        ) from error
