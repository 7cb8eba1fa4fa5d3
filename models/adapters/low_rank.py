"""Low-rank adapters in a pass whose rows have different ones, or none (LoRA, Hu et al. 2021, section
4.1; batches of several adapters as in Punica, Chen et al. 2023).

Adapters have places 1 to S - 1 of stacked matrices, whose shapes do not depend on what is there;
place 0 has zeros, for rows without an adapter. Which row has which place is data of the pass. So
one program serves any mix of adapters.

Axis letters: R rows, T new tokens of a row, S places, r the largest rank.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

ADAPTERS = "adapters"
"""The collection of variables with the stacked matrices of adapters. A module has those of its
linear layers, packed or not, under the names of their parts: {LORA_A: [S, r, in], LORA_B:
[S, out, r]}."""
LORA_A, LORA_B = "lora_a", "lora_b"

LayerAdapters = tuple[Mapping[str, Any], Int32[Array, " R"]]
"""The matrices of a layer, and the place of each row's adapter."""
_PAID = 16
"""Tokens whose products take as long as reading the matrix that they are products of."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowAdapters:
    """The adapters of a linear layer for the rows of a pass.

    Attributes:
      a: the first matrices.
      b: the second ones, multiplied by the scale of their adapters.
      rows: the place of each row's adapter.
    """

    a: Float[Array, "S r in"]
    b: Float[Array, "S out r"]
    rows: Int32[Array, " R"]

    def product(self, x: Float[Array, "R T in"]) -> Float32[Array, "R T out"]:
        """Returns what the rows' adapters add to the layer's output for x, in float32."""
        rows, tokens, _ = x.shape
        if _gathers(self.a.shape[0], rows, tokens):
            inner = _einsum("rti,rki->rtk", x, self.a[self.rows])
            return _einsum("rtk,rok->rto", inner.astype(x.dtype), self.b[self.rows])
        # All places at once, of which those that are not the row's count as 0.
        inner = _einsum("rti,ski->rtsk", x, self.a)
        own = self.rows[:, None] == jnp.arange(self.a.shape[0])
        inner = jnp.where(own[:, None, :, None], inner, 0).astype(x.dtype)
        return _einsum("rtsk,sok->rto", inner, self.b)


def _gathers(places: int, rows: int, tokens: int) -> bool:
    """Returns whether reading the matrices of each row takes less than multiplying all rows by those
    of all places."""
    return rows * (_PAID + tokens) <= places * (_PAID + rows * tokens)


def _einsum(form: str, x: Array, matrices: Array) -> Array:
    return jnp.einsum(form, x, matrices, preferred_element_type=jnp.float32)


def of_rows(adapters: LayerAdapters | None) -> dict[str, Any]:
    """Returns the variables that the linear layers of a layer find their `RowAdapters` in."""
    if adapters is None:
        return {}
    matrices, rows = adapters
    return {
        ADAPTERS: jax.tree.map(
            lambda each: RowAdapters(each[LORA_A], each[LORA_B], rows),
            dict(matrices),
            is_leaf=lambda each: LORA_A in each,
        )
    }


def adapter_of(module: nn.Module, name: str) -> RowAdapters | None:
    """Returns the adapters of a module's linear layer in the pass; None where rows have none."""
    return module.get_variable(ADAPTERS, name) if module.has_variable(ADAPTERS, name) else None


def adapted(
    y: Float[Array, "... out"], x: Float[Array, "... in"], adapters: RowAdapters | None
) -> Float[Array, "... out"]:
    """Returns a linear layer's output y for x with what adapters add to it, in y's dtype."""
    return y if adapters is None else y + adapters.product(x).astype(y.dtype)
