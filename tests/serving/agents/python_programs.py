"""Coroutines over what Python has: patterns of agents, and hard cases. Each is short."""
# ruff: noqa
# Unusual code has to run like all other code.

import abc
import array
import bisect
import collections
import contextlib
import contextvars
import copy
import csv
import dataclasses
import decimal
import enum
import functools
import heapq
import inspect
import io
import itertools
import json
import operator
import os
import re
import sqlite3
import string
import sys
import tempfile
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

from tests.serving.agents.python_oracle import llm, tool

PROGRAMS: list[tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = []


def program(arguments=tuple):
    """Adds a coroutine function, with a function that makes its arguments."""

    def add(function):
        PROGRAMS.append((function, arguments))
        return function

    return add


SENTINEL = object()
COUNTER = contextvars.ContextVar("COUNTER", default=0)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Node:
    def __init__(self, name, parent=None):
        self.name, self.parent, self.children = name, parent, []
        if parent:
            parent.children.append(self)


class Slots:
    __slots__ = ("a", "items", "__weakref__")

    def __init__(self):
        self.a, self.items = 0, []


@dataclasses.dataclass
class Plan:
    goal: str
    steps: list = dataclasses.field(default_factory=list)
    on_step: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    items: tuple
    inner: list


class Base:
    def greet(self):
        return ["base"]


class Derived(Base):
    def greet(self):
        return super().greet() + ["derived"]


class AsyncManager:
    def __init__(self, log):
        self.log = log

    async def __aenter__(self):
        self.log.append("enter " + await llm("enter"))
        return self

    async def __aexit__(self, kind, error, trace):
        self.log.append(("exit", kind and kind.__name__, await llm("exit")))
        return kind is ValueError


class AsyncItems:
    def __init__(self, n):
        self.n = n

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.n:
            raise StopAsyncIteration
        self.n -= 1
        return await llm(f"item {self.n}")


async def numbers(n):
    for i in range(n):
        yield int(await llm(f"number {i}"))


async def deep(n):
    if n == 0:
        return await llm("deep")
    return f"{n}{await deep(n - 1)}"


async def asks_twice(a, b):
    first = await llm(a)
    return first + await llm(b + first)


def fails(*args):
    raise KeyError(*args)


def retrying(function):
    @functools.wraps(function)
    async def inner(*args):
        tries = []
        while len(tries) < 3:
            try:
                return tries, await function(*args)
            except ValueError as error:
                tries.append(str(error))
        return tries, None

    return inner


# Patterns of agents.


@program()
async def one_question():
    return await llm("why?")


@program()
async def chain_of_thought():
    notes = []
    for step in range(4):
        notes.append(await llm(f"step {step} after {notes}"))
    return notes


@program()
async def react_loop():
    trace = {"steps": []}
    history, tools = [], {"add": operator.add, "mul": operator.mul}
    for turn in range(3):
        number = int(await llm(f"act {history}"))
        trace["steps"].append(len(trace["steps"]))
        name = "add" if number % 2 else "mul"
        history.append((name, await tool(tools[name], number, turn)))
        trace["steps"].append(len(trace["steps"]))
    return history, trace


@program()
async def planner():
    plan = Plan("goal")
    plan.on_step = plan.steps.append
    for _ in range(3):
        plan.on_step(await llm(f"plan {plan.steps}"))
    return plan.steps, plan.goal


@program()
async def retries_until_valid():
    trace = {"steps": []}
    for attempt in itertools.count():
        found = int(await llm(f"attempt {attempt}"))
        trace["steps"].append(len(trace["steps"]))
        if found % 3 == 0 or attempt == 4:
            return (attempt, found), trace


@program()
async def votes():
    tally = collections.Counter()
    for i in range(4):
        tally[int(await llm(f"vote {i}")) % 2] += 1
    return tally.most_common()


@program()
async def memory_window():
    window = collections.deque(maxlen=2)
    for i in range(4):
        window.append(await llm(f"see {list(window)}"))
    return list(window), window.maxlen


@program()
async def best_first():
    trace = {"steps": []}
    frontier = [(0, "")]
    seen = set()
    for _ in range(4):
        cost, at = heapq.heappop(frontier)
        seen.add(at)
        n = int(await llm(f"expand {at}"))
        trace["steps"].append(len(trace["steps"]))
        for each in range(2):
            heapq.heappush(frontier, (cost + n + each, at + str(each)))
    return (sorted(seen), frontier), trace


@program()
async def tree_of_nodes():
    root = at = Node("root")
    for _ in range(3):
        at = Node(await llm(at.name), at)
    path = []
    while at:
        path.append((at.name, len(at.children), at.parent is None or at in at.parent.children))
        at = at.parent
    return path, root.children[0].parent is root


@program()
async def json_repair():
    trace = {"steps": []}
    texts = []
    for _ in range(3):
        text = '{"n": ' + await llm(f"json {texts}")
        trace["steps"].append(len(trace["steps"]))
        try:
            texts.append(json.loads(text))
        except json.JSONDecodeError as error:
            texts.append((error.msg, error.pos))
    return texts, trace


@program()
async def debate():
    pro, con = [], []
    sides = itertools.cycle([("pro", pro), ("con", con)])
    for _ in range(4):
        name, side = next(sides)
        side.append(await llm(f"{name} {len(pro)} {len(con)}"))
    return pro, con


@program()
async def dispatch_by_match():
    done, counts = [], {"low": [], "high": []}
    for i in range(3):
        match divmod(int(await llm(f"cmd {i}")), 10):
            case (1 | 2 | 3, unit):
                done.append(("low", unit))
                counts["low"].append(unit)
            case (tens, 0):
                done.append(("round", tens))
            case (tens, unit) if unit > tens:
                done.append(("up", unit - tens))
            case other:
                done.append(other)
        counts["high"].append(len(done))
    return done, counts


@program(lambda: ([1],))
async def changes_its_argument(items):
    items.append(await llm("a"))
    items.append(await llm("b"))
    return items


@program()
async def helper_asks():
    return await asks_twice("a", "b"), await asks_twice("c", "d")


@program()
async def helper_deep():
    return await deep(5), await deep(2)


@program()
async def helper_in_a_closure():
    kept = []

    async def ask(text):
        kept.append(text)
        return await llm(f"{text} {len(kept)}")

    return await ask("a"), await ask("b"), kept


@program()
async def helper_method():
    class Memory:
        def __init__(self):
            self.items = []

        async def remember(self, text):
            self.items.append(await llm(text))
            return len(self.items)

    memory = Memory()
    return await memory.remember("a"), await memory.remember("b"), memory.items


# Syntax.


@program()
async def async_with():
    log = []
    async with AsyncManager(log):
        log.append(await llm("inside"))
    return log


@program()
async def async_with_error():
    log = []
    async with AsyncManager(log):
        raise ValueError(await llm("inside"))
    async with AsyncManager(log) as a, AsyncManager(log) as b:
        log.append((a is b, await llm("two")))
    return log


@program()
async def async_for():
    found = []
    async for each in AsyncItems(3):
        found.append(each)
    else:
        found.append("else")
    return found


@program()
async def async_generator():
    total = 0
    async for each in numbers(3):
        total += each
        await llm(f"total {total}")
    return total


@program()
async def async_comprehension():
    return [n + 1 async for n in numbers(3) if n % 2 or True], {n: n async for n in numbers(2)}


@program()
async def waits_in_comprehensions():
    return [await llm(a + b) for a in "ab" for b in "cd" if a + b != "ad"]


@program()
async def async_generator_expression():
    total = 0
    async for each in (int(await llm(x)) for x in "abc"):
        total += each
    return total


@program()
async def except_star():
    log = []
    try:
        raise ExceptionGroup("both", [ValueError(await llm("v")), KeyError("k")])
    except* ValueError as group:
        log.append([str(e) for e in group.exceptions])
        log.append(await llm("handling"))
    except* KeyError as group:
        log.append(len(group.exceptions))
    return log, await llm("after")


@program()
async def finally_and_return():
    log = []
    for i in range(3):
        try:
            if int(await llm(f"try {i}")) % 2:
                continue
            log.append(i)
        finally:
            log.append(await llm(f"finally {i}"))
    return log


@program()
async def raises_from():
    try:
        int("x" + await llm("a"))
    except ValueError as error:
        await llm("b")
        raise RuntimeError(await llm("c")) from error


@program()
async def raises_in_context():
    try:
        {}[await llm("key")]
    except KeyError:
        raise TypeError(await llm("type"))


@program()
async def reraises_later():
    kept = None
    try:
        raise ValueError([await llm("a")])
    except ValueError as error:
        kept = error
    kept.args[0].append(await llm("b"))
    kept.add_note(await llm("c"))
    raise kept


@program()
async def tool_error():
    try:
        await tool(fails, "gone")
    except KeyError as error:
        return error.args, await llm("after")


@program()
async def tool_error_leaves():
    await llm("before")
    await tool(fails, "gone")


@program()
async def link_chain():
    head = None
    for i in range(5000):
        head = [i, head]
    head[0] = await llm("head")
    total, at = 0, head[1]
    while at:
        total, at = total + at[0], at[1]
    return total, head[0], await llm("end")


@program()
async def walrus_and_lambda():
    f = lambda x, y=(a := await llm("default")): (x, y, a)
    return f(await llm("x")), (b := await llm("b")) + b


@program()
async def nested_functions():
    count = 0

    def bump(by=1):
        nonlocal count
        count += by
        return count

    bump(int(await llm("a")))
    bump(int(await llm("b")))
    return count, bump()


@program()
async def local_class_with_state():
    class Tally:
        total = 0
        names = []

    for i in range(3):
        Tally.total += int(await llm(f"t {i} {Tally.total}"))
        Tally.names.append(i)
    return Tally.total, Tally.names


@program()
async def class_uses_variables():
    base = int(await llm("base"))

    class Adder:
        start = base

        def add(self, x):
            return self.start + x + base

    base += 1
    return Adder().add(int(await llm("x")))


@program()
async def super_call():
    class Local(Derived):
        def greet(self):
            return super().greet() + [word]

    word = await llm("word")
    return Local().greet(), await llm("after"), Local().greet()


@program()
async def sees_locals():
    a = await llm("a")
    names = sorted(locals())
    b = await llm("b")
    return names, sorted(locals()), eval("a + b")


@program()
async def waits_in_odd_places():
    items = [0, 0]
    items[int(await llm("i")) % 2], other = await llm("v"), await llm("o")
    try:
        raise KeyError("k")
    except KeyError if await llm("kind") else ValueError as error:
        items.append(error.args)
    return items, other, f"{await llm('f')!r:>{int(await llm('w'))}}"


# Objects.


@program()
async def bound_builtins():
    items = []
    add, pop = items.append, items.pop
    add(await llm("a"))
    add(await llm("b"))
    return pop(), items, add.__self__ is items


@program()
async def bound_builtins_inside():
    items = []
    plan = Plan("x", items, [items.append])
    plan.on_step[0](await llm("a"))
    plan.on_step[0](await llm("b"))
    return items, plan.steps is items


@program()
async def partials():
    items = []
    add = functools.partial(items.insert, 0)
    add(await llm("a"))
    add(await llm("b"))
    return items


@program()
async def default_dicts():
    groups = collections.defaultdict(list)
    made = []
    fancy = collections.defaultdict(lambda: made.append(1) or made)
    for i in range(3):
        groups[int(await llm(f"g {i}")) % 2].append(i)
        fancy[i]
    return dict(groups), made, fancy[0] is made


@program()
async def iterators():
    items = [1, 2, 3, 4]
    walk, pairs, back = iter(items), zip(items, "abcd"), reversed(items)
    found = [next(walk), next(pairs), next(back)]
    items.append(await llm("a"))
    found += [next(walk), next(pairs), next(back)]
    await llm("b")
    return found, list(walk), list(pairs), list(back)


@program()
async def generators():
    made = []

    def produce():
        for i in range(5):
            made.append(i)
            yield i

    rows = produce()
    first = next(rows)
    await llm(f"first {first}")
    second = next(rows)
    await llm(f"second {second}")
    return list(rows), made


@program()
async def generator_that_is_sent_to():
    def average():
        total = count = 0
        value = None
        while True:
            value = yield value and total / count
            total, count = total + value, count + 1

    running = average()
    next(running)
    return [running.send(int(await llm(f"v {i}"))) for i in range(3)]


@program()
async def regular_expression_iterators():
    found = []
    matches = re.finditer(r"\d+", "1 22 333")
    for match in matches:
        found.append(match.group() + await llm(match.group()))
    return found


@program()
async def itertools_objects():
    count, chain = itertools.count(5), itertools.chain("ab", "cd")
    a, b = itertools.tee(range(4))
    got = [next(count), next(chain), next(a)]
    await llm("one")
    got += [next(count), next(chain), next(b)]
    await llm("two")
    return got, next(count), list(chain), list(a), list(b)


@program()
async def islice_accumulate_groupby():
    groups = itertools.groupby("aabbc")
    sums = itertools.accumulate([1, 2, 3, 4])
    got = [next(sums), next(groups)[0]]
    await llm("x")
    got += [next(sums), next(groups)[0]]
    await llm("y")
    return got, list(itertools.islice(sums, 1))


@program()
async def sentinels():
    mine = object()
    box = {"global": SENTINEL, "mine": mine}
    await llm("a")
    return box["global"] is SENTINEL, box["mine"] is mine, Color.RED is Color(1), await llm("b")


@program()
async def sentinel_instances():
    missing = Node("missing")
    values = {"a": missing, "b": 1}
    await llm("a")
    return [k for k, v in values.items() if v is missing], await llm("b")


@program()
async def id_keys():
    nodes = [Node("a"), Node("b")]
    by_id = {id(node): node.name for node in nodes}
    await llm("a")
    return [by_id[id(node)] for node in nodes], await llm("b")


@program()
async def identity_hashed():
    trace = {"steps": []}
    nodes = [Node("a"), Node("b")]
    seen, names = {nodes[0]}, {node: node.name for node in nodes}
    await llm("a")
    trace["steps"].append(len(trace["steps"]))
    seen.add(nodes[1])
    return (len(seen), nodes[0] in seen, [names[n] for n in nodes], await llm("b")), trace


@program()
async def weak_references():
    node = Node("a")
    ref, cache = weakref.ref(node), weakref.WeakValueDictionary()
    cache["a"] = node
    await llm("a")
    alive = ref() is node, cache.get("a") is node
    await llm("b")
    del node
    return alive, ref() is None, len(cache)


@program()
async def weak_keys():
    node = Slots()
    notes = weakref.WeakKeyDictionary({node: []})
    notes[node].append(await llm("a"))
    notes[node].append(await llm("b"))
    return notes[node], len(notes)


@program()
async def finalizers():
    log = []
    node = Node("a")
    weakref.finalize(node, log.append, "gone")
    await llm("a")
    del node
    await llm(f"b {log}")
    return log


@program()
async def caches():
    calls = []

    @functools.lru_cache
    def square(x):
        calls.append(x)
        return x * x

    square(2)
    a = int(await llm("a"))
    square(2), square(a)
    await llm("b")
    return square(a), calls, square.cache_info().hits


@program()
async def cached_property():
    class Lazy:
        loads = 0

        @functools.cached_property
        def data(self):
            self.loads += 1
            return []

    lazy = Lazy()
    lazy.data.append(await llm("a"))
    lazy.data.append(await llm("b"))
    return lazy.data, lazy.loads


@program()
async def context_variables():
    token = COUNTER.set(5)
    a = COUNTER.get(), await llm("a")
    COUNTER.set(COUNTER.get() + 1)
    b = COUNTER.get(), await llm("b")
    COUNTER.reset(token)
    return a, b, COUNTER.get()


@program()
async def context_variables_in_helpers():
    async def helper():
        COUNTER.set(COUNTER.get() + int(await llm(f"at {COUNTER.get()}")))

    await helper()
    await helper()
    return COUNTER.get()


@program()
async def decimal_context():
    trace = {"steps": []}
    with decimal.localcontext() as context:
        context.prec = 3
        a = decimal.Decimal(1) / 3
        await llm("a")
        trace["steps"].append(len(trace["steps"]))
        b = decimal.Decimal(2) / 3
    await llm("b")
    trace["steps"].append(len(trace["steps"]))
    return (str(a), str(b), len(str(decimal.Decimal(1) / 3))), trace


@program()
async def exit_stacks():
    log = []
    with contextlib.ExitStack() as stack:
        stack.callback(log.append, "first")
        await llm("a")
        stack.enter_context(
            contextlib.closing(types.SimpleNamespace(close=lambda: log.append("c")))
        )
        await llm("b")
        log.append("body")
    return log, await llm("c")


@program()
async def async_exit_stacks():
    log = []
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(AsyncManager(log))
        stack.push_async_callback(asks_twice, "x", "y")
        log.append(await llm("body"))
    return log


@program()
async def context_manager_functions():
    log = []

    @contextlib.contextmanager
    def step(name):
        log.append(f"enter {name}")
        try:
            yield len(log)
        finally:
            log.append(f"exit {name}")

    with step("a") as n:
        log.append(await llm(f"in {n}"))
        with step("b"):
            await llm("nested")
    return log


@program()
async def async_context_manager_functions():
    log = []

    @contextlib.asynccontextmanager
    async def step(name):
        log.append(await llm(f"enter {name}"))
        try:
            yield
        except ValueError as error:
            log.append(str(error))
        log.append(await llm(f"exit {name}"))

    async with step("a"):
        raise ValueError(await llm("body"))
    return log


@program()
async def suppressed():
    trace = {"steps": []}
    with contextlib.suppress(KeyError):
        await llm("a")
        trace["steps"].append(len(trace["steps"]))
        raise KeyError(await llm("b"))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print("hidden")
    return (out.getvalue(), await llm("c")), trace


@program()
async def temporary_directories():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "notes.txt")
        for i in range(3):
            text = await llm(f"note {i}")
            with open(path, "a") as file:
                file.write(text + "\n")
        with open(path) as file:
            return file.read(), os.path.exists(path)


@program()
async def open_files():
    with tempfile.TemporaryFile("w+") as file:
        file.write(await llm("a"))
        file.write(await llm("b"))
        file.seek(0)
        return file.read(), await llm("c")


@program()
async def string_files():
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["n", await llm("a")])
    writer.writerow([1, await llm("b")])
    rows = csv.DictReader(io.StringIO(out.getvalue()))
    first = next(rows)
    return first, out.getvalue(), await llm("c")


@program()
async def csv_rows():
    total = []
    for row in csv.reader(io.StringIO("a,1\nb,2\nc,3\n")):
        total.append((row, await llm(row[0])))
    return total


@program()
async def byte_files():
    trace = {"steps": []}
    out = io.BytesIO(b"12345")
    out.read(2)
    await llm("a")
    trace["steps"].append(len(trace["steps"]))
    rest = out.read(2)
    await llm("b")
    trace["steps"].append(len(trace["steps"]))
    return (rest, out.tell(), out.getvalue()), trace


class SelfClosing(sqlite3.Connection):
    """A database that is closed with its last reference: of an agent's states none is the last. The
    collector may find that in any thread."""

    def __init__(self, name: str):
        super().__init__(name, check_same_thread=False)

    def __del__(self):
        self.close()


@program()
async def databases():
    base = SelfClosing(":memory:")
    base.execute("create table notes (n integer, text text)")
    for i in range(3):
        base.execute("insert into notes values (?, ?)", (i, await llm(f"note {i}")))
    return base.execute("select * from notes order by n").fetchall()


@program()
async def database_cursors():
    base = SelfClosing(":memory:")
    rows = base.execute("values (1), (2), (3)")
    return [(n, await llm(f"row {n}")) for (n,) in rows]
