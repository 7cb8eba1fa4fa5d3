"""CacheConfig: what a cache keeps of each token, as a model's config says it."""

from typing import Protocol

from jaxshare.rope import Rope


class CacheConfig(Protocol):
    """The part of a model's config that a cache needs.

    `value_dim` is the size of a stored value: head_dim, or 0 where values are not stored because a
    token's value is the part of its key that is not rotated (multi-head latent attention,
    DeepSeek-V2 section 2.1). `layer_ropes` has a rotation for each layer where they differ, and is
    empty where all have `rope`.
    """

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def layer_ropes(self) -> tuple[Rope, ...]: ...


def check_config(config: CacheConfig) -> None:
    """Raises TypeError for what is no config; of a model it names the attribute that is one."""
    if not hasattr(config, "num_kv_heads"):
        of_model = "; give model.config" if hasattr(config, "config") else ""
        raise TypeError(f"config is a {type(config).__name__}, not a model's config{of_model}")
