"""Automata over the bytes of generated text, and the same automata over tokens.

With those over tokens a jitted loop can read along. A pattern is written once, byte by byte, as a
Python function. Lifted to a vocabulary it is two small tables, exact for any tokenizer: a token has
the effect of its bytes one after the other, wherever in the token a match ends.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np
from jax import Array
from jaxtyping import Bool, Int


@dataclasses.dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton over bytes that marks some of its transitions.

    It is on the host, and has S states.

    Attributes:
      transitions: int32[S, 256], the state after a byte.
      marks: bool[S, 256], whether taking this transition completes a match.
      start: the state before the first byte.

    Raises:
      ValueError: tables of other shapes, or with a state that does not exist.
    """

    transitions: np.ndarray
    marks: np.ndarray
    start: int = 0

    def __post_init__(self) -> None:
        if (
            self.transitions.ndim != 2
            or self.transitions.shape[1] != 256
            or self.marks.shape != self.transitions.shape
        ):
            raise ValueError(
                f"transitions has shape {self.transitions.shape} and marks {self.marks.shape}; "
                "both must be [states, 256]"
            )
        states = self.num_states
        if (
            not 0 <= self.start < states
            or self.transitions.min() < 0
            or self.transitions.max() >= states
        ):
            raise ValueError(
                f"start or transitions name a state outside 0 to {states - 1}, the states that "
                "transitions has rows for"
            )

    @classmethod
    def build(
        cls, start: Hashable, step: Callable[[Hashable, int], tuple[Hashable, bool]]
    ) -> "ByteAutomaton":
        """The automaton of all states that can be reached from `start`, numbered breadth first.

        Args:
          start: the state before the first byte; it gets number 0.
          step: (state, byte) -> (state after it, whether it marks). It must reach finitely many
            states.
        """
        numbers, found = {start: 0}, [start]
        transitions, marks = [], []
        for state in found:  # grows as new states are found
            after, marked = zip(*(step(state, byte) for byte in range(256)), strict=True)
            for reached in after:
                if reached not in numbers:
                    numbers[reached] = len(found)
                    found.append(reached)
            transitions.append([numbers[reached] for reached in after])
            marks.append(marked)
        return cls(np.asarray(transitions, np.int32), np.asarray(marks, np.bool_))

    @property
    def num_states(self) -> int:
        """The number of states, S."""
        return self.transitions.shape[0]

    def read(self, text: bytes, state: int | None = None) -> tuple[int, bool]:
        """Reads bytes on the host, from `state` or else the start.

        Returns:
          The state after them, and whether any of them marked.
        """
        state, marked = self.start if state is None else state, False
        for byte in text:
            marked |= bool(self.marks[state, byte])
            state = int(self.transitions[state, byte])
        return state, marked

    def lift(self, tokens: Sequence[bytes]) -> "TokenAutomaton":
        """The same automaton over tokens.

        Args:
          tokens: for each token of the vocabulary the bytes that it adds to the text. A token
            without bytes changes nothing.

        Raises:
          ValueError: no tokens.
        """
        if not tokens:
            raise ValueError(
                "there are no tokens to lift the automaton to; give the bytes of each token of the "
                "vocabulary"
            )
        # Reading some bytes is a function from the state before to the state after and the mark: S
        # numbers, state * 2 + mark. Many tokens are the same function. All tokens are read in
        # parallel, a byte at a time, and only new (function, byte) pairs are computed.
        table = 2 * self.transitions + self.marks
        functions = [2 * np.arange(self.num_states, dtype=np.int32)]
        numbers = {functions[0].tobytes(): 0}
        text = np.frombuffer(b"".join(tokens), np.uint8)
        lengths = np.asarray([len(token) for token in tokens], np.int64)
        starts = np.cumsum(lengths) - lengths
        classes = np.zeros(len(tokens), np.int64)
        for index in range(int(lengths.max())):
            longer = np.flatnonzero(lengths > index)
            pairs, which = np.unique(
                classes[longer] * 256 + text[starts[longer] + index], return_inverse=True
            )
            reached = []
            for function, byte in (divmod(pair, 256) for pair in pairs.tolist()):
                after = table[functions[function] >> 1, byte] | (functions[function] & 1)
                reached.append(numbers.setdefault(after.tobytes(), len(functions)))
                if reached[-1] == len(functions):
                    functions.append(after)
            classes[longer] = np.asarray(reached)[which]
        used, classes = np.unique(classes, return_inverse=True)
        by_state = np.stack([functions[number] for number in used], axis=1)
        return TokenAutomaton(
            classes=jax.device_put(classes.astype(np.int32)),
            transitions=jax.device_put((by_state >> 1).astype(np.int32)),
            marks=jax.device_put(by_state % 2 == 1),
            start=jax.device_put(np.int32(self.start)),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenAutomaton:
    """A `ByteAutomaton` over tokens, as data of a jitted program.

    S states, C classes of tokens, V vocabulary.

    Attributes:
      classes: int32[V]; tokens with the same effect in every state share a class, which keeps the
        tables small.
      transitions: int32[S, C], the state after a token.
      marks: bool[S, C], whether any byte of the token marks.
      start: int32[], the state before the first token.
    """

    classes: Array
    transitions: Array
    marks: Array
    start: Array

    def step(
        self, state: Int[Array, "*R"], token: Int[Array, "*R"]
    ) -> tuple[Int[Array, "*R"], Bool[Array, "*R"]]:
        """Reads one token in each row.

        Returns:
          The states after them, and whether they marked.
        """
        token_class = self.classes[token]
        return self.transitions[state, token_class], self.marks[state, token_class]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenAutomata:
    """Automata over one vocabulary, of which each row reads with one of its own.

    A automata, V vocabulary, Z entries of all their tables together. Automaton 0 has one state and
    marks nothing.

    Attributes:
      classes: int32[A, V], the class of each token in each automaton.
      num_classes: int32[A]; first: int32[A], where an automaton's table starts.
      starts: int32[A], the state before the first token.
      table: int32[Z], for each automaton, state and class the state after a token, times 2, plus 1
        where it marks.
    """

    classes: Array
    num_classes: Array
    first: Array
    starts: Array
    table: Array

    @classmethod
    def of(
        cls,
        automata: Sequence[TokenAutomaton] = (),
        *,
        vocab_size: int,
        max_automata: int = 0,
        max_entries: int = 0,
    ) -> "TokenAutomata":
        """Puts automata one after the other; they get the numbers 1, 2, and so on.

        Args:
          automata: over the same vocabulary.
          vocab_size: V.
          max_automata, max_entries: A - 1 and Z at least, so that other automata of about the same
            size make arrays of the same shapes.
        """
        count = 1 + max(len(automata), max_automata)
        classes, numbers = np.zeros((count, vocab_size), np.int32), np.zeros((3, count), np.int32)
        tables = [np.zeros(1, np.int32)]
        for i, automaton in enumerate(automata, start=1):
            table = 2 * np.asarray(automaton.transitions) + np.asarray(automaton.marks)
            classes[i] = np.asarray(automaton.classes)
            numbers[:, i] = table.shape[1], sum(map(len, tables)), int(automaton.start)
            tables.append(table.reshape(-1))
        table = np.concatenate(tables).astype(np.int32)
        table = np.pad(table, (0, max(0, max_entries - len(table))))
        return cls(*jax.device_put((classes, *numbers, table)))

    def step(
        self, which: Int[Array, "*R"], state: Int[Array, "*R"], token: Int[Array, "*R"]
    ) -> tuple[Int[Array, "*R"], Bool[Array, "*R"]]:
        """Reads one token in each row, with the automaton `which`; see `TokenAutomaton.step`."""
        token_class = self.classes[which, token]
        found = self.table[self.first[which] + state * self.num_classes[which] + token_class]
        return found >> 1, found % 2 == 1
