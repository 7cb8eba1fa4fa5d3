"""What people run: completions of a prompt, workers over one cache, the command line."""

from jaxshare.serving.branches import Completion, Completions, generate
from jaxshare.serving.layouts import WorkersLayout, combined, contiguous, interleaved
from jaxshare.serving.prompts import COLLABORATIVE, PLAIN, Format, collaborative
from jaxshare.serving.results import Answer, Result
from jaxshare.serving.transcript import Event, Step
from jaxshare.serving.workers import Workers

__all__ = ["COLLABORATIVE", "PLAIN", "Answer", "Completion", "Completions", "Event", "Format", "Result", "Step", "Workers", "WorkersLayout",
           "collaborative", "combined", "contiguous", "generate", "interleaved"]
