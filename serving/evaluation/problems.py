"""Problems and tasks: what an evaluation asks, and what it needs to judge the answers."""

import dataclasses
import json
from typing import Any, Protocol

from jaxshare.serving import jsonl


@dataclasses.dataclass(frozen=True)
class Case:
    """One case of a program's tests.

    Attributes:
      input: what the program reads from stdin, or the arguments of the function that is called, each
        as JSON on a line of its own.
      output: what it must print, or the value that must be returned, as JSON.
    """

    input: str
    output: str


class Cases(Protocol):
    """The cases of a program's tests, in the form in which they are published."""

    @property
    def function(self) -> str | None:
        """The function that cases call, a method of the class Solution if there is one; None where
        the program reads stdin and writes stdout."""
        ...

    @property
    def digest(self) -> str:
        """A hash of all cases."""
        ...

    def read(self) -> list[Case]:
        """Reads the cases.

        Raises:
          ValueError: they cannot be read.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem, in one prompt and with one answer.

    Attributes:
      id: its name within the task.
      text: the user's words.
      answers: the right answers; with more than one, the model's answer lists as many with commas
        between, and all count alike. Empty where tests decide.
      tests: Python code that raises an exception unless the program before it is right; None where
        answers or cases decide.
      exact: answers are compared as strings; else as mathematics.
      any_order: the answers may be listed in any order, and count as one: all of them or none.
      tolerances: for each answer the largest absolute error of its number, or None for an exact
        comparison; empty for exact comparisons of all.
      unit: of the answer; a model that writes it after the number is not wrong for that.
      cases: the cases that decide whether a program is right, or None.
      preamble: Python code before the program, such as its imports.
    """

    id: str
    text: str
    answers: tuple[str, ...] = ()
    tests: str | None = None
    exact: bool = False
    any_order: bool = False
    tolerances: tuple[float | None, ...] = ()
    unit: str | None = None
    cases: Cases | None = None
    preamble: str = ""

    @property
    def is_program(self) -> bool:
        """True if the answer is a program, which tests or cases judge."""
        return self.tests is not None or self.cases is not None

    @property
    def kind(self) -> str:
        """The kind of answer; see `Workers`."""
        return "code" if self.is_program else "box"

    @property
    def parts(self) -> int:
        """The number of questions, each of which counts by itself."""
        return 1 if self.any_order else len(self.answers) or 1

    @property
    def described(self) -> list[Any]:
        """All that the digest of a task is of; fields that were added later only where they are set."""
        first = [self.id, self.text, [*self.answers], self.tests, self.exact]
        later = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)[len(first) :]
            if getattr(self, field.name) != field.default
        }
        if self.cases is not None:
            later["cases"] = [self.cases.function, self.cases.digest]
        return [*first, later] if later else first


@dataclasses.dataclass(frozen=True)
class Task:
    """The problems of an evaluation.

    Attributes:
      name: of the task, or its file.
      problems: in order.
      answer_tokens: maximum tokens of an answer that is requested early.
      bad_lines: of the files: [{"file": path, "line": number, "error": reason}].
    """

    name: str
    problems: tuple[Problem, ...]
    answer_tokens: int
    bad_lines: tuple[dict[str, Any], ...] = ()

    @property
    def digest(self) -> str:
        """A hash of all problems."""
        return jsonl.sha256(json.dumps([problem.described for problem in self.problems]).encode())

    @property
    def complaints(self) -> list[str]:
        """A sentence for each bad line, which names the file, the line and what is wrong with it."""
        return [f"{bad['file']}, line {bad['line']}: {bad['error']}" for bad in self.bad_lines]

    @property
    def needs_mathematics(self) -> bool:
        """True if answers are compared as mathematics."""
        return any(problem.answers and not problem.exact for problem in self.problems)
