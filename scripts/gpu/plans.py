"""The plan of a pass alone, as a program to compile for a GPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxshare import KVCache, Layout, make_plan
from jaxshare.models.config import ModelConfig
from jaxshare.pallas.block_attention_mosaic_gpu import SETUP_TILES
from jaxshare.pallas.device import H200
from jaxshare.pallas.work_items import WorkForm, make_work
from scripts.gpu.programs import HISTORY, MODEL, Step, Traced, arranged, shapes


def plan_alone(step: Step, config: ModelConfig = MODEL, history: int = HISTORY) -> Traced:
    """The plan of a pass of one token a row; arguments cache, layout, count."""
    listed, capacities = arranged(step.rows, step.blocks, history=history, own=step.own)
    cache = jax.eval_shape(lambda: KVCache.create(config, capacities, jnp.bfloat16))

    def plan(cache: KVCache, layout: Layout, count: jax.Array) -> Any:
        return make_plan(cache, layout, count, 1)

    return plan, (
        cache,
        shapes(Layout.from_blocks(listed)),
        jax.ShapeDtypeStruct((step.rows,), jnp.int32),
    )


def work_alone(step: Step, config: ModelConfig = MODEL, history: int = HISTORY) -> Traced:
    """The parts of a pass of a GPU backend before its first layer: the plan less the tiles that the
    XLA backend reads, and the work items."""
    plan, arguments = plan_alone(step, config, history)

    def work(cache: KVCache, layout: Layout, count: jax.Array) -> Any:
        made = plan(cache, layout, count)
        # Span, tile and number of items are those of the mosaic_gpu backend; other ones make the
        # same kernels.
        items = make_work(
            made,
            WorkForm(
                group=config.num_heads // config.num_kv_heads,
                kv_heads=config.num_kv_heads,
                span=128,
                tile=64,
                num_items=H200.multiprocessors,
                setup=SETUP_TILES,
            ),
        )
        return dataclasses.replace(made, shared=None, grouped=(), private=None), items  # pyright: ignore[reportArgumentType]

    return work, arguments
