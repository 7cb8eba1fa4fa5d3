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
from jaxshare.serving.engine.prompt_pass import feed_prompts
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.running_request import RunningRequest, preemption_order
from jaxshare.serving.engine.scheduled_rows import ScheduledRows
from jaxshare.serving.engine.session_feed import FedText
from jaxshare.serving.engine.session_passes import SessionPasses, WaitingSessions
from jaxshare.serving.engine.speculation import SHAPES
from jaxshare.serving.kvcache.manager import KVManager, Wait
from jaxshare.serving.kvcache.speeds import USUAL_PASSES
from jaxshare.serving.kvcache.view import SessionBlocks, ViewBuilder

log = logging.getLogger("jaxshare.engine")

_QUIET = 2
"""Dispatches in a row with which nothing has entered, until the next one is made early: what arrives
then waits for one more."""
MAX_PASSES = 63
"""Passes of a dispatch that follows the measured speeds, at most: its outputs have 64 places."""


class Scheduler(ScheduledRows):
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
      follows: whether a dispatch may be made before the results of the last one are read.
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
        decode_rows = DecodeRows(
            model,
            kv,
            rows=rows,
            passes=passes or MAX_PASSES,
            num_top_logits=output.num_top_logits,
            groups=groups,
            sessions=takes_sessions,
        )
        super().__init__(
            rows,
            kv=kv,
            queue=queue,
            metrics=metrics,
            output=output,
            decode_rows=decode_rows,
            counts_peak=prefill_first,
        )
        self.model, self._prefill_first = model, prefill_first
        self.passes, self._passes_by_speeds = passes or MAX_PASSES, passes is None
        self._draft_views = {count: ViewBuilder(count) for count, _ in SHAPES}
        self._prefill_passes, self._texts_first = PrefillPasses(model, kv), False
        self.sessions = WaitingSessions()
        self.ahead: ProgramsAhead | None = None
        self.follows = True
        self._num_alike = 0  # dispatches since the last one with which anything entered

    # One step.

    def step(self, admit: bool = True, only_begun: bool = False) -> bool:
        """Runs one step; False if no request is left. Without `admit` the queue goes on waiting; with
        `only_begun` those of it that have not begun, which then do not count."""
        if self._failure:
            raise self._failure
        if self.decode_rows.under_way:
            self._follow()
            self._take_results()
        if not self.decode_rows.under_way:
            self._decide_and_dispatch(admit, only_begun)
        if not self.live:
            self.settle()  # what is under way has no rows any more
        set_gauges(self.metrics, self.live, self.queue, self.kv, self.output)
        waiting = any(r.begun for r in self.queue) if only_begun else len(self.queue)
        return bool(self.live or waiting or len(self.sessions))

    def _follow(self) -> None:
        """Makes the next dispatch before the results of the one under way are read, where these cannot
        change which rows it has; the host then reads them while it runs."""
        (before,) = self.decode_rows.under_way
        if not (self.decode_rows.can_follow and self._goes_on_alike(before.passes)):
            return
        if self.ahead:
            self.ahead.look()
        waiting = len(self.queue) > 0
        most = max(row.request.remaining for row in self.live) - before.passes
        passes = min(self._most_passes(is_followed=True), most)
        self._dispatch(passes, (), stop_on_finish=waiting)

    def _goes_on_alike(self, passes: int) -> bool:
        """Returns whether the same rows run after a dispatch of at most so many passes."""
        rows, left = self.live, [row.request.remaining - passes for row in self.live]
        if not self.follows or self._num_alike < _QUIET or len(self.sessions):
            return False
        if max(left, default=0) <= 0:
            return False
        if any(r.request.cancelled or r.drafts or r.is_full or not r.decoding for r in rows):
            return False
        if not len(self.queue):
            return not (self._prefill_first and kept_rows(self.rows))
        # Requests that wait enter where a row ends, which the dispatch then stops for.
        if not all(self.rows) or min(left) <= 0:
            return False
        lowest, waiting = min(row.request.priority for row in rows), self.queue.unordered()
        return not any(r.resample or r.cancelled or r.priority > lowest for r in waiting)

    def _decide_and_dispatch(self, admit: bool, only_begun: bool) -> None:
        """Admits and prefills what can be, and runs the loop once."""
        self._finish_cancelled()
        if self.ahead:
            self.ahead.look()
        self._siblings.look_up(self.live)
        while True:
            self._end_prompt_passes()
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
        self._num_alike = 0 if ready or sessions else self._num_alike + 1
        if sessions or any(row.decoding for row in self.live):
            # Neither a prompt's next chunk nor sessions that begin together must wait long.
            few = any(s[0].is_first for s in sessions) or bool(self.sessions.feeds)
            few = few or any(not row.decoding for row in self.live)
            is_followed = not sessions and self._goes_on_alike(0)
            passes = max(1, self._most_passes(is_followed=is_followed) // (4 if few else 1))
            passes = self._siblings.passes(passes, self.live)
            self._dispatch(passes, sessions, stop_on_finish=len(self.queue) > 0)
            self._follow()
            self._take_results()
        if self._prefill_first and not len(self.queue) and not self.decode_rows.under_way:
            self._narrow()

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

    # Passes.

    def _prefill(self, rows: Sequence[RunningRequest], texts: Sequence[FedText]) -> None:
        """One pass over the next tokens of the first requests and texts of sessions, as many as its
        shape holds. In turn the ones or the others come first, so that neither wait for long. If
        only requests wait for it the host goes on while it runs."""
        self._texts_first = not self._texts_first
        fed = [*texts, *rows] if self._texts_first else [*rows, *texts]
        streams = self.sessions.has_passes or any(row.decoding for row in self.live)
        streams &= not self._prefill_first
        made = feed_prompts(
            fed,
            passes=self._prefill_passes,
            streaming=streams,
            queue=self.queue,
            metrics=self.metrics,
        )
        self._prompt_passes.append(made)
        if made.is_awaited:
            self._end_prompt_passes()
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

    def _most_passes(self, *, is_followed: bool) -> int:
        """The most passes of the next dispatch, if nothing waits to be prefilled; with `is_followed`
        another one is made before its results are read."""
        if not self._passes_by_speeds:
            return self.passes
        # The host finds stop texts, and what is sampled after one is thrown away.
        has_stops = any(row.request.stream.detokenizer.stops for row in self.live)
        most = USUAL_PASSES if has_stops else self.passes
        return self.kv.speeds.passes(most, is_followed=is_followed)

    def _dispatch(
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
        new = passes + sum(each.passes for each in self.decode_rows.under_way)
        for row in rows:
            capacity = row.extent.capacity - row.extent.length
            if capacity < min(new, row.request.remaining):
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

    def _narrow(self) -> None:
        """Goes on with fewer rows, where that pays and no more requests are to come."""
        if kept := kept_rows(self.rows):
            self.decode_rows.narrow(kept)
            self.rows = [self.rows[index] for index in kept]
            for index, row in enumerate(self.live):
                row.index = index
            self.kv.view_changed = True

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
        self._forget_under_way()
        self.decode_rows.reset()

    def use(self, model: LoadedModel) -> None:
        """Goes on with other weights of the same model."""
        self.model = model
        for each in (self.kv, self._prefill_passes, self.decode_rows):
            each.use(model)

    def forget(self) -> None:
        """Forgets all that has been computed, but for what running requests use."""
        self.kv.forget()
        self._siblings.clear()
        self.output.written.clear()

    def abandon(self) -> None:
        """Drops all rows, and what they have cached, but for pinned prefixes."""
        self._forget_under_way()
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
