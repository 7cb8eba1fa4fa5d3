"""The warning where a checkpoint is decoded greedily that must not be.

The rule: the sampler takes the likeliest token (temperature 0), the checkpoint's
generation_config.json asks for sampling (`do_sample`), and either config.json says that it is a
Qwen3, whose model card warns against greedy decoding, or the prompts were chosen by the name of a
family whose makers advise against it. What to use instead is what generation_config.json says,
which for these families is what the cards recommend. A checkpoint without that file, or with
`do_sample` false, as base models and the embedded model have it, is never warned of.
"""

import logging
import threading

from jaxshare import Sampler
from jaxshare.models import LoadedModel

_WARNS = ("Qwen3ForCausalLM",)
"""Architectures whose model cards warn against greedy decoding."""
_log = logging.getLogger("jaxshare")
_warned: set[str] = set()
_lock = threading.Lock()


def warn_of_greedy(model: LoadedModel, sampler: Sampler, *, discouraged: bool = False) -> None:
    """Logs one warning in the life of this process for each checkpoint that the rule above names;
    without a handler it goes to stderr.

    Args:
      model: that is to be sampled from.
      sampler: what it is to be sampled with.
      discouraged: whether the prompts were chosen by the name of a family whose makers advise
        against greedy decoding.
    """
    own = model.generation
    if sampler.temperature > 0 or own.temperature == 0:
        return
    if model.config.architecture not in _WARNS and not discouraged:
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
