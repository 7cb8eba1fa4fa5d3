"""The Logits Cache (Hive, section 6): `cache` keeps the top logits of states that were sampled from
(as a `trie`), `replay` samples from them again without the model, `hotspot` chooses where."""

from jaxshare.serving.logits_cache.cache import LogitsCache
from jaxshare.serving.logits_cache.hotspot import Hotspot
from jaxshare.serving.logits_cache.statistics import Statistics

__all__ = ["Hotspot", "LogitsCache", "Statistics"]
