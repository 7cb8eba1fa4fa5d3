"""The package that writes and reads the Orbax form, an extra."""

from typing import Any

from jaxshare.extras import MissingExtraError


def orbax() -> Any:
    """Imports `orbax.checkpoint`, which takes a second.

    Raises:
      MissingExtraError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise MissingExtraError(
            "models and checkpoints in Orbax form take the package orbax-checkpoint, which is not "
            "installed",
            "orbax",
        ) from error
    return orbax.checkpoint
