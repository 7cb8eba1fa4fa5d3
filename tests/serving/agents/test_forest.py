"""Forests of thoughts: consensus, sparse activation and self-correction against enumerations."""

import asyncio
import collections
import itertools

import pytest

from jaxshare.serving.agents import (
    BestOfN,
    Dialogue,
    ForestOfThoughts,
    Judged,
    Message,
    MonteCarloTreeSearch,
    Reply,
    Runtime,
    TreeOfThoughts,
    agent,
    llm,
)
from tests.serving.agents.test_search import BranchError


class Model:
    def __init__(self, answer):
        self.given, self.calls = answer, []

    async def answer(self, call):
        self.calls.append(call)
        answer = self.given(call)
        return Reply(await answer if asyncio.iscoroutine(answer) else answer)


def searched(which, supervisor, answer, *args):
    model = Model(answer)
    return asyncio.run(Runtime(model).run(which.under(supervisor), *args)), model.calls


@agent
async def answers():
    found = await llm("answer")
    if found == "fail":
        raise BranchError(found)
    return found


ONE = BestOfN(1, lambda state: 0.0)
"""A tree of one path."""


def decided(given, expert=None):
    """The answer of the trees by the definition: of more than half, of an expert, or most frequent."""
    valid = [text for text in given if text != "fail"]
    counts = collections.Counter(valid)
    most = max(counts.values())
    if most > len(valid) / 2 or expert is None:
        return next(text for text in valid if counts[text] == most)
    return expert(valid)


def last_of(texts):
    return max(texts)


@pytest.mark.parametrize("kind", ["none", "function", "agent"])
def test_consensus_of_all_combinations(kind):
    @agent
    async def decides(states):
        texts = [state.value for state in states]
        return texts.index(last_of(texts))

    for given in itertools.product(["a", "b", "c", "fail"], repeat=4):
        if set(given) == {"fail"}:
            continue
        asked = []

        def expert(states, asked=asked):
            asked.append([state.value for state in states])
            assert all(isinstance(state, Judged) for state in states)
            return asked[-1].index(last_of(asked[-1]))

        deciding = {"none": None, "function": expert, "agent": decides}[kind]
        done, calls = searched(
            answers,
            ForestOfThoughts(ONE, 4, expert=deciding),
            lambda call, given=given: given[call.state[0]],
        )
        expected = decided(given, None if kind == "none" else last_of)
        assert done.accepted.value == expected and len(calls) == 4
        valid = [text for text in given if text != "fail"]
        assert asked in ([], [valid])


def test_an_expert_that_fails_leaves_the_most_frequent_answer_and_its_error_in_the_tree():
    @agent
    async def fails(states):
        raise BranchError("no idea")

    for expert in (fails, lambda states: 9, lambda states: 1 / 0):
        done, _ = searched(
            answers, ForestOfThoughts(ONE, 4, expert=expert), lambda call: "bcba"[call.state[0]]
        )
        assert done.accepted.value == "b"
        [failed] = [state for state in done.states if state.error]
        assert "in the decision of ForestOfThoughts" in "".join(failed.error.__notes__)


def test_early_ends_do_not_wait_for_the_rest():
    async def answer(call):
        await asyncio.sleep(60 * (call.state[0] > 2))
        return "a"

    async def whole_run():
        async with asyncio.timeout(10):
            model = Model(answer)
            forest = ForestOfThoughts(ONE, 5, early=True)
            return await Runtime(model).run(answers.under(forest))

    done = asyncio.run(whole_run())
    assert done.accepted.value == "a" and sum(state.finished for state in done.states) == 3


def test_the_best_score_needs_no_expert():
    for more in ({"expert": last_of}, {"early": True}):
        with pytest.raises(ValueError, match="key is None, so the best score decides"):
            ForestOfThoughts(ONE, 2, None, **more)


# Sparse activation.


@agent
async def spells(length):
    text = ""
    while len(text) < length:
        text += await llm(f"after {text}")
    return text


def merit(text):
    return (sum(ord(letter) * (i + 3) for i, letter in enumerate(text)) * 7919) % 101


def text_of(state):
    return state.value if state.finished else state.variables["text"]


def letter_at(call):
    return chr(97 + (3 * call.state[0] + 5 * call.state[-1] + len(call.state)) % 11)


def grown(number, length, breadth, keep):
    """The levels of one tree: each the new texts, best first."""
    level, levels = [((number,), "")], []
    for _ in range(length):
        came = []
        for path, text in level:
            # The first firing of a tree leads from the root to the first model call.
            at = path if len(path) > 1 else (number, 0)[:1]
            for firing in range(breadth):
                position = (*at, firing)
                letter = chr(97 + (3 * number + 5 * firing + len(position)) % 11)
                came.append((position, text + letter))
        came.sort(key=lambda each: (-merit(each[1]), each[0]))
        levels.append(came)
        level = came[:keep]
    return levels


@pytest.mark.parametrize("active", [1, 2, 4, 9])
def test_only_the_best_trees_stay_active(active):
    breadth, keep, trees, length = 3, 2, 5, 3
    forest = ForestOfThoughts(
        TreeOfThoughts(breadth, keep, lambda state: merit(text_of(state))),
        trees,
        key=None,
        active=active,
    )
    done, calls = searched(spells, forest, letter_at, length)
    levels = [grown(number, length, breadth, keep) for number in range(trees)]
    order = sorted(range(trees), key=lambda number: (-merit(levels[number][0][0][1]), number))
    chosen = order[:active]
    best = max(
        (levels[number][-1][0] for number in sorted(chosen)), key=lambda each: merit(each[1])
    )
    assert done.accepted.value == best[1]
    per_tree = collections.Counter(call.state[0] for call in calls)
    below = breadth * keep * (length - 1)
    assert per_tree == {number: breadth + below * (number in chosen) for number in range(trees)}


def test_trees_of_one_level_can_be_active():
    forest = ForestOfThoughts(
        TreeOfThoughts(2, 1, lambda state: merit(text_of(state))), 3, key=None, active=1
    )
    done, _ = searched(spells, forest, letter_at, 1)
    assert done.accepted.value == max((grown(n, 1, 2, 1)[0][0][1] for n in range(3)), key=merit)


def test_a_tree_whose_states_are_pruned_has_no_say():
    tree = TreeOfThoughts(1, 1, lambda state: float(state.value == "b"), prune=0.5)
    done, _ = searched(answers, ForestOfThoughts(tree, 5), lambda call: "aabaa"[call.state[0]])
    assert done.accepted.value == "b"


# Self-correction.


class Improving:
    """Each answer is the number that the dialogue says last, or one more with every feedback."""

    def __call__(self, call):
        if call.agent == "gives_feedback":
            return f"more than {call.messages[-2].content}"
        told = sum("more than" in message.content for message in call.messages)
        return str(10 * call.state[0] + told)


def number_of(state):
    return float(state.value if state.finished else state.variables["first"])


@agent
async def two_numbers():
    first = await llm("a number")
    return first and await llm("the same")


@agent
async def one_number():
    before = []
    value = await llm("a number")
    before.append(value)
    return value


@agent(restore="replay")
async def one_number_again():
    before = []
    value = await llm("a number")
    before.append(value)
    return before[-1]


@agent
async def critic(judged):
    return f"more than {judged.value}"


def plain(state):
    return f"more than {state.value}"


@pytest.mark.parametrize("which", [one_number, one_number_again])
@pytest.mark.parametrize("tree", [
    TreeOfThoughts(1, 1, number_of), BestOfN(1, number_of), MonteCarloTreeSearch(1, 1, number_of)
], ids=lambda tree: type(tree).__name__)  # fmt: skip
@pytest.mark.parametrize(("corrections", "below"), [(1, 9), (2, 9), (5, 2), (3, 0)])
def test_a_thought_is_corrected_until_it_is_good_enough(which, tree, corrections, below):
    forest = ForestOfThoughts(tree, 1, correct=plain, below=below, corrections=corrections)
    done, calls = searched(which, forest, Improving())
    rounds = min(corrections, below)
    assert done.accepted.value == str(rounds) and len(calls) == 1 + rounds
    expected = [Message("user", "a number")]
    for number in range(rounds):
        expected += [
            Message("assistant", str(number)),
            Message("user", f"more than {number}"),
            Message("user", "a number"),
        ]
    assert calls[-1].messages == tuple(expected)
    assert len({state.path for state in done.states}) == len(done.states)
    assert len({call.seed for call in calls}) == len(calls)


def test_feedback_for_corrections_comes_from_agents_and_the_model_too():
    for correct, more in ((critic, []), ("What is wrong?", ["What is wrong?"])):
        forest = ForestOfThoughts(
            TreeOfThoughts(1, 1, number_of), 1, correct=correct, below=1, corrections=3
        )
        done, calls = searched(one_number, forest, Improving())
        assert done.accepted.value == "1" and len(done.children) == 1
        told = [message.content for message in calls[-1].messages]
        assert told == ["a number", "0", *more, "more than 0", "a number"]


def test_a_correction_goes_on_in_the_midst_of_a_path():
    for number in (two_numbers, two_numbers.under(ONE)):
        forest = ForestOfThoughts(
            TreeOfThoughts(1, 1, number_of), 1, correct=lambda s: "more than that", below=1
        )
        done, calls = searched(number, forest, Improving())
        # The first thought is corrected; the second one has the feedback in its dialogue.
        assert done.accepted.value == "1"
        assert [len(call.messages) for call in calls] == [1, 4, 6]


def test_the_best_thought_is_gone_on_with_and_feedback_of_none_leaves_it():
    given = {1: "5", 4: "3"}  # by the length of the dialogue
    for feedback, count in ((lambda state: "again", 2), (lambda state: None, 1)):
        forest = ForestOfThoughts(TreeOfThoughts(1, 1, number_of), 1, correct=feedback, below=9)
        done, calls = searched(one_number, forest, lambda call: given[len(call.messages)])
        assert done.accepted.value == "5" and len(calls) == count


def test_feedback_that_fails_leaves_the_thought_and_its_error_in_the_tree():
    forest = ForestOfThoughts(TreeOfThoughts(1, 1, number_of), 2, correct=lambda state: 3, below=99)
    done, calls = searched(one_number, forest, Improving())
    assert len(calls) == 2 and done.accepted.value == "0"
    failed = [state for state in done.states if state.error]
    assert len(failed) == 2
    assert all("the feedback is 3; give a text" in str(state.error) for state in failed)


def test_corrected_trees_do_not_wait_for_each_other():
    forest = ForestOfThoughts(
        TreeOfThoughts(2, 1, number_of), 3, key=None, correct=plain, below=21, corrections=2
    )
    done, calls = searched(one_number, forest, Improving())
    # Trees 0 and 1 stay below 21 and are corrected twice for each thought, tree 2 once.
    assert done.accepted.value == "21" or done.accepted.value == "22"
    per_tree = collections.Counter(call.state[0] for call in calls)
    assert per_tree == {0: 6, 1: 6, 2: 4}


@agent
async def asks_elsewhere():
    return await llm("a number", dialogue=Dialogue("before"))


def test_a_call_in_another_dialogue_is_left_as_it_is():
    forest = ForestOfThoughts(TreeOfThoughts(1, 1, number_of), 1, correct=plain, below=9)
    done, calls = searched(asks_elsewhere, forest, Improving())
    assert done.accepted.value == "0" and len(calls) == 1


def test_bad_sources_of_feedback_are_errors_at_once():
    with pytest.raises(TypeError, match="correct is 3; give a function of a state, an agent, or"):
        ForestOfThoughts(ONE, 1, correct=3)  # type: ignore[arg-type]
