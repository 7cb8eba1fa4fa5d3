"""The tasks of an evaluation: generated sums, published data sets, and a user's own files."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from jaxshare.serving.evaluation import arithmetic as sums
from jaxshare.serving.evaluation.arithmetic_forms import FORMS
from jaxshare.serving.evaluation.data_sets import mathematics, programs
from jaxshare.serving.evaluation.data_sets.reading import (
    DATA_VARIABLE,
    Line,
    check_enough,
    id_of,
    read_data_set,
    read_files,
    text_of,
)
from jaxshare.serving.evaluation.problems import Problem, Task

__all__ = ["DATA_VARIABLE", "QUESTIONS", "TASKS", "Problem", "Task", "load_task"]

QUESTIONS = sums.QUESTIONS
"""Default number of questions of a generated problem."""
SUMS, TYPED, DEPENDENT, GSM8K5 = "sums", "sums-typed", "sums-dependent", "gsm8k5"
_DATA_SETS = {**mathematics.MATHEMATICS, **programs.PROGRAMS}
TASKS = (SUMS, TYPED, DEPENDENT, GSM8K5, *_DATA_SETS)
_GROUP = 5
_MAX_SAMPLES = 100_000
_SAMPLES = 128
"""Default number of problems of tasks that have more (section 4.1)."""
_GSM8K = (
    "Solve these problems and return comma-separated answers \\boxed{answer1,..., answer5} :\n "
)
"""Footnote 7 of the paper, to the letter."""
_FIELDS = ("id", "problem", "answer", "tests")
_LINE = 'such as {"problem": "...", "answer": "..."}'


def load_task(
    name: str,
    *,
    samples: int | None = None,
    questions: tuple[int, int] = (QUESTIONS, QUESTIONS),
    data: str | Path | None = None,
    dates: str | None = None,
) -> Task:
    """Loads the problems of a task.

    Args:
      name: one of `TASKS`, or a file of JSON lines, each {"problem": "...", "answer": "..."}, with
        a list of answers if it has several questions, or {"problem": "...", "tests": "..."}; with
        an optional "id".
      samples: number of problems, from the first; default 128 of those that are generated or
        grouped, where there are as many, and all of a file.
      questions: minimum and maximum number of questions of a generated problem.
      data: the folder of the data sets, or the file of this one; default $JAXSHARE_DATA.
      dates: of LiveCodeBench, two dates such as "2024-08-01,2025-01-31": problems of contests
        within them.

    Raises:
      ValueError: no such task, numbers out of range, a missing folder or file, one of another
        form, more samples than there are, or no line that can be read.
    """
    if samples is not None and samples < 1:
        raise ValueError(f"--samples is {samples}; evaluate on at least 1 problem")
    if samples is not None and samples > _MAX_SAMPLES:
        raise ValueError(f"--samples is {samples}; evaluate on at most {_MAX_SAMPLES} problems")
    if dates is not None and name not in programs.LIVE:
        raise ValueError(
            f"--dates is given, but the task {name} has none; they are of "
            f"{' and '.join(programs.LIVE)}"
        )
    if name in (SUMS, TYPED, DEPENDENT):
        return _generated(name, _SAMPLES if samples is None else samples, questions)
    if name == GSM8K5:
        return _gsm8k5(samples, data)
    if name in _DATA_SETS:
        if dates is not None:
            return read_data_set(name, _DATA_SETS[name], data, samples, programs.dates(dates))
        return read_data_set(name, _DATA_SETS[name], data, samples)
    if not name.endswith((".jsonl", ".json", ".parquet")):
        raise ValueError(
            f"--task is {name!r}; it must be one of {', '.join(TASKS)}, or a file of JSON lines "
            "whose name ends with .jsonl, or of Parquet"
        )
    return read_files(name, [Path(name)], samples, _early_tokens, _own_problem, _LINE)


# Generated.


def _generated(name: str, samples: int, questions: tuple[int, int]) -> Task:
    """Generates problems of `jaxshare.serving.evaluation.arithmetic`; none depends on their number.

    Problems of `TYPED` take the forms of a message in turn, and have its name in their ids.
    """
    fewest = 2 if name == DEPENDENT else 1
    minimum, maximum = questions
    if not fewest <= minimum <= maximum <= sums.MAX_QUESTIONS:
        given = minimum if minimum == maximum else f"{minimum}-{maximum}"
        raise ValueError(
            f"--questions is {given}; a problem of {name} has {fewest} to {sums.MAX_QUESTIONS}"
        )
    problems, forms = [], [*FORMS.items()]
    for i in range(samples):
        count = random.Random(f"evaluate/questions/{i}").randint(minimum, maximum)
        rng, (form, shape) = random.Random(f"evaluate/{name}/{i}"), forms[i % len(forms)]
        made = (
            sums.typed_problem(rng, count, shape)
            if name == TYPED
            else sums.make_problem(rng, count, dependent=name == DEPENDENT)
        )
        label = f"{form} {i // len(forms) + 1}" if name == TYPED else str(i + 1)
        problems.append(Problem(label, made.prompt(), tuple(map(str, made.answers)), exact=True))
    return Task(name, tuple(problems), 8 * maximum)


# GSM8K by five, and files of one's own.


def _gsm8k5(samples: int | None, data: str | Path | None) -> Task:
    """Groups the questions of GSM8k by five, each in one group alone (section 4.1)."""
    singles = read_data_set(GSM8K5, mathematics.GSM8K, data)
    groups = [
        singles.problems[i : i + _GROUP]
        for i in range(0, len(singles.problems) - _GROUP + 1, _GROUP)
    ]
    if not groups:
        raise ValueError(
            f"{GSM8K5} asks {_GROUP} questions at once, and its file has {len(singles.problems)} that can be "
            "read; give the file as it is published"
        )
    if samples is not None:
        check_enough(GSM8K5, samples, len(groups))
    problems = [
        Problem(
            "+".join(p.id for p in group),
            _GSM8K + "\n ".join(f"{i}. {p.text}" for i, p in enumerate(group, 1)),
            tuple(p.answers[0] for p in group),
        )
        for group in groups[: _SAMPLES if samples is None else samples]
    ]
    return Task(GSM8K5, tuple(problems), 64, singles.bad_lines)


def _own_problem(value: Line) -> Problem:
    if unknown := sorted({*value} - {*_FIELDS}):
        raise ValueError(
            f"has the unknown field {json.dumps(unknown[0])}; known are {', '.join(_FIELDS)}"
        )
    if ("answer" in value) == ("tests" in value):
        raise ValueError('must have one of "answer" and "tests"')
    name = id_of(value, "id")
    if "tests" in value:
        return Problem(name, text_of(value, "problem"), tests=_code(text_of(value, "tests")))
    answer = value["answer"]
    if type(answer) in (int, float):
        answer = str(answer)
    answers = answer if isinstance(answer, list) else [answer]
    if not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ValueError(
            f'has {json.dumps(value["answer"])[:40]} as its "answer"; give a text, a number or a '
            "list of texts"
        )
    return Problem(name, text_of(value, "problem"), tuple(answers))


def _code(tests: str) -> str:
    try:
        compile(tests, "tests", "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f'has "tests" that are not Python ({error}); give code that raises an exception where '
            "the program is wrong"
        ) from error
    return tests


def _early_tokens(problems: Sequence[Problem]) -> int:
    """The tokens of a whole program, or of a formula (appendix C)."""
    return 1024 if any(problem.is_program for problem in problems) else 64
