"""Batches of samples as arrays, for a training pass over whole sequences."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float32, Int32

from jaxshare import FinishReason
from jaxshare.argument_checks import INT32_MAX, as_integer
from jaxshare.models import LoadedModel
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.engine.validation import Prompt, prompt_tokens

NO_VERSION = -1
"""The version in places that were not sampled."""


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """N samples, each a row of T places: its prompt, its completion, and padding.

    Token t of a row is at position t, as `Decoder.causal` takes them: its logits at place t - 1 are
    of the token at place t. A stop token is the last of its completion.

    Attributes:
      tokens: padded with the pad token.
      prompt_mask, completion_mask: the places of prompts, and of what was sampled.
      logprobs: of the sampled tokens under the model itself, at temperature 1 with nothing cut; 0 in
        other places.
      processed_logprobs: of the chances that they were drawn with, after biases, penalties, bans, the
        temperature and truncation; likewise.
      versions: of the weights that each token was sampled with (`Engine.update_params`); -1 in places
        that were not sampled.
      finish_reasons: `FinishReason` of each sample, as a number.
      prompt_lengths, completion_lengths: in tokens.
      prompts: the number of each sample's prompt; indices: its number among that prompt's samples.
      completions: the samples in this order, with their texts.
    """

    tokens: Int32[np.ndarray, "N T"]
    prompt_mask: Bool[np.ndarray, "N T"]
    completion_mask: Bool[np.ndarray, "N T"]
    logprobs: Float32[np.ndarray, "N T"]
    processed_logprobs: Float32[np.ndarray, "N T"]
    versions: Int32[np.ndarray, "N T"]
    finish_reasons: Int32[np.ndarray, " N"]
    prompt_lengths: Int32[np.ndarray, " N"]
    completion_lengths: Int32[np.ndarray, " N"]
    prompts: Int32[np.ndarray, " N"]
    indices: Int32[np.ndarray, " N"]
    completions: tuple[Completion, ...]

    @classmethod
    def empty(
        cls, completions: Sequence[Completion], prompts: Sequence[int], length: int, pad_token: int
    ) -> "RolloutBatch":
        """Rows of `length` places for these samples, in which nothing is filled in yet."""
        shape, count = (len(completions), length), len(completions)
        return cls(
            tokens=np.full(shape, pad_token, np.int32),
            prompt_mask=np.zeros(shape, bool),
            completion_mask=np.zeros(shape, bool),
            logprobs=np.zeros(shape, np.float32),
            processed_logprobs=np.zeros(shape, np.float32),
            versions=np.full(shape, NO_VERSION, np.int32),
            finish_reasons=np.asarray([each.finish_reason for each in completions], np.int32),
            prompt_lengths=np.zeros(count, np.int32),
            completion_lengths=np.zeros(count, np.int32),
            prompts=np.asarray(prompts, np.int32),
            indices=np.zeros(count, np.int32),
            completions=tuple(completions),
        )

    @property
    def texts(self) -> list[str]:
        """The text of each sample."""
        return [each.text for each in self.completions]

    def reasons(self) -> list[FinishReason]:
        """The finish reason of each sample."""
        return [each.finish_reason for each in self.completions]


def pack(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    samples: Sequence[Sequence[Completion]],
    *,
    length: int | None = None,
    multiple_of: int = 64,
    pad_token: int = 0,
) -> RolloutBatch:
    """Packs the samples of some prompts, each array padded once.

    Args:
      model: that encodes prompts that are texts or messages.
      prompts: as they were submitted.
      samples: of each prompt, with log-probabilities of both kinds (`logprobs="both"`).
      length: T, for one program of all batches; by default that of the longest row, rounded up.
      multiple_of: to which that is rounded up.
      pad_token: in places after the end.

    Raises:
      ValueError: not as many prompts as lists of samples, no samples, one without log-probabilities
        of both kinds, or one that is longer than `length`.
    """
    if len(prompts) != len(samples):
        raise ValueError(
            f"there are {len(prompts)} prompts and samples of {len(samples)}; give a list for each"
        )
    multiple_of = as_integer("multiple_of", multiple_of, 1, INT32_MAX)
    numbers = [number for number, of_one in enumerate(samples) for _ in of_one]
    completions = [each for of_one in samples for each in of_one]
    if not completions:
        raise ValueError("there are no samples; give at least one")
    tokens = [prompt_tokens(model, prompt) for prompt in prompts]
    sizes = [len(tokens[n]) + len(c.tokens) for n, c in zip(numbers, completions, strict=True)]
    longest = max(sizes)
    given = -(-longest // multiple_of) * multiple_of if length is None else length
    given = as_integer("length", given, 1, INT32_MAX)
    if longest > given:
        row = sizes.index(longest)
        raise ValueError(
            f"length is {given}, but sample {completions[row].index} of prompt {numbers[row]} has "
            f"{longest} tokens with its prompt; give at least that, or lower max_new_tokens"
        )
    pad_token = as_integer("pad_token", pad_token, 0, model.config.vocab_size - 1)
    batch = RolloutBatch.empty(completions, numbers, given, pad_token)
    for row, (number, each) in enumerate(zip(numbers, completions, strict=True)):
        _fill(batch, row, tokens[number], each)
    return batch


def _fill(batch: RolloutBatch, row: int, prompt: np.ndarray, sample: Completion) -> None:
    if sample.logprobs is None or sample.processed_logprobs is None:
        raise ValueError(
            f"sample {sample.index} of prompt {batch.prompts[row]} has no log-probabilities of both "
            "kinds; sample with logprobs='both'"
        )
    start, size = len(prompt), len(sample.tokens)
    own = slice(start, start + size)
    batch.tokens[row, :start], batch.prompt_mask[row, :start] = prompt, True
    batch.tokens[row, own], batch.completion_mask[row, own] = sample.tokens, True
    batch.logprobs[row, own] = sample.logprobs
    batch.processed_logprobs[row, own] = sample.processed_logprobs
    batch.versions[row, own] = sample.versions
    batch.prompt_lengths[row], batch.completion_lengths[row] = start, size
    batch.indices[row] = sample.index
