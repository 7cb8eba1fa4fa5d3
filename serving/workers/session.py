"""Workers: a few streams that write at once over one shared cache and read each other's tokens.

    session = Workers(model, "Solve: ...", names=("Alice", "Bob"))
    for event in session.stream():
        print(event.worker, event.step, event.text)
    print(session.finish().value)

Hogwild! Inference (sections 3 and 4.1, appendices A, C and E): the loop runs on the device and ends
steps there; the host syncs once in a few passes, to yield the text.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

from jaxshare import FinishReason, Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.checkpoints import CheckpointStore, SavedCheckpoint
from jaxshare.serving.workers import checkpoint, dispatch, finisher, membership
from jaxshare.serving.workers.layouts import MakeLayout, WorkersLayout
from jaxshare.serving.workers.prompts.format import Format
from jaxshare.serving.workers.results import Answer, Result, check_finish_at
from jaxshare.serving.workers.session_state import SessionView
from jaxshare.serving.workers.setup import check_min, create_session
from jaxshare.serving.workers.text.answers import AnswerRule
from jaxshare.serving.workers.text.transcript import Event

if TYPE_CHECKING:
    from jaxshare.serving.engine import Engine

PERSON = "User"


class Workers(SessionView):
    """A session of workers over one problem.

    Args:
      model: with a tokenizer.
      problem: the user's words.
      names: of the workers.
      layout: "contiguous", "interleaved" or "combined", a function that makes one for any names, or
        a layout of your own.
      budget: forward passes, which is also the number of tokens that a worker may sample.
      format: prompts and headers, or the name of a preset or file (`presets.format_named`); default
        the model's own, or else the collaborative prompt.
      sampler: how to sample; default the checkpoint's own settings. The format's forbidden tokens
        are added.
      seed: by default that of the sampler, or 0. Worker i, from 0, draws from the stream
        `jaxshare.seeds.stream_seed(seed, i)`; one that joins later has a stream of its own.
      ask_every: sampled tokens, all workers together, after which one of them is asked whether its
        work is redundant; 0 never asks.
      move: "rotate" moves a finished step as it is; "reencode" encodes it anew after the history
        (the ablation of appendix E.1).
      max_workers: capacity for workers that join later; default len(names).
      step_tokens: capacity of a step that moves, at least 16. A longer one gets more, up to the
        context: no step moves before it has ended.
      history_tokens: capacity for the prompt and all that moves after it; default what the budget
        can need, within the context.
      kind: what counts as an answer: "box" is the content of `\\boxed{...}`, "code" a Python
        program in a fenced block, and an `AnswerRule` a rule of your own (`box_answers`,
        `code_answers`). A box that is empty, repeats a placeholder of the prompt or holds nothing
        that could be an answer is none, and neither is a block in another language or one that does
        not parse.
      stop_on: the event that ends the session before its budget: "answer", a step with a valid
        answer; "eos", a stop token of any worker; "never", none: workers do not sample stop tokens
        then.
      finisher_tokens: the most tokens of an answer that `finish` samples.
      passes_at_once: the most forward passes between two host syncs; by default 16, or as many as
        a dispatch of the engine has. It never changes what is written.
      together: one worker's answer ends the session for all; False lets the others write on.
      implementation: attention backend.
      engine: an engine of the same model, which has the blocks in its memory. The workers' rows run
        in the same passes as its requests and other sessions (run sessions in threads of their own
        for that). The memory for all that the session may write is taken at once, and released when
        the session is closed or collected. Workers write what they
        write without an engine (for a model whose rotation depends on the length of the context: at
        the model's full context).
      record: keep a `trace` of all that is fed and of the blocks that each row sees, which
        `jaxshare.models.reencode` computes again in one pass.

    Raises:
      ValueError: no workers, empty or repeated names, numbers out of range, an invalid layout, a
        prompt that does not fit the context, or a tokenizer that cannot write the separator.
      TooLongError, EngineError, ClosedError: as `Engine.lease`, for a session on an engine.

    Attributes:
      kind: of answers; see `SessionView` for the others.
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
        seed: int | None = None,
        ask_every: int = 1024,
        move: str = "rotate",
        max_workers: int | None = None,
        step_tokens: int = 512,
        history_tokens: int | None = None,
        kind: str | AnswerRule = "box",
        stop_on: str = "answer",
        finisher_tokens: int = 16,
        passes_at_once: int | None = None,
        together: bool = True,
        implementation: str | None = None,
        engine: "Engine | None" = None,
        record: bool = False,
    ):
        """Encodes the prompt; nothing is written yet."""
        settings = dict(
            problem=problem,
            names=names,
            layout=layout,
            budget=budget,
            format=format,
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
        super().__init__(
            create_session(model, settings, implementation=implementation, engine=engine)
        )
        self.kind = kind
        self._saves: CheckpointStore | None = None

    def close(self) -> None:
        """Releases memory on an engine, and waits for a save in progress.

        What was written can still be read.
        """
        if self._session.lease:
            self._session.lease.close()
        if self._saves:
            self._saves.close()
            self._saves = None

    def __repr__(self) -> str:
        """A line: who takes part, how far they are, and what they see."""
        states = {name: reason for name, reason in self.reasons.items() if reason}
        workers = [f"{each} ({states[each]})" if each in states else each for each in self.names]
        end = f", over: {self.finish_reason}" if self.finish_reason is not None else ""
        layout = self.settings["layout"]
        kind = layout if isinstance(layout, str) else "a layout of its own"
        return f"<Workers {', '.join(workers)}: {self.passes} of {self.budget} passes, {kind}{end}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _device(self) -> contextlib.AbstractContextManager[None]:
        """Holds the cache for work on it, after all of it has been read."""
        dispatch.read_unread(self._session)
        return self._session.device()

    def stream(self, until: int | None = None) -> Iterator[Event]:
        """Lets the workers write, and yields their text as it appears.

        Between two events workers may be paused, resumed, added and removed, and a person may
        speak; it takes effect with the next passes.

        Args:
          until: stop at this many forward passes in all; default the session's budget.

        Raises:
          NotANumberError: a worker's logits are not finite. It ends the session for all workers,
            and comes after all that was written before.
        """
        session, last = self._session, self.budget if until is None else min(until, self.budget)
        while session.events or dispatch.can_run(session, last):
            if not session.events:
                passes = min(session.settings["passes_at_once"], last - session.passes)
                dispatch.run_passes(session, passes)
            while session.events:
                yield session.events.popleft()
        session.check_finite()

    def run(
        self,
        finish_at: Sequence[int] = (),
        *,
        on_event: Callable[[Event], None] | None = None,
        save_to: str | os.PathLike | None = None,
        save_every: int = 256,
        save_cache: bool = True,
    ) -> Result:
        """Runs to the end, and answers at several budgets on the way.

        Answers change nothing of what the workers write.

        Args:
          finish_at: budgets of forward passes at which to take the answer; default the session's
            budget. A restored session has the answers that it has given before.
          on_event: called with the text as it appears.
          save_to: a folder to `save` to on the way, and at the end.
          save_every: forward passes between two saves.
          save_cache: save keys and values too; see `save`.

        Raises:
          ValueError: a budget to finish at that is below 1 or beyond the session's, fewer than 1
            pass between saves, or saves without keys and values of a session that keeps no trace.
          SaveError: see `save`.
          NotANumberError: see `stream`.
        """
        check_finish_at(finish_at, self.budget)
        check_min(1, save_every=save_every)
        if save_to:
            checkpoint.check_can_save(self._session, save_cache)
        budgets = sorted(set(finish_at or [self.budget]))
        begun = saved = self.passes
        answers = self._session.answers
        for budget in [*budgets, None]:
            for event in self.stream(budget):
                if on_event:
                    on_event(event)
                if save_to and not self._session.events and self.passes >= saved + save_every:
                    self.save(save_to, cache=save_cache, wait=False)
                    saved = self.passes
            # A session that was restored beyond a budget cannot go back to it.
            if budget is not None and not (budget < self.passes and answers.get(budget)):
                self.finish(at=budget)
        if save_to:
            self.save(save_to, cache=save_cache, wait=True)
        result = self.result({budget: answers[budget] for budget in budgets})
        if result.finish_reason is FinishReason.PAUSED and self.passes == begun:
            warnings.warn(
                "nothing was written: the workers that have not ended are paused; resume(name) lets "
                "one go on",
                stacklevel=2,
            )
        return result

    def finish(self, *, sees: Sequence[str] | None = None, at: int | None = None) -> Answer:
        """The answer that the workers have given, or else their best guess now.

        For a guess (section 4.1, appendix C) the early-stop prompt is fed to a block of its own,
        after all that any worker has written, unfinished steps included, and a bounded number of
        tokens is sampled greedily. The session goes on afterwards as if there had been no guess.

        Args:
          sees: the blocks to guess from, in order; default `WorkersLayout.overview`. With it, no
            answer is taken from the workers' words.
          at: a budget of forward passes, as whose answer it stays in `answers`.

        Raises:
          ValueError: an unknown block, or blocks that are longer than the context together.
          NotANumberError: the logits of a worker or after the early-stop prompt are not finite.
        """
        dispatch.read_unread(self._session)
        with self._session.compiling():
            found = finisher.finish(self._session, sees)
        if at is not None:
            self._session.answers[at] = found
        return found

    def say(self, text: str, name: str = PERSON) -> None:
        """Adds a person's words after the history, as a step of its own.

        All workers read it from the next pass on.

        Raises:
          ValueError: no text, more than the history has room for, or the name of a worker.
        """
        dispatch.read_unread(self._session)
        membership.say(self._session, text, name)

    def pause(self, name: str) -> None:
        """Stops a worker where it is, if it has not ended; the others see what it has written."""
        with self._device():
            self._session.set_reason(name, FinishReason.RUNNING, FinishReason.PAUSED)

    def resume(self, name: str) -> None:
        """Lets a paused worker go on."""
        with self._device():
            self._session.set_reason(name, FinishReason.PAUSED, FinishReason.RUNNING)

    def add(self, name: str, layout: WorkersLayout | None = None) -> None:
        """Adds a worker, which starts its first step with the next pass.

        Args:
          name: of the worker.
          layout: of all workers from now on; needed where the session has a layout of your own. The
            only block that may be new in it is the one that the worker writes.

        Raises:
          ValueError: a name that is taken or empty, no room for one more worker, or a layout that
            does not fit.
        """
        with self._device():
            membership.add_worker(self._session, name, layout)

    def remove(self, name: str) -> None:
        """Removes a worker.

        The tokens in its block move to the end of the history (of the prompt, where there is none).

        Raises:
          ValueError: no such worker, the last one, or no room for what it has written.
        """
        dispatch.read_unread(self._session)
        membership.remove_worker(self._session, name)

    def save(self, folder: str | os.PathLike, *, cache: bool = True, wait: bool = True) -> int:
        """Saves the session between two passes; see `restore`.

        It is there as a whole or not at all: after a kill in the middle of it, the save before it is
        restored. The two newest saves of a folder are kept.
        Where several processes run the session, all must call this.

        Args:
          folder: of this session's saves; made if it is not there.
          cache: with keys and values. Without them the save of a session that keeps a trace is
            small, and `restore` computes them again from the trace (Hogwild! Inference, appendix
            B), at the cost of a prompt of all that was fed.
          wait: return when it is written; False writes it in the background, for which `close`
            waits.

        Returns:
          The number of the save.

        Raises:
          ValueError: keys and values are to be left out, but the session keeps no trace.
          SaveError: it cannot be written, or the one before it could not.
        """
        with self._device():
            checkpoint.check_can_save(self._session, cache)
            self._saves = CheckpointStore.of(folder, self._saves)
            trace = self.trace if self._session.recorder else None
            return checkpoint.save(self._session, self._saves, trace, cache=cache, wait=wait)

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
        """Restores a saved session, on any number of devices.

        One that kept a trace goes on with it. The session goes on exactly as the saved one would
        have. Where keys and values were left out of the save, that holds in float32: computed again
        they are the same to rounding, which in bfloat16 and float16 may be enough for another
        token.

        Args:
          model: the same, on any mesh or none.
          folder: that the session was saved to.
          number: of the save; default the newest that is not damaged.
          layout, kind: the function and the rule of the saved session, if it had one of its own,
            which cannot be saved.
          passes_at_once, implementation, engine: as for `Workers`.

        Raises:
          SaveError: no save, one that cannot be read or is damaged, one of another model or
            tokenizer, or one of an engine's session that cannot go on without an engine, or the
            other way round (models whose rotation depends on the length of the context alone).
          ValueError: a layout or a kind that is needed and not given.
          TooLongError, EngineError, ClosedError: see `Workers`.
        """
        with SavedCheckpoint(folder, number) as save:
            saved = checkpoint.SavedSession(save)
            settings = saved.settings(model, layout, kind)
            if passes_at_once is not None:
                settings["passes_at_once"] = passes_at_once
            given = (layout, kind, passes_at_once, implementation, engine)
            # An error may be due to what is given here, and not to the save.
            is_saved = all(argument is None for argument in given)
            with save.checked() if is_saved else contextlib.nullcontext():
                workers = cls(model, **settings, implementation=implementation, engine=engine)
            with save.checked():
                checkpoint.restore(workers._session, saved)
        return workers
