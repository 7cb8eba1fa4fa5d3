"""Replays: samples from the top logits of distributions that equal the device's samples from the
full logits, or none.

A sample is the inverse of a cumulative sum at a number that depends on (seed, position) alone. So a
token found here is not merely distributed as a fresh one: it is the fresh one. The top logits
decide most samples; where they do not, because the sample falls between the kept tokens, or so
close to a token's edge that rounding on the device could move it, or because a cut may reach tokens
that are not kept, it is `UNDECIDED` and the model has to be run. Everything here is numpy, in
float64 where sums are taken.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxshare.decoding.sampling_params import Sampler
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.seeds import seed_words
from jaxshare.serving.logits_cache.sampler_view import GUARD, TINY, SamplerView

UNDECIDED = -1
_BLOCK = 128
"""Distributions processed together, so that temporaries stay in a core's cache."""
FIELDS = tuple(field.name for field in dataclasses.fields(TopLogits) if field.name != "vocab")
"""The arrays of `TopLogits`."""
_ROTATIONS = [[np.uint32(n) for n in each] for each in ((13, 15, 26, 6), (17, 29, 16, 24))]


def redraw(top_logits: TopLogits, sampler: Sampler, seed: int, position: int) -> np.ndarray:
    """Samples n distributions again, at positions `position`, `position + 1`, ... of the row's
    randomness.

    Returns:
      int32[n]: the tokens that `Samplers.sample` samples from the full logits, or `UNDECIDED` where
        the top logits do not decide.
    """
    return decide(top_logits, sampler, uniform_run(seed, position, len(top_logits.tokens)))


def uniform_run(seed: int, position: int, count: int) -> np.ndarray:
    """float32[count]: the random numbers of a row with this seed from `position` on.

    Those of `jaxshare.decoding.sampling.uniforms`, by numpy: a program would be compiled for each
    count, and wait for an accelerator.
    """
    key = seed_words([seed]).T
    positions = np.arange(position, position + count, dtype=np.int64).astype(np.uint32)
    none = np.zeros(count, np.uint32)
    high, low = _threefry(_threefry(key, none, positions), none, none)
    bits = high ^ low if jax.config.jax_threefry_partitionable else high
    return ((bits >> np.uint32(9)) | np.uint32(0x3F800000)).view(np.float32) - np.float32(1)


def _threefry(
    key: Sequence[np.ndarray] | np.ndarray, high: np.ndarray, low: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The blocks (high, low) of Threefry-2x32 with 20 rounds (Salmon et al. 2011), under uint32
    keys that fit them."""
    schedule = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    high, low = high + schedule[0], low + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            high += low
            low = (low << rotation) | (low >> (np.uint32(32) - rotation))
            low ^= high
        high += schedule[(group + 1) % 3]
        low += schedule[(group + 2) % 3] + np.uint32(group + 1)
    return high, low


def decide(top_logits: TopLogits, sampler: Sampler, uniform: np.ndarray) -> np.ndarray:
    """Samples n distributions at the random numbers `uniform` [n]; int32[n] as of `redraw`."""
    sampled = np.full(len(uniform), UNDECIDED, np.int32)
    with np.errstate(all="ignore"):
        for start in range(0, len(uniform), _BLOCK):
            part = slice(start, start + _BLOCK)
            view = SamplerView.of(rows(top_logits, part), sampler)
            if sampler.temperature == 0:
                index = np.argmax(view.logits, axis=1)
                decided = np.isfinite(view.top) & (view.ceiling < view.top)
            else:
                index, decided = _invert(view, uniform[part].astype(np.float64))
            tokens = np.asarray(view.top_logits.tokens)[np.arange(len(index)), index]
            sampled[part] = np.where(decided, tokens, UNDECIDED)
    return sampled


def rows(top_logits: TopLogits, part: slice) -> TopLogits:
    """A slice of n distributions on the host, without a copy."""
    return dataclasses.replace(
        top_logits, **{name: np.asarray(getattr(top_logits, name))[part] for name in FIELDS}
    )


def probabilities(top_logits: TopLogits, sampler: Sampler) -> tuple[np.ndarray, np.ndarray]:
    """The probability of each kept token, float64[n, K], and of all others together, float64[n].

    For a temperature above 0. At the temperature at which the distributions were kept, and without
    cuts or a bias that reach tokens which are not kept, these are exact. Elsewhere the mass of the
    other tokens is only bounded, and the middle of the bounds is taken.
    """
    with np.errstate(all="ignore"):
        view = SamplerView.of(top_logits, sampler)
        low, high = view.others()
        rest = (low + high) / 2
        total = view.possible.sum(axis=1) + rest
    return view.possible / total[:, None], rest / total


def _invert(view: SamplerView, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sampled token's index among the kept ones, [n], and whether it is decided, bool[n]."""
    top_logits = view.top_logits
    tokens, below, mass = (
        np.asarray(top_logits.tokens),
        np.asarray(top_logits.below),
        np.asarray(top_logits.rest, np.float64),
    )
    row = np.arange(len(tokens))
    certain = np.cumsum(view.certain, axis=1)
    possible = certain if view.possible is view.certain else np.cumsum(view.possible, axis=1)
    # An estimate, which the bounds on both of its sides then confirm or not.
    estimate = certain
    total = certain[:, -1]
    low = high = np.zeros(len(row))
    if view.open.any():
        low, high = view.others()
        scale = np.where(mass > 0, low / mass, 0)
        estimate = below * scale[:, None]
        estimate += certain
        total = total + low
    j = np.argmax(estimate > (uniform * total)[:, None], axis=1)
    token = tokens[row, j]
    earlier = token - j  # tokens before it that are not kept
    before = below[row, j].astype(np.float64)
    left_low, left_high = view.between(before, np.zeros_like(token), token, earlier)
    right_low, right_high = view.between(
        np.maximum(mass - before, 0),
        token + 1,
        np.full_like(token, top_logits.vocab),
        view.unkept - earlier,
    )
    # Each side is bounded by itself, and by what the other side leaves of the whole.
    left_low, left_high, right_low, right_high = (
        np.maximum(left_low, low - right_high),
        np.minimum(left_high, high - right_low),
        np.maximum(right_low, low - left_high),
        np.minimum(right_high, high - left_low),
    )
    weight = view.certain[row, j]
    left_low, left_high = (
        left_low + certain[row, j] - weight,
        left_high + possible[row, j] - view.possible[row, j],
    )
    right_low, right_high = (
        right_low + certain[:, -1] - certain[row, j],
        right_high + possible[:, -1] - possible[row, j],
    )
    slack = GUARD * (left_high + weight + right_high)
    # Sampled where left <= uniform * (left + weight + right) < left + weight, for all values of
    # left and right within their bounds. An empty side has no edge.
    starts = (left_high == 0) | (
        uniform * (weight + right_low) - (1 - uniform) * left_high >= slack
    )
    ends = (right_high == 0) | ((1 - uniform) * (left_low + weight) - uniform * right_high >= slack)
    normal = float(np.float32(view.sampler.temperature)) >= TINY
    valid = np.isfinite(view.top) & (view.ceiling <= view.top) & normal & (weight > 0)
    return j, starts & ends & valid & np.isfinite(slack)
