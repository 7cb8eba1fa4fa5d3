"""Traces: what a session fed and which rows saw it (`trace`), written down as it runs
(`recorder`), and attention over a whole trace at once (`attention`)."""

from jaxshare.trace.attention import TraceBatch, trace_attention
from jaxshare.trace.recorder import Recorder
from jaxshare.trace.trace import Trace

__all__ = ["Recorder", "Trace", "TraceBatch", "trace_attention"]
