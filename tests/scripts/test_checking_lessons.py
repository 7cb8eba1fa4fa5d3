"""Lessons of workers that check each other, read back from what could be seen."""

import dataclasses
import random
import re

import pytest

from jaxshare.models import EMBEDDED, load
from jaxshare.serving.evaluation.arithmetic import make_problem
from jaxshare.serving.workers.layouts import worker_names
from scripts.bench import checking as bench
from scripts.train import checking, sessions, teacher, train_workers
from tests.scripts.test_teaching import before, steps_of, text_of

CHECK = re.compile(r"Check (\d): [^A]* Answer \1: (\d+), (\d+)\?([ \d:!]+), (right|wrong)\.")
MEND = re.compile(r" (\w+) is right\. Answer (\d): (\d+)\.")


@pytest.fixture(scope="module")
def script():
    model = load(EMBEDDED)
    format = train_workers.teaching_format(model)
    return teacher.Script.of(model.tokenizer, 402, model.generation, format)


def lesson_of(script, seed: int, count: int, layout: str = "combined", **options):
    rng = random.Random(seed)
    problem = dataclasses.replace(make_problem(rng, rng.randint(2, 5)), checked=True)
    there = [
        checking.said(problem, "Zoe", step, number, rng, wrong=step % 2 == 1)
        for step, number in enumerate(range(1, len(problem.questions) + 1, 2), 1)
    ]
    names = worker_names(count)
    return sessions.play(script, problem, names, layout, rng, said=there, **options), problem


@pytest.mark.parametrize("layout", ["contiguous", "combined"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_checks_and_mended_answers_follow_from_what_could_be_seen(script, layout, count):
    said = {"right": 0, "wrong": 0, "mended": 0}
    for seed in range(4):
        lesson, problem = lesson_of(script, seed, count, layout)
        answers, boxes, codec = text_of(problem), 0, script.codec
        for row, step in steps_of(codec, lesson):
            text = codec.decode([target for _, target in step])
            for found in CHECK.finditer(text):
                number = int(found[1])
                assert int(found[2]) == answers[number - 1]
                seen = before(codec, lesson.trace, step, found.start(5)).partition("assistant")[2]
                given = re.findall(rf"Question {number}: [^A]* Answer {number}: (\d+)\.", seen)
                assert given, "checked what had not been answered"
                assert found[3] == given[0]
                pairs = zip(found[2], found[3], strict=True)
                assert found[4] == "".join(f" {a}:{b}" + "!" * (a != b) for a, b in pairs)
                assert (found[5] == "right") == (int(given[0]) == answers[number - 1])
                said[found[5]] += 1
            for found in MEND.finditer(text):
                seen = before(codec, lesson.trace, step, found.start() + 1)
                assert re.search(rf"Answer {found[2]}: {found[3]}, [^.]*wrong", seen), "is not"
                assert count == 1 or found[1] != worker_names(count)[row]
                assert int(found[3]) == answers[int(found[2]) - 1]
                said["mended"] += 1
            if whole := re.search(r"\\boxed\{([^}]*)\}", text):
                seen = before(codec, lesson.trace, step, text.index("\\") + 1)
                assert whole[1] == ", ".join(map(str, answers))
                wrong = re.findall(r"Answer (\d): \d+, [^.]*wrong", seen)
                assert all(re.search(rf"is right\. Answer {n}:", seen) for n in wrong)
                boxes += 1
        assert boxes and script.end in lesson.targets
    assert min(said.values()) > 0, said


def test_wrong_answers_are_not_learned(script):
    """Of what workers write, paragraphs with a wrong answer have no weight, and all others have."""
    wrong = 0
    for seed in range(16):
        lesson, problem = lesson_of(script, seed, 2)
        answers, weights = (
            text_of(problem),
            dict(
                zip(
                    zip(lesson.at.tolist(), lesson.targets.tolist(), strict=True),
                    lesson.weights.tolist(),
                    strict=True,
                )
            ),
        )
        for _, step in steps_of(script.codec, lesson):
            text = script.codec.decode([target for _, target in step])
            for found in re.finditer(r"Question (\d): \d[^A]* Answer \1: (\d+)\.", text):
                right = int(found[2]) == answers[int(found[1]) - 1]
                at = len(script.codec.encode(text[: found.start(2)]))
                assert (weights[step[at]] == 1.0) == right
                wrong += not right
    assert wrong > 2


def test_a_lesson_with_answers_at_its_begin_is_the_trace_of_a_session(script):
    lesson, problem = lesson_of(script, 1, 2, ask_every=0)
    ours = lesson.trace.tokens.tolist()
    prompt = script.prompt(
        problem, worker_names(2), sessions.LAYOUTS["combined"](worker_names(2), script.format)
    )
    assert ours[: len(prompt)] == prompt
    assert script.codec.decode(ours[len(prompt) :]).startswith("\n\nZoe 1: Question 1: ")


@pytest.mark.parametrize("seed", range(30))
def test_a_wrong_answer_has_one_other_digit(seed):
    rng = random.Random(seed)
    problem = make_problem(rng)
    number = rng.randint(1, 5)
    right, wrong = problem.body(number), checking.wrong_body(problem, number, rng)
    given, answer = wrong.rpartition(": ")[2], right.rpartition(": ")[2]
    assert len(given) == len(answer) and len(wrong) == len(right)
    assert sum(a != b for a, b in zip(given, answer, strict=True)) == 1
    assert sum(a != b for a, b in zip(wrong, right, strict=True)) <= 2
    assert str(int(given[:-1])) == given[:-1]


# The benchmark


def test_marks_count_what_is_found_by_one_and_mended_by_another():
    injected = bench.inject(0)
    answers, wrong, right = injected.problem.answers, injected.wrong, injected.right
    box = f"\\boxed{{{', '.join(map(str, answers))}}}"
    found = f"Check {wrong}: 1+1. 1+1=2. Answer {wrong}: {answers[wrong - 1]}, 0? 1:0!, wrong."
    fine = f"Check {right}: 1+1. 1+1=2. Answer {right}: {answers[right - 1]}, 2? 2:2, right."
    mended = f" Bob is right. Answer {wrong}: {answers[wrong - 1]}."
    good = bench.marks(injected, {"Alice": mended + box, "Bob": found + fine}, 9)
    assert good == bench.Marks(True, True, 0, 1, 1.0, 9)
    alone = bench.marks(injected, {"Alice": found + mended + box, "Bob": ""}, 9)
    assert alone.found and not alone.mended
    alarm = bench.marks(injected, {"Alice": fine.replace("right", "wrong") + box, "Bob": ""}, 9)
    assert (alarm.found, alarm.false_alarms, alarm.checks) == (False, 1, 1)
    assert bench.marks(injected, {"Alice": found, "Bob": mended}, 9).mended is False  # no box


def test_injected_sessions_have_one_right_and_one_wrong_answer():
    for seed in range(20):
        injected = bench.inject(seed)
        given = [
            re.findall(r"Question (\d): .* Answer \1: (\d+)\.", text)[0] for text in injected.texts
        ]
        right = [
            int(answer) == text_of(injected.problem)[int(number) - 1] for number, answer in given
        ]
        assert sorted(right) == [False, True]
        assert int(given[right.index(False)][0]) == injected.wrong
        assert "check what others answer" in injected.problem.prompt()


def test_no_problems_are_refused(capsys):
    with pytest.raises(SystemExit) as error:
        bench.main(["--problems", "0"])
    assert error.value.code == 2
    assert "--problems is 0, but at least 1 is needed" in capsys.readouterr().err
