"""Workers over one shared cache: alone as a plain loop, together as an engine that gathers and rotates every key, and on the problem."""

import functools
import random

import numpy as np
import pytest

from jaxshare.models import problems
from jaxshare.serving import combined_layout, demo, write_together
from tests.test_branches import plain_greedy


@functools.cache
def model():
    return demo.load_embedded()


def asked(problem: problems.Problem, names: tuple[str, ...]) -> str:
    return model().tokenizer.apply_chat_template(problem.messages(names), tokenize=False, add_generation_prompt=True)


def test_combined_layout_lists_history_others_own():
    assert np.asarray(combined_layout(1).blocks).tolist() == [[0, 1]]
    assert np.asarray(combined_layout(3).blocks).tolist() == [[0, 2, 3, 1], [0, 1, 3, 2], [0, 1, 2, 3]]
    assert np.asarray(combined_layout(1, rows=2).blocks).tolist() == [[0, 1, -1], [-1, -1, -1]]


def test_a_lone_worker_writes_what_a_plain_loop_writes():
    prompt = asked(problems.make_problem(random.Random(3)), ("Alice",))
    written = write_together(model(), prompt, ("Alice",), problems.header, budget=40)
    tokens = model().tokenizer.encode(prompt + "\n\n" + problems.header("Alice", 1))
    made, _ = plain_greedy(tokens, 40)
    step, separator, _ = model().tokenizer.decode(made).partition("\n\n")
    assert separator
    assert written.texts[0].startswith(problems.header("Alice", 1) + step + separator + problems.header("Alice", 2))


def test_two_workers_share_the_work():
    problem = problems.make_problem(random.Random(0))
    options = dict(budget=320, rows=2)
    seen: list[list[str]] = []
    alone = write_together(model(), asked(problem, ("Alice",)), ("Alice",), problems.header, **options)
    both = write_together(model(), asked(problem, ("Alice", "Bob")), ("Alice", "Bob"), problems.header, on_text=seen.append, **options)
    copies = write_together(model(), asked(problem, ("Alice", "Bob")), ("Alice", "Bob"), problems.header, implementation="reference",
                            **options)
    assert all(problems.check(alone.history, problem)) and all(problems.check(both.history, problem))
    assert both.passes < 0.8 * alone.passes
    assert both.texts == copies.texts and both.passes == copies.passes
    assert seen[-1] == both.texts and len(seen) > 5
    assert both.seen_bytes == 2 * both.kv_bytes
    assert "Bob 1: Question 5" in both.texts[1]


@pytest.mark.parametrize(("names", "options", "words"), [
    ((), {}, "workers need names"),
    (("Alice", "Alice"), {}, "each its own"),
    (("Alice", ""), {}, "workers need names"),
    (("Alice",), {"budget": 0}, "the budget is 0 tokens"),
    (("Alice",), {"budget": 10**6}, "the model's context holds"),
    (("Alice",), {"separator": "no token ends like this"}, "no token of the model's vocabulary ends in the separator"),
])
def test_bad_input(names, options, words):
    with pytest.raises(ValueError, match=words):
        write_together(model(), "Solve: 1 + 1", names, problems.header, **options)
