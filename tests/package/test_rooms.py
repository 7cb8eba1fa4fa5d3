"""Rooms import in one direction, the one that CONTRIBUTING.md has in a table, and no module is in a
circle of imports."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.paths import ROOT

FOLDERS = {"jaxshare": "jaxshare", "jaxshare.models": "models", "jaxshare.serving": "serving"}
SHARED = (
    "inputs",
    "chat_template",
    "words",
    "errors",
    "checkpoints",
    "checksums",
    "identity",
    "jsonl",
    "locks",
    "greedy",
    "interrupts",
)
"""The modules of serving that are in no room."""


def module_files() -> dict[str, Path]:
    """Every module of the three packages by its name; a package is its `__init__`."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


FILES = module_files()


def imports_of(name: str) -> set[str]:
    """The modules that a module imports, wherever in it, those for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in FILES else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return (found & FILES.keys()) - {name}


def room_of(name: str) -> str:
    """The room of a module: a folder of serving, "shared", "models" or "core"."""
    if name == "jaxshare.serving":
        return "serving"
    if name.startswith("jaxshare.serving."):
        room = name.split(".")[2]
        return "shared" if room in SHARED else room
    return "models" if name.startswith("jaxshare.models") else "core"


def allowed() -> dict[str, set[str]]:
    """For each room the rooms that it may import, from the table in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| Room | Imports |\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (\w+) \|(.*?)\|$", table, re.MULTILINE)
    return {room: set(re.findall(r"\w+", below)) for room, below in rows}


def test_the_table_names_every_room_and_goes_one_way():
    rooms = {room_of(name) for name in FILES} - {"serving"}
    table = allowed()
    assert table.keys() == rooms
    order = list(table)
    for room, below in table.items():
        assert below <= set(order[order.index(room) + 1 :]), f"{room} imports a room above it"


@pytest.mark.parametrize("room", [*allowed()])
def test_a_room_imports_what_the_table_says(room):
    wrong = [
        f"{name} imports {other}"
        for name in FILES
        if room_of(name) == room
        for other in sorted(imports_of(name))
        if room_of(other) not in {room, *allowed()[room]}
    ]
    assert wrong == []


def test_no_module_is_in_a_circle():
    try:
        TopologicalSorter({name: imports_of(name) for name in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_every_class_has_a_name_of_its_own():
    found: dict[str, list[str]] = {}
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(name)
    assert {cls: places for cls, places in found.items() if len(places) > 1} == {}
