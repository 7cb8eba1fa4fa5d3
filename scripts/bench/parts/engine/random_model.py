"""The model of about 100 M parameters that the engine's benchmarks run, with random weights, and
with a realistic profile of entropy."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxshare.models import LoadedModel, load
from scripts.bench import sharing as bench_sharing
from scripts.bench.lib import write_checkpoint

MODEL = bench_sharing.MODEL
"""108 M parameters, a vocabulary of 32,000."""
FORKS = 0.05
"""The share of tokens after which the next one is uncertain."""
_CANDIDATES = 8
"""The most tokens to choose from after those."""
_CONSTANT = 8.0
"""One element of every embedding, in standard deviations of the others: what the head's bias is
multiplied with."""


def random_model(seed: int, *, dtype: str, model: dict[str, Any] = MODEL) -> LoadedModel:
    """A Llama with random weights, written as bfloat16 and loaded as `dtype`."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), model, seed)
        return load(folder, dtype)


def forking_model(
    seed: int,
    *,
    dtype: str,
    forks: float = FORKS,
    rejoin: float = 0.0,
    model: dict[str, Any] = MODEL,
) -> LoadedModel:
    """A Llama with random weights that is certain of most tokens and in doubt about a few, as
    language models are.

    Random weights alone give next to even distributions. Here embeddings outweigh what the layers
    add to them, and the head answers each token's embedding with a successor of its own, whose
    logit is some way above all others; after a share `forks` of the tokens it answers with two
    to eight successors that are close to each other. Beside them every token has the logit
    -log(rank), as the frequencies of words (Zipf). The layers' part depends on the whole text, and
    moves all of this a little: the same token is not followed by the same distribution twice.

    Texts that part at a fork have nothing in common from there on; but at a share `rejoin` of the
    forks all successors are followed by the same token, as where one thing can be said in several
    ways.
    """
    made = random_model(seed, dtype=dtype, model=model)
    rng = np.random.default_rng([seed, 2])
    vocab, hidden = made.config.vocab_size, made.config.hidden_size
    embedding = rng.standard_normal((vocab, hidden), np.float32)
    embedding[:, 0] = _CONSTANT
    # Of a normalised state the part along the last token's embedding is about `share` of its
    # length: the layers add the rest.
    share = 0.8
    answers = embedding / (hidden * share)
    answers[:, 0] = 0
    head = 0.02 * rng.standard_normal((vocab, hidden), np.float32)
    rarity = np.log(1 + rng.permutation(vocab)).astype(np.float32)
    head[:, 0] = -rarity / (_CONSTANT * share)
    margins = rng.uniform(6, 14, vocab).astype(np.float32)
    certain = rng.permutation(vocab)
    head[certain] += (margins + rarity[certain])[:, None] * answers
    ways = np.random.default_rng([seed, 6])
    for token in np.flatnonzero(rng.random(vocab) < forks):
        others = rng.choice(vocab, rng.integers(1, _CANDIDATES), replace=False)
        close = margins[token] - rng.exponential(1.0, len(others)).astype(np.float32)
        head[others] += (close + rarity[others])[:, None] * answers[token]
        if ways.random() < rejoin:
            for other in others:
                for sign, after in ((-1, certain[other]), (1, certain[certain[token]])):
                    head[after] += sign * (margins[other] + rarity[after]) * answers[other]
                certain[other] = certain[certain[token]]
    kept = dict(made.params["params"])
    kept["embed"] = {"embedding": jnp.asarray(embedding, dtype)}
    kept["head"] = {"kernel": jnp.asarray(head, dtype)}
    return dataclasses.replace(made, params={**made.params, "params": kept})


@dataclasses.dataclass(frozen=True)
class Profile:
    """The certainty of a model about its own text, sampled at temperature 1.

    Attributes:
      positions: that were looked at.
      certain: the share of them whose likeliest token has more than 0.9.
      nearly_zero: the share whose entropy is below 0.01 nats.
      entropy: in nats, the mean.
      upper_fifth: the entropy that a fifth of the positions is above.
    """

    positions: int
    certain: float
    nearly_zero: float
    entropy: float
    upper_fifth: float


def profile(logits: np.ndarray) -> Profile:
    """The profile of logits float[N, V]."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    weights = np.exp(shifted)
    shifted[weights == 0] = 0  # of what cannot be said
    total = weights.sum(axis=1, keepdims=True)
    entropy = np.log(total[:, 0]) - (weights * shifted).sum(axis=1) / total[:, 0]
    return Profile(
        len(logits),
        float(np.mean(1 / total[:, 0] > 0.9)),
        float(np.mean(entropy < 0.01)),
        float(entropy.mean()),
        float(np.quantile(entropy, 0.8)),
    )
