r"""Answers in texts: the last valid `\boxed{...}` or program, and a vote among several answers.

# five answers in one box, or it is none
rule = box_answers(lambda answer: answer.count(",") == 4)
session = Workers(model, problem, kind=rule)
"""

import ast
import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from jaxshare.decoding.automaton import ByteAutomaton
from jaxshare.serving.workers.text.step_automata import box_automaton, code_automaton

Valid = Callable[[str], bool]
"""A function: the text of an answer -> whether it is valid."""

# An escape is a backslash and the next character, unless they start a box.
_BRACES = re.compile(r"\\boxed\{|\\(?!\\boxed\{).|[{}]", re.DOTALL)
_SPACING = re.compile(r"\\(?:[ ,;:!]|q?quad\b)|[~$\s{}]|\\(?:text|mathrm|mathbf|displaystyle)\b")
_PLACEHOLDER = re.compile(
    r"(?:(?:the|my|your|final|numerical|correct)*(?:answer|result|solution)(?:goes)?(?:here)?[_ "
    r"]?(?:\d+|[a-z])?|\.\.+|…|\\[lc]?dots|[?_]+)?",
    re.IGNORECASE,
)
_PYTHON = ("", "python", "python3", "py", "py3")


@dataclasses.dataclass(frozen=True)
class AnswerRule:
    """The form of answers, and which of them are valid. A valid one ends a session of workers.

    Attributes:
      find: text -> every answer in it that is closed, in order.
      valid: which of them are answers; see `is_answer` and `is_program`.
      guess: text -> the best answer for an early stop, valid or not, or None.
      automaton: makes the automaton that marks the bytes at which an answer closes. The decode loop
        looks for answers there alone.
      code: whether the early-stop prompt asks for a program, and not for a box.
      name: of the kind, where it is one of `KINDS`.
    """

    find: Callable[[str], Sequence[str]]
    valid: Valid
    guess: Callable[[str], str | None]
    automaton: Callable[[], ByteAutomaton]
    code: bool = False
    name: str | None = None

    def extract(self, text: str, told: str = "") -> str | None:
        """The last valid answer, or None.

        Args:
          text: written by workers, or after the finisher's prompt, which it then starts with.
          told: the prompt, in which answers are shown: text that only repeats one of those
            with letters or dots in it, such as `\\boxed{answer1, ..., answer5}`, is not an answer.
        """
        shown = (
            {
                _squeezed(answer)
                for answer in self.find(told)
                if re.search(r"[A-Za-z…]|\.\.", answer)
            }
            if told
            else set()
        )
        return next(
            (a for a in reversed(self.find(text)) if self.valid(a) and _squeezed(a) not in shown),
            None,
        )


def box_answers(valid: Valid | None = None) -> AnswerRule:
    """The rule for answers in `\\boxed{...}`, by default those of `is_answer`."""
    return AnswerRule(
        _boxes, valid or is_answer, boxed, box_automaton, name=None if valid else "box"
    )


def code_answers(language: str = "python", valid: Valid | None = None) -> AnswerRule:
    """The rule for programs in fenced code blocks.

    Args:
      language: of the task. Blocks with the name of another one are not programs; blocks without a
        name may be.
      valid: which blocks are programs; default, for Python, those of `is_program`, and else all
        that are not blank.
    """
    names = _PYTHON if language == "python" else ("", language)

    def find(text: str) -> list[str]:
        return [
            program
            for name, program in _blocks(text)
            if name.lower() in names and (name or not _is_data(program))
        ]

    check = valid or (is_program if language == "python" else lambda program: bool(program.strip()))
    return AnswerRule(
        find,
        check,
        code,
        code_automaton,
        code=True,
        name="code" if language == "python" and not valid else None,
    )


def is_answer(text: str) -> bool:
    r"""Returns whether a box holds an answer.

    It must have text, and not only placeholders such as `answer1, ...`, `?` or `\ldots`.
    """
    entries = [_SPACING.sub("", entry) for entry in text.split(",")]
    return not all(_PLACEHOLDER.fullmatch(entry) for entry in entries)


def is_program(text: str) -> bool:
    """Returns whether a text is a program in Python: it parses, and is not blank."""
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def has_entries(count: int) -> Valid:
    """The `Valid` of boxes that answer `count` questions.

    They have at least as many entries with commas between (a comma may also be within a number),
    and one of these is an answer. Boxes of single answers, before the last one, do not end a
    session then.
    """
    return _Entries(count)


@dataclasses.dataclass(frozen=True)
class _Entries:
    """An object, not a closure, because evaluations send it to other processes."""

    count: int

    def __call__(self, text: str) -> bool:
        return is_answer(text) and len(_entries(text)) >= self.count


def boxed(text: str) -> str | None:
    r"""The text in the last closed `\boxed{...}` that is not blank, or None.

    Braces nest; after a backslash they are ordinary characters. A box that is never closed does not
    hide those before it. The last box inside another one is the one that counts. Give it only text
    that was written, and the finisher before it: instructions have boxes too.
    """
    return next(reversed(_boxes(text)), None)


def code(text: str) -> str | None:
    """The last closed code block; or the one that the text ends in, if none is closed; or None.

    A fence is a line that starts with three backticks or tildes, blanks before them aside; the one
    that closes a block is of the same characters. After those that open a block there may be the
    name of a language. Lines lose the blanks before the opening fence. Blank blocks do not count.
    """
    return next(
        reversed(
            [program for _, program in _blocks(text)]
            or [program for _, program in _blocks(text, open=True)]
        ),
        None,
    )


def vote(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer (self-consistency), whitespace around it aside.

    It is the first of equals. None has no vote.
    """
    counts = collections.Counter(answer.strip() for answer in answers if answer is not None)
    return max(counts, key=lambda answer: counts[answer], default=None)


def _boxes(text: str) -> list[str]:
    """All closed boxes that are not blank, in the order in which they close."""
    boxes, start, depth = [], 0, 0
    for brace in _BRACES.finditer(text):
        if brace[0] == "\\boxed{":
            start, depth = brace.end(), 1
        elif depth and brace[0] in "{}":
            depth += 1 if brace[0] == "{" else -1
            if not depth and (answer := text[start : brace.start()].strip()):
                boxes.append(answer)
    return boxes


def _blocks(text: str, *, open: bool = False) -> list[tuple[str, str]]:
    """The closed blocks, or with `open` the one that the text ends in, none blank.

    Each is (name of the language, program).
    """
    programs: list[tuple[str, str]] = []
    block: list[str] | None = None
    name = indent = opening = ""

    def keep() -> None:
        if block is not None and (program := "\n".join(block)).strip():
            programs.append((name, program))

    for line in text.split("\n"):
        inner = line.lstrip()
        fence = inner[:3] if inner.startswith(("```", "~~~")) else ""
        if block is None:
            info = inner.lstrip(fence[:1] or None)
            # more backticks in the line: code within it
            if fence == "~~~" or (fence and "`" not in info):
                block, indent, opening, name = (
                    [],
                    line[: -len(inner)],
                    fence,
                    next(iter(info.split()), ""),
                )
        elif fence == opening:
            if not open:
                keep()
            block = None
        else:
            block.append(line.removeprefix(indent))
    if open:
        keep()
    return programs


def _is_data(program: str) -> bool:
    """Returns whether a block is quoted input or output: values alone, no statements or calls."""
    try:
        statements = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return not any(
        isinstance(node, ast.Call)
        or (isinstance(node, ast.stmt) and not isinstance(node, ast.Expr))
        for statement in statements
        for node in ast.walk(statement)
    )


def _entries(text: str) -> list[str]:
    """The texts between commas that no bracket encloses."""
    depth, entries = 0, [""]
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            entries.append("")
        else:
            entries[-1] += character
    return entries


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


KINDS: Mapping[str, AnswerRule] = {"box": box_answers(), "code": code_answers()}
"""The kinds of answers by name."""


def answer_rule(kind: str | AnswerRule) -> AnswerRule:
    """The rule of a kind, or the rule itself.

    Raises:
      ValueError: an unknown kind.
    """
    if isinstance(kind, AnswerRule):
        return kind
    if kind not in KINDS:
        raise ValueError(
            f"kind is {kind!r}; it must be one of {', '.join(KINDS)}, or an AnswerRule"
        )
    return KINDS[kind]
