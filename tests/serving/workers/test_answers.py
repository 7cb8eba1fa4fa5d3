"""Boxes, programs and votes, against hand-made cases and scanners of single characters."""

import collections
import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxshare.serving.workers.text import answers
from jaxshare.serving.workers.text.step_automata import box_automaton, code_automaton

box, program = functools.cache(box_automaton), functools.cache(code_automaton)


def scan_boxes(text: str) -> str | None:
    """Tries every opening, the last one first, and reads on until its brace closes.

    Another opening ends the attempt.
    """
    for start in range(len(text), 6, -1):
        if not text[:start].endswith("\\boxed{"):
            continue
        depth, inside, i = 1, "", start
        while i < len(text) and (i == start or not text[:i].endswith("\\boxed{")):
            if text[i] == "\\" and not text.startswith("\\boxed{", i):
                inside, i = inside + text[i : i + 2], i + 2
                continue
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                if inside.strip():
                    return inside.strip()
                break
            inside, i = inside + text[i], i + 1
    return None


def scan_code(text: str) -> str | None:
    """Marks each line as fence, code or prose first, and cuts afterwards."""
    kinds, inside = [], ""
    for line in text.split("\n"):
        bare = line.strip()
        fence = (
            bare[:3] == inside
            if inside
            else bare[:3] == "~~~"
            or (bare[:3] == "```" and bare.count("`") == len(bare) - len(bare.lstrip("`")))
        )
        if fence:
            inside = "" if inside else bare[:3]
        kinds.append("f" if fence else "c" if inside else "p")
    lines, blocks, i = text.split("\n"), [], 0
    while i < len(kinds):
        if kinds[i] == "f":
            end = kinds.index("f", i + 1) if "f" in kinds[i + 1 :] else len(kinds)
            blocks.append((end < len(kinds), "\n".join(lines[i + 1 : end])))
            i = end
        i += 1
    written = [(closed, block) for closed, block in blocks if block.strip()]
    closed = [block for closed, block in written if closed]
    return closed[-1] if closed else written[-1][1] if written else None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"first \boxed{1}, no, \boxed{ 2 } it is", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{x^{2^{n}}+\{a, b\}}", r"x^{2^{n}}+\{a, b\}"),
        (r"\boxed{a \\} and", r"a \\"),
        (r"\boxed{\}}", r"\}"),
        (r"\\boxed{6} or \boxed{1\\boxed{5}", "5"),
        (r"\\boxed{6}", "6"),
        (r"\boxed{7} then \boxed{8", "7"),
        (r"\boxed{8 then \boxed{7}", "7"),
        (r"\boxed{7} then \boxed{}", "7"),
        (r"\boxed{7} then \boxed{ }", "7"),
        (r"\boxed{\boxed{3}}", "3"),
        ("\\boxed{1,\n2}", "1,\n2"),
        (r"\boxed{\boxed{5", None),
        (r"\boxed {5}", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_boxed(text, answer):
    assert answers.boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("a\n```\nx = 1\ny = 2\n```\nb\n```py\nz\n```\nc", "z"),
        ("```python\na\n```\nand\n```python\nb", "a"),
        ("```python\nb\nc", "b\nc"),
        ("use ```x``` here", None),
        ("```x``` begins this line\n```\na\n```", "a"),
        ("1. So:\n   ```python\n   if x:\n       y()\n   ```", "if x:\n    y()"),
        ("```\n```\nthen\n```\n\n```", None),
        ("```\na\n```\nthen\n```\n```", "a"),
        ("````\na\n````", "a"),
        ("~~~python\na\n~~~", "a"),
        ("~~~ `x`\na\n```\nb\n~~~~\nc", "a\n```\nb"),
        ("```\na\n~~~\nb\n```", "a\n~~~\nb"),
        ("", None),
    ],
)
def test_code(text, found):
    assert answers.code(text) == found


@given(
    st.lists(
        st.sampled_from(["\\boxed{", "{", "}", "\\", "7", " ", "\n", "\\{", "x"]), max_size=24
    ).map("".join)
)
def test_boxed_is_what_a_scan_finds(text):
    assert answers.boxed(text) == scan_boxes(text)


@given(
    st.lists(
        st.sampled_from(["```", "`", "~~~", "~", "\n", "python", "x = 1", "\n\n"]), max_size=24
    ).map("".join)
)
def test_code_is_what_a_scan_finds(text):
    assert answers.code(text) == scan_code(text)


@given(
    st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\", "7", " ", "é"]), max_size=16).map("".join)
)
def test_a_box_is_found_when_the_automaton_has_marked_one(text):
    assert (answers.boxed(text) is not None) == box().read(text.encode())[1]


@given(
    st.lists(st.sampled_from(["```", "`", "~~~", "\n", "python", "x = 1", "  "]), max_size=16).map(
        "".join
    )
)
def test_a_program_is_found_when_the_automaton_has_marked_one(text):
    # The automaton marks empty blocks too, so none is left empty here.
    text = text.replace("\n", "\nx\n")
    if program().read(text.encode())[1]:
        assert answers.code(text) is not None


@given(st.lists(st.sampled_from(["a", " a", "b ", "b", "c", None]), max_size=12))
def test_vote_counts(given_answers):
    winner = answers.vote(given_answers)
    stripped = [a.strip() for a in given_answers if a is not None]
    if not stripped:
        assert winner is None
        return
    counts = collections.Counter(stripped)
    assert winner is not None and counts[winner] == max(counts.values())
    assert all(counts[earlier] < counts[winner] for earlier in stripped[: stripped.index(winner)])
