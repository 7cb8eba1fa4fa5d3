"""The ends of steps: what the decode loop does once it has sampled, for rows that write in steps.

`after_sampling` reads the sampled tokens, moves the steps that they end, those of lower rows first,
and opens the next ones.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from jaxshare.cache import KVCache
from jaxshare.decoding.conditional import apply_if
from jaxshare.decoding.finish_reason import FinishReason
from jaxshare.decoding.sampling import uniforms
from jaxshare.decoding.sessions import Sessions
from jaxshare.decoding.state import DecodeState
from jaxshare.decoding.steps import Mark, Steps
from jaxshare.layout import Layout
from jaxshare.pallas.device import current_device


class _Reading(NamedTuple):
    """The automata's finds in the sampled tokens: bool[R], the states aside."""

    end_state: Array
    answer_state: Array
    closed: Array  # an answer, with this token
    answered: Array  # in the step so far
    done: Array
    complete: Array  # the row's last step has ended
    ended: Array  # a step has ended, and another follows


class _Ends(NamedTuple):
    """The steps that sampled tokens end, before they have moved.

    Attributes:
      read: the finds of the automata.
      opening: int32[R], the prepared opening that the row's next step would have.
      unprepared: bool[R], as in `StepOutcome`.
      moves: bool[R], rows whose step has ended and that go on.
      to_target: bool[R], those of them whose steps have a block to move to.
    """

    read: _Reading
    opening: Array
    unprepared: Array
    moves: Array
    to_target: Array


class StepOutcome(NamedTuple):
    """The result of `_after_moves`.

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


def after_sampling(
    state: DecodeState,
    sessions: Sessions,
    token: Int[Array, " R"],
    index: Int[Array, " R"],
    sampled: Bool[Array, " R"],
    stopped: Bool[Array, " R"],
) -> DecodeState:
    """The state in which the steps have ended that the tokens just sampled end, and the next ones
    are open.

    All rows of a session end where there is an answer or nothing can move.

    Args:
      sessions: of the rows.
      token, index: the tokens, and their places in `Steps.marks`.
      sampled, stopped: the rows that sampled, and that sampled a stop token.
    """
    in_steps = jnp.any(sampled & ((state.steps.ends > 0) | (state.steps.answers > 0)))

    def find(state: DecodeState) -> _Ends:
        return _find_ends(state.steps, sessions, token, sampled, stopped, state.running)

    def move(state: DecodeState, ends: _Ends) -> tuple[DecodeState, Array]:
        cache, left = _move_steps(
            state.cache, state.layout, sessions, state.steps.targets, ends.to_target
        )
        return dataclasses.replace(state, cache=cache), left

    def go_on(state: DecodeState, ends: _Ends, left: Array) -> DecodeState:
        steps, outcome = _after_moves(
            state.steps, sessions, ends, left, index, sampled, state.running, state.clock
        )
        return _opened(dataclasses.replace(state, steps=steps), outcome, token, stopped)

    def all_of_it(state: DecodeState) -> DecodeState:
        ends = find(state)
        state, left = move(state, ends)
        return go_on(state, ends, left)

    if current_device() is None:
        return apply_if(in_steps, state, all_of_it)
    # Steps move in a loop: without it the conditionals are a part of XLA's graphs.
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(find, state))
    ends = jax.lax.cond(in_steps, find, lambda _: none, state)
    state, left = move(state, ends)
    return apply_if(in_steps, state, lambda state: go_on(state, ends, left))


def _opened(state: DecodeState, outcome: StepOutcome, token: Array, stopped: Array) -> DecodeState:
    """The state of rows that go on as the steps have them, or end."""
    running = state.running
    reasons = jnp.where(outcome.unprepared, FinishReason.STEP.value, state.reasons)
    reasons = jnp.where(outcome.full & running, FinishReason.CACHE_FULL.value, reasons)
    reasons = jnp.where(outcome.done & (running | stopped), FinishReason.ANSWER.value, reasons)
    opening = jnp.concatenate([token[:, None], outcome.opening], axis=1)
    size = opening.shape[1]
    return dataclasses.replace(
        state,
        record=state.record.log_moves(state.passes, outcome.moved),
        reasons=reasons,
        num_pending=jnp.where(outcome.opens, 1 + outcome.opening_size, state.num_pending),
        pending=state.pending.at[:, :size].set(
            jnp.where(outcome.opens[:, None], opening, state.pending[:, :size])
        ),
    )


def _find_ends(
    steps: Steps,
    sessions: Sessions,
    token: Int[Array, " R"],
    sampled: Bool[Array, " R"],
    stopped: Bool[Array, " R"],
    running: Bool[Array, " R"],
) -> _Ends:
    """Reads the tokens just sampled.

    Args:
      sessions: of the rows.
      token: the tokens.
      sampled, stopped, running: the rows that sampled, that sampled a stop token, and that may
        write on.
    """
    read = _read(steps, sessions, token, sampled, stopped, running)
    opening = steps.number + 1 - steps.base
    unprepared = read.ended & ((opening < 0) | (opening >= steps.prepared))
    # The rows after an unprepared one wait for it, so that steps move in the order of the rows, and
    # so do those after one with an answer, which may turn out to be none.
    waits = unprepared | (read.complete & (steps.targets >= 0))
    unprepared = unprepared | (read.ended & (sessions.before(waits) > 0))
    moves = read.ended & ~unprepared
    return _Ends(read, opening, unprepared, moves, moves & (steps.targets >= 0))


def _after_moves(
    steps: Steps,
    sessions: Sessions,
    ends: _Ends,
    left: Bool[Array, " R"],
    index: Int[Array, " R"],
    sampled: Bool[Array, " R"],
    running: Bool[Array, " R"],
    passes: Int[Array, " R"],
) -> tuple[Steps, StepOutcome]:
    """The steps that go on after those that have ended.

    Args:
      sessions, sampled, running: as in `_find_ends`, which has found `ends`.
      left: the rows whose steps `_move_steps` has left where they were.
      index: the places of the tokens in `Steps.marks`.
      passes: the number that each row has run.
    """
    read, unprepared = ends.read, ends.unprepared
    opens = ends.moves & ~left
    asks = (opens | unprepared | read.complete) & steps.due

    row, asking = jnp.arange(sampled.shape[0]), asks.astype(jnp.int32)
    opening = jnp.clip(ends.opening, 0, steps.openings.shape[1] - 1)
    outcome = StepOutcome(
        done=read.done,
        full=sessions.any(left),
        unprepared=unprepared,
        opens=opens,
        opening=steps.openings[row, opening, asking],
        opening_size=steps.opening_sizes[row, opening, asking],
        moved=ends.to_target & ~left,
    )
    over = read.complete | opens | unprepared
    events = (Mark.STEP, over), (Mark.ANSWER, read.closed), (Mark.ASKED, asks)
    marks = sum(jnp.where(where, mark.value, 0) for mark, where in events)
    # Rows that have not sampled write outside the arrays, which drop what they write.
    index = jnp.where(sampled, index, steps.marks.shape[1])
    advanced = _advanced(steps, read, sampled, opens)
    steps = dataclasses.replace(
        _with_question(advanced, sessions, asks, sampled, running),
        marks=steps.marks.at[row, index].set(marks, mode="drop"),
        sampled_at=steps.sampled_at.at[row, index].set(passes, mode="drop"),
    )
    return steps, outcome


def _move_steps(
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
