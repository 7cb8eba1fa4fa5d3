"""Presets with chat templates like those of each family, against prompts written by hand.

Also files, names, and the tokens that a session feeds against those of --show-prompt.
"""
# ruff: noqa: RUF001 - DeepSeek writes its special tokens with a bar of full width.

import dataclasses
import functools
import json
import re
import shutil

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jaxshare import models
from jaxshare.models import ConfigError
from jaxshare.serving.cli import demo, main
from jaxshare.serving.evaluation.baselines import sequential
from jaxshare.serving.workers.prompts.format import COLLABORATIVE, PLAIN, Format, collaborative
from jaxshare.serving.workers.prompts.presets import FORMATS, OPTIONS, format_named, format_of
from jaxshare.serving.workers.prompts.preview import prompt_view
from jaxshare.serving.workers.session import Workers
from tests.helpers import first_layers, folder_of_first_layers, mostly_slow

NAMES = ("Alice", "Bob", "Carol")
PROBLEM = "What is 12 * 7?"

# The template of each family, as far as it concerns instructions and a problem.
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\n' }}"
QWEN3 = (
    CHATML
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{{ "
    "'' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role == 'user' %}<｜User｜>{{ m.content }}{% endfor %}<｜Assistant｜>"
)
PHI = (
    "<|im_start|>system<|im_sep|>You are Phi. Answer as <think> {Thought} </think> "
    "{Solution}.<|im_end|>{% for m in messages if m.role == 'user' %}<|im_start|>user<|im_sep|>{{ "
    "m.content }}<|im_end|><|im_start|>assistant<|im_sep|>{% endfor %}"
)
LLAMA = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif "
    "%}{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: "
    "December 2023\nToday Date: {{ date_string }}\n\n{% if messages[0].role == 'system' %}{{ "
    "messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}<|eot_id|>{% for m "
    "in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim "
    "}}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n{{ '' }}"
)
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
DEEPSEEK_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
LLAMA_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)

HEADERS = {"#", "##", "###"}
THINKS = ("<think>", "</think>")


@functools.cache
def tokenizer(
    template: str, special: tuple[str, ...], thinks: bool, bos: str | None, eos: str
) -> PreTrainedTokenizerFast:
    """Byte-level, with tokens for runs of #, and the family's own."""
    vocab = {
        token: i
        for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "##", "###"])
    }
    made = Tokenizer(BPE(vocab, [("#", "#"), ("##", "#")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*special])
    made.add_tokens([AddedToken(text, special=False) for text in THINKS] if thinks else [])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=bos, eos_token=eos, chat_template=template
    )


QWEN = functools.partial(tokenizer, special=QWEN_TOKENS, thinks=True, bos=None, eos="<|im_end|>")
R1 = functools.partial(
    tokenizer, special=DEEPSEEK_TOKENS, thinks=True, bos=DEEPSEEK_TOKENS[0], eos=DEEPSEEK_TOKENS[1]
)
PHI4 = functools.partial(
    tokenizer, PHI, special=(*QWEN_TOKENS, "<|im_sep|>"), bos="<|endoftext|>", eos="<|im_end|>"
)
LLAMA3 = functools.partial(
    tokenizer, LLAMA, special=LLAMA_TOKENS, thinks=False, bos="<|begin_of_text|>", eos="<|eot_id|>"
)

QWEN_ENDS = {*HEADERS, "</think>", "<|im_end|>", "<|endoftext|>"}
IN_SYSTEM = "<|im_start|>system\n{told}<|im_end|>\n<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
IN_USER = "<|im_start|>user\n{told}\n\n{problem}<|im_end|>\n<|im_start|>assistant\n"
R1_USER = "<｜begin▁of▁sentence｜><｜User｜>{told}\n\n{problem}<｜Assistant｜>"
PHI_USER = (
    "<|im_start|>system<|im_sep|>You are Phi. Answer as <think> {{Thought}} </think> "
    "{{Solution}}.<|im_end|>"
    "<|im_start|>user<|im_sep|>{told}\n\n{problem}<|im_end|><|im_start|>assistant<|im_sep|>"
)
LLAMA_HEAD = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: "
    "December 2023\nToday Date: 26 Jul 2024\n\n"
)
LLAMA_TAIL = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_SYSTEM = (
    LLAMA_HEAD
    + "{told}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{problem}"
    + LLAMA_TAIL
)
LLAMA_USER = (
    LLAMA_HEAD
    + "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{told}\n\n{problem}"
    + LLAMA_TAIL
)

CASES = [  # name, tokenizer, text before the history's header, texts that no worker samples
    ("qwq", QWEN(CHATML + "<think>\n"), IN_SYSTEM + "<think>\n", QWEN_ENDS),
    ("qwq+user", QWEN(CHATML + "<think>\n"), IN_USER + "<think>\n", QWEN_ENDS),
    ("qwen3", QWEN(QWEN3), IN_SYSTEM + "<think>\n", QWEN_ENDS),
    ("qwen3+user", QWEN(QWEN3), IN_USER + "<think>\n", QWEN_ENDS),
    # as the Thinking models of July 2025
    ("qwen3", QWEN(CHATML + "<think>\n"), IN_SYSTEM + "<think>\n", QWEN_ENDS),
    ("qwen3-no-think", QWEN(QWEN3), IN_SYSTEM + "<think>\n\n</think>\n\n", {*QWEN_ENDS, "<think>"}),
    (
        "deepseek-r1",
        R1(DEEPSEEK),
        R1_USER + "<think>\n",
        {*HEADERS, "</think>", *DEEPSEEK_TOKENS[:2]},
    ),
    (
        "deepseek-r1",
        R1(DEEPSEEK + "<think>\n"),
        R1_USER + "<think>\n",
        {*HEADERS, "</think>", *DEEPSEEK_TOKENS[:2]},
    ),
    (
        "deepseek-r1+system",
        R1(DEEPSEEK + "<think>\n"),
        "<｜begin▁of▁sentence｜>{told}<｜User｜>{problem}<｜Assistant｜><think>\n",
        {*HEADERS, "</think>", *DEEPSEEK_TOKENS[:2]},
    ),
    ("phi-4-reasoning", PHI4(thinks=True), PHI_USER + "<think>\n", QWEN_ENDS),
    ("phi-4-reasoning", PHI4(thinks=False), PHI_USER + "<think>\n", QWEN_ENDS - {"</think>"}),
    (
        "llama-3",
        LLAMA3(),
        LLAMA_SYSTEM,
        {*HEADERS, "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"},
    ),
    (
        "llama-3+user",
        LLAMA3(),
        LLAMA_USER,
        {*HEADERS, "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"},
    ),
    ("collaborative", QWEN(QWEN3), IN_SYSTEM + "<think>\n", QWEN_ENDS - {"<|endoftext|>"}),
    (
        "collaborative+user",
        LLAMA3(),
        LLAMA_USER.replace("26 Jul 2024", "today"),
        {*HEADERS, "<|begin_of_text|>", "<|eot_id|>"},
    ),
]


@pytest.mark.parametrize("options", ["", "+first+no-examples", "+no-suggestions"])
@pytest.mark.parametrize(
    ("name", "made", "around", "ends"),
    CASES,
    ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)],
)
def test_the_exact_prompt_of_each_preset(name, made, around, ends, options):
    form = format_named(name + options)
    person = collaborative(
        "first" if "first" in options else "second",
        examples="no-examples" not in options,
        suggestions="no-suggestions" not in options,
    )
    for names in (NAMES[:1], NAMES[:2], NAMES):
        told = person.instructions(names)
        prompt = form.prompt(made, PROBLEM, names)
        prompt = re.sub(r"(?<=Today Date: )\d\d \w\w\w (?!2024)\d{4}", "today", prompt)
        assert prompt == around.format(told=told, problem=PROBLEM) + "### Past steps"
        assert prompt.count(told) == prompt.count(PROBLEM) == 1
    assert {made.convert_ids_to_tokens(token) for token in form.forbidden_tokens(made)} == ends
    tokens = [
        made.convert_ids_to_tokens(token) for token in made.encode(prompt, add_special_tokens=False)
    ]
    assert all(
        tokens.count(special) == prompt.count(special) for special in made.all_special_tokens
    )


def test_every_preset_has_a_case():
    assert {name.split("+")[0] for name, *_ in CASES} == {*FORMATS}


def test_the_llama_prompt_is_the_same_tomorrow():
    text = format_named("llama-3").prompt(LLAMA3(), PROBLEM, NAMES)
    assert "Today Date: 26 Jul 2024\n" in text
    # the date of the day
    assert "26 Jul 2024" not in COLLABORATIVE.prompt(LLAMA3(), PROBLEM, NAMES)


@pytest.mark.parametrize(
    ("think", "template", "thinks", "end"),
    [
        ("auto", CHATML, True, "assistant\n<think>\n"),
        ("auto", CHATML, False, "assistant\n"),
        ("always", CHATML, False, "assistant\n<think>\n"),
        ("always", CHATML + "<think>", False, "assistant\n<think>\n"),
        ("never", CHATML, True, "assistant\n"),
        ("never", CHATML + "<think>\n", True, "assistant\n<think>\n"),
        (
            "always",
            CHATML + "<think>\n\n</think>\n\n{{ '' }}",
            True,
            "assistant\n<think>\n\n</think>\n\n",
        ),
    ],
)
def test_who_opens_the_think_block(think, template, thinks, end):
    made = tokenizer(template, QWEN_TOKENS, thinks, None, "<|im_end|>")
    prompt = dataclasses.replace(COLLABORATIVE, think=think).prompt(made, PROBLEM, NAMES)
    assert prompt.endswith(end + "### Past steps") and prompt.count("<think>") == end.count(
        "<think>"
    )


def test_a_template_that_refuses_is_named():
    made = QWEN("{{ raise_exception('only tools here') }}")
    with pytest.raises(
        ValueError, match=r"the model's chat template refuses the prompt \(only tools here\)"
    ):
        COLLABORATIVE.prompt(made, PROBLEM, NAMES)


# names and files


def test_options_choose_the_texts():
    assert format_named("collaborative") == COLLABORATIVE
    assert format_named("collaborative+no-examples").system == collaborative(examples=False).system
    assert (
        format_named("qwen3+first+no-suggestions").system
        == collaborative("first", suggestions=False).system
    )
    assert (
        not format_named("collaborative+user").in_system_role
        and not format_named("deepseek-r1").in_system_role
    )
    assert format_named("collaborative+system") == COLLABORATIVE
    for name in FORMATS:
        assert Format.from_json(
            json.loads(json.dumps(dataclasses.asdict(format_named(name))))
        ) == format_named(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "qwen4",
            f"no preset and no file of this name; the presets are {', '.join(FORMATS)}, each with "
            "options such as collaborative\\+no-ex",
        ),
        (
            "qwen3+fast",
            "'qwen3\\+fast' has the option 'fast', which there is not; the options are "
            f"{', '.join(OPTIONS)}",
        ),
        ("qwen3+user+system", "into both messages"),
        (
            "phi-4-reasoning+system",
            "into the system message, which phi-4-reasoning has no use for; leave out \\+system",
        ),
        ("", "the format is ''"),
        (".", "the format is '.', but that is a folder"),
    ],
)
def test_names_that_there_are_not(name, words, capsys):
    with pytest.raises(ValueError, match=words):
        format_named(name)
    for command in (
        ("workers", "nowhere", "--problem", "x"),
        ("evaluate", "nowhere", "--task", "sums", "--budgets", "8", "--out", "o"),
    ):
        assert main.main([*command, "--format", name]) == 1
        assert re.search(words, capsys.readouterr().err)


def test_a_file_is_a_format(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(
        json.dumps(
            {
                "system": "{names} share.",
                "system_alone": "Alone.",
                "think": "never",
                "chat_template_kwargs": {"enable_thinking": False},
            }
        ),
        encoding="utf-8",
    )
    form = format_named(str(file))
    assert form == Format(
        "{names} share.", "Alone.", think="never", chat_template_kwargs={"enable_thinking": False}
    )
    assert format_named(str(file), plain=True) == form
    assert form.prompt(QWEN(QWEN3), PROBLEM, NAMES[:2]) == (
        IN_SYSTEM.format(told="Alice and Bob share.", problem=PROBLEM)
        + "<think>\n\n</think>\n\n### Past steps"
    )
    for more, words in (
        ('"think": "maybe"', 'think is "maybe", but it must be one of auto, always, never'),
        ('"chat_template_kwargs": []', "chat_template_kwargs is .* must be an object"),
        ('"chat_template_kwargs": {"tokenize": true}', "tokenize is set by the session"),
    ):
        file.write_text('{"system": "a", "system_alone": "b", ' + more + "}", encoding="utf-8")
        with pytest.raises(ConfigError, match=words):
            format_named(str(file))
    for text, words in (
        ("[]", "must hold one JSON object"),
        ('{"system": "a"}', r"own\.json lacks system_alone"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=words):
            format_named(str(file))


def test_files_of_before_are_read_as_they_were():
    old = dataclasses.asdict(COLLABORATIVE)
    del old["think"], old["chat_template_kwargs"]
    assert Format.from_json(json.loads(json.dumps(old))) == COLLABORATIVE
    embedded = json.loads((models.EMBEDDED / "workers.json").read_text())
    assert "think" not in embedded and Format.from_json(embedded).think == "auto"


def test_the_format_of_a_model():
    model = demo.load_embedded()
    assert format_of(model, None) == Format.of(model) != COLLABORATIVE
    assert (
        format_of(model, "collaborative+first") == collaborative("first")
        and format_of(model, PLAIN) is PLAIN
    )


def test_a_baseline_is_told_the_problem_alone_in_the_chat_of_the_family(monkeypatch):
    made = []

    def workers(model, problem, *, format, **_):
        made.append(format)
        raise ValueError("seen")

    monkeypatch.setattr("jaxshare.serving.evaluation.streams.Workers", workers)
    model = dataclasses.replace(demo.load_embedded(), workers=None)
    for chosen in ("qwen3-no-think", format_named("deepseek-r1"), "deepseek-r1+system"):
        with pytest.raises(ValueError, match="seen"):
            sequential(model, PROBLEM, budget=8, format=chosen)
    assert made[0].prompt(QWEN(QWEN3), PROBLEM, NAMES[:1]) == (
        f"<|im_start|>user\n{PROBLEM}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert made[1].prompt(R1(DEEPSEEK), PROBLEM, NAMES[:1]) == (  # a Format is used as it is
        R1_USER.format(told=COLLABORATIVE.instructions(("Alice",)), problem=PROBLEM) + "<think>\n"
    )
    assert (
        made[2].prompt(R1(DEEPSEEK), PROBLEM, NAMES[:1])
        == f"<｜begin▁of▁sentence｜><｜User｜>{PROBLEM}<｜Assistant｜><think>\n"
    )
    assert all(form.forbidden == () for form in made)


# --show-prompt


def show(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main.main(["workers", *arguments, "--problem", PROBLEM, "--show-prompt"])
    return code, *capsys.readouterr()


@pytest.fixture
def without_parameters(tmp_path):
    shutil.copytree(
        models.EMBEDDED, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    return str(tmp_path / "model")


def test_the_prompt_is_shown_without_the_parameters(without_parameters, capsys):
    code, out, err = show(capsys, without_parameters, "--json")
    assert code == 0 and err == ""
    shown = json.loads(out)
    prompt, made = (
        "<|im_start|>system\nAlice and Bob work together.<|im_end|>\n<|im_start|>user\nWhat is 12 "
        "* 7?<|im_end|>\n<|im_start|>assistant\n",
        demo.load_embedded().tokenizer,
    )
    assert list(shown["blocks"]) == ["history"] and shown["blocks"]["history"]["text"] == prompt
    assert shown["blocks"]["history"]["tokens"] == made.encode(prompt)
    assert "".join(shown["blocks"]["history"]["pieces"]) == prompt and shown["format"] is None
    assert {name: fed["text"] for name, fed in shown["workers"].items()} == {
        "Alice": "\n\nAlice 1:",
        "Bob": "\n\nBob 1:",
    }
    assert shown["sees"] == {
        "Alice": ["history", "Bob", "Alice"],
        "Bob": ["history", "Alice", "Bob"],
    }
    assert shown["forbidden"] == {"text": "", "tokens": [], "pieces": []}


def test_a_preset_is_shown_byte_for_byte(without_parameters, capsys):
    code, out, _ = show(
        capsys, without_parameters, "--format", "qwen3+user+no-examples", "--names", "Zoë,Bob,Carol"
    )
    told = collaborative(examples=False).instructions(("Zoë", "Bob", "Carol"))
    prompt = f"<|im_start|>user\n{told}\n\n{PROBLEM}<|im_end|>\n<|im_start|>assistant\n<think>\n### Past steps"
    assert code == 0
    parts = re.findall(r"^=== (.*?)\n(.*?)(?=\n\n=== |\n?\Z)", out, re.MULTILINE | re.DOTALL)
    titles, bodies = zip(*parts, strict=True)
    made = demo.load_embedded().tokenizer
    assert titles[0] == f"block 'history', the prompt: {len(made.encode(prompt))} tokens"
    text, tokens = bodies[0].split("\n--- as tokens\n")
    assert text == prompt
    pairs = re.findall(r"(\d+) (\"(?:[^\"\\]|\\.)*\")", tokens)
    assert [int(token) for token, _ in pairs] == made.encode(prompt) and max(
        map(len, tokens.split("\n"))
    ) <= 120
    assert (
        "".join(json.loads(piece) for _, piece in pairs if "\\\\x" not in piece) in prompt
        or "ë" in prompt
    )
    own = {
        title.split(":")[0]: body.split("\n--- as tokens\n")[0]
        for title, body in zip(titles[1:3], bodies[1:3], strict=True)
    }
    assert own == {
        'block "others\' header"': "\n\n### Work in progress (others)",
        "block 'own header'": "<...>\n\n### Work in progress (own)",
    }
    assert titles[3].startswith(
        "Zoë sees 'history', \"others' header\", 'Bob', 'Carol', 'own header', 'Zoë'; its first "
        "step "
    )
    assert bodies[3].startswith(
        "\n\n**Zoë [1]:** Hi, I'm Zoë. My proposal for sharing the work:\n--- as tokens\n"
    )
    assert bodies[5].startswith("\n\n**Carol [1]:** Hi, I'm Carol.\n--- as tokens\n")
    assert titles[6] == "tokens that no worker samples" and '"<|im_end|>"' in bodies[6]


@pytest.mark.parametrize(
    "arguments", [("--format", "nowhere"), ("--names", "A,A"), ("--layout", "ring")]
)
def test_mistakes_with_show_prompt(without_parameters, capsys, arguments):
    code, out, err = show(capsys, without_parameters, *arguments)
    assert code == 1 and out == "" and err.startswith("jaxshare: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("format", "layout"),
    mostly_slow(
        [(None, "combined"), ("collaborative+no-examples+no-suggestions", "contiguous")],
        several=True,
    ),
)
def test_a_session_feeds_what_is_shown(format, layout):
    model = first_layers(demo.load_embedded(), 1)
    if format:  # room for a prompt of the default format
        model = dataclasses.replace(
            model, config=dataclasses.replace(model.config, max_positions=8192)
        )
    view = prompt_view(
        model, PROBLEM, layout=layout, format=format_named(format) if format else None
    )
    session = Workers(model, PROBLEM, layout=layout, format=format, budget=8, record=True)
    trace = session.trace
    lengths = dict(zip(session.blocks, np.asarray(session.cache.lengths).tolist(), strict=True))
    assert {block: length for block, length in lengths.items() if length} == {
        block: len(fed.tokens) for block, fed in view.blocks.items()
    }
    assert trace.tokens.tolist() == [token for fed in view.blocks.values() for token in fed.tokens]
    tokens, count = session.pending()
    assert [row[:n].tolist() for row, n in zip(tokens, count, strict=True)] == [
        view.workers[name].tokens[:16] for name in session.names
    ]
    assert session.format == format_of(model, format)


def test_a_saved_session_goes_on_with_its_own_prompts(tmp_path, capsys):
    folder = folder_of_first_layers(tmp_path / "model", 1)
    file, command = (
        tmp_path / "own.json",
        ["workers", str(folder), "--problem", PROBLEM, "--budget", "8"],
    )
    saved = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "4", "--json"]
    texts = json.loads((models.EMBEDDED / "workers.json").read_text())
    file.write_text(
        json.dumps(texts | {"system": "{names} share.", "chat_template_kwargs": {"a": [1, None]}})
    )
    assert main.main([*command, *saved, "--format", str(file)]) == 0
    written = json.loads(capsys.readouterr().out)["workers"]
    for again in (["--format", str(file)], []):
        assert main.main([*command, *saved, *again, "--resume"]) == 0
        assert json.loads(capsys.readouterr().out)["workers"] == written
    assert main.main([*command, *saved, "--resume", "--format", "qwen3"]) == 1
    assert (
        "has other prompts than --format qwen3; give the same command, or another --checkpoint"
        in capsys.readouterr().err
    )


def test_the_list_of_presets(capsys):
    for command in ("workers", "evaluate"):
        with pytest.raises(SystemExit) as end:
            main.main([command, "--list-formats"])
        assert end.value.code == 0
        out = capsys.readouterr().out
        assert all(re.search(rf"^  {re.escape(name)} +\S", out, re.MULTILINE) for name in FORMATS)
        assert all(re.search(rf"^  \+{name} +\S", out, re.MULTILINE) for name in OPTIONS)
