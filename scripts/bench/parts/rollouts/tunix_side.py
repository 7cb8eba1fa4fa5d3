"""Tunix's own sampler on the weights of a model here, for the comparison of samples."""

import dataclasses
import importlib.util
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxshare.models import LoadedModel


def is_installed() -> bool:
    """True where Tunix is: in the environment `.venv-tunix`, say."""
    return importlib.util.find_spec("tunix") is not None


class TunixSide:
    """Tunix's sampler, which has a row of its own for each sample of a prompt.

    It samples a group of one prompt at a time, as its learners do with a `rollout_micro_batch_size`
    of 1: it computes the logits of all tokens of all prompts of a call, which for a group of 32
    prompts of 512 tokens are 2.1 GB.

    Args:
      model: a plain Llama in float32 whose rotations have the base 1,000,000, the only one that
        Tunix's has.
      new_tokens: of each sample; none of them ends it.
    """

    def __init__(self, model: LoadedModel, prompt_tokens: int, new_tokens: int):
        from tunix.generate import sampler  # pyright: ignore[reportMissingImports]
        from tunix.models.llama3 import model as llama3  # pyright: ignore[reportMissingImports]

        from jaxshare.serving.rollouts.tunix_rollout import give_weights

        config, self.new_tokens = model.config, new_tokens
        self.prompt_tokens = prompt_tokens
        settings = llama3.ModelConfig(
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            embed_dim=config.hidden_size,
            hidden_dim=config.intermediate_size,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            num_kv_heads=config.num_kv_heads,
            rope_theta=1_000_000,
            norm_eps=config.norm_eps,
            weight_tying=config.tie_embeddings,
        )
        module = llama3.Llama3(settings, rngs=nnx.Rngs(0))
        give_weights(module, model)
        sizes = config.num_layers, config.num_kv_heads, config.head_dim
        self._sampler = sampler.Sampler(
            module, _NumbersTokenizer(), sampler.CacheConfig(prompt_tokens + new_tokens, *sizes)
        )

    def seconds(self, prompts: Sequence[Sequence[int]], samples: int) -> float:
        """Samples each prompt, and returns how long that took."""
        begin = time.perf_counter()
        for number, prompt in enumerate(prompts):
            found = self._sampler(
                [" ".join(map(str, prompt))] * samples,
                max_generation_steps=self.new_tokens,
                max_prompt_length=self.prompt_tokens,
                temperature=1.0,
                top_p=1.0,
                seed=number,
                eos_tokens=[-1],
                return_logprobs=True,
            )
            sizes = {len(tokens) for tokens in found.tokens}
            assert sizes == {self.new_tokens}, f"Tunix gave samples of {sizes} tokens"
        return time.perf_counter() - begin

    def logprobs_differ(self, prompts: Sequence[Sequence[int]], model: LoadedModel) -> float:
        """The largest difference of log-probabilities of a greedy sample from the model's."""
        from jaxshare.models import Decoder

        found = self._sampler(
            [" ".join(map(str, prompts[0]))],
            max_generation_steps=self.new_tokens,
            max_prompt_length=self.prompt_tokens,
            eos_tokens=[-1],
            return_logprobs=True,
        )
        tokens = np.asarray([[*prompts[0], *found.tokens[0]]], np.int32)
        logits = Decoder(model.config).apply(model.params, tokens, method="causal")
        own = jnp.take_along_axis(
            nnx.log_softmax(logits[0, :-1]), jnp.asarray(tokens[0, 1:, None]), axis=-1
        )
        return float(np.abs(own[-self.new_tokens :, 0] - np.asarray(found.logprobs[0])).max())


@dataclasses.dataclass(frozen=True)
class _NumbersTokenizer:
    """A tokenizer of texts that are the numbers of their tokens."""

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return -1
