"""Reads the list of launches that a GPU's host works through: what is one graph, and where the host
waits.

XLA writes it as a tree, a line each, with the launches of a loop or branch indented under it:

    000: kCommandBuffer [source | sink]
        003: kWhile [prev=002 | sink]
    condition:
            004: kCustomKernel ...
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Self

GRAPH, LOOP, BRANCH = "kCommandBuffer", "kWhile", "kConditional"
_CONTROL = frozenset({GRAPH, LOOP, BRANCH, "kSequential", "kAsyncStart", "kAsyncDone"})
_LINE = re.compile(r"^( *)\d+: (k\w+) +(.*)$")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One line of the list.

    Attributes:
      kind: as XLA names it, "kCustomKernel" for example.
      what: the rest of the line, a kernel's name among it.
      around: the kinds of what it is inside, the outermost first.
    """

    kind: str
    what: str
    around: tuple[str, ...]

    @property
    def in_graph(self) -> bool:
        """True if it is launched with a graph, and not by itself."""
        return GRAPH in self.around


@dataclasses.dataclass(frozen=True)
class HostWork:
    """The work of the host in a dispatch, each line counted once, however often a loop comes to it.

    Attributes:
      graphs: graphs that it launches.
      waits: loops and branches that it decides: for each it waits for the GPU to send a number, and
        for a loop once more in every turn.
      alone: kernels, copies and calls of libraries that are launched outside of any graph.
      in_graphs: those that graphs have in them.
    """

    graphs: int
    waits: int
    alone: int
    in_graphs: int

    @classmethod
    def of(cls, launches: Sequence[Launch]) -> Self:
        """Counts what a list has."""
        work = [launch for launch in launches if launch.kind not in _CONTROL]
        return cls(
            graphs=sum(launch.kind == GRAPH for launch in launches),
            waits=sum(launch.kind in (LOOP, BRANCH) and not launch.in_graph for launch in launches),
            alone=sum(not launch.in_graph for launch in work),
            in_graphs=sum(launch.in_graph for launch in work),
        )


def read_list(text: str) -> list[Launch]:
    """The launches of a list as XLA writes it, the outer before the inner."""
    found: list[Launch] = []
    open_: list[tuple[int, str]] = []
    for line in text.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        indent = len(match[1])
        while open_ and open_[-1][0] >= indent:
            open_.pop()
        found.append(Launch(match[2], match[3], tuple(kind for _, kind in open_)))
        open_.append((indent, match[2]))
    return found
