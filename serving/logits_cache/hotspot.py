"""Hotspots (Hive, section 6.2): the positions of an answer where sampling again may change it, and
what drawing only there costs."""

import dataclasses

import numpy as np

from jaxshare.decoding.sampling import Sampler
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.serving.logits_cache.replay import probabilities


@dataclasses.dataclass(frozen=True)
class Hotspot:
    """Which positions of an answer are worth drawing again (equations 2 to 4).

    Position t of n scores H_t (1 - c_t) exp(-decay t / n): the entropy of its distribution (what is
    not kept counts as one token), times what its likeliest token leaves to others, with a discount
    for late positions. The paper's own formula is lost; this one favours, as it says, positions
    that are both uncertain and weakly peaked (a product is large only where both are) and slightly
    earlier ones (t / n, so that `decay` means the same at every length). Scores are divided by the
    largest of the answer: the paper's threshold is one of normalised scores.

    Attributes:
      decay: how much less the last position counts, at least 0; exp(-decay).
      threshold: normalised scores above it are hot.
      top_k: take this many of the highest scores instead, at least 0.

    Raises:
      ValueError: a negative decay or top_k.
    """

    decay: float = 0.5
    threshold: float = 0.6
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.decay < 0 or (self.top_k is not None and self.top_k < 0):
            raise ValueError(
                f"decay is {self.decay} and top_k {self.top_k}; neither may be negative"
            )

    def find(self, kept: TopLogits, sampler: Sampler) -> np.ndarray:
        """bool[n]: the hot ones of n distributions, as `sampler` sees them; temperature above 0."""
        chances, rest = probabilities(kept, sampler)
        n = len(rest)
        chances = np.concatenate([chances, rest[:, None]], axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(chances > 0, chances * np.log(chances), 0).sum(axis=1)
        score = (
            entropy
            * (1 - chances[:, :-1].max(axis=1))
            * np.exp(-self.decay * np.arange(n) / max(n, 1))
        )
        if self.top_k is not None:
            hot = np.zeros(n, bool)
            hot[np.argsort(-score, kind="stable")[: self.top_k]] = True
            return hot & (score > 0)
        return score > self.threshold * score.max(initial=0)


USUAL = Hotspot()
"""With the paper's threshold."""


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far hotspot sampling along one continuation is from fresh sampling, as total variation; 0
    is the same, 1 has nothing in common.

    Attributes:
      positions: float64[n], at each position, given the tokens before it: 0 where it is resampled,
        elsewhere the chance of any other token than the one that is taken unasked.
      sequence: of whole outputs: the chance that fresh sampling leaves the continuation first at a
        position that is not resampled. Until then both can draw alike, and after another turn both
        are the model's; and hotspot sampling never does that.
    """

    positions: np.ndarray
    sequence: float

    @classmethod
    def of(
        cls, kept: TopLogits, sampler: Sampler, tokens: np.ndarray, hot: np.ndarray
    ) -> "Distance":
        """Of taking `tokens` [n] unasked wherever it is not `hot`; temperature above 0.

        Exact where `jaxshare.serving.logits_cache.replay.probabilities` is.
        """
        chances, _ = probabilities(kept, sampler)
        own = np.where(np.asarray(kept.tokens) == tokens[:, None], chances, 0).sum(axis=1)
        positions = np.where(hot, 0.0, 1 - own)
        stayed = np.concatenate([[1.0], np.cumprod(own)[:-1]]) if len(own) else own
        return cls(positions, float(stayed @ positions))

    @property
    def mean(self) -> float:
        """Over the positions; 0 where there are none."""
        return float(self.positions.mean()) if len(self.positions) else 0.0
