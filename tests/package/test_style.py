"""Sizes and English, as CONTRIBUTING.md has them: short modules and functions, and docstrings whose
first line is a sentence."""

import ast
import re
from pathlib import Path

import pytest

from tests.paths import ROOT

MODULES = [
    path
    for folder in ("jaxshare", "models", "serving", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
LONG_FUNCTIONS = re.compile(r"parse|add_arguments")
"""Argument parsers may be long, and so may the GPU kernels in jaxshare/pallas."""
NO_SENTENCE = re.compile(r"(Of|What|Whether|Who|As)\b")
PERSONS = re.compile(r"\b(whoever|nobody|somebody|anybody|everybody|so manieth)\b", re.IGNORECASE)
DATA = ("workers/prompts/texts.py", "evaluation/judge_texts.py")
"""Prompts, which are quoted as they are."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_and_functions_are_short(path):
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= 450
    if path.parent == ROOT / "jaxshare" / "pallas":
        return
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno
        and node.end_lineno - node.lineno >= 60
        and not LONG_FUNCTIONS.search(node.name)
    ]
    assert long == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_docstrings_are_sentences_without_persons(path):
    wrong = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        doc = ast.get_docstring(node) or ""
        if NO_SENTENCE.match(doc) or (PERSONS.search(doc) and not name_of(path).endswith(DATA)):
            wrong.append(doc.partition("\n")[0])
    assert wrong == []
