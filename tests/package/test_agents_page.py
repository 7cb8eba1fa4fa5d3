"""docs/agents.md runs as it stands, and prints what it says."""

import contextlib
import io
import re

from jaxshare.serving import agents
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_print_what_the_page_says(tmp_path):
    assert len(EXAMPLES) == PAGE.count("```python") == 8
    names: dict[str, object] = {}
    for number, (program, printed) in enumerate(EXAMPLES):
        file, out = tmp_path / f"example_{number}.py", io.StringIO()
        file.write_text(program, encoding="utf-8")  # agents are compiled from their source
        with contextlib.redirect_stdout(out):
            exec(compile(program, str(file), "exec"), names)
        assert out.getvalue() == printed


def test_the_table_has_every_supervisor():
    named = set(re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE))
    found = {name for name in agents.__all__ if hasattr(getattr(agents, name), "wake")}
    assert named | {"Supervisor"} == found


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([\w./]+\.md)(?:#[\w-]+)?\)", PAGE):
        assert (ROOT / "docs" / link).is_file()
