"""What every command asks about devices: over how many of them to spread the model, the caches and the rows."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.sharding import Mesh


def add_arguments(parser: argparse.ArgumentParser, *, data: bool = True) -> None:
    """--tensor, --kv and --data; without `data` for what is one group of rows."""
    parser.add_argument("--tensor", type=int, default=1, metavar="N", help="split heads, MLP and vocabulary over N devices (default 1)")
    parser.add_argument("--kv", type=int, default=1, metavar="N", help="split the tokens of the cache over N devices (default 1)")
    if data:
        parser.add_argument("--data", type=int, default=1, metavar="N", help="run N groups of completions side by side, each on devices of "
                            "its own (default 1)")


def mesh_of(options: argparse.Namespace) -> "Mesh | None":
    """The mesh that was asked for, or None for one device.

    Raises:
      ValueError: sizes below 1, or more devices than there are.
    """
    sizes = {"data": getattr(options, "data", 1), "tensor": options.tensor, "kv": options.kv}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"--{name} is {size}; it must be at least 1 device")
    if all(size == 1 for size in sizes.values()):
        return None
    from jaxshare.sharding import make_mesh  # here, so that --help and wrong arguments answer at once

    return make_mesh(**sizes)
