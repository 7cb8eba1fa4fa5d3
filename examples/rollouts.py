"""Trains the embedded model by reward for a few steps: groups of samples of each prompt from an engine,
whose weights follow those that are trained.

    python examples/rollouts.py [STEPS]

The reward is for a sum that is right. It prints for each step the share of right answers and the
version of the weights that they were sampled with.
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare import Sampler, models
from jaxshare.models import Decoder, LoadedModel
from jaxshare.serving.engine import Engine
from jaxshare.serving.evaluation import arithmetic
from jaxshare.serving.inputs import encode_messages
from jaxshare.serving.rollouts import RolloutBatch, rollout

PROMPTS, SAMPLES, NEW_TOKENS, LENGTH = 8, 8, 80, 192
RATE = 0.02


def question(rng: np.random.Generator) -> tuple[str, int]:
    """A sum, asked for as the model was taught, and what it is."""
    a, b = rng.integers(10, 90, 2).tolist()
    return f"{arithmetic.instruction(1)}\n1. {a} + {b}", a + b


def advantages(batch: RolloutBatch, right: list[int]) -> tuple[np.ndarray, float]:
    """Each sample's reward against those of its prompt's other samples, and the share of right ones."""
    told = [re.findall(r"\d+", text) for text in batch.texts]
    pairs = zip(told, batch.prompts, strict=True)
    rewards = np.asarray([str(right[prompt]) in found[-1:] for found, prompt in pairs], np.float32)
    groups = rewards.reshape(-1, SAMPLES)
    spread = groups.std(axis=1, keepdims=True) + 1e-4
    return ((groups - groups.mean(axis=1, keepdims=True)) / spread).ravel(), float(rewards.mean())


def make_step(model: LoadedModel):
    """The jitted step of training: the clipped objective of GRPO, and gradient descent."""
    decoder = Decoder(model.config)

    def loss(params, tokens, mask, gains, sampled_with):
        logits = decoder.apply(params, tokens[:, :-1], method="causal")
        chosen = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(chosen, tokens[:, 1:, None], axis=-1)[..., 0]
        ratio = jnp.exp(chosen - sampled_with[:, 1:])
        clipped = jnp.clip(ratio, 0.8, 1.2)
        gain = jnp.minimum(ratio * gains[:, None], clipped * gains[:, None])
        sampled = mask[:, 1:].astype(jnp.float32)
        return -jnp.sum(gain * sampled) / jnp.sum(sampled)

    @jax.jit
    def step(params, *batch):
        grads = jax.grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads)

    return step


def main(steps: int) -> None:
    """Samples, rewards, trains and updates the engine, so many times."""
    model = models.load("embedded", dtype="float32")
    params, step = model.params, make_step(model)
    rng = np.random.default_rng(0)
    with Engine(model, max_rows=16) as engine:
        for number in range(steps):
            texts, right = zip(*(question(rng) for _ in range(PROMPTS)), strict=True)
            prompts = [
                encode_messages(model, [{"role": "user", "content": text}]) for text in texts
            ]
            batch = rollout(
                engine,
                prompts,
                n=SAMPLES,
                sampler=Sampler(1.0),
                max_new_tokens=NEW_TOKENS,
                seed=number,
                length=LENGTH,
            )
            gains, share = advantages(batch, [*right])
            arrays = (batch.tokens, batch.completion_mask, gains, batch.logprobs)
            params = step(params, *arrays)
            version = int(batch.versions[batch.completion_mask].max())
            print(f"step {number}: {share:.0%} right, weights of version {version}")
            engine.update_params(params)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
