"""Branches: completions of trees of prompts.

Every node is stored once, and each pass reads it once for all rows below it (Hydragen section 3).
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Generator, Sequence

import numpy as np

from jaxshare import Sampler
from jaxshare.compile_time import Stopwatch
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.branches.prefix import Prefix
from jaxshare.serving.branches.prompt_tree import Prompts
from jaxshare.serving.branches.run_plan import (
    FEW_ROWS,
    check_settings,
    plan_run,
    read_and_check_prompts,
)
from jaxshare.serving.engine.completion import Completion, without_stop
from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.output import OutputProcessor, unfinished_output
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.scheduler import Scheduler
from jaxshare.serving.engine.stream import Detokenizer
from jaxshare.serving.errors import SamplingError
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import (
    as_top_logprobs,
    check_sampler,
    default_sampler,
    stop_texts,
    token_bytes,
)
from jaxshare.serving.kvcache.eviction import make_policy
from jaxshare.serving.kvcache.fan_in import group_sizes
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.sharing_cost import Costs
from jaxshare.serving.kvcache.speeds import FixedSpeeds

_PASSES_PER_DISPATCH = 16


class Branches:
    """A run over a tree of prompts; `stream` yields the completions as they end.

    Completions are requests of a scheduler of their own, in the depth-first order of the tree: a
    row that ends is replaced by the next one, and a prefix stays as long as there is memory.

    Args:
      model: from `jaxshare.models.load`.
      prompts: text, tokens, a tree (`Branch`), or a list of these, from which the tree of their
        common prefixes is built; or prompts with numbers of their own (`prompt_tree.Prompt`), such
        as a part of a longer list. None samples from the end of `prefix`.
      n: completions of each prompt. Number i of prompt p draws from the stream
        `jaxshare.seeds.stream_seed(seed, p, i)`, so its text depends neither on n nor on the other
        prompts, and two seeds share no stream.
      max_new_tokens: the maximum length of a completion; a stop token ends it earlier.
      sampler: how to sample where a `Branch` has no sampler of its own; default the checkpoint's
        own settings.
      stop: a completion ends before the first of these texts, or after it with `include_stop`;
        default those of the checkpoint.
      top_logprobs: give the log-probabilities of so many of the likeliest tokens in each place, up
        to 20.
      seed: of all streams; the first completion of the first prompt draws from it itself.
      share: True stores every common prefix once; False gives every completion a copy of its
        prompt; None decides for each prefix by `costs`.
      prefix: comes before all prompts, prefilled already. The rows run in its store.
      max_rows: the maximum number of completions at a time; default as many as memory has room
        for, up to 4096.
      max_kv_bytes: bound on the memory for keys and values, of all devices of the mesh together
        except its data groups, which have as much each; default 80 % of what is free on a device
        with memory of its own, and half of what the host has free on others.
      costs: of a pass on this device; default the measurements of `jaxshare calibrate`, or else a
        roofline of the device (`jaxshare.serving.kvcache.sharing_cost.choose`).
      skip: (prompt, index) of completions not to sample.

    Raises:
      ValueError: no prompts, an empty one, n, max_new_tokens or max_rows below 1, a prompt that
        leaves too little of the model's context, or one that does not fit the memory.

    Attributes:
      model: for the context that the run needs.
      prompts: the prompts as tokens.
      sharing_plan: which common prefixes are blocks, and what is in each row's own block.
      rows: completions at a time; rows_because: the reason for that number.
      costs: the costs by which sharing was decided; None where there was nothing to decide.
      prompt_tokens, unique_tokens: see `Completions`.
      passes, seconds, kv_bytes, compile_seconds: see `Completions`; so far.
      sampled_tokens: so far.
    """

    def __init__(
        self,
        model: LoadedModel,
        prompts: Prompts | None,
        *,
        n: int = 1,
        max_new_tokens: int = 64,
        sampler: Sampler | None = None,
        stop: str | Sequence[str] | None = None,
        include_stop: bool = False,
        top_logprobs: int = 0,
        seed: int = 0,
        share: bool | None = None,
        prefix: Prefix | None = None,
        max_rows: int | None = None,
        max_kv_bytes: int | None = None,
        costs: Costs | None = None,
        skip: Collection[tuple[int, int]] = (),
    ):
        bounds = {"max_rows": max_rows, "max_kv_bytes": max_kv_bytes}
        check_settings(model, prompts, prefix, max_new_tokens=max_new_tokens, **bounds)
        self.prompts = read_and_check_prompts(
            model, prompts, n, prefix=prefix, max_new_tokens=max_new_tokens
        )
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self._num_top_logprobs = as_top_logprobs(model, top_logprobs)
        # Below a prefix keys must be rotated as the prefix's are.
        self.model = (
            dataclasses.replace(model, config=prefix.store.model.config)
            if prefix
            else model.for_context(max(len(p.tokens) for p in self.prompts) + max_new_tokens)
        )
        self.sampler = sampler or default_sampler(model)
        samplers = [self.sampler, *(p.sampler for p in self.prompts if p.sampler)]
        for each in samplers:
            check_sampler(model, each)
        warn_of_greedy(model, self.sampler)
        self.detokenizer = Detokenizer(model.tokenizer, stop_texts(model, stop), include_stop)
        plan = plan_run(
            model,
            self.prompts,
            max_new_tokens=max_new_tokens,
            share=share,
            prefix=prefix,
            costs=costs,
            skip=skip,
            counts_tokens=any(each.counts_tokens for each in samplers),
            **bounds,
        )
        self.sharing_plan, self.rows, self.costs = plan.sharing, plan.peak.rows, plan.costs
        self.rows_because, self._samples = plan.rows_because, plan.samples
        before = prefix.tokens if prefix else 0
        self._samplers = {p.number: p.sampler or self.sampler for p in self.prompts}
        self.prompt_tokens = sum(before + len(prompt.tokens) for prompt in self.prompts)
        self.unique_tokens = before + plan.unique_tokens
        self.passes, self.seconds, self.compile_seconds, self.sampled_tokens = 0, 0.0, 0.0, 0
        self._prefix, self._kv_tokens, self._state_rows = prefix, plan.kv_tokens, plan.state_rows
        self._live: dict[Request, None] = {}  # submitted and not finished
        self._ended: collections.deque[Completion] = collections.deque()
        self._peak_tokens = 0

    @property
    def sample_counts(self) -> list[tuple[int, Sampler]]:
        """The number of completions of each prompt, and their sampler."""
        return [(prompt.n, self._samplers[prompt.number]) for prompt in self.prompts]

    @property
    def notes(self) -> list[str]:
        """The choices made for this run and their reasons, a sentence each.

        They are the rows at a time, and the costs where these decide what is shared.
        """
        notes = []
        if len(self._samples) > 1:
            rows = f"{self.rows} row{'s' * (self.rows > 1)}"
            notes.append(f"{rows} at a time: {self.rows_because}")
        if self.costs:
            notes.append(f"what is shared is decided by costs {self.costs.source}")
        return notes

    @property
    def sample_ids(self) -> list[tuple[int, int]]:
        """(prompt, index) of the completions that this run samples, in its order."""
        return [(sample.prompt, sample.index) for sample in self._samples]

    @property
    def kv_bytes(self) -> int:
        """The peak of the bytes of cached keys and values, so far."""
        return self._peak_tokens * token_bytes(self.model)

    def running(self) -> list[Completion]:
        """The completions that `stream` has not yielded yet, with what they have sampled so far."""
        unfinished = [unfinished_output(request) for request in self._live if request.sampled]
        return [*map(self._with_text, [*self._ended, *unfinished])]

    def stream(
        self, on_pass: Callable[["Branches"], None] | None = None, *, warm_up: bool = False
    ) -> Generator[Completion, None, None]:
        """Runs, and yields every completion as it ends. To be called once.

        Where the model's logits are not finite, a completion has what was sampled before, and its
        `error` is a `SamplingError` with the number of its prompt; the others go on.

        Args:
          on_pass: called between dispatches with this run.
          warm_up: compile everything before the clock starts.

        Raises:
          ValueError: another call uses the store of the prefix.
        """
        if not self._samples:
            return
        with self._prefix.store.exclusive() if self._prefix else contextlib.nullcontext():
            self._scheduler = self._create_scheduler()
            try:
                yield from self._run(self._scheduler, on_pass, warm_up)
            finally:
                self._scheduler.abandon()
                self._live.clear()

    def _create_scheduler(self) -> Scheduler:
        """The scheduler of the run. It decides by no clock, so several processes decide alike."""
        queue, policy = FairQueue(), make_policy("lru")
        self._metrics = Metrics()
        kv = (
            self._prefix.store.kv
            if self._prefix
            else KVManager(
                self.model,
                tokens=self._kv_tokens,
                host_tokens=0,
                policy=policy,
                metrics=self._metrics,
                speeds=FixedSpeeds(),
            )
        )
        output = OutputProcessor(
            self.model, queue=queue, policy=policy, metrics=self._metrics, logits=None
        )
        return Scheduler(
            self.model,
            kv=kv,
            queue=queue,
            rows=self._state_rows,
            passes=_PASSES_PER_DISPATCH,
            metrics=self._metrics,
            output=output,
            prefill_first=True,
            groups=group_sizes(
                [min(block.rows, self.rows) for block in self.sharing_plan.blocks],
                self._state_rows,
            ),
            takes_sessions=self._state_rows <= FEW_ROWS,  # as an engine, whose program it can use
        )

    def _run(
        self,
        scheduler: Scheduler,
        on_pass: Callable[["Branches"], None] | None,
        warm_up: bool,
    ) -> Generator[Completion, None, None]:
        # of other prefixes in the same store
        others = scheduler.kv.cached_tokens - (self._prefix.tokens if self._prefix else 0)
        requests = collections.deque(map(self._request, range(len(self._samples))))
        watch = Stopwatch.start()
        if warm_up:
            scheduler.warm_up(requests)
        self.compile_seconds += watch.split()[1]
        watch = Stopwatch.start()
        while requests or self._live:
            # More than are admitted at once: dispatches end early while others wait for a row.
            while requests and len(scheduler.queue) < 2 * self.rows:
                request = requests.popleft()
                self._live[request] = None
                scheduler.queue.add(request)
            scheduler.step()
            self._add_time(watch)
            self.passes = self._metrics.passes
            self.sampled_tokens = self._metrics.num_sampled
            self._peak_tokens = max(self._peak_tokens, scheduler.peak_tokens - others)
            self._live = {request: None for request in self._live if not request.finished}
            if on_pass:
                on_pass(self)
            while self._ended:
                yield self._with_text(self._ended.popleft())
            watch = Stopwatch.start()

    def _request(self, number: int) -> Request:
        """The request of the sample of this number in the run's order."""
        sample = self._samples[number]
        sharing, before = self.sharing_plan, self._prefix.all_tokens if self._prefix else []
        runs = [sharing.blocks[block].tokens for block in sharing.path(sample.block)]
        ends = itertools.accumulate(map(len, runs), initial=len(before))
        prompt = [*before, *itertools.chain(*runs), *sample.suffix]
        return Request(
            number,
            np.asarray(prompt, np.int32),
            self._samplers[sample.prompt],
            stream_seed(self.seed, sample.prompt, sample.index),
            self.max_new_tokens,
            "",
            0,
            self,
            num_top_logprobs=self._num_top_logprobs,
            prompt_number=sample.prompt,
            index=sample.index,
            cuts=[end for end in ends if end],
            scored=True,
        )

    # The sink of the requests; `detokenizer` is a part of it.

    def put(self, tokens: tuple[int, ...]) -> None:
        """Ignores new tokens: `running` has them."""

    def finish(self, output: Completion) -> Completion:
        """Takes a completion that has ended; its error gets the number of its prompt."""
        if output.error:
            after = f"{output.prompt_tokens + len(output.tokens)} tokens"
            kind = type(output.error) if isinstance(output.error, SamplingError) else SamplingError
            error = kind.of(f"prompt {output.prompt}", after)
            output = dataclasses.replace(output, error=error)
        self._ended.append(output)
        return output

    def _with_text(self, completion: Completion) -> Completion:
        shown = [*without_stop(completion.tokens, completion.finish_reason)]
        return dataclasses.replace(completion, text=self.detokenizer.text(shown))

    def _add_time(self, watch: Stopwatch) -> None:
        seconds, compiled = watch.split()
        self.seconds += seconds
        self.compile_seconds += compiled
