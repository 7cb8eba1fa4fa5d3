"""Texts of sessions, such as their prompts, which the scheduler feeds in the passes over the prompts
of requests."""

import abc
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from jaxshare.serving.kvcache.lease import KVLease
from jaxshare.serving.kvcache.pool import Extent


@dataclasses.dataclass(eq=False, kw_only=True)
class SessionRequest(abc.ABC):
    """A request of a session, of which each has one at a time.

    Attributes:
      owner: the lease of the session.
      blocks: gives where the session's blocks are, under the device lock.
      compile_seconds: that it has taken besides.
      error: the exception where it failed.
      given_up: whether the session's thread was interrupted meanwhile.
      done: whether it is over.
    """

    owner: KVLease
    blocks: Callable[[], list[Extent]]
    compile_seconds: float = 0.0
    error: Exception | None = None
    given_up: bool = False
    done: bool = False

    @property
    @abc.abstractmethod
    def text(self) -> str:
        """The request in words. They are the same in every process."""


@dataclasses.dataclass(eq=False, kw_only=True)
class SessionFeed(SessionRequest):
    """Texts to feed to the ends of a session's blocks. Each sees its own block alone.

    Attributes:
      texts: for some blocks the tokens, int32, for which these have room.
      adapter_place: of the session's adapter, 0 for none.
      broken: the blocks after whose text the logits are not finite.
    """

    texts: Mapping[int, np.ndarray]
    adapter_place: int = 0
    broken: set[int] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self._num_fed = dict.fromkeys(self.texts, 0)

    @property
    def text(self) -> str:
        return ", ".join(
            f"{len(new)} tokens for block {block}" for block, new in self.texts.items()
        )

    @property
    def is_over(self) -> bool:
        """Returns whether all texts are fed."""
        return all(self._num_fed[block] == len(new) for block, new in self.texts.items())

    def left(self) -> "list[FedText]":
        """The texts that are not fed yet. Under the device lock.

        Raises:
          ClosedError: the session's memory is gone.
        """
        extents = self.blocks()
        return [
            FedText(self, block, new, extents[block], self._num_fed[block])
            for block, new in self.texts.items()
            if self._num_fed[block] < len(new)
        ]

    def fed(self, block: int, count: int, is_finite: bool) -> None:
        """Notes that the next tokens of a block have been fed, and whether the logits are finite."""
        self._num_fed[block] += count
        if not is_finite:
            self.broken.add(block)


class FedText:
    """A text of a session as passes over prompts take it: all that its block will hold.

    Args:
      feed: that it belongs to.
      block: the number of its block.
      new: its tokens.
      extent: of the block, without what is fed.
      num_fed: tokens of it that are fed.

    Attributes:
      tokens: of the block. Those that are cached are not read, and are zeros here.
      extent, ref_count: as a node of the prefix tree has them.
    """

    ref_count = 0

    def __init__(
        self, feed: SessionFeed, block: int, new: np.ndarray, extent: Extent, num_fed: int
    ):
        self.feed, self._block = feed, block
        self.tokens = np.concatenate([np.zeros(extent.length, np.int32), new])
        self.extent = dataclasses.replace(extent, length=extent.length + num_fed)

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are cached."""
        return self.extent.length

    @property
    def adapter_place(self) -> int:
        """The place of the session's adapter, 0 for none."""
        return self.feed.adapter_place

    def path(self) -> "list[FedText]":
        """All that a pass over its next tokens sees: the text itself."""
        return [self]

    def fed(self, count: int, is_finite: bool) -> None:
        """Notes a pass over its next tokens; see `SessionFeed.fed`."""
        self.feed.fed(self._block, count, is_finite)
