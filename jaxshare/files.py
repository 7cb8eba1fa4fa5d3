"""Files that are written whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def whole_file(file: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file to write to, which takes its name when all is written or, where that fails, leaves what was there; a reader never sees half of
    it. Makes the folder.

    Args:
      file: its name.
      mode: "w" for text in UTF-8, "wb" for bytes.

    Raises:
      OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(mode, encoding=None if "b" in mode else "utf-8", dir=file.parent, delete=False) as whole:
        try:
            yield whole
            whole.close()
            os.replace(whole.name, file)
        except BaseException:
            os.unlink(whole.name)
            raise
