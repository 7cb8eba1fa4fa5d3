"""Codec: text to tokens and back, by the bytes that each token of a tokenizer adds to a text."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

from jaxshare.made_once import made_once
from jaxshare.serving.grammars.token_bytes import token_bytes
from jaxshare.serving.words import check_tokens, encode_marked, mark


class Codec:
    """Text to tokens and back, for texts within a longer text."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        self.tokenizer = tokenizer
        self.vocabulary = token_bytes(tokenizer, vocab_size)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the bytes of every token; identifies the tokenizer in files."""
        return hashlib.blake2b(repr(self.vocabulary).encode(), digest_size=16).hexdigest()

    def mark(self, words: str) -> str:
        """People's words, marked so that `encode` makes no control token of them."""
        return mark(self.tokenizer, words)

    def mark_name(self, name: str) -> str:
        """Marks a name, which recurs in all openings; see `mark`."""
        return _mark_name(self, name, str(self.tokenizer.chat_template))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without the space that some tokenizers put before it."""
        tokens = check_tokens(encode_marked(self.tokenizer, text), len(self.vocabulary))
        return (
            tokens[1:]
            if tokens and self.vocabulary[tokens[0]] == b" " and not text.startswith(" ")
            else tokens
        )

    def encode_recurring(self, text: str) -> list[int]:
        """Encodes one of the few hundred texts that sessions open their steps with; see `encode`."""
        return list(_encode_recurring(self, text, str(self.tokenizer.chat_template)))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; special tokens have none."""
        return b"".join(self.vocabulary[token] for token in tokens).decode(errors="replace")


@made_once(maxsize=8)
def codec_of(tokenizer: Any, vocab_size: int) -> Codec:
    """The codec of a tokenizer, cached because building it reads every token."""
    return Codec(tokenizer, vocab_size)


# Which tokens are control tokens depends on the template, which may be set later.


@functools.lru_cache(maxsize=2**14)
def _encode_recurring(codec: Codec, text: str, template: str) -> tuple[int, ...]:
    return tuple(codec.encode(text))


@functools.lru_cache(maxsize=2**10)
def _mark_name(codec: Codec, name: str, template: str) -> str:
    return codec.mark(name)


def check_separator(separator: str, tokenizer: Any, tokens: Sequence[bytes]) -> None:
    """Raises ValueError if encoding loses the separator.

    Args:
      separator: ends a step.
      tokenizer: to encode it with.
      tokens: `token_bytes` of the tokenizer.
    """
    encoded: Any = tokenizer.encode(f"a.{separator}b", add_special_tokens=False)
    if separator.encode() not in b"".join(
        tokens[token] for token in encoded if token < len(tokens)
    ):
        raise ValueError(
            f"the tokenizer cannot represent the separator {separator!r}, so no step would ever "
            "end; choose a separator that its tokens can spell, or another tokenizer"
        )
