"""The site of the documents: pages of notebooks, links, and what is read of docstrings."""

import ast
import base64
import json
import re
import tomllib

import pytest

from scripts.docs import notebooks, site, versions
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


def test_names_with_one_description_have_a_line_each_in_docstrings_alone():
    source = (
        '"""Of it.\n\n    Args:\n      first, last, at: of a, b: c\n        and d.\n'
        '      one: a, b: c\n\n    Raises:\n      ValueError, TypeError: why.\n    """\n'
        "def f(\n    self, other: int, more: str\n): ...\n"
    )
    lines = "      first: of a, b: c\n        and d.\n      last: see `first`.\n      at: see `first`.\n"
    expected = source.replace("      first, last, at: of a, b: c\n        and d.\n", lines)
    assert site.with_single_names(source) == expected and source != expected


@pytest.mark.slow
def test_all_modules_can_be_read_afterwards():
    for folder in ("jaxshare", "models", "serving"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            changed = ast.parse(site.with_single_names(source))
            assert len(changed.body) == len(ast.parse(source).body)


def built(folder, text):
    folder.mkdir()
    (folder / "index.html").write_text(text)
    return folder


def test_a_version_is_put_beside_older_ones_which_stay(tmp_path):
    pages = tmp_path / "pages"
    for number, (name, title) in enumerate(
        [("0.9", "0.9.0"), ("0.10", "0.10.0"), ("dev", "dev"), ("0.9", "0.9.1")]
    ):
        versions.put(built(tmp_path / f"site {number}", f"{title} it is"), pages, name, title)
    assert json.loads((pages / "versions.json").read_text()) == [
        {"version": "dev", "title": "dev", "aliases": []},
        {"version": "0.10", "title": "0.10.0", "aliases": ["latest"]},
        {"version": "0.9", "title": "0.9.1", "aliases": []},
    ]
    assert (pages / "0.9" / "index.html").read_text() == "0.9.1 it is"
    assert (pages / "0.10" / "index.html").read_text() == "0.10.0 it is"
    assert "url=0.10/index.html" in (pages / "index.html").read_text()
    names = {"0.9", "0.10", "dev", "index.html", "versions.json"}
    assert {path.name for path in pages.iterdir()} == names


def test_the_first_version_may_be_no_release(tmp_path):
    versions.put(built(tmp_path / "site", "it"), tmp_path / "pages", "dev", "dev")
    assert "url=dev/index.html" in (tmp_path / "pages" / "index.html").read_text()
    assert (versions.name_of("0.2.1"), versions.name_of("1.10.0")) == ("0.2", "1.10")


@pytest.mark.parametrize("text", ["{", '["0.2"]', '{"version": "0.2"}', '[{"version": "0.2"}]'])
def test_a_damaged_list_of_versions_is_left_as_it_is(tmp_path, text):
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "versions.json").write_text(text)
    with pytest.raises(ValueError, match=r"versions\.json is no list of objects with a version"):
        versions.put(built(tmp_path / "site", "it"), pages, "0.2", "0.2.0")
    assert {path.name: path.read_text() for path in pages.iterdir()} == {"versions.json": text}


@pytest.mark.parametrize("name", ["", "..", "a/b", ".git", "-x"])
def test_a_version_has_the_name_of_a_folder(tmp_path, name):
    with pytest.raises(ValueError, match="is no name of a version; give letters"):
        versions.put(built(tmp_path / "site", "it"), tmp_path / "pages", name, "x")
    assert not (tmp_path / "pages").exists()


def test_a_site_that_is_not_built_is_no_version(tmp_path):
    with pytest.raises(
        ValueError, match=r"has no site; make it with python -m scripts\.docs\.site"
    ):
        versions.put(tmp_path / "site", tmp_path / "pages", "0.2", "0.2.0")


def test_pages_offer_versions_and_tell_old_ones():
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    assert project["extra"]["version"] == {"provider": "mike", "default": versions.LATEST}
    theme = ROOT / project["theme"]["custom_dir"]
    assert "block outdated" in (theme / "main.html").read_text(encoding="utf-8")
