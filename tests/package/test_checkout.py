"""A checkout is the whole program, from its root: `jaxshare.models` and `jaxshare.serving` are
found, installed or not."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import jaxshare
from jaxshare.checkout import SIBLINGS, SiblingFinder
from tests.paths import ROOT

PROGRAM = """
import importlib, json, sys
import jaxshare.models, jaxshare.serving.kvcache.sharing_cost
found = {name: importlib.import_module(name).__file__ for name in ("jaxshare", "jaxshare.models", "jaxshare.serving")}
leaked = []
for name in ("jaxshare.tests", "jaxshare.scripts", "jaxshare.docs", "jaxshare.jaxshare"):
    try:
        importlib.import_module(name)
        leaked.append(name)
    except ModuleNotFoundError:
        pass
print(json.dumps({"found": found, "leaked": leaked, "top": [n for n in ("models", "serving") if n in sys.modules],
                  "version": jaxshare.__version__,
                  "editable": [n for n in sys.modules if n.startswith("__editable__")]}))
"""


def written_version() -> str:
    found = re.search(
        r'^version = "([^"]+)"$',
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert found
    return found[1]


def imported(*options: str, before: str = "", **environment: str) -> dict:
    """What a program at the root of the checkout finds, after some lines."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [sys.executable, *options, "-c", before + PROGRAM],
        cwd=ROOT,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# -S leaves out the .pth files through which an editable installation is found; the dependencies are
# there as plain folders.
DEPENDENCIES = os.pathsep.join(
    dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
)


def test_packages_are_found_at_the_root_of_a_checkout_that_is_not_installed():
    found = imported("-S", PYTHONPATH=DEPENDENCIES)
    assert found["editable"] == []
    assert {name: Path(file).parent for name, file in found["found"].items()} == {
        "jaxshare": ROOT / "jaxshare",
        "jaxshare.models": ROOT / "models",
        "jaxshare.serving": ROOT / "serving",
    }
    assert (found["leaked"], found["top"], found["version"]) == ([], [], written_version())


ANOTHER = """
import importlib.machinery, sys

class OfAnotherCheckout:
    def find_spec(self, name, path=None, target=None):
        if name in ("jaxshare.models", "jaxshare.serving"):
            return importlib.machinery.PathFinder.find_spec(name, {path!r})

sys.meta_path.append(OfAnotherCheckout())
"""


def test_a_checkout_hides_an_editable_installation_of_another_one(tmp_path):
    for name in ("models", "serving"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError(__file__)")
    before = ANOTHER.format(path=[str(tmp_path)])
    found = imported("-S", before=before, PYTHONPATH=DEPENDENCIES)
    assert Path(found["found"]["jaxshare.serving"]).parent == ROOT / "serving"


def test_an_installation_finds_its_own_packages_without_help(tmp_path, monkeypatch):
    package = tmp_path / "jaxshare"
    (package / "models").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()  # such a file beside an installation means nothing
    monkeypatch.setattr("jaxshare.checkout.__file__", str(package / "checkout.py"))
    monkeypatch.setattr(sys, "meta_path", [])
    assert jaxshare.checkout.checkout() is None
    jaxshare.checkout.find_siblings()
    assert sys.meta_path == []
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 9.9")
    assert jaxshare.checkout.version() == "jaxshare 9.9"


def test_finder_knows_the_sibling_folders_alone():
    finder = SiblingFinder(ROOT)
    for name in SIBLINGS:
        spec = finder.find_spec(f"jaxshare.{name}", None)
        assert spec and spec.origin == str(ROOT / name / "__init__.py")
        assert finder.find_spec(name, None) is None
    assert finder.find_spec("jaxshare.tests", None) is None


def test_version_is_the_one_in_pyproject():
    assert jaxshare.__version__ == written_version()
