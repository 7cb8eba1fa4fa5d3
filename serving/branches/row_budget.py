"""Room: how many completions a device has memory for at a time, beside the model."""

import dataclasses
import os
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxshare.models import LoadedModel
from jaxshare.serving.inputs import cache_devices, token_bytes

MOST_ROWS = 4096
"""Rows at a time where no other number is asked for. Long before that the weights, read once a
pass, cost nothing beside the arithmetic of the rows, so that more rows make no pass cheaper for
each of them; and what ends comes the later, the more of them there are."""
_OF_DEVICE, _OF_HOST = 0.8, 0.5
"""The parts of free memory that runs may take: of a device's own, and of the host's, which other
programs want, too."""
_UNKNOWN_HOST = 4 * 2**30
"""Bytes that are taken to be free where the system does not tell."""
_LOGITS = 6
"""Arrays of a row's logits, float32[V] each, that a pass holds at its widest: those of the state,
those that the model has just made, and four of the sampler. `memory_analysis()` of the decode loop
says so, and a test asserts it."""


@dataclasses.dataclass(frozen=True)
class RowBudget:
    """Memory for rows, and for the keys and values that they see.

    Attributes:
      tokens: the most tokens that all blocks may have together.
      free: bytes for keys, values and everything else that a row takes.
      token_bytes: that a cached token takes of `free`; 0 where the memory for keys and values has
        been taken already.
      row_bytes: that a row takes of `free` beside its keys and values.
      pair_bytes: that each pair of a row and a block takes: the plan of a pass has a table of them.
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
        """The room beside a model that is loaded.

        Args:
          model: as loaded.
          max_new_tokens: of a row.
          max_kv_bytes: bound on keys and values; default what is free.
          arena_tokens: tokens free in a cache that exists, where the rows are to use that one.
        """
        free = free_bytes(model)
        in_token = token_bytes(model)
        if arena_tokens is not None:
            return cls(arena_tokens, free, 0, row_bytes(model, max_new_tokens))
        tokens = (free if max_kv_bytes is None else max_kv_bytes) // in_token
        # An index of a token has 32 bits.
        return cls(min(tokens, 2**31 - 1), free, in_token, row_bytes(model, max_new_tokens))

    def fits(self, rows: int, tokens: int, blocks: int) -> bool:
        """Whether there is room for so many rows, with this many blocks of this many tokens. One
        row has it wherever its tokens have."""
        taken = tokens * self.token_bytes + rows * (self.row_bytes + blocks * self.pair_bytes)
        return tokens <= self.tokens and (rows <= 1 or taken <= self.free)


def row_bytes(model: LoadedModel, max_new_tokens: int) -> int:
    """Bytes of one row in a pass that brings one token a row, on all devices of its data group
    together, without keys and values."""
    c = model.config
    activations = 4 * c.hidden_size + 2 * c.intermediate_size + 4 * c.num_heads * c.head_dim
    # Activations are on every device of the group, logits are cut over them or not; the larger is
    # counted.
    return cache_devices(model) * 4 * (_LOGITS * c.vocab_size + activations) + 8 * max_new_tokens


def free_bytes(model: LoadedModel) -> int:
    """Bytes that runs may take on all devices of a data group together. Devices that keep no
    account of their memory, which are CPUs, have equal shares of the host's."""
    devices = (
        [jax.local_devices()[0]]
        if model.mesh is None
        else model.mesh.local_devices[: cache_devices(model)]
    )
    found = [device.memory_stats() or {} for device in devices]
    if all("bytes_limit" in stats for stats in found):
        # As much on each device as there is on the fullest.
        free = _OF_DEVICE * min(
            stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in found
        )
    else:
        free = _OF_HOST * host_free_bytes() / jax.local_device_count()
    if jax.process_count() > 1:  # all have to decide alike
        free = int(multihost_utils.process_allgather(np.asarray(int(free) // 2**20)).min()) * 2**20
    return max(0, int(free)) * cache_devices(model)


def host_free_bytes(root: Path = Path("/")) -> int:
    """Bytes of main memory that this process can still take: what the system has available, within
    the limit of its control group.

    Args:
      root: where proc and sys are, for tests.
    """
    found = [bytes for bytes in (_available(root), _left_in_group(root)) if bytes is not None]
    if found:
        return max(0, min(found))
    try:  # no Linux: half of what is built in
        return (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            if root == Path("/")
            else _UNKNOWN_HOST
        )
    except (ValueError, OSError, AttributeError):
        return _UNKNOWN_HOST


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(
            (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")),
            None,
        )
    except (OSError, ValueError, IndexError):
        return None


def _left_in_group(root: Path) -> int | None:
    """Of the limit of the control group, version 2 or 1; what files have only been read into counts
    as free."""
    for folder, limit, used, cached in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        group = root / "sys/fs/cgroup" / folder
        try:
            most, taken = int((group / limit).read_text()), int((group / used).read_text())
            stats = dict(
                line.split()[:2] for line in (group / "memory.stat").read_text().splitlines()
            )
            return most - taken + int(stats.get(cached, 0))
        except (OSError, ValueError):  # no limit is the word "max"
            continue
    return None
