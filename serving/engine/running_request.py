"""Running requests: the rows that the scheduler has admitted."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare.decoding.changes import Start
from jaxshare.decoding.top_logits import largest_logprobs
from jaxshare.layout import bucket
from jaxshare.serving.engine.dispatched import Dispatched
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.speculation import DraftLookup
from jaxshare.serving.kvcache.pool import Extent
from jaxshare.serving.kvcache.prefix_tree import Node

WIDTH = 16
"""Tokens of a row that a pass of the decode loop feeds at most."""


@dataclasses.dataclass(eq=False)
class RunningRequest:
    """An admitted request.

    Attributes:
      request: the request.
      index: its row of the decode loop.
      node: the node of the prefix tree that it writes.
      decoding: whether it is in the decode loop; before that it is prefilled.
      logits: float32[V] after its last fed token, where it can sample at once.
      drafts: the lookup of draft tokens, where it has parted from an earlier output.
      block, length: its own block in the last view, and the tokens in that, as far as results of
        dispatches were read.
      is_full: whether it has stopped as its block is full.
      capacity: of the extent that it writes, when it was dispatched last.
    """

    request: Request
    index: int
    node: Node
    decoding: bool = False
    logits: Array | None = None
    drafts: DraftLookup | None = None
    block: int = 0
    length: int = 0
    capacity: int = 0
    is_full: bool = False

    @property
    def adapter_place(self) -> int:
        """The place of its adapter, 0 for none."""
        return self.request.adapter_place

    def path(self) -> list[Node]:
        """The nodes of its tokens, in order."""
        return self.node.path()

    @property
    def extent(self) -> Extent:
        """The extent that it writes."""
        assert self.node.extent is not None
        return self.node.extent

    @property
    def unread(self) -> np.ndarray:
        """Tokens that are not cached yet."""
        path = [node for node in self.node.path() if node.writing]
        return np.concatenate([node.tokens[node.num_cached :] for node in path])

    def start(self, grammar: int) -> Start:
        """How it begins in the decode loop, with this state of its grammar."""
        request = self.request
        return Start(
            request.seed,
            request.max_new_tokens,
            len(request.output),
            self.unread.tolist() if self.logits is None else (),
            request.recorded,
            request.scored,
            grammar,
            request.processed,
        )

    def take(self, result: Dispatched) -> list[int]:
        """The tokens that it has sampled in a dispatch; its request takes what is kept of these."""
        request, new = self.request, slice(0, int(result.num_held[self.index]))
        if request.scored:
            request.logprobs += result.logprobs[self.index, new].tolist()
        if request.both:
            request.raw_logprobs += result.raw_logprobs[self.index, new].tolist()
        if request.recorded and new.stop:
            top = jax.tree.map(lambda array: array[self.index, new], result.top_logits)
            if count := request.num_top_logprobs:
                request.top_logprobs += largest_logprobs(top, count)
            else:
                request.top_logits.append(top)
        return result.tokens[self.index, new].tolist()

    @property
    def needs_prefill(self) -> bool:
        """Returns whether it has more to feed than the decode loop takes.

        The loop feeds few tokens, and those of its own node alone.
        """
        if self.decoding or self.logits is not None:
            return False
        return len(self.unread) > WIDTH or any(
            node.writing for node in self.node.path() if node is not self.node
        )


def preemption_order(row: RunningRequest) -> tuple[int, int]:
    """Sort key of the row to preempt first: the lowest priority, then the latest submission."""
    return row.request.priority, -row.request.number


def stacked_logits(rows: Sequence[RunningRequest], num_rows: int) -> Array:
    """The logits of rows, all of which have some, float32[num_rows, V]; what follows means nothing.

    They are for each row of the loop, and out of a rounded number, so that few programs serve all.
    """
    different = {id(row.logits): row.logits for row in rows if row.logits is not None}
    place = {key: i for i, key in enumerate(different)}
    index = [place[id(row.logits)] for row in rows]
    index += [0] * (num_rows - len(rows))
    given = [*different.values()]
    return _stacked(
        given + given[:1] * (bucket(len(given)) - len(given)), np.asarray(index, np.int32)
    )


@jax.jit
def _stacked(logits: Sequence[Array], index: Array) -> Array:
    return jnp.stack(logits)[index]


def compile_stacked_logits(num_rows: int, vocab_size: int) -> None:
    """Compiles what `stacked_logits` runs, for any number of rows."""
    logits, index = [jnp.zeros(vocab_size)], np.zeros(num_rows, np.int32)
    while len(logits) <= bucket(num_rows):
        _stacked(logits, index)
        logits *= 2
