"""Tokenizers of a tokenizer.json against those of transformers."""

import copy
import json
import pickle

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from jaxshare.extras import MissingExtraError
from jaxshare.models import EMBEDDED
from jaxshare.models.tokenizer_files import read_tokenizer

TEXTS = (
    "",
    " ",
    "hello world",
    " hello  world . it 's fine",
    "<s>hello</s> world<tool>",
    "a<pad>b <unk> Ä ☃\n\thello",
    "<extra> hello<extra>world<more> <late>hello",
)
CHAT = [
    {"role": "system", "content": "be brief", "name": None},
    {"role": "user", "content": "hello <s> world"},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}|{{ m | length }}]{{ m.content }}"
    "{{ eos_token }}{% endfor %}{{ more }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def flags(content, **given):
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"content": content, **plain, **given}


def of_bytes():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate(["<unk>", "<s>", "</s>", *alphabet, "he"])}
    made = Backend(models.BPE(vocab, [("h", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", 1)]
    )
    return made


def of_pieces():
    """With bytes for what has no piece, and a space before a text, as SentencePiece has."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *"▁helowrd.'s", "he"]
    vocab = {text: number for number, text in enumerate(texts)}
    made = Backend(models.BPE(vocab, [("h", "e")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def of_words():
    texts = ["<unk>", "<s>", "</s>", "hello", "world", ".", "'s", "fine", "it"]
    made = Backend(
        models.WordLevel({text: number for number, text in enumerate(texts)}, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.enable_truncation(2)
    made.enable_padding(length=9, pad_token="<unk>")
    return made


KINDS = {"bytes": of_bytes, "pieces": of_pieces, "words": of_words}
SETTINGS = {
    "none": {},
    "named": {**SPECIAL, "clean_up_tokenization_spaces": True, "chat_template": TEMPLATE},
    "as transformers 4 writes them": {
        "added_tokens_decoder": {
            "1": flags("<s>", special=True),
            "2": flags("</s>", special=True, lstrip=True),
            "700": flags("<tool>", normalized=True),
            "600": flags("<more>"),
        },
        **SPECIAL,
        "eos_token": flags("</s>", __type="AddedToken"),
        "pad_token": "<pad>",
        "additional_special_tokens": ["<extra>", "<more>"],
        "chat_template": [
            {"name": "default", "template": TEMPLATE},
            {"name": "tool_use", "template": "tools: {{ tools }}"},
        ],
    },
    "as transformers 5 writes them": {
        **SPECIAL,
        "extra_special_tokens": ["<extra>", "<tool>"],
        "image_token": "<late>",
    },
    "by name": {**SPECIAL, "extra_special_tokens": {"image_token": "<extra>"}},
}


def folder_of(folder, kind, settings, **files):
    made = KINDS[kind]()
    made.add_special_tokens(["</s>"])
    made.add_tokens([AddedToken("<tool>")])
    made.save(str(folder / "tokenizer.json"))
    written = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def assert_same(folder):
    mine, theirs = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert mine.get_vocab() == theirs.get_vocab() and len(mine) == len(theirs)
    assert mine.special_tokens_map == theirs.special_tokens_map
    assert {number: repr(token) for number, token in mine.added_tokens_decoder.items()} == {
        number: repr(token) for number, token in theirs.added_tokens_decoder.items()
    }
    for name in ("bos", "eos", "unk", "pad"):
        for attribute in (f"{name}_token", f"{name}_token_id"):
            assert getattr(mine, attribute) == getattr(theirs, attribute)
    for text in TEXTS:
        for around in (True, False):
            tokens = theirs.encode(text, add_special_tokens=around)
            assert mine.encode(text, add_special_tokens=around) == tokens, text
            assert mine(text, add_special_tokens=around) == dict(
                theirs(text, add_special_tokens=around, return_token_type_ids=False)
            )
            for skip in (True, False):
                assert mine.decode(tokens, skip) == theirs.decode(tokens, skip), (text, skip)
        assert mine.decode(np.array(tokens, np.int32)) == theirs.decode(tokens)
        assert mine.convert_ids_to_tokens(tokens) == theirs.convert_ids_to_tokens(tokens)
    assert mine.decode(3) == theirs.decode(3)
    names = ["<s>", "hello", "no such token"]
    assert mine.convert_tokens_to_ids(names) == theirs.convert_tokens_to_ids(names)
    assert mine.chat_template == theirs.chat_template
    return mine, theirs


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_is_as_transformers_has_it(tmp_path, kind, settings):
    mine, theirs = assert_same(folder_of(tmp_path, kind, SETTINGS[settings]))
    if mine.chat_template is None:
        with pytest.raises(ValueError, match="has no chat template: pass one"):
            mine.get_chat_template()
        return
    schema = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for given in ({}, {"tools": [schema]}, {"add_generation_prompt": True, "more": "x"}):
        for form in ({"tokenize": False}, {"return_dict": False}):
            made = mine.apply_chat_template(CHAT, **given, **form)
            assert made == theirs.apply_chat_template(CHAT, **given, **form)
    assert mine.apply_chat_template(CHAT, chat_template="{{ messages | length }}", tokenize=False)
    with pytest.raises(TypeError, match="does not take continue_final_message"):
        mine.apply_chat_template(CHAT, continue_final_message=True)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_older_versions_are_read(tmp_path, kind):
    tokens = {"<late>": len(KINDS[kind]().get_vocab()) + 1, "<more>": 999}
    named = {**SPECIAL, "eos_token": flags("</s>"), "additional_special_tokens": ["<more>"]}
    assert_same(folder_of(tmp_path, kind, {}, special_tokens_map=named, added_tokens=tokens))


def test_templates_of_several_files(tmp_path):
    folder = folder_of(tmp_path, "bytes", SETTINGS["named"])
    (folder / "chat_template.jinja").write_text("{{ messages | length }}")
    assert assert_same(folder)[0].chat_template == "{{ messages | length }}"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    mine, _ = assert_same(folder)
    assert mine.get_chat_template("rag") == "rag"
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="the chat templates rag, and none is the default"):
        assert_same(folder)[0].get_chat_template()


def test_the_embedded_model_and_what_it_is_saved_as(tmp_path):
    mine, _ = assert_same(EMBEDDED)
    mine.save_pretrained(tmp_path)
    saved, _ = assert_same(tmp_path)
    for made in (saved, copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert made.get_vocab() == mine.get_vocab()
        assert made.special_tokens_map == mine.special_tokens_map
        assert made.chat_template == mine.chat_template


def test_a_class_does_not_change_what_the_file_says(tmp_path):
    """Classes of transformers may build a tokenizer of their own from its vocabulary."""
    folder = folder_of(tmp_path, "pieces", {**SPECIAL, "tokenizer_class": "LlamaTokenizerFast"})
    mine = read_tokenizer(folder)
    for text in TEXTS[:4]:
        assert (
            mine.encode(text) == Backend.from_file(str(folder / "tokenizer.json")).encode(text).ids
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": 5},
        {"added_tokens_decoder": {"1": "x"}},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"chat_template": [{"name": "x"}]},
        {"extra_special_tokens": [5]},
        {"model_max_length": True},
    ],
)
def test_settings_of_wrong_types_are_refused(tmp_path, settings):
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be read"):
        read_tokenizer(folder_of(tmp_path, "words", settings))


def test_without_transformers_a_tokenizer_of_another_file_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"is tokenizer\.model without a tokenizer\.json"):
        read_tokenizer(tmp_path)


def test_one_text_at_a_time():
    with pytest.raises(TypeError, match="one text at a time, not a list"):
        read_tokenizer(EMBEDDED).encode(["a", "b"])
