"""What README.md says runs, as it stands."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, load
from jaxshare.serving import generate
from jaxshare.serving.cli.main import main
from jaxshare.serving.evaluation import arithmetic
from tests.paths import ROOT


def printed(example: int) -> str:
    """What a Python example of README.md prints."""
    block = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S
    )[example]
    # in a file, because an agent is compiled from its source
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "example.py").write_text(block, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(Path(folder) / "example.py")],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(start: str) -> list[str]:
    """The arguments of the one command of README.md that starts so."""
    [line] = re.findall(
        rf"^    jaxshare ({start} .*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M
    )
    return shlex.split(line)


def test_the_library_example_answers_rightly_in_two_branches():
    for text in printed(0).split("\n---\n"):
        assert "47+38. 7+8=15, 4+3+1=8. Answer 1: 85." in text and "\\boxed{85}" in text


@pytest.mark.slow
def test_the_workers_example_answers_rightly():
    out = printed(1)
    assert out.startswith("Alice 1:") and "Bob 1:" in out
    text, answer, passes, kv_bytes = re.fullmatch(
        r"(?s)(.*) (85, 84, 77) (\d+) (\d+)\n", out
    ).groups()
    assert "Alice 2:" in text and answer and 32 < int(passes) <= 96 and int(kv_bytes) > 10**5


@pytest.mark.slow
def test_the_branches_example_answers_rightly():
    summary, best, *streamed, passes = printed(2).rstrip().splitlines()
    order, prompt_tokens, unique_tokens, _ = re.fullmatch(
        r"(\[.*\]) (\d+) (\d+) (\d+)", summary
    ).groups()
    assert order == str([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]) and int(unique_tokens) < int(
        prompt_tokens
    )
    vote, logprob = best.split()
    assert vote == "84" and float(logprob) < 0
    right = {"0": "boxed{85}", "1": "boxed{78}"}
    assert sorted(line.split()[:2] for line in streamed) == [
        [str(p), str(i)] for p in range(2) for i in range(4)
    ]
    assert [line for line in streamed if not line.endswith(right[line[0]])] == []
    assert 1 <= int(passes) <= 8


@pytest.mark.slow
def test_the_agents_example_answers_rightly():
    assert printed(3) == "['85, 84, 77, 83, 45', '55, 78, 18, 99, 196'] True\n"


@pytest.mark.slow
def test_the_engine_example_answers_rightly():
    answers, reused, *replayed = printed(4).splitlines()
    assert re.findall(r"boxed\{(\d+)\}", answers) == ["85", "90", "98"]
    known = [int(n) for n in reused.strip("[]").split(", ")]
    assert known[0] == 0 and min(known[1:]) > 30
    assert (
        len(replayed) == 3
        and replayed[0].startswith("0 of ")
        and not all(line.startswith("0 of ") for line in replayed)
    )


@pytest.mark.slow
def test_the_example_of_many_devices_answers_rightly_with_the_text_of_one_device(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    model: Any = load(EMBEDDED)
    chat = [{"role": "user", "content": f"{arithmetic.instruction(1)}\n1. 17 + 25"}]
    prompt = model.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    alone = (
        generate(model, prompt, n=4, max_new_tokens=72, sampler=Sampler(temperature=0.7))
        .completions[3]
        .text
    )
    assert printed(5) == f"{alone}\n" and alone.endswith("\\boxed{42}")


@pytest.mark.slow
def test_the_example_of_a_fleet_answers_rightly():
    found = sorted(line for line in printed(6).splitlines() if line.endswith("}"))
    assert [re.fullmatch(r"(.*) ([01]) .*boxed\{(\d+)\}", line).groups() for line in found] == [
        ("12 * 7", "0", "84"),
        ("12 * 7", "1", "84"),
        ("17 + 25", "0", "42"),
        ("17 + 25", "1", "42"),
    ]


@pytest.mark.slow
def test_the_commands_on_the_embedded_model_answer_rightly(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main([*commands("generate embedded"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["completions"][0]["text"].endswith(
        "Alice 6: \\boxed{85, 84, 77, 83, 45}"
    )
    assert main([*commands("workers embedded"), "--json"]) == 0
    [answer] = json.loads(capsys.readouterr().out)["answers"].values()
    assert (answer["value"], answer["extra_passes"]) == ("85, 84, 77, 83, 45", 0)
