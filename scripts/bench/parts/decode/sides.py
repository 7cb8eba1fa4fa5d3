"""Our side of the benchmark of decoding."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare import DecodeState, KVCache, Layout, decode
from jaxshare.models import LoadedModel
from scripts.bench.lib import cores
from scripts.bench.parts.decode.report import (
    OURS,
    SHARED,
)

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
}


class Run:
    """jaxshare's side of a batch: prompts in the first blocks of a cache, one each, and the decode
    loop over them.

    The loop is `jaxshare.decode` compiled ahead of its use, so that the program whose memory is
    reported is the one that is timed.
    """

    def __init__(
        self,
        model: LoadedModel,
        prompts: np.ndarray,
        rows: Sequence[Sequence[int]],
        capacities: Sequence[int],
        steps: int,
        budget: int,
        first: Sequence[Sequence[int]] | None = None,
        copied: bool = False,
    ):
        """prompts int[P, S]; `rows` list their blocks; `first` is what each row feeds before it
        samples, if not its prompt alone. If the prompts are `copied`, all the same, the first is
        computed and the other blocks get copies."""
        self.model, self.params, self.steps = model, model.params, steps
        self.blocks, self.length = prompts.shape
        self.count = 1 if copied else self.blocks
        vocab = model.config.vocab_size
        # the prompts' own come with `prefill`
        logits = jnp.zeros((len(rows), vocab)) if first is None else None
        self.state = DecodeState.create(
            KVCache.create(model.config, capacities, approximate=model.approximate_kv),
            Layout.from_blocks(rows),
            first or [[]] * len(rows),
            vocab_size=vocab,
            logits=logits,
            max_new_tokens=budget,
            max_width=1,
        )
        self.rows = min(self.count, PREFILL_ROWS)
        self.width = min(self.length, PREFILL_TOKENS // self.rows)
        self.groups = [
            Layout.from_blocks(
                [[b] for b in range(i, min(i + self.rows, self.count))], num_rows=self.rows
            )
            for i in range(0, self.count, self.rows)
        ]
        self.prompts = np.zeros(
            (len(self.groups) * self.rows, -(-self.length // self.width) * self.width), np.int32
        )
        self.prompts[: self.count, : self.length] = prompts[: self.count]

    def compile_forward(self) -> None:
        forward = jax.jit(self.model.module.apply, donate_argnums=3)
        tokens, count = self.prompts[: self.rows, : self.width], np.zeros(self.rows, np.int32)
        self.forward = forward.lower(
            self.params, tokens, count, self.state.cache, self.groups[0]
        ).compile()

    def compile_loop(self) -> None:
        loop = jax.jit(
            lambda params, state: decode(self.model.module, params, state, passes=self.steps),
            donate_argnums=1,
        )
        self.loop = loop.lower(self.params, self.state).compile()

    def prefill(self) -> float:
        """Empties the blocks, fills them with their prompts and returns the seconds."""
        cache, ends = self.state.cache, []
        cache = dataclasses.replace(cache, lengths=jnp.zeros_like(cache.lengths))
        jax.block_until_ready(cache)
        begin = time.perf_counter()
        for g, layout in enumerate(self.groups):
            tokens, used = (
                self.prompts[g * self.rows : (g + 1) * self.rows],
                np.asarray(layout.listed) > 0,
            )
            for at in range(0, self.length, self.width):
                count = np.where(used, min(self.width, self.length - at), 0).astype(np.int32)
                logits, cache = self.forward(
                    self.params, tokens[:, at : at + self.width], count, cache, layout
                )
            ends.append(logits)
        logits = jnp.concatenate(ends)[: self.count]
        if self.blocks > self.count:
            cache = _with_copies(cache, self.blocks, self.length)
            logits = jnp.repeat(logits, self.blocks, axis=0)
        if self.blocks == len(self.state.logits):
            self.state = dataclasses.replace(self.state, logits=logits)
        self.state = jax.block_until_ready(dataclasses.replace(self.state, cache=cache))
        return time.perf_counter() - begin

    def step(self) -> float:
        """Runs `steps` passes and returns their seconds."""
        begin = time.perf_counter()
        self.state = jax.block_until_ready(self.loop(self.params, self.state))
        return time.perf_counter() - begin

    def check(self, passes: int) -> None:
        """Raises RuntimeError where less was done than was to be measured."""
        self.state.cache.check()
        if int(self.state.passes) != passes or not bool(jnp.all(self.state.running)):
            raise RuntimeError(
                f"rows ended before their {passes} steps were done: "
                f"{np.asarray(self.state.reasons).tolist()}"
            )

    def memory(self) -> dict[str, int]:
        """Bytes: what one pass needs besides its arguments, and what it is to be held against."""
        cache = self.state.cache
        layer = cache.keys[0].nbytes + cache.values[0].nbytes
        return {
            "step_temp_bytes": self.loop.memory_analysis().temp_size_in_bytes,
            "one_layer_cache_bytes": layer,
            "cache_bytes": layer * len(cache.keys),
            "parameter_bytes": sum(p.nbytes for p in jax.tree.leaves(self.params)),
        }


def _with_copies(cache: KVCache, blocks: int, length: int) -> KVCache:
    """The cache with what is in the first block in the first `blocks` of them."""
    offsets = np.asarray(cache.offsets)[:blocks].tolist()

    @functools.partial(jax.jit, donate_argnums=0)
    def copied(arena: jax.Array) -> jax.Array:
        first = arena[:, offsets[0] : offsets[0] + length]
        for at in offsets[1:]:
            arena = arena.at[:, at : at + length].set(first)
        return arena

    keys, values = (jax.tree.map(copied, arenas) for arenas in (cache.keys, cache.values))
    lengths = cache.lengths.at[:blocks].set(length)
    return dataclasses.replace(cache, keys=keys, values=values, lengths=lengths)


def prepare(
    model: LoadedModel,
    prompts: np.ndarray,
    steps: int,
    growth: int,
    share: bool,
    copied: bool = False,
) -> dict[str, Run]:
    """jaxshare's sides for prompts int[R, S], compiled, with room for `growth` tokens a row: every
    row with its own prompt in a block of its own; and with `share` all with the first prompt in one
    block, each going on from a token of its own. Prompts that are `copied` are all the same."""
    rows, length = prompts.shape
    budget = growth + 2  # so that no row ends while it is measured
    runs = {
        OURS: Run(
            model,
            prompts,
            [[r] for r in range(rows)],
            (length + growth,) * rows,
            steps,
            budget,
            copied=copied,
        )
    }
    if share:
        runs[SHARED] = Run(
            model,
            prompts[:1],
            [[0, r + 1] for r in range(rows)],
            (length, *[growth] * rows),
            steps,
            budget,
            prompts[:, :1].tolist(),
        )
    with ThreadPoolExecutor(cores()) as pool:
        for done in [
            pool.submit(job)
            for run in runs.values()
            for job in (run.compile_loop, run.compile_forward)
        ]:
            done.result()
    return runs


# Prompts are fed by this many rows, and this many tokens of all of them, a pass: more is no faster
# and takes more memory.
PREFILL_ROWS, PREFILL_TOKENS = 8, 2048
