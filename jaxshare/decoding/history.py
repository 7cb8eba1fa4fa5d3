"""The text so far of each row, for settings that look at it: penalties, and sequences that must not
come."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Int32

from jaxshare.decoding.array_rows import filled
from jaxshare.decoding.sampling_params import Sampler
from jaxshare.layout import bucket


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """The text of each of R rows. A part that no row needs has size 0, and costs nothing.

    Attributes:
      prompt: bool[R, V], the tokens that the row's text had at first; [R, 0] for none.
      counts: int32[R, V], how often each token was sampled since; [R, 0].
      tokens: int32[R, H], the whole text; [R, 0].
      size: int32[R], tokens of it.
    """

    prompt: Bool[Any, "R V"]
    counts: Int32[Any, "R V"]
    tokens: Int32[Any, "R H"]
    size: Int32[Any, " R"]

    @classmethod
    def empty(cls, rows: int, vocab: int = 0, capacity: int = 0) -> "History":
        """Rows without a text; V and H are 0 where nothing needs them."""
        return cls(
            filled((rows, vocab), False, bool),
            filled((rows, vocab)),
            filled((rows, capacity)),
            filled(rows),
        )

    @classmethod
    def for_samplers(
        cls, samplers: Sequence[Sampler], longest: Sequence[int], vocab: int
    ) -> "History":
        """Rows without a text, with the parts that their samplers need.

        Args:
          samplers, longest: for each row, and the most tokens that its text will have.
          vocab: V.
        """
        counts = any(sampler.counts_tokens for sampler in samplers)
        read = [n for n, sampler in zip(longest, samplers, strict=True) if sampler.reads_tokens]
        return cls.empty(len(samplers), vocab * counts, bucket(max(read)) if read else 0)

    @property
    def is_kept(self) -> bool:
        """True if any part has a size."""
        return self.prompt.shape[1] > 0 or self.tokens.shape[1] > 0

    def grown(self, vocab: int, capacity: int) -> "History":
        """The history with parts of at least these sizes; the texts that it has stay."""
        vocab = max(vocab, self.prompt.shape[1])
        more = max(capacity - self.tokens.shape[1], 0)
        has_counts = vocab == self.prompt.shape[1]
        if has_counts and not more:
            return self
        rows = self.size.shape[0]
        return History(
            self.prompt if has_counts else filled((rows, vocab), False, bool),
            self.counts if has_counts else filled((rows, vocab)),
            jnp.pad(self.tokens, ((0, 0), (0, more))),
            self.size,
        )

    def with_text(self, row: int, tokens: Sequence[int], num_prompt: int) -> "History":
        """The history after a row starts with this text, of which the first tokens are its prompt.

        The arrays are donated.
        """
        text = np.asarray(tokens, np.int32)
        padded = np.zeros(bucket(max(len(text), 1)), np.int32)
        padded[: len(text)] = text
        return _put_text(self, np.int32(row), padded, np.asarray([len(text), num_prompt], np.int32))

    def after(
        self, token: Int[Array, " R"], sampled: Bool[Array, " R"], first: Array | int = 0
    ) -> "History":
        """The history after rows have sampled.

        Args:
          token: of each row.
          sampled: the rows that have.
          first: the token of the first place of `counts`, where a device has a part of them.
        """
        row = jnp.arange(sampled.shape[0])
        counts, tokens = self.counts, self.tokens
        if width := counts.shape[1]:
            index = token - first
            index = jnp.where(sampled & (index >= 0), index, width)
            counts = counts.at[row, index].add(1, mode="drop")
        if width := tokens.shape[1]:
            tokens = tokens.at[row, jnp.where(sampled, self.size, width)].set(token, mode="drop")
        size = self.size + sampled.astype(jnp.int32)
        return dataclasses.replace(self, counts=counts, tokens=tokens, size=size)

    def last(self, back: Array | int) -> Int[Array, " R"]:
        """The token so many before the next one, -1 where the text is shorter."""
        at = self.size - back
        found = jnp.take_along_axis(self.tokens, jnp.maximum(at, 0)[:, None], axis=1)[:, 0]
        return jnp.where(at >= 0, found, -1)


@functools.partial(jax.jit, donate_argnums=0)
def _put_text(history: History, row: Array, text: Array, sizes: Array) -> History:
    place, size, num_prompt = jnp.arange(text.shape[0]), sizes[0], sizes[1]
    prompt, counts, tokens = history.prompt, history.counts, history.tokens
    if vocab := prompt.shape[1]:
        in_prompt = jnp.where(place < num_prompt, text, vocab)
        since = jnp.where((place >= num_prompt) & (place < size), text, vocab)
        seen = jnp.zeros(vocab, bool).at[in_prompt].set(True, mode="drop")
        prompt = prompt.at[row].set(seen)
        counts = counts.at[row].set(jnp.zeros(vocab, jnp.int32).at[since].add(1, mode="drop"))
    if width := tokens.shape[1]:
        kept = jnp.zeros(width, jnp.int32).at[place].set(text, mode="drop")
        tokens = tokens.at[row].set(kept)
    return History(prompt, counts, tokens, history.size.at[row].set(size))
