"""The state of the decode loop: a queue of pending tokens, a sampler and a finish reason for each
row."""

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare.cache import KVCache
from jaxshare.decoding.sampling import Sampler, Samplers
from jaxshare.decoding.steps import Steps
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.layout import Layout, bucket
from jaxshare.seeds import seed_words, stream_seed
from jaxshare.trace.recorder import PassLog

_STOPS = 8
"""Stop tokens are kept in a multiple of this many places, so that a few more or less share a
program."""


class DecodeModel(Protocol):
    """What decode needs of a model: hashable (it is static under jit), and pure. Flax linen modules
    are both."""

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """(params, int32[R, T], int32[R], cache, layout) -> (float32[R, V] after each row's last
        real token, cache)."""
        ...


class FinishReason(enum.IntEnum):
    """Why a row is not running."""

    RUNNING = 0
    STOP = 1
    """It sampled a stop token."""
    BUDGET = 2
    """It has sampled as many tokens as it may."""
    FULL = 3
    """Its block is full, or the one that its steps move to."""
    UNUSED = 4
    PAUSED = 5
    """From outside."""
    STEP = 6
    """Its step has ended and nothing is prepared to open the next one."""
    ANSWER = 7
    """An answer stands."""
    NOT_A_NUMBER = 8
    """Its logits were not finite, so that nothing could be sampled."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything the loop carries. R rows, P places in a queue, X places for generated tokens, V
    vocabulary.

    Attributes:
      cache, layout, samplers: what is cached, who sees what, how each row samples.
      logits: float32[R, V] after each row's last fed token; they mean something where `ready`.
      ready: bool[R].
      pending: int32[R, P + slack], tokens to feed; waiting: int32[R], how many; head: int32[R],
        where the first is.
      seeds: uint32[R, 2], the key of each row's randomness: the words of its seed
        (`jaxshare.seeds`).
      drawn: int32[R], tokens sampled so far: the counter of the row's randomness.
      budgets: int32[R], tokens that a row may sample in all.
      stops: int32[S], tokens that end a row; -1 for an unused place.
      reasons: int32[R], `FinishReason`: why a row ended, or RUNNING.
      tokens: int32[R, X], what each row sampled, a stop token included.
      logprobs: float32[R, X] of the sampled tokens, or [R, 0] where not asked for.
      passes: int32[], forward passes so far.
      kept: [R, X], what is kept of the distributions that the tokens were drawn from, or None where
        nothing is.
      recorded: bool[R], the rows that it is kept of.
      steps: how rows end their steps, or None where they just write.
      record: what the last dispatch has fed and moved, or None where that is not noted.
      max_width: the widest pass that this state can take (static).
    """

    cache: KVCache
    layout: Layout
    samplers: Samplers
    logits: Array
    ready: Array
    pending: Array
    waiting: Array
    head: Array
    seeds: Array
    drawn: Array
    budgets: Array
    stops: Array
    reasons: Array
    tokens: Array
    logprobs: Array
    passes: Array
    kept: TopLogits | None
    recorded: Array
    steps: Steps | None
    record: PassLog | None
    max_width: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        cache: KVCache,
        layout: Layout,
        prompts: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        samplers: Sampler | Sequence[Sampler] = Sampler(),
        seeds: int | Sequence[int] = 0,
        budgets: int | Sequence[int] = 64,
        stops: Sequence[int] = (),
        logits: Array | None = None,
        queue: int = 0,
        room: int = 0,
        bias_slots: int | None = None,
        max_width: int = 256,
        logprobs: bool = False,
        kept: int = 0,
        steps: Steps | None = None,
        record: int = 0,
    ) -> "DecodeState":
        """A state about to run.

        Args:
          cache, layout: as for a forward pass.
          prompts: for each row the tokens to feed before it samples. Rows not in use take an empty
            one.
          vocab_size: V.
          samplers: one for all rows, or one a row.
          seeds: of each row, integers of 64 bits; one integer gives row r the stream r of that
            seed, `stream_seed(seeds, r)`.
          budgets: how many tokens a row may sample; one for all, or one a row.
          stops: tokens that end a row.
          logits: float32[R, V] or [V] after what each row has cached, for rows that have nothing to
            feed.
          queue: places of a row's queue, for what `feed` brings later; at least the longest prompt.
          room: places for the tokens that a row samples; at least the largest budget. States of the
            same room share a program.
          bias_slots: places for biased and forbidden tokens of a row, likewise; default what the
            samplers need.
          max_width: the widest pass that will be asked of `decode`.
          logprobs: keep the log-probabilities of the sampled tokens.
          kept: keep so many of the largest logits that each token is drawn from; rows are
            `recorded` where they are admitted so.
          steps: for rows that write in steps, with room for what a row samples.
          record: note what each dispatch feeds and moves, in room for so many passes; 0 notes
            nothing.

        Raises:
          ValueError: counts that do not fit the layout, a token outside the vocabulary in a prompt,
            a bias or a ban, a negative budget, or a row in use with nothing to feed and no logits.
        """
        rows = layout.num_rows
        layout.check(cache.num_blocks)
        listed = np.asarray(layout.listed)
        prompts = [*map(list, prompts), *([[]] * (rows - len(prompts)))]
        samplers = [samplers] * rows if isinstance(samplers, Sampler) else list(samplers)
        seeds = (
            [stream_seed(seeds, r) for r in range(rows)] if isinstance(seeds, int) else list(seeds)
        )
        budgets = [budgets] * rows if isinstance(budgets, int) else list(budgets)
        for name, values in (
            ("prompts", prompts),
            ("samplers", samplers),
            ("seeds", seeds),
            ("budgets", budgets),
        ):
            if len(values) != rows:
                raise ValueError(
                    f"{name} has {len(values)} entries, but the layout has {rows} rows"
                )
        for r, prompt in enumerate(prompts):
            if outside := [t for t in prompt if not 0 <= t < vocab_size]:
                raise ValueError(
                    f"the prompt of row {r} has token {outside[0]}, outside the vocabulary of "
                    f"{vocab_size}"
                )
            if listed[r] and not prompt and logits is None:
                raise ValueError(
                    f"row {r} has an empty prompt and no logits to sample from; give it at least "
                    "one token"
                )
            if outside := [
                t for t in (*samplers[r].bias, *samplers[r].forbidden) if t >= vocab_size
            ]:
                raise ValueError(
                    f"the sampler of row {r} names token {outside[0]}, outside the vocabulary of "
                    f"{vocab_size}"
                )
            if budgets[r] < 0:
                raise ValueError(
                    f"the budget of row {r} is {budgets[r]}; it must be at least 0 tokens"
                )
        queue = max(queue, 1 + (steps.openings.shape[-1] if steps else 0), *map(len, prompts))
        pending = np.zeros((rows, queue + max_width), np.int32)
        for r, prompt in enumerate(prompts):
            pending[r, : len(prompt)] = prompt
        waiting = np.asarray(
            [len(p) if n else 0 for p, n in zip(prompts, listed, strict=True)], np.int32
        )
        room = max(room, *budgets)
        stops = [*stops, *[-1] * (-len(stops) % _STOPS if stops else _STOPS)]
        given = (
            jnp.zeros((rows, vocab_size))
            if logits is None
            else jnp.broadcast_to(logits, (rows, vocab_size)) + 0.0
        )
        return cls(
            cache=cache,
            layout=layout,
            samplers=Samplers.stack(samplers, bias_slots=bias_slots),
            logits=given,
            ready=jnp.asarray((waiting == 0) & (listed > 0)),
            pending=jnp.asarray(pending),
            waiting=jnp.asarray(waiting),
            head=jnp.zeros(rows, jnp.int32),
            seeds=jnp.asarray(seed_words(seeds)),
            drawn=jnp.zeros(rows, jnp.int32),
            budgets=jnp.asarray(budgets, jnp.int32),
            stops=jnp.asarray(stops, jnp.int32),
            reasons=jnp.asarray(
                np.where(listed > 0, FinishReason.RUNNING, FinishReason.UNUSED), jnp.int32
            ),
            tokens=jnp.zeros((rows, room), jnp.int32),
            logprobs=jnp.zeros((rows, room if logprobs else 0)),
            passes=jnp.zeros((), jnp.int32),
            kept=TopLogits.empty((rows, room), kept, vocab_size) if kept else None,
            recorded=jnp.zeros(rows, bool),
            steps=steps,
            record=PassLog.empty(record, rows, max_width, cache.num_blocks) if record else None,
            max_width=max_width,
        )

    def feed(self, row: int, tokens: Sequence[int]) -> "DecodeState":
        """Puts tokens behind what a row has pending, and lets a row that had stopped run on.

        Raises:
          ValueError: no tokens, a row that is not in use, or more tokens than the queue holds.
        """
        if not tokens or int(self.reasons[row]) == FinishReason.UNUSED:
            raise ValueError(
                f"row {row} is not in use"
                if tokens
                else f"there are no tokens to feed to row {row}"
            )
        head, waiting = int(self.head[row]), int(self.waiting[row])
        queue = [*np.asarray(self.pending[row, head : head + waiting]).tolist(), *tokens]
        if len(queue) > (most := self.pending.shape[1] - self.max_width):
            raise ValueError(
                f"row {row} would have {len(queue)} tokens pending, but its queue holds {most}; "
                "create the state with a longer queue"
            )
        return dataclasses.replace(
            self,
            pending=self.pending.at[row, : len(queue)].set(jnp.asarray(queue, jnp.int32)),
            head=self.head.at[row].set(0),
            waiting=self.waiting.at[row].set(len(queue)),
            reasons=self.reasons.at[row].set(FinishReason.RUNNING.value),
        )

    def admit(
        self,
        rows: Sequence[int],
        blocks: Sequence[Sequence[int]],
        logits: Array,
        *,
        seeds: Sequence[int],
        budgets: Sequence[int],
        drawn: Sequence[int] | None = None,
        pending: Sequence[Sequence[int]] | None = None,
        recorded: Sequence[bool] | None = None,
    ) -> "DecodeState":
        """Gives rows that are not running something new to write; each samples at once from the
        logits after what it sees, or first feeds what it has pending.

        The logits of this state are donated: use the returned one. Rows keep their samplers.

        Args:
          rows: which, each once.
          blocks: for each of them the blocks it sees, in order; it writes the last.
          logits: float32[A, V], for each of them. There may be more, which count for nothing: a
            caller that always gives as many has one program for any number of rows.
          seeds, budgets: for each of them.
          drawn: how many tokens each has sampled before, which count for its budget and its
            randomness; default none. `tokens` has those that come, at their places.
          pending: tokens that each is to feed first; default none. The logits of a row that has any
            mean nothing.
          recorded: whether what each draws from is kept; default not.

        Raises:
          ValueError: rows that write in steps, a row that is named twice, still running or not
            there, more blocks than the layout is wide, blocks that make no layout, a budget that is
            negative or beyond the state's room, more pending tokens than the queue holds, or counts
            that do not agree.
        """
        if self.steps is not None:
            raise ValueError(
                "rows of this state write in steps, and nothing can be admitted between them; "
                "create the state without"
            )
        drawn = [0] * len(rows) if drawn is None else drawn
        pending = [()] * len(rows) if pending is None else pending
        recorded = [False] * len(rows) if recorded is None else recorded
        for name, count in (
            ("blocks", len(blocks)),
            ("logits", min(logits.shape[0], len(rows))),
            ("seeds", len(seeds)),
            ("budgets", len(budgets)),
            ("drawn", len(drawn)),
            ("pending", len(pending)),
            ("recorded", len(recorded)),
        ):
            if count != len(rows):
                raise ValueError(
                    f"{name} has {count} entries, but {len(rows)} rows are to be admitted"
                )
        if len(set(rows)) < len(rows):
            raise ValueError(f"rows must name each row once; got {list(rows)}")
        listed, reasons = np.array(self.layout.blocks), np.asarray(self.reasons)
        for row, seen, budget in zip(rows, blocks, budgets, strict=True):
            if negative := [block for block in seen if block < 0]:
                raise ValueError(f"row {row} lists block {negative[0]}; blocks are numbered from 0")
            if not 0 <= row < len(listed):
                raise ValueError(
                    f"there is no row {row}; the state has rows 0 to {len(listed) - 1}"
                )
            if reasons[row] == FinishReason.RUNNING:
                raise ValueError(f"row {row} is running; end it before it is given something new")
            if not 1 <= len(seen) <= listed.shape[1]:
                raise ValueError(
                    f"row {row} would list {len(seen)} blocks, but the layout has room for 1 to "
                    f"{listed.shape[1]}"
                )
            if not 0 <= budget <= self.tokens.shape[1]:
                raise ValueError(
                    f"the budget of row {row} is {budget}; the state has room for 0 to "
                    f"{self.tokens.shape[1]} tokens a row"
                )
            listed[row] = [*seen, *[-1] * (listed.shape[1] - len(seen))]
        queue = self.pending.shape[1]
        if long := [
            row
            for row, tokens in zip(rows, pending, strict=True)
            if len(tokens) > queue - self.max_width
        ]:
            raise ValueError(
                f"row {long[0]} would have more than the {queue - self.max_width} tokens pending "
                "that its queue holds; create the state with a longer queue, or feed them before"
            )
        layout = dataclasses.replace(self.layout, blocks=jnp.asarray(listed))
        layout.check(self.cache.num_blocks)
        # what is too many falls behind the last row
        spare = max(bucket(len(rows)), logits.shape[0]) - len(rows)
        row = np.asarray([*rows, *[len(listed)] * spare], np.int32)
        given = (
            jnp.concatenate([logits, jnp.zeros((more, logits.shape[1]))])
            if (more := len(row) - logits.shape[0])
            else logits
        )
        waiting = np.zeros((len(row), queue), np.int32)
        for i, tokens in enumerate(pending):
            waiting[i, : len(tokens)] = tokens
        new = (
            seed_words([*seeds, *[0] * spare]),
            *(
                np.asarray([*values, *[0] * spare], np.int32)
                for values in (budgets, drawn, map(len, pending), recorded)
            ),
            waiting,
        )
        rest = dataclasses.replace(self, cache=None, logits=None, kept=None, layout=layout)  # pyright: ignore[reportArgumentType]
        admitted = _admit(self.logits, rest, row, given, *new)
        return dataclasses.replace(admitted, cache=self.cache, kept=self.kept)

    def retire(self, rows: Sequence[int]) -> "DecodeState":
        """Takes rows out of use: they list no block any more, so that others may write those, and
        can be admitted again."""
        gone = np.zeros(self.layout.num_rows, bool)
        gone[list(rows)] = True
        blocks, reasons, waiting = _retired(self.layout.blocks, self.reasons, self.waiting, gone)
        return dataclasses.replace(
            self,
            layout=dataclasses.replace(self.layout, blocks=blocks),
            reasons=reasons,
            waiting=waiting,
        )

    def end(self, row: int, reason: FinishReason = FinishReason.STOP) -> "DecodeState":
        """Ends a row from outside."""
        return dataclasses.replace(self, reasons=self.reasons.at[row].set(reason.value))

    @property
    def running(self) -> Array:
        """bool[R]."""
        return self.reasons == FinishReason.RUNNING

    def outputs(self) -> list[list[int]]:
        """What each row has sampled so far, on the host."""
        return [
            row[:n].tolist()
            for row, n in zip(np.asarray(self.tokens), np.asarray(self.drawn), strict=True)
        ]


@functools.partial(jax.jit, donate_argnames=("logits",))
def _admit(
    logits: Array,
    rest: DecodeState,
    row: Array,
    given: Array,
    seeds: Array,
    budgets: Array,
    drawn: Array,
    waiting: Array,
    recorded: Array,
    pending: Array,
) -> DecodeState:
    def put(whole: Array, value: Any) -> Array:
        return whole.at[row].set(value, mode="drop")

    return dataclasses.replace(
        rest,
        logits=put(logits, given),
        ready=put(rest.ready, waiting == 0),
        waiting=put(rest.waiting, waiting),
        pending=put(rest.pending, pending),
        head=put(rest.head, 0),
        seeds=put(rest.seeds, seeds),
        drawn=put(rest.drawn, drawn),
        budgets=put(rest.budgets, budgets),
        recorded=put(rest.recorded, recorded > 0),
        reasons=put(rest.reasons, FinishReason.RUNNING.value),
    )


@jax.jit
def _retired(
    blocks: Array, reasons: Array, waiting: Array, gone: Array
) -> tuple[Array, Array, Array]:
    return (
        jnp.where(gone[:, None], -1, blocks),
        jnp.where(gone, FinishReason.UNUSED.value, reasons),
        jnp.where(gone, 0, waiting),
    )
