"""What tokens alone tell of replays, against a dictionary of every beginning that was sampled from."""

import random

import pytest

from jaxshare.serving.logits_cache import evidence
from jaxshare.serving.logits_cache.evidence import Evidence

STATE, OTHER = b"a" * 32, b"b" * 32


def spared(own, others) -> int:
    """The tokens of an output whose distributions were computed for one of the others, too."""
    computed = {tuple(other[:n]) for other in others for n in range(len(other))}
    return next((n for n in range(len(own)) if tuple(own[:n]) not in computed), len(own))


@pytest.mark.parametrize("seed", range(6))
def test_a_replay_takes_what_outputs_known_before_had_and_follows_what_came_meanwhile(seed):
    rng, told = random.Random(seed), Evidence()
    outputs = [[rng.randrange(2) for _ in range(rng.randrange(7))] for _ in range(5)]
    for output in outputs[:2]:
        told.add(told.watch("kind", STATE), output, False)
    late = told.watch("kind", STATE)
    for output in outputs[2:4]:
        told.add(told.watch("kind", STATE), output, False)
    found, followed = told.add(late, outputs[4], False)
    assert found == spared(outputs[4], outputs[:2])
    assert found + followed == spared(outputs[4], outputs[:4])


def test_a_request_knows_how_many_came_before_it_and_if_one_was_kept():
    told = Evidence()
    first = told.watch("kind", STATE)
    assert (first.num_known, first.any_kept, first.found) == (0, False, None)
    assert told.add(first, [1, 2], False) == (0, 0)
    second = told.watch("kind", STATE)
    assert (second.num_known, second.any_kept) == (1, False)
    told.add(second, [1, 3], True)
    assert told.watch("kind", STATE).any_kept and not told.watch("kind", OTHER).any_kept


def test_few_outputs_of_a_state_are_remembered_and_the_oldest_states_forgotten(monkeypatch):
    monkeypatch.setattr(evidence, "_MAX_TOKENS", 40)
    told = Evidence()
    for i in range(20):
        told.add(told.watch("kind", STATE), [i], False)
    assert told.watch("kind", STATE).num_known == 8
    for i in range(20):
        told.add(told.watch("kind", bytes([i])), [1, 2, 3], True)
    assert told.watch("kind", STATE).num_known == 0 and not told.watch("kind", STATE).any_kept
    assert [i for i in range(20) if told.watch("kind", bytes([i])).num_known] == [*range(7, 20)]
