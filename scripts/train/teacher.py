"""The rule of a teacher that plays workers: what each would write next, from what it could see in
that pass alone.

Hogwild! Inference, appendices B ("Fine-tuning and re-encoding considerations") and E.2. sessions.py
lets the workers of a session go by it.

- A worker takes a free question of its own part of the list, and then goes on from there, each
  second worker downwards. Two of them are Alice, who takes the lowest, and Bob, who takes the
  highest, as in `jaxshare.serving.evaluation.arithmetic`.
- Two that take the same question see it in the next pass. The one that has written less of it goes
  elsewhere, and of equals the later in the list: "Question 3: Bob has it. Question 4: ...". Where
  steps are private, that happens when the other's result appears.
- A question that goes on from the answer of another one is taken when that answer can be seen,
  no matter which worker wrote it. A worker that has taken it too early sees so once it has named
  the other one, and goes elsewhere: "Question 5: Answer 2: ?. Question 3: ...".
- With nothing to take a worker waits; a worker that sees all results boxes them.
- The finisher boxes what can be known when the time is up: also an answer whose working is complete
  and that only has to be written down.
- Asked whether its work is redundant, a worker says yes if the step before has added nothing: it
  waited, or another had that question.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxshare.models.generation_config import Generation
from jaxshare.serving import Format
from jaxshare.serving.evaluation.arithmetic import Dependent, SumsProblem, wait_body
from jaxshare.serving.workers.layouts import WorkersLayout
from jaxshare.serving.workers.text.codec import Codec, codec_of
from scripts.train.paragraphs import Paragraph, Sight

YES, NO = " yes.", " no."
UNKNOWN = "?"
"""The entry of a box for an answer that is not there yet."""
_SENTENCE = re.compile(r"[.] ?$")
_LONGEST_LULL = 45
"""Passes: a worker that waits begins a new paragraph after six."""


@dataclasses.dataclass(frozen=True)
class Lapses:
    """The rates at which the teacher breaks the rule, so that pupils see the consequences and how
    to go on. None of it is learned.

    Attributes:
      slips: part of the claims that take another question than the rule says.
      yields: part of the clashes in which the worker that has the question leaves it as well. For
        up to `_LONGEST_LULL` passes all then believe that it is taken, and wait if nothing else is
        left.
      early: part of the choices, while a question waits for the answer of another one, that are for
        such a question.
    """

    slips: float = 0.0
    yields: float = 0.0
    early: float = 0.0


@dataclasses.dataclass(frozen=True)
class Script:
    """The encoding of texts as tokens.

    Attributes:
      codec, tokenizer: of the model.
      format: prompts, headers and the question; what separates steps is ASCII whitespace that the
        tokenizer has a token for.
      end: the token that ends a worker, after the box.
    """

    codec: Codec
    tokenizer: Any
    format: Format
    end: int

    @classmethod
    def of(
        cls, tokenizer: Any, vocab_size: int, generation: Generation, format: Format
    ) -> "Script":
        """The script from a model's parts.

        Raises:
          ValueError: no tokenizer or no stop token, or a separator of several tokens.
        """
        if tokenizer is None or not generation.stop_tokens:
            raise ValueError(
                "a teacher needs a model with a tokenizer and a stop token; add tokenizer.json and "
                "generation_config.json to the model's folder"
            )
        codec = codec_of(tokenizer, vocab_size)
        if len(codec.encode(format.separator)) != 1:
            raise ValueError(
                f"the separator {format.separator!r} is not one token of this tokenizer; choose a "
                "format with one that is"
            )
        end = tokenizer.eos_token_id
        return cls(
            codec,
            tokenizer,
            format,
            end if end in generation.stop_tokens else min(generation.stop_tokens),
        )

    @functools.cached_property
    def separator(self) -> int:
        """The token that ends a step."""
        return self.codec.encode(self.format.separator)[0]

    def prompt(
        self, problem: SumsProblem, names: Sequence[str], layout: WorkersLayout
    ) -> list[int]:
        """The first text that all workers read."""
        format = (
            self.format if layout.moves else dataclasses.replace(self.format, history_header="")
        )
        return format.prompt_tokens(self.tokenizer, problem.prompt(), names)

    @functools.cached_property
    def claim(self) -> list[int]:
        """The tokens with which every claim begins, whatever is claimed."""
        return self.begin(" Question")

    @functools.cached_property
    def check(self) -> list[int]:
        """The tokens with which every check begins."""
        return self.begin(" Check")

    def begin(self, word: str) -> list[int]:
        """The tokens of a word and any number that the numbers have in common."""
        first, *others = (self.codec.encode(f"{word} {number}") for number in (1, 2, 9))
        return first[
            : next(i for i, token in enumerate(first) if any(other[i] != token for other in others))
        ]

    def following(self, before: str, text: str) -> list[int]:
        """The tokens of a text that follows another one."""
        known, whole = self.codec.encode(before), self.codec.encode(before + text)
        return whole[len(known) :] if whole[: len(known)] == known else self.codec.encode(text)


class Pupil:
    """One worker as the teacher plays it: given what it sees, its next token.

    Attributes:
      name: of it; rank: its place among the names, from 0.
      own: the paragraph that it is writing.
    """

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        script: Script,
        problem: SumsProblem,
        rng: random.Random,
        lapses: Lapses,
        lulls: dict[int, int],
    ):
        """The teaching script of a session.

        Args:
          lulls: of it: questions that all believe to be taken, and for how many passes yet.
        """
        self.name, self.names, self.rank = name, names, names.index(name)
        self.own, self.last = Paragraph(name), None
        self._script, self._problem, self._rng, self._lapses, self._lulls = (
            script,
            problem,
            rng,
            lapses,
            lulls,
        )
        self._queue: list[int] = []
        self._wrong = 0  # how many of the tokens in the queue are not to be learned
        self._then, self._question = "open", 0
        self._early = False  # the next claim comes too early

    def begin(self, asked: bool) -> None:
        """A paragraph is over, and the next one begins."""
        self.last, self.own, self._queue, self._then = (
            self.own,
            Paragraph(self.name, asked),
            [],
            "asked" if asked else "open",
        )

    def write(self, sight: Sight) -> tuple[int, float]:
        """The next token, and what it weighs."""
        weight = 1.0
        if not self._queue:
            weight = getattr(self, f"_{self._then}")(sight)
        elif (
            self._then == "end"
            and self._question
            and _SENTENCE.search(self.own.body)
            and (rival := self._rival(sight))
        ):
            self._leave(rival)
        if self._wrong:
            self._wrong, weight = self._wrong - 1, 0.0
        return self._queue.pop(0), weight

    # What comes when all that was planned is written. Each plans more, and gives the weight of its
    # first token.

    def _asked(self, sight: Sight) -> float:
        self._plan(self._script.codec.encode(YES if redundant(self.last, sight) else NO), "open")
        return 1.0

    def _open(self, sight: Sight) -> float:
        free = self._free(sight)
        self._question = 0
        self._early = bool(self._lapses.early and self._blocked(sight)) and (
            self._rng.random() < self._lapses.early
        )
        if self._believed(free):
            self._plan(self._script.claim, "number")
        elif len(sight.results) == len(self._problem.questions):
            self._plan(self._script.codec.encode(box(self._problem, sight.results)), "stop")
        elif self._early:
            self._plan(self._script.claim, "number")
            self._wrong = len(self._queue)
        else:
            self._wait(sight)
            return float(not free)
        return 1.0

    def _wait(self, sight: Sight) -> None:
        body = wait_body(self._awaited(sight))
        self._plan(self._script.following(self.own.body, body), "end")

    def _number(self, sight: Sight) -> float:
        # Others may have taken the last ones since this worker began to write that it takes one.
        unsolved = self._problem.open(sight.results) - {*sight.results} or {
            *range(1, len(self._problem.questions) + 1)
        }
        free = self._free(sight) or sorted(unsolved)
        right = self._choice(free)
        if self._early and (blocked := self._blocked(sight)):
            right, self._question = 0, self._rng.choice(blocked)
        elif self._rng.random() < self._lapses.slips:
            self._question = self._rng.choice(sorted(unsolved))
        else:
            self._question = self._choice(self._believed(free) or free)
        claim = self._script.claim
        self._plan(self._script.codec.encode(f" Question {self._question}")[len(claim) :], "work")
        return float(self._question == right)

    def _work(self, sight: Sight) -> float:
        if rival := self._rival(sight):
            self._leave(rival)
        elif (other := self._follower(sight)) and self._rng.random() < self._lapses.yields:
            self._lulls[self._question] = self._rng.randint(0, _LONGEST_LULL)
            self._leave(other)
            self._wrong = len(self._queue)
        elif source := self._source():
            self._plan(self._script.following(self.own.body, f": Answer {source}: "), "found")
        else:
            claim, body = f" Question {self._question}", self._problem.body(self._question)
            self._plan(self._script.following(claim, body.removeprefix(claim)), "end")
        return 1.0

    def _found(self, sight: Sight) -> float:
        """The answer that its question goes on from is there by now, or is not."""
        begun = f" Question {self._question}: Answer {self._source()}: "
        if self._question in self._problem.open(sight.results):
            body = self._problem.body(self._question)
            self._plan(self._script.following(begun, body.removeprefix(begun)), "end")
        else:
            self._plan(self._script.following(begun, f"{UNKNOWN}."), "open")
        return 1.0

    def _end(self, sight: Sight) -> float:
        self._plan([self._script.separator], "end")
        return 1.0

    def _stop(self, sight: Sight) -> float:
        self._plan([self._script.end], "stop")
        return 1.0

    def _plan(self, tokens: list[int], then: str) -> None:
        self._queue, self._then = [*tokens], then

    def _leave(self, rival: str) -> None:
        """Leaves its question to another one."""
        body = self.own.body
        text = (
            f": {rival} has it."
            if body[-1:].isdigit()
            else f"{'' if body.endswith(' ') else ' '}{rival} has it."
        )
        self._plan(self._script.following(body, text), "open")

    # What the rule says.

    def _free(self, sight: Sight) -> list[int]:
        return sorted(self._problem.open(sight.results) - sight.claimed)

    def _blocked(self, sight: Sight) -> list[int]:
        """The questions that go on from an answer that cannot be seen yet."""
        every = {*range(1, len(self._problem.questions) + 1)}
        return sorted(every - self._problem.open(sight.results) - sight.claimed)

    def _source(self) -> int:
        """The number of the question that the worker's own goes on from, 0 for none."""
        question = self._problem.questions[self._question - 1]
        return question.source if isinstance(question, Dependent) else 0

    def _believed(self, free: Sequence[int]) -> list[int]:
        """The questions that the worker believes to be free."""
        return [number for number in free if not self._lulls.get(number)]

    def _choice(self, free: Sequence[int]) -> int:
        """The choice from the worker's own part of the questions upwards from its first or, for
        each second one, downwards from its last, and then on around."""
        count, many = len(self._problem.questions), len(self.names)
        low, high = self.rank * count // many + 1, (self.rank + 1) * count // many
        if self.rank % 2 == 0:
            return min(free, key=lambda number: (number - low) % count)
        return min(free, key=lambda number: (max(low, high) - number) % count)

    def _rival(self, sight: Sight) -> str | None:
        """The worker that has this worker's question: it has answered it, or has written more of
        it, or as much and comes first."""
        own = self.own.claims.get(self._question, 0)
        for other in (*sight.finished, *sight.others):
            if other.writer == self.name or self._question not in other.claims:
                continue
            written = other.claims[self._question]
            if self._question in other.ended or (written, -self.names.index(other.writer)) > (
                own,
                -self.rank,
            ):
                return other.writer
        return None

    def _follower(self, sight: Sight) -> str | None:
        """The worker that has begun this worker's question as well, and is to leave it."""
        return next(
            (other.writer for other in sight.others if self._question in other.claims), None
        )

    def _awaited(self, sight: Sight) -> str:
        """The first worker that has a question under way, or else the next in the list."""
        busy = [p.writer for p in sight.others if p.claims.keys() - sight.ended]
        return busy[0] if busy else self.names[(self.rank + 1) % len(self.names)]


def redundant(last: Paragraph | None, sight: Sight) -> bool:
    """True if a worker's last paragraph has added nothing: it took nothing up, or only what another
    has taken up as well."""
    if last is None:
        return False
    others = {
        number
        for p in (*sight.finished, *sight.others)
        if p.writer != last.writer
        for number in p.claims
    }
    mended = last.results.keys() - last.claims.keys()
    return not mended and last.claims.keys() <= others


def worked(problem: SumsProblem, paragraphs: Iterable[Paragraph]) -> dict[int, int]:
    """The answers with their whole working in a paragraph, given there or not."""
    bodies = {
        number: problem.body(number).rpartition(" Answer ")[0]
        for number in range(1, len(problem.questions) + 1)
    }
    return {
        number: problem.answers[number - 1]
        for p in paragraphs
        for number, body in bodies.items()
        if body in p.text
    }


def box(problem: SumsProblem, known: Mapping[int, int]) -> str:
    """The answers in a box, `UNKNOWN` for those that are not known."""
    entries = (str(known.get(number, UNKNOWN)) for number in range(1, len(problem.questions) + 1))
    return f" \\boxed{{{', '.join(entries)}}}"
