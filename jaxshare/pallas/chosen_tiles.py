"""The tiles of the GPU kernels for a call: those of a context, those measured, or the table's.

`jaxshare tune` measures them on the user's GPU.
"""

import dataclasses
import functools
import json
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxshare.layout import bucket
from jaxshare.pallas.device import Device
from jaxshare.pallas.tiles import (
    KINDS,
    KernelConfig,
    MosaicTiles,
    TritonTiles,
    built_in_mosaic,
    built_in_triton,
    fits,
)
from jaxshare.paths import cache_folder

VERSION = 2
"""The version of the file of measured tiles. To be raised when kernels change so much that old
measurements are void."""

# JAX caches traces and programs by the value of such a context, so that a jitted function is
# traced again for other tiles.
_in_use = jax.make_user_context(None)


def use_tiles(tiles: KernelConfig | None) -> AbstractContextManager[None]:
    """A context in which kernels of the tiles' backend are traced with them.

    None changes nothing.
    """
    return _in_use(tiles)


def choose_mosaic(
    device: Device, head_dim: int, group: int, queries: int, dtype: jax.typing.DTypeLike
) -> MosaicTiles:
    """The mosaic_gpu backend's tiles for a call.

    Those of `use_tiles`, or those measured for such calls, or the table's.

    Args:
      device: the GPU that the call will run on.
      head_dim: D.
      group: G, query heads of a kv head.
      queries: R * T * G.
      dtype: of the cache, or of its codes.

    Raises:
      NotImplementedError: a head dim that is not in the table.
    """
    dtype = jnp.dtype(dtype)
    tiles = _override(
        device, Key("mosaic_gpu", head_dim, group, bucket(queries), dtype.name), queries
    )
    if isinstance(tiles, MosaicTiles):
        return tiles
    return built_in_mosaic(device, head_dim, queries, codes=dtype.itemsize == 1)


def choose_triton(
    device: Device, head_dim: int, group: int, queries: int, dtype: jax.typing.DTypeLike
) -> TritonTiles:
    """The triton backend's tiles for a call.

    Arguments, order and errors are those of `choose_mosaic`.
    """
    dtype = jnp.dtype(dtype)
    tiles = _override(device, Key("triton", head_dim, group, bucket(queries), dtype.name), queries)
    if isinstance(tiles, TritonTiles):
        return tiles
    return built_in_triton(device, head_dim, queries, codes=dtype.itemsize == 1)


def _override(device: Device, key: "Key", queries: int) -> KernelConfig | None:
    if isinstance(_in_use.value, KINDS[key.backend]):
        return _in_use.value
    measured = read_tiles(tiles_file()).get(device.kind, {})
    near = (measured.get(key) for key in key.nearest())
    codes = jnp.dtype(key.dtype).itemsize == 1
    call = device, key.head_dim, queries
    return next((tiles for tiles in near if tiles and fits(tiles, *call, codes=codes)), None)


@dataclasses.dataclass(frozen=True)
class Key:
    """The kind of calls that tiles were measured for; `queries` is a bucket."""

    backend: str
    head_dim: int
    group: int
    queries: int
    dtype: str

    def nearest(self) -> Iterator["Key"]:
        """This key, and those of half and twice as many queries.

        Their tiles are used where this one was not measured.
        """
        for queries in (self.queries, self.queries // 2, self.queries * 2):
            yield dataclasses.replace(self, queries=queries)


Measured = dict[str, dict[Key, KernelConfig]]
"""Tiles by device kind and key."""


def tiles_file() -> Path:
    """The file of measured tiles."""
    return cache_folder() / "tiles.json"


@functools.cache
def read_tiles(file: Path) -> Measured:
    """The measured tiles in the file, none if it does not exist.

    A file is read once in a process, until `read_tiles.cache_clear()`. A file that cannot be read,
    or is of another version, gives a warning and is ignored.
    """
    try:
        return decode_tiles(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(
            f"the tiles in {file} cannot be read ({error}); built-in ones are used until `jaxshare "
            "tune` writes it again",
            stacklevel=2,
        )
        return {}


def encode_tiles(measured: Measured) -> dict[str, Any]:
    """The tiles as plain data, for `decode_tiles`."""
    return {
        "version": VERSION,
        "devices": {
            kind: [
                {**dataclasses.asdict(key), "tiles": dataclasses.asdict(tiles)}
                for key, tiles in entries.items()
            ]
            for kind, entries in measured.items()
        },
    }


def decode_tiles(text: str) -> Measured:
    """The tiles from the JSON of `encode_tiles`.

    Raises:
      ValueError: text that is no such JSON, or of another version.
    """
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("version") != VERSION:
        version = data.get("version") if isinstance(data, dict) else None
        raise ValueError(f"its version is {version!r}, not {VERSION}")
    try:
        return {
            kind: dict(map(_decode_entry, entries)) for kind, entries in data["devices"].items()
        }
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"an entry is missing or wrong: {type(error).__name__} {error}") from error


def _decode_entry(entry: dict[str, Any]) -> tuple[Key, KernelConfig]:
    entry = dict(entry)
    tiles = entry.pop("tiles")
    return Key(**entry), KINDS[entry["backend"]](**tiles)
