"""The dispatches of a session: some passes on the device, then one sync that reads the results."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jaxshare import DecodeState, FinishReason, decode
from jaxshare.compile_time import Stopwatch
from jaxshare.decoding.steps import Mark
from jaxshare.serving.engine.session_passes import Automata, SessionPasses, outputs_of
from jaxshare.serving.interrupts import interrupts_held_back
from jaxshare.serving.workers.block_moves import needs_resizing, resize_blocks
from jaxshare.serving.workers.reencode_steps import end_steps
from jaxshare.serving.workers.session_state import FEED_WIDTH, SessionState


def can_run(session: SessionState, last: int) -> bool:
    """Returns whether a session can run before it has `last` passes."""
    return (
        session.finish_reason is None
        and session.passes < last
        and FinishReason.RUNNING in session.reasons.values()
    )


def run_passes(session: SessionState, passes: int) -> None:
    """Runs some passes in one dispatch, and reads what they wrote.

    On an engine they are passes of its requests and other sessions, too, and there may be fewer.
    """
    watch, elsewhere, interrupt = Stopwatch.start(), 0.0, None
    with session.compiling():
        if not session.unread:  # or else an interrupt came before they were
            session.state = session.state.without_outputs()
            if session.shares_passes:
                elsewhere, interrupt = _run_on_engine(session, passes)
            else:
                _run_alone(session, passes)
        with interrupts_held_back():
            _read(session)
        if session.engine and session.lease and not can_run(session, session.settings["budget"]):
            session.engine.forget_session(session.lease)
    session.seconds += watch.split()[0] - elsewhere
    session.compile_seconds += elsewhere
    if interrupt:
        raise interrupt


def _run_alone(session: SessionState, passes: int) -> None:
    """Dispatches passes of the session's own rows."""
    with session.device():
        if session.engine:
            note_version(session, session.engine.params_version)
        resize_blocks(session, passes)
        session.prepare_openings()
        session.state = _decode(session, session.state, passes, halts=_halts(session))
        session.unread = True


def _decode(session: SessionState, state: DecodeState, passes: int, *, halts: bool) -> DecodeState:
    """Runs passes of rows over the session's blocks. `session.device` is held.

    The first time a dispatch of no passes compiles the loop, whose wall time counts as compilation.
    """
    module, params = session.module, session.model.variables
    settings: dict[str, Any] = dict(width=FEED_WIDTH, stop_on_finish=halts)
    if not session.compiled:
        state = jax.block_until_ready(decode(module, params, state, passes=0, **settings))
        session.compiled = True
    return decode(module, params, state, passes=passes, **settings)


def note_version(session: SessionState, version: int) -> None:
    """Notes the version of the weights that passes run with from now on."""
    if not session.versions or session.versions[-1][1] != version:
        session.versions.append((session.passes, version))


def run_beside(
    session: SessionState,
    state: DecodeState,
    passes: int,
    *,
    automata: Automata,
    listed: Sequence[Sequence[int]],
) -> DecodeState:
    """Runs passes of other rows over the session's blocks, whose lengths stay as they are.

    Args:
      session: whose own rows wait.
      state: of the rows, with the form of the session's; its logits and top logits are donated.
      passes: the most to run, in one dispatch.
      automata: with which the rows find the ends of steps and of answers.
      listed: for each row the blocks that it sees.

    Returns:
      The state after it, with the lengths that it has made.
    """
    if session.shares_passes:
        request, _, interrupt = _run_requested(session, state, passes, automata, listed)
        if interrupt:
            raise interrupt
        return request.state
    with session.device():
        own = session.state.cache
        lengths, phases = own.lengths + 0, own.phases + 0  # copies: the cache is donated
        arrays = dataclasses.replace(state.cache, keys=own.keys, values=own.values)
        state = _decode(session, dataclasses.replace(state, cache=arrays), passes, halts=False)
        session.keep(dataclasses.replace(state.cache, lengths=lengths, phases=phases))
    return state


def _run_on_engine(session: SessionState, passes: int) -> tuple[float, BaseException | None]:
    """Runs passes in a dispatch of the engine.

    Returns:
      The seconds of compilation that it took, and an interrupt to raise at the end.
    """
    if needs_resizing(session, passes):
        with session.device():
            resize_blocks(session, passes)
    session.prepare_openings()
    request, elsewhere, interrupt = _run_requested(
        session,
        session.state,
        passes,
        session.automata,
        session.roster.listed,
        halts=_halts(session),
    )
    session.state, session.unread = request.state, True
    note_version(session, request.version)
    return elsewhere, interrupt


def _run_requested(
    session: SessionState,
    state: DecodeState,
    passes: int,
    automata: Automata,
    listed: Sequence[Sequence[int]],
    *,
    halts: bool = False,
) -> tuple[SessionPasses, float, BaseException | None]:
    """Runs passes of rows in a dispatch of the session's engine; also as `_run_on_engine`."""
    assert session.engine and session.lease
    lease = session.lease
    request = SessionPasses(
        owner=lease,
        state=state,
        automata=automata,
        blocks=lambda: lease.blocks(state.cache),
        listed=listed,
        passes=min(passes, session.engine.passes),
        halts=halts,
        is_first=state is session.state and not session.passes,
    )
    interrupt = session.engine.run_session(request)
    return request, request.compile_seconds, interrupt


def _halts(session: SessionState) -> bool:
    """Returns whether the host must act as soon as a worker has finished a step.

    It must where one worker's answer leaves the others running: if the answer turns out to be none,
    the worker goes on, and must not have missed a pass.
    """
    settings = session.settings
    answers = settings["stop_on"] == "answer" and not settings["together"]
    return answers or session.reencodes or any(map(session.has_grown, session.roster.names))


def read_unread(session: SessionState) -> None:
    """Reads the last dispatch, if an interrupt came before it was read."""
    if session.unread:
        _read(session)


def _read(session: SessionState) -> None:
    """Reads the results of a dispatch, and ends the steps that are left to the host."""
    outputs, roster = _fetch(session), session.roster
    session.passes = int(outputs["clock"][0])
    if session.recorder:
        session.recorder.read(outputs["record"], session.passes, roster.listed, roster.targets)
    session.events.extend(session.transcript.read(outputs))
    session.unread = False
    before, session.reasons = (
        session.reasons,
        {name: FinishReason(int(outputs["reasons"][roster.row(name)])) for name in roster.names},
    )
    last = {name: _last_mark(outputs, roster.row(name)) for name in roster.names}
    answered = [
        name
        for name in roster.names
        if session.reasons[name] is FinishReason.ANSWER is not before[name]
    ]
    _resume_without_answer(session, answered, last)
    session.finish_reason = _why_over(session)
    _fail_not_finite(session)
    if FinishReason.STEP in session.reasons.values():
        with session.device():
            end_steps(session, last)


def _fetch(session: SessionState) -> dict[str, Any]:
    """The results of a dispatch on the host, in one transfer; by row where the device has rows."""
    state = session.state
    found: dict[str, Any] = {**outputs_of(state), "faults": state.cache.faults}
    if session.recorder:
        found["record"] = state.record
    outputs = jax.device_get(found)
    session.host_syncs += 1
    if outputs["faults"]:
        session.state.cache.check()
    return outputs


def _last_mark(outputs: Mapping[str, Any], row: int) -> Mark:
    """The mark of the last token that a row has sampled in a dispatch; none if it has not."""
    num_held = int(outputs["num_sampled"][row] - outputs["num_taken"][row])
    return Mark(int(outputs["marks"][row, num_held - 1])) if num_held else Mark(0)


def _resume_without_answer(
    session: SessionState, names: Sequence[str], last: Mapping[str, Mark]
) -> None:
    """Resumes workers that an answer has ended, if none of their answers is valid.

    Args:
      session: after a dispatch.
      names: the workers that have just ended; all of them where they end together.
      last: for each worker the mark of its last token.
    """
    if session.settings["stop_on"] != "answer":
        return
    ended = [step for step in session.transcript.finished if step.answer]
    for group in [names] if session.settings["together"] else [[name] for name in names]:
        if any(session.answer_of(step) is not None for step in ended if step.worker in group):
            continue
        for name in group:
            cursor = session.transcript.cursors[name]
            if cursor.step.ended is None:
                reason = FinishReason.RUNNING
            else:  # by a token that ends steps, or by a stop token
                reason = FinishReason.STEP if Mark.STEP in last[name] else FinishReason.STOP
            session.state = session.state.end(cursor.row, reason)
            session.reasons[name] = reason


def _fail_not_finite(session: SessionState) -> None:
    """Ends the session with an error if a worker's logits were not finite."""
    failed = [name for name in session.roster.names if session.reasons[name] is FinishReason.ERROR]
    for name in failed[:1]:
        # The pass of its last token, which does not depend on the passes of a dispatch.
        session.fail(name, session.transcript.cursors[name].sampled_at)


def _why_over(session: SessionState) -> FinishReason | None:
    """Why the session is over, or None while a worker may go on."""
    stops = session.settings["stop_on"] == "eos"  # where a stop token ends all as an answer does
    together = stops or session.settings["together"]
    reason = _why_all_over(session.reasons.values(), together=together)
    return FinishReason.STOP if stops and reason is FinishReason.ANSWER else reason


def _why_all_over(reasons: Collection[FinishReason], *, together: bool) -> FinishReason | None:
    """Why workers with these finish reasons are all over, or None while one may go on.

    One that is paused may, and so may one whose step the host is yet to end, unless another's answer
    ends them together.
    """
    goes_on = {FinishReason.RUNNING}
    if not together:
        goes_on |= {FinishReason.PAUSED, FinishReason.STEP}
    if FinishReason.ANSWER in reasons and not goes_on & set(reasons):
        return FinishReason.ANSWER
    if {FinishReason.RUNNING, FinishReason.PAUSED, FinishReason.STEP} & set(reasons):
        return None
    first = (FinishReason.CACHE_FULL, FinishReason.LENGTH)
    return next((reason for reason in first if reason in reasons), FinishReason.STOP)
