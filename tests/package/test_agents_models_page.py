"""docs/agents_models.md: what it prints, and the defaults that it names."""

import inspect
import re

from jaxshare.serving.agents import llm, tool
from jaxshare.serving.agents.endpoint import OpenAIModel
from jaxshare.serving.agents.mcp_tools import MCPServer
from tests.package.pages import run_examples
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "agents_models.md").read_text(encoding="utf-8")


def test_the_examples_print_what_the_page_says(tmp_path):
    printed, _ = run_examples(PAGE, tmp_path)
    assert len(printed) == 3


def test_the_page_has_the_arguments_and_their_defaults():
    arguments = inspect.signature(OpenAIModel).parameters
    named = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.M)
    assert [name for name, _ in named] == [*arguments][2:]
    numbers = {
        name: float(found[-1]) for name, text in named if (found := re.findall(r"\((\d+)\)", text))
    }
    assert numbers == {name: arguments[name].default for name in numbers} and len(numbers) == 4
    assert "takes longer than `timeout` (60 s)" in PAGE
    assert inspect.signature(MCPServer).parameters["timeout"].default == 60
    assert inspect.signature(llm).parameters["most_characters"].default == 200_000
    assert inspect.signature(tool).parameters["most_bytes"].default == 256 * 2**20
