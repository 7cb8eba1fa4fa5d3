"""Tasks read from files in the form in which they are published, and what is wrong with others."""

import base64
import json
import pickle
import zlib
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from jaxshare.serving.evaluation import Run, load_task, run_tests, scoring
from jaxshare.serving.evaluation.data_sets.programs import unpickled_text
from jaxshare.serving.evaluation.problems import Problem
from tests.paths import ROOT

DATA = ROOT / "tests" / "fixtures" / "data_sets"


def changed(name: str, to: Path, **fields) -> Path:
    """A copy of the first line of a file with other fields; those that are ... are left out."""
    text = (DATA / name).read_text(encoding="utf-8")
    line = json.loads(text)[0] if name.endswith(".json") else json.loads(text.splitlines()[0])
    line = {key: value for key, value in {**line, **fields}.items() if value is not ...}
    path = to / "changed.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    return path


# mathematics


@pytest.mark.parametrize(
    ("name", "answers", "tokens"),
    [
        ("limo", [("56",), ("4",)], 16),
        ("aime", [("012",)], 16),
        ("aime2024", [("012",)], 16),
        ("aime2025", [("70",), ("468",), ("49",)], 16),
        ("olympiad", [("1", "3"), (r"$\frac{1}{2 n}$",), ("(2,3)", "(3,2)"), None], 64),
        ("olympiad-physics", [("19.6",), (r"1.2 \times 10^{3}", "0.5"), None], 64),
    ],
)
def test_published_files_are_read(name, answers, tokens):
    task = load_task(name, data=DATA)
    assert task.answer_tokens == tokens and not task.bad_lines and task.needs_mathematics
    assert [p.answers for p, known in zip(task.problems, answers, strict=True) if known] == [
        known for known in answers if known
    ]
    assert [p.kind for p in task.problems] == ["box"] * len(answers)
    assert [p.parts for p in task.problems] == [1] * len(answers)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("limo", "limo.jsonl"),
        ("olympiad-physics", "OE_TO_physics_en_COMP.json"),
        ("livecodebench-v5", "test.jsonl"),
    ],
)
def test_parquet_files_hold_the_same_problems(tmp_path, name, file):
    """Against the same lines as JSON, with a column of pictures, as the hub has it, in addition."""
    text = (DATA / file).read_text(encoding="utf-8")
    rows = json.loads(text) if file.endswith(".json") else [*map(json.loads, text.splitlines())]
    path = tmp_path / "test-00000-of-00001.parquet"
    table = pyarrow.Table.from_pylist([{**row, "image_1": b"\x89PNG\xff"} for row in rows])
    parquet.write_table(table, path)
    (tmp_path / "plain.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    ours, theirs = (load_task(name, data=tmp_path / at) for at in (path.name, "plain.jsonl"))
    assert repr(ours) == repr(theirs) and ours.problems and not ours.bad_lines


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    path = tmp_path / "aime.parquet"
    for content in (b"", b"PAR1 and no more", (DATA / "limo.jsonl").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"aime\.parquet is no Parquet file that can be read"):
            load_task("aime", data=path)


def test_fields_say_what_is_asked_and_how_it_is_compared():
    fall, resonance, pendulum = load_task("olympiad-physics", data=DATA).problems
    assert "falls from rest" in fall.text and "unit out of the box" in fall.text
    assert "The answer is a number." in fall.text and "m/s" not in fall.text
    assert (fall.unit, fall.tolerances, fall.any_order) == ("m/s", (0.1,), False)
    assert (resonance.tolerances, resonance.any_order) == ((100.0, 0.01), True)
    assert pendulum.unit is None and pendulum.tolerances == () and "an equation" in pendulum.text
    two = load_task("olympiad", data=DATA).problems[0]
    assert "several answers, each of which is a number" in two.text and two.tolerances == ()
    # Files of several parts: ids are of the file and its line.
    assert [p.id for p in load_task("aime2025", data=DATA).problems] == [
        "aime2025-I-1",
        "aime2025-II-1",
        "aime2025-II-2",
    ]


def test_both_forms_of_aime_are_read():
    task = load_task("aime2024", data=DATA / "aime_2024_problems.jsonl")
    assert task.problems == (Problem("2024-II-4", "Find $10^2+11^2$.", ("221",)),)


@pytest.mark.parametrize(
    ("task", "file", "fields", "words"),
    [
        ("limo", "gsm8k_test.jsonl", {}, 'has no field "solution" (it has question, answer)'),
        ("gsm8k5", "limo.jsonl", {}, 'has an "answer" without "#### "'),
        ("aime", "limo.jsonl", {}, "as LIMO has"),
        ("aime2025", "aime_2024_problems.jsonl", {}, "is of 2024, and the task is AIME 2025"),
        ("aime2024", "aime2024.jsonl", {"answer": "1000"}, "whole numbers from 0 to 999"),
        ("aime2024", "aime2024.jsonl", {"year": 2023}, "is of 2023"),
        ("olympiad", "OE_TO_physics_en_COMP.json", {}, "is of the subject Physics"),
        ("olympiad-physics", "limo.jsonl", {}, 'has no field "final_answer"'),
        (
            "olympiad",
            "OE_TO_maths_en_COMP.json",
            {"question_type": "Theorem proof"},
            "is a proof",
        ),
        ("olympiad", "OE_TO_maths_en_COMP.json", {"language": "Chinese"}, "is in Chinese"),
        ("olympiad", "OE_TO_maths_en_COMP.json", {"modality": "Multimodal"}, "has a picture"),
        ("olympiad", "OE_TO_maths_en_COMP.json", {"final_answer": []}, 'has [] as its "final_an'),
        ("olympiad", "OE_TO_maths_en_COMP.json", {"error": "1,2,3"}, "for 2 answers"),
        (
            "olympiad",
            "OE_TO_maths_en_COMP.json",
            {"error": "small"},
            "has 'small' as its \"error\"",
        ),
        ("livecodebench-v5", "limo.jsonl", {}, 'has no field "question_content"'),
        ("livecodebench-v5", "test.jsonl", {"private_test_cases": "?"}, "neither JSON nor base64"),
        ("livecodebench-v5", "test.jsonl", {"public_test_cases": "[1]"}, "case 1 of"),
        ("livecodebench-v5", "test.jsonl", {"metadata": "[]"}, "no JSON object"),
        (
            "livecodebench-v5",
            "test.jsonl",
            {"metadata": '{"func_name": "f"}'},
            "of the type 'stdin', but its metadata name a function",
        ),
        ("humaneval-plus", "mbppplus.jsonl", {}, 'has no field "entry_point"'),
        ("humaneval-plus", "humanevalplus.jsonl", {"test": "x = 1"}, "without a function check"),
        ("humaneval-plus", "humanevalplus.jsonl", {"prompt": "def"}, "that is not Python"),
        ("humaneval-plus", "HumanEvalPlus-release.jsonl", {"plus_input": [1]}, "no list of lists"),
        ("mbpp-plus", "HumanEvalPlus-release.jsonl", {}, "has no tuples and sets"),
    ],
)
def test_another_file_is_refused_with_what_is_wrong_in_it(tmp_path, task, file, fields, words):
    with pytest.raises(ValueError, match="can be run") as raised:
        load_task(task, data=changed(file, tmp_path, **fields))
    assert words in str(raised.value) and "line 1 " in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"needs a folder with limo.jsonl \(GAIR/LIMO\), but .* has"
    ):
        load_task("limo", data=tmp_path)
    for number in (1, 2, 3):
        name = f"test{number if number > 1 else ''}.jsonl"
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    with pytest.raises(ValueError, match=r"has no test4.jsonl"):
        load_task("livecodebench-v5", data=tmp_path)


# the comparison of answers


@pytest.mark.parametrize(
    ("task", "place", "value", "right"),
    [
        ("olympiad", 0, "3, 1", True),
        ("olympiad", 0, r"\{3,\ 1\}", True),
        ("olympiad", 0, r"x = 1 \text{ or } x = 3", True),
        ("olympiad", 0, "1", False),
        ("olympiad", 0, "1, 1", False),
        ("olympiad", 0, "1, 2, 3", False),
        ("olympiad", 0, None, False),
        ("olympiad", 1, r"\frac{1}{n+n}", True),
        ("olympiad", 2, "(3,2), (2,3)", True),
        ("olympiad", 2, "(3,2)", False),
        ("olympiad", 3, r"\pm\sqrt{2}", True),
        ("olympiad", 3, r"-\sqrt 2, \sqrt 2", True),
        ("olympiad", 3, r"\sqrt{2}", False),
        ("olympiad-physics", 0, "19.6", True),
        ("olympiad-physics", 0, "19.7", True),
        ("olympiad-physics", 0, "19.8", False),
        ("olympiad-physics", 0, r"19.55\,\mathrm{m/s}", True),
        ("olympiad-physics", 0, r"v = 19.6 \text{ m}/\text{s}", True),
        ("olympiad-physics", 1, r"0.495, 1290", True),
        ("olympiad-physics", 1, r"0.495, 1310", False),
        ("olympiad-physics", 2, r"2\pi\sqrt{l/g}", True),
    ],
)
def test_answers_are_compared_as_their_fields_say(mathematician, task, place, value, right):
    problem = load_task(task, data=DATA).problems[place]
    scorer = scoring.Scorer([problem], mathematician)
    answers = {"9": {"value": value, "extra_passes": 0}}
    [score] = scorer.score(Run(1, problem.id, 0, 0, "", {"answers": answers}))
    assert score.right == (right,)


@pytest.mark.parametrize(
    ("equal", "matched"),
    [
        ([[1, 1], [1, 0]], True),  # the first must leave its first answer to the second
        ([[1, 0], [1, 0]], False),
        ([[0, 1, 1], [1, 1, 0], [0, 1, 0]], True),
        ([[1]], True),
        ([[0]], False),
    ],
)
def test_every_reference_has_an_answer_of_its_own(equal, matched):
    assert scoring.all_matched([[*map(bool, row)] for row in equal]) is matched


# programs


SOLUTIONS = {
    "sum_a": "n = int(input())\na = list(map(int, input().split()))\nprint(sum(a))\nprint(sum(a) / 2)",
    "pairs_b": "class Solution:\n    def smallest(self, nums: List[int], k: int):\n"
    "        return tuple(sorted((n, i) for i, n in enumerate(nums)))[:k]",
    "echo_5": "if __name__ == '__main__':\n    print(input(), end='')",
}


def right(problem: Problem, program: str) -> scoring.Score:
    answers = {"9": {"value": program, "extra_passes": 0}}
    run = Run(1, problem.id, 0, 0, "", {"answers": answers})
    [score] = scoring.Scorer([problem], None).score(run)
    return score


def test_livecodebench_is_read_and_judged_by_its_own_cases():
    five, six = (load_task(f"livecodebench-v{n}", data=DATA) for n in (5, 6))
    names = ["sum_a", "pairs_b", *(f"echo_{n}" for n in range(2, 7))]
    assert [p.id for p in six.problems] == names and five.problems == six.problems[:-1]
    assert five.answer_tokens == 1024 and {p.kind for p in six.problems} == {"code"}
    problems = {p.id: p for p in six.problems}
    assert "stdin" in problems["sum_a"].text
    assert "def smallest(self, nums: List[int], k: int)" in problems["pairs_b"].text
    assert [c.output for c in problems["sum_a"].cases.read()] == ["6\n3.0\n", "5\n2.50\n", "0\n0"]
    for name, program in SOLUTIONS.items():
        assert right(problems[name], program).error is None, name
    wrong = right(problems["sum_a"], SOLUTIONS["sum_a"].replace("/ 2", "// 2"))
    assert wrong.right == (False,) and wrong.error.startswith("case 2 of 3: prints '2' in place of")
    wrong = right(problems["pairs_b"], SOLUTIONS["pairs_b"].replace("(n, i)", "(i, n)"))
    assert wrong.error == "case 1 of 3: returns '[[0, 3], [1, 1]]' in place of '[[1, 1], [2, 2]]'"


def test_dates_choose_contests():
    def chosen(dates):
        return [p.id for p in load_task("livecodebench-v6", data=DATA, dates=dates).problems]

    assert chosen("2024-08-01,2025-01-31") == ["sum_a", "pairs_b", "echo_5"]
    assert chosen("2024-07-31,2024-07-31") == ["echo_4"]
    for dates, words in (
        ("2024", "give two dates"),
        ("2025-01-01,2024-01-01", "is after its last"),
    ):
        with pytest.raises(ValueError, match=words):
            chosen(dates)
    with pytest.raises(ValueError, match="the task limo has none"):
        load_task("limo", data=DATA, dates="2024-08-01,2025-01-31")


class Harm:
    def __reduce__(self):
        return (Path("harm").write_text, ("done",))


@pytest.mark.parametrize("value", [Harm(), ["x"], 3, ("x", "y"), b"x", {"x": 1}])
def test_a_pickle_of_anything_but_a_text_is_refused_and_runs_nothing(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(value, protocol)
        with pytest.raises(ValueError, match="is a pickle of"):
            unpickled_text(data)
        coded = base64.b64encode(zlib.compress(data)).decode()
        with pytest.raises(ValueError, match="neither JSON nor base64 of a compressed pickle"):
            load_task(
                "livecodebench-v5", data=changed("test.jsonl", tmp_path, private_test_cases=coded)
            )
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("text", ["", "x", "a\nü\u2028\ud800", "long" * 100_000])
def test_a_pickle_of_a_text_is_that_text(text):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert unpickled_text(pickle.dumps(text, protocol)) == text


GAP = (
    "def mean_gap(numbers: List[float]) -> float:\n"
    "    return helper(numbers[-1] - numbers[0]) / (len(numbers) - 1) if len(numbers) > 1 else 0"
)


@pytest.mark.parametrize("file", ["humanevalplus.jsonl", "HumanEvalPlus-release.jsonl"])
def test_humaneval_plus_is_judged_by_its_tests_or_its_canonical_solution(file):
    [problem] = load_task("humaneval-plus", data=DATA / file).problems
    assert "def mean_gap" in problem.text and problem.kind == "code"
    assert right(problem, GAP).error is None
    assert right(problem, GAP.replace(" else 0", " else 1")).error.startswith(
        "the tests: Assertion"
    )
    assert right(problem, "x = 1").right == (False,)  # the prompt's own stub is no solution


def test_mbpp_plus_is_judged_by_its_tests():
    [problem] = load_task("mbpp-plus", data=DATA).problems
    assert "assert set(shared(" in problem.text
    good = "def shared(a, b):\n    return [x for x in a if x in b]"
    assert run_tests(good, problem.tests).passed
    assert not run_tests(good.replace("in b", "not in b"), problem.tests).passed
