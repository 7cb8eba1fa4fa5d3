"""Log-probabilities of given texts, such as the choices of a question or a whole document.

    capital, = score(model, "The capital of France is", [" Paris"])
    best = max(score(model, question, choices), key=lambda scored: scored.logprob)

All texts of a call are read as one tree: a prefix that several of them have in common, such as the
examples before a question, is fed once and read by all rows below it (Hydragen section 3).
"""

import concurrent.futures
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, overload

from jaxshare import Sampler
from jaxshare.argument_checks import as_integer
from jaxshare.models import LoadedModel, ModelConfig
from jaxshare.serving.inputs import MOST_LOGPROBS, as_sampler, check_sampler
from jaxshare.serving.scoring.inputs import read_texts
from jaxshare.serving.scoring.passes import TokenScore, TreePasses
from jaxshare.serving.scoring.text_tree import TokenText, batches, feeding_order

_BATCH_TOKENS = 2**19
"""Tokens of the texts that are made a tree of at a time: the tree is in host memory."""

Text = str | Sequence[int]
"""A text, or its tokens."""


@dataclasses.dataclass(frozen=True)
class TextScore:
    """The log-probabilities of a text's tokens, each given all before it.

    Natural logarithms, under the model itself: temperature 1, nothing cut; or of the chances that a
    sampler draws with, minus infinity for a token that has none.

    Attributes:
      tokens: of the text, without those of its prefix.
      logprobs: of each token; None for the first token of all, which has nothing before it.
      logprob: the sum of `logprobs`, without None.
      greedy: True where every token that has a log-probability is the likeliest one; of equal ones
        the lowest token counts as the likeliest.
      top_logprobs: for each token the likeliest ones in its place, as (token, log-probability),
        descending, and the lower first of equal ones; none in the place of the first token of all.
        None where they were not asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    logprob: float
    greedy: bool
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None


@overload
def score(
    model: LoadedModel,
    prefix: str,
    candidates: Sequence[Text],
    *,
    top_logprobs: int = 0,
    sampler: Sampler | None = None,
    on_scored: Callable[[int], None] | None = None,
) -> list[TextScore]: ...
@overload
def score(
    model: LoadedModel,
    prefix: Sequence[int],
    candidates: Sequence[Text],
    *,
    top_logprobs: int = 0,
    sampler: Sampler | None = None,
    on_scored: Callable[[int], None] | None = None,
) -> list[TextScore]: ...
@overload
def score(
    model: LoadedModel,
    prefix: Sequence[Text],
    candidates: Sequence[Sequence[Text]],
    *,
    top_logprobs: int = 0,
    sampler: Sampler | None = None,
    on_scored: Callable[[int], None] | None = None,
) -> list[list[TextScore]]: ...
def score(
    model: LoadedModel,
    prefix: Any,
    candidates: Any,
    *,
    top_logprobs: int = 0,
    sampler: Sampler | None = None,
    on_scored: Callable[[int], None] | None = None,
) -> Any:
    """Computes the log-probabilities of candidates that may continue a prefix.

    The tokens of a candidate that is text are those that the whole text has after the prefix's own
    tokens. Where the tokens of the prefix are not the first ones of the whole text, because one
    would straddle their border, or where one of them is given as tokens, the candidate is encoded by
    itself. A prefix of text starts with the special tokens that the tokenizer puts before a text.

    A model on a mesh scores some of the texts on each of its data groups.

    Args:
      model: from `jaxshare.models.load`.
      prefix: a text or its tokens; or a list of these, each with candidates of its own. An empty one
        has no tokens but those that the tokenizer puts before a text; without any, the first token
        of a candidate has no log-probability.
      candidates: texts or their tokens; of several prefixes, a list for each.
      top_logprobs: likeliest tokens to return in the place of each token, at most 20; 0 for none.
      sampler: for the log-probabilities of the chances that it draws with, instead of the model's own.
        Temperature, truncation, biases and forbidden tokens count; settings that look at the text, or
        at the number of sampled tokens, are refused.
      on_scored: called with the number of texts that are scored, as it grows.

    Returns:
      The scores in the order of the candidates; of several prefixes, a list for each.

    Raises:
      ValueError: no candidates, an empty one, a token outside the vocabulary, a text and its prefix
        that do not fit the model's context, text without a tokenizer, or `top_logprobs` out of
        range.
      TypeError: an argument of another type.
      NotANumberError: the model's logits for a candidate are not finite.
    """
    num_top = as_integer("top_logprobs", top_logprobs, 0, MOST_LOGPROBS)
    _check_sampler(model, sampler)
    several, texts, sizes = read_texts(model, prefix, candidates)
    scores = iter(score_texts(model, texts, num_top, on_scored, sampler))
    found = [[next(scores) for _ in range(size)] for size in sizes]
    return found if several else found[0]


def _check_sampler(model: LoadedModel, sampler: Sampler | None) -> None:
    """Raises ValueError for a sampler whose chances do not follow from one place's logits alone."""
    if sampler is None:
        return
    check_sampler(model, as_sampler(sampler))
    sampler.refuse(None, "given texts are not sampled; leave it out")
    # These follow from the distribution of one place, or end a text.
    other = dataclasses.replace(sampler, typical_p=1.0, stop_token_ids=(), ignore_eos=False)
    if used := other.not_redrawn:
        raise ValueError(
            f"{used} cannot be had for given texts, whose tokens are not drawn one after the other; "
            "leave it out of the sampler"
        )


def prompt_logprobs(
    model: LoadedModel, text: Text, *, top_logprobs: int = 0, sampler: Sampler | None = None
) -> TextScore:
    """Computes the log-probabilities of all tokens of a text, such as for its perplexity.

    The first token of all has nothing before it, so its log-probability is None. Where the
    tokenizer puts a special token before texts, that is the first one, and is among the tokens.

    Args:
      model, top_logprobs, sampler: see `score`.
      text: a text or its tokens.

    Raises:
      ValueError, TypeError, NotANumberError: see `score`.
    """
    num_top = as_integer("top_logprobs", top_logprobs, 0, MOST_LOGPROBS)
    _check_sampler(model, sampler)
    _, (read,), _ = read_texts(model, "" if isinstance(text, str) else [], [text])
    return score_texts(model, [dataclasses.replace(read, start=0)], num_top, sampler=sampler)[0]


def score_texts(
    model: LoadedModel,
    texts: Sequence[TokenText],
    num_top: int = 0,
    on_scored: Callable[[int], None] | None = None,
    sampler: Sampler | None = None,
) -> list[TextScore]:
    """Scores texts that are read and checked; arguments and errors otherwise as in `score`."""
    scores: dict[int, TextScore] = {}
    groups: dict[ModelConfig, tuple[LoadedModel, list[int]]] = {}
    for i, text in enumerate(texts):
        # Some models rotate keys otherwise where a text is long. The last token is not fed.
        fitted = model.for_context(max(1, len(text.tokens) - 1))
        groups.setdefault(fitted.config, (fitted, []))[1].append(i)
    lock = threading.Lock()
    for fitted, members in groups.values():

        def finish(index: int, scored: TextScore, members: list[int] = members) -> None:
            with lock:
                scores[members[index]] = scored
                if on_scored:
                    on_scored(len(scores))

        _score_alike(fitted, [texts[i] for i in members], num_top, finish, sampler)
    return [scores[i] for i in range(len(texts))]


def _score_alike(
    model: LoadedModel,
    texts: Sequence[TokenText],
    num_top: int,
    finish: Callable[[int, TextScore], None],
    sampler: Sampler | None,
) -> None:
    """Scores texts of one rotation, on all data groups of a mesh."""
    replicas = model.replicas()
    longest = max(len(text.tokens) - 1 for text in texts)
    cut = batches(texts, _BATCH_TOKENS, len(replicas))

    def run(group: int) -> None:
        passes = TreePasses(replicas[group], longest, num_top, sampler)
        for members in cut[group :: len(replicas)]:
            _score_batch(
                passes,
                [texts[i] for i in members],
                num_top,
                lambda index, scored, members=members: finish(members[index], scored),
            )

    if len(replicas) == 1:
        return run(0)
    with concurrent.futures.ThreadPoolExecutor(len(replicas)) as executor:
        list(executor.map(run, range(len(replicas))))


def _score_batch(
    passes: TreePasses,
    texts: Sequence[TokenText],
    num_top: int,
    finish: Callable[[int, TextScore], None],
) -> None:
    """Scores texts in one tree; each is finished with its last token."""
    scored: list[list[TokenScore]] = [[] for _ in texts]
    for i, text in enumerate(texts):
        if not text.num_scored:
            finish(i, _text_score(text, [], num_top))
    for found in passes.run(feeding_order(texts), texts):
        for token in found:
            i = token.text
            scored[i].append(token)
            if len(scored[i]) == texts[i].num_scored:
                finish(i, _text_score(texts[i], scored[i], num_top))


def _text_score(text: TokenText, scored: Sequence[TokenScore], num_top: int) -> TextScore:
    """The score of a text from those of its tokens, in any order."""
    tokens: tuple[int, ...] = tuple(text.tokens[text.start :].tolist())
    logprobs: list[float | None] = [None] * len(tokens)
    top: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    for each in scored:
        logprobs[each.index - text.start] = each.logprob
        top[each.index - text.start] = each.top
    return TextScore(
        tokens,
        tuple(logprobs),
        math.fsum(each.logprob for each in scored),
        all(each.greedy for each in scored),
        tuple(top) if num_top else None,
    )
