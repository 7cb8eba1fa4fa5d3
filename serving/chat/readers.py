"""Readers of content with calls in it, one for each form of calls."""

import re

from jaxshare.serving.chat import pythonic
from jaxshare.serving.chat.bracketed import BracketedCalls
from jaxshare.serving.chat.formats import MARKS, PYTHON_TAG
from jaxshare.serving.chat.json_calls import LONGEST_HEAD, JsonCall, is_call
from jaxshare.serving.chat.json_text import ObjectEnd, StopMark, read_object
from jaxshare.serving.chat.page import Page, State
from jaxshare.serving.chat.tagged import TaggedCalls

_BETWEEN = re.compile(r"\s*;?\s*")
_FIRST_KEY = re.compile(r'\{\s*(?:"(?P<key>[a-z]{0,12})(?P<end>"?)|[^"\s])')
_CALL_KEYS = ("name", "type", "arguments", "parameters", "id", "function")


def reader(name: str, page: Page) -> State:
    """Returns the state that reads content with calls in the form of this name."""
    if name in MARKS:
        return MarkedCalls(name, page).read
    if name == "qwen3-coder":
        return TaggedCalls(page).read
    if name == "mistral":
        return BracketedCalls(page).read
    if name == "llama3":
        return BareCalls(page).read
    return ListedCalls(page).read if name == "pythonic" else page.write_all


class MarkedCalls:
    """Calls with marks around each, anywhere in the content."""

    def __init__(self, form: str, page: Page):
        self._form, self._marks, self._page = form, MARKS[form], page
        self._stops = (self._marks.end, self._marks.start, *self._marks.around)

    def read(self, final: bool) -> bool:
        """Reads content up to the next call."""
        text, mark = self._page.take((self._marks.start, *self._marks.around), final)
        self._page.prose.write(text)
        if mark == self._marks.start:
            self._call, self._stop = JsonCall(self._form, self._page.ledger), StopMark(self._stops)
            self._page.state = self._in_call
        elif mark:
            self._page.prose.leave_out()
        return bool(mark)

    def _in_call(self, final: bool) -> bool:
        size, stop = self._stop.feed(self._page.text, final)
        self._call.add(self._page.skip(size))
        if stop is None and not final:
            return False
        end = self._page.skip(len(self._marks.end)) if stop == self._marks.end else ""
        self._page.settle(self._call.close, self._marks.start + self._call.text + end)
        self._page.state = self.read
        return True


class BareCalls:
    """Calls that are JSON objects without marks, at the start of the content or after a tag."""

    def __init__(self, page: Page):
        self._page = page
        self._tag, self._separator = "", ""  # before the object that is read
        self._is_tagged, self._called = False, False

    def read(self, final: bool) -> bool:
        """Looks whether the content starts with an object."""
        text = self._page.text.lstrip()
        if not text and not final:
            return False
        self._page.prose.write(self._page.skip(len(self._page.text) - len(text)))
        self._page.state = self._text
        if text.startswith("{"):
            self._open()
        return True

    def _text(self, final: bool) -> bool:
        text, self._tag = self._page.take((PYTHON_TAG,), final)
        self._page.prose.write(text)
        if self._tag:
            self._is_tagged = True
            self._open()
        return bool(self._tag)

    def _open(self) -> None:
        self._call, self._end = JsonCall("llama3", self._page.ledger), ObjectEnd()
        self._page.state = self._before_object

    def _before_object(self, final: bool) -> bool:
        text = self._page.text.lstrip()
        if not text and not final:
            return False
        self._call.add(self._page.skip(len(self._page.text) - len(text)))
        self._page.state = self._in_object if text.startswith("{") else self._no_object
        return True

    def _no_object(self, final: bool) -> bool:
        """Reads a text that follows a tag and is no object."""
        self._call.add(self._page.skip(len(self._page.text)))
        if final:
            self._close()
        return False

    def _in_object(self, final: bool) -> bool:
        self._call.add(self._page.skip(self._end.feed(self._page.text)))
        if self._end.found:
            is_call = self._is_meant()
        elif final:
            is_call = self._is_tagged or self._call.named
        elif self._may_be_call():
            return False
        else:
            is_call = False
        if is_call:
            self._close()
            self._page.state = self._after_call
        else:
            self._page.prose.write(self._separator + self._call.text)
            self._separator, self._page.state = "", self._text
        return True

    def _close(self) -> None:
        written = self._tag + self._call.text
        self._called = self._page.settle(self._call.close, written, self._separator)
        self._tag = self._separator = ""

    def _may_be_call(self) -> bool:
        """True until the first key of an object without a tag says that it is something else."""
        if self._is_tagged or self._call.named:
            return True
        text = self._call.text[:LONGEST_HEAD]
        start = _FIRST_KEY.match(text)
        if not start:
            return len(text) < LONGEST_HEAD
        if start["end"]:
            return start["key"] in _CALL_KEYS
        key, is_all = start["key"], start.end() == len(text)
        return key is not None and is_all and any(known.startswith(key) for known in _CALL_KEYS)

    def _is_meant(self) -> bool:
        """True for a complete object that was meant as a call, though it may be a broken one."""
        if self._is_tagged or self._call.named:
            return True
        try:
            return self._may_be_call() and is_call(read_object(self._call.text))
        except ValueError:
            return False

    def _after_call(self, final: bool) -> bool:
        """Reads what separates two objects; anything else is content."""
        found = _BETWEEN.match(self._page.text)
        assert found
        rest = self._page.text[found.end() :]
        if not rest and not final:
            return False
        if rest.startswith("{"):
            self._separator = self._page.skip(found.end())
            self._open()
            return True
        if not rest and self._called:
            self._page.text = ""
        self._page.state = self._text
        return True


class ListedCalls:
    """Calls that are a Python list, at the start of the content."""

    def __init__(self, page: Page):
        self._page = page
        self._written = ""  # the list up to now
        self._failed: list[str] = []  # the calls in it that are broken
        self._name, self._call = "", ""

    def read(self, final: bool) -> bool:
        """Looks whether the content starts with a list of calls."""
        text = self._page.text.lstrip()
        if not final and (not text or pythonic.MAY_START.fullmatch(text)):
            return False
        self._page.prose.write(self._page.skip(len(self._page.text) - len(text)))
        self._page.state = self._page.write_all
        if pythonic.START.match(text):
            self._skip(1)
            self._page.state = self._before_call
        return True

    def _skip(self, count: int) -> str:
        text = self._page.skip(count)
        self._written += text
        return text

    def _before_call(self, final: bool) -> bool:
        text = self._page.text
        if name := pythonic.NAME.match(text):
            self._skip(name.start(1))
            self._name, self._call, self._end = name[1], "", pythonic.CallEnd()
            self._page.ledger.start(self._name)
            self._page.state = self._in_call
        elif not final and pythonic.MAY_BE_NAME.fullmatch(text):
            return False
        else:
            self._page.state = self._after_call if text.lstrip().startswith("]") else self._rest
        return True

    def _in_call(self, final: bool) -> bool:
        self._call += self._skip(self._end.feed(self._page.text))
        if not self._end.found and not final:
            return False
        try:
            name, arguments = pythonic.read_call(self._call)
            if name != self._name:
                raise ValueError("it is no call of a function by its name")
            self._page.ledger.finish(name, arguments)
        except ValueError as error:
            self._page.ledger.fail(self._call, str(error))
            self._failed.append(self._call)
        self._page.state = self._after_call
        return True

    def _after_call(self, final: bool) -> bool:
        space = len(self._page.text) - len(self._page.text.lstrip())
        mark = self._page.text[space : space + 1]
        if not mark and not final:
            return False
        if mark and mark not in ",]":
            self._page.state = self._rest
            return True
        self._skip(space + 1)
        if mark == ",":
            self._page.state = self._before_call
        else:
            self._end_list()
            self._page.state = self._page.write_all
        return True

    def _rest(self, final: bool) -> bool:
        """Reads on to the end of a list that goes on with something else."""
        if final:
            rest = self._skip(len(self._page.text))
            if rest.strip():
                self._failed.append(rest)
                self._page.ledger.fail(rest, "it is in a list of calls, but is none")
            self._end_list()
            self._page.state = self._page.write_all
        return False

    def _end_list(self) -> None:
        """Leaves the list out of the content, but for what is broken in it."""
        if not self._page.ledger.calls:
            self._page.prose.write(self._written)
        elif self._failed:
            self._page.prose.leave_out()
            self._page.prose.write(", ".join(self._failed))
        else:
            self._page.prose.leave_out()
