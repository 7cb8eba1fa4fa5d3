"""Steps of rows: paragraphs that move to a shared block when finished (Hogwild! section 3.2).

The decode loop calls `after_sampling` after it has sampled. The device alone finds where a step
ends, whether it holds an answer, the tokens that open the next one, and the worker that is asked
whether its work is redundant.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from jaxshare.cache import KVCache
from jaxshare.decoding.automaton import TokenAutomaton
from jaxshare.decoding.sampling import uniforms
from jaxshare.layout import Layout
from jaxshare.seeds import seed_words, stream_seed


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
    """The state with which decode ends steps by itself.

    R rows, X places for sampled tokens, N prepared openings, E tokens of the longest. Saved
    sessions name their arrays by these fields.

    Attributes:
      ends, answers: find the end of a step, and the end of an answer, in what a row samples.
      end_state, answer_state: int32[R], the state of each automaton; both start anew with a step.
      answered: bool[R], whether the step being written holds an answer.
      at_once: bool[], whether an answer ends a row where it closes, not with the step that holds
        it.
      together: bool[], whether one row's answer ends all rows.
      on_stop: bool[], whether a stop token of one row ends all rows, as an answer does.
      targets: int32[R], the block to whose end a finished step moves; -1 leaves it in place.
      number: int32[R], the step being written, from 1.
      base: int32[R], the step that the first prepared opening is for.
      prepared: int32[R], the number of prepared openings. A row that needs one more ends with
        `FinishReason.STEP`, unmoved, and so do the rows after it whose steps end in the same pass,
        so that steps always move in the order of the rows.
      openings: int32[R, N, 2, E], tokens to feed after the one that ended a step: without and with
        the question.
      opening_sizes: int32[R, N, 2].
      ask_every: int32[], sampled tokens, all rows together, between questions; 0 never asks.
      since: int32[], tokens since the last question.
      asked: int32[], questions so far.
      due: bool[R], rows whose next step asks.
      seed: uint32[2], the key that chooses the worker to ask.
      marks: int32[R, X], `Mark` flags of each sampled token.
      at: int32[R, X], the passes that had run when it was sampled.
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
        """Steps about to start, with room for openings but none prepared.

        Args:
          ends, answers: automata over the model's tokens.
          targets: for each row the block to which its finished steps move, or -1.
          room: X, places for the tokens that a row samples.
          openings: N.
          longest: E, the most tokens of an opening.
          ask_every, at_once, together, on_stop: see the class.
          seed: of the session; the choice of the worker to ask has its own stream under it.
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
            base=self.base.at[row].set(base),
            prepared=self.prepared.at[row].set(len(openings)),
            openings=self.openings.at[row].set(tokens),
            opening_sizes=self.opening_sizes.at[row].set(sizes),
        )

    def begin(self, row: int, number: int) -> "Steps":
        """Starts step `number` of a row, with nothing of it sampled yet."""
        return dataclasses.replace(
            self,
            number=self.number.at[row].set(number),
            end_state=self.end_state.at[row].set(self.ends.start),
            answer_state=self.answer_state.at[row].set(self.answers.start),
            answered=self.answered.at[row].set(False),
        )


class StepOutcome(NamedTuple):
    """The result of `after_sampling`.

    Attributes:
      done: bool[R], rows that need not write on, because there is an answer or, with `on_stop`, a
        row has stopped.
      full: bool[], whether a finished step has no room where it has to move: no row can write on.
      unprepared: bool[R], rows whose step has ended and that have no opening prepared.
      opens: bool[R], rows whose step has ended and moved; they go on with the token that ended it
        and the opening.
      opening: int32[R, E], of which `opening_size` int32[R] tokens are real.
      moved: bool[R], the rows of `opens` whose steps have a block to move to.
    """

    done: Array
    full: Array
    unprepared: Array
    opens: Array
    opening: Array
    opening_size: Array
    moved: Array


class _Reading(NamedTuple):
    """The automata's finds in the sampled tokens: bool[R], the states aside."""

    end_state: Array
    answer_state: Array
    closed: Array  # an answer, with this token
    answered: Array  # in the step so far
    done: Array
    complete: Array  # the row's last step has ended
    ended: Array  # a step has ended, and another follows


def after_sampling(
    steps: Steps,
    cache: KVCache,
    layout: Layout,
    token: Int[Array, " R"],
    index: Int[Array, " R"],
    sampled: Bool[Array, " R"],
    stopped: Bool[Array, " R"],
    running: Bool[Array, " R"],
    passes: Int[Array, ""],
) -> tuple[Steps, KVCache, StepOutcome]:
    """Reads the tokens just sampled, and moves the steps that they end, those of lower rows first.

    Args:
      token, index: the tokens, and their places in `Steps.marks`.
      sampled, stopped, running: the rows that sampled, that sampled a stop token, and that may
        write on.
      passes: the number so far.
    """
    read = _read(steps, token, sampled, stopped, running)
    opening = steps.number + 1 - steps.base
    unprepared = read.ended & ((opening < 0) | (opening >= steps.prepared))
    # The rows after an unprepared one wait for it, so that steps move in the order of the rows.
    unprepared = read.ended & (jnp.cumsum(unprepared, dtype=jnp.int32) > 0)
    moves = read.ended & ~unprepared
    to_target = moves & (steps.targets >= 0)
    cache, left = _move(cache, layout, steps.targets, to_target)
    opens = moves & ~left
    asks = (opens | unprepared | read.complete) & steps.due

    row, asking = jnp.arange(sampled.shape[0]), asks.astype(jnp.int32)
    opening = jnp.clip(opening, 0, steps.openings.shape[1] - 1)
    outcome = StepOutcome(
        done=read.done,
        full=jnp.any(left),
        unprepared=unprepared,
        opens=opens,
        opening=steps.openings[row, opening, asking],
        opening_size=steps.opening_sizes[row, opening, asking],
        moved=to_target & ~left,
    )
    ends = read.complete | opens | unprepared
    events = (Mark.STEP, ends), (Mark.ANSWER, read.closed), (Mark.ASKED, asks)
    marks = sum(jnp.where(where, mark.value, 0) for mark, where in events)
    # Rows that have not sampled write outside the arrays, which drop what they write.
    index = jnp.where(sampled, index, steps.marks.shape[1])
    steps = dataclasses.replace(
        _with_question(_advanced(steps, read, sampled, opens), asks, sampled, running),
        marks=steps.marks.at[row, index].set(marks, mode="drop"),
        at=steps.at.at[row, index].set(passes, mode="drop"),
    )
    return steps, cache, outcome


def _read(steps: Steps, token: Array, sampled: Array, stopped: Array, running: Array) -> _Reading:
    end_state, ended = steps.ends.step(steps.end_state, token)
    answer_state, closed = steps.answers.step(steps.answer_state, token)
    closed &= sampled
    answered = steps.answered | closed
    ended &= sampled & running
    stopped = sampled & stopped
    done = (ended | stopped | (steps.at_once & closed)) & answered
    done |= (steps.together & jnp.any(done)) | (steps.on_stop & jnp.any(stopped))
    return _Reading(end_state, answer_state, closed, answered, done, ended & done, ended & ~done)


def _advanced(steps: Steps, read: _Reading, sampled: Array, opens: Array) -> Steps:
    """The automata after the sampled tokens; those of rows that open a step start anew."""
    end_state = jnp.where(sampled, read.end_state, steps.end_state)
    answer_state = jnp.where(sampled, read.answer_state, steps.answer_state)
    return dataclasses.replace(
        steps,
        end_state=jnp.where(opens, steps.ends.start, end_state),
        answer_state=jnp.where(opens, steps.answers.start, answer_state),
        answered=read.answered & ~opens,
        number=steps.number + opens.astype(jnp.int32),
    )


def _with_question(steps: Steps, asks: Array, sampled: Array, running: Array) -> Steps:
    """Counts the sampled tokens, and after `ask_every` of them makes a row due to be asked.

    The row is a running one, chosen at random. Rows that have just asked are due no more.
    """
    since = steps.since + jnp.sum(sampled, dtype=jnp.int32)
    ask = (steps.ask_every > 0) & (since >= steps.ask_every) & jnp.any(running)
    uniform = uniforms(steps.seed[None], steps.asked[None])[0]
    nth = (uniform * jnp.sum(running, dtype=jnp.float32)).astype(jnp.int32)
    chosen = running & (jnp.cumsum(running, dtype=jnp.int32) - 1 == nth)
    return dataclasses.replace(
        steps,
        since=jnp.where(ask, since - steps.ask_every, since),
        asked=steps.asked + ask.astype(jnp.int32),
        due=(steps.due & ~asks) | (ask & chosen),
    )


def _move(cache: KVCache, layout: Layout, targets: Array, moves: Array) -> tuple[KVCache, Array]:
    """Moves the blocks of bool[R] rows to their targets, in the order of the rows.

    Stops at one that does not fit.

    Returns:
      The cache, and bool[R]: the rows that have not moved.
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

    return jax.lax.while_loop(fits, move, (cache, moves))
