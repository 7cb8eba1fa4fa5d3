"""The goals and tables of products and decode steps with quantised weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.lib import Goal, table
from scripts.gpu.kernel_report import shared_bytes

APART = 0.05
"""The part by which bytes that kernels read may differ from those that are kept."""


def goals_of_quantised(result: Mapping[str, Any]) -> list[Goal]:
    """The goals of one program: packed weights are read once, and never written as numbers."""
    what = f"{result['backend']}, {result['name']}"
    if "measured" not in result:
        matrix = result["matrix_in_bfloat16"]
        return [
            Goal(
                f"{what}: temporary memory, of the matrix",
                result["temp_bytes"] / matrix,
                0.5,
                at_most=True,
            ),
            Goal(f"{what}: wgmma in its loop", result["loop"]["products"], 1),
        ]
    found = result["measured"]
    return [
        Goal(
            f"{what}: bytes read of packed weights, from those kept",
            abs(found["read_bytes"] / found["packed_bytes"] - 1),
            APART,
            at_most=True,
        ),
        Goal(
            f"{what}: bytes of codes read by other instructions",
            found["read_otherwise"],
            0,
            at_most=True,
        ),
        Goal(
            f"{what}: writes of as much as half of a layer's smallest matrix",
            sum(found["large_writes"].values()),
            0,
            at_most=True,
        ),
        Goal(
            f"{what}: temporary memory, of the largest matrix in bfloat16",
            found["temp_bytes"] / found["largest_matrix_in_bfloat16"],
            1,
            at_most=True,
        ),
        Goal(f"{what}: updated in place, of the cache", found["aliased"], 1),
        Goal(f"{what}: bytes that kernels of ours spill", found["spill_bytes"], 0, at_most=True),
    ]


def quantised_text(results: Sequence[Mapping[str, Any]]) -> str:
    done = [r for r in results if r["error"] is None]
    alone = [r for r in done if "measured" not in r]
    steps = [r for r in done if "measured" in r]
    return "\n\n".join(text(rows) for text, rows in ((_products, alone), (_steps, steps)) if rows)


def _products(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for r in results:
        kernel, seconds = r["kernels"][0], r["predicted"]
        rows.append(
            (
                f"{r['backend']}, {r['name']}",
                *(str(kernel[key]) for key in ("registers", "spill_bytes")),
                str(shared_bytes(kernel)),
                f"{r['temp_bytes'] / 1e6:.1f}",
                f"{r['loop']['per_number']:.2f}",
                *(f"{1e6 * value:.1f}" for value in seconds.values()),
            )
        )
    return table(
        (
            "alone",
            "registers",
            "spilled",
            "shared memory",
            "temporary MB",
            "instructions a number",
            *(f"us (predicted): {part}" for part in results[0]["predicted"]),
        ),
        rows,
    )


def _steps(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for r in results:
        found, expected = r["measured"], r["predicted"]
        rows.append(
            (
                r["name"],
                *(f"{found[key] / 1e9:.2f}" for key in ("packed_bytes", "read_bytes")),
                f"{expected['bytes_in_bfloat16'] / 1e9:.1f}",
                f"{found['temp_bytes'] / 1e6:.0f}",
                f"{sum(found['layer'].values())}",
                str(found["launches"]),
                *(f"{1e3 * seconds:.2f}" for seconds in expected["seconds"].values()),
                f"{1e3 * expected['seconds_in_bfloat16']:.2f}",
            )
        )
    parts = results[0]["predicted"]["seconds"]
    return table(
        (
            "a step of all layers",
            "GB packed",
            "GB read",
            "in bfloat16",
            "temporary MB",
            "launches a layer",
            "of a step",
            *(f"ms (predicted): {part}" for part in parts),
            "ms in bfloat16",
        ),
        rows,
    )
