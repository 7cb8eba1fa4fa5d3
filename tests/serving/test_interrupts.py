"""Interrupts of a terminal or a notebook: nothing is left half done, and a session goes on."""

import signal
import threading

import pytest

from jaxshare import Sampler
from jaxshare.serving import Workers
from jaxshare.serving.interrupts import interrupts_held_back
from jaxshare.serving.workers import dispatch
from tests.helpers import one_layer


def test_an_interrupt_comes_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_held_back():
            signal.raise_signal(signal.SIGINT)
            with interrupts_held_back():
                signal.raise_signal(signal.SIGINT)
            done.append("all")
        done.append("more")
    assert done == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_is_raised_as_the_cause():
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_held_back():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("half done")
    assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_the_handler_before_is_there_again(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_held_back():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_left_alone():
    handlers = []

    def look():
        with interrupts_held_back():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_a_session_goes_on_after_an_interrupt_in_the_midst_of_a_dispatch(monkeypatch):
    """The program has the arrays of the state before, and its own are not yet the session's."""
    decode, calls = dispatch.decode, []

    def interrupted(*args, **options):
        state = decode(*args, **options)
        calls.append(options["passes"])
        signal.raise_signal(signal.SIGINT)
        return state

    def start() -> Workers:
        options = {"sampler": Sampler(1.0), "budget": 40, "stop_on": "never", "passes_at_once": 8}
        return Workers(one_layer(), "1. 47 + 38", **options)

    unbroken = start()
    for _ in unbroken.stream():
        pass
    monkeypatch.setattr(dispatch, "decode", interrupted)
    session, interrupts = start(), 0
    while session.passes < 40:
        try:
            for _ in session.stream():
                pass
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 5 and calls == [0, 8, 8, 8, 8, 8]
    assert session.steps == unbroken.steps
