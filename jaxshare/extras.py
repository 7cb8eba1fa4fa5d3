"""Packages that only some uses need, the extras of `pip install`."""

import functools
import io
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
    """A class of matplotlib's figures, which only pictures need. A notebook shows them without
    `%matplotlib inline`.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "pictures are drawn with matplotlib, which is not installed", "plot"
        ) from error
    return _picture_class(Figure)


@functools.cache
def _picture_class(figure: type) -> type:
    class Picture(figure):
        def _repr_png_(self) -> bytes:
            drawn = io.BytesIO()
            self.savefig(drawn, format="png")
            return drawn.getvalue()

    return Picture
