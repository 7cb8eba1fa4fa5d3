"""The runtime of agents against plain coroutines, and everything that can go wrong between agents.

Models here are functions of the call. What a native run would do is written as an ordinary
coroutine, which shares no code with the runtime.
"""

import asyncio
import dataclasses
import gc
import inspect
import random
import re
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref

import pytest

from jaxshare.serving.agents import (
    AgentError,
    Budget,
    BudgetError,
    DeadlockError,
    EndedError,
    Message,
    ParseError,
    Reply,
    Runtime,
    Single,
    Supervisor,
    UncopyableError,
    agent,
    llm,
    run,
    spawn,
    tool,
)
from jaxshare.serving.agents.search import BestOfN, SelfConsistency


class Model:
    """Answers by a function of the call, and keeps the calls."""

    def __init__(self, answer=lambda call: call.messages[-1].content):
        self.function, self.calls, self.cancelled = answer, [], 0

    async def answer(self, call):
        self.calls.append(call)
        try:
            found = self.function(call)
            if inspect.isawaitable(found):
                found = await found
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return (
            found
            if isinstance(found, Reply)
            else Reply(found, new_tokens=len(found), prompt_tokens=1)
        )


def whole_run(agent, *args, model=None, **options):
    """(the run, its runtime)."""

    async def go():
        runtime = Runtime(model or Model(), **options)
        run = await runtime.run(agent, *args)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return run, runtime

    return asyncio.run(go())


def fails(kind, agent, *args, model=None, **options):
    """The error of a run, after which no task may be left."""

    async def go():
        with pytest.raises(kind) as caught:
            await Runtime(model or Model(), **options).run(agent, *args)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return caught.value

    return asyncio.run(go())


def line_of(agent, text):
    """The line of this file in which an agent has a text, once."""
    lines, first = inspect.getsourcelines(agent.__wrapped__)
    [found] = [first + i for i, line in enumerate(lines) if text in line]
    return found


# Agents that work together.


@agent
async def context_gather(files):
    for file in files:
        seen = yield file.upper()
        if seen == "enough":
            return


@agent
async def bug_repair(bug):
    gather, tried = spawn(context_gather, ["a", "b", "c", "d"]), []
    while True:
        try:
            code = await gather.next()
        except EndedError:
            return "gave up", tried
        patch = await llm(f"fix {bug} in {code}")
        tried.append(patch)
        if await tool(str.endswith, patch, "C"):
            return patch, tried
        gather.resume("go on")


def test_an_agent_takes_what_another_gathers_one_after_the_other():
    assert run(bug_repair, "it", model=Model()) == (
        "fix it in C",
        ["fix it in A", "fix it in B", "fix it in C"],
    )
    assert run(bug_repair, "it", model=Model(lambda call: "no")) == ("gave up", ["no"] * 4)


@agent
async def counter(start):
    got, answers = start, []
    while got is not None:
        got = yield got * 10
        answers.append(got)
    yield answers


@agent
async def asks_counter(values):
    child, taken = spawn(counter, values[0]), []
    taken.append(await child.next())
    for value in values[1:]:
        child.resume(value)
        taken.append(await child.next())
    taken.append(await child.next())  # resumes it with None
    return taken


def test_values_go_there_and_back_as_between_native_generators():
    async def native(values):
        async def counting(start):
            got, answers = start, []
            while got is not None:
                got = yield got * 10
                answers.append(got)
            yield answers

        child = counting(values[0])
        taken = [await child.asend(None)]
        for value in values[1:]:
            taken.append(await child.asend(value))
        return [*taken, await child.asend(None)]

    for values in ([3], [3, 1, 4, 1, 5]):
        assert run(asks_counter, values, model=Model()) == asyncio.run(native(values))


@agent
async def adds(to):
    to.append("child")
    given = yield to
    given.append("child again")
    to.append("later")
    yield to + given


@agent
async def returns(value):
    return value


@agent
async def shares():
    mine, sent = ["mine"], ["sent"]
    child = spawn(adds, mine)
    yielded = await child.next()
    child.resume(sent)
    sent.append("after")
    yielded.append("taken")
    last = await child.next()
    other = spawn(returns, mine)
    result = await other.result()
    result.append("result")
    again = await other
    return mine, sent, yielded, last, result, again


def test_agents_do_not_see_each_others_changes():
    assert run(shares, model=Model()) == (
        ["mine"],
        ["sent", "after"],
        ["mine", "child", "taken"],
        ["mine", "child", "later", "sent", "child again"],
        ["mine", "result"],
        ["mine"],
    )


@agent
async def sleeps(seconds, value):
    await asyncio.sleep(seconds)
    return value


@agent
async def spawns_all(count):
    begun = [spawn(sleeps, 0.05, i) for i in range(count)]
    return [await child for child in begun]


def test_children_run_side_by_side():
    begin = time.perf_counter()
    assert run(spawns_all, 40, model=Model()) == list(range(40))
    assert time.perf_counter() - begin < 1


@agent
async def gives_up(how):
    child = spawn(sleeps, 0.01, "of a grandchild")
    if how == "yielded":
        yield child
    elif how == "in a list":
        yield [child]


@agent
async def returns_child():
    return {"child": spawn(sleeps, 0.01, "of a grandchild")}


@agent
async def takes_child(how):
    if how == "returned":
        child = (await spawn(returns_child))["child"]
    else:
        giver = spawn(gives_up, how)
        child = await giver.next()
        giver.resume()
        await giver
        if how == "in a list":
            [child] = child
    await asyncio.sleep(0.002)
    return await child


@pytest.mark.parametrize("how", ["returned", "yielded", "in a list"])
def test_a_child_that_was_given_away_does_not_end_with_its_parent(how):
    assert run(takes_child, how, model=Model()) == "of a grandchild"


@agent
async def waits_for(child):
    return await child


@agent
async def gives_down():
    child = spawn(sleeps, 0.01, 3)
    return await spawn(waits_for, child)


@agent
async def gives_down_and_ends():
    spawn(waits_for, spawn(sleeps, 60, 3))
    return "done"


def test_a_child_that_was_given_down_ends_with_its_parent():
    assert run(gives_down, model=Model()) == 3
    begin = time.perf_counter()
    done, runtime = whole_run(gives_down_and_ends)
    assert done.accepted.value == "done" and time.perf_counter() - begin < 5
    assert [run.cancelled for run in runtime.runs] == [False, True, True]


# Firing a state many times.


class Times(Supervisor):
    """Fires the root once and other model waits k times; accepts the first finished state."""

    def __init__(self, k):
        self.k = k

    def init(self, root):
        self.ready, self.accepted, self.open = [root], None, 1

    def fire(self):
        ready, self.ready = self.ready, []
        return ready

    def commit(self, state):
        self.open -= 1
        if state.ended:
            self.accepted = self.accepted or state
        elif not state.sleeping:
            self.go_on(state)
        else:
            self.open += 1
        self.over = not self.open

    def wake(self, state):
        self.open -= 1
        self.go_on(state)

    def go_on(self, state):
        count = self.k if state.asks_model else 1
        self.open += count
        self.ready += [state] * count


class Twice(Times):
    """Fires every state that waits for anything twice."""

    def go_on(self, state):
        self.open += 2
        self.ready += [state] * 2


@agent
async def wanders(words):
    seen, total = {}, 0
    for word in words:
        answer = await llm(word)
        seen[word] = [answer]
        total += len(answer)
        if answer.endswith("1"):
            words.append("more")
        if len(seen) > 2:
            raise ValueError(f"too many: {sorted(seen)}")
        seen[word].append(await tool(len, words))
    return total, seen, words


async def native_wanders(words, answers):
    """The same as an ordinary coroutine; `answers` gives the model's answers in order."""
    seen, total = {}, 0
    for word in words:
        answer = await answers(word)
        seen[word] = [answer]
        total += len(answer)
        if answer.endswith("1"):
            words.append("more")
        if len(seen) > 2:
            raise ValueError(f"too many: {sorted(seen)}")
        seen[word].append(len(words))
    return total, seen, words


@pytest.mark.parametrize("k", [1, 2, 3])
def test_firing_a_state_k_times_is_k_independent_runs_with_the_same_choices(k):
    def said(path):
        return f"{'x' * (sum(path) % 3)}{path[-1]}"

    done, _ = whole_run(
        wanders.under(Times(k)), ["a", "b"], model=Model(lambda call: said(call.state))
    )
    ends = [state for state in done.states if state.ended]
    assert len(ends) >= k and len({state.path for state in ends}) == len(ends)
    for end in ends:
        chosen, state = [], end
        while state.parent:
            if state.parent.asks_model:
                chosen.append(said(state.path))
            state = state.parent
        chosen.reverse()

        async def answers(word, chosen=chosen):
            return chosen.pop(0)

        if end.error:
            with pytest.raises(type(end.error), match=re.escape(str(end.error))):
                asyncio.run(native_wanders(["a", "b"], answers))
        else:
            assert end.value == asyncio.run(native_wanders(["a", "b"], answers))
        assert not chosen


def test_a_state_keeps_its_variables_whatever_its_firings_do():
    done, _ = whole_run(
        wanders.under(Times(2)), ["a", "b"], model=Model(lambda call: str(call.state[-1]))
    )
    first = next(state for state in done.states if state.asks_model)
    assert first.fired == 2 and dict(first.variables) == {
        "words": ["a", "b"],
        "seen": {},
        "total": 0,
        "word": "a",
    }
    assert first.line == line_of(wanders, "await llm(word)")


OUTSIDE = []


@agent
async def looks_outside():
    seen = OUTSIDE
    await llm("x")
    OUTSIDE.append("changed")
    return seen


def test_variables_are_those_of_when_the_state_was_committed():
    OUTSIDE.clear()
    done, _ = whole_run(looks_outside.under(Times(3)))
    values = {state.path[-1]: state.value for state in done.states if state.finished}
    # The first firing goes on with the agent's own objects, as Python does.
    assert values[0] is OUTSIDE and OUTSIDE == ["changed"] * 3
    assert values[1] == values[2] == []
    first = next(state for state in done.states if state.asks_model)
    assert dict(first.variables) == {"seen": []}


# Dialogues.


@agent
async def talks():
    await llm([{"role": "system", "content": "be brief"}, Message("user", "one")])
    many = await llm("which?", n=3)
    await llm({"role": "user", "content": "two"})
    return many, await llm()


def test_a_dialogue_continues_and_n_answers_do_not_become_part_of_it():
    model = Model(lambda call: f"answer {len(call.messages)} {call.seed}")
    done, _ = whole_run(talks, model=model)
    many, _ = done.accepted.value
    texts = [[(message.role, message.content) for message in call.messages] for call in model.calls]
    first, *which, two, last = texts
    assert first == [("system", "be brief"), ("user", "one")]
    assert (
        which
        == [
            [
                *first,
                (
                    "assistant",
                    many[0].replace("answer 4", "answer 2").split()[0]
                    + f" 2 {model.calls[0].seed}",
                ),
                ("user", "which?"),
            ]
        ]
        * 3
    )
    assert two == [*which[0], ("user", "two")] and last == [
        *two,
        ("assistant", f"answer 5 {model.calls[4].seed}"),
    ]
    assert len({call.seed for call in model.calls}) == 6 and len(set(many)) == 3
    assert {(call.agent, call.run) for call in model.calls} == {("talks", "talks")}
    assert [call.state for call in model.calls] == [
        (0, 0),
        *[(0, 0, 0)] * 3,
        (0, 0, 0, 0),
        (0, 0, 0, 0, 0),
    ]
    assert done.calls == 6 and done.new_tokens == sum(
        len(f"answer {len(c.messages)} {c.seed}") for c in model.calls
    )
    assert done.prompt_tokens == 6


@agent
async def options():
    return await llm(
        "x", stop="\n", max_new_tokens=3, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1
    )


def test_options_come_to_the_model():
    model = Model()
    run(options, model=model)
    assert dataclasses.asdict(model.calls[0].options) == {
        "stop": ("\n",),
        "max_new_tokens": 3,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "adapter": None,
    }


@agent
async def parses(retries, n):
    return await llm("a number", parse=int, retries=retries, n=n)


def attempts(*texts):
    """A model that gives these answers in order."""
    remaining = list(texts)
    return Model(lambda call: remaining.pop(0))


def test_an_answer_that_cannot_be_parsed_is_asked_for_again():
    model = attempts("one", "two", "3")
    done, _ = whole_run(parses, 2, None, model=model)
    assert (
        done.accepted.value == 3
        and done.calls == 3
        and len({call.seed for call in model.calls}) == 3
    )
    assert done.accepted.dialogue[-1] == Message("assistant", "3")
    error = fails(ParseError, parses, 1, None, model=attempts("one", "two"))
    assert (
        error.text == "two"
        and "2 answers" in str(error)
        and "'two'" in str(error)
        and "agent parses" in str(error)
    )
    assert "invalid literal" in error.reason
    assert run(parses, 1, 2, model=Model(lambda call: "5")) == [5, 5]
    assert fails(ParseError, parses, 0, 2, model=attempts("5", "no")).text == "no"


@agent
async def asks_in_time(timeout, retries):
    return await llm("x", timeout=timeout, retries=retries)


def test_a_model_that_is_late_or_fails_is_asked_again():
    async def late_twice(call):
        if len(model.calls) < 3:
            await asyncio.sleep(60)
        return "at last"

    model = Model(late_twice)
    assert run(asks_in_time, 0.01, 2, model=model) == "at last" and model.cancelled == 2
    model = Model(late_twice)
    error = fails(TimeoutError, asks_in_time, 0.01, 1, model=model)
    line = line_of(asks_in_time, "await llm")
    assert (
        str(error)
        == f"the model has not answered agent asks_in_time in line {line} within 0.01 seconds"
    )

    def breaks_once(call):
        if len(broken.calls) == 1:
            raise ConnectionError("no route")
        return "fine"

    broken = Model(breaks_once)
    assert run(asks_in_time, 5, 1, model=broken) == "fine"
    broken = Model(breaks_once)
    assert str(fails(ConnectionError, asks_in_time, 5, 0, model=broken)) == "no route"


def test_bad_calls_are_refused_at_once():
    for arguments, words in [
        ({"n": 0}, "n is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"timeout": 0}, "timeout 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"stop": ""}, "stop is"),
    ]:
        with pytest.raises(ValueError, match=words):
            llm("x", **arguments)
    for content in (3, [3], {"role": "user"}, [{"role": "user", "content": 3}]):
        with pytest.raises((ValueError, TypeError)):
            llm(content)
    with pytest.raises(TypeError, match="3 cannot be called"):
        tool(3)


@agent
async def asks_nothing():
    return await llm()


def test_an_empty_dialogue_and_an_answer_that_is_none_are_errors():
    assert "nothing in its dialogue" in str(fails(ValueError, asks_nothing))

    class Text:
        async def answer(self, call):
            return "text"

    assert "has to be a Reply" in str(fails(TypeError, options, model=Text()))


# Tools.


def thread_name(values):
    values.append("changed")
    return threading.current_thread().name


async def in_the_loop(values):
    values.append("changed")
    await asyncio.sleep(0)
    return threading.current_thread().name


@agent
async def uses(function):
    values = ["mine"]
    return await tool(function, values), values


def test_tools_run_in_threads_or_in_the_loop_and_on_copies():
    assert run(uses, thread_name, model=Model()) == ("jaxshare-tool", ["mine"])
    assert run(uses, in_the_loop, model=Model()) == (threading.current_thread().name, ["mine"])


@agent
async def uses_again(values):
    return await tool(in_the_loop_length, values)


async def in_the_loop_length(values):
    values.append("changed")
    return len(values)


def test_every_firing_gives_a_tool_copies_of_its_own():
    done, _ = whole_run(uses_again.under(Twice(1)), ["one"])
    assert [state.value for state in done.states if state.finished] == [2, 2]


class Flaky:
    """Raises until it is called for the last time, asynchronously or not."""

    def __init__(self, failures, error):
        self.calls, self.failures, self.error = 0, failures, error

    def __deepcopy__(self, memo):
        return self

    def __call__(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return self.calls


@agent
async def tries(function, retries, timeout):
    try:
        return await tool(function, retries=retries, timeout=timeout)
    except (KeyError, TimeoutError, RuntimeError, SystemExit) as error:
        return type(error).__name__, str(error)


def test_a_tool_that_raises_is_called_again_and_then_raises_in_the_agent():
    assert run(tries, Flaky(2, KeyError("k")), 2, None, model=Model()) == 3
    assert run(tries, Flaky(3, KeyError("k")), 2, None, model=Model()) == ("KeyError", "'k'")
    assert run(tries, Flaky(1, StopIteration(1)), 0, None, model=Model())[0] == "RuntimeError"
    assert run(tries, Flaky(1, SystemExit("out")), 0, None, model=Model()) == ("SystemExit", "out")


async def hangs_politely():
    await asyncio.sleep(60)


def hangs():
    time.sleep(0.3)


def late():
    raise TimeoutError("of its own")


def test_a_tool_that_hangs_ends_by_its_timeout():
    for function in (hangs, hangs_politely):
        kind, text = run(tries, function, 1, 0.01, model=Model())
        assert (
            kind == "TimeoutError"
            and text == f"the tool {function.__name__} has not ended within 0.01 seconds"
        )
    assert run(tries, late, 1, 5, model=Model()) == ("TimeoutError", "of its own")


def test_a_program_ends_though_a_tool_hangs_for_good(tmp_path):
    (tmp_path / "hanging.py").write_text(
        textwrap.dedent("""
        import threading
        from jaxshare.serving.agents import agent, run, tool

        @agent
        async def hangs():
            try:
                await tool(threading.Event().wait, timeout=0.05)
            except TimeoutError as error:
                return str(error)

        print(run(hangs, model=None))
    """)
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "hanging.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and "has not ended within 0.05 seconds" in done.stdout, done.stderr


@agent
async def awaits(what):
    try:
        return await what()
    except TypeError as error:
        return str(error)


@agent(restore="copy")
async def copied_awaits(what):
    return await what()


def test_other_things_are_awaited_as_python_does():
    async def plain():
        await asyncio.sleep(0)
        return "plain"

    async def native():
        await 3  # pyright: ignore

    with pytest.raises(TypeError) as error:
        asyncio.run(native())
    assert run(awaits, plain, model=Model()) == "plain"
    assert run(awaits, lambda: 3, model=Model()) == str(error.value)


def test_a_coroutine_is_made_again_for_another_firing_or_refused_where_states_are_copied():
    async def plain():
        return "plain"

    done, _ = whole_run(awaits.under(Twice(2)), plain)
    assert [state.value for state in done.states if state.finished] == ["plain"] * 2
    assert sorted(state.restored for state in done.states if state.finished) == [
        "original",
        "replay",
    ]
    done, _ = whole_run(copied_awaits.under(Twice(2)), plain)
    assert done.accepted.value == "plain"
    [failed] = [state for state in done.states if state.error]
    assert "make it a tool" in str(
        failed.error
    ) and f"line {line_of(copied_awaits, 'await what')}" in str(failed.error)


# Cancelled work.


class Watched:
    """An async tool that records how it ended."""

    def __init__(self):
        self.ended = []

    def __deepcopy__(self, memo):
        return self

    async def __call__(self):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # a run waits until it is tidied up
            self.ended.append("cancelled")
            raise


class First(Times):
    """Accepts the first path that ends."""

    def commit(self, state):
        super().commit(state)
        self.over = state.finished


@agent
async def child_of(watched):
    await tool(watched)


@agent
async def races(watched):
    answer = await llm("who?")
    if answer == "first":
        return answer
    try:
        if answer == "second":
            await tool(watched)
        if answer == "third":
            await spawn(child_of, watched)
        return await llm("more")
    except BaseException:
        return "swallowed"


@agent
async def hurries():
    async def later():
        return "later"

    answer = await llm("who?")
    return answer if answer == "1" else await later()


def test_a_coroutine_that_is_not_needed_any_more_is_closed():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done, _ = whole_run(hurries.under(First(2)), model=Model(lambda call: str(call.state[-1])))
        assert done.accepted.value == "1"
        del done
        gc.collect()
    assert not caught


def test_what_a_finished_supervisor_no_longer_needs_is_cancelled():
    async def answer(call):
        if call.messages[-1].content == "more":
            await asyncio.sleep(60)
        await asyncio.sleep(0.05 if call.state[-1] == 0 else 0)
        return ["first", "second", "third", "fourth"][call.state[-1]]

    watched, model, begin = Watched(), Model(answer), time.perf_counter()
    done, runtime = whole_run(races.under(First(4)), watched, model=model)
    assert done.accepted.value == "first" and time.perf_counter() - begin < 5
    assert watched.ended == ["cancelled"] * 2 and model.cancelled == 4
    [child] = done.children
    assert child.done and child.cancelled and isinstance(child.error, EndedError)
    assert not any(
        state.finished and state.value == "swallowed"
        for run in runtime.runs
        for state in run.states
    )


def test_a_run_that_is_cancelled_from_outside_leaves_nothing_behind():
    async def go(watched):
        task = asyncio.create_task(Runtime(Model()).run(child_of, watched))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    watched = Watched()
    asyncio.run(go(watched))
    assert watched.ended == ["cancelled"]


def test_an_event_loop_that_ends_cancels_agents_that_catch_everything():
    async def go():
        kept.append(
            asyncio.create_task(
                Runtime(Model()).run(all_hold_on, ValueError(), lambda: swallowed.append(1))
            )
        )
        await asyncio.sleep(0.05)

    kept, swallowed = [], []
    asyncio.run(go())
    assert kept[0].cancelled() and swallowed == [1] * 10  # each is told once, and ends


async def cancels_itself():
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@agent
async def catches_cancelled():
    try:
        await tool(cancels_itself)
    except asyncio.CancelledError:
        return "caught"


@agent
async def is_cancelled():
    await tool(cancels_itself)


def test_a_tool_that_is_cancelled_by_itself_raises_in_the_agent():
    assert run(catches_cancelled, model=Model()) == "caught"
    fails(asyncio.CancelledError, is_cancelled)


@agent
async def interrupted(error):
    await asyncio.sleep(0.01)
    raise error


@agent
async def holds_on(swallowed):
    try:
        await asyncio.sleep(0.2)
    except BaseException:
        swallowed()


@agent
async def all_hold_on(error, swallowed):
    children = [spawn(interrupted, error), *(spawn(holds_on, swallowed) for _ in range(10))]
    for child in children[1:]:
        await child
    return "went on"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_the_program_whoever_catches_everything(error):
    swallowed = []
    with pytest.raises(error):
        run(all_hold_on, error, lambda: swallowed.append(1), model=Model())
    assert swallowed == [1] * 10  # each is told once, and ends


# Errors.


@agent
async def raises(what):
    await tool(len, "")
    raise ValueError(what)


@agent
async def middle(what):
    def begin():
        return spawn(raises, what)  # not this line

    children = [begin() for _ in range(1)]
    await tool(len, "")
    return await children[0]


@agent
async def top(what):
    child = spawn(middle, what)
    return await child


def test_an_error_names_the_agents_that_led_there():
    error = fails(ValueError, top, "boom")
    assert str(error) == "boom"
    middle_line, top_line = line_of(middle, "begin() for"), line_of(top, "child = spawn(")
    assert error.__notes__ == [
        f"in agent raises, spawned by middle in line {middle_line} of {__file__}",
        f"in agent middle, spawned by top in line {top_line} of {__file__}",
    ]
    frames, traceback = [], error.__traceback__
    while traceback:
        frames.append((traceback.tb_frame.f_code.co_name, traceback.tb_lineno))
        traceback = traceback.tb_next
    assert ("raises", line_of(raises, "raise ValueError")) in frames


@agent
async def catches():
    child = spawn(raises, "caught")
    found = []
    for wait in (child.result, child.next, child.result):
        try:
            await wait()
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_childs_error_can_be_caught_where_it_is_awaited():
    assert run(catches, model=Model()) == ["caught"] * 3


@agent
async def never_awaits():
    spawn(raises, "nobody")
    await asyncio.sleep(0.01)
    return "fine"


def test_nobody_hears_of_a_child_that_nobody_waits_for():
    done, _ = whole_run(never_awaits)
    assert done.accepted.value == "fine" and isinstance(done.children[0].error, ValueError)


@agent
async def misuses(what):
    child = spawn(counter, 1)
    try:
        if what == "resume early":
            child.resume(1)
        elif what == "resume twice":
            await child.next()
            child.resume(1)
            child.resume(2)
        elif what == "resume ended":
            done = spawn(sleeps, 0, 1)
            await done
            done.resume(1)
        elif what == "next of ended":
            done = spawn(sleeps, 0, 1)
            await done
            await done.next()
        elif what == "next beyond":
            for _ in range(9):
                await child.next()
        elif what == "bad arguments":
            spawn(sleeps)
        elif what == "no agent":
            spawn(len)
        elif what == "call":
            sleeps(1, 2)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("resume early", AgentError, "nothing that it has yielded was taken"),
        ("resume twice", AgentError, "nothing that it has yielded was taken"),
        ("resume ended", EndedError, "agent sleeps has ended and cannot be resumed"),
        ("next of ended", EndedError, "agent sleeps has ended and yields no more"),
        ("next beyond", EndedError, "agent counter has ended and yields no more"),
        ("bad arguments", TypeError, "sleeps() missing a required argument: 'seconds'"),
        ("no agent", TypeError, "is no agent"),
        ("call", TypeError, "spawn(sleeps, ...) runs it from another agent"),
    ],
)
def test_misuse_is_an_error_where_it_happens(what, kind, words):
    found, text = run(misuses, what, model=Model())
    assert found is kind and words in text


@agent
async def recurses(depth):
    return await spawn(recurses, depth + 1)


@agent
async def multiplies():
    while True:
        spawn(sleeps, 60, 1)


def test_agents_cannot_spawn_each_other_for_ever():
    error = fails(AgentError, recurses, 0)
    assert (
        "64 agents deep" in str(error) and "`deepest`" in str(error) and len(error.__notes__) == 64
    )
    assert "3 agents deep" in str(fails(AgentError, recurses, 0, deepest=3))
    assert "there were 20 agents already" in str(fails(AgentError, multiplies, most_agents=20))


@agent
async def yields_to_nobody():
    yield 1


def test_yielding_to_nobody_is_an_error():
    error = fails(AgentError, yields_to_nobody)
    assert (
        f"yields_to_nobody yields in line {line_of(yields_to_nobody, 'yield 1')}, but no other "
        "agent has spawned it" in str(error)
    )


@agent(restore="copy")
async def holds_a_generator():
    numbers = (i for i in range(3))
    await tool(len, "")
    return list(numbers)


@agent(restore="copy")
async def holds_it_at_the_begin(numbers):
    return sum(numbers)


def test_a_value_that_cannot_be_copied_is_an_error_that_names_the_variable():
    for which, arguments in (
        (holds_a_generator, ()),
        (holds_it_at_the_begin, ((i for i in range(3)),)),
    ):
        assert "the variable numbers" in str(fails(UncopyableError, which, *arguments))


def test_things_that_only_agents_can_do():
    with pytest.raises(RuntimeError, match=r"spawn\(sleeps\) outside an agent"):
        spawn(sleeps, 1, 2)

    async def waits(request):
        return await request

    for request in (llm("x"), tool(len, "")):
        with pytest.raises(RuntimeError, match="outside an agent"):
            asyncio.run(waits(request))
    with pytest.raises(TypeError, match="is no agent"):
        run(len, model=Model())

    async def inside():
        return run(sleeps, 0, 1, model=Model())

    with pytest.raises(RuntimeError, match="begins an event loop"):
        asyncio.run(inside())

    async def twice():
        runtime = Runtime(Model())
        await runtime.run(sleeps, 0, 1)
        await runtime.run(sleeps, 0, 1)

    with pytest.raises(RuntimeError, match="make another"):
        asyncio.run(twice())

    with pytest.raises(TypeError, match="async def"):
        agent(lambda: 1)


@agent
async def helped():
    async def helper():
        return spawn(sleeps, 0, 1)

    await (await helper())


async def spawns():
    return spawn(sleeps, 0, 1)


@agent
async def spawns_in_tool():
    await asyncio.sleep(0)
    spawn(sleeps, 0, 1)
    return await tool(spawns)


def test_a_tool_cannot_spawn():
    assert "outside an agent" in str(fails(RuntimeError, spawns_in_tool))


def test_an_ordinary_coroutine_inside_an_agent_can_spawn():
    assert run(helped, model=Model()) is None


# Deadlocks.


@agent
async def wants_value(child):
    return await child.next()


@agent
async def never_yields(child):
    return await child


@agent
async def locked():
    idle = spawn(counter, 1)
    await idle.next()
    return await spawn(never_yields, idle)


def test_a_deadlock_tells_who_waits_for_whom():
    error = fails(DeadlockError, locked)
    waits = dict(re.findall(r"(\S+) waits in line (\d+ for [^;]+)", str(error)))
    first, second = "locked/counter@0", "locked/never_yields@0.0"
    assert waits == {
        "locked": f"{line_of(locked, 'await spawn')} for the result of {second}",
        first: f"{line_of(counter, 'yield got')} for being resumed",
        second: f"{line_of(never_yields, 'await child')} for the result of {first}",
    }


@agent
async def waits_in_time(child):
    try:
        return await spawn(never_yields.under(Single(Budget(seconds=0.05))), child)
    except BudgetError as error:
        return str(error)


@agent
async def unlocked():
    idle = spawn(counter, 1)
    await idle.next()
    return await spawn(waits_in_time, idle)


def test_a_budget_of_seconds_ends_a_run_that_only_waits():
    assert (
        run(unlocked, model=Model())
        == "agent never_yields has used up its budget (0.05 seconds) before it came to an end"
    )


@agent
async def yields_late():
    await asyncio.sleep(0.1)
    yield "late"


@agent
async def takes_over():
    child = spawn(yields_late)
    try:
        await spawn(wants_value.under(Single(Budget(seconds=0.02))), child)
    except BudgetError:
        return await child.next()


def test_a_value_goes_to_who_still_waits_for_it():
    assert run(takes_over, model=Model()) == "late"


@agent
async def answers_twice():
    await tool(in_the_loop, [])
    got = yield "mine"
    GOT.append(got)


GOT = []


@agent
async def takes_one(child, name):
    value = await child.next()
    child.resume(name)
    return value


@agent
async def two_take_one_each():
    child = spawn(answers_twice.under(BestOfN(2, lambda state: 0)))
    takers = [spawn(takes_one, child, name) for name in "ab"]
    taken = [await taker for taker in takers]
    await child
    return taken


def test_every_path_of_a_child_is_resumed_by_who_took_its_value():
    GOT.clear()
    assert run(two_take_one_each, model=Model()) == ["mine", "mine"] and GOT == ["a", "b"]


# Budgets.


@agent
async def asks(times, words="x"):
    said = []
    for _ in range(times):
        said.append(await llm(words))
    return said


def test_budgets_end_a_run_before_the_next_call():
    for budget, calls in ((Budget(calls=3), 3), (Budget(tokens=5), 3), (Budget(tokens=4), 2)):
        model = Model(lambda call: "xx")
        error = fails(BudgetError, asks.under(Single(budget)), 10, model=model)
        assert len(model.calls) == calls and "agent asks has used up its budget" in str(error)
    assert len(run(asks.under(Single(Budget(calls=3, tokens=100))), 3, model=Model())) == 3


def test_several_answers_and_retries_count_as_calls():
    model = Model(lambda call: "no")
    assert (
        "(3 calls)"
        in str(fails(BudgetError, parses.under(Single(Budget(calls=3))), 5, None, model=model))
        and len(model.calls) == 3
    )
    model = Model(lambda call: "5")
    fails(BudgetError, parses.under(Single(Budget(calls=3))), 0, 4, model=model)
    assert not model.calls


@agent
async def asks_slowly(times):
    for _ in range(times):
        await llm("x")
    return times


@pytest.mark.parametrize("budget", [Budget(calls=4), Budget(seconds=0.2)])
def test_a_budget_leaves_the_best_that_there_is(budget):
    async def answer(call):
        if budget.seconds and call.state[0]:
            await asyncio.sleep(60)
        return "x"

    begin, model = time.perf_counter(), Model(answer)
    done, _ = whole_run(
        asks_slowly.under(BestOfN(3, lambda state: 1, budget=budget)), 2, model=model
    )
    assert done.accepted.value == 2 and time.perf_counter() - begin < 5
    assert len(model.calls) == 4
    assert sum(state.finished for state in done.states) == 1


def test_budgets_begin_above_nothing():
    for field in ("calls", "tokens", "seconds", "money"):
        with pytest.raises(ValueError, match=f"{field} of a budget is 0"):
            Budget(**{field: 0})


# Supervisors.


class Plain:
    """A supervisor of three paths, with the four callbacks alone."""

    def init(self, root):
        self.ready = [root] * 3

    def fire(self):
        ready, self.ready = self.ready, []
        return ready

    def commit(self, state):
        if not state.ended and not state.sleeping:
            self.ready.append(state)

    def wake(self, state):
        self.ready.append(state)


class Chooses(Plain):
    """The same, which also sets `over` and `accepted`."""

    over = False

    def commit(self, state):
        super().commit(state)
        if state.finished and state.path[0] == 1:
            self.over, self.accepted = True, state


@agent
async def which():
    child = spawn(sleeps, 0.001, "slept")
    return await child, await llm("which?")


def test_a_supervisor_needs_the_four_callbacks_alone():
    def answer(call):
        return str(call.state[0])

    done, _ = whole_run(which.under(Plain()), model=Model(answer))
    assert (
        done.accepted.value == ("slept", "0") and sum(state.finished for state in done.states) == 3
    )
    done, _ = whole_run(which.under(Chooses()), model=Model(answer))
    assert done.accepted.value == ("slept", "1")
    assert str(fails(ValueError, raises.under(Plain()), "boom")) == "boom"
    limited = Plain()
    limited.budget = Budget(calls=1)
    done, _ = whole_run(which.under(limited), model=Model(answer))
    assert done.accepted.value == ("slept", "0") and done.calls == 1


class Ahead(Plain):
    """Fires sleeping states too, at once."""

    def commit(self, state):
        if not state.ended:
            self.ready.append(state)

    def wake(self, state):
        pass


def test_a_sleeping_state_that_is_fired_goes_on_when_it_wakes():
    done, _ = whole_run(which.under(Ahead()))
    assert [state.value for state in done.states if state.finished] == [("slept", "which?")] * 3


class Never(Plain):
    def fire(self):
        return ()


class Forgets(Plain):
    def fire(self):
        pass


class FiresEnded(Plain):
    def commit(self, state):
        self.ready.append(state)


class FiresForeign(Plain):
    def __init__(self):
        self.seen = []  # by all copies

    def init(self, root):
        self.seen.append(root)
        self.ready = [self.seen[0]]


class Breaks(Plain):
    def __init__(self, where):
        self.where = where

    def init(self, root):
        super().init(root)
        if self.where == "init":
            raise ZeroDivisionError

    def fire(self):
        if self.where == "fire":
            raise ZeroDivisionError
        return super().fire()

    def commit(self, state):
        if self.where == "commit":
            raise ZeroDivisionError
        super().commit(state)

    def wake(self, state):
        if self.where == "wake":
            raise ZeroDivisionError
        super().wake(state)


class AcceptsAnything(Supervisor):
    def init(self, root):
        self.over, self.accepted = True, root


@pytest.mark.parametrize(
    ("supervisor", "words"),
    [
        (Never(), "Never, the supervisor of agent which, fires no state"),
        (Forgets(), "Forgets, the supervisor of agent which, fires no state"),
        (FiresEnded(), "cannot be fired: it has ended"),
        (AcceptsAnything(), "which is not finished"),
    ],
)
def test_supervisors_that_do_what_cannot_be(supervisor, words):
    assert words in str(fails(AgentError, which.under(supervisor)))


def test_a_state_of_another_run_cannot_be_fired():
    foreign = which.under(FiresForeign())

    @agent
    async def parent():
        return await spawn(foreign), await spawn(foreign)

    assert "is none of parent/which@" in str(fails(AgentError, parent))


@pytest.mark.parametrize("where", ["init", "fire", "commit", "wake"])
def test_a_supervisors_error_ends_its_run(where):
    error = fails(ZeroDivisionError, which.under(Breaks(where)))
    assert error.__notes__ == ["in Breaks, the supervisor of agent which,"]

    @agent
    async def parent():
        try:
            await spawn(which.under(Breaks(where)))
        except ZeroDivisionError:
            return "caught"

    assert run(parent, model=Model()) == "caught"


def test_an_agent_shows_its_graph():
    said = str(bug_repair.graph)
    assert all(
        f"{line_of(bug_repair, text)}" in said
        for text in ("gather.next()", "await llm", "await tool")
    )
    assert bug_repair.under(Single()).graph.nodes == bug_repair.graph.nodes


@pytest.mark.parametrize("supervisor", [None, "Single", Single, object(), lambda: None])
def test_what_is_no_supervisor_is_refused(supervisor):
    with pytest.raises(
        TypeError, match="a supervisor is an object with the callbacks init, fire, commit and wake"
    ):
        agent(supervisor=supervisor)(which.__wrapped__)


def test_the_supervisor_is_given_by_name():
    with pytest.raises(TypeError, match="by name"):
        agent(Single())


def test_every_run_has_a_supervisor_of_its_own():
    @agent
    async def parent():
        children = [spawn(asks.under(shared), 1, str(i)) for i in range(3)]
        return [await child for child in children]

    shared = BestOfN(2, lambda state: len(state.value))
    assert run(parent, model=Model()) == [["0"], ["1"], ["2"]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda state: "good", "gave 'good' for"),
        (lambda state: None, "gave None for"),
    ],
)
def test_a_value_that_is_no_number_is_an_error(value, words):
    assert words in str(fails(AgentError, asks.under(BestOfN(2, value)), 1))


def test_an_error_of_a_value_function_ends_the_run():
    def broken(state):
        raise KeyError("score")

    error = fails(KeyError, asks.under(BestOfN(2, broken)), 1)
    assert "in the value function of BestOfN, the supervisor of agent asks," in error.__notes__[0]


# Leftovers of a run, and its reproducibility.


def tree_of(run):
    return (
        run.id,
        sorted(
            (state.path, state.value if state.finished else repr(state.error), state.score)
            for state in run.states
        ),
        run.accepted and run.accepted.path,
        [tree_of(child) for child in run.children],
    )


@agent
async def explores(words):
    child = spawn(asks.under(SelfConsistency(3)), 2)
    found = await llm(f"about {words}")
    return found[-1], sorted(await child), await tool(len, found)


def test_a_run_is_the_same_again_whatever_is_faster():
    def run_once(seed, delays):
        rng = random.Random(delays)

        async def answer(call):
            await asyncio.sleep(rng.random() / 200)
            return f"{call.seed}"

        done, _ = whole_run(
            explores.under(BestOfN(4, lambda state: int(state.value[0]))),
            "it",
            model=Model(answer),
            seed=seed,
        )
        return tree_of(done)

    first = run_once(0, 0)
    assert all(run_once(0, delays) == first for delays in range(1, 4))
    assert run_once(1, 0) != first


def test_most_calls_bounds_what_is_under_way():
    now, most = 0, 0

    async def answer(call):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return "x"

    whole_run(asks.under(BestOfN(10, lambda state: 0)), 2, model=Model(answer), most_calls=3)
    assert most == 3


def test_nothing_of_a_run_is_kept():
    done, runtime = whole_run(explores.under(BestOfN(2, lambda state: 0)), "it")
    kept = [weakref.ref(state) for run in runtime.runs for state in run.states] + [
        weakref.ref(run) for run in runtime.runs
    ]
    assert len(kept) > 20
    del done, runtime
    gc.collect()
    assert not [ref for ref in kept if ref()]


def test_every_state_knows_when_it_was_made():
    done, _ = whole_run(spawns_all, 2)
    for state in done.states[1:]:
        assert (
            0 < state.times[0] <= state.times[1] <= done.ended
            and state.times[0] >= state.parent.times[1]
        )
    assert done.ended - done.began >= 0.05
