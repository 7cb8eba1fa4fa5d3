"""The goals of the benchmark of sharing, and its tables."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.lib import (
    Goal,
    table,
)
from scripts.bench.parts.sharing.attention import NO_ATTENTION, SDPA, SHARED, THEIRS, UNSHARED

ATTENTION_POINT = {"rows": 64, "prefix": 4096, "suffix": 64}


ATTENTION_GOALS = {UNSHARED: 8.0, SDPA: 10.0}


PRODUCTS_GOAL = 0.55


END_POINT = {"batch": 64, "prefix": 4096}


END_GOALS = {UNSHARED: 3.0, THEIRS: 15.0}


PREDICTION_GOAL = 1.25


NEEDLES_GOAL = 1.1
"""Times in proportion to the number of questions."""


DOCUMENT_GOAL = 1.6


LEVELS_GOAL = 1.5


RULE_GOAL = 1.03


def goals(results: Mapping[str, Any], heads: str, unmeasured: Sequence[Goal] = ()) -> list[Goal]:
    """The goals that these results can be held against; those set against PyTorch also where it did
    not run, and those `unmeasured`."""
    found = []
    for r in results.get("attention", []):
        if heads == "model" and ATTENTION_POINT.items() <= r.items():
            found += _attention_goals(r)
    for r in results.get("end-to-end", []):
        if END_POINT.items() <= r.items():
            found += _end_goals(r)
    if "needles" in results:
        r = results["needles"]
        documents = r.get("documents")
        found += needle_goals(
            r["questions"],
            r["last_to_first"],
            bool(documents),
            documents["longest_to_shortest"]["median"] if documents else None,
        )
    if "levels" in results:
        best = max(results["levels"]["one_level_to"].values(), key=lambda ratio: ratio["median"])
        found.append(
            Goal(
                "two levels, memory of one: times faster than one level",
                best["median"],
                LEVELS_GOAL,
            )
        )
    if results.get("rule"):
        found += [
            Goal(
                f"cost rule, {rule} costs: the choice to the better of the two, worst",
                worst,
                RULE_GOAL,
                at_most=True,
            )
            for rule, worst in worst_choices(results["rule"]).items()
        ]
    return [*found, *unmeasured]


def _speed_goals(
    what: str, slower_than_shared: Mapping[str, Mapping[str, float]], targets: Mapping[str, float]
) -> list[Goal]:
    """The goals of the speed-up over each of the other sides; a side that did not run is None."""
    return [
        Goal(
            f"{what}: times faster than {side}",
            slower_than_shared[side]["median"] if side in slower_than_shared else None,
            target,
        )
        for side, target in targets.items()
    ]


def _attention_goals(point: Mapping[str, Any]) -> list[Goal]:
    what = "attention, 64 rows, prefix 4096, suffix 64"
    return [
        *_speed_goals(what, point["slower_than_shared"], ATTENTION_GOALS),
        Goal(
            f"{what}: of the rate of large products",
            point["sides"][SHARED]["of_products"],
            PRODUCTS_GOAL,
        ),
    ]


def _end_goals(point: Mapping[str, Any]) -> list[Goal]:
    what = "decoding, batch 64, prefix 4096"
    return [
        *_speed_goals(what, point["slower_than_shared"], END_GOALS),
        Goal(
            f"{what}: a step, times the prediction",
            point["shared_to_predicted"]["median"],
            PREDICTION_GOAL,
            at_most=True,
        ),
    ]


def needle_goals(
    questions: Sequence[int],
    last_to_first: float | None,
    with_documents: bool,
    longer: float | None,
) -> list[Goal]:
    """The goals of the part needles, for these numbers of questions; what was not measured is
    None."""
    found, first, last = [], questions[0], questions[-1]
    if (first, last) == (16, 256):
        found.append(
            Goal(
                f"needles: seconds of {last} questions, times those of {first}",
                last_to_first,
                last / first * NEEDLES_GOAL,
                at_most=True,
            )
        )
    if with_documents:
        found.append(
            Goal(
                "needles: seconds with a document twice as long, times",
                longer,
                DOCUMENT_GOAL,
                at_most=True,
            )
        )
    return found


def worst_choices(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """For each rule the worst of its choices over all points."""
    return {
        rule: max(point["chosen_to_better"][rule] for point in points)
        for rule in points[0]["chosen"]
    }


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    settings, where, found, results = (
        report["settings"],
        report["machine"],
        report["versions"],
        report["results"],
    )
    torch = found.get("torch")
    lines = [
        f"Llama, {settings['parameters'] / 1e6:.1f} M parameters, bfloat16; medians of "
        f"{settings['rounds']} rounds",
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{found['jaxshare']['jax']}; "
        + (
            f"transformers {torch['transformers']} on torch {torch['torch']}"
            if torch
            else "without PyTorch"
        ),
    ]
    texts = {
        "attention": _attention_text,
        "end-to-end": _end_text,
        "needles": _needles_text,
        "levels": _levels_text,
        "rule": _rule_text,
    }
    return "\n\n".join(
        [
            "\n".join(lines),
            *(text(results[part]) for part, text in texts.items() if part in results),
        ]
    )


def _attention_text(points: Sequence[Mapping[str, Any]]) -> str:
    names = (SHARED, UNSHARED, SDPA)
    rows = []
    for r in points:
        sides = [r["sides"].get(name) for name in names]
        rows.append(
            (
                f"{r['rows']} rows, {r['prefix']} + {r['suffix']}",
                *(f"{s['milliseconds']:.2f}" if s else "-" for s in sides),
                f"{sides[0]['gflops']:.0f}",
                f"{r['product_gflops']:.0f}",
                f"{sides[0]['of_products']:.2f}",
                *(
                    f"{ratio['median']:.1f}"
                    if (ratio := r["slower_than_shared"].get(name))
                    else "-"
                    for name in names[1:]
                ),
            )
        )
    header = (
        "attention, one layer",
        *(f"{name} ms" for name in names),
        "GFLOP/s",
        "products",
        "of them",
        "unshared x",
        "SDPA x",
    )
    return table(header, rows)


def _end_text(points: Sequence[Mapping[str, Any]]) -> str:
    names = (SHARED, UNSHARED, NO_ATTENTION, THEIRS)
    rows = []
    for r in points:
        sides = [r["sides"].get(name) for name in names]
        rows.append(
            (
                f"batch {r['batch']}, prefix {r['prefix']}",
                *(f"{s['tokens_per_second']:.1f}" if s else "-" for s in sides),
                f"{sides[0]['step_milliseconds']:.1f}",
                f"{r['predicted_milliseconds']:.1f}",
                f"{r['shared_to_predicted']['median']:.2f}",
                *(
                    f"{r['slower_than_shared'][name]['median']:.1f}" if name in r["sides"] else "-"
                    for name in (UNSHARED, THEIRS)
                ),
            )
        )
    header = ("tokens/s", *names, "step ms", "predicted", "ratio", "unshared x", "transformers x")
    return table(header, rows)


def _needles_text(r: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{count} questions",
            *(
                f"{r['seconds'][name][str(count)]:.2f}"
                if str(count) in r["seconds"].get(name, {})
                else "-"
                for name in (SHARED, UNSHARED, NO_ATTENTION)
            ),
            f"{r['accuracy'][str(count)]:.2f}",
        )
        for count in r["questions"]
    ]
    lines = [
        table(
            (
                f"seconds, document {r['document_tokens']}",
                SHARED,
                UNSHARED,
                NO_ATTENTION,
                "accuracy",
            ),
            rows,
        ),
        *(
            f"{name}: {line['seconds_a_question']:.3f} s a question"
            for name, line in r["line"].items()
        ),
        f"the document itself: {r['prefill_seconds']:.2f} s",
    ]
    if documents := r.get("documents"):
        by_length = ", ".join(
            f"{length} tokens {seconds:.2f} s" for length, seconds in documents["seconds"].items()
        )
        lines.append(f"{documents['questions']} questions by the document's length: {by_length}")
    return "\n".join(lines)


def _levels_text(r: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            f"{side['seconds']:.2f}",
            str(side["rows"]),
            f"{side['kv_bytes'] / 2**20:.0f}",
            str(side["passes"]),
            f"{r['one_level_to'][name]['median']:.2f}" if name in r["one_level_to"] else "",
        )
        for name, side in r["sides"].items()
    ]
    lengths = f"{r['few_shot']} + {r['problem']} + {r['new_tokens']} tokens"
    return table(
        (
            f"{r['problems']} problems, {r['samples']} samples, {lengths}",
            "seconds",
            "rows",
            "KV MiB",
            "passes",
            "times",
        ),
        rows,
    )


def _rule_text(points: Sequence[Mapping[str, Any]]) -> str:
    if not points:
        return "the cost rule was not measured: no copies fit the memory allowed for them"
    rules = list(points[0]["chosen"])
    rows = [
        (
            f"{r['rows']} rows, prefix {r['prefix']}",
            *(f"{r['milliseconds'][name]:.2f}" for name in (SHARED, UNSHARED)),
            f"{r['worse_to_better']:.3f}",
            f"{r['better_to_itself']:.3f}",
            *(f"{r['chosen'][rule]} {r['chosen_to_better'][rule]:.3f}" for rule in rules),
        )
        for r in points
    ]
    noise = [abs(r["better_to_itself"] - 1) for r in points]
    lines = [
        table(
            (
                "ms a pass",
                SHARED,
                UNSHARED,
                "worse/better",
                "noise",
                *(f"by {rule} costs" for rule in rules),
            ),
            rows,
        )
    ]
    for rule, worst in worst_choices(points).items():
        middle = statistics.median(r["chosen_to_better"][rule] for r in points)
        lines.append(
            f"{rule} costs: the choice is at worst {worst:.3f} times as slow as the better of the "
            f"two, in the median {middle:.3f}"
        )
    lines.append(
        f"equal programs were measured up to {100 * max(noise):.1f} % apart, in the median "
        f"{100 * statistics.median(noise):.1f} %"
    )
    return "\n".join(lines)
