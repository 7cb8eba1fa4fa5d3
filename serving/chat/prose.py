"""The text around blocks that are taken out of it, without the whitespace that they leave."""

from collections.abc import Callable


class Prose:
    """Text that comes in pieces, of which blocks such as calls are left out.

    Whitespace beside a block goes with it, but between two texts the first whitespace stays. Text
    without blocks is as written.
    """

    def __init__(self, tell: Callable[[str], None]):
        """Makes an empty text.

        Args:
          tell: takes the pieces, in order.
        """
        self._tell = tell
        self._space, self._is_kept = "", False
        self._has_text, self._after_block = False, False

    def write(self, text: str) -> None:
        """Takes the next piece of text."""
        if not (body := text.strip()):
            self._add_space(text)
            return
        before = len(text) - len(text.lstrip())
        self._add_space(text[:before])
        dropped = self._after_block and not self._has_text
        self._tell(body if dropped else self._space + body)
        self._space, self._is_kept = "", False
        self._has_text, self._after_block = True, False
        self._add_space(text[before + len(body) :])

    def leave_out(self) -> None:
        """Marks that a block was here."""
        self._after_block, self._is_kept = True, bool(self._space)

    def end(self) -> None:
        """Ends the text."""
        if self._space and not self._after_block:
            self._tell(self._space)

    def _add_space(self, text: str) -> None:
        if not self._is_kept:
            self._space += text
