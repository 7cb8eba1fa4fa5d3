"""Damage to files: in every 64th byte in turn a flipped bit, a cut and zeroes.

What reads the file must give the same as before, or an error that names the file: never anything
else, and never an error of another type, which a user would get as a traceback.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EVERY = 64
"""Bytes between two damages, and bytes that are zeroed."""


@dataclasses.dataclass
class Outcome:
    """The numbers of damages that were tried, were named in an error, and changed nothing."""

    cases: int = 0
    named: int = 0
    same: int = 0


def damages(content: bytes, every: int = EVERY) -> Iterator[tuple[str, bytes]]:
    """Yields each damage in words, and the content with it."""
    for number, at in enumerate(range(0, len(content), every)):
        bit = 1 << number % 8
        flipped = bytes([content[at] ^ bit])
        yield f"bit {number % 8} of byte {at} flipped", content[:at] + flipped + content[at + 1 :]
        yield f"cut at byte {at}", content[:at]
        zeroes = bytes(min(EVERY, len(content) - at))
        yield f"{len(zeroes)} zeroes at byte {at}", content[:at] + zeroes + content[at + EVERY :]


def survive(
    file: Path,
    read: Callable[[], Any],
    *,
    every: int = EVERY,
    name: str = "",
    errors: tuple[type[Exception], ...] = (ValueError,),
    is_checked: bool = True,
) -> Outcome:
    """Damages a file in every way and reads it each time; at the end it is as it was.

    Args:
      file: to damage.
      read: reads it; its values are compared.
      every: bytes between two damages.
      name: what errors have to name; default the name of the file.
      errors: types that are no accident, which the command line says in a sentence.
      is_checked: False for a file of another program's format that has no checksum: another value
        may come from it, which is counted in `cases` alone.

    Raises:
      AssertionError: a damage gave another value, or an error of another type or without the name.
    """
    content, outcome, expected = file.read_bytes(), Outcome(), read()
    try:
        for damage, damaged in damages(content, every):
            if damaged == content:
                continue
            outcome.cases += 1
            file.write_bytes(damaged)
            try:
                found = read()
            except errors as error:
                assert (name or file.name) in str(error), f"{file}, {damage}: {error}"
                outcome.named += 1
            except Exception as error:
                raise AssertionError(f"{file}, {damage}: {type(error).__name__}") from error
            else:
                assert found == expected or not is_checked, f"{file}, {damage}: {found}"
                outcome.same += found == expected
    finally:
        file.write_bytes(content)
    return outcome
