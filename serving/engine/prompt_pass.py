"""The pass that feeds prompts of requests and texts of sessions, and what becomes of its results."""

from collections.abc import Sequence

from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.prefill import PrefillPasses
from jaxshare.serving.engine.running_request import RunningRequest
from jaxshare.serving.engine.session_feed import FedText
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.prefix_tree import Node


def feed_prompts(
    sources: Sequence[RunningRequest | FedText],
    *,
    passes: PrefillPasses,
    streaming: bool,
    kv: KVManager,
    queue: FairQueue,
    metrics: Metrics,
) -> list[RunningRequest]:
    """One pass over the next tokens of the first requests and texts of sessions, as many as its shape
    holds.

    Args:
      sources: what is to be fed, in order.
      passes, streaming: see `PrefillPasses.feed`.
      kv, queue, metrics: of the scheduler.

    Returns:
      The requests whose logits are not finite.
    """
    batch, logits, finite = passes.feed(sources, streaming=streaming)
    metrics.prefilled(sum(len(piece.tokens) for _, piece in batch))
    failed = [each for i, (each, _) in enumerate(batch) if not finite[i]]
    for i, (each, piece) in enumerate(batch):
        if isinstance(each, FedText):
            each.fed(len(piece.tokens), bool(finite[i]))
            continue
        queue.serve(each.request, len(piece.tokens))
        if each in failed:
            continue
        if not len(each.unread):
            each.logits = logits[i]
        node = piece.node
        if isinstance(node, Node) and node is not each.node and node.is_cached:
            kv.tree.complete(node)
            node.logits = each.logits  # of a prompt that ends here, or None
    return list(dict.fromkeys(each for each in failed if isinstance(each, RunningRequest)))
