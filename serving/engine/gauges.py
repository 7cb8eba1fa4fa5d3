"""The gauges of an engine's metrics, which are set once a step."""

from collections.abc import Sequence

from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.output import OutputProcessor
from jaxshare.serving.engine.running_request import RunningRequest
from jaxshare.serving.kvcache.manager import KVManager


def set_gauges(
    metrics: Metrics,
    live: Sequence[RunningRequest],
    queue: FairQueue,
    kv: KVManager,
    output: OutputProcessor,
) -> None:
    """Sets the gauges of running and waiting requests, and of memory.

    Args:
      metrics: that have them.
      live, queue, kv, output: of the scheduler, after a step.
    """
    metrics.set_contributions(queue.contributions())
    decoding, pool = sum(row.decoding for row in live), kv.pool
    metrics.set_state(
        decoding=decoding,
        prefilling=len(live) - decoding,
        waiting=len(queue),
        accelerator_bytes=(pool.tokens - pool.free) * pool.bytes_per_token,
        logits_bytes=output.logits.bytes if output.logits else 0,
        session_bytes=kv.leased_tokens * pool.bytes_per_token,
        host_bytes=kv.tree.host_used * pool.bytes_per_token,
    )
