"""The decode loop, its state, sampling, and the ends of steps.

The jitted loop is in `loop`, its state in `state` and `row_inputs`, sampling in `sampling` and
`top_logits`, and what ends a step on the device in `steps` and `automaton`.
"""

from jaxshare.decoding.loop import decode
from jaxshare.decoding.samplers import Samplers
from jaxshare.decoding.sampling_params import Sampler, SamplingParams
from jaxshare.decoding.state import DecodeState, FinishReason

__all__ = ["DecodeState", "FinishReason", "Sampler", "Samplers", "SamplingParams", "decode"]
