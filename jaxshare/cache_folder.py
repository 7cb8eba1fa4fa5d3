"""The user's cache folder, where what was measured on a device is kept between runs."""

import json
import os
from pathlib import Path
from typing import Any

from jaxshare.files import whole_file


def cache_folder() -> Path:
    """$JAXSHARE_CACHE, or the folder that the system has for such things. It may not exist yet."""
    import platformdirs  # here, because only programs on a GPU or with a cost rule ask

    return Path(os.environ.get("JAXSHARE_CACHE") or platformdirs.user_cache_dir("jaxshare"))


def write_json(file: Path, data: Any) -> None:
    """Writes the whole file or, where that fails, leaves it as it was; a reader never sees half of
    it. Makes the folder.

    Raises:
      OSError: it cannot be written.
    """
    with whole_file(file) as whole:
        json.dump(data, whole, indent=2)
