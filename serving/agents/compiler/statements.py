"""Lowers an agent's statements to instructions; the agent can be stopped between any two.

An instruction is a piece of the agent's own code, compiled as Python compiles it, or a jump, or one
of a few that track try statements and the exceptions being handled. Every wait, in the middle of an
expression too, is an instruction of its own: values evaluated before it are in the frame by then.
Code that does not wait stays in one piece, with its loops.
"""

import ast
import copy
import sys
from collections.abc import Callable, Sequence

from jaxshare.serving.agents.compiler.expressions import REASONS, Expressions
from jaxshare.serving.agents.compiler.instructions import (
    Context,
    Do,
    Final,
    Handler,
    Handling,
    Label,
    LoopLabels,
    builtin,
    call_frame,
    is_one_piece,
    is_temporary,
    located,
    suspends,
)
from jaxshare.serving.agents.compiler.variables import bound_names, flattened


class Lowering(Expressions):
    """Lowers one agent's function.

    Args:
      function: the syntax tree of the function.
      cells: names of the functions around it.
      file: its file, for errors.
    """

    def __init__(self, function: ast.AsyncFunctionDef, cells: set[str], file: str):
        variables, global_names = bound_names(function.body, function.args)
        super().__init__(variables, global_names, cells, file, function.lineno)
        for node in ast.walk(function):
            if isinstance(node, (ast.Await, ast.Yield)):
                node.words = ast.unparse(node)  # pyright: ignore[reportAttributeAccessIssue]
        # The first instruction must not be a wait: a new frame is not at a wait.
        begin = Label()
        self._emit(Do.JUMP, function, to=begin)
        self._place(begin)
        self._block(function.body)
        self._emit(Do.RETURN, function, body=[ast.Return(ast.Constant(None))])
        self.finish()

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        self._line = node.lineno
        if is_one_piece(node):
            if not isinstance(node, (ast.Global, ast.Nonlocal, ast.Pass)):
                self._pending.append(node)
            return
        lower = getattr(self, f"_lower_{type(node).__name__}", None)
        if lower is None:
            raise self.refuse(
                node, REASONS.get(type(node), f"a wait in a {type(node).__name__} statement")
            )
        lower(node)

    def _lower_Expr(self, node: ast.Expr) -> None:
        value = self._value(node.value)
        if not is_temporary(value):
            self._run(ast.Expr(value), node)

    def _lower_Assign(self, node: ast.Assign) -> None:
        value = self._value(node.value)
        if not any(map(suspends, node.targets)):
            self._run(ast.Assign(node.targets, value), node)
            return
        value = self._keep(value, node)
        for target in node.targets:
            self._run(ast.Assign([self._target(target)], value), node)

    def _lower_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._lower_Assign(located(ast.Assign([node.target], node.value), node))

    def _target(self, target: ast.expr) -> ast.expr:
        """An assignment target that does not wait, after emitting the waits in it."""
        match target:
            case ast.Attribute():
                return located(
                    ast.Attribute(self._value(target.value), target.attr, ast.Store()), target
                )
            case ast.Subscript():
                of, index = self._sequence([target.value, target.slice])
                return located(ast.Subscript(of, index, ast.Store()), target)
        raise self.refuse(
            target, "a wait inside a tuple that is assigned to; wait before, and assign then"
        )

    def _lower_AugAssign(self, node: ast.AugAssign) -> None:
        match node.target:
            case ast.Name():
                place: ast.expr = node.target
            case ast.Attribute(value=of, attr=name):
                place = located(
                    ast.Attribute(self._keep(self._value(of), node), name, ast.Store()), node
                )
            case ast.Subscript(value=of, slice=index):
                of, index = self._sequence([of, index])
                of, index = self._keep(of, node), self._keep(index, node)
                place = located(ast.Subscript(of, index, ast.Store()), node)
        kept = self._keep(_loaded(place), node)
        value = self._value(node.value)
        self._run(ast.AugAssign(ast.Name(kept.id, ast.Store()), node.op, value), node)
        self._run(ast.Assign([place], kept), node)

    def _lower_Delete(self, node: ast.Delete) -> None:
        for target in flattened(node.targets):
            if suspends(target):
                place = self._target(target)
                place.ctx = ast.Del()  # pyright: ignore[reportAttributeAccessIssue]
                target = place
            self._run(ast.Delete([target]), node)

    def _lower_Return(self, node: ast.Return) -> None:
        value = self._value(node.value) if node.value else ast.Constant(None)
        if any(not isinstance(c, LoopLabels) for c in self._contexts):
            value = self._keep(value, node)
        kept = self._unwind(0)
        self._emit(Do.RETURN, node, body=[located(ast.Return(value), node)])
        self._contexts = kept

    def _lower_Raise(self, node: ast.Raise) -> None:
        parts = self._sequence([part for part in (node.exc, node.cause) if part])
        self._run(ast.Raise(*parts), node)

    def _lower_Assert(self, node: ast.Assert) -> None:
        if sys.flags.optimize:
            return
        raising = ast.Raise(ast.Call(builtin("AssertionError"), [node.msg] if node.msg else [], []))
        wrong = ast.If(ast.UnaryOp(ast.Not(), node.test), [located(raising, node)], [])
        self._lower_If(ast.fix_missing_locations(located(wrong, node)))

    def _lower_If(self, node: ast.If) -> None:
        otherwise, end = Label(), Label()
        self._test(self._value(node.test), otherwise, node)
        self._block(node.body)
        if node.orelse:
            self._emit(Do.JUMP, node, to=end)
        self._place(otherwise)
        self._block(node.orelse)
        self._place(end)

    def _lower_While(self, node: ast.While) -> None:
        again, otherwise, end = Label(), Label(), Label()
        self._place(again)
        self._test(self._value(node.test), otherwise, node)
        self._inside(LoopLabels(end, again), node.body)
        self._emit(Do.JUMP, node, to=again)
        self._place(otherwise)
        self._block(node.orelse)
        self._place(end)

    def _lower_For(self, node: ast.For) -> None:
        again, otherwise, end = Label(), Label(), Label()
        kept = self._keep(ast.Call(builtin("iter"), [self._value(node.iter)], []), node)
        self._place(again)
        # The piece returns False at the iterator's end; else it assigns the next item.
        following = ast.Assign(
            [ast.Name(".next", ast.Store())], ast.Call(builtin("next"), [kept], [])
        )
        ended = ast.ExceptHandler(builtin("StopIteration"), None, [ast.Return(ast.Constant(False))])
        assign = ast.Assign([node.target], ast.Name(".next", ast.Load()))
        if suspends(node.target):
            raise self.refuse(node.target, "a wait in what a for loop assigns to")
        body: list[ast.stmt] = [
            ast.Try([following], [ended], [], []),
            assign,
            ast.Return(ast.Constant(True)),
        ]
        self._emit(Do.TEST, node, to=otherwise, body=[located(part, node) for part in body])
        self._inside(LoopLabels(end, again), node.body)
        self._emit(Do.JUMP, node, to=again)
        self._place(otherwise)
        self._block(node.orelse)
        self._place(end)

    def _inside(self, context: Context, body: Sequence[ast.stmt]) -> None:
        self._flush()
        self._contexts.append(context)
        self._block(body)
        self._flush()
        self._contexts.pop()

    def _lower_Break(self, node: ast.Break) -> None:
        self._leave_loop(node, again=False)

    def _lower_Continue(self, node: ast.Continue) -> None:
        self._leave_loop(node, again=True)

    def _leave_loop(self, node: ast.stmt, *, again: bool) -> None:
        depth = max(i for i, c in enumerate(self._contexts) if isinstance(c, LoopLabels))
        loop = self._contexts[depth]
        assert isinstance(loop, LoopLabels)
        kept = self._unwind(depth + 1)
        self._emit(Do.JUMP, node, to=loop.again if again else loop.end)
        self._contexts = kept

    def _unwind(self, depth: int) -> list[Context]:
        """Leaves all contexts from `depth` on, innermost first; returns the contexts before that.

        Each context is left inside the contexts around it.
        """
        self._flush()
        kept = self._contexts
        while len(self._contexts) > depth:
            context, self._contexts = self._contexts[-1], self._contexts[:-1]
            if isinstance(context, (Handler, Final)):
                self._emit_bare(Do.LEAVE)
            if isinstance(context, Final):
                context.leave()
                self._flush()
            if isinstance(context, Handling):
                self._emit_bare(Do.HANDLED)
        return kept

    def _guarded(
        self,
        node: ast.AST,
        body: Callable[[], None],
        leave: Callable[[], None],
        failed: Callable[[Label], None],
    ) -> None:
        """Emits a body, with `leave` on every way out except exceptions, which go to `failed`.

        `failed` receives the label after the statement.
        """
        handler, end = Label(), Label()
        self._emit(Do.ENTER, node, to=handler)
        self._contexts.append(Final(handler, leave))
        body()
        self._flush()
        self._contexts.pop()
        self._emit_bare(Do.LEAVE)
        leave()
        self._emit(Do.JUMP, node, to=end)
        self._place(handler)
        self._contexts.append(Handling())
        failed(end)
        self._flush()
        self._contexts.pop()
        self._place(end)

    def _lower_Try(self, node: ast.Try) -> None:
        if not node.finalbody:
            self._handled(node)
            return

        def final() -> None:
            self._block(copy.deepcopy(node.finalbody))  # lowering changes it in place

        def failed(_: Label) -> None:
            final()
            self._emit_bare(Do.RAISE)

        self._guarded(node, lambda: self._handled(node), final, failed)

    def _handled(self, node: ast.Try) -> None:
        """Lowers a try statement without its finally clause."""
        if not node.handlers:
            self._block([*node.body, *node.orelse])
            return
        handler, end = Label(), Label()
        self._emit(Do.ENTER, node, to=handler)
        self._inside(Handler(handler), node.body)
        self._emit_bare(Do.LEAVE)
        self._block(node.orelse)
        self._emit(Do.JUMP, node, to=end)
        self._place(handler)
        self._contexts.append(Handling())
        for clause in node.handlers:
            other = Label()
            if clause.type:
                if suspends(clause.type):
                    raise self.refuse(clause.type, "a wait in what an except clause names")
                self._test(call_frame("matches", clause.type), other, clause)
            self._clause(clause, end)
            self._place(other)
        self._emit_bare(Do.RAISE)
        self._contexts.pop()
        self._place(end)

    def _clause(self, clause: ast.ExceptHandler, end: Label) -> None:
        name = clause.name
        if name is None:
            self._block(clause.body)
        else:
            self._set(name, call_frame("handled"), clause)

            def forget() -> None:
                self._set(name, ast.Constant(None), clause)
                self._run(ast.Delete([ast.Name(name, ast.Del())]), clause)

            def failed(_: Label) -> None:
                forget()
                self._emit_bare(Do.RAISE)

            self._guarded(clause, lambda: self._block(clause.body), forget, failed)
        # After the clause the exception is not being handled any more.
        self._emit_bare(Do.HANDLED)
        self._emit(Do.JUMP, clause, to=end)

    def _lower_With(self, node: ast.With) -> None:
        first, *others = node.items
        inner: list[ast.stmt] = (
            [located(ast.With(others, node.body), node)] if others else node.body
        )
        manager = self._keep(self._value(first.context_expr), node)
        entered: ast.expr = call_frame("enter", manager)
        if first.optional_vars is None:
            self._run(ast.Expr(entered), node)
        else:
            # __exit__ is called even if the assignment fails.
            entered = self._keep(entered, node)

        def body() -> None:
            if first.optional_vars is not None:
                self._lower_Assign(located(ast.Assign([first.optional_vars], entered), node))
            self._block(inner)

        def leave() -> None:
            self._run(ast.Expr(call_frame("leave", manager)), node)

        def failed(end: Label) -> None:
            on = Label()
            self._test(call_frame("swallows", manager), on, node)
            self._emit_bare(Do.HANDLED)
            self._emit(Do.JUMP, node, to=end)
            self._place(on)
            self._emit_bare(Do.RAISE)

        self._guarded(node, body, leave, failed)

    def _lower_Match(self, node: ast.Match) -> None:
        """Lowers match: one piece selects the case and binds its names; then that case's body."""
        subject = self._keep(self._value(node.subject), node)
        chosen = self._temporary()
        cases = []
        for number, case in enumerate(node.cases):
            if suspends(case.guard):
                raise self.refuse(
                    case.guard or node, "a wait in a guard of match; wait in its body"
                )
            cases.append(
                ast.match_case(
                    case.pattern,
                    case.guard,
                    [ast.Assign([ast.Name(chosen, ast.Store())], ast.Constant(number))],
                )
            )
        self._set(chosen, ast.Constant(None), node)
        self._run(ast.Match(subject, cases), node)
        end = Label()
        for number, case in enumerate(node.cases):
            other = Label()
            is_this = ast.Compare(ast.Name(chosen, ast.Load()), [ast.Eq()], [ast.Constant(number)])
            self._test(is_this, other, case.pattern)
            self._block(case.body)
            self._emit(Do.JUMP, node, to=end)
            self._place(other)
        self._place(end)


def _loaded(place: ast.expr) -> ast.expr:
    """The expression that reads an assignment target."""
    match place:
        case ast.Name(id=name):
            made: ast.expr = ast.Name(name, ast.Load())
        case ast.Attribute(value=of, attr=name):
            made = ast.Attribute(of, name, ast.Load())
        case ast.Subscript(value=of, slice=index):
            made = ast.Subscript(of, index, ast.Load())
        case _:
            raise AssertionError(place)
    return located(made, place)
