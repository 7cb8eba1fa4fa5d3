"""CacheConfig: what a cache needs to know of a model."""

from typing import Protocol

from jaxshare.rope import Rope


class CacheConfig(Protocol):
    """The part of a model's config that a cache needs: `layer_ropes` has a rotation for each layer
    where they differ, and is empty where all have `rope`."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def layer_ropes(self) -> tuple[Rope, ...]: ...
