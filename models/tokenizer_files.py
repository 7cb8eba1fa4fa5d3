"""The tokenizer of a checkpoint."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxshare.extras import MissingExtraError
from jaxshare.models.config_fields import ConfigError, first_line

if TYPE_CHECKING:
    from jaxshare.models.tokenizer import Tokenizer

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def read_tokenizer(folder: Path) -> "Tokenizer | Any | None":
    """Reads the tokenizer of a folder, with its chat template; None for a folder without one.

    Returns:
      A `Tokenizer` for a folder with a tokenizer.json; else what transformers makes of the files.

    Raises:
      ValueError: one that cannot be read.
      MissingExtraError: one without a tokenizer.json, where transformers is not installed.
    """
    found = [name for name in _FILES if (folder / name).is_file()]
    if not found:
        return None

    def read() -> Any:
        if found[0] == "tokenizer.json":
            from jaxshare.models.tokenizer import of_folder  # here, because it takes a moment

            return of_folder(folder)
        try:
            from transformers import AutoTokenizer  # here, because it takes seconds
        except ImportError as error:
            raise MissingExtraError(
                f"the tokenizer in {folder} is {found[0]} without a tokenizer.json, which "
                "transformers reads",
                "transformers",
            ) from error
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    return tried(read, folder)


def tried(make: "Callable[[], Tokenizer | Any | None]", source: Path) -> "Tokenizer | Any | None":
    """Returns the tokenizer that a function makes, if it can be used.

    Args:
      make: the function; it may return None.
      source: the folder or file that it reads, for messages.

    Raises:
      ValueError: there is a tokenizer that cannot be read.
    """
    try:
        # On its first import it advises to install PyTorch, which is not needed here.
        with environment(TRANSFORMERS_NO_ADVISORY_WARNINGS="1"):
            tokenizer = make()
        if tokenizer is None:
            return None
        tokenizer.encode("a", verbose=False)  # settings of wrong types show only here
        template = tokenizer.chat_template
        texts = [*template.values()] if isinstance(template, dict) else [template]
        if not all(text is None or isinstance(text, str) for text in texts):
            raise ValueError("its chat_template is not a text")
        return tokenizer
    except (ConfigError, MissingExtraError):
        raise
    # Many types, from a malformed file to a missing library; a panic of Rust is no Exception.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"the tokenizer in {source} cannot be read ({first_line(error)}); give a "
            "tokenizer.json as the tokenizers library writes it, or no tokenizer files at all"
        ) from error


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets environment variables for the duration of a with statement, on one thread."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
