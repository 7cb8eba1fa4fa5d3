"""The problems of the embedded model: arithmetic questions, their solutions, and their division.

The form is the sanity check of Hogwild! Inference (section 4.1): five independent questions in one
prompt, answered in one `\\boxed{...}`. There may be fewer or more of them, and some may depend on
the answer of another one ("twice the answer of 2, plus 7"). A solution is a run of paragraphs, each
opened by a blank line and a header that names its writer and its step:

    Alice 1: Question 1: 47+38. 7+8=15, 4+3+1=8. Answer 1: 85.

    Alice 2: Question 2: ...

Two workers divide the questions by one rule (`next_move`): Alice takes the lowest-numbered question
that no paragraph in sight has claimed, Bob the highest, of those that can be solved from what they
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
MAX_QUESTIONS = 10
BOX = -1
WAIT = 0
REFUSAL = " I can only add, subtract and multiply."
"""The body of the one paragraph that answers anything else."""

_THINGS = ("pens", "cups", "books", "eggs")
_SHORT = 0.15
"""The share of one-digit numbers in typed problems."""
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_CLAIM = re.compile(r"Question (\d+)")
_RESULT = re.compile(r"Answer (\d+): (\d+)\.")


@dataclasses.dataclass(frozen=True)
class Question:
    """One question: its text in the prompt, and its expression (`operator` is one of + - *)."""

    text: str
    left: int
    operator: str
    right: int

    def typed(self, form: Form) -> str:
        """The question in a form; a question in words stays as it is."""
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
        """The expression and its steps, digit by digit from the ones up: `47+38. 7+8=15, 4+3+1=8.`

        Every carry or borrow is written, also where it is 0.
        """
        (tens, ones), right = divmod(self.left, 10), self.right
        if self.operator == "*":
            (tens, ones), digit = divmod(max(self.left, right), 10), min(self.left, right)
            low, high = ones * digit, tens * digit
            total = high + low // 10
            steps = f"{ones}*{digit}={low}, {tens}*{digit}={high}, {high}+{low // 10}={total}"
        elif self.operator == "+":
            low = ones + right % 10
            high = tens + right // 10 + low // 10
            steps = f"{ones}+{right % 10}={low}, {tens}+{right // 10}+{low // 10}={high}"
        else:
            borrow = int(ones < right % 10)
            low = ones + 10 * borrow
            first, second = low - right % 10, tens - right // 10 - borrow
            steps = f"{low}-{right % 10}={first}, {tens}-{right // 10}-{borrow}={second}"
        return f"{self.left}{self.operator}{self.right}. {steps}."


@dataclasses.dataclass(frozen=True)
class Dependent:
    """A question about the answer of another one of its problem: `times` that answer, plus `added`.

    Attributes:
      source: the number of the other question, from 1, which is a `Question`.
      times: 1 or 2.
      added: at least 1.
    """

    source: int
    times: int
    added: int

    @property
    def text(self) -> str:
        """The question in the prompt."""
        return (
            f"{'twice ' if self.times == 2 else ''}the answer of {self.source}, plus {self.added}"
        )

    def typed(self, form: Form) -> str:
        """The question in a form: its text."""
        return self.text

    def value(self, answer: int) -> int:
        """Its answer, given that of the other question."""
        return self.times * answer + self.added

    def working(self, answer: int) -> str:
        """The number of the other question, the expression with its answer put in, and the steps.

        See `Question.working`: `Answer 2: 84+84+7. 4+4=8, 8+8+0=16. 8+7=15, 6+0+1=7, 1+0+0=1.` The
        number comes first, so that which answer to use is written before it has to be looked up.
        """
        sums = [(answer, answer)] * (self.times - 1) + [(self.times * answer, self.added)]
        expression = "+".join([str(answer)] * self.times)
        steps = " ".join(f"{_long_addition(*pair)}." for pair in sums)
        return f"Answer {self.source}: {expression}+{self.added}. {steps}"


@dataclasses.dataclass(frozen=True)
class SumsProblem:
    """1 to `MAX_QUESTIONS` questions in one prompt.

    Attributes:
      questions: in order.
      form: of the user's message.
      checked: the message also asks the workers to check what others answer.

    Raises:
      ValueError: another number of questions, or one that depends on anything but a `Question` of
        the problem.
    """

    questions: tuple[Question | Dependent, ...]
    form: Form = TAUGHT
    checked: bool = False

    def __post_init__(self):
        if not 1 <= len(self.questions) <= MAX_QUESTIONS:
            raise ValueError(
                f"a problem has 1 to {MAX_QUESTIONS} questions; got {len(self.questions)}"
            )
        independent = {
            number for number, q in enumerate(self.questions, 1) if isinstance(q, Question)
        }
        for number, q in enumerate(self.questions, 1):
            if isinstance(q, Dependent) and q.source not in independent:
                raise ValueError(
                    f"question {number} depends on the answer of {q.source}, which is no "
                    "independent question"
                )

    @property
    def answers(self) -> tuple[int, ...]:
        return tuple(map(self._answer, self.questions))

    def prompt(self) -> str:
        """The text of the user's message."""
        return self.form.message(
            instruction(len(self.questions), checked=self.checked),
            [question.typed(self.form) for question in self.questions],
        )

    def messages(self, names: Sequence[str] = NAMES[:1]) -> list[dict[str, str]]:
        """The chat messages; the system message names the workers: ("Alice",) or ("Alice", "Bob").

        Raises:
          ValueError: for other names.
        """
        return [system_message(names), {"role": "user", "content": self.prompt()}]

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
        """The text of a lone Alice, from the first separator to the closed box.

        The end token comes after it.
        """
        text, step, move = "", 0, WAIT
        while move != BOX:
            step, move = step + 1, next_move(NAMES[0], text, self)
            text += SEPARATOR + header(NAMES[0], step) + self.body(move)
        return text

    def open(self, solved: Container[int]) -> set[int]:
        """The questions that can be solved given the answers of `solved`."""
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


def instruction(questions: int, *, checked: bool = False) -> str:
    """The first line of a prompt; `checked` also asks the workers to check what others answer."""
    listed = (
        "answer1, ..., answer{}"
        if questions > 2
        else "answer1, answer{}"
        if questions == 2
        else "answer{}"
    )
    box = f"\\boxed{{{listed.format(questions)}}}"
    joint = ", check what others answer and" if checked else " and"
    return f"Solve these problems{joint} return comma-separated answers {box}:"


def make_problem(
    rng: random.Random, questions: int = QUESTIONS, *, dependent: bool = False
) -> SumsProblem:
    """Samples a problem of sums, differences and products.

    Sums and differences are of two-digit numbers, products of a two-digit number and a digit.

    Args:
      rng: the source of randomness.
      questions: their number, 1 to `MAX_QUESTIONS`.
      dependent: two in five questions, and at least one, depend on the answer of another one, which
        may come before or after it.

    Raises:
      ValueError: another number of questions, or a single one with `dependent`.
    """
    if dependent and questions < 2:
        raise ValueError(
            f"a problem of {questions} questions has none that another one could depend on; sample "
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
    """Samples a problem as people type it: `make_problem` with some one-digit numbers.

    These may be on either side.

    Args:
      rng: the source of randomness.
      questions: their number, 1 to `MAX_QUESTIONS`.
      form: of the message. Questions in words, such as "27 boxes of 6 pens", occur in `TAUGHT`
        alone.

    Raises:
      ValueError: another number of questions.
    """
    return SumsProblem(tuple(_typed_question(rng, form) for _ in range(questions)), form)


def few_shot_messages(
    examples: Sequence[SumsProblem], problem: SumsProblem
) -> list[dict[str, str]]:
    """A chat in which Alice has solved `examples`, a turn each, and now gets `problem`.

    An example takes about 300 tokens.
    """
    turns = [system_message(NAMES[:1])]
    for example in examples:
        turns += [
            {"role": "user", "content": example.prompt()},
            {"role": "assistant", "content": example.solution()},
        ]
    return [*turns, {"role": "user", "content": problem.prompt()}]


def header(name: str, step: int) -> str:
    """The text between the separator and the body of a paragraph.

    `step` counts a worker's own paragraphs from 1.
    """
    return f"{name} {step}:"


def refusal() -> str:
    """The answer to anything but sums, differences and products, as `SumsProblem.solution` has it."""
    return SEPARATOR + header(NAMES[0], 1) + REFUSAL


def wait_body(other: str) -> str:
    """The body of a paragraph of a worker that waits until `other` is ready."""
    return f" I wait for {other}."


def next_move(name: str, seen: str, problem: SumsProblem | None = None) -> int:
    """The next move of `name`, given all text visible to it after the prompt.

    Args:
      seen: finished paragraphs and the other worker's unfinished one.
      problem: default one of five independent questions.

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
    """The questions that a paragraph in `text` has claimed, finished or not."""
    return {int(n) for n in _CLAIM.findall(text)}


def results(text: str) -> dict[int, int]:
    """The answers that finished paragraphs in `text` give, by question; of two answers the last."""
    return {int(n): int(answer) for n, answer in _RESULT.findall(text)}


def boxed(text: str) -> list[str] | None:
    """The comma-separated entries of the last closed `\\boxed{...}` in `text`, stripped.

    None without one.
    """
    boxes = _BOX.findall(text)
    return [entry.strip() for entry in boxes[-1].split(",")] if boxes else None


def check(text: str, problem: SumsProblem) -> list[bool]:
    """Marks each of the boxed answers in `text`.

    All are wrong without a box, or with more entries in it than questions; a missing entry is
    wrong.
    """
    entries, count = boxed(text) or [], len(problem.questions)
    entries = [*entries, *[""] * (count - len(entries))] if len(entries) <= count else [""] * count
    return [entry == str(answer) for entry, answer in zip(entries, problem.answers, strict=True)]


def system_message(names: Sequence[str]) -> dict[str, str]:
    """The chat message that names the workers.

    Raises:
      ValueError: for other names than ("Alice",) and ("Alice", "Bob").
    """
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
    """The steps of an addition, digit by digit from the ones up, such as `8+7=15, 6+0+1=7`.

    Every carry is written, also where it is 0.
    """
    steps, carry = [], 0
    for place in range(max(len(str(left)), len(str(right)))):
        digits = [left // 10**place % 10, right // 10**place % 10]
        total = sum(digits) + carry
        steps.append(f"{'+'.join(map(str, digits + [carry] * (place > 0)))}={total}")
        carry = total // 10
    return ", ".join(steps)
