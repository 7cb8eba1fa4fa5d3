r"""Mathematics and physics: GSM8K, LIMO, OlympiadBench and AIME, as they are published.

Hogwild! Inference, sections 4.1 and 4.2; the maximum tokens of an early answer are those of
appendix C. OlympiadBench: He et al., 2024, whose fields say how an answer is compared: its unit,
the error that a number may have, and several answers in one text, in any order.
"""

import re
from collections.abc import Sequence
from typing import Any

from jaxshare.serving.evaluation.data_sets.reading import DataSet, Line, id_of, require, text_of
from jaxshare.serving.evaluation.problems import Problem

_OPEN, _CLOSE = "([{", ")]}"
_KINDS = {
    "Numerical": "a number",
    "Expression": "an expression",
    "Equation": "an equation",
    "Interval": "an interval",
}
_YEAR = re.compile(r"(?:^|\D)(20\d\d)(?:\D|$)")


def listed_answers(text: str) -> list[str]:
    """The answers in a text such as "$1$, $2$", "$1,2$" or "1,2", and both of one with \\pm."""
    answers = []
    for part in _split(text.replace("$", "")):
        signs = ("+", "-") if "\\pm" in part else ("",)
        answers += [part.replace("\\pm", sign) if sign else part for sign in signs]
    return answers


def _split(text: str) -> list[str]:
    """Splits a list at commas that are in no brackets."""
    depth, parts = 0, [""]
    for i, char in enumerate(text):
        escaped = text[i - 1 : i] == "\\"
        depth += (char in _OPEN) - (char in _CLOSE) if not escaped else 0
        if char == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in map(str.strip, parts) if part]


# GSM8K and LIMO.


def gsm8k_problem(line: Line) -> Problem:
    """A question of GSM8K, whose answer is after the last "####"."""
    question, solution = text_of(line, "question"), text_of(line, "answer")
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise ValueError('has an "answer" without "#### " and the number after it')
    return Problem(id_of(line, "id"), question, (answer.strip().replace(",", ""),))


def limo_problem(line: Line) -> Problem:
    """A problem of LIMO (Ye et al., 2025)."""
    require(line, "question", "solution", "answer")
    return Problem(id_of(line, "id"), text_of(line, "question"), (_number_or_text(line, "answer"),))


# AIME.


def aime_problem(line: Line, year: int) -> Problem:
    """A problem of AIME, in either of the forms in which collections have it.

    Raises:
      ValueError: another form, an answer that is no whole number from 0 to 999, or another year.
    """
    capital = "Problem" in line or "Answer" in line
    names = ("Problem", "Answer") if capital else ("problem", "answer")
    if not capital and "problem" not in line and "question" in line:
        names = ("question", "answer")
    require(line, *names)
    if names[0] == "question" and "solution" in line:
        raise ValueError('has "question" and "solution", as LIMO has')
    text, answer = text_of(line, names[0]), _number_or_text(line, names[1]).strip()
    digits = answer.removesuffix("^\\circ").removesuffix(".0").strip("$ ")
    if not digits.isascii() or not digits.isdigit() or int(digits) > 999:
        raise ValueError(
            f'has "{answer[:40]}" as its answer; AIME\'s are whole numbers from 0 to 999'
        )
    given = " ".join(str(line.get(name, "")) for name in ("year", "Year", "ID", "url"))
    if (found := _YEAR.search(given)) and int(found[1]) != year:
        raise ValueError(f"is of {found[1]}, and the task is AIME {year}")
    return Problem(id_of(line, "id", "ID", "problem_idx"), text, (digits,))


# OlympiadBench.


def olympiad_problem(line: Line, subject: str) -> Problem:
    """A problem of OlympiadBench with its official fields, or in LIMO's copy of the maths part.

    Args:
      subject: "Math" or "Physics".

    Raises:
      ValueError: another form, a proof, a problem with pictures, in another language or of another
        subject.
    """
    if {"question", "answer"} <= {*line} and "final_answer" not in line and subject == "Math":
        return Problem(id_of(line, "id"), text_of(line, "question"), (text_of(line, "answer"),))
    require(line, "question", "final_answer", "is_multiple_answer", "unit", "answer_type", "error")
    _check_part(line, subject)
    final = line["final_answer"]
    if isinstance(final, list) and len(final) == 1:
        final = final[0]
    if not isinstance(final, str) or not final.strip():
        raise ValueError(
            f'has {str(line["final_answer"])[:40]} as its "final_answer"; it must be a list of one '
            "text"
        )
    several = line["is_multiple_answer"]
    if not isinstance(several, bool):
        raise ValueError(f'has {several!r} as its "is_multiple_answer"; it must be true or false')
    answers = listed_answers(final) if several else [final]
    context = line.get("context")
    question = text_of(line, "question")
    unit = line["unit"].strip() if isinstance(line["unit"], str) and line["unit"].strip() else None
    asked = f"{context.strip()}\n{question}" if isinstance(context, str) and context else question
    return Problem(
        id_of(line, "id"),
        f"{_instruction(subject, str(line['answer_type']), several, unit)}\n\n{asked}",
        (*answers,),
        any_order=several,
        tolerances=_tolerances(line, len(answers)),
        unit=unit,
    )


def _check_part(line: Line, subject: str) -> None:
    """Raises ValueError for a problem that is in another part of OlympiadBench."""
    if str(line.get("question_type", "Open-ended")).startswith("Theorem"):
        raise ValueError("is a proof, which no comparison of answers can judge")
    if str(line.get("language", "English")) != "English":
        raise ValueError(f"is in {line['language']}; the task has the problems in English")
    if str(line.get("modality", "Text-only")) != "Text-only" or line.get("image_1"):
        raise ValueError("has a picture; the task has the problems of text alone")
    if (found := str(line.get("subject", subject))) not in (subject, f"{subject}s"):
        raise ValueError(f"is of the subject {found}, and the task is of {subject}")


def _tolerances(line: Line, answers: int) -> tuple[float | None, ...]:
    """The errors that numbers may have: one for all, or a list with commas; none for tuples."""
    given: Any = line["error"]
    if given in (None, "", []) or "Tuple" in str(line["answer_type"]):
        return ()
    try:
        found = [float(part) if part.strip() else None for part in str(given).split(",")]
    except ValueError:
        raise ValueError(f'has {str(given)[:40]!r} as its "error"; it must be numbers') from None
    if len(found) == 1:
        found *= answers
    if len(found) != answers or not all(each is None or each >= 0 for each in found):
        raise ValueError(
            f'has {str(given)[:40]!r} as its "error" for {answers} answers; it must be a number '
            "from 0 up for each"
        )
    return (*found,) if any(each is not None for each in found) else ()


def _instruction(subject: str, answer_type: str, several: bool, unit: str | None) -> str:
    """The instructions on the form of the answer, as the official prompt has them, in other words."""
    kinds = [_KINDS.get(kind.strip()) for kind in answer_type.split(",")]
    place = "answers with commas between" if several else "answer"
    parts = [f"This is an open-ended problem of an international {subject.lower()} competition."]
    if all(kinds):
        if not several:
            parts.append(f"The answer is {kinds[0]}.")
        elif len({*kinds}) == 1:
            parts.append(f"It has several answers, each of which is {kinds[0]}.")
        else:
            parts.append(f"It has several answers, in this order: {', '.join(map(str, kinds))}.")
    parts.append(f"Write formulas in LaTeX, and end with \\boxed{{{place}}}.")
    if unit:
        parts.append("Leave the unit out of the box.")
    return " ".join(parts)


def _number_or_text(line: Line, field: str) -> str:
    if type(line[field]) in (int, float):
        return str(line[field])
    return text_of(line, field)


def _aime(year: int, files: Sequence[tuple[str, ...]]) -> DataSet:
    return DataSet(
        f"AIME {year}",
        (*files,),
        '"problem" or "question" and "answer", or "Problem" and "Answer"',
        lambda line: aime_problem(line, year),
        16,
    )


_OLYMPIAD_FIELDS = (
    '"question", "final_answer", "is_multiple_answer", "unit", "answer_type" and "error"'
)
GSM8K = DataSet(
    "the test set of openai/grade-school-math",
    (("gsm8k_test.jsonl",),),
    '"question" and "answer", which ends with "#### " and a number',
    gsm8k_problem,
    64,
)
AIME_2024 = _aime(2024, [("aime2024.jsonl",), ("aime_2024_problems.jsonl",), ("aime_2024.jsonl",)])
MATHEMATICS = {
    "limo": DataSet(
        "GAIR/LIMO",
        (("limo.jsonl",),),
        '"question", "solution" and "answer"',
        limo_problem,
        16,
    ),
    "olympiad": DataSet(
        "OlympiadBench, OE_TO_maths_en_COMP",
        (("olympiadbench.jsonl",), ("OE_TO_maths_en_COMP.json",), ("OE_TO_maths_en_COMP.jsonl",)),
        f'{_OLYMPIAD_FIELDS}, or "question" and "answer"',
        lambda line: olympiad_problem(line, "Math"),
        64,
    ),
    "olympiad-physics": DataSet(
        "OlympiadBench, OE_TO_physics_en_COMP",
        (("OE_TO_physics_en_COMP.json",), ("OE_TO_physics_en_COMP.jsonl",)),
        _OLYMPIAD_FIELDS,
        lambda line: olympiad_problem(line, "Physics"),
        64,
    ),
    "aime": AIME_2024,
    "aime2024": AIME_2024,
    "aime2025": _aime(
        2025,
        [
            ("aime2025.jsonl",),
            ("aime2025-I.jsonl", "aime2025-II.jsonl"),
            ("aime_2025.jsonl",),
        ],
    ),
}
"""The data sets whose lines are problems, by the names of their tasks."""
