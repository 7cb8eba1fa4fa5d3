"""docs/structured_output.md runs as it stands, and prints what it says."""

import contextlib
import io
import re

import pytest

from jaxshare.decoding.grammar import KINDS
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "structured_output.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_prints_what_the_page_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    ((program, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(program, "docs/structured_output.md", "exec"), {})
    assert out.getvalue() == printed


def test_the_page_names_every_kind():
    assert {*re.findall(r"^\| `Grammar\.(\w+)\(", PAGE, re.MULTILINE)} == {*KINDS, "json_object"}
