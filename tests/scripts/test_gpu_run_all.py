"""`make gpu`: which parts run, how long, what is kept, and where it goes on; the parts themselves are
rehearsed by the slow test."""

import json
import sys

import pytest

from scripts.bench import attention
from scripts.docs import tables
from scripts.gpu import run_all, texts
from scripts.gpu.run_all import DONE, FAILED, LATE, Part

PROGRAMS = {
    "good": "open(file, 'w').write(json.dumps({'benchmark': 'x', 'machine': {}, 'goals': []}))",
    "bad": "sys.exit('no: it fails')",
    "slow": "time.sleep(60)",  # and writes nothing when it is interrupted
}


@pytest.fixture
def parts(monkeypatch):
    """Three parts: one that writes its result, one that fails, and one that does not end."""
    made = tuple(Part(name, "", "", "", 20 if name != "slow" else 1) for name in PROGRAMS)

    def command(part, output, *, rehearsed, sides):
        program = f"import json, sys, time; file = sys.argv[1]; {PROGRAMS[part.name]}"
        return [sys.executable, "-c", program, str(output)]

    monkeypatch.setattr(run_all, "PARTS", made)
    monkeypatch.setattr(Part, "command", command)
    monkeypatch.setattr(run_all, "SLOWER", 1)
    monkeypatch.setattr(tables, "gpu", lambda folder: [])


def state(folder):
    return json.loads((folder / "state.json").read_text())


def rehearse(folder, *arguments: str) -> int:
    return run_all.main(["--rehearse", "--output", str(folder), *arguments])


def test_what_became_of_each_part_is_kept_and_the_done_ones_are_not_run_again(
    parts, tmp_path, capsys
):
    folder = tmp_path / "new"
    assert rehearse(folder) == 1
    found = state(folder)
    assert {name: part["status"] for name, part in found.items()} == {
        "good": DONE,
        "bad": FAILED,
        "slow": LATE,
    }
    assert "no: it fails" in found["bad"]["said"] and found["slow"]["seconds"] < 15
    assert "ended after 1 s, without results" in found["slow"]["said"]
    report = json.loads((folder / "gpu.json").read_text())
    assert report["results"].keys() == {"good"} and report["state"] == found
    said = capsys.readouterr()
    assert "no: it fails" in said.out and said.err.count("good: ") == 2
    assert rehearse(folder, "--parts", "good,bad") == 1
    said = capsys.readouterr()
    assert "good: " not in said.err and "bad: failed" in said.err
    assert rehearse(folder, "--parts", "good", "--again") == 0
    assert "good: done" in capsys.readouterr().err


def test_results_of_another_commit_are_measured_again(parts, tmp_path, capsys, monkeypatch):
    assert rehearse(tmp_path, "--parts", "good") == 0
    monkeypatch.setattr(run_all, "current_commit", lambda: "another")
    assert rehearse(tmp_path, "--parts", "good") == 0
    assert capsys.readouterr().err.count("good: done") == 2


def test_minutes_are_of_all_parts_together(parts, tmp_path):
    times = iter((0.0, 0.0, 50.0, 61.0))
    options = run_all.parse(["--rehearse", "--output", str(tmp_path), "--minutes", "1"])
    found = run_all.State(tmp_path / "state.json")
    run_all.run_parts(options, found, lambda: next(times))
    assert {name: part["limit"] for name, part in found.parts.items()} == {"good": 20, "bad": 10}


def test_the_first_half_takes_at_most_nine_minutes_and_names_differ():
    assert sum(part.seconds + run_all.GRACE for part in run_all.FIRST) <= 9 * 60
    names = [part.name for part in run_all.PARTS]
    assert len({*names, run_all.RESULT, "state"}) == len(names) + 2


def test_the_benchmark_of_attention_takes_the_options_of_its_parts(tmp_path):
    own = [part for part in run_all.PARTS if part.module == "scripts.bench.attention"]
    covered = set()
    for part in own:
        for rehearsed in (False, True):
            command = part.command(tmp_path / "x.json", rehearsed=rehearsed)
            assert command[:3] == [sys.executable, "-m", part.module]
            options = attention.parse(command[3:])
            assert options.cpu == rehearsed and options.quick != rehearsed
            covered |= {*options.parts}
    assert covered == {*attention.parts.PARTS}


def test_sides_are_of_attention_alone(tmp_path):
    for part in run_all.PARTS:
        command = part.command(tmp_path / "x.json", rehearsed=False, sides="triton,jax-cudnn")
        if part.module == "scripts.bench.attention":
            assert attention.parse(command[3:]).sides == ("triton", "jax.nn, cudnn")
        else:
            assert "--sides" not in command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "texts,speed"], "--parts has 'speed'"),
        (["--minutes", "0"], "--minutes is 0"),
        (["--output", __file__], "--output is"),
    ],
)
def test_arguments_that_it_does_not_take(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        run_all.main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_without_a_gpu_it_says_so_in_one_sentence(capsys, monkeypatch, tmp_path):
    assert run_all.main(["--output", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert "no NVIDIA GPU" in said and "--rehearse" in said and said.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_texts_are_compared():
    one = [{"tokens": [1, 2, 3], "logprob": -3.0}, {"tokens": [4, 5], "logprob": -1.0}]
    other = [{"tokens": [1, 2, 3], "logprob": -3.3}, {"tokens": [4, 6, 7], "logprob": -1.0}]
    found = texts.compared(one, other)
    assert found["texts"] == 2 and found["equal"] == 1 and found["first_difference"] == 1
    assert found["logprob_error"] == pytest.approx(0.1)
    same = {"texts": 2, "equal": 2, "logprob_error": 1e-5}
    results = {dtype: dict.fromkeys(texts.KINDS, same) for dtype in texts.DTYPES}
    assert all(goal.met for goal in texts.goals(results))
    results["float32"] = dict.fromkeys(texts.KINDS, found)
    of_each = len(texts.KINDS)
    assert [goal.met for goal in texts.goals(results)] == [False] * (1 + of_each) + [True] * of_each
    # A text that is drawn may differ, and a greedy one may not.
    results["float32"] = dict.fromkeys(texts.KINDS, same) | {"drawn": {**same, "equal": 1}}
    assert texts.goals(results)[0].met
    results["float32"] |= {"workers": {**same, "equal": 1}}
    assert not texts.goals(results)[0].met


def side(microseconds: float) -> dict[str, float]:
    return {"microseconds": microseconds, "of_copy": 0.5, "of_products": 0.25}


def test_the_table(tmp_path):
    assert len(tables.gpu(tmp_path)) == 2  # that there is nothing
    sides = {"triton": side(20), "xla": side(90), "jax.nn, cudnn": side(30)}
    of_workers = {"triton, 1 row": side(10), "triton, 4 rows": side(25), "xla, 4 rows": side(50)}
    workers = {"case": "4 rows, history 50, 9 each", "group": 5, "sides": of_workers}
    point = {"case": "8 rows", "group": 4, "sides": sides}
    step = {"batch": 1, "sides": {"triton": {"tokens_per_second": 123.4, "of_limit": 0.9}}}
    results = {
        "contexts": {"benchmark": "attention", "results": {"contexts": [point]}},
        "workers-attention": {"benchmark": "attention", "results": {"workers": workers}},
        "sampling": {
            "benchmark": "sampling",
            "results": {"top_k": {"milliseconds": {"jaxshare": [1, 2, 3], "bisection": [9]}}},
        },
        "step": {"benchmark": "attention", "results": {"step": [step]}},
    }
    (tmp_path / "gpu.json").write_text(json.dumps({"results": results}))
    assert tables.gpu(tmp_path)[1:] == [
        ("attention, 8 rows, G 4", "20.0 us (triton)", "0.50", "jax.nn, cudnn 30.0 us"),
        ("attention, 4 rows, history 50, 9 each, G 5", "25.0 us (triton, 4 rows)", "0.50", ""),
        ("sampling, top_k", "2.000 ms", "-", "bisection 9.000 ms"),
        ("decode, batch 1, triton", "123 tokens/s", "0.90", "-"),
    ]


@pytest.mark.slow
def test_a_rehearsal_runs_every_part(tmp_path):
    assert rehearse(tmp_path) == 0
    assert {name: part["status"] for name, part in state(tmp_path).items()} == {
        part.name: DONE for part in run_all.PARTS
    }
    assert len(tables.gpu(tmp_path)) > 10
