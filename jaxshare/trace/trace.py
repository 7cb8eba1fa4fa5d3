"""Traces: what a session fed and who saw what, as integers. They are enough to compute all of it
again in one parallel pass.

Hogwild! Inference, appendix B, "Fine-tuning and re-encoding considerations": for each query the
difference between its position and the begin of each block, and how many tokens were in each block.
Keys move here, too: a finished step goes to the end of the history, and what is fed after that sees
it there. So a trace also says where each key stood, and when.

`jaxshare.trace.recorder` makes traces, `jaxshare.trace.attention` computes with them.
"""

import dataclasses
import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxshare.paths import whole_file

STANDS = 2**31 - 1
"""The end of a stay that has not ended."""
NO_ROW = -1
"""The row of a text that was put into a block without one: a prompt, a header, what a person says,
a step that is encoded anew."""
_MAGIC, _FORMAT = b"jaxshare trace", 1
"""How a file begins, with the checksum of the rest, so that nothing is parsed that was not written
so."""
_ARRAYS = (
    "tokens",
    "views",
    "rows",
    "passes",
    "starts",
    "visible",
    "stay_tokens",
    "stay_blocks",
    "stay_indices",
    "stay_begins",
    "stay_ends",
    "capacities",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """What was fed to a cache, pass by pass. T tokens, V views, B blocks, S stays; all arrays are
    int32, of numpy.

    A view is what one row brings to one pass: tokens that stand side by side, and see the blocks as
    they are in this pass. A stay is a key at one place: each token has one where it is written, and
    another for each time that its block was moved.

    Attributes:
      tokens: [T], in the order in which they were fed: by pass, then by row, then as they stand.
      views: [T], the view of each.
      rows: [V], the row of each view, or `NO_ROW`.
      passes: [V], its pass, from 0; they do not descend.
      starts: [V, B], where each block begins in the order of the view's row; 0 for a block that it
        does not see.
      visible: [V, B], tokens of each block that the view's first token sees, 0 where it sees none.
        The token t behind it sees t more of the block that they are written to.
      stay_tokens: [S], ascending: which token's key it is; of one token the earlier stay comes
        first.
      stay_blocks, stay_indices: [S], the block, and the place in it.
      stay_begins, stay_ends: [S], the pass from which the key stands there, and the first one in
        which it does not; `STANDS` if it has not left.
      capacities: [B], tokens that fit in each block.
      names: of the blocks, or none.
      fingerprint: of the model and its tokenizer (`LoadedModel.trace_fingerprint`), or "" for a
        trace that is of no model.
      context: the longest text, in tokens, that the model was prepared for
        (`ModelConfig.for_context`), or 0 for all that it takes.
    """

    tokens: np.ndarray
    views: np.ndarray
    rows: np.ndarray
    passes: np.ndarray
    starts: np.ndarray
    visible: np.ndarray
    stay_tokens: np.ndarray
    stay_blocks: np.ndarray
    stay_indices: np.ndarray
    stay_begins: np.ndarray
    stay_ends: np.ndarray
    capacities: np.ndarray
    names: tuple[str, ...] = ()
    fingerprint: str = ""
    context: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError where the arrays do not belong together."""
        for name in _ARRAYS:
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.int32))
        _check(self)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def num_blocks(self) -> int:
        """B."""
        return len(self.capacities)

    @property
    def num_passes(self) -> int:
        """Passes that fed something."""
        return int(self.passes[-1]) + 1 if len(self.passes) else 0

    @property
    def written(self) -> tuple[np.ndarray, np.ndarray]:
        """The block that each token was written to, and its place there: int32[T] both."""
        first = np.searchsorted(self.stay_tokens, np.arange(self.num_tokens))
        return self.stay_blocks[first], self.stay_indices[first]

    @property
    def positions(self) -> np.ndarray:
        """int32[T], of each token in its row's order."""
        block, index = self.written
        return self.starts[self.views, block] + index

    @property
    def seen(self) -> np.ndarray:
        """int32[T, B], how many tokens of each block each token sees, the first ones."""
        behind = np.arange(self.num_tokens) - np.searchsorted(self.views, self.views)
        seen = self.visible[self.views]
        seen[np.arange(self.num_tokens), self.written[0]] += behind.astype(np.int32)
        return seen

    @property
    def lengths(self) -> np.ndarray:
        """int32[B], tokens in each block in the end."""
        return np.bincount(
            self.stay_blocks[self.stay_ends == STANDS], minlength=self.num_blocks
        ).astype(np.int32)

    def save(self, path: str | os.PathLike) -> None:
        """Writes one file, whole or not at all: integers, and a little JSON.

        Raises:
          OSError: it cannot be written.
        """
        with whole_file(Path(path), "wb") as file:
            file.write(self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Reads what `save` has written.

        Raises:
          OSError: no such file, or one that cannot be read.
          ValueError: as in `from_bytes`.
        """
        return cls.from_bytes(Path(path).read_bytes(), os.fspath(path))

    def to_bytes(self) -> bytes:
        """What `save` writes."""
        about = {"names": self.names, "fingerprint": self.fingerprint, "context": self.context}
        content = io.BytesIO()
        arrays: dict[str, Any] = {name: _narrow(getattr(self, name)) for name in _ARRAYS}
        np.savez_compressed(
            content, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays
        )
        return b"%s %d %s\n%s" % (
            _MAGIC,
            _FORMAT,
            _checksum(content.getvalue()),
            content.getvalue(),
        )

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> Self:
        """A trace from what `to_bytes` gives.

        Args:
          content: all of it.
          name: of where it comes from, for errors.

        Raises:
          ValueError: it is no trace, is cut short or was changed, or another version has written
            it.
        """
        head, _, content = content.partition(b"\n")
        if not (found := re.fullmatch(rb"%s (\d+) ([0-9a-f]{64})" % _MAGIC, head)):
            raise ValueError(
                f"{name} does not begin as a trace does; give a file that Trace.save has written"
            )
        if int(found[1]) != _FORMAT:
            raise ValueError(
                f"{name} is a trace of format {int(found[1])}, and this version reads format "
                f"{_FORMAT}; read it with the version that wrote it"
            )
        if found[2] != _checksum(content):
            raise ValueError(
                f"{name} is a trace that is cut short or damaged: its checksum is wrong; save the "
                "trace again"
            )
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            about = json.loads(file["about"].tobytes())
            return cls(
                **{name: file[name] for name in _ARRAYS}, **about | {"names": tuple(about["names"])}
            )


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _narrow(array: np.ndarray) -> np.ndarray:
    """The same numbers in the narrowest integers that hold them, least byte first."""
    ends = (int(array.min(initial=0)), int(array.max(initial=0)))
    kinds = ("<i1", "<i2", "<i4")
    return array.astype(
        next(
            kind
            for kind in kinds
            if np.iinfo(kind).min <= ends[0] and ends[1] <= np.iinfo(kind).max
        )
    )


def _check(trace: Trace) -> None:
    tokens, views, stays, blocks = (
        len(trace.tokens),
        len(trace.rows),
        len(trace.stay_tokens),
        len(trace.capacities),
    )
    shapes = dict.fromkeys(_ARRAYS, (stays,)) | {
        "tokens": (tokens,),
        "views": (tokens,),
        "rows": (views,),
        "passes": (views,),
        "starts": (views, blocks),
        "visible": (views, blocks),
        "capacities": (blocks,),
    }
    for name, shape in shapes.items():
        if (found := getattr(trace, name).shape) != shape:
            raise ValueError(
                f"a trace of {tokens} tokens, {views} views, {stays} stays and {blocks} blocks has "
                f"{name} of shape {shape}; got {found}"
            )
    if trace.names and len(trace.names) != blocks:
        raise ValueError(
            f"a trace of {blocks} blocks has {len(trace.names)} names of blocks; give one of each, "
            "or none"
        )
    _ascending("views", trace.views, views)
    _ascending("stay_tokens", trace.stay_tokens, tokens)
    if (np.diff(trace.passes) < 0).any() or (trace.passes < 0).any():
        raise ValueError("the trace's passes must not descend, and begin at 0 or later")
    if outside := [
        name
        for name in ("tokens", "starts", "visible", "stay_indices", "capacities")
        if (getattr(trace, name) < 0).any()
    ]:
        raise ValueError(f"the trace's {outside[0]} must be at least 0")
    if ((trace.stay_blocks < 0) | (trace.stay_blocks >= blocks)).any():
        raise ValueError(
            f"a stay of the trace is in block {int(trace.stay_blocks.max())}, but it has blocks 0 "
            f"to {blocks - 1}"
        )
    if (trace.stay_ends <= trace.stay_begins).any():
        raise ValueError(
            "a stay of the trace ends before it begins; it begins in an earlier pass than that in "
            "which it has ended"
        )
    if (lost := np.flatnonzero(np.bincount(trace.stay_tokens, minlength=tokens) == 0)).size:
        raise ValueError(
            f"the trace is cut short: token {int(lost[0])} stands nowhere; take the whole trace"
        )
    first = np.searchsorted(trace.stay_tokens, np.arange(tokens))
    if (late := np.flatnonzero(trace.stay_begins[first] != trace.passes[trace.views])).size:
        raise ValueError(
            f"the first stay of token {int(late[0])} must begin with the pass that feeds it, "
            f"{int(trace.passes[trace.views][late[0]])}; got "
            f"{int(trace.stay_begins[first][late[0]])}"
        )
    _check_stays(trace)


def _check_stays(trace: Trace) -> None:
    """What is seen is there, and what is left in the end makes a cache."""
    there = np.zeros((trace.num_passes + 1, trace.num_blocks), np.int64)
    np.add.at(there, (np.minimum(trace.stay_begins, trace.num_passes), trace.stay_blocks), 1)
    np.add.at(there, (np.minimum(trace.stay_ends, trace.num_passes), trace.stay_blocks), -1)
    if (more := np.argwhere(trace.seen > np.cumsum(there, axis=0)[trace.passes[trace.views]])).size:
        token, block = more[0].tolist()
        raise ValueError(
            f"the trace is cut short: token {token} sees more of block {block} than stands there; "
            "take the whole trace"
        )
    standing = trace.stay_ends == STANDS
    for block in np.unique(trace.stay_blocks[standing]):
        there = np.sort(trace.stay_indices[standing & (trace.stay_blocks == block)])
        if (there != np.arange(len(there))).any() or len(there) > trace.capacities[block]:
            raise ValueError(
                f"what stands in block {int(block)} at the end of the trace must be one token at "
                f"each index from 0, at most its capacity of {int(trace.capacities[block])}; got "
                f"{len(there)} tokens up to index {int(there[-1])}"
            )


def _ascending(name: str, array: np.ndarray, end: int) -> None:
    if array.size and (array[0] < 0 or array[-1] >= end or (np.diff(array) < 0).any()):
        raise ValueError(f"the trace's {name} must not descend, and lie between 0 and {end - 1}")
