"""The pass that feeds prompts of requests and texts of sessions, and what becomes of its results."""

import dataclasses
from collections.abc import Sequence

from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.prefill import FedPass, Piece, PrefillPasses
from jaxshare.serving.engine.running_request import RunningRequest
from jaxshare.serving.engine.session_feed import FedText
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.prefix_tree import Node


@dataclasses.dataclass(frozen=True)
class PromptPass:
    """A pass over prompts and texts that is dispatched.

    Attributes:
      batch: each piece after what it belongs to; fed: the pass.
    """

    batch: Sequence[tuple[RunningRequest | FedText, Piece]]
    fed: FedPass

    @property
    def is_awaited(self) -> bool:
        """True if others than its requests wait for it: sessions, or requests with the same prefix,
        which may take over what is finite alone."""
        return any(
            isinstance(each, FedText) or piece.node is not each.node for each, piece in self.batch
        )

    def failed(self, kv: KVManager) -> list[RunningRequest]:
        """Waits for the pass; returns the requests whose logits are not finite."""
        finite, failed = self.fed.finite(), dict[RunningRequest, None]()
        for i, (each, piece) in enumerate(self.batch):
            if isinstance(each, FedText):
                each.fed(len(piece.tokens), bool(finite[i]))
            elif not finite[i]:
                failed[each] = None
        for each, piece in self.batch:
            if isinstance(each, FedText) or each in failed:
                continue
            node = piece.node
            if isinstance(node, Node) and node is not each.node and node.is_cached:
                kv.tree.complete(node)
                node.logits = each.logits  # of a prompt that ends here, or None
        return [*failed]


def feed_prompts(
    sources: Sequence[RunningRequest | FedText],
    *,
    passes: PrefillPasses,
    streaming: bool,
    queue: FairQueue,
    metrics: Metrics,
) -> PromptPass:
    """Dispatches a pass over the next tokens of the first requests and texts of sessions, as many as its
    shape holds. Requests all of whose tokens are fed then have logits.

    Args:
      sources: what is to be fed, in order.
      passes, streaming: see `PrefillPasses.feed`.
      queue, metrics: of the scheduler.
    """
    batch, fed = passes.feed(sources, streaming=streaming)
    metrics.prefilled(sum(len(piece.tokens) for _, piece in batch))
    for i, (each, piece) in enumerate(batch):
        if isinstance(each, FedText):
            continue
        queue.serve(each.request, len(piece.tokens))
        if not len(each.unread):
            each.logits = fed.logits_of(i)
    return PromptPass(batch, fed)
