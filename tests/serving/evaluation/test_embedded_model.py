"""What the model that comes with the package can do, on problems and requests that no lesson has."""

import re

import pytest

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, load
from jaxshare.serving import generate
from scripts.bench import checking, collaboration
from scripts.papers.hogwild_cases import Evaluations
from scripts.train.other_requests import HELD_OUT


@pytest.fixture(scope="module")
def model():
    return load(EMBEDDED)


def asked(model, messages):
    """The answers to messages of chats, greedily."""
    prompts = [
        model.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        for message in messages
    ]
    made = generate(model, prompts, max_new_tokens=48, sampler=Sampler(0.0))
    return [completion.text for completion in made.completions]


def test_what_is_no_sum_is_answered_with_one_sentence(model):
    """Nine times in ten at least: models/embedded/README.md has the number."""
    sentence = "\n\nAlice 1: I can only add, subtract and multiply."
    answers = asked(model, HELD_OUT)
    assert answers.count(sentence) >= 0.9 * len(HELD_OUT), [*zip(HELD_OUT, answers, strict=True)]


def test_a_sum_as_a_person_types_it_is_answered(model):
    for message, answer in {"47 plus 38": "85", "What is 93 - 16?": "77", "12*7": "84"}.items():
        [text] = asked(model, [message])
        assert re.search(r"\\boxed\{(\d+)\}", text)[1] == answer, text


@pytest.mark.slow
def test_questions_that_use_another_answer_are_right(tmp_path):
    case = collaboration.CASES[collaboration.DEPENDENT]
    found = collaboration.evaluate(Evaluations(), case, "embedded", 40, tmp_path / "runs")
    for count, part in found.going_on.items():
        assert part >= collaboration.GOES_ON[count] - 0.07, count  # two deviations of 80 questions


@pytest.mark.slow
def test_errors_are_found_by_one_worker_and_mended_by_another(model):
    marks = [checking.run(model, checking.inject(seed), 2, checked=True) for seed in range(20)]
    assert sum(mark.mended for mark in marks) >= 13  # of 16 that are expected, less two deviations
    assert sum(mark.false_alarms for mark in marks) <= 2
