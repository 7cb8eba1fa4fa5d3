"""Two commands that share an output and start at once: one of them has it, and the other says so."""

import http.server
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxshare import models
from jaxshare.seeds import stream_seed
from jaxshare.serving.checkpoints import SavedCheckpoint
from jaxshare.serving.cli import main
from jaxshare.serving.evaluation import runs
from jaxshare.serving.workers.inspection.probe import Snapshot
from jaxshare.trace.trace import Trace

pytestmark = pytest.mark.slow
WORKERS = "workers embedded --problem '1. Compute 17 + 25.' --budget 128 --stop-on never --json"
BATCH = (
    "batch embedded --input in.jsonl --output out --n 8 --max-new-tokens 48 --max-rows 4 "
    "--temperature 2"
)
EVALUATE = (
    "evaluate embedded --task sums --samples 2 --workers 1,2 --budgets 64 --temperature 1.2 "
    "--seeds 2 --out out"
)
AGENTS = "agents run agent.py --trace out"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder in which the commands run, with what they read."""
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": f"1. {n} + 38\n2. "} for n in (47, 12)]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("agent.py").write_text(
        "import time\nfrom jaxshare.serving.agents import agent\ntime.sleep(10)\n@agent\n"
        "async def one():\n    return 7\n\nAGENT, MODEL = one, 'scripted'\n"
        "def scripted(): return None\n"
    )
    return tmp_path


def at_once(*commands: str) -> int:
    """Runs two commands; returns the number of the one that had the output."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxshare.serving.cli.main", *shlex.split(command)],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    said = [process.communicate(timeout=500) for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1], said
    winner = 0 if processes[0].returncode == 0 else 1
    assert "error" not in said[winner][1] and "goes on without" not in said[winner][1]
    out, err = said[1 - winner]
    assert out == "" and re.fullmatch(
        rf"jaxshare: error: the output \S+ is being written by process {processes[winner].pid} on "
        rf"{re.escape(socket.gethostname())}; wait for it, or (give|judge) another \S+\n",
        err,
    ), err
    return winner


def only(folder: Path, *names: str) -> None:
    """Checks that nothing but these is left beside what the commands read."""
    assert {path.name for path in folder.iterdir()} == {"in.jsonl", "agent.py", *names}


def test_two_batch_jobs(folder, capsys):
    winner = at_once(f"{BATCH} --seed 5", f"{BATCH} --seed 6")
    only(folder, "out", "out.job")
    found = [json.loads(line) for line in Path("out").read_text().splitlines()]
    assert json.loads(Path("out.job").read_text())["settings"]["seed"] == 5 + winner
    assert main.main(shlex.split(f"{BATCH} --seed {6 - winner} --resume")) == 1
    assert f"began with --seed {5 + winner}, not {6 - winner}" in capsys.readouterr().err
    whole = BATCH.replace("--output out", "--output whole")
    assert main.main(shlex.split(f"{whole} --seed {5 + winner}")) == 0
    expected = [json.loads(line) for line in Path("whole").read_text().splitlines()]
    assert [(r["id"], r["tokens"]) for r in found] == [(r["id"], r["tokens"]) for r in expected]
    assert len({tuple(r["tokens"]) for r in found}) > 4


def test_two_evaluations(folder):
    winner = at_once(f"{EVALUATE} --seed 5", f"{EVALUATE} --seed 6")
    assert json.loads(Path("out/settings.json").read_text())["settings"]["seed"] == 5 + winner
    made = [runs.Run.read(line) for line in Path("out/runs.jsonl").read_bytes().splitlines()]
    seeds = {stream_seed(5 + winner, "evaluation run", p, n) for p in (0, 1) for n in (0, 1)}
    assert len(made) == 8 and {run.seed for run in made} == seeds
    assert not [path.name for path in Path("out").iterdir() if "lock" in path.name]


def test_two_sessions_that_save(folder):
    saving = f"{WORKERS} --checkpoint out --checkpoint-every 16"
    winner = at_once(f"{saving} --seed 5", f"{saving} --seed 6")
    with SavedCheckpoint("out") as saved:
        assert saved.metadata["settings"]["seed"] == 5 + winner and saved.metadata["passes"] == 128
    assert all(path.name.isdigit() for path in Path("out").iterdir())


@pytest.mark.parametrize(
    ("option", "load", "commands"),
    [
        ("--save", Snapshot.load, [WORKERS] * 2),
        ("--trace", Trace.load, [WORKERS, WORKERS]),
        ("--trace", Path.read_text, [WORKERS, AGENTS.removesuffix(" --trace out")]),
    ],
    ids=["save", "trace", "workers and agents"],
)
def test_two_sessions_that_write_one_file(folder, option, load, commands):
    at_once(*(f"{command} {option} out" for command in commands))
    only(folder, "out")
    if commands[1] == WORKERS:
        load(Path("out"))


def test_two_runs_of_agents(folder):
    at_once(AGENTS, AGENTS)
    only(folder, "out")
    json.loads(Path("out").read_text())
    at_once("agents run agent.py --plots pictures", "agents run agent.py --plots pictures")


def test_a_batch_job_and_a_session(folder):
    at_once(f"{BATCH} --seed 5", f"{WORKERS} --save out")


def test_two_conversions(folder):
    """The second may come when the first is done."""
    commands = [
        [sys.executable, "-P", "-m", "jaxshare.serving.cli.main", "convert", "embedded"]
    ] * 2
    processes = [
        subprocess.Popen([*command, "out"], stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1], said
    lost = next(e for p, e in zip(processes, said, strict=True) if p.returncode)
    assert lost.count("\n") == 1 and ("is being written by process" in lost or "out exists" in lost)
    only(folder, "out")
    assert models.load("out").fingerprint == models.load("embedded").fingerprint


def test_two_judges(folder):
    """The endpoint takes its time, and counts."""
    gradings = []

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            gradings.append(1)
            time.sleep(5)
            content = {"choices": [{"message": {"content": "Level: 3"}}]}
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    step = {"text": "x", "tokens": [1]}
    result = {"workers": {"Alice": [step], "Bob": [step]}, "answers": {}, "passes": 1}
    Path("out").mkdir()
    Path("out/settings.json").write_text(
        json.dumps({"format": "jaxshare evaluation 2", "settings": {"method": "workers"}})
    )
    with open("out/runs.jsonl", "ab") as file:
        runs.write_run(file, runs.Run(2, "1", 0, 0, "x", result))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_port}/v1"
        command = f"judge out --endpoint {address} --model m --gradings 3"
        at_once(command, command)
        server.shutdown()
    assert len(gradings) == 3
    assert len(Path("out/gradings.jsonl").read_text().splitlines()) == 3
