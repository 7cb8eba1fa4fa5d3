"""The answers to lm_eval's requests to generate, on an engine."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.argument_checks import as_float, as_integer, as_list, as_texts, shown
from jaxshare.serving.engine import Engine
from jaxshare.serving.engine.stream import Stream
from jaxshare.serving.evaluation.lm_eval.texts import HarnessTexts, cut
from jaxshare.serving.inputs import default_sampler

DEFAULT_NEW_TOKENS = 256
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the same setting, the first of which that is given counts."""
_CUTS = ("top_k", "top_p", "min_p", "typical_p")
"""Settings of sampling."""
_GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
_PENALTIES = ("repetition_penalty", "no_repeat_ngram_size")
"""Settings of greedy answers, too."""
_WITHOUT_EFFECT = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
}
"""Settings of transformers, with the values that change nothing."""


@dataclasses.dataclass(frozen=True)
class HarnessSettings:
    """The settings of one request.

    Attributes:
      stops: texts that end an answer.
      max_new_tokens: of the answer.
      sampler: how tokens are sampled.
    """

    stops: tuple[str, ...]
    max_new_tokens: int
    sampler: Sampler

    @classmethod
    def of(cls, given: Mapping[str, Any], defaults: Sampler) -> "HarnessSettings":
        """Reads the settings of a request, as lm_eval's backends do.

        Greedy unless there is a temperature above 0 and `do_sample` is not False.

        Args:
          given: by the names that tasks use.
          defaults: what is sampled with where a request samples and does not say otherwise.

        Raises:
          ValueError: a setting that is not supported, or out of range.
          TypeError: a setting of another type.
        """
        settings = dict(given)
        stops = _stops(settings.pop("until", None))
        lengths = [settings.pop(name, None) for name in _LENGTHS]
        length = next((value for value in lengths if value is not None), DEFAULT_NEW_TOKENS)
        samples = settings.pop("do_sample", None)
        temperature = as_float("temperature", settings.pop("temperature", 0.0), 0)
        cuts, penalties = (
            {name: settings.pop(name) for name in names if name in settings}
            for names in (_CUTS, _PENALTIES)
        )
        for name, value in settings.items():
            if name not in _WITHOUT_EFFECT or value != _WITHOUT_EFFECT[name]:
                raise ValueError(
                    f"the setting {name}={shown(value)} of a request is not supported; leave it out"
                )
        samples = bool(temperature) and samples is not False
        given = {"temperature": temperature, **cuts} if samples else _GREEDY
        sampler = dataclasses.replace(defaults, **penalties, **given)
        return cls(stops, as_integer("max_gen_toks", length, 1), sampler)


def _stops(until: Any) -> tuple[str, ...]:
    """The texts that end an answer; empty ones, which tasks may have, end none."""
    if until is None or isinstance(until, str):
        return as_texts("until", until or None)
    return as_texts("until", [text for text in as_list("until", until) if text != ""])


def generate_answers(
    engine: Engine,
    texts: HarnessTexts,
    requests: Sequence[tuple[str, Mapping[str, Any]]],
    on_answered: Callable[[], None] = lambda: None,
) -> list[str]:
    """Samples an answer to each context.

    Args:
      engine: of the model.
      texts: encodes for it.
      requests: contexts, each with its settings; see `HarnessSettings.of`.
      on_answered: called after each answer.

    Returns:
      The answers in the order of the requests, without special tokens, each up to the first of its
      stop texts.

    Raises:
      ValueError, TypeError: see `HarnessSettings.of` and `HarnessTexts.prompt`.
      TooLongError: a request does not fit the engine's memory.
      NotANumberError: the model's logits are not finite.
    """
    tokenizer: Any = texts.model.tokenizer
    end = (tokenizer.eos_token,) if tokenizer.eos_token else ()
    defaults = default_sampler(texts.model)
    settings = [HarnessSettings.of(given, defaults) for _, given in requests]
    prompts = [
        texts.prompt(context, setting.max_new_tokens)
        for (context, _), setting in zip(requests, settings, strict=True)
    ]
    answers = [""] * len(requests)
    waiting: collections.deque[tuple[int, Stream]] = collections.deque()

    def take(count: int) -> None:
        for _ in range(count):
            i, stream = waiting.popleft()
            tokens = stream.wait().tokens
            # As transformers has it: a stop text may be in the text of special tokens alone.
            plain = tokenizer.decode(tokens, skip_special_tokens=True)
            answers[i] = cut(plain, (*settings[i].stops, *end))
            on_answered()

    # Those with a common beginning come one after the other, while the engine remembers it.
    for i in sorted(range(len(requests)), key=prompts.__getitem__):
        if len(waiting) == 4 * engine.rows:
            take(1)
        setting = settings[i]
        options = {"max_new_tokens": setting.max_new_tokens, "stop": (*setting.stops, *end)}
        waiting.append((i, engine.submit(prompts[i], setting.sampler, **options)))
    take(len(waiting))
    return answers
