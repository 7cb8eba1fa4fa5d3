"""Running from a checkout of the repository, where models/ and serving/ are beside jaxshare/; in an
installation they are inside it."""

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import tomllib
import types
from collections.abc import Sequence
from pathlib import Path

SIBLINGS = ("models", "serving")
"""Folders beside jaxshare/ that are packages in it."""


def checkout() -> Path | None:
    """The root of the checkout that this module is imported from, or None where it is imported from
    an installation."""
    package = Path(__file__).resolve().parent
    beside = not (package / SIBLINGS[0]).is_dir() and (package.parent / "pyproject.toml").is_file()
    return package.parent if beside else None


class SiblingFinder(importlib.abc.MetaPathFinder):
    """Finds `jaxshare.models` and `jaxshare.serving` in a checkout.

    An entry of `jaxshare.__path__` would find them too, but would also make packages of all other
    folders of the checkout, such as `jaxshare.tests`.
    """

    def __init__(self, root: Path):
        self._root, self._names = str(root), {f"jaxshare.{name}" for name in SIBLINGS}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None, /
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names:
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, [self._root], target)


def find_siblings() -> None:
    """Makes `jaxshare.models` and `jaxshare.serving` importable in a checkout, installed or not.
    Does nothing in an installation."""
    if (root := checkout()) and not any(
        isinstance(finder, SiblingFinder) for finder in sys.meta_path
    ):
        # Before the finder of an editable installation, which may be of another checkout.
        sys.meta_path.insert(0, SiblingFinder(root))


def version() -> str:
    """The version: in a checkout from pyproject.toml, since an installation may be older; else from
    the metadata of the installation."""
    if root := checkout():
        return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "version"
        ]
    try:
        return importlib.metadata.version("jaxshare")
    except importlib.metadata.PackageNotFoundError:  # a copy without an installation
        return "unknown"
