"""Selection of completions, against every subset written out, and by hand."""

import itertools
import math
import random
from fractions import Fraction

import pytest

from jaxshare import FinishReason, models
from jaxshare.serving import generate
from jaxshare.serving.branches.selection import (
    best_of_n,
    by_prompt,
    majority_vote,
    mean_logprob,
    pass_at,
    pass_at_k,
)
from jaxshare.serving.engine.completion import Completion


def made(
    text: str = "",
    *,
    tokens: int = 1,
    logprob: float | None = -1.0,
    prompt: int = 0,
    index: int = 0,
):
    """A completion that selection reads."""
    return Completion(text, (7,) * tokens, FinishReason.STOP, logprob, prompt, index)


def test_by_prompt_is_in_order_of_prompt_and_index():
    completions = [made(prompt=p, index=i) for p in (0, 3, 11) for i in range(12)]
    random.Random(0).shuffle(completions)
    groups = by_prompt(completions)
    assert list(groups) == [0, 3, 11]
    assert [[c.index for c in group] for group in groups.values()] == [list(range(12))] * 3
    assert by_prompt([]) == {}


def test_the_majority_wins_and_texts_without_an_answer_have_no_vote():
    texts = [
        "none",
        r"\boxed{4}",
        r"first \boxed{4}, no: \boxed{ 5 }",
        r"\boxed{5}",
        "none",
        "none",
        "none",
    ]
    assert majority_vote([made(t) for t in texts]) == "5"
    assert (
        majority_vote([made(t) for t in (r"\boxed{1}", r"\boxed{2}", r"\boxed{2}", r"\boxed{1}")])
        == "1"
    )
    assert majority_vote([made("none")]) is None and majority_vote([]) is None
    assert (
        majority_vote([made("a b"), made("c b"), made("d e")], answer=lambda text: text.split()[-1])
        == "b"
    )


def test_the_best_is_likeliest_for_each_token():
    short, long, equal = (
        made("short", tokens=2, logprob=-3.0),
        made("long", tokens=8, logprob=-8.0),
        made("equal", tokens=1),
    )
    assert mean_logprob(long) == -1.0 and mean_logprob(short) == -1.5
    # the first of equals
    assert best_of_n([short, long, equal]) is long and best_of_n([short, equal, long]) is equal
    assert best_of_n([made("nothing", tokens=0, logprob=0.0), short]) is short
    assert best_of_n([short, long, equal], score=lambda c: -len(c.tokens)) is equal


def test_the_best_of_bad_input():
    with pytest.raises(ValueError, match="no completions to choose from; give at least 1"):
        best_of_n([])
    with pytest.raises(ValueError, match=r"the score of completions\[1\] is not a number"):
        best_of_n([made("a"), made("b")], score=lambda c: math.nan if c.text == "b" else 1.0)
    with pytest.raises(ValueError, match="completion 1 of prompt 0 has no log-probability"):
        best_of_n([made("a"), made("b", logprob=None, index=1)])


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_counts_the_subsets_with_a_right_one(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        assert pass_at_k(correct, n, k) == float(Fraction(sum(map(any, subsets)), len(subsets)))


@pytest.mark.parametrize(
    ("correct", "n", "k"),
    [
        (1, 5000, 1),
        (1, 5000, 2500),
        (2, 10_000, 3),
        (40, 4000, 100),
        (3999, 4000, 1),
        (7, 3000, 2993),
    ],
)
def test_pass_at_k_of_thousands(correct, n, k):
    # The same draws one after another: the first is wrong, and the second, and so on.
    wrong = math.prod(Fraction(n - correct - i, n - i) for i in range(k))
    assert pass_at_k(correct, n, k) == float(1 - wrong)


@pytest.mark.parametrize(
    ("correct", "n", "k", "words"),
    [
        (0, 4, 0, "k is 0 with 4 completions"),
        (0, 4, 5, "k is 5 with 4 completions"),
        (0, 0, 1, "k is 1 with 0 completions"),
        (-1, 4, 1, "correct is -1"),
        (5, 4, 1, "correct is 5 with 4 completions"),
    ],
)
def test_pass_at_k_refuses(correct, n, k, words):
    with pytest.raises(ValueError, match=words):
        pass_at_k(correct, n, k)


def test_pass_at_is_the_mean_over_prompts_not_over_completions():
    right = {0: [1, 0, 0], 1: [1] * 12, 2: [0] * 5, 9: [0, 1]}
    completions = [
        made(str(r), prompt=p, index=i) for p, group in right.items() for i, r in enumerate(group)
    ]
    random.Random(1).shuffle(completions)
    for k in (1, 2):
        each = [
            sum(map(any, subsets)) / len(subsets)
            for group in right.values()
            if (subsets := list(itertools.combinations(group, k)))
        ]
        assert pass_at(completions, lambda c: c.text == "1", k) == pytest.approx(
            sum(each) / 4, rel=1e-12
        )
    assert pass_at(completions, lambda c: c.prompt == 0, 2) == 0.25
    with pytest.raises(
        ValueError, match=r"prompt 9 has 2 completions, too few for pass@3; sample at least 3"
    ):
        pass_at(completions, lambda c: True, 3)
    with pytest.raises(ValueError, match="k is 0 with 3 completions"):
        pass_at(completions, lambda c: True, 0)
    with pytest.raises(ValueError, match="there are no completions to score"):
        pass_at([], lambda c: True, 1)


def test_a_sampler_of_another_type_is_refused_by_name():
    with pytest.raises(TypeError, match="sampler is of type dict; it must be a Sampler"):
        generate(models.load("embedded"), "a", sampler={"temperature": 1.0})  # pyright: ignore[reportArgumentType]
