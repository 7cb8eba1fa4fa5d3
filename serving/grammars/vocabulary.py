"""The vocabulary of a model as grammars see it: bytes, and tokens that end a text."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import llguidance

from jaxshare.made_once import made_once
from jaxshare.serving.grammars.token_bytes import token_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class GrammarVocabulary:
    """The tokens of one model.

    Attributes:
      tokens: for each the bytes that it adds to a text; none for special tokens.
      stops: tokens that end a text, which grammars admit where it may end.
      reader: the same for llguidance.
    """

    tokens: Sequence[bytes]
    stops: tuple[int, ...]
    reader: llguidance.LLTokenizer

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int, stops: tuple[int, ...]) -> "GrammarVocabulary":
        """The vocabulary of a tokenizer, made once.

        Raises:
          ValueError: a tokenizer that is not of the tokenizers library.
        """
        return _vocabulary(tokenizer, vocab_size, stops)

    @functools.cached_property
    def num_words(self) -> int:
        """Words of 32 bits for the tokens that the tokenizer knows; it may be fewer than the model's."""
        return -(-self.reader.vocab_size // 32)

    def first_forced(self, text: bytes, ends: bool) -> int | None:
        """The first token of a text that must come, as the tokenizer cuts it; None where that
        depends on what follows.

        Args:
          text: the bytes that must come.
          ends: whether the whole text ends with them.
        """
        if ends:
            return next(iter(self.reader.tokenize_bytes(text)), None)
        return next(iter(self.reader.tokenize_partial(text)[0]), None)


@made_once(maxsize=32)
def _vocabulary(tokenizer: Any, vocab_size: int, stops: tuple[int, ...]) -> GrammarVocabulary:
    tokens = _bytes(tokenizer, vocab_size)
    # A token that ends a text is no part of one.
    tokens = [b"" if number in stops else token for number, token in enumerate(tokens)]
    # Places at the end that the tokenizer does not use would be looked at for every mask.
    used = max((number for number, token in enumerate(tokens) if token), default=0)
    known = tokens[: max(used, *stops) + 1]
    wrapped = llguidance.TokenizerWrapper(_TokenizerAdapter(tokenizer, known, stops))
    reader = llguidance.LLTokenizer(wrapped, eos_token=[*stops])
    return GrammarVocabulary(tokens, stops, reader)


@made_once(maxsize=8)
def _bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
    return token_bytes(tokenizer, vocab_size)


class _TokenizerAdapter:
    """A tokenizer in the form that llguidance asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, tokens: Sequence[bytes], stops: Sequence[int]):
        self._tokenizer, self.tokens, self.eos_token_id = tokenizer, tokens, stops[0]
        self.special_token_ids = [number for number, token in enumerate(tokens) if not token]

    def __call__(self, text: bytes | str) -> list[int]:
        whole = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(whole, add_special_tokens=False, verbose=False)
