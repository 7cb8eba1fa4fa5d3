"""Engine: the front of the loop. Calls come in from any thread or event loop, and streams of tokens
go out."""

import collections
import functools
import itertools
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from jaxshare import Sampler
from jaxshare.arena import ALIGNMENT, arena_size, extents
from jaxshare.compile_time import compile_seconds
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.checkpoints import CheckpointStore, SavedCheckpoint, SaveError
from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.output import OutputProcessor
from jaxshare.serving.engine.request import Request, Stream, StreamState, Text
from jaxshare.serving.engine.scheduler import Scheduler
from jaxshare.serving.errors import ClosedError, EngineError, QueueFullError, TooLongError
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import default_sampler, encode, encode_messages, token_bytes
from jaxshare.serving.kvcache import checkpoint
from jaxshare.serving.kvcache.eviction import make_policy
from jaxshare.serving.kvcache.lease import KVLease, LeaseTable
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.policy import Policy, prefix_hash
from jaxshare.serving.kvcache.pool import whole_tiles
from jaxshare.serving.logits_cache.cache import LogitsCache
from jaxshare.serving.logits_cache.hotspot import USUAL, Hotspot

log = logging.getLogger("jaxshare.engine")

_SAVED = "jaxshare engine 1"
_MOST_BYTES = 2 * 1024**3
_MOST_ASKED = 2**16
Messages = Sequence[Mapping[str, str]]


class Engine:
    """Answers calls of one model, as many at a time as there are rows and memory.

        with Engine(model) as engine:
            stream = engine.submit("What is 2 + 2?", agent_id="maths")
            print(stream.wait().text)

    What calls begin with in common is found, kept, and read once a pass, whoever asks and whenever.
    An answer depends on its prompt, its sampler and its seed alone: in float32 it is the same token
    for token whatever else is under way, and whatever had to leave the memory.

    Attributes:
      model: as loaded.
      metrics: see `Metrics`.
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
        passes: int = 16,
        seed: int = 0,
        sampler: Sampler | None = None,
        logits_cache: int | LogitsCache = 0,
        kept_logits: int = 256,
        hotspot: Hotspot = USUAL,
    ):
        """Takes the accelerator's memory; nothing is computed yet.

        Args:
          model: from `jaxshare.models.load`. One on a mesh runs alike on all data groups; give each
            of `model.replicas()` an engine.
          kv_bytes: memory of the accelerator, on a mesh of all devices of a group together, for
            keys and values; default as much as all rows need at the model's full context, but no
            more than 2 GiB.
          host_kv_bytes: memory of the host for what has to leave there; 0 for none.
          policy: what leaves first: "contribution", "lru", "lfu", "slru", "priority", or an object
            of `residency.Policy`.
          max_rows: calls that run at a time.
          max_queue: calls that may wait beside those.
          passes: forward passes between which the engine looks in, at most: to give out tokens, and
            to take calls.
          seed: of calls that have none of their own.
          sampler: for calls that have none; default the checkpoint's own settings.
          logits_cache: bytes of host memory for the Logits Cache, which calls with `resample` use;
            or one to go on with.
          kept_logits: so many of the largest logits are kept of a distribution, beside the mass of
            the rest.
          hotspot: of calls with `resample="hotspot"`.

        Raises:
          ValueError: an unknown policy, a number below 1, memory for less than one token, host
            memory for less than one block, or a Logits Cache of another model, or a model on
            devices of several processes.
        """
        for name, value in (
            ("max_rows", max_rows),
            ("max_queue", max_queue),
            ("passes", passes),
            ("kept_logits", kept_logits),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if model.mesh is not None and model.mesh.is_multi_process:
            raise ValueError(
                "the model lies on devices of several processes, which would take different calls "
                "at different times; give the engine a model on this process's devices"
            )
        size = token_bytes(model)
        wanted = arena_size(max_rows * model.config.max_positions)
        tokens = (
            min(wanted, whole_tiles(_MOST_BYTES // size))
            if kv_bytes is None
            else whole_tiles(kv_bytes // size)
        )
        if tokens < 1:
            raise ValueError(
                f"kv_bytes is {kv_bytes}, but one token's keys and values take {size}; give them "
                "more room"
            )
        if 0 != host_kv_bytes < size * ALIGNMENT:
            raise ValueError(
                f"host_kv_bytes is {host_kv_bytes}, but a block of {ALIGNMENT} tokens takes "
                f"{size * ALIGNMENT}; give at least that, or 0 to keep nothing in host memory"
            )
        self.model, self.metrics = model.for_context(model.config.max_positions), Metrics()
        self._sampler, self._seed, self._max_queue = (
            sampler or default_sampler(model),
            seed,
            max_queue,
        )
        chosen = make_policy(policy) if isinstance(policy, str) else policy
        queue = FairQueue()
        memory = KVManager(
            self.model,
            tokens=tokens,
            host_tokens=host_kv_bytes // size,
            rows=max_rows,
            policy=chosen,
            metrics=self.metrics,
        )
        self._replies = OutputProcessor(
            self.model,
            queue=queue,
            policy=chosen,
            metrics=self.metrics,
            hotspot=hotspot,
            logits=self._logits_cache(logits_cache, kept_logits),
        )
        self._loop = Scheduler(
            self.model,
            memory=memory,
            queue=queue,
            rows=max_rows,
            passes=passes,
            metrics=self.metrics,
            replies=self._replies,
        )
        self._guests = LeaseTable(memory)
        self._numbers = itertools.count()
        # How often something was asked without a seed; of what was asked last.
        self._asked: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self._saves: CheckpointStore | None = None
        self._changed = threading.Condition()
        self._new: list[Request] = []
        self._calls: dict[Request, None] = {}  # that have not ended
        self._closed = False
        self._thread: threading.Thread | None = None

    def _logits_cache(self, given: int | LogitsCache, kept: int) -> LogitsCache | None:
        if isinstance(given, LogitsCache):
            given.check(self.model.fingerprint)
            given.kept = given.kept or kept
            return given
        if given < 0:
            raise ValueError(f"logits_cache is {given}; give a number of bytes, or 0 for none")
        return (
            LogitsCache(self.model.fingerprint, given, min(kept, self.model.config.vocab_size))
            if given
            else None
        )

    @property
    def logits_cache(self) -> LogitsCache | None:
        """The Logits Cache."""
        return self._replies.logits

    # Calls.

    def submit(
        self,
        asked: "str | Messages | Sequence[int] | np.ndarray",
        sampler: Sampler | None = None,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        agent_id: str | None = None,
        priority: int = 0,
        resample: str | None = None,
    ) -> Stream:
        """Asks for a completion; from any thread, and at once.

        Args:
          asked: a text, messages (dicts with role and content, put into the model's chat template),
            or tokens.
          sampler: how tokens are chosen; default the engine's.
          max_new_tokens: of the answer.
          stop: it ends before the first of these texts.
          seed: of its randomness, an integer of 64 bits; default one that follows from the engine's
            seed, what is asked, and how often that was asked before (`jaxshare.seeds`).
          agent_id: whose call it is. Agents are served in turn, and what leaves the memory is
            decided by what they contribute.
          priority: calls of a higher one are served first, and take rows and memory from those of a
            lower one.
          resample: whether the same will be asked again: "stepwise" takes from the Logits Cache
            what it knows of this prompt, exactly, and keeps what it comes to; "hotspot" likewise,
            but samples again only where the model was uncertain, which is APPROXIMATE.

        Raises:
          TooLongError: it would not fit into the model's context, or never into the memory.
          QueueFullError: as many calls wait as may.
          ClosedError: the engine was shut down.
          ValueError: nothing is asked, a token outside the vocabulary, text without a tokenizer,
            messages that the template refuses, or options out of range.
        """
        tokens = self._tokens(asked)
        sampler = sampler or self._sampler
        warn_of_greedy(self.model, sampler)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in stops):
            raise ValueError(f"stop is {stop!r}; give texts that are not empty")
        if stops and self.model.tokenizer is None:
            raise ValueError(
                "the model folder has no tokenizer, so no answer can end at a text; add the "
                "tokenizer's files to the folder"
            )
        if max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens is {max_new_tokens}; an answer has at least one token"
            )
        if resample not in (None, "stepwise", "hotspot"):
            raise ValueError(f"resample is {resample!r}; it must be None, 'stepwise' or 'hotspot'")
        if resample and self.logits_cache is None:
            raise ValueError(
                f"resample is {resample!r}, but the engine has no Logits Cache; make it with "
                "logits_cache=BYTES"
            )
        vocab = self.model.config.vocab_size
        if outside := [t for t in (*sampler.bias, *sampler.forbidden) if t >= vocab]:
            raise ValueError(
                f"the sampler names token {outside[0]}, outside the vocabulary of {vocab}"
            )
        state = StreamState(Text(self.model.tokenizer, stops))
        call = Request(
            next(self._numbers),
            tokens,
            sampler,
            0,
            max_new_tokens,
            agent_id or "",
            priority,
            state,
            resample,
        )
        with self._changed:
            if self._closed:
                raise ClosedError("the engine is shut down; make another")
            self._check_length(len(tokens), max_new_tokens)
            if (waiting := len(self._new) + len(self._loop.queue)) >= self._max_queue:
                raise QueueFullError(
                    f"{waiting} calls wait already, as many as may; try again when some have "
                    "ended, or make the engine with a larger max_queue"
                )
            if seed is None:
                asked = prefix_hash(tokens)
                self._asked[asked] = self._asked.pop(asked, 0) + 1
                if len(self._asked) > _MOST_ASKED:
                    self._asked.popitem(last=False)
                call.seed, call.next_seed = (
                    self._seed_of(asked, self._asked[asked] + more) for more in (0, 1)
                )
            else:
                call.seed = stream_seed(seed)
            self._new.append(call)
            self._calls[call] = None
            if self._thread is None:
                # It ends when there is nothing to do. Not a daemon: the program must not end in the
                # midst of a pass.
                self._thread = threading.Thread(target=self._work, name="jaxshare-engine")
                self._thread.start()
        return Stream(state, functools.partial(_cancel, call))

    def _tokens(self, asked: "str | Messages | Sequence[int] | np.ndarray") -> np.ndarray:
        if isinstance(asked, str):
            tokens = encode(self.model, asked)
        elif len(asked) and isinstance(asked[0], Mapping):
            tokens = encode_messages(self.model, asked)  # pyright: ignore[reportArgumentType]
        else:
            tokens = asked
        if not len(tokens):
            raise ValueError("nothing is asked; give at least one token of text")
        found, vocab = np.asarray(tokens), self.model.config.vocab_size
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise ValueError(
                "a call is a text, messages with role and content, or a list of tokens"
            )
        if (outside := (found < 0) | (found >= vocab)).any():
            raise ValueError(
                f"token {int(found[outside.argmax()])} is outside the vocabulary of {vocab}"
            )
        return found.astype(np.int32)

    def _check_length(self, prompt: int, most: int) -> None:
        context, room = self.model.config.max_positions, self._loop.memory.pool.tokens
        if prompt + most > context:
            raise TooLongError(
                f"the prompt has {prompt} tokens and {most} more may follow, but the model's "
                f"context holds {context}; shorten the prompt or lower max_new_tokens"
            )
        if prompt + most > room:
            size = self._loop.memory.pool.bytes_a_token
            raise TooLongError(
                f"a prompt of {prompt} tokens and an answer of {most} need keys and values of "
                f"{prompt + most} tokens, {(prompt + most) * size} bytes, but there is room for "
                f"{room}, {room * size} bytes; raise kv_bytes or shorten them"
            )
        if prompt + most > (left := self._guests.room):
            raise TooLongError(
                f"a prompt of {prompt} tokens and an answer of {most} need {prompt + most} of the "
                f"engine's {room} tokens, but sessions have all but {left} of them; close one, "
                "raise kv_bytes or shorten them"
            )

    def _seed_of(self, asked: bytes, time: int) -> int:
        """The stream of the call that asks something for the n-th time."""
        return stream_seed(self._seed, "call", asked, time)

    # Sessions.

    def invite(self, capacities: Sequence[int]) -> KVLease:
        """Memory for the blocks of a session.

        It waits for calls that have no room beside it. Those that come later and need more than is
        left are refused.

        Args:
          capacities: of the blocks, in tokens.

        Raises:
          TooLongError: the session needs more memory than the engine has.
          EngineError: other sessions have too much of it.
          ClosedError: the engine was shut down.
        """
        offsets, tokens = extents(np.asarray(capacities, np.int64))
        with self._changed:
            if self._closed:
                raise ClosedError("the engine is shut down; make another")
            self._guests.announce(tokens)
            try:
                self._changed.wait_for(
                    lambda: (
                        self._closed or all(call.needs <= self._guests.room for call in self._calls)
                    )
                )
            except BaseException:
                self._guests.cancel(tokens)
                raise
        return self._guests.invite(capacities, tokens, offsets)

    # Saves.

    def save(self, folder: str | os.PathLike, *, wait: bool = False) -> int:
        """Saves what the engine knows, between two rounds of passes: the keys and values of all
        that calls have read and written so far, how they were used, the Logits Cache, and how often
        what was asked, which decides seeds that are not given.

        It is written in the background, and is there as a whole or not at all. Calls are not a part
        of it: whoever asks a restored engine the same with the same seed gets the same answer, and
        what is known of it is not computed again.

        Args:
          folder: of this engine's saves; made if it is not there. The two newest are kept.
          wait: come back when it is written. `shutdown` waits, too.

        Returns:
          The number of the save.

        Raises:
          SaveError: it cannot be written, or the one before it could not.
          ClosedError: the engine was shut down.
        """
        with self._guests.turn():
            with self._changed:
                if self._closed:
                    raise ClosedError("the engine is shut down; make another")
                asked = [[key.hex(), count] for key, count in self._asked.items()]
            self._saves = CheckpointStore.of(folder, self._saves)
            arrays, facts = checkpoint.known(self._loop.memory, self.model)
            logits = self.logits_cache.known() if self.logits_cache else ({}, None)
            return self._saves.save(
                {**arrays, **logits[0]},
                {
                    "format": _SAVED,
                    "model": self.model.fingerprint,
                    "asked": asked,
                    "logits": logits[1],
                    **facts,
                },
                wait=wait,
            )

    def restore(self, folder: str | os.PathLike, *, number: int | None = None) -> int:
        """Learns what an engine has saved: of the same model, on any mesh, with memory of any size.
        What was used last comes first; what there is no room for is left out. Policies see it as it
        was used before; what they know of agents begins anew.

        Args:
          folder: that it was saved to.
          number: of the save; default the newest.

        Returns:
          How many tokens are known now.

        Raises:
          SaveError: no save, one that cannot be read, or one of another model.
          EngineError: this engine has been asked something already.
          ClosedError: it was shut down.
        """
        with SavedCheckpoint(folder, number) as save, self._guests.turn():
            if (
                save.metadata.get("format") != _SAVED
                or save.metadata["model"] != self.model.fingerprint
            ):
                raise SaveError(
                    f"save {save.number} of {folder} is of another model, or of no engine; restore "
                    "it with the model that it was saved with"
                )
            with self._changed:
                if self._closed:
                    raise ClosedError("the engine is shut down; make another")
                if self._asked or self._calls or self._loop.memory.tree.root.children:
                    raise EngineError(
                        "the engine has been asked something already; restore into one that was "
                        "just made"
                    )
                self._asked.update(
                    (bytes.fromhex(key), count) for key, count in save.metadata["asked"]
                )
            arrays = save.arrays()
            if self.logits_cache and save.metadata["logits"]:
                self.logits_cache.learn(arrays, save.metadata["logits"])
            return checkpoint.learn(self._loop.memory, self.model, arrays, save.metadata)

    # Its life.

    def drain(self, timeout: float | None = None) -> None:
        """Waits, in the calling thread, until all calls have ended.

        Raises:
          TimeoutError: they have not within so many seconds.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: not self._calls and self._thread is None, timeout
            ):
                raise TimeoutError(
                    f"{len(self._calls)} calls have not ended within {timeout} seconds"
                )

    def shutdown(self, *, cancel: bool = True) -> None:
        """Takes no more calls, ends those that are under way (or, without `cancel`, waits for
        them), and frees the memory."""
        with self._changed:
            self._closed = True
            if cancel:
                for call in self._calls:
                    call.cancelled = True
        self.drain()
        self._guests.close()
        with self._guests.turn():
            self._loop.free()
            if self._saves:
                self._saves.close()
                self._saves = None
        if self.logits_cache:
            self.logits_cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def _work(self) -> None:
        """The engine's thread."""
        while self._step():
            pass

    def _step(self) -> bool:
        """One round of the loop; False if there was nothing to do, so that the thread may end."""
        with self._changed:
            for call in self._new:
                self._loop.queue.begin(call)
            self._new.clear()
        compiled = compile_seconds()
        try:
            with self._guests.turn():
                busy, failed = self._loop.round(admit=not self._guests.waiting), None
        except (
            Exception
        ) as error:  # a mistake in jaxshare, or the device: no call may hang because of it
            log.exception("the engine's loop failed")
            busy, failed = False, error
        self.metrics.compiled(compile_seconds() - compiled)
        with self._changed:
            if failed:
                for call in [
                    call
                    for call in self._calls
                    if call.state.done is None and call not in self._new
                ]:
                    self._replies.give_up(call, failed)
                with self._guests.turn():
                    self._loop.restart()
            self._calls = {call: None for call in self._calls if call.state.done is None}
            self._changed.notify_all()  # a session may wait for calls to end
            if busy or self._new:
                return True
            self._thread = None
            return False


def _cancel(call: Request) -> None:
    call.cancelled = True
