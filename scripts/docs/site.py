"""Builds the documents as a site, in build/site, or serves them while they are written.

python -m scripts.docs.site             # strictly: a link that leads nowhere is an error
python -m scripts.docs.site --serve     # at http://127.0.0.1:8001

Zensical (zensical.toml) makes the site of build/docs, which has docs/, the documents of other
folders, and pages that are made here: the command line from the parsers, the API from docstrings,
goals from benchmarks/results. Links to other files of the repository lead to copies.
"""

import argparse
import importlib
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

from jaxshare.serving.cli.main import command_parser
from scripts.bench.lib import ROOT
from scripts.docs import commands, notebooks, tables

SOURCE = ROOT / "build" / "docs"
PACKAGES = ROOT / "build" / "docs-packages"
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "measuring.md",
    "benchmarks/roofline.md": "roofline.md",
    "models/embedded/README.md": "embedded_model.md",
}
"""Documents outside of docs/, and their names in the site."""
_NOTEBOOKS = {
    path.relative_to(ROOT).as_posix(): notebooks.page_of(path) for path in notebooks.NOTEBOOKS
}
"""Notebooks, and the names of their pages."""
API = {
    "jaxshare": ("api_core.md", "The core"),
    "jaxshare.models": ("api_models.md", "Models"),
    "jaxshare.serving": ("api_serving.md", "Workers and branches"),
    "jaxshare.serving.engine": ("api_engine.md", "The engine"),
    "jaxshare.serving.kvcache.policy": ("api_policy.md", "Policies of eviction"),
    "jaxshare.serving.agents": ("api_agents.md", "Agents"),
    "jaxshare.serving.agents.backends": ("api_agent_models.md", "Models of agents"),
    "jaxshare.serving.chat": ("api_chat.md", "Chats and tools"),
    "jaxshare.serving.evaluation": ("api_evaluation.md", "Evaluation"),
}
"""Packages whose docstrings are pages."""
_LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(#[^)\s]*)?(?=\))")
_NAMES = re.compile(r"^ +\w+(?:, \w+)+(?=: )", re.M)
_MAX_FILES = 100


def _copied(target: Path) -> str:
    """Copies a file, or a folder with a list of its files, and returns its place in the site."""
    place = Path("files") / target.relative_to(ROOT)
    if target.is_dir():
        files = sorted(each for each in target.iterdir() if each.is_file())[:_MAX_FILES]
        links = "\n".join(f"- [{each.name}]({each.name})" for each in files)
        for each in files:
            _copied(each)
        place /= "index.md"
        (SOURCE / place).write_text(f"# {target.name}\n\n{links}\n", encoding="utf-8")
    else:
        (SOURCE / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(target, SOURCE / place)
    return place.as_posix()


def site_page(text: str, origin: Path) -> str:
    """A document for the site: its links lead to pages, or to copies of files.

    Args:
      text: of the document.
      origin: its path in the repository.
    """

    def moved(found: re.Match[str]) -> str:
        target = Path(posixpath.normpath((origin.parent / found[1]).as_posix()))
        name = target.relative_to(ROOT).as_posix()
        place = PAGES.get(name) or _NOTEBOOKS.get(name)
        if place:
            return place + (found[2] or "")
        if target.parent == ROOT / "docs":
            place = target.name
        elif target == ROOT / "docs":
            place = "getting_started.md"
        else:
            place = _copied(target)
        return place + (found[2] or "")

    return _LINK.sub(moved, text)


def _api_page(package: str, title: str) -> str:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == package
    ]
    members = "\n".join(f"        - {name}" for name in names if name != "__version__")
    return f"# {title}\n\n::: {package}\n    options:\n      members:\n{members}\n"


def write_source() -> None:
    """Writes the documents that the site is made of to build/docs."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    for path in sorted((ROOT / "docs").iterdir()):
        if path.suffix == ".md":
            text = site_page(path.read_text(encoding="utf-8"), path)
            (SOURCE / path.name).write_text(text, encoding="utf-8")
        else:
            shutil.copy(path, SOURCE / path.name)
    for name, place in PAGES.items():
        text = site_page((ROOT / name).read_text(encoding="utf-8"), ROOT / name)
        text = re.sub(r"\A---\n.*?\n---\n+", "", text, flags=re.S)
        (SOURCE / place).write_text(text, encoding="utf-8")
    for path in notebooks.NOTEBOOKS:
        _copied(path)
        text = notebooks.markdown(path, SOURCE, site_page)
        (SOURCE / notebooks.page_of(path)).write_text(text, encoding="utf-8")
    made = {
        "command_line.md": commands.page(command_parser()),
        "goals.md": f"# Goals\n\nAll goals of the benchmarks.\n\n{tables.goals()}",
        **{place: _api_page(package, title) for package, (place, title) in API.items()},
    }
    for place, text in made.items():
        (SOURCE / place).write_text(text, encoding="utf-8")


def copy_packages() -> None:
    """Copies the three packages together, as they are once installed, for what reads docstrings.

    Where a docstring describes several names at once ("first, last: of the row"), the reader takes
    the second one for a type. With spaces that do not break it takes all of them for one name.
    """
    shutil.rmtree(PACKAGES, ignore_errors=True)
    for folder, place in (("jaxshare", ""), ("models", "models"), ("serving", "serving")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            copy = PACKAGES / "jaxshare" / place / path.relative_to(ROOT / folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(with_joined_names(path.read_text(encoding="utf-8")), encoding="utf-8")


def with_joined_names(source: str) -> str:
    """Returns a module in whose docstrings names with one description are joined."""
    return _NAMES.sub(lambda found: found[0].replace(", ", ",\xa0"), source)


def main() -> int:
    """Builds or serves the site."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", action="store_true", help="serve it, and build again on changes")
    options = parser.parse_args()
    write_source()
    copy_packages()
    program = str(Path(sys.executable).with_name("zensical"))
    config = ["--config-file", str(ROOT / "zensical.toml")]
    if options.serve:
        return subprocess.call([program, "serve", *config, "--dev-addr", "127.0.0.1:8001"])
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.call([program, "build", *config, "--strict", "--clean"], env=environment)


if __name__ == "__main__":
    sys.exit(main())
