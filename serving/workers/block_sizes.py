"""The sizes of a session's blocks, in tokens."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxshare.serving.workers.layouts import WorkersLayout

_ROUND, _TILE = 512, 128


def rounded_budget(budget: int) -> int:
    """The budget that blocks are sized for: rounded up, so that similar budgets share programs."""
    return budget + -budget % _TILE


def block_sizes(
    layout: WorkersLayout,
    reserved: Sequence[str],
    *,
    context: int,
    prompt: int,
    problem: int,
    texts: Mapping[str, int],
    opening: int,
    budget: int,
    ask_every: int,
    step_tokens: int,
    passes_at_once: int,
    history_tokens: int | None,
) -> dict[str, int]:
    """The tokens that fit in each block, such that no worker sees more than the model's context.

    Args:
      layout: of the workers; reserved: blocks for workers that join later.
      context: the most tokens that the model takes.
      prompt: tokens of the prompt, `problem` of them the user's own.
      texts: tokens of blocks that are written once, and that every worker may see.
      opening: the most tokens of what opens a step.
      budget: forward passes.
      ask_every, step_tokens, passes_at_once, history_tokens: see `Workers`.

    Raises:
      ValueError: the prompt leaves too little of the context, or `history_tokens` does not hold it.
    """
    # Texts and steps that move are small; the rest of the context is for the other blocks.
    roles, budget = _Roles.of(layout, reserved), rounded_budget(budget)
    # A step that starts on the device must have room until the host can give it more.
    step = min(max(step_tokens, opening + passes_at_once + 2), budget + opening)
    sizes = {**texts, **dict.fromkeys(roles.moving, step)}
    unseen = sum(size for block, size in texts.items() if block not in layout.blocks)
    small = max(sum(sizes.get(b, 0) for b in row - roles.growing) for row in roles.rows)
    free = context - prompt - unseen - small
    max_history = 2 * roles.workers * budget if roles.moving else _ROUND
    # so that problems of similar length share programs, and blocks are on large tiles
    max_history += -(prompt + max_history) % _ROUND
    stays = 0
    if roles.staying:
        questions = roles.workers * budget // ask_every if ask_every else 0
        seen = max(len(row & roles.staying) for row in roles.rows)
        left = free - min(max_history, free // 2)
        stays = min(budget + (2 + questions) * opening, left // max(seen, 1))
        free -= stays * seen
    available = free // max(len(row & roles.growing) for row in roles.rows)
    more = _history(prompt, max_history, available)
    if history_tokens is not None and (more := history_tokens - prompt) < 1:
        raise ValueError(
            f"history_tokens is {history_tokens}, but the prompt alone has {prompt}; give the "
            "history more room"
        )
    if more > free or (min(more, stays) if roles.staying else more) < opening:
        raise _no_room(prompt, problem, max(opening, more) + sum(sizes.values()), context)
    sizes |= dict.fromkeys(roles.staying, stays) | dict.fromkeys(roles.growing, more)
    return sizes | {layout.prompt: prompt + more}


@dataclasses.dataclass(frozen=True)
class _Roles:
    """The roles of the blocks of a layout.

    Attributes:
      moving: blocks whose steps move away; staying: blocks that keep them.
      growing: the prompt's block and those that steps move to.
      rows: for each list of blocks that must fit in the context its blocks, reserved ones included.
      workers: the number of workers, those that may join later included.
    """

    moving: set[str]
    staying: set[str]
    growing: set[str]
    rows: list[set[str]]
    workers: int

    @classmethod
    def of(cls, layout: WorkersLayout, reserved: Sequence[str]) -> "_Roles":
        written = {name: layout.written(name) for name in layout.sees}
        moving = {written[name] for name in layout.moves}
        staying = {*written.values()} - moving
        (staying or moving).update(reserved)
        return cls(
            moving,
            staying,
            {layout.prompt, *layout.moves.values()},
            [{*row, *reserved} for row in layout.views([*layout.sees][-1])],
            len(layout.sees) + len(reserved),
        )


def _history(prompt: int, max_tokens: int, available: int) -> int:
    """The tokens after the prompt in its block: at most `max_tokens`, else those available.

    Where many of those are available they are rounded down, so that sessions share programs.
    """
    if max_tokens <= available:
        return max_tokens
    return available - (prompt + available) % _ROUND if available > 2 * _ROUND else available


def _no_room(prompt: int, problem: int, needed: int, context: int) -> ValueError:
    longer = (
        "the problem is the longer part: shorten it"
        if 2 * problem > prompt
        else "the rules are the longer part: give a format with fewer words (--format, format=), "
        "such as collaborative+no-examples, which leaves out the worked examples"
    )
    return ValueError(
        f"the prompt has {prompt} tokens, {problem} of the problem and {prompt - problem} of the "
        f"rules, and the workers need room for {needed} more, but the model's context holds "
        f"{context}; {longer}, or ask for fewer workers (--workers, names=), a smaller budget "
        "(--budget or --budgets, budget=) or smaller blocks for steps (step_tokens=)"
    )
