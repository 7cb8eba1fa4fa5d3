"""The identity of a model: the same for the same files, another for each change that texts see."""

import json
import shutil
from pathlib import Path

import pytest

from jaxshare.models import EMBEDDED, load, outline
from jaxshare.serving.identity import identity
from jaxshare.serving.inputs import encode


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the embedded model without its weights."""
    ignored = shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(EMBEDDED, tmp_path / "model", ignore=ignored))


def rewrite(file: Path, change) -> None:
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def test_the_same_files_have_the_same_identity(folder):
    first, again = load(EMBEDDED), outline(folder)
    whole, known = identity(first), identity(again)
    assert whole == json.loads(json.dumps(whole))
    assert {"dtype", "weights"} == whole.keys() - known.keys()
    assert {name: whole[name] for name in known} == known
    encode(again, "some text")
    assert identity(again) == known
    other = identity(load(EMBEDDED, dtype="bfloat16"))
    assert {name for name in whole if other[name] != whole[name]} == {"dtype", "weights"}


def test_what_changes_in_the_files_changes_the_identity(folder):
    known = identity(outline(folder))

    def differing() -> set[str]:
        now = identity(outline(folder))
        return {name for name in known if now[name] != known[name]}

    def split_otherwise(tokenizer: dict) -> None:
        """The tokens are the same, and texts become other ones."""
        tokenizer["model"]["merges"] = tokenizer["model"]["merges"][1:]

    shutil.copy(folder / "tokenizer.json", folder / "kept")
    rewrite(folder / "tokenizer.json", split_otherwise)
    assert differing() == {"tokenizer"}
    (folder / "kept").replace(folder / "tokenizer.json")
    assert differing() == set()
    rewrite(folder / "generation_config.json", lambda g: g.update(do_sample=True, top_k=9))
    assert differing() == {"generation"}
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert differing() == {"generation", "chat_template"}
