"""The goals of the benchmark of the Logits Cache, and its tables."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.lib import (
    Goal,
    table,
)

BASELINE, STEPWISE, HOTSPOT = "baseline", "stepwise", "hotspot"


SIDES = (BASELINE, STEPWISE, HOTSPOT)


SPEED_GOALS = {STEPWISE: 1.3, HOTSPOT: 2.0}


STORAGE_GOAL = 0.03


WORST_GOAL = 0.98
"""Of the speed without the cache, at every point."""


def averages(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """The means of each side over the temperatures at which there is a number."""
    found: dict[str, dict[str, float | None]] = {}
    for side in SPEED_GOALS:
        found[side] = {}
        for name in ("speedup", "median_speedup", "free_replay", "speedup_with_all", "hit_ratio"):
            values = [p["sides"][side][name] for p in points if p["sides"][side][name] is not None]
            found[side][name] = statistics.fmean(values) if values else None
    return found


def goals(results: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """The goals that these results can be held against; storage is that of the larger
    vocabulary."""
    found = []
    for result in results:
        name, means = title(result), averages(result["points"])
        found += [
            Goal(
                f"{name}: {side}, times the baseline's tokens a second",
                means[side]["speedup"],
                goal,
            )
            for side, goal in SPEED_GOALS.items()
        ]
        speedups = [
            speedup
            for point in result["points"]
            for side in SPEED_GOALS
            if (speedup := point["sides"][side]["speedup"]) is not None
        ]
        worst = min(speedups, default=None)
        found.append(Goal(f"{name}: the worst point alone", worst, WORST_GOAL))
        found += _goals_of_searches(name, result.get("searches", ()))
        if result["model"] == "random":
            worst = max(p["storage_of_full_logits"] for p in result["points"])
            found.append(
                Goal(f"{name}: storage, of full logits", worst, STORAGE_GOAL, at_most=True)
            )
        if result["dtype"] == "float32":
            found.append(
                Goal(
                    f"{name}: stepwise answers that are not the baseline's",
                    sum(p["different_from_baseline"] for p in result["points"]),
                    0,
                    at_most=True,
                )
            )
    return found


def title(result: Mapping[str, Any]) -> str:
    """The model, and its task where that is not the puzzles."""
    task = result.get("task", "game24")
    return result["model"] if task == "game24" else f"{result['model']}, {task}"


def _goals_of_searches(name: str, searches: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """The goals of searches under supervisors; the worst of their points is one."""
    if not searches:
        return []
    found = [
        Goal(
            f"{name}: {side} under supervisors, times the baseline's speed",
            statistics.fmean(point["speedup"][side] for point in searches),
            goal,
        )
        for side, goal in SPEED_GOALS.items()
    ]
    found.append(
        Goal(
            f"{name}: the worst point under supervisors",
            min(point["speedup"][side] for point in searches for side in SPEED_GOALS),
            WORST_GOAL,
        )
    )
    return found


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    settings, where = report["settings"], report["machine"]
    blocks = [
        f"{settings['tokens']} tokens an answer, {settings['turns']} answers of each prompt after "
        f"the first\n{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the "
        f"start; jax {report['versions']['jax']}"
    ]
    return "\n\n".join([*blocks, *map(model_text, report["results"])])


def model_text(result: Mapping[str, Any]) -> str:
    """The tables of one model, without the head of a report."""
    certain = result["profile"]
    means = [
        f"{side}: {_number(mean['speedup'])}x in the mean over temperatures "
        f"({_number(mean['median_speedup'])}x of medians, {_number(mean['free_replay'])}x if "
        f"replays were free and all there is, {_number(mean['speedup_with_all'])}x with whole "
        f"hits), hit ratio {_number(mean['hit_ratio'])}"
        for side, mean in result["averages"].items()
    ]
    storage = max(point["storage_of_full_logits"] for point in result["points"])
    distances = ", ".join(
        f"{p['temperature']}: {p['hotspot_distance']['position']:.4f} and "
        f"{p['hotspot_distance']['sequence']:.3f}"
        for p in result["points"]
    )
    different = sum(point["different_from_baseline"] for point in result["points"])
    requests = sum(point["sides"][BASELINE]["requests"] for point in result["points"])
    return "\n".join(
        [
            f"{title(result)}, {result['dtype']}: {result['puzzles']} puzzles of "
            f"{result['prompt_tokens']:.0f} tokens, {result['rows']} side by side",
            f"at temperature 1 the likeliest token has over 0.9 at {100 * certain['certain']:.0f} "
            f"% of positions, the entropy is below 0.01 at {100 * certain['nearly_zero']:.0f} %, "
            f"in the mean {certain['entropy']:.3f}; a fifth is above {certain['upper_fifth']:.3f} "
            "nats",
            "",
            _points_table(result["points"]),
            "",
            *_searches_text(result.get("searches", ())),
            *means,
            f"{result['kept']} of {result['vocab']} logits kept: {100 * storage:.2f} % of the "
            "bytes of full logits",
            f"stepwise answers that are not the baseline's: {different} of {requests}",
            "hotspot's total variation from fresh sampling, by temperature, of a position and of "
            f"an answer: {distances}",
        ]
    )


def _searches_text(searches: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of the searches, if there are any, and an empty line."""
    if not searches:
        return []
    header = ("supervisor", *SPEED_GOALS, "hits", "hits of hotspot", "different")
    rows = [
        (
            f"{point['temperature']}  {point['supervisor']}",
            *(_number(point["speedup"][side]) for side in SPEED_GOALS),
            *(_number(point["hit_ratio"][side]) for side in SPEED_GOALS),
            str(point["different_from_baseline"]),
        )
        for point in searches
    ]
    return [table(header, rows), ""]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _points_table(points: Sequence[Mapping[str, Any]]) -> str:
    """The table of all sides at all temperatures."""
    rows = [
        (
            f"{point['temperature']}  {name}",
            *(_number(side[f"{kind}_tokens_per_second"], 1) for kind in ("mean", "median")),
            *(
                _number(side.get(key))
                for key in ("speedup", "median_speedup", "hit_ratio", "speedup_with_all")
            ),
            str(side["whole_hits"]),
            f"{side['group_seconds']:.1f}",
        )
        for point in points
        for name, side in point["sides"].items()
    ]
    header = (
        "temperature",
        "mean tok/s",
        "median",
        "speed-up",
        "median",
        "hits",
        "all",
        "whole",
        "seconds",
    )
    return table(header, rows)
