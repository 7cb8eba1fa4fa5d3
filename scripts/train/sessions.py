"""Lessons: sessions of workers against the clock, whose tokens a teacher writes.

`play` does what a session of `jaxshare.serving.Workers` does on the device: it feeds openings in
wide passes, ends steps, moves them, puts the question whether work is redundant. The tokens are not
sampled, though: the rule of teacher.py writes them. What comes of it is a `Lesson`: a trace, and
the tokens to learn in it.
"""

import dataclasses
import random
from collections.abc import Container, Sequence

import jax
import numpy as np

from jaxshare.decoding.sampling import uniforms
from jaxshare.seeds import seed_words, stream_seed
from jaxshare.serving.evaluation.arithmetic import NAMES, SumsProblem, system_message
from jaxshare.serving.workers.layouts import LAYOUTS, WorkersLayout
from jaxshare.serving.workers.session_state import FINISHER
from jaxshare.trace.recorder import Recorder
from jaxshare.trace.trace import Trace
from scripts.train.checking import CheckingPupil, findings
from scripts.train.paragraphs import Paragraph, Sight
from scripts.train.teacher import Lapses, Pupil, Script, box, worked

NO_LAPSES = Lapses()
WIDTH = 16
"""Tokens of a row that a session feeds in one pass."""
_uniforms = jax.jit(uniforms)


@dataclasses.dataclass(frozen=True)
class Lesson:
    """A trace and what is to be learned in it. A tokens are sampled.

    Attributes:
      trace: as a session would have recorded it.
      at: int32[A], numbers of the tokens of the trace after which each was sampled.
      targets: int32[A], what was.
      weights: float32[A], 0 for lapses, which are there to be noticed and not to be repeated.
    """

    trace: Trace
    at: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def play(
    script: Script,
    problem: SumsProblem,
    names: Sequence[str],
    layout: str,
    rng: random.Random,
    *,
    ask_every: int = 0,
    seed: int = 0,
    move: str = "rotate",
    lapses: Lapses = NO_LAPSES,
    budget: int = 1024,
    guess: bool = False,
    guesses: Container[int] = (),
    said: Sequence[Paragraph] = (),
) -> Lesson:
    """Plays a session from the prompt to the box, or to the budget.

    Args:
      script: texts as tokens; problem: the problem to solve.
      names: of the workers; layout: one of `LAYOUTS`.
      rng: decides on lapses.
      ask_every, seed, move: as in `Workers`.
      lapses: how often workers do not go by the rule.
      budget: forward passes.
      guess: if the budget ends the session, the finisher boxes the results visible then.
      guesses: passes after which the finisher guesses as well.
      said: steps of others that are there from the begin, as `Workers.say` adds them.

    Returns:
      The lesson. The names of the trace's blocks are those of the session.

    Raises:
      ValueError: an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    session = _Session(
        script,
        problem,
        names,
        LAYOUTS[layout](names, script.format),
        rng,
        ask_every,
        seed,
        move == "reencode",
        lapses,
        said,
    )
    for number in range(budget):
        session.feed()
        if number in guesses:
            session.guess()
        if session.sample():
            break
    else:
        if guess:
            session.feed_sampled()
            session.guess()
    return session.lesson()


def chat(script: Script, turns: Sequence[tuple[str, str]], *, system: bool = True) -> Lesson:
    """A chat in which Alice answers message after message alone, headers and all, so that a model
    keeps what it can do without a session.

    Args:
      script: texts as tokens, of a model with a chat template.
      turns: messages, each with the answer to be learned.
      system: whether a message of the system says first that she works alone.
    """
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    messages = [system_message(NAMES[:1])] if system else []
    for message, answer in turns:
        messages.append({"role": "user", "content": message})
        text = script.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        asked = script.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        written = [*script.codec.encode(answer), script.end]
        if asked[: len(tokens)] != tokens:  # a template that shows earlier turns in another way
            spans.clear()
        tokens = [*asked, *written]
        spans.append((len(asked), len(tokens)))
        messages.append({"role": "assistant", "content": answer})
    return _text_lesson(tokens, spans)


def plain(script: Script, message: str, answer: str) -> Lesson:
    """A message by itself, in no chat template, and the answer after it."""
    return _answered(script, script.codec.encode(message), answer)


def lone(script: Script, message: str, opening: str, answer: str) -> Lesson:
    """The first step of a lone worker's session about a message: the answer after its opening."""
    prompt = script.format.prompt_tokens(script.tokenizer, message, NAMES[:1])
    return _answered(script, [*prompt, *script.codec.encode(opening)], answer)


def _answered(script: Script, asked: list[int], answer: str) -> Lesson:
    tokens = [*asked, *script.codec.encode(answer), script.end]
    return _text_lesson(tokens, [(len(asked), len(tokens))])


def _text_lesson(tokens: list[int], spans: Sequence[tuple[int, int]]) -> Lesson:
    """A text of which these spans, each of a begin and an end, are to be learned."""
    recorder = Recorder(1)
    recorder.text(tokens, 0)
    at = np.concatenate([np.arange(begin - 1, end - 1) for begin, end in spans]).astype(np.int32)
    return Lesson(
        recorder.trace(names=["prompt"]),
        at,
        np.asarray(tokens, np.int32)[at + 1],
        np.ones(len(at), np.float32),
    )


class _Session:
    """The work of a session on the device, in plain lists."""

    def __init__(
        self,
        script: Script,
        problem: SumsProblem,
        names: Sequence[str],
        layout: WorkersLayout,
        rng: random.Random,
        ask_every: int,
        seed: int,
        reencodes: bool,
        lapses: Lapses,
        said: Sequence[Paragraph],
    ):
        self._script, self._problem, self._names, self._layout = script, problem, names, layout
        self._blocks = [*dict.fromkeys([*layout.blocks, *layout.texts, FINISHER])]
        self._rows = [[*map(self._blocks.index, layout.sees[name])] for name in names]
        self._recorder = Recorder(len(self._blocks))
        for block, tokens in {
            layout.prompt: script.prompt(problem, names, layout),
            **{block: script.codec.encode(text) for block, text in layout.texts.items()},
        }.items():
            self._recorder.text(tokens, self._blocks.index(block))
        for paragraph in said:
            tokens = [script.separator, *script.codec.encode(paragraph.text)]
            self._recorder.text(tokens, self._blocks.index(layout.prompt))
        self._lulls: dict[int, int] = {}
        pupil = CheckingPupil if problem.checked else Pupil
        self._pupils = [
            pupil(name, names, script, problem, rng, lapses, self._lulls) for name in names
        ]
        self._finished: list[Paragraph] = [*said]
        self._numbers = [1] * len(names)
        self._reencodes = reencodes
        self._held: list[list[int]] = [[] for _ in names]  # the tokens of each worker's own block
        self._queues = [[script.separator, *self._opening(row)] for row in range(len(names))]
        self._fed = [0] * len(names)  # the number of the last token that each row has fed
        self._sampled: set[int] = set()  # rows, after the last pass
        self._ask_every = ask_every if script.format.question else 0
        self._seed, self._asks = seed_words([stream_seed(seed, "asked")]), 0
        self._since, self._due = 0, [False] * len(names)
        # after which token, what, and what it weighs
        self._learned: list[tuple[int, int, float]] = []

    def feed(self) -> None:
        """A pass."""
        width = WIDTH if any(len(queue) > 1 for queue in self._queues) else 1
        new = [queue[:width] for queue in self._queues]
        self._queues = [queue[width:] for queue in self._queues]
        for row, numbers in enumerate(self._recorder.feed(new, self._rows)):
            if len(numbers):
                self._fed[row] = int(numbers[-1])
                self._held[row] += new[row]
                own = self._pupils[row].own
                own.text += self._script.codec.decode(new[row])
                if not own.opening and not self._queues[row]:
                    own.opening = len(own.text)

    def sample(self) -> bool:
        """Every worker that has fed all writes a token, by what it sees in this pass. Returns
        whether the session is over."""
        new: dict[int, int] = {}
        for row, pupil in enumerate(self._pupils):
            if not self._queues[row]:
                new[row], weight = pupil.write(self._sight(row))
                self._learned.append((self._fed[row], new[row], weight))
        if self._script.end in new.values():
            return True
        for question, left in self._lulls.items():
            self._lulls[question] = max(0, left - 1)
        due = [*self._due]  # a step ends before the worker to ask is chosen
        self._ask(len(new))
        self._sampled = {*new}
        for row, token in new.items():
            self._queues[row] = [token]
            if token == self._script.separator:
                self._turn(row, due[row])
        return False

    def feed_sampled(self) -> None:
        """A pass for what was sampled last, as a session makes it before its end."""
        last = [queue[: row in self._sampled] for row, queue in enumerate(self._queues)]
        self._recorder.feed(last, self._rows)
        for pupil, tokens in zip(self._pupils, last, strict=True):
            pupil.own.text += self._script.codec.decode(tokens)

    def guess(self) -> None:
        """The finisher sees what all workers have written, and boxes what is known. The one before
        is taken away."""
        asked = self._script.codec.encode(self._script.format.finisher)
        sight = Sight(self._finished, [pupil.own for pupil in self._pupils])
        text = box(
            self._problem,
            {
                **worked(self._problem, (*sight.finished, *sight.others)),
                **sight.results,
                **{number: answer for number, (answer, _) in findings(sight).items()},
            },
        ).partition("{")[2]
        answer = self._script.following(self._script.format.finisher, text)
        finisher = self._blocks.index(FINISHER)
        self._recorder.cut(finisher, 0)
        sees = [*map(self._blocks.index, self._layout.overview(self._names[-1])), finisher]
        [numbers] = self._recorder.feed([[*asked, *answer]], [sees], rows=[len(self._names)])
        self._learned += [
            (int(at), token, 1.0)
            for at, token in zip(numbers[len(asked) - 1 :], answer, strict=False)
        ]

    def lesson(self) -> Lesson:
        at, targets, weights = zip(*self._learned, strict=True) if self._learned else ((), (), ())
        return Lesson(
            self._recorder.trace(names=self._blocks),
            np.asarray(at, np.int32),
            np.asarray(targets, np.int32),
            np.asarray(weights, np.float32),
        )

    def _sight(self, row: int) -> Sight:
        """The present contents of the blocks that a worker sees, as paragraphs."""
        seen = {self._blocks[block] for block in self._rows[row]}
        others = [
            p.own
            for r, p in enumerate(self._pupils)
            if r != row and self._layout.written(p.name) in seen
        ]
        return Sight(self._finished, others)

    def _turn(self, row: int, asked: bool) -> None:
        """A step has ended."""
        pupil = self._pupils[row]
        name = pupil.name
        if name in self._layout.moves:
            source, target = self._rows[row][-1], self._blocks.index(self._layout.moves[name])
            if self._reencodes:
                self._recorder.cut(source, 0)
                self._recorder.text(self._held[row], target)
            else:
                self._recorder.move(source, target)
            self._held[row] = []
        self._finished.append(pupil.own)
        self._numbers[row] += 1
        self._queues[row] += self._opening(row, asked)
        self._due[row] &= not asked
        pupil.begin(asked)

    def _opening(self, row: int, asked: bool = False) -> list[int]:
        name, number, format = self._names[row], self._numbers[row], self._script.format
        stays = number > 1 and name not in self._layout.moves
        text = (
            (format.question if asked else "")
            if stays
            else format.opening(name, number, names=self._names, ask=asked)
        )
        return self._script.codec.encode(text.rstrip(" "))

    def _ask(self, sampled: int) -> None:
        """Chooses, after every `ask_every` tokens of all workers, one of them for a question in its
        next step."""
        self._since += sampled
        if self._ask_every and self._since >= self._ask_every:
            self._since -= self._ask_every
            [chance] = np.asarray(_uniforms(self._seed, np.array([self._asks])))
            self._asks += 1
            self._due[int(chance * np.float32(len(self._names)))] = True
