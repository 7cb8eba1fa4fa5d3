"""The text of an answer that is not read yet, and what is made of it."""

import dataclasses
from collections.abc import Callable

from jaxshare.serving.chat.ledger import CallLedger
from jaxshare.serving.chat.prose import Prose

State = Callable[[bool], bool]
"""Reads from a page, told whether no text follows; returns False when it needs more text."""


@dataclasses.dataclass
class Page:
    """The text, the content and the calls that the states of a reader share.

    Attributes:
      state: reads on.
      prose: takes the content.
      ledger: takes the calls.
      text: not read yet.
    """

    state: State
    prose: Prose
    ledger: CallLedger
    text: str = ""

    def skip(self, count: int) -> str:
        """Returns the next characters and takes them out."""
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def take(self, marks: tuple[str, ...], final: bool) -> tuple[str, str]:
        """Returns the text before the first of these marks, and the mark, and takes both out.

        Without a mark (then ""), the text that is before none, whatever follows.
        """
        found = [(at, mark) for mark in marks if (at := self.text.find(mark)) >= 0]
        at, mark = min(found, default=(len(self.text), ""))
        if not mark and not final:
            at -= _start_of_mark(self.text, marks)
        return self.skip(at), self.skip(len(mark))

    def settle(self, close: Callable[[], None], written: str, separator: str = "") -> bool:
        """Closes a call and returns True; or breaks it, so that it is content as written."""
        try:
            close()
        except ValueError as error:
            self.ledger.fail(written, str(error))
            self.prose.write(separator + written)
            return False
        self.prose.leave_out()
        return True

    def write_all(self, final: bool) -> bool:
        """The state in which all further text is content."""
        self.prose.write(self.skip(len(self.text)))
        return False


def _start_of_mark(text: str, marks: tuple[str, ...]) -> int:
    """The length of the end of a text that may be the start of a mark."""
    longest = max(map(len, marks), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0
