"""Puts the built site into a folder of versions, beside those of other releases, which stay.

python -m scripts.docs.site && python -m scripts.docs.versions FOLDER
python -m scripts.docs.versions FOLDER --name dev        # what is not released yet

FOLDER is what a web server shows:

    index.html        leads to the newest release
    versions.json     what each page offers at its top; its form is that of the program mike
    0.2/, 0.3/, dev/  sites

A minor version has one site, that of its newest patch.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxshare import __version__
from scripts.bench.lib import ROOT

LATEST = "latest"
"""The alias of the newest release; a page of another one says that it is old."""
_NAME = re.compile(r"[0-9A-Za-z][\w.-]*")
_RELEASE = re.compile(r"\d+(\.\d+)*")
_INDEX = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>jaxshare</title>
<meta http-equiv="refresh" content="0; url={name}/index.html">
<a href="{name}/index.html">The documents of jaxshare {title}</a>
</html>
"""


def name_of(version: str) -> str:
    """Returns the name of a version's site: 0.2 for 0.2.1."""
    return ".".join(version.split(".")[:2])


def listed(folder: Path) -> list[dict[str, Any]]:
    """Returns the versions that a folder has.

    Raises:
      ValueError: its versions.json is not of the form that is written here.
    """
    path = folder / "versions.json"
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [{"version": str(each["version"]), "title": str(each["title"])} for each in found]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is no list of objects with a version and a title; mend it or remove it"
        ) from error


def in_order(names: list[str]) -> list[str]:
    """Returns names of versions: other names first, then releases, the newest one first."""
    releases = [name for name in names if _RELEASE.fullmatch(name)]
    releases.sort(key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    return sorted(name for name in names if name not in releases) + releases


def put(site: Path, folder: Path, name: str, title: str) -> None:
    """Puts a site into a folder of versions, in the place of an older one of the same name.

    Args:
      site: a built site.
      folder: is made where it does not exist.
      name: of the version: of the folder, and in addresses.
      title: what pages call it.

    Raises:
      ValueError: the name would be no folder's, the site is not built, or versions.json is damaged.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a version; give letters, digits, dots and dashes")
    if not (site / "index.html").is_file():
        raise ValueError(f"{site} has no site; make it with python -m scripts.docs.site")
    titles = {each["version"]: each["title"] for each in listed(folder)} | {name: title}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as made:
        shutil.copytree(site, Path(made) / "new")
        if (folder / name).exists():
            (folder / name).rename(Path(made) / "old")
        (Path(made) / "new").rename(folder / name)
    order = in_order([*titles])
    newest = next((each for each in order if _RELEASE.fullmatch(each)), order[0])
    entries = [
        {"version": each, "title": titles[each], "aliases": [LATEST] if each == newest else []}
        for each in order
    ]
    _write(folder / "versions.json", json.dumps(entries, indent=2) + "\n")
    _write(folder / "index.html", _INDEX.format(name=newest, title=titles[newest]))


def _write(path: Path, text: str) -> None:
    """Writes a file that a server may be reading."""
    new = path.with_name(f".new-{path.name}")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def main() -> int:
    """Puts build/site into a folder of versions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of all versions")
    parser.add_argument("--name", help="of this one (default: the minor version, such as 0.2)")
    options = parser.parse_args()
    name = options.name or name_of(__version__)
    title = __version__ if name == name_of(__version__) else name
    try:
        put(ROOT / "build" / "site", options.folder, name, title)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(*(f"{each['version']}\t{each['title']}" for each in listed(options.folder)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
