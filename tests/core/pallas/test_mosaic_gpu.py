"""The mosaic_gpu backend, interpreted on the CPU, against float64 numpy.

Threads and barriers are included, and races are looked for (conftest.py). Interpreting takes seconds
a call: a few shapes here, many examples among the slow tests. test_work_items tests how work is cut, test_gpu_lowering and `make
gpu-compile` that the kernels compile.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxshare import block_attention, cpu, make_plan
from jaxshare.attention.api import preferred
from jaxshare.pallas import merge_mosaic_gpu
from jaxshare.pallas.chosen_tiles import use_tiles
from jaxshare.pallas.device import H200, Device, assume_device
from jaxshare.pallas.head_dims import HEAD_DIMS
from jaxshare.pallas.products_mosaic_gpu import INTERPRETER_LACKS
from jaxshare.pallas.tiles import MosaicTiles
from jaxshare.sharding import CyclicSharding
from tests.core.attention.test_attention import Case, Shape, cases, place
from tests.core.pallas.interpreted import (
    DECODE,
    LATENT,
    PENDING,
    SOME_LENGTHS,
    TOLERANCE,
    WIDE,
    case,
    compare,
    compare_layers,
)
from tests.helpers import Scoring, mostly_slow

INTERPRETED = Device("interpreted", 90, multiprocessors=2, interpret=True)
"""Two work items, so that most cuts fall inside blocks."""


def check(shape: Shape, case: Case, device: Device = INTERPRETED) -> None:
    compare("mosaic_gpu", device, shape, case)


@pytest.mark.parametrize("waits", [True, False])
def test_the_interpreter_finds_races(waits):
    """A warpgroup writes what another one reads, which has to wait."""

    def kernel(out, shared, written):
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            shared[0] = jnp.int32(7)
            plgpu.barrier_arrive(written)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            if waits:
                plgpu.barrier_wait(written)
            out[0] = shared[0]

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),
        scratch_types=[plgpu.SMEM((1,), jnp.int32), plgpu.Barrier()],
        grid=(1,),
        grid_names=("item",),
        num_threads=2,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams(),
    )
    if waits:
        assert int(run()[0]) == 7
    else:
        with pytest.raises(Exception, match="RACE DETECTED"):
            jax.block_until_ready(run())


def test_shared_and_private_blocks_that_start_anywhere():
    check(
        DECODE,
        case(
            [[0, 1], [1, 0, 2], [0, 3]],
            [1, 1, 1],
            [200, 70, 3, 0],
            gaps=[1, 2, 0, 3],
            phases=[0, 5, 0, 0],
        ),
    )
    # The same program: one row alone, a row that brings nothing, empty blocks.
    check(DECODE, case([[0, 3, 1], [], []], [1, 0, 0], [0, 129, 0, 64], seed=1))


@pytest.mark.parametrize(
    ("rotary", "runs"), mostly_slow([(64, False), (0, False), (64, True)], 2, several=True)
)
def test_layers_share_the_work_of_their_plan(rotary, runs):
    one = case([[0, 1], [1, 0, 2], [0, 3]], [1, 1, 1], [20, 70, 3, 0])
    compare_layers(
        "mosaic_gpu", INTERPRETED, dataclasses.replace(DECODE, rotary=rotary), one, runs=runs
    )


@pytest.mark.slow
def test_more_queries_than_a_warpgroup_takes():
    check(WIDE, case([[0, n] for n in range(1, 6)], [1] * 5, [300, 5, 0, 64, 1, 17], gaps=[1] * 6))


@pytest.mark.slow
def test_pending_tokens_are_causal_in_their_own_block():
    check(PENDING, case([[0, 2, 1]], [31], [70, 40, 3, 0], gaps=[3, 0, 1, 0]))


@pytest.mark.slow  # the Triton kernels have the same test, and both take what is seen from the plan
def test_rows_in_pieces():
    compare(
        "mosaic_gpu",
        INTERPRETED,
        PENDING,
        case([[0, 2, 1]], [31], [70, 40, 3, 0], gaps=[3, 0, 1, 0]),
        piece=16,
    )


def test_sinks():
    """One is that of no key."""
    shape = dataclasses.replace(DECODE, scoring=Scoring(sinks=(1.0, -2.0, 4.0, -np.inf)))
    check(shape, case([[0, 2], [], [1, 3]], [1, 0, 1], [200, 70, 3, 0], gaps=[1, 2, 0, 3]))


@pytest.mark.slow
def test_a_warpgroup_merges_several_queries(monkeypatch):
    """As where there are more queries than warpgroups."""
    chosen, choose = [], merge_mosaic_gpu._queries_at_once
    monkeypatch.setattr(merge_mosaic_gpu, "_WARPGROUPS", 1)
    monkeypatch.setattr(
        merge_mosaic_gpu, "_queries_at_once", lambda *a: chosen.append(choose(*a)) or chosen[-1]
    )
    shape = dataclasses.replace(DECODE, width=2, scoring=Scoring(sinks=(1.0, -2.0, 4.0, -np.inf)))
    check(shape, case([[0, 2], [], [1, 0, 3]], [2, 0, 1], [200, 70, 3, 0], gaps=[1, 2, 0, 3]))
    assert chosen == [4]


@pytest.mark.slow
def test_softcaps():
    """The scores reach half of the cap; sinks are not capped."""
    shape = dataclasses.replace(DECODE, scoring=Scoring(softcap=8.0, sinks=(9.0, 0.0, 1.0, -1.0)))
    check(shape, case([[0, 2], [1, 0], [3]], [1, 1, 1], [200, 70, 3, 0], gaps=[1, 2, 0, 3]))


@pytest.mark.slow
def test_softcaps_of_wide_heads():
    shape = dataclasses.replace(DECODE, dim=256, rotary=256, scoring=Scoring(100, 3.0))
    check(shape, case([[0, 2], [1, 0], [3]], [1, 1, 1], [200, 70, 3, 0], gaps=[1, 2, 0, 3]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        dict(),
        dict(width=3, heads=5, dtype=jnp.float16),
        dict(heads=128),
        dict(width=40, heads=2),
        dict(scoring=Scoring(100, 3.0, (1.0, -np.inf) * 8)),
    ],
    ids=str,
)
def test_values_that_are_a_part_of_keys(more):
    shape = dataclasses.replace(LATENT, **more)
    check(
        shape,
        case([[0, 1], [0, 2]], [shape.width, 1], [150, 66, 0], gaps=[1, 0, 3], phases=[0, 5, 0]),
    )


@pytest.mark.slow
@settings(max_examples=15)
@given(cases(LATENT, lengths=SOME_LENGTHS))
def test_many_layouts_of_latents(case):
    check(LATENT, case)


WINDOW = dataclasses.replace(DECODE, scoring=Scoring(window=70))


@pytest.mark.slow
def test_windows():
    """A window over two blocks, one inside a block that another row sees more of, and one over all
    that a row sees."""
    check(
        WINDOW,
        case(
            [[0, 1], [1, 0, 2], [0, 3]],
            [1, 1, 1],
            [200, 50, 3, 0],
            gaps=[1, 2, 0, 3],
            phases=[0, 5, 0, 0],
        ),
    )
    # The same program: a block that is out of sight, and a row that brings nothing.
    check(WINDOW, case([[0, 3, 1], [], []], [1, 0, 0], [129, 80, 0, 64], seed=1))


@pytest.mark.slow
def test_windows_of_more_queries_than_a_warpgroup_takes():
    shape = dataclasses.replace(WIDE, scoring=Scoring(window=100))
    check(shape, case([[0, n] for n in range(1, 6)], [1] * 5, [300, 5, 0, 64, 1, 17], gaps=[1] * 6))


@pytest.mark.slow
def test_windows_of_pending_tokens():
    shape = dataclasses.replace(PENDING, scoring=Scoring(window=20))
    check(shape, case([[0, 2, 1]], [31], [70, 40, 3, 0], gaps=[3, 0, 1, 0]))


@pytest.mark.slow
def test_log_sum_exps_for_other_devices(monkeypatch):
    """The inputs of merging over devices, where tokens are sharded.

    One device in place of all: the interpreter has one memory, which concurrent ones would share.
    """
    shape = dataclasses.replace(DECODE, rotary=0)
    (cache, layout, count, q, k, v), out = place(
        shape, case([[0, 2, 1], [3], []], [1, 1, 0], [200, 3, 70, 0], gaps=[1, 0, 2, 0])
    )
    given = []
    monkeypatch.setattr(
        merge_mosaic_gpu,
        "merge_over",
        lambda axis, *partial: given.append((axis, *partial)) or partial[0],
    )

    @jax.jit
    def planned(cache, layout, count, k, v):
        plan = make_plan(cache, layout, count, 1)
        return plan, cache.append(0, k, v, plan)

    plan, cache = planned(cache, layout, count, k, v)
    with assume_device(INTERPRETED):
        block_attention(
            q,
            cache.keys[0],
            cache.values[0],
            dataclasses.replace(plan, token_sharding=CyclicSharding("kv")),
            implementation="mosaic_gpu",
        )
    [(axis, mixed, lse)] = given
    assert axis == "kv" and mixed.dtype == lse.dtype == jnp.float32
    keys, queries = (
        np.asarray(cache.keys[0], np.float64),
        np.asarray(q, np.float64)[:, 0].reshape(3, 2, 2, 64),
    )
    offsets, lengths = np.asarray(cache.offsets), np.asarray(cache.lengths)
    for row, blocks in enumerate([[0, 2, 1], [3], []]):
        seen = [offsets[b] + np.arange(lengths[b] + (b == blocks[-1])) for b in blocks]
        scores = (
            np.einsum(
                "kgd,ksd->kgs", queries[row], keys[:, np.concatenate([[], *seen]).astype(int)]
            )
            / 8
        )
        expected = np.logaddexp.reduce(scores, axis=-1, initial=-np.inf).reshape(4)
        np.testing.assert_allclose(lse[row, 0], expected, atol=TOLERANCE[shape.dtype])
    np.testing.assert_allclose(mixed[:2], out[:2], atol=TOLERANCE[shape.dtype])


@pytest.mark.slow
@pytest.mark.parametrize("dim", sorted({*HEAD_DIMS} - {64}))
def test_every_head_dim(dim):
    shape = Shape(
        rows=2,
        width=1,
        listed=2,
        blocks=3,
        heads=3,
        kv_heads=1,
        dim=dim,
        arena=512,
        rotary=dim,
        dtype=jnp.bfloat16,
    )
    check(shape, case([[0, 1], [0, 2]], [1, 1], [150, 66, 0], gaps=[1, 0, 0]))


@pytest.mark.slow
def test_an_arena_smaller_than_a_tile():
    shape = dataclasses.replace(DECODE, rows=1, listed=1, blocks=1, heads=2, kv_heads=1, arena=13)
    check(shape, case([[0]], [1], [11]))


@pytest.mark.slow
def test_larger_tiles():
    shape = dataclasses.replace(DECODE, rows=2, heads=2, kv_heads=1, listed=2, blocks=3)
    with use_tiles(MosaicTiles(tile=128, stages=2, query_stages=1)):
        check(shape, case([[0, 1], [0, 2]], [1, 1], [300, 66, 0], gaps=[1, 0, 0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiles",
    mostly_slow(
        [
            MosaicTiles(64, 2, 1),
            *(MosaicTiles(*t) for t in [(64, 3, 2), (64, 1, 1), (128, 2, 2), (64, 2, 1, 1, False)]),
        ]
    ),
)
def test_blocks_of_many_tiles_that_many_queries_see(tiles):
    """Their products overlap, and two warpgroups take turns; between them are blocks of one query's."""
    more = case(
        [[0, 6, n] for n in range(1, 6)], [1] * 5, [600, 5, 0, 64, 1, 17, 321], gaps=[1] * 7
    )
    shape = dataclasses.replace(WIDE, listed=3, blocks=7, arena=1536)
    with use_tiles(tiles):
        check(shape, more)


@pytest.mark.slow
@settings(max_examples=40)
@given(cases(DECODE))
def test_many_layouts(case):
    check(DECODE, case)


@pytest.mark.slow
@settings(max_examples=40)
@given(cases(WINDOW))
def test_many_layouts_with_windows(case):
    check(WINDOW, case)


@pytest.mark.slow
@settings(max_examples=25)
@given(cases(WIDE, lengths=SOME_LENGTHS))
def test_many_layouts_of_many_queries(case):
    check(WIDE, case)


@pytest.mark.slow
@settings(max_examples=15)
@given(cases(PENDING, lengths=SOME_LENGTHS))
def test_many_layouts_with_pending_tokens(case):
    check(PENDING, case)


@pytest.mark.slow
@pytest.mark.parametrize("group", [*range(1, 17), 24, 71, 128])
def test_every_number_of_query_heads(group):
    for dtype in (jnp.bfloat16, jnp.float16):
        shape = dataclasses.replace(
            DECODE, rows=2, heads=2 * group, listed=2, blocks=3, dtype=dtype
        )
        check(shape, case([[0, 1], [0, 2]], [1, 1], [150, 66, 0], gaps=[1, 0, 0], seed=group))


@pytest.mark.slow
def test_more_items_than_work():
    """Programs without an item's worth of tiles do nothing."""
    check(
        dataclasses.replace(DECODE, rows=1, listed=1, blocks=1),
        case([[0]], [1], [100]),
        Device("interpreted", 90, 9, interpret=True),
    )


@pytest.fixture
def call():
    """A call with one thing changed; it is only traced."""

    def call(device=H200, dim=64, heads=4, dtype=jnp.bfloat16, implementation="mosaic_gpu"):
        shape = dataclasses.replace(
            DECODE, heads=heads, kv_heads=1, dim=dim, rotary=dim, dtype=dtype
        )
        (cache, layout, count, q, _, _), _ = place(shape, case([[0, 1]], [1], [5, 3, 0, 0]))

        def attend(q, cache):
            return block_attention(
                q,
                cache.keys[0],
                cache.values[0],
                make_plan(cache, layout, count, 1),
                implementation=implementation,
            )

        if device is None:
            return jax.eval_shape(attend, q, cache)
        with assume_device(device):
            return jax.eval_shape(attend, q, cache)

    return call


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (
            dict(device=None),
            "it runs on NVIDIA GPUs of compute capability 9 and 10, and this is cpu",
        ),
        (
            dict(device=Device("NVIDIA A100", 80, 108)),
            "compute capability 9 and 10, and NVIDIA A100 has 8.0",
        ),
        (
            dict(device=Device("NVIDIA RTX PRO 6000", 120, 188)),
            "compute capability 9 and 10, and NVIDIA RTX PRO 6000 has 12.0",
        ),
        (dict(dtype=jnp.float32), "the cache must be bfloat16 or float16, not float32"),
        (dict(dim=72), "its head dims are 64, 80, 96, 128, 192, 256; this one is 72"),
        (dict(dim=576), "its head dims are 64, 80, 96, 128, 192, 256; this one is 576"),
        (dict(heads=129), "129 query heads share a kv head, but it takes at most 128"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(call, wrong, why):
    with pytest.raises(NotImplementedError, match=f"mosaic_gpu: .*{why}"):
        call(**wrong)


def test_where_it_cannot_serve_the_next_backend_does(call):
    assert call(dtype=jnp.float32, implementation=None).shape == (3, 1, 4, 64)
    assert call(device=None, implementation=("mosaic_gpu", "xla")).shape == (3, 1, 4, 64)


def test_what_is_preferred_follows_the_device():
    assert preferred() == (*["cpu"] * cpu.available(), "xla")
    with assume_device(H200):
        assert preferred() == ("mosaic_gpu", "triton", "xla")


def test_what_the_interpreter_lacks_are_products_alone():
    """Everything else of the kernel runs interpreted; a longer list would be a weaker test."""
    alone = "one after the other"
    assert len(INTERPRETER_LACKS) == 3 and alone in INTERPRETER_LACKS.values()
    assert all("a plain product" in each or each == alone for each in INTERPRETER_LACKS.values())
