"""The engine: takes requests from any thread or event loop and returns streams of tokens."""

import functools
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack, overload

import numpy as np

from jaxshare import Sampler
from jaxshare.argument_checks import INT32_MAX, as_integer
from jaxshare.deprecated import find, warn_renamed
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.checkpoints import CheckpointStore, SavedCheckpoint
from jaxshare.serving.engine import agreement, checkpoint, validation
from jaxshare.serving.engine.adapters import AdaptersHost
from jaxshare.serving.engine.create_scheduler import create_scheduler
from jaxshare.serving.engine.decisions import agree_on_settings, settings_of
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.request import DerivedSeeds, Request
from jaxshare.serving.engine.scheduler import MAX_PASSES
from jaxshare.serving.engine.snapshot import EngineSnapshot, take_snapshot
from jaxshare.serving.engine.stream import Detokenizer, Stream, StreamState
from jaxshare.serving.engine.stream_group import StreamGroup, start_group
from jaxshare.serving.errors import EngineError
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import as_sampler, check_model, default_sampler, warn_of_equal_texts
from jaxshare.serving.kvcache.lease import LeaseTable
from jaxshare.serving.kvcache.policy import Policy, SearchPlace
from jaxshare.serving.logits_cache.cache import LogitsCache
from jaxshare.serving.logits_cache.hotspot import USUAL, Hotspot


class Engine(AdaptersHost):
    """Serves requests to one model, as many at a time as there are rows and memory.

        with Engine(model) as engine:
            stream = engine.submit("What is 2 + 2?", agent_id="maths")
            print(stream.wait().text)

    Prefixes that requests have in common are found, kept, and read once in each pass. An output
    depends on its prompt, its sampler and its seed alone: in float32 it is the same token for token
    whatever else is running, and whatever was evicted.

    Attributes:
      model: as loaded, or with the weights of the last `update_params`.
      rows, passes: the most rows at the same time, and the most passes of a dispatch.
      metrics: see `Metrics`.
      tracer: makes spans of requests that are submitted from here on, or None; see `RequestTracer`.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        kv_bytes: int | None = None,
        host_kv_bytes: int = 0,
        policy: str | Policy = "contribution",
        max_rows: int = 16,
        max_queue: int = 1024,
        passes: int | None = None,
        seed: int = 0,
        sampler: Sampler | None = None,
        logits_cache: int | LogitsCache = 0,
        kept_logits: int = 256,
        hotspot: Hotspot = USUAL,
        resample_always: bool = False,
    ):
        """Allocates the accelerator's memory; nothing is computed yet.

        Args:
          model: from `jaxshare.models.load`. One on a mesh computes the same on all data groups;
            give each of `model.replicas()` an engine. Several processes of one mesh run the same
            program; see `jaxshare.serving.engine.agreement`.
          kv_bytes: accelerator memory (on a mesh, of all devices of a group) for keys and values; by
            default for rows of 2,048 tokens and one of a full context, but at most 2 GiB.
          host_kv_bytes: host memory for evicted keys and values; 0 for none.
          policy: "contribution", "lru", "lfu", "slru", "priority", or a `kvcache.policy.Policy`.
          max_rows, max_queue: requests that run at the same time, and that may wait beside those.
          passes: of a dispatch, the most; between dispatches tokens are streamed and requests
            admitted. By default as follows from the speeds; see `Scheduler`.
          seed, sampler: for requests that have none; by default the checkpoint's own settings.
          logits_cache: host bytes for requests with `resample`, or an existing Logits Cache.
          kept_logits: number of the largest logits to keep, beside the mass of the rest.
          hotspot: the rule for `resample="hotspot"`; resample_always: use it where it does not pay.

        Raises:
          ValueError: an unknown policy, a number below 1, memory for less than one token or block,
            a Logits Cache of another model, or host memory with a model of several processes.
          TypeError: an argument of another type.
          EngineError: the processes of the model give different settings.
        """
        check_model(model)
        most = MAX_PASSES if passes is None else passes
        self.rows, self._max_queue, self.passes, kept_logits = validation.check_engine(
            max_rows=max_rows, max_queue=max_queue, passes=most, kept_logits=kept_logits
        )
        self._sampler = default_sampler(model) if sampler is None else as_sampler(sampler)
        tokens, host = validation.memory_sizes(model, kv_bytes, host_kv_bytes, self.rows)
        self.model, metrics = model.for_context(model.config.max_positions), Metrics()
        logits = validation.logits_cache_for(self.model, logits_cache, kept_logits)
        sizes = tokens, host, self.rows, passes and self.passes
        use = logits, hotspot, resample_always
        scheduler = create_scheduler(self.model, metrics, sizes, policy, use)
        leases = LeaseTable(scheduler.kv, agreement.device_lock(model.mesh))
        super().__init__(scheduler, leases, metrics)
        self._start_updates(logits_cache)
        self._numbers, self._seeds = itertools.count(), DerivedSeeds(as_integer("seed", seed))
        self._store: CheckpointStore | None = None
        agree_on_settings(
            leases, scheduler, settings_of(self.model, sizes, policy, logits, hotspot)
        )

    # Requests.

    @overload
    def submit(
        self,
        prompt: validation.Prompt,
        sampler: Sampler | None = None,
        *,
        n: None = None,
        best_of: None = None,
        **options: Unpack[validation.SubmitOptions],
    ) -> Stream: ...
    @overload
    def submit(
        self,
        prompt: validation.Prompt,
        sampler: Sampler | None = None,
        *,
        n: int | None = None,
        best_of: int | None = None,
        **options: Unpack[validation.SubmitOptions],
    ) -> StreamGroup: ...
    def submit(
        self,
        prompt: validation.Prompt,
        sampler: Sampler | None = None,
        *,
        n: int | None = None,
        best_of: int | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        include_stop: bool | None = None,
        seed: int | None = None,
        agent_id: str | None = None,
        priority: int = 0,
        resample: str | None = None,
        logprobs: bool | str = False,
        top_logprobs: int = 0,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        next_seed: int | None = None,
        place: SearchPlace | None = None,
        adapter: str | None = None,
    ) -> Any:
        """Submits a request; from any thread, without waiting. None leaves an option to the sampler.

        Args:
          prompt: a text, messages (dicts with role and content), or tokens.
          sampler, max_new_tokens: how tokens are sampled, by default as the engine's; at most how
            many, by default 256.
          n, best_of: samples of the prompt, which make a `StreamGroup`; so many of which the n with
            the largest `logprob` are given, not with `resample`.
          stop, include_stop: texts before which the output ends (default the checkpoint's), or after.
          seed: of 64 bits; by default it follows from the engine's seed, the prompt, and the number
            of earlier requests with this prompt (`jaxshare.seeds`). Samples are as of `generate`.
          agent_id: the agent that it belongs to. Agents are served in turn, by what they contribute.
          priority: requests of a higher one are served first, and preempt those of a lower one.
          resample: "stepwise" takes from the Logits Cache what it holds of this prompt, exactly;
            "hotspot" samples again only where the model was uncertain, which is APPROXIMATE.
          logprobs: True under the model, "processed" as drawn, "both"; not with `resample`.
          top_logprobs: and of so many of the likeliest tokens in each place, up to 20.
          tools, chat_template_kwargs: with messages; see `encode_messages`.
          next_seed: of the next request with this prompt, whose replay is then computed ahead.
          place: in the search of an agent, whose finished branches are evicted first.
          adapter: the name of a loaded one (`add_adapter`); by default that of the engine's model.

        Raises:
          TooLongError: the request does not fit the model's context, or never the memory.
          QueueFullError: `max_queue` requests wait already. Several processes wait instead.
          ClosedError: the engine was shut down.
          ValueError, TypeError: a prompt that cannot be read, or options out of range.
        """
        tokens = validation.prompt_tokens(self.model, prompt, tools, chat_template_kwargs)
        sampler = self._sampler if sampler is None else as_sampler(sampler)
        several = validation.samples_of_prompt(sampler, n, best_of, resample)
        given = {"max_new_tokens": max_new_tokens, "stop": stop, "include_stop": include_stop}
        given |= {"seed": seed, "agent_id": agent_id, "priority": priority, "resample": resample}
        given |= {"top_logprobs": top_logprobs, "next_seed": next_seed, "place": place}
        given |= {"adapter": adapter, "kept_logits": self._scheduler.output.num_top_logits}
        given |= {"sampler": sampler, "logprobs": True if several and several[1] else logprobs}
        options = validation.RequestOptions.checked(self.model, **given)
        return self._start_all(tokens, options, several)

    def _start_all(
        self, tokens: np.ndarray, options: validation.RequestOptions, several: validation.Samples
    ) -> Stream | StreamGroup:
        """Submits the samples of a prompt, or the single one; see `samples_of_prompt`."""
        warn_of_greedy(self.model, options.sampler)
        if several is None:
            return self._start(tokens, options, 0, options.seed)
        warn_of_equal_texts([(several[0], options.sampler)])
        return start_group(functools.partial(self._start, tokens, options), options.seed, *several)

    def _start(
        self, tokens: np.ndarray, options: validation.RequestOptions, index: int, seed: int | None
    ) -> Stream:
        """Submits a sample of a prompt."""
        state = StreamState(Detokenizer(self.model.tokenizer, options.stops, options.includes_stop))
        request = options.request(next(self._numbers), tokens, state, index)
        if self.tracer is not None:
            state.on_end = self.tracer.begin(request)
        self._enqueue(request, state, seed, options.adapter)
        return Stream(state, functools.partial(_cancel, request))

    def _enqueue(
        self, request: Request, state: StreamState, seed: int | None, adapter: str | None
    ) -> None:
        """Accepts a request unless the engine is closed, full or too small; starts the thread."""
        with self._changed:
            self._check_open()
            request.adapter = self._adapter_of(adapter)
            pool, shared = self._scheduler.kv.pool, self._leases.shared
            validation.check_length(
                len(request.prompt),
                request.max_new_tokens,
                context=self.model.config.max_positions,
                capacity=pool.tokens,
                # What depends on time several processes decide together, before a step.
                available=pool.tokens if shared else self._leases.available,
                bytes_per_token=pool.bytes_per_token,
            )
            self._wait_for_place(self._max_queue)
            request.given_seed = seed
            if seed is None:
                request.seed, request.next_seed = self._seeds.next(request.prompt)
            else:
                request.seed = stream_seed(seed)
            self._start_thread()
            self._submitted.append(request)
            self._requests[request] = state
            self._changed.notify_all()  # another process may have decided on it already

    def workers(self, problem: str, **options: Any) -> Any:
        """The former name of `Workers(engine.model, problem, engine=engine, **options)`."""
        warn_renamed("Engine.workers", "Workers(..., engine=engine)")
        session = find("jaxshare.serving.workers.Workers")
        return session(self.model, problem, engine=self, **options)

    # Its life.

    def warm_up(self) -> float:
        """Compiles what requests and sessions need, so that none waits for it; returns the seconds.

        That is the decode loop for all rows, and for few, which runs while few are in use.

        Samplers that forbid or favour more than 8 tokens, prompts of many pieces and many sessions
        may need a larger program later. Raises ClosedError if the engine was shut down.
        """
        begin = time.perf_counter()

        def propose() -> dict[str, bool]:
            with self._changed:
                self._check_open()
                return {"idle": not self._requests and not self._sessions.expected}

        with self._leases.exclusive("warm up", propose) as agreed:
            if agreed["idle"]:
                self._scheduler.warm_up()
        return time.perf_counter() - begin

    def snapshot(self, max_runs: int = 4096) -> EngineSnapshot:
        """Looks at rows, queue and cache between two steps, from any thread; see `EngineSnapshot`.

        Args:
          max_runs: the most runs of the prefix tree to describe, those nearest to the root.

        Raises:
          EngineError: several processes run the engine.
          ClosedError: it was shut down.
        """
        max_runs = as_integer("max_runs", max_runs, 0, INT32_MAX)
        if self._leases.shared:
            raise EngineError(
                "several processes run the engine; snapshots are of one that is alone"
            )
        with self._leases.exclusive("snapshot"):
            self._check_open()
            return take_snapshot(self._scheduler, self.metrics, max_runs)

    # Checkpoints.

    def save(self, folder: str | os.PathLike, *, wait: bool = True) -> int:
        """Saves the engine between two steps.

        A checkpoint holds the keys and values of all that requests have read and written so far,
        how they were used, the Logits Cache, and the number of requests for each prompt, from which
        seeds are derived. It is written as a whole or not at all. It holds no requests: the same
        prompt with the same seed has the same output in a restored engine, and what was saved of it
        is not computed again.

        Args:
          folder: of this engine's checkpoints; made if it is missing. The two newest are kept.
          wait: return when it is written; False writes it in the background, for which `shutdown`
            waits.

        Returns:
          The number of the checkpoint.

        Raises:
          SaveError: it cannot be written, or the one before it could not.
          ClosedError: the engine was shut down.
        """
        validation.check_checkpoints(self.model, folder)
        with self._leases.exclusive():
            with self._changed:
                self._check_open()
                counts = dict(self._seeds.counts)
            self._store = CheckpointStore.of(folder, self._store)
            arrays, metadata = checkpoint.snapshot(
                self.model, self._scheduler.kv, self.logits_cache, counts
            )
            return self._store.save(arrays, metadata, wait=wait)

    def restore(self, folder: str | os.PathLike, *, number: int | None = None) -> int:
        """Restores a checkpoint of an engine with the same model, on any mesh, with any memory.

        The most recently used tokens come first; what does not fit is left out. Policies see the
        recorded uses; their counts of agents start afresh.

        Args:
          folder: that the checkpoint was saved to.
          number: of the checkpoint; by default the newest that is not damaged.

        Returns:
          The number of cached tokens.

        Raises:
          SaveError: there is no checkpoint, it cannot be read, or it is of another model.
          EngineError: this engine has served requests already.
          ClosedError: it was shut down.
        """
        validation.check_checkpoints(self.model, folder)
        with SavedCheckpoint(folder, number) as save, self._leases.exclusive():
            checkpoint.check(save, self.model)
            kv = self._scheduler.kv
            with self._changed:
                self._check_open()
                if self._seeds.counts or self._requests or kv.tree.root.children:
                    raise EngineError(
                        "the engine has served requests already; restore into a new one"
                    )
                with save.checked():
                    checkpoint.restore_seeds(save, self._seeds)
            with save.checked():
                return checkpoint.restore(save, self.model, kv, self.logits_cache)

    # Its end.

    def drain(self, timeout: float | None = None) -> None:
        """Blocks the calling thread until all requests have finished.

        Raises:
          TimeoutError: they have not finished within `timeout` seconds.
        """
        with self._changed:
            self._num_drains += 1
            try:
                if not self._changed.wait_for(
                    lambda: not self._requests and self._thread is None, timeout
                ):
                    raise TimeoutError(
                        f"{len(self._requests)} requests have not finished within {timeout} seconds"
                    )
            finally:
                self._num_drains -= 1

    def shutdown(self, *, cancel: bool = True) -> None:
        """Accepts no more requests, cancels the running ones, and frees the memory.

        Without `cancel` it waits for the running requests.
        """
        with self._changed:
            self._closed = True
            if cancel:
                for request in self._requests:
                    request.cancel_wanted = True
        self.drain()
        self._leases.close()
        with self._leases.exclusive(agreement.END):
            self._scheduler.free()
            if self._store:
                self._store.close()
                self._store = None
        if self.logits_cache:
            self.logits_cache.close()

    def __repr__(self) -> str:
        """A line: its model, rows, memory, and what it serves now."""
        state = "shut down" if self._closed else f"{len(self._requests)} requests"
        return f"<Engine of {self.model.name!r}: up to {self.rows} rows at a time; {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def _cancel(request: Request) -> None:
    request.cancel_wanted = True
