"""Steps that the host ends: those that have outgrown their blocks, and all steps of the ablation.

In the ablation (`move="reencode"`, Hogwild! Inference, appendix E.1) a finished step is not rotated
to the end of the history, but encoded anew after it.
"""

import dataclasses
from collections.abc import Mapping

import jax

from jaxshare import FinishReason, KVCache
from jaxshare.decoding.steps import Mark
from jaxshare.serving.workers.block_moves import can_move, move_block, resize_blocks
from jaxshare.serving.workers.session_state import SessionState

_clear = jax.jit(KVCache.clear, donate_argnums=0)


def end_steps(session: SessionState, last: Mapping[str, Mark]) -> None:
    """Ends the steps that the device has left to the host, those of lower rows first.

    Args:
      session: after a dispatch.
      last: for each worker the mark of its last token.
    """
    left = [name for name, reason in session.reasons.items() if reason is FinishReason.STEP]
    for name in sorted(left, key=session.roster.row):
        if session.finish_reason is None:
            _end_step(session, name, Mark.ASKED in last[name])


def _end_step(session: SessionState, name: str, asked: bool) -> None:
    """Moves a worker's finished step, and opens its next one."""
    row, source = session.roster.row(name), session.roster.block(name)
    if block := session.roster.layout.moves.get(name):
        target = session.roster.blocks.index(block)
        count = int(session.state.cache.lengths[source])
        if count > can_move(session, count, source, target):
            session.finish_reason = FinishReason.CACHE_FULL
            return
        if session.reencodes:
            _reencode(session, name, source, block, count)
        else:
            move_block(session, source, target)
    opening = session.transcript.next_step(name, session.passes, asked=asked)
    steps = session.state.steps
    number = session.transcript.cursors[name].step.number
    session.state = dataclasses.replace(session.state, steps=steps.begin(row, number))
    session.state = (
        session.state.feed(row, opening)
        if opening
        else session.state.end(row, FinishReason.RUNNING)
    )
    session.reasons[name] = FinishReason.RUNNING


def _reencode(session: SessionState, name: str, source: int, block: str, count: int) -> None:
    """Clears a worker's block, and encodes its `count` tokens anew at the end of another.

    The last token sampled is not among them: it has not been fed yet.
    """
    tokens = session.transcript.cursors[name].block[-count - 1 : -1]
    session.keep(_clear(session.state.cache, source))
    if session.recorder:
        session.recorder.cut(source, 0)
    resize_blocks(session, 0)
    if not session.append_text(tokens, block):
        session.fail_all_that_see(block)
