"""The dispatches of a session: some passes on the device, then one sync that reads the results."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jaxshare import FinishReason, decode
from jaxshare.compile_time import Stopwatch
from jaxshare.decoding.steps import Mark
from jaxshare.serving.workers.block_moves import resize_blocks
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
    """Runs some passes in one dispatch, and reads what they wrote; `session.device` is held."""
    watch = Stopwatch.start()
    resize_blocks(session, passes)
    session.prepare_openings()
    _decode(session, passes)
    outputs, roster = _read_back(session), session.roster
    session.passes = int(outputs["passes"])
    if session.recorder:
        session.recorder.read(outputs["record"], session.passes, roster.listed, roster.targets)
    session.events.extend(session.transcript.read(outputs))
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
    _fail_not_finite(session, outputs)
    end_steps(session, last)
    session.seconds += watch.split()[0]


def _decode(session: SessionState, passes: int) -> None:
    """Dispatches the decode loop.

    The first time a dispatch of no passes compiles it, whose wall time counts as compilation.
    """
    settings: dict[str, Any] = dict(
        width=FEED_WIDTH,
        stop_on_finish=session.reencodes or any(map(session.has_grown, session.roster.names)),
    )
    module, params = session.module, session.model.params
    if not session.compiled:
        session.state = jax.block_until_ready(
            decode(module, params, session.state, passes=0, **settings)
        )
        session.compiled = True
    session.state = decode(module, params, session.state, passes=passes, **settings)


def _read_back(session: SessionState) -> dict[str, Any]:
    """The results of a dispatch on the host, in one transfer; by row where the device has rows."""
    state, steps = session.state, session.state.steps
    outputs = jax.device_get(
        {
            "passes": state.passes,
            "num_sampled": state.num_sampled,
            "reasons": state.reasons,
            "tokens": state.tokens,
            "marks": steps.marks,
            "sampled_at": steps.sampled_at,
            "faults": state.cache.faults,
            "record": state.record,
        }
    )
    session.host_syncs += 1
    if outputs["faults"]:
        session.state.cache.check()
    return outputs


def _last_mark(outputs: Mapping[str, Any], row: int) -> Mark:
    """The mark of the last token that a row has sampled; none before the first."""
    num_sampled = int(outputs["num_sampled"][row])
    return Mark(int(outputs["marks"][row, num_sampled - 1])) if num_sampled else Mark(0)


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
            stopped = (
                bool(cursor.read)
                and int(session.state.tokens[cursor.row, cursor.read - 1])
                in session.model.generation.stop_tokens
            )
            reason = (
                FinishReason.STOP
                if stopped
                else FinishReason.STEP
                if Mark.STEP in last[name]
                else FinishReason.RUNNING
            )
            session.state = session.state.end(cursor.row, reason)
            session.reasons[name] = reason


def _fail_not_finite(session: SessionState, outputs: Mapping[str, Any]) -> None:
    """Ends the session with an error if a worker's logits were not finite."""
    failed = [name for name in session.roster.names if session.reasons[name] is FinishReason.ERROR]
    for name in failed[:1]:
        cursor = session.transcript.cursors[name]
        num_sampled = int(outputs["num_sampled"][cursor.row])
        last = outputs["sampled_at"][cursor.row, num_sampled - 1]
        # The pass of its last token, which does not depend on the passes of a dispatch.
        session.fail(name, int(last) if num_sampled else cursor.step.began)


def _why_over(session: SessionState) -> FinishReason | None:
    """Why the session is over, or None while a worker may go on."""
    reason = _why_all_over(session.reasons.values())
    stops = session.settings["stop_on"] == "eos"  # where a stop token ends all as an answer does
    return FinishReason.STOP if stops and reason is FinishReason.ANSWER else reason


def _why_all_over(reasons: Collection[FinishReason]) -> FinishReason | None:
    """Why workers with these finish reasons are all over, or None while one may go on."""
    if FinishReason.ANSWER in reasons and not {FinishReason.RUNNING, FinishReason.PAUSED} & set(
        reasons
    ):
        return FinishReason.ANSWER
    if {FinishReason.RUNNING, FinishReason.PAUSED, FinishReason.STEP} & set(reasons):
        return None
    first = (FinishReason.CACHE_FULL, FinishReason.LENGTH)
    return next((reason for reason in first if reason in reasons), FinishReason.STOP)
