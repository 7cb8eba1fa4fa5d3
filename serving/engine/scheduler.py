"""The engine's loop: admits calls, feeds what they begin with in chunks, runs the jitted decode
loop, and hands out what it samples.

A round of it is: take calls from the queue as long as there are rows and memory; one forward pass
over a chunk of what is still to be fed; one dispatch of the decode loop. All of it runs in one
thread; nothing here is called from another one.
"""

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import DecodeState, FinishReason, KVCache, Layout, Sampler, decode
from jaxshare.decoding.sampling import Samplers
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.seeds import seed_words
from jaxshare.serving.engine import prefill
from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.output import OutputProcessor
from jaxshare.serving.engine.request import End, Request
from jaxshare.serving.engine.speculation import SHAPES, DraftLookup, verify
from jaxshare.serving.errors import NotANumberError
from jaxshare.serving.kvcache.manager import KVManager, Wait, ema
from jaxshare.serving.kvcache.prefix_tree import Node

log = logging.getLogger("jaxshare.engine")

PENDING = 8
"""So few tokens are fed by the decode loop itself, beside the rows that sample."""


@dataclasses.dataclass(eq=False)
class RunningRequest:
    """A call under way.

    Attributes:
      call: which.
      index: of the decode loop's rows.
      node: the node that it writes.
      running: whether it is in the decode loop; before that it is fed.
      logits: after what was fed, float32[V], where it is to sample at once.
      guesses: of what it may say next, where it has left an earlier answer.
      drawn: tokens that the decode loop had sampled for it when it was looked at last, and `first`
        when it began there.
      slot, length: its own block among those of the last view, and the tokens in that.
    """

    call: Request
    index: int
    node: Node
    running: bool = False
    logits: Array | None = None
    guesses: DraftLookup | None = None
    drawn: int = 0
    first: int = 0
    slot: int = 0
    length: int = 0

    @property
    def left(self) -> np.ndarray:
        """Tokens that are to be fed."""
        assert self.node.extent is not None
        return self.node.tokens[self.node.extent.length :]


class Scheduler:
    """Runs calls.

    Args:
      model: as loaded, keys rotated as for its whole context.
      memory, queue: where keys and values are, and who waits.
      rows: calls that run at a time.
      passes: forward passes of a dispatch at most, between which the host looks in.
      metrics: what is counted.
      replies: what becomes of what is sampled.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        memory: KVManager,
        queue: FairQueue,
        rows: int,
        passes: int,
        metrics: Metrics,
        replies: OutputProcessor,
    ):
        self.model, self.memory, self.queue = model, memory, queue
        self.passes, self.metrics, self.replies = passes, metrics, replies
        self.rows: list[RunningRequest | None] = [None] * rows
        self._state: DecodeState | None = None
        self._samplers = [Sampler()] * rows
        self._samplers_on_device: Samplers | None = None
        self._no_logits = jnp.zeros((rows, model.config.vocab_size))
        self._retired: list[int] = []  # rows that the decode loop still has
        self._ran = 0  # passes of its state

    @property
    def live(self) -> list[RunningRequest]:
        return [row for row in self.rows if row]

    # A round.

    def round(self, admit: bool = True) -> bool:
        """Does what there is to do; whether anything was done. Without `admit` calls that wait go
        on waiting."""
        for row in self.live:
            if row.call.cancelled:
                self._end(row, End.CANCELLED)
        for call in [call for call in self.queue if call.cancelled]:
            self.replies.finish(call, End.CANCELLED)
        for call in [call for call in self.queue if call.resample and not call.looked_up]:
            self.replies.look_up(call)
        if admit:
            self._admit()
        if long := [row for row in self.live if not row.running and len(row.left) > PENDING]:
            self._feed(long)
        ready = [
            row
            for row in self.live
            if not row.running and (row.logits is not None or len(row.left) <= PENDING)
        ]
        guessing = [row for row in ready if row.guesses and row.logits is None]
        unsure = self._confirm(guessing) if guessing else []
        self._start([row for row in ready if row in unsure or row not in guessing])
        if any(row.running for row in self.live):
            # A row that is fed must not wait long for its next chunk, nor a call for a row.
            self._decode(
                max(1, self.passes // 4)
                if any(not row.running for row in self.live)
                else self.passes,
                len(self.queue) > 0,
            )
        self._look()
        return bool(self.live or len(self.queue))

    def _look(self) -> None:
        running, pool = sum(row.running for row in self.live), self.memory.pool
        self.metrics.look(
            running=running,
            fed=len(self.live) - running,
            waiting=len(self.queue),
            accelerator_bytes=(pool.tokens - pool.free) * pool.bytes_a_token,
            logits_bytes=self.replies.logits.bytes if self.replies.logits else 0,
            session_bytes=self.memory.lent_tokens * pool.bytes_a_token,
            host_bytes=self.memory.tree.host_used * pool.bytes_a_token,
        )

    def _admit(self) -> None:
        """Takes calls from the queue as long as there are rows and memory."""
        for call in self.queue:
            free = [i for i, row in enumerate(self.rows) if row is None]
            if not free and not self._make_way(call):
                return
            free = free or [i for i, row in enumerate(self.rows) if row is None]
            while (wait := self._place(call, free[0])) is Wait.ROOM and self._make_way(call):
                pass
            # what it has in common with others lies in the way
            if wait is Wait.ROOM and not self.live:
                wait = self._place(call, free[0], afresh=True)
                assert wait is None
            if wait is Wait.ROOM:
                return

    def _make_way(self, call: Request) -> bool:
        """Takes a row from a call of a lower priority; False if there is none."""
        below = [row for row in self.live if row.call.priority < call.priority]
        if below:
            self._preempt(min(below, key=_worth))
        return bool(below)

    def _place(self, call: Request, index: int, *, afresh: bool = False) -> Wait | None:
        """Gives a call a row and memory, or says what is in the way."""
        running = 1 + sum(row.call.agent == call.agent for row in self.live)
        node = self.memory.place(call, running, afresh=afresh)
        if isinstance(node, Wait):
            return node
        self.queue.take(call)
        self.rows[index] = RunningRequest(call, index, node, guesses=self.replies.guesses(call))
        known = node.segment.depth - len(node.tokens)
        if call.reused is None:
            call.reused = min(known, len(call.prompt))
        self.metrics.admitted(call, known)
        log.debug(
            "admitted",
            extra={
                "call": call.number,
                "agent": call.agent,
                "known": known,
                "to_feed": len(node.tokens),
            },
        )
        return None

    def _preempt(self, row: RunningRequest) -> None:
        """Takes row and memory from a call; it goes on later, as though nothing had been."""
        row.call.preemptions += 1
        self.metrics.preempted()
        log.info(
            "preempted",
            extra={
                "call": row.call.number,
                "agent": row.call.agent,
                "sampled": len(row.call.output),
            },
        )
        self._release(row)
        self.queue.put_back(row.call)

    # Passes.

    def _feed(self, rows: Sequence[RunningRequest]) -> None:
        """One pass over the next tokens of as many of these rows as are fed alike."""
        count, width = prefill.shape(len(rows[0].left))
        taken = dict(enumerate(rows[:count]))
        tokens, counts = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
        for i, row in taken.items():
            piece = row.left[:width]
            tokens[i, : len(piece)], counts[i] = piece, len(piece)
        cache, layout = self._view(taken, count)
        begin = time.perf_counter()
        logits, self.memory.pool.cache = self.model.forward(tokens, counts, cache, layout)
        finite = np.asarray(jnp.isfinite(logits).all(axis=-1))
        fed = int(counts.sum())
        self.memory.feed_seconds = ema(
            self.memory.feed_seconds, (time.perf_counter() - begin) / fed
        )
        self.metrics.fed(fed)
        for i, row in taken.items():
            assert row.node.extent is not None
            row.node.extent.length += int(counts[i])
            self.queue.serve(row.call, int(counts[i]))
            if not finite[i]:
                self._not_a_number(row)
            elif not len(row.left):
                row.logits = logits[i]
        self.memory.moved = True

    def _confirm(self, rows: Sequence[RunningRequest]) -> list[RunningRequest]:
        """One pass over what some of these rows may say next; those that have nothing to guess,
        which the decode loop is for."""
        guessed: list[tuple[RunningRequest, list[int]]] = []
        unsure: list[RunningRequest] = []
        most = SHAPES[-1][1]
        for row in rows:
            extent, call = row.node.extent, row.call
            assert extent is not None and row.guesses is not None
            if extent.capacity - extent.length < most:
                self.memory.grow(row.node, max(most, call.left))
            room = min(most, extent.capacity - extent.length) - len(row.left)
            some = row.guesses.next(call.output, min(room, call.left - 1))
            if not some:
                unsure.append(row)
            elif len(guessed) < SHAPES[-1][0]:
                guessed.append((row, some))
        if not guessed:
            return unsure
        count, width = next(shape for shape in SHAPES if len(guessed) <= shape[0])
        tokens, counts, begins = (
            np.zeros((count, width), np.int32),
            np.zeros(count, np.int32),
            np.zeros(count, np.int32),
        )
        samplers, seeds, positions = [Sampler()] * count, [0] * count, np.zeros(count, np.int32)
        for i, (row, some) in enumerate(guessed):
            whole = [*row.left.tolist(), *some]
            tokens[i, : len(whole)], counts[i], begins[i] = whole, len(whole), len(row.left) - 1
            samplers[i], seeds[i] = row.call.sampler, row.call.seed
            positions[i] = len(row.call.output) - begins[i]
        cache, layout = self._view({i: row for i, (row, _) in enumerate(guessed)}, count)
        edits = max(len(sampler.bias) + len(sampler.forbidden) for sampler in samplers)
        self.memory.pool.cache, drawn, finite, kept = verify(
            self.model.module,
            self.model.params,
            cache,
            layout,
            tokens,
            counts,
            Samplers.stack(samplers, bias_slots=max(8, edits)),
            seed_words(seeds),
            positions,
            self.replies.kept,
        )
        drawn, finite, kept = jax.device_get((drawn, finite, kept))
        self.metrics.ran("guess", 1)
        self.memory.moved = True
        now = time.perf_counter()
        for i, (row, some) in enumerate(guessed):
            assert row.node.extent is not None and row.guesses is not None
            if not finite[i]:
                self._not_a_number(row)
                continue
            found = drawn[i, begins[i] : counts[i]].tolist()
            right = next((n for n, token in enumerate(some) if found[n] != token), len(some))
            row.guesses.told(right, len(some))
            self.metrics.guessed(right, len(some) - right)
            row.node.extent.length += int(begins[i]) + 1 + right
            found = found[: right + 1]
            stop = next((n for n, token in enumerate(found) if token in self.replies.stops), None)
            if stop is not None:  # what was fed behind it is nobody's
                row.node.extent.length -= max(0, right - stop)
                found = found[: stop + 1]
            part = slice(int(begins[i]), int(begins[i]) + len(found))
            row.call.drawn_from.append(
                jax.tree.map(lambda array, i=i, part=part: array[i, part], kept)
            )
            spent = len(row.call.output) + len(found) >= row.call.budget
            self._found(
                row,
                found,
                FinishReason.STOP
                if stop is not None
                else FinishReason.BUDGET
                if spent
                else FinishReason.RUNNING,
                now,
            )
        return unsure

    def _start(self, rows: Sequence[RunningRequest]) -> None:
        """Lets rows sample that have little or nothing left to be fed."""
        if not rows:
            return
        for row in rows:
            row.running, row.drawn, row.first = True, len(row.call.output), len(row.call.output)
            if self._samplers[row.index] != row.call.sampler:
                self._samplers[row.index], self._samplers_on_device = row.call.sampler, None
        state = self._room_for([row.call for row in rows])
        cache, seen = self._seen(
            {row.index: row for row in self.live if row.running}, len(self.rows)
        )
        self.memory.moved = False
        calls, new = [row.call for row in rows], {row.index for row in rows}
        layout = Layout.from_blocks(
            [[] if i in new else listed for i, listed in enumerate(seen)], width=self.memory.width
        )
        state = dataclasses.replace(
            state,
            cache=cache,
            layout=layout,
            samplers=self._stacked(state.samplers.bias_tokens.shape[1]),
        )
        # Always as many, so that one program serves all.
        logits = self._no_logits
        if any(row.logits is not None for row in rows):
            nothing = self._no_logits[0]
            logits = [nothing if row.logits is None else row.logits for row in rows]
            logits = jnp.stack(logits + [nothing] * (len(self.rows) - len(rows)))
        self._state = state.admit(
            [row.index for row in rows],
            [seen[row.index] for row in rows],
            logits,
            seeds=[call.seed for call in calls],
            budgets=[call.budget for call in calls],
            drawn=[row.drawn for row in rows],
            pending=[row.left.tolist() if row.logits is None else [] for row in rows],
            recorded=[call.resample is not None for call in calls],
        )
        for row in rows:
            row.logits = None

    def _room_for(self, calls: Sequence[Request]) -> DecodeState:
        """The decode loop's state, with room for what these calls may sample and for their
        samplers' edits."""
        room = max(call.budget for call in calls)
        edits = max(len(call.sampler.bias) + len(call.sampler.forbidden) for call in calls)
        state = self._state and self._retire(self._state)
        if state is None:
            state = DecodeState.create(
                *self._view({}, len(self.rows)),
                [],
                vocab_size=self.model.config.vocab_size,
                stops=self.model.generation.stop_tokens,
                queue=PENDING,
                room=max(1024, bucket(room)),
                bias_slots=max(8, bucket(edits)),
                max_width=1,
                num_top_logits=self.replies.kept,
            )
        if (more := bucket(room) - state.tokens.shape[1]) > 0:

            def widened(array: Array) -> Array:
                return jnp.pad(array, ((0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)))

            state = dataclasses.replace(
                state,
                tokens=widened(state.tokens),
                top_logits=jax.tree.map(widened, state.top_logits),
            )
        if (slots := bucket(edits)) > state.samplers.bias_tokens.shape[1]:
            state = dataclasses.replace(state, samplers=self._stacked(slots))
        return state

    def _stacked(self, slots: int) -> Samplers:
        if (
            self._samplers_on_device is None
            or self._samplers_on_device.bias_tokens.shape[1] != slots
        ):
            self._samplers_on_device = Samplers.stack(self._samplers, bias_slots=slots)
        return self._samplers_on_device

    def _retire(self, state: DecodeState) -> DecodeState:
        """Without the rows that have left the loop since it was last at work."""
        if self._retired:
            state = state.retire(self._retired)
            self._retired.clear()
        return state

    def _decode(self, passes: int, until_any: bool) -> None:
        """One dispatch: forward passes, each of which samples a token for every row that runs;
        fewer with `until_any` if a row ends."""
        running = [row for row in self.live if row.running]
        for row in running:
            extent = row.node.extent
            assert extent is not None
            if extent.capacity - extent.length < min(passes, row.call.left):
                self.memory.grow(row.node, row.call.left)
        assert self._state is not None
        state, arenas = self._retire(self._state), self.memory.pool.cache
        if self.memory.moved:
            cache, layout = self._view({row.index: row for row in running}, len(self.rows))
            state = dataclasses.replace(state, cache=cache, layout=layout)
            self.memory.moved = False
        else:
            state = dataclasses.replace(
                state,
                cache=dataclasses.replace(state.cache, keys=arenas.keys, values=arenas.values),
            )
        state = decode(
            self.model.module, self.model.params, state, passes=passes, stop_on_finish=until_any
        )
        self._state, self.memory.pool.cache = state, state.cache
        if call := next(iter(self.queue), None):
            self.memory.prepare(call)  # while the device is at work
        reasons, drawn, tokens, lengths, faults, ran = jax.device_get(
            (
                state.reasons,
                state.drawn,
                state.tokens,
                state.cache.lengths,
                state.cache.faults,
                state.passes,
            )
        )
        self.metrics.ran("decode", int(ran) - self._ran)
        self._ran = int(ran)
        if faults:
            state.cache.check()
        now = time.perf_counter()
        full: list[RunningRequest] = []
        for row in running:
            assert row.node.extent is not None
            grown, row.length = int(lengths[row.slot]) - row.length, int(lengths[row.slot])
            row.node.extent.length += grown
            found = tokens[row.index, row.drawn : drawn[row.index]].tolist()
            row.drawn += len(found)
            if (reason := FinishReason(int(reasons[row.index]))) is FinishReason.FULL:
                full.append(row)
            self._found(row, found, reason, now)
        for row in full:
            if self.rows[row.index] is row:  # it may have had to make way meanwhile
                self._give_room(row)
        for row in running:
            if (
                self.rows[row.index] is row
                and row.guesses
                and row not in full
                and row.guesses.back(row.call.output)
            ):
                self._leave_loop(row)

    def _found(
        self, row: RunningRequest, found: list[int], reason: FinishReason, now: float
    ) -> None:
        """What a row has sampled, and what becomes of it."""
        call = row.call
        if found:
            call.first = call.first or now
            self.queue.serve(call, len(found))
            self.metrics.sampled(len(found))
        if reason is FinishReason.STOP:
            call.stop_token = found.pop()
        if found:
            call.output += found
            self.memory.tree.extend(row.node, found)
        stopped = self.replies.stopped(call)
        if reason is FinishReason.NOT_A_NUMBER:
            self._not_a_number(row)
        elif stopped:
            self._end(row, End.STOP_TEXT)
        elif reason is FinishReason.STOP:
            self._end(row, End.STOP)
        elif reason is FinishReason.BUDGET:
            self._end(row, End.LENGTH)
        else:
            self.replies.publish(call)

    def _give_room(self, row: RunningRequest) -> None:
        """A row's block is full: it grows, or another one follows it, or somebody has to make
        way."""
        while (node := self.memory.more(row.node, row.call.left + 1)) is None:
            victim = min(self.live, key=_worth)
            self._preempt(victim)
            if victim is row:
                return
        row.node = node
        assert self._state is not None
        self._state = dataclasses.replace(
            self._state, reasons=self._state.reasons.at[row.index].set(FinishReason.RUNNING.value)
        )

    def _not_a_number(self, row: RunningRequest) -> None:
        """Ends a call that nothing can be sampled for; what it has written last is nothing to go on
        from."""
        assert row.node.extent is not None
        row.node.extent.length = 0
        self._end(
            row,
            End.ERROR,
            NotANumberError(
                f"the model's logits for call {row.call.number} are not numbers after "
                f"{len(row.call.tokens)} tokens; its weights, or its dtype, cannot serve this "
                "prompt"
            ),
        )

    # Ends.

    def _release(self, row: RunningRequest) -> None:
        """Takes a row out of the loop; what it has written stays in the tree, for whoever may want
        it."""
        if row.running:
            self._leave_loop(row)
        self.rows[row.index] = None
        self.memory.release(row.node)

    def _leave_loop(self, row: RunningRequest) -> None:
        """Takes a row out of the decode loop's; what was kept of its distributions is fetched."""
        assert self._state is not None
        if row.call.resample and row.drawn > row.first:
            whole = jax.device_get(
                jax.tree.map(lambda array: array[row.index], self._state.top_logits)
            )
            row.call.drawn_from.append(
                jax.tree.map(lambda array: array[row.first : row.drawn], whole)
            )
        self._retired.append(row.index)
        row.running, self.memory.moved = False, True

    def _end(self, row: RunningRequest, end: End, error: Exception | None = None) -> None:
        self._release(row)
        self.replies.finish(row.call, end, error)

    def restart(self) -> None:
        """After a failure: memory, rows and queue as they were at first, since a cache may have
        been given to a pass that failed."""
        self.rows = [None] * len(self.rows)
        self.queue = self.replies.queue = FairQueue()
        self._state, self._ran = None, 0
        self._retired.clear()
        self.memory.restart()

    def free(self) -> None:
        """Lets go of the memory."""
        self._state = None
        for array in (*self.memory.pool.cache.keys, *self.memory.pool.cache.values):
            if not array.is_deleted():
                array.delete()

    def _view(self, rows: Mapping[int, RunningRequest], count: int) -> tuple[KVCache, Layout]:
        """(the cache with what these rows see as its blocks, a layout of `count` rows)."""
        cache, listed = self._seen(rows, count)
        return cache, Layout.from_blocks(listed, width=self.memory.width)

    def _seen(
        self, rows: Mapping[int, RunningRequest], count: int
    ) -> tuple[KVCache, list[list[int]]]:
        cache, listed, own = self.memory.view({i: row.node for i, row in rows.items()}, count)
        for i, row in rows.items():
            row.slot, row.length = own[i]
        return cache, listed


def _worth(row: RunningRequest) -> tuple[int, int]:
    """Who makes way first: the lowest priority, and of these who came last."""
    return row.call.priority, -row.call.number
