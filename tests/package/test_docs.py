"""README.md and docs/: programs run and print what is said, commands and options exist, links lead
somewhere, and tables are those of the results."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from jaxshare.serving.cli.main import command_parser, split
from scripts.docs import tables
from tests.package.pages import (
    DOCUMENTS,
    NOT_RUN,
    PAGES,
    blocks,
    broken_links,
    commands,
    programs,
    run_examples,
)
from tests.paths import ROOT

TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
ELSEWHERE = {
    *("agents.md", "agents_models.md", "tools.md", "structured_output.md"),
    *("branches.md", "engine.md", "many_devices.md", "workers.md"),
}
"""Pages whose programs have tests of their own: test_guides.py and test_*_page.py."""
TRAINING = {"adapters.md", "rollouts.md"}
"""Pages whose programs train, which takes long."""
WITH_PROGRAMS = [
    page for page, text in TEXTS.items() if programs(text) and page.name not in ELSEWHERE
]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow) if page.name in TRAINING else page
        for page in WITH_PROGRAMS
    ],
    ids=name,
)
def test_programs_print_what_the_page_says(page, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert run_examples(TEXTS[page], tmp_path)[0]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_program_that_is_not_run_says_why(page):
    assert {block.reason for block in blocks(TEXTS[page])} <= {None, *NOT_RUN}


def test_readme_is_short():
    assert len(TEXTS[ROOT / "README.md"].splitlines()) <= 150


PARSER = command_parser()
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def check(words: list[str]) -> None:
    """Asserts that a command exists, and has the options that it is given."""
    program, *arguments = words
    if program == "jaxshare":
        PARSER.parse_args(split(arguments)[0])
    elif program == "make":
        assert {word for word in arguments if "=" not in word} <= TARGETS
    elif program == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1])
    elif program == "pip":
        for word in arguments:
            named = re.findall(r"\[(.*)\]", word)
            assert all(extra in EXTRAS for each in named for extra in each.split(","))


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_commands_and_their_options_exist(page):
    for words in commands(page.read_text(encoding="utf-8")):
        try:
            check(words)
        except SystemExit:
            pytest.fail(f"this is no command: {' '.join(words)}")


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=name)
def test_tables_are_those_of_the_results(document):
    assert tables.written(document) == document.read_text(encoding="utf-8"), (
        "run python -m scripts.docs.tables"
    )
