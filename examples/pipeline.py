"""Three agents that mark a worksheet: a coordinator that asks the model, one that gathers what to
ask, one that checks what came back.

    jaxshare agents run examples/pipeline.py --plots pictures
    jaxshare agents run examples/pipeline.py --model scripted
    jaxshare agents run examples/pipeline.py -- --worksheet sums.txt

The shape is that of Hive's figure 1b: the main agent does most of the work, and two small ones keep
its context clear. `gather` reads the worksheet and yields five questions at a time. `check` gets
what the model has written, works every line of it out again, and yields its complaints. Where there
are any, the coordinator asks anew, at a higher temperature. The model that comes with jaxshare
solves such questions: it is what runs by default.
"""

import argparse
import re
from pathlib import Path

from jaxshare.serving.agents import EndedError, agent, llm, spawn, tool
from jaxshare.serving.agents.backends import ScriptedModel

WORKSHEET = """\
Monday
47 + 38
12 * 7
93 - 16
41 red and 58 blue eggs
30 eggs, 12 sold

Tuesday
64 + 19
11 boxes of 5 cups
88 - 43
26 * 3
98 boxes of 2 books
"""

SYSTEM = {"role": "system", "content": "Alice works alone."}
"""What the embedded model was trained with."""
ASK = "Solve these problems and return comma-separated answers \\boxed{answer1, ..., answer5}:\n"
AT_ONCE = 5
ATTEMPTS = 3

QUESTIONS = {
    r"(\d+) \+ (\d+)": "+",
    r"(\d+) - (\d+)": "-",
    r"(\d+) \* (\d+)": "*",
    r"(\d+) red and (\d+) blue \w+": "+",
    r"(\d+) \w+, (\d+) sold": "-",
    r"(\d+) boxes of (\d+) \w+": "*",
}
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def questions_of(text: str) -> list[str]:
    """The lines of a worksheet that are questions."""
    return [
        line.strip()
        for line in text.splitlines()
        if any(re.fullmatch(form, line.strip()) for form in QUESTIONS)
    ]


def complaints_about(questions: list[str], solution: str) -> list[str]:
    """What is wrong with a solution: equations in it that do not hold, answers that do not follow
    from their questions, missing ones."""
    found = []
    for equation in re.finditer(r"(?<![\d+*-])(\d+)((?:[-+*]\d+)+)=(\d+)", solution):
        value = int(equation[1])
        for sign, number in re.findall(r"([-+*])(\d+)", equation[2]):
            value = OPERATIONS[sign](value, int(number))
        if value != int(equation[3]):
            found.append(f"{equation[0]} does not hold")
    answers = boxed(solution)
    if len(answers) != len(questions):
        return [
            *found,
            f"there are {len(answers)} answers in the box to {len(questions)} questions",
        ]
    for question, answer in zip(questions, answers, strict=True):
        if answer != str(answer_to(question)):
            found.append(f"{answer} does not answer {question!r}")
    return found


def answer_to(question: str) -> int:
    """By the form of the question: what the checker holds the model to."""
    for form, sign in QUESTIONS.items():
        if match := re.fullmatch(form, question):
            return OPERATIONS[sign](int(match[1]), int(match[2]))
    raise ValueError(f"{question!r} is no question")


def boxed(text: str) -> list[str]:
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return [answer.strip() for answer in found[-1].split(",")] if found else []


@agent
async def gather(worksheet):
    """Yields the questions of a worksheet, five at a time; the last ones are filled up with the
    first, since the model wants five."""
    questions = await tool(questions_of, worksheet)
    for first in range(0, len(questions), AT_ONCE):
        some = questions[first : first + AT_ONCE]
        yield some + (questions * AT_ONCE)[: AT_ONCE - len(some)]


@agent
async def check():
    """Is resumed with (questions, solution), and yields what is wrong with it; stops when it is
    resumed with None."""
    complaints = []
    while work := (yield complaints):
        complaints = await tool(complaints_about, *work)


@agent
async def mark(worksheet):
    """Every question of the worksheet with an answer that was checked, or None, and how many
    attempts all took."""
    gatherer, checker = spawn(gather, worksheet), spawn(check)
    await checker.next()
    marked, attempts = {}, 0
    while True:
        try:
            questions = await gatherer.next()
        except EndedError:
            break
        prompt = ASK + "\n".join(
            f"{number}. {question}" for number, question in enumerate(questions, 1)
        )
        for attempt in range(ATTEMPTS):
            attempts += 1
            question = {"role": "user", "content": prompt}
            solution = await llm(
                [SYSTEM, question] if attempts == 1 else question,
                max_new_tokens=230,
                temperature=0.4 * attempt,
            )
            checker.resume((questions, solution))
            complaints = await checker.next()
            if not complaints:
                break
        answers = boxed(solution) if not complaints else [None] * len(questions)
        marked |= dict(zip(questions, answers, strict=True))
    return {"answers": marked, "attempts": attempts}


# What `jaxshare agents run` looks for.

AGENT = mark


def arguments(args: list[str]):
    parser = argparse.ArgumentParser(prog="pipeline.py", description="Mark a worksheet.")
    parser.add_argument(
        "--worksheet",
        metavar="FILE",
        help="lines such as `47 + 38`, `12 * 7`, `30 eggs, 12 sold`; others are left out",
    )
    given = parser.parse_args(args)
    if given.worksheet is None:
        return (WORKSHEET,)
    try:
        return (Path(given.worksheet).read_text(encoding="utf-8"),)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the worksheet {given.worksheet} cannot be read ({error})") from error


def shown(value) -> str:
    lines = [
        f"{question:<28}{answer or 'no answer that holds'}"
        for question, answer in value["answers"].items()
    ]
    return "\n".join([*lines, f"{value['attempts']} attempts"])


def scripted() -> ScriptedModel:
    """Answers to the two pages above; the first to Monday's has a mistake in it, which is found."""
    monday = "Question 1: 47+38. 7+8=15, 4+3+1=8. Answer 1: {}. \\boxed{{{}, 84, 77, 99, 18}}"
    return ScriptedModel(
        {
            "1. 47 + 38": lambda call: monday.format(
                *(["75"] * 2 if len(call.messages) == 2 else ["85"] * 2)
            ),
            "1. 64 + 19": "4+9=13, 6+1+1=8. \\boxed{83, 55, 45, 78, 196}",
        }
    )
