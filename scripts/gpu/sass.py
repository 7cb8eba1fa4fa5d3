"""The instructions of a compiled kernel's loops of matrix products, counted in its machine code."""

import collections
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.gpu.compiler import find_nvdisasm
from scripts.gpu.targets import HOPPER

_PER_PRODUCT = 64 * 16 // 128
"""The numbers of a matrix that a thread has of wgmma's first operand: 64 outputs and 16 inputs of
two bytes, for 128 threads."""


class ProductLoop(NamedTuple):
    """The loop of a kernel that multiplies.

    Attributes:
      instructions: of a thread in one turn.
      products: wgmma among them.
      kinds: the most frequent instructions, with their numbers.
    """

    instructions: int
    products: int
    kinds: dict[str, int]

    @property
    def per_number(self) -> float:
        """Instructions for each number of the matrix that a thread multiplies."""
        return self.instructions / (self.products * _PER_PRODUCT)


def product_loop(ptxas: Path, ptx: Iterable[str]) -> ProductLoop:
    """The smallest loop with matrix products among these programs.

    Raises:
      MissingError: there is no nvdisasm.
      ValueError: no program has such a loop.
    """
    found = [loop for text in ptx for loop in loops(disassembled(ptxas, text))]
    multiply = [turn for turn in found if any("GMMA" in one for one in turn)]
    if not multiply:
        raise ValueError("no kernel of the program has a loop with wgmma")
    turn = min(multiply, key=len)
    kinds = collections.Counter(map(_kind, turn))
    return ProductLoop(len(turn), sum("GMMA" in one for one in turn), dict(kinds.most_common(12)))


class UnderProducts(NamedTuple):
    """Exponentials of a thread in one turn of a loop with two products under way at once.

    Attributes:
      under: those made while only the second goes on.
      exponentials: all of them.
    """

    under: int
    exponentials: int


def under_products(ptxas: Path, ptx: Iterable[str]) -> UnderProducts | None:
    """The exponentials of the loop that has two products under way in these programs, or None if none
    has.

    Raises:
      MissingError: there is no nvdisasm.
    """
    waiting = (text for text in ptx if "wgmma.wait_group.sync.aligned 1;" in text)
    turns = (turn for text in waiting for turn in loops(disassembled(ptxas, text)))
    return next(filter(None, map(_under_products, sorted(turns, key=len))), None)


def _under_products(turn: Sequence[str]) -> UnderProducts | None:
    """Those of one loop, which waits until one product is left (`DEPBAR.LE gsb0, 0x1`), and then for
    that one."""
    waits = [i for i, one in enumerate(turn) if "WARPGROUP.DEPBAR.LE gsb0" in one]
    first = next((i for i in waits if turn[i].endswith("0x1")), None)
    if first is None:
        return None
    end = next((i for i in waits if i > first), len(turn))
    made = [i for i, one in enumerate(turn) if "MUFU.EX2" in one]
    return UnderProducts(sum(first < i < end for i in made), len(made))


def disassembled(ptxas: Path, ptx: str) -> str:
    """The machine code of PTX for an H200, as nvdisasm writes it."""
    program = find_nvdisasm()
    with tempfile.TemporaryDirectory(prefix="sass_") as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        for command in (
            [ptxas, f"-arch={HOPPER.architecture}", source, "-o", binary],
            [program, binary],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ValueError(f"{command[0]} failed: {done.stderr.strip()[:300]}")
    return done.stdout


def loops(sass: str) -> Iterator[list[str]]:
    """The instructions of each loop: from a label to a branch back to it."""
    code, labels, waiting = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            waiting.append(label[1])
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            labels |= dict(zip(waiting, itertools.repeat(len(code))))
            waiting = []
            code.append(found[1])
    for at, one in enumerate(code):
        to = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", one)
        start = labels.get(to[1]) if to else None
        if start is not None and start < at:
            yield code[start : at + 1]


def _kind(instruction: str) -> str:
    """The name of an instruction, with its first modifier."""
    return ".".join(re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[:2])
