"""Decode steps of published models with quantised weights on one GPU: what is compiled, and what it
reads, writes and keeps.

Programs have two layers, as those of `scripts.gpu.expert_steps`. All linear layers but the head are
quantised, as checkpoints have it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare.models.config import ModelConfig
from jaxshare.models.tensor_parallel import param_path
from jaxshare.pallas.dense_products import gpu_dense_product
from jaxshare.pallas.dense_products_mosaic_gpu import check_served
from jaxshare.pallas.dense_products_triton import DenseTiles, choose_tiles
from jaxshare.pallas.device import H200
from jaxshare.pallas.matrix_codes import in_arrays
from jaxshare.pallas.product_tiles import ProductTiles, choose_product_tiles
from jaxshare.quantised import FORMATS, QuantisedTensor, is_quantised
from scripts.gpu import predicted, programs
from scripts.gpu.compiler import Compiler, Program
from scripts.gpu.dense_models import LLAMA_8B, QWQ_32B
from scripts.gpu.expert_steps import RATES, launches_by_what
from scripts.gpu.hlo import (
    kernel_calls,
    large_results,
    launches,
    operand_bytes,
)
from scripts.gpu.sass import product_loop

MODELS: Mapping[str, ModelConfig] = {"Llama-3.1-8B": LLAMA_8B, "QwQ-32B": QWQ_32B}
STEPS = (programs.Step("1 branch", 1, "shared", 512, 1, False), *programs.QUICK_STEPS)
"""One row, 4 workers, and 64 branches."""
HISTORY = 32768
"""Tokens of the block that all rows see."""
BACKEND = "mosaic_gpu"


class PackedForm(NamedTuple):
    """The way in which a checkpoint has its matrices: format, inputs that share a scale (None for
    all), dtypes of scales and of zeros."""

    name: str
    format: str
    group: int | None
    scale: Any
    zero: Any = None


FORMS = (
    PackedForm("int4, groups of 128 with zeros", "int4", 128, jnp.float16, jnp.int8),
    PackedForm("int8, a scale a row", "int8", None, jnp.float32),
    PackedForm("fp8, blocks of 128", "fp8", 128, jnp.float32),
)
"""As AWQ, compressed-tensors, and DeepSeek and Qwen publish them."""
ROWS = (1, 4, 64, 256, 2048)
"""Of products that are compiled alone."""
KERNELS = ("mosaic_gpu", "triton")
"""Of products that are compiled alone, with each."""


def packed(shape: tuple[int, ...], form: PackedForm, sharding: Any = None) -> QuantisedTensor:
    """The shapes of a quantised matrix."""
    kind, (*lead, inputs) = FORMATS[form.format], shape
    groups = 1 if form.group is None else inputs // form.group

    def of(number: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((*lead, number), dtype, sharding=sharding)

    return QuantisedTensor(
        of(inputs * kind.bits // 8, kind.storage),
        of(groups, form.scale),
        None if form.zero is None else of(groups, form.zero),
        format=form.format,
        dtype=np.dtype(jnp.bfloat16),
    )


def packed_layers(params: Any, form: PackedForm) -> Any:
    """The shapes of parameters with the matrices of all layers quantised."""

    def map_leaf(keys: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        path = param_path(keys)
        in_layer = any(part.startswith("layers_") for part in path)
        return packed(leaf.shape, form, leaf.sharding) if in_layer and leaf.ndim == 2 else leaf

    return jax.tree.map_with_path(map_leaf, params)


def describe(name: str, form: PackedForm, step: programs.Step) -> dict[str, Any]:
    """The names of a program in the report."""
    return {
        "backend": BACKEND,
        "name": f"{name}, {form.name}, {step.name}",
        "rows": step.rows,
        "layers": MODELS[name].num_layers,
    }


def describe_product(backend: str, form: PackedForm, rows: int) -> dict[str, Any]:
    return {"backend": backend, "name": f"product, {form.name}, {rows} rows", "rows": rows}


def compiled_product(
    compiler: Compiler, backend: str, form: PackedForm, rows: int
) -> dict[str, Any]:
    """Compiles the product of gate and up of Llama-3.1-8B alone, by one kernel."""
    shape = (2 * LLAMA_8B.intermediate_size, LLAMA_8B.hidden_size)
    x, matrix = jax.ShapeDtypeStruct((rows, shape[1]), jnp.bfloat16), packed(shape, form)
    program = compiler.compile(
        lambda x, kernel: gpu_dense_product(x, kernel, jnp.bfloat16, (backend,)), x, matrix
    )
    loop = product_loop(compiler.ptxas, program.ptx)
    issued = loop.per_number * matrix.size / ISSUED
    return {
        "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
        "temp_bytes": program.temp_bytes,
        "matrix_in_bfloat16": 2 * math.prod(shape),
        "loop": {**loop._asdict(), "per_number": loop.per_number},
        "predicted": {
            **_product_seconds(matrix, rows, backend),
            # A block of rows makes all numbers anew.
            "instructions": issued * -(-rows // tiles_of(matrix, rows, backend).rows),
        },
    }


def compiled(
    compiler: Compiler, name: str, form: PackedForm, step: programs.Step
) -> dict[str, Any]:
    """Compiles the step of a model with two of its layers, and returns all numbers."""
    config = MODELS[name]
    cut = dataclasses.replace(config, num_layers=2)
    decoding = programs.decoding(step, (BACKEND, "xla"), cut, history=HISTORY)
    params, *rest = decoding.arguments
    params = packed_layers(params, form)
    decoding = dataclasses.replace(decoding, arguments=(params, *rest))
    program = compiler.compile(decoding.function, *decoding.arguments, donate_argnums=(1,))
    return numbers(program, decoding, config, step, form)


def numbers(
    program: Program,
    decoding: programs.Decoding,
    config: ModelConfig,
    step: programs.Step,
    form: PackedForm,
) -> dict[str, Any]:
    """The numbers of a compiled step, those of all layers of the model, and a roofline's."""
    from scripts.gpu.numbers import turn_of_layers

    turn = turn_of_layers(program.text, decoding.layers)
    last = [line for line in turn if f"layers_{decoding.layers - 1}/" in line]
    own = launches_by_what(last)
    outside = len(launches(turn)) - decoding.layers * sum(own.values())
    read = matrix_reads(program.text, last, form)
    params = decoding.arguments[0]
    matrices = matrices_of(params, decoding.layers - 1)
    packed_bytes = sum(each.nbytes for each in matrices)
    other = _bytes(params) - sum(each.nbytes for each in matrices_of(params))
    smallest = min(each.size for each in matrices)
    all_launches = outside + config.num_layers * sum(own.values())
    return {
        "measured": {
            "packed_bytes": packed_bytes * config.num_layers,
            "read_bytes": read["by_kernel"] * config.num_layers,
            "read_otherwise": read["otherwise"],
            "other_weight_bytes": other,
            "temp_bytes": program.temp_bytes,
            "largest_matrix_in_bfloat16": 2 * max(each.size for each in matrices),
            "large_writes": dict(large_results(program.text, smallest // 2)),
            "aliased": program.alias_bytes / decoding.cache_bytes,
            "layer": own,
            "outside": outside,
            "launches": all_launches,
            "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
            "spill_bytes": sum(kernel.spill_bytes for kernel in program.kernels),
        },
        "predicted": predict(config, step, matrices, all_launches),
    }


def predict(
    config: ModelConfig,
    step: programs.Step,
    matrices: Sequence[QuantisedTensor],
    launched: int,
) -> dict[str, Any]:
    """Predicts the time of a step where nothing overlaps (benchmarks/roofline.md).

    Args:
      config, step: of the model.
      matrices: of one layer.
      launched: kernels of a step.
    """
    layers, rows = config.num_layers, step.rows
    products = [_product_seconds(each, rows) for each in matrices]
    head = config.vocab_size * config.hidden_size * predicted.BYTES
    plain = sum(each.size for each in matrices) * predicted.BYTES * layers
    cached = predicted.cached_bytes(config, 1, HISTORY, step.own, rows)["read"]
    rest = {
        "head": head / RATES.copies,
        "cache": cached / RATES.copies,
        "launches": launched * RATES.launch,
    }
    parts = {
        "weights": layers * sum(each["memory"] for each in products),
        "waiting for rows": layers * sum(max(each.values()) - each["memory"] for each in products),
        **rest,
    }
    return {
        "seconds": {**parts, "all": sum(parts.values())},
        "seconds_in_bfloat16": plain / RATES.copies + sum(rest.values()),
        "bytes_in_bfloat16": plain,
    }


LEVEL_2, PRODUCTS = 5.5e12, 712e12
"""Bytes/s of the level-2 cache, and FLOP/s of large products (benchmarks/roofline.md)."""
ISSUED = H200.multiprocessors * 4 * 32 * 1.75e9
"""Instructions of threads that all multiprocessors issue in a second, at most."""


def tiles_of(
    matrix: QuantisedTensor, rows: int, backend: str = BACKEND
) -> ProductTiles | DenseTiles:
    """The tiles of a product in the kernel of a backend, or in that which serves it instead."""
    arguments = rows, matrix.shape[0], in_arrays(matrix)[0], matrix.codes.shape[1], H200
    if backend == "mosaic_gpu":
        try:
            check_served(H200, arguments[2], matrix)
            return choose_product_tiles(*arguments)
        except NotImplementedError:
            pass
    return choose_tiles(*arguments)


def _product_seconds(
    matrix: QuantisedTensor, rows: int, backend: str = BACKEND
) -> dict[str, float]:
    """The times that each part of the GPU takes for a product: memory, level-2 cache, matrix
    units."""
    outputs, inputs = matrix.shape
    tiles = tiles_of(matrix, rows, backend)
    blocks = -(-rows // tiles.rows), -(-outputs // tiles.outputs)
    read = blocks[1] * rows * inputs * 2 + blocks[0] * matrix.nbytes
    # Sums of pieces are written and read again.
    sums = 2 * tiles.pieces * rows * outputs * 4 if tiles.pieces > 1 else 0
    return {
        "memory": matrix.nbytes / RATES.copies,
        "level 2": (read + sums) / LEVEL_2,
        "matrix units": 2 * math.prod(blocks) * tiles.rows * tiles.outputs * inputs / PRODUCTS,
    }


def matrix_reads(text: str, lines: Sequence[str], form: PackedForm) -> dict[str, int]:
    """Bytes of matrices that a layer's instructions read: our kernels, and all others of arrays in
    the dtype of codes."""
    names = {"int8": "s8", "uint8": "u8", "float8_e4m3fn": "f8e4m3fn"}
    codes = names[FORMATS[form.format].storage.name]
    found = operand_bytes(text)
    ours = [line for line in kernel_calls(lines) if "dense_products" in line]
    # The first operand has the rows.
    by_kernel = sum(size for line in ours for _, size in found(line)[1:])
    others = [line for line in launches(lines) if line not in ours]
    otherwise = sum(size for line in others for dtype, size in found(line) if dtype == codes)
    return {"by_kernel": by_kernel, "otherwise": otherwise}


def matrices_of(params: Any, layer: int | None = None) -> list[QuantisedTensor]:
    found = jax.tree.leaves_with_path(params, is_leaf=is_quantised)
    return [
        leaf
        for keys, leaf in found
        if is_quantised(leaf) and (layer is None or f"layers_{layer}" in param_path(keys))
    ]


def _bytes(params: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
