"""Journals record the outcomes of firings, so that a run can be replayed without model and tools.

    journal = Journal()
    asyncio.run(Runtime(model, journal=journal).run(agent, ...))
    journal.save("run.json")
    journal = Journal.load("run.json", strict=True)
    asyncio.run(Runtime(None, journal=journal).run(agent, ...))  # same states, scores and result

An entry is the outcome of one firing of one state: the model's answer and the messages that it adds
to the dialogue, a tool's value, or an error. Its key is the run and the path of the firing, so
nothing depends on the order of events. An entry also has a summary of its request, so that a
changed agent does not get the outcome of another request.
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

from jaxshare.models.config_fields import first_line
from jaxshare.paths import whole_file
from jaxshare.serving import checksums
from jaxshare.serving.agents import errors, model_calls, requests
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.model_calls import UsedUpError
from jaxshare.serving.agents.requests import CallRun, Llm, Tool

_FORMAT = "jaxshare agents journal 1"
_ERRORS: dict[str, type[Exception]] = {
    name: kind
    for module in (model_calls, errors, requests, builtins)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind.__name__ == name
}
"""The errors that are recorded by name; others, such as SystemExit, are never raised by name."""

_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""The errors by which a file turns out to be no journal."""

Key = tuple[str, tuple[int, ...]]
"""(id of a run, path of a firing in its tree)."""


class ReplayError(LookupError):
    """A strict journal has no entry for this firing: it is not part of the recorded run."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """The recorded outcome of a firing.

    Attributes:
      request: summary of the request.
      outcome: as it is saved: {"json": value}, {"pickle": base64}, {"error": ...}, {"error pickle":
        base64} or {"used up": part of the budget}. {"here": reason} and {"error here": reason} are
        for an `unsaved` value or error, which cannot be written to a file.
      messages: messages added to the dialogue.
      spent: model calls, tokens generated and tokens read.
    """

    request: str
    outcome: dict[str, Any]
    messages: tuple[Message, ...] = ()
    spent: tuple[int, int, int] = (0, 0, 0)
    unsaved: Any = None


class Journal:
    """Records or replays a run: `Runtime(model, journal=...)`.

    Outcomes that it has are replayed; the others are computed and recorded.

    Attributes:
      strict: a firing without an entry, or with the entry of another request, is a ReplayError.
      missed: the firings without an entry, if strict.
    """

    def __init__(self, *, strict: bool = False):
        self.strict = strict
        self.missed: list[Key] = []
        self._entries: dict[Key, _Entry] = {}
        self._pending: dict[Key, str] = {}  # summaries of requests without an outcome so far
        self._allow_pickles = True

    def __len__(self) -> int:
        return len(self._entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Journal":
        return self

    # Methods for the runtime.

    def lookup(
        self, key: Key, request: Any = None
    ) -> Callable[[], tuple[Any, tuple[Message, ...]]] | None:
        """A function that replays a firing, or None if the journal has no entry for it.

        The function returns (value, messages added to the dialogue), or raises the recorded error.

        Args:
          key: key of the firing.
          request: the request that it waits for; None matches any.

        Raises:
          ReplayError: there is no entry, and the journal is strict.
        """
        summary, entry = _summary(request), self._entries.get(key)
        if entry and (summary == entry.request or not summary or not entry.request):
            return lambda: self._replay(key, entry)
        if self.strict:
            self.missed.append(key)
            problem = (
                f"asks for {summary}, and in the journal for {entry.request}"
                if entry
                else "is not in the journal"
            )
            raise ReplayError(
                f"firing {list(key[1])} of {key[0]} {problem}; the agent, its arguments or its "
                "supervisor are not those of the run that was recorded, or that run ended first"
            )
        self._pending[key] = summary
        return None

    def spent(self, key: Key) -> tuple[int, int, int]:
        """The model calls, new tokens and prompt tokens of an entry; budgets count them again."""
        return self._entries[key].spent

    def record_value(
        self, key: Key, value: Any, messages: tuple[Message, ...], spent: Sequence[int] = (0, 0, 0)
    ) -> None:
        """Records a copy of a firing's value, which the agent may change from now on."""
        request, (calls, written, read) = self._pending.pop(key, ""), spent
        entry = (
            _Entry(request, {"json": json.loads(json.dumps(value))})
            if _is_plain(value)
            else _pickled(request, value, "pickle")
        )
        self._entries[key] = dataclasses.replace(
            entry, messages=messages, spent=(calls, written, read)
        )

    def record_error(
        self, key: Key, error: BaseException, spent: Sequence[int] = (0, 0, 0)
    ) -> None:
        """Records the error of a firing."""
        request, (calls, written, read) = self._pending.pop(key, ""), spent
        named = _named(error)
        entry = (
            _Entry(request, {"error": named}) if named else _pickled(request, error, "error pickle")
        )
        self._entries[key] = dataclasses.replace(entry, spent=(calls, written, read))

    def record_used_up(self, key: Key, used_up: str, spent: Sequence[int]) -> None:
        """Records that the budget was used up in a firing, between two attempts."""
        calls, written, read = spent
        self._entries[key] = _Entry(
            self._pending.pop(key, ""), {"used up": used_up}, spent=(calls, written, read)
        )

    def _replay(self, key: Key, entry: _Entry) -> tuple[Any, tuple[Message, ...]]:
        match entry.outcome:
            case {"json": value}:
                return copy.deepcopy(value), entry.messages
            case {"error": named}:
                raise _error(named)
            case {"used up": used_up}:
                raise UsedUpError(used_up)
            case {"pickle": data} | {"error pickle": data}:
                if not self._allow_pickles:
                    raise ValueError(
                        f"the outcome of firing {list(key[1])} of {key[0]} is kept as a pickle, "
                        "which can run any program when it is read; if you trust the source of "
                        "the journal, load it with pickles=True"
                    )
                value = pickle.loads(base64.b64decode(data))
            case _:
                value = entry.unsaved
        if "error" in next(iter(entry.outcome)):
            raise value
        return value, entry.messages

    # Files.

    def save(self, file: str | os.PathLike) -> None:
        """Writes JSON, the whole file or nothing.

        A value that JSON cannot hold is pickled, and marked as such.

        Raises:
          ValueError: a value that cannot be pickled either.
          WriteError: the file cannot be written; what was there before stays.
        """
        entries = []
        for (run, path), entry in self._entries.items():
            if "here" in entry.outcome or "error here" in entry.outcome:
                raise ValueError(
                    f"the journal cannot be saved: firing {list(path)} of {run} was given a "
                    f"{type(entry.unsaved).__name__}, which neither JSON nor pickle can hold "
                    f"({next(iter(entry.outcome.values()))}); have the tool return plain data"
                )
            entries.append(
                checksums.sealed(
                    {
                        "run": run,
                        "path": path,
                        "asked": entry.request,
                        "said": [_written(message) for message in entry.messages],
                        "spent": entry.spent,
                        **entry.outcome,
                    }
                )
            )
        with whole_file(Path(file)) as whole:
            json.dump({"format": _FORMAT, "entries": entries}, whole)

    @classmethod
    def load(
        cls, file: str | os.PathLike, *, strict: bool = False, pickles: bool = False
    ) -> "Journal":
        """Reads a file written by `save`.

        Args:
          strict: see `Journal`.
          pickles: unpickle values that were pickled. That can run any program: only for files from
            sources that you trust.

        Raises:
          ValueError: it is not a journal.
          OSError: it cannot be read.
        """
        journal = cls(strict=strict)
        journal._allow_pickles = pickles
        try:
            data = checksums.parse(Path(file).read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise ValueError(f"its format is {data['format']!r}, not {_FORMAT!r}")
            for number, sealed in enumerate(data["entries"], 1):
                entry = _unsealed(sealed, number)
                key, request = (entry.pop("run"), tuple(entry.pop("path"))), entry.pop("asked")
                messages = tuple(map(_read, entry.pop("said")))
                calls, written, read = map(int, entry.pop("spent"))
                if len(entry) != 1 or not entry.keys() <= {
                    "json",
                    "pickle",
                    "error",
                    "error pickle",
                    "used up",
                }:
                    raise ValueError(f"entry {number} has {', '.join(entry) or 'nothing'}")
                _check_outcome(entry)
                if not isinstance(key[0], str) or not isinstance(request, str):
                    raise ValueError(f"entry {number} has a name that is no text")
                journal._entries[key] = _Entry(request, entry, messages, (calls, written, read))
        except _DAMAGE as error:
            raise ValueError(
                f"{file} is no journal of agents ({first_line(error)}); give a file that Journal.save has "
                "written"
            ) from error
        return journal


def _unsealed(entry: Any, number: int) -> Any:
    try:
        return checksums.unsealed(entry)
    except ValueError as error:
        raise ValueError(f"entry {number} is damaged: {error}") from error


def _written(message: Message) -> list[Any]:
    """A message as JSON: its role, its content, and an object of the rest if there is any."""
    role, content, *rest = message.as_dict().items()
    return [role[1], content[1], *([dict(rest)] if rest else [])]


def _read(written: Any) -> Message:
    role, content, *rest = written
    if len(rest) > 1 or not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("a message that is no list of a role, a content and the rest")
    return Message.of({"role": role, "content": content, **(rest[0] if rest else {})})


def _summary(request: Any) -> str:
    """A request in a few words; a model request's whole content is in a digest.

    Saved journals hold these words, so they must not change.
    """
    if isinstance(request, Llm):
        # Journals of before have the number that an engine takes where none is given.
        limit = 256 if (given := request.options.max_new_tokens) is None else given
        options = dataclasses.replace(request.options, max_new_tokens=limit)
        words = repr((request.messages, options, request.n))
        words += request.chat.words() if request.chat else ""
        words += repr(request.place.before) if request.place else ""
        return (
            f"an answer of the model ({hashlib.blake2b(words.encode(), digest_size=6).hexdigest()})"
        )
    if isinstance(request, CallRun):
        call = request.calls[0]
        words = json.dumps(call.arguments, sort_keys=True)
        digest = hashlib.blake2b(words.encode(), digest_size=6).hexdigest()
        return f"the call {call.id} of {call.name} ({digest})"
    if isinstance(request, Tool):
        return f"the tool {getattr(request.function, '__name__', type(request.function).__name__)}"
    return "" if request is None else f"a {type(request).__name__.removeprefix('Child')}"


def _is_plain(value: Any) -> bool:
    """True if a value comes back from JSON exactly as it is."""
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


def _pickled(request: str, value: Any, form: str) -> _Entry:
    """An entry with a pickled value, or with the value itself if it cannot be pickled."""
    try:
        data = pickle.dumps(value)
        pickle.loads(data)  # some objects can be pickled and not unpickled
    except Exception as error:
        return _Entry(request, {form.replace("pickle", "here"): str(error)}, unsaved=value)
    return _Entry(request, {form: base64.b64encode(data).decode()})


def _named(error: BaseException) -> dict[str, Any] | None:
    """One of `_ERRORS`, with plain arguments, as JSON; None for others."""
    kind = type(error)
    if _ERRORS.get(kind.__name__) is not kind:
        return None
    more = {name: value for name, value in vars(error).items() if name != "__notes__"}
    args = [*error.args]
    return (
        {"kind": kind.__name__, "args": args, "more": more}
        if _is_plain(args) and _is_plain(more)
        else None
    )


def _error(named: dict[str, Any]) -> Exception:
    kind = _ERRORS[named["kind"]]
    error = kind.__new__(kind, *named["args"])
    error.args = tuple(named["args"])
    vars(error).update(named["more"])
    return error


def _check_outcome(outcome: dict[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError for an outcome that `Journal.save` cannot have
    written, so that it is not met in the midst of a replay."""
    [(form, value)] = outcome.items()
    if form == "error":
        if value.keys() != {"kind", "args", "more"} or value["kind"] not in _ERRORS:
            raise ValueError(f"an entry has an error that no journal names: {str(value)[:60]}")
        _error(value)
    elif form in ("pickle", "error pickle"):
        base64.b64decode(value, validate=True)
    elif form == "used up" and not isinstance(value, str):
        raise ValueError(f"an entry has used up {str(value)[:60]}")
