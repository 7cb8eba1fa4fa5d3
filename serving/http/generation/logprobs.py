"""Log-probabilities in OpenAI's two forms."""

from collections.abc import Sequence
from typing import Any

from jaxshare.serving.engine.completion import Completion, without_stop
from jaxshare.serving.engine.stream import TokenChunk
from jaxshare.serving.workers.text.codec import token_bytes

Pairs = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities."""


class TokenTexts:
    """The texts and the bytes of single tokens.

    Args:
      tokenizer: of the model; None gives tokens as `token_id:5`.
      vocab_size: V.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._bytes: list[bytes] | None = None

    def text(self, token: int) -> str:
        """Returns a token as a text; a part of a character is the sign for one."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.decode([token])

    def bytes(self, token: int) -> list[int] | None:
        """Returns the bytes of a token in UTF-8; of a special one, those of its name."""
        if self._tokenizer is None:
            return None
        self.prepare()
        assert self._bytes is not None
        found = self._bytes[token] if token < len(self._bytes) else b""
        return list(found or self.text(token).encode())

    def prepare(self) -> None:
        """Reads the bytes of all tokens, unless that is done; it takes a second where V is large."""
        if self._bytes is None and self._tokenizer is not None:
            try:
                self._bytes = token_bytes(self._tokenizer, self._vocab_size)
            except ValueError:  # not of the tokenizers library
                self._bytes = []


def chat_logprobs(
    texts: TokenTexts,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Pairs] | None,
) -> dict[str, Any]:
    """Returns the log-probabilities of some tokens as chats have them.

    Args:
      texts: of the model's tokens.
      tokens, logprobs: of each.
      top: likeliest tokens in the place of each; None if there are none.
    """
    content = []
    for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        likeliest = [_chat_token(texts, *pair) for pair in top[i]] if top else []
        content.append({**_chat_token(texts, token, logprob), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def _chat_token(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": logprob, "bytes": texts.bytes(token)}


def completion_logprobs(
    texts: TokenTexts,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[Pairs] | None,
    offset: int = 0,
) -> dict[str, Any]:
    """Returns the log-probabilities of some tokens as completions have them.

    Args:
      texts, tokens, logprobs, top: as of `chat_logprobs`; the first token of a prompt has None.
      offset: of the first token in the text, in characters.

    Returns:
      `tokens`, `token_logprobs`, `top_logprobs` (an object for each token, which has the token
      itself, too) and `text_offset`.
    """
    words = [texts.text(token) for token in tokens]
    offsets, at = [], offset
    for word in words:
        offsets.append(at)
        at += len(word)
    likeliest = None
    if top is not None:
        likeliest = [
            None
            if logprob is None
            else {word: logprob} | {texts.text(one): value for one, value in pairs}
            for word, logprob, pairs in zip(words, logprobs, top, strict=True)
        ]
    return {
        "tokens": words,
        "token_logprobs": [*logprobs],
        "top_logprobs": likeliest,
        "text_offset": offsets,
    }


def shown_tokens(completion: Completion) -> int:
    """Returns the number of a completion's tokens without the stop token that ends it."""
    return len(without_stop(completion.tokens, completion.finish_reason))


class LogprobCursor:
    """The log-probabilities of a choice that its stream has not told yet."""

    def __init__(self) -> None:
        self._told = 0

    def next(
        self, piece: TokenChunk | Completion, end: int | None = None
    ) -> tuple[Sequence[int], Sequence[float], Sequence[Pairs] | None]:
        """Returns the tokens of a piece, their log-probabilities and the likeliest tokens.

        Args:
          piece: a chunk; or at the end the completion, of which the rest is returned.
          end: of the tokens of a completion; None for all.
        """
        tokens, logprobs, top = piece.tokens, piece.logprobs or (), piece.top_logprobs
        if isinstance(piece, Completion):
            part = slice(self._told, end)
            tokens, logprobs, top = tokens[part], logprobs[part], top and top[part]
        self._told += len(tokens)
        return tokens, logprobs, top
