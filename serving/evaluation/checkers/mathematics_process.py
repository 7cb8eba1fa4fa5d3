"""The process that compares answers with math-verify.

It is separate because an answer such as 10^{10^{10}} takes all time and all memory. Run by
`mathematics.Mathematician`. Reads JSON lines [reference, answer, tolerance or null], and answers
each with true or false.
"""

import json
import resource
import sys
import warnings
from collections.abc import Sequence
from typing import Any

_SECONDS = 5
"""The time limit of math-verify itself for each of its steps."""
_SPARE = 1.01
"""The part of a tolerance within which numbers are equal: OlympiadBench allows for rounding."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    warnings.simplefilter("ignore")  # of the packages below, which users cannot mend
    replies, sys.stdout = sys.stdout, sys.stderr  # so that prints are not taken for replies
    from math_verify import parse, verify

    for line in sys.stdin:
        *texts, tolerance = json.loads(line)
        reference, answer = (parse(_boxed(text), parsing_timeout=_SECONDS) for text in texts)
        same = bool(verify(reference, answer, timeout_seconds=_SECONDS))
        if not same and tolerance is not None:
            same = _close(_number(reference), _number(answer), tolerance)
        print(json.dumps(same), file=replies, flush=True)


def _close(reference: float | None, answer: float | None, tolerance: float) -> bool:
    if reference is None or answer is None:
        return False
    return abs(reference - answer) <= _SPARE * tolerance


def _number(parsed: Sequence[Any]) -> float | None:
    """The number that was parsed; of an equation such as x = 2 the one on its right side."""
    for found in parsed:
        if getattr(found, "is_Equality", False):
            found = found.rhs
        try:
            return float(found.evalf())
        except (AttributeError, TypeError, ValueError):
            continue
    return None


def _boxed(text: str) -> str:
    r"""An answer in the form that math-verify parses first, without dollars.

    These mean nothing in a box, as marks of LaTeX or as a currency.
    """
    inner = text.replace("\\$", "").replace("$", "").strip().rstrip(".")
    return f"$\\boxed{{{inner}}}$"


if __name__ == "__main__":
    main()
