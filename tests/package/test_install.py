"""The small installation: what runs without any extra, and what says that it takes one."""

import ast
import email
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import textwrap
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxshare.models import EMBEDDED
from tests.models.test_tokenizer import SPECIAL, folder_of
from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {
    "orbax-checkpoint": "orbax",
    "python-multipart": "python_multipart",
    "math-verify": "math_verify",
    "lm-eval": "lm_eval",
}
"""The module of a package whose name is another one."""
BLOCKING = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, {path!r})
"""


def blocked_modules():
    """The modules of a user's extras, and what Flax and transformers bring and nothing may need."""
    extras = PROJECT["optional-dependencies"]
    needed = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    named = {
        canonicalize_name(Requirement(line).name)
        for name in (
            "transformers",
            "orbax",
            "plot",
            "evaluate",
            "parquet",
            "openai",
            "mcp",
            "gguf",
        )
        for line in [*extras[name], *extras["serve"], *extras["ray"], *extras["lm-eval"]]
    }
    brought = {"optax", "tensorstore", "torch", "sentencepiece"}
    return {MODULES.get(name, name) for name in named - needed} | brought


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """A built wheel, unpacked."""
    folder = tmp_path_factory.mktemp("install")
    build(folder / "source", folder)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "wheel")
    return folder / "wheel"


def copy_tree(source: Path) -> None:
    """Copies what a wheel is built from."""
    source.mkdir()
    files = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
    for name in (*files, "jaxshare", "models", "serving"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)


def build(source: Path, target: Path, kind: str = "wheel", **environment: str) -> None:
    """Builds a wheel or an sdist from a copy of the tree, in which no older build is."""
    if not source.exists():
        copy_tree(source)
    program = (
        "import sys; from setuptools import build_meta; "
        "getattr(build_meta, f'build_{sys.argv[2]}')(sys.argv[1])"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, target, kind],
        cwd=source,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        timeout=300,
    )


def description(metadata: str) -> str:
    """The text that a package index shows."""
    read = email.message_from_string(metadata)
    assert read["Description-Content-Type"] == "text/markdown"
    return read.get_payload()


def test_the_urls_of_the_package_are_those_of_the_papers(unpacked):
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    named = re.findall(r"^Project-URL: (.*), (\S*)$", metadata.read_text(encoding="utf-8"), re.M)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name, _ in named] == ["Hogwild! Inference", "Hydragen", "Hive"]
    assert all(readme.count(f"({url})") == 1 for _, url in named)


def test_without_a_repository_the_description_names_files_of_the_source(unpacked, tmp_path):
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    text = description(metadata.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) == 3 and all(link.startswith("https://arxiv.org/") for link in links)
    named = set(re.findall(r"\(?`((?:docs\b|[A-Z]+\.md)[^`]*)`", text))
    assert {"docs", "docs/idea.svg", "docs/workers.md", "CHANGELOG.md", "SECURITY.md"} <= named
    assert "[**workers**]" not in text and "| **workers** (`docs/workers.md`) |" in text
    assert text.count("that of a file in the source distribution") == 1
    copy_tree(tmp_path / "source")
    shutil.copytree(ROOT / "docs", tmp_path / "source" / "docs")
    for name in ("MANIFEST.in", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        shutil.copy(ROOT / name, tmp_path / "source")
    build(tmp_path / "source", tmp_path, "sdist")
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        files = {name.partition("/")[2] for name in opened.getnames()}
        (information,) = (
            name
            for name in opened.getnames()
            if name.count("/") == 1 and name.endswith("/PKG-INFO")
        )
        held = opened.extractfile(information)
        assert held and description(held.read().decode()) == text
    assert named <= files and {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= files


@pytest.mark.slow
def test_with_a_repository_all_links_of_the_description_lead_to_its_files_at_the_tag(tmp_path):
    source = tmp_path / "source"
    copy_tree(source)
    named = '[project.urls]\nSource = "https://example.org/some/where/"\n'
    project = (source / "pyproject.toml").read_text(encoding="utf-8")
    (source / "pyproject.toml").write_text(project.replace("[project.urls]\n", named))
    build(source, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    (metadata,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA"))
    whole = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "Project-URL: Source, https://example.org/some/where/\n" in whole
    text, start = description(whole), "https://example.org/some/where/"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pattern = r"(!?)\[([^]]*)\]\(([^)]*)\)"
    here, there = re.findall(pattern, readme), re.findall(pattern, text)
    assert len(here) == len(there) > 20
    for (mark, label, before), (_, same, after) in zip(here, there, strict=True):
        assert label == same and after.startswith("https://")
        if before != after:
            kind, tag, place = after.removeprefix(start).split("/", 2)
            assert place == before and tag == f"v{PROJECT['version']}"
            path = ROOT / place.partition("#")[0]
            assert path.exists() and kind == (
                "raw" if mark else "tree" if path.is_dir() else "blob"
            )
    assert re.sub(pattern, "", readme).strip() == re.sub(pattern, "", text).strip()


def test_the_description_of_a_readme():
    """Labels, headings, folders and code."""
    program = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    readme = (
        "# It\n\nSee [docs](docs), [**a**](docs/a.md#part), ![A b](b.svg) and [x](https://x.org).\n"
        "\n## More\n\n```python\nf[0](docs)\n```\n"
    )
    described = program["described"]
    assert described(readme, "1.2", "https://h.org/o/n") == (
        "# It\n\nSee [docs](https://h.org/o/n/tree/v1.2/docs), "
        "[**a**](https://h.org/o/n/blob/v1.2/docs/a.md#part), "
        "![A b](https://h.org/o/n/raw/v1.2/b.svg) and [x](https://x.org).\n"
        "\n## More\n\n```python\nf[0](docs)\n```\n"
    )
    assert described(readme, "1.2", None) == (
        "# It\n\nSee `docs`, **a** (`docs/a.md`), *A b* (`b.svg`) and [x](https://x.org).\n"
        "\nA name such as `docs/workers.md` is that of a file in the source distribution.\n"
        "\n## More\n\n```python\nf[0](docs)\n```\n"
    )


def run_blocked(unpacked, program, folder, *, timeout=300):
    """Runs a program with the wheel, where no extra can be imported."""
    head = BLOCKING.format(names=blocked_modules(), path=str(unpacked))
    variables = {name: value for name, value in os.environ.items() if "PYTHON" not in name}
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_the_embedded_model_runs_without_any_extra(unpacked, tmp_path):
    """So does a folder with a tokenizer.json and a chat template; what takes an extra names it."""
    shutil.copytree(EMBEDDED, tmp_path / "model")
    shutil.copytree(EMBEDDED, tmp_path / "pieces")
    (tmp_path / "pieces" / "tokenizer.json").rename(tmp_path / "pieces" / "tokenizer.model")
    program = """
        import jaxshare
        from pathlib import Path
        from jaxshare.extras import MissingExtraError
        from jaxshare.models import load
        from jaxshare.models.orbax_io import convert
        from jaxshare.serving import generate

        assert Path(jaxshare.__file__).parents[1] == Path(sys.path[0]), jaxshare.__file__
        model = load("model")
        chat = [{"role": "user", "content": "Solve.\\n1. 47 + 38"}]
        prompt = model.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        print(*generate(model, prompt, n=1, max_new_tokens=8).completions[0].tokens)
        for name, act in (("transformers", lambda: load("pieces")),
                          ("orbax", lambda: convert(Path("model"), Path("orbax")))):
            try:
                act()
            except MissingExtraError as error:
                assert error.extra == name and f"pip install 'jaxshare[{name}]'" in str(error)
            else:
                raise AssertionError(name)
        assert not Path("orbax").exists()
    """
    done = run_blocked(unpacked, program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(\d+ ){7}\d+\n", done.stdout) and done.stderr == ""


def test_each_extra_that_a_message_names_is_one():
    named = set()
    for path in [*ROOT.glob("docs/*.md"), *sources()]:
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"'jaxshare\[([\w-]+)\]'", text))
        if path.suffix == ".py":
            named |= {
                node.args[1].value
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "MissingExtraError"
                and isinstance(node.args[1], ast.Constant)
            }
    assert named <= PROJECT["optional-dependencies"].keys()
    assert {"cuda13", "gguf", "mcp", "openai", "orbax", "plot", "serve", "transformers"} <= named


def sources():
    return [
        path for name in ("jaxshare", "models", "serving") for path in (ROOT / name).rglob("*.py")
    ]


@pytest.mark.slow
def test_two_builds_are_the_same_byte_for_byte(tmp_path):
    """Also where the sources are in another folder, and their files were written at other times."""
    wheels = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        source = tmp_path / name / "source"
        build(source, tmp_path / name, SOURCE_DATE_EPOCH="1700000000")
        (wheel,) = (tmp_path / name).glob("*.whl")
        wheels.append(wheel.read_bytes())
        time.sleep(2.1)  # a zip file has the time in steps of two seconds
    assert wheels[0] == wheels[1]


@pytest.mark.slow
def test_a_fresh_environment_with_the_small_installation(tmp_path):
    """From the package index, where there is one; nothing of the extras is in it."""
    (tmp_path / "built").mkdir()
    build(tmp_path / "source", tmp_path / "built")
    (wheel,) = (tmp_path / "built").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-compile", wheel],
        check=True,
        timeout=1500,
    )

    def run(*command):
        done = subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=600
        )
        return done.stdout

    listed = run(python, "-m", "pip", "list", "--format", "freeze")
    installed = {canonicalize_name(line.partition("==")[0]) for line in listed.splitlines()}
    assert not installed & {
        "transformers",
        "fastapi",
        "ray",
        "matplotlib",
        "torch",
        "sentencepiece",
    }
    (tmp_path / "model").mkdir()
    folder = folder_of(
        tmp_path / "model", "bytes", {**SPECIAL, "chat_template": "{{ bos_token }}x"}
    )
    jaxshare = tmp_path / "venv" / "bin" / "jaxshare"
    assert "nothing is to be mended" in run(jaxshare, "doctor")
    assert "answer after" in run(
        jaxshare, "workers", "embedded", "--problem", "1. 47 + 38", "--budget", "40"
    )
    program = """
        import sys
        from pathlib import Path
        from jaxshare.models.tokenizer_files import read_tokenizer
        made = read_tokenizer(Path(sys.argv[1]))
        print(made.apply_chat_template([], tokenize=False), made.encode("he"))
    """
    assert run(python, "-c", textwrap.dedent(program), folder) == "<s>x [1, 259]\n"
