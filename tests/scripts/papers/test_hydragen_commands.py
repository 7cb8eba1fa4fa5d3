"""Hydragen's experiments from start to end on the embedded model: interrupted, resumed, drawn again;
with sides that are absent, damaged problems and a program that means harm."""

import argparse
import contextlib
import json
import re
import textwrap

import pytest

from jaxshare import Sampler, models
from jaxshare.models import EMBEDDED
from jaxshare.serving import generate
from scripts.bench.parts.sharing.attention import NO_ATTENTION, SHARED, UNSHARED
from scripts.papers import folder as folders
from scripts.papers import (
    hydragen,
    hydragen_apps,
    hydragen_judging,
    hydragen_needles,
    hydragen_problems,
    hydragen_throughput,
)
from tests.scripts.papers.test_hydragen import apps_line, options, write_lines

pytestmark = pytest.mark.slow


@pytest.fixture
def command(tmp_path, capsys):
    """Runs a command into one folder; its code, its report or None, and what it said."""

    def run(*arguments):
        out = str(tmp_path / "out")
        code = hydragen.main([*map(str, arguments), "--output", out, "--json"])
        printed, told = capsys.readouterr()
        return code, json.loads(printed) if printed else None, told

    return run


@contextlib.contextmanager
def interrupted(count):
    """Interrupts a command after so many points of its."""
    add, seen = folders.PaperFolder.add, []

    def counted(self, key, value):
        add(self, key, value)
        seen.append("side" not in key)
        if sum(seen) == count:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders.PaperFolder, "add", counted)
        yield


def points_of(tmp_path):
    """The lines of points, without those of starts."""
    lines = (tmp_path / "out" / folders.POINTS).read_text().splitlines()
    return [line for line in lines if "key" in json.loads(line)]


def goes_on(command, tmp_path, arguments, done, total):
    """Interrupts a command, has it refused, and resumes it; its report."""
    with interrupted(done):
        code, report, told = command(*arguments)
    assert code == 130 and report is None and "--resume goes on" in told
    before = points_of(tmp_path)
    code, _, told = command(*arguments)
    assert code == 2 and "has an experiment already" in told
    code, _, told = command(*arguments, "--seed", 1, "--resume")
    assert code == 2 and "began with seed 0, not 1" in told
    code, _, told = command(*arguments, "--dtype", "bfloat16", "--resume")
    assert code == 2 and "bfloat16" in told
    code, report, _ = command(*arguments, "--resume")
    assert code in (0, 3)
    after = points_of(tmp_path)
    assert after[: len(before)] == before
    assert sum("side" not in json.loads(line)["key"] for line in after) == total
    assert report["model"]["weights"] == models.load(EMBEDDED).fingerprint
    assert report["settings"]["machine"]["cores"] and report["versions"]["jax"]
    assert len(report["runs"]) >= 2 and report["runs"][1]["command"].startswith("python -m scripts")
    assert all((tmp_path / "out" / name).stat().st_size > 1000 for name in report["pictures"])
    saved = json.loads((tmp_path / "out" / folders.RESULT).read_text())
    assert saved["results"] == report["results"]
    return report


def test_throughput(command, monkeypatch, tmp_path):
    arguments = ["throughput", "--quick", "--new-tokens", 4, "--batches", "1,3"]
    arguments += [
        "--sides",
        "shared,unshared,no-attention,transformers,vllm",
        "--max-kv-gib",
        0.002,
    ]
    monkeypatch.setattr("scripts.papers.hydragen_peers.TORCH_PYTHON", "no/such/python")
    monkeypatch.setattr("scripts.papers.hydragen_throughput._may_have_gpu", lambda: False)
    report = goes_on(command, tmp_path, arguments, 1, 4)
    points = {(p["batch"], p["prefix"]): p for p in report["results"]["points"]}
    assert points.keys() == {(1, 64), (1, 256), (3, 64), (3, 256)}
    for point in points.values():
        assert all(side["tokens_per_second"] > 0 for side in point["sides"].values())
        assert SHARED in point["sides"] and NO_ATTENTION in point["sides"]
    # Two kv heads of 32 numbers in float32, keys and values, in four layers: 2,048 bytes a token.
    assert UNSHARED in points[1, 64]["sides"]
    assert "GiB" in points[3, 256]["left_out"][UNSHARED]
    assert "vllm is not installed" in report["results"]["sides"]["vllm"]["status"]
    assert "make parity" in points[1, 64]["left_out"]["transformers"]
    code, _, told = command(*arguments, "--sides", "shared", "--resume")
    assert code == 2 and "began with sides_in_turns" in told
    # More points go on in the same folder, and nothing is run to draw again.
    code, more, _ = command(*arguments, "--prefixes", "64,128", "--resume")
    assert code == 0 and len(more["results"]["points"]) == 6
    code, again, _ = command("throughput", "--redraw")
    assert code == 0 and again["results"] == more["results"] and again["runs"] == more["runs"]


def test_throughput_beside_a_gpu_is_measured_in_a_process_of_its_own(command, monkeypatch):
    monkeypatch.setattr(hydragen_throughput, "_may_have_gpu", lambda: True)
    arguments = ["--batches", 2, "--prefixes", 64, "--sides", "shared,sglang"]
    code, report, _ = command("throughput", "--quick", *arguments)
    assert code == 0 and SHARED in report["results"]["points"][0]["sides"]
    assert "sglang is not installed" in report["results"]["sides"]["sglang"]["status"]


FAKES = {
    "vllm": """
        import time
        class SamplingParams:
            def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
                assert temperature == 1.0 and ignore_eos
                self.tokens, self.text = max_tokens, detokenize
        class LLM:
            def __init__(self, model, dtype, tensor_parallel_size, max_model_len, max_num_seqs,
                         enable_prefix_caching, seed):
                assert dtype == "float32" and max_num_seqs == 4 and max_model_len == 64 + 8
            def generate(self, prompts, params, use_tqdm):
                assert all(len(p["prompt_token_ids"]) == 64 for p in prompts)
                if len(prompts) == 4:
                    raise MemoryError("no blocks are left")
                time.sleep(0.1 + 0.01 * params.tokens * (2 if params.text else 1))
                return [Found(params.tokens) for _ in prompts]
        class Found:
            def __init__(self, tokens):
                self.outputs, self.token_ids = [self], [1] * tokens
    """,
    "sglang": """
        import time
        class Engine:
            def __init__(self, model_path, dtype, tp_size, context_length, max_running_requests,
                         random_seed):
                assert tp_size == 1
            def generate(self, input_ids, sampling_params):
                n = sampling_params["max_new_tokens"]
                time.sleep(0.1 + 0.01 * n)
                return [{"meta_info": {"completion_tokens": n}} for _ in input_ids]
    """,
}


def test_other_engines_are_timed_without_their_first_token(command, monkeypatch, tmp_path):
    """Stand-ins with the interfaces of vLLM and SGLang, which take 10 or 20 ms a pass."""
    for name, text in FAKES.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        about = tmp_path / f"{name}-1.2.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(hydragen_throughput, "_may_have_gpu", lambda: False)
    arguments = ["--batches", "2,4", "--prefixes", 64, "--sides", "shared,vllm,vllm-no-text,sglang"]
    code, report, told = command("throughput", "--quick", *arguments)
    assert code == 0, told
    few, many = report["results"]["points"]
    milliseconds = {side: found["pass_milliseconds"] for side, found in few["sides"].items()}
    assert 19 <= milliseconds["vllm"] < 30 and 9 <= milliseconds["vllm-no-text"] < 20
    assert 9 <= milliseconds["sglang"] < 20 and "sglang" in many["sides"]
    assert "no blocks are left" in many["left_out"]["vllm"]
    assert report["results"]["sides"]["vllm"]["versions"]["vllm"] == "1.2"


def test_attention(command, tmp_path):
    arguments = ["attention", "--quick", "--batches", "1,5", "--torch-python", "no/such/python"]
    with interrupted(1):
        assert command(*arguments)[0] == 130
    before = points_of(tmp_path)
    code, _, told = command(*arguments, "--heads", "paper", "--resume")
    assert code == 2 and "began with heads 4, not 8" in told
    code, report, _ = command(*arguments, "--resume")
    assert code == 0 and points_of(tmp_path)[: len(before)] == before
    points = report["results"]["points"]
    assert [(p["rows"], p["prefix"]) for p in points] == [(1, 64), (1, 256), (5, 64), (5, 256)]
    assert all({SHARED, UNSHARED} == p["sides"].keys() for p in points)
    assert "not installed" in report["results"]["sides"]["SDPA"]["status"]
    assert report["pictures"] == ["attention.png"]


TEXT = " ".join(f"Sentence {i} is here to be read, and it says nothing." for i in range(400))


def test_needles(command, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    arguments = ["needles", "--quick", "--text", tmp_path / "text", "--document", "768,1024"]
    report = goes_on(command, tmp_path, arguments, 1, 4)
    points = report["results"]["points"]
    assert [(p["document"], p["questions"]) for p in points] == [
        *((768, 2), (768, 4), (1024, 2), (1024, 4))
    ]
    for point in points:
        assert point["seconds"].keys() == {SHARED, UNSHARED, NO_ATTENTION}
        assert point["same_answers"] and len(point["answers"]) == point["questions"]
        assert 0 <= point["accuracy"][SHARED] <= 1
    code, _, told = command(*arguments, "--resume", "--questions", "2,8")
    assert code == 2 and "began with facts 4, not 8" in told


def test_needles_are_answered_as_generate_answers(tmp_path):
    """The oracle is the scheduler, over whole prompts by themselves."""
    model = models.load(EMBEDDED)
    needles = hydragen_needles.hide(
        TEXT, 768, 3, lambda t: len(model.tokenizer.encode(t, verbose=False)), 5
    )
    document = hydragen_needles.Document.of(model, needles)
    asked = argparse.Namespace(max_kv_gib=None, rounds=1)
    found = hydragen_needles.measure(document, 3, asked, lambda what: None)
    prompts = [needles.prefix + fact.question for fact in needles.questions(3)]
    right = generate(
        model,
        [model.tokenizer.encode(prompt, verbose=False) for prompt in prompts],
        max_new_tokens=hydragen_needles.ANSWER_TOKENS,
        sampler=Sampler(ignore_eos=True),
        share=False,
    )
    wanted = [model.tokenizer.decode([*c.tokens]) for c in right.completions]
    assert found["answers"] == wanted and found["same_answers"]


def test_apps(command, tmp_path):
    lines = [apps_line(i) for i in (1, 2, 3)]
    lines.insert(1, apps_line(9, input_output="{damaged"))
    write_lines(tmp_path / "test.jsonl", lines)
    write_lines(tmp_path / "train.jsonl", [apps_line(7)])
    arguments = ["apps", "--quick", "--problems", 3, "--data-dir", tmp_path, "--larger-batch", 3]
    # Two batches of each side but the last, which has one.
    report = goes_on(command, tmp_path, arguments, 3, 7)
    results = report["results"]
    assert [*results["sides"]] == [*hydragen_apps.SIDES.values()]
    assert [side["problems_at_a_time"] for side in results["sides"].values()] == [2, 2, 2, 3]
    kept = {side: found["kv_bytes"] for side, found in results["sides"].items()}
    assert kept["no sharing"] > kept["one level"] > kept["two levels"]
    assert results["same_texts"] == dict.fromkeys(results["sides"], 1.0)
    assert results["bad_lines"][0]["line"] == 2
    assert results["pass_at"] == {side: {"1": 0.0} for side in results["sides"]}
    scores = (tmp_path / "out" / "scores.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["samples"]["one level"] for line in scores) == 6
    # Marks are made again without running; other cases are refused.
    code, again, _ = command("apps", "--data-dir", tmp_path, "--redraw", "--k", "1,2")
    assert code == 3 and again["results"]["pass_at"]["two levels"] == {"1": 0.0, "2": 0.0}
    lines[0] = apps_line(1, {"inputs": ["1"], "outputs": ["2"]})
    write_lines(tmp_path / "test.jsonl", lines)
    code, _, told = command("apps", "--data-dir", tmp_path, "--redraw")
    assert code == 2 and "the problems of apps are others" in told


def test_sides_without_memory_are_left_out_of_apps(command, tmp_path):
    write_lines(tmp_path / "test.jsonl", [apps_line(1), apps_line(2)])
    # Blocks of 128 tokens of 2,048 bytes: 4 rows are 1 MiB, and with a block before them more.
    arguments = ["--quick", "--shots", 0, "--data-dir", tmp_path, "--max-kv-gib", 1.1 / 1024]
    code, report, _ = command("apps", *arguments)
    results = report["results"]
    assert code == 0 and [*results["sides"]] == ["no sharing"]
    assert results["left_out"].keys() == {"one level", "two levels", "two levels, more rows"}
    assert all("GiB" in why for why in results["left_out"].values())


def test_problems_of_livecodebench_are_asked_in_the_same_form(tmp_path):
    line = {
        "question_id": "a",
        "question_content": "Double the number.",
        "starter_code": "",
        "public_test_cases": json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}]),
        "private_test_cases": "[]",
        "metadata": "{}",
    }
    write_lines(tmp_path / "live.jsonl", [line])
    task = hydragen_problems.load_problems(
        options(tmp_path / "live.jsonl", task="livecodebench-v5")
    )
    (problem,) = task.problems
    assert problem.text.startswith("QUESTION:\nDouble the number.")
    assert problem.text.endswith("\n\nANSWER:\n") and len(problem.cases.read()) == 1


HOSTILE = """
import os, signal, sys
open({path!r}, "w").write("x") if os.path.isdir({folder!r}) else None
try:
    os.kill({pid}, signal.SIGKILL)
except OSError:
    pass
for _ in range(200):
    if not os.fork():
        while True:
            pass
"""


def test_programs_are_judged_whatever_they_do(tmp_path):
    """The right one passes; one that means harm, one that never ends and none at all do not."""
    write_lines(tmp_path / "test.jsonl", [apps_line(2), apps_line(3)])
    given = options(tmp_path, k=[1, 2], test_seconds=1.0, test_memory=256)
    task = hydragen_problems.load_problems(given)
    victim = tmp_path / "victim"
    hostile = HOSTILE.format(path=str(victim), folder=str(tmp_path), pid=2**22 + 5)
    texts = {
        "two levels": {
            0: ["print(2 * int(input()))\n\nQUESTION:\nWhat?", hostile],
            1: ["while True:\n    pass", ""],
        }
    }
    settings = {"problems": task.digest, "samples": 2}
    kept = folders.PaperFolder(tmp_path, hydragen_apps.EXPERIMENT, settings, {}, {})
    found = hydragen_judging.mark(given, kept, task, texts)
    assert found["pass_at"] == {"two levels": {"1": 0.25, "2": 0.5}}
    assert [p["right"]["two levels"] for p in found["problems"]] == [1, 0]
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    errors = [line["error"] for line in lines]
    assert errors[0] is None and errors[3] == "there is no program"
    assert all(error for error in errors[1:])
    if found["marked"]["sandbox"] != "python":
        assert not victim.exists()
    with pytest.raises(ValueError, match="--k has 4"):
        hydragen_judging.mark(argparse.Namespace(**{**vars(given), "k": [4]}), kept, task, texts)


def test_without_namespaces_the_lack_is_said(tmp_path, monkeypatch, capsys):
    write_lines(tmp_path / "test.jsonl", [apps_line(2)])
    given = options(tmp_path, k=None, test_seconds=1.0, test_memory=256)
    task = hydragen_problems.load_problems(given)
    settings = {"problems": task.digest, "samples": 1}
    kept = folders.PaperFolder(tmp_path, hydragen_apps.EXPERIMENT, settings, {}, {})
    ways = hydragen_judging.sandbox.known_ways()
    monkeypatch.setattr(hydragen_judging.sandbox, "ways", lambda: ways[-1:])
    texts = {"one level": {0: ["print(2 * int(input()))"]}}
    found = hydragen_judging.mark(given, kept, task, texts)
    assert found["pass_at"] == {"one level": {"1": 1.0}}
    assert re.search("gives no namespaces", capsys.readouterr().err)
    assert found["marked"]["sandbox"] == ways[-1].name
