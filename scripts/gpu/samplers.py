"""Sampling alone, as a program to compile for a GPU."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxshare import Sampler, Samplers
from jaxshare.decoding.history import History
from scripts.gpu.programs import Traced, shapes

ROWS, VOCAB = 64, 128_256
"""Of a large batch, and Llama 3's."""
CUT = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05}
SAMPLERS = {
    "top-k, top-p, min-p": Sampler(**CUT),
    "and penalties": Sampler(
        **CUT, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    ),
}
"""Settings by name. Numbers are data: only whether texts are counted makes another program."""


def sampling(sampler: Sampler) -> Traced:
    """One draw of each row; arguments samplers, logits, history, seeds, positions."""
    stacked = Samplers.stack([sampler] * ROWS)
    history = History.for_samplers([sampler] * ROWS, [1024] * ROWS, VOCAB)

    def sample(
        samplers: Samplers, logits: jax.Array, history: History, seeds: Any, positions: Any
    ) -> jax.Array:
        return samplers.sample(logits, seeds, positions, history=history)

    numbers = (
        jax.ShapeDtypeStruct((ROWS, VOCAB), jnp.float32),
        jax.ShapeDtypeStruct((ROWS, 2), jnp.uint32),
        jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    )
    return sample, (shapes(stacked), numbers[0], shapes(history), *numbers[1:])
