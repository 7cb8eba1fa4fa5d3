"""Moves an agent's variables from Python's own frames, which cannot be copied, into a `Frame`.

Every name that the agent's function binds becomes an entry of the frame, in nested functions too:
`x` is read and written as `frame["x"]`. A name of a function around the agent is read from that
function's cell; all other names stay as they are.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxshare.serving.agents.compiler.frames import FRAME

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_UNSUPPORTED_BUILTINS = {
    "locals": "variables are not in a Python frame",
    "exec": "what it binds is not seen",
    "eval": "it does not see the variables",
    "super": "there is no class around an agent",
    "vars": "variables are not in a Python frame",
}


class RefusedError(SyntaxError):
    """An agent has a construct that cannot be compiled; the message says why, `lineno` where."""


def bound_names(
    body: Iterable[ast.AST], args: ast.arguments | None = None
) -> tuple[set[str], set[str]]:
    """(names that a function's body binds, names that it declares global)."""
    bound = {a.arg for a in _arguments(args)} if args else set[str]()
    nonlocal_names, global_names = set[str](), set[str]()
    for node in _own_nodes(body):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store() | ast.Del())
                | ast.NamedExpr(target=ast.Name(id=name))
            ):
                bound.add(name)
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                bound.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                bound.update(_alias_name(alias) for alias in aliases)
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                bound.add(name)
            case ast.MatchMapping(rest=str(name)):
                bound.add(name)
            case ast.Global(names=names):
                global_names.update(names)
            case ast.Nonlocal(names=names):
                nonlocal_names.update(names)
    return bound - nonlocal_names - global_names, global_names


def _arguments(args: ast.arguments) -> list[ast.arg]:
    return [
        *args.posonlyargs,
        *args.args,
        *args.kwonlyargs,
        *filter(None, (args.vararg, args.kwarg)),
    ]


def _alias_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes in the scope of a body; of a nested scope, those that are evaluated outside it.

    The := of a comprehension belongs to the scope around it.
    """
    for node in body:
        yield node
        if isinstance(node, _COMPREHENSIONS):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
            yield from _own_nodes([node.generators[0].iter])
        elif isinstance(node, _FUNCTIONS):
            outside = [
                *node.args.defaults,
                *filter(None, node.args.kw_defaults),
                *getattr(node, "decorator_list", ()),
            ]
            yield from _own_nodes(outside)
        elif isinstance(node, ast.ClassDef):
            yield from _own_nodes([*node.bases, *node.keywords, *node.decorator_list])
        else:
            yield from _own_nodes(ast.iter_child_nodes(node))


class _ClassScope(set[str]):
    """The names of a class's body, which functions in it do not see."""


class Renamer(ast.NodeTransformer):
    """Turns the names of an agent's variables into entries of its frame.

    The statements are compiled with FRAME as an argument.

    Args:
      variables: names that the agent's function binds.
      cells: names of the functions around it.
      file: the agent's file, for errors.
    """

    def __init__(self, variables: set[str], cells: set[str], file: str):
        self._variables, self._cells, self._file = variables, cells, file
        # Own names of the nested scopes around the current node, outermost first.
        self._scopes: list[set[str]] = []
        self._frame_used = False  # in the current function or class
        self._function_depth = 0
        self._class_depth = 0
        self._deferred_depth = 0  # of functions and generator expressions, which run later

    def refuse(self, node: ast.AST, reason: str) -> RefusedError:
        """The error for a construct that cannot be compiled."""
        return refused(node, reason, self._file)

    def statements(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """The rewritten statements; one may become several."""
        made: list[Any] = []
        for statement in body:
            found = self.visit(statement)
            made += found if isinstance(found, list) else [found]
        return made

    # Names.

    def _holder(self, name: str) -> ast.expr | None:
        """The frame or its cells, whichever has the name; None if Python itself resolves it."""
        if any(name in scope for scope in self._scopes):
            return None
        if name in self._variables:
            return self._frame()
        return ast.Attribute(self._frame(), "cells", ast.Load()) if name in self._cells else None

    def _frame(self) -> ast.Name:
        self._frame_used = True
        return ast.Name(FRAME, ast.Load())

    def _call(self, holder: ast.expr, method: str, *args: ast.expr) -> ast.Call:
        return ast.Call(ast.Attribute(holder, method, ast.Load()), [*args], [])

    def _stored(self, name: str | None, node: ast.AST) -> list[ast.stmt]:
        """Statements that store a name bound by Python in the frame: frame[name] = name."""
        holder = name and self._holder(name)
        if not holder or not name:
            return []
        target = ast.Subscript(holder, ast.Constant(name), ast.Store())
        return [ast.copy_location(ast.Assign([target], ast.Name(name, ast.Load())), node)]

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if holder := self._holder(node.id):
            if (
                self._deferred_depth
                and isinstance(node.ctx, ast.Load)
                and node.id in self._variables
            ):
                return ast.copy_location(self._call(holder, "free", ast.Constant(node.id)), node)
            return ast.copy_location(ast.Subscript(holder, ast.Constant(node.id), node.ctx), node)
        hidden = any(node.id in scope for scope in self._scopes)
        if node.id in _UNSUPPORTED_BUILTINS and not hidden and isinstance(node.ctx, ast.Load):
            raise self.refuse(node, f"{node.id}(): {_UNSUPPORTED_BUILTINS[node.id]}")
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        value = self.visit(node.value)
        # Inside a comprehension := binds a name of the function around it.
        if holder := self._holder(node.target.id):
            return ast.copy_location(
                self._call(holder, "bind", ast.Constant(node.target.id), value), node
            )
        return ast.copy_location(ast.NamedExpr(node.target, value), node)

    def visit_Delete(self, node: ast.Delete) -> list[ast.AST]:
        made: list[ast.AST] = []
        for target in flattened(node.targets):
            holder = self._holder(target.id) if isinstance(target, ast.Name) else None
            if holder and isinstance(target, ast.Name):
                made.append(
                    ast.copy_location(
                        ast.Expr(self._call(holder, "unbind", ast.Constant(target.id))), node
                    )
                )
            else:
                made.append(ast.copy_location(ast.Delete([self.visit(target)]), node))
        return made

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        # A function's annotations are not evaluated; a class's are.
        if self._scopes and isinstance(self._scopes[-1], _ClassScope):
            return self.generic_visit(node)
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return self.visit(ast.copy_location(ast.Assign([node.target], node.value), node))

    def _imported(self, node: ast.Import | ast.ImportFrom) -> list[ast.AST]:
        return [
            node,
            *(
                statement
                for alias in node.names
                for statement in self._stored(_alias_name(alias), node)
            ),
        ]

    visit_Import = visit_ImportFrom = _imported

    def visit_Global(self, node: ast.Global) -> ast.AST:
        # The agent's own are declared at the head of each piece.
        return node if self._scopes else ast.copy_location(ast.Pass(), node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        names = [name for name in node.names if any(name in scope for scope in self._scopes[:-1])]
        return ast.copy_location(ast.Nonlocal(names) if names else ast.Pass(), node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        kind = self.visit(node.type) if node.type else None
        body = self.statements(node.body)
        if node.name and (holder := self._holder(node.name)):
            forget = ast.copy_location(
                ast.Expr(self._call(holder, "forget", ast.Constant(node.name))), node
            )
            body = [
                *self._stored(node.name, node),
                ast.copy_location(ast.Try(body, [], [], [forget]), node),
            ]
        return ast.copy_location(ast.ExceptHandler(kind, node.name, body), node)

    def visit_Match(self, node: ast.Match) -> ast.AST:
        node.subject = self.visit(node.subject)
        for case in node.cases:
            captured = sorted(name for name in bound_names([case.pattern])[0] if self._holder(name))
            case.pattern = self.visit(case.pattern)
            body = self.statements(case.body)
            if case.guard is None:
                case.body = [
                    *(
                        statement
                        for name in captured
                        for statement in self._stored(name, case.body[0])
                    ),
                    *body,
                ]
                continue
            # Captured names are bound before the guard, and stay bound if the guard is false.
            bound = [
                self._call(
                    self._holder(name) or self._frame(),
                    "bind",
                    ast.Constant(name),
                    ast.Name(name, ast.Load()),
                )
                for name in captured
            ]
            both = ast.Subscript(
                ast.Tuple([*bound, self.visit(case.guard)], ast.Load()),
                ast.Constant(-1),
                ast.Load(),
            )
            case.guard, case.body = ast.copy_location(both, case.guard), body
        return node

    def visit_TypeAlias(self, node: ast.AST) -> ast.AST:
        raise self.refuse(node, "a type statement; define it outside")

    # Nested scopes.

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.AST]:
        decorators = [self.visit(d) for d in node.decorator_list]
        self._defaults(node.args)
        node.returns = node.returns and self.visit(node.returns)
        for arg in _arguments(node.args):
            arg.annotation = arg.annotation and self.visit(arg.annotation)
        node.body, needs_closure = self._nested(node, lambda: self.statements(node.body))
        node.decorator_list = decorators
        if needs_closure:
            # Both the function and the decorated one may use the agent's variables.
            closure = ast.copy_location(ast.Attribute(self._frame(), "closure", ast.Load()), node)
            node.decorator_list = [closure, *decorators, closure] if decorators else [closure]
        return [node, *self._stored(node.name, node)]

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._defaults(node.args)
        node.body, needs_closure = self._nested(node, lambda: self.visit(node.body))
        return (
            ast.copy_location(self._call(self._frame(), "closure", node), node)
            if needs_closure
            else node
        )

    def _nested(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, visit: Callable[[], Any]
    ) -> tuple[Any, bool]:
        """(the rewritten body of a function, whether it needs a closure).

        It does if it may refer to variables of the agent or of a function in it, or has mutable
        defaults.
        """
        bound, global_names = bound_names(
            [node.body] if isinstance(node, ast.Lambda) else node.body, node.args
        )
        before, self._frame_used = self._frame_used, False
        scopes = self._scopes
        self._scopes = [
            *(scope for scope in scopes if not isinstance(scope, _ClassScope)),
            bound | global_names,
        ]
        self._function_depth += 1
        self._deferred_depth += 1
        body = visit()
        self._function_depth -= 1
        self._deferred_depth -= 1
        self._scopes = scopes
        # Methods are shared with their class; visit_ClassDef refuses those that use the agent's
        # variables.
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        mutable_defaults = any(not isinstance(default, ast.Constant) for default in defaults)
        needs_closure = not self._class_depth and (
            self._frame_used or mutable_defaults or self._function_depth > 0
        )
        self._frame_used |= before
        return body, needs_closure

    def _defaults(self, args: ast.arguments) -> None:
        args.defaults = [self.visit(d) for d in args.defaults]
        args.kw_defaults = [d and self.visit(d) for d in args.kw_defaults]

    def visit_ClassDef(self, node: ast.ClassDef) -> list[ast.AST]:
        node.bases, node.keywords = (
            [self.visit(b) for b in node.bases],
            [self.visit(k) for k in node.keywords],
        )
        node.decorator_list = [self.visit(d) for d in node.decorator_list]
        used_before, self._frame_used = self._frame_used, False
        self._scopes.append(_ClassScope(bound_names(node.body)[0]))
        self._class_depth += 1
        node.body = self.statements(node.body)
        self._class_depth -= 1
        self._scopes.pop()
        if self._frame_used:
            raise self.refuse(
                node,
                "a class that uses the agent's variables, which a copy of the agent would share; "
                "define it outside",
            )
        self._frame_used = used_before
        return [node, *self._stored(node.name, node)]

    def _comprehension(self, node: Any) -> ast.AST:
        # The first iterable is evaluated outside the comprehension's scope. Names that := binds are
        # among the variables already.
        first = self.visit(node.generators[0].iter)
        self._scopes.append(comprehension_names(node))
        self._deferred_depth += isinstance(node, ast.GeneratorExp)
        for i, generator in enumerate(node.generators):
            generator.iter = first if i == 0 else self.visit(generator.iter)
            generator.target, generator.ifs = (
                self.visit(generator.target),
                [self.visit(test) for test in generator.ifs],
            )
        for field in ("elt", "key", "value"):
            if hasattr(node, field):
                setattr(node, field, self.visit(getattr(node, field)))
        self._deferred_depth -= isinstance(node, ast.GeneratorExp)
        self._scopes.pop()
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension


def comprehension_names(
    node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp,
) -> set[str]:
    """The variables of a comprehension's own scope."""
    return {
        n.id
        for g in node.generators
        for n in ast.walk(g.target)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def flattened(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """The single targets of a del statement, out of their tuples and lists."""
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            yield from flattened(target.elts)
        else:
            yield target


def refused(node: ast.AST, reason: str, file: str) -> RefusedError:
    """The error for a construct that cannot be compiled, with its position."""
    line = getattr(node, "lineno", None)
    error = RefusedError(f"an agent cannot have {reason}")
    error.filename, error.lineno, error.offset = file, line, getattr(node, "col_offset", 0) + 1
    return error
