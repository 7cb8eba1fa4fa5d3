"""docs/structured_output.md runs as it stands, and prints what it says."""

import re

import pytest

from jaxshare.decoding.grammar import KINDS
from tests.package.pages import run_examples
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "structured_output.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_prints_what_the_page_says(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    printed, _ = run_examples(PAGE, tmp_path)
    assert len(printed) == 1


def test_the_page_names_every_kind():
    assert {*re.findall(r"^\| `Grammar\.(\w+)\(", PAGE, re.MULTILINE)} == {*KINDS, "json_object"}
