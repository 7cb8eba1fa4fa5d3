"""Memory that is free: on the model's devices, and on the host."""

import os
from pathlib import Path

import jax

from jaxshare.models import LoadedModel
from jaxshare.serving.inputs import cache_devices

_DEFAULT_HOST_BYTES = 4 * 2**30
"""The free bytes to assume where the system does not report them."""


def device_free_bytes(model: LoadedModel) -> int | None:
    """Bytes that are free on the fullest device of the model's cache.

    None for devices without memory statistics, which are CPUs.
    """
    devices = (
        [jax.local_devices()[0]]
        if model.mesh is None
        else model.mesh.local_devices[: cache_devices(model)]
    )
    all_stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in stats for stats in all_stats):
        return None
    return min(stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in all_stats)


def cache_free_bytes(model: LoadedModel) -> int:
    """Bytes that the model's devices have for keys and values, on all of them together."""
    free = device_free_bytes(model)
    # The devices of a CPU share the host's memory.
    return host_free_bytes() if free is None else free * cache_devices(model)


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
