"""Compiles an agent's function, and runs its instructions from one wait to the next.

Follows section 5.1 of Hive.
"""

import __future__

import ast
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxshare.serving.agents.compiler.duplicates import (
    CONSTANT,
    FLAT,
    LIMIT,
    OUTSIDE,
    STRICT,
    CostlyError,
    duplicate,
)
from jaxshare.serving.agents.compiler.frames import FRAME, Cells, Closure, Frame
from jaxshare.serving.agents.compiler.instructions import Do, Instruction, call_frame, located
from jaxshare.serving.agents.compiler.statements import Lowering
from jaxshare.serving.agents.compiler.variables import RefusedError, refused

_MADE = ".made"


@dataclasses.dataclass(slots=True)
class Waiting:
    """A run has come to a wait: the index of its instruction, and the awaited or yielded value."""

    position: int
    value: Any


@dataclasses.dataclass(slots=True)
class Returned:
    """A run has come to its end, with this value."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled agent.

    Attributes:
      function: the source function.
      instructions: the compiled instructions.
      cells: variables of the functions around it.
      yields: whether it is an async generator.
      temporaries: the line of each temporary.
      outside: temporaries that hold the value of a name outside the agent.
    """

    function: Callable[..., Any]
    instructions: tuple[Instruction, ...]
    cells: Cells
    yields: bool
    temporaries: Mapping[str, int]
    outside: frozenset[str]

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @property
    def name(self) -> str:
        return self.function.__name__

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        """The frame of a new run; a TypeError if the arguments do not fit the function."""
        bound = bound_arguments(self.name, self.signature, args, kwargs)
        bound.apply_defaults()
        frame = Frame(dict(bound.arguments), self.cells)
        frame.outside = frozenset(map(id, _functions(bound.arguments, set())))
        return frame

    def send(self, frame: Frame, value: Any) -> Waiting | Returned:
        """Continues after a wait with its value; a new run ignores the value."""
        instruction = self.instructions[frame.position]
        if instruction.do is Do.WAIT:
            frame[instruction.store] = value
            frame.position += 1
        return self._run(frame)

    def throw(self, frame: Frame, exception: BaseException) -> Waiting | Returned:
        """Continues after a failed wait; a new run raises the exception at once."""
        if self.instructions[frame.position].do is not Do.WAIT:
            raise exception
        frame.thrown = exception
        return self._run(frame)

    def _run(self, frame: Frame) -> Waiting | Returned:
        instructions = self.instructions
        frame.resume()
        while True:
            instruction = instructions[frame.position]
            do = instruction.do
            call = instruction.call if frame.thrown is None else instruction.throw
            try:
                if call is not None:
                    value = _handling(frame, call) if frame.handling else call(frame)
                    if do is Do.RUN:
                        frame.position += 1
                    elif do is Do.TEST:
                        frame.position = frame.position + 1 if value else instruction.to
                    elif do is Do.WAIT:
                        frame.pause()
                        return Waiting(frame.position, value)
                    else:
                        return Returned(value)
                elif do is Do.JUMP:
                    frame.position = instruction.to
                elif do is Do.ENTER:
                    frame.handlers = (*frame.handlers, (instruction.to, len(frame.handling)))
                    frame.position += 1
                elif do is Do.LEAVE:
                    frame.handlers = frame.handlers[:-1]
                    frame.position += 1
                elif do is Do.HANDLED:
                    frame.handling = frame.handling[:-1]
                    frame.position += 1
                else:
                    *kept, raised = frame.handling
                    frame.handling = tuple(kept)
                    raise raised
            except BaseException as error:
                error.__traceback__ = _without_this_file(error.__traceback__)
                if not frame.handlers:
                    failed = error
                    break
                *kept, (frame.position, depth) = frame.handlers
                frame.handlers, frame.handling = tuple(kept), (*frame.handling[:depth], error)
        raise _as_raised_by_python(failed, self.yields)


def _handling(frame: Frame, call: Callable[[Frame], Any]) -> Any:
    """Runs a piece of code inside an except clause, for a bare raise and sys.exc_info() in it."""
    exception = frame.handling[-1]
    traceback, context = exception.__traceback__, exception.__context__
    try:
        raise exception
    except BaseException:
        exception.__traceback__, exception.__context__ = traceback, context
        return call(frame)


def _without_this_file(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the leading frames of this file."""
    while traceback and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def _as_raised_by_python(error: BaseException, yields: bool) -> BaseException:
    """The exception that leaves a coroutine in which this one is raised."""
    if isinstance(error, StopIteration) or (yields and isinstance(error, StopAsyncIteration)):
        kind = "async generator" if yields else "coroutine"
        made = RuntimeError(f"{kind} raised {type(error).__name__}")
        made.__cause__ = made.__context__ = error
        return made
    return error


def bound_arguments(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a function by name; a TypeError if they do not fit it."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None


def _functions(value: Any, seen: set[int]) -> Iterator[types.FunctionType]:
    """The functions in an agent's arguments, and in the lists, dictionaries and objects there."""
    if isinstance(value, types.FunctionType):
        yield value
    elif type(value) not in CONSTANT and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Mapping):
            parts: Iterable[Any] = list(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = list(value)
        else:
            parts = list(getattr(value, "__dict__", {}).values())
        for part in parts:
            yield from _functions(part, seen)


class UncopyableError(TypeError):
    """A variable of an agent cannot be copied, so the agent's state cannot be fired repeatedly."""


def snapshot(
    frame: Frame, program: Program, *, strict: bool = False, limit: int | None = None
) -> Frame:
    """A copy of a frame; later changes to one are invisible to the other.

    The copy shares modules, classes, functions from outside the agent with all that they hold,
    exceptions, JAX arrays, objects whose `__deepcopy__` returns themselves, and values that a
    stopped expression found by a name outside the agent.

    Args:
      strict: refuse exceptions, functions with variables of their own and what weak references
        refer to, in which two copies could be told from one.
      limit: the most objects that are copied.

    Raises:
      CostlyError: it has more objects than the limit.
      UncopyableError: a variable cannot be copied; the message names it.
    """
    wait = program.instructions[frame.position]
    copied, live = frame.empty(), wait.live
    memo = _memo_for(frame, copied, strict, limit)
    if strict and frame.handling:
        raise UncopyableError(f"agent {program.name} waits in an except clause")
    for name, value in frame.items():
        if "." in name and name not in live:
            continue
        if type(value) in CONSTANT:
            copied[name] = value
            continue
        try:
            copied[name] = value if name in program.outside else duplicate(value, memo)
        except CostlyError:
            raise
        except Exception as error:
            own = name.partition(".")[0]
            holder = (
                f"the variable {own}"
                if own
                else f"what line {program.temporaries[name]} still needs"
            )
            raise UncopyableError(
                f"agent {program.name} waits in line {wait.line}, but {holder} holds a "
                f"{type(value).__name__}, which cannot be copied ({error}); make a list of an "
                "iterator, and open files and locks between two waits"
            ) from error
    if frame.options:
        try:
            copied.options = duplicate(frame.options, memo)
        except CostlyError:
            raise
        except Exception as error:
            raise UncopyableError(
                f"agent {program.name} waits in line {wait.line} for a choice among options that "
                f"cannot be copied ({error})"
            ) from error
    copied.flat = memo[FLAT]
    if frame.beside is not None:
        copied.beside = duplicate(frame.beside, memo)
    copied.size = len(memo) if limit is None else limit - (memo[LIMIT] - len(memo))
    return copied


def _memo_for(frame: Frame, copied: Frame, strict: bool, limit: int | None) -> dict[Any, Any]:
    """The memo of a snapshot."""
    # A frame made by `snapshot` is never changed, so its flat lists are still flat.
    memo: dict[Any, Any] = {id(each): each[:] for each in frame.flat}
    memo[id(frame)], memo[FLAT], memo[OUTSIDE] = copied, [], frame.outside
    if strict:
        memo[STRICT] = True
    if limit is not None:
        memo[LIMIT] = len(memo) + 1 + limit
    return memo


def compiled(function: Callable[..., Any]) -> Program:
    """Compiles an agent's function.

    Raises:
      TypeError: it is not an async def.
      RefusedError: it has something that cannot be compiled; the error has the file and the line.
    """
    check_function(function)
    code = function.__code__
    tree = _syntax_tree(function)
    cells = Cells(code.co_freevars, function.__closure__ or ())
    _refuse_private_names(function, tree)
    lowered = Lowering(tree, set(code.co_freevars), code.co_filename)
    _compile(lowered.instructions, function)
    return Program(
        function,
        tuple(lowered.instructions),
        cells,
        inspect.isasyncgenfunction(function),
        lowered.temporaries,
        frozenset(lowered.outside),
    )


def check_function(function: Any) -> None:
    """Raises a TypeError for what is not an async def."""
    if not inspect.isfunction(function) or not (
        inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    ):
        name = getattr(function, "__qualname__", repr(function))
        if isinstance(function, Closure):
            raise TypeError(
                f"agent {name} is defined in an agent whose variables it uses; give it what it "
                "needs as arguments"
            )
        raise TypeError(f"an agent is a function written with async def, and {name} is not")


def _syntax_tree(function: Callable[..., Any]) -> ast.AsyncFunctionDef:
    """The function's syntax tree, with the lines of its file."""
    code = function.__code__

    def unreadable(why: object) -> RefusedError:
        return RefusedError(
            f"the source of agent {function.__name__} cannot be read ({why}); write it in a file "
            "or a notebook"
        )

    try:
        lines, first = inspect.getsourcelines(function)
    except OSError as error:
        raise unreadable(error) from None
    # The source of an indented function keeps its indentation, so that strings over several lines
    # stay the same.
    indented = lines[0][:1].isspace()
    tree: Any = ast.parse("if 1:\n" * indented + "".join(lines), code.co_filename)
    definition = (tree.body[0] if indented else tree).body[0]
    # Python 3.13 takes the text after `python -c` for the source of all that was made by exec.
    if not isinstance(definition, ast.AsyncFunctionDef) or definition.name != code.co_name:
        raise unreadable("its lines are not those of its async def")
    ast.increment_lineno(tree, first - 1 - indented)
    return definition


def _refuse_private_names(function: Callable[..., Any], tree: ast.AST) -> None:
    """Refuses private names in a class's body, which Python changes after parsing."""
    around = function.__qualname__.split(".")[-2:-1]
    for node in ast.walk(tree) if around and around != ["<locals>"] else ():
        name = getattr(node, "attr", getattr(node, "id", getattr(node, "arg", None)))
        if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
            raise refused(
                node,
                f"{name}, a private name of a class; use one underscore",
                function.__code__.co_filename,
            )


def _compile(instructions: list[Instruction], function: Callable[..., Any]) -> None:
    """Compiles the code of every instruction to a function of the frame.

    The function has the agent's own name, globals and line numbers.
    """
    *around, name = function.__code__.co_qualname.split(".")
    defined: list[ast.stmt] = []

    def define(kind: str, number: int, body: list[ast.stmt], line: int) -> None:
        arguments = ast.arguments([], [ast.arg(FRAME)], None, [], [], None, [])
        made = ast.Call(
            ast.Name(_MADE, ast.Load()),
            [ast.Constant(kind), ast.Constant(number), ast.Name(name, ast.Load())],
            [],
        )
        defined.extend([_definition(name, arguments, body, line), ast.Expr(made)])

    for number, instruction in enumerate(instructions):
        if instruction.body:
            define("call", number, instruction.body, instruction.line)
        if instruction.do is Do.WAIT:
            thrown = located(
                ast.Raise(call_frame("take_thrown")),
                ast.Pass(lineno=instruction.line, col_offset=0),
            )
            define("throw", number, [ast.fix_missing_locations(thrown)], instruction.line)
        instruction.body = None
    # Functions defined in a piece have qualified names with all scopes around the agent, so those
    # scopes are put around the pieces.
    nothing = ast.arguments([], [], None, [], [], None, [])
    for i, outer in reversed(list(enumerate(around))):
        if outer == "<locals>":
            outer = around[i - 1]
            defined = [
                _definition(outer, nothing, defined, 1),
                ast.Expr(ast.Call(ast.Name(outer, ast.Load()), [], [])),
            ]
        elif around[i + 1 : i + 2] != ["<locals>"]:
            defined = [ast.ClassDef(outer, [], [], defined, [], type_params=[])]

    def made(kind: str, number: int, piece: types.FunctionType) -> None:
        setattr(
            instructions[number],
            kind,
            types.FunctionType(piece.__code__, function.__globals__, name),
        )

    code = function.__code__
    flags = code.co_flags & sum(
        getattr(__future__, name).compiler_flag for name in __future__.all_feature_names
    )
    module = ast.fix_missing_locations(ast.Module(defined, []))
    exec(
        compile(module, code.co_filename, "exec", flags, dont_inherit=True),
        {"__name__": function.__module__, _MADE: made},
    )


def _definition(name: str, arguments: ast.arguments, body: list[ast.stmt], line: int) -> ast.stmt:
    made = ast.FunctionDef(name, arguments, body, [], None, None, type_params=[])
    return located(made, ast.Pass(lineno=line, col_offset=0))
