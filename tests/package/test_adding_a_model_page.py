"""docs/adding_a_model.md names every architecture, every field of families and files that exist."""

import dataclasses
import re

from jaxshare.models.config import FAMILIES, ModelConfig
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "adding_a_model.md").read_text(encoding="utf-8")


def test_it_names_the_architectures_that_are_known_beside_the_files_that_read_them():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| .* \| `models/(\w+)\.py` \|$", PAGE, re.M)
    named = {name: module for names, module in rows for name in re.findall(r"\w+", names)}
    assert named.keys() == FAMILIES.keys()
    for name, module in named.items():
        assert f'"{name}"' in (ROOT / "models" / f"{module}.py").read_text(encoding="utf-8")


def test_it_names_each_field_in_which_families_differ():
    fields = [field.name for field in dataclasses.fields(ModelConfig)]
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (.*?) \|", PAGE, re.M))))
    assert {*fields[fields.index("qkv_bias") :]} - {"short_rope", "short_positions"} <= named


def test_the_files_that_it_names_exist():
    named = re.findall(r"`((?:jaxshare|models|tests|scripts)/[\w/.]+)`", PAGE)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
