"""docs/agents.md runs as it stands, and prints what it says."""

import re

from jaxshare.serving import agents
from tests.package.pages import run_examples
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")


def test_the_examples_print_what_the_page_says(tmp_path):
    printed, _ = run_examples(PAGE, tmp_path)
    assert len(printed) == PAGE.count("```python") == 8


def test_the_table_has_every_supervisor():
    named = set(re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE))
    found = {name for name in agents.__all__ if hasattr(getattr(agents, name), "wake")}
    assert named | {"Supervisor"} == found


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([\w./]+\.md)(?:#[\w-]+)?\)", PAGE):
        assert (ROOT / "docs" / link).is_file()
