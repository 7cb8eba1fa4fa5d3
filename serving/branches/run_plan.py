"""Planning a run of branches, before anything is computed.

A plan says which prefixes are shared, how many rows run at a time, and how much memory they take.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxshare.arena import LARGE_TILE, arena_size
from jaxshare.argument_checks import as_integer
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.serving.branches.peak_use import PeakUse, peak_use
from jaxshare.serving.branches.prefix import Prefix
from jaxshare.serving.branches.prompt_tree import Prompt, Prompts, check_n, read_prompts
from jaxshare.serving.branches.row_budget import MAX_ROWS, RowBudget
from jaxshare.serving.branches.sharing_plan import (
    Sample,
    SharingPlan,
    build_prefix_tree,
    can_share,
    plan_sharing,
    unique_tokens,
)
from jaxshare.serving.inputs import check_model, encode, encode_messages, is_dialogue, token_bytes
from jaxshare.serving.kvcache import sharing_cost
from jaxshare.serving.kvcache.pool import standard_tokens, whole_tiles
from jaxshare.serving.kvcache.sharing_cost import Chosen, Costs

FEW_ROWS = 16
"""Rows up to which runs take a program for other hosts, too, rather than one of their own."""
_STANDARD_BYTES = 64 * 2**20
"""Bytes of memory that a run may take, although it needs fewer."""


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The samples of a run, and the blocks that store their tokens.

    Attributes:
      sharing: which common prefixes are blocks, and what is in each row's own block.
      samples: the completions to sample, in order.
      peak: the maximum of rows, blocks and tokens at a time.
      rows_because: why this many rows, in words.
      costs: the costs by which sharing was decided; None where there was nothing to decide.
      unique_tokens: tokens of all prompts when every common prefix counts once.
      kv_tokens: of the memory to make for the run; 0 where it uses that of a prefix.
      state_rows: rows of the decode state.
    """

    sharing: SharingPlan
    samples: tuple[Sample, ...]
    peak: PeakUse
    rows_because: str
    costs: Chosen | None
    unique_tokens: int
    kv_tokens: int
    state_rows: int


def check_settings(
    model: LoadedModel,
    prompts: Prompts | None,
    prefix: Prefix | None,
    *,
    share: bool | None,
    max_rows: int | None,
    max_kv_bytes: int | None,
) -> None:
    """Raises ValueError for limits below 1, an unusable prefix, or neither prompts nor a prefix, and
    TypeError for a value of another kind."""
    check_model(model)
    if share is not None and not isinstance(share, bool):
        raise TypeError(
            f"share is {share!r}; it must be True (always), False (never) or None (by cost)"
        )
    for name, value in (("max_rows", max_rows), ("max_kv_bytes", max_kv_bytes)):
        if value is not None:
            as_integer(name, value, 1)
    if prefix is not None:
        prefix.check()
        if max_kv_bytes is not None:
            raise ValueError(
                "max_kv_bytes and prefix are both given; with a prefix its store's size is the "
                "bound"
            )
        prefix.store.check()
        store = prefix.store.model
        if store.params is not model.params or store.adapter != model.adapter:
            raise ValueError(
                "the prefix was prefilled by another model, or with another adapter; give the model "
                "that its store was made with"
            )
    elif prompts is None:
        raise ValueError(
            "there are no prompts; give at least one, or a prefix to sample from the end of"
        )


def read_run_prompts(
    model: LoadedModel, prompts: Prompts | None, n: int, prefix: Prefix | None
) -> list[Prompt]:
    """The prompts as tokens; without prompts, an empty one that continues the prefix.

    Raises:
      ValueError: see `read_prompts`.
    """
    if prompts is None:
        check_n(n)
        return [Prompt(0, (), n)]
    return read_prompts(
        _without_messages(model, prompts),
        n,
        lambda text, first: encode(model, text, first=first and prefix is None),
        model.config.vocab_size,
    )


def _without_messages(model: LoadedModel, prompts: Any) -> Any:
    """The prompts with messages, alone or in a list, encoded by the model's template, and JAX's
    arrays as NumPy's."""

    def plain(entry: Any) -> Any:
        if isinstance(entry, jax.Array):
            return np.asarray(entry)
        return encode_messages(model, entry) if is_dialogue(entry) else entry

    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return plain(prompts)
    found = plain(prompts)
    return [*map(plain, prompts)] if found is prompts else found


def plan_run(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    share: bool | None,
    prefix: Prefix | None,
    max_rows: int | None,
    max_kv_bytes: int | None,
    costs: Costs | None,
    skip: Collection[tuple[int, int]],
    counts_tokens: bool,
) -> RunPlan:
    """Plans a run; for the arguments see `Branches` and `row_bytes`.

    Raises:
      ValueError: a completion that does not fit the memory even alone.
    """
    tree = build_prefix_tree(prompts)
    budget = RowBudget.of(
        model,
        max_new_tokens,
        max_kv_bytes=max_kv_bytes,
        arena_tokens=prefix.store.free_tokens if prefix else None,
        counts_tokens=counts_tokens,
    )
    chosen: Chosen | None = None
    if share is None and can_share(tree):
        chosen = sharing_cost.choose(model) if costs is None else Chosen(costs, "as given")
    row_limit, skipped = MAX_ROWS if max_rows is None else max_rows, {*skip}

    def planned(share: bool | None) -> tuple[SharingPlan, tuple[Sample, ...], PeakUse]:
        sharing = plan_sharing(
            tree, chosen.costs if chosen else None, share, grow=max_new_tokens // 2
        )
        samples = tuple(s for s in sharing.samples if (s.prompt, s.index) not in skipped)
        return sharing, samples, peak_use(sharing, samples, max_new_tokens, row_limit, budget)

    sharing, samples, peak = planned(share)
    # Where memory bounds the number of rows, share everything, whatever the costs.
    if share is None and peak.rows < min(row_limit, len(samples)):
        sharing, samples, peak = planned(True)
    if peak.max_sample_tokens > budget.tokens:
        raise _too_large(model, peak, budget, len(prompts) > 1, prefix is not None)
    # A power of two for a few, which run all at once: runs of nearly as many share programs.
    few = peak.rows == len(samples) <= FEW_ROWS
    rows = bucket(peak.rows) if few else peak.rows
    return RunPlan(
        sharing,
        samples,
        peak,
        _why_rows(peak, len(samples), budget, max_rows, prefix is not None or bool(max_kv_bytes)),
        chosen,
        unique_tokens(tree),
        _kv_tokens(model, peak.tokens, rows, budget.tokens) if prefix is None else 0,
        rows,
    )


def _too_large(
    model: LoadedModel, peak: PeakUse, budget: RowBudget, several: bool, has_prefix: bool
) -> ValueError:
    """The error that the largest completion does not fit."""
    worst = f" for prompt {peak.largest_prompt}" if several else ""
    needed = peak.max_sample_tokens
    return ValueError(
        f"one completion and its prompt need room for {needed} tokens{worst}, "
        f"{needed * token_bytes(model):,} bytes of keys and values, but there is room for "
        f"{budget.tokens} tokens, {budget.tokens * token_bytes(model):,} bytes; "
        + (
            "drop a prefix or give the store more room"
            if has_prefix
            else "raise max_kv_bytes, shorten the prompts or lower max_new_tokens"
        )
    )


def _why_rows(
    peak: PeakUse, num_samples: int, budget: RowBudget, max_rows: int | None, kv_bounded: bool
) -> str:
    """The reason for the number of rows.

    Args:
      peak, num_samples, budget: of the run.
      max_rows: as given to the run.
      kv_bounded: keys and values have a bound of their own, given or the store's.
    """
    if peak.rows >= num_samples:
        return "all completions"
    if peak.rows == max_rows:
        return "the number that was given"
    if max_rows is None and peak.rows == MAX_ROWS:
        return "the maximum unless a number is given"
    # One row more, of the average size of these, would exceed the bound on keys and values.
    if kv_bounded and peak.tokens * (peak.rows + 1) > budget.tokens * peak.rows:
        return f"as many as fit in {budget.tokens:,} tokens of keys and values"
    return f"as many as fit in {budget.free / 1e9:,.1f} GB of memory"


def _kv_tokens(model: LoadedModel, needed: int, rows: int, bound: int) -> int:
    """The size of an arena for `needed` tokens, within the bound.

    A little larger than needed, and for few rows at least the standard size unless that is large,
    so that runs of nearly the same size share programs.
    """
    standard = standard_tokens(model, rows, _STANDARD_BYTES)
    if rows <= FEW_ROWS and needed <= standard <= bound:
        return standard
    step = max(LARGE_TILE, bucket(needed) // 16)
    rounded = arena_size(needed + -needed % step)
    return next(
        (
            size
            for size in (rounded, arena_size(needed), whole_tiles(bound))
            if needed <= size <= bound
        ),
        bound,
    )
