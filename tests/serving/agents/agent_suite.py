"""Small agents over every construct, each short enough to follow by hand.
`log` gets their side effects."""
# ruff: noqa
# Unusual code has to be compiled like all other code.

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from tests.serving.agents.agent_oracle import Throw, ask, fail, note

SUITE: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []


def case(*args: Any):
    """Adds an agent to the suite, to be run with these arguments; may be used several times."""

    def add(function):
        SUITE.append((function, args))
        return function

    return add


class Manager:
    """A context manager that logs, and whose exit does what its arguments say."""

    def __init__(
        self,
        log: list,
        name: str = "m",
        swallow: bool = False,
        fails: type[Exception] | None = None,
        refuses: bool = False,
    ):
        self.log, self.name, self.swallow, self.fails, self.refuses = (
            log,
            name,
            swallow,
            fails,
            refuses,
        )

    def __enter__(self):
        self.log.append(f"enter {self.name}")
        if self.refuses:
            raise OSError(self.name)
        return self

    def __exit__(self, kind, error, trace):
        self.log.append(
            (
                f"exit {self.name}",
                kind and kind.__name__,
                sys.exc_info()[0] and sys.exc_info()[0].__name__,
            )
        )
        if self.fails:
            raise self.fails(self.name)
        return self.swallow

    def __repr__(self):
        return f"Manager({self.name})"


class Box:
    def __init__(self, log: list, **values: Any):
        self.__dict__.update(values)
        self.__dict__["log"] = log

    def __setattr__(self, name: str, value: Any):
        self.log.append(("set", name, value))
        self.__dict__[name] = value

    def __getattr__(self, name: str):
        if not name.startswith("__"):
            self.log.append(("no", name))
        raise AttributeError(name)

    def add(self, *values: Any, **named: Any):
        self.log.append(("add", values, named))
        return self

    def __repr__(self):
        return f"Box({sorted(k for k in self.__dict__ if k != 'log')})"


@case()
async def nothing(log):
    pass


@case()
async def returns_at_once(log):
    """A docstring."""
    return 4


@case()
async def waits_first(log):
    return await ask(1)


@case()
async def waits_alone(log):
    await ask(1)
    await ask(2)


@case(3)
@case(0)
async def if_else(log, n):
    if await ask(n > 2):
        note(log, "yes")
        return await ask("big")
    elif n:
        note(log, "some")
    else:
        note(log, "none")
        await ask("small")
    return n


@case([1, 2, 3])
@case([])
@case([5, 2])
async def for_else(log, items):
    for i, item in enumerate(items):
        if await ask(item) == 5:
            break
        if item == 2:
            continue
        note(log, (i, item))
    else:
        note(log, await ask("else"))
    return i if items else None


@case(0)
@case(4)
async def while_else(log, stop):
    n = 0
    while (n := n + 1) < await ask(6):
        if n == stop:
            break
        if n % 2:
            continue
        note(log, n)
    else:
        await ask("else")
    return n


@case()
async def nested_loops(log):
    for a in range(3):
        for b in "xy":
            if a == 1:
                break
            if b == "x" and await ask(a):
                continue
            note(log, (a, b))
        else:
            note(log, f"all of {a}")
            continue
        note(log, f"left {a}")
        while True:
            if await ask(True):
                break
    return a, b


@case()
async def while_true(log):
    total = 0
    while True:
        total += await ask(3)
        if total > 10:
            return total


@case()
async def loop_changes_its_list(log):
    items = [1, 2]
    for x in items:
        note(log, await ask(x))
        if len(items) < 5:
            items.append(x * 10)
    return items


@case()
async def loop_over_a_dictionary(log):
    d = {"a": [1], "b": [2]}
    for key, value in d.items():
        value.append(await ask(key))
    for key in sorted(d):
        await ask(d[key])
    return d


@case()
async def loop_targets(log):
    d, box = {}, Box(log)
    for d["x"], (box.y, *rest) in [(1, (2, 3, 4)), (5, (6,))]:
        note(log, await ask(rest))
    return d


@case()
async def loop_over_iterators(log):
    out = []
    for pair in zip(range(3), reversed("abc"), strict=True):
        out.append(await ask(pair))
    for n in map(abs, filter(None, [-1, 0, 2])):
        out.append(await ask(n))
    return out


@case()
async def loop_over_what_is_none(log):
    for x in 3:
        await ask(x)


@case()
async def evaluation_order(log):
    return (
        note(log, 1) + await ask(note(log, 2)),
        note(log, 3),
        [note(log, 4), await ask(note(log, 5)), note(log, 6)],
        {note(log, 7): note(log, 8), note(log, 9): await ask(note(log, 10)), note(log, 11): 12},
    )


@case()
async def what_came_first_stays(log):
    x = 1
    a = x + (x := await ask(5)) + x
    y = [1]
    b = [y, y.append(await ask(2)), y]
    return a, b, b[0] is b[2]


@case()
async def calls(log):
    def show(*args, **named):
        return note(log, (args, named))

    more, named = [1, 2], {"k": 3}
    show(*more, await ask(4), *more, x=await ask(5), **named, y=note(log, 6))
    show(*[await ask(7)], **{"z": await ask(8)})
    return show(await ask(show(await ask(9))))


@case()
async def call_of_what_came_first(log):
    f = len
    g = f
    r = f((f := await ask([1, 2])))
    return r, f is g


@case()
async def methods_are_found_before_arguments(log):
    box = Box(log)
    box.add(1, await ask(2)).add(x=await ask(3)).add()
    items = [3, 1]
    items.append(await ask(7))
    items.sort(key=await ask(None), reverse=await ask(True))
    try:
        box.missing(await ask("never asked"))
    except AttributeError as e:
        note(log, e.args)
    return "-".join([str(await ask(1)), "x"]), items


@case()
async def wrong_call(log):
    def f(a):
        return a

    return f(await ask(1), *[2])


@case()
async def operators(log):
    a = [1, 2, 3, 4]
    return (
        -await ask(3),
        not await ask(0),
        await ask(2) ** await ask(3),
        a[await ask(1)],
        a[await ask(1) :],
        a[: await ask(3) : await ask(2)],
        (await ask(a))[0],
        (await ask("x")).upper(),
        await ask([1]) + [2],
        7 @ Matrix(await ask(1)),
        {await ask(1), 2, *a},
    )


class Matrix:
    def __init__(self, x):
        self.x = x

    def __rmatmul__(self, other):
        return other, self.x

    def __getitem__(self, index):
        return index

    def __setitem__(self, index, value):
        self.x = index, value


@case()
async def slices(log):
    m = Matrix(0)
    got = [m[1:2, await ask(3)], m[await ask(0) : 5, ::2, 4], m[*[1, await ask(2)]]]
    m[1 : await ask(2)] = await ask("v")
    got.append(m.x)
    m = [1, 2, 3, 4]
    m[1 : await ask(3)] += await ask([9])
    return got, m


@case(1, 2, 3)
@case(3, 2, 1)
@case(1, 3, 2)
async def comparisons(log, a, b, c):
    return (
        a < await ask(b) < note(log, c),
        await ask(a) < b,
        a < b < await ask(c),
        note(log, a) == await ask(a) != note(log, b) in [b],
        await ask(a) in [1] is not None,
    )


@case(0, 2)
@case(3, 0)
@case(0, 0)
@case(1, 1)
async def short_circuits(log, a, b):
    x = await ask(a) and note(log, "and") and await ask(b)
    y = await ask(a) or note(log, "") or await ask(b) or "last"
    z = not (a and await ask("deep") or b and (await ask("deeper") or 1))
    if a and await ask(b) or note(log, 0):
        note(log, "both")
    return x, y, z


@case(True)
@case(False)
async def conditional_expressions(log, yes):
    x = await ask("a") if await ask(yes) else note(log, "b")
    return [
        x,
        (1 if yes else await ask(2)),
        note(log, 3 if not yes else (await ask(4) if yes else 5)),
    ]


@case()
async def walrus(log):
    if (n := await ask(3)) > 2 and (m := n + await ask(1)):
        note(log, (n, m))
    while (k := n) and (n := n - await ask(1)):
        note(log, (k, n))
    return [y := await ask(1), y**2, (z := y + 1)], y, z, [w := v for v in range(3)], w


@case()
async def augmented(log):
    x, items, box, d = 1, [1, 2], Box(log, n=1), {"a": [0]}
    x += await ask(2)
    x *= x - await ask(1)
    items[note(log, 0)] += await ask(10)
    alias = items
    items += await ask([3])
    box.n -= await ask(4)
    d[note(log, "a")] += [await ask(5)]
    d[await ask("b")] = x
    d[await ask("b")] |= 1
    (await ask(box)).n += 1
    return x, items, alias is items, box.n, d


@case()
async def augmented_reads_first(log):
    x = 1

    def change():
        nonlocal x
        x = 100
        return 5

    x += await ask(change())
    return x


@case()
async def assignments(log):
    a = b = await ask([1])
    c, (d, *e) = await ask((1, "xyz"))
    box, things = Box(log), {}
    things[note(log, "i")], box.v = await ask((2, 3))
    things[await ask("k")] = box.w = await ask(note(log, "value first"))
    (await ask(things))["z"] = 1
    f: int = await ask(6)
    g: "not evaluated"
    [h, i] = [await ask(1), await ask(2)]
    return a is b, c, d, e, things, f, h, i


@case()
async def unpacking_fails(log):
    try:
        a, b = await ask([1, 2, 3])
    except ValueError as e:
        note(log, e.args)
    a, *b = await ask([])


@case()
async def deleting(log):
    a, b, c, d = 1, 2, {"x": 1, "y": 2}, [1, 2, 3]
    del a
    del (b, c[await ask("x")]), d[await ask(0) : 2]
    try:
        await ask(a)
    except UnboundLocalError as e:
        note(log, str(e))
    del b


@case()
async def unbound(log):
    if await ask(False):
        x = 1
    return x


@case(1)
@case(0)
async def asserting(log, n):
    assert n < 5
    assert await ask(True), note(log, "not evaluated")
    assert n, f"message {await ask(n)}"
    assert await ask(n) > 3


@case()
async def f_strings(log):
    x, w = 3.14159, 9
    return (
        f"{x:.2f} {await ask('a')!r:>{w}} {note(log, 'b')}{await ask(1) + 1:0{await ask(4)}d}{{}} "
        f"{x=} {await ask(2)=}",
        f"{note(log, 'first')!r:{await ask('>9')}}joined{await ask('')}",
        f"{await ask([1])}",
        f"a{f'{await ask(1)}b'}c",
    )


@case()
async def comprehensions(log):
    x = "outside"
    a = [await ask(x) for x in range(3)]
    b = {
        await ask(k): await ask(v) for k, v in {"a": 1, "b": 2}.items() if v > 1 or await ask(True)
    }
    c = {await ask(i % 2) for i in range(4)}
    d = [x * y for x in range(3) if x for y in await ask([1, 2]) if await ask(y) > 1]
    e = [(i, j) for i in range(3) for j in range(i)]
    f = [i for i in await ask([1, 2])]
    g = sum(i for i in await ask([1, 2]))
    return x, a, b, c, d, e, f, g


@case()
async def nested_comprehensions(log):
    rows = [[1, 2], [3]]
    a = [[await ask(x) for x in row if x] for row in rows]
    b = [[await ask(x) for x in range(x)] for x in [2, 1]]
    c = [x for x in [await ask(x) for x in range(3)] if x]
    d = {x: [await ask(y) for y in [x, x]] for x in "ab"}
    return (
        a,
        b,
        c,
        d,
        [(await ask(n), [m + n for m in range(n)], list(m * n for m in [n])) for n in range(3)],
    )


@case()
async def comprehension_fails(log):
    x = 5
    try:
        return [1 // await ask(x) for x in [1, 0]]
    except ZeroDivisionError:
        return x


@case()
async def comprehension_unbound(log):
    return [a for b in [1] if await ask(True) for c in a for a in [1]]


@case()
async def comprehension_targets(log):
    d, k = {}, "k"
    a = [await ask(d[k]) for d[k] in range(2)]
    return a, d, [await ask(last) for n in range(3) if (last := n * 2)], last


@case(None)
@case("body")
@case("body other")
@case("else")
@case("except")
@case("finally")
async def try_all(log, where):
    try:
        await ask("body")
        if where and where.startswith("body"):
            raise (ValueError if where == "body" else OSError)(where)
    except ValueError as e:
        note(log, (str(e), await ask("except")))
    except (KeyError, OSError):
        note(log, "other")
        if where == "except":
            raise KeyError(where)
    else:
        await ask("else")
        if where == "else":
            raise ValueError(where)
    finally:
        note(log, (await ask("finally"), sys.exc_info()[0]))
        if where == "finally":
            raise LookupError(where)
    return await ask("after")


def _ways():
    return [
        case(way, part)
        for way in ("return", "break", "continue", "raise", "none", "error")
        for part in ("body", "except", "else", "finally")
    ]


def all_of(decorators):
    return lambda function: functools.reduce(lambda f, d: d(f), decorators, function)


@all_of(_ways())
async def ways_out(log, way, part):
    for turn in range(2):
        note(log, turn)
        try:
            await ask("body")
            if part == "body":
                if way == "return":
                    return await ask("from body")
                if way == "break":
                    break
                if way == "continue":
                    continue
                if way == "raise":
                    raise LookupError("body")
            if part == "except" or way == "error":
                raise ValueError("for except")
        except ValueError as e:
            note(log, ("caught", await ask(e.args)))
            if part == "except":
                if way == "return":
                    return await ask("from except")
                if way == "break":
                    break
                if way == "continue":
                    continue
                if way == "raise":
                    raise
                if way == "error":
                    raise KeyError("in except") from e
        else:
            note(log, await ask("else"))
            if part == "else":
                if way == "return":
                    return await ask("from else")
                if way == "break":
                    break
                if way == "continue":
                    continue
                if way == "raise":
                    raise LookupError("else")
        finally:
            note(log, ("finally", await ask("f"), sys.exc_info()[0]))
            if part == "finally":
                if way == "return":
                    return await ask("from finally")
                if way == "break":
                    break
                if way == "continue":
                    continue
                if way == "raise":
                    raise LookupError("finally")
        note(log, "rest")
    return "end", turn


@case()
async def finally_keeps_the_result(log):
    x = [1]
    try:
        return x
    finally:
        x.append(await ask(2))
        x = "another"


@case()
async def nested_finally(log):
    for i in range(3):
        try:
            try:
                if i == 0:
                    continue
                if i == 1:
                    raise ValueError(i)
                return await ask("inner")
            finally:
                note(log, ("a", await ask(i)))
        except ValueError:
            note(log, "caught")
        finally:
            for j in range(2):
                if j:
                    break
                note(log, ("b", await ask(j)))


@case()
async def tries_in_each_part(log):
    try:
        try:
            await fail(ValueError, 1)
        except KeyError:
            note(log, "no")
        finally:
            try:
                await fail(KeyError, 2)
            except KeyError as e:
                note(log, (type(e.__context__).__name__, await ask(3), str(sys.exc_info()[1])))
            note(log, str(sys.exc_info()[1]))
    except ValueError as e:
        try:
            raise TypeError("in except")
        except TypeError as f:
            await ask(4)
            note(log, (f.__context__ is e, sys.exc_info()[1] is f))
        note(log, sys.exc_info()[1] is e)
        e = 5
    try:
        e
    except NameError:
        return sys.exc_info()[1].__context__, sys.exc_info()[0]


@case()
async def thrown_in(log):
    try:
        return 1 + await fail(ValueError, "thrown") + note(log, "not reached")
    except ValueError as e:
        note(log, e.args)
    try:
        await fail(KeyError, "second")
    finally:
        await ask("finally")


@case()
async def thrown_in_an_expression(log):
    return [note(log, 1), await ask(2), await fail(OSError, 3), note(log, 4)]


@case()
async def bare_raise(log):
    try:
        try:
            await fail(ValueError, 1)
        except ValueError:
            await ask(2)

            def again():
                raise

            try:
                again()
            except ValueError as e:
                note(log, e.args)
                await ask(3)
            raise
    except ValueError as e:
        raise e


@case()
async def bare_raise_of_nothing(log):
    await ask(1)
    raise


@case()
async def causes(log):
    try:
        try:
            raise KeyError("a")
        except KeyError as e:
            raise await ask(ValueError)(await ask("b")) from await ask(e)
    except ValueError:
        try:
            raise OSError("c") from None
        except OSError as e:
            await ask(4)
            raise RuntimeError("d")


@case()
async def raised_twice(log):
    e = ValueError("kept")
    for _ in range(2):
        try:
            await ask(1)
            raise e
        except ValueError:
            pass
    try:
        raise KeyError
    except KeyError:
        await ask(2)
        raise e


@case()
async def except_names(log):
    kinds = (KeyError, OSError)
    try:
        await fail(FileNotFoundError, 2, "x")
    except kinds as e:
        note(log, type(e).__name__)
        del e
    try:
        await ask(1)
        raise ValueError
    except (3, ValueError):
        note(log, "never")


@case()
async def base_exceptions(log):
    try:
        await fail(KeyboardInterrupt)
    except Exception:
        note(log, "never")
    except BaseException as e:
        note(log, repr(e))
    try:
        await fail(GeneratorExit)
    finally:
        note(log, "finally")


@case()
async def lines_of_exceptions(log):
    x = await ask(0)

    y = (x, await ask(1), note(log, 1) / x)
    return y


@case()
async def stop_iteration(log):
    await ask(1)
    next(iter([]))


@case()
async def stop_iteration_is_thrown(log):
    try:
        await ask(next(iter([]), 3))
        raise StopIteration(4)
    except StopIteration as e:
        note(log, e.value)
    for x in [1]:
        await ask(x)
        raise StopAsyncIteration(5)


@case()
async def withs(log):
    with Manager(log) as m:
        note(log, await ask(m.name))
    with Manager(log, "a"), Manager(log, await ask("b")) as b, await ask(Manager(log, "c")) as c:
        note(log, (b.name, await ask(c.name)))
    with Manager(log, "d") as (m.x):
        await ask(m.x)
    return m


@case("return")
@case("break")
@case("continue")
@case("raise")
@case("swallow")
async def with_ways_out(log, way):
    for i in range(2):
        with Manager(log, f"o{i}", swallow=way == "swallow"):
            with Manager(log, f"i{i}"):
                if await ask(way) == "return":
                    return await ask(i)
                if way == "break":
                    break
                if way == "continue":
                    continue
                raise ValueError(i)
            note(log, "not reached")
        note(log, await ask("rest"))
    return "end"


@case()
async def with_that_fails(log):
    try:
        with Manager(log, fails=OSError):
            await ask(1)
    except OSError as e:
        note(log, e.__context__)
    try:
        with Manager(log, "o"), Manager(log, "i", fails=KeyError):
            await fail(ValueError, 2)
    except KeyError as e:
        note(log, type(e.__context__).__name__)
    try:
        with Manager(log, "o"), Manager(log, "i", refuses=True):
            await ask("never")
    except OSError:
        await ask(3)
    try:
        with Manager(log) as (a, b):
            await ask("never")
    except TypeError:
        pass
    with await ask(5):
        pass


@case()
async def with_of_the_library(log):
    with contextlib.suppress(KeyError):
        await ask(1)
        {}[await ask(2)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(Manager(log, "s"))
        stack.push(Manager(log, "t"))
        await ask(3)
    return "out"


@case([1, 2])
@case({"kind": "a", "n": 3, "more": 4})
@case((0, 5))
@case("text")
@case(7)
@case(None)
async def matching(log, subject):
    match await ask(subject):
        case [1, x] if note(log, x) > 5:
            got = await ask("guarded")
        case [1 | 0 as first, *rest]:
            got = first, rest, await ask("sequence"), x if subject == [1, 2] else None
        case {"kind": kind, **others}:
            got = await ask(kind), others
        case str() as text:
            got = await ask(text)
        case int(n) if n > 100:
            got = "never"
        case None:
            return "none"
        case _:
            got = "other"
    match got:
        case (a, b, *_):
            note(log, (a, b))
        case str(s):
            note(log, s)
    return got


@case()
async def match_in_a_loop(log):
    for x in [1, "a", [2], 3.0]:
        match x:
            case int():
                await ask("int")
                continue
            case [y]:
                note(log, y)
            case float():
                break
        note(log, await ask(x))
    return x, y


@case()
async def closures(log):
    n = 1

    def get():
        return n

    def add(k):
        nonlocal n
        n += k
        return n

    late = lambda z=n: (z, n)
    note(log, (get(), add(5), get(), late()))
    await ask(1)
    n = await ask(10)
    note(log, (get(), add(5), n, late()))
    await ask(2)
    functions = [add, get]
    await ask(3)
    return functions[0](1), functions[1](), n, get(), late()


@case()
async def closures_in_loops(log):
    fs = []
    for i in range(3):
        fs.append(lambda: (i, await_))
        await_ = await ask(i)
    return [f() for f in fs], [g() for g in [lambda: j + i for j in range(2)]]


@case()
async def counters(log):
    def counter():
        count = 0

        def up():
            nonlocal count
            count += 1
            return count

        def now():
            return count

        return up, now

    up, now = counter()
    up()
    await ask(now())
    up()
    other = counter()[0]
    await ask(1)
    return up(), now(), other()


@case()
async def recursion(log):
    depth = 0

    def fact(n):
        nonlocal depth
        depth += 1
        return n * fact(n - 1) if n > 1 else 1

    async_ = await ask(4)

    def even(n):
        return True if n == 0 else odd(n - 1)

    def odd(n):
        return False if n == 0 else even(n - 1)

    x = fact(async_)
    await ask(even(4))
    return x, depth, fact(3), depth, even(7)


@case()
async def decorated_functions(log):
    base = 10

    def twice(f):
        @functools.wraps(f)
        def inner(*args):
            return f(*args), f(*args)

        return inner

    @twice
    def add(x):
        """Adds."""
        return base + x

    @contextlib.contextmanager
    def at(n):
        nonlocal base
        kept, base = base, n
        yield base
        base = kept

    await ask(1)
    base = await ask(20)
    with at(5):
        note(log, add(1))
    await ask(2)
    return add(2), add.__name__, add.__doc__, base


@case()
async def defaults_are_evaluated_once(log):
    n = 1

    def f(a=note(log, n), *, b=[n]):
        b.append(a)
        return b

    n = 2
    f()
    await ask(n)
    return f(), f(3), f.__name__, f.__qualname__


@case(1)
@case(1, 2)
@case(1, 2, 3, 4)
async def arguments(log, a, /, b=5, *rest):
    rest2 = [*rest, await ask(b)]
    b += a
    return a, b, rest, rest2


@case()
async def positional_and_named(log, *args, key=(1, 2), **named):
    named["x"] = await ask(args)
    return args, key, named


@case()
async def imports(log):
    import json as j
    import os.path
    from math import floor as f, pi

    await ask(1)
    import collections.abc

    return j.dumps([1]), os.path.basename("a/b"), f(pi), collections.abc.Sized.__name__


@case()
async def classes(log):
    class Point:
        """In an agent."""

        size: int = 2

        def __init__(self, x):
            self.x = x

        def double(self):
            return [self.x * self.size for _ in range(self.size)]

    p = Point(await ask(3))
    p.x += await ask(1)
    return p.double(), Point.__doc__, Point.__annotations__


WORLD = "world"
COUNT = 0


@case()
async def globals_(log):
    global COUNT
    COUNT = 1
    COUNT += await ask(5)

    def read():
        return COUNT, WORLD

    x = COUNT
    COUNT = 0
    return x, WORLD, read(), __name__


@case()
async def names_of_builtins(log):
    len, iter, next, StopIteration, AssertionError, set = await ask([1, 2, 3, KeyError, 5, 6])
    for x in [len, iter]:
        await ask(x)
    s = {await ask(y) for y in [1]}
    try:
        assert await ask(False), "mine"
    except Exception as e:
        return x, s, type(e).__name__


@case()
async def generator_functions(log):
    n = 2

    def count():
        for i in range(n):
            got = yield i
            note(log, got)

    await ask(1)
    return list(count()), [x + n for x in count()], sum(x for x in count() if x < n)


@case()
async def gives(log):
    got = yield 1
    note(log, got)
    note(log, (yield (yield 2)))
    x = [(yield 3), await ask(4), (yield)]
    note(log, x)
    if await ask(True):
        return
    yield 5


@case()
async def gives_in_loops(log):
    try:
        for i in range(3):
            with Manager(log, str(i)):
                if (yield i)[1] == 1:
                    break
                note(log, await ask(i))
    finally:
        got = yield "last"
        note(log, got)


@case()
async def gives_and_is_thrown_at(log):
    try:
        yield Throw(ValueError, "thrown")
    except ValueError as e:
        note(log, (yield e.args))
        await ask(1)
    yield Throw(KeyError, "out")


@case()
async def gives_nothing(log):
    await ask(1)
    if False:
        yield


@case(StopIteration)
@case(StopAsyncIteration)
@case(ValueError)
async def gives_and_stops(log, kind):
    yield 1
    await ask(1)
    raise kind("x")


@case()
async def strings_over_many_lines(log):
    text = """one
        two
    three"""
    await ask(text)
    return f"""{await ask(1)}
  and
        {text}"""


@case()
async def expressions_of_no_use(log):
    await ask(1), note(log, 1)
    note(log, 2) if await ask(0) else note(log, 3)
    await ask(2) and note(log, 4)
    ...
    "text"
    [await ask(3)]


@case()
async def snapshots_keep_who_is_who(log):
    a = [1]
    d = {"a": a, "self": None}
    d["self"] = d
    box = Box(log, items=a)
    method = box.items.append
    both = (a, [a], box.add)
    await ask(1)
    a.append(2)
    method(await ask(3))
    await ask(4)
    return (
        d["a"] is a,
        d["self"] is d,
        box.items is a,
        both[0] is a,
        both[1][0] is a,
        both[2].__self__ is box,
        a,
    )


@case()
async def dead_temporaries_need_no_copy(log):
    try:
        for x in (i for i in range(3)):
            note(log, x)
            if x == 1:
                raise ValueError(x)
    except ValueError:
        await ask(1)
    for x in (i for i in range(3)):
        if x:
            break
    return await ask(x)


@case()
async def spread_out(log):
    value = await ask(note(log, 1) + await ask(2)) + (await ask(3))
    if value and await ask(None):
        pass
    return {
        "a": await ask(value),
        "b": (await ask(undefined)),
    }


def _inside():
    outer, counter = "outer", 0

    @case()
    async def in_a_function(log):
        nonlocal counter
        counter = await ask(counter)
        counter = 5
        kept = counter, [outer + s for s in "ab"], (lambda: (outer, counter))()
        text = """in
    side"""
        try:
            raise ValueError(1)
        except ValueError as counter:
            await ask(1)
        try:
            counter
        except NameError:
            counter = 0
        match await ask([1, 2]):
            case [x, counter] if await_:
                kept += (x, counter)
        counter = 0
        if counter := await ask(3):
            note(log, [counter := i for i in range(3)])
        del counter
        counter = 0
        for counter in range(2):
            await ask(counter)
        counter = 0
        return kept, text, later

    later = "later"
    await_ = True

    class Holder:
        @case()
        async def in_a_class(log):
            return await ask(outer), Holder.__name__

    return in_a_function


_inside()
