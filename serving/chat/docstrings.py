"""Descriptions in docstrings of Google's form."""

import itertools
import re

_SECTION = re.compile(
    r"(Args|Arguments|Returns|Raises|Yields|Attributes|Examples?|Notes?)( \(.*\))?:\s*"
)
_ENTRY = re.compile(r"\*{0,2}(\w+(?:, *\w+)*)(?: *\([^()]*\))?: *(.*)")


def described(docstring: str) -> tuple[str, dict[str, str]]:
    """Returns the text before the first section, and those of arguments and attributes.

    Args:
      docstring: without the indentation of its lines, as inspect.getdoc returns it.
    """
    lines = docstring.strip().splitlines()
    sections = [i for i, line in enumerate(lines) if _SECTION.fullmatch(line)] + [len(lines)]
    text = "\n".join(lines[: sections[0]]).strip()
    arguments: dict[str, str] = {}
    for start, end in itertools.pairwise(sections):
        if lines[start].startswith(("Arg", "Attr")):
            arguments |= _entries(lines[start + 1 : end])
    return text, arguments


def _entries(lines: list[str]) -> dict[str, str]:
    """The entries of a section: lines that are indented more continue the one before."""
    found: dict[str, str] = {}
    names, indents = [], [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    for line in filter(str.strip, lines):
        entry = _ENTRY.fullmatch(line.strip())
        if entry and len(line) - len(line.lstrip()) == min(indents):
            names = re.split(", *", entry[1])
            found |= dict.fromkeys(names, entry[2].strip())
        else:
            found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
    return found
