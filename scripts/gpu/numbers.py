"""The numbers of a compiled program: what it does to the cache, launches, and what it sends."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

from scripts.gpu.compiler import Compiler, Program
from scripts.gpu.hlo import (
    collectives,
    computations,
    executed,
    kernel_calls,
    large_results,
    launches,
    opcode,
)
from scripts.gpu.report import LARGE
from scripts.gpu.thunks import HostWork, read_list


def step_numbers(program: Program, decoding: Any) -> dict[str, Any]:
    """The effect of a decode step on the cache, and launches of a pass; bytes of each device."""
    return {
        "whole_cache": dict(large_results(program.text, decoding.arena_elements // LARGE)),
        "temp_bytes": program.temp_bytes,
        "layer_bytes": decoding.layer_bytes,
        "aliased_bytes": program.alias_bytes,
        "cache_bytes": decoding.cache_bytes,
        "launches": pass_launches(program.text, decoding.layers),
        "host": host_work(program),
        "spill_bytes": sum(kernel.spill_bytes for kernel in program.kernels),
    }


def sampling_numbers(program: Program) -> dict[str, Any]:
    """Launches of a draw, its kernel, and the memory that it takes beside its arguments."""
    return {
        "host": host_work(program),
        "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
        "temp_bytes": program.temp_bytes,
    }


def host_work(program: Program) -> dict[str, int]:
    """The work of the host in a dispatch."""
    return dataclasses.asdict(HostWork.of(read_list(program.launches)))


def device_numbers(program: Program, decoding: Any) -> dict[str, Any]:
    """The further numbers of a decode step on several devices: the collectives of a pass, and
    kernels of ours a layer."""
    turn = turn_of_layers(program.text, decoding.layers)
    sent = collectives(executed(computations(program.text)))
    of_layers = Counter(
        str(one) for one in collectives(turn) if of_layer(one.line, decoding.layers)
    )
    return {
        **step_numbers(program, decoding),
        "sent": {
            "layer": {kind: number / decoding.layers for kind, number in of_layers.items()},
            "outside": dict(Counter(str(one) for one in collectives(turn)) - of_layers),
            "largest_of_layers_keys": max((one.elements for one in sent), default=0)
            / decoding.arena_elements,
        },
        "kernel_calls": sum(of_layer(line, decoding.layers) for line in kernel_calls(turn))
        / decoding.layers,
        "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
    }


def plan_numbers(
    compiler: Compiler, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> dict[str, Any]:
    program = compiler.compile(function, *arguments)
    lines = list(executed(computations(program.text)))
    return {
        "launches": len(launches(lines)),
        "loops": sum(opcode(line) == "while" for line in lines),
    }


def pass_launches(text: str, layers: int) -> dict[str, int | float]:
    """Launches of a turn, those of loops inside it counted once: of one layer, the middle one, and
    of all that belongs to no layer, the plan's among them. What layers share is laid to the first
    of them, and so counts as outside."""
    turn = turn_of_layers(text, layers)
    counts = [sum(f"layers_{i}/" in line for line in launches(turn)) for i in range(layers)]
    layer = statistics.median(counts[1:] or counts)
    return {
        "layer": layer,
        "outside": len(launches(turn)) - layer * layers,
        "loops": sum(opcode(line) == "while" for line in turn),
    }


def turn_of_layers(text: str, layers: int) -> list[str]:
    """The instructions of one turn of the loop that holds the layers."""
    found = computations(text)
    loops = (
        body
        for line in found["ENTRY"]
        if opcode(line) == "while"
        for body in [line.partition("body=%")[2].split(",")[0].strip()]
    )
    turns = [list(executed(found, body)) for body in loops]
    return max(turns, key=lambda turn: sum(of_layer(line, layers) for line in launches(turn)))


def of_layer(line: str, layers: int) -> bool:
    """True if an instruction belongs to a layer."""
    return any(f"layers_{i}/" in line for i in range(layers))
