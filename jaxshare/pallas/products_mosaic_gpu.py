"""The two products of attention, as a warpgroup of a Mosaic GPU kernel computes them.

Hopper has wgmma, which reads its second operand, or both, from shared memory. Blackwell has none:
there each warp multiplies 16 queries with `mma.sync`, whose operands are in registers. Accumulators
of both lie in registers alike, so that all that is done between the products is the same.
"""

from collections.abc import Callable
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

_PINNED = "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p fence.acq_rel.cta; mov.f32 $0, $1; }"
"""PTX that copies a number and has an effect, a harmless one, where it is negative, which sums of
weights never are."""

INTERPRETER_LACKS = {
    "wgmma that adds to an accumulator in registers (run_state)": "a plain product, added",
    "mma.sync": "a plain product",
    "products that go on while others are made (wgmma_accumulator_load)": "one after the other",
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
            found = jnp.dot(queries[...], keys[...].T, preferred_element_type=jnp.float32)
            plgpu.commit_smem()  # as wgmma reads
            return found
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

    def overlapped(
        self,
        scored: tuple[Any, Any],
        mixed: tuple[Float[Array, "64 D"], Float[Array, "64 tile"], Any],
        state: tuple[Float[Array, " 64"], Float[Array, " 64"]],
        *,
        issued: Callable[[], None],
        weigh: Callable[..., tuple[Array, ...]],
    ) -> tuple[Float[Array, "64 D"], tuple[Array, ...]]:
        """Both products at once by wgmma, the second of which goes on while weights are made of the
        first.

        Args:
          scored: queries and keys, as `scores` takes them.
          mixed: what `add` takes; weights in the dtype of values.
          state: the maximum and the sum of weights so far.
          issued: called once both are under way.
          weigh: takes scores and `state`; returns new ones, a factor of each row, and weights in
            float32.

        Returns:
          What `add` returns, and what `weigh` does.
        """
        plgpu, (queries, keys), (so_far, weights, values) = self.plgpu, scored, mixed
        if self.interpret:  # INTERPRETER_LACKS
            issued()
            found = weigh(self.scores(queries, keys), *state)
            return self.add(so_far, weights, values), found

        def multiply(refs: tuple[Any, ...]) -> None:
            mixed_ref, *found_refs = refs

            def weighed(scores_ref: Any) -> tuple[Array, ...]:
                plgpu.wgmma(scores_ref, queries, keys.transpose((1, 0)))
                plgpu.wgmma(mixed_ref, weights, values)
                issued()
                return weigh(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1), *state)

            shape = WARPGROUP, keys.shape[0]
            found = pl.run_scoped(weighed, plgpu.ACC(shape, jnp.float32))
            # LLVM, and then ptxas, would make weights after the wait for the second product, which
            # is at the end of this function.
            top, total, *more = lax.optimization_barrier(found)
            for ref, each in zip(found_refs, (top, self._pinned(total), *more), strict=True):
                ref[...] = each

        like = (*state, state[1], weights.astype(jnp.float32))
        so_far, *found = pl.run_state(multiply)((plgpu.ACC.init(so_far), *like))
        # Only now may weights in fewer bits be made: they take registers that the second product
        # reads until its end. Where ptxas sees them written before, it lets wgmma wait for each other.
        return so_far, tuple(lax.optimization_barrier(found))

    def _pinned(self, total: Float[Array, " 64"]) -> Float[Array, " 64"]:
        """Sums of weights, which are there before any wait that follows."""
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        layout = self.plgpu.Layout.WGMMA.reduce(1)

        @self.plgpu.inline_mgpu(
            arg_types=(layout,),
            return_type=self.plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=layout),
        )
        def pinned(_: Any, given: Any) -> Any:
            word, found = ir.IntegerType.get_signless(32), np.empty_like(given.registers)
            zero = arith.constant(word, ir.IntegerAttr.get(word, 0))
            for at, register in np.ndenumerate(given.registers):
                one = llvm.extractelement(register, zero)
                one = llvm.inline_asm(one.type, [one], _PINNED, "=f,f", has_side_effects=True)
                found[at] = llvm.insertelement(llvm.mlir_undef(register.type), one, zero)
            return mgpu.FragmentedArray(_registers=found, _layout=given.layout, _is_signed=None)

        return pinned(total)

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
            found = mixed + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
            plgpu.commit_smem()  # as wgmma reads
            return found
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
