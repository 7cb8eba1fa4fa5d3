"""Packages that only some uses need, the extras of `pip install`."""

from typing import Any


class MissingExtraError(ImportError):
    """A package that only some uses need is not installed; the message says how it is."""

    def __init__(self, need: str, extra: str):
        """Makes the error.

        Args:
          need: the start of a sentence that says which package is needed for what.
          extra: the extra with that package.
        """
        super().__init__(f"{need}: pip install 'jaxshare[{extra}]'")
        self.extra = extra


def figure_class() -> Any:
    """Imports the class of matplotlib's figures, which only pictures need.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "pictures are drawn with matplotlib, which is not installed", "plot"
        ) from error
    return Figure
