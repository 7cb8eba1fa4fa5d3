"""Branches: completions of trees of prompts. Every node is stored once and read once a pass for all
rows below it (Hydragen section 3)."""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare import DecodeState, FinishReason, Layout, Sampler, decode
from jaxshare.arena import ALIGNMENT, arena_size
from jaxshare.compile_time import Stopwatch
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.branches.arena import Arena
from jaxshare.serving.branches.prefix import Prefix, at_work
from jaxshare.serving.branches.prompt_tree import Prompt, Prompts, read_prompts
from jaxshare.serving.branches.row_budget import MOST_ROWS, RowBudget
from jaxshare.serving.branches.sharing_plan import (
    Sample,
    SharingPlan,
    can_share,
    fold,
    plan_sharing,
    unique_tokens,
)
from jaxshare.serving.branches.waves import Residents, Wave, groups, widest_wave
from jaxshare.serving.engine import prefill
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import (
    check_context,
    default_sampler,
    encode,
    token_bytes,
)
from jaxshare.serving.kvcache import sharing_cost
from jaxshare.serving.kvcache.pool import whole_tiles
from jaxshare.serving.kvcache.sharing_cost import Chosen, Costs

_PASSES_AT_ONCE = 16
_NARROW_FROM, _NARROW_TO = 256, 4
"""A state of more rows than this goes on with fewer when only one in so many is at work and none is
to come, since a pass costs what its rows do, at work or not. For smaller states the program for
fewer rows takes longer to compile than it saves."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    Attributes:
      text: without the stop token.
      tokens: with it.
      reason: "stop" or "budget".
      logprob: of all its tokens together, under the model itself (temperature 1, nothing cut).
      prompt: number of the prompt that it continues: its place in the list, or among the ends of a
        tree, depth first.
      index: which of the prompt's n completions it is.
    """

    text: str
    tokens: list[int]
    reason: str
    logprob: float
    prompt: int = 0
    index: int = 0


class Branches:
    """A run over a tree of prompts, of which `stream` yields the completions as they end.

    Rows run in waves: a row that ends is replaced at once by the next completion, in the
    depth-first order of the tree, and a prefix is kept as long as rows below it are to come.

    Attributes:
      model: for the context that the run needs.
      prompts: what is completed.
      arrangement: which common prefixes are blocks, and what stands in each row's own.
      rows: how many completions run at a time; rows_because: why as many.
      costs: what the rule that decides which prefixes to share has counted with; None where it had
        nothing to decide.
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
        """Reads the prompts and decides where everything goes. Nothing is computed yet.

        Args:
          model: from `jaxshare.models.load`.
          prompts: text, tokens, a tree (`Branch`), or a list of these, which is folded into the
            tree of its common prefixes; or prompts with numbers of their own (`trees.Prompt`), such
            as a part of a longer list. None samples from the end of `prefix`.
          n: completions of each prompt. Number i of prompt p draws from the stream
            `jaxshare.seeds.stream_seed(seed, p, i)`, so its text depends neither on n nor on what
            else there is, and two seeds share no stream.
          max_new_tokens: the most tokens of a completion; a stop token ends it earlier.
          sampler: how to sample; default the checkpoint's own settings.
          seed: of all streams; the first completion of the first prompt draws from it itself.
          share: True keeps every common prefix once; False gives every completion a copy of its
            prompt; None decides for each prefix by `costs`.
          prefix: what stands before all prompts, prefilled already. Its store is where the rows
            run.
          max_rows: the most completions at a time; default as many as the memory has room for, up
            to 4096.
          max_kv_bytes: bound on the memory for keys and values, of all devices of the mesh together
            but for its data groups, which have as much each; default 80 % of what is free on a
            device with memory of its own, and half of what the host has free on others.
          costs: of a pass on this device; default what `jaxshare calibrate` has measured, or else a
            roofline of the device (`jaxshare.serving.kvcache.sharing_cost.choose`).
          skip: (prompt, index) of completions not to sample.

        Raises:
          ValueError: no prompts, an empty one, n, max_new_tokens or max_rows below 1, a prompt that
            leaves too little of the model's context, or one that does not fit the memory.
        """
        for name, value in (
            ("max_new_tokens", max_new_tokens),
            ("max_rows", max_rows),
            ("max_kv_bytes", max_kv_bytes),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if prefix is not None:
            prefix.check()
            if max_kv_bytes is not None:
                raise ValueError(
                    "max_kv_bytes and prefix are both given; with a prefix its store's size is the "
                    "bound"
                )
            prefix.store.check()
            if prefix.store.model.params is not model.params:
                raise ValueError(
                    "the prefix was prefilled by another model; give the model that its store was "
                    "made with"
                )
        elif prompts is None:
            raise ValueError(
                "there are no prompts; give at least one, or a prefix to sample from the end of"
            )
        before = prefix.tokens if prefix else 0
        if prompts is None:
            if n < 1:
                raise ValueError(f"n is {n}; ask for at least 1 completion")
            self.prompts = [Prompt(0, (), n)]
        else:
            self.prompts = read_prompts(
                prompts, n, lambda text, first: encode(model, text, first=first and prefix is None)
            )
        many = len(self.prompts) > 1
        for prompt in self.prompts:
            check_context(
                model,
                before + len(prompt.tokens),
                max_new_tokens,
                f"prompt {prompt.number}" if many else "the prompt",
            )
        longest = max(len(prompt.tokens) for prompt in self.prompts)
        # Below a prefix keys must be rotated as the prefix's are; everything else is as this call's
        # model says.
        self.model = (
            dataclasses.replace(model, config=prefix.store.model.config)
            if prefix
            else model.for_context(longest + max_new_tokens)
        )
        self.max_new_tokens, self.seed, self.sampler = (
            max_new_tokens,
            seed,
            sampler or default_sampler(model),
        )
        warn_of_greedy(model, self.sampler)
        self.passes, self.seconds, self.compile_seconds, self.sampled_tokens = 0, 0.0, 0.0, 0
        self._prefix, self._peak = prefix, 0

        tree = fold(self.prompts)
        self.prompt_tokens = sum(before + len(prompt.tokens) for prompt in self.prompts)
        self.unique_tokens = before + unique_tokens(tree)
        skipped = set(skip)
        most = MOST_ROWS if max_rows is None else max_rows
        room = RowBudget.of(
            model,
            max_new_tokens,
            max_kv_bytes=max_kv_bytes,
            arena_tokens=prefix.store.arena.free if prefix else None,
        )
        bound = room.tokens
        self.costs: Chosen | None = None
        if share is None and can_share(tree):
            self.costs = sharing_cost.choose(model) if costs is None else Chosen(costs, "as given")

        def arranged(share: bool | None) -> tuple[SharingPlan, list[Sample], Wave]:
            arrangement = plan_sharing(
                tree, self.costs.costs if self.costs else None, share, grow=max_new_tokens // 2
            )
            streams = [s for s in arrangement.streams if (s.prompt, s.index) not in skipped]
            return (
                arrangement,
                streams,
                widest_wave(arrangement, streams, max_new_tokens, most, room),
            )

        self.arrangement, self._streams, wave = arranged(share)
        # memory is short: what saves it comes first
        if share is None and wave.rows < min(most, len(self._streams)):
            self.arrangement, self._streams, wave = arranged(True)
        if wave.most > bound:
            worst = f" for prompt {wave.worst}" if many else ""
            needed = f"{wave.most} tokens{worst}, {wave.most * token_bytes(model):,} bytes"
            raise ValueError(
                f"one completion and its prompt need room for {needed} of keys and values, but "
                f"there is room for {bound} tokens, {bound * token_bytes(model):,} bytes; "
                + (
                    "drop a prefix or give the store more room"
                    if prefix
                    else "raise max_kv_bytes, shorten the prompts or lower max_new_tokens"
                )
            )
        self.rows = wave.rows
        bounded = (prefix is not None or max_kv_bytes is not None) and wave.tokens * (
            wave.rows + 1
        ) > room.tokens * wave.rows
        self.rows_because = (
            "all completions"
            if wave.rows >= len(self._streams)
            else "as many as were asked for"
            if wave.rows == max_rows
            else "the most unless a number is asked for"
            if wave.rows == most
            else f"as many as have room in {room.tokens:,} tokens of keys and values"
            if bounded
            else f"as many as have room in {room.free / 1e9:,.1f} GB of memory"
        )
        # Somewhat larger than needed, so that runs of nearly the same size and depth share
        # programs.
        self._arena_tokens = _arena_tokens(wave.tokens, bound) if prefix is None else 0
        self._slots = wave.rows + wave.blocks
        self._depth = bucket(len(prefix.path if prefix else ()) + self.arrangement.depth + 1)
        self._live: dict[int, tuple[Sample, int]] = {}
        self._state: DecodeState | None = None
        self._written: tuple[np.ndarray, ...] | None = None  # of the state, on the host

    @property
    def most_of_a_prompt(self) -> int:
        """The most completions of one prompt."""
        return max(prompt.n for prompt in self.prompts)

    @property
    def notes(self) -> list[str]:
        """What was chosen for this run and why, a sentence each: rows at a time, and costs where
        they decide what is shared."""
        found = (
            [f"{self.rows} row{'s' * (self.rows > 1)} at a time: {self.rows_because}"]
            if len(self._streams) > 1
            else []
        )
        return (
            [*found, f"what is shared is decided by costs {self.costs.source}"]
            if self.costs
            else found
        )

    @property
    def places(self) -> list[tuple[int, int]]:
        """(prompt, index) of the completions that this run samples, in the order in which it
        does."""
        return [(stream.prompt, stream.index) for stream in self._streams]

    @property
    def kv_bytes(self) -> int:
        """The most bytes of keys and values that were cached at a time, so far."""
        return self._peak * token_bytes(self.model)

    def running(self) -> list[Completion]:
        """What the rows that are at work have written so far."""
        return [self._completion(row, "running") for row in sorted(self._live)]

    def stream(
        self, on_pass: Callable[["Branches"], None] | None = None, *, warm_up: bool = False
    ) -> Iterator[Completion]:
        """Runs, and yields every completion as it ends. To be called once.

        Args:
          on_pass: called between dispatches with this run.
          warm_up: compile everything before the clock starts.

        Raises:
          ValueError: another call is at work with the store of the prefix.
        """
        if not self._streams:
            return
        arena = (
            self._prefix.store.arena
            if self._prefix
            else Arena(self.model, self._arena_tokens, self._slots)
        )
        with at_work(arena):
            if (needed := arena.used_slots + self._slots) > arena.slots:
                arena.grow(bucket(needed))
            residents = Residents(
                arena,
                model=self.model,
                arrangement=self.arrangement,
                streams=self._streams,
                prefix=self._prefix,
                width=self._depth,
                max_new_tokens=self.max_new_tokens,
            )
            try:
                yield from self._stream(arena, residents, on_pass, warm_up)
            finally:
                residents.clear()
                self._live.clear()
                self._state = None

    def _stream(
        self,
        arena: Arena,
        residents: Residents,
        on_pass: Callable[["Branches"], None] | None,
        warm_up: bool,
    ) -> Iterator[Completion]:
        model, waiting, num_rows, watch = (
            self.model,
            collections.deque(self._streams),
            self.rows,
            Stopwatch.start(),
        )
        empty = Layout.from_blocks(
            [], num_rows=num_rows, width=self._depth, groups=self._groups_of(num_rows)
        )
        state = DecodeState.create(
            arena.settle(),
            empty,
            [],
            vocab_size=model.config.vocab_size,
            samplers=self.sampler,
            budgets=self.max_new_tokens,
            stops=model.generation.stop_tokens,
            max_width=1,
            logprobs=True,
        )
        if warm_up:  # as when all rows are admitted; none of them may sample
            state = state.admit(
                range(self.rows),
                [[row] for row in range(self.rows)],
                jnp.zeros((self.rows, model.config.vocab_size)),
                seeds=[0] * self.rows,
                budgets=[0] * self.rows,
            )
        # compiles, runs nothing
        state = decode(model.module, model.params, state, passes=0).retire(range(self.rows))
        arena.cache = state.cache
        if warm_up:
            lengths = {
                len(tokens)
                for tokens in (
                    *(b.tokens for b in self.arrangement.blocks),
                    *(s.own for s in self._streams),
                )
            } - {0}
            arena.cache = prefill.warm_up(model, arena.cache, sorted(lengths), self._depth)
        self.compile_seconds += watch.split()[1]
        watch = Stopwatch.start()
        while waiting or self._live:
            admitted = residents.admit(
                waiting,
                [row for row in range(num_rows) if row not in self._live],
                idle=not self._live,
            )
            cache, logits, passes = residents.feed()
            state = dataclasses.replace(state, cache=cache)
            self.passes += passes
            if admitted:
                rows, streams, blocks = zip(*admitted, strict=True)
                # A row that stays empty may not go on listing a block that another one writes now.
                state = state.retire([*{*range(num_rows)}.difference(self._live, rows)])
                seeds = [stream_seed(self.seed, s.prompt, s.index) for s in streams]
                state = state.admit(
                    rows,
                    [residents.path(s, block) for s, block in zip(streams, blocks, strict=True)],
                    residents.logits(streams, blocks, logits),
                    seeds=seeds,
                    budgets=[self.max_new_tokens] * len(rows),
                )
                self._live |= {row: (stream, block) for row, stream, block in admitted}
            begun = state.passes
            state = decode(
                model.module,
                model.params,
                state,
                passes=_PASSES_AT_ONCE,
                stop_on_finish=bool(waiting),
            )
            self._state, self._written, arena.cache = state, None, state.cache
            reasons, drawn, lengths = (
                np.asarray(x) for x in (state.reasons, state.drawn, state.cache.lengths)
            )
            state.cache.check()
            seconds, compiled = watch.split()
            self.seconds, self.compile_seconds = (
                self.seconds + seconds,
                self.compile_seconds + compiled,
            )
            self.passes += int(state.passes) - int(begun)
            self._peak = max(self._peak, residents.cached(lengths))
            ended = [row for row in self._live if reasons[row] != FinishReason.RUNNING]
            self.sampled_tokens = residents.sampled + sum(int(drawn[row]) for row in self._live)
            if on_pass:
                on_pass(self)
            for row in ended:
                reason = FinishReason(int(reasons[row]))
                if reason is FinishReason.FULL:
                    raise RuntimeError(
                        f"row {row} ran out of room that was made for it; this is a mistake in "
                        "jaxshare"
                    )
                found = self._completion(row, reason.name.lower())
                residents.end(*self._live.pop(row), len(found.tokens))
                yield found
            watch = Stopwatch.start()
            if fewer := self._fewer(num_rows, bool(waiting), drawn):
                state, num_rows = self._narrowed(state, num_rows, fewer), fewer

    def _groups_of(self, rows: int) -> tuple[int, ...]:
        return groups([min(block.rows, rows) for block in self.arrangement.blocks], rows)

    def _fewer(self, rows: int, more: bool, drawn: np.ndarray) -> int:
        """With how many rows to go on where that is worth a program of its own; 0 where it is
        not."""
        if more or rows <= _NARROW_FROM or not self._live or _NARROW_TO * len(self._live) > rows:
            return 0
        left = self.max_new_tokens - min(int(drawn[row]) for row in self._live)
        return bucket(len(self._live)) if left >= _NARROW_TO * _PASSES_AT_ONCE else 0

    def _narrowed(self, state: DecodeState, rows: int, fewer: int) -> DecodeState:
        """The state with those rows that are at work, in their order, and with others that are not
        to fill it up."""
        idle = [row for row in range(rows) if row not in self._live]
        at_work = sorted(self._live)
        state = state.retire(idle)
        state = _picked(state, np.asarray([*at_work, *idle[: fewer - len(at_work)]]))
        self._live = {new: self._live[old] for new, old in enumerate(at_work)}
        self._state, self._written = state, None
        return dataclasses.replace(
            state, layout=dataclasses.replace(state.layout, groups=self._groups_of(fewer))
        )

    def _completion(self, row: int, reason: str) -> Completion:
        assert self._state is not None
        if self._written is None:
            self._written = tuple(
                np.asarray(x) for x in (self._state.drawn, self._state.tokens, self._state.logprobs)
            )
        drawn, written, logprobs = self._written
        stream, count = self._live[row][0], int(drawn[row])
        tokens = written[row, :count].tolist()
        shown = tokens[:-1] if reason == "stop" else tokens
        tokenizer: Any = self.model.tokenizer
        return Completion(
            tokenizer.decode(shown) if tokenizer else "",
            tokens,
            reason,
            float(np.sum(logprobs[row, :count], dtype=np.float64)),
            stream.prompt,
            stream.index,
        )


def _picked(state: DecodeState, rows: np.ndarray) -> DecodeState:
    """Some rows of a state alone, over the same cache."""
    of_rows = {name: getattr(state, name) for name in _OF_ROWS}
    layout = dataclasses.replace(state.layout, blocks=state.layout.blocks[rows])
    return dataclasses.replace(state, layout=layout, **jax.tree.map(lambda x: x[rows], of_rows))


_OF_ROWS = (
    "samplers",
    "logits",
    "ready",
    "pending",
    "waiting",
    "head",
    "seeds",
    "drawn",
    "budgets",
    "reasons",
    "tokens",
    "logprobs",
    "recorded",
)
"""The fields of a decode state whose arrays have one entry a row."""


def _arena_tokens(needed: int, bound: int) -> int:
    """Room for so many tokens, and a little more, so that runs of nearly the same size share
    programs; within the bound."""
    step = max(ALIGNMENT, bucket(needed) // 16)
    rounded = arena_size(needed + -needed % step)
    return next(
        (
            size
            for size in (rounded, arena_size(needed), whole_tiles(bound))
            if needed <= size <= bound
        ),
        bound,
    )
