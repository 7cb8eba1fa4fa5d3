"""A warning about greedy decoding of a checkpoint whose authors advise against it.

The rule: the sampler takes the likeliest token (temperature 0), the checkpoint's
generation_config.json sets `do_sample`, and either config.json names Qwen3, whose model card warns
against greedy decoding, or the prompts were chosen by the name of a family whose authors advise
against it. The settings in generation_config.json are those that the model cards of these families
recommend. There is no warning for a checkpoint without that file, or with `do_sample` false, such
as base models and the embedded model.
"""

import logging
import threading

from jaxshare import Sampler
from jaxshare.models import LoadedModel

_DISCOURAGED = ("Qwen3ForCausalLM",)
"""Architectures whose model cards warn against greedy decoding."""
_log = logging.getLogger("jaxshare")
_warned: set[str] = set()
_lock = threading.Lock()


def warn_of_greedy(model: LoadedModel, sampler: Sampler, *, discouraged: bool = False) -> None:
    """Logs a warning for a checkpoint to which the rule above applies, once per process.

    Without a log handler it goes to stderr.

    Args:
      model: the model to sample from.
      sampler: the sampler of the run.
      discouraged: the prompts were chosen by the name of a family whose authors advise against
        greedy decoding.
    """
    own = model.generation.sampler
    if sampler.temperature > 0 or own.temperature == 0:
        return
    if model.config.architecture not in _DISCOURAGED and not discouraged:
        return
    with _lock:
        if model.name in _warned:
            return
        _warned.add(model.name)
    _log.warning(
        "warning: %s is decoded greedily (temperature 0), which its makers advise against: answers "
        "get worse and may repeat themselves without end; its generation_config.json samples with "
        "temperature %g, top_p %g, top_k %d, min_p %g, which is what it gets where none of these "
        "is given",
        model.name or "the model",
        own.temperature,
        own.top_p,
        own.top_k,
        own.min_p,
    )
