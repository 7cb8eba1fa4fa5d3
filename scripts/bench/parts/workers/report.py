"""The goals of the benchmark of workers, and its tables."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.lib import (
    Goal,
    ratios,
    table,
)
from scripts.bench.parts.workers.sides import ATTENTION, CURRENT, HOGWILD, PASS, PLAN, THEIRS

RELATIVE_GOALS = {2: 1.15, 4: 1.3}


PLAN_GOAL = 2.0


HOGWILD_GOALS = {(4096, 2): 8.0, (4096, 4): 15.0, (16384, 2): 12.0, (16384, 4): 25.0}


WAITS_GOAL = 1.0


def summarise(
    history: int, layers: int, times: Mapping[tuple[int, str], list[float]]
) -> dict[str, Any]:
    """Medians over rounds of each side's time for one pass, and of each round's ratios.

    Args:
      times: seconds for one pass in every round, by number of workers and side; PASS and PLAN of
        all, PASS of 1 among them. Where ATTENTION was not timed, it is None.
    """
    found = {}
    for n in sorted({n for n, _ in times}):
        own = times[n, PASS]
        found[str(n)] = {
            "pass_milliseconds": statistics.median(own) * 1e3,
            "tokens_per_second": n / statistics.median(own),
            "to_one_worker": ratios(own, times[1, PASS]),
            "plan_microseconds": statistics.median(times[n, PLAN]) * 1e6,
            "plan_to_pass": ratios(times[n, PLAN], own),
            "attention_microseconds_a_layer": statistics.median(times[n, ATTENTION]) / layers * 1e6
            if (n, ATTENTION) in times
            else None,
            "round_seconds": own,
        }
        if (n, THEIRS) in times:
            theirs = times[n, THEIRS]
            found[str(n)][THEIRS] = {
                "pass_milliseconds": statistics.median(theirs) * 1e3,
                "times_slower": ratios(theirs, own),
                "round_seconds": theirs,
            }
    return {"history": history, "workers": found}


def goals(results: Sequence[dict[str, Any]], streaming: Mapping[str, int]) -> list[Goal]:
    """The goals that these results can be held against; those set against the authors'
    implementation also where it did not run."""
    found = []
    for r in results:
        for n, of_one in RELATIVE_GOALS.items():
            if str(n) not in r["workers"]:
                continue
            what, w = f"{n} workers, {r['history']} tokens of history", r["workers"][str(n)]
            found.append(
                Goal(
                    f"{what}: a pass, times that of one",
                    w["to_one_worker"]["median"],
                    of_one,
                    at_most=True,
                )
            )
            found.append(
                Goal(
                    f"{what}: the plan, percent of a pass",
                    100 * w["plan_to_pass"]["median"],
                    PLAN_GOAL,
                    at_most=True,
                )
            )
            if (r["history"], n) in HOGWILD_GOALS:
                times = w[THEIRS]["times_slower"]["median"] if THEIRS in w else None
                found.append(
                    Goal(
                        f"{what}: times faster than {HOGWILD}",
                        times,
                        HOGWILD_GOALS[r["history"], n],
                    )
                )
    sixteens = -(-streaming["passes"] // 16)  # the last may be cut short by the end of the run
    found.append(
        Goal(
            "streaming: waits of the host in 16 passes",
            streaming["waits"] / sixteens,
            WAITS_GOAL,
            at_most=True,
        )
    )
    return found


def as_text(report: dict[str, Any]) -> str:
    """The report without its goals."""
    results, waits = report["results"], report["streaming"]
    busy = [r["cores_busy_while_waiting"] for r in results if r["cores_busy_while_waiting"]]
    return "\n".join(
        [
            *_heading(report),
            "",
            _passes_table(results),
            "",
            "attention is that of one layer",
            f"streaming: the host waited {waits['waits']} times in {waits['passes']} forward "
            "passes",
            *(
                f"cores busy while waiting: jaxshare {b['jaxshare']:.2f}, {THEIRS} {b[THEIRS]:.2f}"
                for b in busy
            ),
        ]
    )


def _heading(report: Mapping[str, Any]) -> list[str]:
    settings, where, found = report["settings"], report["machine"], report["versions"]
    other = found.get(THEIRS)
    return [
        f"Llama, {settings['parameters'] / 1e6:.1f} M parameters, bfloat16, combined layout, "
        f"current steps of {CURRENT} tokens; medians of {settings['rounds']} rounds of "
        f"{settings['steps']} passes",
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{found['jaxshare']['jax']}; "
        + (
            f"{HOGWILD}: {settings['hogwild']['dtype']}, torch {other['torch']}, transformers "
            f"{other['transformers']}"
            if other
            else f"{HOGWILD} did not run: name a checkout of it with --hogwild"
        ),
    ]


def _passes_table(results: Sequence[Mapping[str, Any]]) -> str:
    """The table of all numbers of workers over all lengths of history."""
    rows = []
    for r in results:
        for n, w in r["workers"].items():
            ratio, theirs = w["to_one_worker"], w.get(THEIRS)
            rows.append(
                (
                    f"{r['history']}  {n}",
                    f"{w['pass_milliseconds']:.1f}",
                    f"{w['tokens_per_second']:.1f}",
                    f"{ratio['median']:.2f}",
                    f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}",
                    f"{w['attention_microseconds_a_layer']:.0f}",
                    f"{w['plan_microseconds']:.0f}",
                    f"{100 * w['plan_to_pass']['median']:.1f}",
                    *(
                        (
                            f"{theirs['pass_milliseconds']:.0f}",
                            f"{theirs['times_slower']['median']:.1f}",
                        )
                        if theirs
                        else ("", "")
                    ),
                )
            )
    header = (
        "history  workers",
        "ms a pass",
        "tokens/s",
        "to one",
        "of rounds",
        "attention us",
        "plan us",
        "plan %",
        "theirs ms",
        "times",
    )
    return table(header, rows)
