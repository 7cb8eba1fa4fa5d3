"""The goals and tables of decode steps of models with experts on several devices."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.lib import Goal, table

MEMORY = 141e9
"""Bytes of an H200."""
MORE_LAUNCHES = 0.25
"""The part by which launches of a layer may differ from those predicted. Of a product of few rows
with a long sum XLA makes two kernels where it sees fit, and some gathers of biases are their own."""


def goals_of_experts(step: Mapping[str, Any]) -> list[Goal]:
    """The goals of one step: it fits, no expert is copied or dequantised as a whole, and what was
    compiled is what the configuration predicts."""
    what, measured, predicted = (
        f"{step['backend']}, {step['name']}",
        step["measured"],
        step["predicted"],
    )

    def apart(name: str) -> float:
        return abs(measured[name] / predicted[name] - 1)

    launches = []
    for kind, found in measured["layer"].items():
        number, wanted = sum(found.values()), sum(predicted["layer"][kind].values())
        if measured["attention_by_xla"]:  # which is loops, and not predicted
            number -= measured["of_attention"][kind]
            wanted -= predicted["of_attention"]
        launches.append(abs(number / wanted - 1))
    differ = sum(
        (_counted(found) - _counted(predicted["sent"][kind])).total()
        + (_counted(predicted["sent"][kind]) - _counted(found)).total()
        for kind, found in measured["sent"].items()
    )
    missing = _counted(predicted["sent_outside"]) - _counted(measured["sent_outside"])
    held = sum(measured[name] for name in ("weight_bytes", "cache_bytes", "temp_bytes"))
    return [
        Goal(f"{what}: bytes of a device, of those it has", held / MEMORY, 1, at_most=True),
        Goal(
            f"{what}: writes of as much as a layer's experts",
            sum(measured["copies_of_experts"].values()),
            0,
            at_most=True,
        ),
        Goal(f"{what}: updated in place, of the cache", measured["aliased"], 1),
        Goal(f"{what}: bytes that kernels of ours spill", measured["spill_bytes"], 0, at_most=True),
        Goal(f"{what}: weights, from predicted", apart("weight_bytes"), 1e-3, at_most=True),
        Goal(f"{what}: cache, from predicted", apart("cache_bytes"), 1e-3, at_most=True),
        Goal(
            f"{what}: launches of a layer, from predicted",
            max(launches),
            MORE_LAUNCHES,
            at_most=True,
        ),
        Goal(f"{what}: collectives of layers, not as predicted", differ, 0, at_most=True),
        Goal(
            f"{what}: collectives outside of layers, predicted and missing",
            missing.total(),
            0,
            at_most=True,
        ),
    ]


def _counted(sent: Sequence[Mapping[str, Any]]) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for each in sent:
        found[each["kind"], each["bytes"]] += each.get("times", 1)
    return found


def experts_text(results: Sequence[Mapping[str, Any]]) -> str:
    done = [r for r in results if r["error"] is None]
    names = [f"{r['backend']}: {r['name']}" for r in done]
    memory = [
        (
            name,
            *(
                f"{r['measured'][key] / 1e9:.2f} ({r['predicted'][key] / 1e9:.2f})"
                for key in ("weight_bytes", "cache_bytes")
            ),
            f"{r['measured']['temp_bytes'] / 1e9:.2f}",
            f"{r['predicted']['weight_bytes_in_bfloat16'] / 1e9:.1f}",
            str(sum(r["measured"]["copies_of_experts"].values())),
        )
        for name, r in zip(names, done, strict=True)
    ]
    launches = [
        (
            f"{name}: {kind}",
            f"{sum(found.values())} ({sum(r['predicted']['layer'][kind].values())})",
            ", ".join(f"{number} {what}" for what, number in found.items()),
            ", ".join(
                f"{each['times']} {each['kind']} of {each['bytes'] / 1e6:.2f} MB"
                for each in r["measured"]["sent"][kind]
            ),
        )
        for name, r in zip(names, done, strict=True)
        for kind, found in r["measured"]["layer"].items()
    ]
    steps = [
        (
            name,
            f"{r['measured']['launches']} ({r['predicted']['launches']})",
            str(r["measured"]["outside"]),
            f"{r['predicted']['read_bytes'] / 1e9:.2f}",
            f"{r['predicted']['read_cache_bytes'] / 1e9:.2f}",
            *(
                f"{1e3 * r['predicted']['seconds'][part]:.2f}"
                for part in ("weights", "cache", "sending", "launches", "all")
            ),
        )
        for name, r in zip(names, done, strict=True)
    ]
    return "\n\n".join(
        [
            table(
                (
                    "a device, GB (predicted)",
                    "weights",
                    "cache",
                    "temporary",
                    "weights in bfloat16",
                    "copies of experts",
                ),
                memory,
            ),
            table(("a layer (predicted)", "launches", "by what", "sent"), launches),
            table(
                (
                    "a step of all layers (predicted)",
                    "launches",
                    "outside",
                    "GB read: weights",
                    "cache",
                    "ms: weights",
                    "cache",
                    "sending",
                    "launches",
                    "all",
                ),
                steps,
            ),
        ]
    )
