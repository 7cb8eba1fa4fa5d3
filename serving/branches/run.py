"""Branches: completions of trees of prompts.

Every node is stored once, and each pass reads it once for all rows below it (Hydragen section 3).
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxshare import DecodeState, FinishReason, Layout, Sampler, decode
from jaxshare.compile_time import Stopwatch
from jaxshare.decoding.row_transfer import take_rows
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.branches.arena import Arena
from jaxshare.serving.branches.narrow import narrowed_size
from jaxshare.serving.branches.prefix import Prefix, exclusive
from jaxshare.serving.branches.prompt_tree import Prompts
from jaxshare.serving.branches.run_plan import check_settings, plan_run, read_and_check_prompts
from jaxshare.serving.branches.sharing_plan import Sample
from jaxshare.serving.branches.waves import Residents, group_sizes
from jaxshare.serving.engine import prefill
from jaxshare.serving.engine.completion import Completion, without_stop
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import default_sampler, token_bytes
from jaxshare.serving.kvcache.sharing_cost import Costs

_PASSES_PER_DISPATCH = 16


class Branches:
    """A run over a tree of prompts; `stream` yields the completions as they end.

    Rows run in waves: a row that ends is replaced at once by the next completion, in the
    depth-first order of the tree, and a prefix is kept as long as rows below it are to come.

    Args:
      model: from `jaxshare.models.load`.
      prompts: text, tokens, a tree (`Branch`), or a list of these, from which the tree of their
        common prefixes is built; or prompts with numbers of their own (`prompt_tree.Prompt`), such
        as a part of a longer list. None samples from the end of `prefix`.
      n: completions of each prompt. Number i of prompt p draws from the stream
        `jaxshare.seeds.stream_seed(seed, p, i)`, so its text depends neither on n nor on the other
        prompts, and two seeds share no stream.
      max_new_tokens: the maximum length of a completion; a stop token ends it earlier.
      sampler: how to sample; default the checkpoint's own settings.
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
        seed: int = 0,
        share: bool | None = None,
        prefix: Prefix | None = None,
        max_rows: int | None = None,
        max_kv_bytes: int | None = None,
        costs: Costs | None = None,
        skip: Collection[tuple[int, int]] = (),
    ):
        """Reads the prompts and plans the run; computes nothing yet. See the class."""
        bounds = {"max_rows": max_rows, "max_kv_bytes": max_kv_bytes}
        check_settings(model, prompts, prefix, max_new_tokens=max_new_tokens, **bounds)
        self.prompts = read_and_check_prompts(
            model, prompts, n, prefix=prefix, max_new_tokens=max_new_tokens
        )
        self.max_new_tokens, self.seed = max_new_tokens, seed
        # Below a prefix keys must be rotated as the prefix's are.
        self.model = (
            dataclasses.replace(model, config=prefix.store.model.config)
            if prefix
            else model.for_context(max(len(p.tokens) for p in self.prompts) + max_new_tokens)
        )
        self.sampler = sampler or default_sampler(model)
        warn_of_greedy(model, self.sampler)
        plan = plan_run(
            model,
            self.prompts,
            max_new_tokens=max_new_tokens,
            share=share,
            prefix=prefix,
            costs=costs,
            skip=skip,
            **bounds,
        )
        self.sharing_plan, self.rows, self.costs = plan.sharing, plan.wave.rows, plan.costs
        self.rows_because, self._samples = plan.rows_because, plan.samples
        prefix_tokens, prefix_path = (prefix.tokens, prefix.path) if prefix else (0, ())
        self._prompt_tokens = {p.number: prefix_tokens + len(p.tokens) for p in self.prompts}
        self.prompt_tokens = sum(prefix_tokens + len(prompt.tokens) for prompt in self.prompts)
        self.unique_tokens = prefix_tokens + plan.unique_tokens
        self.passes, self.seconds, self.compile_seconds, self.sampled_tokens = 0, 0.0, 0.0, 0

        self._prefix, self._arena_tokens = prefix, plan.arena_tokens
        self._slots = plan.wave.rows + plan.wave.blocks
        self._width = bucket(len(prefix_path) + plan.sharing.depth + 1)
        self._peak_tokens = 0
        self._live: dict[int, tuple[Sample, int]] = {}  # row -> its sample, its own block
        self._state: DecodeState | None = None
        self._sampled: tuple[np.ndarray, ...] | None = None  # copied from the state to the host

    @property
    def max_samples_per_prompt(self) -> int:
        """The largest number of completions of one prompt."""
        return max(prompt.n for prompt in self.prompts)

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
        """The unfinished completions, with what they have sampled so far."""
        return [self._completion(row, FinishReason.RUNNING) for row in sorted(self._live)]

    def stream(
        self, on_pass: Callable[["Branches"], None] | None = None, *, warm_up: bool = False
    ) -> Iterator[Completion]:
        """Runs, and yields every completion as it ends. To be called once.

        Args:
          on_pass: called between dispatches with this run.
          warm_up: compile everything before the clock starts.

        Raises:
          ValueError: another call uses the store of the prefix.
        """
        if not self._samples:
            return
        arena = (
            self._prefix.store.arena
            if self._prefix
            else Arena(self.model, self._arena_tokens, self._slots)
        )
        with exclusive(arena):
            if (needed := arena.used_slots + self._slots) > arena.slots:
                arena.grow(bucket(needed))
            residents = Residents(
                arena,
                model=self.model,
                sharing=self.sharing_plan,
                samples=self._samples,
                prefix=self._prefix,
                width=self._width,
                max_new_tokens=self.max_new_tokens,
            )
            try:
                yield from self._run(arena, residents, on_pass, warm_up)
            finally:
                residents.clear()
                self._live.clear()
                self._state = None

    def _run(
        self,
        arena: Arena,
        residents: Residents,
        on_pass: Callable[["Branches"], None] | None,
        warm_up: bool,
    ) -> Iterator[Completion]:
        queue = collections.deque(self._samples)
        state = self._compiled_state(arena, warm_up)
        watch = Stopwatch.start()
        while queue or self._live:
            state = self._admit(state, residents, queue)
            passes_before = state.passes
            state = decode(
                self.model.module,
                self.model.params,
                state,
                passes=_PASSES_PER_DISPATCH,
                stop_on_finish=bool(queue),
            )
            self._state, self._sampled, arena.cache = state, None, state.cache
            reasons, num_sampled, lengths = (
                np.asarray(x) for x in (state.reasons, state.num_sampled, state.cache.lengths)
            )
            state.cache.check()
            self._add_time(watch)
            self.passes += int(state.passes) - int(passes_before)
            self._peak_tokens = max(self._peak_tokens, residents.cached(lengths))
            live_tokens = sum(int(num_sampled[row]) for row in self._live)
            self.sampled_tokens = residents.sampled + live_tokens
            ended = [row for row in self._live if reasons[row] != FinishReason.RUNNING]
            if on_pass:
                on_pass(self)
            for row in ended:
                yield self._finish(row, FinishReason(int(reasons[row])), residents)
            watch = Stopwatch.start()
            if not queue:
                state = self._narrow(state, num_sampled)

    def _compiled_state(self, arena: Arena, warm_up: bool) -> DecodeState:
        """The state of the decode loop with no row admitted, its program compiled.

        Args:
          arena: whose cache the state takes.
          warm_up: compile admission and prefill, too.
        """
        model, rows, watch = self.model, range(self.rows), Stopwatch.start()
        state = DecodeState.create(
            arena.settle(),
            Layout.from_blocks(
                [], num_rows=self.rows, width=self._width, groups=self._groups(self.rows)
            ),
            [],
            vocab_size=model.config.vocab_size,
            samplers=self.sampler,
            max_new_tokens=self.max_new_tokens,
            stops=model.generation.stop_tokens,
            max_width=1,
            logprobs=True,
        )
        if warm_up:  # with the shapes of all rows being admitted; none of them may sample
            state = state.admit(
                rows,
                [[row] for row in rows],
                jnp.zeros((self.rows, model.config.vocab_size)),
                seeds=[0] * self.rows,
                max_new_tokens=[0] * self.rows,
            )
        # compiles, runs nothing
        state = decode(model.module, model.params, state, passes=0).retire(rows)
        arena.cache = state.cache
        if warm_up:
            lengths = {len(block.tokens) for block in self.sharing_plan.blocks}
            lengths |= {len(sample.suffix) for sample in self._samples}
            arena.cache = prefill.warm_up(model, arena.cache, sorted(lengths - {0}), self._width)
        self.compile_seconds += watch.split()[1]
        return state

    def _admit(
        self, state: DecodeState, residents: Residents, queue: "collections.deque[Sample]"
    ) -> DecodeState:
        """Gives free rows the next samples as far as memory allows, and prefills what they see."""
        free_rows = [row for row in range(state.layout.num_rows) if row not in self._live]
        admitted = residents.admit(queue, free_rows, idle=not self._live)
        cache, logits, passes = residents.feed()
        state = dataclasses.replace(state, cache=cache)
        self.passes += passes
        if not admitted:
            return state
        rows, samples, blocks = zip(*admitted, strict=True)
        # A row that stays empty must not list a block any more that another one writes now.
        state = state.retire([*{*free_rows}.difference(rows)])
        state = state.admit(
            rows,
            [residents.path(s, block) for s, block in zip(samples, blocks, strict=True)],
            residents.logits(samples, blocks, logits),
            seeds=[stream_seed(self.seed, s.prompt, s.index) for s in samples],
            max_new_tokens=[self.max_new_tokens] * len(rows),
        )
        self._live |= {row: (sample, block) for row, sample, block in admitted}
        return state

    def _finish(self, row: int, reason: FinishReason, residents: Residents) -> Completion:
        """The completion of a row that has ended; the row is free afterwards."""
        if reason is FinishReason.CACHE_FULL:
            raise RuntimeError(
                f"row {row} ran out of room that was made for it; this is a mistake in jaxshare"
            )
        completion = self._completion(row, reason)
        residents.end(*self._live.pop(row), len(completion.tokens))
        return completion

    def _narrow(self, state: DecodeState, num_sampled: np.ndarray) -> DecodeState:
        """A state with fewer rows, where that pays; no more samples are to come.

        It has the live rows, in their order, and ended ones to fill it up.
        """
        left = self.max_new_tokens - min((int(num_sampled[row]) for row in self._live), default=0)
        num_rows = state.layout.num_rows
        size = narrowed_size(num_rows, len(self._live), left)
        if not size:
            return state
        ended = [row for row in range(num_rows) if row not in self._live]
        live = sorted(self._live)
        state = take_rows(state.retire(ended), np.asarray([*live, *ended[: size - len(live)]]))
        self._live = {new: self._live[old] for new, old in enumerate(live)}
        self._state, self._sampled = state, None
        return dataclasses.replace(
            state, layout=dataclasses.replace(state.layout, groups=self._groups(size))
        )

    def _groups(self, num_rows: int) -> tuple[int, ...]:
        return group_sizes(
            [min(block.rows, num_rows) for block in self.sharing_plan.blocks], num_rows
        )

    def _add_time(self, watch: Stopwatch) -> None:
        seconds, compiled = watch.split()
        self.seconds += seconds
        self.compile_seconds += compiled

    def _completion(self, row: int, reason: FinishReason) -> Completion:
        """The tokens that a live row has sampled so far, as a completion."""
        assert self._state is not None
        if self._sampled is None:
            self._sampled = tuple(
                np.asarray(x)
                for x in (self._state.num_sampled, self._state.tokens, self._state.logprobs)
            )
        num_sampled, sampled, logprobs = self._sampled
        sample, count = self._live[row][0], int(num_sampled[row])
        tokens = tuple(sampled[row, :count].tolist())
        tokenizer: Any = self.model.tokenizer
        return Completion(
            tokenizer.decode(without_stop(tokens, reason)) if tokenizer else "",
            tokens,
            reason,
            float(np.sum(logprobs[row, :count], dtype=np.float64)),
            sample.prompt,
            sample.index,
            prompt_tokens=self._prompt_tokens[sample.prompt],
        )
