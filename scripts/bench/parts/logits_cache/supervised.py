"""Searches for scripts.bench.logits_cache: agents under supervisors that fire a state several times,
on engines with and without the Logits Cache."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.serving.agents import ModelCall, Reply, Runtime, agent, llm
from jaxshare.serving.agents.repeated_runs import BestOfN, SelfConsistency
from jaxshare.serving.agents.search import MonteCarloTreeSearch, TreeOfThoughts
from jaxshare.serving.agents.states import State, Supervisor
from jaxshare.serving.engine import Engine
from jaxshare.serving.inputs import token_bytes
from scripts.bench.lib import alternate
from scripts.bench.parts.logits_cache.options import CACHE_BYTES, GROWTH
from scripts.bench.parts.logits_cache.report import BASELINE, SIDES, STEPWISE

AGAIN = "13 10"
"""Tokens with which the second answer is asked for."""


def _order(state: State) -> float:
    """Some order of states, the same on every side where the answers are."""
    return sum(map(int, state.dialogue[-1].content.split())) % 97 / 97


_MADE: Mapping[str, Callable[[], Supervisor]] = {
    "ToT": lambda: TreeOfThoughts(4, 2, _order),
    "BestOfN": lambda: BestOfN(4, _order),
    "SelfConsistency": lambda: SelfConsistency(4),
    "MCTS": lambda: MonteCarloTreeSearch(8, 4, _order),
}


@agent
async def answers_twice(prompt: str) -> str:
    """An answer to a puzzle, and another one that follows it."""
    await llm(prompt)
    return await llm(AGAIN)


class TokenModel:
    """A model for agents whose messages are the numbers of tokens, so that it needs no tokenizer.

    Args:
      engine: answers.
      side: how it samples again.
      sampler: of all answers; tokens: of each.
    """

    def __init__(self, engine: Engine, side: str, sampler: Sampler, tokens: int):
        self.engine, self._sampler, self._tokens = engine, sampler, tokens
        self._resample = None if side == BASELINE else side

    async def answer(self, call: ModelCall) -> Reply:
        """Answers one call."""
        prompt = [int(word) for message in call.messages for word in message.content.split()]
        done = await self.engine.submit(
            prompt,
            self._sampler,
            max_new_tokens=self._tokens,
            seed=call.seed,
            agent_id=call.agent,
            resample=self._resample,
        )
        return Reply(" ".join(map(str, done.tokens)), len(done.tokens), done.prompt_tokens)


def search_point(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    supervisor: str,
    temperature: float,
    tokens: int,
    kept: int,
    seed: int,
    always: bool = False,
    engine: Mapping[str, Any] = {},
    logits_cache: int = CACHE_BYTES,
) -> dict[str, Any]:
    """Searches for an answer to each prompt, on one side after the other. The first one is not timed,
    nor are those in which an engine compiles, unless all are. With `always` the Logits Cache is used
    where it does not pay, too.

    Args:
      engine: options of all engines, in place of those that follow from the sizes.
      logits_cache: bytes of the Logits Cache.

    Returns:
      The supervisor, the temperature, the speed-up of each side in the mean over prompts and its
        share of replayed tokens, and how many stepwise searches differ from the baseline's.
    """
    # A level of the tree of thoughts fires two states four times.
    rows, longest = 8, max(map(len, prompts)) + 2 * tokens + 4 * GROWTH
    kv_bytes = bucket(2 * rows * longest) * token_bytes(model)  # alike for both tasks
    sizes = {"kv_bytes": kv_bytes, "max_rows": rows, **engine}
    cache = {"logits_cache": logits_cache, "kept_logits": kept, "resample_always": always}
    sampler = Sampler(temperature=temperature, forbidden=tuple(model.generation.stop_tokens))
    with _engines(model, sizes, cache) as engines:
        models = {side: TokenModel(each, side, sampler, tokens) for side, each in engines.items()}
        said = {side: [] for side in SIDES}

        def search(side: str, prompt: Sequence[int]) -> float:
            begun = time.perf_counter()
            said[side].append(asyncio.run(_search(models[side], supervisor, prompt, seed)))
            return time.perf_counter() - begun

        timed = _timed(engines, prompts, search)
        given = {side: _replayed(models[side].engine) for side in SIDES}
    speedups = {
        side: statistics.fmean(each[BASELINE] / each[side] for each in timed) for side in SIDES
    }
    pairs = zip(said[STEPWISE], said[BASELINE], strict=True)
    computed = sum(tokens * len(answers) for answers in said[BASELINE])
    return {
        "supervisor": supervisor,
        "temperature": temperature,
        "timed": len(timed),
        "seconds": {side: sum(each[side] for each in timed) for side in SIDES},
        "speedup": speedups,
        "hit_ratio": {side: given[side] / computed for side in SIDES},
        "different_from_baseline": sum(own != base for own, base in pairs),
    }


@contextlib.contextmanager
def _engines(
    model: LoadedModel, sizes: Mapping[str, Any], cache: Mapping[str, Any]
) -> Iterator[dict[str, Engine]]:
    """The engine of each side, warm: the same for all, but that the baseline has no Logits Cache."""
    with contextlib.ExitStack() as stack:
        made = {}
        for side in SIDES:
            more = {} if side == BASELINE else cache
            made[side] = stack.enter_context(Engine(model, **sizes, **more))
            made[side].warm_up()
        yield made


def _timed(
    engines: Mapping[str, Engine],
    prompts: Sequence[Sequence[int]],
    search: Callable[[str, Sequence[int]], float],
) -> list[dict[str, float]]:
    """The seconds of the searches that count, by side; those of the last one where none does."""
    seconds: list[tuple[bool, dict[str, float]]] = []
    for number, prompt in enumerate(prompts):
        before = _compiled(engines)
        found = alternate({side: lambda s=side, p=prompt: search(s, p) for side in SIDES}, 1)
        counts = number > 0 and _compiled(engines) == before
        seconds.append((counts, {side: found[side][0] for side in SIDES}))
    return [each for counts, each in seconds if counts] or [seconds[-1][1]]


def _compiled(engines: Mapping[str, Engine]) -> float:
    """The seconds that the engines have compiled so far."""
    return sum(engine.metrics.compile_seconds for engine in engines.values())


def _replayed(engine: Engine) -> int:
    """Tokens that the engine's Logits Cache has given, if it has one."""
    cache = engine.logits_cache
    return cache.statistics.replayed + cache.statistics.followed if cache else 0


async def _search(
    model: TokenModel, supervisor: str, prompt: Sequence[int], seed: int
) -> dict[tuple[int, ...], str]:
    """The answers of all states of a search, by their paths."""
    searching = answers_twice.under(_MADE[supervisor]())
    done = await Runtime(model, seed=seed).run(searching, " ".join(map(str, prompt)))
    return {state.path: state.dialogue[-1].content for state in done.states if state.dialogue}
