"""Checks of arguments that people give, before anything is computed from them."""

import itertools
import math
import operator
import threading
from typing import Any

INT32_MAX, INT64_MAX, FLOAT32_MAX = 2**31 - 1, 2**63 - 1, (2 - 2**-23) * 2.0**127
"""The largest numbers of the types that devices have."""

MOST_VALUES = 2**22
"""The most values of a list that is given, more than a vocabulary has tokens."""


def as_integer(
    name: str, value: Any, least: int | None = None, most: int | None = None, why: str = ""
) -> int:
    """Returns an integer of any type, NumPy's among them, as an int.

    Args:
      name: of the argument, for the error.
      value: as it was given.
      least, most: the bounds, if any.
      why: what follows the bound in the error.

    Raises:
      TypeError: it is no integer. A bool is none.
      ValueError: it is out of bounds.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}; it must be an integer")
    _check_bounds(name, number, least, most, why)
    return number


def as_float(
    name: str, value: Any, least: float | None = None, most: float | None = None, why: str = ""
) -> float:
    """Returns a finite number of any type as a float; otherwise as `as_integer`.

    Raises:
      TypeError: it is no number.
      ValueError: it is not finite or out of bounds.
    """
    try:
        number = float("text" if isinstance(value, str | bytes | bytearray) else value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {shown(value)}; it must be a number") from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {shown(value)}; it must be finite{why}")
    _check_bounds(name, number, least, most, why)
    return number


def as_list(name: str, value: Any, most: int = MOST_VALUES) -> list[Any]:
    """Returns several values as a list, of which none is made where they are too many.

    Args:
      name: of the argument, for the error.
      value: as it was given; a text is no list of texts.
      most: the most values.

    Raises:
      TypeError: it is no list.
      ValueError: it has too many values.
    """
    try:
        values = [*itertools.islice(() if isinstance(value, str | bytes) else value, most + 1)]
    except TypeError:
        values = None
    if values is None or isinstance(value, str | bytes):
        raise TypeError(f"{name} is {shown(value)}; it must be a list")
    if len(values) > most:
        raise ValueError(f"{name} has more than {most:,} values; give fewer")
    return values


def as_texts(name: str, value: Any) -> tuple[str, ...]:
    """Returns one text or several, or None for none, as a tuple of texts that are not empty.

    Raises:
      TypeError: it is neither a text nor a list.
      ValueError: it has too many values, or one that is no text or empty.
    """
    try:
        given = [value] if isinstance(value, str) else as_list(name, () if value is None else value)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}; it must be a text or a list of texts") from None
    texts = tuple(given)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name} is {shown(value)}; give texts that are not empty")
    return texts


def as_timeout(name: str, value: Any) -> float | None:
    """Returns seconds to wait as a float, or None for no limit; as `as_float`."""
    if value is None:
        return None
    # As long as threads can wait is as good as for ever.
    return min(as_float(name, value), threading.TIMEOUT_MAX)


def as_adapter_name(value: Any) -> str | None:
    """Returns the name of an adapter, or None; raises TypeError for anything else."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"adapter is {shown(value)}; it must be the name of one, or None")
    return value


def _check_bounds(
    name: str, number: float, least: float | None, most: float | None, why: str
) -> None:
    if least is not None and not number >= least:
        raise ValueError(f"{name} is {shown(number)}; it must be at least {least}{why}")
    if most is not None and not number <= most:
        raise ValueError(f"{name} is {shown(number)}; it must be at most {most:.10g}{why}")


def shown(value: Any) -> str:
    """A value in an error: short and on one line, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of a class of the caller's
        text = f"of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
