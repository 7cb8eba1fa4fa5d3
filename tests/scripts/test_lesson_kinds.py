"""Lessons beside sessions of workers: other requests, and the stages of Skeleton-of-Thought."""

import dataclasses
import random
import re

import pytest

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, load
from jaxshare.serving.evaluation import streams
from jaxshare.serving.evaluation.arithmetic import refusal
from scripts.train import lessons, sessions, teacher, train_workers
from scripts.train.other_requests import HELD_OUT, sample_request


@pytest.fixture(scope="module")
def model():
    return load(EMBEDDED)


@pytest.fixture(scope="module")
def script(model):
    format = train_workers.teaching_format(model)
    return teacher.Script.of(model.tokenizer, 402, model.generation, format)


@pytest.fixture(scope="module")
def requests():
    rng = random.Random(0)
    return [sample_request(rng) for _ in range(3000)]


def test_other_requests_ask_for_no_sum(requests):
    """Nothing that a person could mean as a sum, a difference or a product of two numbers."""
    for text in requests:
        assert not re.search(r"\d ?[-+*] ?\d|\d x \d|\d (plus|minus|times) \d", text), text
        assert text.strip() and "{" not in text
    assert len({*requests}) > 2000


def test_requests_of_the_evaluation_are_in_no_lesson(requests):
    lessons_of = {text.lower().rstrip("?.") for text in requests}
    assert len({*HELD_OUT}) == 30 and not {t.lower().rstrip("?.") for t in HELD_OUT} & lessons_of


def test_other_requests_are_answered_with_one_sentence(script):
    """The session that `chat` trains on has the sentence alone as its answer, and then its end."""
    lesson = sessions.chat(script, [("Hello", refusal())])
    [*written, end] = lesson.targets.tolist()
    assert script.codec.decode(written) == "\n\nAlice 1: I can only add, subtract and multiply."
    assert end == script.end


def stages(script):
    """A lesson of each of the three stages: of its tokens, the text, and what is learned of it."""
    found, rng = {}, random.Random(0)
    while len(found) < 3:
        lesson = lessons._skeleton(script, rng)
        text = script.codec.decode(lesson.trace.tokens.tolist())
        kind = "Do not solve" in text, "has been divided" in text, "one by one" in text
        found[kind.index(True)] = text, script.codec.decode(lesson.targets.tolist())
    return [found[i] for i in range(3)]


@pytest.mark.slow
def test_stages_of_a_skeleton_are_learned_as_its_sessions_ask_for_them(script, model):
    """Against the prompt and the opening of a session of the baseline itself."""
    stage = stages(script)
    for (text, learned), header in zip(stage, ("1.", "{name}\n", ""), strict=True):
        message = text.partition("user\n")[2].rpartition("\nassistant")[0]
        title = text.rpartition("assistant\n\n\n")[2].partition("\n")[0]
        names = (title if header == "{name}\n" else "stage",)
        format = streams.lone_format(model, None, None)
        format = dataclasses.replace(format, step_header=header) if header else format
        with streams.independent_streams(
            model, message, names, format, budget=8, sampler=Sampler(0.0), record=True
        ) as session:
            for _ in session.stream(1):
                pass
            fed = script.codec.decode(session.trace.tokens.tolist())
        assert fed.startswith(text.removesuffix(learned))
    outline, thread, main = (learned for _, learned in stage)
    assert [line.partition(". ")[0] for line in f"1.{outline}".splitlines()] == [
        *map(str, range(1, outline.count("\n") + 2))
    ]
    assert re.fullmatch(r" Question (\d+): .* Answer \1: (\d+)\. \\boxed\{\2\}", thread)
    assert re.fullmatch(r"\n\nAlice 1: \\boxed\{\d+(, \d+)+\}", main)
