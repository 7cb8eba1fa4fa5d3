"""Ends of steps and answers, against the formatting rules of Hogwild! Inference's authors.

fixtures/hogwild/formatting_VERSION.json holds what two versions of those rules say after every
token of some texts, written by scripts/fixtures/make_hogwild.py: "main",
github.com/eqimp/hogwild_llm at commit 1a87a99, and "inference_lib", the library on the branch of
that name at commit a72df34. Every place where this project says something else on purpose is listed
here with its reason; any other one fails, and so does a listed one that is none.
JAXSHARE_HOGWILD_FIXTURES names another folder of the same form.
"""

import functools
import itertools
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare.serving.workers.text import answers
from jaxshare.serving.workers.text.step_automata import step_automaton
from scripts.fixtures import hogwild_formatting
from tests.paths import FIXTURES

COMMITTED = FIXTURES / "hogwild"
FOLDER = Path(os.environ.get("JAXSHARE_HOGWILD_FIXTURES") or COMMITTED)
VERSIONS = ("main", "inference_lib")
MADE = [version for version in VERSIONS if (FOLDER / f"formatting_{version}.json").is_file()]


def both(*places: str) -> tuple[list[str], list[str]]:
    """The same places for both versions."""
    return [*places], [*places]


STEPS_DIFFER: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "A separator counts wherever its bytes are; theirs looks for it in the last token alone.": {
        "separator of two tokens": both("+It is 5."),
        "separator over the edge of a token": both("+So", "+So"),
    },
    "Each separator in a token counts; theirs looks at the last one.": {
        "two separators in a token": both("+So"),
    },
    "These scripts have marks for the end of a sentence, too; theirs does not list them.": {
        "more scripts": both("+对！", "+对？", "+አምስት።", "+ប្រាំ។"),  # noqa: RUF001 (meant as they are)
    },
    "Quotes, brackets and emphasis may close after the sentence; theirs wants the mark itself "
    "before the separator.": {
        "parentheses": both("+(It is 5.)", "+[It is 6.]"),
        "quotes": both('+"It is 5."', "+'It is 6.'", "+“It is 7.”", "+« C'est 8.\u00a0»"),
        "emphasis": both("+**It is 5.**", "+_It is 6._"),
        "wide marks": both("+（好。）", "+「好。」", "+『好。』", "+【好。】"),  # noqa: RUF001 (likewise)
    },
    "The end of a code block ends a sentence, since a step lasts until its block is complete "
    "(appendix C).": {
        "program": both("+```"),
        "two programs": both("+```", "+```"),
        "program that does not parse": both("+```", "+```"),
        "program without an end": both("+```"),
        "program without a language": both("+```"),
        "program of a shell": both("+```"),
        "program in tildes": both("+~~~"),
        "program with backticks": both("+```"),
        "program in a list": both("+   ```"),
        "empty program": both("+```", "+```"),
    },
    "The same; and no step ends within a block (appendix C), which main does not look at.": {
        "block": (["-x = 1.", "+```"], ["+```"]),
        "block in a list": (["-   x = 1.", "+   ```"], ["+   ```"]),
        "block of four backticks": (["-x = 1.", "+````"], ["+````"]),
        "block of tildes": (["-x = 1.", "+~~~"], ["+~~~"]),
        "fence of two tokens": (["-x = 1.", "+```"], ["+```"]),
    },
    "No step ends within a block, even one that never closes, which main does not look at.": {
        "block without an end": (["-x = 1.", "-y = 2."], []),
    },
    "A fence is at the start of a line, of three characters or more, and closed by the same; "
    "inference_lib counts threes anywhere.": {
        "block of six backticks": both("-x = 1.", "+``````"),
        "backticks in a line": ([], ["+We call ```f(1).", "+It is 2."]),
        "tildes in a line": ([], ["+It is ~~~ 5.", "+It is 6."]),
        "tildes with a title": (["-x = 1.", "+~~~"], ["-x = 1.", "+~~~", "+It is 2."]),
        "tildes in backticks": (["-x = 1.", "+```"], ["+```", "+It is 2."]),
        "backticks in tildes": (["-x = 1.", "+~~~"], ["+~~~", "+It is 2."]),
    },
    "The end of a formula ends a sentence, as that of a code block does.": {
        "formula in one line": both("+$$x = 1$$", "+$$y = 2.$$"),
        "formula with a box": both(r"+$$\boxed{42}$$"),
    },
    "The same; and no step ends within a formula, which main does not look at.": {
        "formula": (["-x = 1.", "+$$"], ["+$$"]),
        "formula of two tokens": (["-x = 1.", "+$$"], ["+$$"]),
    },
    "No step ends within a formula, even one that never closes or is none, which main does not "
    "look at.": {
        "formula without an end": (["-x = 1.", "-y = 2."], []),
        "formulas side by side": (["-Here $x$$y$ is 5."], []),
    },
    r"\$ is a dollar sign, and dollars in code open no formula; inference_lib counts pairs of them "
    r"anywhere.": {
        "dollars": ([], [r"+It costs \$$5.", r"+It costs \$\$6."]),
        "dollars in code": (["+```"], ["+`$$` is a process.", "+```"]),
        "dollars in a formula": both(r"-$$x = \$$ 5."),
        "block in a formula": (["-x = $$.", "-x.", "+$$"], ["-x.", "+$$", "+It is."]),
    },
}
"""{reason: {text: the places for each version}}: + where a step ends here and not there, or -, and
the last line that is written then.

However a text is cut into tokens, the places are the same."""

ANSWERS_DIFFER: dict[str, dict[str, dict[str, list[tuple[str | None, str | None]]]]] = {
    "Braces nest, and after a backslash they are no braces; theirs ends a box at its first }.": {
        "any": {
            "fraction": [(r"\frac{1", None), (r"\frac{1", r"\frac{1}{2}")],
            "set": [("\\{1, 2\\", r"\{1, 2\}")],
        },
    },
    "An empty box is no answer.": {
        "any": {"empty box": [("", None), ("", "5")]},
    },
    "A box that holds a placeholder is no answer; theirs takes any text where it does not ask for "
    "a number.": {
        "any": {
            "placeholder": [("answer here", None)],
            "number, then placeholder": [("answer here", "7")],
        },
    },
    "A block without the name of a language is a program where it parses and does something; "
    "theirs starts with ```python.": {
        "code": {
            "program without a language": [(None, "print(2)")],
            "program in tildes": [(None, "print(2)")],
            "block in a list": [(None, "x = 1.")],
            "block, then words": [(None, "x = 1")],
            "block of four backticks": [(None, "x = 1.")],
            "block of six backticks": [(None, "x = 1.")],
            "block of tildes": [(None, "x = 1.\n\ny = 2.")],
            "fence of two tokens": [(None, "x = 1.")],
        },
    },
    "A block lasts until the line of its fence; theirs ends at the first three backticks.": {
        "code": {"program with backticks": [(None, "x = '```'")]},
    },
    "A block in a list is indented, as its fence is; theirs does not parse then.": {
        "code": {"program in a list": [(None, "print(2)")]},
    },
}
"""{reason: {kind: {text: the pairs (their answer, the answer here) that differ, in order;
whitespace around them aside}}}."""


def is_number(text: str) -> bool:
    """Returns whether Python reads a number from it, which is the authors' own test."""
    try:
        float(text)
    except ValueError:
        return False
    return True


KINDS = {
    "any": answers.KINDS["box"],
    "number": answers.box_answers(is_number),
    "code": answers.KINDS["code"],
}
"""The rule here for each kind of their answers."""


@functools.cache
def cases(version: str) -> dict[str, dict[str, Any]]:
    found = json.loads((FOLDER / f"formatting_{version}.json").read_text())
    return {
        name: case | {"pieces": [piece.encode("latin-1") for piece in case["pieces"]]}
        for name, case in found.items()
    }


def text_of(name: str) -> str:
    """The text that a case is one way to cut."""
    return name.removesuffix(", glued").removesuffix(", apart")


def by_text(found: dict[str, Any]) -> dict[str, Any]:
    """The differences of each text that has any; both ways to cut it must agree."""
    texts = {text_of(name): difference for name, difference in found.items() if difference}
    for name, difference in found.items():
        assert difference == texts.get(text_of(name), difference), (
            f"{name} differs from the other way to cut the text"
        )
    return texts


def test_there_are_fixtures():
    assert "main" in MADE and (FOLDER != COMMITTED or set(MADE) == {*VERSIONS}), (
        "make them with scripts/fixtures/make_hogwild.py"
    )
    assert len(cases("main")) > 100


@pytest.mark.parametrize("version", MADE)
def test_the_fixtures_are_of_the_texts_in_the_script(version):
    texts = hogwild_formatting.cases()
    assert {name: case["pieces"] for name, case in cases(version).items()} == texts, (
        "make the fixtures again"
    )


@pytest.mark.slow
@pytest.mark.parametrize("version", MADE)
def test_ends_of_steps_at_every_token(version):
    found: dict[str, list[str]] = {}
    for name, case in cases(version).items():
        automaton = step_automaton()
        state, written, found[name] = automaton.start, b"", []
        for piece, theirs in zip(case["pieces"], case["ends"], strict=True):
            (state, ours), written = automaton.read(piece, state), written + piece
            if ours != (theirs == "1"):
                found[name].append(
                    "-+"[ours] + written.decode(errors="ignore").rstrip().rpartition("\n")[2]
                )
    listed = {
        text: places
        for of_reason in STEPS_DIFFER.values()
        for text, of_version in of_reason.items()
        if (places := of_version[VERSIONS.index(version)])
    }
    assert by_text(found) == listed
    # or the comparison says little
    assert sum(case["ends"].count("1") for case in cases(version).values()) > 120


def test_the_device_ends_steps_where_the_host_does():
    pieces = [case["pieces"] for case in cases("main").values()]
    tokens = [b"", *sorted({piece for text in pieces for piece in text})]
    automaton = step_automaton()
    expected = np.zeros((len(pieces), max(map(len, pieces))), bool)
    numbers = np.zeros(expected.shape, np.int32)
    for r, text in enumerate(pieces):
        state = automaton.start
        for t, piece in enumerate(text):
            numbers[r, t] = tokens.index(piece)
            state, expected[r, t] = automaton.read(piece, state)
    lifted = automaton.lift(tokens)
    start = jnp.broadcast_to(lifted.start, len(pieces))
    np.testing.assert_array_equal(
        jax.lax.scan(lifted.step, start, jnp.asarray(numbers.T))[1].T, expected
    )


@pytest.mark.parametrize(
    ("version", "kind"),
    [(v, kind) for v in MADE for kind in KINDS if (v, kind) != ("main", "code")],
)
def test_answers_at_every_token(version, kind):
    find, automaton = KINDS[kind].extract, KINDS[kind].automaton()
    found: dict[str, list[tuple[str | None, str | None]]] = {}
    for name, case in cases(version).items():
        changes, theirs, written = dict(case["answers"][kind]), None, b""
        found[name] = []
        for n, piece in enumerate(case["pieces"]):
            theirs, written = changes.get(n, theirs), written + piece
            # A session takes an answer when the automaton has found its end.
            ours = find(written.decode(errors="ignore")) if automaton.read(written)[1] else None
            pair = theirs and theirs.strip(), ours and ours.strip()
            if pair[0] != pair[1] and pair not in found[name]:
                found[name].append(pair)
            # their test whether reasoning is over is that very answer
            if kind == "number" and "finishes" in case:
                assert (case["finishes"][n] == "1") == (theirs is not None)
    of_kind = [texts[kind] for texts in ANSWERS_DIFFER.values() if kind in texts]
    assert by_text(found) == dict(itertools.chain.from_iterable(texts.items() for texts in of_kind))
