"""Draws of tokens, and the bounds of what truncation leaves in, in one kernel that JAX lowers
through Triton: for NVIDIA GPUs from Ampere on.

A program has a row. One pass over its logits, which stay in the level-2 cache from then on, keeps
the largest few of those at each place of a tile in registers: `_BEST` times as many as a tile has
places, and nearly always all that the cuts of top_k and top_p can be among. Thresholds are found bit
by bit among these. Where they cannot answer, as for a distribution that is nearly flat, that bit
takes a pass over the row. One more pass adds up the weights of each tile, and one tile is read again
for the token.

Thresholds are exact: tokens that tie with the last one that is kept are kept, as XLA's
(`jaxshare.decoding.truncation`) keeps them. Masses are float32 sums in another order than XLA's, so
that a top_p or a draw within rounding of the edge between two tokens may take the one beside it.

Axis letters: R rows, V vocabulary, T places of a tile.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from jaxshare.pallas.device import Device, current_device, lowers_triton

_TILE, _LEAST_TILE = 4096, 128
_OF_WARP = 256
"""Places of a tile that a warp has, eight of each thread."""
_BEST = 4
"""Logits that are kept of each place. Of n tokens in random places, more than `_BEST` fall on one of
`_TILE` about n**5 / (120 * _TILE**4) times: 0.001 for 500, 0.03 for 1,000."""
_TOGETHER, _TOGETHER_AT_FIRST = 2, 4
"""Tiles whose reads are under way at the same time, as registers allow."""
_NO_KEY, _NAN_KEY = np.int32(-(2**31)), np.int32(2**31 - 1)
"""Below and above the keys of all numbers."""
_OF_MINUS_INFINITY = np.int32(-0x7F800000)
"""The key of -inf."""


def draws_on(logits: Array) -> Device | None:
    """The GPU whose kernel draws from such logits, or None where XLA does."""
    device = current_device()
    fits = logits.dtype == jnp.float32 and logits.size < 2**31
    return device if device is not None and fits and lowers_triton(device) else None


def drawn(
    logits: Float[Array, "R V"],
    temperature: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    min_p: Float[Array, " R"],
    typical_p: Float[Array, " R"],
    uniform: Float[Array, " R"],
    device: Device,
) -> Int[Array, " R"]:
    """The token of each row, -1 where no logit is above -inf or one is NaN.

    Args:
      logits: after biases, penalties and bans.
      temperature: 0 takes the first of the largest logits.
      top_k, top_p, min_p, typical_p: as in `truncation_bounds`.
      uniform: the numbers in [0, 1) at which the cumulative sum of weights is inverted.
      device: that `draws_on` has returned.
    """
    numbers = temperature, top_p, jnp.log(min_p), typical_p, uniform
    return _call(logits, top_k, numbers, device, draws=True)[0]


def kept_bounds(
    scaled: Float[Array, "R V"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    min_p: Float[Array, " R"],
    typical_p: Float[Array, " R"],
    device: Device,
) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    """The smallest and the largest logit of each row that truncation leaves in, as
    `truncation_bounds` returns them. `device`: that `draws_on` has returned."""
    ones = jnp.ones_like(top_p)
    numbers = ones, top_p, jnp.log(min_p), typical_p, ones
    low, high = _call(scaled, top_k, numbers, device, draws=False)
    return low, high


# Jitted, so that a program with several draws has the kernel once.
@functools.partial(jax.jit, static_argnames=("device", "draws"))
def _call(
    logits: Array, top_k: Array, numbers: tuple[Array, ...], device: Device, *, draws: bool
) -> list[Array]:
    """int32[R] tokens, or float32[R] bounds, the lower ones first. `numbers`: as `_kernel` names
    them."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    rows, vocab = logits.shape
    places = min(max(1 << (vocab - 1).bit_length(), _LEAST_TILE), _TILE)
    return pl.pallas_call(
        functools.partial(_kernel, places=places, draws=draws, interpret=device.interpret),
        out_shape=[
            jax.ShapeDtypeStruct((rows,), kind)
            for kind in ([jnp.int32] if draws else [jnp.float32, jnp.float32])
        ],
        grid=(rows,),
        compiler_params=plt.CompilerParams(num_warps=max(places // _OF_WARP, 1), num_stages=1),
        interpret=device.interpret,
        name="draw" if draws else "truncation_bounds",
    )(logits, top_k, jnp.stack(numbers))


def _kernel(
    logits_ref: Any,
    k_ref: Any,
    numbers_ref: Any,
    *out_refs: Any,
    places: int,
    draws: bool,
    interpret: bool,
) -> None:
    """Computes one row. Refs: logits [R, V], top_k [R], numbers [5, R]; tokens, or bounds, [R]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    row = pl.program_id(0)
    tiles = -(-logits_ref.shape[1] // places)
    whole = _LogitsRow(plt.load, logits_ref, row, places, tiles)
    best, likeliest = whole.best()
    top = _numbers_of(jnp.max(best[0]))
    temperature, p, least, typical, uniform = (numbers_ref[i, row] for i in range(5))
    k = k_ref[row]
    if not draws:
        low, high = _cut(_RowCut(whole, best, top), k, p, least, typical)
        out_refs[0][row] = _numbers_of(low)
        out_refs[1][row] = jnp.where(high == _NAN_KEY, jnp.inf, _numbers_of(high))
        return
    # The largest becomes 0 before the division, so that no temperature overflows it.
    divide = _divided if interpret else functools.partial(_divided_exactly, plt)
    scale = functools.partial(_scaled, divide, top, temperature)
    whole = whole._replace(scale=scale)
    best = [_where(each > _NO_KEY, _keys_of(scale(_numbers_of(each))), _NO_KEY) for each in best]

    def drawn() -> Array:
        cut = _RowCut(whole, best, jnp.float32(0))
        return whole.drawn(*_cut(cut, k, p, least, typical), uniform)

    token = lax.cond(temperature > 0, drawn, lambda: likeliest)
    out_refs[0][row] = jnp.where(top > -jnp.inf, token, -1)


def _cut(cut: "_RowCut", k: Array, p: Array, least: Array, typical: Array) -> tuple[Array, Array]:
    """The keys of the smallest and of the largest logit that all cuts leave in, `_NAN_KEY` where none is the
    largest. `least`: the logarithm of min_p."""
    # Triton takes no constants for results of branches: these are computed.
    everything = jnp.minimum(_keys_of(least), _OF_MINUS_INFINITY)
    no_end = jnp.maximum(_keys_of(least), _NAN_KEY)
    by_k = lax.cond(
        (k > 0) & (k < cut.row.logits_ref.shape[1]),
        lambda: cut.by_number(k.astype(jnp.float32)),
        lambda: everything,
    )
    by_p = lax.cond(p < 1, lambda: cut.by_mass(by_k, p), lambda: everything)
    low = jnp.maximum(jnp.maximum(by_k, by_p), everything)
    low = jnp.maximum(low, _keys_of(cut.at_top + least))
    return lax.cond(typical < 1, lambda: cut.by_typicality(low, typical), lambda: (low, no_end))


class _LogitsRow(NamedTuple):
    """The logits of a row, read a tile at a time.

    Attributes:
      load: reads arrays in device memory, as Triton's.
      logits_ref, row: [R, V] and its own row.
      places, tiles: of a tile, and tiles.
      scale: what is done to logits.
    """

    load: Callable[..., Array]
    logits_ref: Any
    row: Array
    places: int
    tiles: int
    scale: Callable[[Array], Array] = lambda x: x

    def tile(self, number: ArrayLike) -> tuple[Array, Array]:
        """The scaled logits of a tile and their keys, [T] each; -inf and `_NO_KEY` after the last."""
        at = number * self.places + jnp.arange(self.places)
        there = at < self.logits_ref.shape[1]
        read = self.load(self.logits_ref.at[self.row, at], mask=there, other=-jnp.inf)
        x = self.scale(read)
        return x, _where(there, _keys_of(x), _NO_KEY)

    def fold(self, add: Callable[..., Any], start: Any, together: int = _TOGETHER) -> Any:
        """Goes through all tiles: `add(number, x, keys, carried)` returns what is carried on."""
        together = min(together, self.tiles)

        def add_some(turn: Array, carried: Any) -> Any:
            numbers = [turn * together + i for i in range(together)]
            for number, tile in [(number, self.tile(number)) for number in numbers]:
                carried = add(number, *tile, carried)
            return carried

        return lax.fori_loop(0, -(-self.tiles // together), add_some, start)

    def best(self) -> tuple[list[Array], Array]:
        """The keys of the `_BEST` largest logits at each place, [T] each, the largest first, and
        the first token with the largest logit of all."""

        def add(number: Array, x: Array, keys: Array, carried: Any) -> Any:
            found, at = carried
            keys = _where(x != x, _NAN_KEY, keys)
            at = jnp.where(keys > found[0], number, at)
            kept = []
            for each in found:
                kept.append(jnp.maximum(each, keys))
                keys = jnp.minimum(each, keys)
            return kept, at

        empty = jnp.full(self.places, _NO_KEY)
        start = [empty] * _BEST, jnp.zeros(self.places, jnp.int32)
        found, at = self.fold(add, start, _TOGETHER_AT_FIRST)
        token = at * self.places + jnp.arange(self.places)
        is_top = found[0] == jnp.max(found[0])
        return found, jnp.min(_where(is_top, token, _NAN_KEY))

    def total(self, weigh: Callable[[Array, Array], Array]) -> Array:
        """The sum of `weigh(x, keys)` over the row: of each place first."""

        def add(_: Array, x: Array, keys: Array, sums: Array) -> Array:
            return sums + weigh(x, keys)

        return jnp.sum(self.fold(add, jnp.zeros(self.places, jnp.float32)))

    def drawn(self, low: Array, high: Array, uniform: Array) -> Array:
        """The token at which the cumulative sum of the weights from key `low` to `high` is
        `uniform` of it all: the tile first, and then the token in it. A row's largest is 0."""

        def weigh(x: Array, keys: Array) -> Array:
            return jnp.where((keys >= low) & (keys <= high), jnp.exp(x), 0.0)

        index = jnp.arange(1 << (self.tiles - 1).bit_length())

        def add(number: Array, x: Array, keys: Array, sums: Array) -> Array:
            return jnp.where(index == number, jnp.sum(weigh(x, keys)), sums)

        sums = self.fold(add, jnp.zeros(index.shape, jnp.float32))
        tile, rest = _inverted(sums, uniform * jnp.sum(sums))
        token, _ = _inverted(weigh(*self.tile(tile)), rest)
        return tile * self.places + token


class _RowCut(NamedTuple):
    """Finds thresholds of a row.

    Attributes:
      row, best: the row, and the keys of the largest logits of each place, scaled.
      at_top: the largest scaled logit.
    """

    row: _LogitsRow
    best: list[Array]
    at_top: Array

    @property
    def complete(self) -> Array:
        """A key: all tokens with larger ones are among the best."""
        return jnp.max(self.best[-1])

    def mass(self, x: Array, keys: Array, low: Array) -> Array:
        return jnp.where(keys >= low, jnp.exp(x - self.at_top), 0.0)

    def by_number(self, k: Array) -> Array:
        """The largest key that at least `k` tokens reach."""

        def among_best(least: Array) -> Array:
            return jnp.sum(sum(jnp.where(keys >= least, 1.0, 0.0) for keys in self.best))

        def among_all(least: Array) -> Array:
            return self.row.total(lambda _, keys: jnp.where(keys >= least, 1.0, 0.0))

        return self._largest(among_best, among_all, k)

    def by_mass(self, low: Array, share: Array) -> Array:
        """The largest key such that the tokens that reach it have a share of the mass from `low`
        up."""
        masses = [self.mass(_numbers_of(keys), keys, low) for keys in self.best]

        def among_best(least: Array) -> Array:
            pairs = zip(self.best, masses, strict=True)
            return jnp.sum(sum(jnp.where(keys >= least, mass, 0.0) for keys, mass in pairs))

        def among_all(least: Array) -> Array:
            least = jnp.maximum(least, low)
            return self.row.total(lambda x, keys: self.mass(x, keys, least))

        total = lax.cond(low > self.complete, among_best, among_all, low)
        return self._largest(among_best, among_all, share * total)

    def _largest(
        self,
        among_best: Callable[[Array], Array],
        among_all: Callable[[Array], Array],
        enough: Array,
    ) -> Array:
        """The largest key such that what reaches it is enough: of the best tokens, or of all where
        these cannot say."""

        def reaches(least: Array) -> Array:
            found = among_best(least)
            return (
                lax.cond(
                    (found >= enough) | (least > self.complete),
                    lambda least: found,
                    among_all,
                    least,
                )
                >= enough
            )

        return _bit_by_bit(reaches)

    def by_typicality(self, low: Array, share: Array) -> tuple[Array, Array]:
        """The smallest and the largest key that typical_p leaves in of those from `low` up, as
        `jaxshare.decoding.truncation` defines it; a pass over the row for each bit."""

        def moment(x: Array, keys: Array) -> Array:
            mass = self.mass(x, keys, low)
            return jnp.where(mass > 0, mass * (x - self.at_top), 0.0)

        total = self.row.total(lambda x, keys: self.mass(x, keys, low))
        mean = self.row.total(moment) / total

        def nearness(x: Array) -> Array:
            return _keys_of(-jnp.abs(x - self.at_top - mean))

        def reaches(least: Array) -> Array:
            found = self.row.total(
                lambda x, keys: jnp.where(nearness(x) >= least, self.mass(x, keys, low), 0.0)
            )
            return found >= share * total

        nearest = _bit_by_bit(reaches)

        def add(_: Array, x: Array, keys: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            kept = (keys >= low) & (nearness(x) >= nearest)
            return (
                jnp.minimum(ends[0], _where(kept, keys, _NAN_KEY)),
                jnp.maximum(ends[1], _where(kept, keys, _NO_KEY)),
            )

        places = self.row.places
        least, most = self.row.fold(add, (jnp.full(places, _NAN_KEY), jnp.full(places, _NO_KEY)))
        return jnp.min(least), jnp.max(most)


def _bit_by_bit(reaches: Callable[[Array], Array]) -> Array:
    """The largest key that `reaches` holds for; `_NO_KEY` where it holds for none."""

    def add_bit(turn: Array, found: Array) -> Array:
        more = found + (jnp.int32(1) << (31 - turn))
        return jnp.where(reaches(more), more, found)

    return lax.fori_loop(0, 32, add_bit, jnp.int32(_NO_KEY))


def _inverted(weights: Array, target: Array) -> tuple[Array, Array]:
    """The first index of positive weight where the cumulative sum exceeds the target, the last one
    where none does, and the target less the sum before it."""
    index, cumulative = jnp.arange(weights.shape[0]), lax.cumsum(weights, axis=0)
    reached = (weights > 0) & (cumulative > target)
    first = jnp.min(_where(reached, index, np.int32(weights.shape[0])))
    found = jnp.minimum(first, jnp.max(_where(weights > 0, index, np.int32(0))))
    return found, target - jnp.sum(jnp.where(index == found - 1, cumulative, 0.0))


def _scaled(divide: Callable[..., Array], top: Array, temperature: Array, x: Array) -> Array:
    return divide(x - top, jnp.where(temperature > 0, temperature, 1.0))


def _divided(x: Array, y: Array) -> Array:
    return x / y


def _divided_exactly(plt: Any, x: Array, y: Array) -> Array:
    """x / y rounded to the nearest, as XLA divides; Triton's own division is not. It is all that the
    interpreter cannot run of the kernel."""
    y = jnp.broadcast_to(y, x.shape)
    return plt.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;",
        args=[x, y],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )[0]


def _where(condition: Array, x: ArrayLike, y: ArrayLike) -> Array:
    """`jnp.where` of int32 numbers."""
    return jnp.where(condition, jnp.int32(x), jnp.int32(y))


def _keys_of(x: Array) -> Array:
    """Maps float32 numbers to int32 in the same order, with one key for -0 and 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, _NO_KEY - bits, bits)


def _numbers_of(keys: Array) -> Array:
    """The numbers that have these keys."""
    return lax.bitcast_convert_type(jnp.where(keys < 0, _NO_KEY - keys, keys), jnp.float32)
