"""Speculative decoding with an earlier output as the draft, and the pass that verifies it.

Outputs for the same prompt part at a token and often go on alike. So where the Logits Cache ends,
the earlier output is the draft, and one pass over all drafted tokens gives the distribution at each
of them. Each is sampled with the request's own seed and position: the result is that of one pass
per token, as far as the draft is right, and one token more (as in speculative decoding, with the
cache in the place of a draft model, and exact for each seed).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import KVCache, Layout, Sampler, Samplers
from jaxshare.decoding.samplers import SamplerPlaces
from jaxshare.decoding.state import DecodeModel
from jaxshare.decoding.top_logits import TopLogits, compress_logits
from jaxshare.serving.engine.session_passes import MIN_PLACES

SHAPES = ((1, 16), (4, 16))
"""(rows, tokens of a row) of a pass over drafts."""
_MATCH = 3
"""Tokens in a row that locate a request in an earlier output."""
_MAX_MISSES = 6
"""Drafting stops when bad drafts outnumber good ones by this."""


class DraftLookup:
    """Drafts from an earlier output, for a request that has parted from it.

    Args:
      output: the earlier output's tokens.
    """

    def __init__(self, output: np.ndarray):
        self._output = output.tolist()
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(_MATCH, len(self._output)):
            self._ends.setdefault(tuple(self._output[end - _MATCH : end]), []).append(end)
        self._misses = 0
        self._parted = False

    def draft(self, output: Sequence[int], max_tokens: int) -> list[int]:
        """At most `max_tokens` tokens that may follow this output."""
        if self._misses >= _MAX_MISSES or max_tokens < 1:
            return []
        ends = self._ends.get(tuple(output[-_MATCH:]))
        if ends:
            start = min(ends, key=lambda end: abs(end - len(output)))
        elif not self._parted:
            start = len(output)  # one token may have replaced another
        else:
            return []
        self._parted = True
        return self._output[start : start + max_tokens]

    def matches(self, output: Sequence[int]) -> bool:
        """Returns whether the earlier output contains the last tokens of this one."""
        return self._misses < _MAX_MISSES and tuple(output[-_MATCH:]) in self._ends

    def report(self, num_accepted: int, num_drafted: int) -> None:
        """Counts a verified draft."""
        self._misses = max(0, self._misses + (1 if 4 * num_accepted < num_drafted else -1))


@dataclasses.dataclass(frozen=True)
class Draft:
    """One row of a verifying pass.

    Attributes:
      unread: tokens before the draft that are not cached yet, at least one.
      tokens: the draft.
      sampler, seed: of the request.
      position: of the first sampled token in the request's randomness.
    """

    unread: list[int]
    tokens: list[int]
    sampler: Sampler
    seed: int
    position: int

    def num_accepted(self, sampled: Sequence[int]) -> int:
        """The number of drafted tokens that equal what was sampled."""
        pairs = zip(self.tokens, sampled, strict=False)
        return next((n for n, (token, own) in enumerate(pairs) if token != own), len(self.tokens))


@dataclasses.dataclass(frozen=True)
class DraftBatch:
    """Drafts as the arguments of `verify`, padded to one of `SHAPES`.

    Attributes:
      tokens: int32[R, T]; counts: int32[R].
      starts: int32[R], the column after which a row's first token is sampled.
      samplers, seeds: for each row; positions: int32[R], as for `verify`.
    """

    tokens: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    samplers: list[Sampler]
    seeds: list[int]
    positions: np.ndarray

    @classmethod
    def empty(cls, rows: int, width: int) -> "DraftBatch":
        """A batch of this shape without a draft."""
        none = np.zeros(rows, np.int32)
        tokens = np.zeros((rows, width), np.int32)
        return cls(tokens, none, none.copy(), [Sampler()] * rows, [0] * rows, none.copy())

    @classmethod
    def of(cls, drafts: Sequence[Draft]) -> "DraftBatch":
        """Packs at most as many drafts as the largest shape has rows."""
        batch = cls.empty(*next(shape for shape in SHAPES if len(drafts) <= shape[0]))
        for i, draft in enumerate(drafts):
            whole = [*draft.unread, *draft.tokens]
            batch.tokens[i, : len(whole)], batch.counts[i] = whole, len(whole)
            batch.starts[i] = len(draft.unread) - 1
            batch.samplers[i], batch.seeds[i] = draft.sampler, draft.seed
            batch.positions[i] = draft.position - batch.starts[i]
        return batch

    def stacked_samplers(self) -> Samplers:
        """The rows' samplers, with places for those of most requests."""
        places = MIN_PLACES.grown(SamplerPlaces.of(self.samplers))
        return Samplers.stack(self.samplers, places=places)


@functools.partial(jax.jit, static_argnames=("model", "num_top_logits"), donate_argnames="cache")
def verify(
    model: DecodeModel,
    params: Any,
    cache: KVCache,
    layout: Layout,
    tokens: Array,
    count: Array,
    samplers: Samplers,
    seeds: Array,
    positions: Array,
    num_top_logits: int,
) -> tuple[KVCache, Array, Array, TopLogits | None]:
    """Runs one pass over R rows of T tokens, and samples after each of them.

    Args:
      cache: donated.
      tokens: int32[R, T]; count: int32[R], the number of real tokens.
      samplers: of the rows; seeds: uint32[R, 2]; positions: int32[R], the position in the row's
        randomness after its first token.
      num_top_logits: the number of largest logits to keep of each distribution; 0 for none.

    Returns:
      The cache, the sampled tokens int32[R, T], bool[R] whether all of the row's logits are finite,
        and the top logits [R, T].
    """
    logits, cache = model.apply(params, tokens, count, cache, layout, every=True)
    rows, width, vocab = logits.shape
    flat = logits.reshape(rows * width, vocab)
    each = jax.tree.map(lambda of_row: jnp.repeat(of_row, width, axis=0), samplers)
    sampled = each.sample(
        flat,
        jnp.repeat(seeds, width, axis=0),
        (positions[:, None] + jnp.arange(width)).reshape(-1),
        mesh=cache.mesh,
    ).reshape(rows, width)
    real = jnp.arange(width) < count[:, None]
    finite = jnp.all(jnp.isfinite(jnp.max(logits, axis=-1)) | ~real, axis=1)
    top = compress_logits(flat, each.temperature, num_top_logits) if num_top_logits else None
    return (
        cache,
        sampled,
        finite,
        jax.tree.map(lambda array: array.reshape(rows, width, *array.shape[1:]), top),
    )
