"""What README.md says runs, as it stands."""

import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, load, problems
from jaxshare.serving import generate

ROOT = Path(__file__).resolve().parent.parent


def printed(example: int) -> str:
    """What a Python example of README.md prints."""
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[example]
    with tempfile.TemporaryDirectory() as folder:  # in a file, because an agent is compiled from its source
        (Path(folder) / "example.py").write_text(block, encoding="utf-8")
        done = subprocess.run([sys.executable, str(Path(folder) / "example.py")], cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"},
                              capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_example_runs_and_writes_two_branches():
    first, second = printed(0).split("\n---\n")
    answer = problems.make_problem(random.Random(0)).answers[0]
    assert f"Answer 1: {answer}." in first and f"Answer 1: {answer}." in second


@pytest.mark.slow
def test_the_workers_example_runs():
    out = printed(1)
    assert out.startswith("Alice 1:") and "Bob 1:" in out
    text, passes, kv_bytes = out.rstrip().rsplit(" ", 2)
    assert "Alice 2:" in text and 32 < int(passes) <= 64 and int(kv_bytes) > 10**5


@pytest.mark.slow
def test_the_branches_example_runs():
    summary, best, *streamed, passes = printed(2).rstrip().splitlines()
    order, prompt_tokens, unique_tokens, _ = re.fullmatch(r"(\[.*\]) (\d+) (\d+) (\d+)", summary).groups()
    assert order == str([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]) and int(unique_tokens) < int(prompt_tokens)
    assert float(best.split()[-1]) < 0
    assert sorted(line.split()[:2] for line in streamed) == [[str(p), str(i)] for p in range(2) for i in range(4)]
    assert 1 <= int(passes) <= 8


@pytest.mark.slow
def test_the_agents_example_runs():
    assert printed(3) == "['85, 84, 77, 83, 45', '55, 78, 18, 99, 196'] True\n"


def test_the_engine_example_runs():
    reused, *replayed = printed(4).splitlines()
    known = [int(n) for n in reused.strip("[]").split(", ")]
    assert known[0] == 0 and min(known[1:]) > 30
    assert len(replayed) == 3 and replayed[0].startswith("0 of ") and not all(line.startswith("0 of ") for line in replayed)


@pytest.mark.slow
def test_the_example_of_many_devices_runs_and_writes_what_one_device_writes(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    alone = generate(load(EMBEDDED), "Compute 17 + 25.", n=4, max_new_tokens=16, sampler=Sampler(temperature=1.5)).completions[3].text
    assert printed(5) == f"{alone}\n"


@pytest.mark.slow
def test_the_example_of_a_fleet_runs():
    found = sorted(line for line in printed(6).splitlines() if line.startswith("Compute "))
    assert [line.startswith(f"Compute {sum} {i} ") for line, (sum, i) in zip(found, [(s, i) for s in ("12 * 7.", "17 + 25.") for i in "01"],
                                                                             strict=True)] == [True] * 4
