"""Gives the package its description: README.md, with links that lead out of a package index.

Where pyproject.toml names the repository (`Source` under [project.urls]), they lead to its files at
the tag of the version; elsewhere they are text that names files of the source distribution.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_ABSOLUTE = re.compile(r"[a-z][a-z+.-]*:|#")
_NOTE = "A name such as `docs/workers.md` is that of a file in the source distribution."


def described(readme: str, version: str, source: str | None) -> str:
    """Returns the text of a README as a package index shows it.

    The files that it leads to need not be there: an image is built without docs/.

    Args:
      readme: in Markdown. A link to a name without a dot is to a folder.
      version: of the package, whose tag is `v` and the version.
      source: address of the repository, which has files, folders and pictures of a tag at
        `blob/TAG/PATH`, `tree/TAG/PATH` and `raw/TAG/PATH`, as GitHub does. None: there is none.
    """
    is_named = False

    def moved(found: re.Match[str]) -> str:
        nonlocal is_named
        mark, label, target = found.groups()
        if _ABSOLUTE.match(target):
            return found[0]
        path, hash_mark, heading = target.partition("#")
        if source is not None:
            kind = "raw" if mark else "blob" if "." in Path(path).name else "tree"
            place = f"{source.rstrip('/')}/{kind}/v{version}/{path}{hash_mark}{heading}"
            return f"{mark}[{label}]({place})"
        is_named = True
        if mark:
            return f"*{label}* (`{path}`)"
        return f"`{path}`" if label == path else f"{label} (`{path}`)"

    parts, end = [], 0
    for fence in _FENCE.finditer(readme):
        parts += [_LINK.sub(moved, readme[end : fence.start()]), fence[0]]
        end = fence.end()
    text = "".join([*parts, _LINK.sub(moved, readme[end:])])
    if is_named:
        before, heading, after = text.partition("\n## ")
        text = f"{before}\n{_NOTE}\n{heading}{after}"
    return text


if __name__ == "__main__":  # it is when setuptools runs it, and not when a test imports it
    folder = Path(__file__).resolve().parent
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (folder / "README.md").read_text(encoding="utf-8")
    source = project.get("urls", {}).get("Source")
    setup(
        long_description=described(readme, project["version"], source),
        long_description_content_type="text/markdown",
    )
