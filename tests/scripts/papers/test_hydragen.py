"""The parts of Hydragen's experiments that need no run: problems, prompts, marks, rates, arguments."""

import argparse
import itertools
import json
import re
import statistics

import numpy as np
import pytest

from jaxshare import models
from jaxshare.models import EMBEDDED
from jaxshare.serving.evaluation.problems import Case
from scripts.bench.parts.sharing.attention import NO_ATTENTION, SHARED, THEIRS, UNSHARED
from scripts.papers import folder as folders
from scripts.papers import (
    hydragen,
    hydragen_apps,
    hydragen_attention,
    hydragen_judging,
    hydragen_memory,
    hydragen_needles,
    hydragen_peers,
    hydragen_plots,
    hydragen_problems,
    hydragen_throughput,
)

STDIN = {"inputs": ["3\n", "5\n"], "outputs": ["6\n", "10\n"]}


def apps_line(number=1, cases=STDIN, **more):
    """A line of APPS as it is published."""
    return {
        "problem_id": number,
        "question": f"Print {number} times the number that you read.",
        "solutions": json.dumps([f"print({number} * int(input()))", "pass"]),
        "input_output": json.dumps(cases),
        "difficulty": "introductory",
        "url": "",
        "starter_code": "",
        **more,
    }


def write_lines(path, lines):
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path.write_text(text, encoding="utf-8")


def options(folder, **more):
    given = {
        "task": "apps",
        "data_dir": folder,
        "problems": None,
        "difficulty": "introductory",
        "starter_code": False,
        "shots": 1,
        "examples": None,
    }
    return argparse.Namespace(**{**given, **more})


# Problems.


def test_a_problem_of_apps_has_its_cases_and_its_prompt():
    problem = hydragen_problems.apps_problem(apps_line(2))
    assert problem.id == "2" and problem.cases.function is None
    assert problem.cases.read() == [Case("3\n", "6\n"), Case("5\n", "10\n")]
    assert problem.text == (
        "QUESTION:\nPrint 2 times the number that you read.\nUse Standard Input format\n\nANSWER:\n"
    )
    lines = {"inputs": [["1", "2"]], "outputs": [["3"]]}
    assert hydragen_problems.apps_problem(apps_line(cases=lines)).cases.read() == [
        Case("1\n2", "3")
    ]


def test_a_problem_with_a_function_has_arguments_and_values_as_json():
    cases = {"fn_name": "f", "inputs": [[1, "a"], [2, "b"]], "outputs": [["x"], [1, 2]]}
    line = apps_line(cases=cases, starter_code="def f(n, s):\n")
    problem = hydragen_problems.apps_problem(line)
    assert problem.cases.function == "f"
    assert problem.cases.read() == [Case('1\n"a"', '"x"'), Case('2\n"b"', "[1, 2]")]
    assert "\ndef f(n, s):\nUse Call-Based format\n\nANSWER:\n" in problem.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_output": ""}, "no cases"),
        ({"input_output": "{broken"}, "no JSON in a string"),
        ({"input_output": "[1]"}, "no JSON object"),
        ({"input_output": "[" * 100_000}, "no JSON in a string"),
        ({"input_output": '{"inputs": [], "outputs": []}'}, "0 inputs and 0 outputs"),
        ({"input_output": '{"inputs": ["1"], "outputs": []}'}, "1 inputs and 0 outputs"),
        ({"input_output": '{"inputs": [1], "outputs": ["1"]}'}, "has 1 in the inputs"),
        ({"input_output": '{"fn_name": "f(", "inputs": [], "outputs": []}'}, '"fn_name"'),
        ({"question": " "}, '"question"'),
    ],
)
def test_a_problem_without_a_judge_is_named(change, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        hydragen_problems.apps_problem(apps_line(**change))


def test_problems_are_chosen_as_in_the_paper_and_bad_lines_are_named(tmp_path):
    lines = [
        apps_line(1),
        "not json",
        apps_line(2, difficulty="interview"),
        apps_line(3, starter_code="def f():"),
        apps_line(4),
        apps_line(5, input_output=""),
        apps_line(6),
    ]
    write_lines(tmp_path / "test.jsonl", lines)
    task = hydragen_problems.load_problems(options(tmp_path))
    assert [problem.id for problem in task.problems] == ["1", "4", "6"]
    assert [bad["line"] for bad in task.bad_lines] == [2, 6]
    every = options(tmp_path, difficulty="any", starter_code=True, problems=2)
    assert [p.id for p in hydragen_problems.load_problems(every).problems] == ["1", "2"]
    with pytest.raises(ValueError, match="--problems is 9, but apps has 3"):
        hydragen_problems.load_problems(options(tmp_path, problems=9))
    with pytest.raises(ValueError, match=r"has no test\.jsonl"):
        hydragen_problems.load_problems(options(tmp_path / ".."))


def test_examples_have_their_first_solutions(tmp_path):
    with pytest.raises(ValueError, match="--examples, or give --shots 0"):
        hydragen_problems.few_shot(options(tmp_path))
    lines = [apps_line(1, solutions=""), apps_line(7), apps_line(8)]
    write_lines(tmp_path / "train.jsonl", lines)
    text = hydragen_problems.few_shot(options(tmp_path, shots=2))
    assert text.count("QUESTION:\n") == 2
    assert text.endswith("ANSWER:\nprint(8 * int(input()))\n\n")
    with pytest.raises(ValueError, match=r"--shots is 3, .* has 2 examples"):
        hydragen_problems.few_shot(options(tmp_path, shots=3))
    named = options(None, shots=1, examples=tmp_path / "train.jsonl")
    assert hydragen_problems.few_shot(named) in text
    assert hydragen_problems.few_shot(options(None, shots=0)).strip()


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("print(1)\n\nQUESTION:\nmore", "print(1)\n"),
        ("print(1)", "print(1)"),
        ("Here:\n```python\nprint(2)\n```\nDone.\nQUESTION:\n```python\nno\n```", "print(2)\n"),
        ("", ""),
    ],
)
def test_a_program_ends_where_the_next_question_starts(text, program):
    assert hydragen_problems.program_of(text).strip() == program.strip()


# Marks.


@pytest.mark.parametrize(("samples", "right"), [(4, [0, 1, 4]), (5, [2, 5]), (1, [0, 1])])
def test_pass_at_k_is_the_mean_over_all_ways_to_draw(samples, right):
    ks = [*range(1, samples + 1)]
    found = hydragen_judging.pass_at(dict(enumerate(right)), samples, ks)
    for k in ks:
        shares = []
        for count in right:
            marks = [True] * count + [False] * (samples - count)
            shares.append(statistics.fmean(map(any, itertools.combinations(marks, k))))
        assert found[str(k)] == pytest.approx(statistics.fmean(shares), abs=1e-12)


# Memory and rates.


def test_what_does_not_fit_is_left_out_with_its_size():
    model = models.load(EMBEDDED)
    memory = hydragen_memory.SideRoom(model, 1.0)
    assert memory.prepare("first", 3 << 28, lambda: "made") == "made"
    assert memory.prepare("second", 1 << 29, lambda: pytest.fail("it does not fit")) is None
    assert memory.prepare("third", 1 << 28, lambda: "fits") == "fits"
    assert memory.left_out == {
        "second": "keys and values of 0.50 GiB, more than 0.25 GiB that are left"
    }


def throughput_points():
    settings = {
        **{"model": "m", "dtype": "float32", "new_tokens": 8, "rounds": 3},
        "machine": {"cores": 2, "cpu": "c"},
    }
    kept = folders.PaperFolder(None, hydragen_throughput.EXPERIMENT, settings, {}, {})
    for (batch, prefix), times in {
        (1, 64): {SHARED: [0.1, 0.2, 0.4], UNSHARED: [0.4, 0.4, 0.4], NO_ATTENTION: [0.1] * 3},
        (4, 64): {SHARED: [0.1] * 3},
    }.items():
        key = {"batch": batch, "prefix": prefix}
        left_out = {} if UNSHARED in times else {UNSHARED: "too large"}
        value = {"seconds": times, "left_out": left_out}
        name = json.dumps({**key, "with": "jaxshare"})
        kept._points[name] = key, value
    absent = {"status": "not installed: no vllm", "versions": None}
    kept._points["vllm"] = {"side": "vllm"}, absent
    engine = {"seconds": {"sglang": [0.5, 0.5, 0.5]}, "left_out": {}}
    kept._points["sglang"] = {"batch": 4, "prefix": 64, "with": "sglang"}, engine
    return kept


def test_rates_are_medians_and_compared_with_shared():
    kept = throughput_points()
    results = hydragen_throughput.summarise(kept)
    first, second = results["points"]
    assert first["sides"][SHARED]["tokens_per_second"] == pytest.approx(5)
    assert first["sides"][SHARED]["lowest"] == pytest.approx(2.5)
    assert first["sides"][SHARED]["highest"] == pytest.approx(10)
    assert first["shared_to"] == pytest.approx({UNSHARED: 2.0, NO_ATTENTION: 0.5})
    assert second["shared_to"] == pytest.approx({"sglang": 5.0})
    text = hydragen_throughput.as_text({"settings": kept.settings, "results": results})
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line[:1].isdigit()}
    assert rows["4"] == ["8"]  # of the last table, sglang's
    assert hydragen_peers.NOT_MEASURED in text
    assert "vllm: not installed: no vllm" in text and re.search(r"\n4 +x\n", text)


def test_pictures_show_what_there_is(tmp_path):
    results = hydragen_throughput.summarise(throughput_points())
    attention = [
        {
            "rows": rows,
            "prefix": prefix,
            "suffix": suffix,
            "slower_than_shared": {UNSHARED: {"median": rows / suffix}},
        }
        for rows, prefix, suffix in itertools.product((2, 8), (64, 128), (16, 32))
    ]
    needles = [
        {
            "document": 100,
            "document_tokens": 98,
            "questions": count,
            "seconds": {SHARED: count / 10},
            "left_out": {UNSHARED: "too large"},
        }
        for count in (2, 4)
    ]
    sides = {"one level": {"seconds": 2.0, "problems_at_a_time": 2}}
    apps = {"sides": sides, "pass_at": {"one level": {"1": 0.25, "2": 0.5}}}
    pictures = {
        **hydragen_plots.throughput(results),
        **hydragen_plots.attention({"points": attention}),
        **hydragen_plots.needles({"points": needles}),
        **hydragen_plots.apps(apps),
    }
    names = folders.draw(tmp_path, pictures)
    assert names == [
        *("throughput-batches.png", "throughput-prefixes.png", "attention.png"),
        *("needles.png", "apps.png"),
    ]
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in names)
    for name in ("attention.png", "needles.png"):
        figure = pictures[name]()
        figure.canvas.draw()
        axis = figure.axes[0].yaxis
        marks = [text for label in axis.get_ticklabels(which="both") if (text := label.get_text())]
        assert len(marks) > 1 and all(re.fullmatch(r"[\d.]+", mark) for mark in marks)
    named = {text.get_text() for text in pictures["attention.png"]().legends[0].get_texts()}
    assert named == {f"{UNSHARED}, prefix {prefix}" for prefix in (64, 128)}
    assert hydragen_plots.throughput({"points": []}) == {} == hydragen_plots.apps({"sides": {}})


# Attention's heads, and arguments.


def test_heads_are_those_of_each_device():
    model = models.outline(EMBEDDED)

    def sizes(*how):
        config = hydragen_attention.heads_of(model, *how)
        return config.num_heads, config.num_kv_heads, config.head_dim

    assert sizes("model", 1) == (4, 2, 32) and sizes("model", 4) == (1, 1, 32)
    assert sizes("paper", 1) == (8, 1, 128)
    with pytest.raises(ValueError, match="--tensor is 3"):
        sizes("model", 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["throughput", "--batches", "0"], "--batches is '0'"),
        (["throughput", "--prefixes", "64,64"], "--prefixes is '64,64'"),
        (["throughput", "--sides", "shared,tgi"], "--sides has 'tgi'"),
        (["throughput", "--new-tokens", "1"], "--new-tokens is 1"),
        (["throughput", "--rounds", "0"], "--rounds is 0"),
        (["attention", "--dtype", "float32"], "--dtype is float32"),
        (["attention", "--suffixes", "x"], "--suffixes is 'x'"),
        (["needles", "--text", "no/such/text"], "--text is no/such/text"),
        (["needles", "--questions", "-1", "--text", __file__], "--questions"),
        (["needles", "--max-kv-gib", "nan", "--text", __file__], "--max-kv-gib is nan"),
        (["apps", "--samples", "0"], "--samples is 0"),
        (["apps", "--samples", "4", "--k", "5"], "--k has 5"),
        (["apps", "--test-seconds", "0"], "--test-seconds is 0"),
        (["apps", "--sides", "three"], "--sides has 'three'"),
        (["apps", "--task", "codeforces"], "--task"),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        hydragen.main([*arguments, "--output", str(tmp_path / "out")])
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and told.count("\n") == 1 and said in told, told
    assert told.startswith(f"scripts.papers.hydragen {arguments[0]}: ")
    assert not (tmp_path / "out").exists()


def test_a_prompt_that_the_context_does_not_hold_is_refused(tmp_path, capsys):
    out, text = str(tmp_path / "out"), str(tmp_path / "text")
    (tmp_path / "text").write_text("A sentence. " * 10)
    for arguments, said in (
        (["throughput", "--prefixes", "8192", "--sides", "shared"], "--prefixes has 8192"),
        (["needles", "--document", "8192", "--text", text], "--document has 8192"),
        (["needles", "--document", "4096", "--text", text, "--questions", "2"], "--text has"),
        (["apps", "--data-dir", str(tmp_path / "none")], "does not exist"),
    ):
        assert hydragen.main([*arguments, "--output", out]) == 2
        told = capsys.readouterr().err.strip().splitlines()
        assert said in told[-1], told
    assert not (tmp_path / "out").exists()


def test_a_folder_without_an_experiment_cannot_be_redrawn(tmp_path, capsys):
    assert hydragen.main(["throughput", "--output", str(tmp_path), "--redraw"]) == 2
    assert "has no experiment that can be read" in capsys.readouterr().err


def test_stored_tokens_are_those_of_the_blocks():
    """Room by level, counted block by block."""
    asked = tuple(
        hydragen_apps.Prompt(number, tuple(range(length)), 3)
        for number, length in enumerate((100, 40, 70))
    )
    work = hydragen_apps.Work(None, tuple(range(500)), asked, 3, 20, None, 0, 2, 3)

    def tiles(*lengths):
        return sum(-(-n // 128) * 128 for n in lengths)

    assert work.store_tokens(hydragen_apps.NONE) == tiles(*[620] * 6)
    assert work.store_tokens(hydragen_apps.ONE) == tiles(500, *[120] * 6)
    assert work.store_tokens(hydragen_apps.TWO) == tiles(500, *[100, *[20] * 3] * 2)
    assert work.store_tokens(hydragen_apps.MORE) == tiles(500, *[100, *[20] * 3] * 3)
    assert [start for start, _ in work.batches(hydragen_apps.TWO)] == [0, 2]
    assert [len(batch) for _, batch in work.batches(hydragen_apps.MORE)] == [3]


def test_texts_are_compared_sample_by_sample():
    texts = {"a": {0: ["x", "y"], 1: ["z", "w"]}, "b": {0: ["x", "y"], 1: ["z", "?"]}}
    assert hydragen_apps._same_texts(texts) == {"a": 1.0, "b": 0.75}


def test_needles_are_counted_as_right_by_their_first_word():
    kept = folders.PaperFolder(None, hydragen_needles.EXPERIMENT, {}, {}, {})
    value = {
        "document_tokens": 90,
        "seconds": {SHARED: [1.0, 2.0, 3.0], UNSHARED: [8.0, 4.0, 2.0]},
        "left_out": {},
        "right": {SHARED: 3, UNSHARED: 2},
    }
    kept._points["one"] = {"document": 100, "questions": 4}, value
    (point,) = hydragen_needles.summarise(kept)["points"]
    assert point["to_shared"] == {UNSHARED: 2.0} and point["accuracy"] == {
        SHARED: 0.75,
        UNSHARED: 0.5,
    }
    assert np.isclose(point["seconds"][SHARED], 2.0) and THEIRS not in point["seconds"]
