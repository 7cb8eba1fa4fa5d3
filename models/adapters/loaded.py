"""Adapters that are given beside a model: by folder or as matrices, under names."""

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxshare.argument_checks import INT32_MAX, as_integer, shown
from jaxshare.models.adapters.adapter_params import AdapterError, AdapterParams, check_adapter
from jaxshare.models.adapters.peft_files import load_adapter
from jaxshare.models.adapters.places import Adapter, Adapters
from jaxshare.models.config import ModelConfig
from jaxshare.models.tensor_parallel import ShardedDecoder

_NAME = re.compile(r"[^\s\x00-\x1f\x7f]{1,256}")
_MAX_ADAPTERS = 4096
_USUAL_RANK = 16


def as_adapter(
    name: str, given: str | os.PathLike | AdapterParams, config: ModelConfig
) -> AdapterParams:
    """Returns an adapter that is given as a folder or as matrices, checked against a model.

    Args:
      name: that it is to have.
      given: the folder, or the matrices.
      config: of the model, each kv head once.

    Raises:
      FileNotFoundError, AdapterError: see `load_adapter`; or the name is none.
      TypeError: it is neither.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise AdapterError(
            f"the name of an adapter is {shown(name)}; it has 1 to 256 characters and no space"
        )
    if isinstance(given, str | os.PathLike):
        return load_adapter(given, config)
    check_adapter(given, config, f"the adapter {name!r}")
    return given


def load_adapters(
    given: Mapping[str, Any],
    config: ModelConfig,
    dtype: np.dtype,
    module: Any,
    *,
    max_adapters: int | None,
    max_rank: int | None,
) -> Adapters:
    """Returns places for adapters with some in them; see `LoadedModel.with_adapters`.

    Args:
      given: by name.
      config: of the checkpoint, each kv head once.
      dtype, module: of the model.
      max_adapters, max_rank: as described there.
    """
    if isinstance(module, ShardedDecoder) and module.mesh.is_multi_process:
        raise ValueError(
            "the model is on devices of several processes; adapters are for models on those of one"
        )
    found = {name: as_adapter(name, each, config) for name, each in given.items()}
    count = max(1, len(found)) if max_adapters is None else max_adapters
    count = as_integer("max_adapters", count, 1, _MAX_ADAPTERS)
    if len(found) > count:
        raise AdapterError(f"{len(found)} adapters are given, but max_adapters is {count}")
    rank = max((each.rank for each in found.values()), default=_USUAL_RANK)
    rank = as_integer("max_rank", rank if max_rank is None else max_rank, 1, INT32_MAX)
    sizes = {"max_adapters": count, "max_rank": rank}
    adapters = Adapters.empty(config, dtype, **sizes, module=module)
    for place, (name, params) in enumerate(found.items(), start=1):
        adapters = adapters.with_adapter(name, params, place)
    return adapters


def named_adapter(adapters: Adapters | None, name: str | None) -> Adapter | None:
    """Returns an adapter of a model by its name; None for none.

    Raises:
      AdapterError: it has none, or none of this name.
    """
    if name is None:
        return None
    if adapters is None:
        raise AdapterError(
            f"the adapter {name!r} is asked for, but the model has no places for adapters; make it "
            "with LoadedModel.with_adapters"
        )
    return adapters.named(name)
