"""Programs judged case by case: each case is a process of its own, with limits of its own.

A program reads a case from stdin and prints to stdout, as `__main__`, or one of its functions is
called. What comes out is compared here, outside of the sandbox, which never sees the right output:
nothing that a program writes, kills or pretends makes a wrong output right.
"""

import decimal
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from jaxshare.serving.evaluation.checkers.isolation import Way
from jaxshare.serving.evaluation.checkers.sandbox import (
    JudgedFolder,
    Limits,
    Verdict,
    judged_folder,
    kill,
    start,
    wait,
    way_named,
)
from jaxshare.serving.evaluation.problems import Case

_SHOWN = 60
"""Characters of an output in an error."""
_ERROR_BYTES = 4096
_MAX_DIGITS = 50_000
"""Digits of a whole number in a function's value, as LiveCodeBench has it."""


def run_cases(
    program: str,
    cases: Sequence[Case],
    limits: Limits = Limits(),
    *,
    function: str | None = None,
    preamble: str = "",
    isolate: bool | str = True,
) -> Verdict:
    """Runs a program on cases in turn, until one is wrong.

    Args:
      program: Python code.
      cases: see `Case`.
      limits: of each case by itself. A program may print as much as it may write to files.
      function: see `Cases`. The module's name is not `__main__` then.
      preamble: Python code that is run before the program, in the same module.
      isolate: see `run_tests`.
    """
    way = way_named(isolate)
    orders = {"source": program, "preamble": preamble, "function": function}
    for number, case in enumerate(cases, 1):
        with judged_folder() as folder:
            error = _run_case(way, orders, case, folder, limits)
        if error := error or folder.left:
            return Verdict(False, f"case {number} of {len(cases)}: {error}")
    return Verdict(True)


def _run_case(
    way: Way, orders: Mapping[str, Any], case: Case, folder: JudgedFolder, limits: Limits
) -> str | None:
    """Why a case is wrong, or None."""
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as printed,
        tempfile.TemporaryFile() as errors,
    ):
        given.write(case.input.encode(errors="surrogatepass"))
        given.seek(0)
        files = {"stdin": given.fileno(), "stdout": printed.fileno(), "stderr": errors.fileno()}
        process = start(way, {**orders, **files}, [*files.values()], folder, limits)
        try:
            error = wait([process], limits)
        finally:  # what the program has started ends before its output is read
            kill([process])
        if error:
            return error
        if process.returncode:
            return _last_words(errors, process.returncode)
        output = _read(printed)
    return _wrong_lines(output, case) if orders["function"] is None else _wrong_value(output, case)


def _last_words(errors: BinaryIO, status: int) -> str:
    """The last line of a program's stderr, which names its exception."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _ERROR_BYTES))
    lines = errors.read(_ERROR_BYTES).decode(errors="replace").strip().splitlines()
    if lines:
        return f"the program: {lines[-1]}"[:500]
    return (
        f"the program ended with status {status}: it ends itself, or takes more time or memory than "
        "it may"
    )


def _read(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _wrong_value(output: str, case: Case) -> str | None:
    """Why the value of a function is wrong, or None."""
    if not output:
        return "the program ends before its function returns"
    try:
        value, right = _value(output), _value(case.output)
    except (ValueError, RecursionError) as error:
        return f"returns what JSON has no form for ({error})"[:200]
    return None if value == right else f"returns {_short(output)} in place of {_short(case.output)}"


def _value(text: str) -> Any:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(_MAX_DIGITS)
    try:
        return json.loads(text)
    finally:
        sys.set_int_max_str_digits(before)


def _wrong_lines(output: str, case: Case) -> str | None:
    """Why what was printed is wrong, or None, as LiveCodeBench judges.

    Spaces around lines do not count, nor do empty lines around all. A line may have the same numbers
    in another form, such as 2.50 for 2.5; they are compared as decimals, without a tolerance.
    """
    lines, right = _lines(output), _lines(case.output)
    if len(lines) != len(right):
        return f"prints {len(lines)} lines in place of {len(right)}"
    for number, (line, wanted) in enumerate(zip(lines, right, strict=True), 1):
        if line != wanted and ((found := _decimals(line)) is None or found != _decimals(wanted)):
            return f"prints {_short(line)} in place of {_short(wanted)} on line {number}"
    return None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _decimals(line: str) -> list[decimal.Decimal] | None:
    try:
        return [decimal.Decimal(part) for part in line.split()]
    except (decimal.InvalidOperation, ValueError):
        return None


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
