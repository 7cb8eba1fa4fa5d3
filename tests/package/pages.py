"""Documents: their programs and what these print, their commands, and their links."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.paths import ROOT

DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
)
PAGES = [page for page in DOCUMENTS if page.parent.name == "docs" or page.name == "README.md"]
"""Where all programs are run."""

NOT_RUN = {
    "needs a GPU",
    "needs the network",
    "needs a server",
    "needs a folder of weights",
    "needs Tunix",
}
"""Reasons, in a comment `<!-- not run: REASON -->` above a block, for which it is not run."""

_FENCE = re.compile(r"(?:<!-- not run: ([^>]*?) -->\n+)?^```(\w+)\n(.*?)^```$", re.M | re.S)
_INDENTED = re.compile(r"^    (\S.*)$", re.M)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block: its language, its lines, and the reason for which it is not run."""

    language: str
    text: str
    reason: str | None


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    return [Block(found[2], found[3], found[1]) for found in _FENCE.finditer(page)]


def programs(page: str) -> list[str]:
    """The programs of a page that are run."""
    return [b.text for b in blocks(page) if b.language == "python" and b.reason is None]


def run_examples(page: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Runs the programs of a page in its order, and asserts that each prints the text after it.

    Returns:
      what they print, and the names that they have made.
    """
    found, names, printed = blocks(page), {}, []
    for number, (language, program, reason) in enumerate(found):
        if language != "python" or reason is not None:
            continue
        file, out = folder / f"example_{number}.py", io.StringIO()
        file.write_text(program, encoding="utf-8")  # agents are compiled from their source
        with contextlib.redirect_stdout(out):
            exec(compile(program, str(file), "exec"), names)
        after = found[number + 1] if number + 1 < len(found) else None
        if after is not None and after.language == "text":
            assert out.getvalue() == after.text, f"it prints {out.getvalue()!r}"
        printed.append(out.getvalue())
    return printed, names


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command in a page's blocks: fenced as `sh`, or indented."""
    fenced = "\n".join(block.text for block in blocks(page) if block.language == "sh")
    without = _FENCE.sub("", page)
    for line in [*fenced.splitlines(), *_INDENTED.findall(without)]:
        line = line.removeprefix("$ ")
        if re.match(r"(jaxshare|make|pip|python) [-'\w]", line):
            yield shlex.split(line, comments=True)


def anchors(page: str) -> set[str]:
    """The names by which headings of a page are linked to."""
    without = _FENCE.sub("", page)
    titles = re.findall(r"^#+ (.*)$", without, re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def broken_links(document: Path) -> list[str]:
    """The links of a document that lead to no file, or to no heading of it."""
    page = document.read_text(encoding="utf-8")
    broken = []
    for link in _LINK.findall(_FENCE.sub("", page)):
        path, _, anchor = link.partition("#")
        target = document if not path else document.parent / path
        if re.match(r"https?://", link):
            continue
        if not target.exists() or (
            anchor and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    return broken
