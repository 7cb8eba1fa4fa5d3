"""The embedded model's problems, its tokenizer, and the samples it learned from. Oracles: Python's
own arithmetic, a scan of the text for equations, and a replay of what each worker could see."""

import dataclasses
import json
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxshare.serving.evaluation import arithmetic, arithmetic_forms
from jaxshare.serving.evaluation.arithmetic import (
    BOX,
    NAMES,
    WAIT,
    check,
    few_shot_messages,
    header,
    make_problem,
    next_move,
)
from scripts.train import embedded_data as data
from tests.paths import ROOT

EMBEDDED = ROOT / "models" / "embedded"
SEEDS = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def codec():
    return data.Codec(Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")))


@given(SEEDS)
def test_answers_are_what_the_prompt_asks(seed):
    problem = make_problem(random.Random(seed))
    lines = problem.prompt().splitlines()[1:]
    assert [line.split(".")[0] for line in lines] == ["1", "2", "3", "4", "5"]
    for line, answer in zip(lines, problem.answers, strict=True):
        left, right = map(int, re.findall(r"\d+", line)[1:])
        values = {"+": left + right, "-": left - right, "*": left * right}
        [operator] = {
            {"red": "+", "sold": "-", "boxes": "*"}.get(word, word) for word in line.split()
        } & set(values)
        assert answer == values[operator]
        assert answer >= 0


@given(SEEDS)
def test_every_equation_of_a_solution_holds(seed):
    problem = make_problem(random.Random(seed))
    text = problem.solution()
    equations = re.findall(r"([\d+*-]+)=(\d+)", text)
    assert len(equations) >= 10
    for expression, value in equations:
        # digits and operators alone: the pattern above lets nothing else in
        assert eval(expression) == int(value), expression
    for (number, written), answer in zip(
        re.findall(r"Answer (\d): (\d+)\.", text), problem.answers, strict=True
    ):
        low, high = re.search(
            rf"Question {number}: \S+\. \S+=(\d+),.*=(\d+)\. Answer", text
        ).groups()
        assert int(written) == answer == 10 * int(high) + int(low) % 10
    assert check(text, problem) == [True] * 5


def test_same_seed_same_problem_and_other_seeds_other_problems():
    assert make_problem(random.Random(3)) == make_problem(random.Random(3))
    assert len({make_problem(random.Random(seed)) for seed in range(200)}) == 200


def test_paragraphs_open_with_their_header_and_end_with_a_sentence():
    paragraphs = make_problem(random.Random(0)).solution().split(arithmetic.SEPARATOR)
    assert paragraphs[0] == ""
    for step, paragraph in enumerate(paragraphs[1:6], 1):
        assert paragraph.startswith(
            header("Alice", step) + f" Question {step}: "
        ) and paragraph.endswith(".")
    assert re.fullmatch(r"Alice 6: \\boxed\{\d+(, \d+){4}\}", paragraphs[6])


@pytest.mark.parametrize(
    ("name", "seen", "move"),
    [
        ("Alice", "", 1),
        ("Bob", "", 5),
        ("Alice", "Alice 1: Question 1: 2+2.", 2),
        ("Bob", "Alice 1: Question 1: 2+2.", 5),
        ("Alice", "Alice 1: Question", 1),
        ("Alice", "Bob 1: Question 1", 2),
        ("Bob", "Question 5: Question 4: ", 3),
        (
            "Alice",
            "".join(f"Question {n}: Answer {n}: 7." for n in (1, 2, 3, 4)) + "Question 5: 3",
            WAIT,
        ),
        (
            "Bob",
            "".join(f"Question {n}: Answer {n}: 7." for n in (1, 2, 3, 4))
            + "Question 5: 8*9 Answer 5: 7",
            WAIT,
        ),
        ("Bob", "".join(f"Question {n}: Answer {n}: 7." for n in (5, 1, 2, 4, 3)), BOX),
    ],
)
def test_rule_of_who_takes_what(name, seen, move):
    assert next_move(name, seen) == move


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("\\boxed{1, 2, 3, 4, 5}", [True] * 5),
        ("\\boxed{9}, then \\boxed{1,2,3,4,5}.", [True] * 5),
        ("\\boxed{1, 2, 0, 4}", [1, 1, 0, 1, 0]),
        ("\\boxed{1, 2, 3, 4, 5, 6}", [False] * 5),
        ("1, 2, 3, 4, 5", [False] * 5),
        ("\\boxed{1, 2, 3, 4, 5", [False] * 5),
        ("\\boxed{x, 2, , 4, 05}", [0, 1, 0, 1, 0]),
    ],
)
def test_check(text, right):
    problem = arithmetic.SumsProblem(
        tuple(arithmetic.Question("", n, "+", 0) for n in (1, 2, 3, 4, 5))
    )
    assert check(text, problem) == [bool(r) for r in right]


def test_messages():
    problem = make_problem(random.Random(1))
    assert [m["role"] for m in problem.messages()] == ["system", "user"]
    assert problem.messages(NAMES)[0]["content"] == "Alice and Bob work together."
    with pytest.raises(ValueError, match="Carol"):
        problem.messages(("Alice", "Carol"))
    chat = few_shot_messages([problem, problem], problem)
    assert [m["role"] for m in chat] == ["system", *["user", "assistant"] * 2, "user"]


@given(st.text())
def test_tokenizer_round_trips_any_text(text):
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokens_of_digits_and_separators(codec):
    for text in ("0123456789", "12 345", "7*6=42, 8", "\\boxed{10, 200}"):
        pieces = [codec.text([t]) for t in codec.encode(text)]
        assert [p for p in pieces if any(c.isdigit() for c in p)] == [
            c for c in text if c.isdigit()
        ]
    separator = codec.encode("\n\n")
    assert len(separator) == 1
    for before in ("5.", "assistant\n", "}", " word"):
        assert codec.encode(before + "\n\nAlice 2:") == codec.encode(
            before
        ) + separator + codec.encode("Alice 2:")
    assert codec.encode("Alice 2: Question 3: ") == codec.encode(header("Alice", 2)) + codec.encode(
        " Question 3: "
    )


def test_transformers_loads_the_tokenizer_and_the_chat_template(codec):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED)
    problem = make_problem(random.Random(2))
    for messages in (
        problem.messages(),
        problem.messages(NAMES),
        few_shot_messages([problem], problem),
    ):
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert ids == codec.chat(messages)
    assert tokenizer.eos_token_id == codec.end and tokenizer.pad_token_id == codec.pad
    assert (
        tokenizer.decode(tokenizer("héllo\n\n 12 😀 a.b , c").input_ids)
        == "héllo\n\n 12 😀 a.b , c"
    )


@pytest.mark.parametrize("seed", range(20))
def test_simulated_workers_keep_the_rule_and_reach_the_answer(codec, seed):
    rng = random.Random(seed)
    problem = make_problem(rng)
    views = data.simulate(codec, problem, rng)
    boxes = {codec.text(view.body) for view in views if data.is_box(codec, view.body)}
    assert boxes == {f" \\boxed{{{', '.join(map(str, problem.answers))}}}"}
    for view in views:
        seen = codec.text([*(t for p in view.history for t in p), *view.foreign])
        body = codec.text(view.body)
        assert codec.text(view.opening).startswith(f"\n\n{view.name} ")
        assert (
            0 <= view.written < len(view.body)
            and view.context[len(view.context) - view.written :] == view.body[: view.written]
        )
        if view.written == 0:
            move = next_move(view.name, seen)
            assert body.startswith(
                {BOX: " \\boxed{", WAIT: " I wait"}.get(move, f" Question {move}: ")
            )
        for paragraph in view.history:
            assert re.fullmatch(r"\n\n(Alice|Bob) \d+:.*\.", codec.text(paragraph))
        whole = [*view.prompt, *(t for p in view.history for t in p)]
        assert codec.encode(codec.text(whole)) == whole


@pytest.mark.parametrize("make", ["lone_sample", "view_sample", "few_shot_sample"])
def test_samples_learn_only_what_a_writer_writes(codec, make):
    rng = random.Random(5)
    for _ in range(20):
        tokens, weights = getattr(data, make)(
            codec, rng, *([1024] if make == "few_shot_sample" else [])
        )
        assert len(tokens) == len(weights) and set(weights) <= {0, 1, data.OWN} and weights[-1] > 0
        if make == "few_shot_sample":
            assert 600 <= len(tokens) <= 1024 and tokens.count(codec.end) >= 2 * 3 - 1
        learned = codec.text([t for t, w in zip(tokens, weights, strict=True) if w])
        assert "Solve" not in learned and "<|im_start|>" not in learned
    batch, mask = data.batch(codec, [([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1])], 4)
    np.testing.assert_array_equal(
        batch, [[5, 6, 7, codec.pad, codec.pad], [8, 9, codec.pad, codec.pad, codec.pad]]
    )
    np.testing.assert_array_equal(mask, [[1, 1, 0, 0], [1, 0, 0, 0]])
    with pytest.raises(ValueError, match="3 tokens does not fit 2"):
        data.batch(codec, [([5, 6, 7], [0, 1, 1])], 1)


def test_shipped_files():
    safetensors = pytest.importorskip("safetensors.numpy")
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) <= 12e6
    tensors = safetensors.load_file(EMBEDDED / "model.safetensors")
    assert 1e6 <= sum(t.size for t in tensors.values()) <= 5e6
    assert all(np.isfinite(t.astype(np.float32)).all() for t in tensors.values())
    config = json.loads((EMBEDDED / "config.json").read_text())
    assert config["vocab_size"] == tensors["model.embed_tokens.weight"].shape[0]
    assert config["num_key_value_heads"] < config["num_attention_heads"]


# other numbers of questions, and questions that go on from each other's answers


DEPENDENT = re.compile(r"(\d+)\. (twice )?the answer of (\d+), plus (\d+)")


def sampled_problem(seed: int, questions: int = 5):
    return make_problem(random.Random(seed), questions, dependent=True)


@given(SEEDS, st.integers(2, 10))
def test_dependent_questions_ask_for_what_their_answers_are(seed, questions):
    problem = sampled_problem(seed, questions)
    matches = [DEPENDENT.fullmatch(line) for line in problem.prompt().splitlines()[1:]]
    assert len(matches) == questions and sum(map(bool, matches)) == max(1, 2 * questions // 5)
    for match in filter(None, matches):
        number, twice, source, added = match.groups()
        assert not matches[int(source) - 1]  # it depends on an independent one
        assert problem.answers[int(number) - 1] == (2 if twice else 1) * problem.answers[
            int(source) - 1
        ] + int(added)


@given(SEEDS)
def test_every_equation_of_a_dependent_solution_holds_and_comes_after_what_it_needs(seed):
    problem = sampled_problem(seed)
    text, known = problem.solution(), {}
    for expression, value in re.findall(r"([\d+*-]+)=(\d+)", text):
        assert eval(expression) == int(value), expression  # digits and operators alone
    questions = dict(enumerate(problem.prompt().splitlines()[1:], 1))
    for number, source, expression, answer in re.findall(
        r"Question (\d): (?:Answer (\d): )?(\S+)\. .* Answer \1: (\d+)\.", text
    ):
        assert eval(expression) == int(answer) == problem.answers[int(number) - 1]
        match = DEPENDENT.fullmatch(questions[int(number)])
        assert source == (match[3] if match else "")
        if match:
            assert expression.split("+")[0] == known[match[3]]
        known[number] = answer
    assert len(known) == 5 and check(text, problem) == [True] * 5
    assert [header("Alice", i) in text for i in range(1, 7)] == [True] * 6


def test_a_dependent_question_is_worked_out_digit_by_digit():
    question = arithmetic.Dependent(2, 2, 7)
    assert question.text == "twice the answer of 2, plus 7" and question.value(84) == 175
    steps = "4+4=8, 8+8+0=16. 8+7=15, 6+0+1=7, 1+0+0=1."
    assert question.working(84) == f"Answer 2: 84+84+7. {steps}"
    assert arithmetic.Dependent(1, 1, 38).working(47) == "Answer 1: 47+38. 7+8=15, 4+3+1=8."


@pytest.mark.parametrize(
    ("name", "seen", "move"),
    [
        ("Alice", "", 2),
        ("Bob", "", 2),  # 1 and 3 wait for the answer of 2
        ("Alice", "Bob 1: Question 2: 3+4.", WAIT),
        ("Bob", "Question 2: Answer 2: 7.", 3),
        ("Alice", "Question 2: Answer 2: 7.", 1),
        ("Alice", "".join(f"Question {n}: Answer {n}: 7." for n in (2, 1, 3)), BOX),
    ],
)
def test_rule_of_who_takes_what_where_questions_depend(name, seen, move):
    problem = arithmetic.SumsProblem(
        (
            arithmetic.Dependent(2, 1, 5),
            arithmetic.Question("3 + 4", 3, "+", 4),
            arithmetic.Dependent(2, 2, 1),
        )
    )
    assert next_move(name, seen, problem) == move
    assert problem.answers == (12, 7, 15)


@pytest.mark.parametrize("seed", range(5))
def test_simulated_workers_solve_dependent_problems(codec, seed):
    rng = random.Random(seed)
    problem = make_problem(rng, dependent=True)
    views = data.simulate(codec, problem, rng)
    assert {codec.text(view.body) for view in views if data.is_box(codec, view.body)} == {
        problem.body(BOX)
    }


def test_problems_of_other_sizes():
    assert make_problem(random.Random(4)) == make_problem(random.Random(4), 5)
    assert [arithmetic.instruction(n)[56:] for n in (1, 2, 3, 5)] == [
        "\\boxed{answer1}:",
        "\\boxed{answer1, answer2}:",
        "\\boxed{answer1, ..., answer3}:",
        "\\boxed{answer1, ..., answer5}:",
    ]
    two = make_problem(random.Random(4), 2)
    assert check(f"\\boxed{{{two.answers[0]}, 1, 2}}", two) == [False, False] and check(
        two.solution(), two
    ) == [True, True]
    for questions, dependent in ((0, False), (11, False), (1, True)):
        with pytest.raises(ValueError, match=f"{questions}"):
            make_problem(random.Random(0), questions, dependent=dependent)
    with pytest.raises(
        ValueError,
        match="question 1 depends on the answer of 1, which is no independent question",
    ):
        arithmetic.SumsProblem((arithmetic.Dependent(1, 1, 1),))


@given(SEEDS, st.integers(1, 10))
def test_typed_problems_ask_what_they_answer_in_every_form(seed, count):
    """Read back from the message by the signs between numbers alone."""
    rng = random.Random(seed)
    for form in (*arithmetic_forms.FORMS.values(), arithmetic_forms.sample_form(rng)):
        problem = arithmetic.typed_problem(rng, count, form)
        text = problem.prompt().replace(
            "\\boxed{" + problem.prompt().partition("\\boxed{")[2].partition("}")[0] + "}", ""
        )
        for name, sign in (
            (" plus ", "+"),
            (" minus ", "-"),
            (" times ", "*"),
            (" x ", "*"),
            ("x", "*"),
        ):
            text = re.sub(rf"(?<=\d){name}(?=\d)", sign, text)
        text = re.sub(r"(\d+) red and (\d+) blue \w+", r"\1+\2", text)
        text = re.sub(r"(\d+) boxes of (\d+) \w+", r"\1*\2", text)
        text = re.sub(r"(\d+) \w+, (\d+) sold", r"\1-\2", text)
        sums = re.findall(r"(\d+) ?([-+*]) ?(\d+)", text)
        assert (
            tuple(
                {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
                for a, sign, b in sums
            )
            == problem.answers
        )
        assert min(problem.answers) >= 0 and check(problem.solution(), problem) == [True] * count
        for expression, value in re.findall(r"([\d+*-]+)=(\d+)", problem.solution()):
            assert eval(expression) == int(value), expression  # digits and operators alone


def test_forms_by_hand():
    problem = arithmetic.SumsProblem(
        tuple(arithmetic.Question(f"{n} + 8", n, "+", 8) for n in (1, 2, 3)),
        arithmetic_forms.FORMS["what is, one line"],
    )
    assert problem.prompt() == "What is 1 + 8, 2 + 8 and 3 + 8?"
    numbered = dataclasses.replace(problem, form=arithmetic_forms.FORMS["own sentence, numbered"])
    assert numbered.prompt() == "Solve these problems:\n1. 1 + 8\n2. 2 + 8\n3. 3 + 8"
    assert (
        dataclasses.replace(problem, form=arithmetic_forms.FORMS["close signs"]).prompt()
        == "1+8\n2+8\n3+8"
    )
    assert (
        dataclasses.replace(
            problem, questions=problem.questions[:1], form=arithmetic_forms.FORMS["what is"]
        ).prompt()
        == "What is 1 + 8?"
    )
