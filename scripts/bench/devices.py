"""The bytes that a decode step sends between eight devices, and its predicted time on eight GPUs.

    python -m scripts.bench.devices                     # CodeLlama-13B on eight devices, every mesh
    python -m scripts.bench.devices --model llama-3.1-70b
    python -m scripts.bench.devices --quick             # within three minutes on two cores
    python -m scripts.bench.devices --json --output FILE

Nothing here is a speed: steps are compiled for eight virtual devices of the CPU and not run. The
collectives of a pass are read in what XLA compiled, with their kinds and sizes; the time comes from
a roofline with the bandwidths of data sheets (benchmarks/roofline.md), and is given beside what
Hydragen measured with CodeLlama-13B on eight A100-40GB GPUs (its table 3, 128 new tokens a
completion).
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxshare import DecodeState, KVCache, Layout, Rope, Sampler, decode, sharding
from jaxshare.models.config import ModelConfig
from jaxshare.models.layers import Decoder
from jaxshare.models.tensor_parallel import ShardedDecoder, fit
from jaxshare.sharding import make_mesh
from scripts.bench.lib import Goal, Parser, finish, machine, own_command, progress, table, versions
from scripts.bench.parts.devices.sent import Collective, collectives

DEVICES = 8
CODELLAMA = ModelConfig(
    architecture="llama",
    vocab_size=32016,
    hidden_size=5120,
    intermediate_size=13824,
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    rope=Rope.default(128, 1_000_000.0),
    norm_eps=1e-5,
    max_positions=16384,
    tie_embeddings=False,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
)
"""CodeLlama-13B."""
LLAMA_70B = dataclasses.replace(
    CODELLAMA,
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    rope=Rope.default(128, 500_000.0),
    max_positions=131072,
)
"""Llama-3.1-70B, but for the scaling of its rotations, which costs nothing."""
MESHES = (
    {"tensor": 8},
    {"tensor": 4, "kv": 2},
    {"tensor": 2, "kv": 4},
    {"kv": 8},
    {"data": 2, "tensor": 4},
)
QUICK_MESHES = MESHES[:2]
PREFIXES, OWN = (2048, 16256), 128
COUNTED_ROWS = 32
"""Rows of the step that is compiled. What is sent grows with the rows, and with nothing else."""
PAPER = {
    (32, 2048): (2.0, 2.3),
    (128, 2048): (5.7, 6.8),
    (512, 2048): (13.3, 16.1),
    (1024, 2048): (15.5, 18.5),
    (32, 16256): (1.8, 2.3),
    (128, 16256): (5.7, 6.8),
    (512, 16256): (12.3, 16.1),
    (1024, 16256): (14.0, 18.5),
}
"""Thousands of tokens a second by batch and prefix: Hydragen, and its ceiling without attention
(Hydragen, table 3)."""
BYTES = 2
"""Of a weight and of a cached number: bfloat16."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the meshes that it is split over, and the rows of its steps."""

    name: str
    config: ModelConfig
    meshes: tuple[Mapping[str, int], ...]
    batches: tuple[int, ...]
    paper: Mapping[tuple[int, int], tuple[float, float]] = dataclasses.field(default_factory=dict)


CASES = {
    "codellama-13b": Case("CodeLlama-13B", CODELLAMA, MESHES, (32, 128, 512, 1024), PAPER),
    "llama-3.1-70b": Case("Llama-3.1-70B", LLAMA_70B, MESHES[:2], (4, 64, 512)),
}
"""By the names of the command line. Four rows are four workers."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU with links to seven others by its data sheet, and what is expected of it.

    Attributes:
      memory, products: bytes/s, and FLOP/s in bfloat16.
      link: bytes/s that a GPU sends while it receives as much.
      copies, rate: the parts that copies and large products reach.
      latency: seconds of a collective of a few bytes over eight GPUs.
      launch: seconds of a small kernel with its launch.
    """

    name: str
    memory: float
    products: float
    link: float
    copies: float = 0.9
    rate: float = 0.72
    latency: float = 12e-6
    launch: float = 1.5e-6


H200 = Chip("H200", 4.8e12, 989e12, 450e9)
CHIPS = (
    Chip("A100-40GB", 1.555e12, 312e12, 300e9, rate=0.8, latency=15e-6, launch=2e-6),
    H200,
)
LAYER_LAUNCHES = 12
"""Kernels of a layer, as benchmarks/roofline.md counts them."""


def compiled(config: ModelConfig, sizes: Mapping[str, int], rows: int, prefix: int) -> str:
    """The decode step of one data group over a shared prefix, as XLA compiles it for virtual
    devices."""
    mesh = make_mesh(**{name: size for name, size in sizes.items() if name != "data"})
    config = fit(config, mesh)
    module = ShardedDecoder(config, mesh)
    params: Any = jax.eval_shape(
        lambda: Decoder(config).init(
            jax.random.key(0), jnp.zeros((1, 2), jnp.int32), method="causal"
        )
    )
    params = jax.tree.map_with_path(
        lambda keys, leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            jnp.bfloat16,
            sharding=sharding.sharding(mesh, module.names(tuple(key.key for key in keys))),
        ),
        params,
    )
    capacities = [prefix, *[OWN] * rows]
    cache = jax.eval_shape(lambda: KVCache.create(config, capacities, jnp.bfloat16, mesh=mesh))
    cache = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec)
        ),
        cache,
        cache.specs,
    )
    # A state is made of real arrays, so it gets a small cache first.
    small = KVCache.create(
        dataclasses.replace(config, num_layers=1, num_kv_heads=1, head_dim=2), [1] * len(capacities)
    )
    state = DecodeState.create(
        small,
        Layout.from_blocks([[0, 1 + row] for row in range(rows)]),
        [[1]] * rows,
        vocab_size=config.vocab_size,
        samplers=Sampler(0.7),
        max_width=1,
    )
    rest = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), dataclasses.replace(state, cache=None)
    )  # pyright: ignore

    def run(params: Any, cache: KVCache, rest: DecodeState) -> DecodeState:
        return decode(module, params, dataclasses.replace(rest, cache=cache), passes=16)

    return jax.jit(run).lower(params, cache, rest).compile().as_text()


@dataclasses.dataclass(frozen=True)
class Sent:
    """The collectives of a step of `COUNTED_ROWS` rows: in each layer, and outside of layers."""

    layer: tuple[Collective, ...]
    outside: tuple[Collective, ...]

    def step(self, layers: int) -> list[Collective]:
        return [
            *(dataclasses.replace(each, times=each.times * layers) for each in self.layer),
            *self.outside,
        ]


@functools.cache
def counted(config: ModelConfig, sizes: tuple[tuple[str, int], ...], prefix: int) -> Sent:
    """From programs of one layer and of two: what the second has more is a layer's."""
    one, two = (
        collectives(
            compiled(
                dataclasses.replace(config, num_layers=layers), dict(sizes), COUNTED_ROWS, prefix
            )
        )
        for layers in (1, 2)
    )
    layer, left = [], [*one]
    for each in two:
        left.remove(each) if each in left else layer.append(each)
    outside = [*one]
    for each in layer:
        outside.remove(each)
    return Sent(tuple(layer), tuple(outside))


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A step of one data group on one chip, in seconds."""

    weights: float
    attention: float
    sending: float
    launches: float

    @property
    def seconds(self) -> float:
        return self.weights + self.attention + self.sending + self.launches

    @property
    def longest(self) -> str:
        """The part that takes longest."""
        parts = dataclasses.asdict(self)
        return max(parts, key=lambda name: parts[name])


PARTS = tuple(field.name for field in dataclasses.fields(Predicted))


def predict(
    config: ModelConfig, sizes: Mapping[str, int], rows: int, prefix: int, sent: Sent, chip: Chip
) -> Predicted:
    """The time of a step of `rows` rows over a shared prefix where nothing overlaps.

    `rows` are those of all data groups together.
    """
    tensor, kv = sizes.get("tensor", 1), sizes.get("kv", 1)
    rows = -(-rows // sizes.get("data", 1))
    memory, products = chip.memory * chip.copies, chip.products * chip.rate
    c, heads = config, config.num_heads * config.head_dim
    weights = c.num_layers * (
        2 * c.hidden_size * (heads + c.num_kv_heads * c.head_dim)
        + 3 * c.hidden_size * c.intermediate_size
    )
    weights = (weights + c.hidden_size * c.vocab_size) / tensor
    split = tensor * kv
    token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * BYTES / split
    read = token * (prefix + rows * OWN / 2)
    flops = 4 * c.num_layers * heads * rows * (prefix + OWN / 2) / split
    sending = 0.0
    for each in sent.step(c.num_layers):
        sending += each.times * chip.latency + each.sent * rows / COUNTED_ROWS / chip.link
    return Predicted(
        max(weights * BYTES / memory, 2 * rows * weights / products),
        max(read / memory, flops / products),
        sending,
        c.num_layers * LAYER_LAUNCHES * chip.launch,
    )


def name_of(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def measure(case: Case, meshes: Sequence[Mapping[str, int]], prefix: int) -> dict[str, Any]:
    """By mesh: what a step sends, and the prediction for every batch, prefix and chip."""
    found: dict[str, Any] = {}
    config = case.config
    with progress(len(meshes)) as say:
        for sizes in meshes:
            say(name_of(sizes))
            sent = counted(config, tuple(sizes.items()), prefix)
            steps = []
            for batch in case.batches:
                for length in PREFIXES:
                    sides = {
                        chip.name: predict(config, sizes, batch, length, sent, chip)
                        for chip in CHIPS
                    }
                    steps.append(
                        {
                            "batch": batch,
                            "prefix": length,
                            "chips": {
                                name: {
                                    **dataclasses.asdict(side),
                                    "seconds": side.seconds,
                                    "longest": side.longest,
                                    "tokens_per_second": batch / side.seconds,
                                }
                                for name, side in sides.items()
                            },
                            "paper_tokens_per_second": {
                                name: 1e3 * measured
                                for name, measured in zip(
                                    ("hydragen", "no_attention"),
                                    case.paper.get((batch, length), ()),
                                    strict=False,
                                )
                            },
                        }
                    )
            found[name_of(sizes)] = {
                "layer": [dataclasses.asdict(each) for each in sent.layer],
                "outside": [dataclasses.asdict(each) for each in sent.outside],
                "layer_all_reduces": sum(each.kind == "all-reduce" for each in sent.layer),
                "bytes_sent_a_row": sum(each.sent for each in sent.step(config.num_layers))
                / COUNTED_ROWS,
                "largest_bytes": max(
                    (each.bytes for each in (*sent.layer, *sent.outside)), default=0
                ),
                "steps": steps,
            }
    return found


def as_text(found: Mapping[str, Any]) -> str:
    sends = table(
        ("mesh", "all-reduces a layer", "collectives outside", "KB sent a row and step"),
        [
            (
                name,
                str(side["layer_all_reduces"]),
                str(len(side["outside"])),
                f"{side['bytes_sent_a_row'] / 1e3:.0f}",
            )
            for name, side in found.items()
        ],
    )
    rows = []
    for name, side in found.items():
        for step in side["steps"]:
            chips, paper = step["chips"], step["paper_tokens_per_second"]
            rows.append(
                (
                    name,
                    str(step["batch"]),
                    str(step["prefix"]),
                    *(f"{1e3 * chips[chip.name]['seconds']:.1f}" for chip in CHIPS),
                    *(f"{1e3 * chips[CHIPS[-1].name][part]:.2f}" for part in PARTS),
                    chips[CHIPS[-1].name]["longest"],
                    *(f"{chips[chip.name]['tokens_per_second'] / 1e3:.1f}" for chip in CHIPS),
                    *(
                        f"{paper[name] / 1e3:.1f}" if paper else "-"
                        for name in ("hydragen", "no_attention")
                    ),
                )
            )
    times = table(
        (
            "predicted",
            "batch",
            "prefix",
            *(f"{chip.name}: ms" for chip in CHIPS),
            *(f"of it {part}" for part in PARTS),
            "longest",
            *(f"{chip.name}: K tokens/s" for chip in CHIPS),
            "paper, A100",
            "paper, no attention",
        ),
        rows,
    )
    return f"{sends}\n\nPredicted, not measured:\n{times}"


def goals_of(found: Mapping[str, Any], config: ModelConfig, prefix: int) -> list[Goal]:
    layer_cache = 2 * config.num_kv_heads * config.head_dim * prefix * BYTES
    goals = [
        Goal(f"all-reduces a layer, {name}", side["layer_all_reduces"], 2, at_most=True)
        for name, side in found.items()
        if "kv" not in name
    ]
    largest = max(side["largest_bytes"] for side in found.values())
    return [
        *goals,
        Goal(
            "largest array sent: of what a device caches of a layer",
            largest * DEVICES / layer_cache,
            1.0,
            at_most=True,
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="scripts.bench.devices",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="two meshes, within three minutes on two cores"
    )
    parser.add_argument(
        "--model", default="codellama-13b", choices=CASES, help="%(choices)s (default %(default)s)"
    )
    parser.reporting()
    options = parser.parse_args(arguments)
    parser.check_output(options.output)
    asked = own_command(__file__, arguments)
    jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_num_cpu_devices < DEVICES:
        jax.config.update("jax_num_cpu_devices", DEVICES)
    case = CASES[options.model]
    found = measure(case, QUICK_MESHES if options.quick else case.meshes, PREFIXES[0])
    report = {
        "benchmark": "devices",
        "command": asked,
        "machine": machine(),
        "versions": versions(("jax", "jaxlib", "flax", "numpy")),
        "predicted_not_measured": True,
        "chips": [dataclasses.asdict(chip) for chip in CHIPS],
        "counted_rows": COUNTED_ROWS,
        "model": case.name,
        "meshes": found,
    }
    finish(
        report,
        as_text(found),
        goals_of(found, case.config, PREFIXES[0]),
        as_json=options.json,
        output=options.output,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
