"""The state of the decode loop: queues of pending tokens, samplers, finish reasons.

Every row has one of each.
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float

from jaxshare.cache import KVCache
from jaxshare.decoding.row_inputs import Admission, RowInputs
from jaxshare.decoding.sampling import Sampler, Samplers
from jaxshare.decoding.steps import Steps
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.deprecated import warn_renamed
from jaxshare.layout import Layout
from jaxshare.seeds import seed_words
from jaxshare.trace.recorder import PassLog

_STOPS = 8
"""The array of stop tokens has a multiple of this many places, so that a few more or less share a
program."""


class DecodeModel(Protocol):
    """The part of a model that decode uses: hashable (it is static under jit), and pure.

    Flax linen modules are both.
    """

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a forward pass.

        (params, int32[R, T] tokens, int32[R] real ones, cache, layout) -> (float32[R, V] after each
        row's last real token, cache).
        """
        ...


class _FinishReasons(enum.EnumType):
    """Finds the members of `FinishReason` by their former names, too."""

    def __getattr__(cls, name: str) -> Any:
        former = {"BUDGET": "LENGTH", "FULL": "CACHE_FULL", "NOT_A_NUMBER": "ERROR"}
        if name not in former:
            raise AttributeError(f"{cls.__name__} has no member {name!r}")
        warn_renamed(f"FinishReason.{name}", f"FinishReason.{former[name]}")
        return cls[former[name]]


class FinishReason(enum.IntEnum, metaclass=_FinishReasons):
    """The reason why a row, a request or a session is not running.

    `str()` of one is what commands print: "stop", "cache_full".
    """

    RUNNING = 0
    STOP = 1
    """A stop token was sampled."""
    LENGTH = 2
    """As many tokens were sampled, or passes run, as were asked for."""
    CACHE_FULL = 3
    """The row's block is full, or the one that its steps move to."""
    UNUSED = 4
    PAUSED = 5
    """Set by the host."""
    STEP = 6
    """The row's step has ended and no opening of the next one is prepared."""
    ANSWER = 7
    """There is an answer."""
    ERROR = 8
    """Logits were not finite, so that nothing could be sampled; or, of a request, an exception."""
    STOP_TEXT = 9
    """The text contains one of the request's stop texts; found by the host."""
    CANCELLED = 10
    """The caller has cancelled the request."""

    def __str__(self) -> str:
        return self.name.lower()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything the loop carries.

    R rows, P places in a queue, X places for generated tokens, V vocabulary. Saved sessions name
    their arrays by these fields.

    Attributes:
      cache, layout, samplers: what is cached, the blocks that each row sees, how it samples.
      logits: float32[R, V] after each row's last fed token, defined where `ready`.
      ready: bool[R].
      pending: int32[R, P + slack], tokens to feed.
      waiting, head: int32[R], the number of pending tokens, and the index of the first.
      seeds: uint32[R, 2], the key of each row's randomness: the words of its seed
        (`jaxshare.seeds`).
      drawn: int32[R], tokens sampled so far: the counter of the row's randomness.
      budgets: int32[R], tokens that a row may sample in all.
      stops: int32[S], tokens that end a row; -1 for an unused place.
      reasons: int32[R], `FinishReason`.
      tokens: int32[R, X], the tokens that each row sampled, a stop token included.
      logprobs: float32[R, X] of the sampled tokens, or [R, 0] where they are not kept.
      passes: int32[], forward passes so far.
      top_logits: [R, X], the largest logits of the distributions that the tokens were drawn from,
        or None where they are not kept.
      recorded: bool[R], the rows whose top logits are kept.
      steps: how rows end their steps, or None where they write without.
      record: the tokens that the last dispatch has fed and the steps it has moved, or None where
        they are not logged.
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
    top_logits: TopLogits | None
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
        logits: Float[Array, "*R V"] | None = None,
        queue: int = 0,
        room: int = 0,
        bias_slots: int | None = None,
        max_width: int = 256,
        logprobs: bool = False,
        num_top_logits: int = 0,
        steps: Steps | None = None,
        record: int = 0,
        kept: int | None = None,
    ) -> "DecodeState":
        """A state about to run. Raises ValueError for a wrong layout, and as `RowInputs` does.

        Args:
          cache, layout, max_width: for passes that feed up to `max_width` tokens a row.
          prompts, samplers, seeds, budgets: see `RowInputs`; one sampler, seed or budget is for all
            rows, and of one seed row r gets `stream_seed(seeds, r)`.
          stops: tokens that end a row.
          logits: after what each row has cached, for rows that have nothing to feed.
          queue: tokens that a row's queue holds, for `feed`; at least the longest prompt.
          room: tokens that a row can sample; at least the largest budget. It is a shape: states of
            the same room share a program.
          bias_slots: places for a row's biased and forbidden tokens; default what these need.
          logprobs: keep the log-probabilities of the sampled tokens.
          num_top_logits: logits to keep of each distribution that a `recorded` row draws from;
            `kept` is its deprecated name.
          steps: for rows that write in steps, with room for what a row samples.
          record: passes of a dispatch that can be logged; 0 logs none.
        """
        layout.check(cache.num_blocks)
        inputs = RowInputs.create(layout.num_rows, prompts, samplers, seeds, budgets)
        inputs.check(layout, vocab_size, has_logits=logits is not None)
        queue = max(queue, 1 + (steps.openings.shape[-1] if steps else 0))
        k = num_top_logits if kept is None else _warn_kept(kept)
        shape = layout.num_rows, max(room, *inputs.budgets)
        return dataclasses.replace(
            _fed_state(cache, layout, inputs, vocab_size, logits, queue, bias_slots, max_width),
            stops=jnp.asarray(_padded_stops(stops), jnp.int32),
            tokens=jnp.zeros(shape, jnp.int32),
            logprobs=jnp.zeros(shape if logprobs else (layout.num_rows, 0)),
            top_logits=TopLogits.empty(shape, k, vocab_size) if k else None,
            steps=steps,
            record=PassLog.empty(record, shape[0], max_width, cache.num_blocks) if record else None,
        )

    def feed(self, row: int, tokens: Sequence[int]) -> "DecodeState":
        """Appends tokens to a row's queue, and lets a row that had stopped run on.

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
        if len(queue) > self._queue_capacity:
            raise ValueError(
                f"row {row} would have {len(queue)} tokens pending, but its queue holds "
                f"{self._queue_capacity}; create the state with a longer queue"
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
        logits: Float[Array, "A V"],
        *,
        seeds: Sequence[int],
        budgets: Sequence[int],
        drawn: Sequence[int] | None = None,
        pending: Sequence[Sequence[int]] | None = None,
        recorded: Sequence[bool] | None = None,
    ) -> "DecodeState":
        """Starts rows that are not running; they keep their samplers.

        Each samples at once from its logits, or first feeds what it has pending. The logits of this
        state are donated: use the returned one.

        Args:
          rows: row numbers, each once.
          blocks: for each row the blocks it sees, in order; it writes the last.
          logits: for each row, after what it sees. Further ones are ignored: a caller that always
            gives the same number has one program for any number of rows.
          seeds, budgets: for each row.
          drawn: tokens that each has sampled before, which count for its budget and its randomness;
            default none. `tokens` has those that come, at their places.
          pending: tokens that each feeds first; default none. The logits of a row that has any are
            not used.
          recorded: the rows whose top logits are kept; default none.

        Raises:
          ValueError: rows that write in steps, blocks that make no layout, or see
            `Admission.check_counts` and `Admission.check_rows`.
        """
        if self.steps is not None:
            raise ValueError(
                "rows of this state write in steps, and nothing can be admitted between them; "
                "create the state without"
            )
        count = len(rows)
        admission = Admission(
            rows,
            blocks,
            seeds,
            budgets,
            [0] * count if drawn is None else drawn,
            [()] * count if pending is None else pending,
            [False] * count if recorded is None else recorded,
        )
        admission.check_counts(logits.shape[0])
        layout = self._admitted_layout(admission)
        row, *new = admission.arrays(layout.num_rows, logits.shape[0], self.pending.shape[1])
        if more := len(row) - logits.shape[0]:
            logits = jnp.concatenate([logits, jnp.zeros((more, logits.shape[1]))])
        others: Any = {"cache": None, "logits": None, "top_logits": None}
        rest = dataclasses.replace(self, layout=layout, **others)
        admitted = _admit(self.logits, rest, row, logits, *new)
        return dataclasses.replace(admitted, cache=self.cache, top_logits=self.top_logits)

    def _admitted_layout(self, admission: Admission) -> Layout:
        """The layout with the blocks of the admitted rows, all of it checked."""
        blocks = np.asarray(self.layout.blocks)
        admission.check_rows(
            np.asarray(self.reasons) == FinishReason.RUNNING,
            max_listed=blocks.shape[1],
            max_budget=self.tokens.shape[1],
            max_pending=self._queue_capacity,
        )
        layout = dataclasses.replace(self.layout, blocks=jnp.asarray(admission.listed(blocks)))
        layout.check(self.cache.num_blocks)
        return layout

    def retire(self, rows: Sequence[int]) -> "DecodeState":
        """Takes rows out of use; they can be admitted again.

        They list no block any more, so that others may write those.
        """
        retired = np.zeros(self.layout.num_rows, bool)
        retired[list(rows)] = True
        blocks, reasons, waiting = _retire(self.layout.blocks, self.reasons, self.waiting, retired)
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
    def running(self) -> Bool[Array, " R"]:
        """The rows that have not ended."""
        return self.reasons == FinishReason.RUNNING

    @property
    def kept(self) -> TopLogits | None:
        """The former name of `top_logits`."""
        warn_renamed("kept", "top_logits")
        return self.top_logits

    @property
    def _queue_capacity(self) -> int:
        """P. What follows in `pending` is slack for the slice that the widest pass takes."""
        return self.pending.shape[1] - self.max_width

    def outputs(self) -> list[list[int]]:
        """The tokens that each row has sampled so far, on the host."""
        return [
            row[:n].tolist()
            for row, n in zip(np.asarray(self.tokens), np.asarray(self.drawn), strict=True)
        ]


def _fed_state(
    cache: KVCache,
    layout: Layout,
    inputs: RowInputs,
    vocab_size: int,
    logits: Array | None,
    queue: int,
    bias_slots: int | None,
    max_width: int,
) -> DecodeState:
    """A state whose rows have their inputs, and no room for outputs."""
    rows, listed = layout.num_rows, np.asarray(layout.listed)
    waiting = np.where(listed > 0, [*map(len, inputs.prompts)], 0).astype(np.int32)
    reasons = np.where(listed > 0, FinishReason.RUNNING, FinishReason.UNUSED)
    shape = rows, vocab_size
    return DecodeState(
        cache=cache,
        layout=layout,
        samplers=Samplers.stack(inputs.samplers, bias_slots=bias_slots),
        # added to, because the state donates its logits
        logits=jnp.zeros(shape) if logits is None else jnp.broadcast_to(logits, shape) + 0.0,
        ready=jnp.asarray((waiting == 0) & (listed > 0)),
        pending=jnp.asarray(inputs.pending(max(queue, *map(len, inputs.prompts)) + max_width)),
        waiting=jnp.asarray(waiting),
        head=jnp.zeros(rows, jnp.int32),
        seeds=jnp.asarray(seed_words(inputs.seeds)),
        drawn=jnp.zeros(rows, jnp.int32),
        budgets=jnp.asarray(inputs.budgets, jnp.int32),
        stops=jnp.zeros(0, jnp.int32),
        reasons=jnp.asarray(reasons, jnp.int32),
        tokens=jnp.zeros((rows, 0), jnp.int32),
        logprobs=jnp.zeros((rows, 0)),
        passes=jnp.zeros((), jnp.int32),
        top_logits=None,
        recorded=jnp.zeros(rows, bool),
        steps=None,
        record=None,
        max_width=max_width,
    )


def _padded_stops(stops: Sequence[int]) -> list[int]:
    return [*stops, *[-1] * (-len(stops) % _STOPS if stops else _STOPS)]


def _warn_kept(kept: int) -> int:
    warn_renamed("kept", "num_top_logits", stacklevel=4)
    return kept


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
def _retire(
    blocks: Array, reasons: Array, waiting: Array, retired: Array
) -> tuple[Array, Array, Array]:
    return (
        jnp.where(retired[:, None], -1, blocks),
        jnp.where(retired, FinishReason.UNUSED.value, reasons),
        jnp.where(retired, 0, waiting),
    )
