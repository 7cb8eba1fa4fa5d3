"""A built wheel, installed outside the tree, is the whole program: code, console script, embedded
model."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.slow

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "jaxshare", "models", "serving")


def run(*command: object, cwd: Path, timeout: float = 120) -> str:
    # PYTHONPATH, or a working directory inside the tree, would let the tree stand in for what is
    # missing in the wheel.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # Built from a copy: setuptools keeps a build folder beside its sources, and what was deleted
    # since would come back out of it.
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, source)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        source,
        cwd=folder,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A fresh environment with the wheel in it; the dependencies are those of the running
    interpreter."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # A folder named in a .pth file comes after the environment's own, and the .pth files in it,
    # which is where an editable install of the tree hooks in, are not read.
    site_packages = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
        ).strip()
    )
    shared = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site_packages / "dependencies.pth").write_text("\n".join(shared) + "\n", encoding="utf-8")
    return folder / "venv"


def test_wheel_holds_every_file_of_the_packages(wheel):
    expected = {
        "/".join([*package.split("."), *path.relative_to(ROOT / folder).parts])
        for package, folder in (
            ("jaxshare", "jaxshare"),
            ("jaxshare.models", "models"),
            ("jaxshare.serving", "serving"),
        )
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected
    assert {
        "jaxshare/py.typed",
        "jaxshare/serving/cli/main.py",
        "jaxshare/models/embedded/config.json",
        "jaxshare/serving/http/page/index.html",
        "jaxshare/serving/http/page/app.js",
    } <= names
    assert any(
        name.startswith("jaxshare/models/embedded/") and name.endswith(".safetensors")
        for name in names
    )


def test_wheel_carries_the_license(wheel):
    assert [
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if name.endswith("dist-info/licenses/LICENSE")
    ]


def test_packages_are_imported_from_the_environment(environment, tmp_path):
    program = "import jaxshare, jaxshare.models, jaxshare.serving as s; print(jaxshare.__file__, jaxshare.models.__file__, s.__file__)"
    for file in run(environment / "bin" / "python", "-c", program, cwd=tmp_path).split():
        assert environment.resolve() in Path(file).resolve().parents


def test_checkout_hides_the_installation_as_a_whole(environment):
    program = "import jaxshare, jaxshare.models, jaxshare.serving as s; print(jaxshare.__file__, jaxshare.models.__file__, s.__file__)"
    files = run(environment / "bin" / "python", "-c", program, cwd=ROOT).split()
    assert [Path(file).parent for file in files] == [
        ROOT / "jaxshare",
        ROOT / "models",
        ROOT / "serving",
    ]


def test_version_is_that_of_the_installation(environment, tmp_path):
    expected = re.search(
        r'^version = "([^"]+)"$',
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert expected
    assert (
        run(
            environment / "bin" / "python",
            "-c",
            "import jaxshare; print(jaxshare.__version__)",
            cwd=tmp_path,
        ).strip()
        == expected[1]
    )
    assert (
        run(environment / "bin" / "jaxshare", "--version", cwd=tmp_path).strip()
        == f"jaxshare {expected[1]}"
    )


def test_demo_runs_from_the_environment(environment, tmp_path):
    output = run(environment / "bin" / "jaxshare", "demo", cwd=tmp_path, timeout=300)
    assert "identical" in output
    assert list(tmp_path.iterdir()) == []
