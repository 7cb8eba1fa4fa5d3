"""The common part of the tests of the GPU backends.

Kernels are interpreted on the CPU and compared with float64 numpy.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshare import block_attention, make_plan
from jaxshare.arena import append_tokens
from jaxshare.attention.api import with_work
from jaxshare.pallas.device import Device, assume_device
from jaxshare.sharding import STRIPE, make_mesh
from tests.core.attention.test_attention import Case, Shape, attended, in_pieces, place

TOLERANCE = {jnp.bfloat16: 4e-2, jnp.float16: 6e-3}
"""Absolute, for values of unit variance: keys, queries and weights are rounded to 2**-9 and 2**-12,
and scores reach 4."""

DECODE = Shape(
    rows=3,
    width=1,
    listed=3,
    blocks=4,
    heads=4,
    kv_heads=2,
    dim=64,
    arena=1536,
    rotary=64,
    dtype=jnp.bfloat16,
)
"""Narrow segments only: 6 queries at most."""
WIDE = Shape(
    rows=5,
    width=1,
    listed=2,
    blocks=6,
    heads=16,
    kv_heads=1,
    dim=64,
    arena=1024,
    rotary=64,
    dtype=jnp.bfloat16,
)
"""Blocks that all rows see have 80 queries, more than one warpgroup takes."""
PENDING = Shape(
    rows=1,
    width=33,
    listed=3,
    blocks=4,
    heads=4,
    kv_heads=1,
    dim=80,
    arena=1024,
    rotary=40,
    factor=1.2,
    dtype=jnp.float16,
)
"""132 queries a row: its own block is read in two segments, causally; half of each head is
rotated, and a head is no power of two, so that its codes have no swizzling."""
LATENT = Shape(
    rows=2,
    width=1,
    listed=2,
    blocks=3,
    heads=16,
    kv_heads=1,
    dim=576,
    arena=512,
    rotary=64,
    dtype=jnp.bfloat16,
    latent=True,
)
"""DeepSeek-V3's heads on one of eight devices: values are keys without what is rotated."""

SOME_LENGTHS = st.sampled_from([0, 1, 7, 63, 64, 65, 128, 200])


def compare(
    implementation: str, device: Device, shape: Shape, case: Case, piece: int | None = None
) -> None:
    """Compares a backend's result on a device with the oracle's.

    Args:
      implementation, device: the backend.
      shape, case: the pass.
      piece: tokens of a piece, where rows bring their tokens in pieces.
    """
    arguments, expected = place(shape, case)
    if piece:
        arguments, expected = in_pieces(arguments, expected, piece)
    with assume_device(device):
        out, faults = attended(*arguments, implementation=implementation, scoring=shape.scoring)
    assert int(faults) == 0
    check(out, expected, shape)


def compare_layers(
    implementation: str, device: Device, shape: Shape, case: Case, *, runs: bool = True
) -> None:
    """Two layers of one plan: their work is made once, and if the program `runs`, their results are
    those of a layer that makes its own; another number of heads has work of its own."""
    (cache, layout, count, q, k, v), _ = place(shape, case)
    more = jnp.concatenate([q, q], axis=2)

    def attend(cache, layout, count, q, k, v, *, is_shared):
        plan = make_plan(cache, layout, count, q.shape[1])
        arenas = append_tokens(cache.keys[0], cache.values[0], k, v, plan)
        if is_shared:
            plan = with_work(plan, shape.heads, *arenas, implementation)
        return [
            block_attention(x, *arenas, plan, implementation=implementation) for x in (q, -q, more)
        ]

    found = []
    with assume_device(device):
        for is_shared, made in ((True, 2), (False, 3)):
            function = functools.partial(attend, is_shared=is_shared)
            traced = jax.jit(function).trace(cache, layout, count, q, k, v)
            assert str(traced.jaxpr).count("name=make_work") == made
            if runs:
                found.append(traced.lower().compile()(cache, layout, count, q, k, v))
    if not runs:
        return
    real = np.arange(q.shape[1]) < np.asarray(count)[:, None]
    for shared, own in zip(*found, strict=True):
        np.testing.assert_array_equal(np.asarray(shared)[real], np.asarray(own)[real])


def compare_spread(
    implementation: str, device: Device, shape: Shape, case: Case, devices: int
) -> None:
    """Does as `compare`, with the tokens of the arena sharded over several devices.

    Each of them runs the kernels on its part.
    """
    (cache, *arguments), expected = place(shape, case)
    mesh = make_mesh(kv=devices)
    cache = dataclasses.replace(cache, mesh=mesh)

    def dealt(arena, spec):
        """A device's part: every `devices`-th stripe."""
        turns = arena.shape[1] // devices // STRIPE
        stripes = arena.reshape(arena.shape[0], turns, devices, STRIPE, arena.shape[2])
        return jax.device_put(
            stripes.swapaxes(1, 2).reshape(arena.shape), NamedSharding(mesh, spec)
        )

    specs = cache.specs
    cache = dataclasses.replace(
        cache,
        keys=tuple(map(dealt, cache.keys, specs.keys)),
        values=tuple(map(dealt, cache.values, specs.values)),
    )

    def attend(cache, layout, count, q, k, v):
        scoring = shape.scoring
        plan = make_plan(cache, layout, count, q.shape[1], window=scoring.window)
        cache = cache.append(0, k, v, plan)
        return block_attention(
            q,
            cache.keys[0],
            cache.values[0],
            plan,
            implementation=implementation,
            softcap=scoring.softcap,
            sinks=jnp.asarray(scoring.sinks, jnp.bfloat16) if scoring.sinks else None,
        ), plan.faults

    over = jax.shard_map(
        attend, mesh=mesh, in_specs=(specs, *[P()] * len(arguments)), out_specs=P(), check_vma=False
    )
    with assume_device(device):
        out, faults = jax.jit(over)(cache, *arguments)
    assert int(faults) == 0
    check(out, expected, shape)


def check(out: jax.Array, expected: np.ndarray, shape: Shape) -> None:
    """Compares a result with the oracle's, which is NaN where there is none."""
    found = np.asarray(out, np.float64)
    real = ~np.isnan(expected[..., 0])
    assert found.shape == expected.shape and np.isfinite(found).all()
    assert np.abs(found - expected)[real].max(initial=0.0) < TOLERANCE[shape.dtype]


def case(rows, count, lengths, *, seed=0, gaps=None, phases=None):
    """A case whose blocks are in the arena in the reverse of their order."""
    blocks = len(lengths)
    return Case(
        rows,
        count,
        lengths,
        list(range(blocks))[::-1],
        gaps or [0] * blocks,
        phases or [0] * blocks,
        seed,
    )
