"""docs/rollouts.md runs as it stands, and prints what it says."""

import dataclasses
import re

import pytest

from jaxshare.serving.engine.weights import WAYS
from jaxshare.serving.rollouts import RolloutBatch
from tests.package.pages import run_examples
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_prints_what_the_page_says(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    count, _ = run_examples(PAGE, tmp_path)
    assert count == PAGE.count("```python") == 1


def test_the_page_names_every_way_and_every_array():
    assert re.findall(r'^\| `"(\w+)"`', PAGE, re.MULTILINE) == [*WAYS]
    fields = {field.name for field in dataclasses.fields(RolloutBatch)}
    assert fields <= {*re.findall(r"`(\w+)`", PAGE)}
