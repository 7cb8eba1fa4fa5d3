"""What commands ask about devices: over how many of them to spread the model, the caches and the
rows, and with which other processes."""

import argparse
import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.sharding import Mesh

_JOIN_SECONDS = 60
"""How long a process waits for the coordinator and for the others, at most."""
_LOST_SECONDS = 30
"""A process that has said nothing for so long is lost, and the others end."""


def add_arguments(
    parser: argparse.ArgumentParser, *, groups: str = "groups of completions"
) -> None:
    """--tensor, --kv and --data; `groups` are what runs side by side."""
    parser.add_argument(
        "--tensor",
        type=int,
        default=1,
        metavar="N",
        help="split heads, MLP and vocabulary over N devices (default 1)",
    )
    parser.add_argument(
        "--kv",
        type=int,
        default=1,
        metavar="N",
        help="split the tokens of the cache over N devices (default 1)",
    )
    parser.add_argument(
        "--data",
        type=int,
        default=1,
        metavar="N",
        help=f"run N {groups} side by side, each on devices of its own (default 1)",
    )


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Of commands that several processes, on one machine or on many, can run together."""
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="run together with other processes, which all give the same command and "
        "the address at which process 0 listens",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are")
    parser.add_argument(
        "--process",
        type=int,
        metavar="I",
        help="which one this is, from 0; process 0 alone prints and writes files",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="run together with the other processes of a SLURM or Open MPI job",
    )


def mesh_of(options: argparse.Namespace) -> "Mesh | None":
    """The mesh that was asked for, or None for one device.

    Raises:
      ValueError: sizes below 1, more devices than there are, fewer than all processes have, or data
        groups of several processes.
    """
    sizes = sizes_of(options)
    together = is_together(options)
    if together and sizes["data"] > 1:
        raise ValueError(
            f"--data is {sizes['data']}, but data groups of several processes have nothing to say "
            "to each other; run a command for each"
        )
    if not together and all(size == 1 for size in sizes.values()):
        return None
    # here, so that --help and wrong arguments answer at once
    from jaxshare.sharding import make_mesh

    return make_mesh(data=sizes["data"], tensor=sizes["tensor"], kv=sizes["kv"])


def sizes_of(options: argparse.Namespace) -> dict[str, int]:
    """How many devices were asked for along each axis of the mesh.

    Raises:
      ValueError: sizes below 1.
    """
    sizes = {"data": getattr(options, "data", 1), "tensor": options.tensor, "kv": options.kv}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"--{name} is {size}; it must be at least 1 device")
    return sizes


def is_together(options: argparse.Namespace) -> bool:
    """Whether other processes were asked for.

    Raises:
      ValueError: arguments that do not go together.
    """
    given = {name: getattr(options, name, None) for name in ("coordinator", "processes", "process")}
    there = [name for name, value in given.items() if value is not None]
    if getattr(options, "distributed", False):
        if there:
            raise ValueError(
                f"--distributed and --{there[0]} are both given; a SLURM or Open MPI job says by "
                "itself who takes part"
            )
        return True
    if there and len(there) < len(given):
        missing = next(name for name in given if name not in there)
        raise ValueError(
            f"--{there[0]} is given, but --{missing} is not; several processes need --coordinator, "
            "--processes and --process"
        )
    if there and not 0 <= options.process < options.processes:
        raise ValueError(
            f"--process is {options.process} and --processes {options.processes}; processes are "
            "numbered from 0"
        )
    return bool(there)


def speaks() -> bool:
    """Whether this process prints and writes files for all that run together."""
    import jax

    return jax.process_index() == 0


def together(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A command that several processes can run together: each computes its devices' part, and
    process 0 says what came out."""

    @functools.wraps(command)
    def run(options: argparse.Namespace) -> int:
        if not is_together(options):
            return command(options)
        join(options)
        with _quiet():
            return command(options)

    return run


def join(options: argparse.Namespace) -> None:
    """Joins the other processes, before anything else is done with JAX. From here on all end within
    a minute of one that is lost.

    Raises:
      ValueError: no coordinator that answers, others that do not come, or no job to ask.
    """
    if not options.distributed and options.process:
        _wait_for(options.coordinator, options.processes)
    import jax

    from jaxshare.models.config_fields import first_line

    known = (
        {}
        if options.distributed
        else {
            "coordinator_address": options.coordinator,
            "num_processes": options.processes,
            "process_id": options.process,
        }
    )
    try:
        jax.distributed.initialize(
            **known, initialization_timeout=_JOIN_SECONDS, heartbeat_timeout_seconds=_LOST_SECONDS
        )
    except (
        Exception
    ) as error:  # of many kinds, from an address that is none to a coordinator that does not answer
        do = (
            "start this in a SLURM or Open MPI job, or give --coordinator, --processes and "
            "--process"
            if options.distributed
            else f"start all {options.processes} processes within {_JOIN_SECONDS} seconds, with "
            "the address of process 0, HOST:PORT"
        )
        raise ValueError(
            "the other processes cannot be "
            f"joined{'' if options.distributed else f' at {options.coordinator}'} "
            f"({first_line(error)}); {do}"
        ) from error


def _wait_for(address: str, processes: int) -> None:
    """Until process 0 listens. JAX, which waits too, would end this process without a word that
    helps."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"--coordinator is {address!r}; it must be the host of process 0 and a free port "
            "there, such as 10.0.0.1:8476"
        )
    until = time.monotonic() + _JOIN_SECONDS
    while True:
        try:
            socket.create_connection(
                (host, int(port)), timeout=max(0.1, until - time.monotonic())
            ).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ValueError(
                    f"nobody answers at the coordinator's address, {address} ({error}); start all "
                    f"{processes} processes within {_JOIN_SECONDS} seconds, with the address of "
                    "process 0"
                ) from error
            time.sleep(0.2)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is printed but by process 0; errors and logs are."""
    if speaks():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
        yield
