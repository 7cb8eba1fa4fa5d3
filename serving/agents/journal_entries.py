"""Entries of a journal: the outcome of one firing, and how it is written as JSON."""

import base64
import builtins
import dataclasses
import hashlib
import json
import math
import pickle
from collections.abc import Sequence
from typing import Any

from jaxshare.serving.agents import errors, model_calls, requests
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.requests import Ask, CallRun, Choose, Llm, Tool

_ERRORS: dict[str, type[Exception]] = {
    name: kind
    for module in (model_calls, errors, requests, builtins)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind.__name__ == name
}
"""The errors that are recorded by name; others, such as SystemExit, are never raised by name."""

Key = tuple[str, tuple[int, ...]]
"""(id of a run, path of a firing in its tree)."""


Spending = tuple[int, int, int, float]
"""(model calls, tokens generated, tokens read, price of the answers) of a firing."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """The recorded outcome of a firing.

    Attributes:
      request: summary of the request.
      outcome: as it is saved: {"json": value}, {"pickle": base64}, {"error": ...}, {"error pickle":
        base64} or {"used up": part of the budget}. {"here": reason} and {"error here": reason} are
        for an `unsaved` value or error, which cannot be written to a file.
      messages: messages added to the dialogue.
      spent: model calls, tokens generated, tokens read, and the price of the answers.
    """

    request: str
    outcome: dict[str, Any]
    messages: tuple[Message, ...] = ()
    spent: Spending = (0, 0, 0, 0.0)
    unsaved: Any = None


def spending(spent: Sequence[float]) -> Spending:
    """The spending of a firing, of which the last numbers may be left out."""
    calls, written, read, cost = (*spent, *(0, 0, 0, 0.0)[len(spent) :])
    return int(calls), int(written), int(read), float(cost)


CALLS = ("the tool ", "the call ", "an answer ", "the question ")
"""The beginnings of summaries of what is never called again once it has answered."""
_FORMS = ("json", "pickle", "error", "error pickle", "used up")
"""The outcomes that a file can have."""


def line_of(key: Key, entry: Entry) -> dict[str, Any]:
    """Returns an entry as JSON; its value has to be one of `_FORMS`."""
    run, path = key
    return {
        "run": run,
        "path": path,
        "asked": entry.request,
        "said": [_written(message) for message in entry.messages],
        "spent": entry.spent if entry.spent[3] else entry.spent[:3],
        **entry.outcome,
    }


def entry_of(line: dict[str, Any], number: int) -> tuple[Key, Entry]:
    """Returns an entry from its JSON.

    Raises:
      ValueError, LookupError, TypeError, AttributeError: it is none; `number` is its place.
    """
    key, request = (line.pop("run"), tuple(line.pop("path"))), line.pop("asked")
    messages = tuple(map(_read, line.pop("said")))
    spent = spending(line.pop("spent"))
    if len(line) != 1 or not line.keys() <= {*_FORMS}:
        raise ValueError(f"entry {number} has {', '.join(line) or 'nothing'}")
    _check_outcome(line)
    if not isinstance(key[0], str) or not isinstance(request, str):
        raise ValueError(f"entry {number} has a name that is no text")
    return key, Entry(request, line, messages, spent)


def is_written(entry: Entry) -> bool:
    """Returns False for the entry of a value or error that a file cannot have."""
    return not {"here", "error here"} & entry.outcome.keys()


def is_pickled(entry: Entry) -> bool:
    """Returns True for an entry that runs a program when it is read."""
    return bool({"pickle", "error pickle"} & entry.outcome.keys())


def outcome_of_value(request: str, value: Any) -> Entry:
    """Returns the entry of a value: as JSON, pickled, or the value itself if neither can hold it."""
    if is_plain(value):
        return Entry(request, {"json": json.loads(json.dumps(value))})
    return _pickled(request, value, "pickle")


def outcome_of_error(request: str, error: BaseException) -> Entry:
    """Returns the entry of an error: by its name, pickled, or the error itself."""
    named = _named(error)
    return Entry(request, {"error": named}) if named else _pickled(request, error, "error pickle")


def _written(message: Message) -> list[Any]:
    """A message as JSON: its role, its content, and an object of the rest if there is any."""
    role, content, *rest = message.as_dict().items()
    return [role[1], content[1], *([dict(rest)] if rest else [])]


def _read(written: Any) -> Message:
    role, content, *rest = written
    if len(rest) > 1 or not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("a message that is no list of a role, a content and the rest")
    return Message.of({"role": role, "content": content, **(rest[0] if rest else {})})


def summary(request: Any) -> str:
    """A request in a few words; a model request's whole content is in a digest.

    Saved journals hold these words, so they must not change.
    """
    if isinstance(request, Llm):
        # Journals of before have the number that an engine takes where none is given.
        limit = 256 if (given := request.options.max_new_tokens) is None else given
        options = dataclasses.replace(request.options, max_new_tokens=limit)
        words = repr((request.messages, options, request.n))
        words += options.adapter or ""
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
    if isinstance(request, Choose):
        return f"a choice among {len(request.options)}"
    if isinstance(request, Tool):
        return f"the tool {getattr(request.function, '__name__', type(request.function).__name__)}"
    if isinstance(request, Ask):
        words = json.dumps(
            [request.question, request.options, request.returns and request.returns.schema]
        )
        digest = hashlib.blake2b(words.encode(), digest_size=6).hexdigest()
        return f"the question of a person ({digest})"
    return "" if request is None else f"a {type(request).__name__.removeprefix('Child')}"


def is_plain(value: Any) -> bool:
    """True if a value comes back from JSON exactly as it is."""
    if value is None or type(value) in (bool, int, str):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is list:
        return all(map(is_plain, value))
    return (
        type(value) is dict
        and all(type(key) is str for key in value)
        and all(map(is_plain, value.values()))
    )


def _pickled(request: str, value: Any, form: str) -> Entry:
    """An entry with a pickled value, or with the value itself if it cannot be pickled."""
    try:
        data = pickle.dumps(value)
        pickle.loads(data)  # some objects can be pickled and not unpickled
    except Exception as error:
        return Entry(request, {form.replace("pickle", "here"): str(error)}, unsaved=value)
    return Entry(request, {form: base64.b64encode(data).decode()})


def _named(error: BaseException) -> dict[str, Any] | None:
    """One of `_ERRORS`, with plain arguments, as JSON; None for others."""
    kind = type(error)
    if _ERRORS.get(kind.__name__) is not kind:
        return None
    more = {name: value for name, value in vars(error).items() if name != "__notes__"}
    args = [*error.args]
    return (
        {"kind": kind.__name__, "args": args, "more": more}
        if is_plain(args) and is_plain(more)
        else None
    )


def made_error(named: dict[str, Any]) -> Exception:
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
        made_error(value)
    elif form in ("pickle", "error pickle"):
        base64.b64decode(value, validate=True)
    elif form == "used up" and not isinstance(value, str):
        raise ValueError(f"an entry has used up {str(value)[:60]}")
