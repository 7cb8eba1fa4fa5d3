"""Two agents repair a program whose test fails, in the shape of Hive's figure 6; a patch is
believed when the test has really passed.

    jaxshare agents run examples/bug_repair.py
    jaxshare agents run examples/bug_repair.py --model Qwen/Qwen3-8B -- --source buggy.py --test test_buggy.py

`context_gather` reads the program and yields what matters to the bug; `bug_repair` asks the model
for a patch, runs the test, and resumes the other one with what came of it, until the test passes.
The test runs in a process of its own, with bounds on time, memory and files, in a folder of its
own. That keeps mistakes in, not attackers: give patches of a model that you do not trust to a
container.
"""

import argparse
import ast
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jaxshare.serving.agents import ParseError, agent, llm, spawn, tool
from jaxshare.serving.agents.backends import ScriptedModel

SOURCE = '''\
def numbers(text):
    """The numbers in a line, as floats; words are left out."""
    found = []
    for word in text.split():
        try:
            found.append(float(word))
        except ValueError:
            pass
    return found


def median(text):
    """The median of the numbers in a line: the middle one, or the mean of the two in the middle."""
    values = numbers(text)
    return values[len(values) // 2]


def spread(text):
    """The largest number in a line less the smallest."""
    values = numbers(text)
    return max(values) - min(values)
'''

TEST = """\
from program import median


def test_the_middle_of_three():
    assert median("9 apples, 1 pear and 5 plums") == 5


def test_the_mean_of_the_middle_two():
    assert median("4 1 3 2") == 2.5
"""

ROUNDS = 4
SECONDS = 10.0
MEMORY = 512 * 1024**2
FILES = 1024**2
"""Bytes of memory, and of a file that is written, at most."""
REPORT = 1500
"""Characters of what a failing test says that are kept."""

READ_NEXT = """\
A test of a program fails. The program has these functions: {names}.
The test:
{test}
Which functions have to be read to find the mistake? Write their names with commas between them and nothing else."""

REPAIR = """\
A test of a Python program fails.
{code}
The test:
{test}
What it said:
{report}
Write the functions that have to change, whole, in one fenced code block."""


@dataclass(frozen=True)
class Verdict:
    """Whether the test has passed, and what it said if not."""

    passed: bool
    report: str


RUNNER = """\
import resource, sys
seconds, memory, files = map(int, sys.argv[1:4])
proof = sys.stdin.readline()
bounds = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: files, resource.RLIMIT_CORE: 0}
for limit, value in bounds.items():
    try:
        resource.setrlimit(limit, (value, value))
    except (OSError, ValueError):
        pass  # macOS does not bound memory
sys.path.insert(0, ".")
import test_program
tests = [value for name, value in vars(test_program).items() if name.startswith("test") and callable(value)]
assert tests, "there is no test"
for test in tests:
    test()
print(proof)
"""


def verify(source: str, test: str, seconds: float = SECONDS) -> Verdict:
    """Runs the functions of a test whose names begin with `test`, in a process of its own.

    A program that ends the process early has not passed: a word that the process was given is said
    only behind the last test.
    """
    proof = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="bug_repair-") as folder:
        for name, text in (
            ("program.py", source),
            ("test_program.py", test),
            ("runner.py", RUNNER),
        ):
            (Path(folder) / name).write_text(text, encoding="utf-8")
        with (Path(folder) / "output").open("w+b") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-B",
                    "runner.py",
                    str(int(seconds) + 1),
                    str(MEMORY),
                    str(FILES),
                ],
                cwd=folder,
                env={"HOME": folder, "TMPDIR": folder, "PATH": os.defpath},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.communicate(f"{proof}\n".encode(), timeout=seconds)
            except subprocess.TimeoutExpired:
                return Verdict(False, f"The test has not ended within {seconds} seconds.")
            except BrokenPipeError:
                pass  # it has ended before it read; what it said follows
            finally:
                # Whatever it has started dies with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            said = output.read(FILES).decode(errors="replace")
    if process.returncode == 0 and proof in said:
        return Verdict(True, "")
    return Verdict(
        False,
        said.replace(folder, ".")[-REPORT:].strip()
        or f"The test ended with code {process.returncode}.",
    )


def functions_of(source: str) -> dict[str, str]:
    """The text of each function of a program."""
    return {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }


def patched(source: str, patch: str) -> str:
    """The program with the functions of the patch in place of its own; what is new comes behind.

    Raises:
      ValueError: a patch that is no Python, or without a function.
    """
    try:
        new = functions_of(patch)
    except SyntaxError as error:
        raise ValueError(f"the patch is no Python: {error}") from None
    if not new:
        raise ValueError("the patch has no function")
    for name, text in new.items():
        old = functions_of(source).get(name)
        source = source.replace(old, text) if old else f"{source}\n\n{text}\n"
    return source


def code_block(text: str) -> str:
    """What stands in the last fenced block."""
    found = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    if not found:
        raise ValueError("there is no fenced code block")
    return found[-1]


@agent
async def context_gather(source, test):
    """Yields the functions that matter to a failing test, each time that it is resumed with
    (program, what the test said)."""
    functions = functions_of(source)

    def names(text):
        found = [name for name in re.findall(r"\w+", text) if name in functions]
        if not found:
            raise ValueError("it names no function of the program")
        return list(dict.fromkeys(found))

    try:
        chosen = await llm(
            READ_NEXT.format(names=", ".join(functions), test=test),
            parse=names,
            retries=1,
            max_new_tokens=32,
        )
    except ParseError:
        chosen = list(functions)
    while True:
        functions = functions_of(source)
        news = yield "\n\n".join(functions[name] for name in chosen)
        if news is None:
            return
        source, report = news
        # What the test has come across since belongs to it too.
        chosen += [
            name for name in functions_of(source) if name not in chosen and f"in {name}" in report
        ]


@agent
async def bug_repair(source, test):
    """The repaired program, what was tried, and whether the test passes."""
    verdict = await tool(verify, source, test)
    gatherer = spawn(context_gather, source, test)
    tried = []
    while not verdict.passed and len(tried) < ROUNDS:
        code = await gatherer.next()
        try:
            patch = await llm(
                REPAIR.format(code=code, test=test, report=verdict.report),
                parse=code_block,
                retries=1,
                max_new_tokens=512,
            )
            repaired = patched(source, patch)
        except ValueError as error:
            report = f"{verdict.report}\n(The last patch could not be used: {error})"
            patch, repaired, verdict = None, source, Verdict(False, report[-REPORT:])
        else:
            verdict = await tool(verify, repaired, test)
        tried.append({"patch": patch, "passed": verdict.passed, "report": verdict.report})
        source = repaired
        gatherer.resume((source, verdict.report))
    return {"source": source, "passed": verdict.passed, "tried": tried}


# What `jaxshare agents run` looks for.

AGENT = bug_repair
MODEL = "scripted"


def arguments(args: list[str]):
    parser = argparse.ArgumentParser(
        prog="bug_repair.py", description="Repair a program whose test fails."
    )
    parser.add_argument(
        "--source", metavar="FILE", help="the program, which its test imports as `program`"
    )
    parser.add_argument(
        "--test", metavar="FILE", help="functions test_... that raise where it is wrong"
    )
    given = parser.parse_args(args)
    if (given.source is None) != (given.test is None):
        raise ValueError("--source and --test go together")
    if given.source is None:
        return SOURCE, TEST
    try:
        source, test = (
            Path(file).read_text(encoding="utf-8") for file in (given.source, given.test)
        )
        ast.parse(source)
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(
            f"{given.source} and {given.test} have to be Python files that can be read ({error})"
        ) from error
    return source, test


def shown(value) -> str:
    lines = []
    for number, one in enumerate(value["tried"], 1):
        lines += [
            f"patch {number}:",
            one["patch"] or "(none)",
            "the test passes" if one["passed"] else one["report"].splitlines()[-1],
            "",
        ]
    return "\n".join([*lines, "repaired:" if value["passed"] else "not repaired:", value["source"]])


SORTED = '''\
The numbers have to be sorted first.
```python
def median(text):
    """The median of the numbers in a line: the middle one, or the mean of the two in the middle."""
    values = sorted(numbers(text))
    return values[len(values) // 2]
```
'''
BOTH = '''\
Of an even number of values the two in the middle count.
```python
def median(text):
    """The median of the numbers in a line: the middle one, or the mean of the two in the middle."""
    values = sorted(numbers(text))
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
```
'''


def scripted() -> ScriptedModel:
    """Answers to the program above: the first patch repairs one of two mistakes, the second the
    other."""
    return ScriptedModel(
        {
            "Which functions have to be read": "numbers, median",
            "in test_the_middle_of_three": SORTED,
            "in test_the_mean_of_the_middle_two": BOTH,
        }
    )
