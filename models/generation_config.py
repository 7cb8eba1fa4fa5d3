"""The generation settings of a checkpoint: stop tokens and sampling defaults."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxshare.decoding.sampling_params import GREEDY, SamplingParams
from jaxshare.models.config_fields import MAX_INT, ConfigError, Fields

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


_SAMPLING: dict[str, tuple[str, type]] = {
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "typical_p": ("typical_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", int),
    "bad_words_ids": ("bad_words", list),
    "suppress_tokens": ("forbidden", list),
    "begin_suppress_tokens": ("forbidden_first", list),
    "min_length": ("min_length", int),
    "min_new_tokens": ("min_tokens", int),
    "sequence_bias": ("sequence_bias", list),
}
"""Fields of the file, the fields of `SamplingParams` that they are, and their types in JSON."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """The stop tokens and sampling defaults of a checkpoint.

    Attributes:
      stop_tokens: each of them ends an answer.
      sampler: the sampling settings.
      stop_texts: each of them ends an answer, too, which ends before it.
    """

    stop_tokens: tuple[int, ...] = ()
    sampler: SamplingParams = GREEDY
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
        stops = (
            fields if generation.get("eos_token_id") is not None else Fields(config, "config.json")
        )
        samples = fields.take("do_sample", bool, False)
        given = _sampling(fields)
        given["temperature"] = given.get("temperature", 1.0) if samples else 0.0
        if "min_tokens" in given:  # it takes the place of min_length in transformers
            given.pop("min_length", None)
        found = cls(_tokens(stops, "eos_token_id"), _sampler_of(given), _texts(fields))
        _refuse_others(fields, samples)
        return found


def _sampling(fields: Fields) -> dict[str, Any]:
    """The values of fields of `SamplingParams`, each within its range."""
    found: dict[str, Any] = {}
    for name, (setting, kind) in _SAMPLING.items():
        value = fields.take(name, kind, None)
        if value is None or (kind is int and value == 0 and setting != "min_tokens"):
            continue  # a whole number of 0 changes nothing
        if kind is int and value > MAX_INT:
            raise fields.error(name, f"must be at most {MAX_INT}")
        alone: dict[str, Any] = {setting: value}
        try:
            SamplingParams(**alone)
        except (ValueError, TypeError) as error:
            # The sentence ends with what would do.
            raise fields.error(name, str(error).rpartition("; ")[2]) from error
        found[setting] = value
    return found


def _sampler_of(given: Mapping[str, Any]) -> SamplingParams:
    """The sampler with biases of single tokens apart, of which the last of equals counts."""
    biases = {tuple(word): float(value) for word, value in given.get("sequence_bias", ())}
    single = {word[0]: value for word, value in biases.items() if len(word) == 1}
    long = tuple((word, value) for word, value in biases.items() if len(word) > 1)
    fields: dict[str, Any] = {**given, "bias": single, "sequence_bias": long}
    return SamplingParams(**fields)


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def _tokens(fields: Fields, name: str) -> tuple[int, ...]:
    value = fields.given(name)
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(_is_token, tokens)):
        raise fields.error(name, "must be a token or a list of tokens")
    return tuple(tokens)


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
