"""Encoding of people's words, in which the text of a control token is text and nothing else.

A control token is one that a chat template writes to tell who speaks or that a turn has ended:
every special token, and every other added token with a mark in it that the template writes, such
as `<think>`. In what people write (a message, a problem, a name) the same characters are encoded as
ordinary tokens. They are marked there with private characters before the template is rendered, and
the rendered text is cut at the marks. Nothing is cut, and the tokens are those of the whole text,
where people's words make no control token.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxshare.made_once import made_once

_START, _END, _EDGE = "\U000f0000", "\U000f0001", "\U000f0002"
"""Marks: of the start and the end of a control token in people's words, and of an edge of these
words where they might be a part of one."""
_MARKS = re.compile(f"[{_START}{_END}{_EDGE}]")
_ESCAPED = re.compile(r"\\U000f000([012])|\\udb80\\udc0([012])", re.IGNORECASE)
_THINK = ("<think>", "</think>")
"""Tokens that a session writes after a chat, whether the template has them or not."""


def mark(tokenizer: Any, words: str, *, of_model: bool = False) -> str:
    """Marks control tokens in people's words.

    Args:
      tokenizer: as transformers makes them.
      words: of a person, or of any other source but the chat template.
      of_model: the words are an answer of the model, which writes tokens such as `<think>` itself:
        only special tokens are marked.
    """
    return _control(tokenizer).mark(words, of_model)


def mark_messages(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Marks control tokens in messages, but for their roles, which templates build tokens from.

    An assistant's message is an answer of the model, but for its calls of functions: a text in
    their arguments is one that the template puts between tokens of its own.
    """
    control = _control(tokenizer)
    return [
        {
            key: value
            if key == "role"
            else control.mark_all(value, message.get("role") == "assistant" and key != "tool_calls")
            for key, value in message.items()
        }
        for message in messages
    ]


def mark_values(tokenizer: Any, value: Any) -> Any:
    """Marks control tokens in all texts of a value of types that JSON has, as `mark` does."""
    return _control(tokenizer).mark_all(value, False)


def restore_marks(text: str, *values: Any) -> str:
    """Returns a rendered text in which marks that a template has escaped are marks again.

    A template that prints a list or an object as Python does escapes private characters, and a
    control token between such marks would be one.

    Args:
      text: that a template has made of the values.
      values: with marks; where they have none, an escape in the text was in their words.
    """
    if "\\" not in text or not _ESCAPED.search(text):
        return text
    if not _MARKS.search(json.dumps(values, ensure_ascii=False, default=str)):
        return text
    return _ESCAPED.sub(lambda found: chr(ord(_START) + int(found[1] or found[2])), text)


def unmark(text: str) -> str:
    """Returns a text without marks, as it is read."""
    return _MARKS.sub("", text)


def encode_marked(tokenizer: Any, text: str, *, first: bool = False) -> list[int]:
    """Encodes a text with marks in it.

    Args:
      tokenizer: as transformers makes them.
      text: in which control tokens that are not marked become tokens.
      first: put the tokens around it that the tokenizer adds to a text of its own.
    """
    pieces = _control(tokenizer).pieces(text)
    (start, _), *others = pieces
    tokens = tokenizer.encode(start, add_special_tokens=first, verbose=False)
    for piece, as_text in others:
        tokens += _encode_text(tokenizer, piece) if as_text else _encode_inside(tokenizer, piece)
    return tokens


def check_length(tokenizer: Any, characters: int, context: int) -> None:
    """Raises ValueError for a text that no context of so many tokens can hold.

    Encoding a text of 40 MB takes minutes; its characters show at once that it is too long.

    Args:
      tokenizer: as transformers makes them.
      characters: of the text.
      context: the most tokens that the model takes.
    """
    if characters > 16 * context and characters > (most := _longest(tokenizer) * context):
        raise ValueError(
            f"the text has {characters:,} characters, but the model's context of {context:,} "
            f"tokens holds {most:,} at most; shorten it"
        )


def check_tokens(tokens: list[int], vocab_size: int) -> list[int]:
    """Returns tokens that the tokenizer has made, which the model must have.

    Raises:
      ValueError: a token that is outside the model's vocabulary.
    """
    if tokens and max(tokens) >= vocab_size:
        raise ValueError(
            f"the tokenizer makes token {max(tokens)} of the text, but the model's vocabulary has "
            f"{vocab_size}; give the tokenizer that belongs to the model"
        )
    return tokens


@functools.lru_cache(maxsize=8)
def _longest(tokenizer: Any) -> int:
    """The most characters of a token, and at least 16: spaces may be dropped or joined."""
    return max(16, *map(len, tokenizer.get_vocab()))


class _Control:
    """The control tokens of a tokenizer, as patterns.

    Attributes:
      every: matches any of them.
      special: matches those that are special.
    """

    def __init__(self, tokenizer: Any):
        template = tokenizer.chat_template or ""
        # A tokenizer may have several templates, by name.
        template = template if isinstance(template, str) else "\0".join(map(str, template.values()))
        added = [*tokenizer.added_tokens_decoder.values()]
        special = [token.content for token in added if token.special]
        others = [
            token.content
            for token in added
            # Words and runs of spaces are in templates as ordinary text.
            if not token.special
            and re.search(r"[^\w\s]", token.content)
            and (token.content in template or token.content in _THINK)
        ]
        self.every, self.special = _any_of([*special, *others]), _any_of(special)
        self._marked = re.compile(f"{_START}({self.every.pattern}){_END}")
        # Ends of words that are starts of tokens, and the reverse; as sets, since they are short.
        both = [token for token in (*special, *others) if token]
        self._starts = {token[:n] for token in both for n in range(1, len(token))}
        self._ends = {token[-n:] for token in both for n in range(1, len(token))}
        self._longest = max(map(len, both), default=0)

    def mark(self, words: str, of_model: bool) -> str:
        words = unmark(words)
        pattern = self.special if of_model else self.every
        marked = pattern.sub(f"{_START}\\g<0>{_END}", words)
        # Inside the spaces around the words, so that a template can trim them.
        body = marked.strip()
        before, after = marked[: len(marked) - len(marked.lstrip())], marked[len(marked.rstrip()) :]
        sizes = range(1, min(self._longest, len(body) + 1))
        if any(body[:n] in self._ends for n in sizes):
            body = _EDGE + body
        if any(body[-n:] in self._starts for n in sizes):
            body += _EDGE
        return before + body + after if body else marked

    def mark_all(self, value: Any, of_model: bool) -> Any:
        """The value with marks in its texts, and in names that are more than a word."""
        if isinstance(value, str):
            return self.mark(value, of_model)
        if isinstance(value, Mapping):
            return {
                key if self._is_word(key) else self.mark(key, of_model): self.mark_all(
                    inner, of_model
                )
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mark_all(inner, of_model) for inner in value]
        return value

    def _is_word(self, key: Any) -> bool:
        # Templates look names up, and so they must not change.
        return not isinstance(key, str) or (
            re.fullmatch(r"\w+", key) is not None and not self.every.search(key)
        )

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """The parts of a text, each with True if it is a control token that is text only.

        The first part is one in which control tokens are tokens; it may be "".
        """
        # Every second part is a marked token. Marks that a template has torn apart stay.
        parts = self._marked.split(text)
        found = []
        for number, part in enumerate(parts):
            found += [(part, True)] if number % 2 else self._torn(part)
        return [found[0], *(piece for piece in found[1:] if piece[0])]

    def _torn(self, part: str) -> list[tuple[str, bool]]:
        """The parts of a text with single marks: a token around a mark is text."""
        edges, plain = [], ""
        for piece in _MARKS.split(part):
            plain += piece
            edges.append(len(plain))
        pieces, start = [], 0
        for found in self.every.finditer(plain) if len(edges) > 1 else ():
            if any(found.start() < edge < found.end() for edge in edges[:-1]):
                pieces += [(plain[start : found.start()], False), (found[0], True)]
                start = found.end()
        return [*pieces, (plain[start:], False)]


@made_once(maxsize=8)
def _control_of(tokenizer: Any, template: Any) -> _Control:
    return _Control(tokenizer)


def _control(tokenizer: Any) -> _Control:
    # The template may be set later, and decides which tokens are.
    return _control_of(tokenizer, str(tokenizer.chat_template))


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches any of these texts, the longest first; nothing, if there are none."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _encode_text(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text without any added token."""
    token, tokens = tokenizer.convert_tokens_to_ids(text), _without_added(tokenizer, text)
    if token not in tokens:
        return tokens
    # A vocabulary of whole words has the token itself: it is spelled.
    spelled = [part for character in text for part in _without_added(tokenizer, character)]
    return [part for part in spelled if part != token]


def _without_added(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text in the midst of another, by the tokenizer's parts but for added tokens.

    A tokenizer with `encode_special_tokens` would do the same for special tokens alone, and for all
    threads.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)

    def encode(text: str) -> list[int]:
        if backend is None:  # not of the tokenizers library
            return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]

    return _after_newline(encode, text)


def _encode_inside(tokenizer: Any, text: str) -> list[int]:
    return _after_newline(
        lambda text: tokenizer.encode(text, add_special_tokens=False, verbose=False), text
    )


def _after_newline(encode: Any, text: str) -> list[int]:
    """The tokens of a text after a line break, without those of the break.

    Some tokenizers put a space before the first word of a text.
    """
    before, tokens = encode("\n"), encode("\n" + text)
    return tokens[len(before) :] if tokens[: len(before)] == before else encode(text)
