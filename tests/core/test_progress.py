"""Progress on a terminal and in a log, with a clock that the tests move."""

import io
import threading
import time

import pytest

from jaxshare import progress
from jaxshare.progress import Display


class Screen(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal

    def said(self):
        """What was written since the last call."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture(params=["terminal", "log"])
def kind(request):
    return request.param


def display_of(kind):
    screen, clock = Screen(kind == "terminal"), Clock()
    return Display(lambda: screen, clock, ticks=False), screen, clock


CLEAR = "\r\x1b[K"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def test_a_terminal_has_one_line_that_is_cleared_in_the_end():
    display, screen, clock = display_of("terminal")
    with display.begin("reading weights", 8e9, "B") as work:
        clock.now += 1.9
        display.tick()
        assert screen.said() == ""  # most work takes no two seconds
        work.update(2e9)
        clock.now += 0.1
        display.tick()
        assert screen.said() == CLEAR + "reading weights: 2.0 of 8.0 GB, 2 s, 1.0 GB/s"
        with display.begin("compiling the decode loop"):
            clock.now += 8
            display.tick()
            assert screen.said() == CLEAR + (
                "reading weights: 2.0 of 8.0 GB, 10 s, 200.0 MB/s; compiling the decode loop: 8 s"
            )
        work.what, work.note = "checking", "1 of 2 files"
        display.tick()
        assert screen.said() == CLEAR + "checking: 2.0 of 8.0 GB, 10 s, 200.0 MB/s, 1 of 2 files"
        display.say("jaxshare: a note")
        assert screen.said() == CLEAR + "jaxshare: a note\n"
        display.tick()
        assert screen.said().startswith(CLEAR + "checking")
    assert screen.said() == CLEAR
    display.tick()
    assert screen.said() == ""


def test_work_that_turns_to_other_work_starts_anew():
    display, _, clock = display_of("log")
    with display.begin("prefill") as work:
        clock.now += 30
        for done in (0, 5):
            work.turn_to("decoding", 50, "tokens")
            work.done = done
            clock.now += 1
        assert work.line() == "decoding: 5 of 50 tokens, 2 s, 2.5 tokens/s"


def test_a_line_is_no_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    display, screen, clock = display_of("terminal")
    with display.begin("a name that is longer than the line", None, ""):
        clock.now += 5
        display.tick()
        assert screen.said() == CLEAR + "a name that is long"


def test_a_log_has_a_line_a_minute():
    display, screen, clock = display_of("log")
    lines = []
    with display.begin("decoding", 1000, "tokens", 400) as work:
        for _ in range(190):
            clock.now += 1
            work.update()
            display.tick()
            lines += [(clock.now, line) for line in screen.said().splitlines()]
    assert lines == [
        (160, "jaxshare: decoding: 460 of 1,000 tokens, 60 s, 1 tokens/s"),
        (220, "jaxshare: decoding: 520 of 1,000 tokens, 120 s, 1 tokens/s"),
        (280, "jaxshare: decoding: 580 of 1,000 tokens, 180 s, 1 tokens/s"),
    ]


def test_minutes_are_counted_across_the_work_of_a_session_and_anew_after_idle_time():
    display, screen, clock = display_of("log")

    def works():
        for name in ("reading", "compiling"):
            with display.begin(name):
                clock.now += 40
                display.tick()

    with display.session():
        works()
        assert screen.said() == "jaxshare: compiling: 40 s\n"
    works()
    assert screen.said() == ""  # each began a time of its own
    clock.now += 1000
    with display.begin("short"):
        clock.now += 3
        display.tick()
    assert screen.said() == ""


def test_work_of_less_than_two_seconds_is_not_in_a_log():
    display, screen, clock = display_of("log")
    with display.session():
        clock.now += 59
        with display.begin("short"):
            clock.now += 1.5
            display.tick()
    assert screen.said() == ""


@pytest.mark.parametrize("value", ["off", "OFF", "0"])
def test_it_is_turned_off(kind, monkeypatch, value):
    monkeypatch.setenv(progress.VARIABLE, value)
    display, screen, clock = display_of(kind)
    with display.begin("reading"):
        clock.now += 100
        display.tick()
        assert screen.said() == ""
        display.say("a note is no progress")
    assert screen.said() == "a note is no progress\n"
    monkeypatch.delenv(progress.VARIABLE)
    with display.session(quiet=True), display.begin("reading"):
        clock.now += 100
        display.tick()
    assert screen.said() == ""
    with display.begin("reading"):
        clock.now += 100
        display.tick()
        assert "reading: 100 s" in screen.said()


def test_where_something_else_draws_each_work_is_named_once(kind):
    display, screen, clock = display_of(kind)
    with display.lines():
        for _ in range(2):  # a program is traced, lowered and compiled
            with display.begin("compiling the decode loop"):
                for _ in range(3):
                    clock.now += 2
                    display.tick()
    named = "jaxshare: compiling the decode loop ...\n"
    assert screen.said() == (named if kind == "terminal" else "")


@pytest.mark.parametrize(
    ("done", "total", "unit", "words"),
    [
        (0, None, "", "4 s"),
        (0, 7, "layers", "0 of 7 layers, 4 s"),
        (3, 7, "layers", "3 of 7 layers, 4 s, 0.8 layers/s"),
        (7, 7, "", "7 of 7, 4 s, 1.8/s"),
        (12345, None, "tokens", "12,345 tokens, 4 s, 3,086 tokens/s"),
        (500, 2000, "B", "0.5 of 2.0 kB, 4 s, 0.1 kB/s"),
        (2e6, 5e6, "B", "2.0 of 5.0 MB, 4 s, 500.0 kB/s"),
    ],
)
def test_amounts(done, total, unit, words):
    display, _, clock = display_of("log")
    with display.begin("w", total, unit) as work:
        work.update(done)
        clock.now += 4
        assert work.line() == f"w: {words}"


def test_each_item_is_a_unit():
    seen = []
    for item in progress.each([5, 6, 7], "judging", "gradings"):
        (work,) = [w for w in progress.DISPLAY._works if w.what == "judging"]
        seen.append((item, work.done, work.total))
    assert seen == [(5, 0, 3), (6, 1, 3), (7, 2, 3)] and progress.DISPLAY.under_way == []


def test_a_stream_that_is_gone_ends_no_work():
    for stream in (None, io.StringIO()):
        if stream is not None:
            stream.close()
        display = Display(lambda stream=stream: stream, clock := Clock(), ticks=False)
        with display.begin("reading"):
            clock.now += 100
            display.tick()
            display.say("a note")


def test_a_thread_shows_it_and_ends_with_the_work(monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    screen = Screen(True)
    display = Display(lambda: screen)
    with display.begin("reading weights"):
        end = time.monotonic() + 20
        while "reading weights: " not in screen.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        (thread,) = [t for t in threading.enumerate() if t.name == "progress"]
    thread.join(20)
    assert not thread.is_alive()
    assert "reading weights: " in screen.getvalue() and screen.getvalue().endswith(CLEAR)


def test_a_forked_process_has_a_display_of_its_own():
    """Its parent's thread may have held the lock when it was made."""
    display, screen, clock = display_of("log")
    taken, done = threading.Event(), threading.Event()

    def hold():
        with display._lock:
            taken.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(60)
    display.after_fork()
    with display.session(), display.begin("child"):
        clock.now += 60
        display.tick()
    assert screen.said() == "jaxshare: child: 60 s\n"
    done.set()
    thread.join()
