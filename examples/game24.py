"""The game of 24 by Tree of Thoughts: make 24 of four numbers, each used once, with + - * / and
brackets.

    jaxshare agents run examples/game24.py -- 4 9 10 13
    jaxshare agents run examples/game24.py --model Qwen/Qwen3-8B --trace trace.json --plots pictures -- --puzzles game24.csv --limit 10

The model proposes one step at a time, two numbers and what becomes of them; another agent asks it
what the numbers that are left are good for, and the search goes on from the best. Nothing that the
model says is believed: steps and the final expression are worked out in fractions. The scripted
model is no language model: every second of its proposals is a step on a way to 24, found by trying
all.
"""

import argparse
import ast
import collections
import csv
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from jaxshare.serving.agents import Budget, Judged, ModelCall, agent, llm, spawn
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.search import TreeOfThoughts

PUZZLES = ("4 9 10 13", "1 1 4 6", "2 3 5 12", "1 3 4 6", "3 3 8 8")
GOAL = 24

PROPOSE = """\
We want to get from the numbers below to {goal}. In one step you take two of them, calculate with + - * or /, and put the result in
their place.
Numbers: {numbers}
Write one step that brings us closer, in this form and nothing else:
a + b = c"""

VALUE = """\
These numbers are left: {numbers}
Each must be used exactly once, with + - * / and brackets, to get {goal}. Try a few ways, then end with one word on a line of its own:
sure - you have found a way; likely - the numbers look right for it; impossible - they are too small, too large, or do not fit."""

SCORES = {"sure": 20.0, "likely": 1.0, "impossible": 0.001}
"""As in the paper of Tree of Thoughts: one 'sure' is worth more than all that is merely likely."""

Number = tuple[Fraction, str]
"""What it is, and the expression that it came from."""

OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else None,
}


def step(line: str, numbers: Sequence[Number]) -> list[Number]:
    """The numbers after a step such as "13 - 9 = 4"; what the step says comes out is not looked at.

    Raises:
      ValueError: no step, or one that these numbers do not allow.
    """
    found = re.search(r"(-?[\d/]+)\s*([-+*/])\s*(-?[\d/]+)\s*=", line)
    if not found:
        raise ValueError("there is no step of the form a + b = c")
    left = [*numbers]
    taken = []
    for text in found.group(1, 3):
        at = next((i for i, (value, _) in enumerate(left) if str(value) == text), None)
        if at is None:
            raise ValueError(f"{text} is not among the numbers that are left")
        taken.append(left.pop(at))
    (a, a_text), (b, b_text) = taken
    value = OPERATIONS[found[2]](a, b)
    if value is None:
        raise ValueError("division by zero")
    return [*left, (value, f"({a_text} {found[2]} {b_text})")]


def value_of(expression: str) -> tuple[Fraction, list[int]]:
    """What an expression comes to, exactly, and the numbers in it.

    Raises:
      ValueError: anything but whole numbers, + - * / and brackets, or a division by zero.
    """
    used: list[int] = []
    operators = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

    def worked_out(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                used.append(number)
                return Fraction(number)
            case ast.BinOp(left, operator, right) if type(operator) in operators:
                value = OPERATIONS[operators[type(operator)]](worked_out(left), worked_out(right))
                if value is not None:
                    return value
        raise ValueError(
            f"{expression!r} is not an expression of whole numbers with + - * / and brackets that "
            "has a value"
        )

    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"{expression!r} is not an expression ({error})") from None
    return worked_out(tree.body), used


def is_solution(expression: str, puzzle: Sequence[int]) -> bool:
    """Whether an expression uses each number of the puzzle once, and comes to 24."""
    try:
        value, used = value_of(expression)
    except ValueError:
        return False
    return value == GOAL and sorted(used) == sorted(puzzle)


def shown_numbers(numbers: Sequence[Number]) -> str:
    return " ".join(str(value) for value, _ in numbers)


def vote(text: str) -> float:
    """The score of what the model says of numbers, by the last of the three words in it."""
    words = [word for word in re.findall(r"[a-z]+", text.lower()) if word in SCORES]
    if not words:
        raise ValueError(f"none of {', '.join(SCORES)} is in it")
    return SCORES[words[-1]]


@agent
async def judge(judged: Judged):
    """What the numbers that are left are good for: three opinions, added up. An expression that is
    checked is worth the most."""
    if judged.finished:
        return 100.0
    prompt = VALUE.format(goal=GOAL, numbers=shown_numbers(judged.variables["numbers"]))
    texts = await llm(prompt, n=3, temperature=0.7, max_new_tokens=128)
    total = 0.0
    for text in texts:
        try:
            total += vote(text)
        except ValueError:
            continue
    return total


@agent(
    supervisor=TreeOfThoughts(
        breadth=6, keep=3, value=judge, prune=0.01, enough=100.0, budget=Budget(calls=400)
    )
)
async def solve(puzzle):
    """An expression that makes 24 of the puzzle's numbers. A step that cannot be ends its path."""
    numbers = [(Fraction(number), str(number)) for number in puzzle]
    while len(numbers) > 1:
        line = await llm(
            PROPOSE.format(goal=GOAL, numbers=shown_numbers(numbers)),
            temperature=0.9,
            max_new_tokens=32,
            stop="\n",
        )
        numbers = step(line, numbers)
    expression = numbers[0][1].removeprefix("(").removesuffix(")")
    if not is_solution(expression, puzzle):
        raise ValueError(f"{expression} is not {GOAL}")
    return expression


@agent
async def solve_all(puzzles, solver=None):
    """All puzzles at once: their model calls run together. Of each its expression, or None.

    Another solver is `solve` under another supervisor.
    """
    children = [spawn(solver or solve, puzzle) for puzzle in puzzles]
    found = []
    for child in children:
        try:
            found.append(await child.result())
        except Exception:
            found.append(None)
    return {
        " ".join(map(str, puzzle)): expression
        for puzzle, expression in zip(puzzles, found, strict=True)
    }


# What `jaxshare agents run` looks for.

AGENT = solve_all
MODEL = "scripted"


def arguments(args: list[str]):
    parser = argparse.ArgumentParser(prog="game24.py", description="Make 24 of four numbers.")
    parser.add_argument(
        "numbers", nargs="*", type=int, help="of one puzzle (default: a handful of puzzles)"
    )
    parser.add_argument(
        "--puzzles", metavar="FILE", help="CSV with a column `Puzzles`, or a puzzle a line"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N puzzles alone")
    given = parser.parse_args(args)
    puzzles = (
        [puzzle_of(" ".join(map(str, given.numbers)))]
        if given.numbers
        else [*read(given.puzzles)]
        if given.puzzles
        else [puzzle_of(text) for text in PUZZLES]
    )
    return (puzzles[: given.limit],)


def read(file: str) -> Iterator[list[int]]:
    """The puzzles of a file; a ValueError names the line that is none."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the puzzles in {file} cannot be read ({error})") from error
    if lines and "Puzzles" in lines[0].split(","):
        lines = ["", *(row["Puzzles"] for row in csv.DictReader(lines))]
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield puzzle_of(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {file} is no puzzle: {error}") from None


def puzzle_of(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(f"{text!r} is not whole numbers with blanks between them") from None
    if len(numbers) != 4:
        raise ValueError(f"a puzzle has four numbers, and {text!r} has {len(numbers)}")
    return numbers


def shown(value: dict[str, str | None]) -> str:
    lines = [
        f"{puzzle:>14}   {f'{expression} = {GOAL}' if expression else 'not solved'}"
        for puzzle, expression in value.items()
    ]
    return "\n".join([*lines, f"{sum(map(bool, value.values()))} of {len(value)} solved"])


# The stand-in for a model.


def steps(numbers: Sequence[Fraction]) -> list[tuple[str, tuple[Fraction, ...]]]:
    """All steps that these numbers allow, and what they leave, in order."""
    found = {}
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
        for sign, operation in OPERATIONS.items():
            if (value := operation(numbers[i], numbers[j])) is not None:
                found[f"{numbers[i]} {sign} {numbers[j]} = {value}"] = tuple(sorted([*rest, value]))
    return [*found.items()]


@functools.cache
def can_reach(numbers: tuple[Fraction, ...]) -> bool:
    """Whether 24 can be made of numbers in order, by trying everything."""
    return (
        numbers[0] == GOAL
        if len(numbers) == 1
        else any(can_reach(left) for _, left in steps(numbers))
    )


def asked_numbers(call: ModelCall) -> tuple[Fraction, ...]:
    found = re.findall(r"(?:Numbers|left): (.*)", call.messages[-1].content)
    return tuple(sorted(Fraction(text) for text in found[-1].split()))


def proposal(call: ModelCall) -> str:
    """A firing of an even number gets a step from which 24 can be made, as far as there are such;
    one of an odd number any other."""
    sound: dict[bool, list[str]] = collections.defaultdict(list)
    for line, left in steps(asked_numbers(call)):
        sound[can_reach(left)].append(line)
    number = call.state[-1]
    lines = sound[number % 2 == 0] or sound[number % 2 == 1]
    return lines[number // 2 * 7 % len(lines)]


def opinion(call: ModelCall) -> str:
    return "I have tried all ways.\n" + ("sure" if can_reach(asked_numbers(call)) else "impossible")


def scripted() -> ScriptedModel:
    return ScriptedModel({"Write one step": proposal, "These numbers are left": opinion})
