"""Ends of steps, boxes and code blocks on the device, over three tokenizers, against string
code."""

import functools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jaxshare.decoding.automaton import ByteAutomaton, TokenAutomaton
from jaxshare.models import EMBEDDED
from jaxshare.serving.grammars.token_bytes import token_bytes
from jaxshare.serving.workers.text.codec import check_separator
from jaxshare.serving.workers.text.step_automata import (
    box_automaton,
    code_automaton,
    step_automaton,
)
from tests.helpers import mostly_slow

steps = functools.cache(step_automaton)

# The oracle: the whole text so far is looked at again after every byte.
# -------------------------------------------------------------

ENDS = [*".?!…‽¶❧。！？۔؟।॥։჻።།။។᠃"]
OVER = [
    *"\"')]*_”’»›）」』】\u00a0\u3000\u202f\u205f\u2028\u2029",
    *(chr(0x2000 + n) for n in range(11)),
]
SENTENCE = re.compile(
    b"(?:%s)(?:%s|\\s)*\\Z"
    % tuple(b"|".join(re.escape(c.encode()) for c in marks) for marks in (ENDS, OVER))
)
OPENING = re.compile(rb"(?s)\s*(?:(```)`*[^`]*|(~~~).*)")
SPAN_ESCAPE_FORMULA = re.compile(rb"(?s)`+[^`\n]*`*|\\[\\$`]|(\$\$)(?:\\[\\$`]|(?!\$\$).)*(\$\$)?")


def without_code(text: bytes) -> tuple[bytes, bytes, int]:
    """The text outside of code blocks, with a full stop for each block.

    Returns:
      It, the fence of the block that is open, if any, and the number of closed blocks.
    """
    outside, fence, closed = [], b"", 0
    for line in text.split(b"\n"):
        if fence and line.lstrip().startswith(fence):
            outside.append(b"." + line.lstrip().lstrip(fence[:1]))
            fence, closed = b"", closed + 1
        elif not fence and (opening := OPENING.fullmatch(line)):
            fence = opening[1] or opening[2]
        elif not fence:
            outside.append(line)
    return b"\n".join(outside), fence, closed


def without_formulas(text: bytes) -> tuple[bytes, bool]:
    """(text with a full stop for each formula, is the last one open)."""
    found = list(SPAN_ESCAPE_FORMULA.finditer(text))
    outside = SPAN_ESCAPE_FORMULA.sub(lambda match: b"." if match[1] else match[0], text)
    return outside, any(match[1] and not match[2] for match in found)


def ends_step(text: bytes, separator: bytes = b"\n\n") -> bool:
    if not text.endswith(separator):
        return False
    outside, fence, _ = without_code(text)
    outside, formula = without_formulas(outside)
    return not fence and not formula and SENTENCE.search(outside) is not None


def closes_code(text: bytes) -> bool:
    return text.endswith((b"`", b"~")) and without_code(text)[2] > without_code(text[:-1])[2]


def closes_box(text: bytes) -> bool:
    _, opened, content = text.rpartition(b"\\boxed{")
    content = re.sub(rb"(?s)\\.", b"x", content)
    if not opened or not content.endswith(b"}") or not content[:-1].strip():
        return False
    content, depth = content[:-1], 1
    while (shorter := re.sub(rb"\{[^{}]*\}", b"x", content)) != content:
        content, depth = shorter, depth + 1
    return not re.search(rb"[{}]", content) and depth <= 16


# Three tokenizers
# --------------------------------------------------------------------------------------------------

LINES = [
    "We add them: 2 + 3 = 5.\n\nSo the answer is \\boxed{5}.\n\n",
    "```python\nprint(1)\n```\n\n",
    "\\frac{a}{b} \\{ \\} {\\boxed{7}}",
    "“Is it done?”\n\n**Yes!**\n\n",
    "   ```\n\n````\n",
    "(It is.)  \n\nWait, no:\n\n",
    "好。」\n\n 是？\n\n ठीक।\n\n نعم؟\n\n",
]


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on LINES, pairs of newlines and sentence ends among its tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\w\s]+\s*|\s*\w+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        LINES * 4,
        trainers.BpeTrainer(
            vocab_size=420,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|end|>"],
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(["<think>", "</think> .\n"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@functools.cache
def sentence_piece() -> PreTrainedTokenizerFast:
    """Unigram pieces with ▁ for a space, and bytes for newlines, Chinese and all else."""
    pieces = [
        "▁",
        "▁a",
        "a",
        "b",
        ".",
        "!",
        ":",
        ".)",
        ")",
        "*",
        "**",
        "`",
        "```",
        "``",
        "{",
        "}",
        "\\",
        "\\boxed{",
        "boxed",
        "5",
        "▁5",
        "”",
        "5}",
        ".**",
        "।",
        "▁▁▁▁",
        "python",
        "▁is",
        "。",
    ]
    vocabulary = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        *[(f"<0x{byte:02X}>", -9.0) for byte in range(256)],
        *[(piece, -2.0 - len(piece) / 9) for piece in pieces],
    ]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@functools.cache
def embedded() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(EMBEDDED, local_files_only=True)


def word_piece() -> PreTrainedTokenizerFast:
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(
            {"[UNK]": 0, "a": 1, "b": 2, "##b": 3, ".": 4, "##ing": 5}, unk_token="[UNK]"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


TOKENIZERS = {"byte-level": byte_level, "sentence-piece": sentence_piece, "embedded": embedded}
SPARE = 3
"""Tokens of the model that the tokenizer does not know."""

FRAGMENTS = [
    "\n",
    "\n\n",
    " ",
    ".",
    "a",
    "**",
    ")",
    ":",
    "```",
    "\n```",
    "`",
    "python",
    "\\boxed{",
    "{",
    "}",
    "5",
    "\\",
    "\\}",
    "。",
    "”",
    "؟",
    "ok.\n\n",
    "```\n\n",
    "\u00a0",
    "é",
    "\r\n",
    "\\boxed{5}",
    "~~~",
    "\n~~~",
    "~",
    "$$",
    "$",
    "\\$",
    "``",
]


def random_tokens(
    tokenizer: PreTrainedTokenizerFast,
    pieces: list[bytes],
    count: int,
    length: int,
    always: tuple[str, ...],
) -> np.ndarray:
    """Tokens int32[count, length], half of encoded texts, half drawn one by one.

    Each row is made from a few fragments or tokens only.
    """
    draw = random.Random(0)
    likely = [
        number
        for number, piece in enumerate(pieces)
        if re.search(rb"[\n.`{}\\\xe2\xe3\x80\x82\x9d]|^\s*$", piece)
    ]
    needed = sorted(
        {token for text in always for token in tokenizer.encode(text, add_special_tokens=False)}
    )
    sequences = []
    while len(sequences) < count:
        if len(sequences) % 2:
            few = [*draw.sample(needed, 2), *draw.sample(likely, 4), draw.randrange(len(pieces))]
            chosen = draw.choices(few, k=length)
        else:
            few = [*draw.sample(always, 2), *draw.sample(FRAGMENTS, 4)]
            chosen = tokenizer.encode(
                "".join(draw.choices(few, k=length)), add_special_tokens=False
            )[:length]
        if len(chosen) == length:
            sequences.append(chosen)
    return np.asarray(sequences, np.int32)


@jax.jit
def device_marks(automaton: TokenAutomaton, tokens: jax.Array) -> jax.Array:
    """int32[R, T] -> bool[R, T]."""
    start = jnp.broadcast_to(automaton.start, tokens.shape[:1])
    return jax.lax.scan(automaton.step, start, tokens.T)[1].T


def oracle_marks(found, pieces: list[bytes], tokens: np.ndarray) -> np.ndarray:
    """bool[R, T]: whether something is found at any byte of the token."""
    found, marks = functools.lru_cache(2**16)(found), np.zeros(tokens.shape, np.bool_)
    for r, sequence in enumerate(tokens.tolist()):
        text = b""
        for t, token in enumerate(sequence):
            whole = text + pieces[token]
            marks[r, t] = any([found(whole[:n]) for n in range(len(text) + 1, len(whole) + 1)])
            text = whole
    return marks


@pytest.mark.parametrize("name", mostly_slow(reversed(TOKENIZERS)))
def test_device_marks_are_those_of_plain_strings(name):
    tokenizer = TOKENIZERS[name]()
    pieces = token_bytes(tokenizer, len(tokenizer) + SPARE)
    for automaton, found, always in (
        (step_automaton(), ends_step, (".", "\n\n", ".\n\n")),
        (step_automaton(), ends_step, ("$$", ".\n\n", "\n\n")),
        (step_automaton(), ends_step, ("~~~", "```", "$$", "\n", "\n\n")),
        (box_automaton(), closes_box, ("\\boxed{", "}", "\\boxed{5}")),
        (code_automaton(), closes_code, ("```", "\n", "\n```")),
        (code_automaton(), closes_code, ("~~~", "```", "\n", "\n~~~")),
    ):
        tokens = random_tokens(tokenizer, pieces, 4800, 16, always)
        expected = oracle_marks(found, pieces, tokens)
        np.testing.assert_array_equal(device_marks(automaton.lift(pieces), tokens), expected)
        assert expected.sum() > 500  # or the comparison says little


@pytest.mark.parametrize("separator", ["\n", "\n\n\n", " \n ", "\n \n", "  "])
def test_other_separators(separator):
    pieces = token_bytes(byte_level(), len(byte_level()))
    tokens = random_tokens(byte_level(), pieces, 1000, 16, (".", separator, ".\n" + separator))
    expected = oracle_marks(
        functools.partial(ends_step, separator=separator.encode()), pieces, tokens
    )
    np.testing.assert_array_equal(
        device_marks(step_automaton(separator).lift(pieces), tokens), expected
    )
    assert expected.sum() > 200


# Cases written out
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("It is 5.\n\n", True),
        ("Is it?\n\n", True),
        ("It is!\n\n", True),
        ("It is 5.\n", False),
        ("", False),
        ("\n\n", False),
        ("It is:\n\n", False),
        ("It is,\n\n", False),
        ("It is;\n\n", False),
        ("It is\n\n", False),
        ("It. is\n\n", False),
        ("(It is.)\n\n", True),
        ("**It is.**\n\n", True),
        ("\"It is.'\n\n", True),
        ("“It is.”\n\n", True),
        ("« Oui.\u00a0»\n\n", True),
        ("« Oui.\u202f»\n\n", True),
        ("Oui.\u2003\n\n", True),
        ("Oui.\u200b\n\n", False),
        ("It is. \t \n\n", True),
        ("It is.\n \n", False),
        ("It is.\n\n\n", True),
        ("It is:\n\n.\n\n", True),
        ("好。\n\n", True),
        ("好、\n\n", False),
        ("ठीक।\n\n", True),
        ("نعم؟\n\n", True),
        ("And so on…\n\n", True),
        ("（好。）\n\n", True),
        ("```\na.\n\nb.\n\n", False),
        ("```\na\n```\n\n", True),
        ("  ```py\na\n  ```  \n\n", True),
        ("```\na\n````\n\n", True),
        ("```\na\n```\nSo:\n\n", False),
        ("```\na\n``` and so\n\n", False),
        ("```\na ```\nb.\n\n", False),
        ("a ```\nb.\n\n", True),
        ("```x``` is code.\n\n", True),
        ("``\na.\n\n", True),
        ("~~~\na.\n\n", False),
        ("~~~\na\n~~~\n\n", True),
        ("  ~~~ py `x` ~~~\na.\n\n", False),
        ("~~~\na\n~~~~ \n\n", True),
        ("~~\na.\n\n", True),
        ("a ~~~\nb.\n\n", True),
        ("~~~\na\n~~~\nSo:\n\n", False),
        ("```\n~~~\na.\n\n", False),
        ("```\n~~~\n```\n\n", True),
        ("~~~\n```\na.\n\n", False),
        ("~~~\n```\n~~~\n\n", True),
        ("$$\nx = 1.\n\n", False),
        ("$$\nx = 1.\n\n$$\n\n", True),
        ("$$x$$\n\n", True),
        ("So $$x$$ is it\n\n", False),
        ("$$x$$,\n\n", False),
        ("So $$x$$ is it.\n\n", True),
        ("It costs $$ a lot.\n\n", False),
        ("$x.\n\n", True),
        ("$\n$x.\n\n", True),
        ("$$$x.\n\n", False),
        ("$$$$\n\n", True),
        ("$$x$$$\n\n", False),
        ("$$x$$ $$y.\n\n", False),
        ("**$$x$$**\n\n", True),
        (r"\$$x." "\n\n", True),
        (r"\$\$x." "\n\n", True),
        (r"\\$$x." "\n\n", False),
        (r"$$x\$$y." "\n\n", False),
        (r"$$x\\$$" "\n\n", True),
        ("`$$` is the process.\n\n", True),
        ("`` $$ `` is it.\n\n", True),
        ("a ````$$```` b.\n\n", True),
        ("``x`` $$y.\n\n", False),
        ("`$$\nx.\n\n", True),
        ("`a\n$$x.\n\n", False),
        (r"\`$$x." "\n\n", False),
        (r"`\`$$x." "\n\n", False),
        ("```$$``` is it.\n\n", True),
        ("$$`x`$$\n\n", True),
        ("$$`$$\n\n", True),
        ("```\n$$\n```\n\n", True),
        ("~~~\n$$\n~~~\n\n", True),
        ("$$\n```\n$$\n```\n\n", False),
        ("$$\n```\n$$\n```\n$$\n\n", True),
        ("好。$$x。\n\n", False),
        ("`a。\n\n", True),
    ],
)
def test_ends_of_steps(text, ends):
    assert steps().read(text.encode())[1] == ends_step(text.encode()) == ends


@given(
    st.lists(
        st.sampled_from(["$", "$$", "`", "```", "~~~", "\\", "\n", "\n\n", ".", "。", "x", " "]),
        max_size=14,
    ).map("".join)
)
def test_ends_of_steps_in_any_text(text):
    assert ends_with_mark(steps(), text) == ends_step(text.encode())


def ends_with_mark(automaton: ByteAutomaton, text: str) -> bool:
    """Returns whether the last byte marks."""
    state, _ = automaton.read(text.encode()[:-1])
    return automaton.read(text.encode()[-1:], state)[1]


def test_a_step_ends_at_the_byte_that_completes_the_separator():
    automaton = step_automaton()
    state, marked = automaton.read(b"It is.\n")
    assert not marked and automaton.read(b"\n", state)[1]
    assert not automaton.read(b"\n")[1]  # a new step starts at the start state


@pytest.mark.parametrize(
    ("text", "closes"),
    [
        (r"\boxed{5}", True),
        (r"\boxed{5", False),
        (r"\boxed{}", False),
        (r"\boxed{ }", False),
        (r"\boxed{\frac{1}{2}}", True),
        (r"\boxed{\frac{1}{2}", False),
        (r"\boxed{\{1\}", False),
        (r"\boxed{\{1\}}", True),
        (r"\boxed{1\\}", True),
        (r"\boxed{\}}", True),
        (r"boxed{5}", False),
        (r"\boxed 5}", False),
        (r"\\boxed{5}", True),
        (r"\boxed{\boxed{5}", True),
        (r"\boxed{a \boxed{} }", False),
        (r"\boxed{" + "{" * 15 + "5" + "}" * 16, True),
        (r"\boxed{" + "{" * 16 + "5" + "}" * 17, False),
        (r"\boxed{" + "{" * 16 + r"\boxed{5}", True),
    ],
)
def test_boxes(text, closes):
    assert box_automaton().read(text.encode())[1] == closes
    assert any(closes_box(text.encode()[:n]) for n in range(len(text) + 1)) == closes


@pytest.mark.parametrize(
    ("text", "closes"),
    [
        ("```\na\n```", True),
        ("```python\na\n", False),
        ("```python\na\n  ```", True),
        ("```", False),
        ("```a```", False),
        ("```\n```", True),
        ("```\na ```", False),
        ("~~~\na\n~~~", True),
        ("~~~\na\n```", False),
        ("```\na\n~~~", False),
        ("~~~~\n\t~~~", True),
        ("~~~", False),
        ("~~~ `x`\n~~~", True),
        ("$$\n```\nx\n```", True),
    ],
)
def test_code_blocks(text, closes):
    assert code_automaton().read(text.encode())[1] == closes


def test_code_that_goes_on_inside_a_block():
    automaton = code_automaton()
    inside, _ = automaton.read(b"So:\n```python\n")
    assert automaton.read(b"print(1)\n```", inside)[1] and not automaton.read(b"print(1)\n```")[1]


# Bytes of tokens
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_of_tokens_spell_what_the_tokenizer_decodes(name):
    tokenizer, draw = TOKENIZERS[name](), random.Random(1)
    pieces = token_bytes(tokenizer, len(tokenizer) + SPARE)
    assert pieces[-SPARE:] == [b""] * SPARE and len(pieces) == len(tokenizer) + SPARE
    for _ in range(300):
        text = "".join(draw.choice([*FRAGMENTS, *LINES]) for _ in range(8))
        tokens = tokenizer.encode("x" + text, add_special_tokens=False)
        assert b"".join(pieces[token] for token in tokens).lstrip(b" ") == b"x" + text.encode()
    for _ in range(300):
        tokens = [draw.randrange(len(tokenizer)) for _ in range(8)]
        try:
            spelled = b"".join(pieces[token] for token in tokens).decode()
        except UnicodeDecodeError:
            continue
        # A SentencePiece-style decoder takes one space from the beginning of a whole text.
        assert spelled.removeprefix(" ") == tokenizer.decode(
            tokens, skip_special_tokens=True
        ).removeprefix(" ")


def test_special_tokens_add_nothing_and_other_added_tokens_their_text():
    tokenizer = byte_level()
    pieces = token_bytes(tokenizer, len(tokenizer))
    assert pieces[tokenizer.convert_tokens_to_ids("<|end|>")] == b""
    assert pieces[tokenizer.convert_tokens_to_ids("<think>")] == b"<think>"
    assert pieces[tokenizer.convert_tokens_to_ids("</think> .\n")] == b"</think> .\n"
    pieces = token_bytes(sentence_piece(), len(sentence_piece()))
    assert pieces[sentence_piece().convert_tokens_to_ids("<0x0A>")] == b"\n" and pieces[1] == b""


def test_every_byte_has_a_token():
    for make in (byte_level, sentence_piece):
        assert {bytes([byte]) for byte in range(256)} <= set(token_bytes(make(), len(make())))


def test_tokenizers_that_work_on_words():
    assert token_bytes(word_piece(), 7) == [b"", b" a", b" b", b"b", b" .", b"ing", b""]


@pytest.mark.parametrize(
    ("decoder", "space", "newline"),
    [
        (decoders.Metaspace(), b" a", b"<0x0A>"),
        (
            decoders.Sequence(
                [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]
            ),
            b" a",
            b"\n",
        ),
        (decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.Fuse()]), b" a", b"<0x0A>"),
        (None, " ▁a".encode(), b" <0x0A>"),
    ],
)
def test_other_decoders(decoder, space, newline):
    tokenizer = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("b", -1.0), ("▁a", -1.0), ("<0x0A>", -1.0)], unk_id=0)
    )
    if decoder:
        tokenizer.decoder = decoder
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 4)[2:] == [
        space,
        newline,
    ]


def test_separators_that_a_tokenizer_can_represent():
    for make in TOKENIZERS.values():
        check_separator("\n\n", make(), token_bytes(make(), len(make())))
    with pytest.raises(ValueError, match=r"cannot represent the separator '\\n\\n'"):
        check_separator("\n\n", word_piece(), token_bytes(word_piece(), 6))


@pytest.mark.parametrize("separator", ["", "\n-\n", "###", "\u3000"])
def test_separators_that_are_not_whitespace(separator):
    with pytest.raises(ValueError, match="it must be whitespace"):
        step_automaton(separator)


def test_a_tokenizer_of_another_kind():
    with pytest.raises(ValueError, match="the tokenizer is a object, whose tokens"):
        token_bytes(object(), 4)  # pyright: ignore[reportArgumentType]
