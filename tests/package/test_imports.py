"""Imports point one way: jaxshare <- jaxshare.models <- jaxshare.serving."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

# models and serving are also folders of the tree: imported by those names they would work here and
# nowhere else.
EVERYWHERE = ("models", "serving", "tests", "scripts", "torch")
FORBIDDEN = {
    "jaxshare": (
        "jaxshare.models",
        "jaxshare.serving",
        "flax",
        "optax",
        "orbax",
        "transformers",
        "huggingface_hub",
        *EVERYWHERE,
    ),
    "jaxshare.models": ("jaxshare.serving", *EVERYWHERE),
    "jaxshare.serving": EVERYWHERE,
}
FOLDERS = {"jaxshare": "jaxshare", "jaxshare.models": "models", "jaxshare.serving": "serving"}
UNREADABLE = "<not a literal>"


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that a module of `package` imports, wherever in
    the module it does so."""
    tree = ast.parse(source)
    importers = {"__import__", "import_module"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "importlib":
            importers |= {
                alias.asname
                for alias in node.names
                if alias.name == "import_module" and alias.asname
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute("." * node.level + (node.module or ""), package)
            # The name may be a module as well as an attribute: `from jaxshare import models`.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", None)
            )
            if called in importers:
                yield node.lineno, literal_name(node, package)


def absolute(name: str, package: str) -> str:
    """`..cache` in package a.b is a.cache."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    parents = package.split(".")
    return ".".join([*parents[: len(parents) - dots + 1], *filter(None, [name[dots:]])])


def literal_name(call: ast.Call, package: str) -> str:
    given = {keyword.arg: keyword.value for keyword in call.keywords} | dict(
        zip(("name", "package"), call.args, strict=False)
    )
    name = given.get("name")
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return UNREADABLE
    anchor = given.get("package")
    return absolute(
        name.value,
        anchor.value
        if isinstance(anchor, ast.Constant) and isinstance(anchor.value, str)
        else package,
    )


def violations(source: str, package: str) -> list[str]:
    """What `source`, a module of `package`, may not import. The rules are those of the nearest
    package that has any."""
    rules = max((name for name in FORBIDDEN if f"{package}.".startswith(f"{name}.")), key=len)
    return [
        f"line {line}: {rules} may not import {name}"
        for line, name in imported(source, package)
        if name == UNREADABLE or any(f"{name}.".startswith(f"{root}.") for root in FORBIDDEN[rules])
    ]


def modules() -> list[tuple[Path, str]]:
    """Every module of the three packages, with the package it lives in."""
    return [
        (path, ".".join([package, *path.relative_to(ROOT / folder).parent.parts]))
        for package, folder in FOLDERS.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


@pytest.mark.parametrize(
    ("path", "package"),
    modules(),
    ids=lambda value: str(value.relative_to(ROOT)) if isinstance(value, Path) else "",
)
def test_module_imports_only_what_its_package_may(path, package):
    found = violations(path.read_text(encoding="utf-8"), package)
    if path == ROOT / "jaxshare" / "deprecated.py":  # imports what an old name is now, by name
        found = [violation for violation in found if UNREADABLE not in violation]
    assert found == []


def test_all_three_packages_are_looked_at():
    assert {package for _, package in modules()} >= set(FOLDERS)


@pytest.mark.parametrize(
    ("package", "source", "name"),
    [
        ("jaxshare", "import flax", "flax"),
        ("jaxshare", "import numpy, flax.linen as nn", "flax.linen"),
        ("jaxshare", "from flax import linen", "flax.linen"),
        ("jaxshare", "def lazy():\n    from flax.core import freeze", "flax.core.freeze"),
        (
            "jaxshare",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from transformers import "
            "AutoTokenizer",
            "transformers.AutoTokenizer",
        ),
        ("jaxshare", "import jaxshare.models", "jaxshare.models"),
        ("jaxshare", "from jaxshare import models", "jaxshare.models"),
        (
            "jaxshare",
            "from jaxshare.models.config import ModelConfig",
            "jaxshare.models.config.ModelConfig",
        ),
        ("jaxshare", "from . import serving", "jaxshare.serving"),
        ("jaxshare", "from .models import config", "jaxshare.models.config"),
        (
            "jaxshare.pallas",
            "from ..models.config import ModelConfig",
            "jaxshare.models.config.ModelConfig",
        ),
        ("jaxshare.pallas", "from .. import models", "jaxshare.models"),
        ("jaxshare", "from models import config", "models.config"),
        ("jaxshare", "__import__('torch')", "torch"),
        ("jaxshare", "import importlib\nimportlib.import_module('flax.linen')", "flax.linen"),
        ("jaxshare", "from importlib import import_module\nimport_module(name='optax')", "optax"),
        (
            "jaxshare",
            "from importlib import import_module as load\nload('.models', 'jaxshare')",
            "jaxshare.models",
        ),
        (
            "jaxshare",
            "import importlib\nimportlib.import_module('.models', package=__package__)",
            "jaxshare.models",
        ),
        ("jaxshare", "import importlib\nimportlib.import_module('fl' + 'ax')", UNREADABLE),
        ("jaxshare.models", "from jaxshare.serving import cli", "jaxshare.serving.cli"),
        ("jaxshare.models", "from ..serving.cli import main", "jaxshare.serving.cli.main"),
        ("jaxshare.models", "import torch", "torch"),
        ("jaxshare.serving.agents", "from models import config", "models.config"),
    ],
)
def test_checker_finds(package, source, name):
    assert [found.rsplit(" import ")[1] for found in violations(source, package)] == [name]


@pytest.mark.parametrize(
    ("package", "source"),
    [
        (
            "jaxshare",
            "import jax, numpy\nfrom jaxshare.cache import KVCache\nfrom . import layout\nfrom "
            ".pallas import flaxen",
        ),
        ("jaxshare", "import flaxlike\nfrom jaxshare import modelsize"),
        ("jaxshare.pallas", "from ..layout import Layout"),
        (
            "jaxshare.models",
            "import flax.linen as nn\nfrom jaxshare.rope import Rope\nfrom . import config",
        ),
        ("jaxshare.models", "def load():\n    from transformers import AutoTokenizer"),
        (
            "jaxshare.serving",
            "from jaxshare.models import load\nfrom ..models import config\nimport rich",
        ),
        (
            "jaxshare.serving.agents",
            "from ..cli import main\nimport importlib\nimportlib.import_module('jaxshare.models')",
        ),
    ],
)
def test_checker_lets_pass(package, source):
    assert violations(source, package) == []


def test_importing_the_core_loads_no_flax():
    """The same rule seen from outside, so that what reads no source (plugins, exec) cannot get
    round it either."""
    core = [
        ".".join(["jaxshare", *path.relative_to(ROOT / "jaxshare").with_suffix("").parts])
        for path, package in modules()
        if package == "jaxshare" and path.name != "__init__.py"
    ]
    heavy = (
        "flax",
        "optax",
        "orbax",
        "transformers",
        "huggingface_hub",
        "torch",
        "jaxshare.models",
        "jaxshare.serving",
    )
    program = "\n".join(
        [
            *(f"import {name}" for name in core),
            "import sys",
            f"print([name for name in {heavy} if name in sys.modules])",
        ]
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def top_names(file: Path) -> set[str]:
    """The names that a module of the tree gives at its top."""
    found, nodes = set(), [*ast.parse(file.read_text(encoding="utf-8")).body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue  # what is inside is not at the top
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        nodes += ast.iter_child_nodes(node)
    return found


def is_there(name: str) -> bool:
    """True for a dotted name under scripts that is a module, a folder, or a name of a module."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    module = path.parent.with_suffix(".py")
    return module.exists() and path.name in top_names(module)


def missing_names(file: Path) -> list[str]:
    """The names that a module takes from scripts and that are not there, wherever it does so."""
    found = imported(file.read_text(encoding="utf-8"), package="")
    return [name for _, name in found if name.startswith("scripts.") and not is_there(name)]


def test_what_scripts_and_tests_take_from_scripts_is_there(tmp_path):
    files = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    assert {str(file): missing for file in files if (missing := missing_names(file))} == {}
    right = (ROOT / "scripts" / "gpu" / "sass.py").read_text(encoding="utf-8")
    late = "def late():\n    from scripts.gpu.compile import turn_of_layers\n"
    wrong = tmp_path / "wrong.py"
    wrong.write_text(right.replace("import find_nvdisasm", "import find_nothing") + late)
    assert missing_names(wrong) == [
        "scripts.gpu.compiler.find_nothing",
        "scripts.gpu.compile.turn_of_layers",
    ]
