"""Blocks of a session that grow and move: extents for long steps, and finished steps that move."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from jaxshare import FinishReason, KVCache
from jaxshare.serving.workers.growth import Extent, Writer
from jaxshare.serving.workers.session_state import SessionState

_moved = jax.jit(KVCache.move, donate_argnums=0)


def resize_blocks(session: SessionState, passes: int, reserve: int = 0) -> None:
    """Gives each step the capacity that it may need in some passes, and takes back the rest.

    Steps that have moved give back all that they had. With `reserve`, steps give back as much as
    leaves that many tokens free in the blocks that steps move to.
    """
    extents = _resized(session, passes, reserve)
    if not extents:
        return
    session.keep(session.state.cache.relocate([*extents], *zip(*extents.values(), strict=True)))
    # the host ends a step that has grown, so no opening must be prepared for it
    resized = [name for name in session.roster.names if session.roster.block(name) in extents]
    session.prepared |= dict.fromkeys(resized, 0)
    if session.recorder:
        for block, (_, capacity) in extents.items():
            session.recorder.widen(block, capacity)


def needs_resizing(session: SessionState, passes: int) -> bool:
    """Returns whether `resize_blocks` would change anything; it needs no device."""
    return bool(_resized(session, passes))


def _resized(session: SessionState, passes: int, reserve: int = 0) -> dict[int, Extent]:
    """The extents that `resize_blocks` gives blocks."""
    pending = np.asarray(session.state.num_pending)
    needs = {
        name: int(pending[session.roster.row(name)]) + passes + 1
        for name, reason in session.reasons.items()
        if reason is FinishReason.RUNNING
    }
    cache = session.state.cache
    return new_extents(session, cache, np.asarray(cache.lengths), {} if reserve else needs, reserve)


def new_extents(
    session: SessionState,
    cache: KVCache,
    lengths: np.ndarray,
    needs: Mapping[str, int],
    reserve: int = 0,
) -> dict[int, Extent]:
    """The new extents of blocks that must be relocated in a cache.

    Args:
      session: of the workers.
      cache: with the blocks as they are now.
      lengths: int[B], tokens in the blocks.
      needs: for each worker the tokens that it may write.
      reserve: tokens to keep free in the blocks that steps move to.
    """
    writers = []
    for name in session.roster.names:
        if moves := session.roster.layout.moves.get(name):
            block, target = session.roster.block(name), session.roster.blocks.index(moves)
            max_tokens = _max_tokens(session, name, target)
            writers.append(Writer(block, target, needs.get(name, 0), max_tokens))
    return session.growth.extents(
        writers,
        np.asarray(cache.offsets),
        np.asarray(cache.capacities),
        lengths,
        reserve=reserve,
    )


def can_move(session: SessionState, count: int, source: int, target: int) -> int:
    """The tokens of the source that fit after the target's.

    Where `count` do not fit, other long steps give back what they do not need first.
    """
    if count > _free_after(session, target, source):
        resize_blocks(session, 0, reserve=count)
    return _free_after(session, target, source)


def move_block(session: SessionState, source: int, target: int) -> None:
    """Moves a block that fits (`can_move`) to the end of another."""
    free, cache = _free_after(session, target, source), session.state.cache
    # The extents overlap for a moment: the part of the source that the target takes has been read
    # by then.
    cache = dataclasses.replace(
        cache, capacities=cache.capacities.at[target].set(cache.lengths[target] + free)
    )
    session.keep(_moved(cache, source, target))
    if session.recorder:
        session.recorder.move(source, target)
    resize_blocks(session, 0)


def _max_tokens(session: SessionState, name: str, target: int) -> int:
    """The most tokens that a worker's block may ever have.

    A row that sees the block without its target must have the context for all that it sees.
    """
    block, sizes = session.roster.block(name), session.growth.capacities
    others = [
        int(sum(sizes[b] for b in row if b != block))
        for row in session.roster.listed
        if block in row and target not in row
    ]
    return session.context - max(others, default=0)


def _free_after(session: SessionState, target: int, source: int) -> int:
    """The tokens of the source that fit after the target's, as the blocks are now.

    The source's own extent counts if it has grown and is next after the target's.
    """
    cache = session.state.cache
    offsets, ends = np.asarray(cache.offsets), np.asarray(cache.offsets + cache.capacities)
    is_next = offsets[source] == ends[target] and not session.growth.at_home(
        source, session.capacities
    )
    end = ends[source] if is_next else ends[target]
    return int(end - offsets[target] - cache.lengths[target])
