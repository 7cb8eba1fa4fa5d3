"""Pages of the site from the notebooks, with the outputs that are committed in them."""

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.bench.lib import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def page_of(notebook: Path) -> str:
    """Returns the name of a notebook's page."""
    return f"notebook_{notebook.stem}.md"


def markdown(notebook: Path, folder: Path, linked: Callable[[str, Path], str]) -> str:
    """Returns the page of a notebook; its pictures are written into a folder.

    Args:
      notebook: a file.
      folder: of the page.
      linked: moves the links of a text of a file to their places in the site.
    """
    read = json.loads(notebook.read_text(encoding="utf-8"))
    parts, pictures = list[str](), 0
    for cell in read["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(linked(source, notebook))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{notebook.stem}_{pictures}.png"
                (folder / picture).write_bytes(base64.b64decode("".join(data["image/png"])))
                parts.append(f"![A picture that the lines above draw]({picture})")
                pictures += 1
            else:
                parts.append(_shown(output, data))
    first, *rest = [part for part in parts if part]
    title, _, text = first.partition("\n")
    note = f"This page is a notebook: [{notebook.name}](files/{notebook.relative_to(ROOT)})."
    return "\n\n".join([title, note, text.strip(), *rest]) + "\n"


def _shown(output: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """An output that is no picture: a table, or text."""
    if "text/html" in data:
        return "".join(data["text/html"]).strip()
    text = "".join(output.get("text", data.get("text/plain", ""))).strip("\n")
    return f"```text\n{text}\n```" if text else ""
