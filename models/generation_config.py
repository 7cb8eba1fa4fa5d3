"""The generation settings of a checkpoint: stop tokens and sampling defaults."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxshare.decoding.sampling_params import SamplingParams
from jaxshare.models.config_fields import MAX_FLOAT, MAX_INT, ConfigError, Fields

_CALLS = (
    *(
        "max_new_tokens",
        "max_length",
        "max_time",
        "num_return_sequences",
        "return_dict_in_generate",
    ),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("remove_invalid_values", "renormalize_logits", "trust_remote_code", "low_memory"),
)
"""Settings that a call decides here, or that change no chance of a token: logits that are not
numbers are an error, and what is left after truncation is always renormalised."""
_MECHANICS = (
    *("use_cache", "cache_implementation", "cache_config", "return_legacy_cache", "compile_config"),
    *("disable_compile", "prefill_chunk_size", "is_assistant", "assistant_early_exit"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "continuous_batching_config", "token_healing"),
)
"""Settings of how transformers computes the same text."""
_FACTS = (
    *("transformers_version", "_from_model_config", "_name_or_path", "_commit_hash"),
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "chat_format"),
)
_OF_BEAMS = ("early_stopping", "length_penalty")
"""Settings of beam search alone."""
_NEUTRAL: dict[str, float] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
}
"""Settings that change something unless they have this value, or are off."""
_OF_SAMPLING = ("epsilon_cutoff", "eta_cutoff", "top_h")
"""Settings that change nothing in a checkpoint that does not sample."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """The stop tokens and sampling defaults of a checkpoint.

    Attributes:
      stop_tokens: each of them ends an answer.
      temperature: 0 is greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the most likely tokens that together have this probability, in (0, 1].
      min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1].
      typical_p, repetition_penalty, no_repeat_ngram_size, bad_words, forbidden, forbidden_first,
        min_tokens, bias: see `SamplingParams`.
      stop_texts: each of them ends an answer, too, which ends before it.
    """

    stop_tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    forbidden: tuple[int, ...] = ()
    forbidden_first: tuple[int, ...] = ()
    min_tokens: int = 0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    stop_texts: tuple[str, ...] = ()

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
          ConfigError: a value outside of its range, or a setting that changes the text and that
            there is nothing for.
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
        top_p, typical_p = (fields.positive(name, float, 1.0) for name in ("top_p", "typical_p"))
        for name, value in (("top_p", top_p), ("typical_p", typical_p)):
            if value > 1:
                raise fields.error(name, "must be in (0, 1]")
        min_p = fields.take("min_p", float, 0.0)
        if not 0 <= min_p <= 1:
            raise fields.error("min_p", "must be in [0, 1]")
        stops = (
            fields if generation.get("eos_token_id") is not None else Fields(config, "config.json")
        )
        samples = fields.take("do_sample", bool, False)
        found = cls(
            _tokens(stops, "eos_token_id", single=True),
            temperature if samples else 0.0,
            top_k,
            top_p,
            min_p,
            typical_p,
            fields.positive("repetition_penalty", float, 1.0),
            _at_least_0(fields, "no_repeat_ngram_size"),
            _sequences(fields),
            _tokens(fields, "suppress_tokens"),
            _tokens(fields, "begin_suppress_tokens"),
            _at_least_0(fields, "min_new_tokens"),
            _biases(fields),
            _texts(fields),
        )
        _refuse_others(fields, samples)
        return found

    @property
    def sampler(self) -> SamplingParams:
        """The sampling settings."""
        names = {field.name for field in dataclasses.fields(self)} - {"stop_tokens", "stop_texts"}
        return SamplingParams(**{name: getattr(self, name) for name in names})


def _at_least_0(fields: Fields, name: str) -> int:
    value = fields.take(name, int, 0)
    if not 0 <= value <= MAX_INT:
        raise fields.error(name, f"must be from 0 to {MAX_INT}; 0 changes nothing")
    return value


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def _tokens(fields: Fields, name: str, *, single: bool = False) -> tuple[int, ...]:
    value = fields.given(name)
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(_is_token, tokens)) or not (single or isinstance(value, list | None)):
        raise fields.error(name, f"must be a {'token or a ' * single}list of tokens")
    return tuple(tokens)


def _sequences(fields: Fields) -> tuple[tuple[int, ...], ...]:
    value = fields.take("bad_words_ids", list, None) or []
    if not all(isinstance(word, list) and word and all(map(_is_token, word)) for word in value):
        raise fields.error("bad_words_ids", "must be a list of lists of tokens")
    return tuple(map(tuple, value))


def _biases(fields: Fields) -> dict[int, float]:
    """The biases of single tokens; transformers writes [[[token], bias], ...]."""
    value = fields.take("sequence_bias", list, None) or []
    found: dict[int, float] = {}
    for pair in value:
        match pair:
            case [[int(token)], int() | float() as bias] if _is_token(token):
                found[token] = float(bias)
            case _:
                raise fields.error(
                    "sequence_bias",
                    "must be a list of [[token], bias]; only single tokens have one",
                )
    return found


def _texts(fields: Fields) -> tuple[str, ...]:
    value = fields.given("stop_strings")
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise fields.error("stop_strings", "must be a text or a list of texts, none of them empty")
    return tuple(texts)


def _refuse_others(fields: Fields, samples: bool) -> None:
    """Raises ConfigError for settings that change the text and were not read."""
    beams = fields.values.get("num_beams") in (None, 1)
    ignored = {*_CALLS, *_MECHANICS, *_FACTS, *(_OF_BEAMS if beams else ())}
    ignored |= {*(() if samples else _OF_SAMPLING)}
    ignored |= {name for name, value in _NEUTRAL.items() if fields.values.get(name) == value}
    if unknown := fields.unread(ignored):
        raise ConfigError(
            f"{fields.source} has settings that change the text and that there is nothing for: "
            f"{', '.join(unknown)}; remove them if the text may be another one"
        )
