"""Checkpoints of an engine: its cached keys and values, its Logits Cache, and its seeds."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxshare.models import LoadedModel
from jaxshare.models.fingerprint import same_fingerprint
from jaxshare.serving.checkpoints import SavedCheckpoint, SaveError, check_approximation
from jaxshare.serving.engine.request import DerivedSeeds
from jaxshare.serving.kvcache import checkpoint
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.logits_cache.cache import LogitsCache

_FORMAT = "jaxshare engine 1"


def snapshot(
    model: LoadedModel,
    kv: KVManager,
    logits_cache: LogitsCache | None,
    prompt_counts: Mapping[bytes, int],
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and metadata of an engine, in host memory; `prompt_counts` as in `DerivedSeeds`."""
    arrays, metadata = checkpoint.snapshot(kv, model)
    logits_arrays, logits = logits_cache.snapshot() if logits_cache else ({}, None)
    return {**arrays, **logits_arrays}, {
        "format": _FORMAT,
        "model": model.fingerprint,
        "approximate_kv": model.approximate_kv,
        "asked": [[digest.hex(), count] for digest, count in prompt_counts.items()],
        "logits": logits,
        **metadata,
    }


def check(save: SavedCheckpoint, model: LoadedModel) -> None:
    """Refuses a checkpoint that is not one of an engine with this model.

    Raises:
      SaveError: as described.
    """
    is_engine = save.metadata.get("format") == _FORMAT
    if not is_engine or not same_fingerprint(save.metadata["model"], model.fingerprint):
        raise SaveError(
            f"save {save.number} of {save.folder} is of another model, or of no engine; restore it "
            "with the model that it was saved with"
        )
    check_approximation(save, model.approximate_kv)


def restore(
    save: SavedCheckpoint, model: LoadedModel, kv: KVManager, logits_cache: LogitsCache | None
) -> int:
    """Restores keys, values and the Logits Cache; returns the number of cached tokens."""
    arrays = save.arrays()
    if logits_cache and save.metadata["logits"]:
        logits_cache.restore(arrays, save.metadata["logits"])
    return checkpoint.restore(kv, model, arrays, save.metadata)


def restore_seeds(save: SavedCheckpoint, seeds: DerivedSeeds) -> None:
    """Restores the number of requests for each prompt."""
    seeds.counts.update((bytes.fromhex(digest), count) for digest, count in save.metadata["asked"])
