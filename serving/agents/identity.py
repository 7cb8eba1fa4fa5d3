"""The identity of a run: what a journal's file says it is of, and whether that is this run.

Two runs with one identity ask the same questions in the same places, if what they are told is the
same. The identity has no addresses and no order of sets, so it is the same in every process.
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import os
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np

from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.model_calls import ATOMS

_DEPTH = 32
"""Depth of values within values up to which arguments are told apart."""
_SHOWN = 80

Identity = dict[str, Any]
"""agent (its name), program, arguments (digests), seed, supervisor (in words)."""


def identity_of(agent: Agent, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> Identity:
    """The identity of a run of an agent.

    The program is the source of the agent and of the agents that it names, at any depth. Tools and
    helpers are not in it, so that they can be mended before a run goes on.
    """
    return {
        "agent": agent.name,
        "program": _digest("\n".join(_source(each) for each in _named(agent))),
        "arguments": _digest(in_words([args, kwargs])),
        "seed": int(seed),
        "supervisor": in_words(agent.supervisor),
    }


def difference(recorded: Mapping[str, Any], now: Identity) -> str:
    """The differences between two identities, in words; the empty text if there are none."""
    was, told = recorded.get, []
    if was("agent") != now["agent"]:
        told.append(f"its agent is {was('agent')} and this one {now['agent']}")
    elif was("program") != now["program"]:
        told.append(f"the source of agent {now['agent']}, or of one that it names, has changed")
    if was("arguments") != now["arguments"]:
        told.append("its arguments are others")
    if was("seed") != now["seed"]:
        told.append(f"its seed is {was('seed')} and this one {now['seed']}")
    if was("supervisor") != now["supervisor"]:
        told.append(
            f"its supervisor is {_cut(was('supervisor'))} and this {_cut(now['supervisor'])}"
        )
    return ", ".join(told)


def _cut(words: Any) -> str:
    return words if len(words := str(words)) <= _SHOWN else f"{words[:_SHOWN]}..."


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _named(agent: Agent) -> list[Agent]:
    """An agent, the agents that its code and its supervisor name, and those that they name."""
    found: dict[Agent, None] = {agent: None}
    left = [agent]
    while left:
        at = left.pop()
        cells = zip(at.function.__code__.co_freevars, at.function.__closure__ or (), strict=True)
        scope = {**at.function.__globals__, **{name: _in_cell(cell) for name, cell in cells}}
        values = [scope.get(name) for name in _names(at.function.__code__)]
        values += getattr(at.supervisor, "__dict__", {}).values()
        for value in values:
            if isinstance(value, Agent) and value not in found:
                found[value] = None
                left.append(value)
    return list(found)


def _in_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _source(agent: Agent) -> str:
    try:
        return inspect.getsource(agent.function)
    except (OSError, TypeError):  # typed in, and not in a file
        return _compiled(agent.function.__code__)


def _compiled(code: types.CodeType) -> str:
    constants = [
        _compiled(each) if isinstance(each, types.CodeType) else in_words(each)
        for each in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, constants))


def in_words(value: Any) -> str:
    """A value in words that are the same in every process.

    Objects are told by their class and their variables, functions and classes by their names.
    """
    return _words(value, 0, {})


def _words(value: Any, depth: int, seen: dict[int, int]) -> str:
    """The words of a value in this depth; an object that was seen before has its number alone."""
    kind = type(value)
    if kind in ATOMS:
        return repr(value)
    if isinstance(value, (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        return value.__qualname__
    if isinstance(value, Agent):
        return value.name
    if isinstance(value, enum.Enum):
        return f"{kind.__qualname__}.{value.name}"
    if depth > _DEPTH:
        return kind.__qualname__
    if id(value) in seen:
        return f"#{seen[id(value)]}"
    seen[id(value)] = len(seen)

    def words(part: Any) -> str:
        return _words(part, depth + 1, seen)

    if isinstance(value, Mapping):
        parts = [f"{words(key)}: {words(part)}" for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = map(words, value)
    elif isinstance(value, Set):
        parts = sorted(_words(part, depth + 1, {}) for part in value)
    elif isinstance(value, functools.partial):
        parts = map(words, (value.func, value.args, value.keywords))
    elif isinstance(value, os.PathLike):
        parts = [repr(os.fspath(value))]
    elif hasattr(value, "__array__"):
        array = np.asarray(value)
        data = hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()
        parts = [str(array.dtype), str(array.shape), data]
    else:
        parts = [f"{name}={words(part)}" for name, part in _held(value).items()]
    return f"{kind.__qualname__}({', '.join(parts)})"


def _held(value: Any) -> dict[str, Any]:
    """The variables of an object, by name."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return getattr(value, "__dict__", {})
