"""The goals of the benchmark of decoding, and its tables."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.lib import (
    Goal,
    ratios,
    table,
)

GOALS = {1: 1.5, 8: 2.0, 64: 3.0}


GOAL_PROMPT = 512


# Sides, as they are called in results.
OURS, THEIRS, SHARED = "jaxshare", "transformers", "jaxshare, one prompt"


def summarise(rows: int, steps: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians over rounds of a step's time on each side, and of each round's ratio to
    transformers."""
    sides, to_theirs = {}, {}
    for name, seconds in times.items():
        step = statistics.median(seconds) / steps
        sides[name] = {
            "step_milliseconds": step * 1e3,
            "tokens_per_second": rows / step,
            "round_seconds": seconds,
        }
        if name != THEIRS:
            to_theirs[name] = ratios(times[THEIRS], seconds)
    return {"batch": rows, "sides": sides, "ratios": to_theirs}


def goals(results: Sequence[dict[str, Any]], targets: Mapping[int, float]) -> list[Goal]:
    """The goals that these results can be held against, of those of each batch."""
    return [
        Goal(
            f"decode tokens per second, batch {r['batch']}: times transformers",
            r["ratios"][OURS]["median"],
            targets[r["batch"]],
        )
        for r in results
        if r["batch"] in targets
    ]


def as_text(report: dict[str, Any]) -> str:
    """The report without its goals."""
    settings, where, found = report["settings"], report["machine"], report["versions"]
    lines = [
        f"{settings['family']}, {settings['parameters'] / 1e6:.1f} M parameters, bfloat16, prompt "
        f"{settings['prompt']}; medians of {settings['rounds']} rounds of {settings['steps']} "
        "steps",
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{found[OURS]['jax']}; transformers {found[THEIRS]['transformers']} on torch "
        f"{found[THEIRS]['torch']}",
        "",
    ]
    speed, rest = [], []
    for r in report["results"]:
        for name, side in r["sides"].items():
            ratio, memory = r["ratios"].get(name), r["memory"].get(name)
            speed.append(
                (
                    f"{r['batch']}  {name}",
                    f"{side['step_milliseconds']:.1f}",
                    f"{side['tokens_per_second']:.1f}",
                    f"{ratio['median']:.2f}" if ratio else "",
                    f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}" if ratio else "",
                    f"{r['prefill_seconds'][name]:.2f}",
                    f"{memory['step_temp_bytes'] / 2**20:.1f}" if memory else "",
                    f"{memory['cache_bytes'] / 2**20:.0f}" if memory else "",
                )
            )
        agreement, busy = r["agreement"], r["cores_busy_while_waiting"]
        close = agreement["spacings_at_differences"]
        others = (
            f", the others where transformers' two best logits are at most {close[-1]:.0f} "
            "bfloat16 spacings apart"
            if close
            else ""
        )
        rest.append(
            f"batch {r['batch']}: {agreement['equal']} of {agreement['tokens']} greedy tokens "
            f"equal{others}; cores busy while waiting: {OURS} {busy[OURS]:.2f}, {THEIRS} "
            f"{busy[THEIRS]:.2f}"
        )
    header = (
        "batch",
        "ms a step",
        "tokens/s",
        "ratio",
        "of rounds",
        "prefill s",
        "temp MiB",
        "cache MiB",
    )
    return "\n".join([*lines, table(header, speed), "", *rest])
