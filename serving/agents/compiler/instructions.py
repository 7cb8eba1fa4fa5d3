"""The instructions of a compiled agent, and the base class of the lowering that emits them."""

import ast
import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxshare.serving.agents.compiler.frames import FRAME, Frame
from jaxshare.serving.agents.compiler.variables import Renamer, refused


class Do(enum.Enum):
    """The operation of an instruction.

    `call` is its piece of code, a function of the frame; `to` is the index of an instruction.
    """

    RUN = enum.auto()  # call, then continue with the next instruction
    TEST = enum.auto()  # call; continue with the next instruction if it is true, else with `to`
    JUMP = enum.auto()  # continue with `to`
    WAIT = enum.auto()  # suspend with the result of call; the value sent back is bound to `store`
    RETURN = enum.auto()  # end with the result of call
    ENTER = enum.auto()  # start a try statement whose handlers are at `to`
    LEAVE = enum.auto()  # end the innermost try statement
    HANDLED = enum.auto()  # stop handling the innermost exception
    RAISE = enum.auto()  # raise the innermost exception again


@dataclasses.dataclass(slots=True)
class Instruction:
    """One instruction of a program.

    Attributes:
      do: its operation.
      line, column: its position in the agent's file.
      to: the index of the instruction to jump to.
      store: for WAIT, the variable that the awaited value is bound to.
      handler: the index of the instruction that handles its exceptions; None leaves the agent.
      what: for WAIT, the source of the awaited expression; `is_yield`: whether it is a yield.
      live: for WAIT, the temporaries that are live after it.
      call: the compiled `body`.
      throw: for WAIT, raises the frame's `thrown` in the agent's own line.
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
    """The target of a jump, whose position is set when it is reached."""

    position: int = -1


@dataclasses.dataclass(frozen=True)
class LoopLabels:
    """The context of a loop's body, with the targets of break and continue."""

    end: Label
    again: Label


@dataclasses.dataclass(frozen=True)
class Handler:
    """The context of a try statement's body; `label` is where its except clauses start."""

    label: Label


@dataclasses.dataclass(frozen=True)
class Final:
    """The context of a body with cleanup, such as finally.

    `leave` emits the cleanup, once for each way out; `label` is where exceptions go.
    """

    label: Label
    leave: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Handling:
    """The context of code that handles an exception."""


Context = LoopLabels | Handler | Final | Handling

_NEW_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def _evaluated_nodes(node: ast.AST) -> Iterable[ast.AST]:
    """The node and its descendants that are evaluated with it, not the bodies of definitions."""
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
        yield from _evaluated_nodes(child)


def suspends(node: ast.AST | None) -> bool:
    """True if evaluating a node may wait."""
    return node is not None and any(
        isinstance(n, (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith))
        or (isinstance(n, ast.comprehension) and n.is_async)
        for n in _evaluated_nodes(node)
    )


def _escapes(node: ast.AST, loop: bool = False) -> bool:
    """True if a node returns, or breaks out of a loop around it."""
    if isinstance(node, ast.Return):
        return True
    if isinstance(node, (ast.Break, ast.Continue)):
        return not loop
    if isinstance(node, _NEW_SCOPES):
        return False
    if isinstance(node, (ast.For, ast.While)):
        return any(_escapes(n, True) for n in node.body) or any(
            _escapes(n, loop) for n in node.orelse
        )
    return any(_escapes(n, loop) for n in ast.iter_child_nodes(node))


def is_one_piece(node: ast.stmt) -> bool:
    """True if a statement can be compiled in one piece."""
    return not suspends(node) and not _escapes(node)


class Emitter:
    """Collects one agent's instructions.

    Args:
      variables: names that its function binds.
      global_names: names that it declares global.
      cells: names of the functions around it.
      file: its file, for errors.
      line: its first line.
    """

    def __init__(
        self, variables: set[str], global_names: set[str], cells: set[str], file: str, line: int
    ):
        self.instructions: list[Instruction] = []
        self.temporaries: dict[str, int] = {}
        # Temporaries with values found outside the agent, which its copies share.
        self.outside: set[str] = set()
        self._variables, self._global_names, self._cells, self._file, self._line = (
            variables,
            global_names,
            cells,
            file,
            line,
        )
        self._jumps: list[tuple[Instruction, Label]] = []
        self._guarded_instructions: list[tuple[Instruction, Label]] = []
        self._contexts: list[Context] = []
        self._pending: list[ast.stmt] = []
        # For each instruction: (temporaries that it reads first, temporaries that it writes).
        self._temporary_uses: list[tuple[set[str], set[str]]] = []

    def finish(self) -> None:
        """Resolves labels and finds the live temporaries of each wait, once all is emitted."""
        self._flush()
        for instruction, label in self._jumps:
            instruction.to = label.position
        for instruction, label in self._guarded_instructions:
            instruction.handler = label.position
        live = _live_temporaries(self.instructions, self._temporary_uses)
        for number, instruction in enumerate(self.instructions):
            if instruction.do is Do.WAIT:
                after = [
                    *successors(self.instructions, number),
                    *([] if instruction.handler is None else [instruction.handler]),
                ]
                instruction.live = frozenset().union(*(live[i] for i in after)) - {
                    instruction.store
                }

    def refuse(self, node: ast.AST, reason: str) -> Exception:
        """The error for a construct that cannot be compiled."""
        return refused(node, reason, self._file)

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
        self._temporary_uses.append(
            _reads_and_writes(body or [], {name for name in self._variables if "." in name})
        )
        place = getattr(node, "lineno", self._line), getattr(node, "col_offset", 0)
        instruction = Instruction(do, *place, body=body and self._renamed(body, node), **fields)
        if to:
            self._jumps.append((instruction, to))
        handler = next(
            (c.label for c in reversed(self._contexts) if isinstance(c, (Handler, Final))), None
        )
        if handler:
            self._guarded_instructions.append((instruction, handler))
        self.instructions.append(instruction)

    def _emit_bare(self, do: Do) -> None:
        self._emit(do, ast.Pass(lineno=self.instructions[-1].line))

    def _flush(self) -> None:
        """Emits the pending statements as one instruction."""
        if self._pending:
            body, self._pending = self._pending, []
            self._emit(Do.RUN, body[0], body=body)

    def _run(self, statement: ast.stmt, node: ast.AST) -> None:
        self._pending.append(located(statement, node))

    def _place(self, label: Label) -> None:
        self._flush()
        label.position = len(self.instructions)

    def _renamed(self, body: list[ast.stmt], node: ast.AST) -> list[ast.stmt]:
        made = Renamer(self._variables, self._cells, self._file).statements(body)
        global_names = [ast.Global(sorted(self._global_names))] if self._global_names else []
        for statement in (*global_names, *made):
            ast.fix_missing_locations(
                statement if hasattr(statement, "lineno") else located(statement, node)
            )
        return [*global_names, *made]

    def _temporary(self) -> str:
        """A new variable, with a name that is not valid in Python."""
        name = f".{len(self.temporaries)}"
        self.temporaries[name] = self._line
        self._variables.add(name)
        return name

    def _keep(self, value: ast.expr, node: ast.AST) -> ast.Name:
        """Evaluates a value into a temporary, and returns the expression that reads it."""
        name = self._temporary()
        value = _unsliced(value)
        if self._is_outside(value):
            self.outside.add(name)
        self._set(name, value, node)
        return located(ast.Name(name, ast.Load()), node)

    def _set(self, name: str, value: ast.expr, node: ast.AST) -> None:
        self._run(ast.Assign([ast.Name(name, ast.Store())], value), node)

    def _is_outside(self, value: ast.expr) -> bool:
        """True for a global name, or an attribute or item of one: its value must not be copied."""
        while isinstance(value, (ast.Attribute, ast.Subscript)):
            value = value.value
        return isinstance(value, ast.Name) and (
            value.id not in self._variables or value.id in self.outside
        )

    def _test(self, test: ast.expr, otherwise: Label, node: ast.AST) -> None:
        if not (isinstance(test, ast.Constant) and test.value):
            self._emit(Do.TEST, node, to=otherwise, body=[located(ast.Return(test), node)])


def successors(instructions: Sequence[Instruction], number: int) -> tuple[int, ...]:
    """Indices of the instructions that may come next, apart from those after an exception."""
    instruction = instructions[number]
    match instruction.do:
        case Do.JUMP:
            return (instruction.to,)
        case Do.TEST:
            return number + 1, instruction.to
        case Do.RETURN | Do.RAISE:
            return ()
    return (number + 1,)


def _reads_and_writes(body: Sequence[ast.stmt], temporaries: set[str]) -> tuple[set[str], set[str]]:
    """(temporaries that statements read before writing them, temporaries that they write)."""
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


def _live_temporaries(
    instructions: Sequence[Instruction], uses: Sequence[tuple[set[str], set[str]]]
) -> list[set[str]]:
    """Liveness: for each instruction, the temporaries that may be read from it on before a write.

    It iterates backwards from successors to predecessors up to a fixed point.
    """
    live = [set[str]() for _ in instructions]
    before: dict[int, set[int]] = {}
    for number, instruction in enumerate(instructions):
        for after in (*successors(instructions, number), instruction.handler):
            if after is not None:
                before.setdefault(after, set()).add(number)
    todo = list(range(len(instructions)))
    while todo:
        number = todo.pop()
        instruction, (reads, writes) = instructions[number], uses[number]
        found = (
            set().union(*(live[i] for i in successors(instructions, number)))
            - writes
            - {instruction.store}
            | reads
        )
        if instruction.handler is not None:
            found |= live[instruction.handler]
        if found != live[number]:
            live[number] = found
            todo += before.get(number, ())
    return live


def located[Node: ast.AST](made: Node, node: ast.AST) -> Node:
    """Gives a made node the start of another node as its location.

    Not the end, since Python reports some nodes at their end.
    """
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
    """True for the name of a temporary."""
    return isinstance(node, ast.Name) and node.id.startswith(".")


def builtin(name: str) -> ast.expr:
    """An expression for a builtin, even if the agent has rebound its name."""
    return ast.Attribute(
        ast.Attribute(ast.Name(FRAME, ast.Load()), "builtins", ast.Load()), name, ast.Load()
    )


def call_frame(name: str, *args: ast.expr) -> ast.expr:
    """An expression that calls a method of the frame."""
    return ast.Call(ast.Attribute(ast.Name(FRAME, ast.Load()), name, ast.Load()), [*args], [])


def _unsliced(index: ast.expr) -> ast.expr:
    """An index as an expression that is valid outside brackets."""
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
