"""The warning where a checkpoint is decoded greedily that must not be: when, how often, and by
which commands."""

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys

import pytest

from jaxshare import Sampler, models
from jaxshare.models.generation_config import Generation
from jaxshare.serving import Branches, Workers, greedy
from jaxshare.serving.cli import demo, main
from jaxshare.serving.engine import Engine
from jaxshare.serving.evaluation.baselines import sequential
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.workers.prompts.presets import advises_sampling
from tests.helpers import folder_of_first_layers, mostly_slow

CARD = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
"""The generation_config.json of a Qwen3. The embedded model has that architecture, and
do_sample false."""
GREEDY, WARM = Sampler(), Sampler(temperature=0.6)


@pytest.fixture
def warnings(caplog, monkeypatch):
    """The warnings so far, as a function, in a process that has not warned yet."""
    monkeypatch.setattr(greedy, "_warned", set())
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "jaxshare" and record.levelno == logging.WARNING
    ]


def qwen3(architecture: str = "Qwen3ForCausalLM", name: str = "Some/Qwen3", **settings):
    embedded = demo.load_embedded()
    return dataclasses.replace(
        embedded,
        name=name,
        config=dataclasses.replace(embedded.config, architecture=architecture),
        generation=Generation.from_json(CARD | settings, {"eos_token_id": 2}),
    )


@pytest.mark.parametrize(
    ("model", "sampler", "format", "warns"),
    [
        (qwen3(), GREEDY, None, True),
        (qwen3(), WARM, None, False),
        (qwen3(do_sample=False), GREEDY, None, False),  # a base model, or the embedded one
        # Qwen2.5: its generation_config.json samples, too, but its card does not warn
        (qwen3("Qwen2ForCausalLM"), GREEDY, None, False),
        (qwen3("LlamaForCausalLM"), GREEDY, None, False),
        (qwen3("Qwen2ForCausalLM"), GREEDY, "qwq+user", True),
        (qwen3("LlamaForCausalLM"), GREEDY, "deepseek-r1", True),
        (qwen3("LlamaForCausalLM"), GREEDY, "phi-4-reasoning+no-examples", True),
        (qwen3("LlamaForCausalLM"), GREEDY, "llama-3", False),
        (qwen3("LlamaForCausalLM"), GREEDY, "collaborative", False),
        (qwen3("LlamaForCausalLM", do_sample=False), GREEDY, "deepseek-r1", False),
        (demo.load_embedded(), GREEDY, "qwen3", False),
    ],
)
def test_the_rule(model, sampler, format, warns, warnings):
    warn_of_greedy(model, sampler, discouraged=advises_sampling(format))
    assert len(warnings()) == warns


def test_it_is_said_once_and_names_the_checkpoint_and_what_to_use(warnings):
    for _ in range(3):
        warn_of_greedy(qwen3(), GREEDY)
    (said,) = warnings()
    assert "Some/Qwen3 is decoded greedily (temperature 0)" in said and "\n" not in said
    assert "samples with temperature 0.6, top_p 0.95, top_k 20, min_p 0" in said
    warn_of_greedy(qwen3(name="Other/Qwen3"), GREEDY)
    assert len(warnings()) == 2


def test_whatever_samples_says_so(warnings, monkeypatch):
    def once():
        said = warnings()[len(seen) :]
        seen.extend(said)
        greedy._warned.clear()
        return len(said) == 1

    seen: list[str] = []
    model = qwen3()
    Branches(model, "Solve:", sampler=GREEDY)
    assert once()
    Workers(model, "1. 47 + 38", sampler=GREEDY, budget=8)
    assert once()
    with Engine(model) as engine, pytest.raises(ValueError, match="context"):
        engine.submit("Solve:", GREEDY, max_new_tokens=10**6)
    assert once()
    monkeypatch.setattr("jaxshare.serving.evaluation.streams.Workers", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sequential(qwen3("Qwen2ForCausalLM"), "1. 47 + 38", budget=8, sampler=GREEDY, format="qwq")
    assert once()
    Branches(model, "Solve:")  # with the checkpoint's own settings
    assert not once()


@pytest.fixture
def folder(tmp_path):
    """The embedded model's first layer, sampled as a Qwen3 is."""
    folder_of_first_layers(tmp_path / "Qwen3-tiny", 1)
    own = json.loads((models.EMBEDDED / "generation_config.json").read_text())
    (tmp_path / "Qwen3-tiny" / "generation_config.json").write_text(json.dumps(own | CARD))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Solve: 47 + 38"}\n')
    return tmp_path


COMMANDS = {
    "generate": ("--prompt", "Solve: 47 + 38", "--max-new-tokens", "4"),
    "batch": ("--input", "prompts.jsonl", "--output", "out.jsonl", "--max-new-tokens", "4"),
    "workers": ("--problem", "1. 47 + 38", "--budget", "8"),
    "evaluate": (
        "--task",
        "sums",
        "--samples",
        "1",
        "--workers",
        "1",
        "--budgets",
        "8",
        "--out",
        "evaluation",
    ),
}


@pytest.mark.parametrize(
    "command",
    mostly_slow(["batch", "evaluate", "generate", "workers"]),
)
def test_every_command_that_samples_says_so_once(command, folder, warnings, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main.main([command, "Qwen3-tiny", *COMMANDS[command], "--temperature", "0"]) == 0
    assert len(warnings()) == 1 and "Qwen3-tiny is decoded greedily" in warnings()[0]
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more", "count"),
    [
        ("Qwen3-tiny", ("--temperature", "0"), 1),
        ("Qwen3-tiny", (), 0),
        ("embedded", ("--temperature", "0"), 0),
    ],
)
def test_it_is_on_stderr_and_not_on_stdout(folder, model, more, count):
    command = [
        sys.executable,
        "-m",
        "jaxshare.serving.cli.main",
        "workers",
        model,
        *COMMANDS["workers"],
        *more,
        "--json",
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["passes"] <= 8
    assert (
        len(re.findall(r"^warning: .* greedily", done.stderr, re.MULTILINE))
        == done.stderr.count("greedily")
        == count
    )


@pytest.mark.slow
def test_sampling_is_not_warned_of(folder, warnings, monkeypatch):
    monkeypatch.chdir(folder)
    for sampling in (("--top-p", "0.5"), ("--temperature", "0.3")):
        assert main.main(["generate", "Qwen3-tiny", *COMMANDS["generate"], *sampling]) == 0
    assert warnings() == []
