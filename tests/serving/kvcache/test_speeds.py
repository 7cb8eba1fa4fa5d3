"""Speeds: what is measured of passes and of the host between them, with a clock of the test."""

import pytest

from jaxshare.serving.kvcache.speeds import FixedSpeeds, MeasuredSpeeds


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def dispatch(speeds: MeasuredSpeeds, clock: Clock, passes: int, seconds: float) -> None:
    """Dispatches passes whose results arrive after these seconds."""
    speeds.dispatched()
    clock.now += seconds
    speeds.fetched(passes)


def test_nothing_is_known_at_first():
    assert MeasuredSpeeds().measured == FixedSpeeds().measured == (0, 0, 0, 0)


def test_passes_and_the_host_between_two_dispatches_are_measured_apart():
    clock = Clock()
    speeds = MeasuredSpeeds(clock)
    dispatch(speeds, clock, 16, 0.8)
    clock.now += 0.003
    speeds.dispatched()
    assert speeds.measured[2:] == pytest.approx((0.05, 0.003))
    assert (speeds.pass_seconds, speeds.host_seconds) == (0, 0)  # until they are taken over
    speeds.use(*speeds.measured)
    assert (speeds.pass_seconds, speeds.host_seconds) == pytest.approx((0.05, 0.003))


def test_a_pass_is_an_average_and_the_host_the_least_of_late():
    clock = Clock()
    speeds = MeasuredSpeeds(clock)
    for passes, seconds, host in ((10, 1.0, 0.01), (10, 2.0, 0.002), (10, 2.0, 0.012)):
        dispatch(speeds, clock, passes, seconds)
        clock.now += host
    speeds.dispatched()
    first = 0.7 * 0.1 + 0.3 * 0.2
    assert speeds.measured[2] == pytest.approx(0.7 * first + 0.3 * 0.2)
    assert speeds.measured[3] == pytest.approx(0.9 * 0.002 + 0.1 * 0.004)  # at most twice


def test_the_last_pass_has_its_part_of_a_dispatch_that_ends_after_it():
    clock = Clock()
    speeds = MeasuredSpeeds(clock)
    assert speeds.last_pass_seconds == FixedSpeeds().last_pass_seconds == 0
    for passes, seconds in ((10, 1.0), (0, 5.0), (4, 1.0)):
        speeds.dispatching()
        clock.now += seconds  # a CPU may run all passes meanwhile
        dispatch(speeds, clock, passes, 0.2)
        assert speeds.last_pass_seconds == pytest.approx(1.2 / (passes or 10))


def test_passes_of_a_dispatch_that_follows_another_begin_when_those_have_ended():
    """Then the host's time falls in them, and the device has not waited for it."""
    clock = Clock()
    speeds = MeasuredSpeeds(clock)
    for _ in range(2):  # two dispatches at once, the second one 0.01 seconds after the first
        speeds.dispatching()
        speeds.dispatched()
        clock.now += 0.01
    clock.now += 0.99
    speeds.fetched(10)  # a second after it was made
    assert speeds.measured[2:] == pytest.approx((0.101, 0))
    speeds.dispatching()
    clock.now += 0.004
    speeds.dispatched()
    clock.now += 0.5
    speeds.fetched(5)
    assert speeds.last_pass_seconds == pytest.approx(0.504 / 5)
    assert speeds.measured[2:] == pytest.approx((0.7 * 0.101 + 0.3 * 0.504 / 5, 0))
    clock.now += 0.5
    speeds.fetched(5)
    clock.now += 0.002
    speeds.dispatched()
    assert speeds.measured[3] == pytest.approx(0.002)  # nothing was under way


def test_prefill_and_copies_between_two_dispatches_are_not_the_host_s_time():
    clock = Clock()
    speeds = MeasuredSpeeds(clock)
    dispatch(speeds, clock, 4, 1)
    arrived = speeds.feeding(100)
    clock.now += 2
    arrived()
    dispatch(speeds, clock, 4, 1)
    with speeds.copying(100):
        clock.now += 3
    speeds.dispatched()
    assert speeds.measured[0] == pytest.approx(0.02)
    assert speeds.measured[1] == pytest.approx(0.03) and speeds.measured[3] == 0


def test_passes_that_are_dispatched_while_a_prefill_runs_begin_when_it_has_ended():
    clock = Clock()
    speeds = MeasuredSpeeds(clock)
    arrived = speeds.feeding(100)
    clock.now += 0.2
    speeds.dispatching()
    clock.now += 0.1
    speeds.dispatched()
    clock.now += 0.7
    arrived()
    clock.now += 0.5
    speeds.fetched(5)
    assert speeds.measured == pytest.approx((0.01, 0, 0.1, 0))
    assert speeds.last_pass_seconds == pytest.approx(0.1)


def test_nothing_is_measured_over_an_interruption():
    clock = Clock()
    speeds = MeasuredSpeeds(clock)
    dispatch(speeds, clock, 4, 1)
    speeds.interrupted()
    clock.now += 60
    speeds.dispatched()
    assert speeds.measured[3] == 0


@pytest.mark.parametrize(
    "seconds, host, passes",
    [
        (0.001, 0.0, 20),  # 20 milliseconds
        (0.001, 0.005, 40),  # eight times the host
        (0.1, 0.5, 3),  # but a quarter of a second at most
        (1.0, 5.0, 1),
        (1e-6, 0.0, 63),
        (0.0, 0.1, 16),  # not measured
    ],
)
def test_passes_of_a_dispatch_follow_from_seconds(seconds, host, passes):
    assert FixedSpeeds(0, 0, seconds, host).passes(63) == passes


def test_rows_may_idle_for_as_long_as_the_host_takes():
    assert FixedSpeeds(0, 0, 0.001, 0.003).idle_passes(8) == 24
    assert FixedSpeeds(0, 0, 0.1, 0.003).idle_passes(8) == 0
    assert FixedSpeeds(0, 0, 0.0, 0.003).idle_passes(8) == 0


def test_a_dispatch_of_no_pass_says_nothing():
    clock = Clock()
    speeds = MeasuredSpeeds(clock)
    dispatch(speeds, clock, 0, 1)
    assert speeds.measured[2] == 0
