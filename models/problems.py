"""The problems of the embedded model: five arithmetic questions, their worked solutions, and how two workers share them.

The form is the sanity check of Hogwild! Inference (section 4.1): five independent questions in one prompt, answered in one
`\\boxed{...}`. A solution is a run of paragraphs, each opened by a blank line and a header that names its writer and its step:

    Alice 1: Question 1: 47+38. 7+8=15, 4+3+1=8. Answer 1: 85.

    Alice 2: Question 2: ...

Workers divide the questions by one rule (`next_move`): Alice takes the lowest-numbered question that nobody is seen to have
claimed, Bob the highest; with none left a worker waits in a very short paragraph until it sees all five results, then boxes them.
"""

import dataclasses
import random
import re
from collections.abc import Sequence

NAMES = ("Alice", "Bob")
SEPARATOR = "\n\n"
"""Opens every paragraph, and so ends the one before: one token of the embedded tokenizer."""
QUESTIONS = 5
BOX = -1
WAIT = 0

_INSTRUCTION = "Solve these problems and return comma-separated answers \\boxed{answer1, ..., answer5}:"
_THINGS = ("pens", "cups", "books", "eggs")
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_CLAIM = re.compile(r"Question (\d)")
_RESULT = re.compile(r"Answer (\d): (\d+)\.")


@dataclasses.dataclass(frozen=True)
class Question:
    """One question: its text as the prompt shows it, and the expression it stands for (`operator` is one of + - *)."""

    text: str
    left: int
    operator: str
    right: int

    @property
    def answer(self) -> int:
        return {"+": self.left + self.right, "-": self.left - self.right, "*": self.left * self.right}[self.operator]

    def working(self) -> str:
        """The expression, then digit by digit from the ones up, carry or borrow always written: `47+38. 7+8=15, 4+3+1=8.`"""
        (tens, ones), right = divmod(self.left, 10), self.right
        if self.operator == "*":
            low, high = ones * right, tens * right
            steps = f"{ones}*{right}={low}, {tens}*{right}={high}, {high}+{low // 10}={high + low // 10}"
        elif self.operator == "+":
            low = ones + right % 10
            steps = f"{ones}+{right % 10}={low}, {tens}+{right // 10}+{low // 10}={tens + right // 10 + low // 10}"
        else:
            borrow = int(ones < right % 10)
            low = ones + 10 * borrow
            steps = f"{low}-{right % 10}={low - right % 10}, {tens}-{right // 10}-{borrow}={tens - right // 10 - borrow}"
        return f"{self.left}{self.operator}{self.right}. {steps}."


@dataclasses.dataclass(frozen=True)
class Problem:
    """Five questions, asked at once."""

    questions: tuple[Question, ...]

    @property
    def answers(self) -> tuple[int, ...]:
        return tuple(q.answer for q in self.questions)

    def prompt(self) -> str:
        """The text of the user's message."""
        return "\n".join([_INSTRUCTION, *(f"{i}. {q.text}" for i, q in enumerate(self.questions, 1))])

    def messages(self, names: Sequence[str] = NAMES[:1]) -> list[dict[str, str]]:
        """Chat messages; the system message says who works: ("Alice",) or ("Alice", "Bob").

        Raises:
          ValueError: for other names.
        """
        return [_system(names), {"role": "user", "content": self.prompt()}]

    def body(self, move: int) -> str:
        """The paragraph after its header, without the separator that ends it.

        Args:
          move: the number of a question, 1 to 5, or BOX.
        """
        if move == BOX:
            return f" \\boxed{{{', '.join(map(str, self.answers))}}}"
        return f" Question {move}: {self.questions[move - 1].working()} Answer {move}: {self.answers[move - 1]}."

    def solution(self) -> str:
        """All that a lone Alice writes, from the first separator to the closed box; the end token comes after it."""
        moves = [*range(1, QUESTIONS + 1), BOX]
        return "".join(SEPARATOR + header(NAMES[0], step) + self.body(move) for step, move in enumerate(moves, 1))


def make_problem(rng: random.Random) -> Problem:
    """Draws five questions: sums and differences of two-digit numbers, products of a two-digit number and a digit."""
    return Problem(tuple(_make_question(rng) for _ in range(QUESTIONS)))


def few_shot_messages(examples: Sequence[Problem], problem: Problem) -> list[dict[str, str]]:
    """A chat in which Alice has solved `examples`, a turn each, and is now asked `problem`. An example takes about 300 tokens."""
    turns = [_system(NAMES[:1])]
    for example in examples:
        turns += [{"role": "user", "content": example.prompt()}, {"role": "assistant", "content": example.solution()}]
    return [*turns, {"role": "user", "content": problem.prompt()}]


def header(name: str, step: int) -> str:
    """What stands between the separator and the body of a paragraph; `step` counts a worker's own paragraphs from 1."""
    return f"{name} {step}:"


def wait_body(other: str) -> str:
    """The body of a paragraph of a worker that has nothing to do until `other` is ready."""
    return f" I wait for {other}."


def next_move(name: str, seen: str) -> int:
    """What `name` does next, given everything visible to it after the prompt: finished paragraphs and the other's unfinished one.

    Returns:
      The number of the question to claim, or WAIT, or BOX.
    """
    free = sorted(set(range(1, QUESTIONS + 1)) - claimed(seen))
    if free:
        return free[0] if name == NAMES[0] else free[-1]
    return BOX if len(results(seen)) == QUESTIONS else WAIT


def claimed(text: str) -> set[int]:
    """The questions that some paragraph in `text` has taken up, finished or not."""
    return {int(n) for n in _CLAIM.findall(text)}


def results(text: str) -> dict[int, int]:
    """The answers that finished paragraphs in `text` give, by question; the last one stands where a question was answered twice."""
    return {int(n): int(answer) for n, answer in _RESULT.findall(text)}


def boxed(text: str) -> list[str] | None:
    """The comma-separated entries of the last closed `\\boxed{...}` in `text`, stripped; None without one."""
    found = _BOX.findall(text)
    return [entry.strip() for entry in found[-1].split(",")] if found else None


def check(text: str, problem: Problem) -> list[bool]:
    """Whether each of the five boxed answers in `text` is right. All are wrong without a box, or with more than five entries in it; a
    missing entry is wrong."""
    entries = boxed(text) or []
    entries = [*entries, *[""] * (QUESTIONS - len(entries))] if len(entries) <= QUESTIONS else [""] * QUESTIONS
    return [entry == str(answer) for entry, answer in zip(entries, problem.answers, strict=True)]


def _system(names: Sequence[str]) -> dict[str, str]:
    if tuple(names) not in (NAMES[:1], NAMES):
        raise ValueError(f"the workers of a problem are ('Alice',) or ('Alice', 'Bob'), the names the model learned; got {tuple(names)}")
    return {"role": "system", "content": "Alice works alone." if len(names) == 1 else "Alice and Bob work together."}


def _make_question(rng: random.Random) -> Question:
    operator, in_words, things = rng.choice("+-*"), rng.random() < 1 / 3, rng.choice(_THINGS)
    left = rng.randint(10, 99)
    right = {"+": (10, 99), "-": (10, left), "*": (2, 9)}[operator]
    right = rng.randint(*right)
    if not in_words:
        text = f"{left} {operator} {right}"
    elif operator == "+":
        text = f"{left} red and {right} blue {things}"
    elif operator == "-":
        text = f"{left} {things}, {right} sold"
    else:
        text = f"{left} boxes of {right} {things}"
    return Question(text, left, operator, right)
