"""The rows that a scheduler runs: what becomes of what they sample, and how they leave."""

import collections
import logging

from jaxshare import FinishReason
from jaxshare.serving.engine.decode_rows import DecodeRows
from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.output import OutputProcessor
from jaxshare.serving.engine.prompt_pass import PromptPass
from jaxshare.serving.engine.running_request import RunningRequest, preemption_order
from jaxshare.serving.engine.siblings import Siblings
from jaxshare.serving.errors import NotANumberError, NoTokenError
from jaxshare.serving.interrupts import interrupts_held_back
from jaxshare.serving.kvcache.manager import KVManager

log = logging.getLogger("jaxshare.engine")

_FINAL = (FinishReason.STOP, FinishReason.LENGTH)


class ScheduledRows:
    """The rows in use, and the dispatches under way.

    Args:
      rows: requests that run at the same time.
      kv, queue, metrics, output: of the scheduler.
      decode_rows: the decode loop.
      counts_peak: whether to count the most tokens that were cached.

    Attributes:
      rows: the requests that have them.
      peak_tokens: the most tokens that were cached, where they are counted.
    """

    def __init__(
        self,
        rows: int,
        *,
        kv: KVManager,
        queue: FairQueue,
        metrics: Metrics,
        output: OutputProcessor,
        decode_rows: DecodeRows,
        counts_peak: bool,
    ):
        self.kv, self.queue, self.metrics, self.output = kv, queue, metrics, output
        self.decode_rows, self._siblings = decode_rows, Siblings(output)
        self.rows: list[RunningRequest | None] = [None] * rows
        self._counts_peak, self.peak_tokens = counts_peak, 0
        self._prompt_passes = collections.deque[PromptPass]()  # whose results are not read
        self._failure: Exception | None = None  # of `settle`

    @property
    def live(self) -> list[RunningRequest]:
        """The rows in use."""
        return [row for row in self.rows if row]

    # Results.

    def settle(self) -> None:
        """Takes the results of all that is under way, before memory and device are used otherwise. An
        error is that of the next step."""
        try:
            with interrupts_held_back():
                self._end_prompt_passes()
                while self.decode_rows.under_way:
                    self._take_results()
        except Exception as failure:
            self._failure = failure

    def _end_prompt_passes(self) -> None:
        """Waits for passes over prompts, and ends the requests whose logits are not finite. They may be
        in the decode loop already, whose results are then not read."""
        while self._prompt_passes:
            failed = self._prompt_passes[0].failed(self.kv)
            self._prompt_passes.popleft()
            for row in failed:
                if self.rows[row.index] is row:
                    self._fail_not_finite(row)

    def _take_results(self) -> None:
        """Waits for the first dispatch under way, and hands out what it has sampled."""
        self._end_prompt_passes()  # which were dispatched before
        follows = len(self.decode_rows.under_way) > 1
        if not follows and (request := next(iter(self.queue), None)):
            self.kv.prepare(request)  # while the device is at work
        result, rows = self.decode_rows.fetch()
        self.metrics.ran("decode", result.passes)
        times = self.kv.speeds.last_pass_seconds, result.passes
        self.output.payoff.ran(len(rows), *times, all(self.rows) and len(self.queue) > 0)
        rows = [row for row in rows if self.rows[row.index] is row]  # others have ended meanwhile
        for row in rows:
            length = int(result.lengths[row.block])
            row.extent.length += length - row.length
            row.length = length
        if self._counts_peak:
            self.peak_tokens = max(self.peak_tokens, self.kv.cached_tokens)
        for row in rows:
            reason = FinishReason(int(result.reasons[row.index]))
            row.is_full = reason is FinishReason.CACHE_FULL
            self._append(row, row.take(result), reason)
        if follows:
            return  # what is to be done to rows waits until all of their tokens are known
        full = [row for row in rows if row.is_full]
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
        row.node, row.is_full = node, False
        self.decode_rows.resume(row)

    # How rows leave.

    def _finish(
        self, row: RunningRequest, reason: FinishReason, error: Exception | None = None
    ) -> None:
        self._release(row)
        self.output.finish(row.request, reason, error)

    def _fail_not_finite(self, row: RunningRequest) -> None:
        """Ends a request whose logits are not finite; nothing that it was writing can be reused."""
        for node in row.node.path():
            if node.writing and node.extent:
                node.extent.length = 0
        name, tokens = f"request {row.request.number}", f"{len(row.request.tokens)} tokens"
        self._finish(row, FinishReason.ERROR, NotANumberError.of(name, tokens))

    def _preempt(self, row: RunningRequest) -> None:
        """Returns a request to the queue; it goes on later, and its output does not change."""
        request = row.request
        request.preemptions += 1
        request.processor_states = self.decode_rows.processor_states(row)
        self.metrics.preempted()
        extra = {"call": request.number, "agent": request.agent, "sampled": len(request.output)}
        log.info("preempted", extra=extra)
        self.send_back(row)

    def send_back(self, row: RunningRequest) -> None:
        """Returns a request to the queue, which has to begin with its prompt again."""
        self._release(row)
        self.queue.put_back(row.request)

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

    def _forget_under_way(self) -> None:
        """Drops what is under way, unread."""
        self._prompt_passes.clear()
        self.decode_rows.under_way.clear()
        self._failure = None
