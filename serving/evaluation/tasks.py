"""The tasks of an evaluation: generated sums, data sets in a folder, and a user's own files."""

import codecs
import dataclasses
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxshare.serving import jsonl
from jaxshare.serving.evaluation import arithmetic as sums
from jaxshare.serving.evaluation.arithmetic_forms import FORMS

DATA_VARIABLE = "JAXSHARE_DATA"
SUMS, TYPED, DEPENDENT = "sums", "sums-typed", "sums-dependent"
_GROUP = 5
_MAX_SAMPLES = 100_000
_SAMPLES = 128
"""Default number of problems of tasks that have more (section 4.1)."""
_GSM8K = (
    "Solve these problems and return comma-separated answers \\boxed{answer1,..., answer5} :\n "
)
"""Footnote 7 of the paper, to the letter."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem, in one prompt and with one answer.

    Attributes:
      id: its name within the task.
      text: the user's words.
      answers: the right answers; with more than one, the model's answer lists as many with commas
        between, and all count alike. Empty where tests decide.
      tests: Python code that raises an exception unless the program before it is right; None where
        answers decide.
      exact: answers are compared as strings; else as mathematics.
    """

    id: str
    text: str
    answers: tuple[str, ...] = ()
    tests: str | None = None
    exact: bool = False

    @property
    def kind(self) -> str:
        """The kind of answer; see `Workers`."""
        return "box" if self.tests is None else "code"

    @property
    def parts(self) -> int:
        """The number of questions, each of which counts by itself."""
        return len(self.answers) or 1


@dataclasses.dataclass(frozen=True)
class Task:
    """The problems of an evaluation.

    Attributes:
      name: of the task, or its file.
      problems: in order.
      answer_tokens: maximum tokens of an answer that is requested early.
      bad_lines: of the file: [{"line": number, "error": reason}].
    """

    name: str
    problems: tuple[Problem, ...]
    answer_tokens: int
    bad_lines: tuple[dict[str, Any], ...] = ()

    @property
    def digest(self) -> str:
        """A hash of all problems."""
        return jsonl.sha256(
            json.dumps([dataclasses.astuple(problem) for problem in self.problems]).encode()
        )

    @property
    def needs_mathematics(self) -> bool:
        """True if answers are compared as mathematics."""
        return any(problem.answers and not problem.exact for problem in self.problems)


def load_task(
    name: str,
    *,
    samples: int | None = None,
    questions: tuple[int, int] = (sums.QUESTIONS, sums.QUESTIONS),
    data: str | Path | None = None,
) -> Task:
    """Loads the problems of a task.

    Args:
      name: one of `TASKS`, or a file of JSON lines, each {"problem": "...", "answer": "..."}, with
        a list of answers if it has several questions, or {"problem": "...", "tests": "..."}; with
        an optional "id".
      samples: number of problems, from the first; default 128 of those that are generated or
        grouped, and all of a file.
      questions: minimum and maximum number of questions of a generated problem.
      data: the folder of the data sets; default $JAXSHARE_DATA.

    Raises:
      ValueError: no such task, numbers out of range, a missing folder or file, more samples than
        there are, or no line that can be read.
    """
    if samples is not None and samples < 1:
        raise ValueError(f"--samples is {samples}; evaluate on at least 1 problem")
    if samples is not None and samples > _MAX_SAMPLES:
        raise ValueError(f"--samples is {samples}; evaluate on at most {_MAX_SAMPLES} problems")
    if name in (SUMS, TYPED, DEPENDENT):
        return _generated(name, _SAMPLES if samples is None else samples, questions)
    if name == "gsm8k5":
        return _gsm8k5(_SAMPLES if samples is None else samples, data)
    if name in _SETS:
        file, source, fields, tokens = _SETS[name]
        path = _data_file(data, name, file, source)
        return _from_file(name, path, samples, tokens, lambda value: _set_problem(value, *fields))
    if not name.endswith((".jsonl", ".json")):
        raise ValueError(
            f"--task is {name!r}; it must be one of {', '.join(TASKS)}, or a file of JSON lines "
            "whose name ends with .jsonl"
        )
    return _from_file(name, Path(name), samples, None, _own_problem)


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


# Data sets.

_SETS = {
    "olympiad": (
        "olympiadbench.jsonl",
        "OlympiadBench, OE_TO_maths_en_COMP",
        ("question", "answer"),
        64,
    ),
    "aime": ("aime2024.jsonl", "AIME 2024", ("problem", "answer"), 16),
}
"""The file, its source, its fields, and the maximum tokens of an early answer (appendix C)."""
TASKS = (SUMS, TYPED, DEPENDENT, "gsm8k5", *_SETS)


def _data_file(folder: str | Path | None, task: str, file: str, source: str) -> Path:
    folder = folder or os.environ.get(DATA_VARIABLE)
    need = f"the task {task} needs a folder with {file} ({source})"
    if not folder:
        raise ValueError(f"{need}; name it with --data-dir or in {DATA_VARIABLE}")
    if not Path(folder, file).is_file():
        what = f"has no {file}" if Path(folder).is_dir() else "does not exist"
        raise ValueError(
            f"{need}, but {folder} {what}; name another with --data-dir or in {DATA_VARIABLE}"
        )
    return Path(folder, file)


def _gsm8k5(samples: int, data: str | Path | None) -> Task:
    """Groups the questions of GSM8k by five, each in one group alone (section 4.1)."""
    singles = _from_file(
        "gsm8k5",
        _data_file(data, "gsm8k5", "gsm8k_test.jsonl", "the test set of openai/grade-school-math"),
        None,
        None,
        lambda value: _set_problem(value, "question", "answer"),
    )
    groups = [
        singles.problems[i : i + _GROUP]
        for i in range(0, len(singles.problems) - _GROUP + 1, _GROUP)
    ]
    _check_enough("gsm8k5", samples, len(groups))
    problems = [
        Problem(
            "+".join(p.id for p in group),
            _GSM8K + "\n ".join(f"{i}. {p.text}" for i, p in enumerate(group, 1)),
            tuple(p.answers[0].rpartition("####")[2].strip().replace(",", "") for p in group),
        )
        for group in groups[:samples]
    ]
    return Task("gsm8k5", tuple(problems), 64, singles.bad_lines)


def _set_problem(value: dict[str, Any], problem: str, answer: str) -> Problem:
    return Problem(str(value.get("id", "")), _text(value, problem), (_text(value, answer),))


# Files.


def _own_problem(value: dict[str, Any]) -> Problem:
    known = {"id", "problem", "answer", "tests"}
    if unknown := sorted({*value} - known):
        raise ValueError(
            f"has the unknown field {json.dumps(unknown[0])}; known are id, problem, answer, tests"
        )
    if ("answer" in value) == ("tests" in value):
        raise ValueError('must have one of "answer" and "tests"')
    name = value.get("id", "")
    if type(name) not in (str, int):
        raise ValueError(
            f"has the id {json.dumps(name)[:40]}; it must be a string or a whole number"
        )
    if "tests" in value:
        return Problem(str(name), _text(value, "problem"), tests=_code(_text(value, "tests")))
    answer = value["answer"]
    if type(answer) in (int, float):
        answer = str(answer)
    answers = answer if isinstance(answer, list) else [answer]
    if not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ValueError(
            f'has {json.dumps(value["answer"])[:40]} as its "answer"; give a text, a number or a '
            "list of texts"
        )
    return Problem(str(name), _text(value, "problem"), tuple(answers))


def _text(value: dict[str, Any], field: str) -> str:
    text = value.get(field)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'has no text as its "{field}"; give at least one word')
    return text


def _code(tests: str) -> str:
    try:
        compile(tests, "tests", "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f'has "tests" that are not Python ({error}); give code that raises an exception where '
            "the program is wrong"
        ) from error
    return tests


def _from_file(
    name: str,
    path: Path,
    samples: int | None,
    tokens: int | None,
    make: Callable[[dict[str, Any]], Problem],
) -> Task:
    """Reads the first problems of a file; a problem without an id has its line number as id."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"the task file {path} cannot be read ({error}); give a file of JSON lines"
        ) from error
    problems: dict[str, Problem] = {}
    bad_lines: list[dict[str, Any]] = []
    for number, raw in _lines(data):
        if samples is not None and len(problems) == samples:
            break
        try:
            problem = make(_object(raw))
            problem = problem if problem.id else dataclasses.replace(problem, id=str(number))
            if problem.id in problems:
                raise ValueError(
                    f"has the id {json.dumps(problem.id)} of a line before; give each line its own"
                )
            problems[problem.id] = problem
        except ValueError as error:
            bad_lines.append({"line": number, "error": str(error)})
        except RecursionError:
            bad_lines.append({"line": number, "error": "is nested too deeply"})
    if not problems:
        first = f" (line {bad_lines[0]['line']} {bad_lines[0]['error']})" if bad_lines else ""
        raise ValueError(
            f"no line of the task file {path} can be run{first}; give at least one such as "
            '{"problem": "...", "answer": "..."}'
        )
    if samples is not None:
        _check_enough(name, samples, len(problems))
    return Task(
        name,
        tuple(problems.values()),
        tokens or _early_tokens([*problems.values()]),
        tuple(bad_lines),
    )


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    for number, raw in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if raw.strip():
            yield number, raw


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode())
        # JSON may escape half of a surrogate pair, which is no text.
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(f"is not JSON in UTF-8 ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"is {json.dumps(value)[:40]}; it must be a JSON object")
    return value


def _early_tokens(problems: Sequence[Problem]) -> int:
    """The tokens of a whole program, or of a formula (appendix C)."""
    return 1024 if any(problem.tests is not None for problem in problems) else 64


def _check_enough(name: str, samples: int, available: int) -> None:
    if samples > available:
        raise ValueError(f"--samples is {samples}, but {name} has {available} problems; lower it")
