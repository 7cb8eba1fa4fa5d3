"""Samplers of requests."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxshare import Grammar, Sampler
from jaxshare.argument_checks import shown
from jaxshare.serving.http.errors import bad_request
from jaxshare.serving.http.generation.fields import MOST_TEXTS, SamplingFields

_SAME = (
    *("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "no_repeat_ngram_size", "min_tokens"),
)
"""Fields that have the same name and meaning in a Sampler."""


def sampler_of(
    fields: SamplingFields, default: Sampler, tokenizer: Any, grammar: Grammar | None
) -> Sampler:
    """Returns the sampler of a request.

    Args:
      fields: of the request.
      default: has the settings that the request leaves out.
      tokenizer: of the model, for `bad_words`; None if it has none.
      grammar: of the text, or None.

    Raises:
      ApiError: `logit_bias` or `bad_words` cannot be used.
      ValueError, TypeError: see `Sampler`.
    """
    # How many completions a prompt has is the request's.
    changed: dict[str, Any] = {"n": None, "best_of": None}
    changed |= {name: value for name in _SAME if (value := getattr(fields, name)) is not None}
    if fields.top_k is not None:
        changed["top_k"] = max(fields.top_k, 0)  # -1 keeps all in vLLM
    if fields.logit_bias is not None:
        changed["bias"] = {**default.bias, **_biases(fields.logit_bias)}
    if fields.bad_words:
        words = [each for word in fields.bad_words for each in _forms(word, tokenizer)]
        changed["bad_words"] = (*default.bad_words, *words)
    if fields.stop_token_ids:
        changed["stop_token_ids"] = (*default.stop_token_ids, *fields.stop_token_ids)
    if fields.ignore_eos:
        changed["ignore_eos"] = True
    if grammar is not None:
        changed["grammar"] = grammar
    return dataclasses.replace(default, **changed)


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    for name in given:
        if not re.fullmatch(r"\d{1,9}", name):
            raise bad_request(
                f"logit_bias names {shown(name)}; its names are the numbers of tokens", "logit_bias"
            )
    return {int(name): value for name, value in given.items()}


def _forms(word: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """The tokens of a word, at the start of a text and after a space."""
    if tokenizer is None:
        raise bad_request("bad_words are texts, and the model has no tokenizer", "bad_words")
    bare = word.lstrip() or word
    forms = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}"))
    return [form for form in dict.fromkeys(forms) if form]


def stops_of(fields: SamplingFields) -> Sequence[str] | None:
    """Returns the stop texts of a request; None for the checkpoint's own.

    Raises:
      ApiError: there are too many, or one is empty.
    """
    if fields.stop is None:
        return None
    texts = [fields.stop] if isinstance(fields.stop, str) else fields.stop
    if len(texts) > MOST_TEXTS or not all(texts):
        raise bad_request(
            f"stop has an empty text or more than {MOST_TEXTS}; give texts that are not empty",
            "stop",
        )
    return texts
