"""The state of the decode loop: queues of pending tokens, samplers, finish reasons.

Every row has one of each.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxshare.argument_checks import INT32_MAX
from jaxshare.cache import KVCache
from jaxshare.decoding.array_rows import filled, placed, with_own_buffers, with_row
from jaxshare.decoding.automaton import TokenAutomata
from jaxshare.decoding.changes import Action, Changes
from jaxshare.decoding.finish_reason import FinishReason
from jaxshare.decoding.grammar_rows import GrammarRows
from jaxshare.decoding.history import History
from jaxshare.decoding.logprobs import as_logprobs, logprob_places
from jaxshare.decoding.processing import Processing
from jaxshare.decoding.row_inputs import Admission, RowInputs
from jaxshare.decoding.samplers import SamplerPlaces, Samplers
from jaxshare.decoding.sampling_params import GREEDY, Sampler
from jaxshare.decoding.sessions import first_rows
from jaxshare.decoding.steps import Steps
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.deprecated import renamed_arguments, warn_renamed
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything the loop carries.

    R rows, P places in a queue, X places for generated tokens, V vocabulary. Saved sessions name
    their arrays by these fields. A part that is not used has size 0.

    Attributes:
      cache, layout, samplers: what is cached, the blocks that each row sees, how it samples.
      logits: float32[R, V] after each row's last fed token, defined where `has_logits`.
      has_logits: bool[R].
      history: the texts so far, where samplers look at them.
      grammars: what the texts must be, where rows have grammars.
      pending: int32[R, P + slack], tokens to feed.
      num_pending, head: int32[R], the number of pending tokens, and the index of the first.
      seeds: uint32[R, 2], the words of each row's seed (`jaxshare.seeds`), its randomness's key.
      num_sampled: int32[R], tokens sampled so far: the counter of the row's randomness.
      num_taken: int32[R], those of them that `tokens` does not hold any more.
      max_new_tokens: int32[R], tokens that a row may sample in all.
      stops: int32[S], tokens that end a row; -1 for an unused place.
      reasons: int32[R], `FinishReason`.
      session: int32[R], the first row of each row's session. Rows of a session take part in a pass
        together or not at all. A row by itself is a session of one.
      clock: int32[R], passes that the row's session has taken part in.
      last_pass: int32[R], the clock up to which it may take part.
      halts: bool[R], whether a row that finishes in a dispatch ends its session's part in that.
      tokens: int32[R, X], the tokens that each row sampled after those taken, a stop token
        included. A row with X of them waits for them to be taken.
      logprobs: float32[R, X] of the sampled tokens where `scored`, or [R, 0].
      scored: bool[R], the rows whose log-probabilities are wanted.
      passes: int32[], passes so far.
      top_logits: [R, X], the largest logits of the distributions that the tokens were drawn from.
      recorded: bool[R], the rows whose top logits are kept.
      steps: how rows end their steps.
      record: the tokens that the last dispatch has fed and the steps it has moved.
      max_width: the widest pass that this state can take (static).
      processing: the logits processors of rows; None where no row has one.
      processed: bool[R], rows whose log-probabilities are of what is drawn from; None for none.
      raw_logprobs: as `logprobs`, but under the model itself; None where no row wants both kinds.
    """

    cache: KVCache
    layout: Layout
    samplers: Samplers
    logits: Array
    has_logits: Array
    history: History
    grammars: GrammarRows
    pending: Array
    num_pending: Array
    head: Array
    seeds: Array
    num_sampled: Array
    num_taken: Array
    max_new_tokens: Array
    stops: Array
    reasons: Array
    session: Array
    clock: Array
    last_pass: Array
    halts: Array
    tokens: Array
    logprobs: Array
    scored: Array
    passes: Array
    top_logits: TopLogits
    recorded: Array
    steps: Steps
    record: PassLog
    max_width: int = dataclasses.field(metadata={"static": True})
    processing: Processing | None = None
    processed: Array | None = None
    raw_logprobs: Array | None = None

    @classmethod
    @renamed_arguments(budgets="max_new_tokens", room="capacity", kept="num_top_logits")
    def create(
        cls,
        cache: KVCache,
        layout: Layout,
        prompts: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        samplers: Sampler | Sequence[Sampler] = GREEDY,
        seeds: int | Sequence[int] = 0,
        max_new_tokens: int | Sequence[int] = 64,
        stops: Sequence[int] = (),
        logits: Float[Array, "*R V"] | None = None,
        queue: int = 0,
        capacity: int | None = None,
        places: SamplerPlaces | None = None,
        texts: Sequence[Sequence[int]] | None = None,
        max_width: int = 256,
        logprobs: bool | str = False,
        num_top_logits: int = 0,
        steps: Steps | None = None,
        record: int = 0,
    ) -> "DecodeState":
        """A state about to run. Raises ValueError for a wrong layout, and as `RowInputs` does.

        Args:
          cache, layout, max_width: for passes that feed up to `max_width` tokens a row.
          prompts, samplers, seeds, max_new_tokens: see `RowInputs`, of which one is for all rows.
          stops: tokens that end a row.
          logits: after what each row has cached, for rows that have nothing to feed.
          queue: tokens that a row's queue holds.
          capacity: X, sampled tokens of a row that the state holds (see `without_outputs`).
          places: for the settings of a row's sampler; default what these need.
          texts: of each row so far, for samplers that look at it; default its prompt.
          logprobs: keep those of what all rows sample, of the kind that `as_logprobs` tells.
          num_top_logits: logits to keep of what a `recorded` row draws from.
          steps: for rows that write in steps, one session; default none, each row by itself.
          record: passes of a dispatch that can be logged; 0 logs none.
        """
        layout.check(cache.num_blocks)
        rows = layout.num_rows
        inputs = RowInputs.create(rows, prompts, samplers, seeds, max_new_tokens)
        inputs.check(layout, vocab_size, has_logits=logits is not None)
        steps = steps or Steps.none(rows, TokenAutomata.of(vocab_size=vocab_size))
        queue = max(queue, 1 + steps.openings.shape[-1])
        shape = rows, max(inputs.max_new_tokens) if capacity is None else capacity
        kept = shape if num_top_logits else (rows, 0)
        state = dataclasses.replace(
            _fed_state(cache, layout, inputs, vocab_size, logits, queue, max_width),
            samplers=Samplers.stack(inputs.samplers, places=places, stops=stops),
            history=inputs.history(texts, vocab_size),
            stops=placed(np.asarray(_padded_stops(stops), np.int32)),
            tokens=filled(shape),
            **logprob_places(as_logprobs(logprobs), shape),
            top_logits=TopLogits.empty(kept, num_top_logits, vocab_size),
            steps=steps,
            session=first_rows(steps.ends),
            record=PassLog.empty(record, rows, max_width, cache.num_blocks),
        )
        return with_own_buffers(state)

    def feed(self, row: int, tokens: Sequence[int]) -> "DecodeState":
        """Appends tokens to a row's queue, and lets a row that had stopped run on.

        Raises:
          ValueError: no tokens, a row that is not in use, or more tokens than the queue holds.
        """
        if not tokens or int(self.reasons[row]) == FinishReason.UNUSED:
            why = "is not in use" if tokens else "is given no tokens to feed"
            raise ValueError(f"row {row} {why}")
        head, pending = int(self.head[row]), int(self.num_pending[row])
        queue = [*np.asarray(self.pending[row, head : head + pending]).tolist(), *tokens]
        if len(queue) > self.queue_capacity:
            raise ValueError(
                f"row {row} would have {len(queue)} tokens pending, but its queue holds "
                f"{self.queue_capacity}; create the state with a longer queue"
            )
        unused = self.pending.shape[1] - len(queue)
        return dataclasses.replace(
            self,
            pending=with_row(self.pending, row, np.pad(np.asarray(queue, np.int32), (0, unused))),
            head=with_row(self.head, row, 0),
            num_pending=with_row(self.num_pending, row, len(queue)),
            reasons=with_row(self.reasons, row, FinishReason.RUNNING.value),
        )

    @renamed_arguments(budgets="max_new_tokens", drawn="num_sampled")
    def admit(
        self,
        rows: Sequence[int],
        blocks: Sequence[Sequence[int]],
        logits: Float[Array, "A V"],
        *,
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
        num_sampled: Sequence[int] | None = None,
        pending: Sequence[Sequence[int]] | None = None,
        recorded: Sequence[bool] | None = None,
        scored: Sequence[bool] | None = None,
    ) -> "DecodeState":
        """Starts rows that are not running, each by itself; they keep their samplers.

        Each samples at once from its logits, or first feeds what it has pending. The logits of this
        state are donated: use the returned one.

        Args:
          rows: row numbers, each once.
          blocks: for each row the blocks it sees, in order; it writes the last.
          logits: for each row, after what it sees. Further ones are ignored: a caller that always
            gives the same number has one program for any number of rows.
          seeds, max_new_tokens: for each row.
          num_sampled: tokens that each has sampled before, which count for its `max_new_tokens` and
            its randomness; default none. `tokens` has those that come.
          pending: tokens that each feeds first; default none. The logits of a row that has any are
            not used.
          recorded, scored: the rows whose top logits, or log-probabilities, are kept; default no
            top logits, and log-probabilities where the state has room for them.

        Raises:
          ValueError: blocks that make no layout, or see `Admission.check_counts` and
            `Admission.check_rows`.
        """
        count = len(rows)
        admission = Admission(
            rows,
            blocks,
            seeds,
            max_new_tokens,
            [0] * count if num_sampled is None else num_sampled,
            [()] * count if pending is None else pending,
            [False] * count if recorded is None else recorded,
            [True] * count if scored is None else scored,
        )
        admission.check_counts(logits.shape[0])
        listed = np.asarray(self.layout.blocks)
        admission.check_rows(
            np.asarray(self.reasons) == FinishReason.RUNNING,
            max_listed=listed.shape[1],
            max_pending=self.queue_capacity,
        )
        listed = admission.listed(listed)
        dataclasses.replace(self.layout, blocks=listed).check(self.cache.num_blocks)
        changes = Changes.none(self.pending.shape[1], listed)
        for row, start in zip(rows, admission.starts(self.processed is not None), strict=True):
            changes.admit(row, start)
        return self.with_logits(rows, logits).changed(changes)

    def retire(self, rows: Sequence[int]) -> "DecodeState":
        """Takes rows out of use; they can be admitted again.

        They list no block any more, so that others may write those.
        """
        changes = Changes.none(self.pending.shape[1], np.asarray(self.layout.blocks))
        changes.act(rows, Action.RETIRE)
        return self.changed(changes)

    def changed(self, changes: Changes) -> "DecodeState":
        """The state after these changes, in a dispatch of their own; `decode` can make them, too."""
        # Without what stays whole: a program returns a copy of it.
        none, own = {"keys": None, "values": None}, self.cache
        cache: Any = dataclasses.replace(own, **none)
        rest: Any = {"cache": cache, "logits": None, "top_logits": None}
        state = _changed(dataclasses.replace(self, **rest), changes)
        return dataclasses.replace(
            state,
            cache=dataclasses.replace(state.cache, keys=own.keys, values=own.values),
            logits=self.logits,
            top_logits=self.top_logits,
        )

    def with_changes(self, changes: Changes) -> "DecodeState":
        """The state after these changes; inside jit. Logits stay as they are."""
        action, max_new_tokens, num_sampled, num_pending, *flags, grammar = changes.rows.T
        recorded, scored = flags
        admitted, retired = action == Action.ADMIT, action == Action.RETIRE
        runs = admitted | (action == Action.RESUME)

        def put(whole: Array, value: Array | int | bool) -> Array:
            return jnp.where(admitted.reshape(-1, *[1] * (whole.ndim - 1)), value, whole)

        blocks = jnp.where(retired[:, None], -1, changes.listed(self.layout.blocks))
        reasons = jnp.where(retired, FinishReason.UNUSED.value, self.reasons)
        taken = jnp.where(changes.takes_outputs, self.num_sampled, self.num_taken)
        return dataclasses.replace(
            self,
            cache=self.cache if changes.table is None else changes.cache(self.cache),
            layout=dataclasses.replace(self.layout, blocks=blocks),
            reasons=jnp.where(runs, FinishReason.RUNNING.value, reasons),
            has_logits=put(self.has_logits, num_pending == 0),
            num_pending=put(jnp.where(retired, 0, self.num_pending), num_pending),
            pending=put(self.pending, changes.pending),
            head=put(self.head, 0),
            seeds=put(self.seeds, changes.seeds),
            grammars=self.grammars.with_states(put(self.grammars.states, grammar)),
            num_sampled=put(self.num_sampled, num_sampled),
            num_taken=put(taken, num_sampled),
            max_new_tokens=put(self.max_new_tokens, max_new_tokens),
            recorded=put(self.recorded, recorded > 0),
            scored=put(self.scored, scored > 0),
            processed=None if self.processed is None else put(self.processed, scored > 1),
            session=put(self.session, jnp.arange(len(action), dtype=jnp.int32)),
            clock=put(self.clock, 0),
            last_pass=put(self.last_pass, INT32_MAX),
            halts=put(self.halts, False),
            steps=self.steps.without(admitted),
        )

    def with_logits(
        self, rows: Sequence[int], logits: Float[Array | np.ndarray, "A V"]
    ) -> "DecodeState":
        """The state with the logits of some rows, which are donated; further logits are ignored."""
        # A row that does not exist is dropped.
        places = [*rows, *[self.layout.num_rows] * (logits.shape[0] - len(rows))]
        put = _put_logits(self.logits, np.asarray(places, np.int32), logits)
        return dataclasses.replace(self, logits=put)

    def end(self, row: int, reason: FinishReason = FinishReason.STOP) -> "DecodeState":
        """Ends a row from outside."""
        return dataclasses.replace(self, reasons=with_row(self.reasons, row, reason.value))

    @property
    def running(self) -> Bool[Array, " R"]:
        """The rows that have not ended."""
        return jnp.asarray(self.reasons) == FinishReason.RUNNING

    @property
    def num_held(self) -> Int[Array | np.ndarray, " R"]:
        """The number of sampled tokens that `tokens` holds."""
        return self.num_sampled - self.num_taken

    @property
    def queue_capacity(self) -> int:
        """P, tokens that a row can have pending. What follows in `pending` is slack for the slice that the widest pass takes."""
        return self.pending.shape[1] - self.max_width

    def outputs(self) -> list[list[int]]:
        """The tokens that each row has sampled and that are not taken, on the host."""
        tokens, counts = np.asarray(self.tokens), np.asarray(self.num_held)
        return [row[:n].tolist() for row, n in zip(tokens, counts, strict=True)]

    def without_outputs(self) -> "DecodeState":
        """The state with room for as many sampled tokens as at first, after those are taken."""
        return dataclasses.replace(self, num_taken=self.num_sampled + 0)

    def __getattr__(self, name: str) -> Any:
        former = {
            **{"drawn": "num_sampled", "waiting": "num_pending", "ready": "has_logits"},
            **{"budgets": "max_new_tokens", "kept": "top_logits"},
        }
        if name not in former:
            raise AttributeError(f"DecodeState has no attribute {name!r}")
        warn_renamed(f"DecodeState.{name}", former[name])
        return getattr(self, former[name])


def _fed_state(
    cache: KVCache,
    layout: Layout,
    inputs: RowInputs,
    vocab_size: int,
    logits: Array | None,
    queue: int,
    max_width: int,
) -> DecodeState:
    """A state whose rows have their inputs, and no room for outputs."""
    rows, listed = layout.num_rows, layout.count_listed()
    num_pending = np.where(listed > 0, [*map(len, inputs.prompts)], 0).astype(np.int32)
    reasons = np.where(listed > 0, FinishReason.RUNNING, FinishReason.UNUSED)
    shape, zeros, never = (rows, vocab_size), filled(rows), filled(rows, False, bool)
    queues = inputs.pending(max(queue, *map(len, inputs.prompts)) + max_width)
    return DecodeState(
        cache=cache,
        layout=layout,
        samplers=Samplers.stack([]),
        processing=Processing.stack(inputs.samplers),
        # added to, because the state donates its logits
        logits=jnp.zeros(shape) if logits is None else jnp.broadcast_to(logits, shape) + 0.0,
        has_logits=placed((num_pending == 0) & (listed > 0)),
        history=History.empty(rows),
        grammars=GrammarRows.none(rows, vocab_size),
        pending=placed(queues),
        num_pending=placed(num_pending),
        head=zeros,
        seeds=placed(seed_words(inputs.seeds)),
        num_sampled=zeros,
        num_taken=zeros,
        max_new_tokens=placed(np.asarray(inputs.max_new_tokens, np.int32)),
        stops=filled(0),
        reasons=placed(reasons.astype(np.int32)),
        session=zeros,
        clock=zeros,
        last_pass=filled(rows, INT32_MAX),
        halts=never,
        tokens=filled((rows, 0)),
        logprobs=filled((rows, 0), dtype=np.float32),
        scored=never,
        passes=filled(()),
        top_logits=TopLogits.empty((rows, 0), 0, vocab_size),
        recorded=never,
        steps=Steps.none(rows, TokenAutomata.of(vocab_size=vocab_size)),
        record=PassLog.empty(0, rows, max_width, cache.num_blocks),
        max_width=max_width,
    )


def _padded_stops(stops: Sequence[int]) -> list[int]:
    return [*stops, *[-1] * (-len(stops) % _STOPS if stops else _STOPS)]


@jax.jit
def _changed(state: DecodeState, changes: Changes) -> DecodeState:
    return state.with_changes(changes)


@functools.partial(jax.jit, donate_argnames=("logits",))
def _put_logits(logits: Array, rows: Array, new: Array) -> Array:
    return logits.at[rows].set(new, mode="drop")
