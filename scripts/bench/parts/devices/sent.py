"""Reads the collectives of a compiled decode step."""

import dataclasses
import math
import re


@dataclasses.dataclass(frozen=True)
class Collective:
    """One of a step.

    Attributes:
      kind: as XLA names it.
      bytes: of its result on each device.
      group: devices that take part.
      times: in a step.
    """

    kind: str
    bytes: int
    group: int
    times: int = 1

    @property
    def sent(self) -> float:
        """Bytes that each device sends, with the algorithm that sends least (a ring)."""
        share = (self.group - 1) / self.group
        return self.times * self.bytes * share * (2 if self.kind == "all-reduce" else 1)


_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) "
    r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(.*?"
    r"replica_groups=(\[[\d,]+\]|\{\{[\d,]*\}|mesh\[.*?\] \{.*?\})"
)


_SIZES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1, "u8": 1}


def group_size(groups: str) -> int:
    """The number of devices that take part, in one of the forms in which XLA names them."""
    if groups.startswith("mesh"):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", groups)}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", groups.rpartition("{")[2]))
    return (
        int(groups.strip("[]").split(",")[1]) if groups.startswith("[") else groups.count(",") + 1
    )


def collectives(text: str) -> list[Collective]:
    """Those of the decode loop in a compiled program, in its order. The gathering of logits, which
    takes top_k or top_p, is among them."""
    found = []
    for shapes, kind, groups in (
        each
        for line in text.splitlines()
        if "while/body" in line
        for each in _COLLECTIVE.findall(line)
    ):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        size = sum(
            _SIZES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
            for dtype, dims in arrays
        )
        found.append(Collective(kind, size, group_size(groups)))
    return found
