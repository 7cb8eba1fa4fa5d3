"""The goals of kernels that are compiled for a GPU, and their table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.bench.lib import Goal, table
from scripts.gpu.listings import PRODUCTS
from scripts.gpu.targets import Target


def goals_of_kernels(programs: Sequence[Mapping[str, Any]], target: Target) -> list[Goal]:
    """The goals of the kernels of each GPU backend."""
    goals = [*_goals_of_tensor_memory(programs, target)]
    for backend in dict.fromkeys(p["backend"] for p in programs if p["backend"] != "xla"):
        own = [
            kernel
            for program in programs
            if program["backend"] == backend
            for kernel in program.get("kernels", [])
        ]
        spilled = max((kernel["spill_bytes"] for kernel in own), default=None)
        shared = max(map(shared_bytes, own), default=None)
        serialized = sum(kernel.get("serialized", 0) for kernel in own)  # older results have none
        goals += [
            Goal(f"{backend}: bytes that a kernel spills, most", spilled, 0, at_most=True),
            Goal(
                f"{backend}: kernels whose wgmma wait for each other", serialized, 0, at_most=True
            ),
            Goal(
                f"{backend}: bytes of shared memory of a block, most",
                shared,
                target.shared[0],
                at_most=True,
            ),
        ]
        under = [
            found["under"] / found["exponentials"]
            for program in programs
            if program["backend"] == backend and (found := program.get("under_products"))
        ]
        if under:
            name = f"{backend}: exponentials under a product, where two overlap, of all"
            goals.append(Goal(name, min(under), 1))
    return goals


def _goals_of_tensor_memory(
    programs: Sequence[Mapping[str, Any]], target: Target
) -> Iterator[Goal]:
    """On Blackwell's data centre GPUs passes of many queries multiply in tensor memory: by mosaic_gpu
    over exact caches with heads of at most 192."""
    from jaxshare.pallas.tiles import multiplies_in_tensor_memory

    cases = [(p, p["case"]) for p in programs if p["backend"] == "mosaic_gpu" and "case" in p]
    slow = [
        not any(kernel.get("tcgen05") for kernel in program["kernels"])
        for program, case in cases
        if "kernels" in program
        and multiplies_in_tensor_memory(
            target.device,
            case["head_dim"],
            case["rows"] * case["width"] * case["group"],
            codes=bool(case["approximate"]),
        )
    ]
    if slow:
        name = "mosaic_gpu: passes of many queries that do not multiply in tensor memory"
        yield Goal(name, sum(slow), 0, at_most=True)


def kernels_text(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            f"{r['backend']}: {r['name']}",
            k["name"],
            str(k["registers"]),
            str(k["spill_bytes"]),
            str(k["static_shared_bytes"]),
            str(k["dynamic_shared_bytes"]),
            *(str(k.get(kind, "-")) for kind in PRODUCTS),  # older results have none
            _under_products(r, k),
        )
        for r in results
        for k in r.get("kernels", [])
    ]
    numbers = "registers", "spilled", "static shared", "dynamic", *PRODUCTS, "under products"
    return table(("block attention", "kernel", *numbers), rows)


def _under_products(result: Mapping[str, Any], kernel: Mapping[str, Any]) -> str:
    """The exponentials of a kernel's loop that are made under a product, of all."""
    if kernel.get("serialized"):
        return "wgmma wait"
    found = result.get("under_products") if kernel.get("wgmma") else None
    return f"{found['under']} of {found['exponentials']}" if found else "-"


def shared_bytes(kernel: Mapping[str, Any]) -> int:
    return kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"]
