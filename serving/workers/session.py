"""Workers: a few streams that write at once over one shared cache and read each other's tokens as
they appear.

    session = Workers(model, "Solve: ...", names=("Alice", "Bob"))
    for event in session.stream():
        print(event.worker, event.step, event.text)
    print(session.finish().value)

Hogwild! Inference (sections 3 and 4.1, appendices A, C and E): the loop runs on the device and ends
steps there; the host looks in once in a few passes, to hand on the text.
"""

import collections
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare import DecodeState, FinishReason, KVCache, Layout, Sampler, decode
from jaxshare.compile_time import Stopwatch, compile_seconds
from jaxshare.decoding.steps import Mark, Steps
from jaxshare.models import LoadedModel
from jaxshare.seeds import seed_words, stream_seed
from jaxshare.serving.checkpoints import CheckpointStore, SavedCheckpoint
from jaxshare.serving.engine.prefill import prefill
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import cache_dtype, default_sampler
from jaxshare.serving.workers import checkpoint
from jaxshare.serving.workers.answers import AnswerRule, answer_rule
from jaxshare.serving.workers.block_sizes import capacities, rounded_budget
from jaxshare.serving.workers.checkpoint import SavedSession, SessionFacts
from jaxshare.serving.workers.endings import STOP_ON, finisher_tables, never, tables
from jaxshare.serving.workers.growth import Growth, Writer
from jaxshare.serving.workers.layouts import MOVES, MakeLayout, WorkersLayout, layout_maker
from jaxshare.serving.workers.prompts.format import Format
from jaxshare.serving.workers.prompts.presets import advises_sampling, format_of
from jaxshare.serving.workers.prompts.session_prompt import SessionTexts
from jaxshare.serving.workers.results import Answer, Result, check_finish_at
from jaxshare.serving.workers.roster import Roster, spare_blocks
from jaxshare.serving.workers.transcript import Event, Step, Transcript, codec_of
from jaxshare.trace.recorder import Recorder
from jaxshare.trace.trace import Trace

if TYPE_CHECKING:
    from jaxshare.serving.engine import Engine

FINISHER = "finisher"
PERSON = "User"

_WIDTH = 16
"""Tokens of a row that a pass feeds while any row has more than one: what opens steps, and what
asks for an answer."""
_OPENINGS = 64
"""How many steps of a worker the device has openings for, at least."""


def _with_device[**P, R](
    method: "Callable[Concatenate[Workers, P], R]",
) -> "Callable[Concatenate[Workers, P], R]":
    """Of a method that works with the cache."""

    @functools.wraps(method)
    def run(self: "Workers", *args: P.args, **kwargs: P.kwargs) -> R:
        begin, before = compile_seconds(), self.compile_seconds
        try:
            with self._device():
                return method(self, *args, **kwargs)
        finally:  # what it has called may have counted a part of this already
            self.compile_seconds = before + compile_seconds() - begin

    return run


class Workers:
    """A session of workers over one problem.

    Attributes:
      model: the model.
      format: prompts and headers.
      rows: the layout as the device has it.
      budget: forward passes in all; passes: those so far.
      kind: of answers.
      waits: how often the host has waited for the device.
      ended: why the session is over, or None: see `Result`.
      settings: what it was made with, by the names of `Workers`' arguments.
      seconds, prefill_seconds, compile_seconds: see `Result`.
    """

    def __init__(
        self,
        model: LoadedModel,
        problem: str,
        *,
        names: Sequence[str] = ("Alice", "Bob"),
        layout: str | WorkersLayout | MakeLayout = "combined",
        budget: int = 1024,
        format: Format | str | None = None,
        sampler: Sampler | None = None,
        seed: int = 0,
        ask_every: int = 1024,
        move: str = "rotate",
        max_workers: int | None = None,
        step_tokens: int = 512,
        history_tokens: int | None = None,
        kind: str | AnswerRule = "box",
        stop_on: str = "answer",
        finisher_tokens: int = 16,
        passes_at_once: int = 16,
        together: bool = True,
        implementation: str | None = None,
        engine: "Engine | None" = None,
        record: bool = False,
    ):
        """Encodes the prompt; nothing is written yet.

        Args:
          model: with a tokenizer.
          problem: the user's words.
          names: of the workers.
          layout: "contiguous", "interleaved" or "combined", a function that makes one for any
            names, or a layout of your own.
          budget: forward passes, which is also how many tokens a worker may sample.
          format: prompts and headers, or the name of a preset or file (`formats.format_named`);
            default the model's own, or else the collaborative prompt.
          sampler: how to sample; default the checkpoint's own settings. The format's forbidden
            tokens are added.
          seed: worker i, from 0, draws from the stream `jaxshare.seeds.stream_seed(seed, i)`; one
            that joins later has a stream of its own.
          ask_every: sampled tokens, all workers together, after which one of them is asked whether
            its work is redundant; 0 never asks.
          move: "rotate" moves a finished step as it is; "reencode" encodes it anew behind the
            history (the ablation of appendix E.1).
          max_workers: room for workers that join later; default len(names).
          step_tokens: room that is set aside for a step that moves, at least 16. A longer one gets
            more, up to the context: no step moves before it has ended.
          history_tokens: room for the prompt and all that moves behind it; default what the budget
            can need, within the context.
          kind: what counts as an answer: "box" is what stands in `\\boxed{...}`, "code" a Python
            program in a fenced block, and an `AnswerRule` decides as it likes (`box_answers`,
            `code_answers`). A box that is empty, repeats a placeholder of the prompt or has nothing
            in it that could be an answer is none, and neither is a block in another language or one
            that does not parse.
          stop_on: what ends the session before its budget: "answer", a step with a valid answer;
            "eos", a stop token of any worker; "never", nothing: workers do not sample stop tokens
            then.
          finisher_tokens: most tokens of an answer that `finish` asks for.
          passes_at_once: forward passes between two looks of the host. It never changes what is
            written.
          together: one worker's answer ends the session for all; False lets the others write on.
          implementation: attention backend.
          engine: an engine of the same model, in whose memory the blocks are to be, and with
            whose calls and other sessions the passes take turns. The memory for all that the
            session may write is taken at once, and goes back when the session is closed or is
            collected. What the workers write is what they write alone (for a model whose rotation
            depends on the length of the context: at the model's full context).
          record: keep a `trace` of all that is fed and of who sees what, which
            `jaxshare.models.reencode` computes again in one pass.

        Raises:
          ValueError: no workers, empty or repeated names, numbers out of range, a layout that
            cannot be, a prompt that does not fit the context, or a tokenizer that cannot write the
            separator.
          TooLongError, EngineError, ClosedError: as of `Engine.lease`, for a session on an engine.
        """
        watch = Stopwatch.start()
        names = tuple(names)
        check_names(names)
        room = len(names) if max_workers is None else max_workers
        _check_numbers(
            1, budget=budget, finisher_tokens=finisher_tokens, passes_at_once=passes_at_once
        )
        _check_numbers(_WIDTH, step_tokens=step_tokens)
        if ask_every < 0:
            raise ValueError(
                f"ask_every is {ask_every}; it must be at least 1 token, or 0 to ask nobody"
            )
        if room < len(names):
            raise ValueError(f"max_workers is {max_workers}, but there are {len(names)} workers")
        if move not in MOVES:
            raise ValueError(f"move is {move!r}; it must be {' or '.join(map(repr, MOVES))}")
        if stop_on not in STOP_ON:
            raise ValueError(f"stop_on is {stop_on!r}; it must be one of {', '.join(STOP_ON)}")
        self._rule = answer_rule(kind)
        if engine and model.params is not engine.model.params:
            raise ValueError("the engine is of another model; give the session engine.model")
        tokenizer: Any = model.tokenizer
        if tokenizer is None:
            raise ValueError(
                "workers need a model with a tokenizer; add the tokenizer's files to the model's "
                "folder"
            )
        if not problem.strip():
            raise ValueError("the problem is empty; give at least one word")
        self.format, sampler = format_of(model, format), sampler or default_sampler(model)
        warn_of_greedy(model, sampler, discouraged=advises_sampling(format))
        self.settings = dict[str, Any](
            problem=problem,
            names=names,
            layout=layout,
            budget=budget,
            format=self.format,
            sampler=sampler,
            seed=seed,
            ask_every=ask_every,
            move=move,
            max_workers=max_workers,
            step_tokens=step_tokens,
            history_tokens=history_tokens,
            kind=kind,
            stop_on=stop_on,
            finisher_tokens=finisher_tokens,
            passes_at_once=passes_at_once,
            together=together,
            record=record,
        )
        self._make_layout = layout_maker(layout)
        first = self._make_layout(names, self.format)
        first.check(names)
        self.budget, self.kind, self.passes, self.waits = budget, kind, 0, 0
        self._stop_on = stop_on
        self.ended: str | None = None
        self.seconds = 0.0
        self._reencodes, self._passes_at_once, self._finisher_tokens = (
            move == "reencode",
            passes_at_once,
            finisher_tokens,
        )
        self._people: set[str] = set()
        self._answers: dict[int, Answer] = {}  # by budget
        self._saves: CheckpointStore | None = None
        self._most = rounded_budget(budget) + 1  # tokens of a row
        self._events: collections.deque[Event] = collections.deque()
        self._reasons = dict.fromkeys(names, FinishReason.RUNNING)
        self._compiled = False

        codec = codec_of(tokenizer, model.config.vocab_size)
        ends, closes = tables(
            codec, self.format.separator, self._rule.automaton if stop_on == "answer" else never
        )
        # Workers that join may bring headers with them that one worker alone does without.
        spare = spare_blocks(room - len(names))
        headers = (
            {**self._make_layout((*names, *spare), self.format).texts, **first.texts}
            if spare
            else first.texts
        )
        headers = {block: codec.encode(text) for block, text in headers.items()}
        self._party = Roster.create(names, first, room=room, small=(*headers, FINISHER))
        self._texts = SessionTexts.of(codec, self.format, problem, self._party)
        self._told = self.format.instructions(names) + problem
        self._transcript = Transcript(codec.decode, model.generation.stop_tokens, self._opening)
        longest = self._texts.longest(self._party)
        finisher = (
            max(
                len(codec.encode(text))
                for text in (self.format.finisher, self.format.code_finisher)
            )
            + finisher_tokens
        )
        sizes = capacities(
            first,
            spare,
            context=model.config.max_positions,
            prompt=len(self._texts.prompt),
            problem=len(codec.encode(problem)),
            texts={b: len(t) for b, t in headers.items()} | {FINISHER: finisher},
            opening=longest,
            budget=budget,
            ask_every=ask_every,
            step_tokens=step_tokens,
            passes_at_once=passes_at_once,
            history_tokens=history_tokens,
        )
        needed = max(sum(sizes[b] for b in (*row, FINISHER)) for row in first.views(names[-1]))
        # An engine's memory holds keys that are rotated as for the whole context.
        self._context = model.config.max_positions if engine else needed
        self._loaded, self.model = model, model.for_context(self._context)
        model = self.model
        self._module = dataclasses.replace(model.module, implementation=implementation)
        blocks = [sizes.get(block, 0) for block in self.blocks]
        self._recorder = Recorder(len(blocks), blocks) if record else None
        self._guest = engine.lease(blocks) if engine else None
        with self._guest.exclusive() if self._guest else contextlib.nullcontext():
            cache = (
                self._guest.attach()
                if self._guest
                else KVCache.create(model.config, blocks, cache_dtype(model), mesh=model.mesh)
            )
            self._growth = Growth(np.asarray(cache.offsets), np.asarray(cache.capacities))
            cache = self._feed({first.prompt: self._texts.prompt, **headers}, cache)
            if self._guest:
                self._guest.detach(cache)

        self._sampler = dataclasses.replace(sampler, forbidden=self._forbidden(sampler))
        self._prepared = dict.fromkeys(self.names, 0)
        leads = [self._texts.lead(self._party, name) for name in self.names]
        for row, name in enumerate(self.names):
            self._transcript.join(name, row, 0, leads[row])
        steps = Steps.create(
            ends,
            closes,
            self._party.targets,
            room=self._most,
            openings=max(_OPENINGS, 2 * passes_at_once),
            longest=longest,
            together=together,
            on_stop=stop_on == "eos",
            ask_every=ask_every if self.format.question else 0,
            seed=seed,
        )
        self.rows = self._party.device_layout
        self._state = DecodeState.create(
            cache,
            self.rows,
            [*leads, *[[] for _ in spare]],
            vocab_size=model.config.vocab_size,
            samplers=self._sampler,
            seeds=seed,
            budgets=self._most,
            stops=model.generation.stop_tokens,
            max_width=_WIDTH,
            steps=steps,
            queue=len(self._texts.separator) + longest,
            record=passes_at_once if record else 0,
        )
        self._prepare()
        self.compile_seconds = watch.split()[1]

    def _forbidden(self, sampler: Sampler) -> tuple[int, ...]:
        """The tokens that workers must not sample: stop tokens only as far as `stop_on` leaves them
        a meaning."""
        stops = self.model.generation.stop_tokens
        tokens = {*sampler.forbidden, *self.format.forbidden_tokens(self.model.tokenizer)}
        return tuple(
            sorted(
                tokens - {*stops}
                if self._stop_on == "eos"
                else tokens | {*stops}
                if self._stop_on == "never"
                else tokens
            )
        )

    def _feed(self, texts: Mapping[str, Sequence[int]], cache: KVCache) -> KVCache:
        """What blocks begin with."""
        _, cache = prefill(self.model, [], cache, block=0)  # compiles
        watch = Stopwatch.start()
        for block, tokens in texts.items():
            if tokens:
                cache = self._prefilled(tokens, cache, block)
        jax.block_until_ready(cache.keys)
        self.prefill_seconds, _ = watch.split()
        return cache

    def _prefilled(self, tokens: Sequence[int], cache: KVCache, block: str) -> KVCache:
        """The cache with a text behind what stands in a block."""
        number = self.blocks.index(block)
        if self._recorder:
            self._recorder.text(tokens, number)
        return prefill(self.model, tokens, cache, number)[1]

    @contextlib.contextmanager
    def _device(self) -> Iterator[None]:
        """The cache is there to be worked with. On an engine it is not at other times."""
        if self._guest is None:
            yield
            return
        with self._guest.exclusive():
            self._keep(self._guest.attach(self._state.cache))
            try:
                yield
            finally:
                self._guest.detach(self._state.cache)

    def close(self) -> None:
        """Gives the memory back to the engine, and waits for a save that is under way. What was
        written can still be read."""
        if self._guest:
            self._guest.close()
        if self._saves:
            self._saves.close()
            self._saves = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the workers that take part."""
        return self._party.names

    @property
    def layout(self) -> WorkersLayout:
        """Which blocks each worker sees."""
        return self._party.layout

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the cache's blocks; the index is the block's number."""
        return self._party.blocks

    @property
    def cache(self) -> KVCache:
        """The blocks as they stand. The next passes take them over: look at them, do not keep them.
        On an engine this is a copy."""
        return self._state.cache if self._guest is None else self._guest.snapshot(self._state.cache)

    @property
    def trace(self) -> Trace:
        """What has been fed so far, and who saw what. The finisher's guesses are no part of it.

        Raises:
          ValueError: a session that keeps no trace.
        """
        if self._recorder is None:
            raise ValueError("the session keeps no trace; create it with record=True")
        return self._recorder.trace(
            names=self.blocks, fingerprint=self._loaded.trace_fingerprint, context=self._context
        )

    @property
    def steps(self) -> list[Step]:
        """All steps in the order in which they were finished, unfinished ones last."""
        return self._transcript.steps

    @property
    def drawn(self) -> dict[str, int]:
        """Tokens that each worker has sampled, one that stops it included."""
        return {name: voice.read for name, voice in self._transcript.voices.items()}

    def stream(self, until: int | None = None) -> Iterator[Event]:
        """Lets the workers write, and yields their text as it appears.

        Between two events workers may be paused, resumed, added and removed, and a person may
        speak; it takes effect with the next passes.

        Args:
          until: stop at this many forward passes in all; default the session's budget.
        """
        last = self.budget if until is None else min(until, self.budget)
        while self._events or self._runs(last):
            if not self._events:
                self._run(min(self._passes_at_once, last - self.passes))
            while self._events:
                yield self._events.popleft()

    def run(
        self,
        finish_at: Sequence[int] = (),
        *,
        on_event: Callable[[Event], None] | None = None,
        save_to: str | os.PathLike | None = None,
        save_every: int = 256,
        save_cache: bool = True,
    ) -> Result:
        """Runs to the end, and answers at several budgets on the way, which changes nothing of what
        the workers write.

        Args:
          finish_at: budgets of forward passes at which to take the answer; default the session's
            budget. A restored session knows those that it has answered at.
          on_event: called with the text as it appears.
          save_to: a folder to `save` to on the way, and at the end.
          save_every: forward passes between two saves.
          save_cache: save keys and values too; see `save`.

        Raises:
          ValueError: a budget to finish at that is below 1 or beyond the session's, fewer than 1
            pass between saves, or saves without keys and values of a session that keeps no trace.
          SaveError: see `save`.
        """
        check_finish_at(finish_at, self.budget)
        _check_numbers(1, save_every=save_every)
        if save_to:
            self._check_save(save_cache)
        budgets, saved = sorted(set(finish_at or [self.budget])), self.passes
        for budget in [*budgets, None]:
            for event in self.stream(budget):
                if on_event:
                    on_event(event)
                if save_to and not self._events and self.passes >= saved + save_every:
                    self.save(save_to, cache=save_cache)
                    saved = self.passes
            # A session that was restored beyond a budget can not go back to it.
            if budget is not None and not (budget < self.passes and self._answers.get(budget)):
                self._answers[budget] = self.finish()
        if save_to:
            self.save(save_to, cache=save_cache, wait=True)
        return self.result({budget: self._answers[budget] for budget in budgets})

    def result(self, found: Mapping[int, Answer] | None = None) -> Result:
        """What there is so far; `found` are the answers by budget."""
        ended = self.ended or ("budget" if self.passes >= self.budget else "paused")
        kv_bytes = (
            int(np.sum(np.asarray(self._state.cache.lengths))) * self._state.cache.token_bytes
        )
        return Result(
            self.names,
            self.steps,
            dict(found or {}),
            self.passes,
            ended,
            self.seconds,
            self.prefill_seconds,
            kv_bytes,
            self.compile_seconds,
        )

    @_with_device
    def finish(self, *, sees: Sequence[str] | None = None) -> Answer:
        r"""The answer that the workers have given, or else their best guess now (section 4.1,
        appendix C).

        For a guess the early-stop prompt is fed to a block of its own, after all that any worker
        has written, unfinished steps included, and a bounded number of tokens is sampled greedily.
        The session goes on afterwards as though nothing had been asked.

        Args:
          sees: the blocks to guess from, in order; default `WorkersLayout.overview`. Given, no
            answer is taken from the workers' words.

        Raises:
          ValueError: a block that there is not, or blocks that are longer than the context
            together.
        """
        steps = [step for step in self.steps if step.worker not in self._people]
        if (
            sees is None
            and (value := next(filter(None, map(self.answer_of, reversed(steps))), None))
            is not None
        ):
            return Answer(value, "".join(step.text for step in steps), self.passes, 0)
        sees = self.layout.overview(self.names[-1]) if sees is None else sees
        blocks = self._party.numbers([*sees, FINISHER])
        prompt = self.format.code_finisher if self._rule.code else self.format.finisher
        codec = self._texts.codec
        known, room = (
            int(np.sum(np.asarray(self._state.cache.lengths)[blocks[:-1]])),
            int(self._capacities[blocks[-1]]),
        )
        if known + room > (context := self._loaded.config.max_positions):
            raise ValueError(
                f"{', '.join(sees)} have {known} tokens together, and the early-stop prompt needs "
                f"room for {room}, but the model's context holds {context}; name fewer blocks in "
                "sees"
            )
        no_step, closes, start = finisher_tables(codec, prompt, self._rule.automaton)
        steps = Steps.create(no_step, closes, [-1], room=self._finisher_tokens, at_once=True)
        layout = Layout.from_blocks([blocks], width=len(self.blocks))
        lengths = self._state.cache.lengths + 0
        state = DecodeState.create(
            self._flushed(),
            layout,
            [codec.encode(prompt)],
            vocab_size=self.model.config.vocab_size,
            budgets=self._finisher_tokens,
            max_width=_WIDTH,
            samplers=dataclasses.replace(self._sampler, temperature=0.0),
            stops=self.model.generation.stop_tokens,
            steps=dataclasses.replace(steps, answer_state=steps.answer_state + start),
        )
        state = decode(
            self._module,
            self.model.params,
            state,
            passes=state.pending.shape[1] + self._finisher_tokens,
            width=_WIDTH,
        )
        stops = self.model.generation.stop_tokens
        text = prompt + codec.decode([token for token in state.outputs()[0] if token not in stops])
        self._keep(dataclasses.replace(state.cache, lengths=lengths))
        return Answer(
            self._rule.extract(text) or self._rule.guess(text), text, self.passes, int(state.passes)
        )

    def answer_of(self, step: Step) -> str | None:
        """The last valid answer in what was sampled for a step, or None. Its header is left out: it
        would hide a fence behind it."""
        return self._rule.extract(self._texts.codec.decode(step.tokens), self._told)

    def _flushed(self, recorder: Recorder | None = None) -> KVCache:
        """The cache with what each worker has sampled last, which otherwise the next pass would
        feed, and will, to the same place."""
        state = self._state
        waiting, head, drawn = (np.asarray(a) for a in (state.waiting, state.head, state.drawn))
        room = np.asarray(state.cache.lengths < state.cache.capacities)[self._party.writes]
        taken = np.asarray([name is not None for name in self._party.rows], bool)
        count = taken & (waiting > 0) & (head == 0) & (drawn > 0) & room
        tokens = np.asarray(state.pending)[:, :1]
        if recorder:
            recorder.feed(
                [new[:n] for new, n in zip(tokens.tolist(), count.tolist(), strict=True)],
                self._party.listed,
            )
        return self.model.forward(tokens, count.astype(np.int32), state.cache, self.rows)[1]

    @_with_device
    def say(self, text: str, name: str = PERSON) -> None:
        """A person speaks: the text lands behind the history as a step of its own, which all
        workers read from the next pass on.

        Raises:
          ValueError: no text, more than the history has room for, or the name of a worker.
        """
        if not text.strip():
            raise ValueError("there is nothing to say; give at least one word")
        if name in self.names:
            raise ValueError(
                f"{name} is a worker of this session; a person speaks under another name"
            )
        number = 1 + sum(step.worker == name for step in self.steps)
        step = Step(
            name,
            number,
            self.format.opening(name, number, names=()) + text,
            self.passes,
            self.passes,
        )
        tokens, block = self._texts.said(step.text), self.layout.prompt
        if len(tokens) > (room := self._room(block)):
            raise ValueError(
                f"what {name} says has {len(tokens)} tokens, but the block {block!r} has room for "
                f"{room} more; say less, or create the session with more history_tokens"
            )
        self._keep(self._prefilled(tokens, self._state.cache, block))
        self._people.add(name)
        self._transcript.finished.append(step)

    def pause(self, name: str) -> None:
        """A worker stops where it is; the others see what it has written so far. Does nothing to
        one that has ended."""
        self._turn(name, FinishReason.RUNNING, FinishReason.PAUSED)

    def resume(self, name: str) -> None:
        """A paused worker goes on."""
        self._turn(name, FinishReason.PAUSED, FinishReason.RUNNING)

    @_with_device
    def add(self, name: str, layout: WorkersLayout | None = None) -> None:
        """A worker joins and begins its first step with the next pass.

        Args:
          name: of the worker.
          layout: of all workers from now on; needed where the session has a layout of your own. The
            one block that may be new in it is that which the worker writes.

        Raises:
          ValueError: a name that is taken or empty, no room for one more worker, or a layout that
            does not fit.
        """
        check_names((*self.names, name))
        if None not in self._party.rows:
            raise ValueError(
                f"the session has room for {len(self._party.rows)} workers; create it with a "
                f"larger max_workers to add {name}"
            )
        if self.ended:
            raise ValueError(
                f"the session is over ({self.ended}), so {name} cannot join it; start another one"
            )
        assert self._state.steps is not None
        longest, opening = (
            self._state.steps.openings.shape[-1],
            self._texts.codec.encode(self.format.opening(name, 10**6, ask=True)),
        )
        if len(opening) > longest:
            raise ValueError(
                f"a step of {name} would open with {len(opening)} tokens, but the session has room "
                f"for {longest}; choose a shorter name"
            )
        self._party = self._party.joined(
            name, layout or self._make_layout((*self.names, name), self.format)
        )
        row, lead = self.row(name), self._texts.lead(self._party, name)
        self._reasons[name] = FinishReason.RUNNING
        self._transcript.join(name, row, self.passes, lead)
        self._prepared[name] = 0
        self._relayout()
        state = self._state
        assert state.steps is not None
        self._state = dataclasses.replace(
            state,
            reasons=state.reasons.at[row].set(FinishReason.RUNNING.value),
            ready=state.ready.at[row].set(False),
            drawn=state.drawn.at[row].set(0),
            waiting=state.waiting.at[row].set(0),
            # Not that of a worker who had the row before, and who drew from the same positions.
            seeds=state.seeds.at[row].set(
                seed_words([stream_seed(self.settings["seed"], "joined", row, self.passes)])[0]
            ),
            steps=dataclasses.replace(
                state.steps.begin(row, 1), due=state.steps.due.at[row].set(False)
            ),
        ).feed(row, lead)
        self._prepare()

    @_with_device
    def remove(self, name: str) -> None:
        """A worker leaves. What its block holds moves to the end of the history (of the prompt,
        where there is none).

        Raises:
          ValueError: no such worker, the last one, or no room for what it has written.
        """
        row = self.row(name)
        if len(self.names) == 1:
            raise ValueError(f"{name} is the only worker; a session needs at least one")
        block = self.layout.moves.get(name, self.layout.prompt)
        number, target, lengths = (
            self._party.block(name),
            self.blocks.index(block),
            self._state.cache.lengths + 0,
        )
        if int(lengths[number]) >= (
            room := self._room_for(int(lengths[number]) + 1, target, number)
        ):
            raise ValueError(
                f"{name} has {int(lengths[number])} tokens in its block, but the block {block!r} "
                f"has room for {room} more; create the session with more history_tokens"
            )
        cache = self._flushed(self._recorder)
        self._keep(
            dataclasses.replace(cache, lengths=lengths.at[number].set(cache.lengths[number]))
        )
        if self._recorder:
            for other, length in enumerate(np.asarray(self._state.cache.lengths).tolist()):
                self._recorder.cut(other, length)
        self._take_in(number, target)
        self._transcript.leave(name, self.passes)
        del self._reasons[name]
        self._party = self._party.left(name)
        self._state = self._state.end(row, FinishReason.UNUSED)
        self._relayout()

    # Saves.

    @_with_device
    def save(self, folder: str | os.PathLike, *, cache: bool = True, wait: bool = False) -> int:
        """Saves the session as it stands between two passes; see `restore`.

        It is written in the background, and is there as a whole or not at all: killed in the midst
        of it, what was saved before is restored. The two newest saves of a folder are kept. Where
        several processes run the session, all must call this.

        Args:
          folder: of this session's saves; made if it is not there.
          cache: with keys and values. Without them the save of a session that keeps a trace is
            small, and `restore` computes them again from the trace (Hogwild! Inference, appendix
            B), which costs what a prompt of all that was fed costs.
          wait: come back when it is written. `close` waits, too.

        Returns:
          The number of the save.

        Raises:
          ValueError: keys and values are to be left out, but the session keeps no trace.
          SaveError: it cannot be written, or the one before it could not.
        """
        self._check_save(cache)
        self._saves = CheckpointStore.of(folder, self._saves)
        return checkpoint.write(
            self._saves,
            self._facts(),
            self._state,
            self.trace if self._recorder else None,
            cache=cache,
            kv_repeats=self.model.kv_repeats,
            wait=wait,
        )

    def _check_save(self, cache: bool) -> None:
        if not cache and self._recorder is None:
            raise ValueError(
                "the session keeps no trace, so keys and values cannot be left out of a save; "
                "create it with record=True"
            )

    @classmethod
    def restore(
        cls,
        model: LoadedModel,
        folder: str | os.PathLike,
        *,
        number: int | None = None,
        layout: WorkersLayout | MakeLayout | None = None,
        kind: AnswerRule | None = None,
        passes_at_once: int | None = None,
        implementation: str | None = None,
        engine: "Engine | None" = None,
    ) -> "Workers":
        """A session as it was saved, on however many devices. One that kept a trace goes on with
        it.

        It goes on exactly as the one that was saved would have. Where keys and values were left out
        of the save, that holds in float32: computed again they are the same to rounding, which in
        bfloat16 and float16 may be enough for another token.

        Args:
          model: the same, on any mesh or none.
          folder: that the session was saved to.
          number: of the save; default the newest.
          layout, kind: the function and the rule that the session was made with, if it was made
            with one of its own, which cannot be saved.
          passes_at_once, implementation, engine: as for `Workers`.

        Raises:
          SaveError: no save, one that cannot be read or is damaged, one of another model or
            tokenizer, or one of an engine's session that cannot go on without an engine, or the
            other way round (models whose rotation depends on the length of the context alone).
          ValueError: a layout or a kind that is needed and not given.
          TooLongError, EngineError, ClosedError: see `Engine.workers`.
        """
        with SavedCheckpoint(folder, number) as save:
            saved = SavedSession(save)
            settings = saved.settings(model, layout, kind)
            if passes_at_once is not None:
                settings["passes_at_once"] = passes_at_once
            session = cls(model, **settings, implementation=implementation, engine=engine)
            saved.check(model, session._texts.codec.fingerprint, session._context)
            session._take_over(saved)
        return session

    def _facts(self) -> SessionFacts:
        return SessionFacts(
            model=self._loaded.fingerprint,
            tokenizer=self._texts.codec.fingerprint,
            context=self._context,
            settings=self.settings,
            party=self._party,
            passes=self.passes,
            waits=self.waits,
            ended=self.ended,
            seconds=self.seconds,
            prefill_seconds=self.prefill_seconds,
            reasons=self._reasons,
            prepared=self._prepared,
            people=self._people,
            transcript=self._transcript.facts(),
            events=self._events,
            answers=self._answers,
        )

    @_with_device
    def _take_over(self, saved: SavedSession) -> None:
        """Becomes the session that was saved. This one has just been made, with the same
        settings."""

        def room_for(cache: KVCache, lengths: np.ndarray) -> KVCache:
            extents = self._extents(cache, lengths, {})
            return (
                cache.relocate([*extents], *zip(*extents.values(), strict=True))
                if extents
                else cache
            )

        facts = saved.facts
        self._party = facts.party
        self._state, trace = saved.state(self._state, self._loaded, room_for)
        self.rows = self._state.layout
        self._recorder = Recorder.of(trace, trace.capacities.tolist()) if trace else None
        self.passes, self.waits, self.ended = facts.passes, facts.waits, facts.ended
        self.seconds, self.prefill_seconds = facts.seconds, facts.prefill_seconds
        self._reasons, self._prepared, self._people = (
            {**facts.reasons},
            {**facts.prepared},
            {*facts.people},
        )
        self._transcript.take_over(facts.transcript)
        self._events, self._answers = collections.deque(facts.events), {**facts.answers}

    def row(self, name: str) -> int:
        """The row of a worker.

        Raises:
          ValueError: no such worker.
        """
        return self._party.row(name)

    def pending(self) -> tuple[np.ndarray, np.ndarray]:
        """What the next pass will feed: tokens int32[R, T], padded on the right, and count
        int32[R]."""
        state = self._state
        queues, heads, waiting, running = (
            np.asarray(a) for a in (state.pending, state.head, state.waiting, state.running)
        )
        count = np.where(running, np.minimum(waiting, _WIDTH), 0).astype(np.int32)
        width = max(1, count.max())
        return np.stack(
            [queue[head : head + width] for queue, head in zip(queues, heads, strict=True)]
        ), count

    # What the device runs, and what comes back.

    def _runs(self, last: int) -> bool:
        return (
            self.ended is None
            and self.passes < last
            and FinishReason.RUNNING in self._reasons.values()
        )

    @_with_device
    def _run(self, passes: int) -> None:
        """Some passes in one dispatch, then one look at what they wrote."""
        watch = Stopwatch.start()
        self._make_room(passes)
        self._prepare()
        settings: dict[str, Any] = dict(
            width=_WIDTH, until_any=self._reencodes or any(map(self._is_away, self.names))
        )
        if not self._compiled:
            self._state = jax.block_until_ready(
                decode(self._module, self.model.params, self._state, passes=0, **settings)
            )
            self._compiled = True
        self._state = state = decode(
            self._module, self.model.params, self._state, passes=passes, **settings
        )
        steps = state.steps
        assert steps is not None
        seen = jax.device_get(
            {
                "passes": state.passes,
                "drawn": state.drawn,
                "reasons": state.reasons,
                "tokens": state.tokens,
                "marks": steps.marks,
                "at": steps.at,
                "faults": state.cache.faults,
                "record": state.record,
            }
        )
        self.waits += 1
        if seen["faults"]:
            self._state.cache.check()
        self.passes = int(seen["passes"])
        if self._recorder:
            self._recorder.read(
                seen["record"], self.passes, self._party.listed, self._party.targets
            )
        self._events.extend(self._transcript.read(seen))
        before, self._reasons = (
            self._reasons,
            {name: FinishReason(int(seen["reasons"][self.row(name)])) for name in self.names},
        )
        last = {
            name: Mark(int(seen["marks"][row, drawn - 1]))
            if (drawn := int(seen["drawn"][row]))
            else Mark(0)
            for name in self.names
            for row in [self.row(name)]
        }
        self._check_answers(
            [
                name
                for name in self.names
                if self._reasons[name] is FinishReason.ANSWER is not before[name]
            ],
            last,
        )
        self.ended = self._over()
        for name in sorted(
            (name for name, reason in self._reasons.items() if reason is FinishReason.STEP),
            key=self.row,
        ):
            if self.ended is None:
                self._end_step(name, Mark.ASKED in last[name])
        self.seconds += watch.split()[0]

    def _check_answers(self, names: Sequence[str], last: Mapping[str, Mark]) -> None:
        """Lets workers go on that have ended because an answer has closed, where none of their
        answers is valid.

        Args:
          names: the workers that have just ended so, all of them where they end together.
          last: what happened at the token that each has sampled last.
        """
        if self._stop_on != "answer":
            return
        ended = [step for step in self._transcript.finished if step.answer]
        for group in [names] if self.settings["together"] else [[name] for name in names]:
            if any(self.answer_of(step) is not None for step in ended if step.worker in group):
                continue
            for name in group:
                voice, stops = self._transcript.voices[name], self.model.generation.stop_tokens
                stopped = (
                    bool(voice.read) and int(self._state.tokens[voice.row, voice.read - 1]) in stops
                )
                reason = (
                    FinishReason.STOP
                    if stopped
                    else FinishReason.STEP
                    if Mark.STEP in last[name]
                    else FinishReason.RUNNING
                )
                self._state, self._reasons[name] = self._state.end(voice.row, reason), reason

    def _over(self) -> str | None:
        """Why the session is over, or None while a worker may go on."""
        ended = _ended(self._reasons.values())
        return "stopped" if ended == "answer" and self._stop_on == "eos" else ended

    def _end_step(self, name: str, asked: bool) -> None:
        """What the device does at the end of a step, where it has left that to the host: the step
        has outgrown its block, or it is encoded anew behind what it moves to, seeing that alone."""
        row, source = self.row(name), self._party.block(name)
        if block := self.layout.moves.get(name):
            target, count = self.blocks.index(block), int(self._state.cache.lengths[source])
            if count > self._room_for(count, target, source):
                self.ended = "full"
                return
            if self._reencodes:
                tokens = self._transcript.voices[name].block[-count - 1 : -1]
                self._keep(_clear(self._state.cache, source))
                if self._recorder:
                    self._recorder.cut(source, 0)
                self._make_room(0)
                self._keep(self._prefilled(tokens, self._state.cache, block))
            else:
                self._take_in(source, target)
        opening = self._transcript.turn(name, self.passes, asked=asked)
        assert self._state.steps is not None
        self._state = dataclasses.replace(
            self._state,
            steps=self._state.steps.begin(row, self._transcript.voices[name].step.number),
        )
        self._state = (
            self._state.feed(row, opening)
            if opening
            else self._state.end(row, FinishReason.RUNNING)
        )
        self._reasons[name] = FinishReason.RUNNING

    # Room for long steps.

    def _is_away(self, name: str) -> bool:
        """Whether a worker's step has outgrown its block and been given another extent."""
        return name in self.layout.moves and not self._growth.at_home(
            self._party.block(name), self._capacities
        )

    @property
    def _capacities(self) -> np.ndarray:
        return np.asarray(self._state.cache.capacities)

    def _make_room(self, passes: int, reserve: int = 0) -> None:
        """Gives every step the room that it may need in so many passes, and takes back what is not
        needed: all of what steps had that have moved, and with `reserve` as much as leaves room for
        so many tokens where steps move to."""
        waiting = np.asarray(self._state.waiting)
        needs = {
            name: int(waiting[self.row(name)]) + passes + 1
            for name, reason in self._reasons.items()
            if reason is FinishReason.RUNNING
        }
        cache = self._state.cache
        extents = self._extents(cache, np.asarray(cache.lengths), {} if reserve else needs, reserve)
        if not extents:
            return
        self._keep(cache.relocate([*extents], *zip(*extents.values(), strict=True)))
        # where a step is away the host ends it, and nothing is prepared
        self._prepared = dict.fromkeys(self._prepared, 0)
        if self._recorder:
            for block, (_, capacity) in extents.items():
                self._recorder.widen(block, capacity)

    def _extents(
        self, cache: KVCache, lengths: np.ndarray, needs: Mapping[str, int], reserve: int = 0
    ) -> dict[int, tuple[int, int]]:
        """The blocks that must lie elsewhere in a cache where blocks have int[B] lengths and
        workers need room for more tokens."""
        writers = []
        for name in self.names:
            if moves := self.layout.moves.get(name):
                block, target = self._party.block(name), self.blocks.index(moves)
                writers.append(
                    Writer(block, target, needs.get(name, 0), self._most_tokens(name, target))
                )
        return self._growth.extents(
            writers,
            np.asarray(cache.offsets),
            np.asarray(cache.capacities),
            lengths,
            reserve=reserve,
        )

    def _most_tokens(self, name: str, target: int) -> int:
        """Tokens that a worker's block may ever have: what the others see beside it must leave room
        for it in the context."""
        block, sizes = self._party.block(name), self._growth.capacities
        others = [
            int(sum(sizes[b] for b in row if b != block))
            for row in self._party.listed
            if block in row and target not in row
        ]
        return self._context - max(others, default=0)

    def _room_behind(self, target: int, source: int) -> int:
        """Tokens of the source that fit behind the target. The source's own extent counts where it
        lies next behind the target's."""
        cache = self._state.cache
        offsets, ends = np.asarray(cache.offsets), np.asarray(cache.offsets + cache.capacities)
        next_behind = offsets[source] == ends[target] and not self._growth.at_home(
            source, self._capacities
        )
        end = ends[source] if next_behind else ends[target]
        return int(end - offsets[target] - cache.lengths[target])

    def _room_for(self, count: int, target: int, source: int) -> int:
        """As `_room_behind`, after other long steps have made way where that is needed for so many
        tokens."""
        if count > self._room_behind(target, source):
            self._make_room(0, reserve=count)
        return self._room_behind(target, source)

    def _take_in(self, source: int, target: int) -> None:
        """Moves a block that is known to fit to the end of another."""
        room = self._room_behind(target, source)
        cache = self._state.cache
        # The extents overlap for the moment: what the target takes of the source's has been read by
        # then.
        cache = dataclasses.replace(
            cache, capacities=cache.capacities.at[target].set(cache.lengths[target] + room)
        )
        self._keep(_moved(cache, source, target))
        if self._recorder:
            self._recorder.move(source, target)
        self._make_room(0)

    def _prepare(self) -> None:
        """Sees to it that the device has openings for all steps that can end before the host looks
        in again."""
        for name, voice in self._transcript.voices.items():
            number, steps = voice.step.number, self._state.steps
            assert steps is not None
            if self._reencodes or number + self._passes_at_once < self._prepared[name]:
                continue
            if self._is_away(name):
                self._state = dataclasses.replace(
                    self._state, steps=steps.prepare(voice.row, number + 1, [])
                )
            else:
                count = steps.openings.shape[1]
                pairs = [
                    (self._opening(name, n), self._opening(name, n, True))
                    for n in range(number + 1, number + 1 + count)
                ]
                self._state = dataclasses.replace(
                    self._state, steps=steps.prepare(voice.row, number + 1, pairs)
                )
                self._prepared[name] = number + 1 + count

    @_with_device
    def _turn(self, name: str, old: FinishReason, new: FinishReason) -> None:
        row = self.row(name)
        if self._reasons[name] is old:
            self._state, self._reasons[name] = self._state.end(row, new), new

    def _keep(self, cache: KVCache) -> None:
        self._state = dataclasses.replace(self._state, cache=cache)

    def _room(self, block: str) -> int:
        number = self.blocks.index(block)
        return int(self._state.cache.capacities[number] - self._state.cache.lengths[number])

    def _relayout(self) -> None:
        steps = self._state.steps
        assert steps is not None
        self.rows = self._party.device_layout
        steps = dataclasses.replace(steps, targets=jnp.asarray(self._party.targets, jnp.int32))
        self._state = dataclasses.replace(self._state, layout=self.rows, steps=steps)

    def _opening(self, name: str, number: int, ask: bool = False) -> list[int]:
        return self._texts.opening(self._party, name, number, ask)


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for no workers, and for names that are empty or not each its own."""
    if (
        not names
        or not all(isinstance(name, str) and name.strip() for name in names)
        or len(set(names)) < len(names)
    ):
        raise ValueError(f"workers need names, each its own; got {list(names)}")


def _check_numbers(least: int, **numbers: int) -> None:
    if low := [name for name, value in numbers.items() if value < least]:
        raise ValueError(f"{low[0]} is {numbers[low[0]]}; it must be at least {least}")


def _ended(reasons: Collection[FinishReason]) -> str | None:
    """Why a session is over whose workers have stopped for these reasons, or None while one of them
    may go on."""
    if FinishReason.ANSWER in reasons and not {FinishReason.RUNNING, FinishReason.PAUSED} & set(
        reasons
    ):
        return "answer"
    if {FinishReason.RUNNING, FinishReason.PAUSED, FinishReason.STEP} & set(reasons):
        return None
    return (
        "full"
        if FinishReason.FULL in reasons
        else "budget"
        if FinishReason.BUDGET in reasons
        else "stopped"
    )


_clear = jax.jit(KVCache.clear, donate_argnums=0)
_moved = jax.jit(KVCache.move, donate_argnums=0)
