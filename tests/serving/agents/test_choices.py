"""`choose`: what an agent gets, firing by firing, and that searches branch over all options."""

import asyncio
import itertools

import pytest

from jaxshare.serving.agents import (
    BeamSearch,
    BestOfN,
    DivergedError,
    MonteCarloTreeSearch,
    Reply,
    Runtime,
    Supervisor,
    TreeOfThoughts,
    agent,
    choose,
    llm,
    run,
    spawn,
)
from jaxshare.serving.agents.journal import Journal, ReplayError
from jaxshare.serving.agents.search_log import SearchLog


class NoModel:
    async def answer(self, call):
        raise AssertionError("a choice asks no model")


class All(Supervisor):
    """Fires every choice once for each option, and counts more firings on request."""

    def __init__(self, more=0):
        self.more = more

    def init(self, root):
        self.ready, self.finished, self.failed, self.open = [root], [], [], 1

    def fire(self):
        ready, self.ready = self.ready, []
        return ready

    def commit(self, state):
        if state.sleeping:
            return
        self.open -= 1
        if state.finished:
            self.finished.append(state)
        elif state.error is not None:
            self.failed.append(state)
        else:
            firings = state.firings(1) + self.more if state.branches else 1
            self.ready += [state] * firings
            self.open += firings
        if not self.open:
            self.over = True
            self.accepted = min(self.finished or self.failed, key=lambda state: state.path)

    wake = commit


def values(chooser, *args, more=0, **options):
    """The values of all paths of an agent, in the order of the tree."""
    runtime = Runtime(NoModel(), **options)
    done = asyncio.run(runtime.run(chooser.under(All(more)), *args))
    ends = sorted(done.supervisor.finished, key=lambda state: state.path)  # type: ignore[attr-defined]
    return [state.value for state in ends]


@agent
async def pairs(numbers, letters):
    number = await choose(numbers)
    letter = await choose(letters)
    return number, letter


def test_every_option_is_a_branch_and_single_paths_take_the_default():
    assert values(pairs, [1, 2, 3], [*"ab"]) == [*itertools.product([1, 2, 3], "ab")]
    assert run(pairs, [1, 2, 3], [*"ab"], model=NoModel()) == (1, "a")
    assert run(pairs.under(BestOfN(3, lambda state: 0)), [1, 2], ["a"], model=NoModel()) == (1, "a")


@pytest.mark.parametrize("default", [0, 1, 3])
def test_the_default_comes_first_and_the_others_in_order(default):
    @agent
    async def picks():
        return await choose([*"abcd"], default=default)

    rest = [letter for index, letter in enumerate("abcd") if index != default]
    expected = ["abcd"[default], *rest]
    assert run(picks, model=NoModel()) == expected[0]
    assert values(picks) == expected
    assert values(picks, more=3) == expected + expected[:3]  # from the start again


@pytest.mark.parametrize("restore", ["copy", "replay"])
def test_an_option_is_the_very_object_of_the_path_that_chooses_it(restore):
    @agent(restore=restore)
    async def mutates():
        boards = [[0], [0], [0]]
        board = await choose(boards)
        is_own = any(board is each for each in boards)
        board.append(1)
        return is_own, boards, boards.index(board)

    assert values(mutates) == [
        (True, [[0] * (i == j) + [0] * (i != j) + [1] * (i == j) for i in range(3)], j)
        for j in range(3)
    ]


async def helps(options):
    found = await choose(options)
    return f"helped {found}"


@agent
async def through_a_helper():
    before = await helps(["x", "y"])
    return before, await choose(range(2))


def test_a_helper_coroutine_chooses_too():
    expected = [*itertools.product(["helped x", "helped y"], range(2))]
    assert values(through_a_helper) == expected


@agent
async def child_chooses(options):
    return await choose(options)


@agent
async def waits_for_a_child(options):
    mine = await choose(options)
    return mine, await spawn(child_chooses.under(BestOfN(1, lambda state: 0)), [mine, "other"])


def test_each_branch_has_children_of_its_own():
    assert values(waits_for_a_child, ["a", "b"]) == [("a", "a"), ("b", "b")]


@pytest.mark.parametrize(
    ("options", "more", "error", "match"),
    [
        ([], {}, ValueError, "options is empty; there has to be something to choose from"),
        ([1, 2], {"default": 2}, ValueError, "default is 2; give an index of the 2 options"),
        ([1], {"default": -1}, ValueError, "default is -1"),
        ([1], {"default": "0"}, TypeError, "default is '0'"),
        (3, {}, TypeError, "options is 3"),
        ("an answer", {}, TypeError, "options is 'an answer'; it must be a list"),
    ],
)
def test_bad_choices_are_errors_at_once(options, more, error, match):
    with pytest.raises(error, match=match):
        choose(options, **more)


def test_a_choice_is_for_agents_alone():
    with pytest.raises(RuntimeError, match="a choose is waited for outside an agent"):
        asyncio.run(helps([1]))


def test_a_replay_that_has_other_options_is_found():
    counter = itertools.count(1)

    @agent(restore="replay")
    async def changes():
        await choose(range(next(counter)))
        return await choose([*"ab"])

    runtime = Runtime(NoModel())
    done = asyncio.run(runtime.run(changes.under(All())))
    assert done.accepted.value == "a"
    [error] = [state.error for state in done.states if state.error]
    assert isinstance(error, DivergedError) and "is not recorded" in str(error)


# Under searches: a tree of options, enumerated.


class Proposer:
    """Proposes as many thoughts as the prompt says, by name."""

    def __init__(self):
        self.prompts = []

    async def answer(self, call):
        prompt = call.messages[-1].content
        self.prompts.append(prompt)
        return Reply(" ".join(f"{prompt}{letter}" for letter in "abc"))


@agent
async def composes(length):
    text = "."
    for _ in range(length):
        text = await choose(await llm(text, parse=str.split))
    return text


def merit(text):
    """Any order of the texts that does not favour the first."""
    return (sum(ord(letter) * (i + 3) for i, letter in enumerate(text)) * 7919) % 101


def merit_of(state):
    return merit(state.value if state.finished else state.variables["text"])


def proposing_oracle(length, breadth, keep):
    """Breadth-first search with proposals: (answer, prompts)."""
    level, prompts = ["."], []
    for _ in range(length):
        prompts += level
        came = [text + letter for text in level for letter in "abc"[:breadth]]
        level = sorted(came, key=lambda text: -merit(text))[:keep]
    return level[0], sorted(prompts)


@pytest.mark.parametrize(("breadth", "keep"), [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_tree_of_thoughts_by_proposals(breadth, keep):
    model = Proposer()
    supervisor = TreeOfThoughts(breadth, keep, merit_of, generate="propose")
    done = asyncio.run(Runtime(model).run(composes.under(supervisor), 3))
    expected, prompts = proposing_oracle(3, breadth, keep)
    assert (done.accepted.value, sorted(model.prompts)) == (expected, prompts)
    assert not any(state.score is not None for state in done.states if state.is_proposal)


def test_sampling_and_choosing_multiply():
    model = Proposer()
    done = asyncio.run(Runtime(model).run(composes.under(TreeOfThoughts(2, 1, merit_of)), 1))
    assert model.prompts == [".", "."] and done.accepted.value == proposing_oracle(1, 3, 1)[0]
    assert sum(state.finished for state in done.states) == 6


def test_beams_and_monte_carlo_search_find_the_best_of_all_options():
    every = ["." + "".join(letters) for letters in itertools.product("abc", repeat=2)]
    best = max(every, key=merit)
    for supervisor in (
        BeamSearch(9, 1, merit_of),
        MonteCarloTreeSearch(60, 1, lambda state: merit_of(state) / 101),
        MonteCarloTreeSearch(60, 1, lambda state: merit_of(state) / 101, parallel=4),
    ):
        model = Proposer()
        done = asyncio.run(Runtime(model).run(composes.under(supervisor), 2))
        assert done.accepted.value == best
        # Each prompt once: its options cost no model.
        assert sorted(model.prompts) == sorted([".", *(f".{letter}" for letter in "abc")])


@agent
async def walks_by_choice(depth):
    text = ""
    for _ in range(depth):
        text += await choose([*"abc"])
    return text


def test_choices_without_a_model_are_levels():
    done = asyncio.run(
        Runtime(NoModel()).run(walks_by_choice.under(TreeOfThoughts(1, 2, merit_of)), 4)
    )
    level = [""]
    for _ in range(4):
        came = [text + letter for text in level for letter in "abc"]
        level = sorted(came, key=lambda text: (-merit(text), text))[:2]
    assert done.accepted.value == level[0]


# Journals and logs.


def test_a_journal_replays_choices_whatever_their_options_are():
    class Odd:
        def __reduce__(self):
            raise TypeError("no pickle")

    @agent
    async def odd():
        return type(await choose([Odd(), 2])).__name__

    journal = Journal()
    assert values(odd, journal=journal) == ["Odd", "int"]
    journal.strict = True
    assert values(odd, journal=journal) == ["Odd", "int"] and not journal.missed


def test_a_journal_of_another_choice_is_found(tmp_path):
    journal = Journal()
    values(pairs, [1, 2], [*"ab"], journal=journal)
    journal.save(tmp_path / "run.json")
    replayed = Journal.load(tmp_path / "run.json", strict=True)
    assert values(pairs, [1, 2], [*"ab"], journal=replayed) == [*itertools.product([1, 2], "ab")]
    other = Journal.load(tmp_path / "run.json", strict=True)
    with pytest.raises(ReplayError, match="a choice among 3, and in the journal for a choice"):
        values(pairs, [1, 2, 3], [*"ab"], journal=other)


def test_logs_name_choices():
    runtime = Runtime(NoModel())
    asyncio.run(runtime.run(pairs.under(All()), [1, 2], [*"ab"]))
    [logged] = SearchLog.of(runtime).runs
    assert [state.waits_for for state in logged.states].count("choose") == 3
