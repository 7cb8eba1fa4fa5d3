"""Membership of a session: workers join and leave, and people speak."""

import dataclasses

import numpy as np

from jaxshare import FinishReason
from jaxshare.decoding.array_rows import with_row
from jaxshare.seeds import seed_words, stream_seed
from jaxshare.serving.words import check_length
from jaxshare.serving.workers.block_moves import can_move, move_block
from jaxshare.serving.workers.feeding import feed_texts
from jaxshare.serving.workers.finisher import flush
from jaxshare.serving.workers.layouts import WorkersLayout
from jaxshare.serving.workers.roster import check_names
from jaxshare.serving.workers.session_state import SessionState
from jaxshare.serving.workers.text.transcript import Step


def say(session: SessionState, text: str, name: str) -> None:
    """Feeds a person's words as a step of its own; see `Workers.say`."""
    if not text.strip():
        raise ValueError("there is nothing to say; give at least one word")
    check_names((name,))
    check_length(session.loaded.tokenizer, len(text), session.loaded.config.max_positions)
    if name in session.roster.names:
        raise ValueError(f"{name} is a worker of this session; a person speaks under another name")
    number = 1 + sum(step.worker == name for step in session.transcript.steps)
    opening = session.format.opening(name, number)
    if opening and not opening[-1].isspace() and not text[0].isspace():
        text = f" {text}"  # as workers write after their headers
    tokens, block = session.texts.said(name, number, text), session.roster.layout.prompt
    text = opening + text
    step = Step(name, number, text, session.passes, session.passes)
    if len(tokens) > (free := session.free_tokens(block)):
        raise ValueError(
            f"what {name} says has {len(tokens)} tokens, but the block {block!r} has room for "
            f"{free} more; say less, or create the session with more history_tokens"
        )
    with session.compiling():
        elsewhere = feed_texts(session, {block: tokens})
    session.compile_seconds += elsewhere
    session.people.add(name)
    session.transcript.finished.append(step)


def add_worker(session: SessionState, name: str, layout: WorkersLayout | None) -> None:
    """Adds a worker; see `Workers.add`. `session.device` is held."""
    _check_can_join(session, name)
    names = (*session.roster.names, name)
    session.roster = session.roster.joined(
        name, layout or session.make_layout(names, session.format)
    )
    row = session.roster.row(name)
    first_opening = session.texts.first_opening(session.roster, name)
    session.reasons[name] = FinishReason.RUNNING
    session.transcript.join(name, row, session.passes, first_opening)
    session.prepared[name] = 0
    session.update_layout()
    # Not the seed of a worker that had the row before, and sampled at the same positions.
    seed = stream_seed(session.settings["seed"], "joined", row, session.passes)
    state = session.state
    session.state = dataclasses.replace(
        state,
        reasons=with_row(state.reasons, row, FinishReason.RUNNING.value),
        has_logits=with_row(state.has_logits, row, False),
        num_sampled=with_row(state.num_sampled, row, 0),
        num_taken=with_row(state.num_taken, row, 0),
        num_pending=with_row(state.num_pending, row, 0),
        seeds=with_row(state.seeds, row, seed_words([seed])[0]),
        steps=dataclasses.replace(
            state.steps.begin(row, 1), due=with_row(state.steps.due, row, False)
        ),
    ).feed(row, first_opening)
    session.prepare_openings()


def remove_worker(session: SessionState, name: str) -> None:
    """Removes a worker; see `Workers.remove`."""
    roster, row = session.roster, session.roster.row(name)
    if len(roster.names) == 1:
        raise ValueError(f"{name} is the only worker; a session needs at least one")
    block = roster.layout.moves.get(name, roster.layout.prompt)
    source, target = roster.block(name), roster.blocks.index(block)
    count = int(session.state.cache.lengths[source])
    # one more than it has, for the last token sampled, which has not been fed yet
    if count >= (free := can_move(session, count + 1, source, target)):
        raise ValueError(
            f"{name} has {count} tokens in its block, but the block {block!r} has room for {free} "
            "more; create the session with more history_tokens"
        )
    flushed = flush(session, session.recorder)
    with session.device():
        session.keep_lengths(session.state.cache.lengths.at[source].set(flushed[source]))
        if session.recorder:
            for other, length in enumerate(np.asarray(session.state.cache.lengths).tolist()):
                session.recorder.cut(other, length)
        move_block(session, source, target)
    session.transcript.leave(name, session.passes)
    del session.reasons[name]
    session.roster = roster.left(name)
    session.state = session.state.end(row, FinishReason.UNUSED)
    session.update_layout()


def _check_can_join(session: SessionState, name: str) -> None:
    """Raises ValueError if no worker of this name can join the session."""
    check_names((*session.roster.names, name))
    if None not in session.roster.rows:
        raise ValueError(
            f"the session has room for {len(session.roster.rows)} workers; create it with a larger "
            f"max_workers to add {name}"
        )
    if session.finish_reason:
        raise ValueError(
            f"the session is over ({session.finish_reason}), so {name} cannot join it; start another one"
        )
    max_tokens = session.state.steps.openings.shape[-1]
    codec = session.texts.codec
    opening = codec.encode(session.format.opening(codec.mark(name), 10**6, ask=True))
    if len(opening) > max_tokens:
        raise ValueError(
            f"a step of {name} would open with {len(opening)} tokens, but the session has room for "
            f"{max_tokens}; choose a shorter name"
        )
