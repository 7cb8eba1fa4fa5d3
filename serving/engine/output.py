"""What calls have said, and how they end: texts, stop texts, what streams are given, and what the
Logits Cache is told and asked."""

import bisect
import logging
import time

import jax
import numpy as np

from jaxshare.models import LoadedModel
from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.request import End, Request, RequestOutput
from jaxshare.serving.engine.speculation import DraftLookup
from jaxshare.serving.kvcache.policy import Policy
from jaxshare.serving.logits_cache.cache import LogitsCache
from jaxshare.serving.logits_cache.hotspot import Hotspot

log = logging.getLogger("jaxshare.engine")


class OutputProcessor:
    """Of the calls of one engine.

    Args:
      model: whose stop tokens they are.
      queue, policy, metrics: are told of every end.
      logits: the Logits Cache, or None; hotspot: how it is sampled where that was asked for.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        queue: FairQueue,
        policy: Policy,
        metrics: Metrics,
        logits: LogitsCache | None,
        hotspot: Hotspot,
    ):
        self.queue, self.policy, self.metrics, self.logits, self.hotspot = (
            queue,
            policy,
            metrics,
            logits,
            hotspot,
        )
        self.stops = frozenset(model.generation.stop_tokens)

    @property
    def kept(self) -> int:
        """Logits of a distribution that calls keep; 0 for none."""
        return (self.logits.kept or 0) if self.logits else 0

    def look_up(self, call: Request) -> None:
        """Takes the beginning of an answer from the Logits Cache."""
        assert self.logits is not None
        call.looked_up = True
        arguments = call.prompt, call.sampler, call.seed, call.budget, self.stops
        found = (
            self.logits.hotspot(*arguments, self.hotspot)
            if call.resample == "hotspot"
            else self.logits.replay(*arguments)
        )
        self.metrics.looked_up(len(found))
        if not found:
            return
        call.first = time.perf_counter()
        if found[-1] in self.stops:
            call.stop_token = found.pop()
        call.output += found
        call.replayed = len(found) + (call.stop_token is not None)
        if self.stopped(call):
            call.replayed = len(call.output)
            self.finish(call, End.STOP_TEXT)
        elif call.stop_token is not None:
            self.finish(call, End.STOP)
        elif not call.left:
            self.finish(call, End.LENGTH)
        else:
            self.publish(call)

    def guesses(self, call: Request) -> DraftLookup | None:
        """Of what a call may say next: after the latest answer to the same."""
        if not call.resample or self.logits is None:
            return None
        answer = self.logits.answer(call.prompt)
        return DraftLookup(answer) if len(answer) else None

    def finish(self, call: Request, end: End, error: Exception | None = None) -> None:
        """A call is over."""
        self.queue.end(call)
        if call.drawn_from and end is not End.ERROR:
            self._remember(call)
        self.publish(call)
        now = time.perf_counter()
        done = RequestOutput(
            tuple(call.output),
            "",
            end,
            len(call.prompt),
            call.reused or 0,
            call.replayed,
            call.preemptions,
            call.first and call.first - call.submitted,
            now - call.submitted,
            error,
        )
        self.policy.finished(call.agent, len(call.output))
        self.metrics.finished(call, done)
        log.info(
            "ended",
            extra={
                "call": call.number,
                "agent": call.agent,
                "end": end.value,
                "prompt_tokens": done.prompt_tokens,
                "reused_tokens": done.reused_tokens,
                "new_tokens": len(done.tokens),
                "seconds": round(done.seconds, 4),
            },
        )
        call.state.tell(done=done)

    def _remember(self, call: Request) -> None:
        """Gives the Logits Cache what a call has computed; and has the next one on the same state
        looked up before it comes."""
        assert self.logits is not None
        drawn = [*call.output, *([] if call.stop_token is None else [call.stop_token])]
        kept = jax.tree.map(lambda *parts: np.concatenate(parts), *call.drawn_from)
        new = drawn[call.replayed :]
        # a stop text ends the answer before what was drawn last
        kept = jax.tree.map(lambda array: array[: len(new)], kept)
        written = self.logits.write(call.prompt, drawn[: call.replayed], new, kept)
        if written and call.next_seed is not None and call.resample == "stepwise":
            self.logits.prefetch(call.prompt, call.sampler, call.next_seed, call.budget, self.stops)

    def give_up(self, call: Request, error: Exception) -> None:
        """Ends a call because the loop has failed."""
        call.state.tell(
            done=RequestOutput(
                tuple(call.output),
                "",
                End.ERROR,
                len(call.prompt),
                call.reused or 0,
                call.replayed,
                call.preemptions,
                None,
                time.perf_counter() - call.submitted,
                error,
            )
        )

    def stopped(self, call: Request) -> bool:
        """Whether one of the call's stop texts stands; then its output ends where the text before
        it does."""
        text = call.state.text
        if not text.stopped(call.output):
            return False
        # The fewest tokens with it: the same whenever the host looks in.
        del call.output[
            bisect.bisect_left(
                range(len(call.output)), True, lo=1, key=lambda n: text.stopped(call.output[:n])
            ) :
        ]
        return True

    def publish(self, call: Request) -> None:
        """Gives out what is new."""
        call.state.tell(tuple(call.output[call.given :]))
        call.given = len(call.output)
