"""Writes the drill's results into docs/reliability.md, as a table, and into README.md, as a sentence.

python -m scripts.drill.run --minutes 60 --output benchmarks/results/drill.json
python -m scripts.drill.run --parts soak --minutes 60 --output benchmarks/results/drill-soak.json
python -m scripts.drill.table
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.lib import ROOT

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "docs" / "reliability.md", ROOT / "README.md")
_BETWEEN = re.compile(r"(?<=<!-- drill -->\n).*?(?=<!-- end -->)", re.S)
_HEAD = ("Part", "Promise", "Fault", "Cases", "Faults thrown", "Survived")


def results(folder: Path = RESULTS) -> list[Mapping[str, Any]]:
    """The parts of drill.json, those that have a file of their own taken from there."""
    parts = json.loads((folder / "drill.json").read_text(encoding="utf-8"))["parts"]
    own = [*sorted(folder.glob("drill-*.json"))]
    found = {part["part"]: part for part in parts}
    for file in own:
        found |= {p["part"]: p for p in json.loads(file.read_text(encoding="utf-8"))["parts"]}
    return [*found.values()]


def table(parts: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown table of the parts."""
    lines = [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    for part in parts:
        counts = f"{part['cases']:,} | {part['faults']:,} | {part['survived']:,}"
        lines.append(f"| `{part['part']}` | {part['promise']} | {part['fault']} | {counts} |")
    return "\n".join(lines) + "\n"


def sentence(parts: Sequence[Mapping[str, Any]]) -> str:
    """The sum of the table."""
    cases, faults, survived = (
        sum(part[what] for part in parts) for what in ("cases", "faults", "survived")
    )
    kills = sum(part["faults"] for part in parts if part["part"].startswith("kill-"))
    held = "in all of them" if survived == cases else f"in {survived:,} of them"
    return (
        f"In its last long run {faults:,} faults were thrown in {cases:,} cases of {len(parts)} "
        f"kinds, {kills:,} of them `kill -9`, and the promise held {held}.\n"
    )


def written(document: Path) -> str:
    """A document with the results in their place."""
    make = table if document == DOCUMENTS[0] else sentence
    return _BETWEEN.sub(lambda _: make(results()), document.read_text(encoding="utf-8"))


def main() -> None:
    """Writes the results into the documents."""
    for document in DOCUMENTS:
        document.write_text(written(document), encoding="utf-8")


if __name__ == "__main__":
    main()
