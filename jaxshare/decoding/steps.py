"""Steps of rows: paragraphs that move to a shared block when finished (Hogwild! section 3.2).

The decode loop calls `after_sampling` after it has sampled. The device alone finds where a step
ends, whether it holds an answer, the tokens that open the next one, and the worker that is asked
whether its work is redundant.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from jaxshare.cache import KVCache
from jaxshare.decoding.array_rows import filled, placed, with_row
from jaxshare.decoding.automaton import TokenAutomata, TokenAutomaton
from jaxshare.decoding.sampling import uniforms
from jaxshare.decoding.sessions import Sessions
from jaxshare.layout import Layout, bucket
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


class StepOutcome(NamedTuple):
    """The result of `after_sampling`.

    Attributes:
      done: bool[R], rows that need not write on, because there is an answer or, with `on_stop`, a
        row of their session has stopped.
      full: bool[R], the rows of sessions in which a finished step has no room where it has to move:
        none of them can write on.
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
    sessions: Sessions,
    token: Int[Array, " R"],
    index: Int[Array, " R"],
    sampled: Bool[Array, " R"],
    stopped: Bool[Array, " R"],
    running: Bool[Array, " R"],
    passes: Int[Array, " R"],
) -> tuple[Steps, KVCache, StepOutcome]:
    """Reads the tokens just sampled, and moves the steps that they end, those of lower rows first.

    Args:
      sessions: of the rows.
      token, index: the tokens, and their places in `Steps.marks`.
      sampled, stopped, running: the rows that sampled, that sampled a stop token, and that may
        write on.
      passes: the number that each row has run.
    """
    read = _read(steps, sessions, token, sampled, stopped, running)
    opening = steps.number + 1 - steps.base
    unprepared = read.ended & ((opening < 0) | (opening >= steps.prepared))
    # The rows after an unprepared one wait for it, so that steps move in the order of the rows, and
    # so do those after one with an answer, which may turn out to be none.
    waits = unprepared | (read.complete & (steps.targets >= 0))
    unprepared = unprepared | (read.ended & (sessions.before(waits) > 0))
    moves = read.ended & ~unprepared
    to_target = moves & (steps.targets >= 0)
    cache, left = _move(cache, layout, sessions, steps.targets, to_target)
    opens = moves & ~left
    asks = (opens | unprepared | read.complete) & steps.due

    row, asking = jnp.arange(sampled.shape[0]), asks.astype(jnp.int32)
    opening = jnp.clip(opening, 0, steps.openings.shape[1] - 1)
    outcome = StepOutcome(
        done=read.done,
        full=sessions.any(left),
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
    advanced = _advanced(steps, read, sampled, opens)
    steps = dataclasses.replace(
        _with_question(advanced, sessions, asks, sampled, running),
        marks=steps.marks.at[row, index].set(marks, mode="drop"),
        sampled_at=steps.sampled_at.at[row, index].set(passes, mode="drop"),
    )
    return steps, cache, outcome


def _read(
    steps: Steps,
    sessions: Sessions,
    token: Array,
    sampled: Array,
    stopped: Array,
    running: Array,
) -> _Reading:
    end_state, ended = steps.automata.step(steps.ends, steps.end_state, token)
    answer_state, closed = steps.automata.step(steps.answers, steps.answer_state, token)
    closed &= sampled
    answered = steps.answered | closed
    ended &= sampled & running
    stopped = sampled & stopped
    done = (ended | stopped | (steps.at_once & closed)) & answered
    done |= (steps.together & sessions.any(done)) | (steps.on_stop & sessions.any(stopped))
    return _Reading(end_state, answer_state, closed, answered, done, ended & done, ended & ~done)


def _advanced(steps: Steps, read: _Reading, sampled: Array, opens: Array) -> Steps:
    """The automata after the sampled tokens; those of rows that open a step start anew."""
    starts = steps.automata.starts
    end_state = jnp.where(sampled, read.end_state, steps.end_state)
    answer_state = jnp.where(sampled, read.answer_state, steps.answer_state)
    return dataclasses.replace(
        steps,
        end_state=jnp.where(opens, starts[steps.ends], end_state),
        answer_state=jnp.where(opens, starts[steps.answers], answer_state),
        answered=read.answered & ~opens,
        number=steps.number + opens.astype(jnp.int32),
    )


def _with_question(
    steps: Steps, sessions: Sessions, asks: Array, sampled: Array, running: Array
) -> Steps:
    """Counts the sampled tokens, and after `ask_every` of them makes a row due to be asked.

    The row is a running one of the session, chosen at random. Rows that have just asked are due no
    more.
    """
    new = sessions.total(sampled.astype(jnp.int32))
    since = steps.since + new
    can_ask = sessions.total(running.astype(jnp.int32))
    # Passes in which others alone sample change nothing.
    ask = (steps.ask_every > 0) & (since >= steps.ask_every) & (can_ask > 0) & (new > 0)
    uniform = uniforms(steps.seed, steps.asked)
    nth = (uniform * can_ask.astype(jnp.float32)).astype(jnp.int32)
    chosen = running & (sessions.before(running) == nth)
    return dataclasses.replace(
        steps,
        since=jnp.where(ask, since - steps.ask_every, since),
        asked=steps.asked + ask.astype(jnp.int32),
        due=(steps.due & ~asks) | (ask & chosen),
    )


def _move(
    cache: KVCache, layout: Layout, sessions: Sessions, targets: Array, moves: Array
) -> tuple[KVCache, Array]:
    """Moves the blocks of bool[R] rows to their targets, in the order of the rows.

    A block that does not fit stays, and so do those of the rows of its session after it.

    Returns:
      The cache, and bool[R]: the rows that have not moved.
    """
    written, rows = jnp.maximum(layout.written, 0), jnp.arange(moves.shape[0])

    def move(state: tuple[KVCache, Array, Array]) -> tuple[KVCache, Array, Array]:
        cache, to_do, left = state
        row = jnp.argmax(to_do)
        source, target = written[row], targets[row]
        fits = cache.lengths[target] + cache.lengths[source] <= cache.capacities[target]
        stays = ~fits & to_do & sessions.any(rows == row)
        return cache.move(source, target, fits), to_do & (rows != row) & ~stays, left | stays

    state = cache, moves, jnp.zeros_like(moves)
    cache, _, left = jax.lax.while_loop(lambda state: jnp.any(state[1]), move, state)
    return cache, left
