"""A pass over a prompt on several GPUs: the products that are computed while sums of layers are sent.

Programs have three layers; the middle one has another before it and after it. Seconds are those of
the roofline (benchmarks/roofline.md): nothing here runs on a GPU.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxshare import Layout
from jaxshare.models.config import ModelConfig
from jaxshare.sharding import make_mesh
from scripts.bench.devices import H200, LLAMA_70B
from scripts.gpu import programs
from scripts.gpu.compiler import Compiler, Program
from scripts.gpu.hlo import collectives, computations, executed, opcode
from scripts.gpu.predicted import Sent

BACKEND = "mosaic_gpu"
MODEL = dataclasses.replace(LLAMA_70B, num_layers=3)
MIDDLE = "layers_1/"
DEVICES = 8
PROMPTS = (2048, 8192)
"""Tokens of a pass."""


def describe(tokens: int) -> dict[str, Any]:
    """The names of a program in the report."""
    name = f"Llama-3.1-70B, a prompt of {tokens}, tensor {DEVICES}"
    return {"backend": BACKEND, "name": name, "tokens": tokens}


def compiled(compiler: Compiler, tokens: int) -> dict[str, Any]:
    """Compiles a pass over one row, and returns what is sent in a layer, and beside what."""
    mesh = make_mesh(tensor=DEVICES, devices=compiler.devices(DEVICES))
    model, params = programs.model_on(MODEL, BACKEND, mesh)
    cache = programs.shapes_on(mesh, model.config, [2 * tokens], jnp.bfloat16)
    one, row = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1,), (1, tokens)))
    layout = programs.shapes(Layout.from_blocks([[0]]))
    arguments = params, row, one, cache, layout
    program = compiler.compile(model.apply, *arguments, mesh=mesh, donate_argnums=3)
    return numbers(program, MODEL)


def numbers(program: Program, config: ModelConfig) -> dict[str, Any]:
    lines = list(executed(computations(program.text)))
    return {
        "sums": [sum_numbers(each, config) for each in sums_of_layer(lines)],
        "temp_bytes": program.temp_bytes,
        "spill_bytes": sum(kernel.spill_bytes for kernel in program.kernels),
    }


class Sum(NamedTuple):
    """A sum over devices: its instruction, and products between its start and its end."""

    line: str
    beside: tuple[str, ...]


def sums_of_layer(lines: Sequence[str]) -> Iterator[Sum]:
    """The sums of the middle layer among all instructions in their order."""
    for i, line in enumerate(lines):
        kind = opcode(line)
        if MIDDLE not in line or not kind.startswith("all-reduce") or kind.endswith("-done"):
            continue
        beside: list[str] = []
        if kind.endswith("-start"):
            name = line.strip().partition(" = ")[0].removeprefix("ROOT ")
            end = next(
                j
                for j, later in enumerate(lines[i:], i)
                if opcode(later).endswith("-done") and re.search(rf"{re.escape(name)}[,)]", later)
            )
            beside = [each for each in lines[i:end] if is_product(each)]
        yield Sum(line, tuple(beside))


def is_product(line: str) -> bool:
    """True for a matrix product by XLA, or by a library that it calls."""
    return "gemm_fusion" in line.partition(" = ")[0] or "__cublas" in line


def sum_numbers(one: Sum, config: ModelConfig) -> dict[str, Any]:
    """The bytes of a sum, its products, and what each takes by itself, in seconds."""
    (sent,) = collectives([one.line])
    over = Sent("all-reduce", sent.bytes).over(DEVICES)
    return {
        "of": "attention" if "/attention/" in one.line else "MLP",
        "bytes": sent.bytes,
        "products": len(one.beside),
        "sending_seconds": over / H200.link + H200.latency,
        "product_seconds": sum(
            product_flops(line, config) / (H200.products * H200.rate) for line in one.beside
        ),
    }


def product_flops(line: str, config: ModelConfig) -> float:
    """The operations of a layer's product on one device, which may be in pieces."""
    result = re.search(r" = \w+\[([\d,]+)\]", line)
    assert result, line
    *_, rows, outputs = map(int, result[1].split(","))  # of each piece of the inputs
    inputs = config.hidden_size
    if "/attention/o" in line:
        inputs = config.num_heads * config.head_dim // DEVICES
    elif "/mlp/down" in line:
        inputs = config.intermediate_size // DEVICES
    return 2.0 * rows * outputs * inputs
