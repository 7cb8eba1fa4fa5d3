"""A scheduler with its parts: memory, queue and the processing of output."""

from jaxshare.models import LoadedModel
from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.output import OutputProcessor
from jaxshare.serving.engine.scheduler import Scheduler
from jaxshare.serving.kvcache.contribution import Contribution
from jaxshare.serving.kvcache.eviction import make_policy
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.policy import Policy
from jaxshare.serving.kvcache.speeds import MeasuredSpeeds
from jaxshare.serving.logits_cache.cache import LogitsCache
from jaxshare.serving.logits_cache.hotspot import Hotspot
from jaxshare.serving.logits_cache.payoff import Payoff


def create_scheduler(
    model: LoadedModel,
    metrics: Metrics,
    sizes: tuple[int, int, int, int | None],
    policy: str | Policy,
    cache: tuple[LogitsCache | None, Hotspot, bool],
) -> Scheduler:
    """The scheduler of an engine, with memory of its own.

    Args:
      model: as loaded, keys rotated as for its whole context.
      metrics: of the engine.
      sizes: tokens of the memory on the accelerator and on the host, rows, and passes of a
        dispatch, or None; see `Scheduler`.
      policy: the order of eviction, or its name.
      cache: the Logits Cache, the rule for hotspots, and whether it is used where it does not pay.
    """
    tokens, host_tokens, rows, passes = sizes
    logits, hotspot, resample_always = cache
    policy = make_policy(policy) if isinstance(policy, str) else policy
    queue = FairQueue(policy.contributions if isinstance(policy, Contribution) else None)
    kept = (logits.num_top_logits or 1) if logits else 1
    # Several processes have to decide alike, and each would measure something else.
    is_several = model.mesh is not None and model.mesh.is_multi_process
    shape = rows, model.config.vocab_size, kept
    payoff = None if resample_always or is_several else Payoff(shape)
    kv = KVManager(
        model,
        tokens=tokens,
        host_tokens=host_tokens,
        policy=policy,
        metrics=metrics,
        speeds=MeasuredSpeeds(),
    )
    metrics.set_limits(
        rows=rows,
        accelerator_bytes=kv.pool.tokens * kv.pool.bytes_per_token,
        host_bytes=host_tokens * kv.pool.bytes_per_token,
        logits_bytes=logits.max_bytes if logits else 0,
    )
    return Scheduler(
        model,
        kv=kv,
        queue=queue,
        rows=rows,
        passes=passes,
        metrics=metrics,
        output=OutputProcessor(
            model,
            queue=queue,
            policy=policy,
            metrics=metrics,
            logits=logits,
            hotspot=hotspot,
            payoff=payoff,
        ),
        takes_sessions=True,
    )
