"""Tensor names: where a checkpoint in Hugging Face form has each parameter.

Most parameters are a tensor of their own. Some families fuse projections of one input, so that a
parameter is some rows of a tensor, and some rotate other pairs of entries, so that rows come in
another order.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from jaxshare.models.config import FAMILIES, ModelConfig
from jaxshare.models.layers import Decoder
from jaxshare.models.mla import MLA
from jaxshare.models.mxfp4 import GROUP, packed
from jaxshare.models.packed import part_sizes
from jaxshare.models.quantisation.codes import stacked
from jaxshare.models.quantisation.matching import Quantisation
from jaxshare.models.quantisation.stored import StoredArray, StoredForm
from jaxshare.quantised import QuantisedTensor

Parameter = Shaped[np.ndarray, "..."] | QuantisedTensor
"""A parameter on the host, or rows of one."""

_MODULES = {
    ("embed",): "embed_tokens",
    ("norm",): "norm",
    ("attention_norm",): "input_layernorm",
    ("mlp_norm",): "post_attention_layernorm",
    ("attention",): "self_attn",
    **{("attention", name): f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{("attention", name): f"self_attn.{name}" for name in ("q_norm", "k_norm")},
    **{("mlp", name): f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    ("moe", "router"): "mlp.gate",
    ("moe", "shared_gate"): "mlp.shared_expert_gate",
    **{("moe", name): f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")},
    **{
        ("moe", "shared", name): f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")
    },
}
"""The modules of Llama and Qwen, and of other families where they do not name their own. A star is
the index of an expert; the parameters of experts are stacked."""


_WEIGHT = ".weight"
_SUFFIXES = {"bias": ".bias", "sinks": ".sinks", "choice_bias": ".e_score_correction_bias"}


@dataclasses.dataclass(frozen=True)
class Part:
    """Some rows of a tensor of a checkpoint, or all.

    Attributes:
      name: of the tensor.
      shape: of the whole tensor.
      start, stop: the rows.
      groups: the tensor's rows are so many groups of the same size, and `start` and `stop` are rows
        of each.
      matrix: the one that the rows are of, in a tensor of several; None for a tensor of one.
      step: every so many-th row of a matrix is taken, from the first.
      is_transposed: the rows of a matrix are the tensor's columns.
      scales: the tensor with the scales of this one, if it is in MXFP4 (`jaxshare.models.mxfp4`).
      form: the form of a quantised matrix, for which arrays stand in place of the tensor; `name` and
        `shape` are those of the tensor all the same.
      arrays: those that the checkpoint has, by their names in `form`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    groups: int = 1
    matrix: int | None = None
    step: int = 1
    is_transposed: bool = False
    scales: str = ""
    form: StoredForm | None = None
    arrays: tuple[str, ...] = ()

    @property
    def layer(self) -> str:
        """The name of the layer whose weight the tensor is."""
        return self.name.removesuffix(_WEIGHT)

    @property
    def is_quantised(self) -> bool:
        """True for a part of a quantised tensor."""
        return self.form is not None or bool(self.scales)

    @property
    def first_name(self) -> str:
        """The name of a tensor that the checkpoint has for the part."""
        return self.name if self.form is None else f"{self.layer}.{self.arrays[0]}"

    def taken(self, tensor: Callable[[str], Any]) -> Parameter:
        """Returns the rows; `tensor` gives what stands for a tensor of a file, to be sliced."""
        if self.form is not None:
            arrays = {name: tensor(f"{self.layer}.{name}")[...] for name in self.arrays}
            return self.form.read(arrays, self.shape).map_rows(self._rows)
        if self.matrix is not None:
            one, rows = slice(self.matrix, self.matrix + 1), slice(self.start, self.stop, self.step)
            matrix = tensor(self.name)[one][0]
            if self.scales:
                return packed(matrix[rows], tensor(self.scales)[one][0][rows])
            return (matrix.T if self.is_transposed else matrix)[rows]
        if self.groups == 1:
            return tensor(self.name)[self.start : self.stop]
        return self._rows(tensor(self.name)[:])

    def _rows(self, whole: np.ndarray) -> np.ndarray:
        if self.groups == 1:
            return whole[self.start : self.stop]
        groups = whole.reshape(self.groups, -1, *whole.shape[1:])
        return groups[:, self.start : self.stop].reshape(-1, *whole.shape[1:])


@dataclasses.dataclass(frozen=True)
class RotaryOrder:
    """The order of the rows of a projection to heads whose checkpoint rotates pairs (2 i, 2 i + 1).

    Attributes:
      head_dim: rows of a head.
      rotary_dim: how many of them are rotated.
      start: the first of those.
    """

    head_dim: int
    rotary_dim: int
    start: int = 0

    def read(self, value: Parameter) -> Parameter:
        """Rows in the order of this library, whose pairs are (i, i + rotary_dim / 2)."""
        if isinstance(value, QuantisedTensor):
            return value.map_rows(lambda each: self._ordered(each, self._order()))
        return self._ordered(value, self._order())

    def written(self, value: Shaped[np.ndarray, "rows ..."]) -> Shaped[np.ndarray, "rows ..."]:
        """Rows in the order of the checkpoint."""
        return self._ordered(value, np.argsort(self._order()))

    def _order(self) -> np.ndarray:
        rows, stop = np.arange(self.head_dim), self.start + self.rotary_dim
        before, rotated, after = rows[: self.start], rows[self.start : stop], rows[stop:]
        return np.concatenate([before, rotated[::2], rotated[1::2], after])

    def _ordered(self, value: np.ndarray, order: np.ndarray) -> np.ndarray:
        heads = value.reshape(-1, self.head_dim, *value.shape[1:])
        return heads[:, order].reshape(value.shape)


@dataclasses.dataclass(frozen=True)
class ExpectedTensor:
    """A parameter of the model, and where a checkpoint has it.

    Attributes:
      path: under "params".
      shape: of the parameter.
      parts: the tensor that has it; or several, stacked along a first axis.
      is_stacked: True for parts that are stacked.
      order: of its rows, where the checkpoint's differs.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    is_stacked: bool = False
    order: RotaryOrder | None = None


def tensor_name(path: tuple[str, ...], config: ModelConfig | None = None) -> str:
    """Returns the name in a checkpoint of a parameter.

    Args:
      path: under "params", for example ("layers_0", "attention", "q", "kernel").
      config: of the model; default one of Llama.
    """
    modules, prefix = _modules(config), prefix_of(config)
    *module, leaf = path
    suffix = _SUFFIXES.get(leaf, _WEIGHT)
    if path[0] == "head":
        return f"{prefix}lm_head{suffix}"
    layer = ""
    if path[0].startswith("layers_"):
        layer, *module = f"layers.{path[0].removeprefix('layers_')}.", *module[1:]
    return f"{prefix}model.{layer}{modules[tuple(module)]}{suffix}"


def prefix_of(config: ModelConfig | None) -> str:
    """Returns what the names of a model's tensors begin with in a checkpoint of other parts, too."""
    return "" if config is None else FAMILIES[config.architecture].prefix


def _modules(config: ModelConfig | None) -> Mapping[tuple[str, ...], str]:
    return _MODULES if config is None else {**_MODULES, **FAMILIES[config.architecture].modules}


def expected_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """Returns the parameters of a model, by the names that a checkpoint has for them where each is
    a tensor of its own."""
    expected = {}
    for path, shape in _parameters(config):
        tensor = _located(config, path, shape)
        expected[tensor_name(path, config)] = tensor
    return expected


def _parameters(config: ModelConfig) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The path and shape of each parameter."""
    # One layer of each kind is traced, since a file may name thousands.
    kinds: dict[bool, list[int]] = {}
    for layer, form in enumerate(config.layer_forms):
        kinds.setdefault(form.is_sparse, []).append(layer)
    for number, layers in enumerate(kinds.values()):
        for (first, *rest), shape in _parameters_of_one(config.only(layers[0])):
            if first == "layers_0":
                yield from (((f"layers_{n}", *rest), shape) for n in layers)
            elif number == 0:
                yield (first, *rest), shape


@functools.lru_cache(maxsize=64)
def _parameters_of_one(config: ModelConfig) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
    """The path and shape of each parameter of a model of one layer. To trace it takes a tenth of a
    second and more, and one process may load models of the same config again and again."""

    def parameters(tokens: jax.Array) -> Any:
        return Decoder(config).init(jax.random.key(0), tokens, method=Decoder.causal)

    shapes = jax.eval_shape(parameters, jax.ShapeDtypeStruct((1, 2), jnp.int32))["params"]
    leaves = jax.tree.leaves_with_path(shapes)
    return tuple((tuple(key.key for key in keys), leaf.shape) for keys, leaf in leaves)


def _located(config: ModelConfig, path: tuple[str, ...], shape: tuple[int, ...]) -> ExpectedTensor:
    """The parameter with this path, and its place in a checkpoint."""
    order = _row_order(config, path[-2]) if config.rope_interleaved else None
    if config.mla and path[-2] in ("k_b", "v_b"):
        return ExpectedTensor(path, shape, (_part_of_kv_b(config, config.mla, path, shape),))
    family = FAMILIES[config.architecture]
    if family.stacks_experts and path[1:2] == ("moe",) and path[-2] != "router":
        return _of_all_experts(config, path, shape)
    for name, sizes in part_sizes(config).items():
        if name in family.fused and path[-2] in sizes:
            names = [*sizes]
            start = sum(sizes[part] for part in names[: names.index(path[-2])])
            whole = tensor_name((*path[:-2], name, path[-1]), config)
            rows = sum(sizes.values()), *shape[1:]
            part = Part(whole, rows, start, start + sizes[path[-2]])
            return ExpectedTensor(path, shape, (part,), order=order)
    name = tensor_name(path, config)
    if "*" in name:
        names = [name.replace("*", str(expert)) for expert in range(shape[0])]
        parts = tuple(Part(each, shape[1:], 0, shape[1]) for each in names)
        return ExpectedTensor(path, shape, parts, is_stacked=True)
    return ExpectedTensor(path, shape, (Part(name, shape, 0, shape[0]),), order=order)


def _of_all_experts(
    config: ModelConfig, path: tuple[str, ...], shape: tuple[int, ...]
) -> ExpectedTensor:
    """A parameter of experts whose matrices are in one tensor, transposed, gate and up in turns."""
    *layer, module, leaf = path
    turns = 1 if module == "down" else 2
    name = tensor_name((*layer, "down" if turns == 1 else "gate_up", leaf), config)
    name = name.removesuffix(_WEIGHT).replace(".bias", "_bias")
    rows, is_kernel = shape[1] * turns, leaf == "kernel"
    whole = (shape[0], *shape[2:], rows)
    first, more = int(module == "up"), {"step": turns, "is_transposed": is_kernel}
    parts = tuple(
        Part(name, whole, first, rows, matrix=expert, **more) for expert in range(shape[0])
    )
    return ExpectedTensor(path, shape, parts, is_stacked=True)


def as_stored(
    expected: Mapping[str, ExpectedTensor],
    stored: Mapping[str, Any],
    quantisation: Quantisation | None = None,
) -> dict[str, ExpectedTensor]:
    """Returns the parameters with the places that they have in a checkpoint.

    Args:
      expected: the parameters, where matrices are plain.
      stored: the tensors of the checkpoint, by name, with their `dtype`. Some matrices of experts
        may be in MXFP4.
      quantisation: the settings of quantised matrices.
    """

    def place(part: Part, tensor: ExpectedTensor) -> Part:
        if f"{part.name}_blocks" in stored:
            return _in_mxfp4(part)
        return part if quantisation is None else _quantised(part, tensor, stored, quantisation)

    return {
        name: dataclasses.replace(tensor, parts=tuple(place(part, tensor) for part in tensor.parts))
        for name, tensor in expected.items()
    }


_MOSTLY_PLAIN = frozenset({"head", "router", "shared_gate"})
"""Linear layers that methods leave alone, whatever their settings say."""


def _quantised(
    part: Part, tensor: ExpectedTensor, stored: Mapping[str, Any], quantisation: Quantisation
) -> Part:
    """The place of a part whose matrix is quantised, if it is."""
    *_, module, leaf = tensor.path
    if leaf not in ("kernel", "embedding") or part.matrix is not None:
        return part
    form = quantisation.form(part.layer, "Linear" if leaf == "kernel" else "Embedding")
    if form is None:
        return part
    is_missing = part.name not in stored and quantisation.is_quantised(part.layer)
    should_be = is_missing and leaf == "kernel" and module not in _MOSTLY_PLAIN
    if not should_be and not form.is_stored(part.layer, stored):
        return part
    form = form.for_layer(part.layer, stored)
    arrays = form.present(part.layer, part.shape, stored)
    return dataclasses.replace(part, form=form, arrays=arrays)


def _in_mxfp4(part: Part) -> Part:
    """The place of a part whose matrix is in MXFP4, which is not transposed."""
    matrices, width, rows = part.shape
    blocks, scales = f"{part.name}_blocks", f"{part.name}_scales"
    shape = matrices, rows, -(-width // GROUP), GROUP // 2
    return dataclasses.replace(part, name=blocks, shape=shape, is_transposed=False, scales=scales)


def _row_order(config: ModelConfig, module: str) -> RotaryOrder | None:
    """The order of the rows of a projection whose heads are rotated; None for others."""
    rotary_dim, mla = config.rope.rotary_dim, config.mla
    if mla and module in ("q", "q_b"):
        return RotaryOrder(mla.query_dim, rotary_dim, mla.nope_dim)
    if mla and module == "kv_a":
        return RotaryOrder(mla.cached_dim, rotary_dim, mla.kv_lora_rank)
    return RotaryOrder(config.head_dim, rotary_dim) if module in ("q", "k") else None


def _part_of_kv_b(
    config: ModelConfig, mla: MLA, path: tuple[str, ...], shape: tuple[int, ...]
) -> Part:
    """The rows of a checkpoint's kv_b_proj that are k_b or v_b: of each head those that make its
    key, and then those that make its value."""
    name = tensor_name((*path[:-2], "kv_b", path[-1]), config)
    size, first = mla.nope_dim + mla.value_dim, path[-2] == "k_b"
    start, stop = (0, mla.nope_dim) if first else (mla.nope_dim, size)
    return Part(name, (config.num_heads * size, *shape[1:]), start, stop, config.num_heads)


def kept_dtype(path: tuple[str, ...], dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of a parameter in a model of `dtype`: float32 for a bias by which experts
    are chosen, since rounding it would choose others."""
    return jnp.dtype(jnp.float32) if path[-1] == "choice_bias" else dtype


def stored_arrays(expected: Mapping[str, ExpectedTensor]) -> dict[str, StoredArray]:
    """Returns the tensors that a checkpoint must hold, by name."""
    found: dict[str, StoredArray] = {}
    for part in (part for tensor in expected.values() for part in tensor.parts):
        if part.form is not None:
            arrays = part.form.arrays(part.shape)
            found |= {f"{part.layer}.{name}": arrays[name] for name in part.arrays}
        elif part.scales:
            found[part.name] = StoredArray((part.shape,), ("U8",))
            found[part.scales] = StoredArray((part.shape[:-1],), ("U8",))
        else:
            found[part.name] = StoredArray((part.shape,))
    return found


def stored_shapes(expected: Mapping[str, ExpectedTensor]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor that a checkpoint must hold, by name."""
    return {name: array.shapes[0] for name, array in stored_arrays(expected).items()}


def assembled(tensor: ExpectedTensor, read: Callable[[Part], Any]) -> Parameter:
    """Returns a parameter of a checkpoint; `read` gives rows of its tensors.

    Raises:
      ValueError: quantised matrices of experts that cannot be stacked.
    """
    if tensor.is_stacked and tensor.parts[0].is_quantised:
        return stacked(len(tensor.parts), (read(part) for part in tensor.parts))
    value = read(tensor.parts[0])
    if tensor.is_stacked:
        value = np.asarray(value)
        # One part after the other, so that no more than one is held beside the parameter.
        whole = np.empty(tensor.shape, value.dtype)
        whole[0] = value
        for index, part in enumerate(tensor.parts[1:], start=1):
            value = np.asarray(read(part))
            if value.dtype != whole.dtype:
                whole = whole.astype(np.float32)  # which holds the numbers of all dtypes
            whole[index] = value
        return whole
    return value if tensor.order is None else tensor.order.read(value)


def taken_apart(
    expected: Mapping[str, ExpectedTensor], values: Callable[[str], Shaped[np.ndarray, "..."]]
) -> Iterator[tuple[str, Shaped[np.ndarray, "..."]]]:
    """Yields (name, value) of each tensor of a checkpoint.

    Args:
      expected: from `expected_tensors`.
      values: gives the parameter of one of its names.
    """
    places: dict[str, list[tuple[str, int, Part]]] = {}
    for name, tensor in expected.items():
        for index, part in enumerate(tensor.parts):
            places.setdefault(part.name, []).append((name, index, part))
    last: tuple[str, np.ndarray] | None = None
    # Those of one parameter follow each other, so that it is read once.
    for stored, found in sorted(places.items(), key=lambda place: min(place[1])[:2]):
        rows, whole = [], None
        for name, index, part in sorted(found, key=lambda place: place[2].start):
            if last is None or last[0] != name:
                last = name, values(name)
            tensor, value = expected[name], last[1]
            value = value[index] if tensor.is_stacked else value
            if part.matrix is not None:
                whole = whole if whole is not None else np.empty(part.shape, value.dtype)
                matrix = whole[part.matrix].T if part.is_transposed else whole[part.matrix]
                matrix[part.start : part.stop : part.step] = value
                continue
            value = value if tensor.order is None else tensor.order.written(value)
            rows.append(value.reshape(part.groups, -1, *value.shape[1:]))
        if whole is None:
            whole = rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)
        yield stored, whole.reshape(found[0][2].shape)
