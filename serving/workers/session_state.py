"""SessionState: the state of a session of workers, shared by the functions that run it."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import Array

from jaxshare import DecodeState, FinishReason, KVCache, Layout, Sampler
from jaxshare.argument_checks import INT32_MAX
from jaxshare.compile_time import compile_seconds
from jaxshare.decoding.array_rows import placed
from jaxshare.decoding.automaton import TokenAutomaton
from jaxshare.deprecated import warn_renamed
from jaxshare.models import LoadedModel
from jaxshare.models.layers import Decoder
from jaxshare.models.tensor_parallel import ShardedDecoder
from jaxshare.serving.engine.prefill import prefill
from jaxshare.serving.errors import NotANumberError
from jaxshare.serving.interrupts import interrupts_held_back
from jaxshare.serving.kvcache.lease import KVLease
from jaxshare.serving.workers.growth import Growth
from jaxshare.serving.workers.layouts import MakeLayout, WorkersLayout
from jaxshare.serving.workers.prompts.format import Format
from jaxshare.serving.workers.prompts.session_prompt import Openings, SessionTexts
from jaxshare.serving.workers.results import Answer, Result, former_word
from jaxshare.serving.workers.roster import Roster
from jaxshare.serving.workers.text.answers import AnswerRule
from jaxshare.serving.workers.text.transcript import Event, Step, Transcript
from jaxshare.trace.recorder import Recorder
from jaxshare.trace.trace import Trace

if TYPE_CHECKING:
    from jaxshare.serving.engine import Engine

FINISHER = "finisher"
"""The block that the early finisher writes."""
FEED_WIDTH = 16
"""Tokens of a row that a pass feeds while any row has more than one pending, as openings of steps
and early-stop prompts have."""
_UNTIL_RESIZED = INT32_MAX
"""The first step without an opening, of a worker whose step has grown: it has none, and needs none
before its block has another extent."""


@dataclasses.dataclass
class SessionState:
    """A session: fixed parts first, then what changes while it runs.

    Attributes:
      settings: the arguments of `Workers` by name.
      loaded: the model as loaded; model: the same prepared for `context` tokens; module: its
        decoder with the session's attention backend.
      format, rule, make_layout, sampler: prompts, answers, layouts and sampling. The sampler has
        the format's forbidden tokens.
      texts: prompt and openings as tokens; instructions: the text of the prompt, in which answers
        are shown.
      growth: extents of the blocks as long as no step outgrows its own.
      engine, lease: the engine that the session is on, and the blocks' memory there, or None.
      automata: that find the ends of steps and of answers.
      roster: the workers, their rows and blocks; rows: the layout on the device.
      state: caches, rows and steps on the device.
      recorder: of the trace, if one is kept.
      reasons: for each worker why it is not running, or RUNNING.
      prepared: for each worker its first step without an opening on the device.
      people: names of the people who have spoken.
      answers: by budget. events: not yet yielded.
      error: the error where the session's finish reason is ERROR.
      passes, host_syncs, finish_reason, seconds, prefill_seconds, compile_seconds: see `Workers`.
      compiled: whether the decode loop has been compiled.
      unread: whether the last dispatch has not been read yet; versions: see `Result`.
    """

    settings: dict[str, Any]
    loaded: LoadedModel
    model: LoadedModel
    module: Decoder | ShardedDecoder
    context: int
    format: Format
    rule: AnswerRule
    make_layout: MakeLayout
    sampler: Sampler
    texts: SessionTexts
    instructions: str
    growth: Growth
    engine: "Engine | None"
    lease: KVLease | None
    automata: tuple[TokenAutomaton, TokenAutomaton]
    roster: Roster
    rows: Layout
    state: DecodeState
    recorder: Recorder | None
    reasons: dict[str, FinishReason]
    prepared: dict[str, int]
    prefill_seconds: float = 0.0
    people: set[str] = dataclasses.field(default_factory=set)
    answers: dict[int, Answer] = dataclasses.field(default_factory=dict)
    events: collections.deque[Event] = dataclasses.field(default_factory=collections.deque)
    passes: int = 0
    host_syncs: int = 0
    finish_reason: FinishReason | None = None
    error: NotANumberError | None = None
    seconds: float = 0.0
    compile_seconds: float = 0.0
    compiled: bool = False
    unread: bool = False
    versions: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.transcript = Transcript(
            self.texts.codec.decode, self.model.generation.stop_tokens, self.opening
        )

    def use_weights(self, model: LoadedModel) -> None:
        """Goes on with the weights and adapters of a model; see `SessionHost.follow_weights`."""
        now: dict[str, Any] = {"params": model.params, "adapters": model.adapters}
        self.loaded = dataclasses.replace(self.loaded, **now)
        self.model = dataclasses.replace(self.model, **now)

    @property
    def reencodes(self) -> bool:
        """Returns whether finished steps are encoded anew instead of rotated."""
        return self.settings["move"] == "reencode"

    @property
    def capacities(self) -> np.ndarray:
        """int32[B], of the blocks now."""
        return np.asarray(self.state.cache.capacities)

    @property
    def shares_passes(self) -> bool:
        """Returns whether its rows take part in the passes of an engine.

        Passes that are recorded, or that use another backend than the engine's, are its own.
        """
        return (
            self.engine is not None
            and self.recorder is None
            and self.module == self.engine.model.module
        )

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Counts the seconds of compilation."""
        start, before = compile_seconds(), self.compile_seconds
        try:
            yield
        finally:  # calls inside may have counted a part of this already
            self.compile_seconds = before + compile_seconds() - start

    @contextlib.contextmanager
    def device(self) -> Iterator[None]:
        """Holds the cache for work on it, and counts the seconds of compilation.

        The cache of a session on an engine must not be used outside of this.
        """
        with self.compiling(), self._attached():
            yield

    @contextlib.contextmanager
    def _attached(self) -> Iterator[None]:
        if self.lease is None:
            with interrupts_held_back():
                yield
            return
        with self.lease.exclusive(), interrupts_held_back():
            self.keep(self.lease.attach(self.state.cache))
            try:
                yield
            finally:
                self.lease.detach(self.state.cache)

    def keep(self, cache: KVCache) -> None:
        """Replaces the cache."""
        self.state = dataclasses.replace(self.state, cache=cache)

    def keep_lengths(self, lengths: Array) -> None:
        """Replaces the lengths of the blocks, int32[B]."""
        self.keep(dataclasses.replace(self.state.cache, lengths=lengths))

    def append_text(self, tokens: Sequence[int], block: str) -> bool:
        """Feeds a text to the end of a block, in passes of its own; `device` is held.

        Returns:
          True if the logits after it are finite.
        """
        number = self.roster.blocks.index(block)
        if self.recorder:
            self.recorder.text(tokens, number)
        is_finite, cache = prefill(self.model, tokens, self.state.cache, number)
        self.keep(cache)
        return is_finite

    def fail(self, name: str, passes: int) -> None:
        """Ends the session because a worker's logits are not finite after these passes."""
        self.finish_reason = FinishReason.ERROR
        self.error = NotANumberError.of(f"worker {name}", f"{passes} passes")

    def fail_all_that_see(self, block: str) -> None:
        """Ends the session because logits in a block that workers see are not finite.

        Its keys and values would not show it, because a cache holds finite values only.
        """
        names, sees = self.roster.names, self.roster.layout.sees
        self.fail(next((name for name in names if block in sees[name]), names[0]), self.passes)

    def check_finite(self) -> None:
        """Raises the NotANumberError that has ended the session, if one has."""
        if self.error:
            raise self.error

    def free_tokens(self, block: str) -> int:
        """The number of tokens that a block can still take."""
        number = self.roster.blocks.index(block)
        return int(self.state.cache.capacities[number] - self.state.cache.lengths[number])

    def opening(self, name: str, number: int, ask: bool = False) -> list[int]:
        """The tokens that open a worker's step."""
        return self.texts.opening(self.roster, name, number, ask)

    def has_grown(self, name: str) -> bool:
        """Returns whether a worker's step has outgrown its block and has another extent."""
        return name in self.roster.layout.moves and not self.growth.at_home(
            self.roster.block(name), self.capacities
        )

    def answer_of(self, step: Step) -> str | None:
        """The last valid answer in the sampled text of a step, or None.

        The step's header is left out: it would hide a fence after it.
        """
        return self.rule.extract(self.texts.codec.decode(step.tokens), self.instructions)

    def set_reason(self, name: str, old: FinishReason, new: FinishReason) -> None:
        """Changes a worker's finish reason if it is `old`.

        Raises:
          ValueError: no such worker.
        """
        row = self.roster.row(name)
        if self.reasons[name] is old:
            self.state, self.reasons[name] = self.state.end(row, new), new

    def update_layout(self) -> None:
        """Brings the device's layout in line with the roster."""
        steps = self.state.steps
        self.rows = self.model.adapted(self.roster.device_layout)
        steps = dataclasses.replace(
            steps, targets=placed(np.asarray(self.roster.targets, np.int32))
        )
        self.state = dataclasses.replace(self.state, layout=self.rows, steps=steps)

    def prepare_openings(self) -> None:
        """Gives the device openings for all steps that can end before the next host sync.

        Where the host ends steps there are none: in the ablation, and for a step that has grown.
        """
        steps, passes = self.state.steps, self.settings["passes_at_once"]
        capacity, changed = steps.openings.shape[1], steps
        for name, cursor in self.transcript.cursors.items():
            number = cursor.step.number
            if self.reencodes or number + passes < self.prepared[name]:
                continue
            pairs: Openings = ()
            if self.has_grown(name):
                self.prepared[name] = _UNTIL_RESIZED
            else:
                end = self.prepared[name] = number + 1 + capacity
                pairs = self.texts.later_openings(self.roster, name, range(number + 1, end))
            # On the host, where it starts no program for each row.
            changed = steps.openings_on_host() if changed is steps else changed
            changed = changed.prepare(cursor.row, number + 1, pairs)
        self.state = dataclasses.replace(self.state, steps=changed)


class SessionView:
    """The read-only part of a session.

    Attributes:
      model: prepared for the session's context.
      format: prompts and headers.
      budget: forward passes in all.
      settings: the arguments of `Workers` by name.
    """

    def __init__(self, session: SessionState):
        self._session = session
        self.model, self.format, self.settings = session.model, session.format, session.settings
        self.budget: int = session.settings["budget"]

    @property
    def names(self) -> tuple[str, ...]:
        """The workers that take part."""
        return self._session.roster.names

    @property
    def layout(self) -> WorkersLayout:
        """The blocks that each worker sees."""
        return self._session.roster.layout

    @property
    def rows(self) -> Layout:
        """The layout on the device."""
        return self._session.rows

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the cache's blocks; the index is the block's number."""
        return self._session.roster.blocks

    @property
    def reasons(self) -> dict[str, FinishReason]:
        """For each worker the reason why it does not write now, or RUNNING."""
        return dict(self._session.reasons)

    @property
    def block_lengths(self) -> dict[str, int]:
        """The tokens in each block that a worker sees, by the block's name."""
        lengths = np.asarray(self._session.state.cache.lengths).tolist()
        known = dict(zip(self.blocks, lengths, strict=True))
        return {block: known[block] for block in self.layout.blocks}

    @property
    def cache(self) -> KVCache:
        """The blocks as they are now; on an engine a copy.

        The next passes reuse its memory: look at it, do not keep it.
        """
        cache, lease = self._session.state.cache, self._session.lease
        return cache if lease is None else lease.snapshot(cache)

    @property
    def answers(self) -> dict[int, Answer]:
        """The answers at budgets of forward passes that have been taken so far."""
        return dict(self._session.answers)

    @property
    def passes(self) -> int:
        """Forward passes so far."""
        return self._session.passes

    @property
    def host_syncs(self) -> int:
        """The number of times that the host has waited for the device."""
        return self._session.host_syncs

    @property
    def waits(self) -> int:
        """The former name of `host_syncs`."""
        warn_renamed("Workers.waits", "host_syncs")
        return self.host_syncs

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the session is over, or None while a worker may go on: see `Result`."""
        return self._session.finish_reason

    @property
    def ended(self) -> str | None:
        """The former name of `finish_reason`, with the former words."""
        warn_renamed("Workers.ended", "Workers.finish_reason")
        return None if self.finish_reason is None else former_word(self.finish_reason)

    @property
    def seconds(self) -> float:
        """The seconds of the workers' passes: see `Result`."""
        return self._session.seconds

    @property
    def prefill_seconds(self) -> float:
        """The seconds of the passes over the prompt: see `Result`."""
        return self._session.prefill_seconds

    @property
    def compile_seconds(self) -> float:
        """The seconds of compilation: see `Result`."""
        return self._session.compile_seconds

    @property
    def trace(self) -> Trace:
        """The tokens fed so far, and the blocks that rows saw; without the finisher's guesses.

        Raises:
          ValueError: a session that keeps no trace.
        """
        session = self._session
        if session.recorder is None:
            raise ValueError("the session keeps no trace; create it with record=True")
        return session.recorder.trace(
            names=self.blocks,
            fingerprint=session.loaded.trace_fingerprint,
            context=session.context,
        )

    @property
    def steps(self) -> list[Step]:
        """All steps in the order in which they were finished, unfinished ones last."""
        return self._session.transcript.steps

    @property
    def drawn(self) -> dict[str, int]:
        """Tokens that each worker has sampled, one that stops it included."""
        return {name: cursor.read for name, cursor in self._session.transcript.cursors.items()}

    def row(self, name: str) -> int:
        """The row of a worker.

        Raises:
          ValueError: no such worker.
        """
        return self._session.roster.row(name)

    def pending(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens int32[R, T] of the next pass and their number int32[R].

        Rows are padded on the right.
        """
        state = self._session.state
        queues, heads, num_pending, running = (
            np.asarray(a) for a in (state.pending, state.head, state.num_pending, state.running)
        )
        count = np.where(running, np.minimum(num_pending, FEED_WIDTH), 0).astype(np.int32)
        width = max(1, count.max())
        return np.stack(
            [queue[head : head + width] for queue, head in zip(queues, heads, strict=True)]
        ), count

    def result(self, found: Mapping[int, Answer] | None = None) -> Result:
        """The result so far; `found` are the answers by budget."""
        cache, used_up = self._session.state.cache, self.passes >= self.budget
        return Result(
            self.names,
            self.steps,
            dict(found or {}),
            self.passes,
            self.finish_reason or (FinishReason.LENGTH if used_up else FinishReason.PAUSED),
            self.seconds,
            self.prefill_seconds,
            int(np.sum(np.asarray(cache.lengths))) * cache.token_bytes,
            self.compile_seconds,
            tuple(self._session.versions),
        )

    def answer_of(self, step: Step) -> str | None:
        """The last valid answer in the sampled text of a step, or None; its header is left out."""
        return self._session.answer_of(step)
