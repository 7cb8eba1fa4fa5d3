"""Attention of others on the same keys and values, and planning a pass by itself."""

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare.pallas.block_attention_mosaic_gpu import SETUP_TILES
from jaxshare.pallas.work_items import WorkForm, make_work
from scripts.bench.parts.attention import cases
from scripts.bench.parts.attention.cases import Case, Heads, Inputs
from scripts.bench.parts.attention.speed import (
    JAX_CUDNN,
    JAX_XLA,
    PALLAS,
    SDPA,
    SPLIT_TILE,
    SPLITS,
    TOKAMAX,
    Bench,
    Planned,
    Side,
    _loop,
    seconds_of,
)
from scripts.bench.peer import WorkerError


def others(
    bench: Bench, case: Case, skipped: dict[str, str], scaled: float = 1.0
) -> dict[str, Side]:
    """Attention as others have it, over one private block a row: queries [R, 1, H, D] that see all
    of keys and values [R, S, K, D]."""
    heads, rows, tokens = case.heads, len(case.rows), case.after[0]
    calls, passes = bench.loop(case)

    def side(call: Callable[[], float], way: str | None = None) -> Side:
        return Side(
            lambda: call() / (calls * passes) * scaled,
            case.layer_bytes * scaled,
            case.layer_flops * scaled,
            scaled,
            way,
        )

    def jax_side(form: str, tokens: int) -> Side:
        q, keys, values = _random_rows(form, rows, tokens, heads, bench.seed)
        length = jnp.full(rows, case.after[0], jnp.int32)
        return side(
            lambda: seconds_of(
                lambda: _others(form, q, keys, values, length, calls, passes).block_until_ready()
            )
        )

    in_pieces = -(-tokens // (SPLITS * SPLIT_TILE)) * SPLITS * SPLIT_TILE
    forms = {JAX_XLA: ("xla", tokens), JAX_CUDNN: ("cudnn", tokens), PALLAS: ("pallas", in_pieces)}
    found = {name: jax_side(*form) for name, form in forms.items() if name in bench.peers}
    if bench.worker and SDPA in bench.peers:
        worker = bench.worker
        try:
            answer = worker.ask(
                "prepare",
                rows=rows,
                heads=heads.num_heads,
                kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                tokens=tokens,
                layers=heads.num_layers,
                calls=calls,
            )
            found[SDPA] = side(
                lambda: worker.ask("attend", passes=passes)["seconds"], answer["way"]
            )
        except WorkerError as error:
            skipped[SDPA] = str(error)
    return found


def others_causal(bench: Bench, case: Case) -> dict[str, Side]:
    """Causal attention as others have it, of one row's [T] new tokens that see nothing before."""
    heads, tokens = case.heads, case.width
    calls, passes = bench.loop(case)
    rng = np.random.default_rng(bench.seed)
    shape = 1, tokens, heads.num_kv_heads, heads.head_dim
    made = [cases.noise(rng, shape, "bfloat16") for _ in range(2 * heads.num_layers)]
    q = cases.noise(rng, (1, tokens, heads.num_heads, heads.head_dim), "bfloat16")
    keys, values = tuple(made[::2]), tuple(made[1::2])

    def side(form: str) -> Side:
        def turn() -> float:
            run = functools.partial(_causal, form, q, keys, values, calls, passes)
            return seconds_of(lambda: run().block_until_ready()) / (calls * passes)

        return Side(turn, case.layer_bytes, case.layer_flops)

    forms = {JAX_XLA: "xla", JAX_CUDNN: "cudnn", TOKAMAX: "tokamax"}
    return {name: side(form) for name, form in forms.items() if name in bench.peers}


@functools.partial(jax.jit, static_argnames=("form", "calls", "passes"))
def _causal(
    form: str, q: Array, keys: Sequence[Array], values: Sequence[Array], calls: int, passes: int
) -> Array:
    if form == "tokamax":
        tokamax = importlib.import_module("tokamax")
        attend = functools.partial(tokamax.dot_product_attention, is_causal=True)
    else:
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=form
        )
    with jax.numpy_dtype_promotion("standard"):
        return _loop(lambda q, i: attend(q, keys[i], values[i]), q, len(keys), calls, passes)


def _random_rows(
    form: str, rows: int, tokens: int, heads: Heads, seed: int
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """q [R, 1, H, D], and each layer's keys and values as the kernel reads them: [R, S, K, D], or
    [R, K, S, D] for JAX's Pallas decode."""
    rng = np.random.default_rng(seed)
    middle = (heads.num_kv_heads, tokens) if form == "pallas" else (tokens, heads.num_kv_heads)
    made = [
        cases.noise(rng, (rows, *middle, heads.head_dim), "bfloat16")
        for _ in range(2 * heads.num_layers)
    ]
    return (
        cases.noise(rng, (rows, 1, heads.num_heads, heads.head_dim), "bfloat16"),
        tuple(made[::2]),
        tuple(made[1::2]),
    )


@functools.partial(jax.jit, static_argnames=("form", "calls", "passes"))
def _others(
    form: str,
    q: Array,
    keys: Sequence[Array],
    values: Sequence[Array],
    length: Array,
    calls: int,
    passes: int,
) -> Array:
    if form == "pallas":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it goes with JAX's Triton backend
            from jax.experimental.pallas.ops.gpu import decode_attention

            def layer(q: Array, i: int) -> Array:
                # It takes [R, S, K, D] and exchanges the middle axes, so that nothing is left of
                # both exchanges.
                arenas = (jnp.swapaxes(x[i], 1, 2) for x in (keys, values))
                out = decode_attention.gqa(
                    q[:, 0], *arenas, kv_seq_len=length, k_splits=SPLITS, block_k=SPLIT_TILE
                )
                return out[:, None].astype(q.dtype)

            with jax.numpy_dtype_promotion("standard"):
                return _loop(layer, q, len(keys), calls, passes)
    return _loop(
        lambda q, i: jax.nn.dot_product_attention(q, keys[i], values[i], implementation=form),
        q,
        len(keys),
        calls,
        passes,
    )


def planned(inputs: Inputs, heads: Heads, items: int) -> Planned:
    """The parts of a pass on a GPU backend that are made once: the plan without the tiles that only
    the xla backend reads, and the work items."""
    plan = inputs.plan
    form = WorkForm(
        group=heads.group,
        kv_heads=heads.num_kv_heads,
        span=128,
        tile=64,
        num_items=items,
        alignment=8,
        setup=SETUP_TILES,
    )
    work = make_work(plan, form)
    return Planned(dataclasses.replace(plan, shared=None, grouped=(), private=None), work)  # pyright: ignore[reportArgumentType]


def plan_sides(bench: Bench, case: Case) -> dict[str, Callable[[], float]]:
    """Seconds of one plan, as the GPU backends and as the xla backend need it. `case` is that of
    one layer, its own blocks of 8 tokens or more."""
    # no arena is looked at
    small = dataclasses.replace(
        case, heads=dataclasses.replace(case.heads, num_kv_heads=1, num_layers=1)
    )
    inputs = cases.make(small, bench.seed)
    times = max(2, round(bench.turn_seconds / 3e-5))

    def side(gpu: bool) -> Callable[[], float]:
        return lambda: (
            seconds_of(
                lambda: jax.block_until_ready(
                    _planned_often(inputs, case.heads, bench.items, times, gpu)
                )
            )
            / times
        )

    return {"GPU backends": side(True), "xla": side(False)}


@functools.partial(jax.jit, static_argnames=("heads", "items", "times", "gpu"))
def _planned_often(inputs: Inputs, heads: Heads, items: int, times: int, gpu: bool) -> Planned:
    """Makes `times` plans, each for other lengths, and gives the last.

    All of a plan is carried on, so all of it is made.
    """
    lengths = inputs.cache.lengths

    def once(i: Array | int) -> Planned:
        cache = dataclasses.replace(inputs.cache, lengths=jnp.maximum(lengths - i % 8, 0))
        changed = dataclasses.replace(inputs, cache=cache)
        return planned(changed, heads, items) if gpu else Planned(changed.plan, None)

    return jax.lax.fori_loop(1, times, lambda i, _: once(i), once(0))
