r"""Finding the answer in what was written: the last `\boxed{...}`, the last program, and a vote among several answers."""

import collections
import re
from collections.abc import Sequence

# An escape is a backslash and what follows, unless that begins a box.
_BRACES = re.compile(r"\\boxed\{|\\(?!\\boxed\{).|[{}]", re.DOTALL)


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` that is closed and holds more than whitespace, or None.

    Braces nest; after a backslash they are ordinary characters. A box that is never closed does not hide those before it. The last box
    inside another one is the one that counts. Give it only what was written, and the finisher before it: instructions name boxes too.
    """
    answer, start, depth = None, 0, 0
    for brace in _BRACES.finditer(text):
        if brace[0] == "\\boxed{":
            start, depth = brace.end(), 1
        elif depth and brace[0] in "{}":
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                answer = text[start:brace.start()].strip() or answer
    return answer


def code(text: str) -> str | None:
    """The last fenced code block that is closed; or one that the text ends in, if none is closed; or None.

    A fence is a line that begins with three backticks or tildes, blanks before them aside; the one that closes a block is of the same
    characters. Behind those that open a block there may be the name of a language. Lines lose the blanks that stand before the opening
    fence. Blocks of nothing but whitespace do not count.
    """
    found, block, indent, opening = None, None, "", ""
    for line in text.split("\n"):
        inner = line.lstrip()
        fence = inner[:3] if inner.startswith(("```", "~~~")) else ""
        if block is None:
            if fence == "~~~" or (fence and "`" not in inner.lstrip("`")):  # more backticks in the line: code within it
                block, indent, opening = [], line[:-len(inner)], fence
        elif fence == opening:
            found, block = _program(block) or found, None
        else:
            block.append(line.removeprefix(indent))
    return found or _program(block or [])


def vote(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer (self-consistency), whitespace around it aside; the first of equals. None has no vote."""
    counts = collections.Counter(answer.strip() for answer in answers if answer is not None)
    return max(counts, key=lambda answer: counts[answer], default=None)


def _program(lines: list[str]) -> str | None:
    program = "\n".join(lines)
    return program if program.strip() else None
