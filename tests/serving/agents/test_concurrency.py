"""Waits for several things at once, against asyncio's own functions of the same names."""

import asyncio
import time

import pytest

from jaxshare.serving.agents import (
    Budget,
    BudgetError,
    DeadlockError,
    EndedError,
    Reply,
    Runtime,
    SelfConsistency,
    Single,
    TreeOfThoughts,
    agent,
    as_completed,
    first,
    gather,
    llm,
    run,
    spawn,
    tool,
    wait_for,
)
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.agents.search_log import SearchLog
from tests.serving.agents.test_children import Each, Model, answer, counts, paths_of


class Timed:
    """A model that answers "PROMPT SECONDS" after so many seconds, and counts its calls."""

    def __init__(self):
        self.calls, self.cancelled = [], []

    async def answer(self, call):
        said = call.messages[-1].content
        self.calls.append(call)
        try:
            await asyncio.sleep(float(said.split()[-1]))
        except asyncio.CancelledError:
            self.cancelled.append(said)
            raise
        return Reply(f"{said} {call.state[-1]}", 1, 1)


async def slept(seconds, value):
    await asyncio.sleep(seconds)
    if isinstance(value, Exception):
        raise value
    return value


@agent
async def child(seconds, value):
    return await tool(slept, seconds, value)


@agent
async def yields(values):
    for value in values:
        await tool(slept, 0.01, None)
        yield value


# gather.


@agent
async def gathers():
    begin = time.perf_counter()
    found = await gather(
        llm("a 0.1"), tool(slept, 0.1, "t"), spawn(child, 0.1, "c"), spawn(yields, ["y"]).next()
    )
    return found, time.perf_counter() - begin


def test_gather_waits_for_all_side_by_side():
    found, seconds = run(gathers, model=Timed())
    assert found == ["a 0.1 0", "t", "c", "y"] and seconds < 0.3


@agent
async def gathers_none():
    return await gather()


def test_gathering_nothing_is_an_empty_list():
    assert run(gathers_none, model=Timed()) == []


@agent
async def talks():
    await llm("before 0")
    both = await gather(llm("one 0"), llm("two 0"))
    await llm("after 0")
    return both


def test_answers_side_by_side_continue_the_dialogue_each_for_itself():
    model = Timed()
    assert run(talks, model=model) == ["one 0 0", "two 0 0"]
    before, *both, after = [[one.content for one in call.messages] for call in model.calls]
    assert before == ["before 0"] and both == [
        ["before 0", "before 0 0", "one 0"],
        ["before 0", "before 0 0", "two 0"],
    ]
    assert after == ["before 0", "before 0 0", "after 0"]
    assert len({call.seed for call in model.calls}) == 4


@agent
async def fails_within():
    try:
        await gather(llm("slow 5"), tool(slept, 0.01, KeyError("k")), tool(slept, 5, 1))
    except KeyError as error:
        return error.args, await gather(
            tool(slept, 0, ValueError("v")), llm("ok 0"), return_exceptions=True
        )


def test_the_first_error_is_raised_and_what_is_under_way_is_ended():
    model, begin = Timed(), time.perf_counter()
    args, (error, text) = run(fails_within, model=model)
    assert args == ("k",) and repr(error) == "ValueError('v')" and text == "ok 0 0"
    assert model.cancelled == ["slow 5"] and time.perf_counter() - begin < 2


# first and wait_for.


@agent
async def races():
    one, two = spawn(yields, ["a1", "a2"]), spawn(child, 5, "late")
    won = await first(llm("slow 5"), one.next(), two)
    again = await first(one.next(), tool(slept, 5, None))
    return won, again, (await first(llm("q 0"))).value


def test_first_gives_the_part_that_comes_first_and_ends_the_others():
    model = Timed()
    won, again, last = run(races, model=model)
    assert won == (1, "a1") and again == (0, "a2") and last == "q 0 0"
    assert won.index == 1 and model.cancelled == ["slow 5"]


@agent
async def loses_nothing():
    slow = spawn(yields, ["s1", "s2"])
    early = await first(slow.next(), tool(slept, 0, "t"))
    both = await first(slow.next(), llm("x 5"))
    return early, both, await slow.next()


def test_a_value_that_was_not_waited_for_to_its_end_is_not_lost():
    assert run(loses_nothing, model=Timed()) == ((1, "t"), (0, "s1"), "s2")


@agent
async def both_at_once():
    one, two = spawn(yields, [1, 2]), spawn(yields, [3, 4])
    await tool(slept, 0.05, None)  # both values are there
    return await first(one.next(), two.next()), await one.next(), await two.next()


def test_a_value_that_came_at_the_same_time_and_lost_is_awaited_later():
    assert run(both_at_once, model=Timed()) == ((0, 1), 2, 3)


@agent
async def in_time():
    slow, late = spawn(child, 0.2, "done"), []
    for request in (llm("slow 5"), tool(slept, 5, 1), slow, gather(llm("x 5"), llm("y 0"))):
        try:
            await wait_for(request, 0.02)
        except TimeoutError as error:
            late.append(str(error))
    return late, await wait_for(slow, 5), await gather(wait_for(llm("z 0"), 5), llm("w 0"))


def test_wait_for_ends_what_takes_too_long_but_not_a_child():
    model = Timed()
    late, done, both = run(in_time, model=model)
    assert len(late) == 4 and all("agent in_time has waited in line" in text for text in late)
    assert all("for 0.02 seconds" in text for text in late)
    assert done == "done" and both == ["z 0 0", "w 0 0"]
    assert sorted(model.cancelled) == ["slow 5", "x 5"]


# as_completed.


@agent
async def takes_as_they_come():
    found = []
    await llm("before 0")
    parts = [llm("a 0.15"), tool(slept, 0.01, "t"), spawn(child, 0.08, "c")]
    async for index, value in as_completed(*parts):
        found.append((index, value))
    return found


def test_as_completed_gives_results_as_they_come():
    model = Timed()
    assert run(takes_as_they_come, model=model) == [(1, "t"), (2, "c"), (0, "a 0.15 0")]
    assert [one.content for one in model.calls[-1].messages] == [
        "before 0",
        "before 0 0",
        "a 0.15",
    ]


@agent
async def leaves_early():
    async for index, value in as_completed(llm("slow 5"), tool(slept, 0, "t")):
        return index, value


def test_what_as_completed_no_longer_needs_is_ended():
    model, begin = Timed(), time.perf_counter()
    assert run(leaves_early, model=model) == (1, "t")
    assert model.cancelled == ["slow 5"] and time.perf_counter() - begin < 2


# With everything else.


@agent
async def deadlocked():
    return await gather(spawn(waits_to_be_resumed), spawn(child, 0.01, 1))


@agent
async def waits_to_be_resumed():
    yield 1


def test_a_deadlock_of_a_wait_for_several_is_found():
    with pytest.raises(DeadlockError, match=r"deadlocked waits in line .* for several agents"):
        run(deadlocked, model=Timed())


@agent
async def asks_many():
    return await gather(*(llm(f"{i} 0") for i in range(5)))


def test_each_answer_counts_in_a_budget():
    runtime = Runtime(Timed())
    with pytest.raises(BudgetError, match="3 calls"):
        asyncio.run(runtime.run(asks_many.under(Single(Budget(calls=3)))))
    assert runtime.runs[0].calls == 3


@agent
async def branches():
    parts = await gather(llm("one 0"), llm("two 0"))
    return parts, await llm(f"{parts} 0")


def test_searches_branch_where_several_answers_are_asked_for():
    runtime = Runtime(Timed())
    search = TreeOfThoughts(3, 2, lambda state: sum(state.path), depth=3)
    done = asyncio.run(runtime.run(branches.under(search)))
    assert done.accepted.value[0] == ["one 0 2", "two 0 2"]
    log = SearchLog.of(runtime)
    assert {state.waits_for for state in log.runs[0].states} == {"begin", "llm", "end"}
    votes = asyncio.run(Runtime(Timed()).run(asks_many.under(SelfConsistency(3, str))))
    assert votes.accepted.value == [f"{i} 0 0" for i in range(5)]


@agent
async def debates_together():
    teams, heard = [spawn(counts, 10), spawn(counts, 20)], []
    for i in range(3):
        heard.append(await gather(*(team.next() for team in teams), llm(f"{i} {heard}")))
        for team in teams:
            team.resume(int(heard[-1][-1]) % 10)
    return heard


def totals(branches):
    """What the program above has to give, by counting."""
    one, two, heard = 10, 20, []
    for i, branch in enumerate(branches):
        heard.append([one, two, answer(f"{i} {heard}", branch)])
        one, two = (total + (int(heard[-1][-1]) % 10 or 1) for total in (one, two))
    return heard


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("restore", [None, "replay"])
def test_every_firing_of_a_wait_for_several_finds_the_children_as_they_were(late, restore):
    made = agent(restore=restore)(debates_together.function).under(Each(2, late))
    done = asyncio.run(Runtime(Model()).run(made))
    paths = paths_of(done)
    assert len(paths) == 8
    for branches, state in paths:
        assert state.value == totals(branches), branches


def test_a_journal_has_each_part_and_which_came_first(tmp_path):
    journal, model = Journal(), Timed()

    def whole_run(program, model, journal):
        return asyncio.run(Runtime(model, journal=journal).run(program)).accepted.value

    programs = [gathers, races, fails_within, takes_as_they_come, in_time, loses_nothing]
    for number, program in enumerate(programs):
        journal = Journal()
        value = whole_run(program, model, journal)
        journal.save(tmp_path / f"{number}.json")
        strict = Journal.load(tmp_path / f"{number}.json", strict=True)
        again = whole_run(program, None, strict)
        if program is gathers:
            value, again = value[0], again[0]
        assert repr(again) == repr(value), program


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (
            lambda: gather(slept(0, 1)),
            TypeError,
            r"gather\(\) waits for llm\(\), tool\(\), ask\(\) and",
        ),
        (lambda: first(), ValueError, "give at least one"),
        (lambda: first(3), TypeError, r"first\(\) waits for .*, not for 3"),
        (lambda: gather(gather(llm("a"))), TypeError, "give their parts to one call"),
        (lambda: wait_for(llm("a"), 0), ValueError, "timeout is 0; give a number of seconds"),
        (lambda: wait_for(slept(0, 1), 1), TypeError, "make an agent of a coroutine"),
    ],
)
def test_what_cannot_be_waited_for_is_refused_at_once(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_waiting_outside_an_agent_is_an_error():
    async def outside():
        return await gather(llm("a"))

    with pytest.raises(RuntimeError, match="a together is waited for outside an agent"):
        asyncio.run(outside())


@agent
async def cancels_while_another_waits():
    one = spawn(child, 0.2, "done")
    waiting = spawn(takes_over, one)
    await tool(slept, 0.02, None)
    one.cancel()
    try:
        return await waiting
    except EndedError as error:
        return str(error)


@agent
async def takes_over(other):
    return await other


def test_cancelling_tells_those_who_wait():
    assert run(cancels_while_another_waits, model=Timed()) == "agent child was cancelled"
