"""The generation settings of a checkpoint: stop tokens and sampling defaults."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxshare.models.config_fields import MAX_FLOAT, MAX_INT, Fields


@dataclasses.dataclass(frozen=True)
class Generation:
    """The stop tokens and sampling defaults of a checkpoint.

    Attributes:
      stop_tokens: each of them ends an answer.
      temperature: 0 is greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the most likely tokens that together have this probability, in (0, 1].
      min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1].
    """

    stop_tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def from_json(
        cls,
        generation: Mapping[str, Any],
        config: Mapping[str, Any],
        source: str = "generation_config.json",
    ) -> "Generation":
        """Reads generation_config.json, and stop tokens missing there from config.json.

        A checkpoint samples only with `do_sample`, at temperature 1 unless it gives one. Other
        settings that are absent are off.

        Raises:
          ConfigError: a value outside of its range.
        """
        fields = Fields(generation, source)
        temperature = fields.take("temperature", float, 1.0)
        if temperature < 0:
            raise fields.error("temperature", "must not be negative")
        if temperature > MAX_FLOAT:
            raise fields.error("temperature", f"must be at most {MAX_FLOAT}")
        top_k = fields.take("top_k", int, 0)
        if top_k < 0:
            raise fields.error("top_k", "must not be negative")
        if top_k > MAX_INT:
            raise fields.error("top_k", f"must be at most {MAX_INT}; 0 keeps all tokens")
        top_p = fields.positive("top_p", float, 1.0)
        if top_p > 1:
            raise fields.error("top_p", "must be in (0, 1]")
        min_p = fields.take("min_p", float, 0.0)
        if not 0 <= min_p <= 1:
            raise fields.error("min_p", "must be in [0, 1]")
        stops = (
            fields if generation.get("eos_token_id") is not None else Fields(config, "config.json")
        )
        return cls(
            _stop_tokens(stops),
            temperature if fields.take("do_sample", bool, False) else 0.0,
            top_k,
            top_p,
            min_p,
        )


def _stop_tokens(fields: Fields) -> tuple[int, ...]:
    value = fields.values.get("eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token <= MAX_INT for token in tokens):
        raise fields.error("eos_token_id", "must be a token or a list of tokens")
    return tuple(tokens)
