"""docs/tools.md runs as it stands, and prints what it says."""

import re

from tests.package.pages import run_examples
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")


def test_the_examples_print_what_the_page_says(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    printed, names = run_examples(PAGE, tmp_path)
    assert len(printed) == PAGE.count("```python") - PAGE.count("<!-- not run") == 6
    tokenizer = names["model"].tokenizer
    assert "<tool_response>\nOslo: rain for 7 days" in tokenizer.decode(names["tokens"])


def test_the_page_names_every_format():
    named = re.findall(r"^\| `([\w.-]+)` \|", PAGE, re.MULTILINE)
    assert named == [
        *("hermes", "qwen3-coder", "llama3", "pythonic", "mistral", "deepseek", "deepseek-v3.1"),
        "plain",
    ]
