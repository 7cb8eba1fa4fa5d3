"""Texts that are fed to the blocks of a session: prompts, headers, and what people say."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxshare.serving.engine.session_feed import SessionFeed
from jaxshare.serving.workers.session_state import SessionState


def feed_texts(session: SessionState, texts: Mapping[str, Sequence[int]]) -> float:
    """Feeds texts to the ends of blocks that have room for them. Each sees its own block alone.

    On an engine they are fed in its passes over prompts, a piece at a time, so that nothing else
    waits until a long one is fed. The session fails where logits after one are not finite. Where an
    interrupt is raised, the blocks are as before.

    Returns:
      The seconds that another thread has compiled meanwhile.
    """
    blocks = [block for block, tokens in texts.items() if len(tokens)]
    if session.shares_passes:
        feed = _fed_by_engine(session, {block: texts[block] for block in blocks})
        broken = [block for block in blocks if session.roster.blocks.index(block) in feed.broken]
        elsewhere = feed.compile_seconds
    else:
        with session.device():
            broken = [block for block in blocks if not session.append_text(texts[block], block)]
        elsewhere = 0.0
    for block in broken[:1]:
        session.fail_all_that_see(block)
    return elsewhere


def _fed_by_engine(session: SessionState, texts: Mapping[str, Sequence[int]]) -> SessionFeed:
    """Feeds texts on the session's engine; returns the request for it."""
    assert session.engine and session.lease
    lease, cache = session.lease, session.state.cache
    numbers = session.roster.numbers([*texts])
    feed = SessionFeed(
        owner=lease,
        blocks=lambda: lease.blocks(cache),
        texts={
            number: np.asarray(tokens, np.int32)
            for number, tokens in zip(numbers, texts.values(), strict=True)
        },
        adapter_place=session.model.adapter_place,
    )
    interrupt = session.engine.run_session(feed)
    if interrupt:
        raise interrupt
    lengths = np.array(cache.lengths)
    for number, tokens in feed.texts.items():
        lengths[number] += len(tokens)
    session.keep_lengths(jax.device_put(lengths))
    return feed
