"""The problems of the embedded model: arithmetic questions, their worked solutions, and how two
workers share them.

The form is the sanity check of Hogwild! Inference (section 4.1): five independent questions in one
prompt, answered in one `\\boxed{...}`. There may be fewer or more of them, and some may go on from
the answer of another one ("twice the answer of 2, plus 7"). A solution is a run of paragraphs, each
opened by a blank line and a header that names its writer and its step:

    Alice 1: Question 1: 47+38. 7+8=15, 4+3+1=8. Answer 1: 85.

    Alice 2: Question 2: ...

Two workers divide the questions by one rule (`next_move`): Alice takes the lowest-numbered question
that nobody is seen to have claimed, Bob the highest, of those that can be worked out by what they
see; with none left a worker waits in a very short paragraph until it sees more results, and boxes
them when it sees all.
"""

import dataclasses
import random
import re
from collections.abc import Container, Sequence

from jaxshare.serving.evaluation.arithmetic_forms import TAUGHT, Form

NAMES = ("Alice", "Bob")
SEPARATOR = "\n\n"
"""Opens every paragraph, and so ends the one before: one token of the embedded tokenizer."""
QUESTIONS = 5
MOST_QUESTIONS = 10
BOX = -1
WAIT = 0

_THINGS = ("pens", "cups", "books", "eggs")
_SHORT = 0.15
"""The share of numbers of one digit among those that a person types."""
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_CLAIM = re.compile(r"Question (\d+)")
_RESULT = re.compile(r"Answer (\d+): (\d+)\.")


@dataclasses.dataclass(frozen=True)
class Question:
    """One question: its text as the prompt shows it, and the expression it stands for (`operator`
    is one of + - *)."""

    text: str
    left: int
    operator: str
    right: int

    def typed(self, form: Form) -> str:
        """The question as a form shows it; one in words stands as it is."""
        in_signs = self.text == TAUGHT.sum(self.left, self.operator, self.right)
        return form.sum(self.left, self.operator, self.right) if in_signs else self.text

    @property
    def answer(self) -> int:
        return {
            "+": self.left + self.right,
            "-": self.left - self.right,
            "*": self.left * self.right,
        }[self.operator]

    def working(self) -> str:
        """The expression, then digit by digit from the ones up, carry or borrow always written:
        `47+38. 7+8=15, 4+3+1=8.`"""
        (tens, ones), right = divmod(self.left, 10), self.right
        if self.operator == "*":
            (tens, ones), digit = divmod(max(self.left, right), 10), min(self.left, right)
            low, high = ones * digit, tens * digit
            steps = f"{ones}*{digit}={low}, {tens}*{digit}={high}, {high}+{low // 10}={high + low // 10}"
        elif self.operator == "+":
            low = ones + right % 10
            steps = f"{ones}+{right % 10}={low}, {tens}+{right // 10}+{low // 10}={tens + right // 10 + low // 10}"
        else:
            borrow = int(ones < right % 10)
            low = ones + 10 * borrow
            steps = f"{low}-{right % 10}={low - right % 10}, {tens}-{right // 10}-{borrow}={tens - right // 10 - borrow}"
        return f"{self.left}{self.operator}{self.right}. {steps}."


@dataclasses.dataclass(frozen=True)
class Dependent:
    """A question that goes on from the answer of another one of its problem: `times` that answer,
    plus `added`.

    Attributes:
      source: the number of the other question, from 1. That one is a `Question`.
      times: 1 or 2.
      added: at least 1.
    """

    source: int
    times: int
    added: int

    @property
    def text(self) -> str:
        """The question as the prompt shows it."""
        return (
            f"{'twice ' if self.times == 2 else ''}the answer of {self.source}, plus {self.added}"
        )

    def typed(self, form: Form) -> str:
        """The question as a form shows it: as it is."""
        return self.text

    def value(self, answer: int) -> int:
        """Its answer, from that of the other one."""
        return self.times * answer + self.added

    def working(self, answer: int) -> str:
        """As `Question.working`, the answer of the other question put in: `84+84+7. 4+4=8,
        8+8+0=16. 8+7=15, 6+0+1=7, 1+0+0=1.`"""
        sums = [(answer, answer)] * (self.times - 1) + [(self.times * answer, self.added)]
        return f"{'+'.join([str(answer)] * self.times)}+{self.added}. {' '.join(f'{_long_addition(*pair)}.' for pair in sums)}"


@dataclasses.dataclass(frozen=True)
class SumsProblem:
    """Questions, asked at once: 1 to `MOST_QUESTIONS`.

    Attributes:
      questions: what is asked.
      form: how it stands in the user's message.

    Raises:
      ValueError: another number of questions, or one that depends on what is no `Question` of the
        problem.
    """

    questions: tuple[Question | Dependent, ...]
    form: Form = TAUGHT

    def __post_init__(self):
        if not 1 <= len(self.questions) <= MOST_QUESTIONS:
            raise ValueError(
                f"a problem has 1 to {MOST_QUESTIONS} questions; got {len(self.questions)}"
            )
        alone = {number for number, q in enumerate(self.questions, 1) if isinstance(q, Question)}
        for number, q in enumerate(self.questions, 1):
            if isinstance(q, Dependent) and q.source not in alone:
                raise ValueError(
                    f"question {number} goes on from the answer of {q.source}, which is no "
                    "question that stands by itself"
                )

    @property
    def answers(self) -> tuple[int, ...]:
        return tuple(map(self._answer, self.questions))

    def prompt(self) -> str:
        """The text of the user's message."""
        return self.form.message(
            instruction(len(self.questions)),
            [question.typed(self.form) for question in self.questions],
        )

    def messages(self, names: Sequence[str] = NAMES[:1]) -> list[dict[str, str]]:
        """Chat messages; the system message says who works: ("Alice",) or ("Alice", "Bob").

        Raises:
          ValueError: for other names.
        """
        return [_system(names), {"role": "user", "content": self.prompt()}]

    def body(self, move: int) -> str:
        """The paragraph after its header, without the separator that ends it.

        Args:
          move: the number of a question, from 1, or BOX.
        """
        if move == BOX:
            return f" \\boxed{{{', '.join(map(str, self.answers))}}}"
        question = self.questions[move - 1]
        working = (
            question.working(self._source(question))
            if isinstance(question, Dependent)
            else question.working()
        )
        return f" Question {move}: {working} Answer {move}: {self._answer(question)}."

    def solution(self) -> str:
        """All that a lone Alice writes, from the first separator to the closed box; the end token
        comes after it."""
        text, step, move = "", 0, WAIT
        while move != BOX:
            step, move = step + 1, next_move(NAMES[0], text, self)
            text += SEPARATOR + header(NAMES[0], step) + self.body(move)
        return text

    def open(self, solved: Container[int]) -> set[int]:
        """The questions that can be worked out by somebody who knows the answers of `solved`."""
        return {
            number
            for number, q in enumerate(self.questions, 1)
            if isinstance(q, Question) or q.source in solved
        }

    def _answer(self, question: Question | Dependent) -> int:
        return (
            question.value(self._source(question))
            if isinstance(question, Dependent)
            else question.answer
        )

    def _source(self, question: Dependent) -> int:
        return self._answer(self.questions[question.source - 1])


def instruction(questions: int) -> str:
    """The first line of a prompt."""
    listed = (
        "answer1, ..., answer{}"
        if questions > 2
        else "answer1, answer{}"
        if questions == 2
        else "answer{}"
    )
    return f"Solve these problems and return comma-separated answers \\boxed{{{listed.format(questions)}}}:"


def make_problem(
    rng: random.Random, questions: int = QUESTIONS, *, dependent: bool = False
) -> SumsProblem:
    """Draws a problem: sums and differences of two-digit numbers, products of a two-digit number
    and a digit.

    Args:
      rng: what decides.
      questions: how many, 1 to `MOST_QUESTIONS`.
      dependent: two in five of them, and one at least, go on from the answer of another one, which
        may come before or after it.

    Raises:
      ValueError: another number of questions, or a single one that is to depend on another.
    """
    if dependent and questions < 2:
        raise ValueError(
            f"a problem of {questions} questions has none that another one could go on from; draw "
            "at least 2"
        )
    made: list[Question | Dependent] = [_make_question(rng) for _ in range(questions)]
    if dependent:
        order = rng.sample(range(questions), questions)
        count = max(1, 2 * questions // 5)
        for place in order[:count]:
            made[place] = Dependent(
                1 + rng.choice(order[count:]), rng.randint(1, 2), rng.randint(1, 99)
            )
    return SumsProblem(tuple(made))


def typed_problem(rng: random.Random, questions: int, form: Form) -> SumsProblem:
    """Draws a problem as a person would type it: as `make_problem`, with some numbers of one digit,
    on either side.

    Args:
      rng: what decides.
      questions: how many, 1 to `MOST_QUESTIONS`.
      form: of the message. Questions in words, such as "27 boxes of 6 pens", stand among those of
        `TAUGHT` alone.

    Raises:
      ValueError: another number of questions.
    """
    return SumsProblem(tuple(_typed_question(rng, form) for _ in range(questions)), form)


def few_shot_messages(
    examples: Sequence[SumsProblem], problem: SumsProblem
) -> list[dict[str, str]]:
    """A chat in which Alice has solved `examples`, a turn each, and is now asked `problem`. An
    example takes about 300 tokens."""
    turns = [_system(NAMES[:1])]
    for example in examples:
        turns += [
            {"role": "user", "content": example.prompt()},
            {"role": "assistant", "content": example.solution()},
        ]
    return [*turns, {"role": "user", "content": problem.prompt()}]


def header(name: str, step: int) -> str:
    """What stands between the separator and the body of a paragraph; `step` counts a worker's own
    paragraphs from 1."""
    return f"{name} {step}:"


def wait_body(other: str) -> str:
    """The body of a paragraph of a worker that has nothing to do until `other` is ready."""
    return f" I wait for {other}."


def next_move(name: str, seen: str, problem: SumsProblem | None = None) -> int:
    """What `name` does next, given everything visible to it after the prompt: finished paragraphs
    and the other's unfinished one.

    Args:
      problem: that is solved; default one of five questions that stand by themselves.

    Returns:
      The number of the question to claim, or WAIT, or BOX.
    """
    solved = results(seen)
    questions = problem.open(solved) if problem else set(range(1, QUESTIONS + 1))
    free = sorted(questions - claimed(seen))
    if free:
        return free[0] if name == NAMES[0] else free[-1]
    return BOX if len(solved) == (len(problem.questions) if problem else QUESTIONS) else WAIT


def claimed(text: str) -> set[int]:
    """The questions that some paragraph in `text` has taken up, finished or not."""
    return {int(n) for n in _CLAIM.findall(text)}


def results(text: str) -> dict[int, int]:
    """The answers that finished paragraphs in `text` give, by question; the last one stands where a
    question was answered twice."""
    return {int(n): int(answer) for n, answer in _RESULT.findall(text)}


def boxed(text: str) -> list[str] | None:
    """The comma-separated entries of the last closed `\\boxed{...}` in `text`, stripped; None
    without one."""
    found = _BOX.findall(text)
    return [entry.strip() for entry in found[-1].split(",")] if found else None


def check(text: str, problem: SumsProblem) -> list[bool]:
    """Whether each of the boxed answers in `text` is right. All are wrong without a box, or with
    more entries in it than questions; a missing entry is wrong."""
    entries, count = boxed(text) or [], len(problem.questions)
    entries = [*entries, *[""] * (count - len(entries))] if len(entries) <= count else [""] * count
    return [entry == str(answer) for entry, answer in zip(entries, problem.answers, strict=True)]


def _system(names: Sequence[str]) -> dict[str, str]:
    if tuple(names) not in (NAMES[:1], NAMES):
        raise ValueError(
            "the workers of a problem are ('Alice',) or ('Alice', 'Bob'), the names the model "
            f"learned; got {tuple(names)}"
        )
    return {
        "role": "system",
        "content": "Alice works alone." if len(names) == 1 else "Alice and Bob work together.",
    }


def _make_question(rng: random.Random) -> Question:
    operator, in_words, things = rng.choice("+-*"), rng.random() < 1 / 3, rng.choice(_THINGS)
    left = rng.randint(10, 99)
    right = {"+": (10, 99), "-": (10, left), "*": (2, 9)}[operator]
    right = rng.randint(*right)
    if not in_words:
        text = TAUGHT.sum(left, operator, right)
    elif operator == "+":
        text = f"{left} red and {right} blue {things}"
    elif operator == "-":
        text = f"{left} {things}, {right} sold"
    else:
        text = f"{left} boxes of {right} {things}"
    return Question(text, left, operator, right)


def _typed_question(rng: random.Random, form: Form) -> Question:
    question = _make_question(rng)
    left, operator, right = question.left, question.operator, question.right
    if form == TAUGHT and question.text != TAUGHT.sum(left, operator, right):
        return question
    if rng.random() < _SHORT:
        left = rng.randint(1, 9)
        right = rng.randint(0, left) if operator == "-" else right
    elif rng.random() < _SHORT and operator != "*":
        right = rng.randint(1, 9)
    if operator == "*" and rng.random() < 0.5:
        left, right = right, left
    return Question(TAUGHT.sum(left, operator, right), left, operator, right)


def _long_addition(left: int, right: int) -> str:
    """Digit by digit from the ones up, the carry always written: `8+7=15, 6+0+1=7`."""
    steps, carry = [], 0
    for place in range(max(len(str(left)), len(str(right)))):
        digits = [left // 10**place % 10, right // 10**place % 10]
        total = sum(digits) + carry
        steps.append(f"{'+'.join(map(str, digits + [carry] * (place > 0)))}={total}")
        carry = total // 10
    return ", ".join(steps)
