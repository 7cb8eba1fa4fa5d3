"""Compares answers with math-verify, in a process of its own: an answer such as 10^{10^{10}} takes
all time and all memory.

Run by `mathematics.Mathematician`. Reads a JSON line [reference, answer] at a time, and answers
each with true or false.
"""

import json
import resource
import sys
import warnings

_SECONDS = 5
"""That math-verify itself gives to each of its steps."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    warnings.simplefilter("ignore")  # of the packages below, which nobody here can mend
    replies, sys.stdout = sys.stdout, sys.stderr  # so that nothing else is taken for a reply
    from math_verify import parse, verify

    for line in sys.stdin:
        reference, answer = (
            parse(_boxed(text), parsing_timeout=_SECONDS) for text in json.loads(line)
        )
        print(
            json.dumps(bool(verify(reference, answer, timeout_seconds=_SECONDS))),
            file=replies,
            flush=True,
        )


def _boxed(text: str) -> str:
    r"""In the form in which math-verify looks for LaTeX first. Dollars say nothing in a box, be
    they marks of LaTeX or a currency."""
    inner = text.replace("\\$", "").replace("$", "").strip().rstrip(".")
    return f"$\\boxed{{{inner}}}$"


if __name__ == "__main__":
    main()
