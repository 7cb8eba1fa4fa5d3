"""Decoding: the jitted loop (`loop`), its state (`state`, `row_inputs`), sampling (`sampling`,
`top_logits`) and the ends of steps on the device (`steps`, `automaton`)."""

from jaxshare.decoding.loop import decode
from jaxshare.decoding.sampling import Sampler, Samplers
from jaxshare.decoding.state import DecodeState, FinishReason

__all__ = ["DecodeState", "FinishReason", "Sampler", "Samplers", "decode"]
