"""Where a step, an answer or a program ends, as automata over bytes, and what bytes a tokenizer's
tokens stand for.

A step is text that ends with a complete sentence and then the separator, outside of code (Hogwild!
Inference, appendices A and C). The automata are exact for any tokenizer once lifted:
`step_automaton().lift(token_bytes(tokenizer, vocab_size))`.
"""

import functools
import json
import re
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from jaxshare.decoding.automaton import ByteAutomaton

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTENCE_ENDS = ".?!…‽¶❧" + "。！？" + "۔؟" + "।॥" + "։჻።།။។᠃"
"""Characters that end a sentence: of the Latin, Chinese and Japanese, Arabic, Indic, and other
scripts."""

PASSED_OVER = (
    "\"')]*_"
    + "”’»›）」』】"
    + "\u00a0\u3000\u202f\u205f\u2028\u2029"
    + "".join(map(chr, range(0x2000, 0x200B)))
)
"""What may stand between the end of a sentence and the separator, besides ASCII whitespace: marks
that close, and other spaces."""

BOX = rb"\boxed{"
MAX_NESTING = 16
"""Braces of a box, its own included, are counted up to here; a box nested deeper is not
recognised."""

_SPACES = b" \t\n\r\v\f"
_NEWLINE, _TICK, _BACKSLASH, _OPEN, _CLOSE = b"\n`\\{}"
_FENCES = _TICKS, _TILDES = b"```", b"~~~"
_START, _INFO, _TEXT = b"", "info", "text"
_PROSE, _SPAN, _MATH = "prose", "span", "math"

_DECODERS = {"ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"}
"""Decoders that work on one piece at a time; Fuse and Strip touch only where a whole text begins or
ends."""


def _byte_level() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: a character for each byte, itself where that can be
    seen (as in GPT-2)."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {
        chr(256 + n): byte for n, byte in enumerate(hidden)
    }


_BYTE_LEVEL = _byte_level()


def step_automaton(separator: str = "\n\n") -> ByteAutomaton:
    r"""Marks the byte that ends a step: it completes the separator, after the end of a sentence, in
    no code block and no formula.

    A sentence ends with one of `SENTENCE_ENDS`; whitespace and `PASSED_OVER` may follow. The text's
    start is the start of a line.

    A code block is the text between two fences. It opens with a line whose first non-blank
    characters are three or more backticks, unless more backticks follow later in that line, or
    three or more tildes; it closes with the next line that starts with three of the same. A
    displayed formula is the text between `$$` and the next `$$`, on one line or many. Neither is
    looked for in a code block, nor the first in code within a line, which lasts from one run of
    backticks to the next or to the end of the line. `\$` is a dollar sign, and a backtick after a
    backslash is one outside of code. The closing fence and the closing `$$` count as the end of a
    sentence.

    A block or a formula that is never closed lasts until the text ends, and so does the step.

    After a mark the automaton reads on; a new step begins at the start state again.

    Raises:
      ValueError: a separator that is empty or is not ASCII whitespace.
    """
    wanted = separator.encode()
    if not wanted or wanted.strip(_SPACES):
        raise ValueError(
            f"the separator is {separator!r}; it must be whitespace, such as two newlines"
        )
    ends, over = ({c.encode() for c in characters} for characters in (SENTENCE_ENDS, PASSED_OVER))
    known = ends | over
    beginnings = {c[:n] for c in known for n in range(1, len(c))}

    def step(state: Any, byte: int) -> tuple[Hashable, bool]:
        (fence, _), within, ended, partial, matched = state
        line, closes = _read_line(state[0], byte)
        if within == _SPAN and (byte == _NEWLINE or line[0]):
            within = _PROSE
        # in a code block, until it closes; or backticks show that none has opened
        if line[0] or fence:
            return (
                line,
                within,
                closes and within != _MATH,
                b"" if line[0] or closes else b"`",
                0,
            ), False
        if line[1] in _FENCES:  # more characters than three close the block
            return (line, within, within != _MATH, b"", 0), False
        if byte in _SPACES:
            ended = ended and not partial
            matched = _match(wanted, matched, byte) if ended else 0
            return (line, within, ended, b"", matched), ended and matched == len(wanted)
        if partial == b"\\" and byte in b"\\$`":
            return (line, within, False, b"", 0), False
        if byte == _TICK and within != _MATH:
            if partial != b"`":  # the first of a run
                within = _PROSE if within == _SPAN else _SPAN
            return (line, within, False, b"`", 0), False
        if byte in b"\\$" and within != _SPAN:
            if partial + bytes([byte]) == b"$$":
                return (line, _PROSE if within == _MATH else _MATH, within == _MATH, b"", 0), False
            return (line, within, False, bytes([byte]), 0), False
        if within == _MATH:
            return (line, within, False, b"", 0), False
        # The mark may be of several bytes. No byte inside one begins another, so that a mark which
        # goes wrong is dropped as a whole.
        seen = partial + bytes([byte])
        if seen not in known and seen not in beginnings:
            ended, seen = False, bytes([byte])
        if seen in beginnings:
            return (line, within, ended and any(c.startswith(seen) for c in over), seen, 0), False
        return (line, within, seen in ends or (seen in over and ended), b"", 0), False

    return ByteAutomaton.build(((b"", _START), _PROSE, False, b"", 0), step)


@functools.cache
def code_automaton() -> ByteAutomaton:
    r"""Marks the third backtick or tilde of the line that closes a fenced code block; see
    `step_automaton` for what that is.

    For text that goes on inside a block, begin at the state after its fence:
    `automaton.read(b"```python\n")[0]`.
    """
    return ByteAutomaton.build((b"", _START), _read_line)


@functools.cache
def box_automaton() -> ByteAutomaton:
    r"""Marks the brace that closes a `\boxed{...}` with something in it.

    Braces nest, up to `MAX_NESTING` deep; inside the box a backslash escapes the next byte. A box
    of nothing but whitespace does not count. A `\boxed{` inside a box that is still open begins
    anew, so that one which is never closed does not hide those that follow.
    """

    def step(state: Any, byte: int) -> tuple[Hashable, bool]:
        depth, filled, escaped, matched = state
        matched = _match(BOX, matched, byte)
        if matched == len(BOX):
            return (1, False, False, 0), False
        if not depth:
            return (0, False, False, matched), False
        if not escaped and byte == _CLOSE and depth == 1:
            return (0, False, False, matched), filled
        nested = 0 if escaped else (byte == _OPEN) - (byte == _CLOSE)
        if depth + nested > MAX_NESTING:
            return (0, False, False, matched), False
        return (
            depth + nested,
            filled or byte not in _SPACES,
            not escaped and byte == _BACKSLASH,
            matched,
        ), False

    return ByteAutomaton.build((0, False, False, 0), step)


def _read_line(state: Any, byte: int) -> tuple[tuple[bytes, bytes | str], bool]:
    """((fence of the code block that is open, or nothing; place in the line), byte) -> (the same
    after it, whether it closes the block).

    Places: the first one, two or three characters of a fence after blanks alone, or none yet; _INFO
    after backticks that open; or _TEXT.
    """
    fence, place = state
    if byte == _NEWLINE:
        return (fence, _START), False
    if place == _START and byte in _SPACES:
        return (fence, _START), False
    if isinstance(place, bytes) and len(place) < 3:
        run = place + bytes([byte])
        if not any(whole.startswith(run) for whole in ([fence] if fence else _FENCES)):
            return (fence, _TEXT), False
        if len(run) < 3:
            return (fence, run), False
        return (b"" if fence else run, run), bool(fence)
    if place in _FENCES and byte == place[0]:
        return (fence, place), False
    if fence == _TICKS and place in (_TICKS, _INFO):
        # Backticks after the opening ones: code within the line, no fence.
        return ((b"", _TEXT) if byte == _TICK else (fence, _INFO)), False
    return (fence, _TEXT), False


def _match(wanted: bytes, matched: int, byte: int) -> int:
    """How many bytes of `wanted` the text ends with after one more byte, if it ended with `matched`
    of them before."""
    text = wanted[:matched] + bytes([byte])
    return max(n for n in range(min(len(text), len(wanted)) + 1) if text.endswith(wanted[:n]))


def token_bytes(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> list[bytes]:
    """The bytes that each token adds to a text that has begun.

    Args:
      tokenizer: of Hugging Face, and of its tokenizers library: byte-level, SentencePiece-style, or
        any other that can decode.
      vocab_size: V, of the model. Tokens that the tokenizer does not know add no bytes, nor do
        special tokens.

    Raises:
      ValueError: a tokenizer that is not of the tokenizers library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"the tokenizer is a {type(tokenizer).__name__}, whose tokens cannot be turned into "
            "bytes; use one with a tokenizer.json, as the tokenizers library writes it"
        )
    special = {
        number for number, token in backend.get_added_tokens_decoder().items() if token.special
    }
    pieces = [
        None if number in special else backend.id_to_token(number) for number in range(vocab_size)
    ]
    decoder: dict[str, Any] = json.loads(backend.to_str())["decoder"] or {"type": "none"}
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    if all(step["type"] in _DECODERS and "Regex" not in step.get("pattern", {}) for step in steps):
        return [b"" if piece is None else _piece_bytes(piece, steps) for piece in pieces]
    # What a token adds is then seen behind another one: some decoders put a space between words,
    # and none before the first.
    first = next(([number] for number, piece in enumerate(pieces) if piece and piece.isalpha()), [])
    before = backend.decode(first)
    texts = backend.decode_batch(
        [[*first, number] if piece else first for number, piece in enumerate(pieces)]
    )
    return [text.removeprefix(before).encode() for text in texts]


def _piece_bytes(piece: str, steps: Sequence[dict[str, Any]]) -> bytes:
    """What the decoders make of one piece of a vocabulary that stands within a text."""
    for step in steps:
        match step["type"]:
            case "Replace":
                piece = piece.replace(step["pattern"]["String"], step["content"])
            case "Metaspace":
                piece = piece.replace(step["replacement"], " ")
            case "ByteFallback" if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
                return bytes.fromhex(piece[3:5])
            # an added token may have other characters, and stands for itself
            case "ByteLevel" if all(c in _BYTE_LEVEL for c in piece):
                return bytes(_BYTE_LEVEL[c] for c in piece)
    return piece.encode()


def check_separator(
    separator: str, tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[bytes]
) -> None:
    """Raises ValueError if text with this separator in it loses the separator as tokens. `tokens`
    are those of `token_bytes`."""
    encoded: Any = tokenizer.encode(f"a.{separator}b", add_special_tokens=False)
    if separator.encode() not in b"".join(
        tokens[token] for token in encoded if token < len(tokens)
    ):
        raise ValueError(
            f"the tokenizer cannot represent the separator {separator!r}, so no step would ever "
            "end; choose a separator that its tokens can spell, or another tokenizer"
        )
