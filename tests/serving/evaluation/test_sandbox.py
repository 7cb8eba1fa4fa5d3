"""Programs under limits, with and without namespaces, and answers compared as mathematics in a
process that may die."""

import http.server
import importlib.util
import os
import threading
import time

import pytest

from jaxshare.serving.evaluation import Limits, Mathematician, run_tests
from jaxshare.serving.evaluation.checkers import sandbox

TESTS = "assert square(3) == 9\nassert square(-2) == 4, 'of a negative number'"
GOOD = "def square(x):\n    return x * x\n"


@pytest.fixture(params=["namespaces", "python"])
def judge(request):
    """Runs a program against TESTS, in each of the two ways."""
    if request.param == "namespaces" and not sandbox.namespaces():
        pytest.skip("this system allows no namespaces")
    return lambda program, tests=TESTS, **limits: run_tests(
        program, tests, Limits(**{"seconds": 20, **limits}), isolate=request.param == "namespaces"
    )


def test_a_right_program_passes(judge):
    assert judge(GOOD) == sandbox.Verdict(True, None)
    assert judge(GOOD + "if __name__ == '__main__':\n    raise SystemExit(1)").passed
    assert judge(
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 3\nsquare = lambda "
        "x: x * x"
    ).passed


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("def square(x):\n    return x + x", "the tests: AssertionError"),
        (
            "def square(x):\n    return 9 if x == 3 else 0",
            "the tests: AssertionError: of a negative number",
        ),
        ("def square(x) return x", "the program: SyntaxError"),
        ("", "the tests: NameError: name 'square' is not defined"),
        ("raise SystemExit(0)", "the program: SystemExit: 0"),
        (GOOD + "import os\nos._exit(0)", "ended before its tests did"),
        ("def square(x):\n    import sys\n    sys.exit(0)", "the tests: SystemExit"),
        ("import os\nos.kill(os.getpid(), 9)", ""),
        ("def square(x):\n    return square(x)", "the tests: RecursionError"),
        ("input()", "the program: EOFError"),
        ("x = bytearray(1 << 31)", "the program: MemoryError"),
        ("open('x', 'wb').write(bytes(1 << 27))", "the program: OSError"),
        (
            GOOD
            + 'import os\nfor fd in range(3, 64):\n  try: os.write(fd, b\'{"mark": 1, "error": '
            "null}')\n  except OSError: pass",
            "ended",
        ),
    ],
)
def test_other_programs_do_not(judge, program, words):
    verdict = judge(program)
    assert not verdict.passed and words in verdict.error


def test_time_is_limited(judge, monkeypatch):
    monkeypatch.setattr(sandbox, "_START_SECONDS", 1.0)
    begin = time.monotonic()
    assert (
        judge("while True: pass", seconds=1).error
        == "the program: TimeoutError: more than 1 seconds of processor time"
    )
    stubborn = (
        "import time\nwhile True:\n    try:\n        time.sleep(1000)\n"
        "    except BaseException: pass"
    )
    assert judge(stubborn, seconds=1).error == "takes more than 3 seconds"
    assert time.monotonic() - begin < 60


def test_there_is_no_network(judge):
    seen = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path)
            self.send_response(200)
            self.end_headers()

        log_message = print

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.server_address[1]
        look_up = (
            "import urllib.request\n"
            f"urllib.request.urlopen('http://127.0.0.1:{port}/answer', timeout=5)\n"
        )
        verdict = judge(look_up + GOOD)
        started = judge(
            f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {look_up!r}], "
            "check=True)\n" + GOOD
        )
        # sockets within a process
        assert judge(
            "import asyncio\nasync def f(): return 2\nassert asyncio.run(f()) == 2\n" + GOOD
        ).passed
        server.shutdown()
        thread.join()
    assert not verdict.passed and not started.passed and seen == []


def test_a_program_sees_no_variables_and_leaves_no_process(judge, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_KEY", "abc")
    assert judge("import os\nassert 'SECRET_KEY' not in os.environ\n" + GOOD).passed
    if sandbox.namespaces():
        mark = tmp_path / "late"
        run_tests(
            f"import subprocess, sys\nsubprocess.Popen(['sh', '-c', 'sleep 1; touch {mark}'])\n"
            + GOOD,
            TESTS,
        )
        time.sleep(1.5)
        assert not mark.exists()


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"memory": -1}, {"seconds": float("nan")}])
def test_limits_are_more_than_nothing(limits):
    with pytest.raises(ValueError, match=f"{next(iter(limits))} is"):
        Limits(**limits)


# mathematics


@pytest.fixture(scope="module")
def mathematician():
    pytest.importorskip("math_verify")
    with Mathematician() as made:
        yield made


@pytest.mark.parametrize(
    ("reference", "answer", "same"),
    [
        ("18", "18", True),
        ("18", "18.0", True),
        ("18", "\\$18", True),
        ("18", "$18$", True),
        ("18", "19", False),
        ("-10", "10", False),
        ("70000", "70,000", True),
        ("$\\frac{1}{2 n+2}$", "\\frac{1}{2(n+1)}", True),
        ("1/2", "0.5", True),
        ("$2^{1009}$", "2^{1008}", False),
        ("1,3,5", "5, 3, 1", True),
        ("$(2,4)$", "(4,2)", False),
        ("025", "25", True),
        ("5", "unknown", False),
        ("5", "\\frac{", False),
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        ("no number", "no number ", True),
    ],
)
def test_answers_as_mathematics(mathematician, reference, answer, same):
    assert mathematician.same(reference, answer) is same


def test_an_answer_that_takes_all_time_is_wrong_and_does_no_harm():
    pytest.importorskip("math_verify")
    with Mathematician(seconds=0.5) as short:
        begin = time.monotonic()
        assert not short.same("5", "10^{10^{10}}") and short._process is None
        assert time.monotonic() - begin < 60
        assert not short.same("5", "10^{10^{10}}") and short._process is None  # known by now
        short._seconds = 30
        assert short.same("0.5", "\\frac{1}{2}")
        os.kill(short._process.pid, 9)
        assert not short.same("5", "6") and short.same("0.25", "\\frac{1}{4}")


def test_without_math_verify_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"compared with math-verify, which is not installed; `pip install "
        r"'jaxshare\[evaluate\]'` has it",
    ):
        Mathematician.check()
