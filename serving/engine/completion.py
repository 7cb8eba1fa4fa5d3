"""Completions: what was sampled for a prompt, by the engine or by a run over a tree of prompts."""

import dataclasses
from collections.abc import Sequence

from jaxshare import FinishReason
from jaxshare.deprecated import warn_renamed


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt.

    Attributes:
      text: the decoded tokens without the stop token, cut before a stop text; "" where the model
        has no tokenizer.
      tokens: as they were sampled: a stop token is the last of them. With a stop text they end with
        the token that completes it.
      finish_reason: the reason why no more was sampled; RUNNING for an unfinished one.
      logprob: of all its tokens together, under the model itself (temperature 1, nothing cut), or
        with `logprobs="processed"` as they were drawn; None where it was not asked for.
      prompt: number of the prompt that it continues: its index in the list, or among the ends of a
        tree, depth first.
      index: its number among the prompt's n completions.
      prompt_tokens: tokens of the prompt.
      reused_tokens: those of them that the engine had cached.
      replayed_tokens: tokens of the completion that came out of the Logits Cache.
      preemptions: the number of times that the request was preempted by another.
      first_token_seconds, seconds: from the submission to the engine to the first token, and to the
        end. Of a run over a tree they are None and 0: it counts the time of all together.
      queue_seconds: from the submission until there were a row and memory; None for a request that had
        none, because it was cancelled before or the Logits Cache had all of it, and of such a run.
      error: the exception where `finish_reason` is ERROR.
      logprobs: of each token, or None.
      processed_logprobs: of each token as it was drawn, where both kinds were asked for; then `logprobs`
        and `logprob` are under the model itself.
      version_runs: (number of tokens, version of the engine's weights), one after the other; see
        `versions`.
      restarts: the number of times that tokens were sampled anew, because the weights had changed.
      top_logprobs: for each token the likeliest tokens in its place and their log-probabilities,
        the likeliest first, without those that have no chance; None where they were not asked for.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprob: float | None = None
    prompt: int = 0
    index: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    replayed_tokens: int = 0
    preemptions: int = 0
    first_token_seconds: float | None = None
    seconds: float = 0.0
    error: Exception | None = None
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    processed_logprobs: tuple[float, ...] | None = None
    version_runs: tuple[tuple[int, int], ...] = ()
    restarts: int = 0
    queue_seconds: float | None = None

    @property
    def versions(self) -> tuple[int, ...]:
        """For each token the version of the weights that it was sampled with: 0 for those that an
        engine was made with, or as `Engine.update_params` has returned."""
        return tuple(version for count, version in self.version_runs for _ in range(count))

    @property
    def reason(self) -> str:
        """The former name of `finish_reason`, with the former words: "stop" or "budget"."""
        warn_renamed("Completion.reason", "Completion.finish_reason")
        length = self.finish_reason is FinishReason.LENGTH
        return "budget" if length else str(self.finish_reason)

    @property
    def end(self) -> FinishReason:
        """The former name of `finish_reason`."""
        warn_renamed("RequestOutput.end", "Completion.finish_reason")
        return self.finish_reason


def without_stop(tokens: Sequence[int], finish_reason: FinishReason) -> Sequence[int]:
    """The tokens of a completion that are text: all but a stop token at the end."""
    return tokens[:-1] if finish_reason is FinishReason.STOP else tokens
