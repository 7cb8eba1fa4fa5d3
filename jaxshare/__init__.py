"""jaxshare: inference for groups of language-model streams that share memory.

One engine for Hogwild! Inference (workers), Hydragen (branches) and Hive (agents): rows that see
ordered lists of cached blocks. The core is pure JAX; `jaxshare.models` has the families of models,
`jaxshare.serving` the engine, workers, branches, agents and the command line.
"""

from jaxshare.attention import Plan, block_attention, make_plan
from jaxshare.cache import KVCache
from jaxshare.checkout import find_siblings, version
from jaxshare.decoding.grammar import Grammar
from jaxshare.decoding.loop import decode
from jaxshare.decoding.processors import (
    register_logits_processor,
    registered_logits_processors,
)
from jaxshare.decoding.samplers import Samplers
from jaxshare.decoding.sampling_params import Sampler, SamplingParams
from jaxshare.decoding.state import DecodeState, FinishReason
from jaxshare.deprecated import find_moved_modules, renamed
from jaxshare.layout import Layout
from jaxshare.rope import Rope
from jaxshare.trace.attention import TraceBatch
from jaxshare.trace.recorder import Recorder
from jaxshare.trace.trace import Trace

find_siblings()
find_moved_modules()
__getattr__ = renamed(__name__, {"Reason": "jaxshare.decoding.finish_reason.FinishReason"})
__version__ = version()


def __dir__() -> list[str]:
    """The names that are offered: what is imported here for other reasons is not."""
    return sorted(__all__)


__all__ = [
    "DecodeState",
    "FinishReason",
    "Grammar",
    "KVCache",
    "Layout",
    "Plan",
    "Recorder",
    "Rope",
    "Sampler",
    "Samplers",
    "SamplingParams",
    "Trace",
    "TraceBatch",
    "__version__",
    "block_attention",
    "decode",
    "make_plan",
    "register_logits_processor",
    "registered_logits_processors",
]
