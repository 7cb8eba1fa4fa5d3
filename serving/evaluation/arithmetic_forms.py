"""The forms in which people type sums.

With or without a sentence, numbered or not, on lines or in one, in signs or in words.
"""

import dataclasses
import random
from collections.abc import Mapping

SIGNS = (" + ", " - ", " * ")


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of a problem's questions in a user's message.

    Attributes:
      sentence: the text before the questions; None is the instruction of
        `jaxshare.serving.evaluation.arithmetic`, "" is no sentence.
      marker: the text before each question; "{}" in it is the number.
      joint: the text between two questions, and between the sentence and the first one where that
        is a line break.
      last: the text before the last of several questions; "" is `joint`.
      ask: the text around each sum; "{}" in it is the sum.
      end: the text after the last question.
      signs: plus, minus and times, with the spaces around them.
    """

    sentence: str | None = None
    marker: str = "{}. "
    joint: str = "\n"
    last: str = ""
    ask: str = "{}"
    end: str = ""
    signs: tuple[str, str, str] = SIGNS

    def sum(self, left: int, operator: str, right: int) -> str:
        """One sum; `operator` is one of + - *."""
        return self.ask.format(f"{left}{self.signs['+-*'.index(operator)]}{right}")

    def message(self, instruction: str, questions: list[str]) -> str:
        """The whole message.

        Args:
          instruction: the sentence where the form has none of its own.
          questions: their texts, as `sum` writes them.
        """
        marked = [self.marker.format(i) + question for i, question in enumerate(questions, 1)]
        *first, end = marked
        listed = (self.last or self.joint).join([self.joint.join(first), end]) if first else end
        sentence = instruction if self.sentence is None else self.sentence
        return (sentence and sentence + ("\n" if "\n" in self.joint else " ")) + listed + self.end


TAUGHT = Form()
"""The instruction, then a numbered list."""

FORMS: Mapping[str, Form] = {
    "sentence, numbered": TAUGHT,
    "sentence, lines": Form(marker=""),
    "own sentence, numbered": Form("Solve these problems:"),
    "own sentence, one line": Form("Compute", marker="", joint=", "),
    "numbered": Form(""),
    "lines": Form("", marker=""),
    "commas": Form("", marker="", joint=", "),
    "what is": Form("", marker="", ask="What is {}?"),
    "what is, one line": Form("What is", marker="", joint=", ", last=" and ", end="?"),
    "in words": Form("", signs=(" plus ", " minus ", " times ")),
    "close signs": Form("", marker="", signs=("+", "-", "*")),
}
"""Forms by name. The embedded model is measured on each of them."""

_SENTENCES = (
    "Solve these problems:",
    "Solve:",
    "Solve",
    "Solve these problems",
    "Compute:",
    "Compute",
    "Calculate:",
    "Calculate",
    "Please solve these problems:",
    "What is",
    "What are",
    "Work out",
    "Find the answers:",
    "Answer these:",
    "How much is",
    "Can you solve these?",
    "Solve these sums:",
    "Add, subtract or multiply:",
    "Please compute",
    "The questions:",
)
_MARKERS = ("{}. ", "{}) ", "{}: ", "({}) ", "- ", "", "", "")
_ASKS = (
    "{}",
    "{} =",
    "{} = ?",
    "{}?",
    "What is {}?",
    "what is {}",
    "Compute {}.",
    "Calculate {}.",
    "How much is {}?",
    "{}.",
)
_SIGNS = (
    SIGNS,
    SIGNS,
    ("+", "-", "*"),
    (" plus ", " minus ", " times "),
    (" + ", " - ", " x "),
    ("+", "-", "x"),
)
_JOINTS = ("\n", "\n", "\n", ", ", "; ", " ")


def sample_form(rng: random.Random) -> Form:
    """Samples a form to learn from: one of `FORMS`, or a new combination of parts.

    Of `FORMS`, those without numbers are more frequent, and those on one line the most: several
    workers have to count what is listed before they can share it.
    """
    if rng.random() < 0.6:
        weights = [
            1 if "{}" in form.marker else 3 if "\n" in form.joint else 5 for form in FORMS.values()
        ]
        return rng.choices([*FORMS.values()], weights)[0]
    sentence = rng.choice((None, "", rng.choice(_SENTENCES)))
    joint, marker = rng.choice(_JOINTS), rng.choice(_MARKERS)
    if joint == "\n":
        return Form(sentence, marker, ask=rng.choice(_ASKS), signs=rng.choice(_SIGNS))
    numbered = "{}" in marker
    if joint == " " and not numbered:
        joint = ", "
    last = rng.choice(("", " and ")) if joint == ", " else ""
    ask = rng.choice(("{}", "{}", "{} =")) if numbered or not last else "{}"
    return Form(
        sentence,
        marker if numbered else "",
        joint,
        last,
        ask,
        rng.choice(("", "", "?", ".")),
        rng.choice(_SIGNS),
    )
