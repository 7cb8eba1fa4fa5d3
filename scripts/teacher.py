"""A teacher that plays workers against the clock: what each would write, pass by pass, from what it could see in that pass alone.

Hogwild! Inference, appendices B ("Fine-tuning and re-encoding considerations") and E.2. `play` does what a session of
`jaxshare.serving.Workers` does on the device: it feeds openings in wide passes, ends steps, moves them, puts the question whether work is
redundant. The tokens are not sampled, though: a rule writes them.

- A worker takes a free question of its own part of the list, and then goes on from there, each second worker downwards. Two of them are
  Alice, who takes the lowest, and Bob, who takes the highest, as in `jaxshare.models.problems`.
- Two that take the same question see it in the next pass. Who has written less of it goes elsewhere, and of equals the later in the list:
  "Question 3: Bob has it. Question 4: ...". Where steps are private, that happens when the other's result appears.
- A question that goes on from the answer of another one is taken when that answer can be seen, whoever wrote it.
- With nothing to take a worker waits; whoever sees all results boxes them.
- Asked whether its work is redundant, a worker says yes if the step before has added nothing: it waited, or another had that question.

What comes of it is a `Lesson`: a trace, and the tokens to learn in it.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxshare.models.generation import Generation
from jaxshare.models.problems import Problem, few_shot_messages, wait_body
from jaxshare.recording import Recorder
from jaxshare.sampling import uniforms
from jaxshare.serving import Format
from jaxshare.serving.layouts import LAYOUTS, WorkersLayout
from jaxshare.serving.transcript import Codec, codec_of
from jaxshare.serving.workers import FINISHER
from jaxshare.trace import Trace

WIDTH = 16
"""Tokens of a row that a session feeds in one pass."""
YES, NO = " yes.", " no."
UNKNOWN = "?"
"""What stands in a box for an answer that nobody has given yet."""
_CLAIM = re.compile(r"Question (\d+)(?!\d|: ?[^\d\s])")
"""A question that is being worked on: what goes on with a name was left to somebody else."""
_RESULT = re.compile(r"Answer (\d+): (\d+)\.")
_SENTENCE = re.compile(r"[.] ?$")
_uniforms = jax.jit(uniforms)


@dataclasses.dataclass(frozen=True)
class Lesson:
    """A trace and what is to be learned in it. A tokens are sampled.

    Attributes:
      trace: as a session would have recorded it.
      at: int32[A], numbers of the tokens of the trace after which each was sampled.
      targets: int32[A], what was.
      weights: float32[A], 0 for slips, which are there to be noticed and not to be repeated.
    """

    trace: Trace
    at: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


@dataclasses.dataclass(frozen=True)
class Script:
    """How texts become tokens.

    Attributes:
      codec, tokenizer: of the model.
      format: prompts, headers and the question; what separates steps is ASCII whitespace that the tokenizer has a token for.
      end: the token that ends a worker, after the box.
    """

    codec: Codec
    tokenizer: Any
    format: Format
    end: int

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int, generation: Generation, format: Format) -> "Script":
        """Of a model's parts.

        Raises:
          ValueError: no tokenizer or no stop token, or a separator of several tokens.
        """
        if tokenizer is None or not generation.stop_tokens:
            raise ValueError("a teacher needs a model with a tokenizer and a stop token; add tokenizer.json and generation_config.json to "
                             "the model's folder")
        codec = codec_of(tokenizer, vocab_size)
        if len(codec.encode(format.separator)) != 1:
            raise ValueError(f"the separator {format.separator!r} is not one token of this tokenizer; choose a format with one that is")
        end = tokenizer.eos_token_id
        return cls(codec, tokenizer, format, end if end in generation.stop_tokens else min(generation.stop_tokens))

    @functools.cached_property
    def separator(self) -> int:
        """The token that ends a step."""
        return self.codec.encode(self.format.separator)[0]

    def prompt(self, problem: Problem, names: Sequence[str], layout: WorkersLayout) -> list[int]:
        """What all workers read first."""
        format = self.format if layout.moves else dataclasses.replace(self.format, history_header="")
        text = format.prompt(self.tokenizer, problem.prompt(), names)
        return self.tokenizer.encode(text, add_special_tokens=not self.tokenizer.chat_template, verbose=False)

    @functools.cached_property
    def claim(self) -> list[int]:
        """The tokens with which every claim begins, whatever is claimed."""
        first, *others = (self.codec.encode(f" Question {number}") for number in (1, 2, 9))
        return first[:next(i for i, token in enumerate(first) if any(other[i] != token for other in others))]

    def behind(self, before: str, text: str) -> list[int]:
        """The tokens of a text that stands behind another one."""
        known, whole = self.codec.encode(before), self.codec.encode(before + text)
        return whole[len(known):] if whole[:len(known)] == known else self.codec.encode(text)


@dataclasses.dataclass
class Paragraph:
    """A step as far as it was fed, with what opens it.

    Attributes:
      writer: who writes it; asked: whether the question opens it.
      opening: characters of what opens it, known when it was fed.
    """

    writer: str
    asked: bool = False
    text: str = ""
    opening: int = 0

    @property
    def body(self) -> str:
        return self.text[self.opening:]

    @property
    def claims(self) -> dict[int, int]:
        """The questions it works on, and how many characters it has written of each."""
        return {int(found[1]): len(self.text) - found.end() for found in _CLAIM.finditer(self.text)}

    @property
    def results(self) -> dict[int, int]:
        """The answers it gives."""
        return {int(number): int(answer) for number, answer in _RESULT.findall(self.text)}


@dataclasses.dataclass(frozen=True)
class Sight:
    """What a worker sees of the others and of its past: paragraphs that are finished, its own too, and those that others are writing."""

    finished: Sequence[Paragraph]
    others: Sequence[Paragraph]

    @property
    def results(self) -> dict[int, int]:
        return {number: answer for p in (*self.finished, *self.others) for number, answer in p.results.items()}

    @property
    def claimed(self) -> set[int]:
        return {number for p in (*self.finished, *self.others) for number in p.claims}


class Pupil:
    """One worker as the teacher plays it: given what it sees, its next token.

    Attributes:
      name: of it; rank: its place among the names, from 0.
      own: the paragraph that it is writing.
    """

    def __init__(self, name: str, names: Sequence[str], script: Script, problem: Problem, rng: random.Random, slips: float):
        self.name, self.names, self.rank = name, names, names.index(name)
        self.own, self.last = Paragraph(name), None
        self._script, self._problem, self._rng, self._slips = script, problem, rng, slips
        self._queue: list[int] = []
        self._then, self._question = "open", 0

    def begin(self, asked: bool) -> None:
        """A paragraph is over, and the next one begins."""
        self.last, self.own, self._queue, self._then = self.own, Paragraph(self.name, asked), [], "asked" if asked else "open"

    def write(self, sight: Sight) -> tuple[int, float]:
        """The next token, and what it weighs."""
        weight = 1.0
        if not self._queue:
            weight = getattr(self, f"_{self._then}")(sight)
        elif self._then == "end" and self._question and _SENTENCE.search(self.own.body) and (rival := self._rival(sight)):
            self._leave(rival)
        return self._queue.pop(0), weight

    # What comes when all that was planned is written. Each plans more, and gives the weight of its first token.

    def _asked(self, sight: Sight) -> float:
        self._plan(self._script.codec.encode(YES if redundant(self.last, sight) else NO), "open")
        return 1.0

    def _open(self, sight: Sight) -> float:
        if self._free(sight):
            self._plan(self._script.claim, "number")
        elif len(sight.results) == len(self._problem.questions):
            self._plan(self._script.codec.encode(box(self._problem, sight.results)), "stop")
        else:
            self._plan(self._script.behind(self.own.body, wait_body(self._awaited(sight))), "end")
        self._question = 0
        return 1.0

    def _number(self, sight: Sight) -> float:
        # Others may have taken the last ones since this worker began to write that it takes one.
        unsolved = self._problem.open(sight.results) - {*sight.results} or {*range(1, len(self._problem.questions) + 1)}
        right = self._choice(self._free(sight) or sorted(unsolved))
        slip = self._rng.random() < self._slips
        self._question = self._rng.choice(sorted(unsolved)) if slip else right
        claim = self._script.claim
        self._plan(self._script.codec.encode(f" Question {self._question}")[len(claim):], "work")
        return float(self._question == right)

    def _work(self, sight: Sight) -> float:
        if rival := self._rival(sight):
            self._leave(rival)
        else:
            claim, body = f" Question {self._question}", self._problem.body(self._question)
            self._plan(self._script.behind(claim, body.removeprefix(claim)), "end")
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
        text = f": {rival} has it." if body[-1:].isdigit() else f"{'' if body.endswith(' ') else ' '}{rival} has it."
        self._plan(self._script.behind(body, text), "open")

    # What the rule says.

    def _free(self, sight: Sight) -> list[int]:
        return sorted(self._problem.open(sight.results) - sight.claimed)

    def _choice(self, free: Sequence[int]) -> int:
        """Of a worker's own part of the questions upwards from its first or, for each second one, downwards from its last, and then on
        around."""
        count, many = len(self._problem.questions), len(self.names)
        low, high = self.rank * count // many + 1, (self.rank + 1) * count // many
        if self.rank % 2 == 0:
            return min(free, key=lambda number: (number - low) % count)
        return min(free, key=lambda number: (max(low, high) - number) % count)

    def _rival(self, sight: Sight) -> str | None:
        """Who has this worker's question: whoever has answered it, or has written more of it, or as much and comes first."""
        own = self.own.claims.get(self._question, 0)
        for other in (*sight.finished, *sight.others):
            if other.writer == self.name or self._question not in other.claims:
                continue
            written = other.claims[self._question]
            if self._question in other.results or (written, -self.names.index(other.writer)) > (own, -self.rank):
                return other.writer
        return None

    def _awaited(self, sight: Sight) -> str:
        """Who is at work on something, or else the next in the list."""
        busy = [p.writer for p in sight.others if p.claims.keys() - sight.results.keys()]
        return busy[0] if busy else self.names[(self.rank + 1) % len(self.names)]


def redundant(last: Paragraph | None, sight: Sight) -> bool:
    """Whether a worker's last paragraph has added nothing: it took nothing up, or only what another has taken up as well."""
    if last is None:
        return False
    others = {number for p in (*sight.finished, *sight.others) if p.writer != last.writer for number in p.claims}
    return last.claims.keys() <= others


def box(problem: Problem, known: Mapping[int, int]) -> str:
    """The answers in a box, `UNKNOWN` for those that are not known."""
    entries = (str(known.get(number, UNKNOWN)) for number in range(1, len(problem.questions) + 1))
    return f" \\boxed{{{', '.join(entries)}}}"


def play(script: Script, problem: Problem, names: Sequence[str], layout: str, rng: random.Random, *, ask_every: int = 0, seed: int = 0,
         slips: float = 0.0, budget: int = 1024, guess: bool = False) -> Lesson:
    """A session from the prompt to the box, or to the budget.

    Args:
      script: texts as tokens.
      problem: what is to be solved.
      names: of the workers.
      layout: one of `LAYOUTS`.
      rng: decides on slips.
      ask_every, seed: as in `Workers`: when a worker is asked whether its work is redundant, and which.
      slips: how often a worker takes another question than the rule says.
      budget: forward passes.
      guess: where the budget ends the session, it is followed by the finisher's guess, which boxes what can be seen then.

    Returns:
      The lesson. The names of the trace's blocks are those of the session.

    Raises:
      ValueError: an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    session = _Session(script, problem, names, LAYOUTS[layout](names, script.format), rng, ask_every, seed, slips)
    over = False
    for _ in range(budget):
        session.feed()
        over = session.sample()
        if over:
            break
    if guess and not over:
        session.guess()
    return session.lesson()


def chat(script: Script, problems: Sequence[Problem], *, system: bool = True) -> Lesson:
    """A chat in which Alice solves problem after problem alone, headers and all, so that a model keeps what it can do without a session.

    Args:
      script: texts as tokens, of a model with a chat template.
      problems: a turn each.
      system: whether a message of the system says first that she works alone.
    """
    tokens: list[int] = []
    turns: list[tuple[int, int]] = []
    for i, problem in enumerate(problems):
        messages = few_shot_messages(problems[:i], problem)[not system:]
        text = script.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        asked = script.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        written = [*script.codec.encode(problem.solution()), script.end]
        if asked[:len(tokens)] != tokens:  # a template that shows earlier turns in another way
            turns.clear()
        tokens = [*asked, *written]
        turns.append((len(asked), len(tokens)))
    recorder = Recorder(1)
    recorder.text(tokens, 0)
    at = np.concatenate([np.arange(begin - 1, end - 1) for begin, end in turns]).astype(np.int32)
    return Lesson(recorder.trace(names=["prompt"]), at, np.asarray(tokens, np.int32)[at + 1], np.ones(len(at), np.float32))


class _Session:
    """What a session of workers does on the device, in plain lists."""

    def __init__(self, script: Script, problem: Problem, names: Sequence[str], layout: WorkersLayout, rng: random.Random, ask_every: int,
                 seed: int, slips: float):
        self._script, self._problem, self._names, self._layout = script, problem, names, layout
        self._blocks = [*dict.fromkeys([*layout.blocks, *layout.texts, FINISHER])]
        self._rows = [[*map(self._blocks.index, layout.sees[name])] for name in names]
        self._recorder = Recorder(len(self._blocks))
        for block, tokens in {layout.prompt: script.prompt(problem, names, layout),
                              **{block: script.codec.encode(text) for block, text in layout.texts.items()}}.items():
            self._recorder.text(tokens, self._blocks.index(block))
        self._pupils = [Pupil(name, names, script, problem, rng, slips) for name in names]
        self._finished: list[Paragraph] = []
        self._numbers = [1] * len(names)
        self._queues = [[script.separator, *self._opening(row)] for row in range(len(names))]
        self._fed = [0] * len(names)  # the number of the last token that each row has fed
        self._sampled: set[int] = set()  # rows, after the last pass
        self._ask_every = ask_every if script.format.question else 0
        self._seed, self._asks = np.uint32(seed), 0
        self._since, self._due = 0, [False] * len(names)
        self._learned: list[tuple[int, int, float]] = []  # after which token, what, and what it weighs

    def feed(self) -> None:
        """A pass."""
        width = WIDTH if any(len(queue) > 1 for queue in self._queues) else 1
        new = [queue[:width] for queue in self._queues]
        self._queues = [queue[width:] for queue in self._queues]
        for row, numbers in enumerate(self._recorder.feed(new, self._rows)):
            if len(numbers):
                self._fed[row] = int(numbers[-1])
                own = self._pupils[row].own
                own.text += self._script.codec.decode(new[row])
                if not own.opening and not self._queues[row]:
                    own.opening = len(own.text)

    def sample(self) -> bool:
        """Every worker that has fed all writes a token, by what it sees in this pass. Returns whether the session is over."""
        new: dict[int, int] = {}
        for row, pupil in enumerate(self._pupils):
            if not self._queues[row]:
                new[row], weight = pupil.write(self._sight(row))
                self._learned.append((self._fed[row], new[row], weight))
        if self._script.end in new.values():
            return True
        due = [*self._due]
        self._ask(len(new))
        self._sampled = {*new}
        for row, token in new.items():
            self._queues[row] = [token]
            if token == self._script.separator:
                self._turn(row, due[row])
        return False

    def guess(self) -> None:
        """The finisher sees what the last worker does, with what was sampled last, and boxes what it knows."""
        last = [queue[:row in self._sampled] for row, queue in enumerate(self._queues)]
        self._recorder.feed(last, self._rows)
        for pupil, tokens in zip(self._pupils, last, strict=True):
            pupil.own.text += self._script.codec.decode(tokens)
        asked = self._script.codec.encode(self._script.format.finisher)
        sight = self._sight(len(self._names) - 1)
        own = self._pupils[-1].own
        text = box(self._problem, {**sight.results, **own.results}).partition("{")[2]
        answer = self._script.behind(self._script.format.finisher, text)
        blocks = [*self._rows[-1], self._blocks.index(FINISHER)]
        [numbers] = self._recorder.feed([[*asked, *answer]], [blocks], rows=[len(self._names)])
        self._learned += [(int(at), token, 1.0) for at, token in zip(numbers[len(asked) - 1:], answer, strict=False)]

    def lesson(self) -> Lesson:
        at, targets, weights = zip(*self._learned, strict=True) if self._learned else ((), (), ())
        return Lesson(self._recorder.trace(names=self._blocks), np.asarray(at, np.int32), np.asarray(targets, np.int32),
                      np.asarray(weights, np.float32))

    def _sight(self, row: int) -> Sight:
        """What a worker's blocks hold now, as paragraphs."""
        seen = {self._blocks[block] for block in self._rows[row]}
        others = [p.own for r, p in enumerate(self._pupils) if r != row and self._layout.written(p.name) in seen]
        return Sight(self._finished, others)

    def _turn(self, row: int, asked: bool) -> None:
        """A step has ended."""
        pupil = self._pupils[row]
        name = pupil.name
        if name in self._layout.moves:
            self._recorder.move(self._rows[row][-1], self._blocks.index(self._layout.moves[name]))
        self._finished.append(pupil.own)
        self._numbers[row] += 1
        self._queues[row] += self._opening(row, asked)
        self._due[row] &= not asked
        pupil.begin(asked)

    def _opening(self, row: int, asked: bool = False) -> list[int]:
        name, number, format = self._names[row], self._numbers[row], self._script.format
        stays = number > 1 and name not in self._layout.moves
        text = (format.question if asked else "") if stays else format.opening(name, number, names=self._names, ask=asked)
        return self._script.codec.encode(text.rstrip(" "))

    def _ask(self, sampled: int) -> None:
        """After so many tokens of all workers one of them is to be asked in its next step."""
        self._since += sampled
        if self._ask_every and self._since >= self._ask_every:
            self._since -= self._ask_every
            [chance] = np.asarray(_uniforms(np.array([self._seed]), np.array([self._asks])))
            self._asks += 1
            self._due[int(chance * np.float32(len(self._names)))] = True
