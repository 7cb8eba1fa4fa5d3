r"""Where the authors' formatting rules of Hogwild! Inference end steps and find answers, token by
token, in texts made for that: a part of make_hogwild_fixtures.py.

A file has for every text, by name:

    pieces     the tokens, each as a string with one character for each byte
    ends       for each token a 1 if `is_end_of_step` holds of the tokens up to it
    finishes   the same of `should_finish_reasoning` with numbers as answers, which the newer version does not have
    answers    what `get_final_answer` gives of those tokens: "any" text in a box, a "number" in a box, or "code", which the older version
               does not look for; [n, answer] for each token from which on it is another one, at first null
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FENCED = "```python\nprint(2)\n```\n\n"

TEXTS = {
    # Ends of sentences.
    "sentences": "We add 2 and 3. That gives 5.\n\nIs it 5? Yes, it is!\n\nSo is it?\n\nThe sum",
    "no sentences": "First:\n\nSecond,\n\nThird;\n\nFourth\n\n- Fifth -\n\nSixth",
    "blank first": "\n\nSo.\n\n",
    "more newlines": "It is 5.\n\n\nIt is 6.\n\n\n\nSo",
    "spaces before": "It is 5.  \n\nIt is 6. \t\n\nIt is 7.\n \nSo",
    "windows newlines": "It is 5.\r\n\r\nIt is 6.\n\n",
    "wide spaces before": "C'est tout.\u00a0\n\n好。\u3000\n\n",
    "other spaces before": "It is 5.\u2003\n\nIt is 6.\u202f\n\n",
    "marks": "Five…\n\nFive‽\n\nFive ¶\n\nFive ❧\n\n",
    "scripts": "好。\n\nپانچ۔\n\nخمسة؟\n\nठीक।\n\nसमाप्त॥\n\nལྔ།\n\nᠲᠠᠪᠤ᠃\n\nհինգ։\n\nხუთი჻\n\n",  # noqa: RUF001 (meant as they are)
    "more scripts": "对！\n\n对？\n\nአምስት።\n\nប្រាំ។\n\n",  # noqa: RUF001 (meant as they are)
    # Marks that close.
    "parentheses": "(It is 5.)\n\n[It is 6.]\n\n",
    "quotes": "\"It is 5.\"\n\n'It is 6.'\n\n“It is 7.”\n\n« C'est 8.\u00a0»\n\n",
    "emphasis": "**It is 5.**\n\n_It is 6._\n\n",
    "wide marks": "（好。）\n\n「好。」\n\n『好。』\n\n【好。】\n\n",  # noqa: RUF001 (meant as they are)
    "quotes without a sentence": '"It is"\n\n(so):\n\n',
    # Code blocks.
    "block": "So:\n```python\nx = 1.\n\ny = 2.\n```\n\nIt is 2.\n\n",
    "block in a list": "1. So:\n   ```\n   x = 1.\n\n   ```\n\n2. It is 2.\n\n",
    "block, then words": "```\nx = 1\n``` and so\n\n```\nx\n```\nIt is 2.\n\n",
    "block without an end": "```\nx = 1.\n\ny = 2.\n\n",
    "block of four backticks": "````\nx = 1.\n\n````\n\nIt is 2.\n\n",
    "block of six backticks": "``````\nx = 1.\n\n``````\n\nIt is 2.\n\n",
    "backticks in a line": "We call ```f(1).\n\nIt is 2.\n\n",
    "pairs of backticks in a line": "We call ```f(1)``` now.\n\n```f(1)``` is 2.\n\n",
    "block of tildes": "~~~\nx = 1.\n\ny = 2.\n~~~\n\nIt is 2.\n\n",
    "tildes with a title": "~~~ x ~~~\nx = 1.\n\n~~~\n\nIt is 2.\n\n",
    "tildes in backticks": "```\n~~~\nx = 1.\n\n```\n\nIt is 2.\n\n",
    "backticks in tildes": "~~~\n```\nx = 1.\n\n~~~\n\nIt is 2.\n\n",
    "tildes in a line": "It is ~~~ 5.\n\nIt is 6.\n\n",
    "struck out": "~~It is 5.~~ It is 6.\n\n",
    # Formulas.
    "formula": "So\n\n$$\nx = 1.\n\ny = 2.\n$$\n\nIt is 2.\n\n",
    "formula in one line": "$$x = 1$$\n\n$$y = 2.$$\n\nIt is 2.\n\n",
    "formula in a sentence": "Here $$x = 1$$ holds.\n\nAnd $$y = 2$$\nholds\n\n$$z = 3$$,\n\n",
    "formula without an end": "$$\nx = 1.\n\ny = 2.\n\n",
    "formulas of one dollar": "It costs $5.\n\nHere $x$ is $5.\n\n",
    "formulas side by side": "Here $x$$y$ is 5.\n\n",
    "dollars": "It costs \\$$5.\n\nIt costs \\$\\$6.\n\n",
    "dollars in code": "`$$` is a process.\n\n```\necho $$\n```\n\nIt is.\n\n",
    "dollars in a formula": "$$x = \\$$ 5.\n\n",
    "block in a formula": "$$\n```\nx = $$.\n\n```\nx.\n\n$$\n\nIt is.\n\n",
    # Boxes.
    "box": "So the answer is \\boxed{42}.\n\nIt is.\n\n",
    "box without a sentence": "\\boxed{42}\n\nIt is.\n\n",
    "formula with a box": "$$\\boxed{42}$$\n\nIt is.\n\n",
    "two boxes": "Is it \\boxed{5}? No, \\boxed{6}.\n\n",
    "placeholder": "We end with \\boxed{answer here}.\n\nNow \\boxed{7}.\n\n",
    "number, then placeholder": "It is \\boxed{7}.\n\nWe ended with \\boxed{answer here}.\n\n",
    "formula in a box": "It is \\boxed{x+1}.\n\n",
    "thousands": "It is \\boxed{1,234}.\n\n",
    "dollars in a box": "It is \\boxed{\\$5}.\n\n",
    "spaces in a box": "It is \\boxed{ 42 }.\n\n",
    "fraction": "It is \\boxed{\\frac{1}{2}}.\n\n",
    "set": "It is \\boxed{\\{1, 2\\}}.\n\n",
    "empty box": "It is \\boxed{}.\n\nIt is \\boxed{5}, not \\boxed{ }.\n\n",
    "box without an end": "It is \\boxed{5}. Or \\boxed{6",
    "box without an end, then one": "It is \\boxed{8, no \\boxed{7}.\n\n",
    "box in a box": "It is \\boxed{\\boxed{3}}.\n\n",
    "box over lines": "It is \\boxed{1.\n\n2}.\n\n",
    # Programs.
    "program": "So:\n\n" + FENCED + "Done.\n\n",
    "two programs": FENCED + "Or:\n\n" + FENCED.replace("2", "3"),
    "program that does not parse": FENCED + "Or:\n\n```python\nprint(\n```\n\n",
    "program without an end": FENCED + "Or:\n\n```python\nprint(3)\n",
    "program without a language": "```\nprint(2)\n```\n\n",
    "program of a shell": "```bash\nls -l\n```\n\n",
    "program in tildes": "~~~python\nprint(2)\n~~~\n\n",
    "program with backticks": "```python\nx = '```'\n```\n\n",
    "program in a list": "1. So:\n   ```python\n   print(2)\n   ```\n\n",
    "empty program": FENCED + "```python\n\n```\n\n",
}

PIECES = {
    "separator in the midst of a token": ["It is 5", ".\n\nSo", " it is 6", ".\n\n"],
    "separator of two tokens": ["It is 5", ".", "\n", "\n", "So"],
    "separator over the edge of a token": ["It is 5", ".\n", "\nSo", " is 6", ".", "\n", "\nSo"],
    "separator behind a newline": ["It is 5", ".", "\n", "\n\n", "So", ".\n", "\n\n"],
    "two separators": ["It is 5", ".", "\n\n", "\n\n", "So"],
    "two separators in a token": ["It is 5", ".\n\nSo\n\n", "It is", ".\n\n"],
    "bytes of a character": [
        "好".encode(),
        "。".encode()[:1],
        "。".encode()[1:],
        "\n\n",
        "对".encode()[:2],
        "对".encode()[2:],
        "\n\n",
    ],
    "fence of two tokens": ["``", "`\n", "x = 1", ".\n\n", "`", "``\n\n", "So", ".\n\n"],
    "formula of two tokens": ["$", "$\n", "x = 1", ".\n\n", "$", "$\n\n", "So", ".\n\n"],
}

CUTS = {
    "glued": re.compile(r" ?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+|."),
    "apart": re.compile(r" ?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+|[\r\n]+|[^\S\r\n]+|."),
}
"""Newlines in one token with the marks before them, as Llama 3 and Qwen have them, or apart."""


def cases() -> dict[str, list[bytes]]:
    """The tokens of each text, cut in each way that gives other ones, or as given."""
    found = {
        name: [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        for name, pieces in PIECES.items()
    }
    for name, text in TEXTS.items():
        glued, apart = (cut.findall(text) for cut in CUTS.values())
        assert "".join(glued) == "".join(apart) == text, name
        ways = (
            {name: glued} if glued == apart else {f"{name}, glued": glued, f"{name}, apart": apart}
        )
        found |= {way: [piece.encode() for piece in pieces] for way, pieces in ways.items()}
    return found


def tokenizer_of(pieces: Iterable[bytes]) -> tuple[PreTrainedTokenizerFast, list[bytes]]:
    """A byte-level tokenizer with these pieces among its tokens, and a pair of newlines, which it
    encodes as one; the bytes of each."""
    # the bytes that stand for themselves, as in GPT-2
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = itertools.count(256)
    letters = {byte: chr(byte) if byte in seen else chr(next(hidden)) for byte in range(256)}
    single = {bytes([byte]) for byte in range(256)}
    spelled = {
        piece: "".join(letters[byte] for byte in piece)
        for piece in sorted({*single, b"\n\n", *pieces})
    }
    newline = letters[0x0A]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({word: n for n, word in enumerate(spelled.values())}, [(newline, newline)])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
    ), [*spelled]


def number(text: str) -> str:
    """The text, where it is a number as their default says."""
    float(text)
    return text


def changes(values: list[Any]) -> list[list[Any]]:
    """[n, value] for each place from which on there is another value; None stands before the
    first."""
    return [
        [n, value]
        for n, (before, value) in enumerate(itertools.pairwise([None, *values]))
        if value != before
    ]


def record(path: Path, formatting: ModuleType) -> None:
    """Writes what one version's rules say of all cases."""
    texts = cases()
    tokenizer, vocabulary = tokenizer_of(piece for pieces in texts.values() for piece in pieces)
    plain: dict[str, Any] = dict(add_examples=False, add_suggestions_on_collaborating=False)

    def answers_of(rules: Any) -> Callable[[list[int]], str | None]:
        return lambda tokens: rules.get_final_answer(tokenizer.decode(tokens))

    numbers = formatting.MathFormatting(tokenizer, extract_result=number, **plain)
    kinds = {
        "any": formatting.MathFormatting(tokenizer, extract_result=lambda text: text, **plain),
        "number": numbers,
    }
    if hasattr(formatting, "CodeFormatting"):
        kinds["code"] = formatting.CodeFormatting(tokenizer, **plain)
    lines = []
    for name, pieces in texts.items():
        tokens = [vocabulary.index(piece) for piece in pieces]
        steps = [tokens[:n] for n in range(1, len(tokens) + 1)]
        said: dict[str, Any] = {
            "pieces": [piece.decode("latin-1") for piece in pieces],
            "ends": "".join("01"[numbers.is_end_of_step(step)] for step in steps),
        }
        if hasattr(numbers, "should_finish_reasoning"):
            said["finishes"] = "".join(
                "01"[numbers.should_finish_reasoning(step)] for step in steps
            )
        said["answers"] = {
            kind: changes([*map(answers_of(rules), steps)]) for kind, rules in kinds.items()
        }
        lines.append(f"{json.dumps(name)}: {json.dumps(said)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
