"""Plots of what scripts.bench.attention has measured."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.parts.attention.measurements import WORKERS_GOALS
from scripts.bench.parts.attention.speed import BACKENDS, UNSHARED

# Ours in blues, others in orange and green, ceilings in gray.
_COLORS = {"mosaic_gpu": "#08519c", "triton": "#4292c6", "xla": "#9ecae1", "reference": "#c6dbef"}
_OTHERS = ("#d95f02", "#1b9e77", "#e7298a", "#66a61e")
_MARKERS = ("o", "s", "^")


def available() -> bool:
    """True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws every part that was measured; the files written."""
    written = []
    if points := [
        *results.get("private", []),
        *([results["shared"]] if "shared" in results else []),
    ]:
        written.append(_saved(_roofline(points), folder / "attention-roofline.png"))
    if results.get("workers", {}).get("to_one_row"):
        written.append(_saved(_workers(results["workers"]), folder / "attention-workers.png"))
    return written


def _saved(figure: Any, file: Path) -> Path:
    figure.savefig(file, dpi=110, metadata={"Software": None})
    return file


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _roofline(points: list[Mapping[str, Any]]) -> Any:
    """TFLOP/s over FLOPs for each byte that has to be read, under the ceilings that were measured
    beside the first point."""
    figure, axes = _figure(7.5, 4.6)
    colors, intensities = _side_colors(points), []
    for point, marker in zip(points, _MARKERS * len(points), strict=False):
        for name, side in point["sides"].items():
            intensities.append(side["flops"] / side["read_bytes"])
            axes.plot(
                intensities[-1],
                side["teraflops"],
                marker,
                color=colors[name],
                markersize=7,
                linestyle="none",
                label=name,
                fillstyle="none" if name.endswith(UNSHARED) else "full",
            )
        axes.plot(
            [],
            [],
            marker,
            color="white",
            markeredgecolor="black",
            linestyle="none",
            label=f"{point['case']}, G {point['group']}",
        )
    copy, product = points[0]["copy_gigabytes_per_second"] / 1e3, points[0]["product_teraflops"]
    ends = [min([*intensities, product / copy]) / 3, max([*intensities, product / copy]) * 3]
    axes.plot(
        [ends[0], product / copy, ends[1]],
        [copy * ends[0], product, product],
        color="#888888",
        linestyle="--",
        label="copy bandwidth, rate of products",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOPs for each byte that has to be read",
        ylabel="TFLOP/s",
        title="attention of one layer",
    )
    axes.grid(alpha=0.3)
    entries = {
        label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    return figure


def _side_colors(points: list[Mapping[str, Any]]) -> dict[str, str]:
    """The color of every side; a backend's is the same shared and unshared."""
    others = sorted(
        {name for point in points for name in point["sides"]}
        - {*BACKENDS, *(f"{b}, {UNSHARED}" for b in _COLORS), *_COLORS}
    )
    return (
        _COLORS
        | {f"{b}, {UNSHARED}": color for b, color in _COLORS.items()}
        | dict(zip(others, _OTHERS * len(others), strict=False))
    )


def _workers(found: Mapping[str, Any]) -> Any:
    """The time of each number of workers, to that of one row with a query that is not rotated."""
    figure, axes = _figure(5.5, 3.4)
    for name, to_one in found["to_one_row"].items():
        axes.plot(
            [int(n) for n in to_one],
            [ratio["median"] for ratio in to_one.values()],
            "o-",
            color=_COLORS[name],
            label=name,
        )
    counts = sorted({int(n) for to_one in found["to_one_row"].values() for n in to_one})
    goals = {n: most for n, most in WORKERS_GOALS.items() if n in counts}
    axes.plot(
        list(goals),
        list(goals.values()),
        "_",
        color="#888888",
        markersize=24,
        markeredgewidth=2,
        label="at most",
    )
    axes.set(
        title=f"workers over {found['history']} tokens",
        xlabel="workers",
        ylabel="time, to one row not rotated",
    )
    axes.set_xticks(counts)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure
