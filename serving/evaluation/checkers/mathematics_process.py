"""The process that compares answers with math-verify.

It is separate because an answer such as 10^{10^{10}} takes all time and all memory. Run by
`mathematics.Mathematician`. Reads JSON lines [reference, answer], and answers each with true or
false.
"""

import json
import resource
import sys
import warnings

_SECONDS = 5
"""The time limit of math-verify itself for each of its steps."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    warnings.simplefilter("ignore")  # of the packages below, which users cannot mend
    replies, sys.stdout = sys.stdout, sys.stderr  # so that prints are not taken for replies
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
    r"""An answer in the form that math-verify parses first, without dollars.

    These mean nothing in a box, as marks of LaTeX or as a currency.
    """
    inner = text.replace("\\$", "").replace("$", "").strip().rstrip(".")
    return f"$\\boxed{{{inner}}}$"


if __name__ == "__main__":
    main()
