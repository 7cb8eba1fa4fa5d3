"""The bytes that each token of a tokenizer adds to a text."""

import json
import re
from collections.abc import Sequence
from typing import Any

_DECODERS = {"ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"}
"""Decoders that work on one piece at a time; Fuse and Strip touch only the start or the end of a
whole text."""


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """The bytes that each token adds to a text that has begun.

    Args:
      tokenizer: a `Tokenizer`, or one of transformers with a backend of the tokenizers library:
        byte-level, SentencePiece-style, or any other that can decode.
      vocab_size: V of the model. Tokens that are not in the tokenizer add no bytes, nor do special
        tokens.

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
    stages: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    if all(
        stage["type"] in _DECODERS and "Regex" not in stage.get("pattern", {}) for stage in stages
    ):
        return [b"" if piece is None else _piece_bytes(piece, stages) for piece in pieces]
    # Other decoders may put a space between words and none before the first, so each token is
    # decoded after a first one, and what it adds is measured there.
    first = next(([number] for number, piece in enumerate(pieces) if piece and piece.isalpha()), [])
    before = backend.decode(first)
    texts = backend.decode_batch(
        [[*first, number] if piece else first for number, piece in enumerate(pieces)]
    )
    return [text.removeprefix(before).encode() for text in texts]


def _byte_level() -> dict[str, int]:
    """The alphabet of byte-level tokenizers (as in GPT-2): a character for each byte.

    A printable byte has its own character.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {
        chr(256 + n): byte for n, byte in enumerate(hidden)
    }


_BYTE_LEVEL = _byte_level()


def _piece_bytes(piece: str, stages: Sequence[dict[str, Any]]) -> bytes:
    """The bytes that the decoder's stages make of one piece of a vocabulary within a text."""
    for stage in stages:
        match stage["type"]:
            case "Replace":
                piece = piece.replace(stage["pattern"]["String"], stage["content"])
            case "Metaspace":
                piece = piece.replace(stage["replacement"], " ")
            case "ByteFallback" if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
                return bytes.fromhex(piece[3:5])
            # an added token may have other characters, which are its text
            case "ByteLevel" if all(c in _BYTE_LEVEL for c in piece):
                return bytes(_BYTE_LEVEL[c] for c in piece)
    return piece.encode()
