"""Whether the Logits Cache pays, with a clock that the test sets."""

import pytest

from jaxshare.serving.logits_cache.payoff import REPEATS, Payoff

TRIED, OTHER = bytes([64]) * 32, bytes([1]) * 32
KIND = ("agent", 0.7, "stepwise")


class Clock:
    """Seconds that pass only where a test lets them, or with each look."""

    def __init__(self, step: float = 0.0):
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def payoff(*, keeping: float = 0.0, rows: int = 1, pass_seconds: float = 1e-3) -> Payoff:
    """One for which finding a distribution's largest logits takes `keeping` seconds."""
    made = Payoff((1, 8, 4), Clock(keeping * REPEATS))
    for _ in range(20):
        made.ran(rows, pass_seconds)
    return made


def after(made: Payoff, replayed: int, computed: int, count: int = 20) -> Payoff:
    for _ in range(count):
        made.ended(KIND, replayed, computed)
    return made


@pytest.mark.parametrize(
    ("replayed", "computed", "keeping", "pays"),
    [
        (50, 50, 1e-4, True),  # 50 ms spared for 5
        (2, 98, 1e-4, False),  # 2 ms for 9.8
        (2, 98, 1e-5, True),
        (0, 100, 1e-6, False),
        (10, 0, 1e-2, True),  # came back whole
    ],
)
def test_it_pays_where_passes_that_are_spared_take_longer_than_what_is_kept(
    replayed, computed, keeping, pays
):
    assert after(payoff(keeping=keeping), replayed, computed).pays(KIND, OTHER) is pays


def test_the_hosts_seconds_count():
    clock = Clock()
    made = Payoff((1, 8, 4), clock)
    made.ran(1, 1e-3)
    after(made, 3, 10)
    assert made.pays(KIND, OTHER)
    for _ in range(40):
        with made.hosting():
            clock.now += 4e-3
    assert not made.pays(KIND, OTHER)


def test_a_row_beside_others_spares_what_a_pass_takes_longer_for_it():
    made = Payoff((8, 8, 4), Clock())
    for rows, seconds in ((4, 1.04e-3), (8, 1.08e-3)):
        for _ in range(20):
            made.ran(rows, seconds)
    assert made.balance(100, 0) == pytest.approx(100 * 1e-5)
    assert payoff(rows=1).balance(100, 0) == pytest.approx(0.1)


def test_few_requests_and_some_states_are_always_tried():
    made = after(payoff(keeping=1e-3), 0, 100, count=7)
    assert made.pays(KIND, OTHER)
    after(made, 0, 100, count=1)
    assert not made.pays(KIND, OTHER) and made.pays(KIND, TRIED)
    assert made.pays(("another", 0.7, "stepwise"), OTHER)


def test_it_is_used_again_once_it_pays():
    made = after(payoff(keeping=1e-4), 0, 100)
    assert not made.pays(KIND, OTHER)
    assert after(made, 80, 20).pays(KIND, OTHER)


def test_without_a_clock_or_a_measured_pass_every_request_uses_it():
    assert after(Payoff((1, 8, 4), None), 0, 100).pays(KIND, OTHER)
    assert after(Payoff((1, 8, 4), Clock()), 0, 100).pays(KIND, OTHER)


@pytest.mark.parametrize(
    ("tokens", "seconds", "pays"), [(12, 4e-3, True), (2, 4e-3, False), (6, 4e-3, True)]
)
def test_drafts_pay_where_their_pass_is_shorter_than_those_of_their_tokens(tokens, seconds, pays):
    clock = Clock()
    made = Payoff((1, 8, 4), clock)
    made.ran(1, 1e-3)
    for _ in range(10):
        begun = made.now()
        clock.now += seconds
        made.drafted(begun, tokens, 1)
    assert made.drafts_pay(1e-3) is pays
