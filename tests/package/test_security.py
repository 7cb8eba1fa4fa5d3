"""SECURITY.md names tests that exist, and dependencies have no known vulnerability."""

import ast
import re

import pytest

from scripts import audit
from tests.paths import ROOT

NAMED = re.findall(
    r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8")
)


def test_every_line_of_the_threat_model_is_held_by_tests():
    lines = (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| Not trusted"))
    rows = [line for line in lines[begin + 2 :] if line.startswith("|")]
    assert len(rows) >= 9 and all("::test_" in row for row in rows)


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_test_that_is_named_exists(file, name):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("licence", "permitted"),
    [
        ("MIT", True),
        ("Apache Software License; MIT License", True),
        ("BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0", True),
        ("CC0-1.0 OR Apache-2.0", True),
        ("BSD-2-Clause AND Apache-2.0 WITH LLVM-exception", True),
        ("GPL-3.0-only WITH GCC-exception-3.1", False),
        ("ISC License (ISCL)", True),
        ("(MIT AND Zlib) OR GPL-2.0-only", True),
        ("GPL-3.0-or-later", False),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("AGPL-3.0", False),
        ("UNKNOWN", False),
        ("", False),
    ],
)
def test_licences(licence, permitted):
    assert audit.permits(licence) == permitted


def test_vulnerabilities_are_listed_and_packages_without_data_are_counted():
    vuln = {"id": "CVE-1", "fix_versions": ["2.0"]}
    packages = [
        {"name": "a", "version": "1.0", "vulns": [vuln]},
        {"name": "b", "version": "1.0", "vulns": []},
        {"name": "c", "skip_reason": "not found"},
    ]
    found, audited, all_of_them = audit.judged({"dependencies": packages})
    assert found == ["a 1.0: CVE-1, mended in 2.0"] and (audited, all_of_them) == (2, 3)
