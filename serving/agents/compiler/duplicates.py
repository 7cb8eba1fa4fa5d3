"""The copier of agents' states: deep copies, with one memo, of all that a frame refers to.

A copy of a frame shares what cannot change and what all copies share; see `duplicate`. It can have
a limit, since a state that holds much is not worth a copy at every wait.
"""

import copyreg
import dis
import functools
import sys
import types
import weakref
from typing import Any

import jax
import numpy as np

CONSTANT = {
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    type,
    types.ModuleType,
}
"""Types whose objects never change, or are shared by all copies of a state."""
_FIXED = (*CONSTANT, types.FunctionType)
_ITERATORS = frozenset(type(iter(source)) for source in (range(0), "", [], ()))
_SHARED = (type, types.ModuleType, BaseException, jax.Array)
"""Types whose objects, those of their subclasses too, all copies of a state share."""

FLAT = "flat"
"""The memo key of the list that collects the copied lists of constants."""
LIMIT = "limit"
"""The memo key of the length that the memo may have, less what was copied without an entry."""


def shared[T](kind: type[T]) -> type[T]:
    """Declares that all copies of a state share the objects of a class."""
    CONSTANT.add(kind)
    return kind


OUTSIDE = "outside"
"""The memo key of the ids of functions that came from outside the agent."""
STRICT = "strict"
"""The memo key that refuses what copies would share though the agent may change it."""
_KEPT = "kept"
"""The memo key of what has to live as long as the memo, which has its id."""
# What costs about as much as the copy of one object: elements of a list or a dictionary of
# constants, elements of other containers beside their own copies, and bytes.
_OF_FLAT, _OF_CONTAINER, _BYTES = 16, 4, 2048
_OF_INSTANCE = 3
"""The cost of an object with a class of its own, besides what it holds, in objects."""
_UNKNOWN_REFERENCES = (weakref.finalize, weakref.WeakValueDictionary, weakref.WeakKeyDictionary)


class CostlyError(Exception):
    """A copy would have more objects than the limit of its memo."""


def _charge(memo: dict[Any, Any], cost: int) -> None:
    """Counts what is copied without an entry in the memo, before it is copied.

    Raises:
      CostlyError: it is beyond the limit.
    """
    if LIMIT in memo:
        memo[LIMIT] -= cost
        if len(memo) > memo[LIMIT]:
            raise CostlyError


def duplicate(value: Any, memo: dict[Any, Any]) -> Any:
    """A deep copy that shares what copies of an agent share; all else refers to copies alone.

    Raises:
      TypeError: something cannot be copied, or its copy would refer to what was copied.
      CostlyError: it has more objects than the memo allows.
    """
    kind = type(value)
    if kind in CONSTANT:
        return value
    if kind is types.FunctionType:
        if value.__closure__:
            _check_function(value, memo)
        return value
    if id(value) in memo:
        return memo[id(value)]
    if LIMIT in memo and len(memo) > memo[LIMIT]:
        raise CostlyError
    if kind is list:
        memo[id(value)] = made = []
        _charge(memo, len(value) // _OF_FLAT)
        if CONSTANT.issuperset(map(type, value)):  # an agent can have thousands of children
            made.extend(value)
            memo.get(FLAT, []).append(made)
        else:
            _charge(memo, len(value) // _OF_CONTAINER)
            made.extend([duplicate(each, memo) for each in value])
    elif kind is dict:
        made = _dictionary(value, memo)
    elif kind is tuple:
        if CONSTANT.issuperset(map(type, value)):
            return value
        _charge(memo, len(value) // _OF_CONTAINER)
        made = tuple([duplicate(each, memo) for each in value])
        # A tuple that contains itself was copied during the recursion.
        made = memo.setdefault(id(value), made)
    elif kind in _ITERATORS:
        _, (source,), *state = value.__reduce__()
        # An iterator inside its own source was copied during the recursion.
        made = memo.setdefault(id(value), iter(duplicate(source, memo)))
        if state and state[0]:
            made.__setstate__(state[0])
    elif isinstance(value, BaseException):
        if STRICT in memo:
            raise TypeError("all copies would share it, with its notes and its traceback")
        made = value
    elif isinstance(value, _SHARED) or kind is object:
        made = value
    elif kind is types.BuiltinMethodType:
        if isinstance(value.__self__, types.ModuleType | None):
            return value
        made = getattr(duplicate(value.__self__, memo), value.__name__)
    elif kind is types.MethodType:
        made = types.MethodType(value.__func__, duplicate(value.__self__, memo))
    elif isinstance(value, _UNKNOWN_REFERENCES):
        raise TypeError("a weak reference refers to what was copied")
    else:
        made = _object(value, kind, memo)
    return made


def _dictionary(value: dict[Any, Any], memo: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of a dictionary."""
    _charge(memo, len(value) // _OF_FLAT)
    is_flat = CONSTANT.issuperset(map(type, value.values()))
    if not is_flat:
        _charge(memo, len(value) // _OF_CONTAINER)
    if not CONSTANT.issuperset(map(type, value)):
        memo[id(value)] = made = {}
        made.update([(duplicate(key, memo), duplicate(each, memo)) for key, each in value.items()])
        return made
    memo[id(value)] = made = value.copy()
    if not is_flat:
        for key, each in value.items():
            if type(each) not in CONSTANT:
                made[key] = duplicate(each, memo)
    return made


def _check_function(function: types.FunctionType, memo: dict[Any, Any]) -> None:
    """Raises a TypeError for a function that keeps what can change, made while the agent ran."""
    if STRICT not in memo or id(function) in memo[OUTSIDE] or _is_importable(function):
        return
    for cell in function.__closure__ or ():
        if cell != types.CellType() and (
            type(cell.cell_contents) not in _FIXED or _rebinds(function.__code__)
        ):
            raise TypeError("a function with variables of its own")


def _rebinds(code: types.CodeType) -> bool:
    """True if a function rebinds a variable of a function around it."""
    return any(
        each.opname == "STORE_DEREF" and each.argval in code.co_freevars
        for each in dis.get_instructions(code)
    )


def _is_importable(value: Any) -> bool:
    """True if a value is found by its name in its module."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _object(value: Any, kind: type, memo: dict[Any, Any]) -> Any:
    """A copy of an object, by its own `__deepcopy__`, or by the protocol of pickle."""
    if STRICT in memo and weakref.getweakrefcount(value):
        raise TypeError("weak references refer to it")
    if isinstance(value, functools._lru_cache_wrapper) and not _is_importable(value):
        raise TypeError("all copies would share the functools.cache; define it outside")
    if isinstance(value, np.ndarray | bytearray):
        size = len(value) if isinstance(value, bytearray) else value.nbytes
        _charge(memo, size // _BYTES)
    _charge(memo, _OF_INSTANCE)
    if (own := getattr(value, "__deepcopy__", None)) is not None:
        memo[id(value)] = made = own(memo)
        return made
    reducer = copyreg.dispatch_table.get(kind)
    reduced: Any = reducer(value) if reducer else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        if not _is_importable(value):
            raise TypeError("it is shared by all copies; define it outside")
        return value
    memo.setdefault(_KEPT, []).append(reduced)
    parts: list[Any] = [*reduced, None, None, None, None]
    make, args, state, items, pairs, set_state = parts[:6]
    made = make(*[duplicate(each, memo) for each in args])
    made = memo.setdefault(id(value), made)
    if state is not None:
        _set_state(made, duplicate(state, memo), set_state)
    elements: list[Any] = list(items or ())
    entries: list[Any] = list(pairs or ())
    _charge(memo, (len(elements) + len(entries)) // _OF_CONTAINER)
    for each in elements:
        made.append(duplicate(each, memo))
    for key, each in entries:
        made[duplicate(key, memo)] = duplicate(each, memo)
    return made


def _set_state(made: Any, state: Any, set_state: Any) -> None:
    """Gives a copied object its state, as pickle does."""
    if set_state is not None:
        set_state(made, state)
    elif hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        if attributes:
            made.__dict__.update(attributes)
        for name, each in (slots or {}).items():
            setattr(made, name, each)
