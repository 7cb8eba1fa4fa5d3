"""Steps of a session as a teacher of workers reads them: paragraphs, and the questions that are taken
and answered in them."""

import dataclasses
import re
from collections.abc import Sequence

_CLAIM = re.compile(r"Question (\d+)(?!\d|: ?(?!Answer )[^\d\s]|: ?Answer \d+: \?)")
"""A question under way: one followed by a name was left to another worker, and one that goes on from
an answer that is not there was left for later."""
_CHECK = re.compile(r"Check (\d+)(?!\d|: ?(?!Answer )[^\d\s])")
_RESULT = re.compile(r"Answer (\d+): (\d+)\.")
FOUND = re.compile(r"Check (\d+):(?:(?!Check).)* Answer \1: (\d+), [^.]*(right|wrong)\.")


@dataclasses.dataclass
class Paragraph:
    """A step as far as it was fed, with what opens it.

    Attributes:
      writer: the worker that writes it; asked: True if the question opens it.
      opening: characters of what opens it, known when it was fed.
    """

    writer: str
    asked: bool = False
    text: str = ""
    opening: int = 0

    @property
    def body(self) -> str:
        return self.text[self.opening :]

    @property
    def claims(self) -> dict[int, int]:
        """The questions it works on, those that it checks with a minus sign, and how many characters
        it has written of each."""
        return {
            sign * int(found[1]): len(self.text) - found.end()
            for sign, claim in ((1, _CLAIM), (-1, _CHECK))
            for found in claim.finditer(self.text)
        }

    @property
    def results(self) -> dict[int, int]:
        """The answers it gives."""
        return {int(number): int(answer) for number, answer in _RESULT.findall(self.text)}

    @property
    def findings(self) -> dict[int, tuple[int, bool]]:
        """By the question that it has checked: the answer, and whether that was given before."""
        return {
            int(number): (int(answer), said == "right")
            for number, answer, said in FOUND.findall(self.text)
        }

    @property
    def ended(self) -> set[int]:
        """The claims that have come to an end."""
        return {*self.results, *(-number for number in self.findings)}


@dataclasses.dataclass(frozen=True)
class Sight:
    """The paragraphs that a worker sees: the finished ones, its own too, and those that others are
    writing."""

    finished: Sequence[Paragraph]
    others: Sequence[Paragraph]

    @property
    def results(self) -> dict[int, int]:
        return {
            number: answer
            for p in (*self.finished, *self.others)
            for number, answer in p.results.items()
        }

    @property
    def claimed(self) -> set[int]:
        return {number for p in (*self.finished, *self.others) for number in p.claims}

    @property
    def ended(self) -> set[int]:
        return {number for p in (*self.finished, *self.others) for number in p.ended}
