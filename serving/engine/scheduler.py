"""The scheduler: admits requests, prefills them in chunks, runs the decode loop, and hands out
what it samples.

One step admits requests as long as there are rows and memory, runs a forward pass over a chunk of
what is still to be prefilled, and dispatches the decode loop once. It has no thread and reads no
clock: what it decides follows from the requests, their order, and the speeds that it is given.
"""

import collections
import logging
from collections.abc import Sequence

import numpy as np

from jaxshare import FinishReason
from jaxshare.models import LoadedModel
from jaxshare.serving.engine.decode_rows import DecodeRows
from jaxshare.serving.engine.draft_pass import compile_verification, verify_drafts
from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.gauges import set_gauges
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.narrow import kept_rows
from jaxshare.serving.engine.output import OutputProcessor
from jaxshare.serving.engine.prefill import PrefillPasses
from jaxshare.serving.engine.programs_ahead import ProgramsAhead
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.running_request import RunningRequest, preemption_order
from jaxshare.serving.engine.session_feed import FedText
from jaxshare.serving.engine.session_passes import SessionPasses, WaitingSessions
from jaxshare.serving.engine.siblings import Siblings
from jaxshare.serving.engine.speculation import SHAPES
from jaxshare.serving.errors import NotANumberError, NoTokenError
from jaxshare.serving.kvcache.manager import KVManager, Wait
from jaxshare.serving.kvcache.prefix_tree import Node
from jaxshare.serving.kvcache.speeds import USUAL_PASSES
from jaxshare.serving.kvcache.view import SessionBlocks, ViewBuilder

log = logging.getLogger("jaxshare.engine")

MAX_PASSES = 63
"""Passes of a dispatch that follows the measured speeds, at most: its outputs have 64 places."""

_FINAL = (FinishReason.STOP, FinishReason.LENGTH)


class Scheduler:
    """Runs requests.

    Args:
      model: as loaded, keys rotated as for its whole context.
      kv, queue: the keys and values, and the waiting requests.
      rows: requests that run at the same time.
      passes: the most passes of one dispatch, after which the host processes the output; None for
        as many as take 20 milliseconds, or eight times what the host takes between two dispatches,
        at most `MAX_PASSES`, or `USUAL_PASSES` beside a request with stop texts.
      metrics: the engine's counters.
      output: processes sampled tokens.
      prefill_first: prefill all that is admitted before anything more is sampled, which takes the
        least time in all; otherwise a chunk at a time, so that no stream waits for long.
      groups: sizes of fan-in groups to begin with.
      takes_sessions: whether sessions may take part; the decode state has places for them.

    Attributes:
      sessions: that wait for passes; decode_rows: the state of the loop.
      peak_tokens: the most tokens that were cached, with `prefill_first`.
      ahead: compiles programs beside the loop; None where that is done as they are needed.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        kv: KVManager,
        queue: FairQueue,
        rows: int,
        passes: int | None,
        metrics: Metrics,
        output: OutputProcessor,
        prefill_first: bool = False,
        groups: tuple[int, ...] = (),
        takes_sessions: bool = False,
    ):
        self.model, self.kv, self.queue = model, kv, queue
        self.passes, self._passes_by_speeds = passes or MAX_PASSES, passes is None
        self.metrics, self.output = metrics, output
        self.rows: list[RunningRequest | None] = [None] * rows
        self._prefill_first, self.peak_tokens = prefill_first, 0
        self._draft_views = {count: ViewBuilder(count) for count, _ in SHAPES}
        self._prefill_passes, self._texts_first = PrefillPasses(model, kv), False
        self.decode_rows = DecodeRows(
            model,
            kv,
            rows=rows,
            passes=self.passes,
            num_top_logits=output.num_top_logits,
            groups=groups,
            sessions=takes_sessions,
        )
        self.sessions, self._siblings = WaitingSessions(), Siblings(output)
        self.ahead: ProgramsAhead | None = None

    @property
    def live(self) -> list[RunningRequest]:
        """The rows in use."""
        return [row for row in self.rows if row]

    # One step.

    def step(self, admit: bool = True, only_begun: bool = False) -> bool:
        """Runs one step; False if no request is left. Without `admit` the queue goes on waiting; with
        `only_begun` those of it that have not begun, which then do not count."""
        self._finish_cancelled()
        if self.ahead:
            self.ahead.look()
        self._siblings.look_up(self.live)
        while True:
            admitted = self._admit(only_begun) if admit else 0
            long = [row for row in self.live if row.needs_prefill]
            texts = self.sessions.texts()
            if long or texts:
                self._prefill(long, texts)
            if not self._prefill_first or not (long or texts or admitted):
                break
        ready = [row for row in self.live if not row.decoding and not row.needs_prefill]
        drafting = [row for row in ready if row.drafts and row.logits is None]
        undrafted = self._verify_drafts(drafting) if drafting else []
        self.decode_rows.admit([r for r in ready if r in undrafted or r not in drafting])
        free = [i for i, row in enumerate(self.rows) if row is None]
        sessions = self.sessions.place(free, self.output.version)
        if sessions or any(row.decoding for row in self.live):
            # Neither a prompt's next chunk nor sessions that begin together must wait long.
            few = any(s[0].is_first for s in sessions) or bool(self.sessions.feeds)
            few = few or any(not row.decoding for row in self.live)
            passes = max(1, self._most_passes() // (4 if few else 1))
            passes = self._siblings.passes(passes, self.live)
            self._decode(passes, sessions, stop_on_finish=len(self.queue) > 0)
        if self._prefill_first and not len(self.queue):
            self._narrow()
        set_gauges(self.metrics, self.live, self.queue, self.kv, self.output)
        waiting = any(r.begun for r in self.queue) if only_begun else len(self.queue)
        return bool(self.live or waiting or len(self.sessions))

    def _finish_cancelled(self) -> None:
        for row in self.live:
            if row.request.cancelled:
                self._finish(row, FinishReason.CANCELLED)
        for request in [r for r in self.queue if r.cancelled]:
            self.output.finish(request, FinishReason.CANCELLED)

    # Admission and preemption.

    def _admit(self, only_begun: bool) -> int:
        """Admits requests as long as there are rows and memory; returns how many."""
        free = self._free_rows()
        running = collections.Counter(row.request.agent for row in self.live)
        admitted = 0
        for request in self.queue.by_cached(self.kv.cached_prefix) if free else self.queue:
            if self._siblings.holds(request, self.live) or (only_begun and not request.begun):
                continue
            if self.ahead and self.ahead.holds(request, self.queue):
                continue
            if not free and not self._preempt_for(request):
                break
            free = free or self._free_rows()
            if not free:
                break
            count = 1 + running[request.agent]
            while (wait := self._try_admit(request, free[-1], count)) is Wait.MEMORY:
                if not self._preempt_for(request):
                    break
            # The cached prefix may itself fill the memory that the request needs.
            if wait is Wait.MEMORY and not self.live:
                wait = self._try_admit(request, free[-1], count, afresh=True)
                assert wait is None
            if wait is Wait.MEMORY:
                break
            if wait is None:
                free.pop()
                running[request.agent] += 1
                admitted += 1
        return admitted

    def _free_rows(self) -> list[int]:
        """The rows that requests may take, the first one last; a session may have to get others."""
        free = [i for i, row in enumerate(self.rows) if row is None]
        return free[self.sessions.kept_rows :][::-1]

    def _preempt_for(self, request: Request) -> bool:
        """Preempts a row of a lower priority; False if there is none."""
        lower = [row for row in self.live if row.request.priority < request.priority]
        if lower:
            self._preempt(min(lower, key=preemption_order))
        return bool(lower)

    def _try_admit(
        self, request: Request, index: int, running: int, *, afresh: bool = False
    ) -> Wait | None:
        """Gives a request this row and memory, or returns why it has to wait."""
        node = self.kv.allocate(request, running, afresh=afresh)
        if isinstance(node, Wait):
            return node
        self.queue.take(request)
        drafts = self.output.draft_lookup(request, self.kv.speeds.host_seconds)
        self.rows[index] = row = RunningRequest(request, index, node, drafts=drafts)
        num_unread = len(row.unread)
        if not num_unread:
            assert node.parent is not None
            row.logits = node.parent.logits
        num_cached = node.segment.depth - num_unread
        if request.num_reused is None:
            request.num_reused = min(num_cached, len(request.prompt))
        request.stream.admitted()
        self.metrics.admitted(request, num_cached)
        extra = {"call": request.number, "agent": request.agent, "known": num_cached}
        log.debug("admitted", extra={**extra, "to_feed": num_unread})
        return None

    def _preempt(self, row: RunningRequest) -> None:
        """Returns a request to the queue; it goes on later, and its output does not change."""
        request = row.request
        request.preemptions += 1
        request.processor_states = self.decode_rows.processor_states(row)
        self.metrics.preempted()
        extra = {"call": request.number, "agent": request.agent, "sampled": len(request.output)}
        log.info("preempted", extra=extra)
        self.send_back(row)

    # Passes.

    def _prefill(self, rows: Sequence[RunningRequest], texts: Sequence[FedText]) -> None:
        """One pass over the next tokens of the first requests and texts of sessions, as many as its
        shape holds. In turn the ones or the others come first, so that neither wait for long."""
        self._texts_first = not self._texts_first
        fed = [*texts, *rows] if self._texts_first else [*rows, *texts]
        streams = self.sessions.has_passes or any(row.decoding for row in self.live)
        streams &= not self._prefill_first
        batch, logits, finite = self._prefill_passes.feed(fed, streaming=streams)
        self.metrics.prefilled(sum(len(piece.tokens) for _, piece in batch))
        failed = [each for i, (each, _) in enumerate(batch) if not finite[i]]
        for i, (each, piece) in enumerate(batch):
            if isinstance(each, FedText):
                each.fed(len(piece.tokens), bool(finite[i]))
                continue
            self.queue.serve(each.request, len(piece.tokens))
            if each in failed:
                continue
            if not len(each.unread):
                each.logits = logits[i]
            node = piece.node
            if isinstance(node, Node) and node is not each.node and node.is_cached:
                self.kv.tree.complete(node)
                node.logits = each.logits  # of a prompt that ends here, or None
        for row in dict.fromkeys(each for each in failed if isinstance(each, RunningRequest)):
            self._fail_not_finite(row)
        self.sessions.end_feeds()

    def _verify_drafts(self, rows: Sequence[RunningRequest]) -> list[RunningRequest]:
        """One pass over the drafts of some of these rows; returns those that have none."""
        verified, undrafted = verify_drafts(
            rows, model=self.model, kv=self.kv, views=self._draft_views, output=self.output
        )
        for each in verified:
            if each.top_logits is not None:
                each.row.request.top_logits.append(each.top_logits)
            self._append(each.row, each.tokens, each.reason)
        return undrafted

    def _most_passes(self) -> int:
        """The most passes of the next dispatch, if nothing waits to be prefilled."""
        if not self._passes_by_speeds:
            return self.passes
        # The host finds stop texts, and what is sampled after one is thrown away.
        has_stops = any(row.request.stream.detokenizer.stops for row in self.live)
        return self.kv.speeds.passes(USUAL_PASSES if has_stops else self.passes)

    def _decode(
        self,
        passes: int,
        sessions: Sequence[tuple[SessionPasses, np.ndarray, SessionBlocks]],
        *,
        stop_on_finish: bool,
    ) -> None:
        """One dispatch, whose passes each sample a token for every row in the decode loop.

        With `stop_on_finish` it ends when a row does, unless the others should go on.
        """
        if sessions:
            passes = min(passes, max(session.passes for session, _, _ in sessions))
        rows = [row for row in self.live if row.decoding]
        for row in rows:
            capacity = row.extent.capacity - row.extent.length
            if capacity < min(passes, row.request.remaining):
                self.kv.extend_in_place(row.node, row.request.remaining)
        self.decode_rows.dispatch(
            rows,
            passes=passes,
            stop_on_finish=stop_on_finish,
            max_idle=self.kv.speeds.idle_passes(
                len(rows) + sum(len(taken) for _, taken, _ in sessions)
            ),
            sessions=sessions,
        )
        if request := next(iter(self.queue), None):
            self.kv.prepare(request)  # while the device is at work
        result = self.decode_rows.fetch()
        self.metrics.ran("decode", result.passes)
        times = self.kv.speeds.last_pass_seconds, result.passes
        self.output.payoff.ran(len(rows), *times, all(self.rows) and len(self.queue) > 0)
        for row in rows:
            length = int(result.lengths[row.block])
            row.extent.length += length - row.length
            row.length = length
        if self._prefill_first:
            self.peak_tokens = max(self.peak_tokens, self.kv.cached_tokens)
        for row in rows:
            self._append(row, row.take(result), FinishReason(int(result.reasons[row.index])))
        full = [r for r in rows if result.reasons[r.index] == FinishReason.CACHE_FULL]
        for row in full:
            if self.rows[row.index] is row:  # it may have been preempted meanwhile
                self._extend(row)
        for row in rows:
            still_decoding = self.rows[row.index] is row and row not in full
            if still_decoding and row.drafts and row.drafts.matches(row.request.output):
                self._stop_decoding(row)

    def _append(self, row: RunningRequest, tokens: list[int], reason: FinishReason) -> None:
        """Appends sampled tokens to the output; streams or finishes it."""
        request = row.request
        if tokens:
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
        elif reason is FinishReason.NO_TOKEN:
            why = self.decode_rows.grammar_error(row.index)
            why = f", where its grammar gave up ({why})" * bool(why)
            count = f"{len(request.output)} tokens{why}"
            self._finish(row, reason, NoTokenError.of(f"request {request.number}", count))
        elif stopped:
            self._finish(row, FinishReason.STOP_TEXT)
        elif reason in _FINAL:
            self._finish(row, reason)
        else:
            self.output.publish(request)
            self._siblings.grew(request)

    def _extend(self, row: RunningRequest) -> None:
        """Extends a row whose block is full; preempts rows where there is no memory."""
        while (node := self.kv.extend(row.node, row.request.remaining + 1)) is None:
            victim = min(self.live, key=preemption_order)
            self._preempt(victim)
            if victim is row:
                return
        row.node = node
        self.decode_rows.resume(row)

    def _narrow(self) -> None:
        """Goes on with fewer rows, where that pays and no more requests are to come."""
        if kept := kept_rows(self.rows):
            self.decode_rows.narrow(kept)
            self.rows = [self.rows[index] for index in kept]
            for index, row in enumerate(self.live):
                row.index = index
            self.kv.view_changed = True

    # The end of a request.

    def _fail_not_finite(self, row: RunningRequest) -> None:
        """Ends a request whose logits are not finite; nothing that it was writing can be reused."""
        for node in row.node.path():
            if node.writing and node.extent:
                node.extent.length = 0
        name, tokens = f"request {row.request.number}", f"{len(row.request.tokens)} tokens"
        self._finish(row, FinishReason.ERROR, NotANumberError.of(name, tokens))

    def _release(self, row: RunningRequest) -> None:
        """Frees a row; what it has written stays in the prefix tree for reuse."""
        if row.decoding:
            self._stop_decoding(row)
        self.rows[row.index] = None
        self.kv.release(row.node)

    def _stop_decoding(self, row: RunningRequest) -> None:
        """Takes a row out of the decode loop."""
        self.decode_rows.remove(row)
        self.kv.view_changed = True

    def _finish(
        self, row: RunningRequest, reason: FinishReason, error: Exception | None = None
    ) -> None:
        self._release(row)
        self.output.finish(row.request, reason, error)

    def reset(self) -> None:
        """Empties memory, rows and queue after a failure, which may have consumed the cache."""
        self.clear()
        self.kv.reset()

    def clear(self) -> None:
        """Empties rows and queue, whose requests have ended."""
        self.rows = [None] * len(self.rows)
        self.queue = self.output.queue = FairQueue(self.queue.contributions)
        self.sessions.clear()
        self._siblings.clear()
        self.decode_rows.reset()

    def use(self, model: LoadedModel) -> None:
        """Goes on with other weights of the same model."""
        self.model = model
        for each in (self.kv, self._prefill_passes, self.decode_rows):
            each.use(model)

    def send_back(self, row: RunningRequest) -> None:
        """Returns a request to the queue, which has to begin with its prompt again."""
        self._release(row)
        self.queue.put_back(row.request)

    def forget(self) -> None:
        """Forgets all that has been computed, but for what running requests use."""
        self.kv.forget()
        self._siblings.clear()
        self.output.written.clear()

    def abandon(self) -> None:
        """Drops all rows, and what they have cached, but for pinned prefixes."""
        if self.kv.pool.is_lost:  # a pass was interrupted
            return
        for row in self.live:
            self._release(row)
        self.kv.drop_unused()

    def warm_up(self, requests: Sequence[Request] = ()) -> None:
        """Compiles what requests need that are sampled as these are; nothing may be running."""
        self._prefill_passes.warm_up()
        self.decode_rows.warm_up(requests)
        if self.output.logits:
            compile_verification(self.model, self.kv, self._draft_views, self.output)
        self.kv.view_changed = True

    def free(self) -> None:
        """Frees the accelerator's memory."""
        self.decode_rows.reset()
        self.kv.pool.free_arrays()
