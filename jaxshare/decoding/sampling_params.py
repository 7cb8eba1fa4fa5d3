"""The sampling settings of one row."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxshare.argument_checks import FLOAT32_MAX, INT32_MAX, as_float, as_integer, as_list, shown
from jaxshare.decoding.grammar import Grammar
from jaxshare.decoding.processors import Given, as_processors


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The sampling settings of one row. Logits are changed by biases, penalties and bans, then
    divided by the temperature, and truncated in the order top_k, top_p, min_p, typical_p, as
    transformers does.

    Attributes:
      temperature: logits are divided by it; 0 takes the likeliest token.
      top_k: keep the k likeliest tokens, and those that tie with the last; 0 keeps all.
      top_p: keep the smallest set of likeliest tokens with at least this probability, and ties; in
        (0, 1].
      min_p: keep tokens at least this fraction as likely as the likeliest; in [0, 1].
      bias: added to the logits of single tokens.
      forbidden: tokens that are never chosen.
      typical_p: keep the smallest set with at least this probability of the tokens whose
        information is nearest to the entropy, and ties (Meister et al. 2022); in (0, 1].
      repetition_penalty: divides the positive logits of tokens of the text so far, the prompt
        included, and multiplies the negative ones; above 0, 1 changes nothing.
      presence_penalty: subtracted from the logits of tokens that were sampled; frequency_penalty:
        the same for each time.
      no_repeat_ngram_size: no so many tokens in a row come twice in the text; 0 allows it.
      bad_words: sequences of tokens that are never completed.
      forbidden_first: tokens that are never sampled first.
      min_tokens: tokens that are sampled before a stop token can be.
      stop_token_ids: tokens that end the row, besides those of the model.
      ignore_eos: the model's own stop tokens do not end the row.
      grammar: what the whole text must be; see `Grammar`.
      processors: logits processors (`jaxshare.register_logits_processor`) that change the logits
        after all of these, in this order: their names, or a dict of parameters by name. They are
        kept as pairs of a name and all parameters.

    Numbers may be of any type, NumPy's among them; they are kept as int and float.

    Raises:
      ValueError: a value out of its range, or too large for a float32.
      TypeError: a value of another type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    forbidden: tuple[int, ...] = ()
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    forbidden_first: tuple[int, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    processors: Given = ()

    def __post_init__(self):
        zero = "(0 takes the likeliest token)"
        values = {
            "temperature": as_float("temperature", self.temperature, 0, FLOAT32_MAX, f" {zero}"),
            "top_k": as_integer("top_k", self.top_k, 0, why=" (0 keeps all tokens)"),
            "top_p": _probability("top_p", self.top_p),
            "min_p": as_float("min_p", self.min_p),
            "bias": _token_biases(self.bias),
            "forbidden": _token_numbers("forbidden", self.forbidden),
            "typical_p": _probability("typical_p", self.typical_p),
            "repetition_penalty": as_float(
                "repetition_penalty", self.repetition_penalty, most=FLOAT32_MAX
            ),
            "no_repeat_ngram_size": as_integer(
                "no_repeat_ngram_size", self.no_repeat_ngram_size, 0, INT32_MAX
            ),
            "bad_words": _sequences(self.bad_words),
            "forbidden_first": _token_numbers("forbidden_first", self.forbidden_first),
            "min_tokens": as_integer("min_tokens", self.min_tokens, 0, INT32_MAX),
            "stop_token_ids": _token_numbers("stop_token_ids", self.stop_token_ids),
            "ignore_eos": bool(self.ignore_eos),
            "processors": as_processors(self.processors),
        }
        for name in ("presence_penalty", "frequency_penalty"):
            values[name] = as_float(name, getattr(self, name), -FLOAT32_MAX, FLOAT32_MAX)
        if not values["repetition_penalty"] >= 2.0**-126:
            raise ValueError(
                f"repetition_penalty is {values['repetition_penalty']}; it must be above 0 (1 "
                "changes nothing)"
            )
        if not 0 <= values["min_p"] <= 1:
            raise ValueError(
                f"min_p is {values['min_p']}; it must be between 0 and 1 (0 keeps all tokens)"
            )
        if self.ignore_eos not in (True, False):
            raise TypeError(f"ignore_eos is {shown(self.ignore_eos)}; it must be True or False")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise TypeError(
                f"grammar is {shown(self.grammar)}; it must be a Grammar, such as "
                "Grammar.json_schema({'type': 'object'})"
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def counts_tokens(self) -> bool:
        """True if it depends on which tokens the text so far has."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def reads_tokens(self) -> bool:
        """True if it depends on the order of the text's tokens."""
        long_words = any(len(word) > 1 for word in self.bad_words)
        return self.no_repeat_ngram_size > 0 or long_words or bool(self.processors)

    @property
    def looks_back(self) -> bool:
        """True if it depends on the tokens of the text so far."""
        return self.counts_tokens or self.reads_tokens

    @property
    def not_redrawn(self) -> str | None:
        """The name of a setting, if there is one, with which a token cannot be drawn again from the
        largest logits alone: it depends on the text before, or on all of the distribution."""
        names = (
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
            *("no_repeat_ngram_size", "bad_words", "forbidden_first", "min_tokens", "typical_p"),
            *("stop_token_ids", "ignore_eos", "grammar", "processors"),
        )
        return next((name for name in names if getattr(self, name) != getattr(GREEDY, name)), None)

    @property
    def tokens(self) -> set[int]:
        """All tokens that it names."""
        words = [token for word in self.bad_words for token in word]
        return {*self.bias, *self.forbidden, *self.forbidden_first, *self.stop_token_ids, *words}

    def edits(self, stops: Iterable[int] = ()) -> list[tuple[int, float, int]]:
        """The changes of single logits: tokens, what is added, and the number of sampled tokens from
        which on it is not.

        Args:
          stops: the model's stop tokens.
        """
        always, found = INT32_MAX, dict[tuple[int, int], float]()
        for token, value in self.bias.items():
            found[token, always] = value
        single = [word[0] for word in self.bad_words if len(word) == 1]
        for token in (*self.forbidden, *single):
            found[token, always] = -math.inf
        for token in self.forbidden_first:
            found[token, 1] = -math.inf
        if self.min_tokens:
            for token in (*(() if self.ignore_eos else stops), *self.stop_token_ids):
                found[token, self.min_tokens] = -math.inf
        return [(token, value, until) for (token, until), value in found.items()]

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON keeps them; `from_json` is the inverse."""
        return {**dataclasses.asdict(self), "bias": [*self.bias.items()]}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "SamplingParams":
        """Settings that `as_json` gave, by this version or an earlier one."""
        bias = {int(token): value for token, value in given["bias"]}
        grammar = given.get("grammar")
        return cls(**{**given, "bias": bias, "grammar": grammar and Grammar(**grammar)})


def _probability(name: str, value: Any) -> float:
    given = as_float(name, value)
    if not 0 < given <= 1:
        raise ValueError(
            f"{name} is {given}; it must be above 0 and at most 1 (1 keeps all tokens)"
        )
    return given


def _token_numbers(name: str, tokens: Any) -> tuple[int, ...]:
    try:
        given = as_list(name, tokens)
    except TypeError:
        raise TypeError(
            f"{name} is {shown(tokens)}; it must be the numbers of tokens, such as (5, 6)"
        ) from None
    numbers = [as_integer("a token of a bias or a ban", token, most=INT32_MAX) for token in given]
    if negative := [token for token in numbers if token < 0]:
        raise ValueError(f"a bias or a ban names token {negative[0]}; tokens are numbered from 0")
    return tuple(numbers)


def _sequences(words: Any) -> tuple[tuple[int, ...], ...]:
    made = tuple(_token_numbers("a sequence of bad_words", w) for w in as_list("bad_words", words))
    if not all(made):
        raise ValueError("bad_words has an empty sequence; give at least one token of each")
    return made


def _token_biases(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise TypeError(
            f"bias is {shown(bias)}; it must be a dict of numbers by token, such as {{5: 1.0}}"
        )
    tokens, values = _token_numbers("bias", bias), []
    for token, value in zip(tokens, bias.values(), strict=True):
        name = f"the bias of token {token}"
        why = " (forbidden tokens are listed apart)"
        values.append(as_float(name, value, -FLOAT32_MAX, FLOAT32_MAX, why))
    return dict(zip(tokens, values, strict=True))


Sampler = SamplingParams
"""The short name."""
GREEDY = SamplingParams()
"""Takes the likeliest token."""
