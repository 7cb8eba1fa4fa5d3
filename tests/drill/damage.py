"""Damage to files: in every 64th byte in turn a flipped bit, a cut and zeroes, or at random.

What reads the file must give the same as before, or an error that names the file: never anything
else, and never an error of another type, which a user would get as a traceback.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

EVERY = 64
"""Bytes between two damages, and bytes that are zeroed."""


@dataclasses.dataclass(frozen=True)
class Readable:
    """A file that is read back.

    Attributes:
      file: to damage.
      read: reads it; its values are compared.
      every: bytes between two damages, where they are thrown in turn.
      name: what errors have to name; default the name of the file.
      errors: types that are no accident, which the command line says in a sentence.
      is_checked: False for a file of another program's format that has no checksum: another value
        may come from it, which is counted in `cases` alone.
      other: the content of another such file, which has to be refused in the place of this one;
        None where nothing is recorded that tells them apart.
      least: errors that name the file when damages are thrown in turn, and at least as many.
    """

    file: Path
    read: Callable[[], Any]
    every: int = EVERY
    name: str = ""
    errors: tuple[type[Exception], ...] = (ValueError,)
    is_checked: bool = True
    other: bytes | None = None
    least: int = 1


@dataclasses.dataclass
class Outcome:
    """The numbers of damages that were tried, were named in an error, and changed nothing."""

    cases: int = 0
    named: int = 0
    same: int = 0

    def add(self, other: "Outcome") -> None:
        self.cases, self.named = self.cases + other.cases, self.named + other.named
        self.same += other.same


def damages(content: bytes, every: int = EVERY) -> Iterator[tuple[str, bytes]]:
    """Yields each damage in words, and the content with it."""
    for number, at in enumerate(range(0, len(content), every)):
        yield _flipped(content, at, number % 8)
        yield f"cut at byte {at}", content[:at]
        yield _zeroed(content, at, EVERY)


def random_damages(
    content: bytes, rng: random.Random, times: int, other: bytes | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yields random damages in words, and the content with each, and last the `other` content."""
    for _ in range(times):
        words, damaged = _random_damage(content, rng)
        if rng.random() < 0.25 and damaged:
            more, damaged = _random_damage(damaged, rng)
            words = f"{words}, then {more}"
        yield words, damaged
    if other is not None:
        yield "another file in its place", other


def _random_damage(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    at, kind = rng.randrange(len(content)), rng.randrange(7)
    size = rng.choice([1, 2, 8, EVERY, 1 + rng.randrange(len(content))])
    span = content[at : at + size]
    if kind == 0:
        return _flipped(content, at, rng.randrange(8))
    if kind == 1:
        return f"cut at byte {at}", content[:at]
    if kind == 2:
        return _zeroed(content, at, size)
    if kind == 3:
        to = rng.randrange(len(content) - len(span) + 1)
        rest = content[:at] + content[at + len(span) :]
        return f"{len(span)} bytes at {at} moved to {to}", rest[:to] + span + rest[to:]
    if kind == 4:
        return f"{len(span)} bytes at {at} doubled", content[:at] + span + content[at:]
    if kind == 5:
        return f"{len(span)} bytes at {at} lost", content[:at] + content[at + len(span) :]
    added = rng.choice([rng.randbytes(size % 1000), span, bytes(size % 1000), b"\n", b"{}\n"])
    return f"{len(added)} bytes appended: {added[:20]}", content + added


def _flipped(content: bytes, at: int, bit: int) -> tuple[str, bytes]:
    flipped = bytes([content[at] ^ 1 << bit])
    return f"bit {bit} of byte {at} flipped", content[:at] + flipped + content[at + 1 :]


def _zeroed(content: bytes, at: int, size: int) -> tuple[str, bytes]:
    zeroes = bytes(min(size, len(content) - at))
    return f"{len(zeroes)} zeroes at byte {at}", content[:at] + zeroes + content[at + size :]


def survive(readable: Readable) -> Outcome:
    """Damages a file in every way and reads it each time; see `survive_these`."""
    return survive_these(readable, damages(readable.file.read_bytes(), readable.every))


def survive_these(readable: Readable, damages: Iterable[tuple[str, bytes]]) -> Outcome:
    """Reads a file with each damage in turn; at the end it is as it was.

    Raises:
      AssertionError: a damage gave another value, or an error of another type, or in several
        lines, or without the name; or the other content was taken for this one.
    """
    file, outcome = readable.file, Outcome()
    content, expected = file.read_bytes(), readable.read()
    try:
        for damage, damaged in damages:
            if damaged == content:
                continue
            outcome.cases += 1
            file.write_bytes(damaged)
            try:
                found = readable.read()
            except readable.errors as error:
                said = str(error)
                assert (readable.name or file.name) in said, f"{file}, {damage}: {error}"
                assert "\n" not in said, f"{file}, {damage}: {error}"
                outcome.named += 1
            except Exception as error:
                raise AssertionError(f"{file}, {damage}: {type(error).__name__}") from error
            else:
                is_same = found == expected and damaged is not readable.other
                assert is_same or not readable.is_checked, f"{file}, {damage}: {found}"
                outcome.same += is_same
    finally:
        file.write_bytes(content)
    return outcome
