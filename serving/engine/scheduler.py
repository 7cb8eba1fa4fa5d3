"""The scheduler: admits requests, prefills them in chunks, runs the decode loop, and hands out
what it samples.

One step admits requests as long as there are rows and memory, runs one forward pass over a chunk of
what is still to be prefilled, and dispatches the decode loop once. All of it runs in one thread;
nothing here is called from another one.
"""

import logging
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare import FinishReason, KVCache, Layout, decode
from jaxshare.models import LoadedModel
from jaxshare.seeds import seed_words
from jaxshare.serving.engine import prefill
from jaxshare.serving.engine.decode_rows import DecodeRows
from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.output import OutputProcessor
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.running_request import RunningRequest, preemption_order
from jaxshare.serving.engine.speculation import SHAPES, Draft, DraftBatch, verify
from jaxshare.serving.errors import NotANumberError
from jaxshare.serving.kvcache.manager import KVManager, Wait, ema

log = logging.getLogger("jaxshare.engine")

PENDING = 8
"""At most this many tokens are fed by the decode loop itself, beside the rows that sample."""


class Scheduler:
    """Runs requests.

    Args:
      model: as loaded, keys rotated as for its whole context.
      kv, queue: the keys and values, and the waiting requests.
      rows: requests that run at the same time.
      passes: the most forward passes of one dispatch, after which the host processes the output.
      metrics: the engine's counters.
      output: processes sampled tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        kv: KVManager,
        queue: FairQueue,
        rows: int,
        passes: int,
        metrics: Metrics,
        output: OutputProcessor,
    ):
        self.model, self.kv, self.queue = model, kv, queue
        self.passes, self.metrics, self.output = passes, metrics, output
        self.rows: list[RunningRequest | None] = [None] * rows
        self._decode_rows = DecodeRows(
            model, rows=rows, max_pending=PENDING, num_top_logits=output.num_top_logits
        )

    @property
    def live(self) -> list[RunningRequest]:
        """The rows in use."""
        return [row for row in self.rows if row]

    # One step.

    def step(self, admit: bool = True) -> bool:
        """Runs one step; False if no request is left. Without `admit` the queue goes on waiting."""
        self._finish_cancelled()
        for request in [r for r in self.queue if r.resample and not r.looked_up]:
            self.output.look_up(request)
        if admit:
            self._admit()
        if long := [r for r in self.live if not r.decoding and len(r.unread) > PENDING]:
            self._prefill(long)
        ready = [
            row
            for row in self.live
            if not row.decoding and (row.logits is not None or len(row.unread) <= PENDING)
        ]
        drafting = [row for row in ready if row.drafts and row.logits is None]
        undrafted = self._verify_drafts(drafting) if drafting else []
        self._start_decoding([row for row in ready if row in undrafted or row not in drafting])
        if any(row.decoding for row in self.live):
            # A prefilling row must not wait long for its next chunk, nor a request for a row.
            prefilling = any(not row.decoding for row in self.live)
            passes = max(1, self.passes // 4) if prefilling else self.passes
            self._decode(passes, stop_on_finish=len(self.queue) > 0)
        self._set_metrics()
        return bool(self.live or len(self.queue))

    def _finish_cancelled(self) -> None:
        for row in self.live:
            if row.request.cancelled:
                self._finish(row, FinishReason.CANCELLED)
        for request in [request for request in self.queue if request.cancelled]:
            self.output.finish(request, FinishReason.CANCELLED)

    def _set_metrics(self) -> None:
        decoding, pool = sum(row.decoding for row in self.live), self.kv.pool
        self.metrics.set_state(
            decoding=decoding,
            prefilling=len(self.live) - decoding,
            waiting=len(self.queue),
            accelerator_bytes=(pool.tokens - pool.free) * pool.bytes_per_token,
            logits_bytes=self.output.logits.bytes if self.output.logits else 0,
            session_bytes=self.kv.leased_tokens * pool.bytes_per_token,
            host_bytes=self.kv.tree.host_used * pool.bytes_per_token,
        )

    # Admission and preemption.

    def _admit(self) -> None:
        """Admits requests as long as there are rows and memory."""
        for request in self.queue:
            free = [i for i, row in enumerate(self.rows) if row is None]
            if not free and not self._preempt_for(request):
                return
            free = free or [i for i, row in enumerate(self.rows) if row is None]
            while (wait := self._try_admit(request, free[0])) is Wait.MEMORY and self._preempt_for(
                request
            ):
                pass
            # The cached prefix may itself fill the memory that the request needs.
            if wait is Wait.MEMORY and not self.live:
                wait = self._try_admit(request, free[0], afresh=True)
                assert wait is None
            if wait is Wait.MEMORY:
                return

    def _preempt_for(self, request: Request) -> bool:
        """Preempts a row of a lower priority; False if there is none."""
        lower = [row for row in self.live if row.request.priority < request.priority]
        if lower:
            self._preempt(min(lower, key=preemption_order))
        return bool(lower)

    def _try_admit(self, request: Request, index: int, *, afresh: bool = False) -> Wait | None:
        """Gives a request this row and memory, or returns why it has to wait."""
        running = 1 + sum(row.request.agent == request.agent for row in self.live)
        node = self.kv.allocate(request, running, afresh=afresh)
        if isinstance(node, Wait):
            return node
        self.queue.take(request)
        drafts = self.output.draft_lookup(request)
        self.rows[index] = RunningRequest(request, index, node, drafts=drafts)
        num_cached = node.segment.depth - len(node.tokens)
        if request.num_reused is None:
            request.num_reused = min(num_cached, len(request.prompt))
        self.metrics.admitted(request, num_cached)
        extra = {"call": request.number, "agent": request.agent, "known": num_cached}
        log.debug("admitted", extra={**extra, "to_feed": len(node.tokens)})
        return None

    def _preempt(self, row: RunningRequest) -> None:
        """Returns a request to the queue; it goes on later, and its output does not change."""
        request = row.request
        request.preemptions += 1
        self.metrics.preempted()
        sampled = len(request.output)
        extra = {"call": request.number, "agent": request.agent, "sampled": sampled}
        log.info("preempted", extra=extra)
        self._release(row)
        self.queue.put_back(request)

    # Passes.

    def _prefill(self, rows: Sequence[RunningRequest]) -> None:
        """One pass over the next tokens of the first rows, as many as its shape holds."""
        count, width = prefill.shape(len(rows[0].unread))
        batch = dict(enumerate(rows[:count]))
        tokens, counts = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
        for i, row in batch.items():
            chunk = row.unread[:width]
            tokens[i, : len(chunk)], counts[i] = chunk, len(chunk)
        cache, layout = self._view(batch, count)
        start = time.perf_counter()
        logits, self.kv.pool.cache = self.model.forward(tokens, counts, cache, layout)
        finite = np.asarray(jnp.isfinite(logits).all(axis=-1))
        num_fed = int(counts.sum())
        self.kv.feed_seconds = ema(self.kv.feed_seconds, (time.perf_counter() - start) / num_fed)
        self.metrics.prefilled(num_fed)
        for i, row in batch.items():
            row.extent.length += int(counts[i])
            self.queue.serve(row.request, int(counts[i]))
            if not finite[i]:
                self._fail_not_finite(row)
            elif not len(row.unread):
                row.logits = logits[i]
        self.kv.view_changed = True

    def _verify_drafts(self, rows: Sequence[RunningRequest]) -> list[RunningRequest]:
        """One pass over the drafts of some of these rows.

        Returns:
          The rows that have no draft, which are for the decode loop.
        """
        drafts: list[tuple[RunningRequest, Draft]] = []
        undrafted: list[RunningRequest] = []
        max_rows = SHAPES[-1][0]
        for row in rows:
            draft = self._draft(row)
            if draft is None:
                undrafted.append(row)
            elif len(drafts) < max_rows:
                drafts.append((row, draft))
        if not drafts:
            return undrafted
        batch = DraftBatch.of([draft for _, draft in drafts])
        cache, layout = self._view({i: row for i, (row, _) in enumerate(drafts)}, len(batch.counts))
        self.kv.pool.cache, sampled, finite, top_logits = verify(
            self.model.module,
            self.model.params,
            cache,
            layout,
            batch.tokens,
            batch.counts,
            batch.stacked_samplers(),
            seed_words(batch.seeds),
            batch.positions,
            self.output.num_top_logits,
        )
        sampled, finite, top_logits = jax.device_get((sampled, finite, top_logits))
        self.metrics.ran("guess", 1)
        self.kv.view_changed = True
        now = time.perf_counter()
        for i, (row, draft) in enumerate(drafts):
            if not finite[i]:
                self._fail_not_finite(row)
                continue
            start = int(batch.starts[i])
            tokens, reason = self._accept(
                row, draft, sampled[i, start : batch.counts[i]].tolist(), start
            )
            part = slice(start, start + len(tokens))
            row.request.top_logits.append(
                jax.tree.map(lambda array, i=i, part=part: array[i, part], top_logits)
            )
            self._append(row, tokens, reason, now)
        return undrafted

    def _draft(self, row: RunningRequest) -> Draft | None:
        """The draft of a row, or None if it has none."""
        request, max_tokens = row.request, SHAPES[-1][1]
        assert row.drafts is not None
        if row.extent.capacity - row.extent.length < max_tokens:
            self.kv.extend_in_place(row.node, max(max_tokens, request.remaining))
        capacity = min(max_tokens, row.extent.capacity - row.extent.length) - len(row.unread)
        tokens = row.drafts.draft(request.output, min(capacity, request.remaining - 1))
        if not tokens:
            return None
        unread = row.unread.tolist()
        return Draft(unread, tokens, request.sampler, request.seed, len(request.output))

    def _accept(
        self, row: RunningRequest, draft: Draft, sampled: list[int], start: int
    ) -> tuple[list[int], FinishReason]:
        """Accepts the draft as far as it equals what was sampled, and one token more.

        Returns:
          The accepted tokens, up to a stop token, and whether they finish the request.
        """
        assert row.drafts is not None
        num_drafted, right = len(draft.tokens), draft.num_accepted(sampled)
        row.drafts.report(right, num_drafted)
        self.metrics.drafted(right, num_drafted - right)
        row.extent.length += start + 1 + right
        tokens = sampled[: right + 1]
        stop = next((n for n, token in enumerate(tokens) if token in self.output.stops), None)
        if stop is not None:  # tokens that were fed after the stop token belong to no request
            row.extent.length -= max(0, right - stop)
            return tokens[: stop + 1], FinishReason.STOP
        if len(row.request.output) + len(tokens) >= row.request.max_new_tokens:
            return tokens, FinishReason.LENGTH
        return tokens, FinishReason.RUNNING

    def _start_decoding(self, rows: Sequence[RunningRequest]) -> None:
        """Lets rows enter the decode loop that have few or no tokens left to prefill."""
        if not rows:
            return
        for row in rows:
            row.decoding = True
            row.num_sampled = row.first_sampled = len(row.request.output)
        requests = [row.request for row in rows]
        self._decode_rows.set_samplers(rows)
        if self._decode_rows.state is None:
            self._decode_rows.create(*self._view({}, len(self.rows)), requests)
        self._decode_rows.grow(requests)
        cache, blocks = self._visible_blocks(
            {row.index: row for row in self.live if row.decoding}, len(self.rows)
        )
        self.kv.view_changed = False
        self._decode_rows.admit(rows, cache, blocks, self.kv.width)

    def _decode(self, passes: int, stop_on_finish: bool) -> None:
        """One dispatch: passes that each sample a token for every row in the decode loop.

        With `stop_on_finish` the dispatch ends when a row does.
        """
        rows = [row for row in self.live if row.decoding]
        for row in rows:
            capacity = row.extent.capacity - row.extent.length
            if capacity < min(passes, row.request.remaining):
                self.kv.extend_in_place(row.node, row.request.remaining)
        if self.kv.view_changed:
            view = self._view({row.index: row for row in rows}, len(self.rows))
            self.kv.view_changed = False
        else:
            view = self.kv.pool.cache, None
        state = decode(
            self.model.module,
            self.model.params,
            self._decode_rows.before_dispatch(*view),
            passes=passes,
            stop_on_finish=stop_on_finish,
        )
        self._decode_rows.state, self.kv.pool.cache = state, state.cache
        if request := next(iter(self.queue), None):
            self.kv.prepare(request)  # while the device is at work
        result = self._decode_rows.fetch()
        self.metrics.ran("decode", result.passes)
        if result.faults:
            state.cache.check()
        now = time.perf_counter()
        full: list[RunningRequest] = []
        for row in rows:
            length = int(result.lengths[row.block])
            row.extent.length += length - row.length
            row.length = length
            end = result.num_sampled[row.index]
            tokens = result.tokens[row.index, row.num_sampled : end].tolist()
            row.num_sampled += len(tokens)
            if (reason := FinishReason(int(result.reasons[row.index]))) is FinishReason.CACHE_FULL:
                full.append(row)
            self._append(row, tokens, reason, now)
        for row in full:
            if self.rows[row.index] is row:  # it may have been preempted meanwhile
                self._extend(row)
        for row in rows:
            still_decoding = self.rows[row.index] is row and row not in full
            if still_decoding and row.drafts and row.drafts.matches(row.request.output):
                self._stop_decoding(row)

    def _append(
        self, row: RunningRequest, tokens: list[int], reason: FinishReason, now: float
    ) -> None:
        """Appends sampled tokens to the output; streams or finishes it."""
        request = row.request
        if tokens:
            request.first_token_time = request.first_token_time or now
            self.queue.serve(request, len(tokens))
            self.metrics.sampled(len(tokens))
        if reason is FinishReason.STOP:
            request.stop_token = tokens.pop()
        if tokens:
            request.output += tokens
            self.kv.tree.append_tokens(row.node, tokens)
        stopped = self.output.cut_at_stop_text(request)
        if reason is FinishReason.ERROR:
            self._fail_not_finite(row)
        elif stopped:
            self._finish(row, FinishReason.STOP_TEXT)
        elif reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._finish(row, reason)
        else:
            self.output.publish(request)

    def _extend(self, row: RunningRequest) -> None:
        """Extends a row whose block is full; preempts rows where there is no memory."""
        while (node := self.kv.extend(row.node, row.request.remaining + 1)) is None:
            victim = min(self.live, key=preemption_order)
            self._preempt(victim)
            if victim is row:
                return
        row.node = node
        self._decode_rows.resume(row)

    # The end of a request.

    def _fail_not_finite(self, row: RunningRequest) -> None:
        """Ends a request whose logits are not finite; nothing of its last node can be reused."""
        row.extent.length = 0
        self._finish(
            row,
            FinishReason.ERROR,
            NotANumberError(
                f"the model's logits for request {row.request.number} are not numbers after "
                f"{len(row.request.tokens)} tokens; its weights, or its dtype, cannot serve this "
                "prompt"
            ),
        )

    def _release(self, row: RunningRequest) -> None:
        """Frees a row; what it has written stays in the prefix tree for reuse."""
        if row.decoding:
            self._stop_decoding(row)
        self.rows[row.index] = None
        self.kv.release(row.node)

    def _stop_decoding(self, row: RunningRequest) -> None:
        """Takes a row out of the decode loop."""
        self._decode_rows.remove(row)
        self.kv.view_changed = True

    def _finish(
        self, row: RunningRequest, reason: FinishReason, error: Exception | None = None
    ) -> None:
        self._release(row)
        self.output.finish(row.request, reason, error)

    def reset(self) -> None:
        """Empties memory, rows and queue after a failure, which may have consumed the cache."""
        self.rows = [None] * len(self.rows)
        self.queue = self.output.queue = FairQueue()
        self._decode_rows.reset()
        self.kv.reset()

    def free(self) -> None:
        """Frees the accelerator's memory."""
        self._decode_rows.reset()
        self.kv.pool.free_arrays()

    # Views for passes.

    def _view(self, rows: Mapping[int, RunningRequest], count: int) -> tuple[KVCache, Layout]:
        """(the cache with the blocks that these rows see, a layout of `count` rows)."""
        cache, blocks = self._visible_blocks(rows, count)
        return cache, Layout.from_blocks(blocks, width=self.kv.width)

    def _visible_blocks(
        self, rows: Mapping[int, RunningRequest], count: int
    ) -> tuple[KVCache, list[list[int]]]:
        """The same, with the blocks of each row instead of a layout."""
        cache, blocks, own = self.kv.view({i: row.node for i, row in rows.items()}, count)
        for i, row in rows.items():
            row.block, row.length = own[i]
        return cache, blocks
