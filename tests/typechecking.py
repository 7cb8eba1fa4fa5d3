"""Checks shapes and dtypes at run time: every function of the core and of the models whose
signature names them with jaxtyping is checked by beartype. What is installed checks nothing."""

import ast
import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections.abc import Sequence

PACKAGES = re.compile(r"jaxshare(\.(?!serving\b)\w+)*$")
_SHAPES = re.compile(r"\b(Float|Float32|Int|Int32|Int64|UInt32|Bool|Integer|Inexact|Num|Shaped)\[")
# Dunder names: others are mangled inside classes.
_DECORATOR = ast.parse("__jaxtyped__(typechecker=__beartype__)", mode="eval").body
_IMPORTS = ast.parse(
    "from beartype import beartype as __beartype__\nfrom jaxtyping import jaxtyped as __jaxtyped__"
).body


class _Checked(ast.NodeTransformer):
    """Decorates the functions whose annotations have shapes."""

    count = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        arguments = node.args
        annotations = [
            argument.annotation
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            if argument.annotation
        ]
        if any(_SHAPES.search(ast.unparse(a)) for a in (*annotations, node.returns) if a):
            # closest to the function: what jax.jit and others decorate is checked as it is traced
            node.decorator_list.append(_DECORATOR)
            self.count += 1
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        checked = _Checked()
        tree = checked.visit(tree)
        if checked.count:
            after_docstring = int(ast.get_docstring(tree) is not None)
            tree.body[after_docstring:after_docstring] = _IMPORTS
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the finders after it do, and gives them the loader above."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
        /,
    ) -> importlib.machinery.ModuleSpec | None:
        if not PACKAGES.match(fullname):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                    spec.loader = _Loader(spec.loader.name, spec.loader.path)
                return spec
        return None


def install() -> None:
    """Checks what is imported from now on."""
    assert "jaxshare" not in sys.modules, "jaxshare was imported before its checks"
    sys.meta_path.insert(0, _Finder())
