"""More coroutines over what Python has; see `python_programs`."""
# ruff: noqa

import abc
import array
import bisect
import collections
import contextlib
import copy
import dataclasses
import enum
import fractions
import functools
import graphlib
import inspect
import io
import itertools
import json
import operator
import os
import pathlib
import queue
import random
import re
import shelve
import string
import tempfile
import textwrap
import threading
import types
import typing
import uuid
import weakref
import zipfile
from typing import Any

from tests.serving.agents.python_oracle import llm, tool
from tests.serving.agents.python_programs import (
    SENTINEL,
    AsyncItems,
    AsyncManager,
    Base,
    Color,
    Derived,
    Frozen,
    Node,
    Plan,
    Slots,
    asks_twice,
    deep,
    fails,
    numbers,
    program,
    retrying,
)


class Account:
    limit = 200

    def __init__(self):
        self.total, self.log = 0, []

    def __iadd__(self, n):
        self.total += n
        self.log.append(n)
        return self

    def __getattr__(self, name):
        if name.startswith("add_"):
            return functools.partial(self.__iadd__, int(name[4:]))
        raise AttributeError(name)


class Reduced:
    def __init__(self, items):
        self.items = items

    def __reduce__(self):
        return Reduced, (self.items,)


class WithState:
    def __init__(self):
        self.items, self.more = [], {}

    def __getstate__(self):
        return (self.items, self.more)

    def __setstate__(self, state):
        self.items, self.more = state


class MyDict(dict):
    def __missing__(self, key):
        self[key] = value = []
        return value


class MyList(list):
    extra = None


class Point(typing.NamedTuple):
    x: list
    y: int


class Descriptor:
    def __get__(self, of, kind=None):
        return of.__dict__.setdefault("_made", [])


class Described:
    things = Descriptor()


class Linked:
    def __init__(self, value, following=None):
        self.value, self.following = value, following


class OwnError(Exception):
    def __init__(self, code, *, items):
        super().__init__(code)
        self.items = items


def make_counter():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


def make_log():
    log = []
    return log.append, lambda: list(log)


@retrying
async def decorated_helper(text):
    n = int(await llm(text))
    if n % 2:
        raise ValueError(n)
    return n


@contextlib.asynccontextmanager
async def session(log):
    log.append(await llm("open"))
    try:
        yield log
    finally:
        log.append("closed")


# Patterns of agents.


@program()
async def self_refine():
    trace = {"steps": []}
    draft = await llm("draft")
    trace["steps"].append(len(trace["steps"]))
    for _ in range(3):
        notes = await llm(f"critique {draft}")
        trace["steps"].append(len(trace["steps"]))
        if int(notes) > 90:
            break
        draft = await llm(f"revise {draft} by {notes}")
        trace["steps"].append(len(trace["steps"]))
    return draft, trace


@program()
async def router():
    routes = {0: asks_twice, 1: lambda a, b: deep(2)}
    return [await routes[int(await llm(f"route {i}")) % 2]("p", "q") for i in range(2)]


@program()
async def map_reduce():
    trace = {"steps": []}
    parts = textwrap.wrap("one two three four", 9)
    partial = {part: await llm(f"map {part}") for part in parts}
    trace["steps"].append(len(trace["steps"]))
    return (await llm(f"reduce {sorted(partial.items())}")), trace


@program()
async def state_machine():
    states, state = {"ask": "check", "check": "end"}, "ask"
    visited = []
    while state != "end":
        visited.append((state, await llm(state)))
        state = "ask" if int(visited[-1][1]) > 80 and len(visited) < 4 else states[state]
    return visited


@program()
async def scratchpad_of_text():
    trace = {"steps": []}
    pad = io.StringIO()
    for i in range(3):
        print(await llm(pad.getvalue() or "start"), file=pad)
        trace["steps"].append(len(trace["steps"]))
    return (pad.getvalue().splitlines()), trace


@program()
async def task_queue():
    trace = {"steps": []}
    todo, done = collections.deque(["a"]), []
    while todo and len(done) < 4:
        task = todo.popleft()
        n = int(await llm(task))
        trace["steps"].append(len(trace["steps"]))
        done.append((task, n))
        todo.extend(task + str(i) for i in range(n % 3))
    return (done, list(todo)), trace


@program()
async def dependency_order():
    sorter = graphlib.TopologicalSorter({"c": {"a", "b"}, "b": {"a"}})
    sorter.prepare()
    done = []
    while sorter.is_active():
        for task in sorter.get_ready():
            done.append((task, await llm(task)))
            sorter.done(task)
    return done


@program()
async def tool_registry():
    registry = {}

    def register(function):
        registry[function.__name__] = function
        return function

    @register
    def double(x):
        return 2 * x

    @register
    def negative(x):
        return -x

    called = {name: [] for name in registry}
    for name in sorted(registry):
        called[name].append(await tool(registry[name], int(await llm(name))))
    return called


@program()
async def majority_with_early_end():
    seen = collections.Counter()
    for i in itertools.count():
        seen[int(await llm(f"s {i}")) % 3] += 1
        if max(seen.values()) == 2:
            return seen.most_common(1)


@program()
async def agenda_by_bisect():
    trace = {"steps": []}
    order, names = [], {}
    for name in "abc":
        n = int(await llm(name))
        trace["steps"].append(len(trace["steps"]))
        bisect.insort(order, n)
        names.setdefault(n, []).append(name)
    return ([names[n] for n in order]), trace


@program()
async def rolling_summary():
    history = [{"role": "user", "text": "hi"}]
    for i in range(4):
        history.append({"role": "assistant", "text": await llm(json.dumps(history))})
        if len(history) > 3:
            history[:] = [{"role": "system", "text": await llm("summary")}]
    return history


@program()
async def backtracking():
    async def place(queens):
        if len(queens) == 3:
            return queens
        for i in sorted(range(3), key=lambda i: hash((i, first)) % 7):
            if i not in queens and (found := await place([*queens, i])):
                return found
        return None

    first = int(await llm("first"))
    return await place([]), await llm("second")


@program()
async def decorated_by_retry():
    return await decorated_helper("odd?"), await decorated_helper("again?")


@program()
async def recursive_planner():
    made = []

    async def expand(task, depth):
        made.append(task)
        if depth:
            for i in range(1 + int(await llm(task)) % 2):
                await expand(f"{task}.{i}", depth - 1)

    await expand("t", 2)
    return made


@program(lambda: ({"items": [1, 2]},))
async def keeps_its_argument(memory):
    same = memory["items"]
    memory["items"].append(await llm("a"))
    same.append(await llm("b"))
    return memory, same is memory["items"]


@program(lambda: (lambda x: x + 1, [1]))
async def takes_a_function(f, items):
    items.append(f(int(await llm("a"))))
    return items, await llm("b"), f(1)


@program(lambda: make_log())
async def takes_two_closures(add, read):
    trace = {"steps": []}
    a = await llm("a")
    trace["steps"].append(len(trace["steps"]))
    return (a, await llm("b")), trace


@program(lambda: (Node("given"),))
async def takes_an_object(node):
    child = Node(await llm("a"), node)
    return node.children[0] is child, await llm("b"), len(node.children)


# Closures and functions.


@program()
async def factories():
    count = make_counter()
    count()
    await llm("a")
    count()
    await llm("b")
    return count()


@program()
async def factories_in_containers():
    tools = {"count": make_counter(), "log": make_log()}
    tools["count"]()
    tools["log"][0](await llm("a"))
    tools["count"]()
    tools["log"][0](await llm("b"))
    return tools["count"](), tools["log"][1]()


@program()
async def closures_in_a_loop():
    made = [lambda i=i: (i, word) for i in range(2)]
    late = [lambda: i for i in range(2)]
    word = await llm("a")
    first = [f() for f in made]
    word = await llm("b")
    return first, [f() for f in made], [f() for f in late]


@program()
async def mutable_defaults():
    def remember(x, kept=[]):
        kept.append(x)
        return kept

    remember(await llm("a"))
    return remember(await llm("b")), remember.__defaults__


@program()
async def function_attributes():
    def f():
        f.calls += 1
        return f.calls

    f.calls = 0
    f()
    await llm("a")
    f()
    await llm("b")
    return f(), inspect.isfunction(f), f.__name__


@program()
async def code_objects():
    def f(a, b=2):
        return a + b

    g = types.FunctionType(f.__code__, {}, "g", (5,))
    a = int(await llm("a"))
    return g(a), f(a), inspect.signature(f).parameters["b"].default, await llm("b")


@program()
async def single_dispatch():
    trace = {"steps": []}

    @functools.singledispatch
    def show(x):
        return "other"

    @show.register
    def _(x: int):
        return f"int {x}"

    await llm("a")
    trace["steps"].append(len(trace["steps"]))

    @show.register
    def _(x: list):
        return f"list {x}"

    await llm("b")
    trace["steps"].append(len(trace["steps"]))
    return (show(1), show([1]), show("s")), trace


@program()
async def decorators_inside():
    calls = []

    def logged(f):
        @functools.wraps(f)
        def inner(*args):
            calls.append((f.__name__, args))
            return f(*args)

        return inner

    @logged
    def add(a, b):
        return a + b

    add(1, int(await llm("a")))
    return add(2, int(await llm("b"))), calls, add.__wrapped__(1, 1)


@program()
async def async_closure_generators():
    log = []

    async def produce():
        try:
            for i in range(5):
                log.append(i)
                yield await llm(f"p {i}")
        finally:
            log.append("end")

    source = produce()
    first = await anext(source)
    second = await anext(source)
    await source.aclose()
    return first, second, log


@program()
async def nested_async_generators():
    async def twice(source):
        async for each in source:
            yield each
            yield each + int(await llm(f"t {each}"))

    return [each async for each in twice(numbers(2))]


@program()
async def async_generator_asend():
    async def totals():
        total = 0
        while True:
            total += yield total
            await llm(f"total {total}")

    source = totals()
    await anext(source)
    return await source.asend(3), await source.asend(4)


@program()
async def coroutine_awaited_later():
    pending = asks_twice("a", "b")
    first = await llm("first")
    return first, await pending


@program()
async def awaitable_objects():
    class Promise:
        def __init__(self, text):
            self.text = text

        def __await__(self):
            return llm(self.text).__await__()

    return await Promise("a"), await Promise("b")


@program()
async def yields_in_a_types_coroutine():
    @types.coroutine
    def old(text):
        a = yield from llm(text).__await__()
        b = yield from llm(text + a).__await__()
        return a, b

    return await old("x")


@program()
async def exception_in_helper():
    async def risky(n):
        try:
            if int(await llm(f"risk {n}")) % 2:
                raise OwnError(n, items=[n])
            return n
        finally:
            await llm(f"tidy {n}")

    found = []
    for n in range(3):
        try:
            found.append(await risky(n))
        except OwnError as error:
            found.append((error.args, error.items))
            error.items.append(await llm("in except"))
            found.append(error.items)
    return found


@program()
async def error_leaves_helper():
    async def risky():
        await llm("a")
        raise OwnError(await llm("b"), items=[])

    return await risky()


@program()
async def generator_throw():
    log = []

    def worker():
        while True:
            try:
                log.append((yield len(log)))
            except ValueError as error:
                log.append(str(error))

    running = worker()
    next(running)
    running.send(await llm("a"))
    running.throw(ValueError(await llm("b")))
    return log, running.send("end")


@program()
async def stop_iteration_inside():
    await llm("a")
    next(iter([]))


@program()
async def assertion():
    n = int(await llm("a"))
    await llm("b")
    assert n < 0, [n]


@program()
async def group_of_errors():
    errors = []
    for i in range(2):
        try:
            raise ValueError(await llm(f"e {i}"))
        except ValueError as error:
            errors.append(error)
    raise ExceptionGroup("all", errors)


@program()
async def nested_handlers():
    trace = {"steps": []}
    log = []
    try:
        try:
            raise KeyError(await llm("a"))
        except KeyError as outer:
            try:
                raise ValueError(await llm("b")) from outer
            except ValueError as inner:
                log.append((inner.__cause__ is outer, await llm("c")))
                trace["steps"].append(len(trace["steps"]))
                raise
    except ValueError as last:
        log.append((str(last), last.__context__ is last.__cause__))
    return log, trace


@program()
async def exception_as_value():
    results = []
    for i in range(3):
        try:
            results.append(1 // (int(await llm(f"d {i}")) % 2))
        except ZeroDivisionError as error:
            results.append(error)
    return [each if isinstance(each, int) else type(each).__name__ for each in results]


@program()
async def notes_on_errors():
    try:
        raise KeyError("k")
    except KeyError as error:
        error.add_note(await llm("a"))
        error.extra = [await llm("b")]
        return error.__notes__, error.extra


# Objects.


@program()
async def own_operators():
    account = Account()
    account += int(await llm("a"))
    account.add_5()
    account += int(await llm("b"))
    return account.total, account.log


@program()
async def own_reduce():
    shared = []
    one, two = Reduced(shared), Reduced(shared)
    one.items.append(await llm("a"))
    two.items.append(await llm("b"))
    return shared, one.items is two.items is shared


@program()
async def own_state():
    value = WithState()
    value.items.append(await llm("a"))
    value.more["b"] = await llm("b")
    return value.items, value.more


@program()
async def dict_and_list_subclasses():
    groups, items = MyDict(), MyList([1])
    items.extra = groups["x"]
    groups["x"].append(await llm("a"))
    items.append(await llm("b"))
    return dict(groups), items, items.extra is groups["x"]


@program()
async def named_tuples():
    point = Point([], 1)
    point.x.append(await llm("a"))
    moved = point._replace(y=2)
    point.x.append(await llm("b"))
    return point, moved.x is point.x


@program()
async def frozen_dataclasses():
    inner = []
    frozen = Frozen((inner, inner), inner)
    inner.append(await llm("a"))
    inner.append(await llm("b"))
    return frozen.items, frozen.inner is frozen.items[0] is frozen.items[1]


@program()
async def slotted_objects():
    value = Slots()
    value.items.append(value)
    value.a = await llm("a")
    await llm("b")
    return value.items[0] is value, value.a, len(value.items)


@program()
async def descriptors():
    value = Described()
    value.things.append(await llm("a"))
    value.things.append(await llm("b"))
    return value.things


@program()
async def enums_and_flags():
    class Mode(enum.Flag):
        A = enum.auto()
        B = enum.auto()

    mode = Mode.A
    if int(await llm("a")) % 2:
        mode |= Mode.B
    seen = {Color.RED: [], mode: 1}
    seen[Color.RED].append(await llm("b"))
    return mode.value, seen[Color.RED], Color.RED in seen


@program()
async def cyclic_objects():
    a = []
    b = {"a": a, "t": (a,)}
    a.append(b)
    a.append(await llm("x"))
    b["y"] = await llm("y")
    return a[0] is b, b["a"] is a, b["t"][0] is a, a[1], b["y"]


@program()
async def long_linked_list():
    head = None
    for i in range(3000):
        head = Linked(i, head)
    head.value = await llm("a")
    head.following.value = await llm("b")
    n, at = 0, head
    while at:
        n, at = n + 1, at.following
    return n, head.value, head.following.value


@program()
async def simple_namespaces():
    box = types.SimpleNamespace(items=[], f=None)
    box.f = box.items.append
    box.f(await llm("a"))
    box.f(await llm("b"))
    return box.items


@program()
async def ordered_and_chained():
    order = collections.OrderedDict(a=1, b=2)
    chain = collections.ChainMap({}, order)
    chain["c"] = await llm("c")
    order.move_to_end("a")
    order["d"] = await llm("d")
    return list(chain.items()), list(order)


@program()
async def arrays_and_views():
    numbers = array.array("i", [1, 2])
    data = bytearray(b"abc")
    view = memoryview(data)
    numbers.append(int(await llm("a")))
    view[0] = int(await llm("b"))
    return numbers.tolist(), bytes(data), view[0] == data[0]


@program()
async def dict_views():
    items = {"a": 1}
    keys, values = items.keys(), items.values()
    items["b"] = await llm("b")
    items["c"] = await llm("c")
    return list(keys), list(values)


@program()
async def mapping_proxies():
    real = {}
    view = types.MappingProxyType(real)
    real["a"] = await llm("a")
    real["b"] = await llm("b")
    return dict(view)


@program()
async def seeded_random():
    trace = {"steps": []}
    dice = random.Random(5)
    found = [dice.random()]
    await llm("a")
    trace["steps"].append(len(trace["steps"]))
    found.append(dice.random())
    await llm("b")
    trace["steps"].append(len(trace["steps"]))
    return (found, dice.random()), trace


@program()
async def bound_methods():
    node = Node("a")
    rename = node.__setattr__
    greet = Derived().greet
    rename("name", await llm("a"))
    rename("name", node.name + await llm("b"))
    return node.name, greet(), rename.__self__ is node


@program()
async def method_callers():
    get, call = operator.itemgetter(0), operator.methodcaller("append", 5)
    items = [[]]
    call(get(items))
    await llm("a")
    call(get(items))
    return items, await llm("b")


@program()
async def maps_and_filters():
    seen = []
    source = [1, 2, 3, 4]
    walk = map(lambda x: seen.append(x) or x * 2, filter(lambda x: x != 2, source))
    first = next(walk)
    await llm("a")
    source.append(5)
    second = next(walk)
    await llm("b")
    return first, second, list(walk), seen


@program()
async def enumerate_and_nested_loops():
    found = []
    for i, each in enumerate(reversed("abc"), start=5):
        for pair in itertools.product([i], [each, "x"]):
            found.append((pair, await llm(f"{pair}")))
    return found


@program()
async def callable_iterators():
    source = io.StringIO("a\nb\nc\n")
    found = []
    for line in iter(source.readline, ""):
        found.append(line + await llm(line))
    return found


@program()
async def set_and_frozenset_iterators():
    trace = {"steps": []}
    items = {3}
    kept = frozenset([Point])
    walk = iter(items)
    a = await llm("a")
    trace["steps"].append(len(trace["steps"]))
    return (next(walk), a, await llm("b"), Point in kept), trace


@program()
async def locks_and_events():
    lock, event = threading.Lock(), threading.Event()
    with lock:
        a = await llm("a")
        held = lock.locked()
    event.set()
    return a, held, lock.locked(), event.is_set(), await llm("b")


@program()
async def queues():
    todo = queue.Queue()
    todo.put(1)
    todo.put(await llm("a"))
    first = todo.get()
    await llm("b")
    return first, todo.get(), todo.empty()


@program()
async def zip_files():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as files:
        files.writestr("a.txt", await llm("a"))
        files.writestr("b.txt", await llm("b"))
    with zipfile.ZipFile(data) as files:
        return [(name, files.read(name)) for name in files.namelist()]


@program()
async def paths_and_files():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "a" / "b"
        path.mkdir(parents=True)
        (path / "x.txt").write_text(await llm("x"))
        (path / "y.txt").write_text(await llm("y"))
        return sorted((p.name, p.read_text()) for p in path.iterdir())


@program()
async def numbers_and_values():
    trace = {"steps": []}
    total = fractions.Fraction(1, 3)
    number = 10**50 + int(await llm("a"))
    trace["steps"].append(len(trace["steps"]))
    which = uuid.UUID(int=number % 2**64)
    total += fractions.Fraction(1, int(await llm("b")))
    trace["steps"].append(len(trace["steps"]))
    return (total, number, str(which), complex(1, 2), ...), trace


@program()
async def templates_and_formats():
    trace = {"steps": []}
    text = string.Template("$a and $b")
    values = {"a": await llm("a")}
    trace["steps"].append(len(trace["steps"]))
    values["b"] = await llm("b")
    trace["steps"].append(len(trace["steps"]))
    return (text.substitute(values), f"{values['a']!r:>5}|{int(values['b']):08.3f}"), trace


@program()
async def patterns():
    trace = {"steps": []}
    pattern = re.compile(r"(\d)(\d)")
    match = pattern.match(await llm("a"))
    trace["steps"].append(len(trace["steps"]))
    b = await llm("b")
    trace["steps"].append(len(trace["steps"]))
    return (match.groups(), match.re is pattern, pattern.sub(r"\2\1", b)), trace


@program()
async def abstract_classes():
    class Shape(abc.ABC):
        @abc.abstractmethod
        async def ask(self): ...

    class Square(Shape):
        async def ask(self):
            return await llm("square")

    try:
        Shape()
    except TypeError as error:
        kind = type(error).__name__
    return kind, await Square().ask(), isinstance(Square(), Shape), await llm("end")


@program()
async def meta_classes():
    made = []

    class Meta(type):
        def __new__(cls, name, bases, names):
            made.append(name)
            return super().__new__(cls, name, bases, names)

    class A(metaclass=Meta):
        pass

    await llm("a")
    B = Meta("B", (A,), {})
    await llm("b")
    return made, issubclass(B, A), type(B) is Meta


@program()
async def exec_and_globals():
    space = {}
    exec("def f(x):\n    return x * 2\nitems = []", space)
    space["items"].append(space["f"](int(await llm("a"))))
    space["items"].append(space["f"](int(await llm("b"))))
    return space["items"], "SENTINEL" in globals()


@program()
async def deep_copies_by_hand():
    original = {"items": [[]]}
    copied, shallow = copy.deepcopy(original), copy.copy(original)
    original["items"][0].append(await llm("a"))
    copied["items"][0].append(await llm("b"))
    return original, copied, shallow["items"] is original["items"]


@program()
async def sets_of_objects():
    nodes = {Node("a"), Node("b")}
    one = next(iter(nodes))
    await llm("a")
    nodes.discard(one)
    await llm("b")
    return len(nodes), one in nodes


@program()
async def sentinel_in_structures():
    trace = {"steps": []}
    table = [[SENTINEL] * 2 for _ in range(2)]
    table[0][0] = await llm("a")
    trace["steps"].append(len(trace["steps"]))
    empty = [(i, j) for i in range(2) for j in range(2) if table[i][j] is SENTINEL]
    return (empty, await llm("b"), table[1][1] is SENTINEL), trace


@program()
async def weak_sets_and_methods():
    node = Node("a")
    group = weakref.WeakSet([node])
    method = weakref.WeakMethod(node.__init__)
    await llm("a")
    alive = len(group), method() is not None
    await llm("b")
    del node
    return alive, len(group), method() is None


@program()
async def proxies():
    node = Node("a")
    proxy = weakref.proxy(node)
    node.name = await llm("a")
    proxy.name += await llm("b")
    return node.name, proxy.name


# Syntax.


@program()
async def session_by_helper():
    log = []
    async with session(log) as same, session([]) as other:
        same.append(await llm("use"))
    return log, same is log, other


@program()
async def with_and_return():
    log = []
    with contextlib.closing(types.SimpleNamespace(close=lambda: log.append("close"))):
        try:
            return log, await llm("a")
        finally:
            log.append(await llm("b"))


@program()
async def while_else_break():
    trace = {"steps": []}
    n, log = 0, []
    while (n := n + 1) < 4:
        if int(await llm(f"w {n}")) > 95:
            break
        for c in "ab":
            if c == "b":
                continue
            log.append(c)
        else:
            log.append("for else")
    else:
        log.append(await llm("else"))
        trace["steps"].append(len(trace["steps"]))
    return (n, log), trace


@program()
async def async_for_break():
    found = []
    async for n in numbers(5):
        found.append(n)
        if len(found) == 2:
            break
    return found, await llm("after")


@program()
async def unpacking():
    trace = {"steps": []}
    first, *rest, (a, b) = [await llm("1"), 2, 3, (await llm("2"), [])]
    trace["steps"].append(len(trace["steps"]))
    b += [a, *rest]
    return ({**{"first": first}, "b": b}, (*rest, *b)), trace


@program()
async def match_of_classes():
    plan = Plan(await llm("goal"), [1, [2]])
    match plan:
        case Plan(goal=goal, steps=[1, [*inner]]) if int(await llm("guard")) > 0:
            inner.append(goal)
            return inner
    return "never"


@program()
async def short_circuits():
    trace = {"steps": []}
    log = []
    a = log.append("a") or await llm("a")
    trace["steps"].append(len(trace["steps"]))
    b = False and await llm("never")
    trace["steps"].append(len(trace["steps"]))
    c = 0 < int(await llm("c")) < 200 < int(await llm("d"))
    trace["steps"].append(len(trace["steps"]))
    return (a, b, c, log, (await llm("e") if c else await llm("f"))), trace


@program()
async def global_statement():
    trace = {"steps": []}
    global MADE
    MADE = [await llm("a")]
    trace["steps"].append(len(trace["steps"]))
    made = list(MADE)
    return (made, await llm("b")), trace


@program()
async def star_calls():
    def f(*args, **names):
        return args, sorted(names.items())

    given = {"positions": [await llm("a")]}
    given["positions"].append(await llm("b"))
    given["positions"].append(f(*given["positions"], **{"k": await llm("k")}, z=await llm("z")))
    return given


@program()
async def type_statement():
    type Pair[T] = tuple[T, T]
    made: Pair[str] = (await llm("a"), await llm("b"))
    return made, Pair.__name__


@program()
async def generic_function():
    def first[T](items: list[T]) -> T:
        return items[0]

    seen = [[await llm("a")]]
    seen[0].append(first([await llm("b")]))
    return first(seen[0]), seen


@program()
async def augmented_targets():
    items, box = [1, 2], types.SimpleNamespace(n=0)
    items[0] += int(await llm("a"))
    box.n += int(await llm("b"))
    items[box.n % 2 :] += [await llm("c")]
    return items, box.n


@program()
async def deletes_names():
    trace = {"steps": []}
    a = await llm("a")
    trace["steps"].append(len(trace["steps"]))
    del a
    try:
        a
    except UnboundLocalError as error:
        kind = error.args
    return (kind, await llm("b")), trace
