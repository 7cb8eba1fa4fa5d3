"""Calls between the process that runs tests and the process that runs the program they test.

The tests compare in a process that the program cannot reach: it gets values, and answers calls.
Plain data (numbers, texts, containers of them, arrays of NumPy) is copied, and what a call changes
in a list, dict or set is changed in the caller's too. Anything else stays where it is, and the
other process has a `Remote` of it. Messages are JSON, which builds nothing but plain data.

Uses the standard library alone, and NumPy where a value is an array.
"""

import asyncio
import builtins
import collections
import decimal
import fractions
import json
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

MODULE = "solution"
"""The module's name, in both processes."""
_MAX_BYTES = 1 << 28
"""Bytes of one message."""
_SEQUENCES = {kind.__name__: kind for kind in (tuple, set, frozenset, collections.deque)}
_MAPPINGS = {
    kind.__name__: kind for kind in (dict, collections.Counter, collections.OrderedDict)
} | {"defaultdict": lambda pairs: collections.defaultdict(None, pairs)}
_TEXTS: dict[str, tuple[Any, Callable[[Any], str]]] = {
    kind.__name__: (kind, write)
    for kind, write in (
        (decimal.Decimal, str),
        (fractions.Fraction, str),
        (bytes, bytes.hex),
        (bytearray, bytearray.hex),
    )
}
_PLAIN: tuple[Any, ...] = (
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    list,
    tuple,
    dict,
    set,
    frozenset,
)
_MUTABLE = (list, dict, set, bytearray, collections.deque)


class Lost(BaseException):
    """The other process has ended, or sends what is no message."""


class Remote:
    """An object of the other process.

    It is compared with plain data in this process, by its content, so that an object cannot claim
    to be equal to everything. The program's own methods and operators between its own objects are
    the program's to answer.
    """

    __slots__ = ("_jaxshare_calls", "_jaxshare_number")

    def __init__(self, calls: "Calls", number: int):
        object.__setattr__(self, "_jaxshare_calls", calls)
        object.__setattr__(self, "_jaxshare_number", number)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return _ask(self, "call", [*args], keywords)

    def __iter__(self) -> Any:
        return _ask(self, "iter")

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __bool__(self) -> bool:
        return _ask(self, "bool") is True

    def __contains__(self, item: Any) -> bool:
        content = _content(self)
        if not isinstance(content, Remote):
            return item in content
        if _ask(self, "iterable"):
            return any(other == item for other in self)
        return _ask(self, "contains", item) is True

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Remote):
            return _ask(self, "operator", "eq", other, False) is True
        content = _content(self)
        return not isinstance(content, Remote) and bool(content == other)

    def __hash__(self) -> int:
        content = _content(self)
        return object.__hash__(self) if isinstance(content, Remote) else hash(content)

    def __instancecheck__(self, instance: Any) -> bool:
        return _ask(self, "isinstance", instance) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return _ask(self, "issubclass", kind) is True

    def __enter__(self) -> Any:
        return _ask(self, "enter")

    def __exit__(self, kind: Any, error: Any, _: object) -> bool:
        return _ask(self, "exit", kind, None if error is None else str(error)) is True


def _ask(remote: Remote, operation: str, *arguments: Any) -> Any:
    return remote._jaxshare_calls.ask(operation, remote, *arguments)


def _content(remote: Remote) -> Any:
    """The plain content of a list, number or the like of a class of its own; else the remote."""
    return _ask(remote, "plain")


def _forwarded(operation: str) -> Callable[..., Any]:
    return lambda self, *arguments: _ask(self, operation, *arguments)


def _binary(name: str, swapped: bool) -> Callable[[Remote, Any], Any]:
    def operate(self: Remote, other: Any) -> Any:
        function = getattr(operator, name)
        if not isinstance(other, Remote):
            content = _content(self)
            if not isinstance(content, Remote):
                return function(other, content) if swapped else function(content, other)
        result = _ask(self, "operator", name, other, swapped)
        if not isinstance(other, Remote) and not isinstance(result, Remote):
            # An object that knows what it is compared with could answer as the tests wish.
            raise TypeError(f"an object of the program and a {type(other).__name__} give no value")
        return result

    return operate


for _name in ("len", "str", "repr", "int", "float", "index", "round", "abs", "neg", "reversed"):
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in ("getitem", "setitem", "delitem"):
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_"):
    setattr(Remote, f"__{_name.strip('_')}__", _binary(_name, swapped=False))
    setattr(Remote, f"__r{_name.strip('_')}__", _binary(_name, swapped=True))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _binary(_name, swapped=False))


def _plain(value: Any) -> Any:
    if isinstance(value, str):  # str() would ask a method of the subclass
        return str.__str__(value)
    return next((kind(value) for kind in _PLAIN if isinstance(value, kind)), value)


def _operate(left: Any, name: str, right: Any, swapped: bool) -> Any:
    function = getattr(operator, name)
    return function(right, left) if swapped else function(left, right)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, keywords: function(*arguments, **keywords),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "operator": _operate,
    "plain": _plain,
    "iterable": lambda value: hasattr(type(value), "__iter__"),
    "isinstance": lambda kind, value: isinstance(value, kind),
    "issubclass": lambda kind, other: issubclass(other, kind),
    "enter": lambda value: value.__enter__(),
    "exit": lambda value, kind, text: value.__exit__(kind, kind and kind(text), None),
    "run": lambda coroutine: asyncio.run(coroutine),
    "index": operator.index,
    "neg": operator.neg,
    "contains": operator.contains,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
} | {
    kind.__name__: kind
    for kind in (len, iter, next, bool, str, repr, int, float, round, abs, reversed)
}


class Calls:
    """One end of the calls. The other process is served while this one waits for an answer.

    Attributes:
      lost: True after the other process has ended or has sent what is no message.
    """

    def __init__(self, descriptor: int, operations: dict[str, Callable[..., Any]] | None = None):
        """Takes a connected socket.

        Args:
          descriptor: of the socket.
          operations: more that the other process may ask. With None it is not trusted: it may call
            functions that it was given, and read and set public attributes of objects of the
            tests' own classes.
        """
        self.lost = False
        self._read = os.fdopen(descriptor, "rb", closefd=False)
        self._write = os.fdopen(descriptor, "wb", closefd=False)
        self._trusts = operations is not None
        self._operations = _OPERATIONS | (operations or {})
        self._mine: list[Any] = []
        self._numbers: dict[int, int] = {}
        """The number of each object in `_mine`, by its id."""
        self._yours: dict[int, Any] = {}
        """The remotes and classes of errors that stand for the other process's objects."""
        self._errors: dict[type, int] = {}

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Has the other process do something, and returns or raises what comes of it."""
        self._send({"ask": [operation, [self._encode(argument) for argument in arguments]]})
        while "ask" in (message := self._receive()):
            self._serve(message["ask"])
        try:
            if operation == "call":
                changeable = [*arguments[1], *arguments[2].values()]
                for place, value in message.get("changed", {}).items():
                    _change(changeable[int(place)], self._decode(value))
            if "raise" not in message:
                return self._decode(message["value"])
            kind, given, text = map(self._decode, message["raise"])
        except Exception as error:
            raise self._give_up() from error
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise self._give_up()
        try:
            error = kind(*given)
        except Exception:
            error = RuntimeError(text)
        raise error

    def serve(self) -> None:
        """Serves the other process until it ends."""
        while True:
            self._serve(self._receive()["ask"])

    def _serve(self, request: Any) -> None:
        try:
            operation, raw = request
            arguments = [self._decode(value) for value in raw]
            self._check(operation, *arguments[:2])
        except Exception as error:
            return self._refuse(error)
        try:
            value = self._operations[operation](*arguments)
            reply = {"value": self._encode(value)}
            if operation == "call":
                reply["changed"] = self._changed(raw, arguments)
        except Lost:
            raise
        except BaseException as error:  # SystemExit too
            return self._refuse(error)
        self._send(reply)

    def _refuse(self, error: BaseException) -> None:
        try:
            text = str(error)
        except Exception:
            text = ""
        try:
            given = self._encode([*error.args])
        except Exception:
            given = [text]
        self._send({"raise": [self._encode(type(error)), given, text]})

    def _check(self, operation: str, value: Any = None, name: Any = None) -> None:
        """Raises TypeError for what a program may not do with objects of the tests."""
        if self._trusts or operation in ("call", "plain"):
            return
        public = isinstance(name, str) and not name.startswith("_")
        own = getattr(type(value), "__module__", None) == MODULE
        if not (operation in ("getattr", "setattr") and own and public):
            raise TypeError(f"a program cannot do this with the tests' {type(value).__name__}")

    def _changed(self, raw: Any, arguments: list[Any]) -> dict[str, Any]:
        """The new content of arguments that a call has changed, by their places."""
        _, before, keywords = raw
        before = [*before, *(pair[1] for pair in keywords["dict"])]
        after = [*arguments[1], *arguments[2].values()]
        encoded = {
            str(place): self._encode(value)
            for place, value in enumerate(after)
            if isinstance(value, _MUTABLE)
        }
        return {place: value for place, value in encoded.items() if value != before[int(place)]}

    # Messages.

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        try:
            self._write.write(len(data).to_bytes(8) + data)
            self._write.flush()
        except OSError as error:
            raise self._give_up() from error

    def _receive(self) -> dict[str, Any]:
        try:
            size = int.from_bytes(self._exactly(8))
            if size > _MAX_BYTES:
                raise ValueError(f"a message of {size} bytes")
            message = json.loads(self._exactly(size))
            if not isinstance(message, dict) or not {"ask", "value", "raise"} & {*message}:
                raise ValueError("no message")
            return message
        except (OSError, EOFError, ValueError, RecursionError, MemoryError) as error:
            raise self._give_up() from error

    def _exactly(self, size: int) -> bytes:
        data = self._read.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def _give_up(self) -> Lost:
        self.lost = True
        return Lost()

    # Values.

    def _encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if abs(value) < 1 << 53 else {"int": hex(value)}
        if kind is list:
            return [self._encode(item) for item in value]
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is range or kind is slice:
            return {kind.__name__: [value.start, value.stop, value.step]}
        name = kind.__name__
        if _SEQUENCES.get(name) is kind:
            return {name: [self._encode(item) for item in value]}
        if _MAPPINGS.get(name) is kind or kind is collections.defaultdict:
            return {name: [[self._encode(k), self._encode(v)] for k, v in value.items()]}
        if name in _TEXTS and _TEXTS[name][0] is kind:
            return {name: _TEXTS[name][1](value)}
        if kind is Remote and value._jaxshare_calls is self:
            return {"yours": value._jaxshare_number}
        return self._encode_object(value)

    def _encode_object(self, value: Any) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
            return self._encode(value.item())
        if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "biufcU":
            return {"array": [self._encode(value.tolist()), value.dtype.str]}
        is_class = isinstance(value, type)
        if getattr(builtins, getattr(value, "__name__", ""), None) is value and (
            is_class or not self._trusts
        ):
            return {"builtin": value.__name__}
        if is_class and value in self._errors:
            return {"yours": self._errors[value]}
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._mine)
            self._mine.append(value)
        if is_class and issubclass(value, BaseException):
            bases = (base for base in value.__mro__ if base.__module__ == "builtins")
            return {"error": [number, value.__name__, next(bases).__name__]}
        return {"coroutine" if asyncio.iscoroutine(value) else "mine": number}

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((tag, body),) = value.items()
        if tag == "int":
            return int(body, 16)
        if tag in ("complex", "range", "slice"):
            return getattr(builtins, tag)(*body)
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self._decode(item) for item in body)
        if tag in _MAPPINGS:
            return _MAPPINGS[tag]({self._decode(k): self._decode(v) for k, v in body})
        if tag in ("bytes", "bytearray"):
            return _TEXTS[tag][0].fromhex(body)
        if tag in _TEXTS:
            return _TEXTS[tag][0](body)
        if tag == "array":
            import numpy

            return numpy.array(self._decode(body[0]), dtype=body[1])
        return self._decode_object(tag, body)

    def _decode_object(self, tag: str, body: Any) -> Any:
        if tag == "yours":
            return self._mine[body]
        if tag == "builtin":
            found = getattr(builtins, body)
            if self._trusts or (isinstance(found, type) and found is not type):
                return found
            raise TypeError(body)
        if tag == "error" and body[0] not in self._yours:
            number, name, base = body
            kind = type(name, (getattr(builtins, base),), {"__module__": "remote"})
            self._yours[number], self._errors[kind] = kind, number
        number = body[0] if isinstance(body, list) else body
        if number not in self._yours:
            self._yours[number] = Remote(self, number)
        remote = self._yours[number]
        return _coroutine(remote) if tag == "coroutine" else remote


async def _coroutine(remote: Remote) -> Any:
    return _ask(remote, "run")


def _change(mine: Any, new: Any) -> None:
    """Gives a container the content of another of its kind."""
    if type(new) is not type(mine):
        return
    if isinstance(mine, list | bytearray):
        mine[:] = new
    elif isinstance(mine, collections.deque):
        mine.clear()
        mine.extend(new)
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(new)
