"""The transcript of a session: steps made of the tokens that the device has sampled."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxshare.decoding.steps import Mark


@dataclasses.dataclass
class Step:
    """A step, finished or not.

    Attributes:
      worker: the worker, or the person, that wrote it.
      number: of this worker's steps, from 1.
      text: with its header and the separator that ended it.
      began, ended: forward passes at its first token and at its last; `ended` is None while it is
        being written.
      tokens: sampled for it.
      asked: whether it opens with the question whether the work is redundant.
      answer: whether an answer closes in it.
    """

    worker: str
    number: int
    text: str
    began: int
    ended: int | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    asked: bool = False
    answer: bool = False


@dataclasses.dataclass(frozen=True)
class Event:
    """New text of a step.

    Attributes:
      worker, step: the worker, and the number of its step.
      text: the new text; the first event of a step has its header in it.
      passes: forward passes when the last of it was sampled.
      ends: whether the step ends with it.
    """

    worker: str
    step: int
    text: str
    passes: int
    ends: bool


@dataclasses.dataclass
class WorkerCursor:
    """A worker's place in the transcript. Its fields are written to files.

    Attributes:
      row: of the device.
      step: the one it is writing; the last one, when it has ended.
      opening: text that opens the step.
      block: tokens after the prompt and the history, in the block that it writes, the last one
        sampled included.
      read: the number of its sampled tokens that have been read.
      shown: characters of the step's text that events have carried.
      sampled_at: passes when its last token was sampled; when it joined, before the first.
    """

    row: int
    step: Step
    opening: str
    block: list[int]
    read: int = 0
    shown: int = 0
    sampled_at: int = 0


_READ = ("clock", "num_sampled", "num_taken", "number", "tokens", "marks", "sampled_at")


class Transcript:
    """The steps of a session.

    Attributes:
      finished: steps in the order in which they were finished.
      cursors: of the workers that take part.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Collection[int],
        opening: Callable[[str, int, bool], list[int]],
    ):
        """Makes an empty transcript.

        Args:
          decode: tokens -> their text.
          stops: tokens that end a worker.
          opening: (name, number, whether it asks) -> tokens that open a step.
        """
        self.finished: list[Step] = []
        self.cursors: dict[str, WorkerCursor] = {}
        self._decode, self._stops, self._opening = decode, stops, opening

    @property
    def steps(self) -> list[Step]:
        """All steps, finished ones first."""
        return [
            *self.finished,
            *(cursor.step for cursor in self.cursors.values() if cursor.step.ended is None),
        ]

    def join(self, name: str, row: int, passes: int, first_opening: list[int]) -> None:
        """Starts a worker's first step, opened by the tokens `first_opening`."""
        opening = self._decode(first_opening).lstrip()
        step = Step(name, 1, opening, passes)
        self.cursors[name] = WorkerCursor(
            row, step, opening, list(first_opening), sampled_at=passes
        )

    def leave(self, name: str, passes: int) -> None:
        """Ends a worker's unfinished step, its last one."""
        step = self.cursors.pop(name).step
        if step.ended is None:
            step.ended = passes
            self.finished.append(step)

    def snapshot(self) -> dict[str, Any]:
        """All of the transcript as plain data, which JSON can hold; see `restore`."""
        finished = [dataclasses.asdict(step) for step in self.finished]
        # The last step of a worker that has ended is one of the finished steps, and must be the
        # same object again.
        places = {id(step): i for i, step in enumerate(self.finished)}
        cursors = {
            name: {**dataclasses.asdict(cursor), "finished": places.get(id(cursor.step))}
            for name, cursor in self.cursors.items()
        }
        return {"finished": finished, "cursors": cursors}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replaces the transcript by that of a snapshot."""
        self.finished = [Step(**step) for step in snapshot["finished"]]
        self.cursors = {}
        for name, saved in snapshot["cursors"].items():
            index = saved["finished"]
            step = Step(**saved["step"]) if index is None else self.finished[index]
            fields = {key: saved[key] for key in saved if key not in ("step", "finished")}
            self.cursors[name] = WorkerCursor(**fields, step=step)

    def read(self, outputs: Mapping[str, np.ndarray]) -> list[Event]:
        """Reads the tokens that a dispatch has sampled.

        Args:
          outputs: by row, see `jaxshare.serving.engine.session_passes.outputs_of`.

        Returns:
          The new text, in the order of the passes.
        """
        events, before = [], len(self.finished)
        for name, cursor in self.cursors.items():
            row = {key: array[cursor.row] for key, array in outputs.items() if key in _READ}
            events += self._read(name, cursor, **row)
        self.finished[before:] = sorted(
            self.finished[before:], key=lambda step: (step.ended, self.cursors[step.worker].row)
        )
        return sorted(events, key=lambda event: (event.passes, self.cursors[event.worker].row))

    def _read(
        self,
        name: str,
        cursor: WorkerCursor,
        clock: int,
        num_sampled: int,
        num_taken: int,
        number: int,
        tokens: np.ndarray,
        marks: np.ndarray,
        sampled_at: np.ndarray,
    ) -> list[Event]:
        events = []
        new = slice(cursor.read - int(num_taken), int(num_sampled - num_taken))
        sampled = (array[new].tolist() for array in (tokens, marks, sampled_at))
        for token, marked, at in zip(*sampled, strict=True):
            cursor.sampled_at = at
            stops = token in self._stops
            if not stops:
                cursor.step.tokens.append(token)
                cursor.block.append(token)
            if not (marked or stops):
                continue
            mark = Mark(marked)
            cursor.step.answer |= Mark.ANSWER in mark
            if not (Mark.STEP in mark or stops):
                continue
            cursor.step.ended = at
            self.finished.append(cursor.step)
            events += self._new_text(cursor, at)
            # otherwise the worker has ended, or the host opens its next step
            if cursor.step.number < number:
                self.next_step(name, at, asked=Mark.ASKED in mark)
        cursor.read = int(num_sampled)
        if cursor.step.ended is not None:
            return events
        return [*events, *self._new_text(cursor, int(clock))]

    def next_step(self, name: str, passes: int, *, asked: bool) -> list[int]:
        """Starts a worker's next step; returns the tokens that open it."""
        cursor = self.cursors[name]
        number = cursor.step.number + 1
        tokens = self._opening(name, number, asked)
        cursor.block, cursor.shown = [*cursor.step.tokens[-1:], *tokens], 0
        cursor.opening = self._decode(tokens)
        cursor.step = Step(name, number, cursor.opening, passes, asked=asked)
        return tokens

    def _new_text(self, cursor: WorkerCursor, passes: int) -> list[Event]:
        """The event with the new text of a step; none if there is none and the step goes on.

        A character waits for the rest of its bytes.
        """
        step = cursor.step
        text = cursor.opening + self._decode(step.tokens)
        step.text = text if step.ended is not None else text.rstrip("\ufffd")
        new, cursor.shown = step.text[cursor.shown :], max(cursor.shown, len(step.text))
        return (
            [Event(step.worker, step.number, new, passes, step.ended is not None)]
            if new or step.ended is not None
            else []
        )
