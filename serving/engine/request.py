"""Requests: a prompt, how it is answered, and its output so far."""

import collections
import contextvars
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxshare import Sampler
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.models.adapters.places import Adapter
from jaxshare.seeds import stream_seed
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.engine.stream import Detokenizer, TokenChunk
from jaxshare.serving.kvcache.policy import SearchPlace, prefix_hash
from jaxshare.serving.logits_cache.evidence import Watched

_MAX_PROMPTS = 2**16
_PLAIN = Sampler()
_COMPILED = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
    *("bad_words", "sequence_bias", "bias", "forbidden", "forbidden_first", "min_tokens"),
    *("stop_token_ids", "grammar", "processors"),
)
"""Settings of a sampler that not every program of the decode loop has, or has room for."""


class OutputSink(Protocol):
    """The taker of a request's output: a stream, or a run that collects completions.

    Attributes:
      detokenizer: finds its stop texts.
    """

    @property
    def detokenizer(self) -> Detokenizer: ...
    def admitted(self) -> None:
        """Notes that the request has a row and memory."""
        ...

    def put(self, chunk: TokenChunk) -> None:
        """Takes new tokens of the text, whose own text is left to the reader."""
        ...

    def restart(self) -> None:
        """Forgets all tokens, as others will be sampled in their places."""
        ...

    def finish(self, output: Completion) -> Completion:
        """Takes the whole output, without its text; returns it with the times that it took."""
        ...


@dataclasses.dataclass(eq=False)
class Request:
    """A request inside the engine.

    Attributes:
      number: in the order of submission.
      prompt: int32 tokens.
      sampler, seed, max_new_tokens: how it is answered.
      agent, priority: the agent that it belongs to, and its priority over other requests.
      place: its place in the search of an agent, or None.
      stream: takes its output.
      prompt_number, index: of its completion.
      cuts: see `jaxshare.serving.kvcache.manager.KVRequest`.
      scored: whether log-probabilities are wanted; logprobs: of what was sampled so far.
      processed: whether all log-probabilities are of the chances that tokens are drawn with.
      both: whether those of the model are wanted beside these; raw_logprobs: these.
      num_top_logprobs: the likeliest tokens in each place that are wanted, with those of them;
        top_logprobs: these, of what was sampled so far.
      resample: "stepwise" or "hotspot" if the Logits Cache may answer it and keeps its
        distributions; None for neither.
      output: tokens sampled so far, of which the first `num_replayed` came from the cache;
        stop_token: the stop token that ended them.
      num_reused: tokens of the prompt that were cached when the request was first admitted.
      state: the state of a request with `resample`, once it was looked up: a digest of its prompt.
      watched: what decides whether the cache pays for it, once it was looked up.
      num_written: tokens after the replayed ones whose distributions the cache was given;
        top_logits: the distributions from which those after them were sampled.
      next_seed: the seed of the next request with the same prompt, where seeds are derived.
      num_streamed: tokens of the output that its stream was given.
      processor_states: of its logits processors, where it was preempted.
      given_seed: the seed as it was submitted, or None.
      versions: (number of tokens, version), ascending: before so many were sampled the weights had
        this version. The tokens after the last of them have the engine's.
      adapter: that it is answered with, or None.
      waited: whether it has waited for a prefix that another request computed.
      fits: whether the decode loop was found to have room for its options.
      restarts: the number of times that tokens were thrown away, because the weights had changed.
      context: of its submission, in which its end is logged.
      cancel_wanted: whether it is to be cancelled, which is decided before a step; cancelled:
        whether that was decided.
    """

    number: int
    prompt: np.ndarray
    sampler: Sampler
    seed: int
    max_new_tokens: int
    agent: str
    priority: int
    stream: OutputSink
    resample: str | None = None
    num_top_logprobs: int = 0
    prompt_number: int = 0
    index: int = 0
    cuts: Sequence[int] | None = None
    scored: bool = False
    logprobs: list[float] = dataclasses.field(default_factory=list)
    output: list[int] = dataclasses.field(default_factory=list)
    stop_token: int | None = None
    num_replayed: int = 0
    state: bytes | None = None
    watched: Watched | None = None
    num_written: int = 0
    num_reused: int | None = None
    top_logits: list[TopLogits] = dataclasses.field(default_factory=list)
    next_seed: int | None = None
    num_streamed: int = 0
    preemptions: int = 0
    cancel_wanted: bool = False
    cancelled: bool = False
    finished: bool = False
    given_seed: int | None = None
    processed: bool = False
    top_logprobs: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)
    processor_states: Any = None
    place: SearchPlace | None = None
    both: bool = False
    raw_logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    restarts: int = 0
    adapter: Adapter | None = None
    waited: bool = False
    fits: bool = False
    context: contextvars.Context = dataclasses.field(default_factory=contextvars.copy_context)

    @property
    def options(self) -> set[str]:
        """The names of its options whose first use may compile a program, such as `grammar`."""
        sampler = self.sampler
        found = {n for n in _COMPILED if getattr(sampler, n) != getattr(_PLAIN, n)}
        return found | ({"logprobs"} if self.scored or self.num_top_logprobs else set())

    @property
    def adapter_key(self) -> bytes:
        """The digest of its adapter; empty for none."""
        return self.adapter.digest if self.adapter else b""

    @property
    def adapter_place(self) -> int:
        """The place of its adapter among those of the model, 0 for none."""
        return self.adapter.place if self.adapter else 0

    @property
    def state_tokens(self) -> np.ndarray:
        """Its prompt as a state of the Logits Cache: after the digest of its adapter, in numbers of
        which the first is no token."""
        if self.adapter is None:
            return self.prompt
        return np.concatenate([[-1], np.frombuffer(self.adapter_key, np.int32), self.prompt])

    @property
    def begun(self) -> bool:
        """True if it was admitted, or had tokens from the Logits Cache."""
        return self.num_reused is not None or bool(self.sampled)

    @property
    def recorded(self) -> bool:
        """True if the largest logits of its distributions are kept."""
        return self.resample is not None or self.num_top_logprobs > 0

    def start_over(self) -> None:
        """Forgets what was sampled, all of which is to be sampled anew."""
        self.restarts += bool(self.sampled)
        for each in (self.output, self.logprobs, self.raw_logprobs, self.top_logprobs):
            each.clear()
        self.top_logits.clear()
        self.versions.clear()
        self.stop_token = self.num_reused = self.processor_states = None
        self.num_replayed = self.num_written = self.num_streamed = 0
        self.stream.restart()

    @property
    def tokens(self) -> np.ndarray:
        """The prompt and the output so far."""
        return np.concatenate([self.prompt, np.asarray(self.output, np.int32)])

    @property
    def sampled(self) -> list[int]:
        """The output so far with the stop token that ended it."""
        return [*self.output, *([] if self.stop_token is None else [self.stop_token])]

    @property
    def max_tokens(self) -> int:
        """Tokens of the prompt and the longest output together."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled."""
        return self.max_new_tokens - len(self.output)


class DerivedSeeds:
    """Seeds of requests that are given none.

    Attributes:
      counts: the number of such requests for each recent prompt, by its hash.
    """

    def __init__(self, seed: int):
        self._seed = seed
        self.counts: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def next(self, prompt: np.ndarray) -> tuple[int, int]:
        """The seeds of this request and of the next one with the same prompt."""
        digest = prefix_hash(prompt)
        self.counts[digest] = count = self.counts.pop(digest, 0) + 1
        if len(self.counts) > _MAX_PROMPTS:
            self.counts.popitem(last=False)
        return self._of(digest, count), self._of(digest, count + 1)

    def _of(self, digest: bytes, count: int) -> int:
        """The seed of the n-th request with these prompt tokens."""
        return stream_seed(self._seed, "call", digest, count)
