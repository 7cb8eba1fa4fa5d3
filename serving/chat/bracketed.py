"""Calls of Mistral: a list of JSON objects after a mark, or a name and JSON after a mark for each."""

import re

from jaxshare.serving.chat.formats import ARGS, CALLS
from jaxshare.serving.chat.json_calls import JsonCall
from jaxshare.serving.chat.json_text import ObjectEnd
from jaxshare.serving.chat.page import Page, State

_BETWEEN = re.compile(r"[\s,]*")


class BracketedCalls:
    """Calls after `[TOOL_CALLS]`, anywhere in the content."""

    def __init__(self, page: Page):
        self._page = page
        self._written = ""  # of a list, as long as no call was in it
        self._separator, self._is_broken = "", False  # before a call in a list

    def read(self, final: bool) -> bool:
        """Reads content up to the next mark."""
        text, mark = self._page.take((CALLS,), final)
        self._page.prose.write(text)
        if mark:
            self._page.state = self._after_mark
        return bool(mark)

    def _after_mark(self, final: bool) -> bool:
        text = self._page.text.lstrip()
        if not text and not final:
            return False
        if text.startswith("["):
            if not final and CALLS.startswith(text):
                return False
            if not text.startswith(CALLS):
                return self._open_list(len(self._page.text) - len(text) + 1)
        self._call = JsonCall("mistral", self._page.ledger)
        self._page.state = self._in_name
        return True

    # A name and its arguments.

    def _in_name(self, final: bool) -> bool:
        text, mark = self._page.take((ARGS, CALLS), final)
        self._call.add(text)
        if mark == ARGS:
            self._call.add(mark)
            self._end, self._page.state = ObjectEnd(), self._before_arguments
        elif mark or final:
            self._close_named(self._after_mark if mark else self.read)
        return bool(mark)

    def _before_arguments(self, final: bool) -> bool:
        text = self._page.text.lstrip()
        if not text and not final:
            return False
        self._call.add(self._page.skip(len(self._page.text) - len(text)))
        self._page.state = self._in_arguments if text.startswith("{") else self._no_arguments
        return True

    def _in_arguments(self, final: bool) -> bool:
        self._call.add(self._page.skip(self._end.feed(self._page.text)))
        if self._end.found or final:
            self._close_named(self.read)
        return self._end.found

    def _no_arguments(self, final: bool) -> bool:
        """Reads a text that follows the mark of arguments and is no object."""
        text, mark = self._page.take((CALLS,), final)
        self._call.add(text)
        if mark or final:
            self._close_named(self._after_mark if mark else self.read)
        return bool(mark)

    def _close_named(self, state: State) -> None:
        self._page.settle(self._call.close, CALLS + self._call.text)
        self._page.state = state

    # A list.

    def _open_list(self, size: int) -> bool:
        self._written = CALLS + self._page.skip(size)
        self._separator, self._is_broken = "", False
        self._page.state = self._before_item
        return True

    def _before_item(self, final: bool) -> bool:
        found = _BETWEEN.match(self._page.text)
        assert found
        self._separator += self._page.skip(found.end())
        if self._page.text.startswith("{"):
            if self._written:
                self._page.prose.leave_out()
            self._written = ""
            self._call, self._end = JsonCall("hermes", self._page.ledger), ObjectEnd()
            self._page.state = self._in_item
        elif self._page.text.startswith("]") and not self._written:
            self._page.skip(1)
            self._page.prose.leave_out()
            self._page.state = self.read
        elif self._page.text or final:
            self._page.state = self._rest
        else:
            return False
        return True

    def _in_item(self, final: bool) -> bool:
        self._call.add(self._page.skip(self._end.feed(self._page.text)))
        if not self._end.found and not final:
            return False
        separator = self._separator if self._is_broken else ""
        self._is_broken = not self._page.settle(self._call.close, self._call.text, separator)
        self._separator = ""
        self._page.state = self._before_item
        return True

    def _rest(self, final: bool) -> bool:
        """Reads a list to its end that has something else than calls in it."""
        text, mark = self._page.take((CALLS,), final)
        self._written += self._separator + text
        self._separator = ""
        if not mark and not final:
            return False
        if self._written.strip():
            self._page.ledger.fail(self._written, "it is in a list of calls, but is none")
            self._page.prose.write(self._written)
        self._written = ""
        self._page.state = self._after_mark if mark else self.read
        return bool(mark)
