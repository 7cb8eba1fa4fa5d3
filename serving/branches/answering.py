"""The settings with which the prompts of a run are answered, from the call and from samplers."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from jaxshare import Sampler
from jaxshare.argument_checks import as_integer
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.branches.prompt_tree import Prompt
from jaxshare.serving.inputs import check_context, check_sampler, chosen, stop_texts


@dataclasses.dataclass(frozen=True)
class Answering:
    """The settings with which one prompt is answered.

    Attributes:
      sampler: as it was given.
      max_new_tokens: the most tokens of a completion.
      stops, includes_stop: texts before which a completion ends, or after which.
      place: the stream of sample i is `jaxshare.seeds.stream_seed(*place, i)`.
    """

    sampler: Sampler
    max_new_tokens: int
    stops: tuple[str, ...]
    includes_stop: bool
    place: tuple[int, int]

    def seed(self, index: int) -> int:
        """The seed of the prompt's sample of this number."""
        return stream_seed(*self.place, index)


@dataclasses.dataclass(frozen=True)
class CallAnswering:
    """The settings of a call for all its prompts, of which samplers of prompts may have others.

    Attributes:
      model: the model.
      sampler: of the call.
      max_new_tokens, seed: of the call, or else of its sampler, or else the usual ones.
      stop, include_stop: the same; None for the checkpoint's texts.
    """

    model: LoadedModel
    sampler: Sampler
    max_new_tokens: int
    seed: int
    stop: Any
    include_stop: bool

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        sampler: Sampler,
        *,
        max_new_tokens: int | None,
        stop: str | Sequence[str] | None,
        include_stop: bool | None,
        seed: int | None,
    ) -> Self:
        """The settings of a call; for the arguments see `Branches`.

        Raises:
          ValueError: a number below 1, an empty stop text, or a sampler that names a token outside
            the vocabulary.
          TypeError: an argument of another type.
        """
        check_sampler(model, sampler)
        return cls(
            model,
            sampler,
            as_integer("max_new_tokens", chosen("max_tokens", max_new_tokens, sampler, 64), 1),
            as_integer("seed", chosen("seed", seed, sampler, 0)),
            stop_texts(model, chosen("stop", stop, sampler)),
            bool(chosen("include_stop", include_stop, sampler, False)),
        )

    def of_prompts(self, prompts: Sequence[Prompt], before: int) -> dict[int, Answering]:
        """The settings of each prompt, by its number.

        A field of a prompt's own sampler wins over the call: it is nearer. With a seed of its own,
        a prompt has the completions that a call with it alone and that seed gives.

        Args:
          prompts: as tokens.
          before: tokens that precede all of them.

        Raises:
          ValueError: see `of`; or a prompt that leaves too little of the model's context.
        """
        found: dict[int, Answering] = {}
        for prompt in prompts:
            own = prompt.sampler or Sampler()
            if prompt.sampler:
                check_sampler(self.model, own)
            most = self.max_new_tokens if own.max_tokens is None else own.max_tokens
            what = f"prompt {prompt.number}" if len(prompts) > 1 else "the prompt"
            check_context(self.model, before + len(prompt.tokens), most, what)
            found[prompt.number] = Answering(
                prompt.sampler or self.sampler,
                most,
                self.stop if own.stop is None else stop_texts(self.model, own.stop),
                self.include_stop if own.include_stop is None else own.include_stop,
                (self.seed, prompt.number) if own.seed is None else (own.seed, 0),
            )
        return found
