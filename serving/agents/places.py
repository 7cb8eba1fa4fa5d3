"""Places in the tree of a run as short texts, from which the ids of children are made.

A short path is written out. A longer one is its length and its branch, which is known from that of
the path before it: so an id costs the same at the thousandth wait as at the tenth, and it depends
on nothing but the path.
"""

import hashlib

SHOWN = 8
"""Paths of so many steps are written out."""
FIRST = "0"
"""The branch of all paths along first firings."""


def branch_after(branch: str, length: int, step: int) -> str:
    """The branch of a path with one more step.

    Args:
      branch, length: of the path before.
      step: the index of the firing, or a number below 0 of something else in its place.

    Returns:
      A digest of the steps that are not 0, with their places: 64 bits in hexadecimal digits. Among
      n branches the probability that any two have the same one is about n**2 / 2**65.
    """
    if step == 0:
        return branch
    return hashlib.blake2b(f"{branch} {length} {step}".encode(), digest_size=8).hexdigest()


def place_of(path: tuple[int, ...], branch: str) -> str:
    """The place of a path as a text, which no other path has."""
    return ".".join(map(str, path)) if len(path) <= SHOWN else f"{len(path)}:{branch}"
