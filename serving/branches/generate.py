"""Samples completions of prompts in one call."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.branches.data_parallel import branches
from jaxshare.serving.branches.on_engine import complete_on
from jaxshare.serving.branches.prefix import Prefix
from jaxshare.serving.branches.prompt_tree import Prompts
from jaxshare.serving.branches.run_plan import check_settings, read_and_check_prompts
from jaxshare.serving.branches.sharing_plan import build_prefix_tree, unique_tokens
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.inputs import default_sampler, token_bytes, warn_of_equal_texts
from jaxshare.serving.kvcache.sharing_cost import Chosen, Costs

if TYPE_CHECKING:
    from jaxshare.serving.engine import Engine


@dataclasses.dataclass(frozen=True)
class Completions:
    """The completions that `generate` returns, and what they cost.

    Attributes:
      completions: in the order of the prompts, n of each.
      prompt_tokens: tokens of all prompts together.
      unique_tokens: the same with every common prefix counted once.
      passes: forward passes, those over the prompts included. On an engine they are all that it has
        run meanwhile.
      seconds: of wall time in them, without compilation; on an engine with it.
      kv_bytes: the peak of cached keys and values, over all layers; on an engine those of the
        prompts and the completions.
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
    stop: str | Sequence[str] | None = None,
    include_stop: bool = False,
    top_logprobs: int = 0,
    logprobs: bool | str = "raw",
    seed: int = 0,
    share: bool | None = None,
    prefix: Prefix | None = None,
    max_rows: int | None = None,
    max_kv_bytes: int | None = None,
    costs: Costs | None = None,
    warm_up: bool = False,
    on_tokens: Callable[[Any], None] | None = None,
    engine: "Engine | None" = None,
) -> Completions:
    """Samples n completions of each prompt, and shares the prompts' common prefixes.

    A model on a mesh runs some of the completions on each of its data groups. Several completions
    of one prompt at temperature 0 are all equal: a warning is logged (`jaxshare.generate`).

    Args:
      model, prompts, n, max_new_tokens, sampler, stop, include_stop, seed: see `Branches`.
      top_logprobs, logprobs, share, prefix: see `Branches`.
      max_rows, max_kv_bytes, costs: see `Branches`.
      warm_up: compile everything before the clock starts.
      on_tokens: called between dispatches with the run so far.
      engine: of the same model, in whose memory and passes the completions run, beside its other
        requests and sessions. It shares prefixes by itself, so that `share`, `prefix`, `max_rows`,
        `max_kv_bytes`, `costs`, `warm_up` and `on_tokens` are not for it. The texts are the same.

    Raises:
      ValueError: see `Branches`, or an engine of another model or with one of those settings.
      TooLongError, QueueFullError, ClosedError: see `Engine.submit`.
      NotANumberError: the model's logits for a prompt are not finite; `Branches.stream` gives the
        other completions.
    """
    of_texts = {"max_new_tokens": max_new_tokens, "seed": seed, "stop": stop}
    of_texts |= {"include_stop": include_stop, "top_logprobs": top_logprobs}
    of_texts["logprobs"] = logprobs
    if engine:
        _check_none(
            share=share,
            prefix=prefix,
            max_rows=max_rows,
            max_kv_bytes=max_kv_bytes,
            costs=costs,
            warm_up=warm_up or None,
            on_tokens=on_tokens,
        )
        return _generate_on(engine, model, prompts, n, sampler, **of_texts)
    options = {"share": share, "prefix": prefix, "max_rows": max_rows, "sampler": sampler}
    options |= {"max_kv_bytes": max_kv_bytes, "costs": costs}
    run = branches(model, prompts, n=n, **options, **of_texts)
    return _completions(run, on_tokens, warm_up)


def _check_none(**options: Any) -> None:
    """Raises ValueError for the first option that is given, but is not for an engine."""
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"{given[0]} is not for a call with an engine; leave it out")


def _completions(run: Any, on_tokens: Callable[[Any], None] | None, warm_up: bool) -> Completions:
    """Runs branches to their end."""
    warn_of_equal_texts(run.sample_counts)
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


def _generate_on(
    engine: "Engine",
    model: LoadedModel,
    prompts: Prompts | None,
    n: int,
    sampler: Sampler | None,
    *,
    max_new_tokens: int,
    **of_texts: Any,
) -> Completions:
    """Samples completions in the passes of an engine; see `generate`."""
    if model.params is not engine.model.params:
        raise ValueError("the engine is of another model; call generate with engine.model")
    if prompts is None:
        raise ValueError("there are no prompts; give at least one")
    check_settings(
        model, prompts, None, max_new_tokens=max_new_tokens, max_rows=None, max_kv_bytes=None
    )
    read = read_and_check_prompts(model, prompts, n, prefix=None, max_new_tokens=max_new_tokens)
    sampler = sampler or default_sampler(model)
    warn_of_equal_texts((prompt.n, prompt.sampler or sampler) for prompt in read)
    started, passes = time.perf_counter(), engine.metrics.passes
    completions = [
        *complete_on(engine, read, max_new_tokens=max_new_tokens, sampler=sampler, **of_texts)
    ]
    unique = unique_tokens(build_prefix_tree(read))
    sampled = sum(len(completion.tokens) for completion in completions)
    return Completions(
        completions,
        sum(len(prompt.tokens) for prompt in read),
        unique,
        engine.metrics.passes - passes,
        time.perf_counter() - started,
        (unique + sampled) * token_bytes(model),
        engine.rows,
    )
