"""Decode steps of published models with experts on eight GPUs: what is compiled, and what a
configuration predicts (`scripts.gpu.predicted`), side by side.

Programs have two layers of each kind. A model's other layers are those again: the same kernels, the
same collectives, and temporary memory that the layers use one after the other.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from jaxshare.models.config import ModelConfig
from jaxshare.models.tensor_parallel import param_path
from jaxshare.quantised import is_quantised
from jaxshare.sharding import make_mesh
from scripts.bench.devices import H200
from scripts.gpu import moe_models, predicted, programs
from scripts.gpu.compiler import Compiler, Program
from scripts.gpu.hlo import (
    Collective,
    collectives,
    kernel_calls,
    large_results,
    launches,
    opcode,
)
from scripts.gpu.moe_models import BACKEND, DEVICES, Published

STEP = programs.QUICK_STEPS[1]
"""64 branches of a shared context."""
RATES = predicted.Rates(H200.memory * H200.copies, H200.link, H200.latency, H200.launch)


def describe(model: Published) -> dict[str, Any]:
    """The names of a program in the report."""
    packing = "bfloat16" if model.packing is None else model.packing.format
    return {
        "backend": BACKEND,
        "name": f"{model.name}, experts in {packing}, tensor {DEVICES}",
        "rows": STEP.rows,
        "layers": model.config.num_layers,
    }


def compiled(
    compiler: Compiler, model: Published, layers: Sequence[int] | None = None
) -> dict[str, Any]:
    """Compiles the step of a model with some of its layers, by default two of each kind, and
    returns all numbers."""
    mesh = make_mesh(tensor=DEVICES, devices=compiler.devices(DEVICES))
    kept = tuple(moe_models.compiled_layers(model.config) if layers is None else layers)
    config = moe_models.with_layers(model.config, kept)
    decoding = programs.decoding(STEP, (BACKEND, "xla"), config, mesh=mesh)
    params, *rest = decoding.arguments
    decoding = dataclasses.replace(
        decoding, arguments=(moe_models.packed_experts(params, model.packing), *rest)
    )
    program = compiler.compile(
        decoding.function, *decoding.arguments, mesh=mesh, donate_argnums=(1,)
    )
    return numbers(program, decoding, model, config)


def numbers(
    program: Program, decoding: programs.Decoding, model: Published, config: ModelConfig
) -> dict[str, Any]:
    """The numbers of a compiled step of `config`, those of all layers of the model, and those that
    are predicted."""
    from scripts.gpu.numbers import turn_of_layers

    turn = turn_of_layers(program.text, config.num_layers)
    kinds = predicted.kinds(config)
    # The last layer of a kind has what each of them has, and nothing that they share.
    last = {str(kind): layer for layer, kind in enumerate(kinds)}
    by_kind = {
        kind: [line for line in turn if f"layers_{at}/" in line] for kind, at in last.items()
    }
    per_layer = {kind: launches_by_what(lines) for kind, lines in by_kind.items()}
    number = Counter(str(kind) for kind in predicted.kinds(model.config))
    inside = sum(
        f"layers_{i}/" in line for i in range(config.num_layers) for line in launches(turn)
    )
    # Those that layers share are laid to the first of a kind.
    own = sum(sum(per_layer[str(kind)].values()) for kind in kinds)
    outside = len(launches(turn)) - own
    held = _held(decoding.arguments[0])
    cache = decoding.layer_bytes
    weights = held[""] + sum(count * held[str(last[kind])] for kind, count in number.items())
    outside_sent = [one for one in collectives(turn) if "layers_" not in one.line]
    return {
        "measured": {
            "weight_bytes": weights,
            "cache_bytes": cache * model.config.num_layers,
            "temp_bytes": program.temp_bytes,
            "other_bytes": program.argument_bytes - sum(held.values()) - cache * config.num_layers,
            "output_bytes": program.output_bytes,
            "aliased": program.alias_bytes / decoding.cache_bytes,
            "layer": per_layer,
            "attention_by_xla": not any(
                "block_attention" in kernel.name for kernel in program.kernels
            ),
            "of_attention": {
                kind: sum("Layer/attention/" in line for line in launches(lines))
                for kind, lines in by_kind.items()
            },
            "outside": outside,
            "shared_by_layers": inside - own,
            "loops_of_layers": sum(
                opcode(line) == "while" for lines in by_kind.values() for line in lines
            ),
            "launches": outside + sum(n * sum(per_layer[k].values()) for k, n in number.items()),
            "sent": {kind: _sent(collectives(lines)) for kind, lines in by_kind.items()},
            "sent_outside": _sent(outside_sent),
            "copies_of_experts": _copies_of_experts(program.text, decoding.arguments[0]),
            "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
            "spill_bytes": sum(kernel.spill_bytes for kernel in program.kernels),
        },
        "predicted": predict(model, outside),
    }


def predict(model: Published, outside: int) -> dict[str, Any]:
    """Predicts from a configuration; launches outside of layers, mostly of sampling, are given."""
    config, rows = model.config, STEP.rows
    cached = predicted.cached_bytes(config, DEVICES, programs.HISTORY, STEP.own, rows)
    kinds = predicted.kinds(config)
    by_kind = {str(kind): predicted.launches(config, kind) for kind in kinds}
    sent = predicted.sent_by_layer(config, rows)
    return {
        "weight_bytes": predicted.weight_bytes(config, DEVICES, model.packing),
        "weight_bytes_in_bfloat16": predicted.weight_bytes(config, DEVICES),
        "cache_bytes": cached["held"],
        "layer": by_kind,
        "of_attention": predicted.attention_launches(config),
        "launches": outside + sum(sum(by_kind[str(kind)].values()) for kind in kinds),
        "sent": {kind: [each._asdict() for each in sent] for kind in by_kind},
        "sent_outside": [each._asdict() for each in predicted.sent_outside(config, rows)],
        "read_bytes": predicted.read_bytes(config, DEVICES, rows, model.packing),
        "read_cache_bytes": cached["read"],
        "seconds": predicted.step_seconds(
            config, DEVICES, rows, cached["read"], RATES, model.packing, outside
        ),
    }


def _held(params: Any) -> dict[str, int]:
    """Bytes that a device holds of each layer, and under "" of all else."""
    found: Counter[str] = Counter({"": 0})
    for keys, leaf in jax.tree.leaves_with_path(params):
        name = param_path(keys)[1]
        layer = name.removeprefix("layers_") if name.startswith("layers_") else ""
        found[layer] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return dict(found)


def launches_by_what(lines: Sequence[str]) -> dict[str, int]:
    """Launches by what they are: kernels of ours, products of XLA, collectives, copies, others."""
    ours = {*kernel_calls(lines)}

    def what(line: str) -> str:
        kind, name = opcode(line).removesuffix("-start"), line.partition(" = ")[0]
        if line in ours:
            return "kernels of ours"
        if "all-" in kind or kind.startswith(("reduce-scatter", "collective")):
            return kind
        if kind == "copy" or "transpose" in name:
            return "copies"
        return "products" if "gemm" in name or "__cublas" in line else "others"

    return dict(sorted(Counter(what(line) for line in launches(lines)).items()))


def _sent(found: Sequence[Collective]) -> list[dict[str, Any]]:
    """Collectives of a kind and size together."""
    counted = Counter((one.kind, one.bytes) for one in found)
    return [{"kind": k, "bytes": b, "times": n} for (k, b), n in sorted(counted.items())]


def _copies_of_experts(text: str, params: Any) -> dict[str, int]:
    """Instructions that write at least as many numbers to new memory as half of the matrices of one
    kind, gate for example, that a device has of a layer."""
    found = jax.tree.leaves_with_path(params, is_leaf=is_quantised)
    matrices = [leaf for keys, leaf in found if len(leaf.shape) == 3 and "moe" in param_path(keys)]
    held = max(math.prod(leaf.shape) for leaf in matrices) // DEVICES
    return dict(large_results(text, held // 2))
