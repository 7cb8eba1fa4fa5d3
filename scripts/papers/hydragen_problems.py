"""Problems of programming competitions, and the prompts of `scripts.papers.hydragen apps`.

APPS (Hendrycks et al., 2021) is read in the fields in which it is published: question, solutions,
input_output, starter_code and difficulty, of which solutions and input_output are JSON in a string.
LiveCodeBench is read as `jaxshare evaluate` reads it.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxshare.serving import jsonl
from jaxshare.serving.evaluation.data_sets import programs
from jaxshare.serving.evaluation.data_sets.reading import (
    DataSet,
    Line,
    data_files,
    id_of,
    read_files,
    require,
    text_of,
)
from jaxshare.serving.evaluation.problems import Case, Problem, Task
from jaxshare.serving.workers.text import answers

APPS, ANY = "apps", "any"
TASKS = (APPS, *programs.LIVE)
QUESTION, ANSWER = "QUESTION:\n", "ANSWER:\n"
_END = "\nQUESTION:"
"""What a model writes after a program, if it goes on with another question."""
_PROBLEMS = 120
"""The default number of problems (appendix D.4)."""
_HEADER = "A Python program is the answer to each question.\n\n"
_FIELDS = '"question", "input_output" and "starter_code"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which problems."""
    parser.add_argument("--task", choices=TASKS, default=APPS, help="the problems (default apps)")
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="the folder of the files as they are published (APPS: test.jsonl, and train.jsonl for "
        "the examples), or the file of the problems (default $JAXSHARE_DATA)",
    )
    parser.add_argument(
        "--problems", type=int, metavar="N", help="the first N of them (default 120; quick 2)"
    )
    parser.add_argument(
        "--difficulty",
        default="introductory",
        metavar="NAME",
        help=f"of APPS' problems and examples, or {ANY} (default %(default)s)",
    )
    parser.add_argument(
        "--starter-code",
        action="store_true",
        help="take problems of APPS with starter code, too, which the paper leaves out",
    )
    parser.add_argument(
        "--shots", type=int, metavar="N", help="examples in the prompt of all (default 2)"
    )
    parser.add_argument(
        "--examples",
        type=Path,
        metavar="FILE",
        help="problems of APPS with solutions, for the examples (default train.jsonl in --data-dir)",
    )


@dataclasses.dataclass(frozen=True)
class AppsCases:
    """The cases of a problem of APPS, decoded when they are needed.

    Attributes:
      text: the field input_output, JSON in a string.
      function: see `jaxshare.serving.evaluation.problems.Cases`.
    """

    text: str
    function: str | None

    @property
    def digest(self) -> str:
        """A hash of all cases."""
        return jsonl.sha256(self.text.encode(errors="surrogatepass"))

    def read(self) -> list[Case]:
        """Decodes the cases.

        Raises:
          ValueError: they cannot be decoded, or there are none.
        """
        found = _object(self.text, "input_output")
        inputs, outputs = found.get("inputs"), found.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise ValueError('has "input_output" without the lists inputs and outputs')
        if len(inputs) != len(outputs) or not inputs:
            raise ValueError(
                f'has "input_output" of {len(inputs)} inputs and {len(outputs)} outputs; it must '
                "have as many of each, and at least one"
            )
        make = _stdin_case if self.function is None else _function_case
        return [make(*pair) for pair in zip(inputs, outputs, strict=True)]


def _stdin_case(given: Any, right: Any) -> Case:
    return Case(_lines(given, "inputs"), _lines(right, "outputs"))


def _lines(value: Any, field: str) -> str:
    """A text, or the list of its lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f'has {json.dumps(value)[:40]} in the {field} of its "input_output"')
    return value


def _function_case(given: Any, right: Any) -> Case:
    """A call. APPS has the value that must be returned alone, or in a list by itself."""
    if not isinstance(given, list):
        raise ValueError(f'has {json.dumps(given)[:40]} as arguments in its "input_output"')
    value = right[0] if isinstance(right, list) and len(right) == 1 else right
    return Case("\n".join(map(json.dumps, given)), json.dumps(value))


def apps_problem(line: Line) -> Problem:
    """A problem of APPS; its text is the prompt that ends where the answer starts.

    Raises:
      ValueError: another form, or cases that cannot be read or are none.
    """
    require(line, "question", "input_output")
    text = line["input_output"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError('has no cases in "input_output", so that nothing can judge its programs')
    name = _object(text, "input_output").get("fn_name")
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f'has {str(name)[:40]!r} as the "fn_name" of its "input_output"')
    cases = AppsCases(text, name)
    cases.read()  # so that a damaged one is named before anything is run
    return Problem(
        id_of(line, "problem_id", "id"),
        _asked(text_of(line, "question"), _starter(line), name),
        cases=cases,
        preamble=programs.PREAMBLE,
    )


def _example(line: Line) -> Problem:
    """A problem of APPS with its first solution, as its text."""
    require(line, "question", "solutions")
    try:
        solutions = json.loads(text_of(line, "solutions"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f'has "solutions" that are no JSON list in a string ({error})') from error
    if not isinstance(solutions, list) or not solutions or not isinstance(solutions[0], str):
        raise ValueError('has no text in its "solutions"')
    text, name = line.get("input_output"), None
    if isinstance(text, str) and text.strip():
        name = _object(text, "input_output").get("fn_name")
    asked = _asked(text_of(line, "question"), _starter(line), name)
    return Problem(id_of(line, "problem_id", "id"), f"{asked}{solutions[0].strip()}\n\n")


def _asked(question: str, starter: str, function: Any) -> str:
    """A question in the form in which the authors of APPS ask models."""
    form = "Use Standard Input format" if function is None else "Use Call-Based format"
    starter = f"{starter.strip()}\n" if starter.strip() else ""
    return f"{QUESTION}{question.strip()}\n{starter}{form}\n\n{ANSWER}"


def _starter(line: Line) -> str:
    starter = line.get("starter_code")
    return starter if isinstance(starter, str) else ""


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'has "{field}" that is no JSON in a string ({error})') from error
    if not isinstance(found, dict):
        raise ValueError(f'has "{field}" that is no JSON object in a string')
    return found


def load_problems(options: argparse.Namespace) -> Task:
    """The problems that the arguments name, with prompts as texts.

    Raises:
      ValueError: no file, one of another form, or fewer problems than --problems asks for.
    """
    source = SOURCES[options.task]
    task = read_files(
        options.task,
        data_files(options.task, source, options.data_dir),
        options.problems or _PROBLEMS,
        lambda problems: source.answer_tokens,
        source.make,
        f"with {source.fields} ({source.source})",
        _wanted(options) if options.task == APPS else lambda line: True,
        fewer=True,
    )
    if options.problems and len(task.problems) < options.problems:
        raise ValueError(
            f"--problems is {options.problems}, but {options.task} has {len(task.problems)} that can "
            "be asked; lower it"
        )
    if options.task == APPS:
        return task
    asked = [dataclasses.replace(p, text=f"{QUESTION}{p.text}\n\n{ANSWER}") for p in task.problems]
    return dataclasses.replace(task, problems=tuple(asked))


SOURCES = {
    APPS: DataSet("APPS, codeparrot/apps", (("test.jsonl",),), _FIELDS, apps_problem, 1024),
    **programs.LIVE,
}
"""The data sets by the names of their tasks."""


def _wanted(options: argparse.Namespace) -> Any:
    def wanted(line: Line) -> bool:
        is_level = options.difficulty in (ANY, line.get("difficulty"))
        return is_level and (options.starter_code or not _starter(line).strip())

    return wanted


def few_shot(options: argparse.Namespace) -> str:
    """The text before all problems: answered examples.

    Raises:
      ValueError: there is no file of examples, or too few of them can be read.
    """
    if not options.shots:
        return _HEADER
    path = options.examples
    if path is None and options.data_dir is not None and options.data_dir.is_dir():
        path = options.data_dir / "train.jsonl"
    if path is None or not path.is_file():
        raise ValueError(
            f"there are no examples for --shots {options.shots}: {path or 'train.jsonl'} is not "
            "there; name a file of problems with solutions with --examples, or give --shots 0"
        )
    advice = 'with "question", "solutions" and "starter_code"'
    wanted = _wanted(options)
    how = (lambda problems: 0, _example, advice, wanted)
    found = read_files(str(path), [path], options.shots, *how, fewer=True)
    if len(found.problems) < options.shots:
        raise ValueError(
            f"--shots is {options.shots}, but {path} has {len(found.problems)} examples; lower it"
        )
    return "".join(problem.text for problem in found.problems[: options.shots])


def program_of(text: str) -> str:
    """The program that a model has written: up to its next question, or in its last fenced block."""
    text = text.partition(_END)[0]
    return answers.code(text) or text
