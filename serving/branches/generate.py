"""Samples completions of prompts in one call."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.branches.answering import CallAnswering
from jaxshare.serving.branches.data_parallel import branches
from jaxshare.serving.branches.on_engine import complete_on
from jaxshare.serving.branches.prefix import Prefix
from jaxshare.serving.branches.prompt_tree import Prompts, check_n
from jaxshare.serving.branches.run_plan import check_settings, read_run_prompts
from jaxshare.serving.branches.selection import by_prompt
from jaxshare.serving.branches.sharing_plan import build_prefix_tree, unique_tokens
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.engine.stream_group import likeliest
from jaxshare.serving.inputs import (
    as_sampler,
    check_completions,
    check_model,
    chosen,
    default_sampler,
    token_bytes,
    warn_of_equal_texts,
)
from jaxshare.serving.kvcache.sharing_cost import Chosen, Costs

if TYPE_CHECKING:
    from jaxshare.serving.engine import Engine


@dataclasses.dataclass(frozen=True, repr=False)
class Completions:
    """The completions that `generate` returns, and what they cost: a sequence of completions.

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

    def __len__(self) -> int:
        return len(self.completions)

    def __iter__(self) -> Iterator[Completion]:
        return iter(self.completions)

    def __getitem__(self, index: int) -> Completion:
        return self.completions[index]

    def __repr__(self) -> str:
        """A line with their number, and what they cost."""
        sampled = sum(len(each.tokens) for each in self.completions)
        return (
            f"<Completions: {len(self.completions)} with {sampled} tokens, of prompts with "
            f"{self.prompt_tokens} ({self.unique_tokens} read once); {self.passes} passes in "
            f"{self.seconds:.2f} s, {self.kv_bytes / 1e6:.1f} MB of keys and values; see "
            ".completions>"
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens sampled per second, all completions together, without compilation."""
        return sum(len(c.tokens) for c in self.completions) / self.seconds


def generate(
    model: LoadedModel,
    prompts: Prompts | None,
    *,
    n: int | None = None,
    best_of: int | None = None,
    max_new_tokens: int | None = None,
    sampler: Sampler | None = None,
    stop: str | Sequence[str] | None = None,
    include_stop: bool | None = None,
    top_logprobs: int = 0,
    logprobs: bool | str = "raw",
    seed: int | None = None,
    share: bool | None = None,
    prefix: Prefix | None = None,
    max_rows: int | None = None,
    max_kv_bytes: int | None = None,
    costs: Costs | None = None,
    warm_up: bool = False,
    on_tokens: Callable[[Any], None] | None = None,
    engine: "Engine | None" = None,
    alone: bool | None = None,
) -> Completions:
    """Samples n completions of each prompt, and shares the prompts' common prefixes.

    A model on a mesh runs some of the completions on each of its data groups. Several completions
    of one prompt at temperature 0 are all equal: a warning is logged (`jaxshare.generate`).

    Args:
      model, prompts, n, max_new_tokens, sampler, stop, include_stop, seed: see `Branches`.
      best_of: completions of each prompt to sample, of which the n with the largest `logprob` are
        given, the best first; default n. The `best_of` of a prompt's own sampler wins over it.
      top_logprobs, logprobs, share, prefix: see `Branches`.
      max_rows, max_kv_bytes, costs, alone: see `Branches`.
      warm_up: compile everything before the clock starts.
      on_tokens: called between dispatches with the run so far.
      engine: of the same model, in whose memory and passes the completions run, beside its other
        requests and sessions. It shares prefixes by itself: `share`, `prefix`, `max_rows`, `alone`,
        `max_kv_bytes`, `costs`, `warm_up`, `on_tokens` are not for it. The texts are the same.

    Raises:
      ValueError: see `Branches`, or an engine of another model or with one of those settings.
      TooLongError, QueueFullError, ClosedError: see `Engine.submit`.
      NotANumberError: the model's logits for a prompt are not finite; `Branches.stream` gives the
        other completions.
    """
    check_model(model)
    of_texts = {"max_new_tokens": max_new_tokens, "seed": seed, "stop": stop, "logprobs": logprobs}
    of_texts |= {"include_stop": include_stop, "top_logprobs": top_logprobs}
    sampler = default_sampler(model) if sampler is None else as_sampler(sampler)
    count, best_of = chosen("n", n, sampler, 1), chosen("best_of", best_of, sampler)
    prompts, kept = _samples_to_take(model, prompts, count, best_of, prefix)
    sampler = dataclasses.replace(sampler, best_of=None) if sampler.best_of else sampler
    of_run = {"share": share, "prefix": prefix, "max_rows": max_rows, "alone": alone}
    of_run |= {"max_kv_bytes": max_kv_bytes, "costs": costs}
    if engine:
        _check_none(**of_run, warm_up=warm_up or None, on_tokens=on_tokens)
        return _best(_generate_on(engine, model, prompts, count, sampler, **of_texts), kept)
    run = branches(model, prompts, n=count, sampler=sampler, **of_run, **of_texts)
    return _best(_completions(run, on_tokens, warm_up), kept)


def _samples_to_take(
    model: LoadedModel, prompts: Prompts | None, n: int, best_of: int | None, prefix: Prefix | None
) -> tuple[Prompts | None, dict[int, int]]:
    """The prompts with the number of samples of each, and how many of them to give where they are not
    all."""
    if prompts is None and prefix is None:
        return None, {}  # refused later
    check_n(n)
    read = read_run_prompts(model, prompts, n, prefix)
    kept, found = {}, []
    for prompt in read:
        own = prompt.sampler and prompt.sampler.best_of
        if (most := own or best_of) is None:
            found.append(prompt)
            continue
        sampled, kept[prompt.number] = check_completions(prompt.n, most)
        sampler = prompt.sampler and dataclasses.replace(prompt.sampler, best_of=None)
        found.append(dataclasses.replace(prompt, n=sampled, sampler=sampler))
    return found, kept


def _best(result: Completions, kept: Mapping[int, int]) -> Completions:
    """The completions with the largest log-probability of each prompt, as many as are to be given."""
    if not kept:
        return result
    given = [
        completion
        for number, group in by_prompt(result.completions).items()
        for completion in likeliest(group, kept[number] if number in kept else len(group))
    ]
    return dataclasses.replace(result, completions=given)


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
    sampler: Sampler,
    *,
    top_logprobs: int,
    logprobs: bool | str,
    **of_texts: Any,
) -> Completions:
    """Samples completions in the passes of an engine; see `generate`."""
    if model.params is not engine.model.params:
        raise ValueError("the engine is of another model; call generate with engine.model")
    if prompts is None:
        raise ValueError("there are no prompts; give at least one")
    check_settings(model, prompts, None, share=None, max_rows=None, max_kv_bytes=None)
    call = CallAnswering.of(model, sampler, **of_texts)
    read = read_run_prompts(model, prompts, n, None)
    answers = call.of_prompts(read, 0)
    warn_of_equal_texts((prompt.n, answers[prompt.number].sampler) for prompt in read)
    started, passes = time.perf_counter(), engine.metrics.passes
    kept = {"top_logprobs": top_logprobs, "logprobs": logprobs}
    adapter = model.adapter and model.adapter.name
    completions = [*complete_on(engine, read, answers=answers, adapter=adapter, **kept)]
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
