"""Traces: the tokens that a session fed and what each of them saw, as integers. They are enough to
compute all of it again in one parallel pass.

Hogwild! Inference, appendix B, "Fine-tuning and re-encoding considerations": for each query the
difference between its position and the start of each block, and how many tokens were in each block.
Keys move here, too: a finished step goes to the end of the history, and tokens that are fed after
that see it there. So a trace also says where each key was, and when.

`jaxshare.trace.recorder` makes traces, `jaxshare.trace.attention` computes with them.
"""

import dataclasses
import hashlib
import io
import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Int32

from jaxshare.paths import whole_file

NOT_ENDED = 2**31 - 1
"""The end of a placement that has not ended."""
NO_ROW = -1
"""The row of a text that was put into a block without one: a prompt, a header, a user's message, a
step that is encoded anew."""
_MAGIC, _FORMAT = b"jaxshare trace", 1
"""The start of a file; the checksum of the rest follows, so that nothing is parsed but what `save`
has written."""
_MAX_BYTES = 2**32
"""The most bytes of a file's arrays, which few bytes of a file may claim."""
_FILE_KEYS = {
    "tokens": "tokens",
    "row_pass": "views",
    "rows": "rows",
    "passes": "passes",
    "starts": "starts",
    "visible": "visible",
    "placement_tokens": "stay_tokens",
    "placement_blocks": "stay_blocks",
    "placement_indices": "stay_indices",
    "placement_starts": "stay_begins",
    "placement_ends": "stay_ends",
    "capacities": "capacities",
}
"""The name that each array of a trace has in a file."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """The tokens fed to a cache, pass by pass. T tokens, V row passes, B blocks, S placements.

    A row pass is what one row brings to one pass: neighbouring tokens, which see the blocks as they
    are in this pass. A placement is a key at one index of a block: each token has one where it is
    written, and another for each time that its block was moved.

    Attributes:
      tokens: in the order in which they were fed: by pass, then by row, then in text order.
      row_pass: the row pass of each token.
      rows: the row of each row pass, or `NO_ROW`.
      passes: the pass of each row pass, from 0; they do not descend.
      starts: where each block starts in the row's order; 0 for a block that the row does not see.
      visible: tokens of each block that the row pass's first token sees, 0 where it sees none. The
        t-th token after it sees t more of the block that they are written to.
      placement_tokens: ascending: the token whose key it is; of one token the earlier placement
        comes first.
      placement_blocks, placement_indices: the block, and the index in it.
      placement_starts, placement_ends: the pass from which the key is there, and the first one in
        which it is not; `NOT_ENDED` if it has not left.
      capacities: tokens that fit in each block.
      names: of the blocks, or none.
      fingerprint: of the model and its tokenizer (`LoadedModel.trace_fingerprint`), or "" for a
        trace that is of no model.
      context: the longest text, in tokens, that the model was prepared for
        (`ModelConfig.for_context`), or 0 for all that it takes.
    """

    tokens: Int32[np.ndarray, " T"]
    row_pass: Int32[np.ndarray, " T"]
    rows: Int32[np.ndarray, " V"]
    passes: Int32[np.ndarray, " V"]
    starts: Int32[np.ndarray, "V B"]
    visible: Int32[np.ndarray, "V B"]
    placement_tokens: Int32[np.ndarray, " S"]
    placement_blocks: Int32[np.ndarray, " S"]
    placement_indices: Int32[np.ndarray, " S"]
    placement_starts: Int32[np.ndarray, " S"]
    placement_ends: Int32[np.ndarray, " S"]
    capacities: Int32[np.ndarray, " B"]
    names: tuple[str, ...] = ()
    fingerprint: str = ""
    context: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError where the arrays do not fit together."""
        for name in _FILE_KEYS:
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.int32))
        _check(self)

    def __repr__(self) -> str:
        """A line with its size."""
        return f"<Trace: {self.num_tokens} tokens in {self.num_passes} passes, {self.num_blocks} blocks>"

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
        """The number of passes that fed something."""
        return int(self.passes[-1]) + 1 if len(self.passes) else 0

    @property
    def written(self) -> tuple[Int32[np.ndarray, " T"], Int32[np.ndarray, " T"]]:
        """The block that each token was written to, and its index there."""
        first = np.searchsorted(self.placement_tokens, np.arange(self.num_tokens))
        return self.placement_blocks[first], self.placement_indices[first]

    @property
    def positions(self) -> Int32[np.ndarray, " T"]:
        """The position of each token in its row's order."""
        block, index = self.written
        return self.starts[self.row_pass, block] + index

    @property
    def seen(self) -> Int32[np.ndarray, "T B"]:
        """The number of tokens of each block that each token sees, the first ones."""
        nth = np.arange(self.num_tokens) - np.searchsorted(self.row_pass, self.row_pass)
        seen = self.visible[self.row_pass]
        seen[np.arange(self.num_tokens), self.written[0]] += nth.astype(np.int32)
        return seen

    @property
    def lengths(self) -> Int32[np.ndarray, " B"]:
        """The number of tokens in each block at the end."""
        return np.bincount(
            self.placement_blocks[self.placement_ends == NOT_ENDED], minlength=self.num_blocks
        ).astype(np.int32)

    def save(self, path: str | os.PathLike) -> None:
        """Writes one file, whole or not at all: integers, and a little JSON.

        Raises:
          WriteError: it cannot be written; what was there before stays.
        """
        with whole_file(Path(path), "wb") as file:
            file.write(self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Reads a file that `save` has written.

        Raises:
          OSError: no such file, or one that cannot be read.
          ValueError: as in `from_bytes`.
        """
        return cls.from_bytes(Path(path).read_bytes(), os.fspath(path))

    def to_bytes(self) -> bytes:
        """The content of the file that `save` writes."""
        about = {"names": self.names, "fingerprint": self.fingerprint, "context": self.context}
        content = io.BytesIO()
        arrays: dict[str, Any] = {
            key: _narrow(getattr(self, name)) for name, key in _FILE_KEYS.items()
        }
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
        """Reads a trace from the content of a file.

        Args:
          content: all of it.
          name: of the file, for errors.

        Raises:
          ValueError: it is no trace, is cut short or was changed, or another version has written
            it.
        """
        head, _, content = content.partition(b"\n")
        if not (found := re.fullmatch(rb"%s (\d+) ([0-9a-f]{64})" % _MAGIC, head)):
            raise ValueError(
                f"{name} does not start as a trace does; give a file that Trace.save has written"
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
        try:
            return cls._of_arrays(content)
        # Many types: the checksum is right, but it is not what `save` writes.
        except Exception as error:
            raise ValueError(
                f"{name} is not a whole trace ({type(error).__name__}: {str(error)[:300]}); give a "
                "file that Trace.save has written"
            ) from error

    @classmethod
    def _of_arrays(cls, content: bytes) -> Self:
        with zipfile.ZipFile(io.BytesIO(content)) as members:
            if sum(member.file_size for member in members.infolist()) > _MAX_BYTES:
                raise ValueError(f"its arrays have more than {_MAX_BYTES >> 30} GiB")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            about = json.loads(file["about"].tobytes())
            about["names"] = tuple(about["names"])
            return cls(**{name: file[key] for name, key in _FILE_KEYS.items()}, **about)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _narrow(array: np.ndarray) -> np.ndarray:
    """The same numbers in the narrowest integers that hold them, little-endian."""
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    return array.astype(
        next(
            dtype
            for dtype in ("<i1", "<i2", "<i4")
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max
        )
    )


def _check(trace: Trace) -> None:
    """Raises ValueError unless the arrays are one whole trace."""
    _check_shapes(trace)
    _check_numbers(trace)
    _check_placements(trace)
    _check_seen(trace)
    _check_end(trace)


def _check_shapes(trace: Trace) -> None:
    tokens, row_passes, placements, blocks = (
        len(array) for array in (trace.tokens, trace.rows, trace.placement_tokens, trace.capacities)
    )
    shapes = dict.fromkeys(_FILE_KEYS, (placements,)) | {
        "tokens": (tokens,),
        "row_pass": (tokens,),
        "rows": (row_passes,),
        "passes": (row_passes,),
        "starts": (row_passes, blocks),
        "visible": (row_passes, blocks),
        "capacities": (blocks,),
    }
    for name, shape in shapes.items():
        if (given := getattr(trace, name).shape) != shape:
            raise ValueError(
                f"a trace of {tokens} tokens, {row_passes} row passes, {placements} placements and "
                f"{blocks} blocks has {name} of shape {shape}; got {given}"
            )
    if trace.names and len(trace.names) != blocks:
        raise ValueError(
            f"a trace of {blocks} blocks has {len(trace.names)} names of blocks; give one of each, "
            "or none"
        )


def _check_numbers(trace: Trace) -> None:
    _check_ascending("row_pass", trace.row_pass, len(trace.rows))
    _check_ascending("placement_tokens", trace.placement_tokens, trace.num_tokens)
    if (np.diff(trace.passes) < 0).any() or (trace.passes < 0).any():
        raise ValueError("the trace's passes must not descend, and start at 0 or later")
    if outside := [
        name
        for name in ("tokens", "starts", "visible", "placement_indices", "capacities")
        if (getattr(trace, name) < 0).any()
    ]:
        raise ValueError(f"the trace's {outside[0]} must be at least 0")


def _check_placements(trace: Trace) -> None:
    """Checks that each token has a placement, the first of them from its own pass on."""
    tokens, blocks = trace.num_tokens, trace.num_blocks
    if ((trace.placement_blocks < 0) | (trace.placement_blocks >= blocks)).any():
        raise ValueError(
            f"a placement of the trace is in block {int(trace.placement_blocks.max())}, but it has "
            f"blocks 0 to {blocks - 1}"
        )
    if (trace.placement_ends <= trace.placement_starts).any():
        raise ValueError(
            "a placement of the trace ends before it starts; the pass that it starts in must be "
            "earlier than the one that it ends in"
        )
    if (lost := np.flatnonzero(np.bincount(trace.placement_tokens, minlength=tokens) == 0)).size:
        raise ValueError(
            f"the trace is cut short: token {int(lost[0])} has no placement; take the whole trace"
        )
    first = np.searchsorted(trace.placement_tokens, np.arange(tokens))
    fed = trace.passes[trace.row_pass]
    if (late := np.flatnonzero(trace.placement_starts[first] != fed)).size:
        raise ValueError(
            f"the first placement of token {int(late[0])} must start with the pass that feeds it, "
            f"{int(fed[late[0]])}; got {int(trace.placement_starts[first][late[0]])}"
        )


def _check_seen(trace: Trace) -> None:
    """Checks that blocks have as many tokens as are seen of them."""
    change = np.zeros((trace.num_passes + 1, trace.num_blocks), np.int64)
    for passes, sign in ((trace.placement_starts, 1), (trace.placement_ends, -1)):
        np.add.at(change, (np.minimum(passes, trace.num_passes), trace.placement_blocks), sign)
    lengths = np.cumsum(change, axis=0)[trace.passes[trace.row_pass]]
    if (more := np.argwhere(trace.seen > lengths)).size:
        token, block = more[0].tolist()
        raise ValueError(
            f"the trace is cut short: token {token} sees more of block {block} than it has then; "
            "take the whole trace"
        )


def _check_end(trace: Trace) -> None:
    """Checks that the placements at the end make a cache."""
    final = trace.placement_ends == NOT_ENDED
    for block in np.unique(trace.placement_blocks[final]):
        indices = np.sort(trace.placement_indices[final & (trace.placement_blocks == block)])
        complete = (indices == np.arange(len(indices))).all()
        if not complete or len(indices) > trace.capacities[block]:
            raise ValueError(
                f"block {int(block)} at the end of the trace must have one token at each index "
                f"from 0, at most its capacity of {int(trace.capacities[block])}; got "
                f"{len(indices)} tokens up to index {int(indices[-1])}"
            )


def _check_ascending(name: str, array: np.ndarray, end: int) -> None:
    if array.size and (array[0] < 0 or array[-1] >= end or (np.diff(array) < 0).any()):
        raise ValueError(f"the trace's {name} must not descend, and be between 0 and {end - 1}")
