"""Steps of rows: paragraphs that move to a shared block when finished (Hogwild! section 3.2).

The device alone finds where a step ends, whether it holds an answer, the tokens that open the next
one, and the worker that is asked whether its work is redundant: `jaxshare.decoding.step_ends`, of
which `Steps` is the state.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool

from jaxshare.decoding.array_rows import filled, placed, with_row
from jaxshare.decoding.automaton import TokenAutomata, TokenAutomaton
from jaxshare.layout import bucket
from jaxshare.seeds import seed_words, stream_seed

_MIN_ENTRIES = 2**14
"""Entries of the automata's tables, at least, so that other automata need no other program."""


class Mark(enum.IntFlag):
    """The events at a sampled token."""

    STEP = 1
    """The token ended a step. If there is a next one, it is the first token fed to it."""
    ANSWER = 2
    """The token closed an answer."""
    ASKED = 4
    """The step after the token opens with the question, whether the device or the host opens it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Steps:
    """The state with which decode ends the steps of rows by itself.

    R rows, X places for sampled tokens, N prepared openings, E tokens of the longest. Rows of one
    session have the same settings and counters. Saved sessions name their arrays by these fields.

    Attributes:
      automata: find the ends of steps, and the ends of answers, in what rows sample.
      ends, answers: int32[R], each row's automaton for either. A row that writes without steps has
        automaton 0, which finds nothing.
      end_state, answer_state: int32[R], their states; both start anew with a step.
      answered: bool[R], whether the step being written holds an answer.
      at_once: bool[R], whether an answer ends a row where it closes, not with the step that holds
        it.
      together: bool[R], whether one row's answer ends all rows of its session.
      on_stop: bool[R], whether a stop token of one row ends all rows of its session.
      targets: int32[R], the block to whose end a finished step moves; -1 leaves it in place.
      number: int32[R], the step being written, from 1.
      base: int32[R], the step that the first prepared opening is for.
      prepared: int32[R], the number of prepared openings. A row that needs one more ends with
        `FinishReason.STEP`, unmoved, and so do the rows of its session after it whose steps end in
        the same pass, so that steps always move in the order of the rows. So do the rows after one
        whose step ends with an answer.
      openings: int32[R, N, 2, E], tokens to feed after the one that ended a step: without and with
        the question.
      opening_sizes: int32[R, N, 2].
      ask_every: int32[R], sampled tokens, all rows of the session together, between questions; 0
        never asks.
      since: int32[R], tokens since the session's last question.
      asked: int32[R], questions of the session so far.
      due: bool[R], rows whose next step asks.
      seed: uint32[R, 2], the session's key, which chooses the worker to ask.
      marks: int32[R, X], `Mark` flags of each sampled token.
      sampled_at: int32[R, X], the passes that its row had run when it was sampled.
    """

    automata: TokenAutomata
    ends: Array
    answers: Array
    end_state: Array
    answer_state: Array
    answered: Array
    at_once: Array
    together: Array
    on_stop: Array
    targets: Array
    number: Array
    base: Array
    prepared: Array
    openings: Array
    opening_sizes: Array
    ask_every: Array
    since: Array
    asked: Array
    due: Array
    seed: Array
    marks: Array
    sampled_at: Array

    @classmethod
    def none(
        cls,
        rows: int,
        automata: TokenAutomata,
        *,
        capacity: int = 0,
        openings: int = 0,
        longest: int = 0,
    ) -> "Steps":
        """Rows that write without steps.

        Args:
          rows: R.
          automata: those that rows may use later.
          capacity: X; openings: N; longest: E. With 0 they take no memory.
        """
        zeros, ones, never = filled(rows), filled(rows, 1), filled(rows, False, bool)
        return cls(
            automata=automata,
            ends=zeros,
            answers=zeros,
            end_state=zeros,
            answer_state=zeros,
            answered=never,
            at_once=never,
            together=never,
            on_stop=never,
            targets=filled(rows, -1),
            number=ones,
            base=ones,
            prepared=zeros,
            openings=filled((rows, openings, 2, longest)),
            opening_sizes=filled((rows, openings, 2)),
            ask_every=zeros,
            since=zeros,
            asked=zeros,
            due=never,
            seed=filled((rows, 2), dtype=np.uint32),
            marks=filled((rows, capacity)),
            sampled_at=filled((rows, capacity)),
        )

    @classmethod
    def create(
        cls,
        ends: TokenAutomaton,
        answers: TokenAutomaton,
        targets: Sequence[int],
        *,
        capacity: int,
        openings: int = 0,
        longest: int = 1,
        ask_every: int = 0,
        seed: int = 0,
        at_once: bool = False,
        together: bool = True,
        on_stop: bool = False,
    ) -> "Steps":
        """Steps of one session about to start, with room for openings but none prepared.

        Args:
          ends, answers: automata over the model's tokens.
          targets: for each row the block to which its finished steps move, or -1.
          capacity: X, places for the tokens that a row samples.
          openings: N.
          longest: E, the most tokens of an opening.
          ask_every, at_once, together, on_stop: see the class.
          seed: of the session; the choice of the worker to ask has its own stream under it.
        """
        entries = 1 + ends.transitions.size + answers.transitions.size
        automata = TokenAutomata.of(
            [ends, answers],
            vocab_size=ends.classes.shape[0],
            max_entries=max(_MIN_ENTRIES, bucket(entries)),
        )
        none = cls.none(
            len(targets), automata, capacity=capacity, openings=max(openings, 1), longest=longest
        )
        zeros, words = none.ends, seed_words([stream_seed(seed, "asked")])[0]
        return dataclasses.replace(
            none,
            ends=zeros + 1,
            answers=zeros + 2,
            end_state=zeros + ends.start,
            answer_state=zeros + answers.start,
            at_once=none.at_once | at_once,
            together=none.together | together,
            on_stop=none.on_stop | on_stop,
            targets=placed(np.asarray(targets, np.int32)),
            ask_every=zeros + ask_every,
            seed=none.seed + words,
        )

    def prepare(
        self, row: int, base: int, openings: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> "Steps":
        """Prepares the openings of a row's steps `base`, `base + 1` and so on.

        An opening is two lists of tokens: without and with the question.

        Raises:
          ValueError: more openings, or longer ones, than there is room for.
        """
        capacity, _, longest = self.openings.shape[1:]
        given = max((len(opening) for pair in openings for opening in pair), default=0)
        if len(openings) > capacity or given > longest:
            raise ValueError(
                f"{len(openings)} openings of up to {given} tokens are given, but there is room "
                f"for {capacity} of {longest}; create the steps with more"
            )
        tokens = np.zeros((capacity, 2, longest), np.int32)
        sizes = np.zeros((capacity, 2), np.int32)
        for i, pair in enumerate(openings):
            for j, opening in enumerate(pair):
                tokens[i, j, : len(opening)], sizes[i, j] = list(opening), len(opening)
        return dataclasses.replace(
            self,
            base=with_row(self.base, row, base),
            prepared=with_row(self.prepared, row, len(openings)),
            openings=with_row(self.openings, row, tokens),
            opening_sizes=with_row(self.opening_sizes, row, sizes),
        )

    def openings_on_host(self) -> "Steps":
        """The steps with their openings in arrays of numpy, for several calls of `prepare`."""
        names = ("base", "prepared", "openings", "opening_sizes")
        on_host: Any = {name: np.asarray(getattr(self, name)) for name in names}
        return dataclasses.replace(self, **on_host)

    def begin(self, row: int, number: int) -> "Steps":
        """Starts step `number` of a row, with nothing of it sampled yet."""
        return dataclasses.replace(
            self,
            number=with_row(self.number, row, number),
            end_state=with_row(self.end_state, row, self.automata.starts[self.ends[row]]),
            answer_state=with_row(self.answer_state, row, self.automata.starts[self.answers[row]]),
            answered=with_row(self.answered, row, False),
        )

    def without(self, rows: Bool[Array, " R"]) -> "Steps":
        """Lets marked rows write without steps, whatever session had them; others stay."""

        def put(whole: Array, value: int | bool) -> Array:
            return jnp.where(rows, value, whole)

        return dataclasses.replace(
            self,
            ends=put(self.ends, 0),
            answers=put(self.answers, 0),
            answered=put(self.answered, False),
            at_once=put(self.at_once, False),
            together=put(self.together, False),
            on_stop=put(self.on_stop, False),
            ask_every=put(self.ask_every, 0),
            due=put(self.due, False),
        )
