"""The instructions of a compiled agent, and what lowering its statements and expressions to them
builds on."""

import ast
import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxshare.serving.agents.compiler.frames import FRAME, Frame
from jaxshare.serving.agents.compiler.variables import Renamer, refused


class Do(enum.Enum):
    """What an instruction does. `call` is its piece of code, a function of the frame; `to` an index
    of an instruction."""

    RUN = enum.auto()  # call, go on
    TEST = enum.auto()  # call; go on if it is true, else to `to`
    JUMP = enum.auto()  # to `to`
    WAIT = enum.auto()  # suspend with what call returns; what comes back is bound to `store`
    RETURN = enum.auto()  # end with what call returns
    ENTER = enum.auto()  # begin a try statement whose handlers are at `to`
    LEAVE = enum.auto()  # end it
    HANDLED = enum.auto()  # the exception that was being handled is not any more
    RAISE = enum.auto()  # raise it again


@dataclasses.dataclass(slots=True)
class Instruction:
    """One of a program's.

    Attributes:
      call: compiled from `body`.
      to: where to, an index.
      store: the variable that what was waited for is bound to.
      throw: of WAIT, raises what the frame has as thrown, in the agent's own line.
      handler: where an exception in it goes, None out of the agent.
      line: of the agent's file; `column` in it.
      what: of WAIT, what is waited for, in the agent's words; and `is_yield`, whether it is a
        yield.
      live: of WAIT, variables without a name of their own that are needed after it.
    """

    do: Do
    line: int
    column: int = 0
    to: int = -1
    store: str = ""
    handler: int | None = None
    what: str = ""
    is_yield: bool = False
    live: frozenset[str] = frozenset()
    call: Callable[[Frame], Any] | None = None
    throw: Callable[[Frame], Any] | None = None
    body: list[ast.stmt] | None = None


class Label:
    """A place among the instructions that is known when it is reached."""

    at: int = -1


@dataclasses.dataclass(frozen=True)
class LoopLabels:
    end: Label
    again: Label


@dataclasses.dataclass(frozen=True)
class Handler:
    """In a try statement's body."""

    label: Label


@dataclasses.dataclass(frozen=True)
class Final:
    """In a statement that has to be left with this, made anew for each way out; `label` is where
    exceptions go."""

    label: Label
    leave: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Handling:
    """Where an exception is being handled."""


Context = LoopLabels | Handler | Final | Handling

_OWN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def _own(node: ast.AST) -> Iterable[ast.AST]:
    """The node and all in it, but for what functions and classes have inside; of those, what is
    evaluated where they are defined."""
    yield node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        inside = [
            *node.args.defaults,
            *filter(None, node.args.kw_defaults),
            *getattr(node, "decorator_list", ()),
        ]
    elif isinstance(node, ast.ClassDef):
        inside = [*node.bases, *node.keywords, *node.decorator_list]
    else:
        inside = ast.iter_child_nodes(node)
    for child in inside:
        yield from _own(child)


def suspends(node: ast.AST | None) -> bool:
    """Whether it waits somewhere."""
    return node is not None and any(
        isinstance(n, (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith))
        or (isinstance(n, ast.comprehension) and n.is_async)
        for n in _own(node)
    )


def _escapes(node: ast.AST, loop: bool = False) -> bool:
    """Whether it returns, or breaks out of a loop around it."""
    if isinstance(node, ast.Return):
        return True
    if isinstance(node, (ast.Break, ast.Continue)):
        return not loop
    if isinstance(node, _OWN):
        return False
    if isinstance(node, (ast.For, ast.While)):
        return any(_escapes(n, True) for n in node.body) or any(
            _escapes(n, loop) for n in node.orelse
        )
    return any(_escapes(n, loop) for n in ast.iter_child_nodes(node))


def whole(node: ast.stmt) -> bool:
    """Whether a statement can be compiled in one piece."""
    return not suspends(node) and not _escapes(node)


class Emitter:
    """Collects one agent's instructions.

    Args:
      variables: names that its function binds.
      world: those that it declares global.
      cells: names of the functions around it.
      where: its file, for errors.
      line: its first.
    """

    def __init__(
        self, variables: set[str], world: set[str], cells: set[str], where: str, line: int
    ):
        self.instructions: list[Instruction] = []
        self.temporaries: dict[str, int] = {}
        # temporaries for what is found outside the agent, which its copies share
        self.outside: set[str] = set()
        self._variables, self._globals, self._cells, self._where, self._line = (
            variables,
            world,
            cells,
            where,
            line,
        )
        self._to: list[tuple[Instruction, Label]] = []
        self._handlers: list[tuple[Instruction, Label]] = []
        self._contexts: list[Context] = []
        self._pending: list[ast.stmt] = []
        # of each instruction, temporaries that it reads and then writes
        self._traffic: list[tuple[set[str], set[str]]] = []

    def finish(self) -> None:
        """Once all is emitted: places for labels, and what is needed after each wait."""
        self._flush()
        for instruction, label in self._to:
            instruction.to = label.at
        for instruction, label in self._handlers:
            instruction.handler = label.at
        needed = _needed(self.instructions, self._traffic)
        for number, instruction in enumerate(self.instructions):
            if instruction.do is Do.WAIT:
                after = [
                    *successors(self.instructions, number),
                    *([] if instruction.handler is None else [instruction.handler]),
                ]
                instruction.live = frozenset().union(*(needed[i] for i in after)) - {
                    instruction.store
                }

    def refuse(self, node: ast.AST, reason: str) -> Exception:
        return refused(node, reason, self._where)

    def _emit(
        self,
        do: Do,
        node: ast.AST,
        *,
        to: Label | None = None,
        body: list[ast.stmt] | None = None,
        **fields: Any,
    ) -> None:
        self._flush()
        self._traffic.append(
            _traffic(body or [], {name for name in self._variables if "." in name})
        )
        place = getattr(node, "lineno", self._line), getattr(node, "col_offset", 0)
        instruction = Instruction(do, *place, body=body and self._renamed(body, node), **fields)
        if to:
            self._to.append((instruction, to))
        handler = next(
            (c.label for c in reversed(self._contexts) if isinstance(c, (Handler, Final))), None
        )
        if handler:
            self._handlers.append((instruction, handler))
        self.instructions.append(instruction)

    def _plain(self, do: Do) -> None:
        self._emit(do, ast.Pass(lineno=self.instructions[-1].line))

    def _flush(self) -> None:
        """Statements that wait to be compiled in one piece become an instruction."""
        if self._pending:
            body, self._pending = self._pending, []
            self._emit(Do.RUN, body[0], body=body)

    def _run(self, statement: ast.stmt, node: ast.AST) -> None:
        self._pending.append(at(statement, node))

    def _place(self, label: Label) -> None:
        self._flush()
        label.at = len(self.instructions)

    def _renamed(self, body: list[ast.stmt], node: ast.AST) -> list[ast.stmt]:
        made = Renamer(self._variables, self._cells, self._where).statements(body)
        world = [ast.Global(sorted(self._globals))] if self._globals else []
        for statement in (*world, *made):
            ast.fix_missing_locations(
                statement if hasattr(statement, "lineno") else at(statement, node)
            )
        return [*world, *made]

    def _temporary(self) -> str:
        """A new variable that no program can name."""
        name = f".{len(self.temporaries)}"
        self.temporaries[name] = self._line
        self._variables.add(name)
        return name

    def _keep(self, value: ast.expr, node: ast.AST) -> ast.Name:
        """Evaluates now; how to get the value later."""
        name = self._temporary()
        value = _unsliced(value)
        if self._is_outside(value):
            self.outside.add(name)
        self._set(name, value, node)
        return at(ast.Name(name, ast.Load()), node)

    def _set(self, name: str, value: ast.expr, node: ast.AST) -> None:
        self._run(ast.Assign([ast.Name(name, ast.Store())], value), node)

    def _is_outside(self, value: ast.expr) -> bool:
        """Whether it is what a global name stands for, or an attribute or an item of that: found
        there again, not copied."""
        while isinstance(value, (ast.Attribute, ast.Subscript)):
            value = value.value
        return isinstance(value, ast.Name) and (
            value.id not in self._variables or value.id in self.outside
        )

    def _test(self, test: ast.expr, no: Label, node: ast.AST) -> None:
        if not (isinstance(test, ast.Constant) and test.value):
            self._emit(Do.TEST, node, to=no, body=[at(ast.Return(test), node)])


def successors(instructions: Sequence[Instruction], number: int) -> tuple[int, ...]:
    """Indices of the instructions that may come after one, but for exceptions in it."""
    instruction = instructions[number]
    match instruction.do:
        case Do.JUMP:
            return (instruction.to,)
        case Do.TEST:
            return number + 1, instruction.to
        case Do.RETURN | Do.RAISE:
            return ()
    return (number + 1,)


def _traffic(body: Sequence[ast.stmt], temporaries: set[str]) -> tuple[set[str], set[str]]:
    """(temporaries that statements read before they write them, those that they write)."""
    reads, writes = set[str](), set[str]()
    for statement in body:
        targets = (
            [t for t in statement.targets if isinstance(t, ast.Name)]
            if isinstance(statement, ast.Assign)
            else []
        )
        reads |= {
            n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and n not in targets
        } & temporaries - writes
        writes |= {t.id for t in targets} & temporaries
    return reads, writes


def _needed(
    instructions: Sequence[Instruction], traffic: Sequence[tuple[set[str], set[str]]]
) -> list[set[str]]:
    """The temporaries that are read after the begin of each instruction before they are written."""
    needed = [set[str]() for _ in instructions]
    before: dict[int, set[int]] = {}
    for number, instruction in enumerate(instructions):
        for after in (*successors(instructions, number), instruction.handler):
            if after is not None:
                before.setdefault(after, set()).add(number)
    todo = list(range(len(instructions)))
    while todo:
        number = todo.pop()
        instruction, (reads, writes) = instructions[number], traffic[number]
        found = (
            set().union(*(needed[i] for i in successors(instructions, number)))
            - writes
            - {instruction.store}
            | reads
        )
        if instruction.handler is not None:
            found |= needed[instruction.handler]
        if found != needed[number]:
            needed[number] = found
            todo += before.get(number, ())
    return needed


def at[Node: ast.AST](made: Node, node: ast.AST) -> Node:
    """Where the node begins, and no more: Python says of some things that they are where they
    end."""
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    for name, value in {
        "lineno": line,
        "end_lineno": line,
        "col_offset": column,
        "end_col_offset": column,
    }.items():
        setattr(made, name, value)
    return made


def is_temporary(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id.startswith(".")


def builtin(name: str) -> ast.expr:
    """A builtin, whatever the agent calls by that name."""
    return ast.Attribute(
        ast.Attribute(ast.Name(FRAME, ast.Load()), "builtins", ast.Load()), name, ast.Load()
    )


def call_frame(name: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.Attribute(ast.Name(FRAME, ast.Load()), name, ast.Load()), [*args], [])


def _unsliced(index: ast.expr) -> ast.expr:
    """An index as an expression that can stand by itself."""
    match index:
        case ast.Slice(lower=lower, upper=upper, step=step):
            return ast.Call(
                builtin("slice"), [part or ast.Constant(None) for part in (lower, upper, step)], []
            )
        case ast.Tuple(elts=parts):
            return ast.copy_location(
                ast.Tuple([_unsliced(part) for part in parts], ast.Load()), index
            )
    return index
