"""The site of the documents: pages of notebooks, links, and what is read of docstrings."""

import base64
import json
import re
import tomllib

import pytest

from scripts.docs import notebooks, site
from tests.paths import ROOT

PIXEL = base64.b64encode(b"\x89PNG and so on").decode()
CELLS = [
    {"cell_type": "markdown", "source": ["# Sums\n", "\n", "See [workers](../docs/workers.md)."]},
    {
        "cell_type": "code",
        "source": ["print(1)\n", "draw()"],
        "outputs": [
            {"output_type": "stream", "name": "stdout", "text": ["1\n"]},
            {
                "output_type": "display_data",
                "data": {"image/png": PIXEL, "text/plain": ["<Figure>"]},
            },
            {
                "output_type": "display_data",
                "data": {"text/html": ["<table></table>"], "text/plain": ["..."]},
            },
        ],
    },
    {"cell_type": "code", "source": ["x = 1"], "outputs": []},
]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A repository with a notebook: its folder."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "workers.md").write_text("# Workers")
    (tmp_path / "notebooks" / "sums.ipynb").write_text(json.dumps({"cells": CELLS}))
    for module in (notebooks, site):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def test_a_notebook_is_a_page_with_its_outputs(made):
    page = notebooks.markdown(made / "notebooks" / "sums.ipynb", made, site.site_page)
    assert page == (
        "# Sums\n\nThis page is a notebook: [sums.ipynb](files/notebooks/sums.ipynb).\n\n"
        "See [workers](workers.md).\n\n"
        "```python\nprint(1)\ndraw()\n```\n\n```text\n1\n```\n\n"
        "![A picture that the lines above draw](sums_0.png)\n\n<table></table>\n\n"
        "```python\nx = 1\n```\n"
    )
    assert (made / "sums_0.png").read_bytes() == b"\x89PNG and so on"


def test_every_notebook_and_every_page_is_in_the_navigation():
    text = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    named = re.findall(r'"(\w+\.md)"', json.dumps(tomllib.loads(text)["project"]["nav"]))
    made = {"command_line.md", "goals.md", *site.PAGES.values()}
    made |= {place for place, _ in site.API.values()}
    made |= {notebooks.page_of(path) for path in notebooks.NOTEBOOKS}
    assert {*named} == made | {path.name for path in (ROOT / "docs").glob("*.md")}
    assert len(notebooks.NOTEBOOKS) == 4


def test_names_with_one_description_are_one_name():
    source = '"""Of it.\n\n    Args:\n      first, last: of a, b: c.\n      one: a, b: c\n"""\nx: int = a[1, 2]\n'
    expected = source.replace("first, last:", "first,\xa0last:")
    assert site.with_joined_names(source) == expected
