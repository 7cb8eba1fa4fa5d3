"""The header of a GGUF file, before the package gguf reads it: that package looks neither where a
file ends nor how much a header asks for."""

import mmap
import struct
from pathlib import Path

_MOST_KEYS, _MOST_TENSORS, _MOST_ELEMENTS = 2**14, 2**17, 2**22
"""In a file, and in an array of it. A vocabulary of 262,144 has 500,000 merges."""
_MOST_AXES = 4
_TEXT, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the numbers of each type, by the type's own number."""


class BigEndianError(ValueError):
    """The file is of big-endian numbers."""


def check_bounds(path: Path) -> None:
    """Raises ValueError for a header that does not end in its file, or asks for too much."""
    with (
        path.open("rb") as content,
        mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        try:
            _Header(data).check()
        except struct.error as error:
            raise ValueError("it ends within its header") from error


class _Header:
    """Goes over a header, no further than the end of its file."""

    def __init__(self, data: mmap.mmap):
        self._data, self._at = data, 4  # after the magic number

    def check(self) -> None:
        if self._number("<I") & 0xFFFF == 0:
            raise BigEndianError("it is of big-endian numbers")
        tensors, keys = self._number("<Q"), self._number("<Q")
        for count, most, what in (
            (keys, _MOST_KEYS, "values"),
            (tensors, _MOST_TENSORS, "tensors"),
        ):
            if count > most:
                raise ValueError(f"it says that it has {count} {what}; {most} is the most")
        for _ in range(keys):
            self._text()
            self._value(self._number("<I"))
        for _ in range(tensors):
            self._tensor()

    def _number(self, form: str) -> int:
        (found,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _skip(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise ValueError("it ends within its header")
        self._at += count

    def _text(self) -> None:
        self._skip(self._number("<Q"))

    def _value(self, kind: int) -> None:
        if kind == _TEXT:
            self._text()
        elif kind == _ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if count > _MOST_ELEMENTS:
                raise ValueError(f"it has an array of {count} values; {_MOST_ELEMENTS} is the most")
            if inner == _TEXT:
                for _ in range(count):
                    self._text()
            else:
                self._skip(count * self._size(inner))
        else:
            self._skip(self._size(kind))

    def _size(self, kind: int) -> int:
        if kind not in _SIZES:
            raise ValueError(f"it has a value of type {kind}, which is not known here")
        return _SIZES[kind]

    def _tensor(self) -> None:
        self._text()
        axes = self._number("<I")
        sizes = [self._number("<Q") for _ in range(min(axes, _MOST_AXES))]
        if not 1 <= axes <= _MOST_AXES or 0 in sizes:
            raise ValueError(
                f"it has a tensor of {axes} axes, {sizes}; there are 1 to {_MOST_AXES}"
            )
        self._number("<I")  # its kind, which is looked at later
        self._number("<Q")  # its place, too
