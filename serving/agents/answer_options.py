"""The options of a model's answer."""

import dataclasses
import functools

from jaxshare.argument_checks import as_adapter_name, as_texts


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a model's answer. None leaves an option to the model's own setting.

    Attributes:
      max_new_tokens: limit of the answer's tokens; an engine's is 256 unless its sampler has one.
      temperature, top_k, top_p, min_p: sampling settings.
      stop: the answer ends before the first of these texts.
      adapter: the name of an adapter of the engine; an endpoint's model of this name.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    # Saved journals have digests of how options are written.
    adapter: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens}; an answer has at least one token"
            )
        as_texts("stop", self.stop)
        as_adapter_name(self.adapter)


cached_options = functools.lru_cache(Options)
"""Cached, since most calls of a run have equal options, and checking them takes longer."""
