"""Children of a state that is fired many times, against the same programs run natively.

The oracle is Python: an agent is its own coroutine, and a child another one that is driven when its
parent waits for it. Every path of an agent is the program run from its beginning with other answers
of the model.
"""

import asyncio
import contextvars
import hashlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from jaxshare.serving import agents
from jaxshare.serving.agents import (
    AgentError,
    BestOfN,
    EndedError,
    Reply,
    Runtime,
    Single,
    Supervisor,
    agent,
)
from jaxshare.serving.agents.journal import Journal
from tests.serving.agents.python_oracle import copy_some

_BRANCHES: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar(
    "branches", default=None
)
"""The branches of the parent's calls of the model that are still to come, in a native run."""


def answer(text: str, branch: int) -> str:
    """A number for a prompt; other branches get others."""
    digest = hashlib.blake2b(f"{text} {branch}".encode(), digest_size=4).digest()
    return str(int.from_bytes(digest) % 10_000)


class Asked:
    """A call of the model in a native run."""

    def __init__(self, text: str):
        self.text = text

    def __await__(self):
        return (yield self)


def llm(text: str) -> Any:
    return agents.llm(text) if _BRANCHES.get() is None else Asked(text)


def spawn(child: Any, *args: Any) -> Any:
    return agents.spawn(child, *args) if _BRANCHES.get() is None else NativeChild(child, args)


class NativeChild:
    """A child in a native run: its own coroutine or generator, run when it is waited for."""

    def __init__(self, child: Any, args: tuple[Any, ...]):
        made = child.function(*args)
        self._made, self._sent, self._has_ended = made, None, False
        self._waits_at_yield = self._is_cancelled = False
        self._is_generator = inspect.isasyncgen(made)
        self._ended: tuple[Any] | None = None

    def _drive(self, step: Any) -> Any:
        value = None
        while True:
            asked = step.send(value)
            value = answer(asked.text, 0)

    async def next(self) -> Any:
        self._check()
        try:
            self._drive(self._made.asend(self._sent))
        except StopIteration as end:
            self._sent, self._waits_at_yield = None, True
            return end.value
        except StopAsyncIteration:
            self._has_ended = True
            raise EndedError from None

    def resume(self, value: Any = None) -> None:
        if self._has_ended or self._is_cancelled:
            raise EndedError
        if not self._waits_at_yield:
            raise AgentError
        self._sent, self._waits_at_yield = value, False

    async def result(self) -> Any:
        self._check()
        if self._ended is not None:
            return self._ended[0]
        if self._is_generator:
            try:
                self._drive(self._made.asend(self._sent))
            except StopAsyncIteration:
                self._has_ended = True
                return None
            raise AssertionError("the program waits for the end of a child that yields")
        try:
            self._drive(self._made)
        except StopIteration as end:
            self._ended = (end.value,)
            return end.value

    def cancel(self) -> None:
        self._is_cancelled = True

    def _check(self) -> None:
        if self._has_ended or self._is_cancelled:
            raise EndedError

    def __await__(self):
        return self.result().__await__()


def native(function: Callable[..., Any], branches: list[int]) -> Any:
    """The value of an agent run by Python, whose calls of the model get these branches."""

    def run() -> Any:
        _BRANCHES.set(branches)
        coroutine, value = function(), None
        try:
            while True:
                asked = coroutine.send(value)
                value = answer(asked.text, branches.pop(0))
        except StopIteration as end:
            return end.value

    return contextvars.Context().run(run)


class Each(Supervisor):
    """Fires every state that asks the model k times, and all others once.

    Args:
      late: fires the second ones only after the first path has ended.
    """

    def __init__(self, k: int, late: bool = False):
        self.k, self.late = k, late

    def init(self, root: Any) -> None:
        self.over, self.accepted, self.ended = False, None, []
        self._ready, self._later, self._open = [root], [], 1

    def fire(self) -> Any:
        ready, self._ready = self._ready, []
        return ready

    def commit(self, state: Any) -> None:
        if state.ended:
            self.ended.append(state)
            self._open -= 1
            if not self._open and self._later:
                self._ready, self._later = self._later, []
                self._open = len(self._ready)
            if not self._open:
                self.over, self.accepted = True, min(self.ended, key=lambda each: each.path)
        elif state.asks_model:
            again = [state] * (self.k - 1)
            self._ready.append(state)
            if self.late:
                self._later += again
            else:
                self._ready += again
                self._open += len(again)
        elif not state.sleeping:
            self._ready.append(state)

    def wake(self, state: Any) -> None:
        self._ready.append(state)


class Model:
    """Answers by the prompt and the index of the firing."""

    def __init__(self, delays: bool = False):
        self.delays, self.calls = delays, []

    async def answer(self, call: Any) -> Reply:
        self.calls.append(call)
        if self.delays:  # later firings are faster
            await asyncio.sleep(0.002 * (3 - min(call.state[-1], 2)))
        return Reply(answer(call.messages[-1].content, call.state[-1]))


# Children.


@agent
async def debater(name):
    said = await llm(f"{name} begins")
    while True:
        heard = yield f"{name}: {said}"
        if heard is None:
            return
        said = await llm(f"{name} hears {heard}")


@agent
async def counts(start):
    total = start
    while True:
        got = yield total
        total += got or 1


@agent
async def thinks(task):
    parts = [await llm(f"{task} {i}") for i in range(3)]
    return "-".join(parts)


@agent
async def leads(task):
    helper, said = spawn(counts, int(await llm(task))), []
    for _ in range(3):
        said.append(await helper.next())
        got = yield said[-1]
        helper.resume(int(got or 0) % 7)


@agent
async def makes(task):
    helper = spawn(debater, task)
    return helper, await helper.next()


# Programs.


async def debate():
    one, two = spawn(debater, "one"), spawn(debater, "two")
    heard, all_said = "nothing", []
    for turn in range(3):
        speaker = (one, two)[turn % 2]
        if turn > 1:
            speaker.resume(heard)
        said = await speaker.next()
        heard = await llm(f"moderate {said}")
        all_said.append((said, heard))
    return all_said


async def conversation():
    child, got = spawn(counts, 5), []
    for i in range(4):
        got.append(await child.next())
        child.resume(int(await llm(f"{i} {got}")) % 10)
    return got


async def resumes_by_next():
    child, got = spawn(counts, 5), []
    for i in range(3):
        got.append(await child.next())
        got.append(await child.next())
        await llm(f"{i}")
    return got


async def planner():
    plan = await llm("plan")
    workers = [spawn(thinks, f"{plan} part {i}") for i in range(3)]
    notes = await llm("meanwhile")
    found = [await worker for worker in workers]
    return [*found, notes, await llm(f"together {found}")]


async def child_before_any_call():
    worker = spawn(thinks, "early")
    first = await llm("a")
    done = await worker
    return first, done, await llm(f"b {done}"), await worker


async def grandchildren():
    team, heard = spawn(leads, "team"), []
    for i in range(3):
        heard.append(await team.next())
        team.resume(await llm(f"lead {i} {heard[-1]}"))
    return heard


async def child_that_was_made_by_another():
    helper, first = await spawn(makes, "inner")
    heard = [first]
    for i in range(2):
        helper.resume(await llm(f"{i} {heard[-1]}"))
        heard.append(await helper.next())
    return heard


async def given_to_another():
    child = spawn(counts, 3)
    got = [await child.next()]
    child.resume(int(await llm("first")) % 5)
    got.append(await spawn(takes, child, await llm("second")))
    got.append(await child.next())
    return got


@agent
async def takes(child, text):
    value = await child.next()
    child.resume(int(text) % 11)
    return value


async def cancelled_on_one_path():
    child, got = spawn(counts, 1), []
    for i in range(3):
        got.append(await child.next())
        choice = int(await llm(f"{i} {got}"))
        if choice % 3 == 0:
            child.cancel()
            break
        child.resume(choice % 10)
    try:
        got.append(await child.next())
    except EndedError:
        got.append("cancelled")
    return got


async def cancelled_while_it_thinks():
    worker = spawn(thinks, "slow")
    if int(await llm("go on?")) % 2:
        worker.cancel()
        try:
            return await worker
        except EndedError:
            return "cancelled"
    return await worker, await llm("more")


async def ends_and_is_asked_again():
    child = spawn(debater, "x")
    got = [await child.next()]
    if int(await llm("stop?")) % 2:
        child.resume(None)
        for attempt in (child.resume, child.next):
            try:
                made = attempt()
                got.append(made if made is None else await made)
            except (EndedError, AgentError) as error:
                got.append(type(error).__name__)
    else:
        child.resume("go")
        got.append(await child.next())
    return got


async def many_children():
    children, got = {i: spawn(counts, i) for i in range(4)}, []
    for i in range(3):
        pick = int(await llm(f"pick {i} {got}")) % 4
        if got and got[-1][0] == pick:
            children[pick].resume(10)
        got.append((pick, await children[pick].next()))
    return got


async def replayed_paths():
    async def ask(text):
        return await llm(text)

    child, got = spawn(counts, 5), []
    for i in range(3):
        got.append(await child.next())
        child.resume(int(await ask(f"{i} {got}")) % 10)
    try:
        child.resume(1)
    except AgentError:
        got.append("refused")
    return got


PROGRAMS = [
    debate,
    conversation,
    resumes_by_next,
    planner,
    child_before_any_call,
    grandchildren,
    child_that_was_made_by_another,
    given_to_another,
    cancelled_on_one_path,
    cancelled_while_it_thinks,
    ends_and_is_asked_again,
    many_children,
    replayed_paths,
]


def paths_of(run):
    """(the branches of the calls of the model, the state) of every path of a run that has ended."""
    found = []
    for state in run.states:
        if state.ended:
            branches, at = [], state
            while at.parent is not None:
                if at.parent.asks_model:
                    branches.insert(0, at.path[-1])
                at = at.parent
            found.append((branches, state))
    return found


def run_all(function, supervisor, model=None, **options):
    runtime = Runtime(model or Model(), **options)
    return asyncio.run(runtime.run(agent(function).under(supervisor))), runtime


@pytest.mark.parametrize("restore", [None, "replay"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_path_finds_its_children_as_they_were(program, late, restore):
    runtime = Runtime(Model())
    made = agent(restore=restore)(program).under(Each(2, late))
    done = asyncio.run(runtime.run(made))
    paths = paths_of(done)
    assert len(paths) >= 2 and len({tuple(branches) for branches, _ in paths}) == len(paths)
    for branches, state in paths:
        assert state.error is None, (branches, repr(state.error))
        assert state.value == native(program, [*branches]), branches


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_children_are_found_by_paths_of_which_few_states_have_copies(program, every, monkeypatch):
    copy_some(monkeypatch, every)
    done = asyncio.run(Runtime(Model()).run(agent(program).under(Each(2))))
    for branches, state in paths_of(done):
        assert state.error is None, (branches, repr(state.error))
        assert state.value == native(program, [*branches]), branches


def test_a_fork_computes_nothing_that_its_child_had_done():
    model = Model()
    _, runtime = run_all(debate, Each(2), model)
    asked = [call.messages[-1].content for call in model.calls if call.run != "debate"]
    # The parent has two answers when it resumes the first debater, on each of its two paths.
    assert asked.count("one begins") == asked.count("two begins") == 1 and len(asked) == 2 + 4
    assert len([run for run in runtime.runs if "~" in run.id]) == 3


def test_paths_do_not_depend_on_what_is_faster():
    def seen(model):
        done, _ = run_all(grandchildren, Each(2), model)
        seeds = {(call.run, call.state): call.seed for call in model.calls if call.run == "leads"}
        return sorted((state.path, repr(state.value)) for state in done.states), seeds

    assert seen(Model()) == seen(Model(delays=True))


def test_a_journal_replays_forks(tmp_path):
    journal = Journal()
    done, _ = run_all(grandchildren, Each(2), journal=journal)
    journal.save(tmp_path / "run.json")
    again, _ = run_all(
        grandchildren,
        Each(2),
        model=None,
        journal=Journal.load(tmp_path / "run.json", strict=True),
    )
    assert [state.value for _, state in paths_of(again)] == [
        state.value for _, state in paths_of(done)
    ]


@agent
async def tries(start):
    choice = await llm(f"try {start}")
    got = yield f"{start} {choice}"
    yield f"last {got} {await llm(f'then {got}')}"


@agent
async def searched_child():
    child = spawn(tries.under(BestOfN(2, lambda state: 0)), "s")
    heard = []
    for i in range(4):
        heard.append(await child.next())
        child.resume(await llm(f"{i} {heard[-1]}"))
    return heard


def test_a_child_that_searches_is_forked_with_its_search():
    done, _ = run_all(searched_child.function, Each(2))
    paths = paths_of(done)
    assert len(paths) == 16
    for branches, state in paths:
        heard, expected, told = state.value, [], []
        for i, branch in enumerate(branches):
            told.append(answer(f"{i} {heard[i]}", branch))
        first = answer("try s", 0)
        for i in range(4):
            # The two paths of the child yield the same first text, and then what they are told.
            expected.append(f"s {first}" if i < 2 else f"last {told[i - 2]} ")
        assert all(text.startswith(want) for text, want in zip(heard, expected, strict=True)), (
            branches,
            heard,
            expected,
        )


class Locked(Single):
    """A supervisor that cannot be copied."""

    def init(self, root):
        super().init(root)
        self.lock = (each for each in ())


@agent
async def locked_child():
    child = spawn(counts.under(Locked()), 1)
    got = [await child.next()]
    child.resume(int(await llm("a")) % 5)
    got.append(await child.next())
    return got


def test_a_search_that_cannot_be_copied_is_an_error_where_the_paths_part():
    done, _ = run_all(locked_child.function, Each(2))
    [(_, first), (_, second)] = sorted(paths_of(done), key=lambda each: each[1].path)
    assert first.error is None and isinstance(second.error, AgentError)
    assert "Locked, the supervisor of agent counts, cannot be copied" in str(second.error)


@agent
async def holds(log):
    try:
        yield "held"
    finally:
        await agents.tool(log.append, "closed")


class Log:
    """A list that copies share."""

    def __init__(self):
        self.lines = []

    def __deepcopy__(self, memo):
        return self

    def append(self, line):
        self.lines.append(line)


def test_what_a_cancelled_child_holds_is_closed():
    log = Log()

    @agent
    async def cancels():
        child = agents.spawn(holds, log)
        await child.next()
        child.cancel()
        child.cancel()
        with pytest.raises(EndedError, match="agent holds was cancelled"):
            await child
        return await agents.llm("on")

    done = asyncio.run(Runtime(Model()).run(cancels))
    assert done.accepted and done.accepted.value and log.lines == ["closed"]


@pytest.mark.parametrize("restore", [None, "replay"])
def test_what_a_losing_path_holds_is_closed_once(restore):
    log = Log()

    class Manager:
        async def __aenter__(self):
            await agents.tool(log.append, "enter")

        async def __aexit__(self, *raised):
            await agents.tool(log.append, f"exit {raised[0] and raised[0].__name__}")

    async def opens():
        async with Manager():
            if await agents.llm("a") == answer("a", 1):
                await agents.llm("never")
        return "first"

    class FirstEnd(Each):
        def commit(self, state):
            super().commit(state)
            if state.finished:
                self.over, self.accepted = True, state

    class Slow(Model):
        async def answer(self, call):
            if call.messages[-1].content == "never":
                await asyncio.sleep(30)
            return await super().answer(call)

    made = agent(restore=restore)(opens).under(FirstEnd(2))
    done = asyncio.run(Runtime(Slow()).run(made))
    assert done.accepted.value == "first"
    # A path that is replayed enters its context manager by its record.
    assert sorted(log.lines) == ["enter", "exit CancelledError", "exit None"]


def test_many_forks_are_bounded_with_the_bound_in_the_message():
    done, _ = run_all(conversation, Each(3), most_agents=4)
    errors = [state.error for _, state in paths_of(done) if state.error]
    assert errors and all("there were 4 agents already" in str(error) for error in errors)


@agent
async def asks_once(number):
    said = await agents.llm(f"child {number}")
    yield number
    yield said


@pytest.mark.slow
def test_ten_thousand_children_answer():
    @agent
    async def parent(n):
        children = [agents.spawn(asks_once, number) for number in range(n)]
        return sum([await child.next() for child in children])

    done = asyncio.run(Runtime(Model()).run(parent, 10_000))
    assert done.accepted.value == 10_000 * 9_999 // 2


def test_more_children_than_allowed_are_an_error_with_the_limit():
    @agent
    async def parent():
        return [agents.spawn(asks_once, number) for number in range(10_000)]

    message = "there were 1000 agents already when asks_once was to be spawned; .* `most_agents`"
    with pytest.raises(AgentError, match=message):
        asyncio.run(Runtime(Model(), most_agents=1000).run(parent))


def test_native_runs_are_what_they_seem():
    """The oracle by itself: answers differ between branches, and reach the value."""
    values = [native(conversation, [*branches]) for branches in itertools.product((0, 1), repeat=4)]
    assert len({repr(value) for value in values}) >= 8


@agent
async def echoes(word):
    return await agents.llm(word)


async def makes_agents():
    @agent
    async def local(word):
        return await agents.llm(word)

    one, other = agents.spawn(local, "a"), agents.spawn(echoes.under(Each(1)), "b")
    said = await agents.llm("c")
    return said, await one, await other


@pytest.mark.parametrize("restore", [None, "replay"])
def test_a_replay_meets_the_children_of_agents_that_it_makes_anew(restore, monkeypatch):
    copy_some(monkeypatch, None)
    made = agent(restore=restore)(makes_agents).under(Each(2))
    done = asyncio.run(Runtime(Model()).run(made))
    values = {tuple(branches): state.value for branches, state in paths_of(done)}
    assert values == {(n,): (answer("c", n), answer("a", 0), answer("b", 0)) for n in range(2)}
