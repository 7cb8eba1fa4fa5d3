"""The tokens of lm_eval's requests, as its own backend `hf` makes them.

Results of two backends can be compared only if both score the same tokens.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxshare.models import LoadedModel
from jaxshare.serving.scoring.text_tree import TokenText
from jaxshare.serving.words import check_tokens


@dataclasses.dataclass(frozen=True)
class HarnessTexts:
    """Encodes texts for one model.

    Attributes:
      model: with its tokenizer.
      prefix_token: comes before a text that has no context.
      max_length: the most tokens that are fed of a text.
      add_bos: whether the tokenizer puts its special tokens before texts; None leaves that to it.
    """

    model: LoadedModel
    prefix_token: int
    max_length: int
    add_bos: bool | None = None

    def encode(self, text: str) -> list[int]:
        """Encodes a text that starts a context.

        No special token is put before one that starts with the prefix token's text already, as
        texts of chat templates do.
        """
        tokenizer: Any = self.model.tokenizer
        if text.startswith(tokenizer.decode([self.prefix_token])):
            return self._encode(text, False)
        return self._encode(text, self.add_bos)

    def pair(self, context: str, continuation: str) -> TokenText:
        """The tokens of a continuation and of its context, cut at the left to `max_length`.

        Raises:
          ValueError: the continuation has no tokens of its own, or too many.
        """
        if context:
            before, after = self._split(context, continuation)
        else:
            before, after = [self.prefix_token], self._encode(continuation, False)
            if after[:1] == before:
                after = after[1:]
        if not 0 < len(after) <= self.max_length:
            raise ValueError(
                f"the continuation {continuation[:60]!r} has {len(after)} tokens; it must have 1 "
                f"to {self.max_length}"
            )
        # The last token is scored, but not fed.
        whole = [*before, *after][-self.max_length - 1 :]
        name = f"the continuation {continuation[:60]!r}"
        return TokenText(name, np.asarray(whole, np.int32), len(whole) - len(after))

    def windows(self, text: str) -> Iterator[TokenText]:
        """The pieces of a text of any length, in which each of its tokens is scored once.

        A piece starts with as many of the tokens before it as fit.
        """
        whole = [self.prefix_token, *self.encode(text)]
        for first in range(1, len(whole), self.max_length):
            end = min(first + self.max_length, len(whole))
            start = max(0, end - self.max_length - 1)
            tokens = np.asarray(whole[start:end], np.int32)
            yield TokenText(f"the text {text[:60]!r}", tokens, first - start)

    def prompt(self, context: str, max_new_tokens: int) -> list[int]:
        """The tokens of a context that is continued, cut at the left so that all fit.

        Raises:
          ValueError: a context without tokens, or more new tokens than the model's context holds.
        """
        most = self.max_length - max_new_tokens
        if most < 1:
            raise ValueError(
                f"max_gen_toks is {max_new_tokens}, but the context holds {self.max_length} tokens; "
                "ask for fewer than it holds"
            )
        tokens = self.encode(context)
        if not tokens:
            raise ValueError("a context to generate from is empty; give at least one token of text")
        return tokens[-most:]

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Spaces at the end of a context belong to the first word of its continuation."""
        stripped = context.rstrip()
        whole, before = self.encode(context + continuation), self.encode(stripped)
        return before or [self.prefix_token], whole[len(before) :]

    def _encode(self, text: str, special: bool | None) -> list[int]:
        tokenizer: Any = self.model.tokenizer
        options = {} if special is None else {"add_special_tokens": special}
        tokens = tokenizer.encode(text, verbose=False, **options)
        return check_tokens(tokens, self.model.config.vocab_size)


def prefix_token(tokenizer: Any) -> int:
    """The token that comes before a text without a context: that of the start of a text, or else
    that of the end.

    Raises:
      ValueError: the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError(
        "the tokenizer has no token for the start or the end of a text; give prefix_token_id"
    )


def cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of these texts."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text
