"""Regular grammars as tables over tokens, which a jitted loop reads along with."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Int32, UInt32

from jaxshare.decoding.array_rows import filled

MOST_FORCED = 15
"""Forced tokens that are fed along with a sampled one, at most."""
_WORD = 32


@dataclasses.dataclass(frozen=True, eq=False)
class GrammarTable:
    """A regular grammar over the tokens of one vocabulary, on the host. S states, C classes of
    tokens, V vocabulary.

    Attributes:
      classes: int32[V]; tokens with the same effect in every state share a class.
      transitions: int32[S, C], the state after a token of this class, -1 where it is not admitted.
      start: the state of an empty text.
    """

    classes: np.ndarray
    transitions: np.ndarray
    start: int = 0

    @property
    def num_states(self) -> int:
        """S."""
        return len(self.transitions)

    def read(self, tokens: Sequence[int]) -> int:
        """The state after these tokens; -1 if the grammar does not admit them."""
        state = self.start
        for token in tokens:
            state = -1 if state < 0 else int(self.transitions[state, self.classes[token]])
        return state

    def masks(self) -> UInt32[np.ndarray, "S W"]:
        """The tokens that each state admits, a bit each, in words of 32, the lowest bit first."""
        return pack_bits((self.transitions >= 0)[:, self.classes])

    def forced(
        self, stops: Sequence[int]
    ) -> tuple[Int[np.ndarray, "S F"], Int[np.ndarray, "S F"], Int[np.ndarray, " S"]]:
        """The tokens that are forced in each state, the states after them, and how many there are.

        Args:
          stops: tokens that end a row, which are sampled like others.
        """
        admitted = (self.transitions >= 0)[:, self.classes]
        admitted_once = admitted.sum(axis=1) == 1
        only = admitted.argmax(axis=1)
        is_forced = admitted_once & ~np.isin(only, [*stops])
        reached = self.transitions[np.arange(self.num_states), self.classes[only]]
        shape = self.num_states, MOST_FORCED
        tokens, after = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        count, state = np.zeros(self.num_states, np.int32), np.arange(self.num_states)
        goes_on = np.ones(self.num_states, bool)
        for place in range(MOST_FORCED):
            goes_on &= is_forced[state]
            tokens[:, place] = np.where(goes_on, only[state], 0)
            state = np.where(goes_on, reached[state], state)
            after[:, place] = state
            count += goes_on
        return tokens, after, count


def pack_bits(bits: np.ndarray) -> UInt32[np.ndarray, "N W"]:
    """Booleans [N, V] in words of 32, the lowest bit first."""
    padded = np.pad(bits, ((0, 0), (0, -bits.shape[1] % _WORD)))
    packed = np.packbits(padded, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.uint32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GrammarTables:
    """Tables of several grammars, one after the other. T states of all, N grammars, Z transitions
    of all, V vocabulary, W words of 32 tokens, F as `MOST_FORCED`.

    Attributes:
      masks: uint32[T, W], the tokens that a state admits.
      classes: int32[N, V]; grammar: int32[T], that of each state.
      first: int32[T], where a state's transitions begin; transitions: int32[Z].
      forced, after: int32[T, F], the tokens that are forced in a state, and the states after them;
        num_forced: int32[T].
    """

    masks: UInt32[Any, "T W"]
    classes: Int32[Any, "N V"]
    grammar: Int32[Any, " T"]
    first: Int32[Any, " T"]
    transitions: Int32[Any, " Z"]
    forced: Int32[Any, "T F"]
    after: Int32[Any, "T F"]
    num_forced: Int32[Any, " T"]

    @classmethod
    def empty(
        cls, vocab_size: int, states: int = 0, grammars: int = 0, transitions: int = 0
    ) -> "GrammarTables":
        """Tables of no grammar, with room for so many states, grammars and transitions."""
        words = -(-vocab_size // _WORD)
        return cls(
            filled((states, words), dtype=np.uint32),
            filled((grammars, vocab_size)),
            filled(states),
            filled(states),
            filled(transitions),
            filled((states, MOST_FORCED)),
            filled((states, MOST_FORCED)),
            filled(states),
        )

    @property
    def num_states(self) -> int:
        """T."""
        return self.masks.shape[0]

    @property
    def num_words(self) -> int:
        """W."""
        return self.masks.shape[1]

    def step(self, states: Int[Any, " R"], tokens: Int[Any, " R"]) -> Int[Any, " R"]:
        """The states of rows after a token that they admit; 0 after another."""
        token_class = self.classes[self.grammar[states], tokens]
        reached = self.transitions[self.first[states] + token_class]
        return jax.numpy.maximum(reached, 0)
