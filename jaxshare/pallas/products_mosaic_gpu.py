"""The two products of attention, as a warpgroup of a Mosaic GPU kernel computes them.

Hopper has wgmma, which reads its second operand, or both, from shared memory. Blackwell has none:
there each warp multiplies 16 queries with `mma.sync`, whose operands are in registers. Accumulators
of both lie in registers alike, so that all that is done between the products is the same.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from jaxshare.pallas.device import Device
from jaxshare.pallas.items_mosaic_gpu import WARPGROUP

COLUMNS = 64
"""The entries of keys and values that are in registers at once where operands are: those of a
pattern of swizzling, or fewer."""
TOKENS = 16
"""The tokens whose keys or values are: few, since results and scores take most registers."""
WIDEST, WIDEST_OF_CODES = 256, 128
"""The head dims up to which they fit, of an exact cache and of one that approximates."""

INTERPRETER_LACKS = {
    "wgmma that adds to an accumulator in registers (run_state)": "a plain product, added",
    "mma.sync": "a plain product",
}
"""The operations of these products, and of those of the kernel for latents, that Mosaic GPU's
interpreter lacks, and their replacements when they are interpreted."""


def multiplies_by_warps(device: Device) -> bool:
    """True for a GPU that has no wgmma."""
    return device.capability >= 100


class WarpgroupProducts(NamedTuple):
    """How a warpgroup multiplies.

    Attributes:
      plgpu: Pallas' Mosaic GPU module.
      by_warps: `mma.sync` is taken in place of wgmma.
      interpret: kernels are interpreted.
    """

    plgpu: Any
    by_warps: bool
    interpret: bool

    @classmethod
    def of(cls, plgpu: Any, device: Device) -> "WarpgroupProducts":
        """The products of a GPU."""
        return cls(plgpu, multiplies_by_warps(device), device.interpret)

    def scores(self, queries: Any, keys: Any) -> Float[Array, "64 tile"]:
        """queries [64, D] times keys [tile, D], refs of shared memory, in float32."""
        plgpu, (tile, dim) = self.plgpu, keys.shape
        if not self.by_warps:

            def multiply(ref: Any) -> Array:
                plgpu.wgmma(ref, queries, keys.transpose((1, 0)))
                return ref[...]

            return pl.run_scoped(multiply, plgpu.ACC((WARPGROUP, tile), jnp.float32))
        if self.interpret:  # INTERPRETER_LACKS
            return jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)
        layout, dtype = plgpu.Layout, queries.dtype
        columns = min(dim & -dim, COLUMNS)
        zero = jnp.zeros((WARPGROUP, TOKENS), jnp.float32)
        found = [plgpu.layout_cast(zero, layout.WGMMA) for _ in range(0, tile, TOKENS)]
        for i in range(0, dim, columns):
            here = pl.ds(i, columns)
            left = plgpu.load(queries.at[:, here], layout=layout.MMA_LHS(dtype))
            for j, part in enumerate(found):
                right = keys.at[pl.ds(j * TOKENS, TOKENS), here].transpose((1, 0))
                right = plgpu.load(right, layout=layout.MMA_RHS(dtype))
                found[j] = plgpu.mma(part, left, right)
        return lax.concatenate(found, 1)

    def operand(self, weights: Float[Array, "64 tile"], dtype: Any) -> Float[Array, "64 tile"]:
        """Weights in `dtype`, as `add` takes them."""
        if not self.by_warps or self.interpret:
            return weights.astype(dtype)
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils

        layout = self.plgpu.Layout.MMA_LHS(dtype)

        @self.plgpu.inline_mgpu(
            arg_types=(self.plgpu.Layout.WGMMA,),
            return_type=self.plgpu.ShapeDtypeStruct(weights.shape, dtype, layout=layout),
        )
        def renamed(_: Any, given: Any) -> Any:
            # Each thread has the same numbers of both layouts: tiles of eight columns become pairs.
            numbers = given.astype(utils.dtype_to_ir_type(jnp.dtype(dtype)))
            to = mgpu.MMALayouts(dtype).lhs
            registers = np.reshape(numbers.registers, to.registers_shape(given.shape))
            return mgpu.FragmentedArray(_registers=registers, _layout=to, _is_signed=None)

        return renamed(weights)

    def add(
        self, mixed: Float[Array, "64 D"], weights: Float[Array, "64 tile"], values: Any
    ) -> Float[Array, "64 D"]:
        """mixed + weights times values [tile, D], a ref of shared memory."""
        plgpu = self.plgpu
        if self.interpret:  # INTERPRETER_LACKS
            return mixed + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        if not self.by_warps:

            def mix(ref: Any) -> None:
                plgpu.wgmma(ref, weights, values)

            return pl.run_state(mix)(plgpu.ACC.init(mixed))
        layout, (tile, dim) = plgpu.Layout.MMA_RHS(weights.dtype), values.shape
        columns, found = min(dim & -dim, COLUMNS), []
        for j in range(0, dim, columns):
            part = mixed[:, j : j + columns]
            for i in range(0, tile, TOKENS):
                right = plgpu.load(values.at[pl.ds(i, TOKENS), pl.ds(j, columns)], layout=layout)
                part = plgpu.mma(part, weights[:, i : i + TOKENS], right)
            found.append(part)
        return lax.concatenate(found, 1)
