"""Whether the Logits Cache pays, with a clock that the test sets."""

import random

import pytest

from jaxshare.serving.logits_cache.payoff import REPEATS, Payoff

KIND, HOT = ("agent", 0.7, "stepwise"), ("agent", 0.7, "hotspot")
PASS = 1e-3


class Clock:
    """Seconds that pass only where a test lets them, or with each look."""

    def __init__(self, step: float = 0.0):
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def payoff(*, keeping: float = 0.0, rows: int = 1, pass_seconds: float = PASS) -> Payoff:
    """One for which finding a distribution's largest logits takes `keeping` seconds."""
    made = Payoff((1, 8, 4), Clock(keeping * REPEATS))
    for _ in range(20):
        made.ran(rows, pass_seconds)
    return made


def state(number: int, *, tried: bool = False) -> bytes:
    """A digest, one of those that are tried now and then or not."""
    return bytes([0 if tried else 1, *number.to_bytes(4, "little")]) * 6


def asked(made: Payoff, digest: bytes, tokens, *, kind=KIND, gives: int = 0) -> bool:
    """Runs one request, to which a replay of what is kept `gives` tokens; whether it was kept."""
    watched = made.watch(kind, digest)
    kept = made.pays(watched, watched.any_kept)
    if kept and watched.any_kept:
        watched.found = gives
    made.ended(watched, tokens, 0 if kept else None)
    return kept


def repeated(made: Payoff, common: int, length: int, count: int, *, kind=KIND, first=0, gives=None):
    """Asks `count` states twice each, whose outputs have so many tokens in common; how many
    requests were kept."""
    kept = 0
    for number in range(first, first + count):
        for turn in (1, 2):
            tokens = [0] * (common - 1) + [turn] * (length - common + 1)
            found = common if gives is None else gives
            kept += asked(made, state(number), tokens, kind=kind, gives=found)
    return kept


@pytest.mark.parametrize(
    ("replayed", "computed", "keeping", "pays"),
    [
        (50, 50, 1e-4, True),  # 50 ms spared for 5
        (2, 98, 1e-4, False),  # 2 ms for 9.8
        (5, 95, 1e-5, True),
        (0, 100, 1e-6, False),
        (10, 0, 1e-2, True),  # came back whole
    ],
)
def test_it_pays_where_passes_that_are_spared_take_longer_than_what_is_kept(
    replayed, computed, keeping, pays
):
    made = payoff(keeping=keeping)
    assert (made.balance(1.0, replayed, 0, replayed + computed) > 0) is pays


def test_three_times_the_cost_have_to_be_spared():
    made = payoff(keeping=1e-4)
    assert made.balance(1.0, 25, 0, 100) > 0 > made.balance(1.0, 23, 0, 100)
    assert made.balance(1.0, 40, 0, 100) == pytest.approx(40e-3 - 3 * 6.2e-3)


def test_a_kind_whose_prompts_never_come_again_is_never_kept():
    made = payoff(keeping=1e-6)
    assert not any(asked(made, state(number), [1] * 100) for number in range(200))


def test_a_kind_whose_outputs_part_at_once_is_never_kept():
    assert repeated(payoff(keeping=1e-4), 2, 100, 100) == 0


def test_a_kind_whose_outputs_agree_is_kept_once_two_have_shown_it():
    made = payoff(keeping=1e-4)
    assert repeated(made, 80, 100, 2) == 0
    assert repeated(made, 80, 100, 50, first=2) == 100


def test_kinds_are_counted_apart():
    made = payoff(keeping=1e-4)
    repeated(made, 80, 100, 10)
    cold = ("agent", 0.2, "stepwise")
    assert repeated(made, 80, 100, 2, kind=cold, first=50) == 0
    assert repeated(made, 80, 100, 2, kind=KIND, first=60) == 4


def test_it_is_kept_again_once_outputs_agree_and_no_more_once_they_part():
    made = payoff(keeping=1e-4)
    repeated(made, 2, 100, 20)
    repeated(made, 80, 100, 10, first=20)
    assert repeated(made, 80, 100, 10, first=40) == 20
    repeated(made, 2, 100, 20, first=60)
    assert repeated(made, 2, 100, 20, first=90) == 0


def test_replays_that_give_less_than_outputs_tell_end_it():
    made = payoff(keeping=1e-4)  # as where the cache is too small for what is asked again
    repeated(made, 80, 100, 30, gives=0)
    assert repeated(made, 80, 100, 10, first=40, gives=0) == 0


def test_a_state_now_and_then_measures_the_hosts_seconds_again():
    made = payoff(keeping=1e-5)
    repeated(made, 80, 100, 10)
    for _ in range(9):
        with made.hosting("stepwise"):
            made._clock.now += 1.0  # the machine was busy
    assert repeated(made, 80, 100, 5, first=20) == 0
    kept = [asked(made, state(50, tried=True), [1] * 100) for _ in range(3)]
    assert kept == [True] * 3


def test_an_unknown_kind_uses_what_is_cached():
    made = payoff(keeping=1e-4)
    watched = made.watch(KIND, state(1))
    assert made.pays(watched, True) and not made.pays(watched, False)


def test_hotspots_are_tried_on_few_states_until_two_were_replayed():
    made = payoff(keeping=1e-4)
    assert repeated(made, 2, 100, 10, kind=HOT) == 0
    kept = [asked(made, state(50, tried=True), [1] * 100, kind=HOT, gives=90) for _ in range(3)]
    assert kept == [True] * 3
    assert repeated(made, 2, 100, 10, kind=HOT, first=60, gives=90) == 20


def test_hotspots_that_give_little_are_left_alone_after_two():
    made = payoff(keeping=1e-4)
    repeated(made, 2, 100, 10, kind=HOT)
    for number in range(3):
        asked(made, state(50 + number // 2, tried=True), [1] * 100, kind=HOT, gives=2)
    assert repeated(made, 2, 100, 10, kind=HOT, first=60, gives=2) == 0


def test_hotspots_pay_where_outputs_agree_as_they_go_further_still():
    made = payoff(keeping=1e-4)
    assert repeated(made, 80, 100, 2, kind=HOT) == 0
    assert repeated(made, 80, 100, 10, kind=HOT, first=2) == 20


def test_the_hosts_seconds_count_as_the_median_of_the_last():
    clock = Clock()
    made = Payoff((1, 8, 4), clock)
    for _ in range(3):
        made.ran(1, PASS)
    for seconds in (1.0, 4e-3, 4e-3, 4e-3):  # the first one compiles
        with made.hosting("write"):
            clock.now += seconds
    assert made.balance(1.0, 13, 0, 13) == pytest.approx(13e-3 - 12e-3)
    assert made.balance(1.0, 11, 0, 11) < 0


def test_a_token_spares_its_rows_part_of_a_pass():
    made = Payoff((8, 8, 4), Clock())
    for _ in range(20):
        made.ran(4, 1.04e-3)
    host = 3 * 2e-4
    assert made.balance(1.0, 100, 0, 100) == pytest.approx(100 * 0.26e-3 - host)
    assert made.balance(0.5, 100, 0, 100) == pytest.approx(50 * 0.26e-3 - host)
    assert payoff(rows=1).balance(1.0, 100, 0, 100) == pytest.approx(0.1 - host)


@pytest.mark.parametrize(
    ("long", "crowded", "followed", "pays"),
    [
        (1.2e-3, False, 80, False),  # 0.2 ms over seven rows are spared a token
        (8e-3, False, 80, True),
        (8e-3, False, 4, False),  # 4 ms for what may take 2.5
        (8e-3, False, 0, False),
        (1.2e-3, True, 80, True),
        (1.2e-3, True, 20, False),
    ],
)
def test_following_pays_where_rows_take_long_or_others_wait_for_them(long, crowded, followed, pays):
    made = Payoff((8, 8, 4), Clock())
    for _ in range(3):
        made.ran(1, PASS)
    for _ in range(40):
        made.ran(8, long, is_crowded=crowded)
    assert made.following_pays(followed) is pays


def test_requests_of_one_state_at_once_count_as_followers_alone():
    made, rng = payoff(keeping=1e-4), random.Random(0)
    for number in range(20):
        family = [made.watch(KIND, state(number)) for _ in range(4)]
        assert not any(made.pays(each, False) or each.follows for each in family)
        for each in family:
            made.ended(each, [0] * 80 + [rng.random()] * 20, None)
    for _ in range(200):
        made.ran(4, 4 * PASS, is_crowded=True)
    watched = made.watch(KIND, state(99))
    assert watched.follows and made.pays(watched, False)


def test_without_a_clock_every_request_uses_it_and_without_a_measured_pass_none_does():
    always, unmeasured = Payoff((1, 8, 4), None), Payoff((1, 8, 4), Clock())
    assert repeated(always, 2, 100, 3) == 6 and always.watch(KIND, state(0)).follows
    assert repeated(unmeasured, 80, 100, 20) == 0


def drafted(made: Payoff, seconds: float, tokens: int | None, count: int) -> None:
    for _ in range(count):
        begun = made.now()
        made._clock.now += seconds
        made.drafting(begun, tokens)


@pytest.mark.parametrize(
    ("tokens", "seconds", "pays"), [(12, 4e-3, True), (2, 4e-3, False), (6, 4e-3, True)]
)
def test_drafts_pay_where_their_pass_is_shorter_than_those_of_their_tokens(tokens, seconds, pays):
    made = payoff()
    drafted(made, seconds, tokens, 10)
    assert made.drafts_pay(1e-3, 16) is pays


def test_drafts_are_tried_now_and_then_once_they_are_compiled_and_might_pay():
    made = payoff()
    assert not any(made.drafts_pay(1e-3, 16) for _ in range(100))  # nor compiled meanwhile
    drafted(made, 4e-3, None, 3)
    assert [made.drafts_pay(1e-3, 16) for _ in range(16)].count(True) == 2
    assert not any(made.drafts_pay(1e-3, 4) for _ in range(100))


def test_drafts_are_compiled_after_a_minute_of_passes():
    made = payoff()
    made.ran(1, PASS, passes=70_000)
    assert [made.drafts_pay(1e-3, 16) for _ in range(16)].count(True) == 2
