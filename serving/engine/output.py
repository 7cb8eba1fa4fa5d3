"""Output processing: stop texts, finish reasons, streaming, and the Logits Cache."""

import logging
import math

import jax
import numpy as np

from jaxshare import FinishReason, Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.speculation import SHAPES, DraftLookup
from jaxshare.serving.engine.stream import TokenChunk
from jaxshare.serving.kvcache.policy import Policy
from jaxshare.serving.logits_cache.cache import LogitsCache
from jaxshare.serving.logits_cache.evidence import Watched
from jaxshare.serving.logits_cache.hotspot import USUAL, Hotspot
from jaxshare.serving.logits_cache.payoff import Payoff
from jaxshare.serving.logits_cache.trie import state_digest

log = logging.getLogger("jaxshare.engine")


class OutputProcessor:
    """Processes the outputs of one engine's requests.

    Args:
      model: the model whose stop tokens end an output.
      queue, policy, metrics: receive every finished request.
      logits: the Logits Cache, or None; hotspot: the rule for requests with `resample="hotspot"`.
      payoff: decides which requests use the cache; None for all.

    Attributes:
      written: states of which new distributions were written since requests were looked up last.
      version: of the model's weights.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        queue: FairQueue,
        policy: Policy,
        metrics: Metrics,
        logits: LogitsCache | None,
        hotspot: Hotspot = USUAL,
        payoff: Payoff | None = None,
    ):
        self.payoff = payoff or Payoff((1, 1, 1), None)
        self.queue, self.policy, self.metrics = queue, policy, metrics
        self.logits, self.hotspot = logits, hotspot
        self.stops = frozenset(model.generation.stop_tokens)
        self.written: set[bytes | None] = set()
        self.version = 0

    @property
    def num_top_logits(self) -> int:
        """Logits that are kept of each distribution; 0 for none."""
        return (self.logits.num_top_logits or 0) if self.logits else 0

    def look_up(self, request: Request) -> None:
        """Takes the beginning of an output from the Logits Cache."""
        assert self.logits is not None and request.watched is not None and request.resample
        is_cached = self.logits.has(request.watched.state)
        with self.payoff.hosting(request.resample if is_cached else "miss"):
            tokens = (
                self.logits.hotspot(*self._replay_of(request), self.hotspot)
                if request.resample == "hotspot"
                else self.logits.replay(*self._replay_of(request))
            )
        request.watched.found = len(tokens) if is_cached else None
        self.metrics.looked_up(len(tokens))
        self._take_replayed(request, tokens)

    def go_on(self, request: Request) -> None:
        """Takes more of an output from the Logits Cache, where other requests have come further."""
        assert self.logits is not None
        with self.payoff.hosting("follow"):
            tokens = self.logits.go_on(*self._replay_of(request), request.output)
        self.metrics.followed(len(tokens))
        self._take_replayed(request, tokens)

    def _replay_of(self, request: Request) -> tuple[np.ndarray, Sampler, int, int, frozenset[int]]:
        """The first arguments of a request's replay."""
        budget = request.max_new_tokens
        return request.state_tokens, request.sampler, request.seed, budget, self.stops

    def _take_replayed(self, request: Request, tokens: list[int]) -> None:
        """Appends tokens from the Logits Cache to an output; streams or finishes it."""
        if not tokens:
            return
        if tokens[-1] in self.stops:
            request.stop_token = tokens.pop()
        request.output += tokens
        request.num_replayed = len(request.sampled)
        if self.cut_at_stop_text(request):
            request.num_replayed = len(request.output)
            self.finish(request, FinishReason.STOP_TEXT)
        elif request.stop_token is not None:
            self.finish(request, FinishReason.STOP)
        elif not request.remaining:
            self.finish(request, FinishReason.LENGTH)
        else:
            self.publish(request)

    def draft_lookup(self, request: Request, host_seconds: float) -> DraftLookup | None:
        """A draft lookup in the latest output for the same prompt, or None where there is none, or
        drafts do not pay."""
        if not request.resample or self.logits is None:
            return None
        if not self.payoff.drafts_pay(host_seconds, SHAPES[-1][1]):
            return None
        output = self.logits.latest_output(request.state_tokens)
        return DraftLookup(output) if len(output) else None

    def finish(
        self, request: Request, reason: FinishReason, error: Exception | None = None
    ) -> None:
        """Finishes a request: its last tokens, its final output, and all that is counted."""
        self.queue.finish(request)
        request.finished = True
        if request.resample and reason is not FinishReason.ERROR:
            with self.payoff.hosting("write"):
                self.write_logits(request)
            self._replay_ahead(request)
        if request.watched is not None and reason is not FinishReason.ERROR:
            replayed = request.num_replayed if request.resample else None
            self.payoff.ended(request.watched, request.sampled, replayed)
        self.publish(request)
        output = request.stream.finish(_final_output(request, reason, error, self.version))
        self.policy.finished(request.agent, len(request.output))
        self.metrics.finished(output)
        request.context.run(
            log.info,
            "ended",
            extra={
                "call": request.number,
                "agent": request.agent,
                "end": str(reason),
                "prompt_tokens": output.prompt_tokens,
                "reused_tokens": output.reused_tokens,
                "new_tokens": len(output.tokens),
                "seconds": round(output.seconds, 4),
            },
        )

    def write_logits(self, request: Request) -> None:
        """Writes the distributions that a request has computed since the last time to the cache."""
        assert self.logits is not None
        if not request.top_logits:
            return
        sampled, start = request.sampled, request.num_replayed + request.num_written
        top_logits = jax.tree.map(lambda *parts: np.concatenate(parts), *request.top_logits)
        before, new = sampled[:start], sampled[start:]
        # A stop text cuts the output before the tokens that were sampled last.
        top_logits = jax.tree.map(lambda array: array[: len(new)], top_logits)
        if self.logits.write(request.state_tokens, before, new, top_logits):
            self.written.add(request.state)
        request.num_written += len(new)
        request.top_logits.clear()

    def watch(self, request: Request) -> Watched:
        """Watches a request that has not been looked up yet, and lets it be where the Logits Cache
        does not pay for it."""
        assert self.logits is not None
        # Those among which it is counted whether the cache pays.
        kind = request.agent, request.sampler.temperature, request.resample
        request.state = state_digest(request.state_tokens)
        request.watched = self.payoff.watch(kind, request.state)
        if not self.payoff.pays(request.watched, self.logits.has(request.state)):
            request.resample = None
            self.metrics.left_alone()
        return request.watched

    def _replay_ahead(self, request: Request) -> None:
        """Lets the replay of the next request with the same prompt be computed ahead."""
        assert self.logits is not None
        computed = request.num_written and request.resample == "stepwise"
        if computed and request.next_seed is not None:
            state, sampler, _, budget, stops = self._replay_of(request)
            self.logits.prefetch(state, sampler, request.next_seed, budget, stops)

    def abort(self, request: Request, error: Exception) -> None:
        """Ends the stream of a request because the scheduler has failed."""
        request.stream.finish(_final_output(request, FinishReason.ERROR, error, self.version))

    def cut_at_stop_text(self, request: Request) -> bool:
        """Cuts the output before a stop text; False if there is none."""
        # The fewest tokens that contain it: the same for any number of passes per dispatch.
        shortest = request.stream.detokenizer.fewest_with_stop(request.output)
        if shortest is None:
            return False
        del request.output[shortest:]
        request.stop_token = None  # it came after the stop text
        return True

    def publish(self, request: Request) -> None:
        """Gives the stream all new tokens."""
        new = slice(request.num_streamed, len(request.output))
        if new.start < new.stop:
            logprobs = tuple(_logprobs(request)[new]) if request.scored else None
            tokens, top = tuple(request.output[new]), _top_logprobs(request, new)
            request.stream.put(TokenChunk(tokens, "", logprobs, top))
        request.num_streamed = new.stop


def _final_output(
    request: Request, reason: FinishReason, error: Exception | None, version: int
) -> Completion:
    """The output of a request that finishes now, without its text."""
    tokens = tuple(request.sampled)
    # A stop text cuts the output before the tokens that were sampled last.
    logprobs = tuple(_logprobs(request)[: len(tokens)]) if request.scored else None
    return Completion(
        "",
        tokens,
        reason,
        logprob=None if logprobs is None else math.fsum(logprobs),
        logprobs=logprobs,
        top_logprobs=_top_logprobs(request, slice(0, len(tokens))),
        processed_logprobs=tuple(request.logprobs[: len(tokens)]) if request.both else None,
        version_runs=_version_runs(request, len(tokens), version),
        restarts=request.restarts,
        prompt=request.prompt_number,
        index=request.index,
        prompt_tokens=len(request.prompt),
        reused_tokens=request.num_reused or 0,
        replayed_tokens=request.num_replayed,
        preemptions=request.preemptions,
        error=error,
    )


def _logprobs(request: Request) -> list[float]:
    """The log-probabilities of what was sampled; where both kinds are wanted, those of the model."""
    return request.raw_logprobs if request.both else request.logprobs


def _version_runs(request: Request, size: int, version: int) -> tuple[tuple[int, int], ...]:
    """The versions of the weights that the first tokens were sampled with, each with how many."""
    runs, start = [], 0
    for end, each in (*request.versions, (size, version)):
        end = min(end, size)  # a stop text may cut the output
        if end > start:
            runs.append((end - start, each))
            start = end
    return tuple(runs)


def _top_logprobs(
    request: Request, places: slice
) -> tuple[tuple[tuple[int, float], ...], ...] | None:
    """The likeliest tokens in some places of the output, and their log-probabilities."""
    return tuple(request.top_logprobs[places]) if request.num_top_logprobs else None


def unfinished_output(request: Request) -> Completion:
    """The output of a request so far, without its text."""
    return _final_output(request, FinishReason.RUNNING, None, 0)
