"""A decode step of a model with experts on several GPUs, counted from its configuration alone:
bytes that a device holds, reads and sends, launches, and the time that follows.

Nothing here looks at a compiled program; scripts/gpu/compile.py compares. Devices split heads,
MLP, whole experts and vocabulary (`jaxshare.models.tensor_parallel`).
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from jaxshare.models.config import ModelConfig
from jaxshare.models.moe import MoE
from jaxshare.quantised import FORMATS

BYTES, SUM_BYTES = 2, 4
"""Of a weight and a cached number, bfloat16; of a number that is summed over devices."""


class Packing(NamedTuple):
    """The way in which experts are quantised: format, inputs that share a scale, bytes of that."""

    format: str
    group: int
    scale_bytes: int


class Layer(NamedTuple):
    """A kind of layer."""

    is_sparse: bool
    window: int

    def __str__(self) -> str:
        return f"{'experts' if self.is_sparse else 'dense'}{', window' if self.window else ''}"


def kinds(config: ModelConfig) -> tuple[Layer, ...]:
    """The kind of each layer."""
    sparse = config.sparse_layers or (False,) * config.num_layers
    windows = config.windows or (0,) * config.num_layers
    return tuple(map(Layer, sparse, windows))


def attention_numbers(config: ModelConfig, devices: int) -> int:
    """Parameters of a layer's attention on each device."""
    c, m, heads = config, config.mla, config.num_heads // devices
    if m is not None:
        latents = (m.q_lora_rank + m.cached_dim) * c.hidden_size + m.q_lora_rank + m.kv_lora_rank
        by_head = m.query_dim * m.q_lora_rank + (m.nope_dim + m.value_dim) * m.kv_lora_rank
        return latents + heads * (by_head + m.value_dim * c.hidden_size)
    kv = max(c.num_kv_heads // devices, 1)
    made, biased = (heads + 2 * kv) * c.head_dim, c.qkv_bias
    return (
        made * (c.hidden_size + biased)
        + heads * c.head_dim * c.hidden_size
        + c.hidden_size * c.out_bias
        + 2 * c.head_dim * c.qk_norm
        + heads * c.attention_sinks
    )


def expert_numbers(config: ModelConfig) -> int:
    """Parameters of the matrices of one expert."""
    assert config.moe is not None
    return 3 * config.hidden_size * config.moe.expert_size


def packed_bytes(config: ModelConfig, packing: Packing | None) -> float:
    """Bytes of the matrices of one expert."""
    numbers = expert_numbers(config)
    if packing is None:
        return numbers * BYTES
    bits = FORMATS[packing.format].bits
    return numbers * (bits / 8 + packing.scale_bytes / packing.group)


def rest_numbers(config: ModelConfig, layer: Layer, devices: int) -> int:
    """Parameters of a layer on each device, without the matrices of experts."""
    c, found = config, 2 * config.hidden_size + attention_numbers(config, devices)
    if not layer.is_sparse:
        return found + 3 * c.hidden_size * c.intermediate_size // devices
    moe = _moe(c)
    found += moe.num_experts * (c.hidden_size + moe.router_bias + moe.choice_bias)
    found += moe.num_experts // devices * moe.expert_bias * (2 * moe.expert_size + c.hidden_size)
    return found + 3 * c.hidden_size * moe.shared_size // devices


def _moe(config: ModelConfig) -> MoE:
    assert config.moe is not None
    return config.moe


def weight_bytes(config: ModelConfig, devices: int, packing: Packing | None = None) -> float:
    """Bytes of the parameters that each device holds."""
    found = (2 - config.tie_embeddings) * config.vocab_size // devices * config.hidden_size
    total = (found + config.hidden_size) * BYTES
    for layer in kinds(config):
        total += rest_numbers(config, layer, devices) * BYTES
        if layer.is_sparse:
            total += _moe(config).num_experts // devices * packed_bytes(config, packing)
    return total


def active_experts(moe: MoE, devices: int, rows: int) -> float:
    """The experts of a device that some row passes through, on average where all experts are
    equally likely."""
    return moe.num_experts / devices * (1 - (1 - moe.top_k / moe.num_experts) ** rows)


def read_bytes(
    config: ModelConfig, devices: int, rows: int, packing: Packing | None = None
) -> float:
    """Bytes of parameters that each device reads in a step: of embeddings the rows alone, of
    experts those that have rows."""
    whole = weight_bytes(config, devices, packing)
    found = whole - config.vocab_size // devices * config.hidden_size * BYTES
    for layer in kinds(config):
        if layer.is_sparse:
            moe = _moe(config)
            idle = moe.num_experts / devices - active_experts(moe, devices, rows)
            found -= idle * packed_bytes(config, packing)
    return found


def cached_bytes(
    config: ModelConfig, devices: int, tokens: int, own: int, rows: int
) -> dict[str, float]:
    """Bytes of keys and values that each device holds, and reads in a step, of a shared block of
    `tokens` and one of `own` for each row, all full."""
    kv = max(config.num_kv_heads // devices, 1)
    token = kv * (config.head_dim + config.value_dim) * BYTES
    held = token * (tokens + own * rows) * config.num_layers
    read = sum(
        # A window ends inside a row's own block, or before the row's last token in the shared one.
        token * (rows * min(own, each.window) if each.window else tokens + own * rows)
        for each in kinds(config)
    )
    return {"held": held, "read": read}


# Launches.

_ATTENTION = {
    "queries, keys and values": 1,
    "appends, and queries put in order": 1,
    "attention and merge": 2,
    "output": 1,
    "all-reduce": 1,
}
_MLP = {"gate and up": 1, "activation": 1, "down": 1, "all-reduce": 1}
_EXPERTS = {
    "router": 1,
    "scores and their finiteness": 2,
    "choice": 2,
    "order": 3,
    "gate and up": 2,
    "activation": 1,
    "down": 1,
    "weighted sum": 1,
    "all-reduce": 1,
}
_SHARED = {"gate and up": 1, "activation": 1, "down": 1}
_GROUPS = {"best groups": 4}
_LATENT = {
    "norms of latents": 2,
    "queries of latents": 1,
    "absorbed keys and values": 2,
    # Of products whose sums XLA splits: before other products, and before the sum over devices.
    "sums of queries, values and output": 3,
}


def launches(config: ModelConfig, layer: Layer) -> dict[str, int]:
    """The kernels and collectives of a layer that cannot be one: a product and what ends it are
    one, and so is what is computed element by element between two of these."""
    found = _of_attention(config) + Counter({"norms": 2})
    if not layer.is_sparse:
        return dict(found + Counter(_MLP))
    found += Counter(_EXPERTS)
    if _moe(config).shared_size:
        found += Counter(_SHARED)
    if _moe(config).groups > 1:
        found += Counter(_GROUPS)
    return dict(found)


def _of_attention(config: ModelConfig) -> Counter[str]:
    found = Counter(_ATTENTION)
    if config.mla:
        found += Counter(_LATENT)
    elif config.head_dim % 128:
        found += Counter({"cuts of padded heads": 1})
    # Norms write them side by side.
    found += Counter(
        {"norms of queries and keys": 2} if config.qk_norm else {"these side by side": 1}
    )
    return found


def attention_launches(config: ModelConfig) -> int:
    """Those of `launches` that are of attention, with its sum over devices."""
    return _of_attention(config).total()


# What is sent.


class Sent(NamedTuple):
    """A collective over all devices: its kind, and the bytes of its result on each."""

    kind: str
    bytes: int

    def over(self, devices: int) -> float:
        """Bytes that each device sends, with the algorithm that sends least (a ring)."""
        share = (devices - 1) / devices
        return self.bytes * share * (2 if self.kind == "all-reduce" else 1)


def sent_by_layer(config: ModelConfig, rows: int) -> list[Sent]:
    """The collectives of a layer: what attention adds, and MLP or experts."""
    return [Sent("all-reduce", rows * config.hidden_size * SUM_BYTES)] * 2


def sent_outside(config: ModelConfig, rows: int) -> list[Sent]:
    """The collectives of a pass outside of its layers that send more than some numbers a row: the
    embeddings, and for top-k and top-p all logits."""
    return [
        Sent("all-reduce", rows * config.hidden_size * BYTES),
        Sent("all-gather", rows * config.vocab_size * SUM_BYTES),
    ]


# Time.


@dataclasses.dataclass(frozen=True)
class Rates:
    """The assumptions on a GPU: bytes/s of copies and of a link, seconds of a collective of few
    bytes, and of a small kernel with its launch (benchmarks/roofline.md)."""

    copies: float
    link: float
    latency: float
    launch: float


def step_seconds(
    config: ModelConfig,
    devices: int,
    rows: int,
    cached: float,
    rates: Rates,
    packing: Packing | None = None,
    outside: int = 0,
) -> Mapping[str, float]:
    """The time of a step where nothing overlaps, in parts.

    Args:
      config: of the model.
      devices: over which it is split.
      rows: of the step.
      cached: bytes of keys and values that a device reads.
      rates: of the device.
      packing: of experts.
      outside: launches outside of layers.
    """
    layers = kinds(config)
    sent = [
        *sent_outside(config, rows),
        *(each for _ in layers for each in sent_by_layer(config, rows)),
    ]
    small = sum(sum(launches(config, layer).values()) for layer in layers) + outside
    parts = {
        "weights": read_bytes(config, devices, rows, packing) / rates.copies,
        "cache": cached / rates.copies,
        "sending": sum(each.over(devices) / rates.link + rates.latency for each in sent),
        "launches": (small - len(sent)) * rates.launch,
    }
    return {**parts, "all": sum(parts.values())}
