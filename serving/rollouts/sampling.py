"""Samples of prompts on one engine, or on one for each data group, as a batch for training."""

import concurrent.futures
from collections.abc import Sequence

import numpy as np

from jaxshare import Sampler
from jaxshare.serving.branches.prompt_tree import Prompts
from jaxshare.serving.engine import Engine
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.rollouts.batch import RolloutBatch
from jaxshare.serving.rollouts.call import RolloutCall


def rollout(
    engines: Engine | Sequence[Engine],
    prompts: Prompts,
    *,
    n: int = 1,
    sampler: Sampler | None = None,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    include_stop: bool | None = None,
    seed: int | None = None,
    length: int | None = None,
    multiple_of: int = 64,
    pad_token: int = 0,
    adapter: str | None = None,
) -> RolloutBatch:
    """Samples n completions of each prompt, and packs them for training.

    Sample i of prompt p has the stream of `stream_seed(seed, p, i)`, as from `generate`: in float32 it
    is the same on any number of engines.

    Args:
      engines: one, or several of one model with the same weights, such as those of
        `model.replicas()`. Each has neighbouring prompts, with all of their samples.
      prompts: a text, tokens, a list of these, or a tree; see `generate`.
      n: samples of each prompt.
      sampler, max_new_tokens, stop, include_stop, seed: see `generate`. Give another seed at each step
        of training.
      length, multiple_of, pad_token: of the arrays; see `pack`.
      adapter: of the engines, by name; see `Engine.add_adapter`.

    Raises:
      ValueError: no engines, or see `generate` and `pack`.
      NotANumberError, NoTokenError: nothing can be sampled for a prompt.
      TooLongError, QueueFullError, ClosedError: see `Engine.submit`.
    """
    engines = [engines] if isinstance(engines, Engine) else [*engines]
    if not engines:
        raise ValueError("there are no engines; give at least one")
    call = RolloutCall.of(
        engines[0].model,
        prompts,
        n=n,
        sampler=sampler,
        max_new_tokens=max_new_tokens,
        stop=stop,
        include_stop=include_stop,
        seed=seed,
        adapter=adapter,
    )

    def of_part(engine: Engine, part: Sequence[int]) -> list[Completion]:
        return [*call.part([call.prompts[i] for i in part]).complete(engine)]

    parts = np.array_split(np.arange(len(call.prompts)), len(engines))
    with concurrent.futures.ThreadPoolExecutor(len(engines), "jaxshare-rollout") as threads:
        found = [each for part in threads.map(of_part, engines, parts) for each in part]
    return call.packed(
        engines[0].model, found, length=length, multiple_of=multiple_of, pad_token=pad_token
    )
