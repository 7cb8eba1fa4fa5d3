"""Firings of one state on an engine with a Logits Cache, under supervisors that fire several."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, load
from jaxshare.seeds import stream_seed
from jaxshare.serving.agents import Runtime, agent, llm, model_calls
from jaxshare.serving.agents.backends import EngineModel, ScriptedModel
from jaxshare.serving.agents.repeated_runs import BestOfN, SelfConsistency
from jaxshare.serving.agents.search import MonteCarloTreeSearch, TreeOfThoughts
from tests.serving.engine.stepped import use_always


@agent
async def solver(question: str) -> str:
    """Two answers, the second with the first in its dialogue."""
    first = await llm(question, max_new_tokens=16)
    return first + "|" + await llm("And 6 * 7?", max_new_tokens=16)


def value(state) -> float:
    """Some order of the states, the same in every run."""
    return sum(map(ord, "".join(said(state)))) % 97 / 97


SUPERVISORS = {
    "tree": lambda: TreeOfThoughts(3, 2, value),
    "best": lambda: BestOfN(4, value),
    "consistent": lambda: SelfConsistency(4),
    "monte carlo": lambda: MonteCarloTreeSearch(6, 3, value),
}


@pytest.fixture(scope="module")
def models():
    """Models on one engine, without the cache's use and with it."""
    sampler = Sampler(temperature=0.5)
    plain = EngineModel(load(EMBEDDED), sampler=sampler, max_rows=4, logits_cache=10**8)
    use_always(plain.engine)
    return plain, EngineModel(plain.engine, sampler=sampler, resample="stepwise")


@pytest.mark.parametrize("name", SUPERVISORS)
def test_siblings_hit_the_cache_and_say_what_they_would_have_said(models, name, monkeypatch):
    cache = models[0].engine.logits_cache
    monkeypatch.setattr(cache, "prefetch", waiting(cache.prefetch))
    before = cache.statistics
    runs = [asyncio.run(searched(model, name)) for model in models]
    after = cache.statistics
    plain, cached = ({state.path: said(state) for state in run.states} for run in runs)
    assert plain == cached and len(plain) > 4
    assert after.hits > before.hits
    assert after.replayed + after.followed > before.replayed + before.followed
    if name == "monte carlo":  # which fires one state at a time
        assert after.ahead > before.ahead


def waiting(prefetch: Callable[..., Future]) -> Callable[..., None]:
    """Computes ahead at once, so that it does not depend on threads what comes in time."""
    return lambda *args, **more: prefetch(*args, **more).result()


async def searched(model: EngineModel, name: str):
    asked = f"1. 47 + 38 ({name})"
    return await Runtime(model, seed=5).run(solver.under(SUPERVISORS[name]()), asked)


def said(state) -> list[str]:
    return [message.content for message in state.dialogue]


def test_a_call_knows_its_seed_in_the_next_firing_of_its_state():
    model = ScriptedModel({"?": "an answer", "And": "another"})

    async def searched_by_script():
        searching = solver.under(TreeOfThoughts(3, 2, value))
        return await Runtime(model, seed=3).run(searching, "A question?")

    asyncio.run(searched_by_script())
    seeds = {call.state: (call.seed, call.next_seed) for call in model.calls}
    assert len({seed for seed, _ in seeds.values()}) == len(seeds)
    again = [path for path in seeds if path[-1]]
    assert len(again) > 3
    for path in again:
        assert seeds[*path[:-1], path[-1] - 1][1] == seeds[path][0]


def test_a_seed_is_computed_for_the_calls_that_are_made_alone(monkeypatch):
    places = []

    def counted(seed, *place):
        places.append(place)
        return stream_seed(seed, *place)

    monkeypatch.setattr(model_calls, "stream_seed", counted)
    model = ScriptedModel({"?": "an answer", "And": "another"})
    asyncio.run(Runtime(model).run(solver.under(TreeOfThoughts(3, 2, value)), "A question?"))
    assert len(places) == len(model.calls) == len({call.seed for call in model.calls})
