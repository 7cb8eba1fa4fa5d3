"""Texts of streams: pieces put together are the text of all tokens, however they are cut."""

import random

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from jaxshare.models import EMBEDDED, load
from jaxshare.serving.engine.stream import Detokenizer, GrowingText
from tests.serving.chat.templates import TEMPLATES, tokenizer


def metaspace() -> PreTrainedTokenizerFast:
    """As SentencePiece writes: the space before the first word is left out."""
    letters = {piece: i for i, piece in enumerate([*"▁abcä.", "▁a", "<unk>"])}
    made = Tokenizer(BPE(letters, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def words() -> PreTrainedTokenizerFast:
    """Words with spaces between them, which a sign after them takes back."""
    made = Tokenizer(WordLevel({"a": 0, "b": 1, ".": 2, "n't": 3, "<unk>": 4}, unk_token="<unk>"))
    made.decoder = decoders.WordPiece(cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZERS = {
    "embedded": lambda: load(EMBEDDED).tokenizer,
    "bytes": lambda: tokenizer(TEMPLATES["hermes"]),
    "metaspace": metaspace,
    "words": words,
}


def pieces(tokens, rng):
    """Tokens in pieces of 0 to 5."""
    cut = []
    while tokens:
        size = rng.randrange(6)
        cut.append(tokens[:size])
        tokens = tokens[size:]
    return cut


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_growing_text_is_that_of_all_tokens_at_any_time(name):
    """Random tokens: most are parts of characters that never become whole."""
    made, rng = TOKENIZERS[name](), random.Random(0)
    for _ in range(20):
        tokens = [rng.randrange(len(made)) for _ in range(rng.randrange(120))]
        growing, seen = GrowingText(made), []
        for piece in pieces(tokens, rng):
            seen += piece
            assert growing.add(piece, False) == made.decode(seen)
        assert growing.add([], True) == made.decode(tokens)


@pytest.mark.parametrize("name", ["embedded", "bytes"])
@pytest.mark.parametrize("stops", [(), ("tä",), ("x€", "zz")])
def test_pieces_put_together_are_the_text(name, stops):
    made, rng = TOKENIZERS[name](), random.Random(1)
    text = "Größe 5 €: naïve 日本語 🎉 Stätte x€ ende " * 4
    tokens = made.encode(text, add_special_tokens=False)
    whole = Detokenizer(made, stops).text(tokens)
    assert whole == min((text.partition(stop)[0] for stop in stops), key=len, default=text)
    for _ in range(10):
        stream = Detokenizer(made, stops)
        shown = [stream.next_text(piece, False) for piece in pieces(tokens, rng)]
        assert "".join([*shown, stream.next_text([], True)]) == whole
        assert "\ufffd" not in "".join(shown)


def test_long_texts_are_not_decoded_again_and_again():
    """Each token is decoded a bounded number of times."""
    decoded = []

    class Counting:
        def decode(self, tokens):
            decoded.append(len(tokens))
            return "a" * len(tokens)

    growing = GrowingText(Counting())
    for _ in range(1000):
        growing.add([1], False)
    assert max(decoded) <= 40 and growing.add([], True) == "a" * 1000
