"""Calibration on a text: the inputs of linear layers, and how they are scaled before rounding.

Inputs that are large make the errors of their weights large. Those weights are made larger before
they are rounded and the inputs smaller by the same factor (AWQ, Lin et al. 2023), where whatever
makes the inputs can make them smaller: the scale of a norm, the rows of `v` and of `up`. So the model
needs nothing more when it runs. Factors are powers of two, which change no bits of what they multiply.

Axis letters: R rows, T tokens of a row, M model dim, N tokens, I inputs, O outputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxshare.models.causal_attention import causal_attention
from jaxshare.models.config import LayerForm, ModelConfig
from jaxshare.models.decoder_layer import Layer
from jaxshare.models.linear import INPUTS
from jaxshare.models.quantisation.rounding import Rounding, rounded

Path = tuple[str, ...]
"""Of a module in a layer, for example ("attention", "q")."""
ROWS = 4
"""Rows of a text that are computed at once."""
_SAMPLES = 256
"""Inputs of a layer by which factors are chosen."""
_EXPONENTS = tuple(i / 10 for i in range(10))
"""Of the mean magnitude of an input; 0 leaves all as they are."""
_MOST_FACTOR = 2.0**10


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of one matrix.

    Attributes:
      squares: the mean square of each input.
      sample: some of the inputs.
    """

    squares: Float[np.ndarray, " I"]
    sample: Float[np.ndarray, "N I"]

    @classmethod
    def of(cls, seen: Float[np.ndarray, "N I"]) -> "Inputs":
        """Makes those of all inputs that were seen."""
        wide = seen.astype(np.float32)
        step = max(1, -(-len(wide) // _SAMPLES))
        return cls(np.mean(wide * wide, axis=0), wide[::step])

    @classmethod
    def joined(cls, parts: Sequence["Inputs"]) -> "Inputs":
        """Makes one of several of the same number of inputs."""
        sample = np.concatenate([part.sample for part in parts])
        step = max(1, -(-len(sample) // _SAMPLES))
        return cls(np.mean([part.squares for part in parts], axis=0), sample[::step])

    def divided(self, factors: Float[np.ndarray, " I"]) -> "Inputs":
        """The inputs divided by factors."""
        return Inputs(self.squares / factors**2, self.sample / factors)


Seen = dict[Path, list[Inputs]]
"""By the module: one for its matrix, or one for that of each expert."""


@functools.partial(jax.jit, static_argnames=("config", "form", "watched"))
def _run(
    config: ModelConfig,
    form: LayerForm,
    params: Mapping[str, Any],
    x: Float[Array, "R T M"],
    watched: bool,
) -> tuple[Float[Array, "R T M"], Mapping[str, Any]]:
    def attend(q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
        with jax.numpy_dtype_promotion("standard"):  # of scores in bfloat16 and a mask in float32
            return causal_attention(q, k, v, sinks, config, form)

    layer = Layer(config, form=form)
    if not watched:
        out: Any = layer.apply({"params": params}, x, attend)
        return out, {}
    out, kept = layer.apply({"params": params}, x, attend, mutable=[INPUTS])
    return out, kept[INPUTS]


def run_layer(
    config: ModelConfig,
    form: LayerForm,
    params: Mapping[str, Any],
    states: Float[np.ndarray, "R T M"],
    *,
    watched: bool = False,
) -> tuple[Float[np.ndarray, "R T M"], Seen]:
    """Computes a layer of whole texts, some rows at a time.

    Args:
      config: of the model.
      form: of the layer.
      params: of the layer.
      states: that it gets.
      watched: keep what its linear layers get.

    Returns:
      The states after it, and what its linear layers got.
    """
    outs, seen = [], dict[Path, list[list[Inputs]]]()
    for start in range(0, len(states), ROWS):
        out, kept = _run(config, form, params, states[start : start + ROWS], watched)
        outs.append(np.asarray(out))
        for path, found in _inputs_of(kept):
            seen.setdefault(path, []).append(found)
    joined = {path: [*map(Inputs.joined, zip(*parts, strict=True))] for path, parts in seen.items()}
    return np.concatenate(outs), joined


def _inputs_of(kept: Mapping[str, Any]) -> Iterator[tuple[Path, list[Inputs]]]:
    """The inputs of each module, from all that modules have kept in one pass."""
    for keys, (found,) in jax.tree.leaves_with_path(kept, is_leaf=lambda x: isinstance(x, tuple)):
        *module, name = (key.key for key in keys)
        if name != "experts":
            yield tuple(module), [Inputs.of(np.asarray(found).reshape(-1, found.shape[-1]))]
            continue
        rows, hidden, sizes = (np.asarray(each) for each in found)
        ends = np.cumsum(sizes)
        for part, values in (("gate", rows), ("up", rows), ("down", hidden)):
            of_each = np.split(values[: ends[-1]], ends[:-1])
            # An expert that has seen less than a few tokens is taken to see what the others do.
            common = Inputs.of(values[: ends[-1]])
            few = _SAMPLES // 16
            each = [Inputs.of(one) if len(one) >= few else common for one in of_each]
            yield (*module, part), each


Weights = dict[Path, np.ndarray]
"""The parameters of a layer by their paths, for example ("attention", "q", "kernel")."""


def scale_inputs(
    weights: Weights,
    seen: Seen,
    config: ModelConfig,
    rounding: Rounding,
    fixed: Callable[[Path], bool],
) -> None:
    """Scales inputs of a layer's matrices where that makes the error of rounded ones smaller.

    Changes `weights` and `seen`; the layer computes what it did.

    Args:
      weights: of the layer.
      seen: what its modules get.
      config: of the model.
      rounding: how matrices will be rounded.
      fixed: says of a path that its matrix stays plain.
    """
    for maker, readers, heads in _chains(weights, config):
        readers = [path for path in readers if (*path, "kernel") in weights]
        if readers and maker in weights and all(path in seen for path in readers):
            _scale(weights, seen, maker, readers, heads, config, rounding, fixed)


def _chains(weights: Weights, config: ModelConfig) -> Iterator[tuple[Path, list[Path], int]]:
    """(parameter that makes inputs, modules that read them, how many query heads read one kv head)
    of a layer, where the parameter can be divided by factors."""
    dtype = weights["attention", "o", "kernel"].dtype
    # 1 + scale cannot be divided without rounding the scale anew.
    divisible = not config.norm_adds_one or dtype == np.float32
    if divisible and config.norm_placement != "post":
        first = [("attention", name) for name in ("q", "k", "v", "q_a", "kv_a")]
        yield ("attention_norm", "scale"), first, 1
        names = [("mlp", "gate"), ("mlp", "up")]
        names += [("moe", name) for name in ("gate", "up", "router", "shared_gate")]
        names += [("moe", "shared", name) for name in ("gate", "up")]
        yield ("mlp_norm", "scale"), names, 1
    if config.mla:
        yield ("attention", "q_a_norm", "scale"), [("attention", "q_b")], 1
    else:
        groups = config.num_heads // config.num_kv_heads
        yield ("attention", "v", "kernel"), [("attention", "o")], groups
    yield ("mlp", "up", "kernel"), [("mlp", "down")], 1
    yield ("moe", "shared", "up", "kernel"), [("moe", "shared", "down")], 1
    if config.moe and not config.moe.swiglu_limit:
        yield ("moe", "up", "kernel"), [("moe", "down")], 1


def _scale(
    weights: Weights,
    seen: Seen,
    maker: Path,
    readers: list[Path],
    heads: int,
    config: ModelConfig,
    rounding: Rounding,
    fixed: Callable[[Path], bool],
) -> None:
    """Scales the inputs that one parameter makes."""
    if weights[maker].ndim == 3:  # each expert makes its own
        for expert, inputs in enumerate(seen[readers[0]]):
            kernel = weights[*readers[0], "kernel"][expert]
            factors = _factors([(kernel, inputs)], inputs.squares, rounding)
            weights[*readers[0], "kernel"][expert] = kernel * factors
            seen[readers[0]][expert] = inputs.divided(factors)
            _divide(weights, maker, factors, expert)
        return
    pairs = [
        pair
        for path in readers
        if not fixed((*path, "kernel"))
        for pair in zip(_matrices(weights[*path, "kernel"]), seen[path], strict=True)
    ]
    if not pairs:
        return
    squares = np.mean([each.squares for path in readers for each in seen[path]], axis=0)
    if heads > 1:
        by_head = squares.reshape(config.num_kv_heads, heads, config.head_dim)
        squares = np.broadcast_to(by_head.mean(axis=1, keepdims=True), by_head.shape).reshape(-1)
    factors = _factors(pairs, squares, rounding)
    for path in readers:
        kernel = weights[*path, "kernel"]
        weights[*path, "kernel"] = (kernel * factors).astype(kernel.dtype)
        seen[path] = [each.divided(factors) for each in seen[path]]
    made = factors
    if heads > 1:
        made = factors.reshape(config.num_kv_heads, heads, config.head_dim)[:, 0].reshape(-1)
    _divide(weights, maker, made, None, config.norm_adds_one)


def _matrices(kernel: np.ndarray) -> list[np.ndarray]:
    return [kernel] if kernel.ndim == 2 else [*kernel]


def _divide(
    weights: Weights, maker: Path, factors: np.ndarray, expert: int | None, adds_one: bool = False
) -> None:
    """Divides what a norm or a linear layer makes, with its bias, by factors."""
    for path in (maker, (*maker[:-1], "bias")):
        if path not in weights:
            continue
        value = weights[path]
        part = value if expert is None else value[expert]
        by = factors[:, None] if part.ndim == 2 else factors
        one = int(adds_one and path[-1] == "scale")
        divided = (one + part) / by - one
        if expert is None:
            weights[path] = divided.astype(value.dtype)
        else:
            value[expert] = divided


def _factors(
    pairs: Sequence[tuple[np.ndarray, Inputs]], squares: Float[np.ndarray, " I"], rounding: Rounding
) -> Float[np.ndarray, " I"]:
    """The factors, powers of the inputs' magnitudes, with which rounded matrices change their
    outputs least."""
    magnitudes = np.sqrt(np.maximum(squares, 1e-12))
    best, found = np.inf, np.ones_like(magnitudes)
    for exponent in _EXPONENTS:
        factors = _powers_of_two(magnitudes**exponent)
        if exponent and (factors == 1).all():
            continue
        error = 0.0
        for matrix, inputs in pairs:
            scaled = (matrix * factors).astype(matrix.dtype)
            given = inputs.divided(factors)
            codes = rounded(scaled, rounding, given.squares, searched=False)
            off = codes.dequantised(np.float32) - scaled.astype(np.float32)
            error += float(np.sum((given.sample @ off.T) ** 2)) / len(given.sample)
        if error < best:
            best, found = error, factors
    return found


def _powers_of_two(values: Float[np.ndarray, " I"]) -> Float[np.ndarray, " I"]:
    """Powers of two about values, which are divided by their middle first."""
    exponents = np.log2(values)
    nearest = np.exp2(np.rint(exponents - (exponents.max() + exponents.min()) / 2))
    return np.clip(nearest, 1 / _MOST_FACTOR, _MOST_FACTOR).astype(np.float32)


def as_params(weights: Mapping[Path, Any]) -> dict[str, Any]:
    """The parameters as a tree on the default device."""
    tree: dict[str, Any] = {}
    for path, value in weights.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = jax.tree.map(jnp.asarray, value)
    return tree
