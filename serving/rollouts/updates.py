"""Other weights for several engines of one model, such as one for each data group of a mesh."""

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any

from jaxshare.serving.engine import Engine
from jaxshare.serving.errors import EngineError


class UpdateError(EngineError):
    """Some of several engines have not taken the weights.

    Attributes:
      errors: of these, by their numbers; the others have the new weights, unless a check before has
        failed: then none has.
    """

    errors: Mapping[int, Exception] = {}

    @classmethod
    def of(cls, errors: Mapping[int, Exception], count: int, what: str) -> "UpdateError":
        """The error for engines that have failed, of so many, and what the others have."""
        told = "; ".join(f"engine {number} of {count}: {e}" for number, e in errors.items())
        error = cls(f"{told} ({what})")
        error.errors = dict(errors)
        return error


def update_engines(
    engines: Sequence[Engine],
    params: Any,
    *,
    running: str = "finish",
    version: int | None = None,
    copy: bool = True,
    timeout: float | None = None,
) -> int:
    """Exchanges the weights of several engines at the same time.

    All of them check the weights before the first one changes anything. Engines are numbered from 0.

    Args:
      engines: of one model; on data groups each puts the weights on its own devices.
      params, running, copy, timeout: see `Engine.update_params`.
      version: of the weights on all engines; by default the next one of the engine with the largest.

    Returns:
      The version.

    Raises:
      UpdateError: engines that have refused the weights, or failed, each with its number and its
        error.
    """
    least = 1 + max((engine.params_version for engine in engines), default=0)
    number = least if version is None else version

    def failed(work: Any) -> dict[int, Exception]:
        with concurrent.futures.ThreadPoolExecutor(len(engines) or 1, "jaxshare-update") as threads:
            started = [threads.submit(work, engine) for engine in engines]
        found = {i: each.exception() for i, each in enumerate(started)}
        return {i: error for i, error in found.items() if isinstance(error, Exception)}

    if errors := failed(lambda engine: engine.check_params(params)):
        raise UpdateError.of(errors, len(engines), "no engine has changed its weights")
    how: dict[str, Any] = {"running": running, "version": number, "copy": copy, "timeout": timeout}
    if errors := failed(lambda engine: engine.update_params(params, **how)):
        others = len(engines) - len(errors)
        raise UpdateError.of(errors, len(engines), f"the other {others} have version {number}")
    return number
