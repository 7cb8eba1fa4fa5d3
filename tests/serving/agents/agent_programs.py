"""Random agents: programs from a grammar, for hypothesis."""

import itertools
import linecache
from collections.abc import Callable
from typing import Any

from tests.serving.agents import agent_suite
from tests.serving.agents.agent_oracle import Throw, ask, fail, note

_NUMBERS = itertools.count()
_KINDS = ("ValueError", "KeyError", "LookupError", "ZeroDivisionError")


class Writer:
    """Writes the source of an agent.

    Args:
      draw: draws an integer from 0 to its argument; 0 is the simplest choice.
      gives: whether the agent yields, too.
    """

    def __init__(self, draw: Callable[[int], int], gives: bool):
        self.draw, self.gives = draw, gives
        self.loops = 0  # around the current statement
        self.handling = False
        self.names = itertools.count()

    def one(self, *choices: Any) -> Any:
        made = choices[self.draw(len(choices) - 1)]
        return made() if callable(made) else made

    def name(self) -> str:
        return self.one("a", "b", "c")

    def value(self, depth: int = 2, waits: bool = True, binds: bool = True) -> str:
        """An expression for a number."""

        def part() -> str:
            return self.value(depth - 1, waits, binds)

        simple = [lambda: str(self.draw(3)), self.name]
        if waits:
            simple += [lambda: f"await ask({self.draw(3)})", lambda: f"await ask({self.name()})"]
        if depth <= 0:
            return self.one(*simple)
        fresh = f"v{next(self.names)}"
        made = [
            *simple,
            lambda: f"note(log, {part()})",
            lambda: f"({part()} {self.one('+', '-', '*', '//', '%', '==', '&')} {part()})",
            lambda: f"({part()} {self.one('and', 'or')} {part()})",
            lambda: f"(not {part()})",
            lambda: f"({part()} < {part()} <= {part()})",
            lambda: f"({part()} if {part()} else {part()})",
            lambda: f"[{part()}, {part()}][{part()}]",
            lambda: f"-{part()}",
            lambda: self.in_comprehension(depth - 1, waits, fresh),
            lambda: f"len(f'{{ {part()} }}{{ {part()} !r:>{{ {part()} }}}}')",
            lambda: f"(lambda {fresh}: {self.value(1, False, False)})({part()})",
            lambda: f"max({part()}, *[{part()}], key=lambda {fresh}: -{fresh})",
            lambda: f"{{'k': {part()}, {part()}: {part()}}}['k']",
        ]
        if binds:
            made.append(lambda: f"({self.name()} := {part()})")
        if waits:
            made += [
                lambda: f"await ask({part()})",
                lambda: f"(await fail({self.one(*_KINDS)}, {part()}))",
            ]
            if self.gives:
                made += [
                    lambda: f"len([(yield {part()})])",
                    lambda: f"(yield Throw({self.one(*_KINDS)}, {part()}))",
                ]
        return self.one(*made)

    def in_comprehension(self, depth: int, waits: bool, fresh: str) -> str:
        gives, self.gives = self.gives, False
        one, other, first = (
            self.value(depth, waits, False),
            self.value(depth, waits, False),
            self.value(0, waits, False),
        )
        self.gives = gives
        return self.one(
            f"sum([{one} + {fresh} for {fresh} in range({first}) if {other}])",
            f"sum({fresh} for {fresh} in [{first}, 2])",
            f"sum({{ {one}: {other} for {fresh} in [{first}] for {fresh} in [{fresh}, {other}]}})",
            f"len({{ {one} for a in [{first}, 1] for {fresh} in [a] }})",
        )

    def block(self, depth: int, indent: str) -> list[str]:
        return [line for _ in range(self.draw(2) + 1) for line in self.statement(depth, indent)]

    def in_loop(self, depth: int, indent: str) -> list[str]:
        self.loops += 1
        made = self.block(depth, indent)
        self.loops -= 1
        return made

    def statement(self, depth: int, indent: str) -> list[str]:
        more = indent + "    "
        simple = [
            lambda: [f"note(log, {self.value()})"],
            lambda: [f"{self.name()} = {self.value()}"],
            lambda: [f"{self.name()} {self.one('+', '-', '*')}= {self.value()}"],
            lambda: [f"raise {self.one(*_KINDS)}({self.value()})"],
            lambda: ["return"] if self.gives else [f"return {self.value()}"],
            lambda: [f"assert {self.value()}, {self.value(1)}"],
            lambda: [f"{self.name()}, *{self.name()} = {self.value()}, {self.value()}"],
            lambda: [f"del {self.name()}"],
            lambda: [f"items[{self.value(1)}] {self.one('', '+')}= {self.value()}"],
            lambda: [f"items.append({self.value()})"],
        ]
        if self.loops:
            simple += [lambda: ["break"], lambda: ["continue"]]
        if self.handling:
            simple += [lambda: ["raise"], lambda: ["note(log, repr(sys.exc_info()[1]))"]]
        if self.gives:
            simple.append(lambda: [f"note(log, (yield {self.value(1)}))"])
        if depth <= 0:
            return [indent + line for line in self.one(*simple)]
        return [
            indent + line if line[:1] != " " else line
            for line in self.one(
                *simple,
                lambda: self._if(depth, more, indent),
                lambda: self._for(depth, more, indent),
                lambda: self._while(depth, more, indent),
                lambda: self._try(depth, more, indent),
                lambda: self._try(depth, more, indent),
                lambda: self._with(depth, more),
                lambda: self._match(depth, more, indent),
                lambda: self._def(depth, more),
            )
        ]

    def _if(self, depth: int, more: str, indent: str) -> list[str]:
        other = [indent + "else:", *self.block(depth - 1, more)] if self.draw(1) else []
        return [f"if {self.value()}:", *self.block(depth - 1, more), *other]

    def _else(self, depth: int, more: str, indent: str) -> list[str]:
        return [indent + "else:", *self.block(depth - 1, more)] if self.draw(1) else []

    def _for(self, depth: int, more: str, indent: str) -> list[str]:
        items = self.one(
            lambda: f"range({self.draw(3)})",
            lambda: f"[{self.value(1)}, {self.value(1)}]",
            "list(items)",
        )
        return [
            f"for {self.name()} in {items}:",
            *self.in_loop(depth - 1, more),
            *self._else(depth, more, indent),
        ]

    def _while(self, depth: int, more: str, indent: str) -> list[str]:
        turn = f"v{next(self.names)}"
        test = f"while ({turn} := {turn} + 1) < {self.draw(3)} and {self.value(1)}:"
        return [
            f"{turn} = 0",
            indent + test,
            *self.in_loop(depth - 1, more),
            *self._else(depth, more, indent),
        ]

    def _try(self, depth: int, more: str, indent: str) -> list[str]:
        made = ["try:", *self.block(depth - 1, more)]
        before, self.handling = self.handling, True
        clauses = self.draw(2)
        for _ in range(clauses):
            name = self.one("", lambda: f" as {self.name()}")
            made += [
                f"{indent}except "
                f"{self.one(*_KINDS, '(KeyError, AssertionError)', 'Exception')}{name}:",
                *self.block(depth - 1, more),
            ]
        self.handling = before
        if clauses:
            made += self._else(depth, more, indent)
        if not clauses or self.draw(1):
            made += [indent + "finally:", *self.block(depth - 1, more)]
        return made

    def _with(self, depth: int, more: str) -> list[str]:
        how = self.one(
            "", ", swallow=True", lambda: f", fails={self.one(*_KINDS)}", ", refuses=True"
        )
        second = self.one("", lambda: f", Manager(log, {self.value(1)})")
        return [
            f"with Manager(log, {self.value(1)}{how}) as {self.name()}{second}:",
            *self.block(depth - 1, more),
        ]

    def _match(self, depth: int, more: str, indent: str) -> list[str]:
        deep = more + "    "
        made = [
            f"match [{self.value()}, {self.value(1)}]:",
            f"{more}case [0, {self.name()}]:",
            *self.block(depth - 1, deep),
        ]
        made += [
            f"{more}case [{self.name()}, *_] if {self.value(1, False)}:",
            *self.block(depth - 1, deep),
        ]
        return made + ([f"{more}case _:", *self.block(depth - 1, deep)] if self.draw(1) else [])

    def _def(self, depth: int, more: str) -> list[str]:
        name, argument = f"f{next(self.names)}", f"v{next(self.names)}"
        bound = self.name()
        return [
            f"def {name}({argument}={self.value(0, False)}):",
            f"{more}nonlocal {bound}",
            f"{more}{bound} = {self.value(1, False, False)}",
            f"{more}return {bound} + {argument}",
            f"{more[:-4]}calls.append({name})",
            f"{more[:-4]}note(log, [f() for f in calls])",
        ]

    def agent(self) -> str:
        gives = ["    yield"] if self.gives else []
        return (
            "\n".join(
                [
                    "async def agent(log):",
                    "    a, b, c, items, calls = 1, 2, 0, [1, 2], []",
                    *self.block(3, "    "),
                    f"    note(log, {self.value()})",
                    *gives,
                    "    note(log, [a, b, c, items, [f() for f in calls]])",
                ]
            )
            + "\n"
        )


def defined(source: str) -> Callable[..., Any]:
    """The agent of a source that inspect can read as though it came from a file."""
    file = f"<agent {next(_NUMBERS)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    world: dict[str, Any] = {
        "ask": ask,
        "fail": fail,
        "note": note,
        "Throw": Throw,
        "Manager": agent_suite.Manager,
        "sys": agent_suite.sys,
    }
    exec(compile(source, file, "exec"), world)
    return world["agent"]
