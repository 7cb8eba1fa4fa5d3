"""The prompts of a rollout and how they are sampled, as plain data that other processes can take."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Self, TypedDict

from jaxshare import Sampler
from jaxshare.decoding.logprobs import BOTH
from jaxshare.models import LoadedModel
from jaxshare.serving.branches.answering import Answering, CallAnswering
from jaxshare.serving.branches.on_engine import complete_on
from jaxshare.serving.branches.prompt_tree import Prompt, Prompts
from jaxshare.serving.branches.run_plan import read_run_prompts
from jaxshare.serving.branches.selection import by_prompt
from jaxshare.serving.engine import Engine
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.inputs import default_sampler, warn_of_equal_texts
from jaxshare.serving.rollouts.batch import RolloutBatch, pack


class SampleOptions(TypedDict, total=False):
    """How a rollout samples; see `rollout`."""

    n: int
    sampler: Sampler | None
    max_new_tokens: int | None
    stop: Any
    include_stop: bool | None
    seed: int | None
    adapter: str | None


@dataclasses.dataclass(frozen=True)
class RolloutCall:
    """Prompts to sample.

    Attributes:
      prompts: as tokens, with the number of samples of each.
      answers: how each is answered, by its number.
      adapter: of the engines, by name, or None.
    """

    prompts: tuple[Prompt, ...]
    answers: Mapping[int, Answering]
    adapter: str | None

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        prompts: Prompts,
        *,
        n: int = 1,
        sampler: Sampler | None = None,
        max_new_tokens: int | None = None,
        stop: Any = None,
        include_stop: bool | None = None,
        seed: int | None = None,
        adapter: str | None = None,
    ) -> Self:
        """Reads the arguments of `rollout`; of the model all but its parameters are used."""
        sampler = sampler or default_sampler(model)
        sampler.refuse(["best_of"], "all samples are given; leave it out")
        texts = {"max_new_tokens": max_new_tokens, "seed": seed, "stop": stop}
        call = CallAnswering.of(model, sampler, include_stop=include_stop, **texts)
        read = tuple(read_run_prompts(model, prompts, n, None))
        answers = call.of_prompts(read, 0)
        warn_of_equal_texts((prompt.n, answers[prompt.number].sampler) for prompt in read)
        return cls(read, answers, adapter)

    def part(self, prompts: Collection[Prompt]) -> Self:
        """The same for some of the prompts."""
        answers = {prompt.number: self.answers[prompt.number] for prompt in prompts}
        return dataclasses.replace(self, prompts=tuple(prompts), answers=answers)

    def complete(self, engine: Engine) -> Iterator[Completion]:
        """Samples on an engine, and yields in the order of the prompts."""
        how = {"top_logprobs": 0, "logprobs": BOTH, "adapter": self.adapter}
        return complete_on(engine, self.prompts, answers=self.answers, **how)

    def packed(self, model: LoadedModel, found: Iterable[Completion], **sizes: Any) -> RolloutBatch:
        """Packs the samples that were found; for the sizes see `pack`."""
        samples = by_prompt(found)
        of_each = [samples[prompt.number] for prompt in self.prompts]
        return pack(model, [prompt.tokens for prompt in self.prompts], of_each, **sizes)
