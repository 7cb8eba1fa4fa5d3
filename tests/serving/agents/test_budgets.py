"""Budgets: what children, judges and voters spend counts for all runs above them; money."""

import asyncio
import time

import pytest

from jaxshare.serving.agents import (
    AgentError,
    BestOfN,
    Budget,
    BudgetError,
    EndedError,
    Reply,
    Runtime,
    SelfConsistency,
    Single,
    TreeOfThoughts,
    agent,
    gather,
    llm,
    spawn,
)
from jaxshare.serving.agents.backends import Priced, ScriptedModel
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.agents.search_log import SearchLog


class Model:
    """Answers with four new tokens for three read, at a price if one is given."""

    def __init__(self, cost=None, delay=0.0):
        self.cost, self.delay, self.calls = cost, delay, []

    async def answer(self, call):
        self.calls.append(call)
        await asyncio.sleep(self.delay)
        return Reply("x", 4, 3, cost=self.cost)


def whole_run(which, *args, model=None, **options):
    """(the run or its error, the runtime)."""
    runtime = Runtime(model or Model(), **options)
    try:
        return asyncio.run(runtime.run(which, *args)), runtime
    except Exception as error:
        return error, runtime


@agent
async def asks(times):
    return [await llm(f"{i}") for i in range(times)]


@agent
async def tree(depth, width, times):
    """Asks, and has so many children that do."""
    own = [await llm("own") for _ in range(times)]
    if depth:
        for child in [spawn(tree, depth - 1, width, times) for _ in range(width)]:
            own += await child
    return own


@pytest.mark.parametrize(("depth", "width", "times"), [(0, 0, 3), (1, 2, 1), (2, 2, 2), (3, 1, 1)])
def test_totals_are_sums_over_the_tree_of_runs(depth, width, times):
    done, runtime = whole_run(tree, depth, width, times, model=Model(cost=0.25))

    def below(run):
        return run.calls + sum(below(child) for child in run.children)

    assert below(done) == times * sum(width**level for level in range(depth + 1))
    for run in runtime.runs:
        calls = below(run)
        assert (run.total.calls, run.total.new_tokens, run.total.prompt_tokens) == (
            calls,
            4 * calls,
            3 * calls,
        )
        assert run.total.cost == 0.25 * calls and run.cost == 0.25 * run.calls
    assert sum(logged.cost for logged in SearchLog.of(runtime).runs) == done.total.cost


BUDGETS = [
    (Budget(calls=5), 5, "5 calls"),
    (Budget(tokens=20), 5, "20 tokens"),
    (Budget(tokens=17), 5, "17 tokens"),
    (Budget(money=1.25), 5, "1.25 of money"),
    (Budget(money=1.1), 5, "1.1 of money"),
]


@pytest.mark.parametrize(("budget", "calls", "words"), BUDGETS, ids=lambda value: str(value))
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_run_stops_once_the_budget_of_one_above_it_is_used_up(budget, calls, words, depth):
    @agent
    async def passes_on(depth):
        return await spawn(passes_on, depth - 1) if depth else await spawn(asks, 9)

    model = Model(cost=0.25)
    error, runtime = whole_run(passes_on.under(Single(budget)), depth, model=model)
    assert isinstance(error, BudgetError) and len(model.calls) == calls
    assert str(error).startswith(
        f"agent asks has used up its budget ({words} of agent passes_on, which it is a part of)"
    )
    assert runtime.runs[0].total.calls == calls and runtime.runs[0].calls == 0


def test_the_smaller_budget_counts_and_siblings_share_what_is_above():
    @agent
    async def parent():
        found = []
        for limit in (2, 9, 9):
            try:
                found.append(await spawn(asks.under(Single(Budget(calls=limit))), 4))
            except BudgetError as error:
                found.append(str(error).split(") ")[0])
        return found

    done, runtime = whole_run(parent.under(Single(Budget(calls=8))))
    assert done.accepted.value == [
        "agent asks has used up its budget (2 calls",
        ["x"] * 4,
        "agent asks has used up its budget (8 calls of agent parent, which it is a part of",
    ]
    assert [run.calls for run in runtime.runs] == [0, 2, 4, 2]


def test_a_child_that_is_stopped_gives_its_best_answer_so_far():
    @agent
    async def parent():
        return await spawn(asks.under(BestOfN(9, lambda state: len(state.path))), 1)

    done, runtime = whole_run(parent.under(Single(Budget(calls=3))))
    assert done.accepted.value == ["x"] and runtime.runs[1].calls == 3


def test_judges_and_voters_spend_from_the_search_that_asks_them():
    @agent
    async def judge(judged):
        return len(await llm("how good?"))

    @agent
    async def votes(states):
        return len(await llm("which?")) - 1

    for supervisor, own, others in (
        (TreeOfThoughts(2, 1, judge, budget=Budget(calls=5)), 2, 2),
        (TreeOfThoughts(2, 1, vote=votes, budget=Budget(calls=5)), 4, 1),
    ):
        found, runtime = whole_run(asks.under(supervisor), 3)
        assert isinstance(found, BudgetError)
        assert runtime.runs[0].total.calls == 5
        children = runtime.runs[0].children
        assert runtime.runs[0].calls >= own and len(children) >= others


def test_calls_side_by_side_do_not_overshoot():
    @agent
    async def parent():
        children = [spawn(asks, 3) for _ in range(5)]
        return await gather(*children, return_exceptions=True)

    for limit in range(1, 15, 3):
        model = Model(delay=0.001)
        found, _ = whole_run(parent.under(Single(Budget(calls=limit))), model=model)
        assert len(model.calls) == limit
        assert any(isinstance(each, BudgetError) for each in found.accepted.value)


def test_time_ends_children_too():
    @agent
    async def parent():
        return await spawn(asks, 9)

    begin = time.perf_counter()
    error, runtime = whole_run(parent.under(Single(Budget(seconds=0.1))), model=Model(delay=30))
    assert isinstance(error, BudgetError) and time.perf_counter() - begin < 10
    assert isinstance(runtime.runs[1].error, EndedError)


# Money.


def test_prices_of_tokens():
    model = Priced(Model(), prompt=0.5, new=2.0)
    done, _ = whole_run(asks, 3, model=model)
    assert done.cost == pytest.approx(3 * (3 * 0.5 + 4 * 2.0) / 1e6, rel=1e-12)
    with pytest.raises(
        ValueError, match=r"prompt is -1.0; give the price of a million tokens, from"
    ):
        Priced(Model(), prompt=-1, new=0)
    with pytest.raises(ValueError, match="new is inf; it must be finite"):
        Priced(Model(), prompt=0, new=float("inf"))
    with pytest.raises(TypeError, match="prompt is 'much'"):
        Priced(Model(), prompt="much", new=1)  # type: ignore[arg-type]


def test_answers_that_cannot_be_parsed_and_several_answers_cost_too():
    @agent
    async def fails_first():
        found = await llm("x", n=3)
        try:
            await llm("x", parse=int, retries=1)
        except ValueError:
            return len(found)

    done, _ = whole_run(fails_first, model=Model(cost=0.5))
    assert done.accepted.value == 3 and done.cost == 2.5 and done.calls == 5


def test_money_without_prices_is_an_error_that_says_so():
    error, _ = whole_run(asks.under(Single(Budget(money=3))), 1)
    assert isinstance(error, AgentError)
    assert str(error) == (
        "the budget of agent asks has money, but the model Model gives no cost with its answers; "
        "wrap it in Priced, or bound calls or tokens"
    )


def test_a_replayed_journal_spends_the_same_money(tmp_path):
    def stopped(journal, model):
        error, runtime = whole_run(
            asks.under(Single(Budget(money=2.25))), 9, model=model, journal=journal
        )
        assert isinstance(error, BudgetError)
        return runtime.runs[0]

    journal = Journal()
    first = stopped(journal, Model(cost=0.5))
    journal.save(tmp_path / "run.json")
    again = stopped(Journal.load(tmp_path / "run.json", strict=True), None)
    assert (again.calls, again.cost) == (first.calls, first.cost) == (5, 2.5)


def test_a_journal_without_prices_is_read(tmp_path):
    journal = Journal()
    whole_run(asks, 2, journal=journal)
    journal.save(tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text()
    assert '"spent": [1, 4, 3]' in text  # the form of former versions
    again, _ = whole_run(asks, 2, journal=Journal.load(tmp_path / "run.json", strict=True))
    assert again.calls == 2 and again.cost == 0.0


def test_a_priced_model_answers_as_the_model_does():
    script = {"0": "zero", "1": ["one", "two"]}
    plain, priced = (
        whole_run(asks.under(SelfConsistency(3, key=str)), 2, model=model)[0].accepted.value
        for model in (ScriptedModel(script), Priced(ScriptedModel(script), prompt=1, new=1))
    )
    assert plain == priced == ["zero", "one"]
