"""Programs under limits, with and without namespaces, and answers compared as mathematics in a
process that may die."""

import http.server
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxshare.serving.cli.evaluation import report
from jaxshare.serving.evaluation import Limits, Mathematician, run_tests
from jaxshare.serving.evaluation.checkers import isolation, sandbox
from jaxshare.serving.evaluation.tasks import Problem, Task

TESTS = "assert square(3) == 9\nassert square(-2) == 4, 'of a negative number'"
GOOD = "def square(x):\n    return x * x\n"


WAYS = [way.name for way in sandbox.ways()]
"""The ways to start a judged process that this machine has; Python's own is the last."""


@pytest.fixture(params=WAYS)
def judge(request):
    """Runs a program against TESTS, in each of the ways."""
    return lambda program, tests=TESTS, **limits: run_tests(
        program, tests, Limits(**{"seconds": 20, **limits}), isolate=request.param
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
    begin = time.monotonic()
    assert (
        judge("while True: pass", seconds=1).error
        == "the program: TimeoutError: more than 1 seconds of processor time"
    )
    monkeypatch.setattr(sandbox, "_START_SECONDS", 1.0)
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
    if len(WAYS) > 1:
        mark = tmp_path / "late"
        run_tests(
            f"import subprocess, sys\nsubprocess.Popen(['sh', '-c', 'sleep 1; touch {mark}'])\n"
            + GOOD,
            TESTS,
        )
        time.sleep(1.5)
        assert not mark.exists()


# what a program and its tests may say to each other

FAIR = """
import collections, dataclasses, enum, fractions, math
import numpy as np
Pair = collections.namedtuple("Pair", "x y")
Color = enum.Enum("Color", "RED BLUE")
calls = 0
class Full(ValueError):
    pass
@dataclasses.dataclass
class Vector:
    x: int
    def __add__(self, other): return Vector(self.x + other.x)
    def __mul__(self, other): return Vector(self.x * other)
    def __lt__(self, other): return self.x < other.x
class Stack:
    def __init__(self): self.items = []
    def push(self, item):
        if len(self.items) == 2: raise Full("no room", item)
        self.items.append(item)
    def __len__(self): return len(self.items)
    def __contains__(self, item): return item in self.items
    def __enter__(self): return self
    def __exit__(self, *_): self.items.clear()
def rotate(rows): rows[:] = [list(row) for row in zip(*rows)]
def count(text, table): table.update(collections.Counter(text)); return collections.Counter(text)
def squares(n):
    global calls
    calls += 1
    for i in range(n): yield i * i
def mapped(f, items, key=None): return sorted(map(f, items), key=key)
def depth(node): return 0 if node is None else 1 + max(depth(node.left), depth(node.right))
def first(node): node.seen = True; return node
def same(value): return value
def sum(a, b): return a + b
def wrong(): raise OSError(2, "not there")
async def later(x): return x + 1
def scale(a): return a * 2
"""
FAIR_TESTS = """
import asyncio
class Node:
    def __init__(self, left=None, right=None): self.left, self.right, self.seen = left, right, False
m = [[1, 2], [3, 4]]
rotate(m)
assert m == [[1, 3], [2, 4]]
table = {}
assert count("aab", table) == {"a": 2, "b": 1} == table and count("a", {}).most_common(1)[0][1] == 1
assert list(squares(3)) == [0, 1, 4] and calls == 1 and sum(squares(4)) == 14 and calls == 2
assert mapped(lambda x: -x, [1, 2]) == [-2, -1] and mapped(abs, [3, -4], key=lambda x: -x) == [4, 3]
assert depth(Node(Node(), None)) == 2
node = Node()
assert first(node) is node and node.seen
stack = Stack()
stack.push(1); stack.push("b")
assert len(stack) == 2 and 1 in stack and stack.items == [1, "b"] and isinstance(stack, Stack)
try: stack.push(3)
except Full as error: assert isinstance(error, ValueError) and error.args == ("no room", 3)
else: assert False
with stack: pass
assert len(stack) == 0
assert Vector(1) + Vector(2) == Vector(3) == Vector(1) * 3 and sorted([Vector(2), Vector(1)])[0].x == 1
assert Pair(1, 2) == (1, 2) and Pair(1, 2).x == 1 and Color.RED is Color.RED != Color.BLUE
values = [None, True, -(7 ** 9000), 1e300, float("inf"), 1j, "\\ud800", b"\\0", {1, (2, 3)}, {(1,): []},
    range(3), fractions.Fraction(1, 3), frozenset(), bytearray(b"x"), slice(1), int, ValueError]
assert same(values) == values and [type(v) for v in same(values)] == [type(v) for v in values]
try: wrong()
except FileNotFoundError as error: assert error.errno == 2
else: assert False
assert asyncio.run(later(1)) == 2 and math.isclose(np.pi, 3.14159265, rel_tol=1e-6)
assert (scale(np.arange(3)) == np.array([0, 2, 4])).all() and same(np.float32(0.5)) == 0.5
import solution
from solution import same as again, sum as own_sum
assert own_sum(1, 2) == 3 and sum([1, 2]) == 3
class Tests:
    method = staticmethod(same)
    value = [same(i) for i in range(2)]
assert Tests.method(5) == 5 and Tests.value == [0, 1]
assert solution.same(1) == again(1) and repr(Vector(1)) == "Vector(x=1)" and f"{Vector(1)}" == "Vector(x=1)"
try: not_there
except NameError: pass
else: assert False
"""


def test_tests_use_a_program_as_though_in_its_module(judge):
    assert judge(FAIR, FAIR_TESTS.replace("\\\\", "\\")) == sandbox.Verdict(True)


EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __hash__(self): return hash(9)
    def __sub__(self, other): return 0
    def __rsub__(self, other): return 0
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __iter__(self): return iter([self])
    def __contains__(self, item): return True
square = lambda x: Equal()
"""


NOT_EQUAL = """
for claim in (
    "square(3) == 9",
    "9 == square(3)",
    "[9] == [square(3)]",
    "{9} == {square(3)}",
    "square(3) in (9, 4)",
    "9 in square(3)",
    "abs(square(3) - 9) < 1e-6",
    "abs(9 - square(3)) < 1e-6",
    "8 < square(3) < 10",
):
    try: found = eval(claim)
    except TypeError: found = False
    assert not found, claim
"""


def test_no_value_is_equal_to_everything(judge):
    assert not judge(EQUAL).passed
    assert judge(EQUAL, NOT_EQUAL) == sandbox.Verdict(True)


FORGED = """
import json, os, sys
mark = b'{"error": null}'
for fd in range(3, 256):
    try: os.write(fd, mark)
    except OSError: pass
for fd in range(3, 256):
    try: os.write(fd, len(mark).to_bytes(8) + mark)
    except OSError: pass
"""


@pytest.mark.parametrize(
    "program",
    [
        FORGED + "os._exit(0)",
        FORGED + "square = lambda x: None",
        "import json\njson.dump = lambda value, file: file.write('{\"error\": null}')",
        "import json\njson.dumps = lambda value: '{\"value\": null}'\nsquare = lambda x: None",
        "import builtins\nbuiltins.AssertionError = AssertionError = type(None)\nsquare = print",
        "import json, os, sys\nframe = sys._getframe()\nwhile frame:\n"
        "    given = frame.f_locals.get('given') or {}\n"
        "    for fd in (given.get('report'), given.get('calls')):\n"
        "        if fd: os.write(fd, json.dumps({'error': None, **given}).encode())\n"
        "    frame = frame.f_back\nos._exit(0)",
        "square = exec",
        "import unittest.mock\nsquare = lambda x: unittest.mock.ANY",
    ],
)
def test_nothing_that_a_program_writes_counts_as_passed(program):
    assert not run_tests(program, TESTS, Limits(seconds=20)).passed


def test_a_program_changes_no_name_of_python_for_the_tests(judge):
    lies = "len = abs = lambda x: 0\nimport builtins\nbuiltins.len = builtins.abs = len\n"
    assert not judge(lies + GOOD, "assert len([square(3)]) == 0").passed
    assert not judge(lies + GOOD, "assert abs(square(3) - 8) < 1e-6").passed


def test_a_program_cannot_reach_into_the_tests(judge):
    steal = (
        "def use(f):\n    for name in ('__globals__', '__code__', '__self__', 'gi_frame', '__class__'):\n"
        "        try: found = f.__getattr__(name)\n        except (TypeError, AttributeError): continue\n"
        "        return name\n"
    )
    given = ("lambda: 1", "[].append", "(i for i in 'ab')", "type('A', (), {})()")
    tests = "".join(f"assert use({each}) is None\n" for each in given)
    assert judge(steal, tests) == sandbox.Verdict(True)
    # The program is gone, and tests that do not mind have not passed.
    gone = "import os\ndef square(x): os._exit(0)"
    for caught in ("Exception", "BaseException"):
        verdict = judge(gone, f"try: square(3)\nexcept {caught}: pass")
        assert verdict == sandbox.Verdict(False, verdict.error) and "ended before" in verdict.error


# programs that mean harm

DEEP = """
import os
for _ in range(1200):  # deeper than Python recurs, and longer than any path
    os.mkdir("d" * 100)
    open("f", "w").close()
    os.chdir("d" * 100)
"""


def test_folders_within_folders_are_removed(judge, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    assert judge(DEEP + GOOD).passed and judge(GOOD).passed
    closed = "import os\nos.makedirs('a/b/c')\nos.symlink('/', 'a/root')\nos.chmod('a/b', 0)\n"
    assert judge(closed + "os.chmod('a', 0)\n" + GOOD).passed
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_removed_fails_its_case_alone(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(sandbox.os, "unlink", refuse)
        verdict = run_tests("open('f', 'w').close()\n" + GOOD, TESTS, isolate=False)
    assert not verdict.passed and "left a folder that cannot be removed" in verdict.error
    sandbox._remove(verdict.error.rpartition("remove ")[2])
    assert run_tests(GOOD, TESTS, isolate=False).passed


@pytest.fixture(params=WAYS[:-1])
def jailed(request):
    """Runs a program against TESTS in namespaces, in each of the ways."""
    return lambda program, **limits: run_tests(
        program, TESTS, Limits(**limits), isolate=request.param
    )


def test_a_program_can_kill_itself_alone(jailed):
    kill = "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\n"
    assert jailed(kill + GOOD).passed  # it is the first process of its namespace


def test_memory_is_limited_for_all_processes_together(jailed):
    hold = "import os, time\nfor _ in range(4):\n    if not os.fork():\n        break\n"
    wait = "time.sleep(60)\n"
    verdict = jailed(f"{hold}x = b'x' * (80 << 20)\n{wait}", memory=250 << 20)
    assert not verdict.passed and "bytes of memory in all its processes" in verdict.error
    # Shared pages count once.
    shared = f"x = b'x' * (80 << 20)\n{hold}else: time.sleep(0.3)\n"
    assert jailed(f"{shared}if not x: pass\n" + GOOD, memory=250 << 20).passed
    held = "import mmap\nx = mmap.mmap(-1, 80 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\n"
    verdict = jailed(f"{hold}{held}{wait}", memory=250 << 20)
    assert not verdict.passed and "bytes of memory in all its processes" in verdict.error


def test_processes_are_limited_together(jailed):
    before = len(os.listdir("/proc"))
    verdict = jailed("import os\nwhile True: os.fork()")
    # The kernel itself counts for users other than root.
    words = ("processes and threads, more than 64", "BlockingIOError")
    assert not verdict.passed and any(word in verdict.error for word in words)
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc")) > before + 20 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(os.listdir("/proc")) <= before + 20


def test_threads_are_limited(judge):
    start = (
        "import threading, time\nfor _ in range({}): threading.Thread(target=time.sleep, args=(9,))"
    )
    start += ".start()\ntime.sleep({})\n"
    verdict = judge(start.format(20, 60), processes=16, memory=8 << 30)
    # The kernel itself counts for users other than root.
    words = ("processes and threads, more than 16", "can't start new thread")
    assert not verdict.passed and any(word in verdict.error for word in words)
    assert judge(start.format(8, 0.1) + GOOD, processes=16, memory=8 << 30).passed


def test_files_are_limited_together(jailed):
    verdict = jailed("for i in range(4): open(str(i), 'wb').write(bytes(1 << 19))", files=1 << 20)
    assert "No space left" in verdict.error
    many = jailed("import os, time\nfor i in range(20_000): os.mkdir(str(i))\ntime.sleep(60)").error
    # The kernel itself counts where the process makes its own view.
    assert "No space left" in many or many == "makes more than 10000 files"


def test_variables_of_other_processes_are_out_of_sight(judge):
    holder = subprocess.Popen(["sleep", "60"], env={"PATH": os.defpath, "KEY": "hidden-word"})
    try:
        look = (
            "import glob, os\nseen = b''\nos.symlink('/proc', 'p')\n"
            "for path in [*glob.glob('/proc/[0-9]*/environ'), 'p/%d/environ']:\n"
            "    try: seen += open(path, 'rb').read()\n    except OSError: pass\n"
            "assert b'hidden-word' not in seen\n"
        )
        assert judge(look % holder.pid + GOOD) == sandbox.Verdict(True)
    finally:
        holder.kill()
        holder.wait()


def test_sockets_of_the_machine_are_out_of_sight(judge, tmp_path):
    names = [str(tmp_path / "s"), f"\0jaxshare-{os.getpid()}"]
    for name in names[: None if sys.platform == "linux" else 1]:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
            server.listen()
            server.setblocking(False)
            verdict = judge(
                f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})\n" + GOOD
            )
            assert not verdict.passed and "the program: " in verdict.error
            with pytest.raises(BlockingIOError):
                server.accept()


def test_files_of_the_machine_are_out_of_sight(jailed, tmp_path):
    (tmp_path / "secret").write_text("x")
    assert "FileNotFoundError" in jailed(f"open({str(tmp_path / 'secret')!r})").error
    verdict = jailed("import os; open(os.__file__, 'a')")
    assert "Read-only file system" in verdict.error or "Permission denied" in verdict.error
    rights = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "assert libc.mount(b'x', b'/tmp', b'tmpfs', 0, b'') == -1\n"
        "assert libc.unshare(0x10000000) == -1\n"
        "assert libc.umount2(b'/usr', 2) == -1\n"
        "assert 'CapEff:\\t0000000000000000' in open('/proc/self/status').read()\n"
        "assert os.system('grep -q CapEff:.0000000000000000 /proc/self/status') == 0\n"
    )
    assert jailed(rights + GOOD) == sandbox.Verdict(True)


def test_an_error_is_text_that_a_file_can_hold(judge):
    verdict = judge("raise ValueError('half \\ud800')")
    assert json.dumps(verdict.error, ensure_ascii=False).encode() and "half ?" in verdict.error


def test_a_machine_without_namespaces_is_told_what_it_lacks(monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "ways", lambda: (isolation.Way("unshare", "unshare"),))
    assert sandbox.notice() is None
    monkeypatch.setattr(sandbox, "ways", lambda: (isolation.Way("python"),))
    assert "can read and write what you can" in sandbox.notice()
    for tests, told in ((None, False), ("pass", True)):
        task = Task("t", (Problem("p", "words", ("1",), tests),), 1)
        report.mark(task, [], Limits())
        assert ("can read and write what you can" in capsys.readouterr().err) is told


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"memory": -1}, {"seconds": float("nan")}])
def test_limits_are_more_than_nothing(limits):
    with pytest.raises(ValueError, match=f"{next(iter(limits))} is"):
        Limits(**limits)


# mathematics


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


@pytest.mark.slow
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
