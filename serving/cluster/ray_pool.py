"""Fleets: independent pieces of work on replicas of a model, each an actor on a Ray cluster. Losing
a node loses nothing.

    with RayPool("local", replicas=2) as fleet:
        fleet.start(make, most=len(pieces))
        for result in fleet.run(pieces):
            ...

`make` runs once in the process of every replica and gives what does a piece: a generator of keys
and values. These come to the caller as they are made. A piece whose replica died is done again on
another one, which is told what has arrived; nothing arrives twice. So the work decides what a key
is, and the fleet neither knows models nor what is done with them.
"""

import argparse
import collections
import contextlib
import dataclasses
import logging
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxshare.models.config_fields import first_line
from jaxshare.models.loading import environment
from jaxshare.serving.cluster.process_mesh import sizes_of

Work = Callable[[Any, Collection[Hashable]], Iterator[tuple[Hashable, Any]]]
"""Does a piece: yields keys and values. Its second argument are keys that have arrived already,
which need not be made again."""

_DEATHS = 3
"""Replicas that may die over one piece, or in a row while they start, before that is an error."""
_PROBE_SECONDS, _CONNECT_SECONDS, _ROOM_SECONDS = 5, 20, 120
"""How long an address may take to answer, how long the cluster behind it, and how long nodes may be
too busy for any replica."""
_STORE_BYTES = 128 * 2**20
"""Of the object store of a cluster that is started here: pieces and results are small."""
_SOCKET_FOLDER = 40
"""Characters of a folder in which the paths of Ray's sockets, 64 longer, stay below the 107 that
the system allows."""
_log = logging.getLogger("jaxshare.fleet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--ray and --replicas."""
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="run replicas of the model on a Ray cluster: one that is started on this machine, or "
        "that at `auto` (the one this machine is part of), HOST:PORT or ray://HOST:PORT",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="with --ray, how many replicas, each on --tensor x --kv devices "
        "(default: as many as the cluster's GPUs or, where it has none, CPUs give)",
    )


def of_options(options: argparse.Namespace) -> "RayPool | None":
    """The fleet that was asked for, not yet connected, or None.

    Raises:
      ValueError: arguments that do not go together, an address that is none, or Ray is not
        installed.
    """
    if options.ray is None:
        if options.replicas is not None:
            raise ValueError(
                "--replicas is given without --ray; add --ray for replicas on this machine, or use "
                "--data"
            )
        return None
    sizes = sizes_of(options)
    if sizes["data"] > 1:
        raise ValueError(
            f"--data is {sizes['data']}, but with --ray each replica is one group; give --replicas "
            "instead"
        )
    return RayPool(options.ray, replicas=options.replicas, devices=sizes["tensor"] * sizes["kv"])


class JobResult(NamedTuple):
    """What came of a piece: one of the values that the work yields.

    Attributes:
      piece: which one, as it was given.
      key, value: that the work has yielded.
      replica: number of the replica that made it.
    """

    piece: Any
    key: Hashable
    value: Any
    replica: int


class RayPool:
    """Replicas on a Ray cluster, as a context: entering connects, leaving ends the replicas and all
    that was started here.

    Attributes:
      replicas: how many there are to be; known once connected.
    """

    def __init__(self, address: str = "local", *, replicas: int | None = None, devices: int = 1):
        """Checks what can be checked without the cluster.

        Args:
          address: "local" starts a cluster on this machine, "auto" is the one that this machine is
            part of; else HOST:PORT of the head node or ray://HOST:PORT. A program that has called
            `ray.init` already stays connected as it is.
          replicas: how many; default as many as the nodes have room for.
          devices: of one replica: GPUs where the cluster has any and JAX_PLATFORMS is not cpu, or
            else CPUs.

        Raises:
          ValueError: a number below 1, an address that is none, or Ray is not installed.
        """
        for name, value in (("replicas", replicas), ("devices", devices)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if address not in ("local", "auto") and not re.fullmatch(
            r"(ray://)?[^/:\s]+:\d{1,5}", address
        ):
            raise ValueError(
                f"the Ray address is {address!r}; it must be auto, HOST:PORT or ray://HOST:PORT, "
                "or local for a cluster here"
            )
        _import_ray()
        self._address, self._wanted, self._devices = address, replicas, devices
        self._leaving = contextlib.ExitStack()
        self._held: dict[int, _ReplicaHandle] = {}
        self._hired = self._failed_starts = 0
        self._waiting: collections.deque[_Job] = collections.deque()
        self._make: Callable[[], Work] | None = None
        self._idle_since = 0.0
        self._gpus = False
        self.replicas = replicas or 0

    def __enter__(self) -> "RayPool":
        """Connects.

        Raises:
          ValueError: nothing answers at the address, it is no Ray cluster or one of another
            version, or its nodes have no room for so many replicas.
        """
        with contextlib.ExitStack() as leaving:
            ray = _import_ray()
            if not ray.is_initialized():
                _connect(self._address, leaving)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self._gpus = os.environ.get("JAX_PLATFORMS") != "cpu" and any(
                node.get("GPU") for node in nodes
            )
            self.replicas = self._placed_on(nodes)
            self._leaving = leaving.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for number in [*self._held]:
            self._end(number)
        self._leaving.close()

    def start(self, make: Callable[[], Work], *, most: int | None = None) -> None:
        """Puts replicas on nodes, and waits until the first one is ready for work. Others may be
        later; what they have to say of their nodes is then said by `run`.

        Args:
          make: gives what does a piece; called once in each replica, whose devices JAX then shows.
            It is pickled, so a function of a module that all nodes have, with `functools.partial`
            for its arguments.
          most: replicas that are of use.

        Raises:
          ValueError: what `make` has raised, with the name of the node; or replicas that die as
            they start, or find no room.
        """
        self._make = make
        for _ in range(min(self.replicas, most or self.replicas)):
            self._hire()
        while not any(held.stage == "ready" for held in self._held.values()):
            self._turn()

    def run(self, pieces: Sequence[Any]) -> Iterator[JobResult]:
        """Does the pieces, and yields what comes of them as it comes; those given first are begun
        first.

        Raises:
          ValueError: a piece that has ended several replicas, which is named by its `str`; and what
            `start` raises, of later replicas.
          Exception: whatever the work itself raised.
        """
        self._waiting = collections.deque(_Job(piece) for piece in pieces)
        while self._waiting or any(held.job for held in self._held.values()):
            for held in self._held.values():
                if held.stage == "ready" and self._waiting:
                    job = self._waiting.popleft()
                    held.stage, held.job = "working", job
                    held.reply = held.actor.begin.remote(job.piece, frozenset(job.arrived))
            yield from self._turn()

    def _placed_on(self, nodes: Sequence[Mapping[str, float]]) -> int:
        """How many replicas there will be, if the nodes have room for them when nothing else runs
        there."""
        needs = self._needs()
        room = sum(
            int(min(node.get(name, 0) // need for name, need in needs.items())) for node in nodes
        )
        wanted = 1 if self._wanted is None else self._wanted
        if wanted > room:
            each = " and ".join(f"{need} {name}{'s' * (need > 1)}" for name, need in needs.items())
            what = (
                f"{wanted} replicas of {each} each are" if wanted > 1 else f"1 replica of {each} is"
            )
            raise ValueError(
                f"{what} asked for, but the Ray cluster, of {len(nodes)} "
                f"node{'s' * (len(nodes) != 1)}, has room for {room}; lower --replicas, --tensor "
                "or --kv, or add nodes"
            )
        return room if self._wanted is None else self._wanted

    def _needs(self) -> dict[str, int]:
        """What Ray is to keep for a replica."""
        return {"GPU": self._devices, "CPU": 1} if self._gpus else {"CPU": self._devices}

    def _hire(self) -> None:
        """Asks for one more replica, wherever there is room."""
        needs = self._needs()
        # Not restarted by Ray: a replica elsewhere does as well, and the count of deaths is kept
        # here.
        actor = (
            _import_ray()
            .remote(_Replica)
            .options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                max_restarts=0,
                max_task_retries=0,
            )
            .remote()
        )
        self._held[self._hired] = _ReplicaHandle(self._hired, actor, actor.node.remote())
        self._hired += 1

    def _turn(self) -> list[JobResult]:
        """Waits a moment for replicas to say something, and answers them."""
        ray = _import_ray()
        replies = {held.reply: held for held in self._held.values() if held.reply is not None}
        if not ray.wait([*replies], timeout=1.0)[0]:
            self._check_room()
            return []
        found: list[JobResult] = []
        for reply in ray.wait([*replies], num_returns=len(replies), timeout=0)[0]:
            held = replies[reply]
            try:
                found += self._heard(held, ray.get(reply))
            except ray.exceptions.RayTaskError as error:
                # which holds what the replica's process has to say of it
                raise error.cause from error
            except ray.exceptions.RayError as error:
                self._lost(held, error)
        return found

    def _heard(self, held: "_ReplicaHandle", said: Any) -> list[JobResult]:
        """Takes what a replica has said, and asks it for what comes next."""
        if held.stage == "placing":
            held.stage, held.node = "loading", said
            held.reply = held.actor.load.remote(self._make, self._devices, self._gpus)
            return []
        if held.stage == "loading":
            held.stage, held.reply, self._failed_starts = "ready", None, 0
            return []
        pairs, ended = said
        job = held.job
        assert job is not None
        new = {key: value for key, value in pairs if key not in job.arrived}
        job.arrived.update(new)
        if new:
            job.deaths = 0
        if ended:
            held.stage, held.reply, held.job = "ready", None, None
        else:
            held.reply = held.actor.more.remote()
        return [JobResult(job.piece, key, value, held.number) for key, value in new.items()]

    def _lost(self, held: "_ReplicaHandle", error: Exception) -> None:
        """Puts another replica in the place of one that has died, and its piece in front of those
        that wait."""
        reason, where = _reason(error), f" on {held.node}" if held.node else ""
        self._end(held.number)
        if held.job:
            held.job.deaths += 1
            if held.job.deaths == _DEATHS:
                raise ValueError(
                    f"{held.job.piece} ended {_DEATHS} replicas one after the other, the "
                    f"last{where} ({reason}); take it out of the input, or give a replica more "
                    "memory"
                ) from error
            self._waiting.appendleft(held.job)
        else:
            self._failed_starts += 1
            if self._failed_starts == _DEATHS:
                raise ValueError(
                    f"{_DEATHS} replicas one after the other died as they started, the last{where} "
                    f"({reason}); look whether the nodes have the memory for the model, and the "
                    "same jaxshare installed"
                ) from error
        _log.warning(
            "replica %d%s is lost (%s); another takes its place", held.number, where, reason
        )
        self._hire()

    def _end(self, number: int) -> None:
        """Ends a replica, if it is still there."""
        held = self._held.pop(number)
        with contextlib.suppress(Exception):  # of many kinds, where the cluster itself is gone
            _import_ray().kill(held.actor, no_restart=True)

    def _check_room(self) -> None:
        """Finds it out when nothing runs because the nodes have no room."""
        if any(held.stage != "placing" for held in self._held.values()):
            self._idle_since = 0.0
            return
        self._idle_since = self._idle_since or time.monotonic()
        if time.monotonic() - self._idle_since > _ROOM_SECONDS:
            raise ValueError(
                f"no node of the Ray cluster has had room for a replica for {_ROOM_SECONDS} "
                "seconds; wait for what else runs there, or add nodes"
            )


@dataclasses.dataclass
class _Job:
    """A piece that is to be done, what has arrived of it, and the replicas that died over it since
    something last did."""

    piece: Any
    arrived: set[Hashable] = dataclasses.field(default_factory=set)
    deaths: int = 0


@dataclasses.dataclass
class _ReplicaHandle:
    """What the driver knows of a replica; `reply` is what it has been asked for, or None while it
    waits for a piece."""

    number: int
    actor: Any
    reply: Any
    stage: Literal["placing", "loading", "ready", "working"] = "placing"
    node: str = ""
    job: _Job | None = None


class _Replica:
    """What runs in a process of its own on some node. The work goes on while what it has made is on
    its way."""

    def __init__(self):
        self._work: Work | None = None
        self._made: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def node(self) -> str:
        """Where this is: answers as soon as there is room."""
        return f"node {socket.gethostname()} ({_import_ray().util.get_node_ip_address()})"

    def load(self, make: Callable[[], Work], devices: int, gpus: bool) -> None:
        """Makes what does the work, on devices that JAX is told of before it looks for any."""
        try:
            _claim(devices, gpus)
            self._work = make()
        except (ValueError, OSError, NotImplementedError, ImportError) as error:
            raise ValueError(f"{self.node()} cannot make its replica: {error}") from error

    def begin(
        self, piece: Any, arrived: Collection[Hashable]
    ) -> tuple[list[tuple[Hashable, Any]], bool]:
        """Begins a piece, and goes on as `more` does."""
        assert self._work is not None
        self._made = queue.SimpleQueue()
        threading.Thread(
            target=_do,
            args=(self._work, piece, arrived, self._made),
            name="jaxshare-piece",
            daemon=True,
        ).start()
        return self.more()

    def more(self) -> tuple[list[tuple[Hashable, Any]], bool]:
        """Waits until something is made: all that has been since, and whether the piece is done."""
        pairs = []
        made = self._made.get()
        while True:
            if isinstance(made, BaseException):
                raise made
            if made is None:
                return pairs, True
            pairs.append(made)
            try:
                made = self._made.get_nowait()
            except queue.Empty:
                return pairs, False


def _do(
    work: Work, piece: Any, arrived: Collection[Hashable], made: "queue.SimpleQueue[Any]"
) -> None:
    """Does a piece; ends with None or with what went wrong."""
    try:
        for pair in work(piece, arrived):
            made.put(pair)
        made.put(None)
    except BaseException as error:  # it is the driver's to see, whatever it is
        made.put(error)


def _claim(devices: int, gpus: bool) -> None:
    """Tells JAX which devices are this replica's.

    Raises:
      ValueError: Ray has given GPUs that JAX cannot use.
    """
    if not gpus:
        # threads of XLA, which would otherwise take every core of the node
        os.environ["PJRT_NPROC"] = str(devices)
    import jax

    if not gpus:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    elif jax.default_backend() == "cpu" or jax.local_device_count() < devices:
        raise ValueError(
            f"Ray has {devices} GPUs for it, but JAX has {jax.local_device_count()} devices of "
            f"kind {jax.default_backend()}; pip install 'jaxshare[cuda13]' there"
        )


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise ValueError(
            "replicas on several machines run on Ray, which is not installed: pip install "
            "'jaxshare[ray]'"
        ) from error
    return ray


def _connect(address: str, leaving: contextlib.ExitStack) -> None:
    """Connects to a cluster, or starts one; `leaving` undoes it."""
    ray = _import_ray()
    settings: dict[str, Any] = {
        "address": address,
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    if address == "local":
        short = (
            tempfile.gettempdir()
            if len(tempfile.gettempdir()) < _SOCKET_FOLDER - len("/jaxshare-12345678")
            else "/tmp"
        )
        folder = tempfile.mkdtemp(prefix="jaxshare-", dir=short)
        leaving.callback(shutil.rmtree, folder, ignore_errors=True)
        settings |= {
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
            "_temp_dir": folder,
        }
    else:
        _probe(address)
    leaving.callback(ray.shutdown)
    leaving.enter_context(contextlib.redirect_stdout(_Aside(sys.stdout)))
    with _unreported():
        try:
            ray.init(**settings)
        except Exception as error:  # of many kinds
            what = (
                "a Ray cluster cannot be started on this machine"
                if address == "local"
                else f"the Ray cluster at {address} is not there"
            )
            raise ValueError(f"{what} ({first_line(error)}); {_start(address)}") from error


def _probe(address: str) -> None:
    """Finds out whether a cluster answers. Ray itself waits for minutes at an address that is down,
    and then ends the process."""
    if address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"nobody answers at the Ray address {address} ({error}); {_start(address)}"
            ) from error
    program = (
        "import sys, ray\ntry:\n    ray.init(sys.argv[1], log_to_driver=False, "
        "logging_level='CRITICAL')\nexcept Exception as error:\n    print(' "
        "'.join(str(error).split()))\n    sys.exit(1)\n"
    )
    with _unreported():
        try:
            tried = subprocess.run(
                [sys.executable, "-c", program, address],
                capture_output=True,
                text=True,
                timeout=_CONNECT_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(
                f"what is at the Ray address {address} has not answered as a Ray cluster in "
                f"{_CONNECT_SECONDS} seconds; look at the address and, if the cluster asks for a "
                "token, give it by RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
            ) from error
    if tried.returncode:
        said = (
            tried.stdout.strip() or (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        )
        raise ValueError(
            f"the Ray cluster at {address} cannot be used ({said[:300]}); {_start(address)}"
        )


def _start(address: str) -> str:
    """What would do where a cluster is not there."""
    if address == "local":
        return "look whether this machine has memory and room for sockets and shared memory"
    return "start one with `ray start --head`, and run this where `ray start --address=HOST:PORT` has been run, or leave the address out"


def _unreported() -> contextlib.AbstractContextManager[None]:
    """Ray counts its users unless told otherwise when it starts."""
    return environment(RAY_USAGE_STATS_ENABLED="0")


class _Aside:
    """Standard output, but for what Ray's threads print of nodes and processes: stdout is for
    results, so that goes to stderr."""

    def __init__(self, stdout: Any):
        self._stdout = stdout

    def write(self, text: str) -> int:
        return self._target().write(text)

    def flush(self) -> None:
        self._target().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)

    def _target(self) -> Any:
        return sys.stderr if threading.current_thread().name.startswith("ray_") else self._stdout


def _reason(error: Exception) -> str:
    """Why a replica died, of the paragraph that Ray writes about it."""
    said = " ".join(str(error).split())
    return (said.rpartition("The actor is dead because ")[2] or type(error).__name__)[:300]
