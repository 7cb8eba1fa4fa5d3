"""The samplers of rows, as arrays."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int, UInt32

from jaxshare.argument_checks import INT32_MAX
from jaxshare.decoding.array_rows import placed
from jaxshare.decoding.grammar_rows import admitted
from jaxshare.decoding.history import History
from jaxshare.decoding.penalties import penalised, with_word_values, without_repeats
from jaxshare.decoding.sampling import (
    chances_of_rows,
    history_spec,
    sample_rows,
    vocab_axis,
    vocab_spec,
)
from jaxshare.decoding.sampling_params import Sampler
from jaxshare.layout import bucket
from jaxshare.pallas.device import current_device
from jaxshare.sharding import on_each

_LEAST_P = 2.0**-126
"""The smallest top_p on a device, which keeps the likeliest token alone."""


@dataclasses.dataclass(frozen=True)
class SamplerPlaces:
    """The places that a row has for settings of which a sampler may have several. They are shapes:
    more of them are another program.

    Attributes:
      edits: changes of single logits.
      stops: stop tokens of the row's own.
      words, word_tokens: sequences that are favoured or must not come, of two tokens or more, and
        their tokens.
    """

    edits: int = 0
    stops: int = 0
    words: int = 0
    word_tokens: int = 0

    @classmethod
    def of(cls, samplers: Iterable[Sampler], stops: Sequence[int] = ()) -> "SamplerPlaces":
        """The fewest that serve these samplers, for a model with these stop tokens."""
        samplers = [*samplers]
        words = [sampler.long_words for sampler in samplers]
        return cls(
            max((len(sampler.edits(stops)) for sampler in samplers), default=0),
            max((len(sampler.stop_token_ids) for sampler in samplers), default=0),
            max(map(len, words), default=0),
            max((len(word) for of_row in words for word, _ in of_row), default=0),
        )

    def grown(self, other: "SamplerPlaces") -> "SamplerPlaces":
        """Returns places for both; where these lack some, a rounded number, so that few programs serve
        all."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return SamplerPlaces(*(a if a >= b else bucket(b) for a, b in pairs))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samplers:
    """The samplers of R rows as arrays, so that changing a setting never recompiles.

    Attributes:
      temperature, top_p, min_p, typical_p: float32[R]; top_k: int32[R].
      repetition, presence, frequency: float32[R], penalties; ngram: int32[R].
      edit_tokens, edit_values, edit_until: int32, float32 and int32[R, X], additions to single
        logits while a row has sampled fewer tokens than `until`; an unused place has token -1.
      stops: int32[R, S], stop tokens of the row's own, -1 for an unused place.
      ignores_stops: bool[R], rows that the model's stop tokens do not end.
      words: int32[R, W, L], sequences, -1 after the last token of one.
      word_values: float32[R, W], added to the logit of a token that would complete one.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    typical_p: Array
    repetition: Array
    presence: Array
    frequency: Array
    ngram: Array
    edit_tokens: Array
    edit_values: Array
    edit_until: Array
    stops: Array
    ignores_stops: Array
    words: Array
    word_values: Array

    @classmethod
    def stack(
        cls,
        samplers: Sequence[Sampler],
        *,
        places: SamplerPlaces | None = None,
        stops: Sequence[int] = (),
    ) -> "Samplers":
        """Makes one row of each sampler.

        Args:
          samplers: of the rows.
          places: to leave some for later rows; default the fewest that these need.
          stops: the model's stop tokens, which `min_tokens` keeps from being sampled.

        Raises:
          ValueError: a sampler needs more places.
        """
        places = _places_of(samplers, stops, places)
        rows = len(samplers)
        tokens = np.full((rows, places.edits), -1, np.int32)
        values = np.zeros((rows, places.edits), np.float32)
        until = np.zeros((rows, places.edits), np.int32)
        own_stops = np.full((rows, places.stops), -1, np.int32)
        for r, sampler in enumerate(samplers):
            if edits := sampler.edits(stops):
                tokens[r, : len(edits)], values[r, : len(edits)], until[r, : len(edits)] = zip(
                    *edits, strict=True
                )
            own_stops[r, : len(sampler.stop_token_ids)] = sampler.stop_token_ids

        def each(name: str, kind: Any = np.float32) -> np.ndarray:
            most = INT32_MAX if kind == np.int32 else None
            found = [getattr(sampler, name) for sampler in samplers]
            return np.asarray([min(n, most) for n in found] if most else found, kind)

        return cls(
            *placed(
                (
                    each("temperature"),
                    each("top_k", np.int32),
                    np.maximum(each("top_p"), np.float32(_LEAST_P)),
                    each("min_p"),
                    np.maximum(each("typical_p"), np.float32(_LEAST_P)),
                    each("repetition_penalty"),
                    each("presence_penalty"),
                    each("frequency_penalty"),
                    each("no_repeat_ngram_size", np.int32),
                    tokens,
                    values,
                    until,
                    own_stops,
                    each("ignore_eos", bool),
                    *_words_of(samplers, places),
                )
            )
        )

    @property
    def places(self) -> SamplerPlaces:
        """The places that its rows have."""
        shapes = self.edit_tokens.shape, self.stops.shape, self.words.shape
        return SamplerPlaces(*(n for _, *sizes in shapes for n in sizes))

    def sample(
        self,
        logits: Float[Array, "R V"],
        seeds: UInt32[Array, "R 2"],
        positions: Int[Array, " R"],
        *,
        history: History | None = None,
        masks: UInt32[Array, "R W"] | None = None,
        mesh: Mesh | None = None,
    ) -> Int[Array, " R"]:
        """Samples one token a row, -1 where bans and masks leave none.

        Logits that are sharded over a mesh's vocabulary stay where they are, except for top_k,
        top_p and typical_p, which need all of a row.

        Args:
          logits: of each row.
          seeds: each row's key (`jaxshare.seeds.seed_words`).
          positions: the tokens that the row has sampled, and the counter of its randomness: the same
            key and position always give the same draw.
          history: the texts so far, for settings that look at them.
          masks: the tokens that grammars admit, as `GrammarRows.masks` gives them.
          mesh: of the model that the logits are from.
        """
        axis, none = vocab_axis(mesh, logits.shape[-1]), PartitionSpec()
        history, masks = _or_none(logits, history, masks)
        return on_each(
            functools.partial(sample_rows, axis),
            mesh,
            in_specs=(none, vocab_spec(axis), history_spec(axis), none, none, none),
            out_specs=none,
        )(self, logits, history, masks, seeds, positions)

    def chances(
        self,
        logits: Float[Array, "R V"],
        positions: Int[Array, " R"],
        *,
        history: History | None = None,
        masks: UInt32[Array, "R W"] | None = None,
        mesh: Mesh | None = None,
    ) -> Float[Array, "R V"]:
        """Returns the chance of each token: what `sample` draws from. The arguments are its own."""
        axis, none = vocab_axis(mesh, logits.shape[-1]), PartitionSpec()
        history, masks = _or_none(logits, history, masks)
        return on_each(
            functools.partial(chances_of_rows, axis),
            mesh,
            in_specs=(none, vocab_spec(axis), history_spec(axis), none, none),
            out_specs=vocab_spec(axis),
        )(self, logits, history, masks, positions)

    def without_changes(self) -> "Samplers":
        """The samplers of logits that `changed` has changed already; give them no history."""
        edits = ("edit_tokens", "edit_values", "edit_until")
        none: Any = {name: getattr(self, name)[:, :0] for name in edits}
        return dataclasses.replace(self, **none)

    def ends(self, token: Int[Array, " R"], stops: Int[Array, " S"]) -> Bool[Array, " R"]:
        """Marks the rows that these tokens end, where the model has these stop tokens."""
        by_model = jnp.any(token[:, None] == stops, axis=1) & ~self.ignores_stops
        return by_model | jnp.any(token[:, None] == self.stops, axis=1)

    def changed(
        self,
        logits: Array,
        history: History,
        masks: Array,
        positions: Array,
        first: Array | int = 0,
    ) -> Array:
        """The logits after biases, penalties, bans and masks, of the vocabulary from token `first`
        on."""
        if self.edit_tokens.shape[1]:
            index = self.edit_tokens - first
            index = jnp.where((self.edit_tokens < 0) | (index < 0), logits.shape[1], index)
            values = jnp.where(positions[:, None] < self.edit_until, self.edit_values, 0.0)
            row = jnp.arange(logits.shape[0])[:, None]
            logits = logits.at[row, index].add(values, mode="drop")
        if history.tokens.shape[1]:  # before penalties, as transformers does
            logits = with_word_values(logits, history, self.words, self.word_values, first)
        if history.counts.shape[1]:
            penalties = (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0)
            # A GPU would copy the logits of rows without, which takes as long as this.
            wanted = jnp.any(penalties) if current_device() is None else True
            logits = lax.cond(wanted, lambda x: penalised(x, history, self), lambda x: x, logits)
        if history.tokens.shape[1]:
            logits = without_repeats(logits, history, self.ngram, first)
        return admitted(logits, masks, first)


def _or_none(logits: Array, history: History | None, masks: Array | None) -> tuple[History, Array]:
    """The texts and masks of rows, of size 0 where there are none."""
    rows = logits.shape[0]
    history = History.empty(rows) if history is None else history
    return history, jnp.zeros((rows, 0), jnp.uint32) if masks is None else masks


def _words_of(samplers: Sequence[Sampler], places: SamplerPlaces) -> tuple[np.ndarray, np.ndarray]:
    """`Samplers.words` and `word_values` of these samplers."""
    words = np.full((len(samplers), places.words, places.word_tokens), -1, np.int32)
    values = np.zeros((len(samplers), places.words), np.float32)
    for r, sampler in enumerate(samplers):
        for w, (word, value) in enumerate(sampler.long_words):
            words[r, w, : len(word)], values[r, w] = word, value
    return words, values


def _places_of(
    samplers: Sequence[Sampler], stops: Sequence[int], places: SamplerPlaces | None
) -> SamplerPlaces:
    """The fewest places that serve these samplers, or those that are given, checked."""
    if places is None:
        return SamplerPlaces.of(samplers, stops)
    what = {
        "edits": "biased or forbidden tokens",
        "stops": "stop_token_ids",
        "words": "bad_words and sequences with a bias",
        "word_tokens": "tokens in one of these",
    }
    for i, sampler in enumerate(samplers):
        needed = SamplerPlaces.of([sampler], stops)
        for name, text in what.items():
            if (count := getattr(needed, name)) > getattr(places, name):
                raise ValueError(
                    f"sampler {i} has {count} {text}; there are places for {getattr(places, name)}"
                )
    return places
