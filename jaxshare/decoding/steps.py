"""Steps: rows that write a paragraph at a time, each of which moves to a shared block when it is
finished (Hogwild! section 3.2).

The decode loop calls `after_sampling` after it has sampled. Where a step ends, whether an answer is
in it, what opens the next one and which worker is asked whether its work is redundant: all of it is
found on the device.
"""

import dataclasses
import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare.cache import KVCache
from jaxshare.decoding.automaton import TokenAutomaton
from jaxshare.decoding.sampling import uniforms
from jaxshare.layout import Layout
from jaxshare.seeds import seed_words, stream_seed


class Mark(enum.IntFlag):
    """What happened at a sampled token."""

    STEP = 1
    """It ended a step. If there is a next one, it is the first token fed to it."""
    ANSWER = 2
    """It closed an answer."""
    ASKED = 4
    """The step after it opens with the question, whether the device or the host opens it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Steps:
    """What decode needs to end steps by itself. R rows, X places for sampled tokens, N prepared
    openings, E tokens of the longest.

    Attributes:
      ends, answers: find the end of a step, and the end of an answer, in what a row samples.
      end_state, answer_state: int32[R], how far each automaton has come; both begin anew with a
        step.
      answered: bool[R], whether the step being written holds an answer.
      at_once: bool[], whether an answer ends a row where it closes, and not with the step that
        holds it.
      together: bool[], whether one row's answer ends all rows.
      on_stop: bool[], whether a stop token of one row ends all rows, as an answer does.
      targets: int32[R], the block to whose end a finished step moves; -1 leaves it where it is.
      number: int32[R], the step being written, from 1.
      base: int32[R], the step that the first prepared opening is for.
      prepared: int32[R], how many openings are prepared. A row that needs one that is not ends with
        `Reason.STEP`, unmoved, and so do the rows after it whose steps end in the same pass, so
        that steps always move in the order of the rows.
      openings: int32[R, N, 2, E], tokens to feed after the one that ended a step: without and with
        the question.
      opening_sizes: int32[R, N, 2].
      ask_every: int32[], sampled tokens, all rows together, between questions; 0 never asks.
      since: int32[], tokens since the last question; asked: int32[], questions so far; due:
        bool[R], rows whose next step asks.
      seed: uint32[2], the key of the choice which worker to ask.
      marks: int32[R, X], `Mark` flags of each sampled token.
      at: int32[R, X], how many passes there had been when it was sampled.
    """

    ends: TokenAutomaton
    answers: TokenAutomaton
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
    at: Array

    @classmethod
    def create(
        cls,
        ends: TokenAutomaton,
        answers: TokenAutomaton,
        targets: Sequence[int],
        *,
        room: int,
        openings: int = 0,
        longest: int = 1,
        ask_every: int = 0,
        seed: int = 0,
        at_once: bool = False,
        together: bool = True,
        on_stop: bool = False,
    ) -> "Steps":
        """Steps about to begin, with room for openings but none prepared.

        Args:
          ends, answers: automata over the model's tokens.
          targets: for each row the block to which its finished steps move, or -1.
          room: X, places for the tokens that a row samples.
          openings: N; longest: E, at most.
          ask_every, at_once, together, on_stop: see the class.
          seed: of the session; the choice which worker to ask has a stream of its own under it.
        """
        rows = len(targets)
        zeros = jnp.zeros(rows, jnp.int32)
        return cls(
            ends=ends,
            answers=answers,
            end_state=zeros + ends.start,
            answer_state=zeros + answers.start,
            answered=zeros > 0,
            at_once=jnp.asarray(at_once),
            together=jnp.asarray(together),
            on_stop=jnp.asarray(on_stop),
            targets=jnp.asarray(targets, jnp.int32),
            number=zeros + 1,
            base=zeros + 1,
            prepared=zeros,
            openings=jnp.zeros((rows, max(openings, 1), 2, longest), jnp.int32),
            opening_sizes=jnp.zeros((rows, max(openings, 1), 2), jnp.int32),
            ask_every=jnp.asarray(ask_every, jnp.int32),
            since=jnp.zeros((), jnp.int32),
            asked=jnp.zeros((), jnp.int32),
            due=zeros > 0,
            seed=jnp.asarray(seed_words([stream_seed(seed, "asked")])[0]),
            marks=jnp.zeros((rows, room), jnp.int32),
            at=jnp.zeros((rows, room), jnp.int32),
        )

    def prepare(
        self, row: int, base: int, openings: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> "Steps":
        """Prepares what opens a row's steps `base`, `base + 1` and so on: tokens without and with
        the question.

        Raises:
          ValueError: more openings, or longer ones, than there is room for.
        """
        most, _, longest = self.openings.shape[1:]
        given = max((len(opening) for pair in openings for opening in pair), default=0)
        if len(openings) > most or given > longest:
            raise ValueError(
                f"{len(openings)} openings of up to {given} tokens are given, but there is room "
                f"for {most} of {longest}; create the steps with more"
            )
        tokens, sizes = np.zeros((most, 2, longest), np.int32), np.zeros((most, 2), np.int32)
        for i, pair in enumerate(openings):
            for j, opening in enumerate(pair):
                tokens[i, j, : len(opening)], sizes[i, j] = list(opening), len(opening)
        return dataclasses.replace(
            self,
            base=self.base.at[row].set(base),
            prepared=self.prepared.at[row].set(len(openings)),
            openings=self.openings.at[row].set(tokens),
            opening_sizes=self.opening_sizes.at[row].set(sizes),
        )

    def begin(self, row: int, number: int) -> "Steps":
        """A row begins to write a step, with nothing of it sampled yet."""
        return dataclasses.replace(
            self,
            number=self.number.at[row].set(number),
            end_state=self.end_state.at[row].set(self.ends.start),
            answer_state=self.answer_state.at[row].set(self.answers.start),
            answered=self.answered.at[row].set(False),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """What `after_sampling` found.

    Attributes:
      over: bool[R], rows that need not write on, because an answer stands or, with `on_stop`, a row
        has stopped.
      full: bool[], a finished step finds no room where it has to move: nobody can write on.
      held: bool[R], rows whose step has ended and that have no opening prepared.
      opens: bool[R], rows whose step has ended and moved; they go on with the token that ended it
        and the opening int32[R, E] of int32[R] tokens.
      moved: bool[R], those of them whose steps have a block to move to.
    """

    over: Array
    full: Array
    held: Array
    opens: Array
    opening: Array
    opening_size: Array
    moved: Array


def after_sampling(
    steps: Steps,
    cache: KVCache,
    layout: Layout,
    token: Array,
    place: Array,
    due: Array,
    stopped: Array,
    running: Array,
    passes: Array,
) -> tuple[Steps, KVCache, StepOutcome]:
    """Reads the tokens just sampled, and moves the steps that they end, those of lower rows first.

    Args:
      token: int32[R]; place: int32[R], where each stands in `Steps.marks`; due: bool[R], the rows
        that sampled.
      stopped: bool[R], rows whose token is a stop token; running: bool[R], rows that may write on.
      passes: int32[], so far.
    """
    row = jnp.arange(due.shape[0])
    end_state, ended = steps.ends.step(steps.end_state, token)
    answer_state, closed = steps.answers.step(steps.answer_state, token)
    closed &= due
    answered = steps.answered | closed
    ended &= due & running
    over = (ended | (due & stopped) | (steps.at_once & closed)) & answered
    over |= (steps.together & jnp.any(over)) | (steps.on_stop & jnp.any(due & stopped))
    complete, ended = ended & over, ended & ~over

    index = steps.number + 1 - steps.base
    held = ended & ((index < 0) | (index >= steps.prepared))
    held = ended & (jnp.cumsum(held, dtype=jnp.int32) > 0)
    moving = ended & ~held
    wanted = moving & (steps.targets >= 0)
    cache, left = _move(cache, layout, steps.targets, wanted)
    full = jnp.any(left)
    opens = moving & ~left

    since = steps.since + jnp.sum(due, dtype=jnp.int32)
    ask = (steps.ask_every > 0) & (since >= steps.ask_every) & jnp.any(running)
    turn = uniforms(steps.seed[None], steps.asked[None])[0] * jnp.sum(running, dtype=jnp.float32)
    chosen = running & (jnp.cumsum(running, dtype=jnp.int32) - 1 == turn.astype(jnp.int32))
    asks = (opens | held | complete) & steps.due

    index = jnp.clip(index, 0, steps.openings.shape[1] - 1)
    found = (Mark.STEP, complete | opens | held), (Mark.ANSWER, closed), (Mark.ASKED, asks)
    marks = sum(jnp.where(where, mark.value, 0) for mark, where in found)
    place = jnp.where(due, place, steps.marks.shape[1])
    steps = dataclasses.replace(
        steps,
        end_state=jnp.where(opens, steps.ends.start, jnp.where(due, end_state, steps.end_state)),
        answer_state=jnp.where(
            opens, steps.answers.start, jnp.where(due, answer_state, steps.answer_state)
        ),
        answered=answered & ~opens,
        number=steps.number + opens.astype(jnp.int32),
        since=jnp.where(ask, since - steps.ask_every, since),
        asked=steps.asked + ask.astype(jnp.int32),
        due=(steps.due & ~asks) | (ask & chosen),
        marks=steps.marks.at[row, place].set(marks, mode="drop"),
        at=steps.at.at[row, place].set(passes, mode="drop"),
    )
    asking = asks.astype(jnp.int32)
    return (
        steps,
        cache,
        StepOutcome(
            over,
            full,
            held,
            opens,
            steps.openings[row, index, asking],
            steps.opening_sizes[row, index, asking],
            wanted & ~left,
        ),
    )


def _move(cache: KVCache, layout: Layout, targets: Array, wanted: Array) -> tuple[KVCache, Array]:
    """Moves the blocks of the `wanted` rows to their targets in the order of the rows; stops at one
    that does not fit.

    Returns:
      The cache, and bool[R]: rows that have not moved.
    """
    written = jnp.maximum(layout.written, 0)

    def fits(state: tuple[KVCache, Array]) -> Array:
        cache, left = state
        row = jnp.argmax(left)
        end = cache.lengths[targets[row]] + cache.lengths[written[row]]
        return jnp.any(left) & (end <= cache.capacities[targets[row]])

    def move(state: tuple[KVCache, Array]) -> tuple[KVCache, Array]:
        cache, left = state
        row = jnp.argmax(left)
        return cache.move(written[row], targets[row]), left.at[row].set(False)

    return jax.lax.while_loop(fits, move, (cache, wanted))
