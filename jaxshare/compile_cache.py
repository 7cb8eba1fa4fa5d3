"""JAX's persistent compilation cache: what one process has compiled, the next one reads.

It is on by default, in the user's cache folder. Models and commands switch it on; a program that
uses the core alone does so with `enable`.
"""

import logging
import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxshare.paths import cache_folder, check_folder, unwritable_folder

log = logging.getLogger("jaxshare.compile_cache")

VARIABLE = "JAXSHARE_COMPILE_CACHE"
OFF = "off"
_MAX_BYTES = 2 * 1024**3
"""Bytes that the folder may hold; what was used least recently is deleted first."""
_MIN_SECONDS = 0.2
"""Programs that compile faster are compiled again, rather than read."""

_decided = False


def enable(folder: str | os.PathLike | None = None) -> Path | None:
    """Switches the cache on, for all that this process compiles from here on.

    What was decided before stays as it is unless a folder is given: by an earlier call, or by what
    JAX itself was told, in the program or by JAX_COMPILATION_CACHE_DIR.

    Args:
      folder: that holds the programs, made if it is missing, or "off" for none. By default
        $JAXSHARE_COMPILE_CACHE, or else `compiled` in the user's cache folder.

    Returns:
      The folder, or None without one.

    Raises:
      ValueError: nothing can be written in the folder that was asked for. If nothing can be written
        in the user's cache folder, programs are not kept.
    """
    global _decided
    current = jax.config.jax_compilation_cache_dir
    if folder is None and (_decided or current):
        return Path(current) if current else None
    asked, option = folder, "the folder of compiled programs"
    if asked is None:
        asked, option = os.environ.get(VARIABLE) or None, VARIABLE
    if asked == OFF:
        target = None
    elif asked is not None:
        check_folder(option, asked)
        target = Path(asked)
    elif why := unwritable_folder(target := cache_folder() / "compiled"):
        log.info("compiled programs are not kept: %s: %s", target, why)
        target = None
    _decided = True
    if target is not None:
        jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)
    jax.config.update("jax_compilation_cache_dir", None if target is None else os.fspath(target))
    compilation_cache.reset_cache()  # JAX goes on with the former folder otherwise
    return target
