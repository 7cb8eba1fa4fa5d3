"""docs/architecture.md names files that exist, and its drawing is that of the tree."""

import re

import pytest

from scripts import draw_rooms
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`((?:jaxshare|models|serving|tests|scripts)/[\w/.]+)`", PAGE)))


def test_the_page_is_short():
    assert len(PAGE.splitlines()) <= 150 and len(NAMED) > 40


@pytest.mark.parametrize("path", NAMED)
def test_a_named_file_exists(path):
    assert (ROOT / path).exists()


def test_names_in_a_file_s_sentence_are_defined_in_it():
    """A line such as "`jaxshare/cache.py`: `move` ..." names a function or class of that file."""
    named = re.findall(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", PAGE, re.MULTILINE)
    assert len(named) >= 6
    for path, name in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"(def|class) {name.rpartition('.')[2]}\b", source), (path, name)


def test_the_drawing_is_that_of_the_tree():
    drawn = draw_rooms.DRAWING.read_text(encoding="utf-8")
    assert drawn == draw_rooms.draw(), "run python -m scripts.draw_rooms"
