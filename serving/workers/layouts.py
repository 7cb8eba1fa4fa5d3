"""Layouts of workers: the blocks that each of them sees, in order, and where finished steps move.

A layout is a value. The three of the paper (Hogwild! Inference, appendix A) are made for any names;
one of your own is written from names of blocks:

    WorkersLayout(
        sees={
            "Alice": ("prompt", "notes of Alice", "Bob", "Alice"),
            "Bob": ("prompt", "Alice", "Bob"),
        },
        texts={"notes of Alice": "Only Alice can read this."},
        prompt="prompt",
    )
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from jaxshare.serving.workers.prompts.format import COLLABORATIVE, Format

HISTORY = "history"
PROMPT = "prompt"
_OTHERS = "others' header"
_OWN = "own header"


@dataclasses.dataclass(frozen=True)
class WorkersLayout:
    """The blocks of workers, by name.

    Attributes:
      sees: for each worker the blocks that it sees, in order. It writes to the last one.
      moves: for each worker the block to whose end its finished steps move. A worker that is not
        in here keeps its steps where it wrote them.
      texts: the contents of blocks from the start. Each is encoded by itself, seeing no other
        block.
      prompt: the block of the prompt, and of what people say.
    """

    sees: Mapping[str, tuple[str, ...]]
    moves: Mapping[str, str] = dataclasses.field(default_factory=dict)
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prompt: str = PROMPT

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """The layout that `dataclasses.asdict` has turned into JSON."""
        return cls(
            **{**given, "sees": {name: tuple(blocks) for name, blocks in given["sees"].items()}}
        )

    @property
    def blocks(self) -> tuple[str, ...]:
        """All blocks: the prompt's first, then as the workers list them, then where steps move."""
        return tuple(
            dict.fromkeys(
                [self.prompt, *(b for row in self.sees.values() for b in row), *self.moves.values()]
            )
        )

    def written(self, name: str) -> str:
        """The block that a worker writes."""
        return self.sees[name][-1]

    def overview(self, last: str) -> tuple[str, ...]:
        """The blocks that the early finisher sees (Hogwild! Inference, section 4.1, appendix C).

        They are all blocks that workers write or move their steps to, in the order of the worker
        `last`. Blocks that `last` does not see come before the one that it writes.
        """
        *before, own = self.sees[last]
        filled = [
            block
            for name in self.sees
            for block in (self.moves.get(name), self.written(name))
            if block is not None
        ]
        return tuple(dict.fromkeys([*before, *(block for block in filled if block != own), own]))

    def views(self, last: str) -> list[tuple[str, ...]]:
        """The lists of blocks that must fit in the context.

        They are those that workers see and, where steps move, that of the early finisher. Streams
        that do not move steps and do not see each other may fill the context each.
        """
        return [*self.sees.values(), *([self.overview(last)] if self.moves else [])]

    def without(self, name: str) -> "WorkersLayout":
        """The layout without a worker, whose block the others do not see any more."""
        own = self.written(name)
        sees = {n: tuple(b for b in row if b != own) for n, row in self.sees.items() if n != name}
        return dataclasses.replace(
            self, sees=sees, moves={n: b for n, b in self.moves.items() if n != name}
        )

    def check(self, names: Sequence[str]) -> None:
        """Raises ValueError for a layout that these workers cannot have.

        Each needs blocks, and a last one that no other writes. Every block must be written, and
        must be read.
        """
        if unknown := [
            *(n for n in names if not self.sees.get(n)),
            *(n for n in (*self.sees, *self.moves) if n not in names),
        ]:
            raise ValueError(
                f"the layout and the workers do not agree on {unknown[0]!r}; the workers are "
                f"{', '.join(names)}, and each needs the blocks that it sees"
            )
        for name, row in self.sees.items():
            if repeated := [b for b in row if row.count(b) > 1]:
                raise ValueError(
                    f"{name} sees the block {repeated[0]!r} twice: {list(row)}; list every block "
                    "once"
                )
        writers = {self.written(name): name for name in reversed([*self.sees])}
        for name in self.sees:
            if writers[self.written(name)] != name:
                raise ValueError(
                    f"{writers[self.written(name)]} and {name} both write the block "
                    f"{self.written(name)!r}, the last one that each sees; give every worker a "
                    "last block of its own"
                )
            if self.moves.get(name) == self.written(name):
                raise ValueError(
                    f"the steps of {name} move to {self.written(name)!r}, the block that it "
                    "writes; name another, or none"
                )
        filled = {self.prompt, *self.texts, *self.moves.values(), *writers}
        read = {b for row in self.sees.values() for b in row}
        if empty := [b for b in self.blocks if b not in filled]:
            raise ValueError(
                f"the layout reads the block {empty[0]!r}, which is never written; give it a text, "
                "or let a worker write it or move its steps there"
            )
        if lost := [b for b in filled if b not in read]:
            raise ValueError(
                f"no worker sees the block {lost[0]!r}, though something is written to it; list it "
                "for a worker, or leave it out"
            )


def contiguous(names: Sequence[str], format: Format = COLLABORATIVE) -> WorkersLayout:
    """Workers keep their steps in blocks of their own, after those of the others."""
    headers = _headers(names, format)
    return WorkersLayout(
        {name: (PROMPT, *_current(names, name, headers)) for name in names}, texts=headers
    )


def interleaved(names: Sequence[str], format: Format = COLLABORATIVE) -> WorkersLayout:
    """Steps are written in private, and move to a history that all see."""
    return WorkersLayout(
        {name: (HISTORY, name) for name in names}, dict.fromkeys(names, HISTORY), prompt=HISTORY
    )


def combined(names: Sequence[str], format: Format = COLLABORATIVE) -> WorkersLayout:
    """All workers see steps while they are written, and then in a history that they move to."""
    headers = _headers(names, format)
    return WorkersLayout(
        {name: (HISTORY, *_current(names, name, headers)) for name in names},
        dict.fromkeys(names, HISTORY),
        headers,
        HISTORY,
    )


MakeLayout = Callable[[Sequence[str], Format], WorkersLayout]
"""A function of names and a format."""

_NAMES = ("Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi")


MAX_WORKERS = 256
"""The most workers of a session; what is made for them grows with the square of their number."""


def worker_names(count: int) -> tuple[str, ...]:
    """Default names of workers.

    Raises:
      ValueError: more than a session can have.
    """
    if count > MAX_WORKERS:
        raise ValueError(f"{count} workers were asked for; a session has at most {MAX_WORKERS}")
    return (*_NAMES, *(f"Worker {i}" for i in range(len(_NAMES) + 1, count + 1)))[:count]


LAYOUTS: Mapping[str, MakeLayout] = {
    "contiguous": contiguous,
    "interleaved": interleaved,
    "combined": combined,
}


MOVES = ("rotate", "reencode")
"""The ways of a finished step to the history: as it is, or encoded anew after it."""


def layout_maker(layout: str | WorkersLayout | MakeLayout) -> MakeLayout:
    """The function that makes layouts: one of `LAYOUTS`, a given one, or that of a fixed layout.

    Raises:
      ValueError: an unknown name.
    """
    if isinstance(layout, WorkersLayout):
        return lambda names, format: layout
    if not isinstance(layout, str):
        return layout
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}, or in a program a "
            "function of names and format, or a WorkersLayout"
        )
    return LAYOUTS[layout]


def _current(names: Sequence[str], own: str, headers: Mapping[str, str]) -> list[str]:
    """The blocks of the others, in order, and a worker's own, each under its header if any."""
    others = [name for name in names if name != own]
    return [b for b in (_OTHERS, *others, _OWN, own) if b in headers or b in names]


def _headers(names: Sequence[str], format: Format) -> dict[str, str]:
    headers = {_OTHERS: format.others_header, _OWN: format.own_header}
    return {block: text for block, text in headers.items() if text and len(names) > 1}
