"""Choices: an agent asks its supervisor which of some options to go on with."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxshare.argument_checks import as_integer, as_list
from jaxshare.serving.agents.requests import Choose


@dataclasses.dataclass(frozen=True, slots=True)
class Picked:
    """The outcome of a `Choose`: the index of an option, which the waiting code has itself."""

    index: int


def choose(options: Iterable[Any], /, *, default: int = 0) -> Choose:
    """Requests one of some options; awaited in an agent, it gives the option itself.

    A search makes every option a branch, without the model: so one answer that proposes several
    thoughts becomes as many states ("propose" of Yao et al., 2023, section 3). Supervisors that
    follow single paths, such as `Single` and `BestOfN`, take the default.

    Args:
      options: any values, in order.
      default: index of the option of the first firing; the other firings have the rest in order.

    Raises:
      ValueError: there is no option, or none with the default's index.
      TypeError: the options cannot be listed.
    """
    found = tuple(as_list("options", options))
    if not found:
        raise ValueError("options is empty; there has to be something to choose from")
    default = as_integer("default", default, 0)
    if default >= len(found):
        raise ValueError(f"default is {default}; give an index of the {len(found)} options")
    return Choose(found, default)
