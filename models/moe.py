"""MoE: the settings of layers with a mixture of experts, and how a router chooses among these.

Axis letters: N tokens, E experts, K chosen experts of a token, G groups of experts.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from jaxshare.sharding import EXPERT, TENSOR

_TINY = 1e-20
"""Is added to a sum that is divided by, which may underflow where scores are sigmoids."""


@dataclasses.dataclass(frozen=True)
class MoE:
    """The mixture of experts of a model's layers.

    Attributes:
      num_experts: E.
      top_k: K, the experts that each token passes through.
      expert_size: the MLP units of one expert.
      normalise: divide a token's weights by their sum.
      scoring: "softmax" over all experts, "sigmoid" of each, or "chosen": softmax over the K
        experts with the largest logits.
      groups: the router chooses in two steps if this is greater than 1: groups, then experts in
        them (DeepSeek-V2, section 2.2.2).
      top_groups: groups that a token's experts are in.
      group_score: "max", the score of a group's best expert, or "top2", the sum of its best two.
      scaling: multiplies the weights.
      router_bias: the router adds a bias to its logits.
      choice_bias: a bias that counts in the choice of experts, not in their weights (DeepSeek-V3,
        section 2.1.2).
      shared_size: the MLP units of the expert that all tokens pass through; 0: there is none.
      shared_gate: its output is multiplied by a sigmoid of a product of the token.
      expert_bias: experts have biases.
      swiglu_limit: 0 for silu(gate) * up; else the bound of gpt-oss's
        clip(gate) * sigmoid(swiglu_alpha * clip(gate)) * (clip(up) + 1).
      swiglu_alpha: see `swiglu_limit`.
      held: the experts of one device, where they are split over a mesh; 0: all of them.
      axes: of the mesh, over which whole experts are split, the first of them outermost.
    """

    num_experts: int
    top_k: int
    expert_size: int
    normalise: bool
    scoring: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scaling: float = 1.0
    router_bias: bool = False
    choice_bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    expert_bias: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.0
    held: int = 0
    axes: tuple[str, ...] = ()

    @property
    def num_held(self) -> int:
        """The experts of this device."""
        return self.held or self.num_experts

    def on_each_of(self, expert: int, tensor: int) -> "MoE":
        """Returns the part of each device of a mesh: whole experts along `expert`, and along
        `tensor` where these divide over it; else a part of each. The shared one is split along
        `tensor` alone, since along `expert` each device computes tokens of its own."""
        sizes = {EXPERT: expert, TENSOR: tensor}
        whole = self.num_experts % (expert * tensor) == 0
        split = (EXPERT, TENSOR) if whole else (EXPERT,)
        return dataclasses.replace(
            self,
            shared_size=self.shared_size // tensor,
            expert_size=self.expert_size // (1 if whole else tensor),
            held=self.num_experts // math.prod(sizes[axis] for axis in split),
            axes=tuple(axis for axis in split if sizes[axis] > 1),
        )

    def divides_over(self, expert: int, tensor: int) -> bool:
        """Returns whether `on_each_of` these devices loses nothing."""
        whole = self.num_experts % (expert * tensor) == 0 or self.expert_size % tensor == 0
        return whole and self.num_experts % expert == 0 and self.shared_size % tensor == 0


def route(
    logits: Float32[Array, "N E"], choice_bias: Float32[Array, " E"] | None, moe: MoE
) -> tuple[Int32[Array, "N K"], Float32[Array, "N K"]]:
    """Chooses experts for each token.

    Returns:
      The experts of a token, and their weights: NaN if any of its logits is not finite, so that the
      error shows in its output.
    """
    scores = logits
    if moe.scoring != "chosen":
        scores = (jax.nn.softmax if moe.scoring == "softmax" else jax.nn.sigmoid)(logits)
    choice = scores if choice_bias is None else scores + choice_bias
    if moe.groups > 1:
        choice = _in_best_groups(choice, moe)
    expert = jax.lax.top_k(choice, moe.top_k)[1]
    weight = jnp.take_along_axis(scores, expert, axis=-1)
    weight = jax.nn.softmax(weight) if moe.scoring == "chosen" else weight
    if moe.normalise:
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + _TINY)
    finite = jnp.all(jnp.isfinite(logits), axis=-1, keepdims=True)
    return expert, jnp.where(finite, weight * moe.scaling, jnp.nan)


def _in_best_groups(choice: Float32[Array, "N E"], moe: MoE) -> Float32[Array, "N E"]:
    """The scores of experts in each token's best groups, and minus infinity for the others."""
    grouped = choice.reshape(choice.shape[0], moe.groups, -1)
    best = jax.lax.top_k(grouped, 2 if moe.group_score == "top2" else 1)[0].sum(axis=-1)
    chosen = jax.lax.top_k(best, moe.top_groups)[1]
    taken = jnp.any(jax.nn.one_hot(chosen, moe.groups, dtype=bool), axis=1)
    return jnp.where(taken[..., None], grouped, -jnp.inf).reshape(choice.shape)
