"""Tokenizers of GGUF files against SentencePiece, and against transformers' own classes."""

import json
import re

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from jaxshare.models.config_fields import ConfigError
from jaxshare.models.gguf.file import GGUFFile
from jaxshare.models.gguf.tokenizer import tokenizer_of
from tests.paths import FIXTURES, ROOT

TEXTS = [
    "Hello, world! It's 12345 tokens; they'LL don't",
    "  two spaces,\ta tab\n\n and lines \r\n ",
    "Grüße, 世界 🙂 café",
    "HTTPServer camelCase x=y+1 //path",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]
PIECES = json.loads((FIXTURES / "gguf" / "pieces.json").read_text())


def file_with(values, architecture: str = "llama") -> GGUFFile:
    """A file with these settings of the tokenizer alone."""
    own = {"general.architecture": architecture}
    own |= {f"tokenizer.{key}": value for key, value in values.items()}
    return GGUFFile(ROOT / "model.gguf", own, {})


def of_pieces(**more) -> GGUFFile:
    values = {
        "ggml.model": "llama",
        "ggml.tokens": PIECES["tokens"],
        "ggml.scores": PIECES["scores"],
        "ggml.token_type": PIECES["types"],
        "ggml.unknown_token_id": 0,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }
    return file_with({**values, **{f"ggml.{key}": value for key, value in more.items()}})


def trained(split: str) -> Tokenizer:
    """BPE of bytes of this repository's own pages."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([(ROOT / "README.md").read_text(encoding="utf-8")], trainer)
    return made


@pytest.fixture(scope="module")
def of_bytes() -> dict:
    found = json.loads(trained(r"\w+").to_str())["model"]
    tokens = [*found["vocab"], "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    merges = [" ".join(each) for each in found["merges"]]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "qwen2",
        "ggml.tokens": tokens,
        "ggml.token_type": [1] * (len(tokens) - 4) + [3, 3, 3, 4],
        "ggml.merges": merges,
        "ggml.eos_token_id": len(tokens) - 2,
        "ggml.padding_token_id": len(tokens) - 4,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def made_of(file: GGUFFile):
    found = tokenizer_of(file)
    assert found is not None
    return found


@pytest.mark.parametrize(("text", "tokens"), PIECES["texts"], ids=range(len(PIECES["texts"])))
def test_pieces_are_those_of_sentencepiece(text, tokens):
    found = made_of(of_pieces())
    assert found.encode(text) == [1, *tokens]  # llama.cpp begins texts of such vocabularies
    assert found.encode(text, add_special_tokens=False) == tokens
    assert found.decode(tokens) == text


def test_tokens_around_a_text_are_those_of_the_metadata():
    plain = made_of(of_pieces(add_bos_token=False)).encode("hi")
    assert made_of(of_pieces(add_bos_token=True, add_eos_token=True)).encode("hi") == [1, *plain, 2]
    assert made_of(of_pieces(add_space_prefix=False)).encode("hi")[1:] != plain


def test_control_tokens_and_user_defined_ones_are_found_whole():
    found = made_of(of_pieces(add_bos_token=False))
    tokens = found.encode("<think>hi</s>")
    assert tokens[0] == PIECES["tokens"].index("<think>") and tokens[-1] == 2
    kept = found.decode(tokens, skip_special_tokens=True)
    assert kept.startswith("<think>") and kept.endswith("hi")


def test_bytes_are_merged_as_by_transformers(of_bytes):
    found = made_of(file_with(of_bytes, "qwen2"))
    tokens = of_bytes["ggml.tokens"]
    vocab = {text: number for number, text in enumerate(tokens)}
    expected = Qwen2Tokenizer(
        vocab=vocab, merges=[tuple(m.split(" ")) for m in of_bytes["ggml.merges"]]
    )
    expected.add_special_tokens({"additional_special_tokens": tokens[-4:-1]})
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text), text
        assert found.decode(found.encode(text)) == text
    assert found.eos_token == "<|im_end|>" and found.pad_token == "<|endoftext|>"
    assert found.bos_token is None
    chat = [{"role": "user", "content": "hello"}]
    assert found.apply_chat_template(chat, tokenize=False) == "hello"


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("llama-bpe", ["It", "'S", " ", "123", "45", "+=", "x", "  ", " y", "\n\n", "camelCase"]),
        ("qwen2", ["It", "'S", " ", *"12345", "+=", "x", "  ", " y", "\n\n", "camelCase"]),
        ("gpt-2", ["It", "'", "S", " 12345", "+=", "x", "  ", " y", "\n", "\n", "camelCase"]),
        ("smollm", ["It", "'", "S", " ", *"12345", "+=", "x", "  ", " y", "\n", "\n", "camelCase"]),
        ("gpt-4o", ["It'S", " ", "123", "45", "+=", "x", "  ", " y", "\n\n", "camel", "Case"]),
        ("tekken", ["It", "'S", " ", *"12345", "+=", "x", "  ", " y", "\n\n", "camel", "Case"]),
    ],
)
def test_texts_are_split_as_the_metadata_says(of_bytes, pre, parts):
    backend = made_of(file_with({**of_bytes, "ggml.pre": pre})).backend_tokenizer
    text = "".join(parts)
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:stop] for start, stop in spans] == parts


def test_a_file_without_a_tokenizer_has_none():
    assert tokenizer_of(file_with({"ggml.model": "no_vocab"})) is None
    assert tokenizer_of(file_with({})) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.model": "bert"}, 'tokenizer.ggml.model is "bert", but only gpt2 and llama'),
        ({"ggml.pre": "viking"}, 'tokenizer.ggml.pre is "viking", but only default, gpt-2'),
        ({"ggml.tokens": None}, "lacks tokenizer.ggml.tokens"),
        ({"ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        ({"ggml.tokens": ["a", "a"]}, "a token twice"),
        ({"ggml.eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id is 1000000, but there are"),
        ({"ggml.token_type": [1]}, "tokenizer.ggml.token_type"),
    ],
)
def test_what_cannot_be_read_is_named(of_bytes, change, message):
    with pytest.raises(ConfigError, match=f"model.gguf.*{re.escape(message)}"):
        tokenizer_of(file_with({**of_bytes, **change}))
