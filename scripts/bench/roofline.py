"""Predictions of an H200 for the goals of scripts.bench.attention; nothing is measured.

    python -m scripts.bench.roofline [--json]

The page benchmarks/roofline.md has the same tables and explains them. Shapes and goals are those of
scripts.bench.attention, the cut into work items is that of `jaxshare.pallas.work_items`, tiles are
those of `jaxshare.pallas.tiles`. Everything else is assumed, and what only a measurement can tell
is assumed twice, hopefully and carefully. Seconds, bytes and FLOPs throughout; axis letters as in
`jaxshare.attention.plan`.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from scripts.bench.lib import Goal, Parser, table
from scripts.bench.parts.attention import cases
from scripts.bench.parts.attention import measurements as parts
from scripts.bench.parts.attention.cases import Case, Heads
from scripts.bench.parts.attention.chip import (
    CAREFUL,
    H200,
    HOPEFUL,
    LAYER_LAUNCHES,
    OUTSIDE_LAUNCHES,
    PLAN_LAUNCHES,
    PRODUCTS,
    Assumed,
    Chip,
    attention,
)
from scripts.bench.parts.attention.scale import MODEL


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step, in seconds: products, and with them the weights; attention of all layers; the
    other kernels and the gaps between them; and the memory-bound limit of all of it."""

    products: float
    attention: float
    rest: float
    limit: float

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.rest


def decode_step(batch: int, chip: Chip, assumed: Assumed) -> Step:
    """A step of the 7B-shaped model."""
    model, scale = MODEL, parts.FULL
    hidden, layers = model["hidden_size"], model["num_hidden_layers"]
    heads = Heads(
        model["num_key_value_heads"],
        model["num_attention_heads"] // model["num_key_value_heads"],
        model["head_dim"],
    )
    layer = (
        hidden * (2 * heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        + 3 * hidden * model["intermediate_size"]
    )
    head = model["vocab_size"] * hidden
    tokens = scale.context + (scale.steps + 1) / 2

    def products(parameters: int) -> float:
        return max(
            2 * parameters / (assumed.weights * chip.copy_rate),
            2 * batch * parameters / chip.product_rate,
        )

    attended = attention(cases.private(heads, batch, math.ceil(tokens)), chip, assumed)
    small = LAYER_LAUNCHES - PRODUCTS - 3  # attention's three have their launches in its time
    rest = (
        layers * (PRODUCTS * assumed.launch + small * assumed.small)
        + (OUTSIDE_LAUNCHES - 1) * assumed.small
        + assumed.host
    )
    read = (
        2 * (layers * (layer + 2 * hidden) + hidden + head)
        + 4 * batch * tokens * layers * heads.num_kv_heads * heads.head_dim
    )
    return Step(
        layers * products(layer) + products(head),
        layers * attended.seconds,
        rest,
        read / chip.copy_rate,
    )


def passes() -> dict[str, Case]:
    """The passes of scripts.bench.attention that its goals are about."""
    scale = parts.FULL
    found = {
        f"private, G {group}": cases.private(
            dataclasses.replace(scale.private_heads, group=group),
            scale.private_rows,
            scale.private_tokens,
        )
        for group in scale.private_groups
    }
    found |= {
        "shared": cases.shared(scale.shared_heads, scale.shared_rows, scale.prefix, scale.own),
        "shared, a copy each": cases.private(
            scale.shared_heads, scale.shared_rows, scale.prefix + scale.own
        ),
        "one row": cases.private(scale.worker_heads, 1, scale.history + scale.own),
    }
    return found | {
        f"{n} workers": cases.workers(scale.worker_heads, n, scale.history, scale.own)
        for n in parts.WORKERS_GOALS
    }


def predict(chip: Chip, assumed: Assumed) -> list[float]:
    """The numbers that scripts.bench.attention would measure, in the order of its goals."""
    found, seconds = passes(), {}
    for name, case in found.items():
        seconds[name] = attention(case, chip, assumed).seconds
    private = [
        found[name].layer_bytes / seconds[name] / chip.copy_rate
        for name in found
        if name.startswith("private")
    ]
    shared = [
        found["shared"].layer_flops / seconds["shared"] / chip.product_rate,
        seconds["shared, a copy each"] / seconds["shared"],
    ]
    workers = [seconds[f"{n} workers"] / seconds["one row"] for n in parts.WORKERS_GOALS]
    plans = [launches * assumed.small * 1e6 for launches in PLAN_LAUNCHES.values()]
    steps = [
        step.limit / step.seconds
        for step in (decode_step(batch, chip, assumed) for batch in parts.FULL.batches)
    ]
    return [*private, *shared, *workers, *plans, *steps]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction of one goal under hopeful and careful assumptions."""

    goal: Goal
    hopeful: float
    careful: float

    @property
    def met(self) -> bool | None:
        """None where the two disagree."""
        both = {
            dataclasses.replace(self.goal, measured=value).met
            for value in (self.hopeful, self.careful)
        }
        return both.pop() if len(both) == 1 else None


def predictions(chip: Chip = H200) -> list[Prediction]:
    """All goals of bench_attention.py, in its order and by its names."""
    return [
        Prediction(*found)
        for found in zip(
            parts.goals({}, tiny=False), predict(chip, HOPEFUL), predict(chip, CAREFUL), strict=True
        )
    ]


def goals_table(found: Sequence[Prediction]) -> str:
    return table(
        ("goal", "wanted", "hopeful", "careful", "to be met"),
        [
            (
                p.goal.name,
                f"{'at most' if p.goal.at_most else 'at least'} {p.goal.goal:.2f}",
                f"{p.hopeful:.2f}",
                f"{p.careful:.2f}",
                {True: "yes", False: "NO", None: "open"}[p.met],
            )
            for p in found
        ],
    )


def times_table(chip: Chip = H200) -> str:
    """The table of where a layer's attention spends its time."""
    rows = []
    for name, case in passes().items():
        hopeful, careful = (attention(case, chip, assumed) for assumed in (HOPEFUL, CAREFUL))
        rows.append(
            (
                name,
                f"{case.layer_bytes / 1e6:.1f}",
                f"{case.layer_flops / 1e9:.2f}",
                str(hopeful.tiles),
                str(hopeful.pieces),
                *(f"{x * 1e6:.1f}" for x in (hopeful.memory, hopeful.level_2)),
                *(
                    _both(hopeful, careful, field, 1e6)
                    for field in ("item", "queries", "merge", "seconds")
                ),
            )
        )
    return table(
        (
            "a layer, us",
            "MB",
            "GFLOP",
            "tiles",
            "pieces",
            "memory",
            "level 2",
            "slowest item",
            "queries",
            "merge",
            "all",
        ),
        rows,
    )


def steps_table(chip: Chip = H200) -> str:
    """The table of where a decode step spends its time."""
    rows = []
    for batch in parts.FULL.batches:
        hopeful, careful = (decode_step(batch, chip, assumed) for assumed in (HOPEFUL, CAREFUL))
        rows.append(
            (
                f"batch {batch}",
                f"{hopeful.limit * 1e3:.2f}",
                *(
                    _both(hopeful, careful, field, 1e3)
                    for field in ("products", "attention", "rest", "seconds")
                ),
            )
        )
    return table(("a step, ms", "limit", "products", "attention", "the rest", "all"), rows)


def _both(hopeful: Any, careful: Any, field: str, times: float) -> str:
    few = 1 if times == 1e6 else 2
    return " / ".join(f"{getattr(side, field) * times:.{few}f}" for side in (hopeful, careful))


def assumptions_table() -> str:
    units = {"exposed": (1, ""), "weights": (1, "")}
    rows = []
    for name, hopeful in dataclasses.asdict(HOPEFUL).items():
        times, unit = units.get(name, (1e6, " us"))
        rows.append(
            (name, *(f"{value * times:.4g}{unit}" for value in (hopeful, getattr(CAREFUL, name))))
        )
    return table(("assumed", "hopeful", "careful"), rows)


def as_json(chip: Chip = H200) -> dict[str, Any]:
    return {
        "predicted_not_measured": True,
        "chip": dataclasses.asdict(chip),
        "hopeful": dataclasses.asdict(HOPEFUL),
        "careful": dataclasses.asdict(CAREFUL),
        "predictions": [
            {
                "name": p.goal.name,
                "goal": p.goal.goal,
                "at_most": p.goal.at_most,
                "hopeful": p.hopeful,
                "careful": p.careful,
                "met": p.met,
            }
            for p in predictions(chip)
        ],
        "attention": {
            name: {
                side: dataclasses.asdict(found) | {"seconds": found.seconds}
                for side, found in (
                    ("hopeful", attention(case, chip, HOPEFUL)),
                    ("careful", attention(case, chip, CAREFUL)),
                )
            }
            for name, case in passes().items()
        },
        "steps": {
            batch: {
                side: dataclasses.asdict(found) | {"seconds": found.seconds}
                for side, found in (
                    ("hopeful", decode_step(batch, chip, HOPEFUL)),
                    ("careful", decode_step(batch, chip, CAREFUL)),
                )
            }
            for batch in parts.FULL.batches
        },
    }


def tables() -> list[str]:
    """All that is on the page."""
    return [goals_table(predictions()), times_table(), steps_table(), assumptions_table()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="scripts.bench.roofline",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if parser.parse_args(arguments).json:
        print(json.dumps(as_json(), indent=2))
    else:
        print(f"Predicted for an {H200.name}, not measured.", *tables(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
