"""Hotspots (Hive, section 6.2): the positions of an output where sampling again may change it, and
the distance from fresh sampling when only these are sampled."""

import dataclasses

import numpy as np

from jaxshare.argument_checks import as_float, as_integer
from jaxshare.decoding.sampling_params import Sampler
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.serving.logits_cache.replay import (
    FIELDS,
    UNDECIDED,
    decide,
    probabilities,
    uniform_run,
)


@dataclasses.dataclass(frozen=True)
class Hotspot:
    """A rule for the positions of an output that are worth sampling again (equations 2 to 4).

    Position t of n scores H_t (1 - c_t) exp(-decay t / n): the entropy of its distribution (all
    tokens that are not kept count as one), times the probability of all but its likeliest token,
    with a discount for late positions. The paper's own formula is lost; this one favours, as the
    paper says, positions that are both uncertain and weakly peaked (a product is large only where
    both are) and slightly earlier ones (t / n, so that `decay` means the same at every length).
    Scores are divided by the largest of the output: the paper's threshold is one of normalised
    scores.

    Attributes:
      decay: the last position counts exp(-decay) of the first; at least 0.
      threshold: normalised scores above it are hot.
      top_k: this many of the highest scores are hot instead; at least 0.

    Raises:
      ValueError: a negative decay or top_k.
    """

    decay: float = 0.5
    threshold: float = 0.6
    top_k: int | None = None

    def __post_init__(self) -> None:
        for name in ("decay", "threshold"):
            object.__setattr__(self, name, as_float(name, getattr(self, name)))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", as_integer("top_k", self.top_k))
        if self.decay < 0 or (self.top_k is not None and self.top_k < 0):
            raise ValueError(
                f"decay is {self.decay} and top_k {self.top_k}; neither may be negative"
            )

    def find(self, top_logits: TopLogits, sampler: Sampler) -> np.ndarray:
        """bool[n]: the hot ones of n distributions under `sampler`; temperature above 0."""
        probs, rest = probabilities(top_logits, sampler)
        n = len(rest)
        probs = np.concatenate([probs, rest[:, None]], axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(probs > 0, probs * np.log(probs), 0).sum(axis=1)
        score = (
            entropy
            * (1 - probs[:, :-1].max(axis=1))
            * np.exp(-self.decay * np.arange(n) / max(n, 1))
        )
        if self.top_k is not None:
            hot = np.zeros(n, bool)
            hot[np.argsort(-score, kind="stable")[: self.top_k]] = True
            return hot & (score > 0)
        return score > self.threshold * score.max(initial=0)


USUAL = Hotspot()
"""The default rule, with the paper's threshold."""


def sampled_where_hot(
    top_logits: TopLogits, tokens: np.ndarray, sampler: Sampler, seed: int, rule: Hotspot
) -> list[int]:
    """The tokens of a continuation up to the first hot one that is sampled differently.

    Args:
      top_logits: its distributions; tokens: int32[n], its tokens.
      sampler, seed: of the row; its temperature is above 0.
      rule: the positions to sample again.

    Returns:
      The tokens, the different one included unless the top logits do not decide it.
    """
    hot = np.flatnonzero(rule.find(top_logits, sampler))
    picked = dataclasses.replace(
        top_logits, **{name: getattr(top_logits, name)[hot] for name in FIELDS}
    )
    sampled = decide(picked, sampler, uniform_run(seed, 0, len(tokens))[hot])
    changed = np.flatnonzero(sampled != tokens[hot])
    if not len(changed):
        return tokens.tolist()
    position, token = int(hot[changed[0]]), int(sampled[changed[0]])
    return [*tokens[:position].tolist(), *([] if token == UNDECIDED else [token])]


@dataclasses.dataclass(frozen=True)
class Distance:
    """The total variation between hotspot sampling along one continuation and fresh sampling.

    0 is the same distribution, 1 has nothing in common.

    Attributes:
      positions: float64[n], at each position, given the tokens before it: 0 where it is resampled,
        elsewhere the probability of all tokens but the continuation's.
      sequence: of whole outputs: the probability that fresh sampling leaves the continuation first
        at a position that is not resampled. Hotspot sampling never does that; until then both can
        sample the same, and after another token both follow the model.
    """

    positions: np.ndarray
    sequence: float

    @classmethod
    def of(
        cls, top_logits: TopLogits, sampler: Sampler, tokens: np.ndarray, hot: np.ndarray
    ) -> "Distance":
        """The distance if `tokens` [n] are taken wherever it is not `hot`; temperature above 0.

        Exact where `jaxshare.serving.logits_cache.replay.probabilities` is.
        """
        probs, _ = probabilities(top_logits, sampler)
        own = np.where(np.asarray(top_logits.tokens) == tokens[:, None], probs, 0).sum(axis=1)
        positions = np.where(hot, 0.0, 1 - own)
        stayed = np.concatenate([[1.0], np.cumprod(own)[:-1]]) if len(own) else own
        return cls(positions, float(stayed @ positions))

    @property
    def mean(self) -> float:
        """The mean over the positions; 0 where there are none."""
        return float(self.positions.mean()) if len(self.positions) else 0.0
