"""Samples completions of prompts in one call."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.branches.data_parallel import branches
from jaxshare.serving.branches.prefix import Prefix
from jaxshare.serving.branches.prompt_tree import Prompts
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.inputs import warn_of_equal_texts
from jaxshare.serving.kvcache.sharing_cost import Chosen, Costs


@dataclasses.dataclass(frozen=True)
class Completions:
    """The completions that `generate` returns, and what they cost.

    Attributes:
      completions: in the order of the prompts, n of each.
      prompt_tokens: tokens of all prompts together.
      unique_tokens: the same with every common prefix counted once.
      passes: forward passes, those over the prompts included.
      seconds: of wall time in them, without compilation.
      kv_bytes: the peak of cached keys and values, over all layers.
      rows: the maximum number of completions that ran at a time.
      costs: the costs by which sharing was decided; None where there was nothing to decide.
      compile_seconds: of wall time in compilation.
    """

    completions: list[Completion]
    prompt_tokens: int
    unique_tokens: int
    passes: int
    seconds: float
    kv_bytes: int
    rows: int = 1
    costs: Chosen | None = None
    compile_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens sampled per second, all completions together, without compilation."""
        return sum(len(c.tokens) for c in self.completions) / self.seconds


def generate(
    model: LoadedModel,
    prompts: Prompts | None,
    *,
    n: int = 1,
    max_new_tokens: int = 64,
    sampler: Sampler | None = None,
    seed: int = 0,
    share: bool | None = None,
    prefix: Prefix | None = None,
    max_rows: int | None = None,
    max_kv_bytes: int | None = None,
    costs: Costs | None = None,
    warm_up: bool = False,
    on_tokens: Callable[[Any], None] | None = None,
) -> Completions:
    """Samples n completions of each prompt, and shares the prompts' common prefixes.

    A model on a mesh runs some of the completions on each of its data groups. Several completions
    of one prompt at temperature 0 are all equal: a warning is logged (`jaxshare.generate`).

    Args:
      model, prompts, n, max_new_tokens, sampler, seed, share, prefix: see `Branches`.
      max_rows, max_kv_bytes, costs: see `Branches`.
      warm_up: compile everything before the clock starts.
      on_tokens: called between dispatches with the run so far.

    Raises:
      ValueError: see `Branches`.
      NotANumberError: the model's logits for a prompt are not finite; `Branches.stream` gives the
        other completions.
    """
    run = branches(
        model,
        prompts,
        n=n,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        seed=seed,
        share=share,
        prefix=prefix,
        max_rows=max_rows,
        max_kv_bytes=max_kv_bytes,
        costs=costs,
    )
    warn_of_equal_texts(run.sampler, run.max_samples_per_prompt)
    completions: list[Completion] = []
    # Closed at once where an error is raised: a store of prefixes is free again then.
    with contextlib.closing(run.stream(on_tokens, warm_up=warm_up)) as stream:
        for completion in stream:
            if completion.error:
                raise completion.error
            completions.append(completion)
    return Completions(
        sorted(completions, key=lambda c: (c.prompt, c.index)),
        run.prompt_tokens,
        run.unique_tokens,
        run.passes,
        run.seconds,
        run.kv_bytes,
        run.rows,
        run.costs,
        run.compile_seconds,
    )
