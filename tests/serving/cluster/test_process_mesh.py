"""Several processes that run one model together over loopback, against one process alone.

One of them is lost in some tests.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time

import pytest

from jaxshare.serving.cli import main
from jaxshare.serving.cluster import process_mesh
from tests.processes import free_port

COMMAND = [
    "generate",
    "embedded",
    "--prompt",
    "Compute 17 + 25.",
    "--n",
    "2",
    "--temperature",
    "1.1",
    "--max-new-tokens",
]
SPLIT = ["--tensor", "2", "--kv", "2"]


def start(command, process, port, processes=2):
    return begin(
        [
            *command,
            "--coordinator",
            f"127.0.0.1:{port}",
            "--processes",
            str(processes),
            "--process",
            str(process),
        ]
    )


def begin(arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxshare.serving.cli.main", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def slurm(process, job):
    """The environment of each process under `srun -n 2` (https://slurm.schedmd.com/srun.html)."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
        "SLURM_STEP_NUM_NODES": "1",
    }


def open_mpi(process, job):
    """The environment of each process under `mpirun -n 2` of Open MPI 4."""
    return {
        "OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
    }


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [slurm, open_mpi])
def test_a_job_of_a_launcher_is_found_without_options(launcher, capsys):
    command = [*COMMAND, "12", "--json"]
    assert main.main(command) == 0
    alone = tokens(capsys.readouterr().out)
    job = secrets.randbelow(10**6)  # the launcher derives the port from it
    both = [begin([*command, *SPLIT, "--distributed"], **launcher(i, job)) for i in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len(alone[0]) == 2 and [tokens(out) for out, _ in said] == [alone, []]


def tokens(out):
    # Gloo, which connects processes on CPUs, writes to stdout by itself.
    return [
        [c["tokens"] for c in json.loads(line)["completions"]]
        for line in out.splitlines()
        if line.startswith("{")
    ]


@pytest.mark.slow
def test_two_processes_write_what_one_writes_and_the_first_prints_it(capsys):
    assert main.main([*COMMAND, "12", "--json"]) == 0
    alone, port = tokens(capsys.readouterr().out), free_port()
    both = [start([*COMMAND, "12", "--json", *SPLIT], i, port) for i in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len(alone[0]) == 2 and [tokens(out) for out, _ in said] == [alone, []]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_is_lost_ends_the_other_within_a_minute(lost):
    """It is killed during the decode loop."""
    port = free_port()
    long = [*COMMAND, "1900", "--n", "20000", *SPLIT]
    both = [start(long, i, port) for i in range(2)]
    time.sleep(45)
    assert all(process.poll() is None for process in both), [
        process.communicate() for process in both
    ]
    both[lost].send_signal(signal.SIGKILL)
    clock = time.monotonic()
    _, said = both[1 - lost].communicate(timeout=90)
    assert time.monotonic() - clock < 60 and both[1 - lost].returncode not in (0, None)
    # JAX ends the process by itself; the others report to process 0.
    assert (
        "leader task" if lost == 0 else "tasks are unhealthy (stopped sending heartbeats):\n1\n"
    ) in said, said[-3000:]
    both[lost].communicate()


def test_a_coordinator_that_does_not_answer_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(process_mesh, "_JOIN_SECONDS", 1)
    port = free_port()
    silent = (
        rf"the coordinator's address, 127.0.0.1:{port}, does not answer \(.*refused\); start all 2 "
        "processes within 1 seconds"
    )
    for address, message in (
        (f"127.0.0.1:{port}", silent),
        ("here", "--coordinator is 'here'; it must be the host of process 0"),
    ):
        assert (
            main.main(
                [*COMMAND, "2", "--coordinator", address, "--processes", "2", "--process", "1"]
            )
            == 1
        )
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--coordinator", "h:1"],
            "--coordinator is given, but --processes is not; several processes need --coordinator, "
            "--processes and",
        ),
        (
            ["--coordinator", "h:1", "--processes", "2", "--process", "2"],
            "--process is 2 and --processes 2; processes are numbered from 0",
        ),
        (["--distributed", "--process", "1"], "--distributed and --process are both given"),
    ],
)
def test_processes_that_make_no_sense_are_refused(more, message, capsys):
    assert main.main([*COMMAND, "2", *more]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_session_that_two_processes_save_goes_on_in_one(tmp_path, capsys):
    """Each device writes its part; both processes are killed after a save."""
    command = [
        "workers",
        "embedded",
        "--problem",
        "1. Compute 17 + 25. 2. Compute 6 * 7.",
        "--budget",
        "150",
        "--temperature",
        "0.9",
        "--seed",
        "4",
        "--json",
    ]
    saving = [*command, "--checkpoint", str(tmp_path / "saves"), "--checkpoint-every", "16"]
    port = free_port()
    both = [start([*saving, *SPLIT], i, port) for i in range(2)]
    deadline = time.monotonic() + 300
    while not any(path.name.isdigit() and int(path.name) > 1 for path in tmp_path.glob("saves/*")):
        assert all(p.poll() is None for p in both) and time.monotonic() < deadline, [
            p.communicate() for p in both if p.poll() is not None
        ]
        time.sleep(0.01)
    for process in both:
        process.kill()
    for process in both:
        process.communicate()
    assert main.main(command) == 0
    unbroken = json.loads(capsys.readouterr().out)
    assert main.main([*saving, "--resume"]) == 0
    resumed = json.loads(capsys.readouterr().out)
    assert resumed["workers"] == unbroken["workers"] and resumed["answers"] == unbroken["answers"]
