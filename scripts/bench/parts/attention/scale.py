"""The scales of the benchmark of attention."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.parts.attention.cases import Heads
from scripts.bench.parts.decode import sides as decode_sides

MODEL = decode_sides.MODEL | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
}
"""The shape of Llama-2-7B: 6.74 G parameters."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a measurement; lengths in tokens.

    Attributes:
      widths, dims, groups: of correctness: T, D and G; every width with every other D and G in
        turn. many: rows of the passes of many rows.
      private_heads, private_rows, private_tokens; private_groups: every G.
      shared_heads, shared_rows, prefix, own: `own` of the workers and plans too.
      unshared_rows: most rows of the side that has copies, whose time is scaled.
      worker_heads, history, workers.
      contexts: decoding, (rows, tokens that each sees); prefix_rows: over one prefix; prefills: new
        tokens of one row. These have `private_heads`.
      plan_rows: over one prefix.
      model, batches, context, steps: of the decode step: config.json, numbers of rows, tokens that
        each sees at first, passes of a turn.
      most_layers: arenas that a loop goes through, at most.
    """

    widths: Sequence[int]
    dims: Sequence[int]
    groups: Sequence[int]
    many: int
    private_heads: Heads
    private_groups: Sequence[int]
    private_rows: int
    private_tokens: int
    shared_heads: Heads
    shared_rows: int
    prefix: int
    own: int
    unshared_rows: int
    worker_heads: Heads
    history: int
    workers: Sequence[int]
    contexts: Sequence[tuple[int, int]]
    prefix_rows: Sequence[int]
    prefills: Sequence[int]
    plan_rows: int
    model: Mapping[str, Any]
    batches: Sequence[int]
    context: int
    steps: int
    most_layers: int


FULL = Scale(
    widths=(1, 8, 64),
    dims=(64, 80, 96, 128, 192, 256),
    groups=(1, 2, 4, 5, 8, 16),
    many=300,
    private_heads=Heads(8, 4),
    private_groups=(4, 8),
    private_rows=64,
    private_tokens=8192,
    shared_heads=Heads(1, 8),
    shared_rows=1024,
    prefix=16384,
    own=64,
    unshared_rows=512,
    worker_heads=Heads(8, 5),
    history=16384,
    workers=(1, 2, 4),
    contexts=((64, 2048), (8, 16384), (1, 131072)),
    prefix_rows=(16, 64, 256, 1024),
    prefills=(256, 1024, 4096, 8192),
    plan_rows=64,
    model=MODEL,
    batches=(1, 64),
    context=128,
    steps=8,
    most_layers=8,
)
"""The heads of sharing are those of Hydragen, section 4.2; those of workers are QwQ-32B's, of
Hogwild! Inference, table 2."""


QUICK = dataclasses.replace(FULL, widths=(1, 8), dims=(64, 128), groups=(5, 8))


TINY = Scale(
    widths=(2,),
    dims=(16,),
    groups=(2,),
    many=0,
    private_heads=Heads(1, 4, 16),
    private_groups=(4,),
    private_rows=2,
    private_tokens=40,
    shared_heads=Heads(1, 2, 16),
    shared_rows=4,
    prefix=64,
    own=9,
    unshared_rows=2,
    worker_heads=Heads(1, 2, 16),
    history=50,
    workers=(2,),
    contexts=((2, 40), (1, 64)),
    prefix_rows=(2, 4),
    prefills=(16, 32),
    plan_rows=4,
    model=MODEL
    | {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
    },
    batches=(2,),
    context=4,
    steps=2,
    most_layers=2,
)
"""Runs every line of the program on a CPU and measures nothing that means something."""
