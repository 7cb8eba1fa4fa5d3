"""Environment variables that turn something off."""

import os

_ON, _OFF = ("", "on", "1", "true"), ("off", "0", "false")


def is_on(variable: str) -> bool:
    """Returns False where the environment variable turns off what it is named after, in upper or
    lower case; True where it is not set, or turns it on.

    Raises:
      ValueError: it says neither.
    """
    value = os.environ.get(variable, "")
    if value.lower() in _OFF:
        return False
    if value.lower() in _ON:
        return True
    raise ValueError(f"{variable} is {value!r}, but it must be on or off")
