"""Meshes of devices, of one process or of several, from the options of a command."""

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
"""The timeout for the coordinator and for the other processes."""
_LOST_SECONDS = 30
"""A process without a heartbeat for this long is lost, and the others end."""


def add_arguments(
    parser: argparse.ArgumentParser, *, groups: str = "groups of completions"
) -> None:
    """Adds --tensor, --expert, --kv and --data; `groups`: what runs side by side, for the help text."""
    parser.add_argument(
        "--tensor",
        type=int,
        default=1,
        metavar="N",
        help="split heads, MLP and vocabulary over N devices (default 1)",
    )
    parser.add_argument(
        "--expert",
        type=int,
        default=1,
        metavar="N",
        help="split a mixture's experts over N devices, which send tokens to each other, and heads "
        "and vocabulary as --tensor does (default 1)",
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
    """Adds the arguments of commands that several processes can run together."""
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="run together with other processes, which all give the same command and "
        "the address at which process 0 listens",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="the number of processes")
    parser.add_argument(
        "--process",
        type=int,
        metavar="I",
        help="the index of this one, from 0; process 0 alone prints and writes files",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="run together with the other processes of a SLURM or Open MPI job",
    )


def mesh_of(options: argparse.Namespace) -> "Mesh | None":
    """The mesh of a command's options, or None for one device.

    Raises:
      ValueError: sizes below 1, more devices than there are, fewer than all processes have, or data
        groups of several processes.
    """
    sizes = sizes_of(options)
    together = is_together(options)
    if together and sizes["data"] > 1:
        raise ValueError(
            f"--data is {sizes['data']}, but data groups of several processes do not "
            "communicate; run a command for each"
        )
    if not together and all(size == 1 for size in sizes.values()):
        return None
    # imported here, so that --help and argument errors are fast
    from jaxshare.sharding import make_mesh

    return make_mesh(**sizes)


def sizes_of(options: argparse.Namespace) -> dict[str, int]:
    """The number of devices along each axis of the mesh, from a command's options.

    Raises:
      ValueError: sizes below 1.
    """
    sizes = {
        "data": getattr(options, "data", 1),
        "expert": getattr(options, "expert", 1),
        "tensor": options.tensor,
        "kv": options.kv,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"--{name} is {size}; it must be at least 1 device")
    return sizes


def is_together(options: argparse.Namespace) -> bool:
    """True if the options name other processes.

    Raises:
      ValueError: options that contradict each other.
    """
    values = {
        name: getattr(options, name, None) for name in ("coordinator", "processes", "process")
    }
    given = [name for name, value in values.items() if value is not None]
    if getattr(options, "distributed", False):
        if given:
            raise ValueError(
                f"--distributed and --{given[0]} are both given; a SLURM or Open MPI job defines "
                "its processes itself"
            )
        return True
    if given and len(given) < len(values):
        missing = next(name for name in values if name not in given)
        raise ValueError(
            f"--{given[0]} is given, but --{missing} is not; several processes need --coordinator, "
            "--processes and --process"
        )
    if given and not 0 <= options.process < options.processes:
        raise ValueError(
            f"--process is {options.process} and --processes {options.processes}; processes are "
            "numbered from 0"
        )
    return bool(given)


def speaks() -> bool:
    """True in process 0, which prints and writes files for all that run together."""
    import jax

    return jax.process_index() == 0


def together(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Lets several processes run a command together.

    Each computes its devices' part, and process 0 prints the output.
    """

    @functools.wraps(command)
    def run(options: argparse.Namespace) -> int:
        if not is_together(options):
            return command(options)
        join(options)
        with _quiet():
            return command(options)

    return run


def join(options: argparse.Namespace) -> None:
    """Joins the other processes; must come before any other use of JAX.

    Once joined, all processes end within a minute after one is lost.

    Raises:
      ValueError: no answer of the coordinator, other processes that do not join in time, or no
        SLURM or Open MPI job.
    """
    if not options.distributed and options.process:
        _wait_for(options.coordinator, options.processes)
    import jax

    from jaxshare.models.config_fields import first_line

    settings = (
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
            **settings,
            initialization_timeout=_JOIN_SECONDS,
            heartbeat_timeout_seconds=_LOST_SECONDS,
        )
    except Exception as error:  # of many kinds: an invalid address, a silent coordinator
        advice = (
            "start this in a SLURM or Open MPI job, or give --coordinator, --processes and "
            "--process"
            if options.distributed
            else f"start all {options.processes} processes within {_JOIN_SECONDS} seconds, with "
            "the address of process 0, HOST:PORT"
        )
        raise ValueError(
            "the other processes cannot be "
            f"joined{'' if options.distributed else f' at {options.coordinator}'} "
            f"({first_line(error)}); {advice}"
        ) from error


def _wait_for(address: str, processes: int) -> None:
    """Waits until process 0 listens.

    JAX waits too, but then ends the process without a helpful message.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"--coordinator is {address!r}; it must be the host of process 0 and a free port "
            "there, such as 10.0.0.1:8476"
        )
    deadline = time.monotonic() + _JOIN_SECONDS
    while True:
        try:
            socket.create_connection(
                (host, int(port)), timeout=max(0.1, deadline - time.monotonic())
            ).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"the coordinator's address, {address}, does not answer ({error}); start all "
                    f"{processes} processes within {_JOIN_SECONDS} seconds, with the address of "
                    "process 0"
                ) from error
            time.sleep(0.2)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discards the standard output of all processes but 0; errors and logs stay."""
    if speaks():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as sink, contextlib.redirect_stdout(sink):
        yield
