"""Row budget: the number of completions that a device has memory for, beside the model."""

import dataclasses
import os
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxshare.models import LoadedModel
from jaxshare.serving.inputs import cache_devices, token_bytes

MAX_ROWS = 4096
"""The default maximum of rows at a time. With far fewer rows the weights, read once a pass, already
cost little beside the arithmetic of the rows, so more rows do not make a pass cheaper per row; and
with more rows each completion takes longer."""
_DEVICE_SHARE, _HOST_SHARE = 0.8, 0.5
"""The parts of free memory that runs may take: of a device's own, and of the host's, which other
programs use, too."""
_DEFAULT_HOST_BYTES = 4 * 2**30
"""The free bytes to assume where the system does not report them."""
_LOGITS = 6
"""Arrays of a row's logits, float32[V] each, at the peak of a pass: one of the state, one that the
model has just computed, and four of the sampler. This is the `memory_analysis()` of the decode
loop, and a test asserts it."""


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
    ) -> "RowBudget":
        """The budget beside a loaded model.

        Args:
          model: as loaded.
          max_new_tokens: of a row.
          max_kv_bytes: bound on keys and values; default what is free.
          arena_tokens: free tokens of an existing cache, where the rows are to use that one.
        """
        free = free_bytes(model)
        per_token = token_bytes(model)
        if arena_tokens is not None:
            return cls(arena_tokens, free, 0, row_bytes(model, max_new_tokens))
        tokens = (free if max_kv_bytes is None else max_kv_bytes) // per_token
        # An index of a token has 32 bits.
        return cls(min(tokens, 2**31 - 1), free, per_token, row_bytes(model, max_new_tokens))

    def fits(self, rows: int, tokens: int, blocks: int) -> bool:
        """True if this many rows, with this many blocks of this many tokens, fit.

        A single row fits wherever its tokens do.
        """
        taken = tokens * self.token_bytes + rows * (self.row_bytes + blocks * self.pair_bytes)
        return tokens <= self.tokens and (rows <= 1 or taken <= self.free)


def row_bytes(model: LoadedModel, max_new_tokens: int) -> int:
    """Bytes of one row in a pass of one token per row, without keys and values.

    They count all devices of its data group together.
    """
    c = model.config
    activations = 4 * c.hidden_size + 2 * c.intermediate_size + 4 * c.num_heads * c.head_dim
    # Activations are on every device of the group; logits are split over them or not: the larger
    # case is counted.
    return cache_devices(model) * 4 * (_LOGITS * c.vocab_size + activations) + 8 * max_new_tokens


def free_bytes(model: LoadedModel) -> int:
    """Bytes that runs may take on all devices of a data group together.

    Devices without memory statistics, which are CPUs, have equal shares of the host's memory.
    """
    devices = (
        [jax.local_devices()[0]]
        if model.mesh is None
        else model.mesh.local_devices[: cache_devices(model)]
    )
    all_stats = [device.memory_stats() or {} for device in devices]
    if all("bytes_limit" in stats for stats in all_stats):
        # The fullest device bounds them all.
        free = _DEVICE_SHARE * min(
            stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in all_stats
        )
    else:
        free = _HOST_SHARE * host_free_bytes() / jax.local_device_count()
    if jax.process_count() > 1:  # all must decide alike
        free = int(multihost_utils.process_allgather(np.asarray(int(free) // 2**20)).min()) * 2**20
    return max(0, int(free)) * cache_devices(model)


def host_free_bytes(root: Path = Path("/")) -> int:
    """Bytes of main memory that this process can still take.

    This is what the system has available, within the limit of the process's control group.

    Args:
      root: the folder of proc and sys, for tests.
    """
    found = [
        bytes for bytes in (_available(root), _left_in_control_group(root)) if bytes is not None
    ]
    if found:
        return max(0, min(found))
    try:  # not Linux: half of what is installed
        return (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            if root == Path("/")
            else _DEFAULT_HOST_BYTES
        )
    except (ValueError, OSError, AttributeError):
        return _DEFAULT_HOST_BYTES


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(
            (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")),
            None,
        )
    except (OSError, ValueError, IndexError):
        return None


def _left_in_control_group(root: Path) -> int | None:
    """Bytes left within the limit of the control group, version 2 or 1.

    The page cache counts as free.
    """
    for folder, limit, used, cached in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        group = root / "sys/fs/cgroup" / folder
        try:
            limit_bytes, used_bytes = (
                int((group / limit).read_text()),
                int((group / used).read_text()),
            )
            stats = dict(
                line.split()[:2] for line in (group / "memory.stat").read_text().splitlines()
            )
            return limit_bytes - used_bytes + int(stats.get(cached, 0))
        except (OSError, ValueError):  # without a limit the file holds the word "max"
            continue
    return None
