"""The goals of the check that compiles for a GPU, and its tables."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.bench.lib import Goal, table
from scripts.gpu.expert_report import experts_text, goals_of_experts
from scripts.gpu.kernel_report import goals_of_kernels, kernels_text
from scripts.gpu.prompt_report import goals_of_prompts, prompts_text
from scripts.gpu.quantised_report import goals_of_quantised, quantised_text
from scripts.gpu.targets import HOPPER, Target

OF_A_LAYER = 2
"""All-reduces of a layer: over `tensor` the sums after attention and MLP, over `kv` the largest
log-sum-exp and what is merged by it."""


OF_A_PASS = {"all-reduce over tensor": 5, "all-gather over tensor": 2}
"""The most collectives of a pass outside of its layers: the embedding's sum and whether logits are
finite; for sampling the largest logit, its place, the logits where top-k or top-p need them in
order, the weights of all chunks and those of the chunk drawn from."""


OF_MOVES = {"all-reduce over kv": 2}
"""And where steps move, in two loops: what a step has overflowed by, and a step that has ended, a
tile of all layers at a time."""


OF_OURS = 2
"""Kernels of a GPU backend in a layer: attention and merging."""


APPENDS = ", appends"
"""Ends the names of passes that are compiled with their appends, which their backend serves where it
serves the same without."""


OF_A_DRAW = 6
"""The most launches of a draw with top-k, top-p, min-p and penalties."""


def all_goals(
    results: Mapping[str, Sequence[Mapping[str, Any]]], target: Target = HOPPER
) -> list[Goal]:
    """The goals of these results, compiled for a GPU. A program that did not compile, or that a
    backend has declined, has no numbers of its own."""
    declined = _declined(results.values())
    results = {part: _not_declined(found) for part, found in results.items()}
    kernels, steps, devices, prompts, experts, sampling, cold, quantised = (
        results.get(part, [])
        for part in (
            *("kernels", "steps", "devices", "prompts"),
            *("experts", "sampling", "cold", "quantised"),
        )
    )
    coded, coded_steps = _coded(results)
    kernels, steps = [*kernels, *coded], [*steps, *coded_steps]
    compiled = [step for step in (*steps, *devices) if step["error"] is None]
    return [
        *_goals_of_compiling((*kernels, *steps, *devices, *prompts, *experts, *cold, *quantised)),
        *_goals_of_serving(declined, results, target),
        *goals_of_kernels((*kernels, *devices, *quantised), target),
        *_goals_of_plans(results.get("plan")),
        *(goal for step in compiled for goal in _goals_of_memory(step)),
        *(goal for step in devices if step["error"] is None for goal in goals_of_sending(step)),
        *(goal for one in prompts if one["error"] is None for goal in goals_of_prompts(one)),
        *(goal for program in sampling for goal in _goals_of_host(program)),
        *(goal for one in sampling for goal in _goals_of_sampling(one)),
        *(goal for step in cold if step["error"] is None for goal in _goals_of_cold(step)),
        *(goal for step in experts if step["error"] is None for goal in goals_of_experts(step)),
        *(goal for one in quantised if one["error"] is None for goal in goals_of_quantised(one)),
    ]


def _declined(parts: Iterable[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """The programs of these parts that a backend has declined for this GPU."""
    return [result for found in parts for result in found if "declined" in result]


def _not_declined(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [result for result in found if "declined" not in result]


def _goals_of_serving(
    declined: Sequence[Mapping[str, Any]],
    results: Mapping[str, Sequence[Mapping[str, Any]]],
    target: Target,
) -> list[Goal]:
    """Kernels of ours serve all that is asked: on an H200 each backend's, and on other GPUs one's."""
    if target is HOPPER:
        return [Goal("programs that a backend declines", len(declined), 0, at_most=True)]
    served = {r["name"] for part in results.values() for r in part if r.get("backend") != "xla"}
    left = {r["name"].removesuffix(APPENDS) for r in declined} - served
    return [Goal("programs that no GPU backend of ours serves", len(left), 0, at_most=True)]


def _coded(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[list[Any], list[Any]]:
    """The kernels and the decode steps of the part `codes`."""
    found = results.get("codes", [])
    return [r for r in found if "case" in r], [r for r in found if "case" not in r]


def _goals_of_compiling(programs: Sequence[Mapping[str, Any]]) -> list[Goal]:
    return [
        Goal(
            f"{backend}: programs that do not compile",
            sum(p["error"] is not None for p in programs if p["backend"] == backend),
            0,
            at_most=True,
        )
        for backend in dict.fromkeys(program["backend"] for program in programs)
    ]


def _goals_of_plans(plans: Sequence[Mapping[str, Any]] | None) -> list[Goal]:
    if not plans:
        return []
    failed = sum(plan["error"] is not None for plan in plans)
    return [Goal("plan: programs that do not compile", failed, 0, at_most=True)]


def _goals_of_memory(step: Mapping[str, Any]) -> list[Goal]:
    """The goals of one decode step: no copies of the cache, little temporary memory."""
    what = f"{step['backend']}, {step['name']}"
    copies = sum(step["whole_cache"].values())
    return [
        Goal(f"{what}: copies of the cache", copies, 0, at_most=True),
        Goal(
            f"{what}: temporary memory, of one layer's cache",
            step["temp_bytes"] / step["layer_bytes"],
            1,
            at_most=True,
        ),
        Goal(
            f"{what}: updated in place, of the cache",
            step["aliased_bytes"] / step["cache_bytes"],
            1,
        ),
        Goal(f"{what}: bytes that kernels of ours spill", step["spill_bytes"], 0, at_most=True),
    ]


def _goals_of_host(program: Mapping[str, Any]) -> list[Goal]:
    """The goals of a program without loops, of which older results have no such numbers: one graph.

    A decode loop has no such goals: XLA's graphs of loops gave wrong results on an H100."""
    host = program.get("host")
    if host is None:
        return []
    what = f"sampling, {program['name']}"
    return [
        Goal(f"{what}: graphs of a dispatch", host["graphs"], 1, at_most=True),
        Goal(f"{what}: loops and branches of the host", host["waits"], 0, at_most=True),
        Goal(f"{what}: launches outside of graphs", host["alone"], 0, at_most=True),
    ]


def _goals_of_sampling(program: Mapping[str, Any]) -> list[Goal]:
    """A draw is few launches, whose kernel has registers enough; older results have no kernels."""
    if program["error"] is not None:
        return [Goal("sampling: programs that do not compile", 1, 0, at_most=True)]
    launches = program["host"]["in_graphs"]
    spilled = [kernel["spill_bytes"] for kernel in program.get("kernels", [])]
    what = f"sampling, {program['name']}"
    return [
        Goal(f"{what}: launches", launches, OF_A_DRAW, at_most=True),
        Goal(f"{what}: bytes that a kernel spills", max(spilled, default=None), 0, at_most=True),
    ]


def _goals_of_cold(program: Mapping[str, Any]) -> list[Goal]:
    """Attention's kernels are lowered once for all layers, though not for all numbers of tokens a row."""
    what = f"{program['backend']}, {program['name']}: kernels of attention lowered for {program['layers']} layers"
    return [Goal(what, program["kernels"], 2 * OF_OURS, at_most=True)]


def goals_of_sending(step: Mapping[str, Any]) -> list[Goal]:
    """The further goals of a decode step on several devices."""
    what, sent = f"{step['backend']}, {step['name']}", step["sent"]
    meant = {f"all-reduce over {axis}": OF_A_LAYER for axis in step["axes"]}
    differ = sum(
        abs(sent["layer"].get(kind, 0) - meant.get(kind, 0)) for kind in {*sent["layer"], *meant}
    )
    allowed = {**OF_A_PASS, **(OF_MOVES if step["moves"] and "kv" in step["axes"] else {})}
    more = sum(max(0, number - allowed.get(kind, 0)) for kind, number in sent["outside"].items())
    goals = [
        Goal(
            f"{what}: collectives a layer, more or fewer than {OF_A_LAYER} all-reduces an axis",
            differ,
            0,
            at_most=True,
        ),
        Goal(
            f"{what}: collectives outside of layers, more than sampling and moves take",
            more,
            0,
            at_most=True,
        ),
        Goal(
            f"{what}: largest array sent, of one layer's keys",
            sent["largest_of_layers_keys"],
            1 / LARGE,
            at_most=True,
        ),
    ]
    if step["backend"] != "xla":
        goals.append(Goal(f"{what}: kernels of ours a layer", step["kernel_calls"], OF_OURS))
    return goals


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    found = report["versions"]
    lines = [
        f"compiled for {report['target']} with jax {found['jax']}, ptxas {found['ptxas']}; results "
        "and speed take a GPU"
    ]
    tables = {
        "kernels": kernels_text,
        "steps": _steps_text,
        "devices": _devices_text,
        "prompts": prompts_text,
        "plan": _plan_text,
        "experts": experts_text,
        "sampling": _sampling_text,
        "cold": _cold_text,
        "quantised": quantised_text,
        "codes": kernels_text,
        "steps of codes": _steps_text,
    }
    shown = {**report, "codes": _coded(report)[0], "steps of codes": _coded(report)[1]}
    shown = {part: _not_declined(shown.get(part, [])) for part in tables}
    lines += [text(shown[part]) for part, text in tables.items() if shown[part]]
    if declined := _declined(report.get(part, []) for part in tables):
        counts = Counter((r.get("backend", "sampling"), r["declined"]) for r in declined)
        said = (f"  {backend}, {number} times: {why}" for (backend, why), number in counts.items())
        lines.append("\n".join(["declined, for the next backend to serve:", *said]))
    if failed := [result for part in tables for result in shown.get(part, []) if result["error"]]:
        lines.append(
            "\n".join(
                [
                    "does not compile:",
                    *(f"  {r.get('backend', 'plan')}, {r['name']}: {r['error']}" for r in failed),
                ]
            )
        )
    return "\n\n".join(lines)


def _steps_text(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for r in results:
        if r["error"] is None:
            copies = ", ".join(f"{count} {kind}" for kind, count in r["whole_cache"].items())
            rows.append(
                (
                    f"{r['backend']}: {r['name']}",
                    copies or "none",
                    *(
                        f"{r[name] / 2**20:.1f}"
                        for name in ("temp_bytes", "layer_bytes", "aliased_bytes", "cache_bytes")
                    ),
                    *(f"{r['launches'][name]:g}" for name in ("layer", "outside", "loops")),
                    *_host_cells(r.get("host")),
                )
            )
    return table(
        (
            "decode step",
            "whole-cache writes",
            "temp MiB",
            "a layer's",
            "in place",
            "cache",
            "launches a layer",
            "outside",
            "loops",
            *HOST,
        ),
        rows,
    )


HOST = "graphs", "host waits", "launches alone", "in graphs"
"""The columns of what the host does in a dispatch."""


def _host_cells(host: Mapping[str, int] | None) -> tuple[str, ...]:
    names = "graphs", "waits", "alone", "in_graphs"
    return tuple("-" if host is None else str(host[name]) for name in names)


def _sampling_text(results: Sequence[Mapping[str, Any]]) -> str:
    numbers = "registers", "spill_bytes"
    rows = [
        (
            f"{r['name']}, {r['rows']} x {r['vocab']}",
            *_host_cells(r["host"]),
            *(str(sum(k[name] for k in r.get("kernels", []))) for name in numbers),
        )
        for r in results
        if r["error"] is None
    ]
    return table(("sampling alone", *HOST, "registers", "spilled"), rows)


def _cold_text(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{r['backend']}: {r['name']}, {r['layers']} layers",
            str(r["kernels"]),
            *(f"{r['processor_seconds'][name]:.1f}" for name in ("trace", "lower", "compile")),
        )
        for r in results
        if r["error"] is None
    ]
    return table(
        (
            "decode loop, processor seconds",
            "attention's kernels lowered",
            "trace",
            "lower",
            "compile",
        ),
        rows,
    )


def _devices_text(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{r['backend']}: {r['name']}",
            *(
                ", ".join(f"{number:g} {kind}" for kind, number in r["sent"][where].items())
                or "none"
                for where in ("layer", "outside")
            ),
            f"{r['sent']['largest_of_layers_keys']:.1%}",
        )
        for r in results
        if r["error"] is None
    ]
    return "\n\n".join(
        [
            _steps_text(results),
            table(
                ("on devices", "sent a layer", "sent outside", "largest, of a layer's keys"), rows
            ),
        ]
    )


def _plan_text(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (f"{r['name']}: {r['what']}", str(r["launches"]), str(r["loops"]))
        for r in results
        if r["error"] is None
    ]
    return table(("alone", "launches", "loops"), rows)


LARGE = 4
"""A decode step is to write no array as large as a LARGE-th of one layer's keys, but for the
updates in place, and to send none."""
