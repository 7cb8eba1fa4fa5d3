"""Counts of what Linux says of processes: their number, and the memory and files that they take.

Elsewhere there is nothing to count.
"""

import contextlib
import os
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, as far as they still have their parents."""
    found = [pid]
    for each in found:  # which grows
        for thread in threads(each):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{each}/task/{thread}/children").read_text()
                found += map(int, text.split())
    return found


def threads(pid: int) -> list[str]:
    """The threads of a process."""
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def resident(pid: int) -> int:
    """Bytes of a process in memory, with pages that it shares with others."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def share(pid: int) -> int:
    """Bytes of a process in memory, shared pages divided among those that have them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except OSError:  # the process of the tests keeps it to itself
        return resident(pid)


def files(pid: int, folder: str) -> int:
    """The number of files in a process's own file system at this folder; 0 where it sees the machine's."""
    path = f"/proc/{pid}/root{folder}"
    try:
        if os.stat(path).st_dev == os.stat(folder).st_dev:
            return 0
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_files - found.f_ffree
