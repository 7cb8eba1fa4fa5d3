"""The programs and commands of the guides whose texts are sampled: they answer rightly."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxshare.serving.cli.main import main
from tests.package.pages import commands, programs, run_examples
from tests.paths import ROOT

pytestmark = pytest.mark.slow


def text(page: str) -> str:
    """A page of docs/."""
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_the_workers_example_answers_rightly(tmp_path):
    [out], _ = run_examples(text("workers.md"), tmp_path)
    assert out.startswith("Alice 1:") and "Bob 1:" in out
    written, answer, passes, kv_bytes = re.fullmatch(
        r"(?s)(.*) (85, 84, 77) (\d+) (\d+)\n", out
    ).groups()
    assert "Alice 2:" in written and answer and 32 < int(passes) <= 96 and int(kv_bytes) > 10**5


def test_the_branches_example_answers_rightly(tmp_path):
    [out], _ = run_examples(text("branches.md"), tmp_path)
    summary, best, *streamed, passes = out.rstrip().splitlines()
    order, prompt_tokens, unique_tokens, _ = re.fullmatch(
        r"(\[.*\]) (\d+) (\d+) (\d+)", summary
    ).groups()
    assert order == str([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)])
    assert int(unique_tokens) < int(prompt_tokens)
    vote, logprob = best.split()
    assert vote == "84" and float(logprob) < 0
    right = {"0": "boxed{85}", "1": "boxed{78}"}
    assert sorted(line.split()[:2] for line in streamed) == [
        [str(p), str(i)] for p in range(2) for i in range(4)
    ]
    assert [line for line in streamed if not line.endswith(right[line[0]])] == []
    assert 1 <= int(passes) <= 8


def test_the_engine_example_answers_rightly(tmp_path):
    [out], _ = run_examples(text("engine.md"), tmp_path)
    answers, reused, *replayed = out.splitlines()
    assert re.findall(r"boxed\{(\d+)\}", answers) == ["85", "90", "98"]
    known = [int(n) for n in reused.strip("[]").split(", ")]
    assert known[0] == 0 and min(known[1:]) > 30
    assert len(replayed) == 3 and replayed[0].startswith("0 of ")
    assert not all(line.startswith("0 of ") for line in replayed)


def test_the_example_of_a_mesh_has_the_text_of_one_device(tmp_path):
    [on_mesh, _] = programs(text("many_devices.md"))
    alone = on_mesh.replace(", mesh=make_mesh(tensor=2, kv=2)", "")
    assert alone != on_mesh
    [(one,), (four,)] = [
        run_examples(f"```python\n{program}```\n", tmp_path)[0] for program in (alone, on_mesh)
    ]
    assert one == four and one.endswith("\\boxed{42}\n")


def test_the_example_of_a_pool_of_replicas_answers_rightly(tmp_path):
    (tmp_path / "example.py").write_text(programs(text("many_devices.md"))[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(Path(tmp_path) / "example.py")],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = sorted(line for line in done.stdout.splitlines() if line.endswith("}"))
    assert [re.fullmatch(r"(.*) ([01]) .*boxed\{(\d+)\}", line).groups() for line in found] == [
        ("12 * 7", "0", "84"),
        ("12 * 7", "1", "84"),
        ("17 + 25", "0", "42"),
        ("17 + 25", "1", "42"),
    ]


def test_the_commands_on_the_embedded_model_answer_rightly(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    [generates, works] = [
        words[1:]
        for words in commands(text("getting_started.md"))
        if words[1:3] in (["generate", "embedded"], ["workers", "embedded"])
    ]
    assert main([*generates, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["completions"][0]["text"].endswith(
        "Alice 6: \\boxed{85, 84, 77, 83, 45}"
    )
    assert main([*works, "--json"]) == 0
    [answer] = json.loads(capsys.readouterr().out)["answers"].values()
    assert (answer["value"], answer["extra_passes"]) == ("85, 84, 77, 83, 45", 0)
