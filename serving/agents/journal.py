"""Journals: what agents were given from outside, kept so that a run can be repeated without its
model and its tools.

    journal = Journal()
    asyncio.run(Runtime(model, journal=journal).run(agent, ...))
    journal.save("run.json")
    asyncio.run(Runtime(None, journal=Journal.load("run.json", strict=True)).run(agent, ...))  # the same states, scores and result

An entry is what one firing of one state was given: the model's answer and what it adds to the
dialogue, a tool's value, or an error. Its key is the run and the path of the firing, so nothing
depends on what was faster. What was asked there is kept too, in short, so that an agent that has
changed is not given what another one asked for.
"""

import base64
import builtins
import copy
import dataclasses
import hashlib
import json
import math
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxshare.serving.agents import requests as calls
from jaxshare.serving.agents import runtime
from jaxshare.serving.agents.model_calls import UsedUpError
from jaxshare.serving.agents.requests import Llm, Message, Tool

_FORMAT = "jaxshare agents journal 1"
_MODULES = (builtins, calls, runtime)
"""Whose errors are kept by name."""

Key = tuple[str, tuple[int, ...]]
"""A run, and the path of a firing in its tree."""


class ReplayError(LookupError):
    """What is repeated is not what was recorded: the journal has nothing for this firing."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """What was asked, in short, and what came, in the form in which it is saved: {"json": value},
    {"pickle": base64}, {"error": ...}, {"used up": of the budget}, or what can only be kept here.
    `spent` are calls of the model, tokens written and tokens read."""

    asked: str
    form: dict[str, Any]
    said: tuple[Message, ...] = ()
    spent: tuple[int, int, int] = (0, 0, 0)
    here: Any = None


class Journal:
    """To be filled by a run, or to repeat one: `Runtime(model, journal=...)`. What it knows is
    taken from it, what it does not is asked.

    Attributes:
      strict: what it does not know, or knows as something else, is a ReplayError.
      missed: firings that it did not know, where it is strict.
    """

    def __init__(self, *, strict: bool = False):
        self.strict = strict
        self.missed: list[Key] = []
        self._entries: dict[Key, _Entry] = {}
        self._asked: dict[Key, str] = {}
        self._pickles = True

    def __len__(self) -> int:
        return len(self._entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Journal":
        return self

    # What the runtime calls.

    def known(
        self, key: Key, request: Any = None
    ) -> Callable[[], tuple[Any, tuple[Message, ...]]] | None:
        """What gives the value of a firing and what it adds to the dialogue, or raises its error;
        None if it is to be asked.

        Args:
          key: of the firing.
          request: what it waits for; None where that is all one.

        Raises:
          ReplayError: nothing is known, and the journal is strict.
        """
        asked, entry = _in_short(request), self._entries.get(key)
        if entry and (asked == entry.asked or not asked or not entry.asked):
            return lambda: self._given(key, entry)
        if self.strict:
            self.missed.append(key)
            what = (
                f"asks for {asked}, and in the journal for {entry.asked}"
                if entry
                else "is not in the journal"
            )
            raise ReplayError(
                f"firing {list(key[1])} of {key[0]} {what}; the agent, its arguments or its "
                "supervisor are not those of the run that was recorded, or that run ended first"
            )
        self._asked[key] = asked
        return None

    def spent(self, key: Key) -> tuple[int, int, int]:
        """Calls of the model, tokens written and tokens read by a firing that is known: budgets
        count them again."""
        return self._entries[key].spent

    def done(
        self, key: Key, value: Any, said: tuple[Message, ...], spent: Sequence[int] = (0, 0, 0)
    ) -> None:
        """A firing was given this, and has spent so much. It is kept as it is now, whatever the
        agent makes of it."""
        asked, (calls, written, read) = self._asked.pop(key, ""), spent
        entry = (
            _Entry(asked, {"json": json.loads(json.dumps(value))})
            if _is_plain(value)
            else _pickled(asked, value, "pickle")
        )
        self._entries[key] = dataclasses.replace(entry, said=said, spent=(calls, written, read))

    def failed(self, key: Key, error: BaseException, spent: Sequence[int] = (0, 0, 0)) -> None:
        """A firing has failed, and has spent so much."""
        asked, named, (calls, written, read) = self._asked.pop(key, ""), _named(error), spent
        entry = _Entry(asked, {"error": named}) if named else _pickled(asked, error, "error pickle")
        self._entries[key] = dataclasses.replace(entry, spent=(calls, written, read))

    def given_up(self, key: Key, used_up: str, spent: Sequence[int]) -> None:
        """In a firing the budget was used up, between two attempts."""
        calls, written, read = spent
        self._entries[key] = _Entry(
            self._asked.pop(key, ""), {"used up": used_up}, spent=(calls, written, read)
        )

    def _given(self, key: Key, entry: _Entry) -> tuple[Any, tuple[Message, ...]]:
        match entry.form:
            case {"json": value}:
                return copy.deepcopy(value), entry.said
            case {"error": named}:
                raise _error(named)
            case {"used up": used_up}:
                raise UsedUpError(used_up)
            case {"pickle": data} | {"error pickle": data}:
                if not self._pickles:
                    raise ValueError(
                        f"what firing {list(key[1])} of {key[0]} was given is kept as a pickle, "
                        "which can run any program when it is read; if you trust where the "
                        "journal comes from, load it with pickles=True"
                    )
                value = pickle.loads(base64.b64decode(data))
            case _:
                value = entry.here
        if "error" in next(iter(entry.form)):
            raise value
        return value, entry.said

    # Files.

    def save(self, file: str | os.PathLike) -> None:
        """Writes JSON. What JSON cannot hold is pickled, and marked as such.

        Raises:
          ValueError: a value that cannot be pickled either.
          OSError: the file cannot be written.
        """
        entries = []
        for (run, path), entry in self._entries.items():
            if "here" in entry.form or "error here" in entry.form:
                raise ValueError(
                    f"the journal cannot be saved: firing {list(path)} of {run} was given a "
                    f"{type(entry.here).__name__}, which neither JSON nor pickle can hold "
                    f"({next(iter(entry.form.values()))}); have the tool return plain data"
                )
            said = [[message.role, message.content] for message in entry.said]
            entries.append(
                {
                    "run": run,
                    "path": path,
                    "asked": entry.asked,
                    "said": said,
                    "spent": entry.spent,
                    **entry.form,
                }
            )
        Path(file).write_text(json.dumps({"format": _FORMAT, "entries": entries}), encoding="utf-8")

    @classmethod
    def load(
        cls, file: str | os.PathLike, *, strict: bool = False, pickles: bool = False
    ) -> "Journal":
        """Reads what `save` has written.

        Args:
          strict: see `Journal`.
          pickles: unpickle what was pickled. That can run any program: for files from those you
            trust.

        Raises:
          ValueError: it is not a journal.
          OSError: it cannot be read.
        """
        journal = cls(strict=strict)
        journal._pickles = pickles
        try:
            data = json.loads(Path(file).read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise ValueError(f"its format is {data['format']!r}, not {_FORMAT!r}")
            for entry in data["entries"]:
                key, asked = (entry.pop("run"), tuple(entry.pop("path"))), entry.pop("asked")
                said = tuple(Message(*message) for message in entry.pop("said"))
                calls, written, read = map(int, entry.pop("spent"))
                if len(entry) != 1 or not entry.keys() <= {
                    "json",
                    "pickle",
                    "error",
                    "error pickle",
                    "used up",
                }:
                    raise ValueError(f"an entry has {', '.join(entry) or 'nothing'}")
                journal._entries[key] = _Entry(asked, entry, said, (calls, written, read))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is no journal of agents ({error}); give a file that Journal.save has "
                "written"
            ) from error
        return journal


def _in_short(request: Any) -> str:
    """What is asked, in few words; of a model also a digest of them all."""
    if isinstance(request, Llm):
        words = repr((request.messages, request.options, request.n))
        return (
            f"an answer of the model ({hashlib.blake2b(words.encode(), digest_size=6).hexdigest()})"
        )
    if isinstance(request, Tool):
        return f"the tool {getattr(request.function, '__name__', type(request.function).__name__)}"
    return "" if request is None else f"a {type(request).__name__.removeprefix('Child')}"


def _is_plain(value: Any) -> bool:
    """Whether JSON gives back exactly this."""
    if value is None or type(value) in (bool, int, str):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is list:
        return all(map(_is_plain, value))
    return (
        type(value) is dict
        and all(type(key) is str for key in value)
        and all(map(_is_plain, value.values()))
    )


def _pickled(asked: str, value: Any, how: str) -> _Entry:
    try:
        data = pickle.dumps(value)
        pickle.loads(data)  # some can be written and not read
    except Exception as error:
        return _Entry(asked, {how.replace("pickle", "here"): str(error)}, here=value)
    return _Entry(asked, {how: base64.b64encode(data).decode()})


def _named(error: BaseException) -> dict[str, Any] | None:
    """An error of Python's or of the agents', with plain arguments, as JSON; None for others."""
    kind = type(error)
    if not any(getattr(module, kind.__name__, None) is kind for module in _MODULES):
        return None
    more = {name: value for name, value in vars(error).items() if name != "__notes__"}
    args = [*error.args]
    return (
        {"kind": kind.__name__, "args": args, "more": more}
        if _is_plain(args) and _is_plain(more)
        else None
    )


def _error(named: dict[str, Any]) -> BaseException:
    kind = next(found for module in _MODULES if (found := getattr(module, named["kind"], None)))
    error = kind.__new__(kind, *named["args"])
    error.args = tuple(named["args"])
    vars(error).update(named["more"])
    return error
