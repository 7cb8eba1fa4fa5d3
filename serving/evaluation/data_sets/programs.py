"""Programs: LiveCodeBench, HumanEval+ and MBPP+, as they are published.

LiveCodeBench (Jain et al., 2024) keeps cases as JSON in a string, the private ones compressed and
pickled; HumanEval+ and MBPP+ (Liu et al., 2023) have Python code that checks a function, or, in
evalplus' own files, inputs whose right outputs the canonical solution gives.
"""

import base64
import binascii
import dataclasses
import datetime
import json
import pickletools
import zlib
from collections.abc import Callable
from typing import Any

from jaxshare.serving import jsonl
from jaxshare.serving.evaluation.data_sets.reading import DataSet, Line, id_of, require, text_of
from jaxshare.serving.evaluation.problems import Case, Problem

_MAX_BYTES = 1 << 30
"""Bytes of the cases of one problem, decompressed."""
_TEXT_OPERATIONS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_SILENT_OPERATIONS = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP")
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
PREAMBLE = "\n".join(
    [
        *(f"from {module} import *" for module in (*_MODULES, "builtins", "typing")),
        *(f"import {module}" for module in _MODULES),
        "sys.setrecursionlimit(50000)",
    ]
)
"""The imports that LiveCodeBench puts before a program."""
_EVALPLUS_TESTS = """
def _same(given, right, close):
    if isinstance(right, float) and isinstance(given, (int, float)):
        return given == right or abs(given - right) <= close + 1e-7 * abs(right)
    if isinstance(right, (list, tuple)) and isinstance(given, (list, tuple)):
        return len(given) == len(right) and all(
            _same(each, other, close) for each, other in zip(given, right)
        )
    return given == right


def _reference():
    names = {"__name__": "reference"}
    exec(SOURCE, names)
    return names[NAME]


import copy as _copy

_right, _given = _reference(), FUNCTION
for _inputs in INPUTS:
    if NAME == "find_zero":
        _root = _given(*_copy.deepcopy(_inputs))
        _value = sum(factor * _root**i for i, factor in enumerate(_inputs[0]))
        assert abs(_value) <= CLOSE, f"{NAME}({str(_inputs)[1:-1][:200]})"
        continue
    _wanted = _right(*_copy.deepcopy(_inputs))
    assert _same(_given(*_copy.deepcopy(_inputs)), _wanted, CLOSE or 1e-6), (
        f"{NAME}({str(_inputs)[1:-1][:200]})"
    )
"""
"""Compares a function with the canonical solution on all inputs; the names in capitals are put in."""


# LiveCodeBench.


@dataclasses.dataclass(frozen=True)
class PublishedCases:
    """The cases of a problem of LiveCodeBench, decoded when they are needed.

    Attributes:
      public: JSON in a string.
      private: the same, or compressed and pickled.
      function: see `Cases`.
    """

    public: str
    private: str
    function: str | None

    @property
    def digest(self) -> str:
        """A hash of all cases."""
        return jsonl.sha256(f"{self.public}\n{self.private}".encode())

    def read(self) -> list[Case]:
        """Decodes the cases, the public ones first.

        Raises:
          ValueError: they cannot be decoded, are of another type than the problem's, or are none.
        """
        cases = [
            *_decoded(self.public, "public_test_cases", self.function),
            *_decoded(self.private, "private_test_cases", self.function),
        ]
        if not cases:
            raise ValueError('has no cases in "public_test_cases" and "private_test_cases"')
        return cases


def unpickled_text(data: bytes) -> str:
    """The one text in a pickle. Nothing is executed: operations that could do more are refused.

    Raises:
      ValueError: it has anything else.
    """
    texts = []
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name in _TEXT_OPERATIONS:
                texts.append(argument)
            elif operation.name not in _SILENT_OPERATIONS:
                raise ValueError(f"the operation {operation.name}")
    except ValueError as error:
        raise ValueError(f"is a pickle of more than a text ({error})") from error
    if len(texts) != 1:
        raise ValueError(f"is a pickle of {len(texts)} texts; it must have one")
    return texts[0]


def _decoded(text: str, field: str, function: str | None) -> list[Case]:
    """The cases in a field."""
    try:
        if not text.lstrip().startswith("["):
            text = unpickled_text(_decompressed(base64.b64decode(text, validate=True)))
        values = json.loads(text)
    except (ValueError, binascii.Error, zlib.error, RecursionError) as error:
        raise ValueError(
            f'has "{field}" that are neither JSON nor base64 of a compressed pickle ({error})'[:400]
        ) from error
    if not isinstance(values, list):
        raise ValueError(f'has "{field}" that are no list')
    kind, cases = "stdin" if function is None else "functional", []
    for number, value in enumerate(values, 1):
        try:
            case, found = Case(value["input"], value["output"]), value["testtype"]
        except (TypeError, KeyError) as error:
            raise ValueError(
                f'has case {number} of "{field}" without input, output and testtype'
            ) from error
        if not isinstance(case.input, str) or not isinstance(case.output, str):
            raise ValueError(f'has case {number} of "{field}" whose input or output is no text')
        if found != kind:
            raise ValueError(
                f'has case {number} of "{field}" of the type {str(found)[:20]!r}, but its '
                f"metadata name {'a' if function else 'no'} function, so it must be {kind!r}"
            )
        cases.append(case)
    return cases


def _decompressed(data: bytes) -> bytes:
    decompress = zlib.decompressobj()
    found = decompress.decompress(data, _MAX_BYTES)
    if decompress.unconsumed_tail:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    return found


def livecodebench_problem(line: Line) -> Problem:
    """A problem of LiveCodeBench (code_generation_lite).

    Raises:
      ValueError: another form, or cases that cannot be read.
    """
    require(
        line,
        "question_content",
        "starter_code",
        "public_test_cases",
        "private_test_cases",
        "metadata",
    )
    function = _function(line["metadata"])
    public, private = (
        text_of(line, field) for field in ("public_test_cases", "private_test_cases")
    )
    cases = PublishedCases(public, private, function)
    for case in cases.read():  # so that a damaged one is named before anything is run
        if function is not None:
            _check_json(case)
    starter = line["starter_code"] if isinstance(line["starter_code"], str) else ""
    if function is not None and function not in starter:
        raise ValueError(
            f'has the function {function[:40]!r} in its metadata, which its "starter_code" does not '
            "name"
        )
    asked = text_of(line, "question_content").strip()
    if starter.strip():
        form = (
            "Write a Python program that begins with this code, and give it in one fenced block:"
            f"\n```python\n{starter.rstrip()}\n```"
        )
    else:
        form = (
            "Write a Python program that reads its input from stdin and prints its answer to "
            "stdout, and give it in one fenced block that begins with ```python."
        )
    return Problem(id_of(line, "question_id"), f"{asked}\n\n{form}", cases=cases, preamble=PREAMBLE)


def _function(metadata: Any) -> str | None:
    """The name of the function in a problem's metadata, a JSON object in a string."""
    try:
        found = json.loads(metadata) if isinstance(metadata, str) else metadata
        name = found.get("func_name")
    except (ValueError, AttributeError) as error:
        raise ValueError('has "metadata" that are no JSON object in a string') from error
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f'has {str(name)[:40]!r} as the "func_name" of its metadata')
    return name


def _check_json(case: Case) -> None:
    """Raises ValueError for the case of a function whose arguments or value are not JSON."""
    try:
        for text in (*case.input.split("\n"), case.output):
            json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"has a case of a function whose arguments or value are not JSON ({error})"
        ) from error


def dates(text: str) -> Callable[[Line], bool]:
    """Says of a line of LiveCodeBench whether its contest was within two dates, both included.

    Args:
      text: two dates such as "2024-08-01,2025-01-31".

    Raises:
      ValueError: it is something else.
    """
    try:
        first, last = map(datetime.date.fromisoformat, text.split(","))
    except ValueError:
        raise ValueError(
            f"--dates is {text!r}; give two dates such as 2024-08-01,2025-01-31"
        ) from None
    if first > last:
        raise ValueError(f"--dates is {text!r}, whose first date is after its last")

    def within(line: Line) -> bool:
        try:
            found = datetime.datetime.fromisoformat(str(line.get("contest_date"))).date()
        except ValueError:
            raise ValueError(
                f'has {str(line.get("contest_date"))[:40]!r} as its "contest_date"'
            ) from None
        return first <= found <= last

    return within


# HumanEval+ and MBPP+.


def humaneval_problem(line: Line) -> Problem:
    """A problem of HumanEval+, with `test` or with evalplus' inputs.

    Raises:
      ValueError: another form, or code that does not compile.
    """
    require(line, "task_id", "prompt", "entry_point", "canonical_solution")
    prompt, name = text_of(line, "prompt"), _name(line)
    if "base_input" in line:
        tests = _evalplus_tests(line, prompt, name)
    else:
        require(line, "test")
        if "def check(" not in (test := text_of(line, "test")):
            raise ValueError('has a "test" without a function check')
        tests = f"{test}\n\ncheck({name})\n"
    text = (
        "Write the whole of this Python function, and give it in one fenced block that begins with "
        f"```python:\n\n{prompt.strip()}"
    )
    return Problem(
        id_of(line, "task_id"), text, tests=_code(tests, "test"), preamble=_code(prompt, "prompt")
    )


def mbpp_problem(line: Line) -> Problem:
    """A problem of MBPP+ with `test` and `test_list`.

    Raises:
      ValueError: another form, such as evalplus' own, or code that does not compile.
    """
    if "base_input" in line:
        raise ValueError(
            "has inputs in JSON, which has no tuples and sets, that functions of MBPP+ take; give "
            'the form with "test" (evalplus/mbppplus)'
        )
    require(line, "task_id", "prompt", "test", "test_list")
    examples = line["test_list"]
    if not isinstance(examples, list) or not all(isinstance(each, str) for each in examples):
        raise ValueError('has a "test_list" that is no list of texts')
    text = (
        f"{text_of(line, 'prompt').strip()}\nThe program must pass these tests:\n"
        + "\n".join(examples)
        + "\nGive it in one fenced block that begins with ```python."
    )
    return Problem(id_of(line, "task_id"), text, tests=_code(text_of(line, "test"), "test"))


def _name(line: Line) -> str:
    name = text_of(line, "entry_point")
    if not name.isidentifier():
        raise ValueError(
            f'has {name[:40]!r} as its "entry_point"; it must be the name of a function'
        )
    return name


def _evalplus_tests(line: Line, prompt: str, name: str) -> str:
    """Tests by the canonical solution, which is run in the process of the tests."""
    inputs = [*_inputs(line, "base_input"), *_inputs(line, "plus_input")]
    if not inputs:
        raise ValueError('has no inputs in "base_input" and "plus_input"')
    close = line.get("atol", 0)
    if type(close) not in (int, float) or not close >= 0:
        raise ValueError(f'has {str(close)[:40]!r} as its "atol"; it must be a number from 0 up')
    source = _code(prompt + text_of(line, "canonical_solution"), "canonical_solution")
    values = {"SOURCE": source, "INPUTS": inputs, "CLOSE": close, "NAME": name}
    head = "from math import inf, nan\n" + "".join(f"{k} = {v!r}\n" for k, v in values.items())
    return head + _EVALPLUS_TESTS.replace("FUNCTION", name)


def _inputs(line: Line, field: str) -> list[list[Any]]:
    inputs = line.get(field)
    if not isinstance(inputs, list) or not all(isinstance(each, list) for each in inputs):
        raise ValueError(f'has a "{field}" that is no list of lists of arguments')
    return inputs


def _code(source: str, field: str) -> str:
    try:
        compile(source, field, "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f'has a "{field}" that is not Python ({error})') from error
    return source


_LIVE_FIELDS = (
    '"question_content", "starter_code", "public_test_cases", "private_test_cases" and "metadata"'
)


def _live(last: int) -> DataSet:
    files = ("test.jsonl", *(f"test{number}.jsonl" for number in range(2, last + 1)))
    return DataSet(
        f"livecodebench/code_generation_lite, release_v{last}",
        (files,),
        _LIVE_FIELDS,
        livecodebench_problem,
        1024,
    )


LIVE = {"livecodebench-v5": _live(5), "livecodebench-v6": _live(6)}
"""The releases of LiveCodeBench."""
PROGRAMS = {
    **LIVE,
    "humaneval-plus": DataSet(
        "HumanEval+, evalplus/humanevalplus or evalplus' own release",
        (("HumanEvalPlus.jsonl",), ("humanevalplus.jsonl",)),
        '"task_id", "prompt", "entry_point", "canonical_solution", and "test" or "base_input"',
        humaneval_problem,
        1024,
    ),
    "mbpp-plus": DataSet(
        "MBPP+, evalplus/mbppplus",
        (("MbppPlus.jsonl",), ("mbppplus.jsonl",)),
        '"task_id", "prompt", "test" and "test_list"',
        mbpp_problem,
        1024,
    ),
}
"""The data sets of programs, by the names of their tasks."""
