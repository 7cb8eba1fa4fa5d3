"""The programs that scripts/gpu/compile.py compiles: block attention over a grid of shapes, and
whole decode steps on one device and on several.

Everything is made of shapes: caches of many GB cost nothing here. Axis letters: R rows, T new
tokens of a row, H query heads, K kv heads, G = H / K, D head dim.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshare import (
    DecodeState,
    KVCache,
    Layout,
    Plan,
    Rope,
    Sampler,
    block_attention,
    decode,
    make_plan,
    sharding,
)
from jaxshare.attention.api import append_and_attend
from jaxshare.decoding.automaton import TokenAutomaton
from jaxshare.decoding.steps import Steps
from jaxshare.models.config import ModelConfig
from jaxshare.models.layers import Decoder
from jaxshare.models.packed import pack
from jaxshare.models.tensor_parallel import ShardedDecoder, fit

GPU_BACKENDS = ("mosaic_gpu", "triton")
"""Backends of block attention whose kernels are looked at one by one."""
STEP_BACKENDS = (*GPU_BACKENDS, "xla")

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
LATENT_DIM, ROTATED = 576, 64
GROUPS = (1, 2, 4, 5, 7, 8, 16)
DTYPES = ("bfloat16", "float16")
PASSES = (
    (1, 4, "shared"),
    (1, 256, "shared"),
    (1, 64, "private"),
    (8, 4, "workers"),
    (64, 4, "shared"),
    (64, 64, "private"),
)
"""T, rows, and what they see: a block together and one of their own each, one of their own alone,
or all blocks in orders of their own."""


class Scoring(NamedTuple):
    """Sliding window, softcap, and whether there are sinks."""

    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


class Case(NamedTuple):
    """One call of block attention: D, G, the dtype of queries and cache, one of PASSES, what is
    done with scores, and the format of codes where the cache approximates."""

    head_dim: int
    group: int
    dtype: str
    width: int
    rows: int
    blocks: str
    scoring: Scoring = Scoring()
    approximate: str | None = None

    def __str__(self) -> str:
        more = "".join(f", {name} {x}" for name, x in self.scoring._asdict().items() if x)
        more += f", {self.approximate} cache" if self.approximate else ""
        return f"D {self.head_dim}, G {self.group}, {self.dtype}, T {self.width}, {self.rows} rows, {self.blocks}{more}"


QUICK = tuple(
    dict.fromkeys(
        [
            *(
                Case(head_dim, group, "bfloat16", *one)
                for head_dim in HEAD_DIMS
                for group, one in ((4, PASSES[0]), (4, PASSES[4]), (8, PASSES[4]))
            ),
            *(Case(128, group, "bfloat16", *PASSES[0]) for group in GROUPS),
            *(Case(128, 8, "bfloat16", *one) for one in PASSES),
            *(Case(head_dim, 8, "float16", *PASSES[3]) for head_dim in (64, 256)),
        ]
    )
)
"""Every head dim, every G, both dtypes and every pass, but not each with each."""
SCORED = (
    Case(64, 8, "bfloat16", *PASSES[0], Scoring(128, sinks=True)),
    Case(64, 8, "bfloat16", *PASSES[4], Scoring(128, sinks=True)),
    Case(256, 2, "bfloat16", *PASSES[0], Scoring(4096, 50.0)),
    Case(128, 2, "float16", *PASSES[4], Scoring(4096, 50.0, True)),
    Case(128, 4, "bfloat16", *PASSES[3], Scoring(softcap=30.0)),
    Case(128, 8, "float16", *PASSES[5], Scoring(4096, 50.0, True)),
    Case(128, 128, "bfloat16", *PASSES[0]),
)
"""Windows, softcaps and sinks, as gpt-oss and Gemma 2 have them, and many query heads."""
_LATENT = [*((16, one) for one in PASSES), (5, PASSES[2]), (64, PASSES[0]), (128, PASSES[0])]
LATENT = tuple(Case(LATENT_DIM, group, "bfloat16", *one) for group, one in _LATENT)
"""Multi-head latent attention: keys of which 64 entries are rotated, and the others are values."""
CODED = (
    *(
        Case(head_dim, 4, "bfloat16", *one, approximate=form)
        for head_dim in HEAD_DIMS
        for form, one in (("int8", PASSES[0]), ("fp8", PASSES[4]))
    ),
    Case(128, 8, "bfloat16", *PASSES[3], approximate="fp8"),
    Case(128, 8, "float16", *PASSES[1], approximate="int8"),
    Case(64, 8, "bfloat16", *PASSES[0], Scoring(128, sinks=True), approximate="fp8"),
    Case(192, 2, "float16", *PASSES[4], Scoring(4096, 50.0), approximate="int8"),
    Case(256, 2, "bfloat16", *PASSES[4], Scoring(4096, 50.0), approximate="fp8"),
    Case(256, 8, "float16", *PASSES[3], approximate="int8"),
    Case(LATENT_DIM, 16, "bfloat16", *PASSES[0], approximate="int8"),
    Case(LATENT_DIM, 16, "bfloat16", *PASSES[4], approximate="fp8"),
    Case(LATENT_DIM, 128, "float16", *PASSES[2], Scoring(4096, 50.0), approximate="int8"),
)
"""Caches that approximate."""
APPENDING = (*QUICK[: 3 * len(HEAD_DIMS) : 3], *CODED[: 2 * len(HEAD_DIMS)], LATENT[0], *CODED[-3:])
"""What is compiled with its appends too: every head dim, with every form of caches."""
QUICK_SPREAD = tuple(
    case for case in QUICK if case.group == 4 and (case.width, case.rows, case.blocks) == PASSES[0]
)
"""What is compiled with its tokens spread over devices too, where merging ends with log-sum-exps:
every head dim."""


def whole_grid() -> list[Case]:
    """Each with each."""
    return [
        Case(*shape, *one) for *shape, one in itertools.product(HEAD_DIMS, GROUPS, DTYPES, PASSES)
    ]


class Shape(NamedTuple):
    """A `CacheConfig`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    layer_ropes: tuple[Rope, ...] = ()

    @property
    def value_dim(self) -> int:
        return 0 if self.head_dim == LATENT_DIM else self.head_dim

    @classmethod
    def of(cls, case: Case, kv_heads: int) -> "Shape":
        """That of one layer; a latent is one for all heads."""
        latent = case.head_dim == LATENT_DIM
        rope = Rope.default(ROTATED if latent else case.head_dim, 10_000.0)
        return cls(1, 1 if latent else kv_heads, case.head_dim, rope)


Traced = tuple[Callable[..., jax.Array], tuple[Any, ...]]
"""A function and the shapes of its arguments."""


def attention(
    case: Case, backend: str | None, kv_heads: int = 2, *, appends: bool = False
) -> Traced:
    """A call of block attention by a backend, or by the best one; arguments q, keys, values, plan,
    and the new keys and values where it `appends`."""
    config = Shape.of(case, kv_heads)
    listed, capacities = arranged(case.rows, case.blocks, history=16384, own=512)
    cache = jax.eval_shape(
        lambda: KVCache.create(config, capacities, case.dtype, approximate=case.approximate)
    )
    count = jax.ShapeDtypeStruct((case.rows,), jnp.int32)
    plan = jax.eval_shape(
        lambda *planned: make_plan(*planned, case.width, window=case.scoring.window),
        cache,
        shapes(Layout.from_blocks(listed)),
        count,
    )
    heads = config.num_kv_heads * case.group
    q = jax.ShapeDtypeStruct((case.rows, case.width, heads, case.head_dim), case.dtype)
    new = [
        jax.ShapeDtypeStruct((*q.shape[:2], config.num_kv_heads, size), case.dtype)
        for size in (case.head_dim, config.value_dim)
    ]

    def attend(
        q: jax.Array, keys: jax.Array, values: jax.Array, plan: Plan, *new: jax.Array
    ) -> Any:
        how: Any = {"implementation": backend, "softcap": case.scoring.softcap}
        how["sinks"] = jnp.zeros(q.shape[2]) if case.scoring.sinks else None
        if new:
            return append_and_attend(q, *new, keys, values, plan, **how)
        return block_attention(q, keys, values, plan, **how)

    return attend, (q, cache.keys[0], cache.values[0], plan, *(new if appends else ()))


def spread_attention(case: Case, backend: str, mesh: Mesh, kv_heads: int = 2) -> Traced:
    """A call of block attention over tokens that are spread along the axis `kv` of a mesh;
    arguments q, cache, layout, count."""
    config = Shape.of(case, kv_heads)
    listed, capacities = arranged(case.rows, case.blocks, history=16384, own=512)
    cache, layout = (
        shapes_on(mesh, config, capacities, case.dtype),
        shapes(Layout.from_blocks(listed)),
    )
    heads = config.num_kv_heads * case.group
    q = jax.ShapeDtypeStruct((case.rows, case.width, heads, case.head_dim), case.dtype)

    def attend(q: jax.Array, cache: KVCache, layout: Layout, count: jax.Array) -> jax.Array:
        return block_attention(
            q,
            cache.keys[0],
            cache.values[0],
            make_plan(cache, layout, count, case.width),
            implementation=backend,
        )

    none = PartitionSpec()
    return (
        sharding.on_each(attend, mesh, in_specs=(none, cache.specs, none, none), out_specs=none),
        (q, cache, layout, jax.ShapeDtypeStruct((case.rows,), jnp.int32)),
    )


def arranged(
    rows: int, blocks: str, *, history: int, own: int
) -> tuple[list[list[int]], list[int]]:
    """(for each row the blocks it lists, the capacity of each block in tokens) of one of the
    arrangements of PASSES."""
    numbers = range(1, rows + 1)
    listed = {
        "shared": [[0, b] for b in numbers],
        "private": [[b] for b in numbers],
        "workers": [[0, *(other for other in numbers if other != b), b] for b in numbers],
    }[blocks]
    return listed, [0 if blocks == "private" else history, *[own] * rows]


def shapes(tree: Any) -> Any:
    """The tree with shapes in place of arrays."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def shapes_on(
    mesh: Mesh | None,
    config: Any,
    capacities: list[int],
    dtype: jax.typing.DTypeLike,
    approximate: str | None = None,
) -> KVCache:
    """The shapes of a cache, cut over a mesh if there is one."""
    cache = jax.eval_shape(
        lambda: KVCache.create(config, capacities, dtype, mesh=mesh, approximate=approximate)
    )
    return (
        cache
        if mesh is None
        else jax.tree.map(
            lambda a, spec: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=NamedSharding(mesh, spec)
            ),
            cache,
            cache.specs,
        )
    )


# Decode steps.

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=8,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=Rope.default(128, 500_000.0),
    norm_eps=1e-5,
    max_positions=131072,
    tie_embeddings=False,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
)
HISTORY = 65536


class Step(NamedTuple):
    """One kind of decode loop: its rows, T of the passes that feed prompts, and whether rows write
    in steps that move."""

    name: str
    rows: int
    blocks: str
    own: int
    width: int
    moves: bool


QUICK_STEPS = (
    Step("4 workers", 4, "workers", 2048, 1, True),
    Step("64 branches", 64, "shared", 512, 1, False),
)
ALL_STEPS = (
    *QUICK_STEPS,
    Step("4 workers, T 64", 4, "workers", 2048, 64, True),
    Step("64 branches, T 64", 64, "shared", 512, 64, False),
)


class Spread(NamedTuple):
    """Devices over which a model and its cache are laid."""

    tensor: int
    kv: int

    @property
    def axes(self) -> tuple[str, ...]:
        """Those along which there are several devices."""
        return tuple(axis for axis, size in self._asdict().items() if size > 1)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self._asdict().items() if size > 1)

    def mesh(self, devices: list[Any]) -> Mesh:
        return sharding.make_mesh(tensor=self.tensor, kv=self.kv, devices=devices)


SPREADS = (Spread(4, 1), Spread(2, 2))
"""Over which decode steps are compiled."""
SPREAD_TOKENS = Spread(1, 2)
"""Over which block attention is compiled alone."""


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A decode loop as a function of (params, cache, rest) that donates the cache; bytes are those
    of keys and values, on each device.

    Attributes:
      layers: how many.
      mesh: over which it is laid; None for one device.
      arena_elements: of one layer's keys.
      layer_bytes, cache_bytes: keys and values of one layer, and of all.
    """

    function: Callable[..., DecodeState]
    arguments: tuple[Any, ...]
    mesh: Mesh | None
    layers: int
    arena_elements: int
    layer_bytes: int
    cache_bytes: int


def decoding(
    step: Step,
    backend: str | tuple[str, ...],
    config: ModelConfig = MODEL,
    history: int = HISTORY,
    mesh: Mesh | None = None,
    approximate: str | None = None,
) -> Decoding:
    """The loop of `jaxshare.decode` with bfloat16 weights and cache, which may approximate, over a
    mesh if there is one."""
    model, params = model_on(config, backend, mesh)
    listed, capacities = arranged(step.rows, step.blocks, history=history, own=step.own)
    cache = shapes_on(mesh, model.config, capacities, jnp.bfloat16, approximate)
    # A state is made of real arrays, so it gets a small cache first.
    small = KVCache.create(Shape(1, 1, 2, config.rope), [1] * len(capacities))
    state = DecodeState.create(
        small,
        Layout.from_blocks(listed),
        [[1, 2]] * step.rows,
        vocab_size=config.vocab_size,
        max_new_tokens=64,
        samplers=Sampler(0.7, top_p=0.9),
        stops=[2],
        max_width=step.width,
        queue=64,
        steps=_steps(step.rows, config.vocab_size) if step.moves else None,
    )
    rest = shapes(dataclasses.replace(state, cache=None))  # pyright: ignore[reportArgumentType]

    def run(params: Any, cache: KVCache, rest: DecodeState) -> DecodeState:
        return decode(
            model, params, dataclasses.replace(rest, cache=cache), passes=16, width=step.width
        )

    arena, spread = cache.keys[0], 1 if mesh is None else mesh.devices.size
    elements = arena.size // spread
    arrays = jax.tree.leaves((arena, cache.values[0]))
    layer = sum(a.size * a.dtype.itemsize for a in arrays) // spread
    return Decoding(
        run,
        (params, cache, rest),
        mesh,
        config.num_layers,
        elements,
        layer,
        layer * config.num_layers,
    )


def model_on(
    config: ModelConfig, backend: str | tuple[str, ...], mesh: Mesh | None
) -> tuple[Decoder | ShardedDecoder, Any]:
    """(the model, the shapes of its parameters), as they lie on a mesh if there is one."""
    if mesh is not None:
        config = fit(config, mesh)
    whole = Decoder(config, backend)
    params = jax.eval_shape(
        lambda: whole.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32), method="causal")
    )
    if mesh is None:
        params = jax.eval_shape(lambda p: pack({**p}, config), params)  # as `load` packs them
        return whole, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), params)
    model = ShardedDecoder(config, mesh, backend)
    return model, jax.tree.map(
        lambda p, spec: jax.ShapeDtypeStruct(
            p.shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)
        ),
        params,
        model.specs(params),
    )


def _steps(rows: int, vocab_size: int) -> Steps:
    """Steps that move to block 0, with automata of the size that real ones have."""
    automaton = TokenAutomaton(
        classes=jnp.zeros(vocab_size, jnp.int32),
        transitions=jnp.zeros((16, 64), jnp.int32),
        marks=jnp.zeros((16, 64), bool),
        start=jnp.zeros((), jnp.int32),
    )
    return Steps.create(
        automaton, automaton, [0] * rows, capacity=64, openings=8, longest=32, ask_every=100
    )
