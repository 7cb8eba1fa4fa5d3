"""The pass that verifies drafts, for rows that have parted from an earlier output."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jaxshare import FinishReason
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.models import LoadedModel
from jaxshare.seeds import seed_words
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.output import OutputProcessor
from jaxshare.serving.engine.running_request import RunningRequest
from jaxshare.serving.engine.speculation import SHAPES, Draft, DraftBatch, verify
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.view import View, ViewBuilder, spans

_MEASURED = 3
"""Passes over drafts that a warm-up measures."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """The result of a row's draft.

    Attributes:
      row: the row, whose extent has what was accepted.
      tokens: accepted ones, up to a stop token, and one more.
      reason: RUNNING, or why the request is finished with them; ERROR where logits are not finite.
      top_logits: [tokens], of the distributions.
    """

    row: RunningRequest
    tokens: list[int]
    reason: FinishReason
    top_logits: TopLogits | None


def verify_drafts(
    rows: Sequence[RunningRequest],
    *,
    model: LoadedModel,
    kv: KVManager,
    views: Mapping[int, ViewBuilder],
    output: OutputProcessor,
) -> tuple[list[Verified], list[RunningRequest]]:
    """Runs one pass over the drafts of some of these rows.

    Args:
      rows: with a draft lookup each.
      model, kv, output: of the scheduler. The output's `payoff` is told what the pass took
        and gave.
      views: builders of views, by the rows of a pass.

    Returns:
      The results, and the rows that have no draft, which are for the decode loop.
    """
    payoff, metrics, num_top_logits = output.payoff, output.metrics, output.num_top_logits
    begun, (drafts, undrafted) = payoff.now(), _drafts(rows, kv)
    if not drafts:
        return [], undrafted
    batch = DraftBatch.of([draft for _, draft in drafts])
    seen = {i: spans(row.node.path()) for i, (row, _) in enumerate(drafts)}
    view = views[len(batch.counts)].build(seen)
    adapters = [row.request.adapter_place for row, _ in drafts]
    sampled, finite, top_logits = _verify(model, kv, view, batch, num_top_logits, adapters)
    kv.view_changed = True
    metrics.ran("guess", 1)
    results = []
    for i, (row, draft) in enumerate(drafts):
        if not finite[i]:
            results.append(Verified(row, [], FinishReason.ERROR, None))
            continue
        start = int(batch.starts[i])
        new = sampled[i, start : batch.counts[i]].tolist()
        tokens, reason = _accept(row, draft, new, start, metrics, output.stops)
        part = slice(start, start + len(tokens))
        top = jax.tree.map(lambda array, i=i, part=part: array[i, part], top_logits)
        results.append(Verified(row, tokens, reason, top))
    payoff.drafting(begun, sum(len(each.tokens) for each in results))
    return results, undrafted


def compile_verification(
    model: LoadedModel, kv: KVManager, views: Mapping[int, ViewBuilder], output: OutputProcessor
) -> None:
    """Compiles the passes over drafts, and measures what decides if they and the cache pay. Arguments as those of
    `verify_drafts`; the other ones are those of the output."""
    payoff, num_top_logits = output.payoff, output.num_top_logits
    for shape in SHAPES:
        view = views[shape[0]].build({})
        _verify(model, kv, view, DraftBatch.empty(*shape), num_top_logits)
    payoff.keeping_seconds()  # which is measured once
    view = views[SHAPES[0][0]].build({})
    for _ in range(_MEASURED):
        begun = payoff.now()
        _verify(model, kv, view, DraftBatch.empty(*SHAPES[0]), num_top_logits)
        payoff.drafting(begun)


def _verify(
    model: LoadedModel,
    kv: KVManager,
    view: View,
    batch: DraftBatch,
    num_top_logits: int,
    adapters: Sequence[int] = (),
) -> Any:
    kv.speeds.interrupted()
    cache, layout = view.inputs(kv.pool.cache)
    kv.pool.cache, *found = verify(
        model.module,
        model.variables,
        cache,
        model.adapted(layout, adapters),
        batch.tokens,
        batch.counts,
        batch.stacked_samplers(),
        seed_words(batch.seeds),
        batch.positions,
        num_top_logits,
    )
    return jax.device_get(found)


def _drafts(
    rows: Sequence[RunningRequest], kv: KVManager
) -> tuple[list[tuple[RunningRequest, Draft]], list[RunningRequest]]:
    """The drafts of the first rows, as many as a pass takes, and the rows that have none."""
    drafts: list[tuple[RunningRequest, Draft]] = []
    undrafted: list[RunningRequest] = []
    for row in rows:
        draft = _draft(row, kv)
        if draft is None:
            undrafted.append(row)
        elif len(drafts) < SHAPES[-1][0]:
            drafts.append((row, draft))
    return drafts, undrafted


def _draft(row: RunningRequest, kv: KVManager) -> Draft | None:
    """The draft of a row, or None if it has none."""
    request, max_tokens, lookup = row.request, SHAPES[-1][1], _lookup(row)
    if row.extent.capacity - row.extent.length < max_tokens:
        kv.extend_in_place(row.node, max(max_tokens, request.remaining))
    unread = row.unread.tolist()
    capacity = min(max_tokens, row.extent.capacity - row.extent.length) - len(unread)
    tokens = lookup.draft(request.output, min(capacity, request.remaining - 1))
    if not tokens:
        return None
    return Draft(unread, tokens, request.sampler, request.seed, len(request.output))


def _accept(
    row: RunningRequest,
    draft: Draft,
    sampled: list[int],
    start: int,
    metrics: Metrics,
    stops: Collection[int],
) -> tuple[list[int], FinishReason]:
    """Accepts the draft as far as it equals what was sampled, and one token more.

    Returns:
      The accepted tokens, up to a stop token, and whether they finish the request.
    """
    num_drafted, right = len(draft.tokens), draft.num_accepted(sampled)
    _lookup(row).report(right, num_drafted)
    metrics.drafted(right, num_drafted - right)
    row.extent.length += start + 1 + right
    tokens = sampled[: right + 1]
    stop = next((n for n, token in enumerate(tokens) if token in stops), None)
    if stop is not None:  # tokens that were fed after the stop token belong to no request
        row.extent.length -= max(0, right - stop)
        return tokens[: stop + 1], FinishReason.STOP
    if len(row.request.output) + len(tokens) >= row.request.max_new_tokens:
        return tokens, FinishReason.LENGTH
    return tokens, FinishReason.RUNNING


def _lookup(row: RunningRequest) -> Any:
    assert row.drafts is not None
    return row.drafts
