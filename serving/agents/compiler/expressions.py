"""Lowers an agent's expressions: values before a wait are evaluated first, into temporaries."""

import ast
from collections.abc import Callable, Sequence
from typing import Any

from jaxshare.serving.agents.compiler.instructions import (
    Do,
    Emitter,
    Label,
    builtin,
    is_temporary,
    located,
    suspends,
)
from jaxshare.serving.agents.compiler.variables import comprehension_names

REASONS: dict[type[ast.AST], str] = {
    ast.AsyncFor: "async for; write while with `await child.next()`",
    ast.AsyncWith: "async with, which waits where nothing can be copied; write try and finally",
    ast.TryStar: "except*",
    ast.FunctionDef: "a wait in what a function's definition evaluates; wait before",
    ast.AsyncFunctionDef: "a wait in what a function's definition evaluates; wait before",
    ast.ClassDef: "a wait in what a class's definition evaluates; wait before",
    ast.Lambda: "a wait in what a lambda evaluates; wait before",
    ast.YieldFrom: "yield from",
}


class Expressions(Emitter):
    """Lowers expressions."""

    def _block(self, body: Sequence[ast.stmt]) -> None:
        """Lowers statements."""
        raise NotImplementedError

    def _value(self, node: ast.expr) -> ast.expr:
        """An expression for the same value that does not wait; emits all that comes before it."""
        if not suspends(node):
            return node
        lower = getattr(self, f"_value_{type(node).__name__}", None)
        if lower is None:
            raise self.refuse(
                node, REASONS.get(type(node), f"a wait in a {type(node).__name__} expression")
            )
        made = lower(node)
        return made if hasattr(made, "lineno") else ast.copy_location(made, node)

    def _wait(self, node: ast.Await | ast.Yield, value: ast.expr) -> ast.expr:
        store = self._temporary()
        self._emit(
            Do.WAIT,
            node,
            body=[located(ast.Return(value), node)],
            store=store,
            is_yield=isinstance(node, ast.Yield),
            what=getattr(node, "words", ""),
        )
        return ast.Name(store, ast.Load())

    def _value_Await(self, node: ast.Await) -> ast.expr:
        return self._wait(node, self._value(node.value))

    def _value_Yield(self, node: ast.Yield) -> ast.expr:
        return self._wait(node, self._value(node.value) if node.value else ast.Constant(None))

    def _sequence(self, nodes: Sequence[ast.expr]) -> list[ast.expr]:
        """The values of expressions that are evaluated in order."""
        last = max((i for i, node in enumerate(nodes) if suspends(node)), default=-1)
        values = []
        for i, node in enumerate(nodes):
            starred = isinstance(node, ast.Starred)
            value = self._value(node.value if isinstance(node, ast.Starred) else node)
            if i < last and starred:
                value = self._keep(ast.List([ast.Starred(value, ast.Load())], ast.Load()), node)
            elif i < last and not isinstance(value, ast.Constant) and not is_temporary(value):
                value = self._keep(value, node)
            values.append(
                ast.copy_location(ast.Starred(value, ast.Load()), node) if starred else value
            )
        return values

    def _value_Call(self, node: ast.Call) -> ast.expr:
        mappings = [
            ast.Dict([None], [k.value]) if k.arg is None else k.value for k in node.keywords
        ]
        method = (
            node.func
            if isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, (ast.Constant, ast.Name))
            else None
        )
        if method and (isinstance(method.value, ast.Constant) or is_temporary(method.value)):
            # Looking up the method of a string or a new list early has no visible effect.
            function, *rest = method, *self._sequence([*node.args, *mappings])
        else:
            function, *rest = self._sequence([node.func, *node.args, *mappings])
        keywords = [
            ast.keyword(k.arg, value)
            for k, value in zip(node.keywords, rest[len(node.args) :], strict=True)
        ]
        made = ast.copy_location(ast.Call(function, rest[: len(node.args)], keywords), node)
        if isinstance(node.func, ast.Attribute):
            # Python locates the call of a method at its name, which may be lines below the object.
            made.lineno = node.func.end_lineno or node.lineno
            name = len(node.func.attr.encode())
            made.col_offset = max(0, (node.func.end_col_offset or 0) - name)
        return made

    def _value_BinOp(self, node: ast.BinOp) -> ast.expr:
        left, right = self._sequence([node.left, node.right])
        return ast.BinOp(left, node.op, right)

    def _value_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        return ast.UnaryOp(node.op, self._value(node.operand))

    def _value_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Attribute(self._value(node.value), node.attr, ast.Load())

    def _value_Subscript(self, node: ast.Subscript) -> ast.expr:
        of, index = self._sequence([node.value, node.slice])
        return ast.Subscript(of, index, ast.Load())

    def _value_Slice(self, node: ast.Slice) -> ast.expr:
        parts = iter(self._sequence([part for part in (node.lower, node.upper, node.step) if part]))
        return ast.Slice(
            *(next(parts) if part else None for part in (node.lower, node.upper, node.step))
        )

    def _value_Tuple(self, node: ast.Tuple) -> ast.expr:
        return ast.Tuple(self._sequence(node.elts), ast.Load())

    def _value_List(self, node: ast.List) -> ast.expr:
        return ast.List(self._sequence(node.elts), ast.Load())

    def _value_Set(self, node: ast.Set) -> ast.expr:
        return ast.Set(self._sequence(node.elts))

    def _value_Dict(self, node: ast.Dict) -> ast.expr:
        if node.keys == [None]:
            return ast.Dict([None], [self._value(node.values[0])])
        flat = [
            part
            for key, value in zip(node.keys, node.values, strict=True)
            for part in ([ast.Dict([None], [value])] if key is None else [key, value])
        ]
        values = iter(self._sequence(flat))
        keys, found = [], []
        for key in node.keys:
            keys.append(next(values) if key is not None else None)
            found.append(next(values))
        return ast.Dict(keys, found)

    def _value_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        value = self._value(node.value)
        value = value if is_temporary(value) else self._keep(value, node)
        self._run(ast.Assign([node.target], value), node)
        return value

    def _value_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        """Lowers an f-string: each part is formatted before the wait of the next one."""
        last = max(i for i, part in enumerate(node.values) if suspends(part))
        parts: list[ast.expr] = []
        for i, part in enumerate(node.values):
            if isinstance(part, ast.FormattedValue):
                value, form = self._value(part.value), part.format_spec
                if form and suspends(form):
                    value, form = self._keep(value, node), self._value(form)
                part = ast.copy_location(ast.FormattedValue(value, part.conversion, form), part)
                if i < last:
                    text = self._keep(ast.copy_location(ast.JoinedStr([part]), part), node)
                    part = ast.copy_location(ast.FormattedValue(text, -1, None), part)
            parts.append(part)
        return ast.JoinedStr(parts)

    def _choice(
        self,
        node: ast.expr,
        values: Sequence[ast.expr],
        emit_test: Callable[[ast.expr, Label], None],
    ) -> ast.expr:
        """The first value at which the emitted test jumps to the end, else the last value."""
        name, end = self._temporary(), Label()
        for i, value in enumerate(values):
            self._set(name, self._value(value), node)
            if i < len(values) - 1:
                emit_test(ast.copy_location(ast.Name(name, ast.Load()), node), end)
        self._place(end)
        return ast.Name(name, ast.Load())

    def _value_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        def emit_test(value: ast.expr, end: Label) -> None:
            self._test(
                value if isinstance(node.op, ast.And) else ast.UnaryOp(ast.Not(), value), end, node
            )

        return self._choice(node, node.values, emit_test)

    def _value_IfExp(self, node: ast.IfExp) -> ast.expr:
        name, otherwise, end = self._temporary(), Label(), Label()
        self._test(self._value(node.test), otherwise, node)
        self._set(name, self._value(node.body), node)
        self._emit(Do.JUMP, node, to=end)
        self._place(otherwise)
        self._set(name, self._value(node.orelse), node)
        self._place(end)
        return ast.Name(name, ast.Load())

    def _value_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) == 1:
            left, right = self._sequence([node.left, node.comparators[0]])
            return ast.Compare(left, node.ops, [right])
        name, end = self._temporary(), Label()
        left = self._keep(self._value(node.left), node)
        for i, (operator, right) in enumerate(zip(node.ops, node.comparators, strict=True)):
            right = self._keep(self._value(right), node)
            self._set(name, ast.Compare(left, [operator], [right]), node)
            if i < len(node.ops) - 1:
                self._test(ast.Name(name, ast.Load()), end, node)
            left = right
        self._place(end)
        return ast.Name(name, ast.Load())

    def _comprehension(
        self, node: Any, empty: ast.expr, add: Callable[[ast.expr], ast.stmt]
    ) -> ast.expr:
        """Lowers a comprehension to the equivalent loops, over renamed variables."""
        names = comprehension_names(node)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Lambda) and any(
                isinstance(n, ast.Name) and n.id in names for n in ast.walk(inner.body)
            ):
                raise self.refuse(
                    inner, "a lambda over the variables of a comprehension that waits; write a loop"
                )
        made = self._keep(empty, node)
        renaming = _RenameVariables({name: f"{name}{self._temporary()}" for name in names})
        self._variables.update(renaming.names.values())
        # The first iterable is evaluated outside the comprehension's scope.
        first, node.generators[0].iter = node.generators[0].iter, ast.Constant(None)
        node = renaming.visit(node)
        node.generators[0].iter = first
        body: list[ast.stmt] = [add(made)]
        for generator in reversed(node.generators):
            if generator.is_async:
                raise self.refuse(generator.target, REASONS[ast.AsyncFor])
            for test in reversed(generator.ifs):
                body = [ast.If(test, body, [])]
            body = [ast.For(generator.target, generator.iter, body, [])]
        self._block(
            [ast.fix_missing_locations(ast.copy_location(statement, node)) for statement in body]
        )
        return made

    def _wait_in_first_iterable(self, node: Any) -> ast.expr | None:
        """The comprehension with its first iterable lowered, or None if it waits elsewhere too.

        Python evaluates the first iterable before all else.
        """
        first, *others = node.generators
        rest = [
            *first.ifs,
            *others,
            *(getattr(node, field, None) for field in ("elt", "key", "value")),
        ]
        if first.is_async or any(map(suspends, rest)):
            return None
        first.iter = self._value(first.iter)
        return node

    def _value_GeneratorExp(self, node: ast.GeneratorExp) -> ast.expr:
        if made := self._wait_in_first_iterable(node):
            return made
        raise self.refuse(
            node,
            "a wait in a generator expression, which runs some other time; write a list "
            "comprehension",
        )

    def _value_ListComp(self, node: ast.ListComp) -> ast.expr:
        empty = ast.List([], ast.Load())
        return self._wait_in_first_iterable(node) or self._comprehension(
            node, empty, lambda made: _method(made, "append", node.elt)
        )

    def _value_SetComp(self, node: ast.SetComp) -> ast.expr:
        empty = ast.Call(builtin("set"), [], [])
        return self._wait_in_first_iterable(node) or self._comprehension(
            node, empty, lambda made: _method(made, "add", node.elt)
        )

    def _value_DictComp(self, node: ast.DictComp) -> ast.expr:
        def add(made: ast.expr) -> ast.stmt:
            # The key is evaluated before the value, unlike in an assignment.
            return _method(made, "__setitem__", node.key, node.value)

        return self._wait_in_first_iterable(node) or self._comprehension(
            node, ast.Dict([], []), add
        )


class _RenameVariables(ast.NodeTransformer):
    """Renames a comprehension's variables."""

    def __init__(self, names: dict[str, str]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(self.names.get(node.id, node.id), node.ctx), node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        # The body stays as it is: the lambda's own arguments may have these names.
        node.args = self.visit(node.args)
        return node


def _method(of: ast.expr, name: str, *args: ast.expr) -> ast.stmt:
    return ast.Expr(ast.Call(ast.Attribute(of, name, ast.Load()), [*args], []))
