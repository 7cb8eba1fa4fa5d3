"""What people run: completions of a prompt, workers over one cache, the command line."""

from jaxshare.serving.branches import Completion, Completions, generate
from jaxshare.serving.workers import Written, combined_layout, write_together

__all__ = ["Completion", "Completions", "Written", "combined_layout", "generate", "write_together"]
