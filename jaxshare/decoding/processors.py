"""Logits processors of one's own: pure functions that samplers name, registered for the process.

    def less_of_the_last(logits, tokens, size, state, *, strength):
        return logits.at[tokens[size - 1]].add(-strength), state

    register_logits_processor("less_of_the_last", less_of_the_last, parameters={"strength": 1.0})
    SamplingParams(processors={"less_of_the_last": {"strength": 2.0}})

`jaxshare.decoding.processing` runs them in the decode loop.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare.argument_checks import FLOAT32_MAX, as_float, as_integer, as_list, shown

_TRIED_TOKENS = 16
"""The length of the text with which a function is tried."""

Given = tuple[tuple[str, tuple[tuple[str, float], ...]], ...]
"""The processors of a sampler in order: the name and all parameters of each."""


@dataclasses.dataclass(frozen=True, eq=False)
class LogitsProcessor:
    """A registered logits processor. Each is equal to itself alone, because programs are compiled
    for it.

    Attributes:
      name: by which samplers name it.
      function: see `register_logits_processor`.
      state: a pytree of NumPy arrays, with which each text begins.
      parameters: the names of its parameters, and their defaults.
    """

    name: str
    function: Callable[..., Any]
    state: Any
    parameters: Mapping[str, float]


_registered: dict[str, LogitsProcessor] = {}


def register_logits_processor(
    name: str,
    function: Callable[..., Any],
    *,
    state: Any = None,
    parameters: Mapping[str, float] | None = None,
    vocab_size: int = 256,
) -> None:
    """Registers a logits processor under a name, for as long as the process runs.

    The function serves one row, and is compiled into the decode loop where a sampler names it:

        function(logits, tokens, size, state, **parameters) -> (logits, state)

    It is called once for each token that the row samples, with float32[V] logits after biases,
    penalties and bans, and before the temperature and truncation; the int32[H] tokens of the text so
    far, the prompt included, of which the first int32[] `size` ones are meant, and which are the
    text that a worker has seen first and then what it has written; and the state that it returned
    for the token before. It must be pure, and what it returns must not depend on H, which is larger
    in some programs than in others. A row whose processors leave no finite logit, or a NaN or an
    infinite one, ends with an error.

    Args:
      name: not taken yet.
      function: as described; traced by JAX, and mapped over rows with `jax.vmap`.
      state: a pytree of arrays, with which each text begins; None for no state.
      parameters: names of float parameters, and their defaults. The function gets them by name as
        float32[]; each row has values of its own, and other values are no other program.
      vocab_size: V with which the function is tried here, for one that serves a single vocabulary.
        It is tried again with that of a model before it is used.

    Raises:
      ValueError: a name that is taken, or a function that JAX cannot trace, or that returns logits
        or a state of another shape or type than it is given.
      TypeError: an argument of another type.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name is {shown(name)}; it must be a text that is not empty")
    if not callable(function):
        raise TypeError(f"function is {shown(function)}; it must be a function of one row's logits")
    if name in _registered:
        raise ValueError(f"name is {name!r}, which a logits processor has already; give another")
    processor = LogitsProcessor(name, function, _as_state(state), _as_defaults(parameters))
    check_processor(processor, as_integer("vocab_size", vocab_size, 1))
    _registered[name] = processor


def registered_logits_processors() -> tuple[str, ...]:
    """Returns the names of all registered logits processors, in the order of registration."""
    return tuple(_registered)


def find_processor(name: str) -> LogitsProcessor:
    """Returns the logits processor of a name; raises ValueError where there is none."""
    if name not in _registered:
        known = ", ".join(_registered) or "none"
        raise ValueError(
            f"processors names {shown(name)}, which is not registered ({known}); register it with "
            "register_logits_processor"
        )
    return _registered[name]


def as_processors(value: Any) -> Given:
    """Returns the logits processors that a sampler names, with all parameters of each.

    Args:
      value: names, pairs of a name and parameters, or a dict of parameters by name.

    Raises:
      ValueError: a name that is not registered or comes twice, or an unknown parameter.
      TypeError: something else is given.
    """
    items = value.items() if isinstance(value, Mapping) else as_list("processors", value)
    made = tuple(map(_as_processor, items))
    names = [name for name, _ in made]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"processors names {repeated[0]!r} twice; name each once")
    return made


def _as_processor(item: Any) -> tuple[str, tuple[tuple[str, float], ...]]:
    name, given = (item, {}) if isinstance(item, str) else _pair("processors", item)
    if not isinstance(name, str):
        raise TypeError(
            f"processors has {shown(item)}; give names, or a dict of parameters by name, such as "
            '{"my_name": {"strength": 2.0}}'
        )
    processor, values = find_processor(name), {}
    pairs = given.items() if isinstance(given, Mapping) else as_list("processors", given)
    for parameter, number in (_pair(f"the parameters of {name}", pair) for pair in pairs):
        if parameter not in processor.parameters:
            known = ", ".join(processor.parameters) or "none"
            raise ValueError(
                f"processors gives {name} the parameter {shown(parameter)}; it has {known}"
            )
        values[parameter] = as_float(
            f"{parameter} of {name}", number, least=-FLOAT32_MAX, most=FLOAT32_MAX
        )
    return name, tuple({**processor.parameters, **values}.items())


def _pair(name: str, item: Any) -> tuple[Any, Any]:
    pair = as_list(name, item, most=2)
    if len(pair) < 2:
        raise TypeError(f"{name} has {shown(item)}; it must be pairs of a name and a value")
    return pair[0], pair[1]


@functools.cache
def check_processor(processor: LogitsProcessor, vocab_size: int) -> None:
    """Tries a processor's function on the shapes of a row, without computing anything.

    Raises:
      ValueError: it cannot be traced, or what it returns has another shape or type.
    """
    row = (
        jax.ShapeDtypeStruct((vocab_size,), jnp.float32),
        jax.ShapeDtypeStruct((_TRIED_TOKENS,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), processor.state),
    )
    values = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in processor.parameters}
    what = f"the logits processor {processor.name!r}"
    try:
        found = jax.eval_shape(processor.function, *row, **values)
    except Exception as error:  # of the caller's function
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{what} cannot be traced for a vocabulary of {vocab_size} ({type(error).__name__}: "
            f"{reason}); write it with jax.numpy, for one row"
        ) from error
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"{what} returns {shown(found)}; it must return a pair: logits and state")
    for part, given, returned in zip(("logits", "state"), row[::3], found, strict=True):
        if _form(given) != _form(returned):
            raise ValueError(
                f"{what} returns {part} of the form {_form(returned)}; it must be "
                f"{_form(given)}, as it is given"
            )


def _form(tree: Any) -> str:
    """The shapes and types of a pytree's arrays in words."""
    forms = jax.tree.map(lambda x: f"{x.dtype}{[*x.shape]}", tree)
    return str(forms).replace("'", "")


def _as_state(state: Any) -> Any:
    """A pytree of NumPy arrays of types that devices have."""
    try:
        return jax.tree.map(lambda leaf: np.array(jnp.asarray(leaf)), state)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"state is {shown(state)}; it must be a pytree of arrays of numbers"
        ) from error


def _as_defaults(parameters: Any) -> dict[str, float]:
    if parameters is None:
        return {}
    is_named = isinstance(parameters, Mapping) and all(
        isinstance(name, str) and name.isidentifier() for name in parameters
    )
    if not is_named:
        raise TypeError(
            f"parameters is {shown(parameters)}; it must be a dict of defaults by name, such as "
            '{"strength": 1.0}'
        )
    return {
        name: as_float(f"the default of {name}", value, least=-FLOAT32_MAX, most=FLOAT32_MAX)
        for name, value in parameters.items()
    }
