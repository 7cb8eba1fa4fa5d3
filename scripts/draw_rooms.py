"""Draws the rooms of the tree, what is in each, and which imports which: docs/architecture.svg.

python -m scripts.draw_rooms           # writes the drawing
python -m scripts.draw_rooms --check   # exits with 1 where the drawing is not that of the tree
"""

import argparse
import ast
import html
import sys
import textwrap
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DRAWING = ROOT / "docs" / "architecture.svg"
FOLDERS = {"jaxshare": "jaxshare", "models": "jaxshare.models", "serving": "jaxshare.serving"}
COLORS = {"core": "#dbe9f6", "models": "#e4f0dc", "serving": "#fbecd5"}
WIDTH, CHARACTERS, LINE, GAP = 250, 37, 14, 34


def rooms() -> dict[str, list[str]]:
    """The modules of each room: a folder of serving, "models", "core", or "serving" for the flat
    files."""
    found: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[-1] in ("__init__", "__main__"):
                continue
            room = "core" if folder == "jaxshare" else folder
            if folder == "serving" and len(parts) > 1:
                room, parts = parts[0], parts[1:]
            found.setdefault(room, []).append("/".join(parts))
    return found


def room_of(module: str) -> str | None:
    """The room of a module by its dotted name; None outside the package."""
    parts = module.split(".")
    if parts[0] != "jaxshare":
        return None
    if len(parts) < 2 or parts[1] not in ("models", "serving"):
        return "core"
    if parts[1] == "models" or len(parts) < 3:
        return parts[1]
    return parts[2] if (ROOT / "serving" / parts[2]).is_dir() else "serving"


def imports() -> dict[str, set[str]]:
    """The rooms that each room imports; the package's own `__init__`, which only collects names,
    is left out."""
    found: dict[str, set[str]] = {room: set() for room in rooms()}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT / folder)
            if folder == "serving" and relative.parts == ("__init__.py",):
                continue
            room = room_of(".".join([package, *relative.with_suffix("").parts]))
            assert room
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names: list[str] = []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                found[room] |= {other for name in names if (other := room_of(name))} - {room}
    return found


def levels(below: dict[str, set[str]]) -> list[list[str]]:
    """The rooms from top to bottom, each above all that it imports."""
    height: dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():
        height[room] = 1 + max((height[other] for other in below[room]), default=-1)
    top = max(height.values())
    return [sorted(r for r, h in height.items() if h == level) for level in range(top, -1, -1)]


def direct(below: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that do not follow from others: the transitive reduction."""

    def reaches(room: str) -> set[str]:
        return below[room] | {far for other in below[room] for far in reaches(other)}

    return [
        (room, other)
        for room in sorted(below)
        for other in sorted(below[room])
        if not any(other in reaches(middle) for middle in below[room] - {other})
    ]


def _lines(room: str, modules: list[str]) -> list[str]:
    if room != "core":
        return textwrap.wrap(", ".join(modules), CHARACTERS)
    flat = [module for module in modules if "/" not in module]
    lines = textwrap.wrap(", ".join(flat), 3 * CHARACTERS)
    for inner in sorted({m.partition("/")[0] for m in modules} - {*flat}):
        names = [m.partition("/")[2] for m in modules if m.startswith(f"{inner}/")]
        lines += textwrap.wrap(f"{inner}/: {', '.join(names)}", 3 * CHARACTERS)
    return lines


def draw() -> str:
    """The drawing as SVG."""
    modules, below = rooms(), imports()
    rows = levels(below)
    columns = max(len(row) for row in rows)
    total = max(columns * (WIDTH + GAP), 3 * WIDTH + 2 * GAP) + GAP
    boxes, y = {}, 24
    for row in rows:
        tall = 0
        widths = {room: 3 * WIDTH if room == "core" else WIDTH for room in row}
        x = (total - sum(widths.values()) - GAP * (len(row) - 1)) / 2
        for room in row:
            height = 28 + LINE * len(_lines(room, modules[room]))
            boxes[room] = (x, y, widths[room], height)
            x, tall = x + widths[room] + GAP, max(tall, height)
        y += tall + GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:.0f} {y:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#666"/></marker></defs>',
        f'<rect width="{total:.0f}" height="{y:.0f}" fill="white"/>',
    ]
    for upper, lower in direct(below):
        (x, top, wide, tall), (x2, top2, wide2, _) = boxes[upper], boxes[lower]
        start = x + wide / 2
        end = min(max(start, x2 + 20), x2 + wide2 - 20)
        out.append(
            f'<path d="M{start:.0f} {top + tall:.0f}C{start:.0f} {top + tall + 24:.0f} '
            f'{end:.0f} {top2 - 28:.0f} {end:.0f} {top2 - 1:.0f}" fill="none" stroke="#666" '
            'marker-end="url(#a)"/>'
        )
    for room, (x, top, wide, tall) in boxes.items():
        color = COLORS.get(room, COLORS["serving"])
        title = {"core": "jaxshare/", "models": "models/", "serving": "serving/ (no room)"}
        name = title.get(room, f"serving/{room}/")
        out.append(
            f'<rect x="{x:.0f}" y="{top:.0f}" width="{wide}" height="{tall}" rx="5" '
            f'fill="{color}" stroke="#888"/>'
            f'<text x="{x + 8:.0f}" y="{top + 16:.0f}" font-weight="bold">{name}</text>'
        )
        for number, line in enumerate(_lines(room, modules[room])):
            out.append(
                f'<text x="{x + 8:.0f}" '
                f'y="{top + 32 + LINE * number:.0f}">{html.escape(line)}</text>'
            )
    return "\n".join([*out, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if parser.parse_args().check:
        return int(not DRAWING.is_file() or DRAWING.read_text(encoding="utf-8") != draw())
    DRAWING.write_text(draw(), encoding="utf-8")
    print(DRAWING, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
