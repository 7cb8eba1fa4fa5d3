"""Files that are written whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def whole_file(file: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file to write to, which takes its name when all is written and on the disk or, where that fails, leaves what was there; a reader
    never sees half of it. Makes the folder.

    Args:
      file: its name; of a link, that of what it leads to.
      mode: "w" for text in UTF-8, "wb" for bytes.

    Raises:
      OSError: it cannot be written.
    """
    file = Path(os.path.realpath(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")  # of its own: several processes may write one file
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as whole:
            yield whole
            whole.flush()
            os.fsync(whole.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
