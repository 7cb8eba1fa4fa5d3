"""Clocks and random numbers that agents read: recorded, so that a replay reads them again.

An agent that is run again to restore a state has to do what it did. What its own code reads of the
functions in `FORMS` between two waits is kept with the firing, and in the run's journal. They are wrapped when
an agent begins whose states may be fired again, or which has a journal: in their modules, and where the agent's module has imported them by
name. Outside of agents, and in the code of libraries, a wrapper only calls the function.
`datetime.now()` is not among them, since nothing can be put in its place; `time.time()` is.
"""

import contextlib
import functools
import os
import secrets
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from jaxshare.serving.agents.errors import DivergedError
from jaxshare.serving.agents.runs import Firing, current_firing

_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
_PACKAGE = "jaxshare"

Read = Callable[[Callable[[], Any]], Any]
"""Gives the value of a function now, or the recorded one."""


def _value(function: Callable[..., Any], read: Read, *args: Any, **kwargs: Any) -> Any:
    return read(lambda: function(*args, **kwargs))


def _choice(function: Callable[..., Any], read: Read, seq: Any) -> Any:
    """Records the place of what is chosen, since a replay has things of its own."""
    return seq[read(lambda: function(range(len(seq))))]


def _choices(
    function: Callable[..., Any], read: Read, population: Any, *args: Any, **kwargs: Any
) -> list[Any]:
    if not isinstance(population, Sequence):
        return function(population, *args, **kwargs)  # which says so
    places = read(lambda: function(range(len(population)), *args, **kwargs))
    return [population[place] for place in places]


def _shuffle(function: Callable[..., Any], read: Read, x: Any) -> None:
    order = [*range(len(x))]
    read_order = read(lambda: function(order) or order)
    for place, value in enumerate([x[i] for i in read_order]):
        x[place] = value


def _default_rng(function: Callable[..., Any], read: Read, seed: Any = None) -> Any:
    return function(read(lambda: secrets.randbits(128)) if seed is None else seed)


FORMS: dict[str, dict[str, Callable[..., Any]]] = {
    "time": dict.fromkeys(
        ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"), _value
    ),
    "random": {
        **dict.fromkeys(("random", "randint", "randrange", "uniform", "triangular"), _value),
        **dict.fromkeys(("gauss", "normalvariate", "betavariate", "expovariate"), _value),
        **dict.fromkeys(("gammavariate", "lognormvariate", "paretovariate"), _value),
        **dict.fromkeys(("vonmisesvariate", "weibullvariate", "binomialvariate"), _value),
        **dict.fromkeys(("getrandbits", "randbytes"), _value),
        "choice": _choice,
        "choices": _choices,
        "sample": _choices,
        "shuffle": _shuffle,
    },
    "secrets": {
        **dict.fromkeys(("token_bytes", "token_hex", "token_urlsafe"), _value),
        **dict.fromkeys(("randbelow", "randbits"), _value),
        "choice": _choice,
    },
    "os": {"urandom": _value},
    "uuid": {"uuid1": _value, "uuid4": _value},
    "numpy.random": {"default_rng": _default_rng},
}
"""How the functions of modules that are recorded are called."""

_wrappers: dict[Any, Any] = {}
"""The wrappers by their functions."""


def record_for(function: types.FunctionType) -> None:
    """Wraps what is recorded, in the modules that are imported and among the names of an agent's
    own module."""
    for module_name, forms in FORMS.items():
        module = sys.modules.get(module_name)
        for name, form in forms.items() if module else ():
            original = getattr(module, name)
            if not hasattr(original, "_records"):
                _wrappers[original] = _wrapped(original, f"{module_name}.{name}", form)
                setattr(module, name, _wrappers[original])
    names = function.__globals__
    for name, value in [*names.items()]:
        if callable(value) and (wrapper := _wrapper_of(value)) is not None:
            names[name] = wrapper


_READINGS = -(2**30)
"""Ends the path of what a firing has read in a journal; parts of waits and `finally` have others."""


@contextlib.contextmanager
def journaled(journal: Any, run: str, now: Firing) -> Generator[None, None, None]:
    """Surrounds the code of a firing: what a journal has of its readings is read again, and what is
    new is recorded."""
    if journal is None:
        yield
        return
    key = run, (*now.path, _READINGS)
    known = journal.readings(key) or []
    if known:
        now.readings, now.is_beyond = deque((name, value) for name, value in known), True
    try:
        yield
    finally:
        if len(now.recorded) > len(known):
            journal.record_value(key, [[name, value] for name, value in now.recorded], ())


def _wrapper_of(value: Any) -> Any:
    try:
        return _wrappers.get(value)
    except TypeError:  # it has no hash
        return None


def _wrapped(
    function: Callable[..., Any], name: str, form: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        now = current_firing.get()
        if now is None or not _is_own(sys._getframe(1), now):
            return function(*args, **kwargs)
        line = sys._getframe(1).f_lineno
        return form(function, functools.partial(_read, now, name, line), *args, **kwargs)

    wrapper._records = True  # pyright: ignore[reportAttributeAccessIssue]
    return wrapper


def _is_own(frame: types.FrameType, now: Firing) -> bool:
    """True for code of an agent or of its module's package, but not of libraries."""
    # Code that is executed from a text may have no module.
    name, own = frame.f_globals.get("__name__") or "", now.run.agent.function.__module__ or ""
    if name == own:
        return True
    package = name.partition(".")[0]
    if package == own.partition(".")[0]:
        return package != _PACKAGE
    return package != _PACKAGE and not frame.f_code.co_filename.startswith(_LIBRARIES)


def _read(now: Firing, name: str, line: int, compute: Callable[[], Any]) -> Any:
    if now.readings is None or (now.is_beyond and not now.readings):
        value = compute()
        now.recorded.append((name, value))
        return value
    was, value = now.readings.popleft() if now.readings else ("nothing", None)
    if was != name:
        raise DivergedError.of(
            now.run.agent.name,
            f"reads {name} in line {line}, where its record has {was}; make a tool of what decides it",
        )
    if now.replays is None:  # it is the firing itself, by a journal
        now.recorded.append((name, value))
    return value
