"""docs/tools.md runs as it stands, and prints what it says."""

import contextlib
import io
import re

from tests.paths import ROOT

PAGE = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")


def test_the_examples_print_what_the_page_says(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == PAGE.count("```python") == 6
    names: dict[str, object] = {}
    for number, (program, printed) in enumerate(examples):
        file, out = tmp_path / f"example_{number}.py", io.StringIO()
        file.write_text(program, encoding="utf-8")  # agents are compiled from their source
        with contextlib.redirect_stdout(out):
            exec(compile(program, str(file), "exec"), names)
        assert out.getvalue() == printed
    tokenizer = names["model"].tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    assert "<tool_response>\nOslo: rain for 7 days" in tokenizer.decode(names["tokens"])


def test_the_page_names_every_format():
    named = re.findall(r"^\| `([\w.-]+)` \|", PAGE, re.MULTILINE)
    assert named == [
        *("hermes", "qwen3-coder", "llama3", "pythonic", "mistral", "deepseek", "deepseek-v3.1"),
        "plain",
    ]
