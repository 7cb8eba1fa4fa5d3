"""The texts of a session: prompts in several chat templates, examples, and JSON."""

import dataclasses
import functools
import json
import random
import re
import shutil

import jax
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jaxshare import models
from jaxshare.models import ConfigError
from jaxshare.serving.cli import demo
from jaxshare.serving.evaluation import arithmetic
from jaxshare.serving.workers.prompts.format import COLLABORATIVE, PLAIN, Format, collaborative

NAMES = ("Alice", "Bob", "Carol", "Dave", "Eve", "Frank")
GROUPS = [NAMES[:2], NAMES[:3], NAMES, ("Zoë", "Bob")]
TURN = "{{ '<|' + m.role + '|>' + m.content }}"
ALLOWS = "{% for m in messages %}" + TURN + "{% endfor %}<|assistant|>"
REFUSES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% "
    "endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}<|assistant|>"
)
DROPS = "{% for m in messages if m.role != 'system' %}" + TURN + "{% endfor %}<|assistant|>"
TEMPLATES = {"allows": ALLOWS, "refuses": REFUSES, "drops": DROPS}
PROBLEM = "What is {count} times {names}? Put <think> into \\boxed{}."


def tokenizer(template: str | None = ALLOWS, thinks: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level, with tokens for runs of # and, with `thinks`, for the ends of a think block."""
    vocab = {
        token: i
        for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "##", "###", "Ġ#"])
    }
    made = Tokenizer(BPE(vocab, [("#", "#"), ("##", "#"), ("Ġ", "#")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens(
        [AddedToken(text, special=False) for text in ("<think>", "</think>")] if thinks else []
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=template
    )


@functools.cache
def embedded():
    return demo.load_embedded()


def quoted_out(text: str) -> str:
    return re.sub(r'"[^"\n]*"|\([^()\n]*"\)', "", text)


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("names", [NAMES[:1], *GROUPS])
def test_the_prompt_holds_instructions_problem_think_and_header_in_this_order(kind, names):
    told = COLLABORATIVE.instructions(names)
    roles = (
        f"<|system|>{told}<|user|>{PROBLEM}" if kind == "allows" else f"<|user|>{told}\n\n{PROBLEM}"
    )
    assert (
        COLLABORATIVE.prompt(tokenizer(TEMPLATES[kind]), PROBLEM, names)
        == f"{roles}<|assistant|><think>\n### Past steps"
    )
    in_user = dataclasses.replace(COLLABORATIVE, in_system_role=False).prompt(
        tokenizer(TEMPLATES[kind]), PROBLEM, names
    )
    assert in_user == f"<|user|>{told}\n\n{PROBLEM}<|assistant|><think>\n### Past steps"


@pytest.mark.parametrize(
    ("template", "thinks", "end"),
    [
        (ALLOWS, True, "<|assistant|><think>\n### Past steps"),
        (ALLOWS, False, "<|assistant|>### Past steps"),
        (ALLOWS + "<think>\n", True, "<|assistant|><think>\n### Past steps"),
        (ALLOWS + "<think>", True, "<|assistant|><think>\n### Past steps"),
        (ALLOWS + "<think>\n\n", False, "<|assistant|><think>\n### Past steps"),
        (
            ALLOWS + "<think>\n\n</think>\n\n{{ '' }}",
            True,
            "<|assistant|><think>\n\n</think>\n\n### Past steps",
        ),
        (None, True, f"{PROBLEM}\n\n### Past steps"),
    ],
)
def test_one_think_block_is_opened_where_the_model_knows_them(template, thinks, end):
    prompt = COLLABORATIVE.prompt(tokenizer(template, thinks), PROBLEM, NAMES[:2])
    assert prompt.endswith(PROBLEM + end.removeprefix(PROBLEM))
    assert PLAIN.prompt(tokenizer(template, thinks), PROBLEM, NAMES[:1]).endswith(
        end.removesuffix("### Past steps")
    )


def test_plain_is_the_problem_alone():
    assert (
        PLAIN.prompt(tokenizer(), PROBLEM, NAMES[:1]) == f"<|user|>{PROBLEM}<|assistant|><think>\n"
    )
    assert PLAIN.prompt(tokenizer(None), PROBLEM, NAMES[:1]) == f"{PROBLEM}\n\n"
    assert (
        PLAIN.opening("Alice", 1, names=NAMES[:2], ask=True) == ""
        and PLAIN.forbidden_tokens(tokenizer()) == ()
    )
    assert (PLAIN.finisher, PLAIN.code_finisher) == (
        COLLABORATIVE.finisher,
        COLLABORATIVE.code_finisher,
    )
    plain_text = COLLABORATIVE.prompt(tokenizer(None), PROBLEM, NAMES[:2])
    assert plain_text == f"{COLLABORATIVE.instructions(NAMES[:2])}\n\n{PROBLEM}\n\n### Past steps"


@pytest.mark.parametrize("person", ["first", "second"])
@pytest.mark.parametrize("names", GROUPS)
def test_instructions_name_everybody_and_nobody_else(names, person):
    text = collaborative(person).instructions(names)
    assert f"one of {len(names)} assistants, {', '.join(names[:-1])} and {names[-1]}, who" in text
    assert {name for name in re.findall(r"\*\*(\w+) \[\d+\]:\*\* ", text)} == set(names)
    assert not {"Alice", "Bob", "Carol"} - set(names) & set(re.findall(r"\w+", text))
    # every placeholder has been filled
    assert {braces for braces in re.findall(r"\{[^{}]*\}", text)} == {"{answer}", "{120}"}
    assert "\n\n\n" not in text and text == text.strip()


@pytest.mark.parametrize("names", GROUPS)
def test_examples_show_the_page_as_the_cache_does(names):
    form = collaborative("second")
    examples = re.findall(r"<example>\n(.*?)\n</example>", form.instructions(names), re.DOTALL)
    assert len(examples) >= 6
    for example in examples:
        page = re.sub(r"^Problem: .*\n\n", "", example)
        above, own = page.split(form.own_header)  # the mark ends the last step of others directly
        history, others = re.fullmatch(
            f"(.*?)(?:^|\n\n){re.escape(form.others_header.strip())}(.*)", above, re.DOTALL
        ).groups()
        assert history.startswith(form.history_header) or not history
        split = [
            re.findall(r"\n\n\*\*(\w+) \[(\d+)\]:\*\* (?=\S)", part)
            for part in (history, others, own)
        ]
        # a step is a paragraph
        assert [part.count("\n\n") for part in (history, others, own)] == [
            len(steps) for steps in split
        ]
        author = split[2][0][0]
        assert (
            len(split[2]) == 1
            and [name for name, _ in split[1]] == [n for n in names if n in dict(split[1])] != []
        )
        assert author not in dict(split[1])
        assert all(step[-1] in ".?" for step in history.split("\n\n")[1:]) and not re.search(
            r"[.?]($|\n)", others
        )
        for name in names if "Problem: " in example else ():
            numbers = [int(number) for part in split for who, number in part if who == name]
            assert numbers == list(range(1, len(numbers) + 1))
    full = max(examples, key=len)
    assert set(re.findall(r"\*\*(\w+) \[", full)) == set(names)
    for header in (form.opening(names[0], 3), form.opening(names[1], 2)):
        assert f"\n\n{header}" in full
    assert (
        form.opening(names[0], 7, ask=True) in "".join(examples)
        and form.opening(names[0], 1, names=names) in full
    )


def test_the_sums_in_the_examples_are_right():
    text = COLLABORATIVE.instructions(NAMES[:3])
    sums = re.findall(
        r"(?<![-+·/] )(?<!\d)((?:\d+ [-+·/] )*\d+) = ((?:\d+ [-+·/] )*\d+)(?![\w²])", text
    )
    assert len(sums) >= 9
    for left, right in sums:
        assert eval(left.replace("·", "*")) == eval(right.replace("·", "*")), (left, right)
    cubes = [n**3 % 7 for n in range(1, 41)]
    assert (
        "leave 1, 1, 6, 1, 6, 6 and 0" in text
        and cubes[:7] == [1, 1, 6, 1, 6, 6, 0]
        and f"\\boxed{{{sum(cubes)}}}" in text
    )


def test_first_person_says_i_and_second_person_says_you():
    for person, own, other in (
        ("first", r"\b(I|my|me)\b", r"\byou(rs?|rself)?\b"),
        ("second", r"\byou(rs?|rself)?\b", r"\b(I|my|me)\b"),
    ):
        for text in (
            collaborative(person, examples=False).instructions(NAMES),
            collaborative(person).instructions(NAMES[:1]),
        ):
            assert len(re.findall(own, quoted_out(text), re.IGNORECASE)) >= 3 and not re.search(
                other, quoted_out(text), re.IGNORECASE
            )


def test_suggestions_and_examples_can_be_left_out():
    texts = {
        (s, e): collaborative(suggestions=s, examples=e).system
        for s in (True, False)
        for e in (True, False)
    }
    titles = {
        key: re.findall("^#+ (.*)$", text.split("<example>")[0], re.MULTILINE)
        for key, text in texts.items()
    }
    both = ["Working together", "How the page works", "Ways to share the work", "Examples"]
    assert titles[True, True] == both and titles[False, True] == [*both[:2], both[3]]
    assert titles[True, False] == [*both[:3], "The problem"] and titles[False, False] == [
        *both[:2],
        "The problem",
    ]
    assert "<example>" in texts[False, True] and "<example>" not in texts[True, False]


def test_openings():
    form = COLLABORATIVE
    assert form.opening("Bob", 2) == form.opening("Bob", 2, names=NAMES) == "**Bob [2]:** "
    assert form.opening("Bob", 1) == form.opening("Bob", 1, names=("Bob",)) == "**Bob [1]:** "
    assert (
        form.opening("Alice", 1, names=NAMES)
        == "**Alice [1]:** Hi, I'm Alice. My proposal for sharing the work:"
    )
    assert form.opening("Dave", 1, names=NAMES) == "**Dave [1]:** Hi, I'm Dave."
    assert (
        form.opening("Bob", 9, names=NAMES, ask=True)
        == "**Bob [9]:** Quick check: am I doing redundant work? (yes/no): "
    )


def test_finishers_open_what_the_answer_closes():
    for form in (COLLABORATIVE, PLAIN):
        assert form.finisher.startswith(form.separator) and form.finisher.endswith("\\boxed{")
        assert form.code_finisher.startswith(form.separator) and form.code_finisher.endswith(
            "\n```python\n"
        )


@pytest.mark.parametrize("thinks", [True, False])
def test_forbidden_tokens_are_those_that_read_as_a_forbidden_text(thinks):
    made = tokenizer(thinks=thinks)
    texts = {"#", "##", "###", "</think>", "<s>", "</s>"}
    expected = [i for i in range(len(made)) if made.decode([i]) in texts]
    assert list(COLLABORATIVE.forbidden_tokens(made)) == expected and len(expected) == (
        6 if thinks else 5
    )


def test_a_format_survives_json():
    for form in (COLLABORATIVE, PLAIN, collaborative("first", suggestions=False)):
        assert Format.from_json(json.loads(json.dumps(dataclasses.asdict(form)))) == form
    assert Format.from_json({"system": "a", "system_alone": "b"}) == Format("a", "b")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"system": "a"}, "workers.json lacks system_alone"),
        (
            {"system": "a", "system_alone": 3},
            "workers.json: system_alone is 3, but must be a string",
        ),
        (
            {"system": "a", "system_alone": "b", "in_system_role": "yes"},
            'in_system_role is "yes", but must be true or false',
        ),
        (
            {"system": "a", "system_alone": "b", "forbidden": "#"},
            'forbidden is "#", but must be a list',
        ),
        (
            {"system": "a", "system_alone": "b", "forbidden": ["#", 1]},
            "forbidden is .* list of strings",
        ),
        (
            {"system": "a", "system_alone": "b", "heading": ""},
            "workers.json has heading, which no .* uses; its fields are system, ",
        ),
    ],
)
def test_bad_workers_json(values, words):
    with pytest.raises(ConfigError, match=words):
        Format.of(dataclasses.replace(embedded(), workers=values))


def test_bad_input():
    with pytest.raises(ValueError, match="there are no names; give at least one"):
        COLLABORATIVE.prompt(tokenizer(), PROBLEM, ())
    with pytest.raises(ValueError, match="person is 'third'"):
        collaborative("third")


def test_a_model_without_texts_of_its_own_gets_the_collaborative_ones(tmp_path):
    shutil.copytree(models.EMBEDDED, tmp_path / "model")
    (tmp_path / "model" / "workers.json").unlink()
    assert models.load(tmp_path / "model").workers is None
    assert Format.of(models.load(tmp_path / "model")) is COLLABORATIVE
    (tmp_path / "model" / "workers.json").write_text('{"system": "a", "system_alone": "b"}')
    assert Format.of(models.load(tmp_path / "model")) == Format("a", "b")
    (tmp_path / "model" / "workers.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"workers\.json must hold one JSON object"):
        models.load(tmp_path / "model")


def test_the_embedded_model_gets_the_texts_it_learned():
    form, problem = Format.of(embedded()), arithmetic.make_problem(random.Random(5))
    for names in (("Alice",), ("Alice", "Bob")):
        learned = embedded().tokenizer.apply_chat_template(
            problem.messages(names), tokenize=False, add_generation_prompt=True
        )
        assert form.prompt(embedded().tokenizer, problem.prompt(), names) == learned
        assert form.opening("Bob", 1, names=names) == arithmetic.header("Bob", 1)
    assert form.separator == arithmetic.SEPARATOR and not form.others_header and not form.own_header
    assert form.question == " Am I redundant?" and form.forbidden_tokens(embedded().tokenizer) == ()


def test_the_embedded_model_answers_when_it_is_cut_short():
    form, loaded = Format.of(embedded()), embedded()
    causal = jax.jit(lambda params, tokens: loaded.module.apply(params, tokens, method="causal"))
    for seed in range(8):
        problem = arithmetic.make_problem(random.Random(seed))
        written = "".join(
            f"\n\n{arithmetic.header('Alice', i)}{problem.body(i)}" for i in range(1, 6)
        )
        prompt = loaded.tokenizer.encode(
            form.prompt(loaded.tokenizer, problem.prompt(), ("Alice",)) + written + form.finisher
        )
        answer = loaded.tokenizer.encode(", ".join(map(str, problem.answers)) + "}")
        padded = np.zeros((1, 512), np.int32)
        padded[0, : len(prompt + answer)] = prompt + answer
        likeliest = np.asarray(causal(loaded.params, padded))[0].argmax(axis=-1)
        # Each token is the likeliest after those before it, so this is what greedy decoding writes.
        assert likeliest[len(prompt) - 1 : len(prompt + answer) - 1].tolist() == answer
