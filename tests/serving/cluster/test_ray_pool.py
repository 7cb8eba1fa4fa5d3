"""Pools on a local Ray cluster: replicas and nodes that die, and batch jobs like one process's."""

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray.cloudpickle

from jaxshare.serving.branches.prompt_tree import Prompt, read_prompts
from jaxshare.serving.cli import main
from jaxshare.serving.cluster import ray_pool
from jaxshare.serving.cluster.model_spec import ModelSpec
from jaxshare.serving.cluster.ray_pool import RayPool
from jaxshare.serving.cluster.shards import cut
from tests.helpers import mostly_slow
from tests.processes import below, free_port, ray_cluster, wait_for

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not find the tests


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of two CPUs in processes of its own: (address, process id)."""
    with ray_cluster(tmp_path_factory.mktemp("compiled")) as made:
        yield made


# Cutting.


@pytest.mark.parametrize(
    ("shards", "sizes"), [(1, [10]), (3, [3, 3, 4]), (4, [2, 3, 2, 3]), (100, [1] * 10)]
)
def test_a_run_is_cut_into_neighbours(shards, sizes):
    prompts = [
        Prompt(0, (7, 1, 300), 3),
        Prompt(4, (5,), 2),
        Prompt(2, (7, 1), 4),
        Prompt(3, (5, 2), 1),
        Prompt(9, (7, 1, 300, 4), 2),
    ]
    found = cut(prompts, {(0, 1), (4, 0)}, shards)
    ids = [sample for shard in found for sample in shard.sample_ids]
    assert sorted(map(len, (shard.sample_ids for shard in found))) == sorted(sizes)
    assert sorted(ids) == sorted(
        {(p.number, i) for p in prompts for i in range(p.n)} - {(0, 1), (4, 0)}
    )
    # common prefixes are together
    assert [number for number in dict.fromkeys(p for p, _ in ids)] in (
        [4, 3, 2, 0, 9],
        [2, 0, 9, 4, 3],
    )
    for shard in found:
        assert {p.number for p in shard.prompts} == {number for number, _ in shard.sample_ids} and {
            *shard.prompts
        } <= {*prompts}
        assert shard.skipped() | {*shard.sample_ids} == {
            (p.number, i) for p in shard.prompts for i in range(p.n)
        }
        assert shard.skipped().isdisjoint(shard.sample_ids) and shard.sample_ids[
            0
        ] in shard.skipped(["cost", shard.sample_ids[0]])


def test_shards_are_bounded_and_none_are_made_of_nothing():
    assert [len(shard.sample_ids) for shard in cut([Prompt(0, (1,), 10_000)], (), 1)] == [
        3333,
        3333,
        3334,
    ]
    assert cut([Prompt(0, (1,), 2)], {(0, 0), (0, 1)}, 4) == []
    assert (
        str(cut([Prompt(i, (i,), 1) for i in range(9)], (), 1)[0])
        == "the shard of prompts 0, 1, 2, 3, 4 and 4 more (counted from 0)"
    )


def test_a_part_of_a_list_keeps_its_numbers():
    """Seeds depend on them: real jobs below show that the texts are those of the whole list."""
    part = [Prompt(2, (5, 6), 2), Prompt(1, (5,), 1)]
    assert read_prompts(part, 7, no_encoding) == part


def no_encoding(text: str, first: bool):
    pytest.fail("these are tokens already")


# Work without a model.


def making(folder: str, deadly: str = "", number: int = signal.SIGKILL):
    """Makes the work function for tasks (name, number of keys).

    The task called `deadly` sends its process a signal after its first key is taken.
    """

    def work(task, arrived):
        name, keys = task
        for key in range(keys):
            if key in arrived:
                continue
            yield key, (name, key, os.getpid())
            if name == deadly:
                while not os.path.exists(f"{folder}/taken"):
                    time.sleep(0.01)
                if not os.path.exists(f"{folder}/died"):
                    Path(folder, "died").touch()
                    os.kill(os.getpid(), number)
        if name == "always":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "wrong":
            raise LookupError("nothing of this kind")

    return work


def test_tasks_are_done_on_several_replicas_and_a_lost_one_goes_on_elsewhere(
    cluster, tmp_path, caplog
):
    tasks = [("a", 3), ("deadly", 4), ("b", 1), ("empty", 0), ("c", 2)]
    found = []
    with RayPool(cluster[0]) as pool:
        assert pool.replicas == 2
        pool.start(functools.partial(making, str(tmp_path), "deadly"))
        for result in pool.run(tasks):
            found.append(result)
            if result.piece[0] == "deadly":
                (tmp_path / "taken").touch()
        assert sorted((r.piece, r.key) for r in found) == sorted(
            (task, key) for task in tasks for key in range(task[1])
        )
        assert all(r.value[:2] == (r.piece[0], r.key) for r in found)
        assert len({r.value[2] for r in found if r.piece[0] == "deadly"}) == 2  # processes
        assert "is lost" in caplog.text and "another takes its place" in caplog.text
        assert [r.key for r in pool.run([("again", 2)])] == [0, 1]
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_replica_that_stops_is_lost_and_its_task_is_done_by_another(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(ray_pool, "_SILENT_SECONDS", 3.0)
    Path(tmp_path, "taken").touch()
    with RayPool(cluster[0], replicas=1) as pool:
        pool.start(functools.partial(making, str(tmp_path), "stops", number=signal.SIGSTOP))
        found = [(result.piece, result.key) for result in pool.run([("stops", 2), ("good", 2)])]
    assert sorted(found) == [
        (("good", 2), 0),
        (("good", 2), 1),
        (("stops", 2), 0),
        (("stops", 2), 1),
    ]


LEAVING = """
import sys, time, types
from jaxshare.serving.cluster import ray_cluster

ray_cluster._LEAVE_SECONDS = 0.2
ray_cluster.import_ray = lambda: types.SimpleNamespace(shutdown=lambda: time.sleep(600))
ray_cluster._leave("10.0.0.1:6379")
sys.exit(3)
"""


def test_a_program_leaves_a_cluster_whose_head_does_not_answer():
    done = subprocess.run(
        [sys.executable, "-c", LEAVING], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == 3
    assert "the head of the Ray cluster at 10.0.0.1:6379 has not answered for 0" in done.stderr


@pytest.mark.parametrize(
    ("task", "kind", "words"),
    mostly_slow(
        [
            (("wrong", 1), LookupError, "nothing of this kind"),
            (
                ("always", 0),
                ValueError,
                r"\('always', 0\) ended 3 replicas one after the other, the last on node .*; take "
                r"it out of the input",
            ),
        ],
        several=True,
    ),
)
def test_a_task_that_cannot_be_done_is_an_error(cluster, tmp_path, task, kind, words):
    with RayPool(cluster[0], replicas=1) as pool:
        pool.start(functools.partial(making, str(tmp_path)))
        with pytest.raises(kind, match=words):
            [*pool.run([("good", 1), task])]


def failing():
    raise FileNotFoundError("there is no folder /models/x")


def dying():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("make", "words"),
    mostly_slow(
        [
            (
                failing,
                rf"node {re.escape(socket.gethostname())} \([\d.]+\) cannot make its replica: "
                r"there is no folder /models/x",
            ),
            (dying, "3 replicas one after the other died as they started, the last on node"),
        ],
        several=True,
    ),
)
def test_a_replica_that_cannot_start_is_an_error(cluster, make, words):
    with RayPool(cluster[0], replicas=1) as pool, pytest.raises(ValueError, match=words):
        pool.start(make)


def shown():
    import jax

    return lambda task, arrived: iter(
        [("cpus", len(jax.devices())), ("threads", os.environ["PJRT_NPROC"])]
    )


@pytest.mark.slow
def test_a_replica_has_the_devices_that_were_asked_for(cluster):
    with RayPool(cluster[0], devices=2) as pool:
        assert pool.replicas == 1
        pool.start(shown)
        assert {r.key: r.value for r in pool.run([0])} == {"cpus": 2, "threads": "2"}


@pytest.mark.slow
def test_more_replicas_than_there_is_room_for(cluster):
    words = (
        "3 replicas of 1 CPU each are asked for, but the Ray cluster, of 1 node, has room for 2; "
        "lower --replicas"
    )
    with pytest.raises(ValueError, match=words), RayPool(cluster[0], replicas=3):
        pass
    with (
        pytest.raises(ValueError, match="1 replica of 3 CPUs is asked for"),
        RayPool(cluster[0], devices=3),
    ):
        pass
    assert not ray.is_initialized()


# The command.

ARGUMENTS = [
    "--n",
    "8",
    "--max-new-tokens",
    "24",
    "--max-rows",
    "2",
    "--temperature",
    "2",
    "--seed",
    "5",
]


def job(folder: Path) -> list[str]:
    prompts = [f"1. {q}" for q in ("47 + 38", "12 * 7", "90 - 17", "47 - 36")]
    (folder / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": p}) + "\n" for p in prompts), encoding="utf-8"
    )
    return ["batch", "embedded", "--input", str(folder / "in.jsonl"), *ARGUMENTS]


def start(folder: Path, name: str, *more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jaxshare.serving.cli.main",
            *job(folder),
            "--output",
            str(folder / name),
            *more,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def equal(found: Path, expected: Path) -> None:
    """Asserts equality byte for byte, except for the rounding of log-probabilities.

    It depends on the number of rows that run together.
    """
    logprob = re.compile(rb'"logprob": (-?[\d.e-]+)')
    a, b = found.read_bytes(), expected.read_bytes()
    assert logprob.sub(b"", a) == logprob.sub(b"", b)
    assert [float(x) for x in logprob.findall(a)] == pytest.approx(
        [float(x) for x in logprob.findall(b)], abs=1e-3
    )


@pytest.mark.slow
def test_a_job_that_loses_a_replica_writes_what_an_unbroken_one_does(cluster, tmp_path):
    address, pid = cluster
    process = start(tmp_path, "pool", "--ray", address, "--json")
    wait_for(lambda: lines(tmp_path / "pool") >= 2 or process.poll() is not None)
    replicas = [p for p, name in below(pid).items() if "ReplicaActor" in name]
    before = lines(tmp_path / "pool")
    os.kill(replicas[0], signal.SIGKILL)
    assert main.main([*job(tmp_path), "--output", str(tmp_path / "alone")]) == 0
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and len(replicas) == 2 and before < 32, err
    assert "is lost" in err and json.loads(out)["completions"] == 32
    equal(tmp_path / "pool", tmp_path / "alone")


@pytest.mark.slow
def test_ctrl_c_ends_the_cluster_that_was_started_and_resume_goes_on(tmp_path):
    assert main.main([*job(tmp_path), "--output", str(tmp_path / "alone")]) == 0
    process = start(tmp_path, "pool", "--ray")
    wait_for(lambda: lines(tmp_path / "pool") >= 2 or process.poll() is not None)
    started = below(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume goes on with the job" in err and out == ""
    assert any("raylet" in name for name in started.values())
    wait_for(lambda: not [p for p in started if os.path.exists(f"/proc/{p}")], 30)
    assert 0 < lines(tmp_path / "pool") < 32
    process = start(tmp_path, "pool", "--ray", "--resume", "--kv", "2")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    equal(tmp_path / "pool", tmp_path / "alone")


NODES = """
import os, sys, tempfile
with tempfile.TemporaryDirectory(prefix="jaxshare-", dir="/tmp") as folder:
    os.environ["RAY_TMPDIR"] = folder  # the address of the cluster is written into ray/ of it
    os.mkdir(f"{folder}/ray")
    from ray.cluster_utils import Cluster
    more = dict(num_cpus=1, object_store_memory=100 * 2**20)
    head = {**more, "include_dashboard": False, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(**more)
    print(cluster.address, flush=True)
    sys.stdin.readline()
    cluster.remove_node(second, allow_graceful=False)
    sys.stdin.read()
    cluster.shutdown()
"""


@pytest.mark.slow
def test_a_job_that_loses_a_node_goes_on_with_the_others(tmp_path):
    nodes = subprocess.Popen(
        [sys.executable, "-c", NODES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    try:
        address = wait_for(
            lambda: re.search(r"^[\d.]+:\d+$", nodes.stdout.readline().strip())
        ).group()
        process = start(tmp_path, "pool", "--ray", address)
        wait_for(lambda: lines(tmp_path / "pool") >= 2 or process.poll() is not None)
        nodes.stdin.write("\n")
        nodes.stdin.flush()
        assert main.main([*job(tmp_path), "--output", str(tmp_path / "alone")]) == 0
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0 and "is lost" in err, err
        equal(tmp_path / "pool", tmp_path / "alone")
    finally:
        nodes.communicate("", timeout=60)


@pytest.mark.slow
def test_an_evaluation_on_replicas_comes_to_what_it_comes_to_here(cluster, tmp_path, capsys):
    address, _ = cluster
    command = [
        "evaluate",
        "embedded",
        "--task",
        "sums",
        "--workers",
        "1,2",
        "--budgets",
        "16,96",
        "--samples",
        "3",
        "--questions",
        "2",
        "--json",
    ]
    found = []
    for name, more in (("pool", ["--ray", address]), ("here", [])):
        assert main.main([*command, "--out", str(tmp_path / name), *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["points"] == found[1]["points"] and len(found[0]["points"]) == 4

    def texts(name: str) -> dict:
        runs = map(json.loads, (tmp_path / name / "runs.jsonl").read_text().splitlines())
        return {
            (run["workers"], run["problem"]): (run["result"]["workers"], run["result"]["answers"])
            for run in runs
        }

    assert texts("pool") == texts("here")


def test_a_model_that_a_node_does_not_have():
    with pytest.raises(
        FileNotFoundError,
        match="there is no folder /models/x; give every node the model at the same path, or name "
        "it",
    ):
        ModelSpec("/models/x", None, 1, 1).load()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ray", "127.0.0.1:{port}"], "the Ray address 127.0.0.1:{port} does not answer ("),
        (
            ["--ray", "ray://127.0.0.1:{port}"],
            "the Ray address ray://127.0.0.1:{port} does not answer (",
        ),
        (
            ["--ray", "head"],
            "the Ray address is 'head'; it must be auto, HOST:PORT or ray://HOST:PORT",
        ),
        (["--ray", "127.0.0.1:99999"], "the Ray address 127.0.0.1:99999 does not answer"),
        (
            ["--ray", "--data", "2"],
            "--data is 2, but with --ray each replica is one group; give --replicas",
        ),
        (["--ray", "--replicas", "0"], "replicas is 0; it must be at least 1"),
        (["--replicas", "2"], "--replicas is given without --ray"),
        (["--ray", "--tensor", "0"], "--tensor is 0; it must be at least 1 device"),
    ],
)
def test_impossible_options_are_refused_at_once_and_leave_no_file(
    arguments, words, capsys, tmp_path
):
    port, clock = str(free_port()), time.monotonic()
    arguments = [argument.replace("{port}", port) for argument in arguments]
    assert main.main([*job(tmp_path), "--output", str(tmp_path / "out"), *arguments]) == 1
    out, err = capsys.readouterr()
    assert words.replace("{port}", port) in err and out == "" and time.monotonic() - clock < 15
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_ray_that_is_not_installed_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main.main([*job(tmp_path), "--output", str(tmp_path / "out"), "--ray"]) == 1
    assert "Ray, which is not installed: pip install 'jaxshare[ray]'" in capsys.readouterr().err


def test_ray_is_imported_only_where_it_is_asked_for():
    program = (
        "import sys, jaxshare.serving.cli.main, jaxshare.serving.cluster.shards; "
        "print('ray' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )
