"""The command line: what it prints, and one clear sentence and a non-zero exit for each mistake."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxshare import models, progress
from jaxshare.serving.cli import generate, main
from tests.helpers import folder_of_first_layers
from tests.paths import FIXTURES

QUESTION = (
    "Solve these problems and return comma-separated answers \\boxed{answer1, ..., answer5}:\n"
    "1. 47 + 38"
)


SHAPE = ("--n", "2", "--max-new-tokens", "30")
"""Of commands that share programs."""


@pytest.fixture(scope="module")
def shallow(tmp_path_factory) -> str:
    """The folder of a model of one layer, for what does not depend on the words."""
    return str(folder_of_first_layers(tmp_path_factory.mktemp("shallow") / "model", 1))


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main.main(arguments)
    return code, *capsys.readouterr()


def test_generate_prints_completions(capsys):
    code, out, _ = run(
        capsys,
        "generate",
        "embedded",
        "--prompt",
        QUESTION,
        "--chat",
        *SHAPE,
        "--temperature",
        "0.7",
        "--seed",
        "3",
    )
    assert code == 0
    assert "--- 1 of 2 (length, logprob -" in out and "--- 2 of 2 (length, " in out
    assert "47+38" in out


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_has_progress_on_stderr_but_with_quiet(monkeypatch, capsys, shallow, quiet):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "_REDRAW", 0.001)
    options = ("--prompt", "1. 47 + 38", *SHAPE, "--temperature", "0.7", "--json")
    assert main.main(["generate", shallow, *options, *["--quiet"] * quiet]) == 0
    shown = screen.getvalue()
    assert shown[-1:] in ("K", "\n")  # nothing is left of the line
    assert ("prefill: " in shown or "decoding: " in shown) is ("\x1b" in shown) is not quiet
    assert len(json.loads(capsys.readouterr().out)["completions"]) == 2


def test_a_command_is_alone_in_its_process_and_a_call_may_not_be(monkeypatch):
    seen = []
    monkeypatch.setattr(generate, "run", lambda options: seen.append(options.alone) or 0)
    monkeypatch.setattr(sys, "argv", ["jaxshare", "generate", "embedded"])
    assert main.main() == main.main(sys.argv[1:]) == 0
    assert seen == [True, False]


@pytest.mark.slow
def test_generate_says_what_it_chose_and_warns_of_equal_texts(shallow):
    """On stderr, in plain sentences, as a user's own process shows them."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "jaxshare.serving.cli.main",
            "generate",
            shallow,
            "--prompt",
            QUESTION,
            *SHAPE,
            "--temperature",
            "0",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    equal, rows, costs = done.stderr.splitlines()
    assert (
        equal.startswith("all 2 completions of a prompt will be equal, because temperature 0")
        and "such as 0.7" in equal
    )
    assert rows == "jaxshare: 2 rows at a time: all completions"
    assert costs.startswith("jaxshare: what is shared is decided by costs of two CPU cores;")
    result = json.loads(done.stdout)
    assert (
        result["rows"] == 2
        and result["costs"]["source"].startswith("of two CPU cores")
        and "private_row" in result["costs"]["costs"]
    )


def test_generate_json_is_one_object_and_repeats(capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text(QUESTION, encoding="utf-8")
    arguments = (
        "generate",
        "embedded",
        "--prompt-file",
        str(tmp_path / "prompt.txt"),
        "--chat",
        *SHAPE,
        "--json",
        "--temperature",
        "0.9",
    )
    first, second = (json.loads(run(capsys, *arguments)[1]) for _ in range(2))
    assert [c["text"] for c in first["completions"]] == [c["text"] for c in second["completions"]]
    assert len(first["completions"]) == 2 and all(
        len(c["tokens"]) <= 30 for c in first["completions"]
    )
    assert first["kv_bytes"] > 0 and first["tokens_per_second"] > 0
    for index, completion in enumerate(first["completions"]):
        names = {"text", "tokens", "finish_reason", "logprob", "logprobs", "prompt", "index"}
        assert {*completion} == names and len(completion["logprobs"]) == len(completion["tokens"])
        ended = "length" if len(completion["tokens"]) == 30 else "stop"
        assert completion["finish_reason"] == ended and completion["logprob"] < 0
        assert (completion["prompt"], completion["index"]) == (0, index)


def test_chat_reads_messages_from_stdin(capsys, monkeypatch, shallow):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("1. 47 + 38\n\n2. 12 + 5\n"))
    code, out, _ = run(capsys, "generate", shallow, "--chat", "--max-new-tokens", "8", "--json")
    first, second = map(json.loads, out.splitlines())
    # the first turn is part of the second's prompt
    assert code == 0 and second["prompt_tokens"] > first["prompt_tokens"] + 8


@pytest.fixture
def broken(tmp_path) -> Path:
    """Copies of the embedded model with one thing wrong in each."""
    for name in ("no_weights", "no_tokenizer", "truncated", "architecture", "dynamic"):
        shutil.copytree(models.EMBEDDED, tmp_path / name)
    (tmp_path / "no_weights" / "model.safetensors").unlink()
    (tmp_path / "no_tokenizer" / "tokenizer.json").unlink()
    (tmp_path / "no_tokenizer" / "tokenizer_config.json").unlink()
    weights = tmp_path / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    for name, change in (
        ("architecture", {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}),
        (
            "dynamic",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        ),
    ):
        file = tmp_path / name / "config.json"
        file.write_text(
            json.dumps(json.loads(file.read_text(encoding="utf-8")) | change), encoding="utf-8"
        )
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no/such/folder", "--prompt", "x"), "there is no model folder no/such/folder"),
        (("{broken}/no_weights", "--prompt", "x"), "safetensors"),
        (("{broken}/truncated", "--prompt", "x"), "model.safetensors"),
        (("{broken}/architecture", "--prompt", "x"), "MambaForCausalLM"),
        (("{broken}/dynamic", "--prompt", "x"), "dynamic"),
        (("embedded", "--prompt", ""), "the prompt is empty"),
        (("embedded", "--prompt", "  \n"), "the prompt is empty"),
        (("embedded",), "there is no prompt"),
        (("embedded", "--prompt-file", "{broken}/nothing.txt"), "nothing.txt cannot be read"),
        (("embedded", "--prompt", "9 " * 6000), "the model's context holds"),
        (("embedded", "--chat", "--prompt", "9 " * 6000), "the model's context holds"),
        (("embedded", "--prompt", "x", "--max-new-tokens", "-1"), "--max-new-tokens is -1"),
        (("embedded", "--prompt", "x", "--n", "0"), "--n is 0"),
        (("embedded", "--prompt", "x", "--temperature", "-0.5"), "temperature is -0.5"),
        (("embedded", "--prompt", "x", "--top-p", "0"), "top_p is 0"),
        (("embedded", "--prompt", "x", "--top-p", "1.5"), "top_p is 1.5"),
        (("embedded", "--prompt", "x", "--dtype", "int8"), "int8"),
        (("embedded", "--prompt", "x", "--top-logprobs", "3"), "--top-logprobs needs --json"),
        (("embedded", "--prompt", "x", "--logprobs", "raw"), "--logprobs needs --json"),
        (("missing.gguf", "--prompt", "x"), "there is no file missing.gguf: give a GGUF file"),
        (("{broken}/no_tokenizer", "--prompt", "x"), "/no_tokenizer has no tokenizer"),
    ],
)
def test_mistakes_get_one_sentence(capsys, broken, arguments, words):
    code, out, err = run(capsys, "generate", *(a.format(broken=broken) for a in arguments))
    assert code != 0 and out == ""
    assert (
        err.startswith("jaxshare: error: ") and words in err and len(err.strip().splitlines()) == 1
    )


def test_a_missing_extra_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    file = str(FIXTURES / "gguf" / "tiny-Q4_K_M.gguf")
    code, out, err = run(capsys, "generate", file, "--prompt", "x")
    assert (code, out) == (1, "") and err == (
        f"jaxshare: error: {file} is read with the package gguf, which is not installed: pip "
        "install 'jaxshare[gguf]'\n"
    )


def test_unknown_commands_and_options_exit_2(capsys):
    for arguments, command in (
        (["fly"], "jaxshare"),
        ([], "jaxshare"),
        (["generate", "embedded", "--prompt", "x", "--n", "many"], "jaxshare generate"),
        (["convert", "embedded", "x", "--quantize", "int3"], "jaxshare convert"),
        (["agents", "run"], "jaxshare agents run"),
    ):
        with pytest.raises(SystemExit) as stop:
            main.main(arguments)
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith(f"{command}: error: ") and said.count("\n") == 1
        assert said.endswith(f"; see {command} --help\n")


@pytest.mark.slow
def test_the_end_of_a_reader_of_the_output_is_no_error():
    """As with `jaxshare doctor --json | head -c 1`."""
    read, written = os.pipe()
    os.close(read)
    program = [sys.executable, "-m", "jaxshare.serving.cli.main", "doctor", "--json"]
    done = subprocess.run(program, stdout=written, stderr=subprocess.PIPE, text=True)
    os.close(written)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_command_imports_no_other():
    program = (
        "import sys; from jaxshare.serving.cli.main import main\n"
        "assert main(['inspect', '/nowhere']) == 1\n"
        "print(sorted(n for n in sys.modules if n.startswith('jaxshare.serving.cli.')))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "'jaxshare.serving.cli.inspect'" in ran.stdout, ran.stderr
    for other in ("agents", "serve", "generate", "workers"):
        assert f"cli.{other}'" not in ran.stdout


def test_the_words_of_an_agent_are_split_off_wherever_options_stand():
    for before in ([], ["--quiet"], ["--debug", "--compile-cache", "off"]):
        given = [*before, "agents", "run", "f.py", "--seed", "1"]
        assert main.split([*given, "--", "--json", "--"]) == (given, ["--json", "--"])
    assert main.split(["generate", "m", "--", "x"]) == (["generate", "m", "--", "x"], [])


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "jaxshare.serving.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("jaxshare ")


@pytest.mark.slow
def test_demo_json(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxshare.serving.cli.main", "demo", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["right"]["1"] == result["right"]["2"] == result["right"]["4"] == 5
    one, two, four, branches = result["table"]
    assert (
        four["passes"] < two["passes"] < one["passes"]
        and two["identical"]
        and four["identical"]
        and branches["identical"]
    )
    assert all(line["kv_bytes"] < line["kv_bytes_unshared"] for line in (two, four, branches))


PROBLEM = QUESTION + "\n2. 12 * 7\n3. 90 - 17\n4. 23 red and 44 blue cups\n5. 81 - 36"


def test_workers_and_inspect(capsys, tmp_path):
    (tmp_path / "problem.txt").write_text(PROBLEM, encoding="utf-8")
    snapshot = tmp_path / "run.json"
    code, out, err = run(
        capsys,
        "workers",
        "embedded",
        "--problem-file",
        str(tmp_path / "problem.txt"),
        "--budget",
        "320",
        "--finish-at",
        "32,320",
        "--json",
        "--save",
        str(snapshot),
    )
    assert code == 0, err
    result = json.loads(out)
    assert (
        result["answers"]["320"]["value"] == "85, 84, 73, 67, 45"
        and result["finish_reason"] == "answer"
    )
    assert result["answers"]["32"]["passes"] == 32 and result["answers"]["32"]["extra_passes"] > 0
    first = result["workers"]["Alice"][0]
    assert (
        first["text"].startswith("Alice 1: Question 1: 47+38.")
        and first["began"] == 0
        and 20 < first["ended"] < 40
    )
    assert result["passes"] < 160 and result["kv_bytes"] > 0 and result["seconds"] > 0
    assert "85, 84, 73, 67, 45 (written by the workers)" in err and "answer found" in err
    code, out, _ = run(
        capsys, "inspect", str(snapshot), "--out", str(tmp_path / "pictures"), "--json"
    )
    assert code == 0 and set(json.loads(out)["rows"]) == {"Alice", "Bob"}
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"cache.png", "mass.png"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--problem", "x", "--workers", "0"), "--workers is 0"),
        (("--problem", "x", "--names", "Alice,Alice"), "each its own"),
        (("--problem", "x", "--names", "Alice,,Bob"), "workers need names"),
        (("--problem", "x", "--budget", "0"), "budget is 0"),
        (("--problem", "x", "--layout", "ring"), "layout is 'ring'"),
        (("--problem", "x", "--finish-at", "2000"), "finish_at has 2000"),
        (("--problem", "x", "--finish-at", "1;2"), "--finish-at is '1;2'"),
        (("--problem", "x", "--temperature", "-1"), "temperature is -1.0"),
        (("--problem", " "), "the problem is empty"),
        ((), "there is no problem; give --problem TEXT or --problem-file FILE"),
        (("--problem-file", "nowhere.txt"), "the problem file nowhere.txt cannot be read"),
        (("--problem", "1 + " * 9000), "the problem is the longer part: shorten it"),
    ],
)
def test_mistakes_with_workers(capsys, arguments, words):
    code, out, err = run(capsys, "workers", "embedded", *arguments)
    assert code == 1 and out == "" and words in err and err.count("\n") == 1
