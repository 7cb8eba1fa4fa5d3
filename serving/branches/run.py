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
from jaxshare.decoding.logprobs import BOTH, PROCESSED, as_logprobs
from jaxshare.models import LoadedModel
from jaxshare.serving.branches.answering import CallAnswering
from jaxshare.serving.branches.prefix import Prefix
from jaxshare.serving.branches.prompt_tree import Prompts
from jaxshare.serving.branches.run_plan import (
    FEW_ROWS,
    check_settings,
    plan_run,
    read_run_prompts,
)
from jaxshare.serving.engine.completion import Completion, without_stop
from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.output import OutputProcessor, unfinished_output
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.scheduler import Scheduler
from jaxshare.serving.engine.stream import Detokenizer, TokenChunk
from jaxshare.serving.errors import SamplingError
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import (
    as_top_logprobs,
    check_both,
    chosen,
    default_sampler,
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
      model: from `jaxshare.models.load`; all completions have its `adapter`, if it has one.
      prompts: text, tokens, messages for the chat template, a tree (`Branch`), or a list of these,
        from which the tree of their common prefixes is built; or prompts with numbers of their own
        (`prompt_tree.Prompt`), such as a part of a longer list. None samples from the end of `prefix`.
      n: completions of each prompt, by default 1. Number i of prompt p draws from the stream
        `jaxshare.seeds.stream_seed(seed, p, i)`, so its text depends neither on n nor on the other
        prompts, and two seeds share no stream.
      max_new_tokens: the maximum length of a completion, by default 64; a stop token ends it
        earlier.
      sampler: how to sample where a `Branch` has no sampler of its own; default the checkpoint's
        own settings. Its fields of calls (`n`, `max_tokens`, `stop`, `include_stop`, `seed`) are for
        arguments that are not given; it has no `best_of`, which `generate` has.
      stop: a completion ends before the first of these texts, or after it with `include_stop`;
        default those of the checkpoint.
      top_logprobs: give the log-probabilities of so many of the likeliest tokens in each place, up
        to 20.
      logprobs: "raw" gives log-probabilities under the model itself, "processed" those of the
        chances that tokens are drawn with, after all settings.
      seed: of all streams, by default 0; the first completion of the first prompt draws from it itself.
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
      alone: the process has no sessions and no engine. The program of a run of few rows then has no
        part for sessions: it is compiled in five sixths of the time, and is of use to no engine.

    Raises:
      ValueError: no prompts, an empty one, n, max_new_tokens or max_rows below 1, a prompt that
        leaves too little of the model's context, one that does not fit the memory, or a sampler
        with `best_of`.

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
        n: int | None = None,
        max_new_tokens: int | None = None,
        sampler: Sampler | None = None,
        stop: str | Sequence[str] | None = None,
        include_stop: bool | None = None,
        top_logprobs: int = 0,
        logprobs: bool | str = "raw",
        seed: int | None = None,
        share: bool | None = None,
        prefix: Prefix | None = None,
        max_rows: int | None = None,
        max_kv_bytes: int | None = None,
        costs: Costs | None = None,
        skip: Collection[tuple[int, int]] = (),
        alone: bool | None = None,
    ):
        bounds = {"max_rows": max_rows, "max_kv_bytes": max_kv_bytes}
        check_settings(model, prompts, prefix, share=share, **bounds)
        self._peak_tokens, self._alone = 0, alone
        self.sampler = sampler or default_sampler(model)
        texts = {"max_new_tokens": max_new_tokens, "stop": stop, "include_stop": include_stop}
        call = CallAnswering.of(model, self.sampler, seed=seed, **texts)
        count, before = chosen("n", n, self.sampler, 1), prefix.tokens if prefix else 0
        self.prompts = read_run_prompts(model, prompts, count, prefix)
        self._answers = call.of_prompts(self.prompts, before)
        samplers = [self.sampler, *(answer.sampler for answer in self._answers.values())]
        for each in samplers:
            each.refuse(["best_of"], "a run yields all its completions; call generate to choose")
        longest = max(answer.max_new_tokens for answer in self._answers.values())
        self._logprobs = check_both(as_logprobs(logprobs), as_top_logprobs(model, top_logprobs))
        # Below a prefix keys must be rotated as the prefix's are.
        self.model = (
            dataclasses.replace(model, config=prefix.store.model.config)
            if prefix
            else model.for_context(max(len(p.tokens) for p in self.prompts) + longest)
        )
        warn_of_greedy(model, self.sampler)
        plan = plan_run(
            model,
            self.prompts,
            max_new_tokens=longest,
            share=share,
            prefix=prefix,
            costs=costs,
            skip=skip,
            counts_tokens=any(each.counts_tokens for each in samplers),
            **bounds,
        )
        self.sharing_plan, self.rows, self.costs = plan.sharing, plan.peak.rows, plan.costs
        self.rows_because, self._samples = plan.rows_because, plan.samples
        self.prompt_tokens = sum(before + len(prompt.tokens) for prompt in self.prompts)
        self.unique_tokens = before + plan.unique_tokens
        self.passes, self.seconds, self.compile_seconds, self.sampled_tokens = 0, 0.0, 0.0, 0
        self._prefix, self._kv_tokens, self._state_rows = prefix, plan.kv_tokens, plan.state_rows
        self._live, self._ended = dict[Request, None](), collections.deque[Completion]()

    def __repr__(self) -> str:
        """A line with its size and how far it is."""
        return (
            f"<Branches: {len(self._samples)} completions of {len(self.prompts)} prompts with "
            f"{self.prompt_tokens} tokens ({self.unique_tokens} read once), {self.rows} rows; "
            f"{self.passes} passes, {self.sampled_tokens} tokens sampled>"
        )

    @property
    def sample_counts(self) -> list[tuple[int, Sampler]]:
        """The number of completions of each prompt, and their sampler."""
        return [(prompt.n, self._answers[prompt.number].sampler) for prompt in self.prompts]

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
            # as an engine, whose program it can use
            takes_sessions=not self._alone and self._state_rows <= FEW_ROWS,
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
        answer = self._answers[sample.prompt]
        return Request(
            number,
            np.asarray(prompt, np.int32),
            answer.sampler.for_prompt(len(prompt)),
            answer.seed(sample.index),
            answer.max_new_tokens,
            "",
            0,
            _Sink(self._detokenizer(sample.prompt), self._finish),
            num_top_logprobs=self._logprobs[1],
            prompt_number=sample.prompt,
            index=sample.index,
            cuts=[end for end in ends if end],
            scored=self._logprobs[0] is not None,
            processed=self._logprobs[0] in (PROCESSED, BOTH),
            both=self._logprobs[0] == BOTH,
            adapter=self.model.adapter,
        )

    def _finish(self, output: Completion) -> Completion:
        """Takes a completion that has ended; its error gets the number of its prompt."""
        if output.error:
            after = f"{output.prompt_tokens + len(output.tokens)} tokens"
            kind = type(output.error) if isinstance(output.error, SamplingError) else SamplingError
            error = kind.of(f"prompt {output.prompt}", after)
            output = dataclasses.replace(output, error=error)
        self._ended.append(output)
        return output

    def _detokenizer(self, prompt: int) -> Detokenizer:
        """Finds the stop texts of completions of this prompt."""
        answer = self._answers[prompt]
        return Detokenizer(self.model.tokenizer, answer.stops, answer.includes_stop)

    def _with_text(self, completion: Completion) -> Completion:
        shown = [*without_stop(completion.tokens, completion.finish_reason)]
        text = self._detokenizer(completion.prompt).text(shown)
        return dataclasses.replace(completion, text=text)

    def _add_time(self, watch: Stopwatch) -> None:
        seconds, compiled = watch.split()
        self.seconds += seconds
        self.compile_seconds += compiled


@dataclasses.dataclass(frozen=True)
class _Sink:
    """The taker of a request's output, which is of one completion."""

    detokenizer: Detokenizer
    ended: Callable[[Completion], Completion]

    def finish(self, output: Completion) -> Completion:
        """Gives the output to the run."""
        return self.ended(output)

    def admitted(self) -> None:
        """Is for requests of an engine, whose time in the queue is told."""

    def put(self, chunk: TokenChunk) -> None:
        """Ignores new tokens: `Branches.running` has them."""

    def restart(self) -> None:
        """Is for requests of an engine: the weights of a run stay as they are."""
