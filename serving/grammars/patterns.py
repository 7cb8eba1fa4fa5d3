"""Patterns: regular descriptions of texts, and the regular expressions that are read as such.

`read_regex` reads the common part of the syntax of Rust's `regex` crate. What is beyond it, such as
flags, anchors and classes of Unicode, is left to llguidance.
"""

import dataclasses
import functools
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NoReturn

_LAST = sys.maxunicode
_SURROGATES = 0xD800, 0xDFFF
_MOST_REPEATS = 1000
_SPACES = [
    *((0x9, 0xD), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
]
"""The characters of Unicode's property White_Space."""
_ESCAPED = {"n": 0xA, "t": 0x9, "r": 0xD, "f": 0xC, "v": 0xB, "a": 0x7}
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


class BeyondError(ValueError):
    """A pattern is beyond what is read here."""


@dataclasses.dataclass(frozen=True)
class Characters:
    """One character out of some ranges of code points, first and last, in ascending order."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]], negated: bool = False) -> "Characters":
        """The characters of some ranges, or all others; halves of surrogate pairs are none."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            else:
                merged.append((first, last))
        if negated:
            edges = [-1, *(edge for pair in merged for edge in pair), _LAST + 1]
            merged = [(a + 1, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        low, high = _SURROGATES
        parts = [
            part
            for first, last in merged
            for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
        ]
        return cls(tuple((first, last) for first, last in parts if first <= last))


@dataclasses.dataclass(frozen=True)
class Chain:
    """Patterns one after the other."""

    parts: tuple["Pattern", ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of some patterns."""

    parts: tuple["Pattern", ...]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A pattern at least and at most so many times; None for any number."""

    part: "Pattern"
    least: int = 0
    most: int | None = None


Pattern = Characters | Chain | Choice | Repeat
NOTHING = Chain(())


def text(words: str) -> Pattern:
    """The pattern of one text."""
    return Chain(tuple(Characters(((ord(c), ord(c)),)) for c in words))


def sequence(*parts: "Pattern | str") -> Pattern:
    """Patterns and texts one after the other."""
    return Chain(tuple(text(part) if isinstance(part, str) else part for part in parts))


def choice(parts: "Sequence[Pattern | str]") -> Pattern:
    """One of some patterns and texts."""
    return Choice(tuple(text(part) if isinstance(part, str) else part for part in parts))


def read_regex(pattern: str) -> Pattern:
    """Reads a regular expression that is to match a whole text.

    Raises:
      BeyondError: it has something that is not read here.
    """
    reader = _Reader(pattern)
    try:
        found = reader.choice()
    except RecursionError:
        raise BeyondError("it is nested too deeply") from None
    if reader.left:
        reader.refuse()
    return found


@functools.cache
def _digits() -> tuple[tuple[int, int], ...]:
    """The decimal digits of all scripts, as Python's version of Unicode has them."""
    numbers = (n for n in range(_LAST + 1) if unicodedata.category(chr(n)) == "Nd")
    return Characters.of((n, n) for n in numbers).ranges


class _Reader:
    """A regular expression that is being read."""

    def __init__(self, pattern: str):
        self._pattern, self._at = pattern, 0

    @property
    def left(self) -> str:
        """The text that is still to be read."""
        return self._pattern[self._at :]

    def refuse(self) -> NoReturn:
        """Gives up at this place."""
        raise BeyondError(f"it has {self.left[:8]!r}, which is not read here")

    def choice(self) -> Pattern:
        """Reads alternatives."""
        parts = [self._sequence()]
        while self._takes("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self) -> Pattern:
        parts = []
        while self.left and self.left[0] not in "|)":
            parts.append(self._repeated(self._atom()))
        return Chain(tuple(parts))

    def _repeated(self, part: Pattern) -> Pattern:
        while self.left and self.left[0] in "*+?{":
            kind = self._next()
            if kind == "{":
                least, most = self._counts()
            else:
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[kind]
            self._takes("?")  # which of the matches comes first makes no difference
            part = Repeat(part, least, most)
        return part

    def _counts(self) -> tuple[int, int | None]:
        inside, closed, _ = self.left.partition("}")
        least, comma, most = inside.partition(",")
        if not closed or not least.isascii() or not least.isdigit():
            self.refuse()
        if most and not (most.isascii() and most.isdigit()):
            self.refuse()
        self._at += len(inside) + 1
        found = int(least), (int(most) if most else None) if comma else int(least)
        if max(found[0], found[1] or 0) > _MOST_REPEATS:
            raise BeyondError("it repeats something very often")
        return found

    def _atom(self) -> Pattern:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character == ".":
            return Characters.of([(0xA, 0xA)], negated=True)
        if character == "\\":
            return self._escape()
        if character in "^$*+?{":
            self._at -= 1
            self.refuse()
        return text(character)

    def _group(self) -> Pattern:
        if self._takes("?") and not self._takes(":"):
            if not (self._takes("P<") or self._takes("<")) or self.left[:1] in ("=", "!"):
                self.refuse()
            name, closed, _ = self.left.partition(">")
            if not closed or not name.isidentifier():
                self.refuse()
            self._at += len(name) + 1
        found = self.choice()
        if not self._takes(")"):
            self.refuse()
        return found

    def _escape(self) -> Characters:
        letter = self._next()
        if letter in "dD":
            return Characters.of(_digits(), negated=letter == "D")
        if letter in "sS":
            return Characters.of(_SPACES, negated=letter == "S")
        return Characters.of([(code := self._code(letter), code)])

    def _code(self, letter: str) -> int:
        """The character of an escape that begins with this letter."""
        if letter in _ESCAPED:
            return _ESCAPED[letter]
        if letter in _PUNCTUATION:
            return ord(letter)
        if letter not in "xuU":
            self._at -= 1
            self.refuse()
        if self._takes("{"):
            digits, closed, _ = self.left.partition("}")
            self._at += len(digits) + len(closed)
        else:
            size = {"x": 2, "u": 4, "U": 8}[letter]
            digits, closed = self.left[:size], len(self.left) >= size
            self._at += size
        if not closed or not digits or not all(c in "0123456789abcdefABCDEF" for c in digits):
            self.refuse()
        code = int(digits, 16)
        if code > _LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
            self.refuse()
        return code

    def _class(self) -> Characters:
        negated, ranges = self._takes("^"), []
        if self.left[:1] == "]":
            self.refuse()
        while not self._takes("]"):
            if self.left[:2] in ("&&", "--", "~~") or self.left[:1] in ("[", ""):
                self.refuse()
            first = self._member()
            if isinstance(first, Characters):
                ranges += first.ranges
                continue
            last = first
            if self.left[:1] == "-" and self.left[1:2] not in ("]", "-", ""):
                self._at += 1
                last = self._member()
                if isinstance(last, Characters) or last < first:
                    self.refuse()
            ranges.append((first, last))
        return Characters.of(ranges, negated)

    def _member(self) -> int | Characters:
        """One character of a class, or several that an escape stands for."""
        character = self._next()
        if character != "\\":
            return ord(character)
        if self.left[:1] in ("d", "D", "s", "S"):
            return self._escape()
        return self._code(self._next())

    def _next(self) -> str:
        if not self.left:
            raise BeyondError("it ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _takes(self, expected: str) -> bool:
        """Reads these characters where they come next."""
        found = self._pattern.startswith(expected, self._at)
        self._at += len(expected) * found
        return found
