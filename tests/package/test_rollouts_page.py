"""docs/rollouts.md names what there is."""

import dataclasses
import re

from jaxshare.serving.engine.weights import WAYS
from jaxshare.serving.rollouts import RolloutBatch
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")


def test_the_page_names_every_way_and_every_array():
    assert re.findall(r'^\| `"(\w+)"`', PAGE, re.MULTILINE) == [*WAYS]
    fields = {field.name for field in dataclasses.fields(RolloutBatch)}
    assert fields <= {*re.findall(r"`(\w+)`", PAGE)}
