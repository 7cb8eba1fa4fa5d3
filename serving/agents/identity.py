"""The identity of a run: what a journal's file says it is of, and whether that is this run.

Two runs with one identity ask the same questions in the same places, if what they are told is the
same. The identity has no addresses and no order of sets, so it is the same in every process.
"""

import dataclasses
import enum
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
        "seed": seed,
        "supervisor": in_words(agent.supervisor),
    }


def difference(recorded: Mapping[str, Any], now: Identity) -> str:
    """What differs between two identities, in words; the empty text if nothing does."""
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
        scope = {**at.function.__globals__, **{name: _held(cell) for name, cell in cells}}
        values = [scope.get(name) for name in _names(at.function.__code__)]
        values += getattr(at.supervisor, "__dict__", {}).values()
        for value in values:
            if isinstance(value, Agent) and value not in found:
                found[value] = None
                left.append(value)
    return list(found)


def _held(cell: Any) -> Any:
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


def in_words(value: Any, _depth: int = 0) -> str:
    """A value in words that are the same in every process.

    Objects are told by their class and their variables, functions and classes by their names.
    """
    kind = type(value)
    if kind in ATOMS:
        return repr(value)
    if _depth > _DEPTH:
        return kind.__qualname__

    def words(part: Any) -> str:
        return in_words(part, _depth + 1)

    if isinstance(value, (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        return value.__qualname__
    if isinstance(value, Agent):
        return value.name
    if isinstance(value, enum.Enum):
        return f"{kind.__qualname__}.{value.name}"
    if isinstance(value, os.PathLike):
        return f"{kind.__qualname__}({os.fspath(value)!r})"
    if isinstance(value, Mapping):
        pairs = [f"{words(key)}: {words(part)}" for key, part in value.items()]
        return f"{kind.__qualname__}({', '.join(pairs)})"
    if isinstance(value, (list, tuple)):
        return f"{kind.__qualname__}({', '.join(map(words, value))})"
    if isinstance(value, Set):
        return f"{kind.__qualname__}({', '.join(sorted(map(words, value)))})"
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        data = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()
        return f"array({array.dtype}, {array.shape}, {data})"
    if dataclasses.is_dataclass(value):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        held = getattr(value, "__dict__", {})
    parts = [f"{name}={words(part)}" for name, part in held.items()]
    return f"{kind.__qualname__}({', '.join(parts)})"
