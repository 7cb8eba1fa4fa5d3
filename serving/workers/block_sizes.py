"""How many tokens each block of a session of workers has room for."""

from collections.abc import Mapping, Sequence

from jaxshare.serving.workers.layouts import WorkersLayout

_ROUND, _TILE = 512, 128


def rounded_budget(budget: int) -> int:
    """The budget that room is made for, so that budgets of nearly the same size share programs."""
    return budget + -budget % _TILE


def capacities(
    layout: WorkersLayout,
    spare: Sequence[str],
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
    """Tokens that fit in each block, such that no worker ever sees more than the model's context.

    Args:
      layout: of the workers; spare: blocks kept for workers that join later.
      context: most tokens that the model takes.
      prompt: tokens of the prompt, `problem` of them the user's own.
      texts: tokens of blocks that are written once, and that every worker may see.
      opening: most tokens of what opens a step.
      budget: forward passes.
      ask_every, step_tokens, passes_at_once, history_tokens: see `Workers`.

    Raises:
      ValueError: the prompt leaves too little of the context, or `history_tokens` does not hold it.
    """
    written = {name: layout.written(name) for name in layout.sees}
    moving = {written[name] for name in layout.moves}
    staying = {*written.values()} - moving
    (staying or moving).update(spare)
    grow = {layout.prompt, *layout.moves.values()}
    workers, budget = len(layout.sees) + len(spare), rounded_budget(budget)
    rows = [{*row, *spare} for row in layout.views([*layout.sees][-1])]

    # Texts and steps that move are small. What is left of the context is for blocks that stay, and
    # for those that others move to. A step that begins on the device must have room until the host
    # can give it more.
    step = min(max(step_tokens, opening + passes_at_once + 2), budget + opening)
    sizes = {**texts, **dict.fromkeys(moving, step)}
    unseen = sum(size for block, size in texts.items() if block not in layout.blocks)
    free = context - prompt - unseen - max(sum(sizes.get(b, 0) for b in row - grow) for row in rows)
    wanted = 2 * workers * budget if moving else _ROUND
    # so that problems of nearly the same length share programs, and blocks lie on large tiles
    wanted += -(prompt + wanted) % _ROUND
    stays = 0
    if staying:
        questions = workers * budget // ask_every if ask_every else 0
        most = max(len(row & staying) for row in rows)
        stays = min(
            budget + (2 + questions) * opening, (free - min(wanted, free // 2)) // max(most, 1)
        )
        free -= stays * most
    most = free // max(len(row & grow) for row in rows)
    more = (
        wanted if wanted <= most else most - (prompt + most) % _ROUND if most > 2 * _ROUND else most
    )
    if history_tokens is not None:
        more = history_tokens - prompt
        if more < 1:
            raise ValueError(
                f"history_tokens is {history_tokens}, but the prompt alone has {prompt}; give the "
                "history more room"
            )
    if more > free or min(more, stays if staying else more) < opening:
        longer = (
            "the problem is the longer part: shorten it"
            if 2 * problem > prompt
            else "the rules are the longer part: choose a format with fewer words"
        )
        raise ValueError(
            f"the prompt has {prompt} tokens, {problem} of the problem and {prompt - problem} of "
            f"the rules, and the workers need room for {max(opening, more) + sum(sizes.values())} "
            f"more, but the model's context holds {context}; {longer}, or give the workers less "
            "room"
        )
    return (
        sizes
        | dict.fromkeys(staying, stays)
        | dict.fromkeys(grow, more)
        | {layout.prompt: prompt + more}
    )
