"""The requests of the server's benchmark, and its models."""

import dataclasses
from typing import Any

import numpy as np

from jaxshare.models import EMBEDDED, LoadedModel, load
from scripts.bench.parts.engine.random_model import forking_model

MODELS = ("embedded", "random")
TEMPERATURE = 0.7
MOST_PROMPT, MOST_OUTPUT = 1024, 768
"""Tokens that a request of the mix has at most."""

Request = dict[str, Any]
"""The `prompt` (tokens), `max_tokens`, `seed`, and `at`, the seconds after which it is sent."""


def load_model(name: str) -> LoadedModel:
    """The embedded model, or one of 108 M parameters with random weights and the embedded one's
    texts.

    The latter is certain of most tokens, and in float32: one that is certain of none would draw
    others where two programs round differently.
    """
    embedded = load(EMBEDDED)
    if name == "embedded":
        return embedded
    made = forking_model(0, dtype="float32")
    return dataclasses.replace(made, tokenizer=embedded.tokenizer, generation=embedded.generation)


def at_once(rng: np.random.Generator, count: int, prompt: int, tokens: int) -> list[Request]:
    """Requests of one size that are all sent at once, with prompts that have nothing in common."""
    return [_request(rng, prompt, tokens, 0.0) for _ in range(count)]


def mixed(rng: np.random.Generator, count: int, rate: float, scale: float) -> list[Request]:
    """Requests whose lengths are log-normal, as those of ShareGPT's dialogues nearly are, and which
    arrive by Poisson.

    Args:
      rng: random numbers.
      count: how many.
      rate: requests a second.
      scale: of the lengths; 1 for medians of 96 tokens of a prompt and 160 of an output.
    """
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    prompts = np.clip(rng.lognormal(np.log(96 * scale), 1.1, count), 4, MOST_PROMPT)
    outputs = np.clip(rng.lognormal(np.log(160 * scale), 0.9, count), 4, MOST_OUTPUT)
    return [
        _request(rng, int(prompt), int(tokens), float(at))
        for prompt, tokens, at in zip(prompts, outputs, arrivals, strict=True)
    ]


def _request(rng: np.random.Generator, prompt: int, tokens: int, at: float) -> Request:
    return {
        "prompt": rng.integers(3, 402, prompt).tolist(),  # tokens that both models have
        "max_tokens": tokens,
        "seed": int(rng.integers(2**31)),
        "at": at,
    }
