"""The arguments of `score`: prefixes and candidates as texts or tokens, read and checked."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxshare.argument_checks import as_integer, as_list, shown
from jaxshare.models import LoadedModel
from jaxshare.serving.scoring.text_tree import TokenText
from jaxshare.serving.words import check_length, check_tokens


def read_texts(
    model: LoadedModel, prefix: Any, candidates: Any
) -> tuple[bool, list[TokenText], list[int]]:
    """Reads the arguments of `score`.

    Returns:
      Whether there are several prefixes, the texts of all candidates in order, and the number of
      candidates of each prefix.

    Raises:
      ValueError, TypeError: see `score`.
    """
    several = _is_several(prefix)
    prefixes = as_list("prefix", prefix) if several else [prefix]
    lists = as_list("candidates", candidates) if several else [candidates]
    if len(lists) != len(prefixes):
        raise ValueError(
            f"candidates has {len(lists)} lists for {len(prefixes)} prefixes; give each prefix a "
            "list of its own"
        )
    texts: list[TokenText] = []
    sizes: list[int] = []
    for number, (each, given) in enumerate(zip(prefixes, lists, strict=True)):
        place = f" of prefix {number}" if several else ""
        if isinstance(given, str):
            raise TypeError(f"candidates{place} is {shown(given)}; it must be a list of texts")
        read = as_list(f"candidates{place}", given)
        if not read:
            raise ValueError(f"there are no candidates{place}; give at least one")
        before = _Beginning(model, each, f"prefix {number}" if several else "the prefix")
        for n, candidate in enumerate(read):
            texts.append(before.with_candidate(candidate, f"candidate {n}{place}"))
        sizes.append(len(read))
    if not texts:
        raise ValueError("prefix is an empty list of prefixes; give at least one")
    return several, texts, sizes


def _is_several(prefix: Any) -> bool:
    """Returns whether a prefix is a list of prefixes: one whose first entry is a text or a list."""
    if isinstance(prefix, str) or not isinstance(prefix, Sequence | np.ndarray) or not len(prefix):
        return False
    return isinstance(prefix[0], str | Sequence | np.ndarray)


class _Beginning:
    """A prefix, whose candidates are read."""

    def __init__(self, model: LoadedModel, prefix: Any, name: str):
        self._model = model
        self._text = prefix if isinstance(prefix, str) else None
        self._tokens = _read_tokens(model, prefix, name, first=True)

    def with_candidate(self, candidate: Any, name: str) -> TokenText:
        """The prefix and a candidate as tokens.

        Raises:
          ValueError: an empty candidate, or one that does not fit the context with the prefix.
        """
        tokens = self._candidate(candidate, name)
        whole, most = len(self._tokens) + len(tokens), self._model.config.max_positions
        if not tokens:
            raise ValueError(f"{name} is empty; give at least one token of text")
        if whole > most:
            raise ValueError(
                f"{name} has {len(tokens)} tokens after {len(self._tokens)} of its prefix, but the "
                f"model's context holds {most}; shorten one of them"
            )
        return TokenText(name, np.asarray([*self._tokens, *tokens], np.int32), len(self._tokens))

    def _candidate(self, candidate: Any, name: str) -> list[int]:
        if isinstance(candidate, str) and self._text is not None and candidate:
            whole = _read_tokens(self._model, self._text + candidate, name, first=True)
            before = len(self._tokens)
            if whole[:before] == self._tokens and len(whole) > before:
                return whole[before:]
        return _read_tokens(self._model, candidate, name, first=False)


def _read_tokens(model: LoadedModel, given: Any, name: str, *, first: bool) -> list[int]:
    """The tokens of a text, or tokens that are given; `first` as in `inputs.encode`."""
    vocabulary = model.config.vocab_size
    if not isinstance(given, str):
        tokens = as_list(name, given)
        return [as_integer(f"a token of {name}", token, 0, vocabulary - 1) for token in tokens]
    if model.tokenizer is None:
        if not given:
            return []
        raise ValueError(
            f"the model folder has no tokenizer, so {name} must be given as tokens; add the "
            "tokenizer's files to the folder"
        )
    check_length(model.tokenizer, len(given), model.config.max_positions)
    # not verbose, because a text that is too long is reported with its prefix
    tokens = model.tokenizer.encode(given, add_special_tokens=first, verbose=False)
    return check_tokens(tokens, vocabulary)
