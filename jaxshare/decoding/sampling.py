"""Sampling, each row with settings of its own.

The settings are temperature (0 is greedy), top-k, top-p, min-p, bias and forbidden tokens.
Randomness is counter-based: a draw depends on (row key, position) alone, never on the rest of the
batch; `jaxshare.seeds` makes the keys. Truncation is exact and needs no sort: thresholds are found
by bisecting the ordered bits of the logits.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int, UInt32

from jaxshare.argument_checks import FLOAT32_MAX, INT32_MAX, as_float, as_integer, as_list, shown
from jaxshare.sharding import (
    TENSOR,
    axis_in_use,
    axis_size,
    gathered,
    inside,
    on_each,
    pmax,
    psum,
    spec,
)

_CHUNK = 256
_LEAST_P = 2.0**-126
"""The smallest top_p on a device, which keeps the likeliest token alone."""


@dataclasses.dataclass(frozen=True)
class Sampler:
    """The sampling settings of one row, applied in the order temperature, top_k, top_p, min_p.

    Attributes:
      temperature: logits are divided by it; 0 takes the likeliest token.
      top_k: keep the k likeliest tokens, and those that tie with the last; 0 keeps all.
      top_p: keep the smallest set of likeliest tokens with at least this probability, and ties; in
        (0, 1].
      min_p: keep tokens at least this fraction as likely as the likeliest; in [0, 1].
      bias: added to the logits of single tokens.
      forbidden: tokens that are never chosen.

    Numbers may be of any type, NumPy's among them; they are kept as int and float.

    Raises:
      ValueError: a value out of its range, or too large for a float32.
      TypeError: a value of another type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    forbidden: tuple[int, ...] = ()

    def __post_init__(self):
        zero = "(0 takes the likeliest token)"
        values = {
            "temperature": as_float("temperature", self.temperature, 0, FLOAT32_MAX, f" {zero}"),
            "top_k": as_integer("top_k", self.top_k, 0, why=" (0 keeps all tokens)"),
            "top_p": as_float("top_p", self.top_p),
            "min_p": as_float("min_p", self.min_p),
            "bias": _token_biases(self.bias),
            "forbidden": tuple(_token_numbers(self.forbidden)),
        }
        if not 0 < values["top_p"] <= 1:
            raise ValueError(
                f"top_p is {values['top_p']}; it must be above 0 and at most 1 (1 keeps all tokens)"
            )
        if not 0 <= values["min_p"] <= 1:
            raise ValueError(
                f"min_p is {values['min_p']}; it must be between 0 and 1 (0 keeps all tokens)"
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _token_numbers(tokens: Iterable[Any]) -> list[int]:
    try:
        given = as_list("forbidden", tokens)
    except TypeError:
        raise TypeError(
            f"forbidden is {shown(tokens)}; it must be the numbers of tokens, such as (5, 6)"
        ) from None
    numbers = [as_integer("a token of a bias or a ban", token, most=INT32_MAX) for token in given]
    if negative := [token for token in numbers if token < 0]:
        raise ValueError(f"a bias or a ban names token {negative[0]}; tokens are numbered from 0")
    return numbers


def _token_biases(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise TypeError(
            f"bias is {shown(bias)}; it must be a dict of numbers by token, such as {{5: 1.0}}"
        )
    tokens, values = _token_numbers(bias), []
    for token, value in zip(tokens, bias.values(), strict=True):
        name = f"the bias of token {token}"
        why = " (forbidden tokens are listed apart)"
        values.append(as_float(name, value, -FLOAT32_MAX, FLOAT32_MAX, why))
    return dict(zip(tokens, values, strict=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samplers:
    """The samplers of R rows as arrays, so that changing a setting never recompiles.

    Attributes:
      temperature, top_p, min_p: float32[R]; top_k: int32[R].
      bias_tokens, bias_values: int32 and float32[R, X], additions to single logits; an unused place
        has token -1.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    bias_tokens: Array
    bias_values: Array

    @classmethod
    def stack(cls, samplers: Sequence[Sampler], *, bias_slots: int | None = None) -> "Samplers":
        """Makes one row of each sampler.

        `bias_slots` is X, to leave room for later rows; default the fewest that these need.

        Raises:
          ValueError: a sampler has more biased and forbidden tokens than `bias_slots`.
        """
        edits = [{**s.bias, **dict.fromkeys(s.forbidden, -math.inf)} for s in samplers]
        slots = max((len(e) for e in edits), default=0) if bias_slots is None else bias_slots
        if over := [i for i, e in enumerate(edits) if len(e) > slots]:
            raise ValueError(
                f"sampler {over[0]} has {len(edits[over[0]])} biased or forbidden tokens; "
                f"bias_slots is {slots}"
            )
        tokens = np.full((len(edits), slots), -1, np.int32)
        values = np.zeros((len(edits), slots), np.float32)
        for r, edit in enumerate(edits):
            tokens[r, : len(edit)], values[r, : len(edit)] = list(edit), list(edit.values())
        return cls(
            *jax.device_put(
                (
                    np.asarray([s.temperature for s in samplers], np.float32),
                    np.asarray([min(s.top_k, INT32_MAX) for s in samplers], np.int32),
                    np.asarray([max(s.top_p, _LEAST_P) for s in samplers], np.float32),
                    np.asarray([s.min_p for s in samplers], np.float32),
                    tokens,
                    values,
                )
            )
        )

    def sample(
        self,
        logits: Float[Array, "R V"],
        seeds: UInt32[Array, "R 2"],
        positions: Int[Array, " R"],
        *,
        mesh: Mesh | None = None,
    ) -> Int[Array, " R"]:
        """Samples one token a row.

        Logits that are sharded over a mesh's vocabulary stay where they are, except for top_k and
        top_p, which need all of a row.

        Args:
          logits: of each row.
          seeds: each row's key (`jaxshare.seeds.seed_words`).
          positions: the counter: the same key and position always give the same draw.
          mesh: of the model that the logits are from.
        """
        axis, none = vocab_axis(mesh, logits.shape[-1]), PartitionSpec()
        return on_each(
            functools.partial(_sample, axis),
            mesh,
            in_specs=(none, vocab_spec(axis), none, none),
            out_specs=none,
        )(self, logits, seeds, positions)

    def _biased(self, logits: Array, first: Array | int = 0) -> Array:
        """Adds the biases to logits of the vocabulary from token `first` on."""
        if not self.bias_tokens.shape[1]:
            return logits
        index = self.bias_tokens - first
        index = jnp.where((self.bias_tokens < 0) | (index < 0), logits.shape[1], index)
        return logits.at[jnp.arange(logits.shape[0])[:, None], index].add(
            self.bias_values, mode="drop"
        )

    def _floor(self, scaled: Array) -> Array:
        """float32[R, 1]: the smallest scaled logit of a row that passes top_k, top_p and min_p."""
        top = jnp.max(scaled, axis=-1, keepdims=True)
        order = _ordered(scaled)
        k = jnp.where(self.top_k > 0, self.top_k, scaled.shape[1])[:, None].astype(jnp.float32)
        kept_by_k = _threshold(order, jnp.ones_like(scaled), k)
        mass = jnp.where(order >= kept_by_k, jnp.exp(scaled - top), 0.0)
        p = jnp.where(self.top_p < 1, self.top_p, 0.0)[:, None] * jnp.sum(
            mass, axis=-1, keepdims=True
        )
        kept_by_p = jnp.where(self.top_p[:, None] < 1, _threshold(order, mass, p), kept_by_k)
        min_p = top + jnp.log(self.min_p)[:, None]
        return jnp.maximum(_unordered(jnp.maximum(kept_by_k, kept_by_p)), min_p)


def vocab_axis(mesh: Mesh | None, vocab: int) -> str | None:
    """The axis of a mesh along which rows of logits are sharded.

    None where every device has all of them.

    Args:
      mesh: of the model.
      vocab: the length of the rows, as the caller sees them. A vocabulary that the axis does not
        divide is not sharded.
    """
    axis = axis_in_use(mesh, TENSOR)
    # Inside a shard_map the caller sees one device's part, whose length says nothing.
    return axis if axis and (inside() or vocab % axis_size(mesh, TENSOR) == 0) else None


def vocab_spec(axis: str | None) -> PartitionSpec:
    """The partition spec of logits [R, V] that are sharded along `axis`."""
    return spec((None, "vocab")) if axis else PartitionSpec()


def _sample(
    axis: str | None, samplers: Samplers, logits: Array, seeds: Array, positions: Array
) -> Array:
    """Samples on one device, which has the logits of its part of the vocabulary."""
    first = 0 if axis is None else lax.axis_index(axis) * logits.shape[1]
    logits = samplers._biased(logits, first)
    top = pmax(jnp.max(logits, axis=-1, keepdims=True), axis)
    likeliest = _argmax(top, logits, first, axis)

    def draw() -> Array:
        # The largest becomes 0 before the division, so that no temperature overflows it.
        scaled = (logits - top) / jnp.where(samplers.temperature > 0, samplers.temperature, 1.0)[
            :, None
        ]
        cuts = (samplers.top_k > 0) | (samplers.top_p < 1)
        # The largest is 0 now, so that min_p alone needs no other logit.
        floor = lax.cond(
            jnp.any(cuts),
            lambda x: samplers._floor(gathered(x, axis)),
            lambda x: jnp.log(samplers.min_p)[:, None],
            scaled,
        )
        weights = jnp.where(scaled >= floor, jnp.exp(scaled), 0.0)
        return jnp.where(
            samplers.temperature > 0, _draw(weights, uniforms(seeds, positions), axis), likeliest
        )

    return lax.cond(jnp.any(samplers.temperature > 0), draw, lambda: likeliest)


def largest(logits: Float[Array, "R V"], mesh: Mesh | None) -> Float[Array, " R"]:
    """The largest logit of each row, NaN where one is. `mesh`: as in `Samplers.sample`."""
    axis = vocab_axis(mesh, logits.shape[-1])
    return on_each(
        functools.partial(_largest, axis),
        mesh,
        in_specs=(vocab_spec(axis),),
        out_specs=PartitionSpec(),
    )(logits)


def whole_rows(logits: Float[Array, "R part"], mesh: Mesh | None) -> Float[Array, "R V"]:
    """The logits over the whole vocabulary: gathered inside a shard_map, elsewhere unchanged."""
    return gathered(logits, vocab_axis(mesh, logits.shape[-1])) if inside() else logits


def _largest(axis: str | None, logits: Array) -> Array:
    top = jnp.max(logits, axis=-1)
    if axis is None:
        return top
    # Not every library that reduces over devices passes a NaN on.
    is_nan = jnp.isnan(top)
    top, is_nan = pmax(
        jnp.stack([jnp.where(is_nan, -jnp.inf, top), is_nan.astype(top.dtype)]), axis
    )
    return jnp.where(is_nan > 0, jnp.nan, top)


def logprob(
    logits: Float[Array, "R V"], tokens: Int[Array, " R"], *, mesh: Mesh | None = None
) -> Float[Array, " R"]:
    """The model's own log-probability of each row's token, before temperature, truncation and bias.
    `mesh`: as in `Samplers.sample`."""
    axis, none = vocab_axis(mesh, logits.shape[-1]), PartitionSpec()
    return on_each(
        functools.partial(_logprob, axis), mesh, in_specs=(vocab_spec(axis), none), out_specs=none
    )(logits, tokens)


def _logprob(axis: str | None, logits: Array, tokens: Array) -> Array:
    if axis is None:
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)
    index = tokens - lax.axis_index(axis) * logits.shape[1]
    here = (index >= 0) & (index < logits.shape[1])
    chosen = jnp.take_along_axis(logits, jnp.clip(index, 0, logits.shape[1] - 1)[:, None], axis=1)[
        :, 0
    ]
    top = pmax(jnp.max(logits, axis=-1), axis)
    total = jnp.sum(jnp.exp(logits - top[:, None]), axis=-1)
    chosen, total = psum((jnp.where(here, chosen, 0.0), total), axis)
    return chosen - top - jnp.log(total)


def uniforms(
    seeds: UInt32[Array | np.ndarray, "R 2"], positions: Int[Array | np.ndarray, " R"]
) -> Float[Array, " R"]:
    """Uniform numbers in [0, 1), each from its own (key, position) alone."""

    def draw(words: Any, position: Any) -> Array:
        # Named, because a process can make another generator the default.
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(draw)(seeds, positions)


def _argmax(top: Array, logits: Array, first: Array | int, axis: str | None) -> Array:
    """The index of the first of the largest logits, as jnp.argmax.

    It uses plain reductions: XLA vectorises those on the CPU, and not argmax.
    """
    index = jnp.where(logits == top, jnp.arange(logits.shape[-1]), logits.shape[-1])
    index = jnp.min(index, axis=-1).astype(jnp.int32)
    if axis is not None:
        index = lax.pmin(
            jnp.where(index < logits.shape[-1], first + index, jnp.iinfo(jnp.int32).max), axis
        )
        return jnp.minimum(index, logits.shape[-1] * lax.axis_size(axis) - 1)
    return jnp.minimum(index, logits.shape[-1] - 1)


def _draw(weights: Array, uniform: Array, axis: str | None = None) -> Array:
    """Inverts the cumulative sum of weights [R, V] at uniform [R].

    It has two levels: a chunk of tokens, then one of them. Devices with parts of the vocabulary
    exchange the sums of all chunks, and then the weights of the one chunk.
    """
    rows, vocab = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % _CHUNK))).reshape(rows, -1, _CHUNK)
    chunks = padded.shape[1]
    sums = gathered(jnp.sum(padded, axis=-1), axis)
    cumulative = jnp.cumsum(sums, axis=-1)
    chunk, rest = _invert(sums, cumulative, uniform * cumulative[:, -1])
    device, chunk = chunk // chunks, chunk % chunks
    within = jnp.take_along_axis(padded, chunk[:, None, None], axis=1)[:, 0]
    if axis is not None:
        within = psum(jnp.where((device == lax.axis_index(axis))[:, None], within, 0.0), axis)
    token, _ = _invert(within, jnp.cumsum(within, axis=-1), rest)
    return device * vocab + chunk * _CHUNK + token


def _invert(weights: Array, cumulative: Array, target: Array) -> tuple[Array, Array]:
    """The first index of positive weight where the cumulative sum exceeds the target.

    Returns also the target less the sum before that index. Sums are rounded, and on some devices
    not even monotone: where the target reaches the whole sum, it is the last index of positive
    weight, and an index of weight 0 is never taken.
    """
    indices = jnp.arange(weights.shape[1])
    reached = (weights > 0) & (cumulative > target[:, None])
    first = jnp.min(jnp.where(reached, indices, weights.shape[1]), axis=-1)
    last = jnp.max(jnp.where(weights > 0, indices, 0), axis=-1)
    index = jnp.minimum(first, last).astype(jnp.int32)
    below = jnp.where(
        index > 0,
        jnp.take_along_axis(cumulative, jnp.maximum(index - 1, 0)[:, None], axis=1)[:, 0],
        0.0,
    )
    return index, target - below


def _ordered(x: Array) -> Array:
    """Maps float32 values to int32 in the same order; `_unordered` is the inverse."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _unordered(order: Array) -> Array:
    return jax.lax.bitcast_convert_type(order ^ ((order >> 31) & 0x7FFFFFFF), jnp.float32)


def _threshold(order: Array, weights: Array, target: Array) -> Array:
    """The largest threshold, int32[R, 1], whose entries have enough weight.

    The entries at or above it have weights that sum to `target` [R, 1] or more.
    """

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # reached at low, not reached at high
        middle = (low & high) + ((low ^ high) >> 1)
        reached = (
            jnp.sum(jnp.where(order >= middle, weights, 0.0), axis=-1, keepdims=True) >= target
        )
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low = jnp.min(order, axis=-1, keepdims=True)
    return jax.lax.fori_loop(0, 32, halve, (low, jnp.max(order, axis=-1, keepdims=True) + 1))[0]
