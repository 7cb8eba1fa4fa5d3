"""Row budget: the number of completions that a device has memory for, beside the model."""

import dataclasses

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxshare import cpu
from jaxshare.models import LoadedModel
from jaxshare.serving.inputs import cache_devices, token_bytes
from jaxshare.serving.kvcache.free_memory import device_free_bytes, host_free_bytes

MAX_ROWS = 4096
"""The default maximum of rows at a time. With far fewer rows the weights, read once a pass, already
cost little beside the arithmetic of the rows, so more rows do not make a pass cheaper per row; and
with more rows each completion takes longer."""
_DEVICE_SHARE, _HOST_SHARE = 0.8, 0.5
"""The parts of free memory that runs may take: of a device's own, and of the host's, which other
programs use, too."""
_LOGITS, _LOGITS_OF_XLA, _LOGITS_OF_COUNTS = 4, 7.1, 2.25
"""Arrays of a row's logits, float32[V] each, at the peak of a pass: one of the state, one that the
model has just computed, and those of the sampler, of which a CPU's kernels need fewer than XLA; and
the tokens so far, where samplers count them. This is the `memory_analysis()` of the decode loop,
and a test asserts it."""


@dataclasses.dataclass(frozen=True)
class RowBudget:
    """Memory for rows, and for the keys and values that they see.

    Attributes:
      tokens: the maximum number of tokens in all blocks together.
      free: bytes for keys, values and everything else that a row takes.
      token_bytes: bytes of `free` per cached token; 0 where the memory for keys and values is
        allocated already.
      row_bytes: bytes of `free` per row, beside its keys and values.
      pair_bytes: bytes per pair of a row and a block: the plan of a pass has a table of them.
    """

    tokens: int
    free: int
    token_bytes: int
    row_bytes: int
    pair_bytes: int = 16

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        max_new_tokens: int,
        *,
        max_kv_bytes: int | None = None,
        arena_tokens: int | None = None,
        counts_tokens: bool = False,
    ) -> "RowBudget":
        """The budget beside a loaded model.

        Args:
          model: as loaded.
          max_new_tokens: of a row.
          max_kv_bytes: bound on keys and values; default what is free.
          arena_tokens: free tokens of an existing cache, where the rows are to use that one.
          counts_tokens: see `row_bytes`.
        """
        free, per_row = free_bytes(model), row_bytes(model, max_new_tokens, counts_tokens)
        per_token = token_bytes(model)
        if arena_tokens is not None:
            return cls(arena_tokens, free, 0, per_row)
        tokens = (free if max_kv_bytes is None else max_kv_bytes) // per_token
        # An index of a token has 32 bits.
        return cls(min(tokens, 2**31 - 1), free, per_token, per_row)

    def fits(self, rows: int, tokens: int, blocks: int) -> bool:
        """True if this many rows, with this many blocks of this many tokens, fit.

        A single row fits wherever its tokens do.
        """
        taken = tokens * self.token_bytes + rows * (self.row_bytes + blocks * self.pair_bytes)
        return tokens <= self.tokens and (rows <= 1 or taken <= self.free)


def row_bytes(model: LoadedModel, max_new_tokens: int, counts_tokens: bool = False) -> int:
    """Bytes of one row in a pass of one token per row, without keys and values.

    They count all devices of its data group together.

    Args:
      model: as loaded.
      max_new_tokens: of the row.
      counts_tokens: samplers count the tokens of the text so far.
    """
    c, logits = model.config, _LOGITS if cpu.used_for(None) else _LOGITS_OF_XLA
    logits += _LOGITS_OF_COUNTS * counts_tokens
    activations = 4 * c.hidden_size + c.mlp_numbers + 4 * c.num_heads * c.head_dim
    # Activations are on every device of the group; logits are split over them or not: the larger
    # case is counted.
    numbers = logits * c.vocab_size + activations
    return cache_devices(model) * int(4 * numbers) + 8 * max_new_tokens


def free_bytes(model: LoadedModel) -> int:
    """Bytes that runs may take on all devices of a data group together.

    Devices without memory statistics, which are CPUs, have equal shares of the host's memory.
    """
    on_device = device_free_bytes(model)
    host = _HOST_SHARE * host_free_bytes() / jax.local_device_count()
    free = host if on_device is None else _DEVICE_SHARE * on_device
    if jax.process_count() > 1:  # all must decide alike
        free = int(multihost_utils.process_allgather(np.asarray(int(free) // 2**20)).min()) * 2**20
    return max(0, int(free)) * cache_devices(model)
