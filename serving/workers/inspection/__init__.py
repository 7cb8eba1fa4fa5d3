"""Looking inside sessions: numbers (`probe`) and pictures (`plots`)."""

from jaxshare.serving.workers.inspection.plots import attention_picture, cache_picture
from jaxshare.serving.workers.inspection.probe import AttentionProbe, Snapshot, attention_shares

__all__ = [
    "AttentionProbe",
    "Snapshot",
    "attention_picture",
    "attention_shares",
    "cache_picture",
]
