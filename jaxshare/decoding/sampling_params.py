"""The sampling settings of one row."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxshare.argument_checks import (
    FLOAT32_MAX,
    INT32_MAX,
    as_float,
    as_integer,
    as_list,
    as_texts,
    shown,
)
from jaxshare.decoding.grammar import Grammar
from jaxshare.decoding.processors import Given, as_processors

_OF_CALLS = ("n", "best_of", "max_tokens", "min_length", "stop", "include_stop", "seed")
"""The fields that say how a prompt is answered; the others say how a token is drawn."""


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
      sequence_bias: sequences of tokens and numbers, each added to the logit of the last token where
        the text ends with those before it.
      n: completions of a prompt.
      best_of: completions that are sampled, of which the n with the largest `logprob` are given.
      max_tokens: the most tokens of a completion, which calls name `max_new_tokens`.
      min_length: tokens of the prompt and the completion before a stop token can be sampled.
      stop: texts before which a completion ends, or after with `include_stop`; () for none.
      seed: of the random numbers, any integer.

    From `n` on, and `include_stop`, they are of calls that answer prompts: None leaves them to the
    call, whose argument wins over a field where both are given. What cannot obey one refuses it by
    name.
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
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    min_length: int | None = None
    stop: tuple[str, ...] | None = None
    include_stop: bool | None = None
    seed: int | None = None
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
            "sequence_bias": _sequence_biases(self.sequence_bias),
            **self._checked_of_calls(),
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

    def _checked_of_calls(self) -> dict[str, Any]:
        """The fields of calls that are given, in Python's own types."""
        least = {"n": 1, "best_of": 1, "max_tokens": 1, "min_length": 0}
        values: dict[str, Any] = {
            name: as_integer(name, value, bound, INT32_MAX)
            for name, bound in least.items()
            if (value := getattr(self, name)) is not None
        }
        check_best_of(values.get("n"), values.get("best_of"))
        if self.seed is not None:
            values["seed"] = as_integer("seed", self.seed)
        if self.stop is not None:
            values["stop"] = as_texts("stop", self.stop)
        if self.include_stop is not None:
            if self.include_stop not in (True, False):
                raise TypeError(
                    f"include_stop is {shown(self.include_stop)}; it must be True, False or None"
                )
            values["include_stop"] = bool(self.include_stop)
        return values

    @property
    def of_calls(self) -> dict[str, Any]:
        """The fields of calls that are given, by name."""
        fields = {name: getattr(self, name) for name in _OF_CALLS}
        return {name: value for name, value in fields.items() if value is not None}

    def for_prompt(self, tokens: int) -> "SamplingParams":
        """The settings with which the tokens after a prompt of so many tokens are drawn: without those
        of calls. Samplers that differ in these alone, as in the seed, give equal ones."""
        given = self.of_calls
        if not given:
            return self
        least = max(self.min_tokens, given.get("min_length", 0) - tokens)
        return dataclasses.replace(self, **dict.fromkeys(given), min_tokens=least)

    def refuse(self, names: Iterable[str] | None, why: str) -> None:
        """Raises ValueError for a field of calls that is given where it cannot be obeyed.

        Args:
          names: of the fields; None for all.
          why: what the error says after the field's name and value.
        """
        names = _OF_CALLS if names is None else names
        for name in names:
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"the sampler's {name} is {shown(value)}, but {why}")

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
        return self.no_repeat_ngram_size > 0 or bool(self.long_words or self.processors)

    @property
    def long_words(self) -> list[tuple[tuple[int, ...], float]]:
        """Sequences of two tokens or more, and what is added to the logit of a token that would
        complete one: minus infinity for bad words."""
        given = [*self.sequence_bias, *((word, -math.inf) for word in self.bad_words)]
        return [(word, value) for word, value in given if len(word) > 1]

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
            *("stop_token_ids", "ignore_eos", "grammar", "processors", "sequence_bias"),
            "min_length",
        )
        return next((name for name in names if getattr(self, name) != getattr(GREEDY, name)), None)

    @property
    def tokens(self) -> set[int]:
        """All tokens that it names."""
        words = [*self.bad_words, *(word for word, _ in self.sequence_bias)]
        words = [token for word in words for token in word]
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
        for word, value in self.sequence_bias:
            if len(word) == 1:
                found[word[0], always] = found.get((word[0], always), 0.0) + value
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


def check_best_of(n: int | None, best_of: int | None) -> None:
    """Raises ValueError where fewer completions are to be sampled than given."""
    if best_of is not None and best_of < (n or 1):
        raise ValueError(
            f"best_of is {best_of}; it must be at least {n or 1}, the number of completions to give"
        )


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
    numbers = [as_integer(f"a token of {name}", token, most=INT32_MAX) for token in given]
    if negative := [token for token in numbers if token < 0]:
        raise ValueError(f"a bias or a ban names token {negative[0]}; tokens are numbered from 0")
    return tuple(numbers)


def _sequence_biases(pairs: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    made = []
    for pair in as_list("sequence_bias", pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                f"sequence_bias has {shown(pair)}; it must be pairs of tokens and a number, such as "
                "((5, 6), 1.0)"
            )
        word = _token_numbers("a sequence of sequence_bias", pair[0])
        if not word:
            raise ValueError("sequence_bias has an empty sequence; give at least one token of each")
        name, why = f"the sequence_bias of {shown(word)}", " (bad_words are listed apart)"
        made.append((word, as_float(name, pair[1], -FLOAT32_MAX, FLOAT32_MAX, why)))
    return tuple(made)


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
"""Another name of `SamplingParams`, as these documents use it."""
GREEDY = SamplingParams()
"""Takes the likeliest token."""
