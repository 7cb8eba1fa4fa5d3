"""Sessions of the embedded model against the same computed in float64."""

import random

import pytest

from jaxshare import Sampler
from jaxshare.serving import Workers
from jaxshare.serving.evaluation import arithmetic
from tests.serving.branches.test_branches import embedded
from tests.serving.workers.plain_session import PlainSession
from tests.serving.workers.test_session import run

PASSES = 192
NAMES = ("Alice", "Bob", "Carol", "Dan")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_four_workers_write_what_float64_gives(seed):
    """Token for token, but where a random number lies within a millionth of the edge between two."""
    model = embedded()
    problem = arithmetic.make_problem(random.Random(seed), 4).prompt()
    sampler = Sampler(temperature=0.7)
    session = Workers(
        model,
        problem,
        names=NAMES,
        budget=PASSES,
        sampler=sampler,
        seed=seed,
        stop_on="never",
        step_tokens=128,
        history_tokens=1536,
    )
    found = run(session)
    settings = {
        "problem": problem,
        "names": NAMES,
        "layout": "combined",
        "format": session.format,
        "sampler": sampler,
        "seed": seed,
        "ask_every": 1024,
        "stop_on": "never",
        "together": True,
        "max_workers": len(NAMES),
    }
    plain = PlainSession(model, settings, lambda text: False, found)
    plain.run(PASSES)
    assert plain.passes == PASSES
    assert plain.written == found
