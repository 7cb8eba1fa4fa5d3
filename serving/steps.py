"""Where a step, an answer or a program ends, as automata over bytes, and what bytes a tokenizer's tokens stand for.

A step is text that ends with a complete sentence and then the separator, outside of code (Hogwild! Inference, appendices A and C).
The automata are exact for any tokenizer once lifted: `step_automaton().lift(token_bytes(tokenizer, vocab_size))`.
"""

import functools
import json
import re
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from jaxshare.automaton import ByteAutomaton

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTENCE_ENDS = ".?!…‽¶❧" + "。！？" + "۔؟" + "।॥" + "։჻።།။។᠃"  # noqa: RUF001 (each is meant, whatever it looks like)
"""Characters that end a sentence: of the Latin, Chinese and Japanese, Arabic, Indic, and other scripts."""

PASSED_OVER = "\"')]*_" + "”’»›）」』】" + "\u00a0\u3000"  # noqa: RUF001 (likewise)
"""What may stand between the end of a sentence and the separator, besides ASCII whitespace: marks that close, and two more spaces."""

BOX = rb"\boxed{"
MAX_NESTING = 16
"""Braces of a box, its own included, are counted up to here; a box nested deeper is not recognised."""

_SPACES = b" \t\n\r\v\f"
_NEWLINE, _TICK, _BACKSLASH, _OPEN, _CLOSE = b"\n`\\{}"
_START, _TEXT, _FENCE, _INFO = 0, "text", "fence", "info"

_DECODERS = {"ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"}
"""Decoders that work on one piece at a time; Fuse and Strip touch only where a whole text begins or ends."""


def _byte_level() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: a character for each byte, itself where that can be seen (as in GPT-2)."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTE_LEVEL = _byte_level()


def step_automaton(separator: str = "\n\n") -> ByteAutomaton:
    r"""Marks the byte that ends a step: it completes the separator, what stands before that ends a sentence, and it is not in a code block.

    A sentence ends with one of `SENTENCE_ENDS`; whitespace and `PASSED_OVER` may follow. A code block is what stands between fences: it
    begins with a line whose first non-blank characters are three or more backticks, unless more backticks follow later in that line, and
    ends with the next line that begins so. The closing backticks count as the end of a sentence. The text's start is the start of a line.

    After a mark the automaton reads on; whoever begins a new step begins at the start state again.

    Raises:
      ValueError: a separator that is empty or is not ASCII whitespace.
    """
    wanted = separator.encode()
    if not wanted or wanted.strip(_SPACES):
        raise ValueError(f"the separator is {separator!r}; it must be whitespace, such as two newlines")
    ends, over = ({c.encode() for c in characters} for characters in (SENTENCE_ENDS, PASSED_OVER))
    known = ends | over
    beginnings = {c[:n] for c in known for n in range(1, len(c))}

    def step(state: Any, byte: int) -> tuple[Hashable, bool]:
        (inside, _), ended, partial, matched = state
        line, closes = _read_line(state[0], byte)
        if line[0] or inside:  # what ends in a code block is of no interest, until it closes
            return (line, closes, b"", 0), False
        if line[1] == _FENCE:  # more backticks than three close the block
            return (line, True, b"", 0), False
        if byte in _SPACES:
            ended, matched = ended and not partial, _match(wanted, matched, byte)
            return (line, ended, b"", matched), ended and matched == len(wanted)
        # The mark may be of several bytes. No byte inside one begins another, so that a mark which goes wrong is dropped as a whole.
        seen = partial + bytes([byte])
        if seen not in known and seen not in beginnings:
            ended, seen = False, bytes([byte])
        if seen in beginnings:
            return (line, ended, seen, 0), False
        return (line, seen in ends or (seen in over and ended), b"", 0), False

    return ByteAutomaton.build(((False, _START), False, b"", 0), step)


@functools.cache
def code_automaton() -> ByteAutomaton:
    r"""Marks the third backtick of the line that closes a fenced code block; see `step_automaton` for what that is.

    For text that goes on inside a block, begin at the state after its fence: `automaton.read(b"```python\n")[0]`.
    """
    return ByteAutomaton.build((False, _START), _read_line)


@functools.cache
def box_automaton() -> ByteAutomaton:
    r"""Marks the brace that closes a `\boxed{...}` with something in it.

    Braces nest, up to `MAX_NESTING` deep; inside the box a backslash escapes the next byte. A box of nothing but whitespace does not count.
    A `\boxed{` inside a box that is still open begins anew, so that one which is never closed does not hide those that follow.
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
        return (depth + nested, filled or byte not in _SPACES, not escaped and byte == _BACKSLASH, matched), False

    return ByteAutomaton.build((0, False, False, 0), step)


def _read_line(state: Any, byte: int) -> tuple[tuple[bool, int | str], bool]:
    """((inside a code block, place in the line), byte) -> (the same after it, whether it closes the block).

    Places: 0 while the line is blank, 1 and 2 after as many backticks at its start, then _FENCE; _INFO behind an opening fence; or _TEXT.
    """
    inside, place = state
    if byte == _NEWLINE:
        return (inside, _START), False
    if place == _START and byte in _SPACES:
        return (inside, _START), False
    if place in (0, 1) and byte == _TICK:
        return (inside, place + 1), False
    if place == 2 and byte == _TICK:
        return (not inside, _FENCE), inside
    if place == _FENCE and byte == _TICK:
        return (inside, _FENCE), False
    if inside and place in (_FENCE, _INFO):
        # Backticks behind the opening ones: code within the line, no fence.
        return ((False, _TEXT) if byte == _TICK else (True, _INFO)), False
    return (inside, _TEXT), False


def _match(wanted: bytes, matched: int, byte: int) -> int:
    """How many bytes of `wanted` the text ends with after one more byte, if it ended with `matched` of them before."""
    text = wanted[:matched] + bytes([byte])
    return max(n for n in range(min(len(text), len(wanted)) + 1) if text.endswith(wanted[:n]))


def token_bytes(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> list[bytes]:
    """The bytes that each token adds to a text that has begun.

    Args:
      tokenizer: of Hugging Face, and of its tokenizers library: byte-level, SentencePiece-style, or any other that can decode.
      vocab_size: V, of the model. Tokens that the tokenizer does not know add no bytes, nor do special tokens.

    Raises:
      ValueError: a tokenizer that is not of the tokenizers library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"the tokenizer is a {type(tokenizer).__name__}, whose tokens cannot be turned into bytes; use one with a "
                         "tokenizer.json, as the tokenizers library writes it")
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    pieces = [None if number in special else backend.id_to_token(number) for number in range(vocab_size)]
    decoder: dict[str, Any] = json.loads(backend.to_str())["decoder"] or {"type": "none"}
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    if all(step["type"] in _DECODERS and "Regex" not in step.get("pattern", {}) for step in steps):
        return [b"" if piece is None else _piece_bytes(piece, steps) for piece in pieces]
    # What a token adds is then seen behind another one: some decoders put a space between words, and none before the first.
    first = next(([number] for number, piece in enumerate(pieces) if piece and piece.isalpha()), [])
    before = backend.decode(first)
    texts = backend.decode_batch([[*first, number] if piece else first for number, piece in enumerate(pieces)])
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
            case "ByteLevel" if all(c in _BYTE_LEVEL for c in piece):  # an added token may have other characters, and stands for itself
                return bytes(_BYTE_LEVEL[c] for c in piece)
    return piece.encode()


def check_separator(separator: str, tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[bytes]) -> None:
    """Raises ValueError if text with this separator in it loses the separator as tokens. `tokens` are those of `token_bytes`."""
    encoded: Any = tokenizer.encode(f"a.{separator}b", add_special_tokens=False)
    if separator.encode() not in b"".join(tokens[token] for token in encoded if token < len(tokens)):
        raise ValueError(f"the tokenizer cannot represent the separator {separator!r}, so no step would ever end; choose a separator that "
                         "its tokens can spell, or another tokenizer")
