"""The goals and the table of what is sent in a pass over a prompt on several GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.lib import Goal, table


def hidden(program: Mapping[str, Any]) -> float:
    """The part of a layer's sending that products are computed beside, by the roofline."""
    sums = program["sums"]
    sending = sum(each["sending_seconds"] for each in sums)
    return sum(min(each["sending_seconds"], each["product_seconds"]) for each in sums) / sending


def goals_of_prompts(program: Mapping[str, Any]) -> list[Goal]:
    what = f"{program['backend']}, {program['name']}"
    alone = sum(not each["products"] for each in program["sums"])
    return [
        Goal(f"{what}: sums of a layer without a product beside them", alone, 0, at_most=True),
        Goal(f"{what}: bytes that kernels spill", program["spill_bytes"], 0, at_most=True),
    ]


def prompts_text(results: Sequence[Mapping[str, Any]]) -> str:
    done = [r for r in results if r["error"] is None]
    rows = [
        (
            f"{r['backend']}: {r['name']}",
            each["of"],
            f"{each['bytes'] / 1e6:.1f}",
            str(each["products"]),
            f"{1e6 * each['sending_seconds']:.0f}",
            f"{1e6 * each['product_seconds']:.0f}",
            f"{hidden(r):.2f}",
        )
        for r in done
        for each in r["sums"]
    ]
    names = "MB", "products beside", "us (predicted): sending", "products", "hidden, of a layer"
    return table(("a pass over a prompt", "sum after", *names), rows)
