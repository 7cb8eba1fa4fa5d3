"""Programs judged case by case, as judges run them, and programs that mean harm."""

import os
import socket
import subprocess
import time

import pytest

from jaxshare.serving.evaluation import Limits
from jaxshare.serving.evaluation.checkers import sandbox
from jaxshare.serving.evaluation.checkers.cases import run_cases
from jaxshare.serving.evaluation.problems import Case

WAYS = [way.name for way in sandbox.ways()]
CASES = [Case("3\n1 2 3\n", "6\n"), Case("1\n5", "5")]
SUM = "n = int(input())\nprint(sum(map(int, input().split())))\n"


@pytest.fixture(params=WAYS)
def judge(request):
    """Runs a program on CASES, in each of the ways that this machine has."""
    return lambda program, cases=CASES, **limits: run_cases(
        program, cases, Limits(**{"seconds": 20, **limits}), isolate=request.param
    )


@pytest.fixture(params=WAYS[:-1])
def jailed(request):
    """The same in namespaces."""
    return lambda program, cases=CASES, **limits: run_cases(
        program, cases, Limits(**{"seconds": 20, **limits}), isolate=request.param
    )


@pytest.mark.parametrize(
    "program",
    [
        "from __future__ import annotations\n" + SUM,
        "import sys\ndef main():\n    data = sys.stdin.read().split()\n    print(sum(map(int, data[1:])"
        "))\nif __name__ == '__main__':\n    main()",
        "import sys, threading\ndef main():\n    input()\n    print(sum(map(int, input().split())))\n"
        "sys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
        "threading.Thread(target=main).start()",
        "import atexit, os, sys\nout = []\natexit.register(lambda: os.write(1, ''.join(out).encode()))\n"
        "sys.stdin.readline()\nout.append(str(sum(map(int, sys.stdin.readline().split()))))",
        "data = open(0).read().split()\nprint(sum(map(int, data[1:])))\nexit()",
        "input()\nprint(f'  {sum(map(int, input().split())):.3f} \\n\\n')",
        "import sys, __main__\nassert __main__.__name__ == __name__ == '__main__'\n" + SUM,
    ],
)
def test_programs_run_as_judges_run_them(judge, program):
    assert judge(program) == sandbox.Verdict(True)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("print(6)", "case 2 of 2: prints '6' in place of '5' on line 1"),
        ("", "case 1 of 2: prints '' in place of '6' on line 1"),
        (SUM + "print('more')", "case 1 of 2: prints 2 lines in place of 1"),
        ("print(6.0000001)", "prints '6.0000001' in place of '6'"),
        ("raise ValueError('no')", "case 1 of 2: the program: ValueError: no"),
        ("def", "the program: SyntaxError"),
        (SUM + "raise SystemExit(3)", "ended with status 3"),
        (SUM + "input()", "the program: EOFError"),
        ("x = bytearray(1 << 31)", "the program: MemoryError"),
    ],
)
def test_other_programs_are_wrong_and_say_why(judge, program, words):
    verdict = judge(program)
    assert not verdict.passed and words in verdict.error


@pytest.mark.parametrize(
    ("printed", "wanted", "right"),
    [
        ("1 2\n3", " 1 2 \n3\n\n", True),
        ("1 2", "1  2", True),  # numbers, of which spaces say nothing
        ("a b", "a  b", False),
        ("1.50", "1.5", True),
        ("1e3", "1000", True),
        ("50000000000000001", "50000000000000000", False),
        ("0.1", "0.10000001", False),
        ("1 x", "1.0 x", False),
        ("1\n\n2", "1\n2", False),
        ("", "", True),
        ("YES", "Yes", False),
    ],
)
def test_lines_are_compared_as_livecodebench_does(printed, wanted, right):
    verdict = run_cases(f"print({printed!r})", [Case("", wanted)], isolate=WAYS[0])
    assert verdict.passed is right


def test_functions_are_called_with_json(judge):
    cases = [Case("[3, 1, 2]\n2", "[[1, 2], Infinity]"), Case("[]\n0", "[[], Infinity]")]

    def called(program):
        return run_cases(program, cases, function="f", preamble="from math import *")

    method = (
        "class Solution:\n    def f(self, a, k):\n        print('x'); return sorted(a)[:k], inf"
    )
    assert called(method).passed
    assert called("def f(a, k): return [tuple(sorted(a)[:k]), inf]").passed
    for program, words in (
        (method.replace("[:k]", "[:1]"), "case 1 of 2: returns '[[1], Infinity]' in place of"),
        ("f = lambda a, k: 1 / 0", "the program: ZeroDivisionError"),
        ("f = lambda a, k: {1}", "the program: AttributeError"),
        ("f = lambda a, k: exit()", "case 1 of 2: the program ends before its function returns"),
        ("x = 1", "has no attribute 'f'"),
    ):
        verdict = called(program)
        assert not verdict.passed and words in verdict.error


def test_every_case_has_its_own_time(judge):
    work = "import time\nt = time.process_time()\nwhile time.process_time() < t + 0.6: pass\n"
    many = [CASES[0]] * 2
    assert judge(work + SUM, many, seconds=1).passed
    verdict = judge("while True: pass", many, seconds=1)
    assert "TimeoutError: more than 1 seconds of processor time" in verdict.error


# programs that mean harm


def test_sleep_is_no_time_of_the_processor_and_still_ends(judge, monkeypatch):
    monkeypatch.setattr(sandbox, "_START_SECONDS", 1.0)
    begin = time.monotonic()
    program = "import signal, time\nfor s in (15, 2, 14, 24): signal.signal(s, signal.SIG_IGN)\n"
    verdict = judge(program + "while True: time.sleep(1000)", seconds=1)
    assert verdict.error == "case 1 of 2: takes more than 3 seconds"
    assert time.monotonic() - begin < 30


def test_output_without_end_is_cut(judge):
    verdict = judge("while True: print('x' * 1000)", files=1 << 20)
    assert not verdict.passed and "File too large" in verdict.error
    verdict = judge(
        "import os\nwhile True:\n  try: os.write(2, b'x' * 1000)\n  except OSError: 1/0"
    )
    assert not verdict.passed


def test_forks_and_memory_without_end_are_stopped(jailed):
    verdict = jailed("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass")
    words = ("processes and threads, more than 64", "takes more than")
    assert not verdict.passed and any(word in verdict.error for word in words)
    hold = "import os, time\nfor _ in range(4):\n    if not os.fork(): break\n"
    verdict = jailed(f"{hold}x = b'x' * (80 << 20)\ntime.sleep(60)", memory=250 << 20)
    assert "bytes of memory in all its processes" in verdict.error


def test_nothing_that_a_program_starts_goes_on(jailed, tmp_path):
    mark = tmp_path / "late"
    start = (
        "import subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 0.5; touch {0}; kill -9 -1'])\n"
    )
    assert jailed(start.format(mark) + SUM).passed
    time.sleep(1)
    assert not mark.exists()


def test_the_judge_and_others_cannot_be_killed(judge):
    victim = subprocess.Popen(["sleep", "60"])
    try:
        for target in (os.getpid(), victim.pid, -1, 1, 0):
            kill = f"import os, signal\ntry: os.kill({target}, 9)\nexcept OSError: pass\n"
            judge(kill + SUM)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_right_outputs_are_nowhere_to_be_found(judge):
    secret = "the-right-output"
    look = (
        "import gc, glob, os, sys\nseen = []\n"
        "for path in [*glob.glob('/proc/self/fd/*'), *glob.glob('/tmp/*')][:500]:\n"
        "    try: seen.append(open(path, errors='replace').read(1 << 16))\n"
        "    except (OSError, ValueError): pass\n"
        "frame = sys._getframe()\n"
        "while frame:\n    seen.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "seen.append(repr(gc.get_objects())[:1 << 22])\n"
        "marker = 'tuptuo-thgir-eht'[::-1]\nfound = any(marker in text for text in seen)\n"
        "print(marker if found else 'not found')\n"
    )
    verdict = judge(look, [Case("", secret)])
    assert not verdict.passed and "prints 'not found' in place of" in verdict.error


def test_files_and_links_lead_nowhere(jailed, tmp_path):
    (tmp_path / "secret").write_text("x")
    for program in (
        f"open({str(tmp_path / 'secret')!r})",
        f"import os\nos.symlink({str(tmp_path)!r}, 'way')\nopen('way/secret')",
        f"import os\nos.symlink('/proc/1/root{tmp_path}', 'way')\nopen('way/secret')",
        "import os\nos.mkdir('/usr/mine')",
        "import json\nopen(json.__file__, 'a')",
    ):
        verdict = jailed(program + "\n" + SUM)
        words = ("FileNotFoundError", "Read-only file system", "PermissionError")
        assert not verdict.passed and any(word in verdict.error for word in words), program
    # Its root is in memory, if it can be written at all.
    jailed("for path in '/mine', '/dev/mine':\n  try: open(path, 'w')\n  except OSError: pass")
    assert not os.path.exists("/mine") and not os.path.exists("/dev/mine")
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert jailed("open('own', 'w').write('x')\nassert open('own').read() == 'x'\n" + SUM).passed


def test_there_is_no_network(judge):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        verdict = judge(
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\n" + SUM
        )
        assert not verdict.passed
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'{\"error\": null}')\n"
        "    except OSError: pass\nos._exit(0)",
        "import json, sys\njson.loads = lambda text: 6\nsys.exit()",
        "import builtins, decimal\nbuiltins.str.__eq__ = None",
        "class Any(str):\n    def __eq__(self, other): return True\nprint(Any('7'))",
        "import os, sys\nframe = sys._getframe()\nwhile frame:\n    given = frame.f_locals.get('given')\n"
        "    if given:\n        given['stdout'] = given['stdin']\n    frame = frame.f_back\nprint(7)",
    ],
)
def test_nothing_that_a_program_writes_makes_it_right(program):
    assert not run_cases(program, CASES, Limits(seconds=20)).passed
