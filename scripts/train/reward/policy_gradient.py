"""The policy gradient of GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1) over traces.

Samples of one prompt are a group, and a sample's advantage is its reward against those of its group.
With G samples o_i of a prompt, of |o_i| tokens each, what is maximised is the mean over samples of

    1 / |o_i| sum_t min(r A_i, clip(r, 1 - low, 1 + high) A_i) - kl (q / p - log(q / p) - 1)

where r is the chance p of a token now over that when it was sampled, and q that of the reference
policy (the estimator k3 of the divergence, which is never negative). Two variants of the rest:

- "grpo": A_i = (R_i - mean) / deviation of the group's rewards, as published.
- "dr-grpo" (arXiv:2503.20783): A_i = R_i - mean, and a constant in place of |o_i|, so that neither
  easy prompts nor short wrong samples count for more.

A sample is the sampled tokens of a trace, all of its workers together; samples of a prompt that is
read once are rows of one trace. So one pass gives the gradients of both, and a prompt is computed
once for its group.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare.models.layers import Decoder
from jaxshare.serving.rollouts import RolloutBatch
from jaxshare.trace.attention import TraceBatch
from jaxshare.trace.recorder import Recorder
from scripts.train.lessons import Shape, batch, first_fit, pack
from scripts.train.pair_attention import Pairs, logits
from scripts.train.sessions import Lesson

VARIANTS = ("grpo", "dr-grpo")
NAMES = ("objective", "clipped", "drift", "divergence", "tokens")
"""The numbers that `add_gradients` sums: the objective over samples, and over tokens those that were
clipped, k3 against the policy that sampled them and against the reference."""
_DEVIATION = 1e-6
"""Added to the deviation of a group's rewards."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """The settings of what is maximised.

    Attributes:
      low, high: how far the ratio of chances may fall and rise before it is clipped.
      kl: the weight of the divergence from the reference policy.
      temperature: of the policy; its tokens were sampled at it.
      dtype: of computation; parameters and their gradients are float32.
    """

    low: float = 0.2
    high: float = 0.2
    kl: float = 0.0
    temperature: float = 1.0
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Episode:
    """Samples in one trace. A tokens were sampled.

    Attributes:
      lesson: the trace, and the tokens; their weights are 1 / |o_i|, or the constant in its place.
      sampled_with: float32[A], their log-probabilities when they were sampled.
      advantages: float32[A], of each token's sample.
      samples: their number.
    """

    lesson: Lesson
    sampled_with: np.ndarray
    advantages: np.ndarray
    samples: int


LearningBatch = tuple[TraceBatch, Pairs, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""A batch of `lessons.Batch`, and of each of its tokens the log-probability when it was sampled and
the advantage, float32[1, T]."""


def advantages(rewards: np.ndarray, variant: str = VARIANTS[0]) -> np.ndarray:
    """The advantages of groups of samples.

    Args:
      rewards: float[P, G], NaN for samples that are left out.
      variant: one of `VARIANTS`.

    Returns:
      float32[P, G]: NaN for the same ones, and for all of a group that teaches nothing, because its
      rewards are equal or fewer than two.
    """
    counts = np.sum(np.isfinite(rewards), axis=1, keepdims=True)
    total = np.nansum(rewards, axis=1, keepdims=True)
    found = rewards - total / np.maximum(counts, 1)
    spread = np.nanmax(np.where(counts, np.abs(found), 0.0), axis=1, keepdims=True, initial=0.0)
    if variant == "grpo":
        squares = np.nansum(found**2, axis=1, keepdims=True) / np.maximum(counts, 1)
        found = found / (np.sqrt(squares) + _DEVIATION)
    return np.where((counts > 1) & (spread > _DEVIATION), found, np.nan).astype(np.float32)


def widest(rewards: np.ndarray, count: int) -> np.ndarray:
    """Leaves out all but `count` samples of each group, those whose rewards vary most.

    They are some of the highest and some of the lowest (arXiv:2504.13818, "max-variance
    down-sampling"): samples cost little beside gradients, and of a group of which one sample in ten
    is right more is learned from that one and a few others than from all.

    Args:
      rewards: float[P, G], NaN for samples that are left out.
      count: of samples to keep.

    Returns:
      The rewards, NaN for those left out now as well.
    """
    found = np.full_like(rewards, np.nan)
    for group, kept in zip(rewards, found, strict=True):
        order = np.argsort(group, kind="stable")[: np.isfinite(group).sum()]
        few = min(count, len(order))
        choices = [[*order[:low], *order[len(order) - few + low :]] for low in range(few + 1)]
        best = max(choices, key=lambda chosen: np.var(group[chosen]) if chosen else 0.0)
        kept[best] = group[best]
    return found


def group_episodes(
    sampled: RolloutBatch, gains: np.ndarray, shape: Shape, length: int | None = None
) -> list[Episode]:
    """The samples of a rollout as episodes, the prompt of each group read once.

    Args:
      sampled: P prompts of G samples each.
      gains: float32[P, G], advantages; NaN leaves a sample out.
      shape: of the batches; a group that is larger is divided.
      length: that takes the place of |o_i|.

    Raises:
      ValueError: a prompt leaves no room in a batch for a sample.
    """
    found = []
    of_prompt = sampled.prompts
    for number, own in enumerate(gains):
        [rows] = np.nonzero(of_prompt == number)
        rows, kept = rows[np.isfinite(own)], own[np.isfinite(own)]
        if not len(rows):
            continue
        longest = int(sampled.completion_lengths[rows].max())
        room = shape.tokens - int(sampled.prompt_lengths[rows[0]])
        each = min(room // longest, shape.blocks - 1)
        if each < 1:
            raise ValueError(
                f"--tokens is {shape.tokens}, but a prompt and its sample have "
                f"{shape.tokens - room + longest}; give at least that"
            )
        for first in range(0, len(rows), each):
            part = slice(first, first + each)
            found.append(_episode(sampled, rows[part], kept[part], length))
    return found


def _episode(
    sampled: RolloutBatch, rows: np.ndarray, gains: np.ndarray, length: int | None
) -> Episode:
    start = int(sampled.prompt_lengths[rows[0]])
    prompt = sampled.tokens[rows[0], :start].tolist()
    written = [sampled.tokens[row, sampled.completion_mask[row]] for row in rows]
    recorder = Recorder(1 + len(rows))
    recorder.text(prompt, 0)
    # The last token of a sample has no successor, so it is not fed.
    fed = recorder.feed(
        [each[:-1].tolist() for each in written], [[0, 1 + i] for i in range(len(rows))]
    )
    at = [np.concatenate([[start - 1], np.asarray(numbers, np.int32)]) for numbers in fed]
    sizes = [len(each) for each in written]
    mask = sampled.completion_mask
    lesson = Lesson(
        recorder.trace(),
        np.concatenate(at).astype(np.int32),
        np.concatenate(written).astype(np.int32),
        np.concatenate([np.full(size, 1 / (length or size), np.float32) for size in sizes]),
    )
    return Episode(
        lesson,
        np.concatenate([sampled.processed_logprobs[row, mask[row]] for row in rows]),
        np.repeat(gains, sizes).astype(np.float32),
        len(rows),
    )


def batches(episodes: Sequence[Episode], shape: Shape) -> list[tuple[LearningBatch, int]]:
    """Episodes packed side by side into batches of one shape, each with its number of samples.

    Raises:
      ValueError: an episode that is larger.
    """
    ordered = sorted(episodes, key=lambda episode: -episode.lesson.trace.num_tokens)
    bins = [
        [ordered[i] for i in held]
        for held in first_fit([episode.lesson for episode in ordered], shape)
    ]
    return [(_batch(held, shape), sum(episode.samples for episode in held)) for held in bins]


def _batch(held: Sequence[Episode], shape: Shape) -> LearningBatch:
    packed = batch(pack([episode.lesson for episode in held]), shape)
    size = packed[2].shape[1]
    rest = (
        np.concatenate([getattr(episode, name) for episode in held])
        for name in ("sampled_with", "advantages")
    )
    sampled_with, gains = (np.pad(each, (0, size - len(each)))[None] for each in rest)
    return (*packed, sampled_with, gains)


def chosen_logprobs(
    params: dict, module: Decoder, objective: Objective, learned: LearningBatch
) -> Array:
    """The log-probabilities of the sampled tokens under a policy, float32[1, T]."""
    traces, pairs, at, targets = learned[:4]
    cast = jax.tree.map(lambda p: p.astype(objective.dtype), params)
    found = logits(module, cast, traces, pairs, jnp.asarray(at)) / objective.temperature
    chosen = jnp.take_along_axis(found, jnp.asarray(targets)[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(found, axis=-1)


@functools.partial(jax.jit, static_argnames=("module", "objective"))
def score(params: dict, learned: LearningBatch, module: Decoder, objective: Objective) -> Array:
    """See `chosen_logprobs`."""
    return chosen_logprobs(params, module, objective, learned)


def objective_of(
    logprobs: Array,
    sampled_with: Array,
    reference: Array,
    gains: Array,
    weights: Array,
    objective: Objective,
) -> tuple[Array, dict[str, Array]]:
    """What is maximised, summed over samples; see the module.

    Args:
      logprobs, sampled_with, reference: float32[..., T], of the tokens now, when they were sampled, and
        under the reference policy.
      gains: float32[..., T], the advantages.
      weights: float32[..., T], as `Episode.lesson` has them; 0 for padding.
      objective: the settings.

    Returns:
      The sum, and sums over tokens for those of `NAMES` that follow the objective.
    """
    real = weights > 0
    ratio = jnp.exp(jnp.where(real, logprobs - sampled_with, 0.0))
    clipped = jnp.clip(ratio, 1.0 - objective.low, 1.0 + objective.high)
    gain = jnp.minimum(ratio * gains, clipped * gains)
    divergence = _k3(jnp.where(real, reference - logprobs, 0.0))
    drift = _k3(jnp.where(real, sampled_with - logprobs, 0.0))
    total = jnp.sum(weights * (gain - objective.kl * divergence))
    sums = {
        "clipped": jnp.sum(jnp.where(real, gain < ratio * gains, False).astype(jnp.float32)),
        "drift": jnp.sum(drift),
        "divergence": jnp.sum(divergence),
        "tokens": jnp.sum(real.astype(jnp.float32)),
    }
    return total, sums


def _k3(difference: Array) -> Array:
    return jnp.exp(difference) - difference - 1.0


@functools.partial(jax.jit, static_argnames=("module", "objective"), donate_argnames=("total",))
def add_gradients(
    total: dict,
    params: dict,
    reference: dict | None,
    learned: LearningBatch,
    samples: Array,
    *,
    module: Decoder,
    objective: Objective,
) -> dict:
    """The gradients of the negative objective and the numbers of one more batch, added to a total.

    Args:
      total: `training.empty_sums(params, NAMES)`, or what came of the batch before.
      params: float32.
      reference: parameters of the reference policy; None without one, where kl is 0.
      learned: the batch; samples: float32[], how many it has.
      module: of the model.
      objective: the settings.
    """

    def loss(params: dict) -> tuple[Array, dict[str, Array]]:
        logprobs = chosen_logprobs(params, module, objective, learned)
        before = (
            jax.lax.stop_gradient(logprobs)
            if reference is None
            else chosen_logprobs(reference, module, objective, learned)
        )
        weights, sampled_with, gains = (jnp.asarray(each) for each in learned[4:])
        found, sums = objective_of(logprobs, sampled_with, before, gains, weights, objective)
        return -found, sums

    (negative, sums), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    new = {"gradients": gradients, "objective": -negative, "weight": samples, **sums}
    return jax.tree.map(jnp.add, total, new)
