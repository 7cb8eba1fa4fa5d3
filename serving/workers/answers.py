r"""Finding the answer in what was written: the last valid `\boxed{...}`, the last valid program,
and a vote among several answers.

    rule = box_answers(lambda answer: answer.count(",") == 4)      # five answers in one box, or it is none
    session = Workers(model, problem, kind=rule)
"""

import ast
import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from jaxshare.decoding.automaton import ByteAutomaton
from jaxshare.serving.workers.step_automata import box_automaton, code_automaton

Valid = Callable[[str], bool]
"""Whether the text of an answer is one."""

# An escape is a backslash and what follows, unless that begins a box.
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
    """How answers are written, and which of them count. What ends a session of workers is a valid
    one.

    Attributes:
      find: text -> every answer in it that is closed, in order.
      valid: which of them are answers; see `is_answer` and `is_program`.
      guess: text -> the best that an early stop can take from it, valid or not, or None.
      automaton: makes what marks the bytes at which an answer closes. There alone the decode loop
        looks for one.
      code: whether the early stop asks for a program, and not for a box.
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
          text: what was written, and the finisher's prompt before it.
          told: the prompt, in which answers are shown: what only repeats one of those with letters
            or dots in it, such as `\\boxed{answer1, ..., answer5}`, is not an answer.
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
    """Answers in `\\boxed{...}`; default those of `is_answer`."""
    return AnswerRule(
        _boxes, valid or is_answer, boxed, box_automaton, name=None if valid else "box"
    )


def code_answers(language: str = "python", valid: Valid | None = None) -> AnswerRule:
    """Programs in fenced code blocks.

    Args:
      language: of the task. Blocks that name another one are not programs; blocks that name none
        may be.
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
    r"""Whether a box holds an answer: something besides spaces, and not only placeholders such as
    `answer1, ...`, `?` or `\ldots`."""
    entries = [_SPACING.sub("", entry) for entry in text.split(",")]
    return not all(_PLACEHOLDER.fullmatch(entry) for entry in entries)


def is_program(text: str) -> bool:
    """Whether a text is a program in Python: it parses, and is not blank."""
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def has_entries(count: int) -> Valid:
    """The rule for boxes that answer so many questions: they have at least as many entries with
    commas between (a comma may also stand within a number), and one of these is an answer. Boxes of
    single answers, on the way to the last one, do not end a session then."""
    return _Entries(count)


@dataclasses.dataclass(frozen=True)
class _Entries:
    """As an object, because evaluations send it to other processes."""

    count: int

    def __call__(self, text: str) -> bool:
        return is_answer(text) and len(_entries(text)) >= self.count


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` that is closed and holds more than whitespace, or
    None.

    Braces nest; after a backslash they are ordinary characters. A box that is never closed does not
    hide those before it. The last box inside another one is the one that counts. Give it only what
    was written, and the finisher before it: instructions name boxes too.
    """
    return next(reversed(_boxes(text)), None)


def code(text: str) -> str | None:
    """The last fenced code block that is closed; or one that the text ends in, if none is closed;
    or None.

    A fence is a line that begins with three backticks or tildes, blanks before them aside; the one
    that closes a block is of the same characters. Behind those that open a block there may be the
    name of a language. Lines lose the blanks that stand before the opening fence. Blocks of nothing
    but whitespace do not count.
    """
    return next(
        reversed(
            [program for _, program in _blocks(text)]
            or [program for _, program in _blocks(text, open=True)]
        ),
        None,
    )


def vote(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer (self-consistency), whitespace around it aside; the first of equals.
    None has no vote."""
    counts = collections.Counter(answer.strip() for answer in answers if answer is not None)
    return max(counts, key=lambda answer: counts[answer], default=None)


def _boxes(text: str) -> list[str]:
    """All boxes that are closed and hold more than whitespace, in the order in which they close."""
    found, start, depth = [], 0, 0
    for brace in _BRACES.finditer(text):
        if brace[0] == "\\boxed{":
            start, depth = brace.end(), 1
        elif depth and brace[0] in "{}":
            depth += 1 if brace[0] == "{" else -1
            if not depth and (answer := text[start : brace.start()].strip()):
                found.append(answer)
    return found


def _blocks(text: str, *, open: bool = False) -> list[tuple[str, str]]:
    """The fenced blocks that are closed, or with `open` the one that the text ends in: (name of the
    language, program), none blank."""
    found: list[tuple[str, str]] = []
    block: list[str] | None = None
    name = indent = opening = ""

    def keep() -> None:
        if block is not None and (program := "\n".join(block)).strip():
            found.append((name, program))

    for line in text.split("\n"):
        inner = line.lstrip()
        fence = inner[:3] if inner.startswith(("```", "~~~")) else ""
        if block is None:
            told = inner.lstrip(fence[:1] or None)
            # more backticks in the line: code within it
            if fence == "~~~" or (fence and "`" not in told):
                block, indent, opening, name = (
                    [],
                    line[: -len(inner)],
                    fence,
                    next(iter(told.split()), ""),
                )
        elif fence == opening:
            if not open:
                keep()
            block = None
        else:
            block.append(line.removeprefix(indent))
    if open:
        keep()
    return found


def _is_data(program: str) -> bool:
    """Whether a block is input or output that is quoted: values alone, and nothing that is done
    with them."""
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
    """What stands between commas that no bracket encloses."""
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
