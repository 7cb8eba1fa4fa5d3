"""What workers have written, as the host sees it: steps made of the tokens that the device has
sampled."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxshare import FinishReason
from jaxshare.decoding.steps import Mark
from jaxshare.serving.workers.step_automata import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Codec:
    """Text to tokens and back, for texts that stand within another one."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", vocab_size: int):
        self.tokenizer = tokenizer
        self.vocabulary = token_bytes(tokenizer, vocab_size)

    @functools.cached_property
    def fingerprint(self) -> str:
        """What stands for the tokenizer where its tokens are kept: a sum over what each of them
        says."""
        return hashlib.blake2b(repr(self.vocabulary).encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. Some tokenizers put a space before it, which is taken off."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return (
            tokens[1:]
            if tokens and self.vocabulary[tokens[0]] == b" " and not text.startswith(" ")
            else tokens
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """What tokens say; special tokens say nothing."""
        return b"".join(self.vocabulary[token] for token in tokens).decode(errors="replace")


@functools.lru_cache(maxsize=8)
def codec_of(tokenizer: Any, vocab_size: int) -> Codec:
    """The codec of a tokenizer, made once: it looks at every token."""
    return Codec(tokenizer, vocab_size)


@dataclasses.dataclass
class Step:
    """A step, finished or not.

    Attributes:
      worker: who wrote it.
      number: of this worker's steps, from 1.
      text: with its header; what ended it included.
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
      worker, step: whose, and which of its steps.
      text: what is new; the first event of a step has its header in it.
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
    """A worker on its way.

    Attributes:
      row: of the device.
      step: the one it is writing; the last one, when it has ended.
      opening: text that opens the step.
      block: tokens behind the prompt and the history, in the block that it writes, the last one
        sampled included.
      read: how many of its sampled tokens are in here.
      shown: characters of the step's text that events have carried.
    """

    row: int
    step: Step
    opening: str
    block: list[int]
    read: int = 0
    shown: int = 0


class Transcript:
    """The steps of a session.

    Attributes:
      finished: steps in the order in which they were finished.
      voices: of the workers that take part.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Collection[int],
        opening: Callable[[str, int, bool], list[int]],
    ):
        """An empty one.

        Args:
          decode: tokens -> what they say.
          stops: tokens that end a worker.
          opening: (name, number, whether it asks) -> tokens that open a step.
        """
        self.finished: list[Step] = []
        self.voices: dict[str, WorkerCursor] = {}
        self._decode, self._stops, self._opening = decode, stops, opening

    @property
    def steps(self) -> list[Step]:
        """All steps, finished ones first."""
        return [
            *self.finished,
            *(voice.step for voice in self.voices.values() if voice.step.ended is None),
        ]

    def join(self, name: str, row: int, passes: int, lead: list[int]) -> None:
        """A worker begins its first step, opened by the tokens `lead`."""
        opening = self._decode(lead).lstrip()
        self.voices[name] = WorkerCursor(row, Step(name, 1, opening, passes), opening, list(lead))

    def leave(self, name: str, passes: int) -> None:
        """A worker's unfinished step becomes its last one."""
        step = self.voices.pop(name).step
        if step.ended is None:
            step.ended = passes
            self.finished.append(step)

    def facts(self) -> dict[str, Any]:
        """All that is here, as JSON can say it."""
        finished = [dataclasses.asdict(step) for step in self.finished]
        # A voice that has ended has its last step among the finished ones, and that is where its
        # step stays.
        places = {id(step): i for i, step in enumerate(self.finished)}
        voices = {
            name: {**dataclasses.asdict(voice), "finished": places.get(id(voice.step))}
            for name, voice in self.voices.items()
        }
        return {"finished": finished, "voices": voices}

    def take_over(self, facts: Mapping[str, Any]) -> None:
        """Becomes the transcript that these facts are of."""
        self.finished = [Step(**step) for step in facts["finished"]]
        self.voices = {}
        for name, voice in facts["voices"].items():
            step = (
                Step(**voice["step"])
                if voice["finished"] is None
                else self.finished[voice["finished"]]
            )
            self.voices[name] = WorkerCursor(
                **{
                    field: value
                    for field, value in voice.items()
                    if field not in ("step", "finished")
                },
                step=step,
            )

    def read(self, seen: Mapping[str, np.ndarray]) -> list[Event]:
        """Takes over what has been sampled since the last time.

        Args:
          seen: passes [], and by row drawn [R], reasons [R], tokens [R, X], marks [R, X], at [R,
            X].

        Returns:
          What is new, in the order of the passes.
        """
        found, before = [], len(self.finished)
        for name, voice in self.voices.items():
            found += self._read(
                name,
                voice,
                int(seen["passes"]),
                int(seen["drawn"][voice.row]),
                FinishReason(int(seen["reasons"][voice.row])),
                *(seen[key][voice.row] for key in ("tokens", "marks", "at")),
            )
        self.finished[before:] = sorted(
            self.finished[before:], key=lambda step: (step.ended, self.voices[step.worker].row)
        )
        return sorted(found, key=lambda event: (event.passes, self.voices[event.worker].row))

    def _read(
        self,
        name: str,
        voice: WorkerCursor,
        passes: int,
        drawn: int,
        reason: FinishReason,
        tokens: np.ndarray,
        marks: np.ndarray,
        at: np.ndarray,
    ) -> list[Event]:
        found = []
        for i in range(voice.read, drawn):
            token, mark, last = int(tokens[i]), Mark(int(marks[i])), i + 1 == drawn
            if token not in self._stops:
                voice.step.tokens.append(token)
                voice.block.append(token)
            voice.step.answer |= Mark.ANSWER in mark
            if not (Mark.STEP in mark or token in self._stops):
                continue
            voice.step.ended = int(at[i])
            self.finished.append(voice.step)
            found += self._news(voice, int(at[i]))
            # nothing comes after it, or the host opens it
            if not (last and reason in (FinishReason.STOP, FinishReason.ANSWER, FinishReason.STEP)):
                self.turn(name, int(at[i]), asked=Mark.ASKED in mark)
        voice.read = drawn
        return found if voice.step.ended is not None else [*found, *self._news(voice, passes)]

    def turn(self, name: str, passes: int, *, asked: bool) -> list[int]:
        """A worker turns to its next step; the tokens that open it behind the one that ended the
        last."""
        voice = self.voices[name]
        tokens = self._opening(name, voice.step.number + 1, asked)
        opening = self._decode(tokens)
        voice.block, voice.opening, voice.shown = [*voice.step.tokens[-1:], *tokens], opening, 0
        voice.step = Step(name, voice.step.number + 1, opening, passes, asked=asked)
        return tokens

    def _news(self, voice: WorkerCursor, passes: int) -> list[Event]:
        """The event with what is new in the step, if anything is. A character of which bytes are
        still to come waits for them."""
        step = voice.step
        text = voice.opening + self._decode(step.tokens)
        step.text = text if step.ended is not None else text.rstrip("\ufffd")
        new, voice.shown = step.text[voice.shown :], max(voice.shown, len(step.text))
        return (
            [Event(step.worker, step.number, new, passes, step.ended is not None)]
            if new or step.ended is not None
            else []
        )
