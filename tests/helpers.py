"""Objects that several tests build and compare with: tiny models, caches with given keys, and
oracles in float64 numpy.

The oracles share no code with jaxshare: they keep keys and values as they leave the projections,
not rotated, in plain lists for each block, and rotate every key to its absolute position again for
every row and every pass.
"""

import dataclasses
import functools
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxshare import DecodeState, FinishReason, KVCache, Layout, Rope, Sampler, Samplers, decode
from jaxshare.decoding.samplers import SamplerPlaces
from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.models.config import ModelConfig
from jaxshare.models.layers import Decoder
from jaxshare.models.mla import MLA


def on_device(values: Any, dtype: Any = None) -> jax.Array:
    """An array of the host on the device, converted by numpy: JAX compiles a program for each shape."""
    return jax.device_put(np.asarray(values).astype(dtype) if dtype else np.asarray(values))


def mostly_slow(values: Iterable[Any], quick: int = 1, *, several: bool = False) -> list[Any]:
    """Parameters of a test, of which `make test` takes the first `quick` and `make test-all` all;
    `several` where each is a tuple of the values of several names."""
    return [
        value
        if i < quick
        else pytest.param(*(value if several else (value,)), marks=pytest.mark.slow)
        for i, value in enumerate(values)
    ]


TINY = ModelConfig(
    architecture="llama",
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope=Rope.yarn(12, 10_000.0, 4.0, 64),
    norm_eps=1e-5,
    max_positions=4096,
    tie_embeddings=False,
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    qk_norm=True,
)
"""A model whose passes compile in seconds: YaRN over 12 of 16 entries, so that a factor applied
twice or a wrong slice shows."""
LATENT = dataclasses.replace(
    TINY,
    num_kv_heads=1,
    head_dim=24,
    qkv_bias=False,
    qk_norm=False,
    score_scale=0.3,
    mla=MLA(q_lora_rank=20, kv_lora_rank=12, nope_dim=6, rope_dim=12, value_dim=10),
)
"""The same with multi-head latent attention; no two of its sizes are equal."""


def init(config: ModelConfig, seed: int = 0, spread: float = 1.5):
    """Random float32 parameters in which no entry is 0 or 1, and weights wide enough that attention
    and logits are far from flat."""
    shapes = jax.eval_shape(
        lambda: Decoder(config).init(
            jax.random.key(0), jnp.zeros((1, 2), jnp.int32), method="causal"
        )
    )
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name, noise = path[-1].key, rng.normal(size=leaf.shape)
        if name == "scale":
            return on_device(1 + 0.2 * noise, jnp.float32)
        return on_device(
            noise
            * (
                spread * leaf.shape[1] ** -0.5
                if name == "kernel"
                else 1.0
                if name == "embedding"
                else 0.3
            ),
            jnp.float32,
        )

    return jax.tree_util.tree_map_with_path(fill, shapes)


def first_layers(model: LoadedModel, count: int) -> LoadedModel:
    """A model cut off after its first layers: its tokenizer and its widths, in programs that
    compile sooner, for tests that do not look at what it has learned."""
    whole = model.params["params"]
    cut = {f"layers_{i}" for i in range(count, model.config.num_layers)}
    return dataclasses.replace(
        model,
        config=dataclasses.replace(model.config, num_layers=count),
        params={"params": {name: leaf for name, leaf in whole.items() if name not in cut}},
    )


@functools.cache
def one_layer() -> LoadedModel:
    """The first layer of the embedded model, for tests that look at no words."""
    return first_layers(load(EMBEDDED), 1)


def folder_of_first_layers(path: Path, count: int) -> Path:
    """A copy of the embedded model's folder, of a model cut off after its first layers."""
    shutil.copytree(EMBEDDED, path)
    file, weights = path / "config.json", path / "model.safetensors"
    config, tensors = json.loads(file.read_text()), safetensors.numpy.load_file(weights)
    for layer in range(count, config["num_hidden_layers"]):
        for name in [name for name in tensors if name.startswith(f"model.layers.{layer}.")]:
            del tensors[name]
    kinds = config["layer_types"][:count]
    file.write_text(json.dumps(config | {"num_hidden_layers": count, "layer_types": kinds}))
    safetensors.numpy.save_file(tensors, weights)
    return path


def rotated(x: np.ndarray, positions: np.ndarray, rope: Rope, factor: float = 1.0) -> np.ndarray:
    """Rotates x [..., heads, D] to positions [...], in float64. Pairs are (i, i + P); entries from
    2P on are unchanged."""
    pairs = len(rope.frequencies)
    x = np.asarray(x, np.float64)
    angle = np.asarray(positions, np.float64)[..., None, None] * np.asarray(rope.frequencies)
    wave = np.exp(1j * angle) * factor
    out = (x[..., :pairs] + 1j * x[..., pairs : 2 * pairs]) * wave
    return np.concatenate([out.real, out.imag, x[..., 2 * pairs :]], axis=-1)


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What models do with scores besides Llama's scale: tokens that a token sees, itself included
    (0 for all), a cap (0 for none), and a score for each head with no value (none for no head)."""

    window: int = 0
    softcap: float = 0.0
    sinks: tuple[float, ...] = ()


PLAIN = Scoring()


def softmax_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, scoring: Scoring = PLAIN
) -> np.ndarray:
    """One token's q [H, D] over k, v [S, K, D] -> [H, D], in float64."""
    group = q.shape[0] // k.shape[1]
    out = []
    for head in range(q.shape[0]):
        scores = k[:, head // group] @ q[head] * scale
        if scoring.softcap:
            scores = np.tanh(scores / scoring.softcap) * scoring.softcap
        sink = scoring.sinks[head] if scoring.sinks else -np.inf
        top = max(scores.max(), sink)
        weights = np.exp(scores - top)
        out.append(weights @ v[:, head // group] / (weights.sum() + np.exp(sink - top)))
    return np.stack(out)


@dataclasses.dataclass
class Shelf:
    """The oracle's cache of one layer: for each block a list of (k [K, D], v [K, D]), not
    rotated."""

    blocks: list[list[tuple[np.ndarray, np.ndarray]]]

    def append(
        self, rows: Sequence[Sequence[int]], count: Sequence[int], k: np.ndarray, v: np.ndarray
    ) -> None:
        """Appends row r's first count[r] new tokens of k, v [R, T, K, D] to the last block it
        lists."""
        for r, row in enumerate(rows):
            for t in range(count[r]):
                self.blocks[row[-1]].append(
                    (np.asarray(k[r, t], np.float64), np.asarray(v[r, t], np.float64))
                )

    def attend(
        self,
        rows: Sequence[Sequence[int]],
        count: Sequence[int],
        q: np.ndarray,
        rope: Rope,
        scale: float,
        scoring: Scoring = PLAIN,
    ) -> np.ndarray:
        """q [R, T, H, D] of tokens that `append` has put down already -> [R, T, H, size of a value];
        nan where there is no token."""
        value_dim = next((v.shape[-1] for block in self.blocks for _, v in block), q.shape[-1])
        out = np.full((*q.shape[:3], value_dim), np.nan)
        for r, row in enumerate(rows):
            for t in range(count[r]):
                own = self.blocks[row[-1]]
                seen = [pair for b in row[:-1] for pair in self.blocks[b]] + own[
                    : len(own) - count[r] + t + 1
                ]
                keys, values = (np.stack(side) for side in zip(*seen, strict=True))
                keys = rotated(keys, np.arange(len(seen)), rope, rope.attention_factor)
                query = rotated(q[r, t], np.asarray(len(seen) - 1), rope, rope.attention_factor)
                near = slice(-scoring.window if scoring.window else None, None)
                out[r, t] = softmax_attention(query, keys[near], values[near], scale, scoring)
        return out


def linear(x: np.ndarray, w) -> np.ndarray:
    return x @ w["kernel"].T + w.get("bias", 0.0)


def expanded_heads(m: MLA, x: np.ndarray, a) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values of multi-head latent attention as DeepSeek-V2, section 2.1.2 and
    appendix C, has them, [R, T, H, D] each: a key and a value for every head, made of its latent.
    Rotated entries are the first, and values are filled up with 0."""

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    source = norm(linear(x, a["q_a"]), a["q_a_norm"]["scale"]) if m.q_lora_rank else x
    q = linear(source, a["q_b" if m.q_lora_rank else "q"])
    q = q.reshape(*x.shape[:2], -1, m.nope_dim + m.rope_dim)
    q = np.concatenate([q[..., m.nope_dim :], q[..., : m.nope_dim]], axis=-1)
    kv = linear(x, a["kv_a"])
    latent = norm(kv[..., : m.kv_lora_rank], a["kv_a_norm"]["scale"])
    k, v = (linear(latent, a[name]).reshape(*q.shape[:3], -1) for name in ("k_b", "v_b"))
    shared = np.broadcast_to(kv[..., None, m.kv_lora_rank :], (*q.shape[:3], m.rope_dim))
    filling = np.zeros((*v.shape[:3], m.nope_dim + m.rope_dim - m.value_dim))
    return q, np.concatenate([shared, k], axis=-1), np.concatenate([v, filling], axis=-1)


class DenseModel:
    """The whole transformer in float64 numpy, over a `Shelf` for each layer. Writes down once more
    what families have: biases, norms, multipliers, windows, softcaps and latents; experts are
    written down where they are tested."""

    def __init__(self, config: ModelConfig, params, num_blocks: int):
        self.config = config
        self.params = jax.tree.map(lambda p: np.asarray(p, np.float64), params["params"])
        self.shelves = [Shelf([[] for _ in range(num_blocks)]) for _ in range(config.num_layers)]

    def length(self, block: int) -> int:
        return len(self.shelves[0].blocks[block])

    def move(self, source: int, target: int) -> None:
        for shelf in self.shelves:
            shelf.blocks[target] += shelf.blocks[source]
            shelf.blocks[source] = []

    def forward(
        self, tokens: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """tokens: each row's new ones, any number -> for each row its logits [count, V]."""
        c, p = self.config, self.params
        count = [len(t) for t in tokens]
        x = np.zeros((len(rows), max(count), c.hidden_size))
        for r, new in enumerate(tokens):
            x[r, : len(new)] = p["embed"]["embedding"][list(new)] * c.embedding_multiplier
        for i in range(c.num_layers):
            layer = p[f"layers_{i}"]
            out = self._attention(i, self._normed(x, layer, "attention_norm"), rows, count)
            x = x + self._normed(out, layer, "attention_post_norm") * c.residual_multiplier
            out = self.mlp(layer, self._normed(x, layer, "mlp_norm"))
            x = x + self._normed(out, layer, "mlp_post_norm") * c.residual_multiplier
        table = p["embed"]["embedding"] if c.tie_embeddings else p["head"]["kernel"]
        logits = self._normed(x, p, "norm") @ table.T / c.logit_divisor
        if c.logit_softcap:
            logits = c.logit_softcap * np.tanh(logits / c.logit_softcap)
        return [logits[r, :n] for r, n in enumerate(count)]

    def mlp(self, layer, x: np.ndarray) -> np.ndarray:
        """The MLP of a layer, given the layer's parameters."""
        mlp = layer["mlp"]
        gate = linear(x, mlp["gate"])
        if self.config.activation == "silu":
            gate = gate / (1 + np.exp(-gate))
        else:
            gate = gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        return linear(gate * linear(x, mlp["up"]), mlp["down"])

    def _normed(self, x: np.ndarray, module, name: str) -> np.ndarray:
        """x where the model has no such norm."""
        if name not in module:
            return x
        scale = module[name]["scale"] + self.config.norm_adds_one
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.norm_eps) * scale

    def _attention(self, i: int, x: np.ndarray, rows, count: list[int]) -> np.ndarray:
        c, a, shelf = self.config, self.params[f"layers_{i}"]["attention"], self.shelves[i]
        if c.mla:
            q, k, v = expanded_heads(c.mla, x, a)
        else:
            q, k, v = (linear(x, a[name]) for name in "qkv")
            if c.qk_norm_whole:
                q, k = self._normed(q, a, "q_norm"), self._normed(k, a, "k_norm")
            if c.qkv_clip:
                q, k, v = (np.clip(y, -c.qkv_clip, c.qkv_clip) for y in (q, k, v))
            q, k, v = (y.reshape(*x.shape[:2], -1, c.head_dim) for y in (q, k, v))
        if c.qk_norm:
            q, k = self._normed(q, a, "q_norm"), self._normed(k, a, "k_norm")
        shelf.append(rows, count, k, v)
        sinks = tuple(a["sinks"]) if c.attention_sinks else ()
        scoring = Scoring(c.windows[i] if c.windows else 0, c.attention_softcap, sinks)
        more = () if scoring == PLAIN else (scoring,)
        rope = c.layer_ropes[i] if c.layer_ropes else c.rope
        out = np.nan_to_num(shelf.attend(rows, count, q, rope, c.scale, *more))
        out = out[..., : c.mla.value_dim] if c.mla else out
        return linear(out.reshape(*x.shape[:2], -1), a["o"])


def cache_with(
    blocks: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    *,
    rope: Rope,
    offsets: Sequence[int],
    capacities: Sequence[int],
    tokens: int,
    phases: Sequence[int],
    dtype=jnp.float32,
) -> KVCache:
    """A cache of one layer that holds given keys and values [n, K, D] (not rotated), the keys
    rotated by the oracle.

    What no block holds is filled with large noise, so that reading it shows.
    """
    rng = np.random.default_rng(7)
    keys, kept = (rng.normal(size=(tokens, *given[0].shape[1:])) * 30 for given in (blocks, values))
    for k, v, at, phase in zip(blocks, values, offsets, phases, strict=True):
        keys[at : at + len(k)] = rotated(k, phase + np.arange(len(k)), rope, rope.attention_factor)
        kept[at : at + len(v)] = v
    arenas = (on_device(a.swapaxes(0, 1), dtype) for a in (keys, kept))
    numbers = (
        on_device(n, jnp.int32) for n in (offsets, [len(b) for b in blocks], capacities, phases)
    )
    return KVCache(*((a,) for a in arenas), *numbers, faults=jnp.zeros((), jnp.int32), rope=rope)


def padded(tokens: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """One row with these tokens, int32[1, T], T being the smallest of `sizes` that holds them: so
    texts of all lengths take few programs, and short ones little time."""
    row = np.zeros((1, next(size for size in sizes if len(tokens) <= size)), np.int32)
    row[0, : len(tokens)] = tokens
    return row


def pad_rows(rows: Sequence[Sequence[int]], num_rows: int, width: int) -> Layout:
    """A layout of given static shape."""
    return Layout.from_blocks(rows, num_rows=num_rows, width=width)


MODEL, VOCAB = Decoder(TINY), TINY.vocab_size
GREEDY = Sampler()
ROWS, LISTED, CAPACITIES = 4, 3, (64, 48, 48, 48, 48, 0)
QUEUE, WIDEST, MOST = 48, 64, 12
"""Of every state below: places in a row's queue, tokens of the widest pass, and the most tokens
that a row may sample."""


@functools.cache
def tiny_params():
    """The parameters of MODEL."""
    return init(TINY)


def tiny_cache(capacities: Sequence[int] = CAPACITIES) -> KVCache:
    """A float32 cache; blocks have the offsets of CAPACITIES also with smaller capacities."""
    return dataclasses.replace(
        KVCache.create(TINY, CAPACITIES, jnp.float32), capacities=jnp.asarray(capacities, jnp.int32)
    )


def tiny_state(
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Sequence[int]] = ((1,), (2,), (3,), (4,)),
    *,
    cache: KVCache | None = None,
    max_new_tokens: int | Sequence[int] = MOST,
    samplers: Sampler | Sequence[Sampler] = GREEDY,
    stops: Sequence[int] = (),
    **more,
) -> DecodeState:
    """A state of the same shape for all arguments, so that all tests share one program for each
    width."""
    prompts = [*prompts, *[[]] * (ROWS - len(prompts))]
    made = DecodeState.create(
        tiny_cache() if cache is None else cache,
        pad_rows(rows, ROWS, LISTED),
        prompts,
        vocab_size=VOCAB,
        logprobs=True,
        max_new_tokens=max_new_tokens,
        stops=[*stops, *[-1] * (2 - len(stops))],
        queue=QUEUE,
        max_width=WIDEST,
        **{"capacity": MOST, **more},
    )
    samplers = [samplers] * ROWS if isinstance(samplers, Sampler) else [*samplers]
    return dataclasses.replace(made, samplers=Samplers.stack(samplers, places=SamplerPlaces(2)))


def run(state: DecodeState, passes: int = 200, width: int = 16, **more) -> DecodeState:
    """`decode` of MODEL."""
    return decode(MODEL, tiny_params(), state, passes=passes, width=width, **more)


def reasons(state: DecodeState) -> list[FinishReason]:
    """The finish reason of each row."""
    return [FinishReason(int(r)) for r in state.reasons]
